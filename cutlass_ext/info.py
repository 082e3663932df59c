"""`python -m cutlass_ext.info`: what is installed, what there is to run on, and what would run there.

For users, and for reports of faults. Computes nothing.
"""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from typing import get_args

import torch

import cutlass_ext

from . import _C, flash_attn_with_kvcache
from ._ops import name_of
from .bench import driver_version
from .interface import Backend

PEERS = "transformers", "flash-attn", "xformers", "flashinfer-python", "triton", "diffusers"
DTYPES = torch.bfloat16, torch.float16, torch.float32


def main() -> None:
    """Prints a line for each fact, under headings."""
    for heading, lines in (
        ("versions", versions()),
        ("devices", devices()),
        ("kernels", kernels()),
        ("choices", choices()),
    ):
        print(f"{heading}:")
        for line in lines:
            print(f"  {line}")


def versions() -> Iterator[str]:
    """The library, and what it stands on or meets."""
    runtime = getattr(_C, "CUDART_VERSION", 13000)
    of_binary = f"CUDA runtime {runtime // 1000}.{runtime % 1000 // 10} in its binary"
    yield f"cutlass_ext {cutlass_ext.__version__}, {of_binary}, {os.path.dirname(cutlass_ext.__file__)}"
    yield f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none: a CPU build'}"
    yield f"driver {driver_version() or 'none'}"
    yield f"Python {sys.version.split()[0]}, {platform.platform()}"
    for name in PEERS:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def devices() -> Iterator[str]:
    """What PyTorch sees."""
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        memory = f"{about.total_memory / 2**30:.0f} GiB, {about.multi_processor_count} multiprocessors"
        yield f"cuda:{i} {about.name}, compute capability {about.major}.{about.minor}, {memory}"
    yield f"cpu {platform.machine()}, {torch.get_num_threads()} threads: backend torch"


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def explained(*args, **kwargs) -> str:
    """What `explain` says of a call, or why there is nothing to say."""
    try:
        found = cutlass_ext.explain(*args, **kwargs)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"none: {str(error).splitlines()[0]}"
    if found.backend == "torch":
        return "torch"
    B_r, B_c = found.tile
    return f"{found.backend} {found.kernel}, tile {B_r} x {B_c}, {found.splits} splits, {found.ctas} CTAs"


def kernels() -> Iterator[str]:
    """Which backends take which dtypes on the first device, or why none."""
    for name in sorted(set(get_args(Backend)) - {"auto"}):
        if name != "torch" and device() == "cpu":
            yield f"{name}: needs a CUDA GPU"
            continue
        says = {}
        for dtype in DTYPES:
            q = torch.empty(1, 256, 4, 64, device=device(), dtype=dtype)
            says[name_of(dtype)] = explained(q, q, q, causal=True, backend=name)
        taken = [dtype for dtype, text in says.items() if not text.startswith("none")]
        yield f"{name}: {', '.join(taken) or next(iter(says.values()))}"


# name: sequences, query rows, keys, query heads, KV heads, head dim, dtype, causal
SHAPES = {
    "llama3-8b prefill": (1, 8192, 8192, 32, 8, 128, torch.bfloat16, True),
    "gpt2 training": (8, 1024, 1024, 12, 12, 64, torch.bfloat16, True),
    "bert": (32, 512, 512, 12, 12, 64, torch.float16, False),
    "vit": (64, 197, 197, 12, 12, 64, torch.float16, False),
    "deepseek-v3 prefill": (1, 4096, 4096, 16, 16, (192, 128), torch.bfloat16, True),
    "float32": (4, 512, 512, 16, 16, 64, torch.float32, True),
}


def choices() -> Iterator[str]:
    """What would run for the attention of common models; of a cache, one token of eight sequences of 8,192."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, device=device(), dtype=dtype)

    for name, (B, N_q, N_kv, H_q, H_kv, dims, dtype, causal) in SHAPES.items():
        d, d_v = dims if isinstance(dims, tuple) else (dims, dims)
        q, k, v = (empty(B, n, h, w, dtype=dtype) for n, h, w in ((N_q, H_q, d), (N_kv, H_kv, d), (N_kv, H_kv, d_v)))
        sizes = f"B {B}, N {N_q}, H {H_q}/{H_kv}, d {d}" + (f"/{d_v}" if d != d_v else "")
        yield f"{name} ({sizes}, {name_of(dtype)}): {explained(q, k, v, causal=causal)}"
        out, lse = empty(B, N_q, H_q, d_v, dtype=dtype), empty(B, H_q, N_q, dtype=torch.float32)
        backward = explained(cutlass_ext.fmha_backward, out, q, k, v, out, lse, causal=causal)
        yield f"  its gradients: {backward}"
    q, pages = empty(8, 1, 32, 128), empty(8 * 64, 128, 8, 128)
    lengths = torch.full((8,), 8000, dtype=torch.int32, device=device())
    table = torch.arange(8 * 64, dtype=torch.int32, device=device()).view(8, 64)
    says = explained(flash_attn_with_kvcache, q, pages, pages, cache_seqlens=lengths, block_table=table, causal=True)
    yield f"llama3-8b decoding (B 8, 8192 keys in pages of 128, H 32/8, d 128, bfloat16): {says}"


if __name__ == "__main__":
    main()
