"""Rows of k and v that begin at odd multiples of 16 bytes: Hopper's tiles leave 8 columns empty in front of them."""

import itertools

import pytest
import torch
from conftest import HOPPER_ALONE, targets
from oracle import assert_same_bits, expect, expect_packed

NAN = float("nan")
ODD = [40, 72, 104, 120, 136, 200, 248]  # columns of which every second head begins so


@pytest.fixture(params=targets(*HOPPER_ALONE))
def sm90(request):
    return request.param


def contiguous(target, batch, n, heads, d):
    return target.randn(batch, n, heads, d)


def among_heads(target, batch, n, heads, d):
    """Between two heads of NaN: of an odd number of units of 16 bytes, the first head begins at an odd one."""
    buffer = torch.full((batch, n, heads + 2, d), NAN, device=target.device, dtype=target.dtype)
    buffer[:, :, 1:-1] = target.randn(batch, n, heads, d)
    return buffer[:, :, 1:-1]


def behind_columns(target, batch, n, heads, d):
    """All heads alike, behind 8 columns of NaN."""
    buffer = torch.full((batch, n, heads, d + 16), NAN, device=target.device, dtype=target.dtype)
    buffer[..., 8:-8] = target.randn(batch, n, heads, d)
    return buffer[..., 8:-8]


def by_heads(target, batch, n, heads, d):
    """[B, H, N, d]: every second row of a head, where no columns are left empty."""
    return target.randn(batch, heads, n, d).transpose(1, 2)


LAYOUTS = [contiguous, among_heads, behind_columns, by_heads]


@pytest.mark.parametrize("d", ODD)
@pytest.mark.parametrize("causal", [False, True])
def test_head_dim(sm90, d, causal):
    for layout, heads_kv in ((among_heads, 2), (contiguous, 4)):
        q = layout(sm90, 2, 133, 4, d)
        k, v = (layout(sm90, 2, 261, heads_kv, d) for _ in "kv")
        got = sm90.fmha(q, k, v, causal=causal, start_pos="end")
        expect(q, k, v, causal=causal, start_pos="end").check(*got, what=layout.__name__)


@pytest.mark.parametrize("d,d_v", [(72, 72), (80, 80), (64, 64), (72, 96), (96, 72), (120, 112), (112, 120), (128, 120),
                                   (136, 120), (192, 72), (8, 8), (8, 248)])  # fmt: skip
def test_layouts_of_each(sm90, d, d_v):
    """Tiles that are full leave no columns empty. Batch and rows of v differ from k's."""
    for of_k, of_v in itertools.product(LAYOUTS, LAYOUTS):
        q, k, v = sm90.randn(2, 17, 4, d), of_k(sm90, 2, 131, 2, d), of_v(sm90, 2, 131, 2, d_v)
        got = sm90.fmha(q, k, v, causal=True, start_pos="end")
        what = f"{of_k.__name__}, {of_v.__name__}"
        expect(q, k, v, causal=True, start_pos="end").check(*got, small=True, what=what)


@pytest.mark.parametrize("d,d_v", [(72, 72), (104, 120), (200, 200)])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_what_lies_around_keys(sm90, d, d_v, num_splits):
    """NaN behind the last key and in front of the first, and in all other heads."""
    q, k, v = sm90.randn(3, 70, 4, d), sm90.randn(3, 270, 4, d), sm90.randn(3, 270, 4, d_v)
    lengths, leftpads = [270, 129, 100], [0, 5, 64]
    options = {"seqused_k": sm90.int32(lengths), "leftpad_k": sm90.int32(leftpads), "causal": True, "start_pos": "end",
               "num_splits": num_splits}  # fmt: skip
    want = sm90.fmha(q, k, v, **options)
    expect(q, k, v, **{name: x for name, x in options.items() if name != "num_splits"}).check(*want)
    for head in range(4):
        planted = k.clone(), v.clone()
        for t in planted:
            for b, (end, begin) in enumerate(zip(lengths, leftpads, strict=True)):
                t[b, end:] = t[b, :begin] = NAN
            t[:, :, [other for other in range(4) if other != head]] = NAN
        got = sm90.fmha(q, *planted, **options)
        assert_same_bits([t.transpose(1, 2)[:, head] if t.dim() == 4 else t[:, head] for t in got],
                         [t.transpose(1, 2)[:, head] if t.dim() == 4 else t[:, head] for t in want])  # fmt: skip


@pytest.mark.parametrize("d", [40, 104, 136])
def test_packed(sm90, d):
    cu_q, cu_k = sm90.int32([0, 5, 140, 140, 207]), sm90.int32([0, 70, 70, 201, 459])
    qkv = among_heads(sm90, 1, 459, 12, d)[0]
    q, k, v = sm90.randn(207, 8, d), qkv[:, :4], qkv[:, 4:8]
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 135, "max_seqlen_k": 258, "causal": True}
    expect_packed(q, k, v, **options).check(*sm90.fmha(q, k, v, **options))


@pytest.mark.parametrize("page", [16, 48, 256])
@pytest.mark.parametrize("d", [72, 120])
def test_pages(sm90, d, page):
    lengths, columns = [300, 1, 131], -(-300 // page)
    table = torch.randperm(3 * columns, device=sm90.device).int().view(3, columns)
    k, v = (among_heads(sm90, 3 * columns, page, 2, d) for _ in "kv")
    q, used = sm90.randn(3, 67, 4, d), sm90.int32(lengths)
    out, lse = sm90.fmha(q, k, v, block_table=table, seqused_k=used, causal=True, start_pos="end")
    k, v = (t[table.long()].reshape(3, columns * page, 2, d) for t in (k, v))
    expect(q, k, v, seqused_k=used, causal=True, start_pos="end").check(out, lse)


def test_what_scores_and_pairs_add(sm90):
    for d in (72, 104):
        q, k, v = (among_heads(sm90, 2, n, 4, d) for n in (133, 200, 200))
        mask = torch.rand(2, 1, 133, 200, device=sm90.device) < 0.7
        for options in ({"softcap": 5.0, "alibi_slopes": sm90.vector(4).abs()}, {"bias": sm90.randn(1, 4, 133, 200)},
                        {"mask": mask}, {"sink": sm90.vector(4), "window": (50, 3)}):  # fmt: skip
            expect(q, k, v, **options).check(*sm90.fmha(q, k, v, **options), what=f"{d} {list(options)}")


@pytest.mark.parametrize("d", [72, 136, 248])
def test_float32_results(sm90, d):
    q, k, v = (among_heads(sm90, 1, n, heads, d) for n, heads in ((133, 6), (300, 2), (300, 2)))
    for num_splits in (1, 2):
        out, lse = sm90.fmha(q, k, v, out_dtype=torch.float32, num_splits=num_splits)
        expect(q, k, v).check(out.to(sm90.dtype), lse)
