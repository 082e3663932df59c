"""The gradients of `fmha`: against float64, with every feature, padded and packed; what must not reach them; through
autograd, torch.func, checkpoints, torch.compile and CUDA graphs; `fmha_backward` and `merge_attention`."""

import dataclasses
import functools

import pytest
import test_features as padded_cases
import test_varlen as packed_cases
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from oracle import assert_same_bits, attention, expect, expect_gradients, expect_gradients_packed, peer_tolerance
from test_errors import assert_refused
from test_varlen import MIXED, Packed, ends, packed, packing_of
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cutlass_ext
from cutlass_ext.measurement import peak_extra_bytes

NAN, INF = float("nan"), float("inf")
COMPILE_TIMEOUT = pytest.mark.timeout(180)


def of_out(target, q, v):
    """A gradient of the output, and one of lse."""
    dout = target.randn(*q.shape[:-1], v.shape[-1])
    return dout, target.vector(*q.shape[:-3], q.shape[-2], q.shape[-3])


def check(target, q, k, v, *, small=False, lse=True, **options):
    dout, dlse = of_out(target, q, v)
    dlse = dlse if lse else None
    how = {name: options.pop(name) for name in ("num_splits", "deterministic") if name in options}
    got = target.gradients(q, k, v, dout, dlse, **options, **how)
    assert all(t.is_contiguous() for t in got)
    expect_gradients(q, k, v, dout, dlse, **options).check(got, small=small, what=str(options))


def check_packed(target, batch, *, small=True, lse=True, deterministic=False, **options):
    dout, dlse = of_out(target, batch.q, batch.v)
    dlse = dlse if lse else None
    got = target.gradients(*batch, dout, dlse, **batch.packing, **options, deterministic=deterministic)
    assert all(t.is_contiguous() for t in got)
    expect_gradients_packed(*batch, dout, dlse, **batch.packing, **options).check(got, small=small, what=str(options))


# ------------------------------------------------------------------------------------------------ every feature
FEW = {"window of one key", "lengths"}  # features with which dS is 0, or nearly, in some sequence: one of one key


def check_feature(target, feature):
    tensors, options = padded_cases.build(target, padded_cases.PLAIN | padded_cases.FEATURES[feature])
    check(target, *tensors, small=feature in FEW, **options)


def check_packed_feature(target, feature):
    batch, options = packed_cases.build(target, packed_cases.PLAIN | packed_cases.FEATURES[feature])
    check_packed(target, batch, **options)


@pytest.mark.parametrize("feature", padded_cases.FEATURES)
def test_feature(target, feature):
    check_feature(target, feature)


@pytest.mark.parametrize("feature", packed_cases.FEATURES)
def test_packed_feature(target, feature):
    check_packed_feature(target, feature)


@pytest.mark.parametrize("feature", padded_cases.FEATURES)
def test_feature_torch_16_bit(target_16_bit, feature):
    check_feature(target_16_bit, feature)


@pytest.mark.parametrize("feature", padded_cases.FEATURES)
def test_torch_backend_on_cuda(gpu, feature):
    check_feature(dataclasses.replace(gpu, backend="torch"), feature)


@pytest.mark.parametrize("feature", packed_cases.FEATURES)
def test_packed_torch_backend_on_cuda(gpu, feature):
    """There sequences are padded, several at a time: lengths are not read."""
    check_packed_feature(dataclasses.replace(gpu, backend="torch"), feature)


@settings(max_examples=40)
@given(case=padded_cases.cases())
def test_any_case(target, case):
    tensors, options = padded_cases.build(target, case)
    check(target, *tensors, small=True, num_splits=case["num_splits"], **options)


@settings(max_examples=30)
@given(case=packed_cases.cases())
def test_any_packed_case(target, case):
    batch, options = packed_cases.build(target, case)
    check_packed(target, batch, **options)


# ------------------------------------------------------------------------------------------------ sizes
@pytest.mark.parametrize("d_max", range(32, 257, 32))
def test_head_dim(target, d_max):
    for d in range(d_max - 24, d_max + 1, 8):
        check(target, *target.qkv(2, 70, 2, d, n_kv=90), causal=True, small=True)
    d = target.head_dim(d_max - 28)
    check(target, *target.qkv(1, 40, 4, d, n_kv=70, heads_kv=2), lse=False, small=True)


@pytest.mark.parametrize("d,d_v", [(192, 128), (64, 128), (128, 64), (8, 256), (256, 8), (96, 40)])
def test_d_and_d_v_differ(target, d, d_v):
    check(target, *target.qkv(2, 70, 4, d, n_kv=130, heads_kv=2, d_v=d_v), causal=True, start_pos="end", small=True)


EDGES = [1, 63, 64, 65, 127, 128, 129, 197]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("n_q", EDGES)
def test_lengths_around_tile_edges(target, n_q, causal):
    for n_kv in EDGES:
        check(target, *target.qkv(1, n_q, 2, 64, n_kv=n_kv, heads_kv=1), causal=causal, start_pos="end", small=True)


@pytest.mark.parametrize("group", [1, 2, 4, 5, 8, 32])
def test_query_heads_of_a_key_head(target, group):
    check(target, *target.qkv(1, 80, 2 * group, 64, n_kv=100, heads_kv=2), causal=True, small=True)


@pytest.mark.parametrize("offset", [-300.0, 300.0])
@pytest.mark.parametrize("n_q,d", [(40, 64), *((600, d) for d in (64, 96, 128, 192, 256))])
def test_scores_far_from_zero(target, n_q, d, offset):
    """Past the last key of a tile scores would be 0, whose weight beside those of -150 is more than a float holds."""
    q, k, v = target.qkv(1, n_q, 2, d, n_kv=75)
    q[..., 0], k[..., 0] = offset, 8.0
    check(target, q, k, v, small=True, softmax_scale=1 / 8 if d == 64 else 1 / 16)  # which no score is rounded by


@pytest.mark.parametrize("offset", [-300.0, 300.0])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_scores_far_from_zero_beside_sums_of_dq(mma_sync, d, offset):
    """The same, where what a key past the last would give is multiplied by zeros: three tiles, the last not whole."""
    q, k, v = mma_sync.qkv(1, 300, 2, d, n_kv=300)
    q[..., 0], k[..., 0] = offset, 8.0
    for options in ({}, {"causal": True}):
        check(mma_sync, q, k, v, small=True, softmax_scale=1 / 8 if d == 64 else 1 / 16, **options)


# n_kv, d, d_v: two CTAs share a tile of 128 keys, of which the last has one to 128.
SHARED_TILES = [(1, 192, 192), (64, 192, 128), (65, 160, 160), (128, 136, 128), (200, 192, 64), (321, 184, 192)]


@pytest.mark.parametrize("options", [{}, {"causal": True, "start_pos": "end"}, {"window": (90, 20)}], ids=str)
@pytest.mark.parametrize("shape", SHARED_TILES, ids=str)
def test_tiles_of_two_ctas(target, shape, options):
    n_kv, d, d_v = shape
    tensors = target.qkv(2, 530, 4, d, n_kv=n_kv, heads_kv=2, d_v=d_v)
    check(target, *tensors, small=True, sink=target.vector(4), **options)
    lengths = {"seqused_k": target.int32([n_kv // 2, n_kv]), "leftpad_k": target.int32([n_kv // 3, n_kv // 5])}
    check(target, *tensors, small=True, **options, **lengths)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0), (2, 0, 0)], ids=str)
def test_sizes_of_zero(target, shape, sink):
    batch, n_q, n_kv = shape
    options = {"sink": target.vector(4)} if sink else {}
    q, k, v = target.qkv(batch, n_q, 4, 32, n_kv=n_kv, heads_kv=2, d_v=16)
    dout, dlse = of_out(target, q, v)
    got = target.gradients(q, k, v, dout, dlse, **options)
    assert [t.shape for t in got[:3]] == [t.shape for t in (q, k, v)]
    assert not any(t.any() for t in got[:3])
    if sink:  # of rows that see no key lse is the sink
        torch.testing.assert_close(got[3], dlse.sum((0, 2)))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("where", packed_cases.ZEROS)
def test_packed_lengths_of_zero(target, where, sink):
    batch = packed(target, *packed_cases.ZEROS[where], d_v=24)
    options = {"sink": target.vector(4)} if sink else {}
    for causal in (False, True):
        check_packed(target, batch, causal=causal, start_pos="end", **options)


# ------------------------------------------------------------------------------------------------ strides
def test_parts_of_one_buffer(target):
    """q, k and v a token apart in one leaf, whose gradient has the shape of the whole."""
    for shape, parts in (((2, 70, 3, 4, 64), 2), ((2, 3, 70, 4, 64), 1), ((3, 2, 70, 4, 64), 0)):
        qkv = target.randn(*shape).requires_grad_()
        tensors = qkv.unbind(parts)
        dout, _ = of_out(target, tensors[0], tensors[2])
        (got,) = torch.autograd.grad(target.fmha(*tensors, causal=True)[0], qkv, dout)
        assert got.shape == qkv.shape
        expect_gradients(*(t.detach() for t in tensors), dout, causal=True).check(got.unbind(parts))


def test_heads_first(target):
    """[batch, heads, rows, head_dim], as PyTorch has it, and a dout that lies so too."""
    q, k, v, dout = (target.randn(2, 4, 70, 64).transpose(1, 2) for _ in "qkvo")
    got = target.gradients(q, k, v, dout, causal=True)
    expect_gradients(q, k, v, dout, causal=True).check(got)


def test_expanded_inputs(target):
    """One KV head, and one sequence's keys, for all: their gradients are sums."""
    q, k, v = target.randn(3, 70, 4, 64), target.randn(1, 90, 1, 64), target.randn(1, 90, 1, 64)
    wide = [t.expand(3, 90, 4, 64) for t in (k, v)]
    dout, _ = of_out(target, q, v)
    got = target.gradients(q, *wide, dout)
    expect_gradients(q, *wide, dout).check(got)
    leaves = [t.detach().requires_grad_() for t in (k, v)]
    out = target.fmha(q, *(t.expand(3, 90, 4, 64) for t in leaves))[0]
    for sums, parts in zip(torch.autograd.grad(out, leaves, dout), got[1:], strict=True):
        torch.testing.assert_close(sums, parts.sum((0, 2), keepdim=True), **peer_tolerance(target.dtype))


@pytest.mark.parametrize("of", ["a sum", "one value", "every other row", "transposed", "unaligned"])
def test_dout_of_any_stride(target, of):
    q, k, v = target.qkv(2, 70, 4, 64)
    dout = {
        "a sum": lambda: torch.ones((), dtype=q.dtype, device=q.device).expand(q.shape),
        "one value": lambda: target.randn(2, 70, 4, 1).expand(q.shape),
        "every other row": lambda: target.randn(2, 140, 4, 64)[:, ::2],
        "transposed": lambda: target.randn(2, 70, 64, 4).transpose(2, 3),
        "unaligned": lambda: target.randn(2, 70, 4, 65)[..., 1:],
    }[of]()
    assert_same_bits(target.gradients(q, k, v, dout), target.gradients(q, k, v, dout.contiguous()))


# ------------------------------------------------------------------------------------------------ what stays outside
@pytest.mark.parametrize("plant", [NAN, INF])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_keys_that_do_not_count(target, d, causal, plant):
    """Past seqused_k and before leftpad_k: gradients of 0 there, and the same bits elsewhere. The last sequence has no
    keys, so that no row of q or dout counts either."""
    lengths, leftpads = [100, 37, 64, 0], [3, 0, 36, 0]
    q, k, v = target.qkv(4, 70, 4, d, n_kv=130, heads_kv=2)
    dout, dlse = of_out(target, q, v)
    options = {"seqused_k": target.int32(lengths), "leftpad_k": target.int32(leftpads), "causal": causal,
               "start_pos": "end"}  # fmt: skip
    want = target.gradients(q, k, v, dout, dlse, **options)
    planted = [t.clone() for t in (q, k, v, dout)]
    for b, (length, leftpad) in enumerate(zip(lengths, leftpads, strict=True)):
        for t in planted[1:3]:
            t[b, length:], t[b, :leftpad] = plant, plant
        for t in want[1:3]:
            assert not t[b, length:].any() and not t[b, :leftpad].any()
    planted[0][3] = planted[3][3] = plant
    assert not want[0][3].any()
    assert_same_bits(target.gradients(*planted, dlse, **options), want)


EMPTY_ROWS = [
    {"causal": True, "start_pos": -40},
    {"causal": True, "start_pos": -1000},
    {"causal": True, "start_pos": "end"},
    {"window": (10, -1), "start_pos": 90},
    {"window": (3, 3), "start_pos": 95},
    {"leftpad_k": [100, 50]},
    {"seqused_k": [0, 100], "causal": True},
]


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("options", EMPTY_ROWS, ids=str)
def test_rows_that_see_nothing(target, options, sink):
    """NaN in their q, dout and out reaches nothing, and their dq is 0."""
    q, k, v = target.qkv(2, 120, 4, 32, n_kv=100, heads_kv=2)
    options = {name: target.int32(value) if isinstance(value, list) else value for name, value in options.items()}
    if sink:
        options["sink"] = target.vector(4)
    dout, dlse = of_out(target, q, v)
    got = target.gradients(q, k, v, dout, dlse, **options)
    expect_gradients(q, k, v, dout, dlse, **options).check(got, small=True)
    out, lse = target.fmha(q, k, v, **options)
    empty = (lse == (options["sink"][None, :, None] if sink else -INF)).transpose(1, 2) & ~out.any(-1)
    assert empty.any() and not got[0][empty].any()
    for plant in (NAN, INF):
        spoilt = [t.clone() for t in (q, dout, out)]
        for t in spoilt:
            t[empty] = plant
        call = functools.partial(cutlass_ext.fmha_backward, backend=target.backend, dlse=dlse, **options)
        assert_same_bits(call(spoilt[1], spoilt[0], k, v, spoilt[2], lse), call(dout, q, k, v, out, lse))


@pytest.mark.parametrize("options", [{"causal": True, "start_pos": -2}, {"window": (3, 3), "start_pos": 90}], ids=str)
@pytest.mark.parametrize("shape", [(2, 120, 4, 32), (96, 49, 6, 32), (45, 197, 12, 64), (3, 150, 4, 128)], ids=str)
def test_rows_that_see_none_of_these_keys(target, shape, options):
    """The lse of more keys says nothing of that: still, NaN in their q, dout and out reaches nothing."""
    batch, n, heads, d = shape
    q, k, v = target.qkv(batch, n, heads, d, n_kv=min(n, 100))
    dout, _ = of_out(target, q, v)
    out, lse = target.fmha(q, k, v, **options)
    empty = lse.isneginf()
    lse = torch.where(empty, torch.ones_like(lse), lse)
    call = functools.partial(cutlass_ext.fmha_backward, backend=target.backend, deterministic=True, **options)
    want = call(dout, q, k, v, out, lse)
    for t in (q, dout, out):
        t[empty.transpose(1, 2)] = NAN
    got = call(dout, q, k, v, out, lse)
    assert empty.any() and not got[0][empty.transpose(1, 2)].any()
    assert_same_bits(got, want)


@pytest.mark.parametrize("plant", [NAN, INF])
def test_rows_in_no_sequence(target, plant):
    """Of packed tensors, before the first and past the last (flash-attention #2324): their gradients are 0, and what
    they hold reaches no others."""
    batch = packed(target, [70, 0, 33], [40, 130, 33])
    dout, dlse = of_out(target, batch.q, batch.v)
    want = target.gradients(*batch, dout, dlse, **batch.packing, causal=True)
    before, behind = 5, 50

    def around(t, fill=plant):
        return F.pad(t, (0, 0) * (t.dim() - 1) + (before, behind), value=fill)

    packing = batch.packing | {n: batch.packing[n] + before for n in ("cu_seqlens_q", "cu_seqlens_k")}
    wide_dlse = around(dlse.T).T.contiguous()
    got = target.gradients(*(around(t) for t in (*batch, dout)), wide_dlse, **packing, causal=True)
    assert_same_bits(got, [around(t, 0.0) for t in want])


def test_rows_where_no_sequence_has_any(target):
    q, k, v = target.randn(5, 4, 64), target.randn(70, 2, 64), target.randn(70, 2, 64)
    dout, dlse = of_out(target, q, v)
    for ends_q, ends_k in (([0, 0], [0, 70]), ([0], [0])):
        packing = packing_of(target.int32(ends_q), target.int32(ends_k), 0, 70)
        assert not any(t.any() for t in target.gradients(q, k, v, dout, dlse, **packing))


def test_a_sequence_without_rows(target):
    """Its keys have gradients of 0 (flash-attention #2421)."""
    batch = packed(target, [0, 70, 0], [64, 70, 200], d=128)
    dout, dlse = of_out(target, batch.q, batch.v)
    got = target.gradients(*batch, dout, dlse, **batch.packing)
    for t in got[1:]:
        assert not t[:64].any() and not t[134:].any() and t[64:134].any()


def test_more_rows_than_keys(target):
    """flash-attention #443: three keys, one a sequence, under 256 rows."""
    packing = packing_of(target.int32([0, 76, 110, 256]), target.int32([0, 1, 2, 3]), 256, 3)
    q, k, v = 3 * target.randn(256, 1, 32), 3 * target.randn(3, 1, 32), 3 * target.randn(3, 1, 32)
    for start_pos in (0, "end"):
        check_packed(target, Packed(q, k, v, packing), causal=True, start_pos=start_pos)


@pytest.mark.parametrize("n,d", [(1, 16), (1024, 128)])
def test_large_inputs(target, n, d):
    """flash-attention #334 and #1052: all inputs times 3."""
    q, k, v = (3 * t for t in target.qkv(1, n, 1, d))
    for causal in (False, True):
        check(target, q, k, v, causal=causal, lse=False, small=True)


@pytest.mark.parametrize("d", [64, 128])
def test_65536_keys(kernels, d):
    """`small`: P comes from an lse of 11, which rounds it by 7e-7 in float32; the reference's softmax does not."""
    check(kernels, *kernels.qkv(1, 300, 2, d, n_kv=1 << 16), small=True)


@pytest.mark.parametrize("plant", [NAN, INF])
@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["q", "k", "v", "dout"])
def test_other_heads_and_sequences(target, which, plant):
    q, k, v = target.qkv(3, 70, 4, 32, n_kv=90, heads_kv=2)
    dout, _ = of_out(target, q, v)
    want = target.gradients(q, k, v, dout)
    planted = [t.clone() for t in (q, k, v, dout)]
    planted[which][1, :, 1] = plant
    clean_q = torch.ones(3, 4, dtype=torch.bool, device=target.device)
    clean_q[1, [1] if which in (0, 3) else [2, 3]] = False
    clean_k = torch.ones(3, 2, dtype=torch.bool, device=target.device)
    clean_k[1, 0 if which in (0, 3) else 1] = False
    got = target.gradients(*planted)
    for a, b, clean in zip(got, want, (clean_q, clean_k, clean_k), strict=True):
        assert_same_bits([a.transpose(1, 2)[clean]], [b.transpose(1, 2)[clean]])


# ------------------------------------------------------------------------------------------------ the same bits
@pytest.mark.parametrize("shape", [(2, 300, 4, 2, 64), (1, 513, 6, 1, 128), (4, 70, 2, 2, 192)], ids=str)
def test_deterministic(target, shape):
    batch, n, heads, heads_kv, d = shape
    q, k, v = target.qkv(batch, n, heads, d, heads_kv=heads_kv)
    dout, dlse = of_out(target, q, v)
    options = {"causal": True, "deterministic": True, "sink": target.vector(heads)}
    want = target.gradients(q, k, v, dout, dlse, **options)
    for _ in range(20 if target.cuda else 3):
        assert_same_bits(target.gradients(q, k, v, dout, dlse, **options), want)


def test_keys_have_the_same_bits_anyway(kernels):
    q, k, v = kernels.qkv(2, 700, 4, 64, heads_kv=2)
    dout, dlse = of_out(kernels, q, v)
    want = kernels.gradients(q, k, v, dout, dlse)
    for _ in range(20):
        assert_same_bits(kernels.gradients(q, k, v, dout, dlse)[1:], want[1:])


# ------------------------------------------------------------------------------------------------ heads of few rows
# batch, n_q, n_kv, heads, heads_kv, d: heads that one CTA of Hopper's has all of, with one tile of keys and with
# several, as many rows as there is room for, those of several heads together; above d 64 a cluster of up to three.
WHOLE_HEADS = {
    "one tile": (3, 100, 128, 5, 5, 64),
    "512 rows": (12, 512, 512, 11, 11, 64),
    "197 rows, not of whole tiles": (11, 197, 197, 12, 12, 64),
    "rows of eight heads": (16, 64, 300, 64, 8, 64),
    "rows of three heads": (44, 100, 130, 9, 3, 40),
    "more keys than rows": (33, 70, 1000, 4, 4, 64),
    "more rows than keys": (44, 500, 65, 3, 3, 24),
    "several heads a CTA": (45, 197, 197, 12, 12, 64),
    "several heads of few rows a CTA": (90, 40, 100, 8, 4, 40),
    "wide": (3, 300, 300, 12, 12, 128),
    "wide, rows of two heads": (33, 65, 150, 8, 4, 104),
    "wide, more keys than rows": (9, 70, 380, 4, 4, 72),
    "wide, more rows than keys": (33, 300, 65, 4, 4, 128),
    "wide, a tile of keys": (33, 200, 128, 5, 5, 128),
    "wide, two heads in turn": (60, 200, 250, 4, 2, 120),
    "a panel and a half": (11, 260, 197, 12, 12, 80),
    "a panel and a half, several heads a CTA": (45, 130, 197, 12, 12, 96),
}


def whole_heads(target, shape):
    batch, n_q, n_kv, heads, heads_kv, d = WHOLE_HEADS[shape]
    return target.qkv(batch, n_q, heads, d, n_kv=n_kv, heads_kv=heads_kv)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "start_pos": "end", "window": (100, 0)},
        {"start_pos": 30, "window": (5, 90)},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", WHOLE_HEADS)
def test_whole_heads(kernels, shape, options):
    """Statistics of rows are made by a launch for sinks and gradients of lse, else by CTAs beside their work."""
    tensors = whole_heads(kernels, shape)
    check(kernels, *tensors, small=True, sink=kernels.vector(tensors[0].shape[2]), **options)
    check(kernels, *tensors, small=True, lse=False, **options)
    if kernels.family == "sm90":
        with torch.no_grad():
            out, lse = kernels.fmha(*tensors, **options)
        call = torch.randn_like(out), *tensors, out, lse
        explanation = cutlass_ext.explain(cutlass_ext.fmha_backward, *call, backend=kernels.backend, **options)
        assert explanation.kernel == "head_gradients", explanation


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [80, 128])
def test_heads_of_four_tiles_of_keys_with_fixed_bits(kernels, d, causal):
    q, k, v = kernels.qkv(3, 450, 7, d, n_kv=500)
    dout, dlse = of_out(kernels, q, v)
    got = kernels.gradients(q, k, v, dout, dlse, causal=causal, deterministic=True)
    expect_gradients(q, k, v, dout, dlse, causal=causal).check(got, small=True)


def test_a_sequence_longer_than_its_caller_says(kernels):
    """What it gets is not said, but the call ends, and the others get what they have to."""
    batch = packed(kernels, [100, 90, 80], [100, 300, 128], (4, 4), 128)
    dout, dlse = of_out(kernels, batch.q, batch.v)
    packing = batch.packing | {"max_seqlen_k": 128}
    dq, dk, dv = kernels.gradients(*batch, dout, dlse, **packing, causal=True)
    want = kernels.gradients(*batch, dout, dlse, **batch.packing, causal=True)
    for got, of, middle in (
        (dq, want[0], slice(100, 190)),
        (dk, want[1], slice(100, 400)),
        (dv, want[2], slice(100, 400)),
    ):
        outside = torch.ones(len(got), dtype=torch.bool, device=got.device)
        outside[middle] = False
        torch.testing.assert_close(got[outside], of[outside], **peer_tolerance(kernels.dtype))


@pytest.mark.parametrize("longer", [20, 10])
def test_heads_with_more_keys_than_their_caller_says(kernels, longer):
    """The same of heads that a CTA has whole, of all sequences or of half: a head has tiles for 512 keys."""
    rows, keys = [300] * 20, [600] * longer + [400] * (20 - longer)
    batch = packed(kernels, rows, keys, (12, 12), 64)
    dout, dlse = of_out(kernels, batch.q, batch.v)
    got = kernels.gradients(*batch, dout, dlse, **batch.packing | {"max_seqlen_k": 512})
    want = kernels.gradients(*batch, dout, dlse, **batch.packing)
    for t, of, first in zip(got, want, (sum(rows[:longer]), sum(keys[:longer]), sum(keys[:longer])), strict=True):
        torch.testing.assert_close(t[first:], of[first:], **peer_tolerance(kernels.dtype))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads,longest,d", [((12, 12), 512, 64), ((8, 2), 128, 64), ((12, 6), 150, 128)])
def test_whole_heads_of_packed_sequences(kernels, heads, longest, d, causal):
    rows = [longest, 0, 1, longest - 1, 65, 64, 0, 7, longest] * 9
    keys = [longest + 130, 33, 0, longest - 1, 64, 129, 0, 300, 1] * 9
    for lse in (True, False):
        check_packed(kernels, packed(kernels, rows, keys, heads, d), lse=lse, causal=causal, start_pos="end")


@pytest.mark.parametrize("d", [64, 80, 128])
def test_lengths_of_whole_heads(kernels, d):
    lengths = {"seqused_k": kernels.int32([300, 0, 129, 128] * 9), "leftpad_k": kernels.int32([5, 0, 100, 128] * 9)}
    for lse in (True, False):
        tensors = kernels.qkv(36, 200, 4, d, n_kv=300)
        check(kernels, *tensors, lse=lse, causal=True, start_pos="end", small=True, **lengths)


@pytest.mark.parametrize("shape", WHOLE_HEADS)
def test_whole_heads_have_the_same_bits(hopper, shape):
    """In either mode: each sum has one CTA, in a fixed order."""
    tensors = whole_heads(hopper, shape)
    dout, dlse = of_out(hopper, tensors[0], tensors[2])
    want = hopper.gradients(*tensors, dout, dlse, causal=True)
    want_of_out = hopper.gradients(*tensors, dout, torch.zeros_like(dlse), causal=True)
    for deterministic in (True, False) * 10:
        options = {"causal": True, "deterministic": deterministic}
        assert_same_bits(hopper.gradients(*tensors, dout, dlse, **options), want)
        assert_same_bits(hopper.gradients(*tensors, dout, None, **options), want_of_out)


# ------------------------------------------------------------------------------------------------ many tiles
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "start_pos": "end", "window": (300, 0)}], ids=str
)
@pytest.mark.parametrize("shape", [(7, 520, 576, 11, 11, 64), (5, 577, 575, 30, 15, 40), (4, 530, 1100, 11, 11, 64)])
def test_tiles_of_three_warpgroups(kernels, shape, options):
    batch, n_q, n_kv, heads, heads_kv, d = shape
    tensors = kernels.qkv(batch, n_q, heads, d, n_kv=n_kv, heads_kv=heads_kv)
    check(kernels, *tensors, small=True, sink=kernels.vector(heads), **options)
    has_132 = torch.cuda.is_available() and torch.cuda.get_device_properties(0).multi_processor_count == 132
    if kernels.family == "sm90" and has_132:
        with torch.no_grad():
            out, lse = kernels.fmha(*tensors, **options)
        call = torch.randn_like(out), *tensors, out, lse
        explanation = cutlass_ext.explain(cutlass_ext.fmha_backward, *call, backend=kernels.backend, **options)
        assert "64 rows and 192 keys" in str(explanation)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_tiles_of_three_warpgroups(kernels, causal):
    rows, keys = [600, 0, 530, 1, 700, 64] * 6, [576, 100, 0, 193, 385, 1] * 6
    check_packed(kernels, packed(kernels, rows, keys, (8, 8), 64), causal=causal, start_pos="end")


# ------------------------------------------------------------------------------------- sums of dQ, added by mma.sync
# batch, n_q, n_kv, heads, heads_kv, d, d_v: tiles of 32 and 64 rows, heads in one pass up to 128 columns and in two.
ADDED = {
    "64": (2, 700, 700, 4, 4, 64, 64),
    "64, two heads a KV head": (3, 333, 777, 4, 2, 64, 64),
    "24": (2, 129, 130, 3, 3, 24, 24),
    "128": (2, 700, 700, 4, 4, 128, 128),
    "128, few rows": (4, 65, 300, 4, 4, 128, 128),
    "72, two heads a KV head": (3, 260, 520, 4, 2, 72, 72),
    "128 and 64": (2, 200, 500, 4, 4, 128, 64),
    "192": (3, 300, 411, 4, 4, 192, 192),
    "136 and 128": (2, 257, 200, 4, 4, 136, 128),
    "256": (2, 520, 300, 4, 4, 256, 256),
    "200, two heads a KV head": (8, 260, 300, 4, 2, 200, 200),
}


def added(target, shape):
    batch, n_q, n_kv, heads, heads_kv, d, d_v = ADDED[shape]
    return target.qkv(batch, n_q, heads, d, n_kv=n_kv, heads_kv=heads_kv, d_v=d_v)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "start_pos": "end"},
        {"causal": True, "start_pos": -40, "window": (300, 0)},
        {"start_pos": 100, "window": (30, 200)},
        {"causal": True, "softcap": 20.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", ADDED)
def test_sums_of_dq_by_mma_sync(mma_sync, shape, options):
    check(mma_sync, *added(mma_sync, shape), small=True, **options)


@pytest.mark.parametrize("shape", ADDED)
def test_dk_and_dv_beside_sums_by_mma_sync_have_the_same_bits(mma_sync, shape):
    q, k, v = added(mma_sync, shape)
    dout, dlse = of_out(mma_sync, q, v)
    want = mma_sync.gradients(q, k, v, dout, dlse, causal=True)
    for _ in range(10):
        got = mma_sync.gradients(q, k, v, dout, dlse, causal=True)
        assert_same_bits(got[1:], want[1:])
        torch.testing.assert_close(got[0], want[0], rtol=2**-7, atol=1e-3)


def test_who_adds_to_sums_by_mma_sync(mma_sync):
    if torch.cuda.get_device_properties(0).multi_processor_count != 132:
        pytest.skip("of a GPU of 132 multiprocessors")
    for shape in ADDED:
        q, k, v = added(mma_sync, shape)
        out, lse = mma_sync.fmha(q, k, v, return_lse=True)[:2]
        for deterministic, kernel in ((False, "all_gradients"), (True, "key_gradients")):
            explanation = cutlass_ext.explain(
                cutlass_ext.fmha_backward, out, q, k, v, out, lse, backend="sm80", deterministic=deterministic
            )
            assert explanation.kernel == kernel, (shape, explanation)


@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_packed_sums_by_mma_sync(mma_sync, d):
    """Of the third sequence the first 111 rows see no key, of the fourth all do, of the fifth the last one alone."""
    batch = packed(mma_sync, [700, 0, 311, 257, 130, 5], [520, 130, 200, 300, 1, 900], (8, 8), d)
    check_packed(mma_sync, batch, causal=True, start_pos="end")
    check_packed(mma_sync, batch)


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("hidden", [1, 63, 64, 511])
def test_rows_before_the_first_that_sees_a_key(mma_sync, hidden, d):
    """Tiles of sums begin at multiples of 64 rows: some of these are looked at, whatever they hold."""
    q, k, v = mma_sync.qkv(2, 900, 4, d, n_kv=400, heads_kv=4)
    dout, _ = of_out(mma_sync, q, v)
    options = {"causal": True, "start_pos": -hidden}
    want = mma_sync.gradients(q, k, v, dout, **options)
    planted = [q.clone(), dout.clone()]
    for t in planted:
        t[:, :hidden] = NAN
    got = mma_sync.gradients(planted[0], k, v, planted[1], **options)
    assert_same_bits(got[1:], want[1:])
    assert_same_bits([got[0][:, :hidden]], [torch.zeros_like(q[:, :hidden])])
    torch.testing.assert_close(got[0], want[0], rtol=2**-7, atol=1e-3)


# batch, n_q, n_kv, heads, heads_kv, d: calls whose tiles of keys add to dQ in their order where bits are to be fixed.
IN_ORDER = {
    "sections": (12, 600, 600, 16, 16, 64),
    "three warpgroups": (7, 520, 1150, 22, 22, 64),
    "wide": (9, 577, 700, 16, 16, 128),
    "a panel and a half": (10, 530, 640, 15, 15, 96),
    "rows of two heads": (9, 530, 650, 32, 16, 64),
    "wide, rows of four heads": (9, 300, 650, 32, 8, 128),
    "rows of seven heads, by three and four": (16, 1000, 1000, 7, 1, 128),
}


def in_order(target, shape):
    batch, n_q, n_kv, heads, heads_kv, d = IN_ORDER[shape]
    return target.qkv(batch, n_q, heads, d, n_kv=n_kv, heads_kv=heads_kv)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "start_pos": "end"},
        {"causal": True, "start_pos": -40, "window": (300, 0)},
        {"start_pos": 100, "window": (30, 200)},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", IN_ORDER)
def test_tiles_that_add_in_order(hopper, shape, options):
    q, k, v = in_order(hopper, shape)
    options = options | {"deterministic": True}
    check(hopper, q, k, v, small=True, **options)
    dout, dlse = of_out(hopper, q, v)
    want = hopper.gradients(q, k, v, dout, dlse, **options)
    for _ in range(20):
        assert_same_bits(hopper.gradients(q, k, v, dout, dlse, **options), want)
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        out, lse = hopper.fmha(q, k, v, return_lse=True)[:2]
        explanation = cutlass_ext.explain(cutlass_ext.fmha_backward, dout, q, k, v, out, lse, **options)
        assert explanation.kernel == "all_gradients", explanation


@pytest.mark.parametrize("d", [64, 80, 128])
def test_lengths_of_tiles_that_add_in_order(hopper, d):
    lengths = {"seqused_k": hopper.int32([700, 0, 129, 128] * 3), "leftpad_k": hopper.int32([5, 0, 100, 128] * 3)}
    for options in ({"causal": True, "start_pos": "end"}, {}):
        check(hopper, *hopper.qkv(12, 600, 12, d, n_kv=700), small=True, deterministic=True, **lengths, **options)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads,d", [((12, 12), 64), ((8, 4), 128)])
def test_packed_tiles_that_add_in_order(hopper, heads, d, causal):
    rows, keys = [600, 0, 530, 1, 700, 64] * 4, [700, 100, 0, 193, 585, 1] * 4
    batch = packed(hopper, rows, keys, heads, d)
    check_packed(hopper, batch, causal=causal, start_pos="end", deterministic=True)
    # More keys than the caller says: what these get is not said, but the call ends.
    dout, dlse = of_out(hopper, batch.q, batch.v)
    hopper.gradients(*batch, dout, dlse, **batch.packing | {"max_seqlen_k": 640}, causal=causal, deterministic=True)


def shown(target, *shape):
    return torch.rand(*shape, device=target.device) < 0.6


def shown_tiles(target, heads, n_q, n_kv):
    tiles = shown(target, 1, heads, -(-n_q // 64), -(-n_kv // 64))
    return tiles.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :n_q, :n_kv]


def shown_keys(target, batch, n_kv):
    lengths = target.int32([n_kv - 50 * b for b in range(batch)])
    return (torch.arange(n_kv, device=target.device) < lengths[:, None])[:, None, None]


PAIRS_IN_ORDER = {
    "a bias": lambda target, batch, *sizes: {"bias": target.randn(1, *sizes)},
    "a bias of each sequence": lambda target, *sizes: {"bias": target.randn(*sizes)},
    "keys hidden": lambda target, batch, heads, n_q, n_kv: {"mask": shown_keys(target, batch, n_kv)},
    "tiles hidden": lambda target, batch, *sizes: {"mask": shown_tiles(target, *sizes)},
    "pairs hidden": lambda target, batch, heads, *sizes: {"mask": shown(target, batch, 1, *sizes)},
    "a bias, tiles hidden": lambda target, batch, *sizes: {
        "bias": target.randn(1, *sizes), "mask": shown_tiles(target, *sizes),
    },
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"causal": True, "start_pos": "end"}, {"window": (200, 90)}], ids=str)
@pytest.mark.parametrize("kind", PAIRS_IN_ORDER)
@pytest.mark.parametrize("shape", ["sections", "wide", "a panel and a half", "wide, rows of four heads"])
def test_pairs_of_tiles_that_add_in_order(hopper, shape, kind, options):
    batch, n_q, n_kv, heads, *_ = IN_ORDER[shape]
    q, k, v = in_order(hopper, shape)
    options = options | PAIRS_IN_ORDER[kind](hopper, batch, heads, n_q, n_kv)
    dout, dlse = of_out(hopper, q, v)
    want = hopper.gradients(q, k, v, dout, dlse, **options, deterministic=True)
    expect_gradients(q, k, v, dout, dlse, **options).check(want, small=True)
    for _ in range(10):
        assert_same_bits(hopper.gradients(q, k, v, dout, dlse, **options, deterministic=True), want)


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1e3])
@pytest.mark.parametrize("d", [64, 128])
def test_factors_of_scores(kernels, d, factor):
    """lse is divided by the factor where products bring it to the scores."""
    q, k, v = kernels.qkv(2, 600, 3, d)
    check(kernels, q, k / factor if factor > 1 else k, v, small=True, causal=True, softmax_scale=factor)


@pytest.mark.parametrize(
    "batch,n,heads,d",
    [(86, 513, 5, 128), (52, 513, 5, 256), (86, 513, 5, 192), (3, 2048, 24, 128), (50, 513, 5, 128)],
)
def test_mirrored_tiles(kernels, batch, n, heads, d):
    """A CTA takes two tiles of keys, and rows pass by for all heads, where a group of these has more than L2 holds; in
    the last but one of these calls for five heads or four of 24, in the last one CTAs share the last 18 twos."""
    check(kernels, *kernels.qkv(batch, n, heads, d, heads_kv=1), causal=True, small=True)


def test_last_keys_first_of_tiles_that_ctas_share(hopper):
    """Whose sums lie by items, of which those of the last sections alone are the scheduler's tiles."""
    options = {"window": (1500, 1500), "deterministic": True}
    q, k, v = hopper.qkv(1, 2048, 36, 64, heads_kv=9)
    check(hopper, q, k, v, small=True, **options)
    check(hopper, *hopper.qkv(2, 3000, 6, 64, heads_kv=2), small=True, causal=True, deterministic=True)
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        out, lse = hopper.fmha(q, k, v, return_lse=True)[:2]
        explanation = cutlass_ext.explain(cutlass_ext.fmha_backward, out, q, k, v, out, lse, **options)
        assert explanation.kernel == "all_gradients", explanation
        assert explanation.splits > 1, explanation


# n_q, n_kv, heads, d, d_v, tiles of keys, CTAs of one: of so many sequences that a last wave has few tiles, which CTAs
# then share: of the heads, of the rows, of both.
LAST_WAVE = {
    "columns that no panel fills": (900, 600, 4, 80, 40, 5, 1),
    "wide": (700, 630, 4, 128, 128, 5, 1),
    "a panel and a half": (800, 640, 3, 96, 72, 5, 1),
    "two CTAs a tile": (700, 520, 4, 192, 128, 5, 2),
    "head_dim 256": (500, 600, 2, 256, 256, 10, 1),
    "one head": (1500, 513, 1, 128, 128, 5, 1),
}


@pytest.mark.parametrize("options", [{}, {"sink": True}, {"causal": True, "start_pos": 2000}], ids=str)
@pytest.mark.parametrize("shape", LAST_WAVE)
def test_last_wave(hopper, shape, options):
    n_q, n_kv, heads, d, d_v, tiles, ctas = LAST_WAVE[shape]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    batch = multiprocessors // ctas // tiles + 1
    tensors = hopper.qkv(batch, n_q, heads, d, n_kv=n_kv, heads_kv=1, d_v=d_v)
    options = options | ({"sink": hopper.vector(heads)} if "sink" in options else {})
    check(hopper, *tensors, small=True, **options)
    if multiprocessors == 132:
        out, lse = hopper.fmha(*tensors, return_lse=True, **options)[:2]
        explanation = cutlass_ext.explain(cutlass_ext.fmha_backward, out, *tensors, out, lse, **options)
        assert f", {batch * tiles - 132 // ctas} of them in " in explanation.reason, explanation


# n_q, n_kv, heads, heads_kv, d, d_v: of so many sequences that tiles of keys come in three waves and more, dQ is made
# of its sums beside them, a wave's heads after the other's.
SECTIONS = {
    "narrow": (520, 1000, 6, 6, 64, 64),
    "narrow, grouped": (600, 1025, 8, 4, 40, 64),
    "wide": (1000, 1100, 6, 6, 128, 128),
    "a panel and a half": (1000, 1100, 6, 6, 96, 96),
    "less than that": (1100, 1030, 8, 4, 72, 80),
    "columns that no panel fills": (1030, 900, 5, 5, 104, 72),
}


@pytest.mark.parametrize("options", [{}, {"causal": True, "start_pos": 480}, {"softmax_scale": 0.3}], ids=str)
@pytest.mark.parametrize("shape", SECTIONS)
def test_dq_beside_tiles(hopper, shape, options):
    n_q, n_kv, heads, heads_kv, d, d_v = SECTIONS[shape]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    batch = 3 * multiprocessors // (heads_kv * (n_kv // 128)) + 1
    tensors = hopper.qkv(batch, n_q, heads, d, n_kv=n_kv, heads_kv=heads_kv, d_v=d_v)
    check(hopper, *tensors, small=True, sink=hopper.vector(heads), **options)


@pytest.mark.parametrize("batch,heads,dim", [(66_000, 1, 0), (1, 66_000, 2)], ids=["sequences", "heads"])
def test_more_than_a_grid_has_in_y_and_z(kernels, batch, heads, dim):
    """As in two calls that have fewer."""
    tensors = kernels.qkv(batch, 3, heads, 8)
    dout, dlse = of_out(kernels, tensors[0], tensors[2])
    whole = kernels.gradients(*tensors, dout, dlse, causal=True)
    halves = [t.tensor_split([40_000], dim) for t in (*tensors, dout)], dlse.tensor_split([40_000], min(dim, 1))
    for part in (0, 1):
        q, k, v, g = (t[part].contiguous() for t in halves[0])
        got = kernels.gradients(q, k, v, g, halves[1][part].contiguous(), causal=True)
        for x, y in zip(whole, got, strict=True):
            torch.testing.assert_close(x.tensor_split([40_000], dim)[part], y)


@pytest.mark.parametrize("batch,n,heads,d", [(9, 1100, 16, 128), (9, 1100, 16, 80), (4, 2048, 8, 192)])
def test_dk_and_dv_beside_dq_have_the_same_bits(hopper, batch, n, heads, d):
    """With more sections than there are places for sums; and where CTAs pass dS to each other."""
    q, k, v = hopper.qkv(batch, n, heads, d)
    dout, _ = of_out(hopper, q, v)
    first, *rest = (hopper.gradients(q, k, v, dout, None) for _ in range(10))
    for got in rest:
        assert_same_bits(got[1:3], first[1:3])
        torch.testing.assert_close(got[0], first[0], rtol=0.02, atol=0.02)


# ------------------------------------------------------------------------------------------------ tiles that CTAs share
# batch, n_q, n_kv, heads, heads_kv, d, d_v: so few tiles of keys, or of rows too, that Hopper's kernels split them: of
# the heads, of the rows or keys that a tile goes through, of both; in parts that differ, and of which some are empty.
FEW_TILES = {
    "heads": (1, 600, 600, 16, 1, 64, 64),
    "heads and tiles": (2, 520, 700, 12, 2, 128, 128),
    "tiles": (1, 900, 1000, 1, 1, 64, 64),
    "tiles of seven heads": (1, 700, 520, 7, 1, 128, 128),
    "wide": (1, 520, 600, 8, 1, 256, 256),
    "wide, few heads": (1, 700, 800, 1, 1, 256, 256),
    "two CTAs a tile": (1, 600, 700, 8, 1, 192, 192),
    "two CTAs a tile, d_v of its own": (2, 700, 600, 6, 2, 192, 128),
    "short, d_v of its own": (1, 300, 400, 6, 2, 192, 128),
    "columns that no panel fills": (1, 450, 500, 8, 2, 72, 40),
}
SPLIT_OPTIONS = [{}, {"causal": True}, {"causal": True, "start_pos": "end", "window": (600, 0)}]


@pytest.mark.parametrize("options", SPLIT_OPTIONS, ids=str)
@pytest.mark.parametrize("shape", FEW_TILES)
def test_few_tiles(target, shape, options):
    batch, n_q, n_kv, heads, heads_kv, d, d_v = FEW_TILES[shape]
    tensors = target.qkv(batch, n_q, heads, d, n_kv=n_kv, heads_kv=heads_kv, d_v=d_v)
    check(target, *tensors, sink=target.vector(heads), **options)
    if target.family == "sm90":
        with torch.no_grad():
            out, lse = target.fmha(*tensors, **options)
        call = torch.randn_like(out), *tensors, out, lse
        explanation = cutlass_ext.explain(cutlass_ext.fmha_backward, *call, backend=target.backend, **options)
        assert explanation.splits > 1, explanation


OF_FEW_TILES = [{"softcap": 20.0}, {"seqused_k": [700, 0, 129], "leftpad_k": [5, 0, 100]}]


def check_few_tiles(target, d, options):
    options = {k: target.int32(x) if isinstance(x, list) else x for k, x in options.items()}
    check(target, *target.qkv(3, 520, 4, d, n_kv=700, heads_kv=1), causal=True, start_pos="end", **options)


@pytest.mark.parametrize("options", OF_FEW_TILES, ids=str)
def test_few_tiles_of(target, options):
    check_few_tiles(target, 256, options)


@pytest.mark.parametrize("options", OF_FEW_TILES, ids=str)
@pytest.mark.parametrize("d", [32, 64, 128])
def test_few_tiles_of_kernels(kernels, d, options):
    check_few_tiles(kernels, d, options)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_few_packed_tiles(target, d, causal):
    batch = packed(target, [700, 0, 33, 257, 1], [520, 130, 0, 300, 64], (8, 1), d)
    check_packed(target, batch, causal=causal, start_pos="end")


@pytest.mark.parametrize("shape", FEW_TILES)
def test_few_tiles_have_the_same_bits(kernels, shape):
    batch, n_q, n_kv, heads, heads_kv, d, d_v = FEW_TILES[shape]
    q, k, v = kernels.qkv(batch, n_q, heads, d, n_kv=n_kv, heads_kv=heads_kv, d_v=d_v)
    dout, dlse = of_out(kernels, q, v)
    for deterministic in (False, True):
        run = lambda: kernels.gradients(q, k, v, dout, dlse, causal=True, deterministic=deterministic)  # noqa: B023, E731
        want = run()
        for _ in range(10):
            assert_same_bits(run()[not deterministic :], want[not deterministic :])


class Calls(TorchDispatchMode):
    """The library's operators that are called, and their arguments by name."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "cutlass_ext":
            arguments = function._schema.arguments
            named = {a.name: a.default_value for a in arguments}
            self.seen.append((function._opname, named | dict(zip(named, args, strict=False))))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("of_torch", [False, True])
def test_who_asks_for_the_same_bits(target_fp32, given, of_torch):
    q, k, v = (t.requires_grad_() for t in target_fp32.qkv(1, 9, 2, 16))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(of_torch)
    try:
        with Calls() as calls:
            for function, options in ((cutlass_ext.fmha, {"backend": target_fp32.backend}),
                                      (cutlass_ext.flash_attn_func, {})):  # fmt: skip
                function(q, k, v, deterministic=given, **options).sum().backward()
            out, lse = cutlass_ext.fmha(q.detach(), k, v, return_lse=True)
            with torch.no_grad():
                cutlass_ext.fmha_backward(out, q, k, v, out, lse, deterministic=given)
    finally:
        torch.use_deterministic_algorithms(before)
    asked = [arguments["deterministic"] for name, arguments in calls.seen if name.startswith("fmha_backward")]
    assert asked == [given or of_torch] * 3


# ------------------------------------------------------------------------------------------------ float64
GRADCHECKED = {
    "plain": {},
    "causal": {"causal": True},
    "rows that see nothing": {"causal": True, "start_pos": -2},
    "end, lengths": {"causal": True, "start_pos": "end", "seqused_k": [3, 2]},
    "everything": {
        "causal": True, "start_pos": [2, -1], "window": (4, -1), "softcap": 1.5, "softmax_scale": 0.7, "alibi": True,
        "sink": True, "seqused_k": [5, 3], "leftpad_k": [1, 0],
    },
}  # fmt: skip


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def float64_call(device, case, packing):
    """`fmha` of float64, and its tensors."""
    options = {n: x for n, x in GRADCHECKED[case].items() if n not in ("alibi", "sink")}
    for name, x in options.items():
        if isinstance(x, list):
            options[name] = torch.tensor(x, dtype=torch.int32, device=device)
    leaf = lambda *shape: torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)  # noqa: E731
    if packing:
        tensors = [leaf(6, 2, 4), leaf(10, 1, 4), leaf(10, 1, 4)]
        cu = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3, 6], [1, 6, 9])]
        options |= packing_of(*cu, 3, 5)
    else:
        tensors = [leaf(2, 3, 2, 4), leaf(2, 5, 1, 4), leaf(2, 5, 1, 8)]
    if "alibi" in GRADCHECKED[case]:
        options["alibi_slopes"] = leaf(2, 2).detach().abs()
    if "sink" in GRADCHECKED[case]:
        tensors.append(leaf(2))

    def call(q, k, v, sink=None):
        return cutlass_ext.fmha(q, k, v, sink=sink, return_lse=True, backend="torch", **options)

    return call, tensors


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("case", GRADCHECKED)
def test_gradcheck(device, case, packing):
    call, tensors = float64_call(device, case, packing)
    finite = call(*tensors)[1].isfinite()

    def finite_results(*tensors):
        out, lse = call(*tensors)
        return out, lse[finite]

    torch.autograd.gradcheck(finite_results, tensors)


def test_float64_is_float64(device):
    q, k, v = (torch.randn(1, 70, 2, 16, dtype=torch.float64, device=device) for _ in "qkv")
    out, lse = cutlass_ext.fmha(q, k, v, causal=True, return_lse=True, backend="torch")
    expected = attention(q, k, v, causal=True)
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected[1], rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "simt", "sm80", "sm90"])
def test_no_kernel_takes_float64(backend):
    q, k, v = (torch.randn(1, 9, 2, 16, dtype=torch.float64, device="cuda") for _ in "qkv")
    assert_refused(cutlass_ext.fmha, "q", TypeError, {"q": q, "k": k, "v": v, "backend": backend})


# ------------------------------------------------------------------------------------------------ through PyTorch
def test_gradients_of_what_needs_them(target):
    """Of each input alone, and of none where nothing asks."""
    tensors = dict(zip(("q", "k", "v"), target.qkv(2, 40, 4, 32, heads_kv=2), strict=True)) | {"sink": target.vector(4)}
    dout, _ = of_out(target, tensors["q"], tensors["v"])
    q, k, v, sink = tensors.values()
    want = dict(zip(tensors, target.gradients(q, k, v, dout, sink=sink), strict=True))
    for name in tensors:
        own = {n: t.detach().requires_grad_(n == name) for n, t in tensors.items()}
        out, lse = target.fmha(**own)
        assert out.requires_grad and lse.requires_grad
        (got,) = torch.autograd.grad(out, own[name], dout)
        assert_same_bits([got], [want[name]])
        with torch.no_grad():
            assert not target.fmha(**own)[0].requires_grad
    assert not target.fmha(**tensors)[0].requires_grad


def test_the_same_results_with_and_without_gradients(target):
    q, k, v = target.qkv(2, 70, 4, 64, heads_kv=2)
    want = target.fmha(q, k, v, causal=True)
    q.requires_grad_()
    assert_same_bits([t.detach() for t in target.fmha(q, k, v, causal=True)], want)
    out = target.fmha(q, k, v, causal=True, return_lse=False)
    assert isinstance(out, torch.Tensor)
    assert_same_bits([out.detach()], want[:1])


def test_lse_alone(target):
    q, k, v = target.qkv(2, 40, 4, 32)
    dout, dlse = of_out(target, q, v)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    got = torch.autograd.grad(target.fmha(*leaves)[1], leaves, dlse)
    expect_gradients(*(t.detach() for t in leaves), torch.zeros_like(dout), dlse).check(got, small=True)
    assert not got[2].any()


def test_double_backward_is_refused(target):
    q, k, v = (t.requires_grad_() for t in target.qkv(1, 9, 2, 16))
    (dq,) = torch.autograd.grad(target.fmha(q, k, v)[0].float().square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.float().sum().backward()


def test_func(target):
    """torch.func.grad and vjp give what autograd gives."""
    q, k, v = target.qkv(2, 17, 4, 32, n_kv=40, heads_kv=2)
    sink = target.vector(4)
    dout, dlse = of_out(target, q, v)
    call = lambda q, k, v, sink: target.fmha(q, k, v, sink=sink, causal=True, start_pos="end")  # noqa: E731
    want = target.gradients(q, k, v, dout, dlse, sink=sink, causal=True, start_pos="end")
    results, vjp = torch.func.vjp(call, q, k, v, sink)
    assert_same_bits(vjp((dout, dlse)), want)
    assert_same_bits(results, call(q, k, v, sink))
    loss = lambda *t: (call(*t)[0] * dout).sum() + (call(*t)[1] * dlse).sum()  # noqa: E731
    got = torch.func.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, sink)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **peer_tolerance(target.dtype))


def test_double_backward_of_func_is_refused(target_fp32):
    q, k, v = target_fp32.qkv(1, 9, 2, 16)
    inner = torch.func.grad(lambda q: target_fp32.fmha(q, k, v)[0].square().sum())
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.func.grad(lambda q: inner(q).sum())(q)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(target, use_reentrant):
    q, k, v = target.qkv(2, 70, 4, 32)
    dout, dlse = of_out(target, q, v)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    call = lambda *t: target.fmha(*(2 * x for x in t), causal=True)  # noqa: E731
    want = torch.autograd.grad(call(*leaves), leaves, (dout, dlse))
    results = checkpoint(call, *leaves, use_reentrant=use_reentrant)
    torch.autograd.backward(results, (dout, dlse))
    assert_same_bits([t.grad for t in leaves], want)


def compiled(call):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(call, backend=counter, fullgraph=True), counter


@COMPILE_TIMEOUT
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_compile(target, packing):
    """A forward and a backward graph without breaks, and the same bits."""
    sink, options = target.vector(4), {"causal": True, "softcap": 9.0, "start_pos": "end"}
    if packing:
        batch = packed(target, [5, 17], [40, 17], d=32)
        tensors, options = list(batch), options | batch.packing
    else:
        tensors = target.qkv(2, 17, 4, 32, n_kv=40, heads_kv=2)
    dout, dlse = of_out(target, tensors[0], tensors[2])
    leaves = [t.requires_grad_() for t in (*tensors, sink)]
    call = lambda q, k, v, sink: target.fmha(q, k, v, sink=sink, **options)  # noqa: E731
    fast, counter = compiled(call)
    want = torch.autograd.grad(call(*leaves), leaves, (dout, dlse))
    for _ in range(2):
        results = fast(*leaves)
        assert_same_bits(torch.autograd.grad(results, leaves, (dout, dlse)), want)
        assert_same_bits(torch.autograd.grad(fast(*leaves)[0], leaves, dout, retain_graph=False), target.gradients(
            *tensors, dout, sink=sink, **options))  # fmt: skip
    assert counter.frame_count == 1


@COMPILE_TIMEOUT
def test_totals_and_maxima_do_not_recompile(target_fp32):
    """Packed batches of other lengths go through the graphs, forward and backward, that the first made."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(q, k, v, packing):
        return target_fp32.fmha(q, k, v, causal=True, **packing)

    fast, compilations = torch.compile(call, backend=counter, fullgraph=True, dynamic=True), []
    for lengths in ([5, 9], [70, 3], [130, 64], [33, 30]):
        batch = packed(target_fp32, lengths)
        leaves, of_results = [t.requires_grad_() for t in batch], of_out(target_fp32, batch.q, batch.v)
        got, want = (torch.autograd.grad(f(*leaves, batch.packing), leaves, of_results) for f in (fast, call))
        assert_same_bits(got, want)
        compilations.append(counter.frame_count)
    assert compilations[0] == compilations[-1]


@COMPILE_TIMEOUT
def test_compile_of_a_layer(target):
    """q, k and v are made in the graph, of what requires grad."""
    x, weight = target.randn(2, 40, 32), (target.randn(32, 3 * 2 * 16) / 6).requires_grad_()

    def layer(x, weight):
        q, k, v = (x @ weight).unflatten(2, (3, 2, 16)).unbind(2)
        return target.fmha(q, k, v, causal=True)[0].flatten(2)

    fast, counter = compiled(layer)
    dout = target.randn(2, 40, 32)
    got = torch.autograd.grad(fast(x, weight), weight, dout)
    want = torch.autograd.grad(layer(x, weight), weight, dout)
    torch.testing.assert_close(got, want, **peer_tolerance(target.dtype))
    assert counter.frame_count == 1


@COMPILE_TIMEOUT
def test_compile_of_torch_func(target_fp32):
    """It runs as it does without, or is refused: never gradients of 0."""
    q, k, v = target_fp32.qkv(1, 9, 2, 16)
    call = torch.func.grad(lambda q: target_fp32.fmha(q, k, v, causal=True)[0].square().sum())
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(call, backend="aot_eager")(q), call(q))
    fast, _ = compiled(call)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        fast(q)


@COMPILE_TIMEOUT
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_opcheck(target, packing):
    """Of the operators with gradients, and of the gradients."""
    options = {"causal": True, "backend": target.backend, "sink": target.vector(4), "softcap": 4.0}
    if packing:
        batch = packed(target, [5, 0, 17], [9, 40, 17], d=32, d_v=16)
        tensors, options = tuple(batch), options | batch.packing
    else:
        tensors = tuple(target.qkv(2, 17, 4, 32, n_kv=40, heads_kv=2, d_v=16))
    out, lse = target.fmha(*tensors, **{n: x for n, x in options.items() if n != "backend"})
    ops, of_torch = torch.ops.cutlass_ext, "_torch" if target.backend == "torch" else ""
    leaves = tuple(t.clone().requires_grad_() for t in tensors)
    torch.library.opcheck(getattr(ops, f"fmha_with_grad{of_torch}").default, leaves, options | {"return_lse": True})
    of_gradients = getattr(ops, f"fmha_backward{of_torch}").default
    torch.library.opcheck(of_gradients, (torch.ones_like(out), *tensors, out, lse), options)


def test_flash_attn_names(target):
    """Their gradients are those of `fmha` with the last row at the last key."""
    q, k, v = target.qkv(2, 40, 4, 32, n_kv=70)
    dout, dlse = of_out(target, q, v)
    options = {"causal": True, "softcap": 5.0}
    leaves = [t.requires_grad_() for t in (q, k, v)]
    expected = expect_gradients(*(t.detach() for t in leaves), dout, dlse, start_pos="end", **options)
    results = cutlass_ext.flash_attn_func(*leaves, return_attn_probs=True, deterministic=True, **options)
    expected.check(torch.autograd.grad(results[:2], leaves, (dout, dlse)), small=True)
    kv = torch.stack([k, v], 2)
    results = cutlass_ext.flash_attn_kvpacked_func(q, kv, return_softmax_lse=True, **options)
    dq, dkv = torch.autograd.grad(results, (q, kv), (dout, dlse))
    expected.check((dq, *dkv.unbind(2)), small=True)

    batch = packed(target, *MIXED, d=32)
    dout, _ = of_out(target, batch.q, batch.v)
    leaves = [t.requires_grad_() for t in batch]
    out = cutlass_ext.flash_attn_varlen_func(*leaves, *batch.packing.values(), causal=True, window_size=(20, 0))
    got = torch.autograd.grad(out, leaves, dout)
    expected = expect_gradients_packed(*(t.detach() for t in batch), dout, **batch.packing, causal=True,
                                       window=(20, 0), start_pos="end")  # fmt: skip
    expected.check(got, small=True)


def test_s_aux_has_a_gradient(target):
    q, k, v = target.qkv(2, 40, 4, 32)
    dout, _ = of_out(target, q, v)
    sink = target.vector(4).to(target.dtype).requires_grad_()
    (got,) = torch.autograd.grad(cutlass_ext.flash_attn_func(q, k, v, s_aux=sink), sink, dout)
    want = target.gradients(q, k, v, dout, sink=sink.detach().float(), start_pos="end")[3]
    torch.testing.assert_close(got, want.to(target.dtype), **peer_tolerance(target.dtype))


@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa(target, is_causal):
    q, k, v = (target.randn(2, 4, n, 32) for n in (70, 90, 90))
    dout = target.randn(2, 4, 70, 32)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = cutlass_ext.scaled_dot_product_attention(*leaves, is_causal=is_causal)
    got = torch.autograd.grad(out, leaves, dout)
    bshd = [t.detach().transpose(1, 2) for t in (*leaves, dout)]
    expect_gradients(*bshd, causal=is_causal).check([t.transpose(1, 2) for t in got], small=True)
    want = torch.autograd.grad(F.scaled_dot_product_attention(*leaves, is_causal=is_causal), leaves, dout)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=8 * peer_tolerance(target.dtype)["atol"], rtol=0.02)


# ------------------------------------------------------------------------------------------------ fmha_backward
def test_fmha_backward_is_what_autograd_calls(target):
    q, k, v = target.qkv(2, 40, 4, 32, heads_kv=2)
    dout, dlse = of_out(target, q, v)
    for sink in (None, target.vector(4)):
        options = {"causal": True, "window": (20, 3), "softcap": 7.0, "sink": sink, "backend": target.backend}
        out, lse = target.fmha(q, k, v, **options)
        want = target.gradients(q, k, v, dout, dlse, **options)
        assert_same_bits(cutlass_ext.fmha_backward(dout, q, k, v, out, lse, dlse=dlse, **options), want)
        delta = ((dout.float() * out.float()).sum(-1).transpose(1, 2) - dlse).contiguous()
        got = cutlass_ext.fmha_backward(dout, q, k, v, None, lse, delta=delta, **options)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, **peer_tolerance(target.dtype))


@pytest.mark.parametrize("known", ["delta", "out"])
@pytest.mark.parametrize("n_q,n_kv,heads_kv", [(70, 150, 2), (40, 60, 4), (100, 150, 4)])
def test_parts_of_the_keys(target, n_q, n_kv, heads_kv, known):
    """As sequence parallelism has them: with lse and delta of all keys, or lse and out, from which delta follows,
    gradients of a part are those of all."""
    q, k, v = target.qkv(2, n_q, 4, 64, n_kv=n_kv, heads_kv=heads_kv)
    dout, dlse = of_out(target, q, v)
    options = {"backend": target.backend, "window": (60, -1)}
    cuts = [(0, n_kv // 3), (n_kv // 3, n_kv * 3 // 5), (n_kv * 3 // 5, n_kv)]
    parts = [(k[:, a:b], v[:, a:b], {"start_pos": 20 - a}) for a, b in cuts]
    out, lse = cutlass_ext.merge_attention(
        *zip(*(target.fmha(q, *kv, **start, **options) for *kv, start in parts), strict=True)
    )
    expect(q, k, v, start_pos=20, window=(60, -1)).check(out.to(q.dtype), lse, small=True)
    if known == "delta":
        of_all = {"delta": ((dout.float() * out.float()).sum(-1).transpose(1, 2) - dlse).contiguous()}
    else:
        of_all = {"dlse": dlse}
    known_out = out.to(q.dtype) if known == "out" else None
    got = [
        cutlass_ext.fmha_backward(dout, q, *kv, known_out, lse, **of_all, **start, **options) for *kv, start in parts
    ]
    want = expect_gradients(q, k, v, dout, dlse, start_pos=20, window=(60, -1))
    dq = sum(t[0].float() for t in got).to(q.dtype)
    joined = (dq, *(torch.cat([t[i] for t in got], 1) for i in (1, 2)))
    for name, a in zip(("dq", "dk", "dv"), joined, strict=True):
        tolerance = 4 * torch.finfo(target.dtype).eps * want.oracle[name].abs().max().item() + 1e-5
        torch.testing.assert_close(a.double(), want.oracle[name], atol=tolerance, rtol=0.0)


B, N, HEADS, HEADS_KV, D = 2, 6, 4, 2, 16
V, T, NI = ValueError, TypeError, NotImplementedError


def valid_gradients(device):
    shapes = {"dout": (B, N, HEADS, D), "q": (B, N, HEADS, D), "k": (B, N, HEADS_KV, D), "v": (B, N, HEADS_KV, D)}
    shapes |= {"out": (B, N, HEADS, D), "lse": (B, HEADS, N)}
    return {name: torch.randn(shape, device=device) for name, shape in shapes.items()}


WRONG = [
    *[(name, T, {name: x}) for name in ("dout", "q", "k", "v", "lse") for x in (None, 3.0)],
    *[(name, T, {name: x}) for name in ("out", "delta", "dlse") for x in (3.0, [1.0])],
    *[(name, V, {name: torch.ones(s)}) for name in ("dout", "out")
      for s in ((), (B, N, HEADS, D + 4), (B, N, HEADS_KV, D), (B, N + 1, HEADS, D), (B * N, HEADS, D))],
    *[(name, T, {name: torch.ones(B, N, HEADS, D, dtype=torch.float16)}) for name in ("dout", "out")],
    *[(name, V, {name: torch.ones(B, N, D, HEADS).mT}) for name in ("dout", "out")],
    *[(name, V, {name: torch.ones(s)}) for name in ("lse", "dlse") for s in ((), (B, N, HEADS), (HEADS, B * N))],
    *[(name, V, {name: torch.ones(B, N, HEADS).mT}) for name in ("lse", "dlse")],
    *[(name, T, {name: torch.ones(B, HEADS, N, dtype=x)}) for name in ("lse", "dlse")
      for x in (torch.float16, torch.float64)],
    ("delta", V, {"out": None}),
    ("delta", V, {"delta": torch.ones(B, HEADS, N)}),
    ("delta", V, {"out": None, "delta": torch.ones(B, HEADS, N + 1)}),
    ("dlse", V, {"out": None, "delta": torch.ones(B, HEADS, N), "dlse": torch.ones(B, HEADS, N)}),
    ("block_table", NI, {"block_table": torch.zeros(B, 1, dtype=torch.int32)}),
    ("causal", T, {"causal": 1}),
    ("deterministic", T, {"deterministic": None}),
    ("window", V, {"window": (-2, 0)}),
    ("softcap", V, {"softcap": -1.0}),
    ("sink", V, {"sink": torch.ones(HEADS_KV)}),
    ("cu_seqlens_k", V, {"cu_seqlens_q": torch.tensor([0, N], dtype=torch.int32)}),
    ("backend", V, {"backend": "fast"}),
    ("num_splits", T, {"num_splits": 2}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)), ids=lambda i: f"{i}-{WRONG[i][0]}")
def test_wrong_argument_of_fmha_backward(device, number):
    name, error, spoilt = WRONG[number]
    spoilt = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in spoilt.items()}
    assert_refused(cutlass_ext.fmha_backward, name, error, valid_gradients(device) | spoilt)
    if number == 0:
        assert len(cutlass_ext.fmha_backward(**valid_gradients(device))) == 3


def test_explain(target):
    q, k, v = target.qkv(2, 70, 4, 64)
    dout, _ = of_out(target, q, v)
    out, lse = target.fmha(q, k, v)
    explanation = cutlass_ext.explain(cutlass_ext.fmha_backward, dout, q, k, v, out, lse, backend=target.backend)
    assert explanation.backend == target.family
    by_kernels = "head_gradients" if target.family in ("sm80", "sm90") else "all_gradients"
    if target.dtype == torch.float32 and target.family != "simt":
        by_kernels = "key_gradients"
    assert explanation.kernel == ("torch" if target.family == "torch" else by_kernels)
    q.requires_grad_()
    with_grad = cutlass_ext.explain(q, k, v, causal=True, backend=target.backend)
    assert with_grad == cutlass_ext.explain(q.detach(), k, v, causal=True, return_lse=True, backend=target.backend)


# ------------------------------------------------------------------------------------------------ merge_attention
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_merge_attention(target, packing):
    q, k, v = target.qkv(1, 40, 4, 32, n_kv=90, heads_kv=2)
    expected = expect(q, k, v, causal=True, start_pos=20)
    parts = []
    for a, b in ((0, 30), (30, 55), (55, 90)):  # most rows do not see the last part, some not the second
        out, lse = target.fmha(q, k[:, a:b], v[:, a:b], causal=True, start_pos=20 - a)
        parts.append((out[0], lse[0]) if packing else (out, lse))
    outs, lses = zip(*parts, strict=True)
    assert lses[2].isneginf().any() and not lses[0].isneginf().any()
    out, lse = cutlass_ext.merge_attention(outs, lses)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    got = (out[None], lse[None]) if packing else (out, lse)
    torch.testing.assert_close(got[0].double(), expected.out, **peer_tolerance(target.dtype))
    torch.testing.assert_close(got[1].double(), expected.lse, atol=1e-5, rtol=1e-5)


def test_merge_attention_of_rows_without_keys(device):
    """In some parts, or in all; NaN there does not count."""
    outs = [torch.randn(1, 3, 2, 8, device=device) for _ in range(2)]
    lses = [torch.randn(1, 2, 3, device=device) for _ in range(2)]
    outs[0][0, 0], lses[0][0, :, 0] = NAN, -INF
    for out, lse in zip(outs, lses, strict=True):
        out[0, 2], lse[0, :, 2] = NAN, -INF
    leaves = [t.requires_grad_() for t in (*outs, *lses)]
    out, lse = cutlass_ext.merge_attention(leaves[:2], leaves[2:])
    assert_same_bits([out[0, 0].detach()], [outs[1][0, 0].detach()])
    torch.testing.assert_close(lse[0, :, 0], lses[1][0, :, 0])
    assert not out[0, 2].any() and lse[0, :, 2].isneginf().all()
    gradients = torch.autograd.grad((out.sum(), lse[..., :2].sum()), leaves)
    assert all(t.isfinite().all() for t in gradients)
    gradients = torch.autograd.grad(sum(t[..., :2].sum() for t in cutlass_ext.merge_attention(leaves[:2], leaves[2:])),
                                    leaves)  # fmt: skip
    assert all(t.isfinite().all() for t in gradients)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_merge_attention_gradcheck(device, parts):
    outs = [torch.randn(2, 3, 2, 4, dtype=torch.float64, device=device, requires_grad=True) for _ in range(parts)]
    lses = [torch.randn(2, 2, 3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(parts)]
    torch.autograd.gradcheck(lambda *t: cutlass_ext.merge_attention(t[:parts], t[parts:]), (*outs, *lses))
    torch.autograd.gradgradcheck(lambda *t: cutlass_ext.merge_attention(t[:parts], t[parts:]), (*outs, *lses))


def test_gradients_through_merge_attention(target):
    """Of parts with their lse, which has a gradient: those of the whole."""
    q, k, v = target.qkv(2, 40, 4, 32, n_kv=70, heads_kv=2)
    dout, dlse = of_out(target, q, v)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    parts = [target.fmha(q, k[:, a:b], v[:, a:b], causal=True, start_pos=25 - a) for a, b in ((0, 33), (33, 70))]
    results = cutlass_ext.merge_attention(*zip(*parts, strict=True))
    got = torch.autograd.grad(results, leaves, (dout, dlse))
    want = expect_gradients(*(t.detach() for t in leaves), dout, dlse, causal=True, start_pos=25)
    for a, b in zip(got, want.oracle.values(), strict=True):
        tolerance = 8 * torch.finfo(target.dtype).eps * b.abs().max().item() + 1e-5
        torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=0.0)


@pytest.mark.parametrize(
    "name,error,spoilt",
    [
        ("outs", V, {"outs": [], "lses": []}),
        ("outs", T, {"outs": 3}),
        ("outs", T, {"outs": torch.ones(2, B, N, HEADS, D)}),
        ("lses", T, {"lses": torch.ones(2, B, HEADS, N)}),
        ("outs", T, {"outs": [None, None]}),
        ("outs", V, {"outs": [torch.ones(B, N, HEADS, D), torch.ones(B, N, HEADS, D + 4)]}),
        ("outs", T, {"outs": [torch.ones(B, N, HEADS, D), torch.ones(B, N, HEADS, D).half()]}),
        ("outs", V, {"outs": [torch.ones(B, N)] * 2}),
        ("lses", V, {"lses": [torch.ones(B, HEADS, N)]}),
        ("lses", V, {"lses": [torch.ones(B, N, HEADS)] * 2}),
        ("lses", T, {"lses": [torch.ones(B, HEADS, N, dtype=torch.int32)] * 2}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_argument_of_merge_attention(name, error, spoilt):
    arguments = {"outs": [torch.ones(B, N, HEADS, D)] * 2, "lses": [torch.ones(B, HEADS, N)] * 2} | spoilt
    assert_refused(cutlass_ext.merge_attention, name, error, arguments)


# ------------------------------------------------------------------------------------------------ on a GPU, and memory
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_cuda_graph_of_a_training_step(gpu, packing):
    """Projection, attention, loss, gradients and update, captured once, replayed on other inputs and lengths. The loss
    is of rows in sequences: of others the outputs are undefined, so that a replay and a call have other bits there."""
    x, weight = gpu.randn(300, 128), (gpu.randn(128, 3 * 4 * 64) / 11).requires_grad_()
    lengths = gpu.int32(ends([100, 150, 50]))
    options = packing_of(lengths, lengths, 300, 300) if packing else {}
    rows = torch.arange(300, device="cuda").view(-1, 1, 1)

    def step():
        q, k, v = (x @ weight).unflatten(1, (3, 4, 64)).unbind(1)
        if not packing:
            q, k, v = (t.unflatten(0, (3, 100)) for t in (q, k, v))
        out = cutlass_ext.fmha(q, k, v, causal=True, sink=sink, deterministic=True, **options)
        if packing:
            out = out.masked_fill(rows >= lengths[-1], 0.0)
        loss = out.float().square().mean()
        gradients = torch.autograd.grad(loss, (weight, sink))
        with torch.no_grad():
            for t, g in zip((weight, sink), gradients, strict=True):
                t.sub_(g.to(t.dtype), alpha=0.1)
        return loss

    sink = gpu.vector(4).requires_grad_()
    begin = [t.detach().clone() for t in (weight, sink)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for of_lengths in ([100, 150, 50], [0, 299, 1], [7, 0, 200]):
        lengths.copy_(gpu.int32(ends(of_lengths)))
        x.copy_(torch.randn_like(x))
        results = []
        for run in (graph.replay, step):
            with torch.no_grad():
                for t, was in zip((weight, sink), begin, strict=True):
                    t.copy_(was)
            eager = run()
            results.append([t.detach().clone() for t in (loss if eager is None else eager, weight, sink)])
        assert_same_bits(*results)


def test_extra_memory_on_a_gpu(gpu):
    """At N 16384 no more than a copy of the results, what is known of each row, and little else."""
    q, k, v = gpu.qkv(1, 16384, 2, 64)
    out, lse = gpu.fmha(q, k, v, causal=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = cutlass_ext.fmha_backward(out, q, k, v, out, lse, causal=True)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= 2 * sum(t.nbytes for t in results) + 2 * lse.nbytes + (16 << 20)


def test_extra_memory(target_fp32):
    """O(N): at either length no more than some copies of the results, and the scores of a block of rows."""
    for n in (2048, 4096):
        q, k, v = target_fp32.qkv(1, n, 1, 64)
        out, lse = target_fp32.fmha(q, k, v)
        call = lambda: cutlass_ext.fmha_backward(out, q, k, v, out, lse, backend=target_fp32.backend)  # noqa: B023, E731
        call()
        extra, results = peak_extra_bytes(call, target_fp32.device), 3 * q.nbytes
        assert results <= extra <= 6 * results + (24 << 20), f"{extra} bytes at N {n}, results of {results}"
