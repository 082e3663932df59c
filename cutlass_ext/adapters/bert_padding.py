"""flash-attn's `bert_padding`: padded batches to packed rows and back. `adapters.flash_attn.install` puts it there."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` `[n]` of `x` `[rows, ...]`; differentiable."""
    return x.index_select(0, indices)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis`, and `x` without a gradient, for a residual connection."""
    return index_first_axis(x, indices), x.detach()


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """`[first_axis_dim, ...]`, 0 but for `values` `[n, ...]` in the rows `indices`; differentiable."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that a mask selects, one after the other.

    Args:
        hidden_states: `[B, N, ...]`.
        attention_mask: `[B, N]`, bool or int: rows of a sequence.
        unused_mask: `[B, N]`, the same: rows that are kept, but belong to no sequence's length.

    Returns:
        The rows `[total, ...]`; their places in the flattened batch, int64 `[total]`; `cu_seqlens`, int32 `[B + 1]`;
        the longest of the sequences, for which the host waits; and their lengths without unused rows, int32 `[B]`.

    Raises:
        TypeError, ValueError: a mask that is no tensor, or not `[B, N]`.
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        _check(name, mask, hidden_states, is_needed=name == "attention_mask")
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = (mask.sum(-1, dtype=torch.int32) for mask in (kept, attention_mask))
    return *_packed(hidden_states, kept, lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` of batches whose rows hold several sequences one after the other.

    Args:
        hidden_states: `[B, N, ...]`.
        attention_mask_in_length: int `[B, N]`: the lengths of the sequences of each row of the batch, then zeros.

    Returns:
        The first four of `unpad_input`, with a `cu_seqlens` of as many sequences as there are.
    """
    _check("attention_mask_in_length", attention_mask_in_length, hidden_states)
    i = torch.arange(attention_mask_in_length.shape[1], device=attention_mask_in_length.device)
    kept = i < attention_mask_in_length.sum(-1, keepdim=True)
    lengths = attention_mask_in_length[attention_mask_in_length > 0].int()
    return _packed(hidden_states, kept, lengths)


def _check(name: str, mask: Tensor | None, hidden_states: Tensor, *, is_needed: bool = True) -> None:
    """Rows of a mask of another length would be those of another token."""
    if mask is None and not is_needed:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name}: is of type {type(mask).__name__}; expected a tensor")
    if mask.shape != hidden_states.shape[:2]:
        expected = list(hidden_states.shape[:2])
        raise ValueError(f"{name}: has shape {list(mask.shape)}; expected [batch, seq] = {expected}")


def _packed(hidden_states: Tensor, kept: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        cu_seqlens,
        int(lengths.max()) if len(lengths) else 0,
    )


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """`[batch, seqlen, ...]`, 0 but for the rows `hidden_states` `[total, ...]` at the places `indices`."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
