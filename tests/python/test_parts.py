"""Parts of the keys, each a call with the position of its first key, merged: what one call of all keys gives, with its
gradients, whatever the features, the dropped weights included."""

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


@pytest.mark.parametrize("cuts", [EVEN, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{i}-{CASES[i][0] or 'plain'}")
def test_parts_merged_are_the_whole(target, number, cuts):
    """Forward, and with lse and delta of the whole the gradients: dk and dv of each part, sums of dq, dsink, dbias."""
    options = whole_of(target, *CASES[number])
    by_tensor = number % 2 == 1
    q, k, v = target.qkv(2, ROWS, HEADS, 64, n_kv=KEYS, heads_kv=HEADS_KV)
    dout, dlse = of_out(target, q, v)
    if target.backend == "sm90" and "bias" in options and options.get("softcap"):
        pytest.skip("of sizes that Hopper's gradients do not have")
    cut = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    parts = [(k[:, at], v[:, at], part_of(target, options, at.start, at.stop, by_tensor=by_tensor)) for at in cut]
    results = [target.fmha(q, *kv, **own) for *kv, own in parts]
    out, lse = cutlass_ext.merge_attention(*zip(*results, strict=True))
    expected = expect(q, k, v, **options)
    assert_near(out, expected.out, target.dtype, 4, "out")
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
