"""The oracle itself, against the formula written out element by element and against answers known without it."""

import math

import pytest
import torch
from oracle import assert_bounds, attention, expect


def by_element(q, k, v, b, i, h, *, p, first, last, causal, window, scale, softcap, slope, sink):
    """One output row of the formula in Python floats."""
    weights, total, group = [], math.exp(sink), q.shape[2] // k.shape[2]
    for j in range(k.shape[1]):
        if not first <= j < last or (causal and j > p):
            continue
        if (window[0] >= 0 and j < p - window[0]) or (window[1] >= 0 and j > p + window[1]):
            continue
        s = scale * sum(x * y for x, y in zip(q[b, i, h].tolist(), k[b, j, h // group].tolist(), strict=True))
        s = softcap * math.tanh(s / softcap) - slope * abs(p - j)
        weights.append((j, math.exp(s)))
        total += math.exp(s)
    row = [sum(w * v[b, j, h // group, c].item() for j, w in weights) / total for c in range(v.shape[3])]
    return row, math.log(total)


@pytest.mark.parametrize("causal,window", [(False, (-1, -1)), (True, (2, -1)), (False, (1, 3)), (True, (-1, -1))])
def test_oracle_is_section_2(causal, window):
    q, k, v = torch.randn(2, 3, 4, 4), torch.randn(2, 6, 2, 4), torch.randn(2, 6, 2, 8)
    slopes, sink = torch.rand(2, 4), torch.randn(4)
    starts, lengths, leftpads = torch.tensor([-1, 2]), torch.tensor([6, 4]), torch.tensor([0, 1])
    out, lse, _ = attention(q, k, v, causal=causal, start_pos=starts, window=window, softmax_scale=0.7, softcap=1.5,
                            alibi_slopes=slopes, sink=sink, seqused_k=lengths, leftpad_k=leftpads)  # fmt: skip
    for b in range(2):
        for i in range(3):
            for h in range(4):
                row, total = by_element(
                    q, k, v, b, i, h, p=int(starts[b]) + i, first=int(leftpads[b]), last=int(lengths[b]), causal=causal,
                    window=window, scale=0.7, softcap=1.5, slope=slopes[b, h].item(), sink=sink[h].item(),
                )  # fmt: skip
                assert out[b, i, h].tolist() == pytest.approx(row, rel=1e-12, abs=1e-14)
                assert lse[b, h, i].item() == pytest.approx(total, rel=1e-12)


def test_rows_are_rows_of_the_whole():
    q, k, v = (torch.randn(2, 9, 2, 4) for _ in range(3))
    out, lse, _ = attention(q, k, v, causal=True, start_pos="end")
    some, some_lse, _ = attention(q, k, v, causal=True, start_pos="end", rows=[7, 2])
    assert torch.equal(some, out[:, [7, 2]]) and torch.equal(some_lse, lse[..., [7, 2]])


def test_the_tolerance_rejects_tf32_and_a_wrong_row():
    """The assertion has teeth: inputs rounded to TF32's 10 bits, and one row of thousands exchanged, both fail it."""
    q, k, v = (torch.randn(1, 128, 4, 64) for _ in range(3))
    expected = expect(q, k, v)
    expected.check(expected.ref_out.float(), expected.ref_lse)
    to_tf32 = lambda t: (t.view(torch.int32) + (1 << 12) & ~((1 << 13) - 1)).view(torch.float32)  # noqa: E731
    coarse = attention(to_tf32(q), to_tf32(k), v)[0].float()
    with pytest.raises(AssertionError, match="the bounds"):
        expected.check(coarse)
    wrong = expected.out.float()
    wrong[0, 64] = wrong[0, 65]
    with pytest.raises(AssertionError, match="the bounds"):
        assert_bounds(wrong, expected.ref_out, expected.out, eps=torch.finfo(torch.float32).eps)
