"""flash-attn's `bert_padding`: padded batches to packed rows and back. `adapters.flash_attn.install` puts it there."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._ops import name_of
from ..interface import check_tensors


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Some rows of a tensor; differentiable.

    Args:
        x: `[rows, ...]`.
        indices: `[n]`, int32 or int64, each from 0 to `rows - 1`.

    Returns:
        `[n, ...]`, dtype of `x`.

    Raises:
        IndexError: an index outside of the rows (on a GPU, an assertion of the device).
    """
    return x.index_select(0, indices)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis`, and `x` without a gradient, for a residual connection.

    Args:
        x, indices: as in `index_first_axis`.

    Returns:
        The rows `[n, ...]`, and `x` detached.

    Raises:
        IndexError: as `index_first_axis`.
    """
    return index_first_axis(x, indices), x.detach()


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse of `index_first_axis`: rows put where they belong, between zeros; differentiable.

    Args:
        values: `[n, ...]`.
        indices: int64 `[n]`, the row of each, from 0 to `first_axis_dim - 1`, none of them twice.
        first_axis_dim: rows of the result.

    Returns:
        `[first_axis_dim, ...]`, dtype of `values`.

    Raises:
        IndexError: numbers that differ, or an index outside of the rows (on a GPU, an assertion of the device).
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that a mask selects, one after the other.

    Args:
        hidden_states: `[B, N, ...]`.
        attention_mask: `[B, N]`, bool or int: True, or anything but 0, for the rows of a sequence that are in use.
        unused_mask: `[B, N]`, the same: further rows that are selected, and counted in `cu_seqlens` and in the longest
            length, but not among the rows in use, the last of the results. Such are rows allocated for tokens to come.

    Returns:
        The rows `[total, ...]`; their places in the flattened batch, int64 `[total]`; `cu_seqlens`, int32 `[B + 1]`;
        the longest of the sequences, for which the host waits; and how many rows of each are in use, int32 `[B]`.

    Raises:
        TypeError: an argument that is no tensor, or a mask that is neither bool nor int: of floats some are 0 for rows
            to keep, as what is added to scores is.
        ValueError: a mask that is not `[B, N]`.
    """
    check_tensors(hidden_states=hidden_states)
    _check("attention_mask", attention_mask, hidden_states)
    used = kept = attention_mask != 0
    if unused_mask is not None:
        _check("unused_mask", unused_mask, hidden_states)
        kept = used | (unused_mask != 0)
    lengths, in_use = (mask.sum(-1, dtype=torch.int32) for mask in (kept, used))
    return *_packed(hidden_states, kept, lengths), in_use


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` of batches whose rows hold several sequences one after the other.

    Args:
        hidden_states: `[B, N, ...]`.
        attention_mask_in_length: int `[B, N]`: the lengths of the sequences of each row of the batch, then zeros.

    Returns:
        The first four of `unpad_input`, with a `cu_seqlens` of as many sequences as there are.

    Raises:
        TypeError: an argument that is no tensor, or lengths that are not of ints.
        ValueError: lengths that are not `[B, N]`, are negative, or of a row are more than `N` together. On a GPU too,
            as the host waits for the longest in any case.
    """
    check_tensors(hidden_states=hidden_states)
    _check("attention_mask_in_length", attention_mask_in_length, hidden_states, takes_bool=False)
    i = torch.arange(attention_mask_in_length.shape[1], device=attention_mask_in_length.device)
    kept = i < attention_mask_in_length.sum(-1, keepdim=True)
    lengths = attention_mask_in_length[attention_mask_in_length > 0].int()
    rows, indices, cu_seqlens, longest = _packed(hidden_states, kept, lengths)
    if cu_seqlens[-1] != len(indices):  # both of which the host has waited for
        raise ValueError(
            f"attention_mask_in_length: has a row with negative lengths, or with more than the {len(i)} tokens of the "
            "batch's rows; expected the lengths of each row's sequences, then zeros"
        )
    return rows, indices, cu_seqlens, longest


def _check(name: str, mask: Tensor, hidden_states: Tensor, *, takes_bool: bool = True) -> None:
    """Rows of a mask of another length would be those of another token."""
    check_tensors(**{name: mask})
    if mask.is_floating_point() or (mask.dtype == torch.bool and not takes_bool):
        raise TypeError(f"{name}: has dtype {name_of(mask.dtype)}; expected {'bool or ' * takes_bool}int")
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
    """The inverse of `unpad_input`: packed rows put back, between zeros.

    Args:
        hidden_states: `[total, ...]`.
        indices: int64 `[total]`, the second result of `unpad_input`.
        batch, seqlen: `B` and `N` of the padded batch.

    Returns:
        `[B, N, ...]`, dtype of `hidden_states`.

    Raises:
        IndexError: as `index_put_first_axis`.
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
