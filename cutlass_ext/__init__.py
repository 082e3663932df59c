"""Exact attention for NVIDIA GPUs, on CuTe/CUTLASS, called from PyTorch.

`fmha` is the one function with all features; `flash_attn_*` and `scaled_dot_product_attention` are the same under the
names of flash-attn and PyTorch; all are differentiable. `fmha_backward` and `merge_attention` are for those who cut the
keys into parts themselves; `explain` says what would run, and `dropout_mask` what a seed drops. `activate` has
PyTorch's own attention computed here, `nn` has its modules, `adapters` are for other packages. CPU tensors run through
PyTorch's own operators.
"""

from . import (
    nn,
    torch_rules,  # noqa: F401  (importing it tells PyTorch)
)
from .backward import fmha_backward
from .dropout import dropout_mask
from .flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .interface import Explanation, explain, fmha
from .kvcache import flash_attn_with_kvcache
from .merge import merge_attention
from .sdpa import scaled_dot_product_attention
from .switch import activate, deactivate

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "activate",
    "deactivate",
    "dropout_mask",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "fmha",
    "fmha_backward",
    "merge_attention",
    "nn",
    "scaled_dot_product_attention",
]
