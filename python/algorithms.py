"""FlashAttention-2's two algorithms as loops in plain PyTorch, which count what they read, write and multiply.

    python python/algorithms.py

For readers of the paper (arXiv:2307.08691: algorithm 1, the forward pass, and algorithm 2, the backward pass) and of
csrc/fmha, whose kernels do the same; docs/how_it_works.md says where. One head, float32; the tests compare them with
`fmha`, and the counts with their closed forms.
"""
# ruff: noqa: E741  (l and O are the paper's names)

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import cutlass_ext


@dataclass
class Chip:
    """Where tiles are worked on: what comes from memory and goes there passes `load` and `store`."""

    bytes_read: int = 0
    bytes_written: int = 0
    flops: int = 0  # of matrix products

    def load(self, x: Tensor) -> Tensor:
        self.bytes_read += x.nbytes
        return x.clone()

    def store(self, place: Tensor, x: Tensor) -> None:
        self.bytes_written += place.nbytes
        place.copy_(x)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return a @ b

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


def tiles(n: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, n)) for first in range(0, n, size))


def sees_nothing(i: slice, j: slice, causal: bool) -> bool:
    """Whether no row of a query tile sees a key of a key tile, so that the tile is not visited."""
    return causal and j.start > i.stop - 1


def mask(S: Tensor, i: slice, j: slice, causal: bool) -> Tensor:
    """`S` of the rows `i` and the keys `j`, -inf where a key comes after its row."""
    if not causal or j.stop - 1 <= i.start:
        return S
    rows, keys = torch.arange(i.start, i.stop), torch.arange(j.start, j.stop)
    return S.masked_fill(keys > rows[:, None], -math.inf)


def standard(chip: Chip, Q: Tensor, K: Tensor, V: Tensor, causal: bool = False) -> Tensor:
    """Attention with S and P in memory, which FlashAttention's paper calls algorithm 0 (arXiv:2205.14135)."""
    everything = slice(0, len(Q)), slice(0, len(K))
    S, O = Q.new_empty(len(Q), len(K)), V.new_empty(len(Q), V.shape[1])
    chip.store(S, mask(chip.product(chip.load(Q), chip.load(K).T) / math.sqrt(Q.shape[1]), *everything, causal))
    P = torch.empty_like(S)
    chip.store(P, torch.softmax(chip.load(S), -1))
    chip.store(O, chip.product(chip.load(P), chip.load(V)))
    return O


def forward(
    chip: Chip, Q: Tensor, K: Tensor, V: Tensor, B_r: int, B_c: int, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Algorithm 1: `O` and `lse`, a tile of `B_r` query rows at a time over tiles of `B_c` keys."""
    softmax_scale = 1 / math.sqrt(Q.shape[1])
    O, lse = V.new_empty(len(Q), V.shape[1]), Q.new_empty(len(Q))
    for i in tiles(len(Q), B_r):
        Q_i = chip.load(Q[i])
        O_i = V.new_zeros(len(Q_i), V.shape[1])
        m = Q.new_full((len(Q_i), 1), -math.inf)  # running row maximum
        l = Q.new_zeros(len(Q_i), 1)  # running row sum
        for j in tiles(len(K), B_c):
            if sees_nothing(i, j, causal):
                break
            S = mask(chip.product(Q_i, chip.load(K[j]).T) * softmax_scale, i, j, causal)
            m_new = torch.maximum(m, S.amax(-1, keepdim=True))
            P = torch.exp(S - m_new)
            rescale = torch.exp(m - m_new)
            l = rescale * l + P.sum(-1, keepdim=True)
            O_i = rescale * O_i + chip.product(P, chip.load(V[j]))
            m = m_new
        chip.store(O[i], O_i / l)
        chip.store(lse[i], (m + l.log()).squeeze(-1))
    return O, lse


def backward(
    chip: Chip,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,
    dO: Tensor,
    lse: Tensor,
    B_r: int,
    B_c: int,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2: `dQ`, `dK` and `dV`, a tile of keys at a time over tiles of query rows.

    P is computed again from lse, and dQ is summed up in memory, where each tile of keys adds its part.
    """
    softmax_scale = 1 / math.sqrt(Q.shape[1])
    dQ, dK, dV, delta = torch.zeros_like(Q), torch.empty_like(K), torch.empty_like(V), torch.empty_like(lse)
    for i in tiles(len(Q), B_r):  # a launch of its own: rowsum(dO O)
        chip.store(delta[i], (chip.load(dO[i]) * chip.load(O[i])).sum(-1))
    for j in tiles(len(K), B_c):
        K_j, V_j = chip.load(K[j]), chip.load(V[j])
        dK_j, dV_j = torch.zeros_like(K_j), torch.zeros_like(V_j)
        for i in tiles(len(Q), B_r):
            if sees_nothing(i, j, causal):
                continue
            Q_i, dO_i = chip.load(Q[i]), chip.load(dO[i])
            S = mask(chip.product(Q_i, K_j.T) * softmax_scale, i, j, causal)
            P = torch.exp(S - chip.load(lse[i])[:, None])
            dV_j += chip.product(P.T, dO_i)
            dP = chip.product(dO_i, V_j.T)
            dS = P * (dP - chip.load(delta[i])[:, None])
            chip.store(dQ[i], chip.load(dQ[i]) + chip.product(dS, K_j) * softmax_scale)
            dK_j += chip.product(dS.T, Q_i) * softmax_scale
        chip.store(dK[j], dK_j)
        chip.store(dV[j], dV_j)
    return dQ, dK, dV


def main() -> None:
    torch.manual_seed(0)
    N, d, B_r, B_c = 1024, 64, 128, 64
    print(f"one head, N {N}, d {d}, float32, tiles of B_r {B_r} query rows and B_c {B_c} keys")
    print(f"{'':30}{'MB read':>9}{'written':>9}{'GFLOP':>8}{'FLOP/byte':>11}  max difference from fmha")
    for causal in (False, True):
        Q, K, V, dO = (torch.randn(N, d) for _ in range(4))
        leaves = [x[None, :, None].clone().requires_grad_() for x in (Q, K, V)]
        out = cutlass_ext.fmha(*leaves, causal=causal)
        gradients = torch.autograd.grad(out, leaves, dO[None, :, None])
        chips = Chip(), Chip(), Chip()
        results = [[standard(chips[0], Q, K, V, causal)]]
        O, lse = forward(chips[1], Q, K, V, B_r, B_c, causal)
        results += [[O], backward(chips[2], Q, K, V, O, dO, lse, B_r, B_c, causal)]
        expected = [out], [out], gradients
        names = "standard", "algorithm 1, forward", "algorithm 2, backward"
        for name, chip, got, want in zip(names, chips, results, expected, strict=True):
            difference = max((a - b[0, :, 0]).abs().max().item() for a, b in zip(got, want, strict=True))
            megabytes = f"{chip.bytes_read / 1e6:9.2f}{chip.bytes_written / 1e6:9.2f}"
            rates = f"{chip.flops / 1e9:8.3f}{chip.flops / chip.bytes:11.1f}"
            print(f"{name + ' causal' * causal:30}" + megabytes + rates + f"  {difference:.1e}")


if __name__ == "__main__":
    main()
