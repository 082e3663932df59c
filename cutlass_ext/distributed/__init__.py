"""Attention over several GPUs: a sequence, or a cache, that is spread over the ranks of a `torch.distributed` group.

`fmha` is `cutlass_ext.fmha` with the rows of q, k and v spread over ranks; `shard` and `gather` cut whole tensors up
and put them together again; `decode` reads a cache that is spread by keys. `python -m cutlass_ext.distributed.bench`
prints what a machine makes of it, and docs/several_gpus.md says what to expect.
"""

from .decode import decode
from .interface import fmha
from .shards import gather, shard

__all__ = ["decode", "fmha", "gather", "shard"]
