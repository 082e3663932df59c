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
