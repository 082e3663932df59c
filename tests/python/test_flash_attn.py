"""The flash-attn names: their alignment (bottom right), arguments and results, against the oracle and `fmha`."""

import pytest
import torch
from oracle import expect

import cutlass_ext

# name -> how it takes q, k, v
TAKES = {
    "flash_attn_func": lambda q, k, v: (q, k, v),
    "flash_attn_qkvpacked_func": lambda q, k, v: (torch.stack([q, k, v], dim=2),),
    "flash_attn_kvpacked_func": lambda q, k, v: (q, torch.stack([k, v], dim=2)),
}


def sizes(name):
    """Packed QKV has one length and one head count."""
    return {} if name == "flash_attn_qkvpacked_func" else {"n_kv": 90, "heads_kv": 2}


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window_size": (20, 0)},
        {"window_size": (7, 11)},
        {"softmax_scale": 0.3, "softcap": 5.0},
        {"deterministic": True},
        {"dropout_p": 0.0},
    ],
    ids=str,
)
def test_options(target, name, options):
    q, k, v = target.qkv(2, 70, 4, 32, **sizes(name))
    out = getattr(cutlass_ext, name)(*TAKES[name](q, k, v), **options)
    same = {n: options[n] for n in ("causal", "softmax_scale", "softcap") if n in options}
    window = options.get("window_size", (-1, -1))
    expect(q, k, v, start_pos="end", window=window, **same).check(out)


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize("per_sequence", [False, True])
def test_alibi_slopes(target, name, per_sequence):
    q, k, v = target.qkv(2, 70, 4, 32, **sizes(name))
    slopes = target.vector(*((2, 4) if per_sequence else (4,))).abs()
    out = getattr(cutlass_ext, name)(*TAKES[name](q, k, v), causal=True, alibi_slopes=slopes)
    expect(q, k, v, start_pos="end", causal=True, alibi_slopes=slopes).check(out)


@pytest.mark.parametrize("name", TAKES)
def test_return_attn_probs_gives_lse(target, name):
    q, k, v = target.qkv(2, 70, 4, 32, **sizes(name))
    out, lse, *rest = getattr(cutlass_ext, name)(*TAKES[name](q, k, v), causal=True, return_attn_probs=True)
    expect(q, k, v, start_pos="end", causal=True).check(out, lse)
    assert rest == [None]  # flash-attn's third result: the dropout mask, which there is none of


@pytest.mark.parametrize("name", TAKES)
def test_arguments_by_position(target, name):
    """flash-attn's order: dropout_p, softmax_scale, causal, window_size, softcap, slopes, deterministic, probs."""
    q, k, v = target.qkv(2, 70, 4, 32, **sizes(name))
    slopes = target.vector(4).abs()
    positional = getattr(cutlass_ext, name)(*TAKES[name](q, k, v), 0.0, 0.2, True, (30, 0), 4.0, slopes, False, True)
    options = {"causal": True, "softmax_scale": 0.2, "window": (30, 0), "softcap": 4.0, "alibi_slopes": slopes}
    expect(q, k, v, start_pos="end", **options).check(*positional[:2])


def test_more_rows_than_keys(target):
    """Aligned at the end, the first rows of a causal call see nothing: zeros, and -inf where flash-attn says +inf."""
    q, k, v = target.qkv(1, 90, 2, 32, n_kv=40)
    out, lse, _ = cutlass_ext.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    expect(q, k, v, start_pos="end", causal=True).check(out, lse)
    assert not out[:, :50].any() and (lse[..., :50] == float("-inf")).all()


def test_packed_without_a_copy(target):
    """The packed buffer is read where it lies: same bits as its three slices."""
    qkv = target.randn(2, 70, 3, 4, 32)
    assert torch.equal(cutlass_ext.flash_attn_qkvpacked_func(qkv), cutlass_ext.flash_attn_func(*qkv.unbind(2)))
    kv = target.randn(2, 70, 2, 4, 32)
    q = target.randn(2, 70, 4, 32)
    assert torch.equal(cutlass_ext.flash_attn_kvpacked_func(q, kv), cutlass_ext.flash_attn_func(q, *kv.unbind(2)))


# ------------------------------------------------------------------------------------------------ engines' keywords
def varlen(q, k, v, **options):
    """`flash_attn_varlen_func` of sequences of one length, as the others give their results."""
    (batch, n_q, *_), n_kv = q.shape, k.shape[1]
    cu = [torch.arange(batch + 1, dtype=torch.int32, device=q.device) * n for n in (n_q, n_kv)]
    if "out" in options:
        options["out"] = options["out"].flatten(0, 1) if isinstance(options["out"], torch.Tensor) else options["out"]
    packed = (x.flatten(0, 1) for x in (q, k, v))
    results = cutlass_ext.flash_attn_varlen_func(*packed, *cu, n_q, n_kv, **options)
    out, *lse = results if isinstance(results, tuple) else (results,)
    lse = [x if x is None else x.unflatten(1, (batch, n_q)).transpose(0, 1) for x in lse]
    out = out.unflatten(0, (batch, n_q))
    return (out, *lse) if lse else out


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_longest_lengths_that_are_tensors(target, shape):
    """As transformers gives them, and flash-attn takes them."""
    q, k, v = (x[0] for x in target.qkv(1, 30, 4, 32))
    ends = target.int32([0, 10, 30])
    packed, most = (q, k, v, ends, ends), target.int32(20).view(shape)
    want = cutlass_ext.flash_attn_varlen_func(*packed, 20, 20, causal=True)
    for dtype in (torch.int32, torch.int64):
        got = cutlass_ext.flash_attn_varlen_func(*packed, most.to(dtype), most.to(dtype), causal=True)
        assert torch.equal(got, want)
    qkv = torch.stack((q, k, v), 1)
    assert torch.equal(cutlass_ext.flash_attn_varlen_qkvpacked_func(qkv, ends, most, causal=True), want)


ENGINES = {
    "flash_attn_func": cutlass_ext.flash_attn_func,
    "flash_attn_varlen_func": varlen,
    "flash_attn_with_kvcache": cutlass_ext.flash_attn_with_kvcache,
}
NEUTRAL = {"fa_version": 3, "scheduler_metadata": torch.ones(3), "pack_gqa": True, "sm_margin": 4,
           "q_descale": torch.ones(2), "k_descale": None, "v_descale": None, "q_v": None, "cp_world_size": 1,
           "cp_rank": 0, "cp_tot_seqused_k": None, "attention_chunk": 0, "num_splits": 0}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ENGINES)
def test_engines_keywords(target, name, dtype):
    """Those that change nothing, the sinks of vLLM, its results, and a buffer for them."""
    q, k, v = target.qkv(2, 70, 4, 32, n_kv=90, heads_kv=2)
    sinks = target.vector(4).to(dtype)
    out = torch.full_like(q, float("nan"))
    got = ENGINES[name](q, k, v, causal=True, s_aux=sinks, out=out, return_softmax_lse=True, **NEUTRAL)
    assert len(got) == 2 and got[0].data_ptr() == out.data_ptr()
    expect(q, k, v, start_pos="end", causal=True, sink=sinks.float()).check(out, got[1], small=True)


@pytest.mark.parametrize("name", ENGINES)
def test_out_may_be_any_part_of_a_buffer(target, name):
    """Rows that lie apart, which kernels write where they are aligned; also q itself, which is read before."""
    q, k, v = target.qkv(2, 70, 4, 32, n_kv=90, heads_kv=2)
    want = ENGINES[name](q, k, v, causal=True)
    buffer = torch.full((2, 76, 6, 72), float("nan"), device=q.device, dtype=q.dtype)
    for first_row, first_head, first_column in ((3, 1, 8), (0, 2, 0), (6, 0, 3)):
        rows, heads = slice(first_row, first_row + 70), slice(first_head, first_head + 4)
        out = buffer.fill_(float("nan"))[:, rows, heads, first_column : first_column + 32]
        if name != "flash_attn_varlen_func":
            assert torch.equal(ENGINES[name](q, k, v, causal=True, out=out), want) and torch.equal(out, want)
        else:
            ends = [torch.tensor([0, n], dtype=torch.int32, device=q.device) for n in (70, 90)]
            for b in range(2):
                options = {"causal": True, "out": out[b]}
                cutlass_ext.flash_attn_varlen_func(q[b], k[b], v[b], *ends, 70, 90, **options)
            torch.testing.assert_close(out, want, rtol=1e-2, atol=1e-2)  # a batch may have other tiles
        assert buffer.isfinite().sum() == out.numel() and out.isfinite().all()
    turned = torch.empty_like(want.transpose(1, 2).contiguous()).transpose(1, 2)
    if name != "flash_attn_varlen_func":
        assert torch.equal(ENGINES[name](q, k, v, causal=True, out=turned), want) and torch.equal(turned, want)
    assert torch.equal(ENGINES[name](q, k, v, causal=True, out=q), want) and torch.equal(q, want)


@pytest.mark.parametrize("name", ENGINES)
def test_out_of_padded_head_dims(target, name):
    """Of which `fmha` writes more columns than there are."""
    if name == "flash_attn_with_kvcache":
        pytest.skip("takes no such head dims")
    q, k, v = target.qkv(2, 70, 4, 32, n_kv=90, heads_kv=2)
    tensors = [x[..., :30] for x in (q, k, v)]
    want, out = ENGINES[name](*tensors, causal=True), torch.empty_like(tensors[0])
    got = ENGINES[name](*tensors, causal=True, out=out)
    assert got.data_ptr() == out.data_ptr() and torch.equal(out, want)
    turned = v.transpose(1, 3).contiguous().transpose(1, 3)  # columns that lie apart
    want = ENGINES[name](q, k, v)
    assert torch.equal(ENGINES[name](q, k, turned, out=q), want) and torch.equal(q, want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ENGINES)
def test_out_is_written_by_kernels(target, name):
    """Without a copy, but for what they cannot write."""
    if not target.cuda:
        pytest.skip("a CPU has no kernels")
    q, k, v = target.qkv(2, 70, 4, 32, n_kv=90, heads_kv=2)
    with pytest.raises(ValueError, match="out: is on another device"):
        ENGINES[name](q, k, v, out=torch.empty_like(q, device="cpu"))
    wide = torch.empty(2, 70, 4, 40, device=q.device, dtype=q.dtype)
    for out, copies in ((torch.empty_like(q), 0), (wide[..., 8:], 0), (wide[..., 1:33], 1), (q, 1)):
        if name == "flash_attn_varlen_func" and not out.is_contiguous():
            continue  # which flattens it
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ENGINES[name](q, k, v, causal=True, out=out)
        assert sum(event.name == "aten::copy_" for event in profile.events()) == copies


@pytest.mark.parametrize("name", TAKES)
def test_packed_names_take_them_too(target, name):
    q, k, v = target.qkv(2, 70, 4, 32, **sizes(name))
    sinks, out = target.vector(4), torch.full_like(q, float("nan"))
    tensors = TAKES[name](q, k, v)
    got = getattr(cutlass_ext, name)(*tensors, causal=True, s_aux=sinks, out=out, return_softmax_lse=True, fa_version=2)
    assert got[0] is out and len(got) == 2
    expect(q, k, v, start_pos="end", causal=True, sink=sinks).check(*got)


WRONG = [
    *[(name, NotImplementedError, torch.ones(2, 2)) for name in ("q_v", "qv")],
    *[(name, NotImplementedError, torch.ones(2)) for name in ("seqused_q", "cp_tot_seqused_k")],
    *[(name, NotImplementedError, 2) for name in ("cp_world_size", "cp_rank", "attention_chunk")],
    ("fa_vers", TypeError, 3),
    ("out", TypeError, 3),
    ("out", TypeError, torch.zeros(2, 6, 4, 16, dtype=torch.float16)),
    ("out", ValueError, torch.zeros(2, 6, 4, 24)),
    ("out", ValueError, torch.zeros(2, 5, 4, 16)),
    ("s_aux", TypeError, [0.0] * 4),
    ("s_aux", TypeError, torch.zeros(4, dtype=torch.float64)),
    ("s_aux", ValueError, torch.zeros(3)),
    ("num_splits", ValueError, -1),
]


@pytest.mark.parametrize("given,error,value", WRONG, ids=lambda x: x if isinstance(x, str) else "")
@pytest.mark.parametrize("name", ENGINES)
def test_engines_keywords_are_refused_by_name(name, given, error, value):
    q, k, v = torch.zeros(2, 6, 4, 16), torch.zeros(2, 9, 2, 16), torch.zeros(2, 9, 2, 16)
    with pytest.raises(error, match=rf"\b{given}\b") as raised:
        ENGINES[name](q, k, v, **{given: value})
    assert type(raised.value) is error and "\n" not in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ENGINES.keys() - {"flash_attn_with_kvcache"})  # which does not take it
def test_sinks_beside_float64(name, dtype):
    q, k, v = (torch.randn(2, n, h, 16, dtype=torch.float64) for n, h in ((6, 4), (9, 2), (9, 2)))
    sinks = torch.randn(4, dtype=dtype)
    want = cutlass_ext.fmha(q, k, v, sink=sinks.double())
    torch.testing.assert_close(ENGINES[name](q, k, v, s_aux=sinks), want)


def test_no_window():
    q = torch.randn(2, 6, 4, 16)
    assert torch.equal(cutlass_ext.flash_attn_func(q, q, q, window_size=None), cutlass_ext.flash_attn_func(q, q, q))


def test_one_sink_under_two_names():
    q, sink = torch.zeros(2, 6, 4, 16), torch.zeros(4)
    with pytest.raises(ValueError, match="s_aux"):
        cutlass_ext.flash_attn_with_kvcache(q, q, q, sink=sink, s_aux=sink)


@pytest.mark.parametrize("d", [16, 10])
def test_a_last_dimension_that_is_not_contiguous(target, d):
    """Of a head dim that is padded, too: PyTorch's pad leaves the strides in their order."""
    q, k, v = (target.randn(2, 30, d, 4).mT.requires_grad_() for _ in "qkv")
    dout = target.randn(2, 30, 4, d)
    want, got = (
        [out, *torch.autograd.grad(out, (q, k, v), dout)]
        for out in (
            cutlass_ext.flash_attn_func(*(x.contiguous() for x in (q, k, v)), causal=True),
            cutlass_ext.flash_attn_func(q, k, v, causal=True),
        )
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
