"""Parts of the keys, each a call with the position of its first key, merged: what one call of all keys gives, with its
gradients, whatever the features, the dropped weights included; and results that are not rounded before."""

import itertools

import pytest
import torch
from conftest import FLOAT32, HOPPER_ALONE, TENSOR_CORES, TORCH_16_BIT, targets
from oracle import expect, expect_gradients, expect_gradients_packed, expect_packed, peer_tolerance
from test_backward import of_out
from test_varlen import packed

import cutlass_ext

ROWS, KEYS, HEADS, HEADS_KV = 100, 200, 4, 2
EVEN, ODD = (0, 64, 136, 200), (0, 77, 78, 200)  # at multiples of 8, where draws of dropout are shared, and elsewhere
SEED = -987654321987654321, 5


@pytest.fixture(scope="module", params=targets(*FLOAT32, *TENSOR_CORES, *HOPPER_ALONE, *TORCH_16_BIT))
def target(request):
    """Every family of kernels, and PyTorch's operators, in every dtype."""
    return request.param


def tensors(target, name):
    """The options of a case that are tensors."""
    if name == "drop":
        return {"dropout_p": 0.3, "dropout_seed": torch.tensor(SEED, device=target.device)}
    if name == "alibi":
        return {"alibi_slopes": target.vector(2, HEADS).abs() / 20}
    if name == "sink":
        return {"sink": target.vector(HEADS)}
    if name == "bias":
        return {"bias": torch.randn(1, HEADS, ROWS, KEYS, device=target.device)}
    if name == "mask":
        return {"mask": torch.rand(2, 1, 1, KEYS, device=target.device) < 0.7}
    return {"seqused_k": target.int32([KEYS, 130]), "leftpad_k": target.int32([9, 0])}


CASES = [
    ("", {"causal": True, "start_pos": 100}),
    ("", {"causal": True, "start_pos": "end"}),
    ("alibi", {"causal": True, "start_pos": [30, 90]}),
    ("alibi", {"start_pos": -20, "window": (60, 40)}),
    ("sink", {"window": (50, -1), "start_pos": 70, "softcap": 5.0}),
    ("drop", {}),
    ("drop", {"causal": True, "start_pos": "end", "head_start": 3}),
    ("drop sink", {"window": (90, 11), "start_pos": [60, 130], "sequence_start": 2}),
    ("drop lengths", {"causal": True, "start_pos": "end"}),
    ("drop bias mask", {"causal": True, "start_pos": 50}),
]


def whole_of(target, names, options):
    options = {name: target.int32(x) if isinstance(x, list) else x for name, x in options.items()}
    for name in names.split():
        options |= tensors(target, name)
    return options


def part_of(target, options, a, b, *, by_tensor):
    """The options of a call of the keys [a, b) of a call of `KEYS` with `options`."""
    own = options | {"key_start": target.int32([a, a]) if by_tensor else a}
    used = options.get("seqused_k", target.int32([KEYS, KEYS]))
    if options.get("start_pos") == "end" and (b < KEYS or "seqused_k" in options):
        own["start_pos"] = used - ROWS
    for name in ("seqused_k", "leftpad_k"):
        if name in options:
            own[name] = (options[name] - a).clamp(0, b - a)
    for name in ("bias", "mask"):
        if name in options:
            own[name] = options[name][..., a:b]
    if a > 0:
        own.pop("sink", None)
    return own


def assert_near(got, want, dtype, factor, what):
    """As near as roundings to `dtype` leave them: of the largest, and of the whole."""
    eps = torch.finfo(dtype).eps
    atol = factor * eps * want.abs().max().item() + 2e-5
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=0.0, msg=lambda m: f"{what}: {m}")
    error, norm = (got.double() - want).norm().item(), want.norm().item()
    assert error <= factor * eps * norm + 2e-5 * want.numel() ** 0.5, f"{what}: off by {error:.2e} of {norm:.2e}"


@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["rounded", "float32"])
@pytest.mark.parametrize("cuts", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{i}-{CASES[i][0] or 'plain'}")
def test_parts_merged_are_the_whole(target, number, cuts, out_dtype):
    """Forward, and with lse and delta of the whole the gradients: dk and dv of each part, sums of dq, dsink, dbias."""
    options = whole_of(target, *CASES[number])
    by_tensor = number % 2 == 1
    q, k, v = target.qkv(2, ROWS, HEADS, 64, n_kv=KEYS, heads_kv=HEADS_KV)
    dout, dlse = of_out(target, q, v)
    if target.backend == "sm90" and "bias" in options and options.get("softcap"):
        pytest.skip("of sizes that Hopper's gradients do not have")
    cut = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    parts = [(k[:, at], v[:, at], part_of(target, options, at.start, at.stop, by_tensor=by_tensor)) for at in cut]
    results = [target.fmha(q, *kv, **own, out_dtype=out_dtype) for *kv, own in parts]
    out, lse = cutlass_ext.merge_attention(*zip(*results, strict=True))
    expected = expect(q, k, v, **options)
    if out_dtype is None:
        assert_near(out, expected.out, target.dtype, 4, "out")
    else:  # as exact as one call, rounded once
        expected.check(out.to(target.dtype), small=True)
    seeing = expected.lse.isfinite()
    assert torch.equal(lse.isfinite(), seeing)
    torch.testing.assert_close(lse[seeing].double(), expected.lse[seeing], atol=2e-5, rtol=2e-5)

    delta = ((dout.float() * out.float()).sum(-1).transpose(1, 2) - dlse).contiguous()
    got = [
        cutlass_ext.fmha_backward(dout, q, *kv, None, lse, delta=delta, backend=target.backend, **own)
        for *kv, own in parts
    ]
    want = expect_gradients(q, k, v, dout, dlse, **options).oracle
    joined = {"dq": sum(t[0].float() for t in got)} | {
        f"d{n}": torch.cat([t[i] for t in got], 1) for i, n in ((1, "k"), (2, "v"))
    }
    if "sink" in options:
        joined["dsink"] = got[0][3]
    if "bias" in options:
        joined["dbias"] = torch.cat([t[-1] for t in got], -1)
    for name, gradient in joined.items():
        assert_near(gradient, want[name], target.dtype, 8, name)


def test_gradients_through_parts(target):
    """By autograd, through the merge, dropout in the parts."""
    q, k, v = (t.requires_grad_() for t in target.qkv(2, ROWS, HEADS, 32, n_kv=KEYS, heads_kv=HEADS_KV))
    dout, dlse = of_out(target, q, v)
    options = {"causal": True, "start_pos": 70} | tensors(target, "drop")
    parts = [target.fmha(q, k[:, a:b], v[:, a:b], key_start=a, **options) for a, b in ((0, 90), (90, KEYS))]
    results = cutlass_ext.merge_attention(*zip(*parts, strict=True))
    got = torch.autograd.grad(results, (q, k, v), (dout, dlse))
    want = expect_gradients(*(t.detach() for t in (q, k, v)), dout, dlse, **options).oracle
    for name, gradient in zip(("dq", "dk", "dv"), got, strict=True):
        assert_near(gradient, want[name], target.dtype, 8, name)


@pytest.mark.parametrize("names", ["", "drop"], ids=["plain", "drop"])
def test_parts_of_packed_sequences(target, names):
    """Chunks of several sequences, as a ring has them: each sequence's part begins elsewhere."""
    lengths_q, lengths_k = [40, 0, 71, 5], [90, 12, 60, 0]
    batch = packed(target, lengths_q, lengths_k, heads=(HEADS, HEADS_KV))
    (q, k, v), options = batch, batch.packing
    own = {"causal": True, "start_pos": target.int32([500, -3, 44, 7])} | {
        n: x for n in names.split() for n, x in tensors(target, n).items()
    }
    own["key_start"] = target.int32([470, 13, 8, -5])
    out, lse = target.fmha(q, k, v, **options, **own)
    expect_packed(q, k, v, **options, **own).check(out, lse, small=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = target.gradients(q, k, v, dout, dlse, **options, **own)
    expect_gradients_packed(q, k, v, dout, dlse, **options, **own).check(got, small=True)


# ------------------------------------------------------------------------------------------------ out_dtype
def as_if_merged(out, lse):
    """Float32 results of 16-bit inputs, which lie as lse does."""
    assert out.dtype == lse.dtype == torch.float32
    assert out.transpose(-2, -3).is_contiguous() and lse.is_contiguous()


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("rows,keys", [(ROWS, KEYS), (1, 1000), (3, 77), (150, 0), (0, 20)], ids=str)
@pytest.mark.parametrize("names", ["", "sink", "alibi", "drop"])
def test_float32_results(target, names, rows, keys, num_splits):
    """Nearer to the oracle than what is rounded, of query tiles and of decoding, of one part and of several."""
    q, k, v = target.qkv(2, rows, HEADS, 64, n_kv=keys, heads_kv=HEADS_KV)
    options = {"causal": True, "start_pos": "end"}
    for name in names.split():
        options |= tensors(target, name)
    got = target.fmha(q, k, v, out_dtype=torch.float32, num_splits=num_splits, **options)
    if target.dtype != torch.float32:
        as_if_merged(*got)
    want, rounded = expect(q, k, v, **options), target.fmha(q, k, v, num_splits=num_splits, **options)
    want.check(got[0].to(target.dtype), got[1], small=True)
    errors = [(out.double() - want.out).norm().item() for out in (got[0], rounded[0])]
    assert errors[0] <= 1.01 * errors[1] + 1e-6
    if target.dtype != torch.float32 and rows * keys > 10_000:
        assert (got[0] != got[0].to(target.dtype)).float().mean() > 0.5
    without_lse = target.fmha(
        q, k, v, out_dtype=torch.float32, num_splits=num_splits, return_lse=False, **options
    )  # fmt: skip
    assert torch.equal(without_lse, got[0])


@pytest.mark.parametrize("d", [192, 256])
def test_float32_results_of_wide_heads_with_a_sink(target, d):
    """Columns beyond 128 are other CTAs', of the launch that lets the sink in: they do not read lse as it leaves it."""
    q, k, v = target.qkv(2, 600, 8, d, n_kv=64, heads_kv=2)
    options = {"sink": target.vector(8), "out_dtype": torch.float32, "num_splits": 1}
    out, lse = target.fmha(q, k, v, **options)
    expect(q, k, v, sink=options["sink"]).check(out.to(target.dtype), lse, small=True)
    assert torch.equal(target.fmha(q, k, v, return_lse=False, **options), out)


@pytest.mark.parametrize("names", ["", "sink"])
def test_float32_results_of_packed_sequences(target, names):
    batch = packed(target, [40, 0, 150, 1], [90, 12, 150, 0], heads=(HEADS, HEADS_KV))
    options = {"causal": True, "start_pos": "end"}
    for name in names.split():
        options |= tensors(target, name)
    out, lse = target.fmha(*batch, **batch.packing, **options, out_dtype=torch.float32)
    if target.dtype != torch.float32:
        as_if_merged(out, lse)
    expect_packed(*batch, **batch.packing, **options).check(out.to(target.dtype), lse, small=True)


def test_float32_results_over_pages(target):
    """Chunks and single rows in one call, of which a launch each computes some."""
    lengths_q, lengths_k = [1, 60, 2, 130], [300, 64, 90, 130]
    q, _, _ = batch = packed(target, lengths_q, lengths_k, heads=(HEADS, HEADS_KV))
    pages = sum(-(-n // 16) for n in lengths_k)
    table, pools, page = torch.zeros(4, 19, dtype=torch.int32), [target.randn(pages, 16, HEADS_KV, 64) for _ in "kv"], 0
    for b, n in enumerate(lengths_k):
        own = -(-n // 16)
        table[b, :own] = torch.arange(page, page + own)
        page += own
    packing = {name: batch.packing[name] for name in ("cu_seqlens_q", "max_seqlen_q")}
    options = {"causal": True, "start_pos": "end", "seqused_k": target.int32(lengths_k)}
    out, lse = target.fmha(
        q, *pools, **packing, **options, block_table=table.to(target.device), out_dtype=torch.float32
    )
    if target.dtype != torch.float32:
        as_if_merged(out, lse)
    keys = [torch.cat([pool[table[b].long()].flatten(0, 1)[:n] for b, n in enumerate(lengths_k)]) for pool in pools]
    del options["seqused_k"]
    expect_packed(q, *keys, **batch.packing, **options).check(out.to(target.dtype), lse, small=True)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_gradients_of_float32_results(target, packing):
    """Those of the rounded gradient that comes in, in the dtype of the inputs."""
    options = {"causal": True, "sink": target.vector(HEADS)}
    if packing:
        batch = packed(target, [40, 0, 150], [90, 12, 150], heads=(HEADS, HEADS_KV))
        (q, k, v), options = batch, options | batch.packing
    else:
        q, k, v = target.qkv(2, ROWS, HEADS, 64, n_kv=KEYS, heads_kv=HEADS_KV)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], device=target.device)
    dlse = torch.randn(*q.shape[:-3], q.shape[-2], q.shape[-3], device=target.device)
    expected = expect_gradients_packed if packing else expect_gradients
    for of_lse in (None, dlse):
        want = expected(q, k, v, dout.to(target.dtype), of_lse, **options)
        got = target.gradients(q, k, v, dout, of_lse, out_dtype=torch.float32, **options)
        want.check(got, small=True)


def test_gradients_in_float32(target):
    """Where they are to be had; kernels of 16 bits refuse them by name."""
    q, k, v = target.qkv(2, ROWS, HEADS, 64, n_kv=KEYS, heads_kv=HEADS_KV)
    dout, _ = of_out(target, q, v)
    out, lse = target.fmha(q, k, v, causal=True)

    def gradients(**options):
        return cutlass_ext.fmha_backward(dout, q, k, v, out, lse, causal=True, backend=target.backend, **options)

    if target.dtype != torch.float32 and target.backend != "torch":
        with pytest.raises(NotImplementedError, match=r"^out_dtype: "):
            gradients(out_dtype=torch.float32)
        return
    got, want = gradients(out_dtype=torch.float32), gradients()
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32 and a.is_contiguous()
        torch.testing.assert_close(a.to(b.dtype), b, **peer_tolerance(target.dtype))


def test_key_start_shifts_positions_alone(target):
    """Without what goes by positions it changes nothing; with start_pos as much further, nothing either."""
    q, k, v = target.qkv(2, 40, HEADS, 64, n_kv=90, heads_kv=HEADS_KV)
    plain = target.fmha(q, k, v)
    shifts = 7, -300, target.int32([1000, -8])
    for key_start in shifts:
        for a, b in zip(target.fmha(q, k, v, key_start=key_start), plain, strict=True):
            torch.testing.assert_close(a, b, **peer_tolerance(target.dtype))
    for start_pos in (0, "end", target.int32([3, 50])):
        want = target.fmha(q, k, v, causal=True, window=(30, 0), start_pos=start_pos)
        for key_start in shifts:
            moved = start_pos if isinstance(start_pos, str) else start_pos + key_start
            got = target.fmha(q, k, v, causal=True, window=(30, 0), start_pos=moved, key_start=key_start)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, **peer_tolerance(target.dtype))
