"""The shapes that the library was asked for, causal and not: against the oracle, written-out multi-head attention,
torch.nn.MultiheadAttention and SDPA. The result of each shape is computed once and held against all."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from oracle import Expected, expect, peer_tolerance

SHAPES = [
    (4, 512, 16, 64), (56, 490, 2, 64), (8, 64, 16, 64), (8, 59, 16, 64),
    (1, 2048, 16, 64), (2, 2048, 16, 64), (1, 3722, 16, 64), (1, 2000, 16, 64),
]  # fmt: skip


@dataclasses.dataclass
class Problem:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    rows: torch.Tensor
    expected: Expected
    out: torch.Tensor
    lse: torch.Tensor


def sampled_rows(n, device):
    """All rows of a short sequence; of a long one its ends, the neighbours of a tile edge and some more."""
    if n <= 64:
        return torch.arange(n, device=device)
    some = [0, 1, 31, 32, 63, 64, n // 2, n - 2, n - 1, *range(5, n - 2, n // 20)]
    return torch.tensor(sorted(set(some)), device=device)


@pytest.fixture(scope="module", params=[False, True], ids=["full", "causal"])
def causal(request):
    return request.param


@pytest.fixture(scope="module", params=SHAPES, ids=lambda s: "x".join(map(str, s)))
def problem(request, causal, target):
    torch.manual_seed(1)
    q, k, v = target.qkv(*request.param)
    rows = sampled_rows(q.shape[1], q.device)
    out, lse = target.fmha(q, k, v, causal=causal)
    return Problem(q, k, v, causal, rows, expect(q, k, v, causal=causal, rows=rows), out, lse)


def test_oracle(problem):
    problem.expected.check(problem.out, problem.lse)


def test_written_out_mha(problem):
    """softmax(Q K^T / sqrt(d)) V with PyTorch's operators, on the first and the last sequence and head."""
    mask = torch.ones(problem.q.shape[1], problem.k.shape[1], dtype=torch.bool, device=problem.q.device).tril()
    for b, h in {(0, 0), (problem.q.shape[0] - 1, problem.q.shape[2] - 1)}:
        q, k, v = (t[b, :, h].float() for t in (problem.q, problem.k, problem.v))
        scores = q @ k.T / q.shape[-1] ** 0.5
        if problem.causal:
            scores = scores.masked_fill(~mask, float("-inf"))
        out, tolerance = (scores.softmax(-1) @ v).to(problem.out.dtype), peer_tolerance(problem.out.dtype)
        torch.testing.assert_close(problem.out[b, :, h], out, **tolerance)
        torch.testing.assert_close(problem.lse[b, h], scores.logsumexp(-1), **peer_tolerance(torch.float32))


def test_sdpa(problem):
    q, k, v = (t.transpose(1, 2) for t in (problem.q, problem.k, problem.v))
    peer = F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal)
    torch.testing.assert_close(problem.out, peer.transpose(1, 2), **peer_tolerance(peer.dtype))


@pytest.mark.parametrize("shape", SHAPES[:5], ids=lambda s: "x".join(map(str, s)))
def test_nn_multihead_attention(target_fp32, shape, causal):
    """The module's own projections around our attention, compared with the module's output."""
    batch, n, heads, d = shape
    module = torch.nn.MultiheadAttention(heads * d, heads, batch_first=True, device=target_fp32.device).eval()
    x = target_fp32.randn(batch, n, heads * d)
    mask = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1) if causal else None
    with torch.no_grad():
        theirs, _ = module(x, x, x, attn_mask=mask, is_causal=causal, need_weights=False)
        qkv = F.linear(x, module.in_proj_weight, module.in_proj_bias).view(batch, n, 3, heads, d)
        out, _ = target_fp32.fmha(*qkv.unbind(2), causal=causal)
        ours = module.out_proj(out.reshape(batch, n, heads * d))
    torch.testing.assert_close(ours, theirs, **peer_tolerance(x.dtype))


@pytest.mark.parametrize("shape", [(2, 129, 4, 64), (1, 300, 2, 128)], ids=lambda s: "x".join(map(str, s)))
def test_torch_16_bit(target_16_bit, shape, causal):
    q, k, v = target_16_bit.qkv(*shape)
    expect(q, k, v, causal=causal).check(*target_16_bit.fmha(q, k, v, causal=causal))
