"""Which weights dropout keeps, drawn by position in PyTorch's operators, bit for bit as the kernels draw it
(csrc/fmha/params.hpp, `Dropout`). Used by `torch_padded.py` and `dropout.py`.
"""

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # of Philox4x32 (Salmon et al., SC 2011), as the additions to its key
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 7
_SPREAD = 0x9E3779B97F4A7C15  # so that seeds that count by their second word do not draw their neighbours' bits
_WORD = 0xFFFFFFFF
_KEYS = 16  # that a draw is for, those of two rows together for the 32 pairs that they have with them


def threshold_of(probability: float) -> int:
    """What of 32 bits is dropped: all that is below."""
    return int(probability * 2**32 + 0.5)


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product of two. No number on the way to them leaves 63 bits: where one does, code
    that torch.compile has C++ made of need not keep the low 64."""
    low, high = word * (factor & 0xFFFF), word * (factor >> 16)
    return high + (low >> 16) >> 16, low + ((high & 0xFFFF) << 16) & _WORD


def _philox(k0: Tensor, k1: Tensor, *counter: Tensor) -> tuple[Tensor, ...]:
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = _product(c0, _M0), _product(c2, _M1)
        c0, c1 = high1 ^ c1 ^ k0, low1
        c2, c3 = high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _W0 & _WORD, k1 + _W1 & _WORD
    return c0, c1, c2, c3


def _spread(word: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low word of `word` `* _SPREAD`, of whose 128 bits the low 64 count."""
    low, high = word & _WORD, word >> 32 & _WORD
    carried, low_word = _product(low, _SPREAD & _WORD)
    high_word = carried + _product(low, _SPREAD >> 32)[1] + _product(high, _SPREAD & _WORD)[1]
    return high_word & _WORD, low_word


def _rotated(word: Tensor, by: int) -> Tensor:
    return (word << by | word >> 32 - by) & _WORD


def kept(
    seed: Tensor, threshold: int, sequences: Tensor, heads: Tensor, rows: Tensor, keys: slice, origin: int | Tensor = 0
) -> Tensor:
    """Bool `[..., keys]`: where the weight of a row and a key is kept.

    `sequences`, `heads` and `rows`, their positions, are int64 and broadcast to `[..., 1]`, and so does `origin`, the
    position of key 0. Words of 32 bits are int64 here.
    """
    of_sequences, of_heads = _spread(seed[1])
    n, begin = keys.stop - keys.start, keys.start + origin
    first = begin // _KEYS
    if isinstance(begin, Tensor):  # sequences begin anywhere in sixteen keys
        c0 = first + torch.arange(n // _KEYS + 2, device=seed.device) & _WORD
    else:
        c0 = torch.arange(first, -(-(begin + n) // _KEYS), device=seed.device) & _WORD
    c2, c3 = heads + of_heads & _WORD, sequences + of_sequences & _WORD
    draw = lambda row: _philox(seed[0] & _WORD, seed[0] >> 32 & _WORD, c0, row & _WORD, c2, c3)  # noqa: E731
    even, odd = draw(rows & ~1), draw(rows | 1)
    # The top byte of a pair's number has a bit of each word; all of a block are compared at once, a bit at a time.
    shared = even[0] ^ _rotated(even[1], 11) ^ _rotated(even[2], 22)
    words = torch.where(shared >> 8 < (threshold & 0xFFFFFF), 0, _WORD)
    for place, bits in enumerate((*even, *odd), 24):
        words = bits & words if threshold >> place & 1 else bits | words
    keys_of = torch.arange(_KEYS, device=seed.device)
    places = keys_of % 4 * 8 + keys_of // 4 % 2 * 4 + keys_of // 8 * 2
    of_sixteens = (words[..., None] >> places + (rows & 1)[..., None] & 1).bool().flatten(-2)
    skipped = begin - _KEYS * first
    if isinstance(skipped, Tensor):
        return of_sixteens.take_along_dim(skipped + torch.arange(n, device=seed.device), -1)
    return of_sixteens[..., skipped:][..., :n]
