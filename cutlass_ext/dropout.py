"""`dropout_mask`: which weights the dropout of `fmha` keeps. Called by users, and by whoever checks what ran."""

from numbers import Integral, Real

import torch
from torch import Tensor

from ._ops import name_of
from .interface import StartPos, behind_keys, check_numbers, check_positions, split_start
from .philox import kept, threshold_of

_BLOCK = 2**22  # elements that are drawn at a time: the words of a draw take 64 bits here


def dropout_mask(
    B: int,
    H: int,
    N_q: int,
    N_kv: int,
    dropout_p: float,
    dropout_seed: Tensor,
    *,
    start_pos: StartPos = 0,
    head_start: int = 0,
    sequence_start: int = 0,
    key_start: int | Tensor = 0,
) -> Tensor:
    """What `fmha(..., dropout_p=dropout_p, dropout_seed=dropout_seed)` keeps, on every backend and for its gradients.

    Whether a weight is kept follows from where it stands alone: from its sequence, query head, and the positions of its
    row and key. So it is the same whatever else is in the batch, is packed, or is another GPU's.

    Args:
        B, H, N_q, N_kv: sequences, query heads, query rows and keys.
        dropout_p: the probability that a weight is dropped, 0 to less than 1, rounded to multiples of 2^-32.
        dropout_seed: int64 `[2]`; the mask is on its device.
        start_pos: the position of the first query row, as in `fmha`: an int, an int32 tensor `[B]`, or `"end"`,
            which aligns the last row with the last key.
        head_start, sequence_start: as in `fmha`: what head 0 and sequence 0 count as.
        key_start: as in `fmha`: the position of key 0, an int or an int32 tensor `[B]`.

    Returns:
        bool `[B, H, N_q, N_kv]`, true where a weight is kept, and then multiplied by `1 / (1 - dropout_p)`.

    Raises:
        TypeError: an argument of a wrong type, or a tensor of a wrong dtype.
        ValueError: a dropout_seed of another shape, or a size, dropout_p, start_pos or key_start that does not fit.

    Source: Philox4x32 with 7 rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011). The key is
    the first word of the seed; the counter is key position / 16, position of the row, query head, sequence, with the
    second word spread over the last two; two rows draw for sixteen keys together: of their eight words each of the 32
    weights has a bit, at the top of its number, above 24 bits that all of them share (`Dropout` in
    csrc/fmha/params.hpp).
    """
    if not isinstance(dropout_seed, Tensor) or dropout_seed.dtype != torch.int64:
        given = dropout_seed.dtype if isinstance(dropout_seed, Tensor) else type(dropout_seed).__name__
        raise TypeError(f"dropout_seed: is of type {given}; expected an int64 tensor [2]")
    if dropout_seed.shape != (2,):
        raise ValueError(f"dropout_seed: has shape {list(dropout_seed.shape)}; expected [2]")
    check_numbers(dropout_p=dropout_p)
    if not isinstance(dropout_p, Real):
        raise TypeError(f"dropout_p: is of type {type(dropout_p).__name__}; expected a number")
    if not 0 <= dropout_p < 1 or threshold_of(dropout_p) == 1 << 32:
        raise ValueError(f"dropout_p: is {dropout_p}; expected a probability from 0 to less than 1 - 2^-33")
    sizes = {"B": B, "H": H, "N_q": N_q, "N_kv": N_kv, "head_start": head_start, "sequence_start": sequence_start}
    for name, x in sizes.items():
        if isinstance(x, bool) or not isinstance(x, Integral):
            raise TypeError(f"{name}: is of type {type(x).__name__}; expected an int")
        if not 0 <= x < 1 << 31:
            raise ValueError(f"{name}: is {x}; expected 0 or more, and less than 2^31")
    device = dropout_seed.device
    behind_keys(0, key_start)  # which says what is wrong with it
    start, start_positions = split_start(start_pos)
    check_positions(start_pos=start)
    for name, x in (("start_pos", start_positions), ("key_start", key_start)):
        if isinstance(x, Tensor) and x.dtype != torch.int32:
            raise TypeError(f"{name}: has dtype {name_of(x.dtype)}; expected int32")
        if isinstance(x, Tensor) and x.shape != (B,):
            raise ValueError(f"{name}: has shape {list(x.shape)}; expected [batch] = [{B}]")
    if isinstance(key_start, Tensor):
        key_start = key_start.to(device).long().view(B, 1, 1, 1)
    if start_positions is not None:
        start = start_positions.to(device).long().view(B, 1, 1, 1)
    elif start is None:
        start = N_kv - N_q + key_start
    sequences = torch.arange(B, device=device).view(B, 1, 1, 1) + sequence_start
    heads = torch.arange(H, device=device).view(H, 1, 1) + head_start
    mask = torch.empty(B, H, N_q, N_kv, dtype=torch.bool, device=device)
    step = max(_BLOCK // max(B * H * N_kv, 1), 1)
    for first in range(0, N_q, step):
        rows = torch.arange(first, min(first + step, N_q), device=device).unsqueeze(-1) + start
        drawn = kept(dropout_seed, threshold_of(dropout_p), sequences, heads, rows, slice(0, N_kv), key_start)
        mask[:, :, first : first + step] = drawn
    return mask
