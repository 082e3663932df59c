"""FlexAttention's `BlockMask` as a mask. Called by `fmha` for `block_mask`."""

import torch
from torch import Tensor

_KEPT = "_cutlass_ext_mask"  # the attribute of a BlockMask in which the mask that was made of it stays, and of what
_MADE_OF = "mask_mod", "seq_lengths", "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"


def mask_of(block_mask: object, *, packs: bool = False) -> Tensor:
    """Bool `[1 or B, 1 or H, N_q, N_kv]`, true where the BlockMask shows a key; the same in bits where it `packs`.

    That is in its full blocks, and where its `mask_mod` says so in its partial ones. `mask_mod` is evaluated once, the
    result kept with the BlockMask, until one of its attributes is replaced, so that calls that follow launch nothing.
    """
    from torch.nn.attention.flex_attention import BlockMask  # importing it takes 0.3 s

    if not isinstance(block_mask, BlockMask):
        given = type(block_mask).__name__
        raise TypeError(f"block_mask: is of type {given}; expected a torch.nn.attention.flex_attention.BlockMask")
    made_of = [getattr(block_mask, name) for name in _MADE_OF]
    kept, of = getattr(block_mask, _KEPT, (None, ()))
    is_of_these = kept is not None and all(a is b for a, b in zip(made_of, of, strict=True))
    if not is_of_these or (kept.dtype == torch.int32) != packs:
        with torch.inference_mode(False), torch.no_grad():  # what is kept may be saved for a backward pass later
            kept = _evaluated(block_mask)
            if packs:
                kept = torch.ops.cutlass_ext.pack_mask(kept)
        if type(kept) is Tensor:  # and not a fake one, of torch.export
            setattr(block_mask, _KEPT, (kept, made_of))
    return kept


def can_pack(block_mask: object, q: object, k: object) -> bool:
    """Whether q and k are what kernels compute, padded sequences of the lengths that the BlockMask was made for."""
    if not isinstance(q, Tensor) or not isinstance(k, Tensor) or not q.is_cuda or q.dim() != 4 or k.dim() != 4:
        return False
    return getattr(block_mask, "seq_lengths", None) == (q.shape[1], k.shape[1])


def _evaluated(block_mask) -> Tensor:
    from torch.nn.attention.flex_attention import create_mask

    counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
    if counts.dim() != 3:
        raise ValueError(f"block_mask: has {counts.dim() - 1} leading dimensions; expected 2, batch and heads")
    mask = create_mask(block_mask.mask_mod, *counts.shape[:2], *block_mask.seq_lengths, counts.device)
    mask = mask & _elements(block_mask, counts, indices)
    if block_mask.full_kv_num_blocks is not None:
        mask |= _elements(block_mask, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return mask


def _elements(block_mask, counts: Tensor, indices: Tensor) -> Tensor:
    """Bool `[B, H, N_q, N_kv]`: what lies in the blocks of keys, the first `counts` of `indices`, of blocks of rows."""
    (rows, keys), (N_q, N_kv) = block_mask.BLOCK_SIZE, block_mask.seq_lengths
    blocks = -(-N_kv // keys)
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    there = torch.zeros(*indices.shape[:-1], blocks + 1, dtype=torch.bool, device=indices.device)
    there.scatter_(-1, indices.where(listed, blocks).long(), True)  # what is not listed, in a column of its own
    there = there[..., :blocks].repeat_interleave(rows, 2)[:, :, :N_q]
    return there.repeat_interleave(keys, 3)[..., :N_kv]
