"""Exact attention for NVIDIA GPUs, on CuTe/CUTLASS, called from PyTorch.

`fmha` is the one function with all features; `flash_attn_*` and `scaled_dot_product_attention` are the same under the
names of flash-attn and PyTorch; `explain` says what would run. CPU tensors run through PyTorch's own operators.
"""

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
from .sdpa import scaled_dot_product_attention

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "fmha",
    "scaled_dot_product_attention",
]
