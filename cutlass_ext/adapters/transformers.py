"""transformers 5: `attn_implementation="cutlass_ext"`. Users call `register()`, transformers the two functions.

A model makes its mask once and hands it to all layers. Where the mask is a window of keys around each row's position,
which causal, sliding and padded masks are, `mask` hands on no mask but what `fmha` wants to know: where rows and keys
begin and end, on the device, and the window, which the host has to know, in the tensor's shape. Any other mask is
written out.
"""

import functools
import inspect
import sys
from typing import NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .._ops import name_of
from ..kvcache import flash_attn_with_kvcache
from ..support import attend, given, refusal, warn_once
from ..torch_padded import dtype_of_scores

NAME = "cutlass_ext"


def register() -> None:
    """Makes `attn_implementation="cutlass_ext"` known to transformers; once or more often.

        cutlass_ext.adapters.transformers.register()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="cutlass_ext")

    A model that is there already takes `model.set_attn_implementation("cutlass_ext")`. Grouped heads, head dims up to
    256 that may differ between keys and values (DeepSeek), padding on either side, sliding windows, softcap, attention
    sinks, packed sequences (`position_ids`, or `cu_seq_lens_q` and so on), dynamic and static caches, continuous
    batching with paged caches (of transformers 5.23; pages are read where they lie while every sequence has one row and
    no layer has a window), and training work. What `fmha` does not take PyTorch's SDPA
    computes, or the model's own `eager` where SDPA knows no softcap or sink, with a warning, once, that names the
    reason.

    Rows that are padding have outputs of 0 where causal masks hide everything from them; `eager` gives them the mean of
    all values. Under torch.compile give an `attention_mask`, or `cu_seq_lens_q` and so on: without either, positions
    may mean packed sequences, and the mask is written out. A mask with holes is an error there.

    Models that compute attention by themselves and ask no `AttentionInterface` (Bloom, CodeGen, GPT-J, Falcon, ...)
    refuse `attn_implementation="cutlass_ext"` with a ValueError from then on: what they got for a mask they would not
    understand. `set_attn_implementation` of such a model raises nothing: transformers logs a warning, and the model
    stays with what it had, `eager` mostly.

    Raises:
        RuntimeError: transformers is older than 5.0.
    """
    if int(transformers.__version__.split(".")[0]) < 5:
        raise RuntimeError(f"transformers: is version {transformers.__version__}; expected 5.0 or newer")
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    _let_models_without_interface_refuse()
    _let_continuous_batching_have_it()


@functools.cache  # once
def _let_models_without_interface_refuse() -> None:
    """transformers checks what it knows by name alone."""
    check = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(check)
    def get_correct_attn_implementation(self, requested_attention, *args, **kwargs) -> str:
        if requested_attention == NAME and not _asks_interface(type(self)):
            raise ValueError(
                f'attn_implementation: is "{NAME}", and {type(self).__name__} computes attention by itself, not by '
                'transformers\' AttentionInterface; expected "eager", or another that the class knows'
            )
        return check(self, requested_attention, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def _asks_interface(model: type) -> bool:
    """Whether the layers of a model, or the models that it is made of, get their attention from the interface."""
    own = vars(sys.modules[model.__module__])
    if any(name.endswith("_ATTENTION_CLASSES") for name in own):  # a layer class for each implementation it knows
        return False
    if "ALL_ATTENTION_FUNCTIONS" in own:
        return True
    flags = "_supports_attention_backend", "_supports_sdpa", "_supports_flash_attn"
    return any(getattr(model, flag, False) for flag in flags)


@functools.cache  # once
def _let_continuous_batching_have_it() -> None:
    """Its manager refuses implementations that it does not know by name. Older ones know others by another name, and
    have another cache: those still refuse."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager

    check = getattr(Manager, "switch_to_cb_friendly_attn", None)
    has_this_cache = "kwargs" in inspect.signature(PagedAttentionCache.update).parameters
    if check is None or not has_this_cache:
        return

    def switch_to_cb_friendly_attn(self, model, *args, **kwargs) -> None:
        if model.config._attn_implementation != NAME:
            check(self, model, *args, **kwargs)

    Manager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn
    _let_steps_read_pages()


def _let_steps_read_pages() -> None:
    """Steps in which every sequence has one row come with the cache's pages and their table, not with gathered keys, if
    the manager believes that the implementation takes them; it knows by name who does."""
    from transformers.generation.continuous_batching import initialization
    from transformers.generation.continuous_batching.utils import find_head_dim

    check = getattr(initialization, "ensure_decode_fast_path_is_available", None)
    if check is None:
        return

    def ensure_decode_fast_path_is_available(config, cb_config, *args, **kwargs) -> None:
        types = initialization.group_layers_by_attn_type(config)
        has_tables = all(initialization.ATTN_TYPE_TO_ALLOCATOR[name].supports_block_table for name in types)
        page, d = cb_config.page_size, find_head_dim(config)
        fits = page <= 4096 and (page % 16 == 0 or page & (page - 1) == 0) and d % 8 == 0 and d <= 256
        if not (config._attn_implementation == NAME and has_tables and fits):
            check(config, cb_config, *args, **kwargs)

    initialization.ensure_decode_fast_path_is_available = ensure_decode_fast_path_is_available


# ------------------------------------------------------------------------------------------------ masks
class _Window(NamedTuple):
    """Keys that a row sees, before and after its position, -1 for all; of packed sequences only those of its own."""

    left: int = -1
    right: int = -1
    sequences: Tensor | None = None  # [B, N]: which sequence a row belongs to


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function=masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options,
) -> Tensor | None:
    """The mask of a forward pass, as transformers asks for it, for `attention` to read.

    Args:
        batch_size, q_length, kv_length: sizes of the scores.
        q_offset, kv_offset: positions of the first row and of the first key; q_offset may be on the device.
        mask_function: transformers' rule for pairs of positions.
        attention_mask: bool `[B, length]`, False for padding; positions past it are padding.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether the model takes anything but a mask written out.
        options: `device`, and what `sdpa_mask` takes besides.

    Returns:
        None where every row sees all keys; int32 `[B, left + 2, right + 2, 0, 1 or 3]`, a view of the first row's
        position, nothing where that is 0, and, with padding, each sequence's first key and end; of packed sequences
        int32 `[1, longest, left + 2, right + 2, sequences + 1]`, a view of where they begin and end; or else
        `sdpa_mask`'s bool mask.
    """
    arguments = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": mask_function, "attention_mask": attention_mask,
        "allow_is_causal_skip": allow_is_causal_skip, "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
    }  # fmt: skip
    window = _window_of(mask_function)
    if torch.compiler.is_compiling() and window is None:
        window = _traced_window(allow_is_causal_skip, **options)
    if window is None:
        return masking_utils.sdpa_mask(**arguments, **options)
    if window.sequences is not None:
        return _packed(window)
    # A model that may not get None concatenates masks; but where rows come one by one the same argument tells of a
    # compiled step, which takes any mask that has one shape, however full the cache is.
    may_skip = allow_is_causal_skip if window.right == 0 else allow_is_bidirectional_skip
    if not may_skip and (q_length > 1 or window.right != 0):
        return masking_utils.sdpa_mask(**arguments, **options)

    start, device = q_offset - kv_offset, options.get("device", "cpu")
    keys = None
    if attention_mask is not None:
        beyond = max(kv_offset + kv_length - attention_mask.shape[-1], 0)
        own = pad(attention_mask, (0, beyond))[:, kv_offset : kv_offset + kv_length].to(device)
        first = own.int().argmax(-1)
        end = first + own.sum(-1)
        j = torch.arange(kv_length, device=device)
        no_holes = own == ((j >= first[:, None]) & (j < end[:, None]))
        if torch.compiler.is_compiling():  # nothing of a tensor can be looked at: a wrong assumption must not pass
            torch._assert_async(no_holes.all(), "attention_mask: has holes, which torch.compile cannot take here")
            keys = first, end
        else:
            none_hidden, no_holes = torch.stack([own.all(), no_holes.all()]).tolist()
            if not no_holes:
                return masking_utils.sdpa_mask(**arguments, **options)
            keys = None if none_hidden and may_skip else (first, end)

    sees_left = window.left < 0 or kv_length <= window.left
    # Without a mask several rows begin with the first key, and a row alone is the last.
    place = kv_length - 1 if q_length == 1 else 0
    sees_right = window.right < 0 or (type(start) is int and start == place)
    if may_skip and keys is None and sees_left and sees_right:
        # Not every layer that gets a causal mask says that it is causal, as those of PegasusX do not.
        is_square = window.right == 0 and q_length > 1
        return torch.empty(batch_size, 1, 2, 0, dtype=torch.int32, device=device) if is_square else None
    start = torch.as_tensor(start, device=device).expand(batch_size)
    columns = torch.stack([start, *(keys or ())]).int()  # [1 or 3, B], so that each of them is contiguous
    return columns.t()[:, None, None].expand(-1, window.left + 2, window.right + 2, -1)


def _window_of(function) -> _Window | None:
    """The window that one of transformers' mask functions stands for, or None: they are closures that carry it."""
    if function is masking_utils.causal_mask_function:
        return _Window(right=0)
    if function is masking_utils.bidirectional_mask_function:
        return _Window()
    if torch.compiler.is_compiling() or getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    inside = inspect.getclosurevars(function).nonlocals
    match function.__qualname__.partition(".")[0]:
        case "and_masks":
            return _intersection([_window_of(part) for part in inside["mask_functions"]])
        case "sliding_window_overlay":
            return _Window(left=inside["sliding_window"] - 1)
        case "sliding_window_bidirectional_overlay":
            return _Window(inside["sliding_window"], inside["sliding_window"])
        case "packed_sequence_mask_function":
            return _Window(sequences=inside["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence":
            return _window_of(inside["mask_function"])
    return None


def _traced_window(allow_is_causal_skip: bool, local_size=None, use_vmap=False, config=None, **_) -> _Window | None:
    """The window of a sliding mask while torch.compile traces, which cannot look into closures.

    It is one where there is a size, not that of chunks, and nothing was added: the mask could not be left out then.
    """
    is_sliding = local_size is not None and getattr(config, "attention_chunk_size", None) is None
    return _Window(local_size - 1, 0) if is_sliding and allow_is_causal_skip and not use_vmap else None


def _intersection(windows: list[_Window | None]) -> _Window | None:
    if None in windows:
        return None
    left, right = (
        min((side for side in sides if side >= 0), default=-1) for sides in list(zip(*windows, strict=True))[:2]
    )
    sequences = [window.sequences for window in windows if window.sequences is not None]
    return _Window(left, right, *sequences) if len(sequences) < 2 else None


def _packed(window: _Window) -> Tensor:
    """Where the sequences of all rows of a batch begin and end, one after the other; a row of the batch begins one."""
    sequences = window.sequences
    begins = sequences != sequences.roll(1, -1)
    begins[:, 0] = True
    begin = begins.flatten().nonzero().flatten().int()
    ends = torch.cat([begin, begin.new_full((1,), sequences.numel())])
    longest = int(ends.diff().max())
    return ends.expand(1, longest, window.left + 2, window.right + 2, -1)


# ------------------------------------------------------------------------------------------------ attention
def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    cache=None,
    **others,
) -> tuple[Tensor, Tensor | None]:
    """The attention of a layer, as transformers asks for it.

    Args:
        module: the layer; its `is_causal` counts where the argument is None.
        query: `[B, H_q, N_q, d]`.
        key, value: `[B, H_kv, N_kv, d]` and `[B, H_kv, N_kv, d_v]`, heads not repeated.
        attention_mask: what `mask` gave; bool `[B or 1, H_q or 1, N_q, N_kv]`, True for visible; the same of floats,
            to be added to the scores; or None.
        dropout: of the probabilities.
        scaling: of the scores, `1 / sqrt(d)` by default.
        is_causal, sliding_window: for layers without a mask; a window of `w` tokens holds the row's own.
        softcap, s_aux: bound of the scores; one more logit a head, `[H_q]`.
        position_bias: `[B or 1, H_q, N_q, N_kv]`, added to the scores.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences in a batch of one, aligned at their
            ends; the mask does not count then.
        cache: the paged cache of continuous batching, which gives the keys; of steps in which every sequence has one
            row their pages, which are read where they lie.
        others: what other implementations take; `output_attentions=True` makes the model's own `eager` compute.

    Returns:
        `[B, N_q, H_q, d_v]`, and the probabilities where `eager` computed them, else None.

    Raises:
        ValueError: a mask that is none of these.
    """
    sink = None if s_aux is None else s_aux.to(dtype_of_scores(query))
    if cache is not None:
        places = others | {"cu_seq_lens_k": cu_seq_lens_k, "max_length_k": max_length_k}
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=places)
        cu_seq_lens_k, max_length_k = places["cu_seq_lens_k"], places["max_length_k"]
        if places.get("block_table") is not None:
            return _by_pages(query, key, value, places, softmax_scale=scaling, softcap=softcap or 0.0, sink=sink), None
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        attention_mask = None
        visible = _sides(*_sides_of_layer(is_causal, sliding_window)) | {
            "cu_seqlens_q": cu_seq_lens_q.int(), "cu_seqlens_k": cu_seq_lens_k.int(), "start_pos": "end",
            "max_seqlen_q": int(max_length_q), "max_seqlen_k": int(max_length_k),
        }  # fmt: skip
    elif attention_mask is None:
        visible = _sides(*_sides_of_layer(is_causal and query.shape[2] > 1, sliding_window))
        if query.shape[2] == 1:
            visible["start_pos"] = "end"  # a row alone is the last of its sequence
    else:
        visible = _visible(attention_mask, query, key)
    options = visible | {"softcap": softcap, "sink": sink, "dropout_p": dropout}
    if position_bias is not None:
        options["bias"] = position_bias + visible["bias"] if "bias" in visible else position_bias

    reason = "output_attentions is True" if others.get("output_attentions") else refusal(query, key, value, dropout)
    if reason is not None:
        warn_once(f'transformers with attn_implementation="{NAME}"', reason)
        call = {"dropout": dropout, "scaling": scaling, "position_bias": position_bias}
        takes_sdpa = softcap is None and s_aux is None and not others.get("output_attentions")
        call |= {} if takes_sdpa else {"softcap": softcap}
        return _by_transformers(module, query, key, value, _written_out(visible, query, key), takes_sdpa, call)

    tensors = [x.transpose(1, 2) for x in (query, key, value)]
    if "cu_seqlens_q" in visible:
        tensors = [x.flatten(0, 1) for x in tensors]
    out = attend(*tensors, softmax_scale=scaling, **given(**options))
    return out.view(query.shape[0], query.shape[2], *out.shape[-2:]), None


def _by_pages(query: Tensor, key: Tensor, value: Tensor, places: dict, **options) -> Tensor:
    """A step of one row a sequence, whose key the call writes. Sequences that fill a graph up have no pages."""
    q, k, v = (x[0].transpose(0, 1).unsqueeze(1) for x in (query, key, value))
    out = flash_attn_with_kvcache(
        q, places["k_cache"], places["v_cache"], k, v, block_table=places["block_table"],
        cache_seqlens=places["cu_seq_lens_k"].diff()[: len(q)] - 1, **options,
    )  # fmt: skip
    return out.transpose(0, 1)


def _by_transformers(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, takes_sdpa: bool, call: dict
) -> tuple[Tensor, Tensor | None]:
    """What `fmha` refuses: by SDPA, or by the model's own `eager`."""
    if takes_sdpa:
        return sdpa_attention_forward(module, query, key, value, hidden, is_causal=False, **call)
    if hidden.dtype == torch.bool:  # which eager adds to the scores
        hidden = torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(~hidden, torch.finfo(query.dtype).min)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, hidden, **call)


def _sides_of_layer(is_causal: bool, sliding_window: int | None) -> tuple[int, int]:
    side = -1 if sliding_window is None else sliding_window - 1
    return side, 0 if is_causal else side


def _sides(left: int, right: int) -> dict:
    """A window as `fmha` takes it: causal is one that ends at the row."""
    return {"causal": True, "window": (left, -1)} if right == 0 else {"window": (left, right)}


def _visible(attention_mask: Tensor, query: Tensor, key: Tensor) -> dict:
    """What a mask says, as `fmha` takes it."""
    dims, dtype = attention_mask.dim(), attention_mask.dtype
    if dims in (4, 5) and dtype == torch.int32:
        options = _sides(attention_mask.shape[-3] - 2, attention_mask.shape[-2] - 2)
        if dims == 5:
            ends, longest = attention_mask[0, 0, 0, 0], attention_mask.shape[1]
            packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
            return options | packed | {"start_pos": "end"}
        columns = attention_mask[:, 0, 0].expand(query.shape[0], -1).unbind(-1)
        names = "start_pos", "leftpad_k", "seqused_k"
        return options | dict(zip(names, (c.contiguous() for c in columns), strict=False))
    if dims == 4 and attention_mask.shape[-2] in (1, query.shape[2]) and attention_mask.shape[-1] == key.shape[2]:
        if dtype == torch.bool:
            return {"mask": attention_mask}
        if attention_mask.is_floating_point():
            return {"bias": attention_mask}
    raise ValueError(
        f"attention_mask: has shape {list(attention_mask.shape)} and dtype {name_of(dtype)}; expected what "
        f"cutlass_ext.adapters.transformers.mask gives, or bool or floats [batch, heads or 1, "
        f"{query.shape[2]} or 1, {key.shape[2]}]"
    )


def _written_out(visible: dict, query: Tensor, key: Tensor) -> Tensor:
    """The mask `[B or 1, heads or 1, N_q, N_kv]` that `visible` is, bool or to be added to the scores."""
    if "mask" in visible or "bias" in visible:
        return visible.get("mask", visible.get("bias"))
    N_q, N_kv, device = query.shape[2], key.shape[2], query.device
    i, j = torch.arange(N_q, device=device)[:, None], torch.arange(N_kv, device=device)
    seen = torch.ones(1, 1, N_q, N_kv, dtype=torch.bool, device=device)
    if "cu_seqlens_q" in visible:
        batch = query.shape[0]
        ends_q, ends_k = visible["cu_seqlens_q"][1:], visible["cu_seqlens_k"][1:]
        i, j = torch.arange(batch * N_q, device=device), torch.arange(batch * N_kv, device=device)
        i, j = i.view(batch, 1, N_q, 1), j.view(batch, 1, 1, N_kv)
        of_row, of_key = torch.bucketize(i, ends_q, right=True), torch.bucketize(j, ends_k, right=True)
        seen = of_row == of_key
        i = i + (ends_k - ends_q)[of_row.clamp(max=len(ends_q) - 1)]  # aligned at the ends
    else:
        start = visible.get("start_pos", 0)
        start = N_kv - N_q if isinstance(start, str) else start
        i = i + (start.view(-1, 1, 1, 1) if isinstance(start, Tensor) else start)
        if "leftpad_k" in visible:
            first, end = (visible[name].view(-1, 1, 1, 1) for name in ("leftpad_k", "seqused_k"))
            seen = seen & (j >= first) & (j < end)
    left, right = visible["window"]
    right = 0 if visible.get("causal") else right
    if left >= 0:
        seen = seen & (j >= i - left)
    if right >= 0:
        seen = seen & (j <= i + right)
    return seen
