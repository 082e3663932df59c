"""A sequence piece by piece: single rows and chunks at a start position, against the same rows of one prefill."""

import itertools

import pytest
import torch
from conftest import HOPPER_ALONE, TENSOR_CORES, targets
from oracle import expect, expect_packed, peer_tolerance
from test_kvcache import paged_pair, poison_tails

import cutlass_ext

N, HEADS, D = 256, 4, 64


@pytest.fixture(scope="module")
def prefill(target):
    torch.manual_seed(2)
    q, k, v = target.qkv(2, N, HEADS, D)
    return q, k, v, *target.fmha(q, k, v, causal=True)


def assert_same_rows(got, out, lse, rows):
    tolerance = {"atol": 2e-6, "rtol": 2e-6} if out.dtype == torch.float32 else peer_tolerance(out.dtype)
    torch.testing.assert_close(got[0], out[:, rows], **tolerance)
    torch.testing.assert_close(got[1], lse[..., rows], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("start_pos", [0, 1, 63, 64, 127, 255])
def test_single_row(target, prefill, start_pos, num_splits):
    q, k, v, out, lse = prefill
    row, rows = q[:, start_pos : start_pos + 1], slice(start_pos, start_pos + 1)
    options = {"causal": True, "num_splits": num_splits}
    # the whole cache behind the row, the part that it may see, and that part by its length
    assert_same_rows(target.fmha(row, k, v, start_pos=start_pos, **options), out, lse, rows)
    visible = k[:, : start_pos + 1], v[:, : start_pos + 1]
    assert_same_rows(target.fmha(row, *visible, start_pos=start_pos, **options), out, lse, rows)
    assert_same_rows(target.fmha(row, *visible, start_pos="end", **options), out, lse, rows)
    used = target.int32([start_pos + 1] * 2)
    assert_same_rows(target.fmha(row, k, v, start_pos="end", seqused_k=used, **options), out, lse, rows)
    expect(row, k, v, causal=True, start_pos=start_pos).check(
        *target.fmha(row, k, v, start_pos=start_pos, **options), small=True
    )


def test_int_tensor_and_end_are_one_thing(target, prefill):
    q, k, v, *_ = prefill
    rows = q[:, 100:164]
    runs = [
        target.fmha(rows, k[:, :164], v[:, :164], causal=True, num_splits=1, start_pos=start)
        for start in (100, target.int32([100, 100]), "end")
    ]
    for out, lse in runs[1:]:
        assert torch.equal(out, runs[0][0]) and torch.equal(lse, runs[0][1])


@pytest.mark.parametrize("chunk", [1, 17, 64, 128])
@pytest.mark.parametrize("by", ["seqused_k", "slice"])
def test_prefix_of_128_continued_from_a_cache(target, prefill, by, chunk):
    """The cache is longer than what is valid, and its tail holds NaN."""
    q, k, v, out, lse = prefill
    valid = 128 + chunk
    k_cache, v_cache = (torch.full((2, 512, HEADS, D), float("nan")).to(k) for _ in "kv")
    k_cache[:, :valid], v_cache[:, :valid] = k[:, :valid], v[:, :valid]
    if by == "slice":
        cache, used = (k_cache[:, :valid], v_cache[:, :valid]), None
    else:
        cache, used = (k_cache, v_cache), target.int32([valid, valid])
    for start in (128, "end"):
        got = target.fmha(q[:, 128:valid], *cache, causal=True, start_pos=start, seqused_k=used)
        assert_same_rows(got, out, lse, slice(128, valid))


def test_each_sequence_at_its_own_position(target):
    q, k, v = target.qkv(5, 3, 4, D, n_kv=200, heads_kv=2)
    starts, used = target.int32([0, 197, 60, -2, 131]), target.int32([200, 200, 64, 10, 129])
    case = {"causal": True, "start_pos": starts, "seqused_k": used}
    expect(q, k, v, **case).check(*target.fmha(q, k, v, **case), small=True)
    case = {"causal": True, "start_pos": "end", "seqused_k": target.int32([200, 1, 64, 0, 129])}
    expect(q, k, v, **case).check(*target.fmha(q, k, v, **case), small=True)


@pytest.mark.parametrize("n_q,heads_kv", [(1, 4), (1, 80), (5, 2), (40, 4)])
@pytest.mark.parametrize("options", [{}, {"num_splits": 3}, {"softcap": 5.0}], ids=["plain", "splits", "softcap"])
def test_the_output_does_not_depend_on_return_lse(target, options, n_q, heads_kv):
    q, k, v = target.qkv(2, n_q, 2 * heads_kv, D, n_kv=300, heads_kv=heads_kv)
    want, _lse = target.fmha(q, k, v, **options)
    assert torch.equal(target.fmha(q, k, v, return_lse=False, **options), want)


@pytest.mark.gpu
def test_more_than_2_to_the_32_tiles():
    """32,768 sequences on one million keys that all of them share: 2^32 tiles of 8 keys, which 32 bits do not count. K
    and V lie in L2, so this takes some seconds."""
    batch, n_kv = 32_768, 1 << 20
    q = torch.randn(batch, 1, 1, 4, device="cuda")
    k, v = (torch.randn(1, n_kv, 1, 4, device="cuda").expand(batch, -1, -1, -1) for _ in "kv")
    out, lse = cutlass_ext.fmha(q, k, v, return_lse=True)
    some = [0, 1, batch // 2, batch - 1]
    expect(q[some], k[some], v[some]).check(out[some], lse[some], small=True)


# ------------------------------------------------------------------------------------------------ packed, over pages
PACKED_PAGES = targets(("cuda", "auto"), *TENSOR_CORES, *HOPPER_ALONE)
KEYS = 576  # pages of 1, 16, 48 and 64


def check_packed(target, rows, lengths, group, d, page_size, *, longest=None, heads_kv=2, **options):
    """Sequences of so many query rows on so many keys in pages, NaN in the pages and rows that are nobody's; as far as
    the rows of the heads that share a KV head fit a tile."""
    longest = longest or max(rows)
    if longest * group > (16 if target.dtype == torch.float32 else 64):
        return
    batch, total = len(rows), sum(rows)
    q = torch.cat([target.randn(total, group * heads_kv, d), target.randn(3, group * heads_kv, d) * float("nan")])
    _, k, v = target.qkv(batch, 1, 1, d, n_kv=KEYS, heads_kv=heads_kv)
    poison_tails(k, lengths), poison_tails(v, lengths)
    ends, used = target.int32([0, *itertools.accumulate(rows)]), target.int32(lengths)
    options = {"causal": True, "start_pos": "end", "seqused_k": used} | options
    asked = {name: value for name, value in options.items() if name != "num_splits"}
    want = expect_packed(
        q[:total], k.flatten(0, 1), v.flatten(0, 1), cu_seqlens_q=ends,
        cu_seqlens_k=target.int32([KEYS * b for b in range(batch + 1)]), **asked,
    )  # fmt: skip
    k, v, pages = paged_pair(k, v, page_size)
    for b, n in enumerate(lengths):
        pages["block_table"][b, -(-n // page_size) :] = -1
    out, lse = target.fmha(q, k, v, cu_seqlens_q=ends, max_seqlen_q=longest, **pages, **options)
    want.check(out[:total], lse[:, :total], small=True, what=f"rows {rows}, lengths {lengths}, page {page_size}")


@pytest.fixture(params=PACKED_PAGES)
def packed_pages(request):
    return request.param


@pytest.mark.parametrize("page_size", [1, 16, 48, 64])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("d", [64, 128, 80, 256])
def test_packed_rows_over_pages(packed_pages, d, group, page_size):
    """One row and up to 16, none, more rows than keys, no key: narrow tiles, tiles of 16 and of 64 rows."""
    lengths = [1, 576, 0, 300, 64, 5, 17, 0]
    for most in (1, 2, 4, 16):
        rows = [1, most, most, 0, most - 1, most, 1, 0]
        check_packed(packed_pages, rows, lengths, group, d, page_size)
    check_packed(packed_pages, [1, 2, 1, 0, 1, 1, 1, 0], lengths, group, d, page_size, longest=8)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("feature", ["none", "window", "softcap", "alibi", "sink", "leftpad", "start"])
def test_features_of_packed_rows_over_pages(packed_pages, feature, num_splits):
    target = packed_pages
    options = {
        "none": {},
        "window": {"window": (40, 0)},
        "softcap": {"softcap": 5.0},
        "alibi": {"alibi_slopes": target.vector(5, 8).abs()},
        "sink": {"sink": target.vector(8)},
        "leftpad": {"leftpad_k": target.int32([3, 0, 100, 0, 7])},
        "start": {"start_pos": target.int32([5, -3, 600, 0, 130])},
    }[feature]
    for rows in ([1, 0, 1, 1, 0], [2, 1, 0, 2, 2], [5, 0, 16, 3, 1]):
        check_packed(target, rows, [500, 130, 300, 0, 576], 4, 64, 16, num_splits=num_splits, **options)


@pytest.mark.parametrize("batch", [1, 33, 256, 257])
def test_many_packed_sequences_over_pages(packed_pages, batch):
    """Several sequences to a CTA and several CTAs to one, most sequences without a row or without a key."""
    random = torch.Generator().manual_seed(batch)
    rows = torch.randint(0, 3, (batch,), generator=random).tolist()
    lengths = (
        torch.randint(0, 577, (batch,), generator=random) * torch.randint(0, 2, (batch,), generator=random)
    ).tolist()
    check_packed(packed_pages, [*rows[:-1], 2], lengths, 4, 64, 16)
