"""`install()`: modules named `flash_attn` and `flash_attn_interface` for code that imports them. Called by users.

The first has the functions of flash-attn 2.8, the second those of FlashAttention-3, which have another order. Here are
those of them that the package itself does not have: the passes that sequence parallelism calls one by one.
"""

import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from torch import Tensor

from .. import flash_attn as names
from .._ops import renaming
from ..interface import check_tensors
from ..kvcache import flash_attn_with_kvcache
from ..merge import merge_attention
from ..support import attend, attend_backward
from . import bert_padding, rotary

VERSION = "2.8.3"  # of flash-attn, whose interface this is
_before: dict[str, ModuleType | None] = {}  # what sys.modules had, while installed


def install(*, replace: bool = False) -> None:
    """Makes `import flash_attn` and `import flash_attn_interface` give this library's functions, in this process.

        cutlass_ext.adapters.flash_attn.install()
        import xlstm, diffusers     # or whatever else imports flash_attn

    Call it before what imports them. There are `flash_attn`, `flash_attn.flash_attn_interface`, `.bert_padding` and
    `.layers.rotary`, and FlashAttention-3's `flash_attn_interface`; `importlib.metadata.version("flash-attn")` is 2.8.3
    where no other is installed. `flash_attn.ops` and `flash_attn.modules` are not there. transformers is better served
    by `cutlass_ext.adapters.transformers`.

    Args:
        replace: take the place of a flash-attn that is installed; modules that have imported it keep what they have.

    Raises:
        RuntimeError: one of the real packages is installed, and `replace` is False.
    """
    if _before:
        return
    modules = _modules()
    if not replace:
        for name in ("flash_attn", "flash_attn_interface"):
            if name in sys.modules or importlib.util.find_spec(name) is not None:
                raise RuntimeError(f"{name}: is installed already; install(replace=True) takes its place")
    loaded = [name for name in sys.modules if name.partition(".")[0] in modules]
    _before.update({name: sys.modules.get(name) for name in {*loaded, *modules}})
    for name in loaded:
        del sys.modules[name]
    sys.modules.update(modules)
    if not any(importlib.metadata.distributions(name="flash-attn")):
        sys.meta_path.append(_Metadata)


def uninstall() -> None:
    """Takes away what `install` put there, and puts back what it replaced."""
    for name, module in _before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
    _before.clear()
    if _Metadata in sys.meta_path:
        sys.meta_path.remove(_Metadata)


class _Metadata(importlib.metadata.DistributionFinder):
    """Says that flash-attn is there to those who ask for its version, and not to those who list what is installed."""

    @classmethod
    def find_spec(cls, *_) -> None:
        return None

    @classmethod
    def find_distributions(cls, context=importlib.metadata.DistributionFinder.Context()):  # noqa: B008
        if context.name is not None and context.name.lower().replace("_", "-") == "flash-attn":
            yield _Distribution()


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        return f"Name: flash-attn\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path):
        return path


def _modules() -> dict[str, ModuleType]:
    """The modules by their names, each an attribute of the one that it is in."""
    public = {name: x for name, x in vars(names).items() if name.startswith("flash_attn_")}
    public["flash_attn_with_kvcache"] = flash_attn_with_kvcache
    passes = {x.__name__: x for x in (_flash_attn_forward, _flash_attn_varlen_forward)}
    passes |= {x.__name__: x for x in (_flash_attn_backward, _flash_attn_varlen_backward)}
    passes |= {f"_wrapped{name}": x for name, x in passes.items()}  # the same, as operators of PyTorch there
    content = {
        "flash_attn": public | {"__version__": VERSION},
        "flash_attn.flash_attn_interface": public | passes,
        "flash_attn.bert_padding": vars(bert_padding),
        "flash_attn.layers": {},
        "flash_attn.layers.rotary": vars(rotary),
        "flash_attn_interface": _of_third(public),
    }
    modules = {}
    for name, values in content.items():
        modules[name] = module = ModuleType(name, values.get("__doc__"))
        vars(module).update({n: x for n, x in values.items() if n == "__version__" or not n.startswith("__")})
        is_package = any(other.startswith(f"{name}.") for other in content)
        module.__spec__ = ModuleSpec(name, None, is_package=is_package)
        if is_package:
            module.__path__ = []
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    return modules


# ------------------------------------------------------------------------------------------------ FlashAttention-3
_LIKE_ALL = "window_size attention_chunk softcap"
_LAST = "num_splits pack_gqa deterministic sm_margin return_attn_probs"
_SCALES = "qv q_descale k_descale v_descale"
_ORDERS = {
    "flash_attn_func": f"q k v softmax_scale causal {_SCALES} {_LIKE_ALL} {_LAST}",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k "
    f"softmax_scale causal {_SCALES} {_LIKE_ALL} {_LAST}",
    "flash_attn_with_kvcache": "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx "
    "cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale "
    f"softmax_scale causal {_LIKE_ALL} rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
    "return_softmax_lse",
}
_RENAMED = {"page_table": "block_table", "return_attn_probs": "return_softmax_lse"}


def _in_order(function: Callable, order: str) -> Callable:
    """`function` with the arguments, by position or by name, that FlashAttention-3's has."""
    known = order.split()
    own = inspect.signature(function).parameters
    more = [name for name in ("s_aux", "out") if name not in known]
    defaults = {name: own[_RENAMED.get(name, name)].default for name in known if _RENAMED.get(name, name) in own}

    @renaming(**{own: name for name, own in _RENAMED.items() if name in known})
    def call(*args, **kwargs):
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:  # "missing a required argument: 'v'", of no function
            raise TypeError(f"{function.__name__}() {error}") from None
        return function(**{_RENAMED.get(name, name): x for name, x in given.items() if x is not None})

    kind = inspect.Parameter
    signature = inspect.Signature(
        [kind(name, kind.POSITIONAL_OR_KEYWORD, default=defaults.get(name)) for name in known]
        + [kind(name, kind.KEYWORD_ONLY, default=None) for name in more]
    )
    call.__name__, call.__doc__, call.__signature__ = function.__name__, function.__doc__, signature
    return call


def _of_third(public: dict[str, Callable]) -> dict[str, Callable]:
    functions = {name: _in_order(public[name], order) for name, order in _ORDERS.items()}
    more = flash_attn_qkvpacked_func, flash_attn_combine, get_scheduler_metadata
    return functions | {function.__name__: function for function in more}


@renaming(
    q="qkv", k="qkv", v="qkv", return_softmax_lse="return_attn_probs", flash_attn_func="flash_attn_qkvpacked_func"
)
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> names.Result:
    """`flash_attn_func` of q, k and v in one buffer, in FlashAttention-3's order.

    Args:
        qkv: `[B, N, 3, H, d]`, or `[B, N, H_q + 2 H_kv, d]` with `num_heads_q`: the heads of q, then of k, then of v.
        num_heads_q: `H_q`.
        return_attn_probs: return `(out, softmax_lse)`.
        softmax_scale, causal, window_size, softcap, deterministic: as in `flash_attn_func`.
        q_descale, k_descale, v_descale, sm_margin: taken, and change nothing.
        attention_chunk: must be 0.

    Returns:
        `out` `[B, N, H_q, d]`, dtype of qkv, and with `return_attn_probs` also `softmax_lse`, float32 `[B, H_q, N]`.

    Raises:
        NotImplementedError: `attention_chunk`.
        TypeError, ValueError: as `flash_attn_func`; of q, k and v the text names `qkv`. A `num_heads_q` that is None
            where qkv has four dimensions, or does not leave as many heads for k as for v.
    """
    return names.flash_attn_func(
        *rotary.unpacked(qkv, num_heads_q), softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, deterministic=deterministic, attention_chunk=attention_chunk, sm_margin=sm_margin,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, return_softmax_lse=return_attn_probs,
    )  # fmt: skip


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`merge_attention` of splits, in FlashAttention-3's shapes.

    Args:
        out_partial: `[splits, B, N, H, d]`.
        lse_partial: `[splits, B, N, H]`, natural log.
        out: where the result is written, too, `[B, N, H, d]`.
        out_dtype: of the result; out's, or else that of out_partial.

    Returns:
        `out` `[B, N, H, d]` and `lse` `[B, N, H]`.

    Raises:
        TypeError: a tensor that is none, or dtypes that are not floating-point.
        ValueError: no splits, or shapes or devices that do not fit.
    """
    check_tensors(out_partial=out_partial, lse_partial=lse_partial, **({} if out is None else {"out": out}))
    if out_partial.dim() != 5 or lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"lse_partial: has shape {list(lse_partial.shape)} and out_partial {list(out_partial.shape)}; "
            "expected [splits, batch, rows, heads] and [splits, batch, rows, heads, d]"
        )
    merged, lse = merge_attention([*out_partial], [*lse_partial.transpose(-1, -2)])
    dtype = out_dtype or (out_partial if out is None else out).dtype
    if out is None:
        return merged.to(dtype), lse.transpose(-1, -2)
    if out.shape != merged.shape or out.dtype != dtype:
        raise ValueError(f"out: is {out.dtype} {list(out.shape)}; expected {dtype} {list(merged.shape)}")
    return out.copy_(merged), lse.transpose(-1, -2)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    *more: object,
    **options: object,
) -> None:
    """Nothing: there is nothing to be worked out beforehand, since work is dealt on the device, by its own lengths.

    Args:
        batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens: FlashAttention-3's;
            not looked at.
        more, options: its further ones, by position or by name; not looked at either.

    Returns:
        None, which the other functions take as `scheduler_metadata`, as they do whatever else.
    """


# ------------------------------------------------------------------------------------------------ single passes
def _options(dropout_p, causal, left, right, softcap, alibi_slopes) -> dict:
    if dropout_p:
        raise NotImplementedError(f"dropout_p: is {dropout_p}; expected 0, a single pass has no dropout")
    return {
        "causal": causal, "start_pos": "end", "window": (left, right), "softcap": softcap, "alibi_slopes": alibi_slopes,
    }  # fmt: skip


def _passed(q: Tensor, k: Tensor, v: Tensor, **options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with torch.no_grad():
        out, lse = attend(q, k, v, return_lse=True, **options)
    return out, lse, q.new_empty(0), torch.empty(2, dtype=torch.int64, device=q.device)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`out`, `softmax_lse`, and two placeholders for the probabilities and for the state of dropout."""
    options = _options(dropout_p, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    return _passed(q, k, v, softmax_scale=softmax_scale, **options)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_flash_attn_forward` of packed sequences. `zero_tensors`: what no row sees is 0 in any case."""
    options = _options(dropout_p, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    max_seqlen_q, max_seqlen_k = names.longest(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    if block_table is not None:
        seqused_k = names.lengths_between(cu_seqlens_k, cu_seqlens_q) if seqused_k is None else seqused_k
        cu_seqlens_k = None
    return _passed(
        q, k, v, softmax_scale=softmax_scale, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_k=max_seqlen_k,
        block_table=block_table, leftpad_k=leftpad_k, seqused_k=seqused_k, **options,
    )  # fmt: skip


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes `dq`, `dk` and `dv`, and returns the rows' sums of `dout * out`, float32 `[B, H_q, N_q]`."""
    options = _options(dropout_p, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    options |= {"softmax_scale": softmax_scale, "deterministic": deterministic}
    return _passed_back(dout, q, k, v, out, softmax_lse, (dq, dk, dv), options)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """`_flash_attn_backward` of packed sequences; the sums are `[H_q, total_q]`. `zero_tensors`: as forwards."""
    options = _options(dropout_p, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    options |= {"softmax_scale": softmax_scale, "deterministic": deterministic}
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    max_seqlen_q, max_seqlen_k = names.longest(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return _passed_back(dout, q, k, v, out, softmax_lse, (dq, dk, dv), options)


@torch.no_grad()
def _passed_back(dout, q, k, v, out, lse: Tensor, into: tuple[Tensor | None, ...], options: dict) -> Tensor:
    for result, gradient in zip(into, attend_backward(dout, q, k, v, out, lse, **options), strict=True):
        if result is not None:
            result.copy_(gradient)
    return (dout.float() * out.float()).sum(-1).transpose(-1, -2).contiguous()
