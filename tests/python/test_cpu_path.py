"""Where the CPU path leaves a call to PyTorch's fused attention: which calls, and that they give what others give.

And `python/algorithms.py`, which computes on a CPU what the kernels do.
"""

import sys
from pathlib import Path

import oracle
import pytest
import torch

import cutlass_ext
from cutlass_ext import torch_padded

sys.path.insert(0, str(Path(__file__).parents[2] / "python"))
import algorithms


@pytest.fixture
def fused(monkeypatch):
    """How often each pass went to PyTorch's fused attention."""
    counts = {"attention": 0, "backward": 0}
    for name in counts:
        own = getattr(torch_padded._Fused, name)

        def counted(self, *args, name=name, own=own):
            counts[name] += 1
            return own(self, *args)

        monkeypatch.setattr(torch_padded._Fused, name, counted)
    return counts


def tensors(B=2, N_q=70, N_kv=70, H_q=4, H_kv=4, d=32, d_v=None, dtype=torch.float32):
    torch.manual_seed(0)
    return [
        torch.randn(B, n, h, w).to(dtype)
        for n, h, w in ((N_q, H_q, d), (N_kv, H_kv, d), (N_kv, H_kv, d_v or d), (N_q, H_q, d_v or d))
    ]


FUSED = {
    "full": ({}, {}),
    "causal": ({}, {"causal": True}),
    "grouped": ({"H_kv": 2}, {"causal": True}),
    "more keys": ({"N_kv": 90}, {}),
    "more keys than rows see": ({"N_kv": 90}, {"causal": True}),
    "more rows": ({"N_kv": 40}, {"causal": True}),
    "aligned at the end": ({}, {"causal": True, "start_pos": "end"}),
    "one row of a cache": ({"N_q": 1}, {"causal": True, "start_pos": "end"}),
    "one row's window": ({"N_q": 1}, {"causal": True, "start_pos": "end", "window": (15, 0)}),
    "a window that hides nothing": ({}, {"causal": True, "window": (69, 0)}),
    "causal by a window": ({}, {"window": (-1, 0)}),
    "scaled": ({"d": 20}, {"softmax_scale": 0.3}),
    "bias": ({}, {"bias": torch.linspace(-1, 1, 70).expand(1, 1, 1, 70)}),
    "bias of every head": ({"N_kv": 90}, {"bias": torch.linspace(-2, 2, 4 * 90).view(1, 4, 1, 90).bfloat16()}),
    "bias, causal": ({"H_kv": 2}, {"bias": torch.linspace(-2, 2, 70 * 70).view(1, 1, 70, 70), "causal": True}),
    "bias with strides": ({}, {"bias": torch.linspace(-2, 2, 70 * 70).view(1, 1, 70, 70).mT}),
    "mask": ({}, {"mask": torch.arange(70).view(1, 1, 1, 70) > 12}),
    "mask, causal": ({"H_kv": 2}, {"mask": torch.arange(70).view(1, 1, 1, 70) > 12, "causal": True}),
    "mask of some rows": ({"N_kv": 90}, {"mask": torch.arange(70 * 90).view(1, 1, 70, 90) % 7000 > 360}),
    "bias and mask": ({}, {"bias": torch.ones(2, 1, 70, 1).expand(2, 1, 70, 70),
                           "mask": torch.arange(280).view(1, 4, 1, 70) % 3 > 0}),
}  # fmt: skip
NOT_FUSED = {
    "aligned at the end": ({"N_kv": 90}, {"causal": True, "start_pos": "end"}),
    "window": ({}, {"window": (9, 9)}),
    "causal with a window": ({}, {"causal": True, "window": (68, 0)}),
    "before the first key": ({}, {"causal": True, "start_pos": -3}),
    "no key": ({}, {"causal": True, "start_pos": -70}),
    "softcap": ({}, {"softcap": 5.0}),
    "d_v": ({"d_v": 16}, {}),
    "sink": ({}, {"sink": torch.zeros(4)}),
    "slopes": ({}, {"alibi_slopes": torch.ones(4)}),
    "bias beside softcap": ({}, {"bias": torch.zeros(1, 1, 1, 70), "softcap": 5.0}),
    "lengths": ({}, {"seqused_k": torch.tensor([70, 9], dtype=torch.int32)}),
    "padding in front": ({}, {"leftpad_k": torch.tensor([0, 9], dtype=torch.int32)}),
    "starts on the device": ({}, {"causal": True, "start_pos": torch.zeros(2, dtype=torch.int32)}),
    "no sequence": ({"B": 0}, {}),
    "no keys": ({"N_kv": 0}, {}),
}
CASES = [pytest.param(*case, True, id=name) for name, case in FUSED.items()]
CASES += [pytest.param(*case, False, id=f"not {name}") for name, case in NOT_FUSED.items()]


@pytest.mark.parametrize("sizes,options,is_fused", CASES)
def test_what_is_fused_and_what_it_gives(sizes, options, is_fused, fused):
    q, k, v, dout = tensors(**sizes)
    out = cutlass_ext.fmha(q, k, v, **options)
    assert fused["attention"] == is_fused
    assert out.is_contiguous()
    expected = oracle.expect(q, k, v, **_told(q, k, options))
    expected.check(out)
    same, lse = cutlass_ext.fmha(q, k, v, return_lse=True, **options)
    assert torch.equal(out, same)
    expected.check(out, lse)
    if "sink" in options:
        return
    gradients = cutlass_ext.fmha_backward(dout, q, k, v, out, lse, **options)
    assert fused["backward"] == (is_fused and "bias" not in options)
    assert all(x.is_contiguous() for x in gradients)
    oracle.expect_gradients(q, k, v, dout, **_told(q, k, options)).check(gradients, small=True)
    if "bias" in options:  # its own gradient is of the blocks; without it the others are not
        leaves = [x.requires_grad_() for x in (q, k, v)]
        others = torch.autograd.grad(cutlass_ext.fmha(*leaves, **options), leaves, dout)
        assert fused["backward"] == is_fused
        for a, b in zip(others, gradients[:3], strict=True):
            torch.testing.assert_close(a, b, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_training_is_fused(options, fused):
    q, k, v, dout = tensors(N_q=256, N_kv=256, H_kv=2)
    out, lse = cutlass_ext.fmha(q, k, v, return_lse=True, **options)
    assert fused == {"attention": 1, "backward": 0} and lse.is_contiguous()
    oracle.expect(q, k, v, **options).check(out, lse)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad(cutlass_ext.fmha(*leaves, **options), leaves, dout)
    assert fused == {"attention": 2, "backward": 1}
    oracle.expect_gradients(*(x.detach() for x in leaves), dout, **options).check(gradients)


def _told(q, k, options):
    """The options for the oracle, which wants to be told what "end" is."""
    end = k.shape[1] - q.shape[1]
    return options | ({"start_pos": end} if options.get("start_pos") == "end" else {})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("N", [5, 70, 300])
@pytest.mark.parametrize("extra", ["", "mask"])
@pytest.mark.parametrize("causal", [False, True])
def test_16_bits_are_fused(dtype, causal, extra, N, fused):
    """lse and gradients in float32."""
    q, k, v, dout = tensors(N_q=N, N_kv=N, H_kv=2, dtype=dtype)
    options = {"causal": causal} | ({"mask": torch.rand(2, 1, 1, N) < 0.7} if extra else {})
    out = cutlass_ext.fmha(q, k, v, **options)
    oracle.expect(q, k, v, **options).check(out, small=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = cutlass_ext.fmha(*leaves, return_lse=True, **options)
    oracle.expect(q, k, v, **options).check(out, lse, small=True)
    gradients = torch.autograd.grad(out, leaves, dout)
    assert [x.dtype for x in gradients] == [dtype] * 3
    oracle.expect_gradients(*(x.detach() for x in leaves), dout, **options).check(gradients, small=True)
    assert fused == {"attention": 2, "backward": 1}


def test_results_in_float32_beside_16_bits(fused):
    q, k, v, dout = tensors(dtype=torch.bfloat16)
    options = {"mask": torch.rand(2, 1, 1, 70) < 0.7, "out_dtype": torch.float32}
    out, lse = cutlass_ext.fmha(q, k, v, return_lse=True, **options)
    rounded = out.bfloat16()
    gradients = cutlass_ext.fmha_backward(dout, q, k, v, rounded, lse, **options)
    assert fused == {"attention": 1, "backward": 1}
    assert {x.dtype for x in (out, *gradients)} == {torch.float32}
    oracle.expect(q.float(), k.float(), v.float(), mask=options["mask"]).check(out, lse)
    del options["out_dtype"]
    for a, b in zip(gradients, cutlass_ext.fmha_backward(dout, q, k, v, rounded, lse, **options), strict=True):
        assert torch.equal(a.bfloat16(), b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("N", [70, 300])
def test_rows_that_a_mask_leaves_without_keys(N, causal, fused):
    """0 and -inf, and gradients of 0, whatever stands in their q and dout."""
    q, k, v, dout = tensors(N_q=N, N_kv=N)
    mask = torch.rand(2, 1, N, N) < 0.4
    mask[:, :, ::5] = False
    mask[0, :, :40] &= torch.arange(N) > 20  # causal hides the rest of some rows
    options = {"mask": mask, "causal": causal}
    empty = ~(mask.tril() if causal else mask).any(-1).expand(2, 4, N)
    out, lse = cutlass_ext.fmha(q, k, v, return_lse=True, **options)
    oracle.expect(q, k, v, **options).check(out, lse)
    assert torch.equal(lse == -torch.inf, empty) and not out.transpose(1, 2)[empty].any()
    want = cutlass_ext.fmha_backward(dout, q, k, v, out, lse, **options)
    assert fused == {"attention": 1, "backward": 1}
    for x in (q, dout):
        x.transpose(1, 2)[empty] = torch.nan
    assert not cutlass_ext.fmha(q, k, v, **options).transpose(1, 2)[empty].any()
    for a, b in zip(cutlass_ext.fmha_backward(dout, q, k, v, out, lse, **options), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["k", "v"])
def test_what_a_mask_hides_reaches_what_it_reaches_in_blocks(place, value, fused, monkeypatch):
    """A key that no row may see; other sequences and heads keep their bits."""
    q, k, v, dout = tensors(H_kv=2)
    options = {"mask": torch.arange(70).view(1, 1, 1, 70) != 33}
    clean = cutlass_ext.fmha(q, k, v, return_lse=True, **options)
    clean += cutlass_ext.fmha_backward(dout, q, k, v, *clean, **options)[:3]
    {"k": k, "v": v}[place][1, 33, 0, 5] = value
    got = cutlass_ext.fmha(q, k, v, return_lse=True, **options)
    got += cutlass_ext.fmha_backward(dout, q, k, v, *clean[:2], **options)[:3]
    assert fused["attention"] == fused["backward"] == 2
    monkeypatch.setattr(torch_padded._Fused, "of", lambda *_: None)
    blocks = cutlass_ext.fmha(q, k, v, return_lse=True, **options)
    blocks += cutlass_ext.fmha_backward(dout, q, k, v, *clean[:2], **options)[:3]
    if place == "k":
        assert got[0].isfinite().all() and got[1].isfinite().all()
    for name, a, b, c in zip(("out", "lse", "dq", "dk", "dv"), got, blocks, clean, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, atol=1e-5, rtol=1e-4)
        heads = 1 if name == "lse" else 2
        n = a.shape[heads] // 2
        assert torch.equal(a[0], c[0]) and torch.equal(a.narrow(heads, n, n), c.narrow(heads, n, n)), name


def test_large_masks_are_not_converted(fused, monkeypatch):
    """But a bias of float32 is added as it stands."""
    monkeypatch.setattr(torch_padded, "_MOST_ADDED", 70 * 70 - 1)
    q, k, v, _ = tensors()
    mask, bias = torch.rand(1, 1, 70, 70) < 0.7, torch.randn(1, 1, 70, 70)
    for options, is_fused in (({"mask": mask}, 0), ({"bias": bias.bfloat16()}, 0), ({"bias": bias}, 1)):
        fused["attention"] = 0
        oracle.expect(q, k, v, **options).check(cutlass_ext.fmha(q, k, v, **options))
        assert fused["attention"] == is_fused


def test_float64_and_gradients_of_lse_are_not_fused(fused):
    q, k, v, _ = tensors(N_q=256, N_kv=256)
    cutlass_ext.fmha(q.double(), k.double(), v.double())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    _, lse = cutlass_ext.fmha(*leaves, return_lse=True)
    lse.sum().backward()
    assert fused == {"attention": 1, "backward": 0}


def test_packed_sequences_are_fused_one_by_one(fused):
    q, k, v, _ = (x[0] for x in tensors(B=1))
    ends = torch.tensor([0, 30, 30, 70], dtype=torch.int32)
    ends = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 40, "max_seqlen_k": 40}
    used = torch.tensor([30, 0, 40], dtype=torch.int32)
    for options in ({}, {"seqused_k": used}):
        fused["attention"] = 0
        out = cutlass_ext.fmha(q, k, v, causal=True, **ends, **options)
        assert fused["attention"] == 2
        oracle.expect_packed(q, k, v, causal=True, **ends, **options).check(out)


def test_the_switch_does_not_call_itself(fused):
    """PyTorch's attention computed here, which computes it with what PyTorch had before."""
    q, k, v, dout = (x.transpose(1, 2) for x in tensors(N_q=256, N_kv=256))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    want = torch.autograd.grad(sdpa(*leaves, is_causal=True), leaves, dout)
    assert fused == {"attention": 0, "backward": 0}
    with cutlass_ext.activate("cpu"):
        got = torch.autograd.grad(sdpa(*leaves, is_causal=True), leaves, dout)
    assert fused == {"attention": 1, "backward": 1}
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_non_finite_values_reach_what_they_reach_elsewhere(fused):
    """The fused pass and the one in blocks agree which outputs a NaN or an infinity reaches."""
    for place in range(3):
        for value in (torch.nan, torch.inf):
            inputs = tensors()[:3]
            inputs[place][1, 20, 2, 3] = value
            for causal in (False, True):
                out = cutlass_ext.fmha(*inputs, causal=causal)
                blocks = cutlass_ext.fmha(*inputs, causal=causal, start_pos=torch.zeros(2, dtype=torch.int32))
                torch.testing.assert_close(out, blocks, equal_nan=True, atol=1e-5, rtol=1e-4)
    assert fused["attention"] == 12


# ---- python/algorithms.py


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("N,B_r,B_c", [(96, 32, 16), (100, 32, 48), (50, 64, 64)])
def test_the_papers_algorithms_agree_with_fmha(N, B_r, B_c, causal):
    torch.manual_seed(0)
    Q, K, V, dO = (torch.randn(N, 24) for _ in range(4))
    leaves = [x[None, :, None].clone().requires_grad_() for x in (Q, K, V)]
    out, lse = cutlass_ext.fmha(*leaves, causal=causal, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, dO[None, :, None])
    out_1, lse_1 = algorithms.forward(algorithms.Chip(), Q, K, V, B_r, B_c, causal)
    got = out_1, lse_1, *algorithms.backward(algorithms.Chip(), Q, K, V, out_1, dO, lse_1, B_r, B_c, causal)
    want = out[0, :, 0], lse[0, 0], *(x[0, :, 0] for x in gradients)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b.detach(), atol=3e-6, rtol=1e-5)
    standard = algorithms.standard(algorithms.Chip(), Q, K, V, causal)
    torch.testing.assert_close(standard, got[0], atol=3e-6, rtol=1e-5)


def test_the_papers_algorithms_count_bytes_and_flops():
    """K and V are read once for each query tile, or Q, dO, dQ and the row's numbers once for each key tile."""
    N, d, B_r, B_c = 128, 16, 32, 16
    Q, K, V, dO = (torch.randn(N, d) for _ in range(4))
    rows, matrix = 4 * N, 4 * N * d  # bytes of a number for each row, and of a matrix
    forward, backward, standard = (algorithms.Chip() for _ in range(3))
    out, lse = algorithms.forward(forward, Q, K, V, B_r, B_c)
    assert forward == algorithms.Chip(matrix + N // B_r * 2 * matrix, matrix + rows, 4 * N * N * d)
    algorithms.backward(backward, Q, K, V, out, dO, lse, B_r, B_c)
    read = 4 * matrix + N // B_c * (3 * matrix + 2 * rows)
    assert backward == algorithms.Chip(read, 2 * matrix + rows + N // B_c * matrix, 10 * N * N * d)
    algorithms.standard(standard, Q, K, V)
    assert standard == algorithms.Chip(3 * matrix + 8 * N * N, matrix + 8 * N * N, 4 * N * N * d)


@pytest.mark.parametrize("n", [700, 1024, 1100])
def test_sums_over_many_keys_in_parts(n, monkeypatch):
    """As on a GPU, forward and backward."""
    init = torch_padded._Blocks.__init__

    def summing_in_parts(self, *args):
        init(self, *args)
        self.sums_in_parts = True

    monkeypatch.setattr(torch_padded._Blocks, "__init__", summing_in_parts)
    monkeypatch.setattr(torch_padded._Fused, "of", lambda *_: None)
    q, k, v, dout = tensors(N_q=20, N_kv=n, H_kv=2, d_v=24)
    dout = dout[..., :24].contiguous()
    options = {"causal": True, "start_pos": "end", "window": (640, -1)}
    got = cutlass_ext.fmha(q, k, v, return_lse=True, **options)
    oracle.expect(q, k, v, **options).check(*got)
    gradients = cutlass_ext.fmha_backward(dout, q, k, v, *got, **options)
    oracle.expect_gradients(q, k, v, dout, **options).check(gradients)
