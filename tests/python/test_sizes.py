"""Every head dim, every length around the edges of a tile, zero sizes, and the layouts a caller's tensors come in."""

import itertools

import pytest
import torch
from oracle import expect

import cutlass_ext

EDGES = [1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, *range(95, 98), *range(126, 131)]


@pytest.mark.parametrize("d_max", range(8, 257, 8))
def test_head_dim(target, d_max):
    """Every one there is: multiples of 4 in float32, of 8 in 16 bits."""
    for d in range(d_max, d_max - 8, -target.step):
        q, k, v = target.qkv(2, 70, 4, d, heads_kv=2)
        expect(q, k, v, causal=True).check(*target.fmha(q, k, v, causal=True), what=f"{d=}")


@pytest.mark.parametrize("d,d_v", [(64, 128), (128, 64), (192, 128), (4, 256), (256, 4), (32, 36), (100, 20), (8, 60)])
def test_d_and_d_v_differ(target, d, d_v):
    d, d_v = target.head_dim(d), target.head_dim(d_v)
    for causal, (n_q, n_kv) in itertools.product((False, True), ((70, 131), (1, 200))):
        q, k, v = target.qkv(2, n_q, 4, d, n_kv=n_kv, heads_kv=1, d_v=d_v)
        got = target.fmha(q, k, v, causal=causal, start_pos="end")
        expect(q, k, v, causal=causal, start_pos="end").check(*got, small=n_q == 1)


@pytest.mark.parametrize("group", [1, 2, 4, 5, 8, 32])
@pytest.mark.parametrize("d", [64, 128])
def test_query_heads_of_a_key_head(target, d, group):
    """Which KV head is read. In fp32 the largest error hangs on one large score: there the check is not the strict
    one, which the tests of sizes and features make."""
    small = target.dtype == torch.float32
    for causal, (n_q, n_kv) in itertools.product((False, True), ((70, 131), (3, 150), (1, 200))):
        q, k, v = target.qkv(2, n_q, 2 * group, d, n_kv=n_kv, heads_kv=2)
        got = target.fmha(q, k, v, causal=causal, start_pos="end")
        expect(q, k, v, causal=causal, start_pos="end").check(*got, small=small or n_q < 70, what=f"{n_q=} {causal=}")


def test_head_dim_torch_16_bit(target_16_bit):
    for d in range(8, 257, 8):
        q, k, v = target_16_bit.qkv(1, 70, 2, d)
        expect(q, k, v).check(*target_16_bit.fmha(q, k, v), what=f"d={d}")


@pytest.mark.parametrize("n_q", EDGES)
def test_lengths_around_tile_edges(target, n_q):
    """One call for each N_kv, all of one N_q, with odd and even numbers of heads so that the work items end at both.
    Few rows have many heads: over 32 elements the norms of two rounding errors are more than 1.5 apart in 3% of draws
    of bfloat16."""
    heads = 1 if n_q > 16 else 31
    for n_kv, causal in itertools.product(EDGES, (False, True)):
        q, k, v = target.qkv(1, n_q, heads + n_kv % 2, 32, n_kv=n_kv)
        got = target.fmha(q, k, v, causal=causal, start_pos="end")
        expect(q, k, v, causal=causal, start_pos="end").check(*got, small=True, what=f"{n_q=} {n_kv=} {causal=}")


@pytest.mark.parametrize("n_q", [63, 64, 65, 127, 128, 129, 191, 192, 193, 257])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_edges_of_the_tiles_of_each_head_dim(kernels, d, n_q):
    """Tiles shrink as the head dim grows; with the number of splits fixed their height goes by N_q alone."""
    for n_kv, num_splits in itertools.product((31, 32, 33, 63, 65, 96, 127, 128, 129, 193), (1, 2)):
        q, k, v = kernels.qkv(1, n_q, 2, d, n_kv=n_kv, heads_kv=1)
        got = kernels.fmha(q, k, v, causal=True, start_pos="end", num_splits=num_splits)
        expect(q, k, v, causal=True, start_pos="end").check(*got, small=True, what=f"{n_kv=} {num_splits=}")


@pytest.mark.parametrize("tens", range(0, 130, 10))
def test_every_length_to_130(target, tens):
    for n in range(tens + 1, tens + 11):
        q, k, v = target.qkv(1, n, 2, 64)
        expect(q, k, v, causal=True).check(*target.fmha(q, k, v, causal=True), small=True, what=f"{n=}")


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("batch,n_q,n_kv", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0), (2, 0, 0)])
def test_zero_sizes(target, batch, n_q, n_kv, sink):
    q, k, v = target.qkv(batch, n_q, 4, 16, n_kv=n_kv, heads_kv=2, d_v=24)
    logits = target.vector(4) if sink else None
    for options in ({}, {"causal": True, "start_pos": "end"}, {"num_splits": 3}):
        out, lse = target.fmha(q, k, v, sink=logits, **options)
        assert out.shape == (batch, n_q, 4, 24) and lse.shape == (batch, 4, n_q)
        assert out.dtype == target.dtype and not out.any()
        of_empty_rows = logits if sink else torch.full((4,), float("-inf"), device=target.device)
        # to base 2 and back: of one sink in seven the last bit
        torch.testing.assert_close(lse, of_empty_rows[None, :, None].expand(batch, 4, n_q), rtol=2**-22, atol=0)


# ------------------------------------------------------------------------------------------------ layouts
def packed(target, batch, n, heads, d):
    return target.randn(batch, n, 3, heads, d).unbind(2)


def bhsd(target, batch, n, heads, d):
    return [target.randn(batch, heads, n, d).transpose(1, 2) for _ in "qkv"]


def sbhd(target, batch, n, heads, d):
    return [target.randn(n, batch, heads, d).transpose(0, 1) for _ in "qkv"]


def heads_packed(target, batch, n, heads, d):
    """[B, N, H, 3 d]: rows of 3 d, a head's q, k and v side by side."""
    return target.randn(batch, n, heads, 3 * d).split(d, dim=-1)


def odd_rows(target, batch, n, heads, d):
    """Rows of d + 1 elements: only every fourth (16-bit: eighth) begins on 16 bytes."""
    return [target.randn(batch, n, heads, d + 1)[..., :d] for _ in "qkv"]


def odd_offsets(target, batch, n, heads, d):
    count = batch * n * heads * d
    return [target.randn(count + 3)[o : o + count].view(batch, n, heads, d) for o in (1, 2, 3)]


def padded_rows(target, batch, n, heads, d):
    """Rows that begin on 16 bytes in float32, on 8 in 16 bits."""
    return [target.randn(batch, n, heads, d + 4)[..., 4:] for _ in "qkv"]


def widely_padded_rows(target, batch, n, heads, d):
    """Rows that begin on 16 bytes in every dtype."""
    return [target.randn(batch, n, heads, d + 24)[..., 8:-16] for _ in "qkv"]


def only_v_is_odd(target, batch, n, heads, d):
    return [*target.qkv(batch, n, heads, d)[:2], odd_rows(target, batch, n, heads, d)[2]]


def every_second_token(target, batch, n, heads, d):
    return [target.randn(batch, 2 * n, heads, d)[:, ::2] for _ in "qkv"]


def one_cache_for_all(target, batch, n, heads, d):
    """K and V of stride 0 along batch: a prefix that all sequences share; and one KV head by expand."""
    kv = [target.randn(1, n, 1, d).expand(batch, n, heads, d) for _ in "kv"]
    return [target.randn(batch, n, heads, d), *kv]


LAYOUTS = [
    packed, bhsd, sbhd, heads_packed, odd_rows, odd_offsets, padded_rows, widely_padded_rows, only_v_is_odd,
    every_second_token, one_cache_for_all,
]  # fmt: skip


@pytest.mark.parametrize("d", [64, 20, 128])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layout(target, layout, d):
    q, k, v = layout(target, 2, 77, 4, target.head_dim(d))
    if not target.takes(q, k, v):
        with pytest.raises(NotImplementedError, match="16 bytes"):
            target.fmha(q, k, v, causal=True)
        return
    expected = expect(q, k, v, causal=True)
    out, lse = target.fmha(q, k, v, causal=True)
    expected.check(out, lse)
    assert out.is_contiguous() and lse.is_contiguous()


def test_strides_of_dimensions_of_one_mean_nothing(target):
    q, k, v = target.qkv(1, 1, 1, 16, n_kv=40)
    strange = q.as_strided(q.shape, (3, 5, 7, 1))
    out, lse = target.fmha(strange, k, v)
    expect(q, k, v).check(out, lse, small=True)


EXPANDED = {
    "heads": lambda x: x[:1, :, :1].expand(1, -1, 4, -1),
    # Where a batch of one has a stride of 1, PyTorch puts head_dim outside in a float32 copy.
    "heads of one sequence": lambda x: x[0, :, 0].as_strided((1, x.shape[1], 4, 64), (1, x.stride(1), 0, 1)),
    "rows": lambda x: x[:, :1].expand(-1, x.shape[1], -1, -1),
    "overlapping rows": lambda x: x.flatten().as_strided(x.shape, (x.stride(0), 8, 8, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("how", EXPANDED)
def test_expanded_on_a_cpu(how, dtype):
    """PyTorch's fused attention takes rows that are contiguous, and apart from each other, for granted."""
    strange = [EXPANDED[how](torch.randn(2, rows, 4, 64, dtype=dtype)) for rows in (77, 40, 40, 77)]
    q, k, v, dout = (x.contiguous() for x in strange)
    out, lse = cutlass_ext.fmha(*strange[:3], return_lse=True)
    expect(q, k, v).check(out, lse, small=True)
    assert torch.equal(cutlass_ext.fmha(*strange[:3]), cutlass_ext.fmha(q, k, v))
    gradients = cutlass_ext.fmha_backward(strange[3], *strange[:3], out, lse)
    for got, want in zip(gradients, cutlass_ext.fmha_backward(dout, q, k, v, out, lse), strict=True):
        assert torch.equal(got, want)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cutlass_ext.fmha(*strange[:3]), cutlass_ext.fmha(q, k, v))
