"""`scaled_dot_product_attention`: PyTorch's signature, layout (BHSD) and alignment (top left), against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F
from oracle import expect, peer_tolerance

import cutlass_ext
from cutlass_ext import support


def bhsd(target, batch, heads, n, d):
    return target.randn(batch, heads, n, d)


@pytest.mark.parametrize("n_q,n_kv", [(64, 64), (70, 130), (130, 70), (1, 99)])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_like_pytorch(target, n_q, n_kv, scale, is_causal):
    q, k, v = bhsd(target, 2, 4, n_q, 32), bhsd(target, 2, 4, n_kv, 32), bhsd(target, 2, 4, n_kv, 64)
    out = cutlass_ext.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
    torch.testing.assert_close(
        out, F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale), **peer_tolerance(target.dtype)
    )
    bshd = [t.transpose(1, 2) for t in (q, k, v)]
    expect(*bshd, causal=is_causal, softmax_scale=scale).check(out.transpose(1, 2), small=n_q == 1)


def test_enable_gqa(target):
    q, k, v = bhsd(target, 2, 8, 70, 32), bhsd(target, 2, 2, 90, 32), bhsd(target, 2, 2, 90, 32)
    out = cutlass_ext.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(
        out, F.scaled_dot_product_attention(q, k, v, enable_gqa=True), **peer_tolerance(target.dtype)
    )


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "flash_attn_func"])
def test_head_dims_that_autocast_makes_odd(target_fp32, name):
    """12 columns of float32 are read where they lie, of 16 bits not."""
    q, k, v = (target_fp32.randn(1, 5, 2, 12) for _ in "qkv")
    call = getattr(cutlass_ext, name)
    tensors = [x.transpose(1, 2) for x in (q, k, v)] if "scaled" in name else [q, k, v]
    with torch.autocast(target_fp32.device, torch.bfloat16):
        got = call(*tensors)
    assert got.dtype == torch.bfloat16 and torch.equal(got, call(*(x.bfloat16() for x in tensors)))


def test_options_that_ask_for_nothing_are_left_out():
    """But for the longest of packed sequences, which may all be empty."""
    options = {"bias": None, "causal": False, "softcap": 0.0, "max_seqlen_q": 0, "dropout_p": 0.5}
    assert support.given(**options) == {"max_seqlen_q": 0, "dropout_p": 0.5}


def test_masks_under_another_default_dtype():
    q = torch.randn(1, 2, 5, 8)
    mask = torch.rand(5, 5) < 0.7
    want = cutlass_ext.scaled_dot_product_attention(q, q, q, mask)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(cutlass_ext.scaled_dot_product_attention(q, q, q, mask), want)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "flash_attn_func"])
def test_strided_nested_tensors_are_named(name):
    x = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(4, 2, 8)])
    with pytest.raises(TypeError, match=r"^(query|q): is (a )?nested"):
        getattr(cutlass_ext, name)(x, x, x)


def test_arguments_by_position(target):
    q, k, v = (bhsd(target, 1, 2, 40, 16) for _ in "qkv")
    out = cutlass_ext.scaled_dot_product_attention(q, k, v, None, 0.0, True)
    torch.testing.assert_close(
        out, F.scaled_dot_product_attention(q, k, v, None, 0.0, True), **peer_tolerance(target.dtype)
    )


@pytest.mark.parametrize("d,d_v", [(10, 10), (30, 17), (32, 7)])
def test_any_head_dim_and_strides(target, d, d_v):
    """As PyTorch takes them, gradients too, with a last dimension that is not contiguous."""
    q, k = (bhsd(target, 2, 4, d, 40).mT.requires_grad_() for _ in "qk")
    leaves = q, k, bhsd(target, 2, 4, 40, d_v).requires_grad_()
    dout = bhsd(target, 2, 4, 40, d_v)
    results = []
    for attention in (cutlass_ext.scaled_dot_product_attention, F.scaled_dot_product_attention):
        out = attention(*leaves, is_causal=True)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **{name: 8 * x for name, x in peer_tolerance(target.dtype).items()})
