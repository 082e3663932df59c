"""Packed sequences (`cu_seqlens`): against the oracle and each sequence alone, with every feature; lengths of 0;
what must not reach an output; what the device may hold; the operator under opcheck, compile and CUDA graphs."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_same_bits, expect_packed, peer_tolerance
from test_features import options_of
from torch._dynamo.testing import CompileCounterWithBackend

import cutlass_ext

NAN = float("nan")
MIXED = [70, 0, 1, 131, 64, 7, 200], [70, 33, 140, 131, 0, 64, 129]  # queries and keys of seven sequences
TINY = 3000


def ends(lengths):
    return [0, *itertools.accumulate(lengths)]


@dataclasses.dataclass
class Packed:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    packing: dict

    def __iter__(self):
        return iter((self.q, self.k, self.v))

    def alone(self, b, **options):
        """Sequence `b` as a packed batch of its own, and what `options` become there."""
        rows, keys = (slice(*self.packing[cu][b : b + 2].tolist()) for cu in ("cu_seqlens_q", "cu_seqlens_k"))
        q, k, v = self.q[rows], self.k[keys], self.v[keys]
        one = [torch.tensor([0, len(t)], dtype=torch.int32, device=t.device) for t in (q, k)]
        for name, x in options.items():
            if isinstance(x, torch.Tensor) and (name != "alibi_slopes" or x.dim() == 2) and name != "sink":
                options[name] = x[b : b + 1]
        return Packed(q, k, v, packing_of(*one, len(q), len(k))), options, rows


def packing_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return dict(zip(names, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), strict=True))


def packed(target, lengths_q, lengths_k=None, heads=(4, 2), d=64, d_v=None):
    lengths_k = lengths_q if lengths_k is None else lengths_k
    shapes = (sum(lengths_q), heads[0], d), (sum(lengths_k), heads[1], d), (sum(lengths_k), heads[1], d_v or d)
    longest = max(lengths_q, default=0), max(lengths_k, default=0)
    cu = target.int32(ends(lengths_q)), target.int32(ends(lengths_k))
    return Packed(*(target.randn(*shape) for shape in shapes), packing_of(*cu, *longest))


def check(target, batch, *, num_splits=0, small=False, **options):
    got = target.fmha(*batch, num_splits=num_splits, **batch.packing, **options)
    assert all(t.is_contiguous() for t in got)
    expect_packed(*batch, **batch.packing, **options).check(*got, small=small, what=str(options))


# ------------------------------------------------------------------------------------------------ every feature
LENGTHS = st.one_of(st.integers(0, 8), st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129]), st.integers(0, 200))


@st.composite
def cases(draw):
    batch, heads_kv, group = draw(st.integers(0, 6)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 1, 2, 5]))
    lengths = lambda: draw(st.lists(LENGTHS, min_size=batch, max_size=batch))  # noqa: E731
    side, position = st.sampled_from([-1, -1, 0, 1, 15, 64, 150]), st.integers(-140, 260)
    lengths_q, lengths_k = lengths(), lengths()
    used = [draw(st.integers(0, n)) for n in lengths_k] if draw(st.booleans()) else None
    return {
        "lengths": (lengths_q, lengths_k),
        "heads": (heads_kv * group, heads_kv),
        "steps": (draw(st.integers(1, 32)), draw(st.integers(1, 32))),
        "seed": draw(st.integers(0, 2**31)),
        "causal": draw(st.booleans()),
        "start_pos": draw(st.just(0) | st.just("end") | position | st.lists(position, min_size=batch, max_size=batch)),
        "window": (draw(side), draw(side)),
        "softmax_scale": draw(st.none() | st.floats(0.02, 0.3)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.0, 30.0])),
        "alibi": draw(st.sampled_from([None, None, "[H]", "[B, H]"])),
        "sink": draw(st.booleans()),
        "seqused_k": used,
        "leftpad_k": draw(st.none() | st.just([draw(st.integers(0, n)) for n in used or lengths_k])),
        "num_splits": draw(st.integers(0, 5)),
    }


PLAIN = {"lengths": MIXED, "heads": (4, 2), "steps": None, "seed": 0, "causal": False, "start_pos": 0,
         "window": (-1, -1), "softmax_scale": None, "softcap": 0.0, "alibi": None, "sink": False, "seqused_k": None,
         "leftpad_k": None}  # fmt: skip
USED, PADS = [70, 20, 140, 5, 0, 0, 129], [3, 20, 0, 2, 0, 0, 64]
FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "causal, end": {"causal": True, "start_pos": "end"},
    "causal, int": {"causal": True, "start_pos": 17},
    "causal, tensor": {"causal": True, "start_pos": [0, 5, 139, -40, 3, 57, -71]},
    "mqa": {"heads": (8, 1), "causal": True, "start_pos": "end"},
    "window": {"causal": True, "window": (63, 0), "start_pos": "end"},
    "window both sides": {"window": (20, 33)},
    "softcap": {"softcap": 15.0},
    "alibi": {"causal": True, "alibi": "[H]"},
    "alibi, a slope a sequence": {"alibi": "[B, H]", "start_pos": "end"},
    "sink": {"causal": True, "sink": True, "window": (31, -1)},
    "lengths": {"seqused_k": USED, "start_pos": "end", "causal": True},
    "leftpad": {"leftpad_k": PADS, "start_pos": "end", "causal": True},
    "everything": {
        "heads": (6, 2), "causal": True, "window": (90, -1), "softcap": 8.0, "alibi": "[B, H]", "sink": True,
        "seqused_k": USED, "leftpad_k": PADS, "start_pos": [20, -7, 60, 0, 1, 9, -1],
    },
}  # fmt: skip


def build(target, case):
    torch.manual_seed(case["seed"])
    d, d_v = (steps * target.step for steps in case["steps"]) if case["steps"] else (64, 64)
    batch = packed(target, *case["lengths"], case["heads"], d, d_v)
    return batch, options_of(target, case, len(case["lengths"][0]))


@settings(max_examples=150)
@given(case=cases())
def test_any_case(target, case):
    batch, options = build(target, case)
    check(target, batch, num_splits=case["num_splits"], small=True, **options)


@settings(max_examples=40)
@given(case=cases())
def test_any_case_torch_16_bit(target_16_bit, case):
    batch, options = build(target_16_bit, case)
    check(target_16_bit, batch, small=True, **options)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(target, feature, num_splits):
    batch, options = build(target, PLAIN | FEATURES[feature])
    check(target, batch, num_splits=num_splits, small=True, **options)


@pytest.mark.parametrize("feature", FEATURES)
def test_torch_backend_on_cuda(gpu, feature):
    """There sequences are padded, several at a time: lengths are not read."""
    batch, options = build(gpu, PLAIN | FEATURES[feature])
    check(dataclasses.replace(gpu, backend="torch"), batch, small=True, **options)


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("feature", ["plain", "causal, end", "everything"])
def test_each_sequence_has_the_bits_that_it_has_alone(target, feature, d, num_splits):
    steps = (d // target.step, d // target.step)
    batch, options = build(target, PLAIN | FEATURES[feature] | {"steps": steps})
    out, lse = target.fmha(*batch, num_splits=num_splits, **batch.packing, **options)
    for b in range(len(MIXED[0])):
        alone, own, rows = batch.alone(b, **options)
        got = target.fmha(*alone, num_splits=num_splits, **alone.packing, **own)
        assert_same_bits((out[rows], lse[:, rows]), got)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("options", [{}, {"causal": True, "start_pos": "end"}, {"window": (100, 0), "start_pos": 200}])
@pytest.mark.parametrize(
    "lengths_q,lengths_k,heads,d",
    [([14], [722], (12, 12), 104), ([14], [722], (12, 2), 64), ([159, 233], [159, 233], (28, 4), 96),
     ([70, 5], [400, 300], (4, 4), 192), ([130, 3], [129, 260], (4, 2), 256)],
)  # fmt: skip
def test_bits_do_not_depend_on_rows_behind_a_sequence(kernels, lengths_q, lengths_k, heads, d, options, num_splits):
    """With num_splits fixed: not on rows of the buffers past the sequence's own, whatever they hold, not on how many
    there are, not on max_seqlen. Large rows there once decided when Hopper's kernels raised m for the rows before them.
    """
    batch = packed(kernels, lengths_q, lengths_k, heads, d)
    options = options | {"num_splits": num_splits, "softmax_scale": 0.05}
    out, lse = kernels.fmha(*batch, **batch.packing, **options)
    for b, n_q in enumerate(lengths_q):
        alone, _, rows = batch.alone(b)
        want = kernels.fmha(*alone, **alone.packing, **options)
        assert_same_bits((out[rows], lse[:, rows]), want)
        for more, fill in itertools.product((0, 1, 5, 300), (300.0, NAN)):
            behind = [torch.cat([t, fill * kernels.randn(more, *t.shape[1:])]) for t in alone]
            longest = {name: alone.packing[name] + more for name in ("max_seqlen_q", "max_seqlen_k")}
            got = kernels.fmha(*behind, **alone.packing | longest, **options)
            assert_same_bits((got[0][:n_q], got[1][:, :n_q]), want)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_sequences_of_one_length_have_the_bits_of_a_batch(target, num_splits):
    """With N_q above half a tile the choice of the kernel is the same."""
    batch = packed(target, [131] * 3, [150] * 3, d=128)
    options = {"causal": True, "num_splits": num_splits, "start_pos": "end"}
    out, lse = target.fmha(*batch, **batch.packing, **options)
    padded = target.fmha(*(t.unflatten(0, (3, -1)) for t in batch), **options)
    assert_same_bits((out.unflatten(0, (3, -1)), lse.unflatten(1, (3, -1)).transpose(0, 1)), padded)


# ------------------------------------------------------------------------------------------------ sizes
@pytest.mark.parametrize("d_max", range(8, 257, 8))
def test_head_dim(target, d_max):
    for d in range(d_max, d_max - 8, -target.step):
        check(target, packed(target, [70, 3, 0, 33], [65, 130, 9, 33], d=d), causal=True, start_pos="end", small=True)


@pytest.mark.parametrize("d,d_v", [(192, 128), (64, 128), (128, 64), (8, 256), (256, 8)])
def test_d_and_d_v_differ(target, d, d_v):
    for num_splits in (0, 2):
        batch = packed(target, *MIXED, d=d, d_v=d_v)
        check(target, batch, causal=True, start_pos="end", num_splits=num_splits, small=True)


@pytest.mark.parametrize("group", [1, 2, 4, 5, 8, 32])
def test_query_heads_of_a_key_head(target, group):
    check(target, packed(target, *MIXED, heads=(2 * group, 2)), causal=True, start_pos="end", small=True)


ZEROS = {
    "first": ([0, 5, 9], [0, 70, 9]), "last": ([5, 9, 0], [70, 9, 0]), "all": ([0, 0, 0], [0, 0, 0]),
    "queries": ([0, 0], [5, 70]), "keys": ([5, 130], [0, 0]), "here and there": ([0, 5, 0, 0, 9], [7, 0, 0, 70, 9]),
    "one": ([0], [0]), "none": ([], []),
}  # fmt: skip


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("where", ZEROS)
def test_lengths_of_zero(target, where, sink, num_splits):
    batch = packed(target, *ZEROS[where], d_v=24)
    options = {"sink": target.vector(4)} if sink else {}
    for causal in (False, True):
        check(target, batch, causal=causal, start_pos="end", num_splits=num_splits, small=True, **options)


def test_thousands_of_tiny_sequences(target):
    """Against the same sequences padded to one length."""
    lengths = torch.randint(0, 9, (TINY,)).tolist()
    batch = packed(target, lengths, heads=(2, 1), d=32)
    out, lse = target.fmha(*batch, causal=True, start_pos="end", **batch.packing)
    begins = batch.packing["cu_seqlens_q"][:-1].long()
    i = torch.arange(8, device=out.device)
    exists = i < target.int32(lengths)[:, None]
    rows = (begins[:, None] + i).where(exists, 0)
    padded, padded_lse = target.fmha(*(t[rows] for t in batch), causal=True, seqused_k=target.int32(lengths))
    torch.testing.assert_close(out, padded[exists], **peer_tolerance(out.dtype))
    torch.testing.assert_close(lse, padded_lse.transpose(1, 2)[exists].T, **peer_tolerance(torch.float32))


def test_one_long_sequence_among_short_ones(target):
    check(target, packed(target, [3, 1500, 1, 40]), causal=True, small=True)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_longer_maxima_change_nothing(target, num_splits):
    batch = packed(target, *MIXED)
    want = target.fmha(*batch, num_splits=num_splits, **batch.packing)
    longer = batch.packing | {"max_seqlen_q": 5000, "max_seqlen_k": 1 << 28}
    assert_same_bits(target.fmha(*batch, num_splits=num_splits, **longer), want)


@pytest.mark.parametrize("d,heads,lengths,options", [
    (104, (12, 12), (14, 722), {}), (64, (12, 12), (14, 722), {}), (64, (12, 4), (14, 722), {"causal": True}),
    (96, (28, 4), (159, 233), {"softmax_scale": 0.05}), (128, (8, 2), (1, 500), {}), (224, (4, 4), (65, 129), {}),
])  # fmt: skip
@pytest.mark.parametrize("num_splits", [1, 3])
def test_bits_do_not_depend_on_what_lies_around(target, num_splits, d, heads, lengths, options):
    """With num_splits fixed: one sequence, with larger maxima, with rows behind it in the buffers, and both."""
    batch = packed(target, [lengths[0]], [lengths[1]], heads, d)
    want = target.fmha(*batch, num_splits=num_splits, **batch.packing, **options)
    for more_rows, longer in itertools.product((0, 1, 5, 70, 1000), (0, 1, 50, 400)):
        q, k, v = (torch.cat([t, t[:1].expand(more_rows, -1, -1)]) for t in batch)
        packing = batch.packing | {"max_seqlen_q": lengths[0] + longer, "max_seqlen_k": lengths[1] + longer}
        out, lse = target.fmha(q, k, v, num_splits=num_splits, **packing, **options)
        assert_same_bits((out[: lengths[0]], lse[:, : lengths[0]]), want)


def test_packed_buffers_of_any_stride(target):
    """q, k and v as parts of one buffer, a token apart, and as [heads, total, head_dim]."""
    lengths = [70, 0, 33]
    packing = packed(target, lengths).packing
    total = sum(lengths)
    for q, k, v in (
        target.randn(total, 3, 4, 64).unbind(1),
        [target.randn(2 * total, 4, 65)[::2, :, :64] for _ in "qkv"],
        [target.randn(4, total, 64).transpose(0, 1) for _ in "qkv"],
    ):
        if target.takes(q, k, v):
            check(target, Packed(q, k, v, packing), causal=True, small=True)
            continue
        with pytest.raises(NotImplementedError, match="16 bytes"):
            target.fmha(q, k, v, causal=True, **packing)


# ------------------------------------------------------------------------------------------------ what stays outside
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("plant", [NAN, float("inf")])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_keys_that_do_not_count(target, d, plant, num_splits):
    """Past seqused_k, before leftpad_k, and past the last sequence."""
    batch, options = build(target, PLAIN | FEATURES["lengths"] | {"leftpad_k": PADS})
    tail = target.randn(50, 2, 64)
    k, v = (torch.cat([t, tail]) for t in (batch.k, batch.v))
    want = target.fmha(batch.q, k, v, num_splits=num_splits, **batch.packing, **options)
    for t in (k, v):
        for begin, end, used, pad in zip(ends(MIXED[1]), ends(MIXED[1])[1:], USED, PADS, strict=False):
            t[begin : begin + pad] = plant
            t[begin + used : end] = plant
        t[-50:] = plant
    assert_same_bits(target.fmha(batch.q, k, v, num_splits=num_splits, **batch.packing, **options), want)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_neighbours(target, which, num_splits):
    """NaN throughout one sequence: none of it in the sequences that lie before and after it in the same tiles."""
    batch = packed(target, [40, 30, 50], d=64)
    want = target.fmha(*batch, num_splits=num_splits, **batch.packing)
    getattr(batch, which)[40:70] = NAN
    out, lse = target.fmha(*batch, num_splits=num_splits, **batch.packing)
    clean = [*range(40), *range(70, 120)]
    assert_same_bits((out[clean], lse[:, clean]), (want[0][clean], want[1][:, clean]))
    assert out[40:70].isnan().all()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_rows_of_no_sequence(target, num_splits):
    """Rows of q before the first and past the last sequence: those of the sequences are what they are without."""
    batch = packed(target, [40, 30])
    want = target.fmha(*batch, num_splits=num_splits, **batch.packing)
    wider = batch.packing | {"cu_seqlens_q": batch.packing["cu_seqlens_q"] + 8}
    q = torch.cat([target.randn(8, 4, 64), batch.q, target.randn(9, 4, 64)])
    out, lse = target.fmha(q, batch.k, batch.v, num_splits=num_splits, **wider)
    assert_same_bits((out[8:-9], lse[:, 8:-9]), want)


WILD = [-(1 << 31), -5, 90, 1 << 30]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("wild", WILD)
def test_whatever_the_gpu_holds_stays_in_bounds(gpu, which, wild, backend):
    """The host does not read cu_seqlens. The first sequence, which is right, is computed (a third that begins at a
    negative row writes over it), and nothing outside is read or written."""
    buffers = [torch.full((3 * 100, 4, 64), NAN, device="cuda", dtype=gpu.dtype) for _ in "qkv"]
    q, k, v = (buffer[100:200].copy_(gpu.randn(100, 4, 64)) for buffer in buffers)
    packing = packing_of(gpu.int32([0, 30, 60, 100]), gpu.int32([0, 30, 60, 100]), 40, 40)
    want = cutlass_ext.fmha(q, k, v, num_splits=2, backend=backend, return_lse=True, **packing)
    packing[which] = gpu.int32([0, 30, wild, 100])
    out, lse = cutlass_ext.fmha(q, k, v, num_splits=2, backend=backend, return_lse=True, **packing)
    torch.cuda.synchronize()
    if which == "cu_seqlens_k" or wild > 0:
        assert_same_bits((out[:30], lse[:, :30]), (want[0][:30], want[1][:, :30]))
    else:
        assert out[:40].isfinite().all()  # by either of them
    for buffer in buffers:
        assert buffer[:100].isnan().all() and buffer[200:].isnan().all()


def test_max_seqlen_q_too_small(gpu):
    """Rows past it are not computed; those before it are as they were."""
    batch = packed(gpu, [30, 70, 5], d=64)
    want = gpu.fmha(*batch, num_splits=2, causal=True, start_pos="end", **batch.packing)
    packing = batch.packing | {"max_seqlen_q": 40}
    out, lse = gpu.fmha(*batch, num_splits=2, causal=True, start_pos="end", **packing)
    clean = [*range(70), *range(100, 105)]
    assert_same_bits((out[clean], lse[:, clean]), (want[0][clean], want[1][:, clean]))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_nothing_waits_for_the_gpu(gpu, backend):
    batch = packed(gpu, *MIXED)
    options = {"causal": True, "start_pos": "end", "seqused_k": gpu.int32(USED), "backend": backend}
    cutlass_ext.fmha(*batch, **batch.packing, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cutlass_ext.fmha(*batch, **batch.packing, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------------------------ flash-attn's names
FLASH = {
    "flash_attn_varlen_func": lambda q, k, v, p: ((q, k, v), tuple(p.values())),
    "flash_attn_varlen_kvpacked_func": lambda q, k, v, p: ((q, torch.stack([k, v], 1)), tuple(p.values())),
    "flash_attn_varlen_qkvpacked_func": lambda q, k, v, p: (
        (torch.stack([q, k, v], 1),), (p["cu_seqlens_q"], p["max_seqlen_q"])
    ),
}  # fmt: skip


def flash_batch(target, name):
    if name == "flash_attn_varlen_qkvpacked_func":
        return packed(target, MIXED[0], heads=(4, 4), d=32)
    return packed(target, *MIXED, d=32)


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window_size": (20, 0)},
        {"softmax_scale": 0.3, "softcap": 5.0, "dropout_p": 0.0, "deterministic": True},
    ],
    ids=str,
)
def test_flash_attn_options(target, name, options):
    batch = flash_batch(target, name)
    tensors, packing = FLASH[name](*batch, batch.packing)
    out = getattr(cutlass_ext, name)(*tensors, *packing, **options)
    same = {n: options[n] for n in ("causal", "softmax_scale", "softcap") if n in options}
    window = options.get("window_size", (-1, -1))
    expect_packed(*batch, **batch.packing, start_pos="end", window=window, **same).check(out, small=True)


@pytest.mark.parametrize("name", FLASH)
def test_flash_attn_arguments_by_position(target, name):
    """flash-attn's order: dropout_p, softmax_scale, causal, window_size, softcap, slopes, deterministic, probs."""
    batch = flash_batch(target, name)
    tensors, packing = FLASH[name](*batch, batch.packing)
    slopes = target.vector(len(MIXED[0]), 4).abs()
    got = getattr(cutlass_ext, name)(*tensors, *packing, 0.0, 0.2, True, (30, 0), 4.0, slopes, False, True)
    options = {"causal": True, "softmax_scale": 0.2, "window": (30, 0), "softcap": 4.0, "alibi_slopes": slopes}
    expected = expect_packed(*batch, **batch.packing, start_pos="end", **options)
    expected.check(*got[:2], small=True)
    assert got[2] is None


def test_flash_attn_seqused_k(target):
    batch, used = packed(target, *MIXED, d=32), target.int32(USED)
    args = tuple(batch.packing.values())
    out = cutlass_ext.flash_attn_varlen_func(*batch, *args, causal=True, block_table=None, seqused_k=used)
    expect_packed(*batch, **batch.packing, causal=True, start_pos="end", seqused_k=used).check(out, small=True)


# ------------------------------------------------------------------------------------------------ the operator
@pytest.mark.timeout(180)
@pytest.mark.parametrize("features", [False, True])
def test_opcheck(target, features):
    batch = packed(target, [5, 0, 17], [9, 40, 17], d=32, d_v=16)
    options = batch.packing | {"causal": True, "backend": target.backend}
    if features:
        options |= {"start_pos": None, "start_positions": target.int32([3, 20, 0]), "softmax_scale": 0.3,
                    "softcap": 4.0, "alibi_slopes": target.vector(4), "sink": target.vector(4),
                    "seqused_k": target.int32([9, 7, 0]), "leftpad_k": target.int32([0, 2, 0]), "num_splits": 2,
                    "return_lse": True}  # fmt: skip
    torch.library.opcheck(torch.ops.cutlass_ext.fmha.default, tuple(batch), options)


@pytest.mark.timeout(180)
def test_totals_and_maxima_do_not_recompile(target):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(q, k, v, packing):
        return cutlass_ext.fmha(q, k, v, causal=True, return_lse=True, backend=target.backend, num_splits=1, **packing)

    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    compilations = []
    for lengths in ([5, 9], [70, 3], [130, 64], [33, 30]):
        batch = packed(target, lengths)
        assert_same_bits(compiled(*batch, batch.packing), call(*batch, batch.packing))
        compilations.append(counter.frame_count)
    assert compilations[0] == compilations[-1]


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_cuda_graph(gpu, num_splits):
    """Captured once, replayed with other lengths: they live on the device."""
    batch = packed(gpu, [40, 60, 0], [300, 7, 93])
    packing = batch.packing | {"max_seqlen_q": 100, "max_seqlen_k": 400}
    options = {"causal": True, "num_splits": num_splits, "start_pos": "end"}
    call = lambda: cutlass_ext.fmha(*batch, return_lse=True, **packing, **options)  # noqa: E731
    with torch.cuda.stream(torch.cuda.Stream()):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for lengths_q, lengths_k in (
        ([100, 0, 0], [0, 400, 0]),
        ([1, 98, 1], [133, 134, 133]),
        ([40, 20, 40], [1, 0, 399]),
    ):
        packing["cu_seqlens_q"].copy_(gpu.int32(ends(lengths_q)))
        packing["cu_seqlens_k"].copy_(gpu.int32(ends(lengths_k)))
        for t in batch:
            t.copy_(torch.randn_like(t))
        out.fill_(NAN), lse.fill_(NAN)
        graph.replay()
        expected = expect_packed(*batch, **packing, causal=True, start_pos="end")
        expected.check(out, lse, small=True)


def test_explain(target):
    batch = packed(target, *MIXED)
    explanation = cutlass_ext.explain(*batch, causal=True, backend=target.backend, **batch.packing)
    assert explanation.backend == target.family
    assert explanation.kernel in ("torch", "tiles", "short", "persistent")
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        cutlass_ext.explain(*batch, backend=target.backend, **batch.packing | {"cu_seqlens_k": None})
