"""Which weights dropout keeps, drawn by position in PyTorch's operators, bit for bit as the kernels draw it
(csrc/fmha/params.hpp, `Dropout`). Used by `torch_padded.py` and `dropout.py`.
"""

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # of Philox4x32 (Salmon et al., SC 2011), as the additions to its key
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 7
_SPREAD = 0x9E3779B97F4A7C15 - 2**64  # so that seeds that count by their second word do not draw their neighbours' bits
_WORD = 0xFFFFFFFF
_KEYS = 16  # that the 128 bits of one draw are for


def threshold_of(probability: float) -> int:
    """What of 32 bits is dropped: all that is below."""
    return int(probability * 2**32 + 0.5)


def kept(
    seed: Tensor, threshold: int, sequences: Tensor, heads: Tensor, rows: Tensor, keys: slice, origin: int | Tensor = 0
) -> Tensor:
    """Bool `[..., keys]`: where the weight of a row and a key is kept.

    `sequences`, `heads` and `rows`, their positions, are int64 and broadcast to `[..., 1]`, and so does `origin`, the
    position of key 0. Words of 32 bits are int64 here, whose products keep their low 64 bits.
    """
    spread = seed[1] * _SPREAD
    n, begin = keys.stop - keys.start, keys.start + origin
    first = begin // _KEYS
    if isinstance(begin, Tensor):  # sequences begin anywhere in sixteen keys
        c0 = first + torch.arange(n // _KEYS + 2, device=seed.device) & _WORD
    else:
        c0 = torch.arange(first, -(-(begin + n) // _KEYS), device=seed.device) & _WORD
    c1, c2, c3 = rows & _WORD, heads + (spread & _WORD) & _WORD, sequences + (spread >> 32) & _WORD
    k0, k1 = seed[0] & _WORD, seed[0] >> 32 & _WORD
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _M0, c2 * _M1
        c0, c1 = product1 >> 32 & _WORD ^ c1 ^ k0, product1 & _WORD
        c2, c3 = product0 >> 32 & _WORD ^ c3 ^ k1, product0 & _WORD
        k0, k1 = k0 + _W0 & _WORD, k1 + _W1 & _WORD
    # A byte for each key: of keys 2w, 2w + 1, 2w + 8 and 2w + 9 in word w. Below it they share 24 bits.
    below = c0 ^ c1 ^ c2
    least = (threshold >> 24) + ((below >> 8) < (threshold & 0xFFFFFF)).long()
    words = torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), -1)
    pairs = [words >> shift & 0xFF for shift in (0, 8, 16, 24)]
    drawn = torch.stack([torch.stack(pairs[:2], -1), torch.stack(pairs[2:], -1)], -3)  # [..., half, word, odd]
    of_sixteens = (drawn >= least[..., None, None, None]).flatten(-4)
    skipped = begin - _KEYS * first
    if isinstance(skipped, Tensor):
        return of_sixteens.take_along_dim(skipped + torch.arange(n, device=seed.device), -1)
    return of_sixteens[..., skipped:][..., :n]
