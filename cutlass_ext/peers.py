"""Who computes the cases of `python -m cutlass_ext.bench`: this library, attention written out, SDPA's backends, and
every other attention library that is installed. `measurement.py` times them.

A provider is one function: of a case and its inputs it makes a call that returns `[B, N, H, d]`. It raises `Refused`
for what its library does not have; what the library itself refuses, it refuses in its own words.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import cutlass_ext

if TYPE_CHECKING:
    from .measurement import Case, Inputs

Call = Callable[[], Tensor]
Provider = Callable[["Case", "Inputs"], Call]
OURS, WRITTEN_OUT = "cutlass_ext", "written out"


class Refused(Exception):
    """A library has no such attention."""


def only(case: Case, *features: str) -> None:
    """Raises `Refused` for a case that has more to it than `features`: of causal, window, pages, and its scores."""
    asked = ["window"] * bool(case.window) + ["pages"] * bool(case.page) + [case.scores] * bool(case.scores)
    if missing := [feature for feature in asked if feature not in features]:
        raise Refused(f"no {' and '.join(missing)}")


# ---- this library, and PyTorch ----


def ours(case: Case, x: Inputs) -> Call:
    if case.page:
        k, v = x.pages
        return lambda: cutlass_ext.flash_attn_with_kvcache(
            x.q, k, v, cache_seqlens=x.lengths, block_table=x.table, causal=case.causal
        )
    return lambda: cutlass_ext.fmha(x.q, x.k, x.v, **x.options(case))


def hidden_keys(case: Case, device: torch.device) -> Tensor | None:
    """`[rows, n]`: which keys causal and the window hide."""
    if not case.causal:
        return None
    hidden = torch.ones(case.rows, case.n, dtype=torch.bool, device=device).triu(1)
    return hidden | torch.ones_like(hidden).tril(-case.window) if case.window else hidden


def written_out(case: Case, x: Inputs) -> Call:
    """PyTorch multi-head attention, scores and all, KV heads repeated where query heads share them; what hides keys is
    made beforehand and not counted."""
    groups = x.q.shape[2] // x.k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    hidden = hidden_keys(case, q.device) if x.mask is None else ~x.mask

    def call() -> Tensor:
        keys, values = (k, v) if groups == 1 else (t.repeat_interleave(groups, 1) for t in (k, v))
        scores = q @ keys.transpose(-2, -1) / math.sqrt(case.head_dim)
        if x.bias is not None:
            scores = scores + x.bias
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        weights = torch.softmax(scores, -1)
        if x.kept is not None:
            weights = weights * x.kept / (1 - case.dropout_p)
        elif case.dropout_p:
            weights = F.dropout(weights, case.dropout_p)
        return (weights @ values).transpose(1, 2)

    return call


def sdpa(backend: SDPBackend) -> Provider:
    """Has no pages: it reads the same keys one after the other."""

    def make(case: Case, x: Inputs) -> Call:
        only(case, "pages", "mask", "bias", "dropout")
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        extra = x.mask if x.bias is None else x.bias
        options = {"is_causal": case.causal, "dropout_p": case.dropout_p, "enable_gqa": case.heads_kv > 0}

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, extra, **options).transpose(1, 2)

        return call

    return make


# ---- other libraries, where they are installed ----


def first_of(result: Tensor | tuple) -> Tensor:
    """Some versions return lse too."""
    return result[0] if isinstance(result, tuple) else result


def window_size(case: Case) -> tuple[int, int]:
    return (case.window - 1, 0) if case.window else (-1, -1)


def flash_attn_2(case: Case, x: Inputs) -> Call:
    import flash_attn

    only(case, "window", "pages", "dropout")
    if case.page:
        where = {"cache_seqlens": x.lengths, "block_table": x.table, "causal": case.causal}
        return lambda: first_of(flash_attn.flash_attn_with_kvcache(x.q, *x.pages, **where))
    options = {"dropout_p": case.dropout_p, "causal": case.causal, "window_size": window_size(case)}
    return lambda: first_of(flash_attn.flash_attn_func(x.q, x.k, x.v, **options))


def flash_attn_3(case: Case, x: Inputs) -> Call:
    import flash_attn_interface

    only(case, "window", "pages")
    if case.page:
        where = {"cache_seqlens": x.lengths, "page_table": x.table, "causal": case.causal}
        return lambda: first_of(flash_attn_interface.flash_attn_with_kvcache(x.q, *x.pages, **where))
    # num_splits: of 0 it chooses; it would not split the keys of few rows.
    options = {"causal": case.causal, "window_size": window_size(case), "num_splits": 0}
    return lambda: first_of(flash_attn_interface.flash_attn_func(x.q, x.k, x.v, **options))


def xformers(case: Case, x: Inputs) -> Call:
    from xformers.ops import fmha

    only(case, "window", "bias", "dropout")
    hides = x.bias
    if case.window:
        hides = fmha.attn_bias.LocalAttentionFromBottomRightMask(window_left=case.window - 1, window_right=0)
    elif case.causal:
        hides = fmha.attn_bias.LowerTriangularMask()
    q, k, v = x.q, x.k, x.v
    if groups := case.heads_kv and case.heads // case.heads_kv:
        q = q.unflatten(2, (case.heads_kv, groups))
        k, v = (t.unsqueeze(3).expand(-1, -1, -1, groups, -1) for t in (k, v))

    def call() -> Tensor:
        return fmha.memory_efficient_attention(q, k, v, attn_bias=hides, p=case.dropout_p).reshape(x.q.shape)

    return call


WORKSPACE_BYTES = 256 << 20


def flashinfer(case: Case, x: Inputs) -> Call:
    import flashinfer

    only(case, "window", "pages")
    if case.backward:
        raise Refused("no backward pass")
    sizes = case.heads, case.key_heads, case.head_dim
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=x.q.device)
    first = torch.arange(case.batch + 1, dtype=torch.int32, device=x.q.device)  # times rows of a sequence
    if case.page:
        full = torch.full((case.batch,), case.page, dtype=torch.int32, device=x.q.device)
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        decode.plan(first * x.table.shape[1], x.table.flatten(), full, *sizes, case.page,
                    q_data_type=x.q.dtype, kv_data_type=x.q.dtype)  # fmt: skip
        return lambda: decode.run(x.q.squeeze(1), x.pages).unsqueeze(1)
    prefill = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    prefill.plan(first * case.rows, first * case.n, *sizes, causal=case.causal,
                 window_left=window_size(case)[0], q_data_type=x.q.dtype)  # fmt: skip
    q, k, v = (t.flatten(0, 1) for t in (x.q, x.k, x.v))
    return lambda: prefill.run(q, k, v).view(x.q.shape)


@functools.cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 256  # each case is compiled for its shapes
    return torch.compile(flex_attention, dynamic=False)


def flex_attention(case: Case, x: Inputs) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask

    only(case, "window", "mask", "bias")
    mask, bias, window = x.mask, x.bias, case.window
    visible = score = None
    if mask is not None:
        visible = lambda b, h, i, j: mask[0, 0, i, j]  # noqa: E731
    elif window:
        visible = lambda b, h, i, j: (i >= j) & (i - j < window)  # noqa: E731
    elif case.causal:
        visible = lambda b, h, i, j: i >= j  # noqa: E731
    if bias is not None:
        score = lambda s, b, h, i, j: s + bias[b, h, i, j]  # noqa: E731
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    blocks = visible and create_block_mask(visible, None, None, case.rows, case.n, device=str(x.q.device))
    flex, options = compiled_flex_attention(), {"enable_gqa": case.heads_kv > 0}
    return lambda: flex(q, k, v, score_mod=score, block_mask=blocks, **options).transpose(1, 2)


# ---- who is there ----

PYTORCH: dict[str, Provider] = {
    OURS: ours,
    WRITTEN_OUT: written_out,
    "SDPA math": sdpa(SDPBackend.MATH),
    "SDPA efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
}


class Peer(NamedTuple):
    module: str  # what its import says of whether it is installed
    install: str
    make: Provider


OTHERS = {
    "flash-attn 2": Peer("flash_attn.flash_attn_interface", "pip install flash-attn", flash_attn_2),
    "flash-attn 3": Peer("flash_attn_interface", "build the hopper folder of flash-attention", flash_attn_3),
    "xFormers": Peer("xformers.ops", "pip install xformers", xformers),
    "FlashInfer": Peer("flashinfer", "pip install flashinfer-python", flashinfer),
    "FlexAttention": Peer("triton", "a PyTorch for CUDA, which brings triton", flex_attention),
}
NAMES = [*PYTORCH, *OTHERS]  # in the order of tables and plots


def installed() -> tuple[dict[str, Provider], dict[str, str], dict[str, str]]:
    """Every provider that is there; the versions of those that are not PyTorch's; and how to get the others."""
    providers, versions, absent = dict(PYTORCH), {}, {}
    for name, peer in OTHERS.items():
        try:
            importlib.import_module(peer.module)
        except (ImportError, OSError) as error:  # OSError: it is there, and its shared object does not load
            there = not isinstance(error, ModuleNotFoundError)
            absent[name] = f"does not load: {error}" if there else peer.install
            continue
        providers[name] = peer.make
        package = importlib.import_module(peer.module.partition(".")[0])
        versions[name] = getattr(package, "__version__", "of no version")
    return providers, versions, absent
