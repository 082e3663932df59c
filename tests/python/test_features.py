"""Shapes and features together, drawn by hypothesis, against the oracle; and the rows and scores at the limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import expect

import cutlass_ext

LENGTHS = st.one_of(st.integers(0, 8), st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129]), st.integers(0, 200))


@st.composite
def cases(draw):
    """Sizes and options of one call; tensors are drawn from the seed when the device is known, and `steps` become
    head dims when the dtype is: to 128 in float32, to 256 in 16 bits."""
    batch, heads_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3, 8]))
    n_kv = draw(LENGTHS)
    lengths = draw(st.none() | st.lists(st.integers(0, n_kv), min_size=batch, max_size=batch))
    leftpads = st.tuples(*(st.integers(0, length) for length in lengths or [n_kv] * batch)).map(list)
    window_side = st.sampled_from([-1, -1, 0, 1, 15, 64, 150])
    position = st.integers(-140, 260)
    return {
        "batch": batch,
        "heads": (heads_kv * group, heads_kv),
        "n_q": draw(LENGTHS),
        "n_kv": n_kv,
        "steps": (draw(st.integers(1, 32)), draw(st.integers(1, 32))),
        "seed": draw(st.integers(0, 2**31)),
        "causal": draw(st.booleans()),
        "start_pos": draw(st.just(0) | st.just("end") | position | st.lists(position, min_size=batch, max_size=batch)),
        "window": (draw(window_side), draw(window_side)),
        "softmax_scale": draw(st.none() | st.floats(0.02, 0.3)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.0, 30.0])),
        "alibi": draw(st.sampled_from([None, None, "[H]", "[B, H]"])),
        "sink": draw(st.booleans()),
        "seqused_k": lengths,
        "leftpad_k": draw(st.none() | leftpads),
        "num_splits": draw(st.integers(0, 5)),
    }


def options_of(target, case, batch):
    """The keywords of a case, tensors among them."""
    heads = case["heads"][0]
    options = {name: case[name] for name in ("causal", "window", "softmax_scale", "softcap", "start_pos")}
    for name in ("seqused_k", "leftpad_k", "start_pos"):
        if isinstance(case.get(name), list):
            options[name] = target.int32(case[name])
    if case["alibi"]:
        options["alibi_slopes"] = target.vector(*((heads,) if case["alibi"] == "[H]" else (batch, heads))).abs() / 4
    if case["sink"]:
        options["sink"] = target.vector(heads)
    return options


def build(target, case):
    """The tensors and keywords of a drawn case."""
    torch.manual_seed(case["seed"])
    (heads_q, heads_kv), batch = case["heads"], case["batch"]
    d, d_v = (steps * target.step for steps in case["steps"]) if "steps" in case else (case["d"], case["d_v"])
    tensors = target.qkv(batch, case["n_q"], heads_q, d, n_kv=case["n_kv"], heads_kv=heads_kv, d_v=d_v)
    return tensors, options_of(target, case, batch)


@given(case=cases())
def test_any_case(target, case):
    (q, k, v), options = build(target, case)
    got = target.fmha(q, k, v, num_splits=case["num_splits"], **options)
    expect(q, k, v, **options).check(*got, small=True)


@settings(max_examples=40)
@given(case=cases())
def test_any_case_torch_16_bit(target_16_bit, case):
    (q, k, v), options = build(target_16_bit, case)
    got = target_16_bit.fmha(q, k, v, num_splits=case["num_splits"], **options)
    expect(q, k, v, **options).check(*got, small=True)


# each feature alone, and in the company that real models give it
FEATURES = {
    "plain": {},
    "gqa": {"heads": (8, 2)},
    "mqa": {"heads": (8, 1)},
    "window": {"causal": True, "window": (63, 0)},
    "window both sides": {"window": (20, 33)},
    "window right of the diagonal": {"causal": True, "window": (40, 7)},
    "window of one key": {"window": (0, 0)},
    "softcap": {"softcap": 15.0},
    "alibi": {"causal": True, "alibi": "[H]"},
    "alibi, not causal, a slope a sequence": {"alibi": "[B, H]"},
    "sink": {"causal": True, "sink": True, "window": (31, -1)},
    "leftpad": {"causal": True, "leftpad_k": [5, 140, 0], "start_pos": "end"},
    "lengths": {"seqused_k": [150, 64, 1], "start_pos": "end", "causal": True},
    "everything": {
        "heads": (6, 2), "causal": True, "window": (90, -1), "softcap": 8.0, "alibi": "[B, H]", "sink": True,
        "seqused_k": [150, 97, 130], "leftpad_k": [3, 0, 64], "start_pos": [20, -7, 60],
    },
}  # fmt: skip
PLAIN = dict(batch=3, heads=(4, 4), n_q=140, n_kv=150, d=64, d_v=64, seed=3, causal=False, start_pos=0, window=(-1, -1),
             softmax_scale=None, softcap=0.0, alibi=None, sink=False, seqused_k=None, leftpad_k=None)  # fmt: skip


@pytest.mark.parametrize("num_splits", [0, 1, 2, 5])
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(target, feature, num_splits):
    (q, k, v), options = build(target, PLAIN | FEATURES[feature])
    expect(q, k, v, **options).check(*target.fmha(q, k, v, num_splits=num_splits, **options))


@pytest.mark.parametrize("feature", FEATURES)
def test_feature_torch_16_bit(target_16_bit, feature):
    (q, k, v), options = build(target_16_bit, PLAIN | FEATURES[feature])
    expect(q, k, v, **options).check(*target_16_bit.fmha(q, k, v, **options))


@pytest.mark.parametrize("feature", FEATURES)
def test_torch_backend_on_cuda(gpu, feature):
    (q, k, v), options = build(gpu, PLAIN | FEATURES[feature])
    expect(q, k, v, **options).check(*cutlass_ext.fmha(q, k, v, backend="torch", return_lse=True, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_torch_backend_adds_up_many_keys_in_parts(seed):
    """In one chain of additions, which a GPU's products of many rows may be, the largest error is 1.2e-7 to 2.0e-7, and
    about 1.3e-7 is allowed: tests/soak.py --seed 321984726 was such a call."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, n, heads, 64, device="cuda") for n, heads in ((3, 128), (2068, 2), (2068, 2)))
    options = {"softcap": 1.0, "causal": True, "start_pos": "end"}
    got = cutlass_ext.fmha(q, k, v, backend="torch", return_lse=True, **options)
    expect(q, k, v, **options).check(*got, small=True)


@pytest.mark.parametrize("side", [2**30, 2**31 - 1, 2**31, 2**63, 2**70])
def test_a_window_of_2_to_the_30_is_none(target, side):
    q, k, v = target.qkv(2, 40, 4, 32)
    for window, same in (((side, side), (-1, -1)), ((5, side), (5, -1)), ((side, 3), (-1, 3))):
        for a, b in zip(target.fmha(q, k, v, window=window), target.fmha(q, k, v, window=same), strict=True):
            assert torch.equal(a, b)


def test_slopes_in_a_larger_buffer(target):
    """[B, H] slopes of any batch stride: rows of a table, and one row for all sequences."""
    q, k, v = target.qkv(3, 40, 4, 32)
    table = target.vector(3, 9).abs()
    for slopes in (table[:, 2:6], table[1, :4].expand(3, 4)):
        expect(q, k, v, alibi_slopes=slopes).check(*target.fmha(q, k, v, alibi_slopes=slopes))


# ------------------------------------------------------------------------------------------------ at the limits
@pytest.mark.parametrize("num_splits", [0, 1, 4])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "start_pos": -1000},
        {"causal": True, "start_pos": -70},
        {"window": (10, -1), "start_pos": 500},
        {"window": (-1, 5), "start_pos": -200},
        {"window": (3, 3), "start_pos": 95},
        {"seqused_k": [0, 0]},
        {"seqused_k": [0, 100], "causal": True, "start_pos": "end"},
        {"leftpad_k": [100, 50]},
        {"leftpad_k": [64, 99], "causal": True},
    ],
    ids=str,
)
def test_rows_that_see_nothing(target, options, sink, num_splits):
    """o = 0 and lse = -inf or the sink's logit, exactly; their neighbours that see something are right."""
    q, k, v = target.qkv(2, 70, 4, 32, n_kv=100, heads_kv=2)
    options = {name: target.int32(value) if isinstance(value, list) else value for name, value in options.items()}
    if sink:
        options["sink"] = target.vector(4)
    out, lse = target.fmha(q, k, v, num_splits=num_splits, **options)
    expected = expect(q, k, v, **options)
    expected.check(out, lse, small=True)
    empty = (expected.lse == (options["sink"].double()[None, :, None] if sink else float("-inf"))) & ~(
        expected.out.transpose(1, 2).any(-1)
    )
    assert empty.any() and not out.transpose(1, 2)[empty].any()
    if sink:
        assert torch.equal(lse[empty], options["sink"][None, :, None].expand_as(lse)[empty])


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_scores_times_30(target, causal, d, num_splits):
    """Rows of one large score: exp must neither overflow nor lose the rest."""
    q, k, v = target.qkv(2, 130, 4, d)
    got = target.fmha(30 * q, k, v, causal=causal, num_splits=num_splits)
    expect(30 * q, k, v, causal=causal).check(*got)


@pytest.mark.parametrize("offset", [-2000.0, 2000.0])
def test_scores_far_from_zero(target, offset):
    """All scores of a row near `offset`: a maximum of 0, or of the padding, would make them inf or 0."""
    q, k, v = target.qkv(1, 40, 2, 64, n_kv=75)
    q[..., 0], k[..., 0] = offset, 8.0  # softmax_scale is 1/8
    out, lse = target.fmha(q, k, v)
    expect(q, k, v).check(out, lse, small=True)
    assert (lse * offset > 0).all()


def test_a_dominant_sink_takes_everything(target):
    q, k, v = target.qkv(1, 20, 2, 32)
    out, lse = target.fmha(q, k, v, sink=torch.tensor([1000.0, -1000.0], device=target.device))
    assert not out[:, :, 0].any() and (lse[:, 0] == 1000.0).all()
    one_head = [t[:, :, 1:] for t in (q, k, v)]
    expect(*one_head).check(out[:, :, 1:], lse[:, 1:], small=True)


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_softmax_scale(target, scale):
    q, k, v = target.qkv(2, 65, 2, 32)
    expect(q, k, v, softmax_scale=scale).check(*target.fmha(q, k, v, softmax_scale=scale))


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_fp32_stays_fp32_where_the_rest_of_the_program_may_round(target_fp32, backend, precision):
    """torch.set_float32_matmul_precision lets matmul use TF32 or bf16: not here, and the setting survives the call."""
    q, k, v = target_fp32.qkv(2, 100, 4, 64)
    expected = expect(q, k, v)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        got = cutlass_ext.fmha(q, k, v, backend=backend, return_lse=True)
        after = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)
    expected.check(*got)
    assert after == precision


def test_d_64_defaults_to_one_eighth(target):
    q, k, v = target.qkv(1, 65, 2, 64)
    for a, b in zip(target.fmha(q, k, v), target.fmha(q, k, v, softmax_scale=0.125), strict=True):
        assert torch.equal(a, b)
