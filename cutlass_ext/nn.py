"""`MultiheadAttention` in place of PyTorch's: its weights and arguments, `fmha` inside. Called by users."""

import warnings

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import Parameter

from ._ops import name_of
from .interface import check_bool, check_tensors
from .support import attend, given, refusal, warn_once


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`, computed by `fmha`, with query heads that may share KV heads.

    Weights, their names and their first values for a seed are PyTorch's, so a `state_dict` of either loads into the
    other. With `need_weights=False` attention takes memory that grows with N; otherwise the weights are written out, as
    they are to be returned. PyTorch's layers around it (`nn.TransformerEncoderLayer`) call it, and not their own fused
    inference, which would go past it. What `fmha` does not take PyTorch's SDPA computes, with a warning, once.

    What differs from PyTorch's: with `need_weights=True` rows that see no key are 0, where PyTorch has NaN (without, it
    has NaN in its fused inference alone); `is_causal` needs no `attn_mask` beside it, stands for one that is given,
    which is to say the same, and does not hide the keys that `add_bias_kv` and `add_zero_attn` add, which PyTorch's
    hides where no weights are needed.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as in
            `torch.nn.MultiheadAttention`.
        num_kv_heads: KV heads, of which `num_heads` is a multiple; `num_heads` by default. With fewer the projections
            of keys and values have `num_kv_heads * embed_dim / num_heads` rows, and so does `bias_k`.

    Raises:
        ValueError: sizes that do not fit; the text names the argument.

    Source: Attention Is All You Need (arXiv:1706.03762, section 3.2.2); GQA (arXiv:2305.13245, section 2.2).
    """

    # PyTorch's layers look at it, and where it is False call `forward`.
    _qkv_same_embed_dim = property(lambda self: False, lambda self, value: None)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device=None,
        dtype=None,
        *,
        num_kv_heads: int | None = None,
    ) -> None:
        nn.Module.__init__(self)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim: is {embed_dim}; expected a multiple of num_heads, {num_heads}, above 0")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: is {num_kv_heads}; expected a divisor of num_heads, {num_heads}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout: is {dropout}; expected a probability")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.head_dim, self.dropout = embed_dim // num_heads, dropout
        self.batch_first, self.add_zero_attn = batch_first, add_zero_attn
        kv_dim = num_kv_heads * self.head_dim
        self._rows = [embed_dim, kv_dim, kv_dim]  # of the projections
        factory = {"device": device, "dtype": dtype}

        def parameter(*shape: int) -> Parameter:
            return Parameter(torch.empty(shape, **factory))

        if self.kdim == self.vdim == embed_dim:
            self.in_proj_weight = parameter(sum(self._rows), embed_dim)
            self.q_proj_weight = self.k_proj_weight = self.v_proj_weight = None
        else:
            self.q_proj_weight = parameter(embed_dim, embed_dim)
            self.k_proj_weight = parameter(kv_dim, self.kdim)
            self.v_proj_weight = parameter(kv_dim, self.vdim)
            self.in_proj_weight = None
        self.in_proj_bias = parameter(sum(self._rows)) if bias else None
        self.out_proj = NonDynamicallyQuantizableLinear(embed_dim, embed_dim, bias=bias, **factory)
        self.bias_k, self.bias_v = [parameter(1, 1, kv_dim) if add_bias_kv else None for _ in range(2)]
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for key in (self.bias_k, self.bias_v):
            if key is not None:
                nn.init.xavier_normal_(key)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiheadAttention":
        """One that has the parameters of `module`, the same objects, so that an optimizer's go on being used.

            attention = torch.nn.MultiheadAttention(512, 8, batch_first=True)
            attention = cutlass_ext.nn.MultiheadAttention.from_torch(attention)

        Hooks, parametrizations, and what has been added to `module` since (buffers, modules, parameters) would stay
        with it: one that has any is refused.

        Args:
            module: a `torch.nn.MultiheadAttention`.

        Raises:
            TypeError: it is something else.
            ValueError: it has something of the kind.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise TypeError(f"module: is of type {type(module).__name__}; expected a torch.nn.MultiheadAttention")
        if (left := _what_stays_behind(module)) is not None:
            raise ValueError(f"module: has {left}, which would be lost; expected a module without")
        ours = cls(
            module.embed_dim, module.num_heads, module.dropout, module.in_proj_bias is not None,
            module.bias_k is not None, module.add_zero_attn, module.kdim, module.vdim, module.batch_first,
            device="meta", num_kv_heads=getattr(module, "num_kv_heads", None),
        )  # fmt: skip
        for name, parameter in module.named_parameters(recurse=False):
            setattr(ours, name, parameter)
        ours.out_proj = module.out_proj
        return ours.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of query to key and value.

        Args:
            query: `[B, N, embed_dim]` with `batch_first`, else `[N, B, embed_dim]`; without a batch `[N, embed_dim]`.
            key: `[B, S, kdim]`, `[S, B, kdim]` or `[S, kdim]`.
            value: the same with `vdim`.
            key_padding_mask: `[B, S]`, or `[S]` without a batch: bool, True for keys to ignore, or floats to be added
                to the scores.
            need_weights: return the weights too; they are written out then.
            attn_mask: `[N, S]` or `[B * num_heads, N, S]`: bool, True for keys to ignore, or floats to be added.
            average_attn_weights: weights are the mean over the heads.
            is_causal: row `i` sees the keys up to `i`; an `attn_mask` is taken to say the same.

        Returns:
            The output, shape of query, and with `need_weights` the weights after dropout, `[B, N, S]` or with
            `average_attn_weights=False` `[B, num_heads, N, S]` (without a batch, without `B`), else None.

        Raises:
            TypeError: an argument that is no tensor, or a mask that is neither bool nor of floats.
            ValueError: shapes that do not fit; the text names the argument.
        """
        self._check(query, key, value)
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None and not isinstance(mask, Tensor):
                raise TypeError(f"{name}: is of type {type(mask).__name__}; expected a tensor or None")
        check_bool("is_causal", is_causal)
        batched, same = query.dim() == 3, query is key and key is value
        tensors = [query] if same else [query, key, value]
        if not batched:
            tensors = [x.unsqueeze(0) for x in tensors]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            tensors = [x.transpose(0, 1) for x in tensors]
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in self._projected(*tensors))
        B, N, S = q.shape[0], q.shape[1], k.shape[1]

        masks = []
        if key_padding_mask is not None:
            masks.append(_of_scores("key_padding_mask", key_padding_mask, query.dtype, (B, 1, 1, S), (B, S)))
        if attn_mask is not None and not is_causal:
            shape = (1, 1, N, S) if attn_mask.dim() == 2 else (B, self.num_heads, N, S)
            masks.append(_of_scores("attn_mask", attn_mask, query.dtype, shape, (N, S), (B * self.num_heads, N, S)))
        k, v, more = self._more_keys(k, v)
        if more:
            if is_causal:
                masks.append(torch.ones(1, 1, N, S, dtype=torch.bool, device=q.device).tril())
                is_causal = False
            masks = [F.pad(x, (0, more), value=x.dtype == torch.bool) for x in masks]

        out, weights = self._attended(q, k, v, masks, is_causal, need_weights)
        if batched and not self.batch_first:
            out = out.transpose(0, 1)
        out = self.out_proj(out.flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        return (out, weights) if batched else (out.squeeze(0), None if weights is None else weights.squeeze(0))

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        check_tensors(query=query, key=key, value=value)
        dims = query.dim()
        for name, x, width in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            expected = f"expected [rows, {width}], with or without a batch, alike"
            if x.is_nested:
                raise ValueError(f"{name}: is a nested tensor; {expected}")
            if dims not in (2, 3) or x.dim() != dims or x.shape[-1] != width:
                raise ValueError(f"{name}: has shape {list(x.shape)}; {expected}")
        if dims == 3 and query.shape[batch := 0 if self.batch_first else 1] != key.shape[batch]:
            raise ValueError(f"key: has batch {key.shape[batch]} and query {query.shape[batch]}; they must be equal")
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"value: has shape {list(value.shape)} and key {list(key.shape)}; they must have as many rows"
            )

    def _projected(self, query: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        if not others and self.in_proj_weight is not None:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).split(self._rows, -1)
        weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.split(self._rows)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.split(self._rows)
        inputs = (query, *others) if others else (query, query, query)
        return tuple(F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))

    def _more_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """k and v with the keys that the module adds at the end, and how many these are."""
        rows = k.shape[1]
        if self.bias_k is not None:
            own = (x.to(k.dtype).view(1, 1, -1, self.head_dim) for x in (self.bias_k, self.bias_v))
            k, v = (torch.cat([x, more.expand(len(x), -1, -1, -1)], 1) for x, more in zip((k, v), own, strict=True))
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
        return k, v, k.shape[1] - rows

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, masks: list[Tensor], causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`out` `[B, N, H, d]`, and the weights `[B, H, N, S]` where they are needed."""
        dropout_p = self.dropout if self.training else 0.0
        if not need_weights:
            shown, added = ([x for x in masks if (x.dtype == torch.bool) == is_bool] for is_bool in (True, False))
            mask = torch.logical_and(*shown) if len(shown) == 2 else (shown or [None])[0]
            bias = sum(added[1:], added[0]) if added else None
            options = {"causal": causal, "mask": mask, "bias": bias, "dropout_p": dropout_p}
            reason = refusal(q, k, v, dropout_p)
            if reason is None:
                return attend(q, k, v, **given(**options)), None
            warn_once("MultiheadAttention", reason)
        if causal and (masks or need_weights):
            masks = [*masks, torch.ones(1, 1, q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()]
            causal = False
        bias = None
        for x in masks:
            x = (
                torch.zeros_like(x, dtype=q.dtype).masked_fill(~x, -torch.inf)
                if x.dtype == torch.bool
                else x.to(q.dtype)
            )
            bias = x if bias is None else bias + x
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if not need_weights:
            options = {"attn_mask": bias, "dropout_p": dropout_p, "is_causal": causal, "enable_gqa": True}
            return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2), None
        group = self.num_heads // self.num_kv_heads
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = (q * self.head_dim**-0.5) @ k.mT
        scores = scores if bias is None else scores + bias
        empty = (scores == -torch.inf).all(-1, keepdim=True)  # NaN behind the softmax would be in gradients, too
        weights = F.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
        weights = F.dropout(weights, dropout_p)
        return (weights @ v).transpose(1, 2), weights


_OWN = {
    "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v", "out_proj",
}  # fmt: skip
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def _what_stays_behind(module: nn.Module) -> str | None:
    """What a module has beside the parameters that it is made with."""
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "parametrized weights"
    if more := next((name[1:].replace("_", " ") for name in _HOOKS if getattr(module, name)), None):
        return more
    contents = (("parameter", module._parameters), ("buffer", module._buffers), ("module", module._modules))
    return next((f"a {kind} {name}" for kind, all_of in contents for name in all_of if name not in _OWN), None)


def _of_scores(name: str, mask: Tensor, dtype: torch.dtype, to: tuple[int, ...], *expected: tuple[int, ...]) -> Tensor:
    """A mask of four dimensions, True for visible keys where it is bool."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name}: has dtype {name_of(mask.dtype)}; expected bool, True for keys to ignore, or floats")
    if mask.dtype == torch.float64 != dtype:
        raise TypeError(
            f"{name}: has dtype float64 and query {name_of(dtype)}; expected bool, or floats of 32 or 16 bits"
        )
    if tuple(mask.shape) not in expected:
        shapes = " or ".join(str(list(shape)) for shape in expected)
        raise ValueError(f"{name}: has shape {list(mask.shape)}; expected {shapes}")
    mask = mask.view(to)
    return ~mask if mask.dtype == torch.bool else mask


def replace_attention(model: nn.Module) -> nn.Module:
    """Puts a `MultiheadAttention` with the same parameters in place of every `torch.nn.MultiheadAttention` of a model.

        model = torch.nn.Transformer(512, 8, batch_first=True)
        cutlass_ext.nn.replace_attention(model)

    Subclasses of it, which parametrized ones are, are left alone, and so, with a warning, are modules with hooks or
    additions, which would be lost. `nn.TransformerEncoder` no longer packs padded batches into nested tensors.

    Args:
        model: any module, which is changed.

    Raises:
        TypeError: it is none.
        ValueError: it is itself a `torch.nn.MultiheadAttention` that `from_torch` refuses.

    Returns:
        The model; where that is a `torch.nn.MultiheadAttention` itself, the new module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: is of type {type(model).__name__}; expected a torch.nn.Module")
    replaced: dict[nn.Module, MultiheadAttention] = {}

    def ours(module: nn.Module) -> MultiheadAttention:
        if module not in replaced:
            replaced[module] = MultiheadAttention.from_torch(module)
        return replaced[module]

    if type(model) is nn.MultiheadAttention:
        return ours(model)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children() names one that is there twice once
            if type(child) is not nn.MultiheadAttention:
                continue
            if (left := _what_stays_behind(child)) is None:
                setattr(parent, name, ours(child))
            else:
                warnings.warn(f"replace_attention: {name} stays as it is: it has {left}", RuntimeWarning, stacklevel=2)
        if isinstance(parent, nn.TransformerEncoder):
            parent.use_nested_tensor = False
    return model
