"""The kernels of Hopper for short launches: tiles of 64 rows and keys, by one warpgroup with one stage and by two with
two each; those of one for a mask, for dropout, for a bias, and for sequences that only the device knows. Against the
oracle; everything else that "auto" runs in other modules is often theirs, too."""

import itertools

import pytest
import torch
from oracle import assert_same_bits, expect, expect_packed, peer_tolerance
from test_varlen import packed

import cutlass_ext

TILE = 64
FEATURES = {
    "full": {},
    "causal": {"causal": True, "start_pos": "end"},
    "window": {"window": (100, 20), "start_pos": 30},
    "nothing to see": {"causal": True, "start_pos": -70},  # for the first query tile and 6 rows of the second
}


def check(target, q, k, v, what="", **options):
    assert cutlass_ext.explain(q, k, v, **options).kernel == "short", what
    expect(q, k, v, **options).check(*target.fmha(q, k, v, **options), small=True, what=what)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("d,d_v", [(64, 64), (128, 128), (8, 40), (72, 104)])
@pytest.mark.parametrize("heads,most_tiles", [(3, 9), (80, 4)], ids=["two warpgroups", "one warpgroup"])
def test_keys_around_tiles(hopper, heads, most_tiles, d, d_v, features):
    """One key less than whole tiles, as many, and one more; query rows of a whole tile and some more."""
    options = FEATURES[features] | {"sink": hopper.vector(heads)}
    for n_kv in (tiles * TILE + more for tiles in range(1, most_tiles) for more in (-1, 0, 1)):
        check(hopper, *hopper.qkv(1, 75, heads, d, n_kv=n_kv, heads_kv=1, d_v=d_v), f"{n_kv=}", **options)


@pytest.mark.parametrize("n_q", [17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 320])
@pytest.mark.parametrize("batch", [1, 5])
def test_rows_around_tiles(hopper, batch, n_q):
    """The order of the query tiles folds in the middle: odd and even numbers of them."""
    for d in (64, 128):
        check(hopper, *hopper.qkv(batch, n_q, 8, d, heads_kv=2), f"{d=}", causal=True)


def test_many_key_tiles(hopper):
    for d in (64, 128):
        check(hopper, *hopper.qkv(1, 2048, 4, d), f"{d=}", causal=True)
        check(hopper, *hopper.qkv(1, 70, 4, d, n_kv=1024), f"{d=}")


def test_large_scores(hopper):
    """A maximum that rises from tile to tile, in both warpgroups."""
    q, k, v = hopper.qkv(1, 64, 4, 128, n_kv=512)
    k *= torch.linspace(30, 1, 512, device=k.device)[:, None, None].to(k.dtype)
    check(hopper, q, k, v)


# In the order in which one warpgroup takes the tiles, of every second row; of the others their negatives. A maximum
# that is passed by up to 8 log 2 stays.
LEVELS = {
    "creeps": [0, 3, 6, 9, 12],
    "leaps": [0, 12, 24, 6, 36],
    "leaps further than an exponential": [-200, 50, -100, 240, 256],
    "falls": [100, 80, 8, -60, -128],
}


@pytest.mark.parametrize("of", LEVELS)
@pytest.mark.parametrize("d", [64, 128])
def test_maxima_from_tile_to_tile(hopper, d, of):
    """Sums and output follow a maximum that rises, that of each row of a warp, where nothing is hidden and where a mask
    leaves rows without a key in the first tiles."""
    n_kv = len(LEVELS[of]) * TILE
    levels = torch.tensor(LEVELS[of][::-1], device=hopper.device).repeat_interleave(TILE)
    mask = torch.rand(3, 1, 100, n_kv, device=hopper.device) < 0.7
    mask[:, :, ::3, -2 * TILE :] = False
    mask[:, :, 40:, TILE : 3 * TILE] = False
    drop, bias = dropout_of(hopper), bias_of(hopper, 3, 4, 100, n_kv)
    lengths = {"seqused_k": hopper.int32([n_kv, n_kv - 1, n_kv - 2 * TILE])}
    masked, both = {"mask": mask}, {"bias": bias, "mask": mask}
    kinds = [{}, masked, drop, drop | masked, {"bias": bias}, drop | both, lengths]
    for batch, heads in ((3, 4), (3, 48)):  # two warpgroups where nothing else is asked, and one
        q, k, v = hopper.qkv(batch, 100, heads, d, n_kv=n_kv, heads_kv=1)
        q[..., 0], k[..., 0] = 1 - 2.0 * (torch.arange(100, device=q.device)[:, None] % 2), levels[:, None].to(k.dtype)
        for options in kinds if heads == 4 else ({}, masked, drop):
            check(hopper, q, k, v, f"{heads=}, {list(options)}", softmax_scale=1.0, **options)


@pytest.mark.parametrize("hidden", [-1e4, -65504.0, -1e9])
@pytest.mark.parametrize("d", [64, 128])
def test_a_bias_that_stands_for_a_mask(hopper, d, hidden):
    """The first tile may have nothing but scores far below all others, from which these must lose nothing: as if a mask
    hid its keys."""
    q, k, v = hopper.qkv(2, 100, 4, d, n_kv=256)
    bias = torch.zeros(2, 4, 100, 256, device=hopper.device, dtype=torch.float16 if hidden > -1e5 else torch.bfloat16)
    bias[..., 120:] = hidden
    bias[:, :, ::3, 60:] = hidden
    for options in ({}, dropout_of(hopper), {"sink": hopper.vector(4)}):
        assert cutlass_ext.explain(q, k, v, bias=bias, **options).kernel == "short"
        out, lse = hopper.fmha(q, k, v, bias=bias, **options)
        want, want_lse = hopper.fmha(q, k, v, mask=bias == 0, **options)
        torch.testing.assert_close(out, want, **peer_tolerance(q.dtype))
        torch.testing.assert_close(lse, want_lse, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("d", [64, 128])
def test_a_row_is_its_own(hopper, d):
    """Whatever the other rows of a warp do to its maxima."""
    for heads, options in ((4, {}), (48, {}), (4, dropout_of(hopper))):
        q, k, v = hopper.qkv(3, 70, heads, d, n_kv=320)
        assert cutlass_ext.explain(q, k, v, **options).kernel == "short"
        want = hopper.fmha(q, k, v, **options)
        for loud in (30.0, float("nan")):
            changed = q.clone()
            changed[:, 1::2] *= loud
            out, lse = hopper.fmha(changed, k, v, **options)
            assert_same_bits((out[:, ::2], lse[..., ::2]), (want[0][:, ::2], want[1][..., ::2]))


def test_more_rows_than_there_is_room_for(hopper):
    """Of a launch in waves the longest tiles come first, all the way."""
    for heads, d in ((32, 64), (40, 128)):
        check(hopper, *hopper.qkv(8, 192, heads, d, heads_kv=8), f"{d=}", causal=True)


def test_keys_without_end(hopper):
    """What lies behind the last key of a sequence, the next one's here, is not of it; NaN shows."""
    q, k, v = hopper.qkv(3, 70, 4, 64, n_kv=100)
    k[1], v[1] = float("nan"), float("nan")
    out, lse = hopper.fmha(q, k, v)
    assert out[1].isnan().all() and lse[1].isnan().all()
    for b in (0, 2):
        expect(q[b : b + 1], k[b : b + 1], v[b : b + 1]).check(out[b : b + 1], lse[b : b + 1], small=True)


def test_no_keys_in_many_sequences(hopper):
    """More of them than a grid has in its third dimension, and nothing to do: not theirs."""
    q, k, v = hopper.qkv(70_000, 20, 1, 64, n_kv=0)
    assert cutlass_ext.explain(q, k, v).kernel != "short"
    out, lse = hopper.fmha(q, k, v)
    assert not out.any() and lse.isneginf().all()


# ------------------------------------------------------------------------------------------------ masks
def masks_of(target, batch, heads, n_q, n_kv):
    """Of keys and of pairs, some of which hide blocks of 64 by 64, all of a sequence, or nothing."""
    rand = lambda *shape: torch.rand(*shape, device=target.device)  # noqa: E731
    lengths = (rand(batch, 1, 1, 1) * n_kv).long()
    lengths[0] = n_kv
    at = torch.arange(n_kv, device=target.device)
    yield "padding", at < lengths
    yield "padding in front", at >= lengths
    yield "keys", rand(batch, 1, 1, n_kv) < 0.5
    yield "of a head", rand(1, heads, n_q, n_kv) < 0.5
    blocks = rand(batch, heads, -(-n_q // 64), -(-n_kv // 64)) < 0.5
    blocks[:, 0, 0], blocks[0, -1] = False, True
    yield "blocks", blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :n_q, :n_kv]
    yield "nothing", torch.zeros(1, 1, 1, n_kv, dtype=torch.bool, device=target.device)
    yield "everything", torch.ones(1, 1, n_q, n_kv, dtype=torch.bool, device=target.device)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("d,d_v", [(64, 64), (128, 128), (8, 40), (72, 104)])
def test_masks(hopper, d, d_v, features):
    for n_q, n_kv in ((75, 64), (40, 191), (130, 200), (64, 700)):
        q, k, v = hopper.qkv(3, n_q, 4, d, n_kv=n_kv, heads_kv=2, d_v=d_v)
        for what, mask in masks_of(hopper, 3, 4, n_q, n_kv):
            options = FEATURES[features] | {"sink": hopper.vector(4), "mask": mask}
            check(hopper, q, k, v, f"{what}, {n_q=}, {n_kv=}", **options)


@pytest.mark.parametrize("beside", ["nothing", "dropout", "a bias"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("batch", [1, 30, 48])
def test_a_mask_that_has_just_been_packed(hopper, batch, d, beside):
    """The kernel may begin before the launch that packs the mask has ended: calls with other masks follow each other,
    whose bits lie in the same places, and so do those of a captured graph."""
    q, k, v = hopper.qkv(batch, 130, 12, d)
    masks = [torch.rand(batch, 1, 130, 130, device=hopper.device) < 0.5 for _ in range(8)]
    options = dropout_of(hopper) if beside == "dropout" else {}
    if beside == "a bias":  # 130 keys are no whole vectors: a launch copies it between the packing and the kernel
        options = {"bias": torch.randn(1, 1, 130, 130, device=hopper.device).to(q.dtype)}
    assert cutlass_ext.explain(q, k, v, mask=masks[0], **options).kernel == "short"
    want = [cutlass_ext.fmha(q, k, v, mask=mask, num_splits=1, **options) for mask in masks]
    got = [torch.empty_like(q) for _ in masks]

    def call():
        for mask, out in zip(masks, got, strict=True):
            cutlass_ext.fmha(q, k, v, mask=mask, out=out, **options)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(10):
            call()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            call()
    for _ in range(10):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, **peer_tolerance(a.dtype))
            a.fill_(float("nan"))
        graph.replay()


def test_a_mask_that_was_packed_before(hopper):
    q, k, v = hopper.qkv(2, 100, 4, 64, n_kv=150)
    mask = torch.rand(2, 4, 100, 150, device=hopper.device) < 0.5
    expected = expect(q, k, v, mask=mask)
    bits = torch.ops.cutlass_ext.pack_mask(mask)
    assert cutlass_ext.explain(q, k, v, mask=bits).kernel == "short"
    expected.check(*hopper.fmha(q, k, v, mask=bits), small=True)


def test_the_last_keys_of_a_map(hopper):
    """As many keys as a word of it has blocks, of which rows see the first or the last ones."""
    q, k, v = hopper.qkv(2, 130, 4, 64, n_kv=2048)
    for what, mask in masks_of(hopper, 2, 4, 130, 2048):
        for start in (300, 1900):
            check(hopper, q, k, v, f"{what}, {start}", mask=mask, window=(300, 20), start_pos=start)


def test_masks_that_others_have(hopper):
    """More keys than a mask is faster with there, and together with what they do not take."""
    q, k, v = hopper.qkv(2, 100, 4, 64, n_kv=705)
    mask = torch.ones(705, dtype=torch.bool, device=hopper.device).expand(2, 1, 1, 705)
    assert cutlass_ext.explain(q, k, v, mask=mask).kernel != "short"
    mask = torch.ones(2, 1, 1, 2049, dtype=torch.bool, device=hopper.device)  # of whose map it would want two words
    q, k, v = hopper.qkv(2, 100, 4, 64, n_kv=2049)
    assert cutlass_ext.explain(q, k, v, mask=mask, window=(300, 0)).kernel != "short"
    q, k, v = hopper.qkv(2, 100, 4, 64)
    mask = mask[..., :100]
    for options in ({"seqused_k": hopper.int32([7, 100])}, {"softcap": 2.0}, {"num_splits": 1}):
        assert cutlass_ext.explain(q, k, v, mask=mask, **options).kernel != "short", options


# ------------------------------------------------------------------------------------------------ dropout and bias
def dropout_of(target, *words, p=0.3):
    return {"dropout_p": p, "dropout_seed": torch.tensor(words or (20, -7), device=target.device)}


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("d,d_v", [(64, 64), (128, 128), (8, 40), (72, 104)])
def test_dropout(hopper, d, d_v, features):
    for (n_q, n_kv), key_start in zip(((75, 64), (40, 191), (130, 200), (64, 700)), (0, 5, 32, -3), strict=True):
        q, k, v = hopper.qkv(3, n_q, 4, d, n_kv=n_kv, heads_kv=2, d_v=d_v)
        drop = dropout_of(hopper) | {"key_start": key_start, "head_start": 3, "sequence_start": 2}
        for what, mask in itertools.chain((("no mask", None),), masks_of(hopper, 3, 4, n_q, n_kv)):
            options = FEATURES[features] | drop | {"sink": hopper.vector(4), "mask": mask}
            check(hopper, q, k, v, f"{what}, {n_q=}, {n_kv=}", **options)


def bias_of(target, *shape, dtype=torch.float16):
    """Of rows that begin with whole vectors."""
    *rows, n_kv = shape
    return torch.randn(*rows, -(-n_kv // 8) * 8, device=target.device).to(dtype)[..., :n_kv]


def biases_of(target, batch, heads, n_q, n_kv):
    """Of 16 bits: of every shape, and where they are shared of rows that are no vectors, or that lie across."""
    for dtype, dims in itertools.product((torch.float16, torch.bfloat16), itertools.product((batch, 1), (heads, 1))):
        x = bias_of(target, *dims, n_q, n_kv, dtype=dtype)
        x[torch.rand(x.shape, device=x.device) < 0.1] = float("-inf")
        yield f"{dims}, {dtype}", x
    yield "across", torch.randn(1, heads, n_kv, n_q, device=target.device).half().mT
    yield "rows apart", torch.randn(1, heads, n_q, n_kv + 13, device=target.device).half()[..., 5:-8]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("d,d_v", [(64, 64), (128, 128), (8, 40), (72, 104)])
def test_biases(hopper, d, d_v, features):
    for n_q, n_kv in ((75, 64), (40, 191), (130, 200)):
        q, k, v = hopper.qkv(3, n_q, 4, d, n_kv=n_kv, heads_kv=2, d_v=d_v)
        sink, pairs = hopper.vector(4), torch.rand(3, 1, n_q, n_kv, device=hopper.device) < 0.6
        for what, bias in biases_of(hopper, 3, 4, n_q, n_kv):
            for beside in ({}, {"mask": pairs}, dropout_of(hopper), {"mask": pairs} | dropout_of(hopper)):
                options = FEATURES[features] | beside | {"bias": bias, "sink": sink}
                check(hopper, q, k, v, f"{what}, {n_q=}, {n_kv=}, {list(beside)}", **options)


@pytest.mark.parametrize("d", [64, 128])
def test_a_bias_of_many_tiles(hopper, d):
    """Tile after tile of it lies in one place, where warps that wait for shared memory read it late: a whole GPU of
    CTAs, again and again, to the same bits."""
    batch = 16
    q, k, v = hopper.qkv(batch, 256, 16, d, n_kv=640)
    bias = torch.randn(1, 16, 256, 640, device=hopper.device).to(q.dtype)
    options = {"bias": bias, "causal": True, "start_pos": "end"} | dropout_of(hopper)
    assert cutlass_ext.explain(q, k, v, **options).kernel == "short"
    want = cutlass_ext.fmha(q, k, v, **options)
    torch.testing.assert_close(want, cutlass_ext.fmha(q, k, v, num_splits=1, **options), **peer_tolerance(q.dtype))
    for _ in range(100):
        assert_same_bits([cutlass_ext.fmha(q, k, v, **options)], [want])


def test_dropout_of_many_keys(hopper):
    """More than a word of a mask's map has blocks for, which a call without one does not ask."""
    for d in (64, 128):
        check(hopper, *hopper.qkv(2, 70, 70, d, n_kv=1100, heads_kv=7), f"{d=}", **dropout_of(hopper))
    q, k, v = hopper.qkv(1, 70, 140, 64, n_kv=2200)
    bias = torch.randn(1, 140, 70, 2200, device=hopper.device).to(q.dtype)
    check(hopper, q, k, v, bias=bias, **dropout_of(hopper))
    mask = torch.rand(1, 1, 70, 2200, device=hopper.device) < 0.5
    assert cutlass_ext.explain(q, k, v, bias=bias, mask=mask, **dropout_of(hopper)).kernel != "short"


@pytest.mark.parametrize("d", [64, 128])
def test_what_a_bias_holds_where_nobody_looks(hopper, d):
    """NaN where a mask or a causal end hides the key."""
    q, k, v = hopper.qkv(2, 130, 4, d)
    mask = torch.rand(2, 4, 130, 130, device=hopper.device) < 0.6
    bias = bias_of(hopper, 2, 4, 130, 130)
    seen = mask & torch.ones_like(mask).tril()
    assert cutlass_ext.explain(q, k, v, bias=bias, mask=mask, causal=True).kernel == "short"
    want = hopper.fmha(q, k, v, bias=bias, mask=mask, causal=True)
    bias[~seen] = float("nan")
    assert_same_bits(hopper.fmha(q, k, v, bias=bias, mask=mask, causal=True), want)


def test_pairs_that_others_have(hopper):
    """A bias of 32 bits, or of keys alone, and together with what they do not take."""
    q, k, v = hopper.qkv(2, 100, 4, 64)
    half, drop = bias_of(hopper, 2, 4, 100, 100), dropout_of(hopper)
    assert cutlass_ext.explain(q, k, v, bias=half, **drop).kernel == "short"
    of_keys, of_rows, in_place = half[:, :, :1], half[..., :1].expand_as(half), half.contiguous()
    for bias in (half.float(), of_keys, of_rows, in_place):  # rows of 200 bytes, which nobody shares, are not copied
        assert cutlass_ext.explain(q, k, v, bias=bias, **drop).kernel != "short", bias.stride()
    for beside in ({"seqused_k": hopper.int32([7, 100])}, {"softcap": 2.0}, {"num_splits": 1}):
        for options in ({"bias": half}, drop):
            assert cutlass_ext.explain(q, k, v, **options, **beside).kernel != "short", (options, beside)


# ------------------------------------------------------------------------------------------------ unlike sequences
LENGTHS = [70, 0, 1, 128, 64, 7, 200, 65, 63], [70, 33, 140, 129, 0, 64, 127, 65, 191]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("d,d_v", [(64, 64), (128, 128), (8, 40), (72, 104)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=str)
def test_packed(hopper, heads, d, d_v, features):
    batch = packed(hopper, *LENGTHS, heads, d, d_v)
    options = FEATURES[features] | {"sink": hopper.vector(heads[0])}
    used, pads = [70, 20, 140, 128, 0, 63, 100, 65, 130], [3, 20, 0, 64, 0, 1, 70, 0, 128]
    for more in ({}, {"seqused_k": hopper.int32(used), "leftpad_k": hopper.int32(pads)}):
        options |= more
        assert cutlass_ext.explain(*batch, **batch.packing, **options).kernel == "short"
        got = hopper.fmha(*batch, **batch.packing, **options)
        expect_packed(*batch, **batch.packing, **options).check(*got, small=True, what=str(more))


@pytest.mark.parametrize("d", [64, 128])
def test_packed_neighbours(hopper, d):
    """NaN in all other sequences, and in rows of none, shows in none; what nobody computes is left as it is."""
    lengths_q, lengths_k = [30, 70, 0, 64, 5], [70, 65, 40, 1, 130]
    batch = packed(hopper, [9, *lengths_q, 9], [9, *lengths_k, 9], (4, 2), d)
    cu = {name: batch.packing[name][1:-1] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    packing = batch.packing | cu
    assert cutlass_ext.explain(*batch, **packing).kernel == "short"
    for b in range(5):
        rows, keys = (slice(*cu[name][b : b + 2].tolist()) for name in ("cu_seqlens_q", "cu_seqlens_k"))
        q, k, v = (torch.full_like(t, float("nan")) for t in batch)
        q[rows], k[keys], v[keys] = batch.q[rows], batch.k[keys], batch.v[keys]
        out, lse = cutlass_ext.fmha(q, k, v, causal=True, start_pos="end", return_lse=True, **packing)
        alone = expect(q[None, rows], k[None, keys], v[None, keys], causal=True, start_pos="end")
        alone.check(out[None, rows], lse[None, :, rows], small=True, what=f"{b=}")


@pytest.mark.parametrize(
    "ends", [[-7, 60, 50, 200], [90, 30, 300, 1 << 30], [0, 0, 0, 0], [1 << 30, -5, 5, 40]], ids=str
)
def test_packed_ends_that_make_no_sense(hopper, ends):
    """Are those of the nearest rows that there are: as in the kernels of many rows."""
    batch = packed(hopper, [70, 20, 60], heads=(4, 4))
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        packing = batch.packing | {name: hopper.int32(ends)}
        out, want = (torch.zeros_like(batch.q) for _ in range(2))
        cutlass_ext.fmha(*batch, **packing, out=out)
        cutlass_ext.fmha(*batch, **packing, num_splits=1, out=want)
        if name == "cu_seqlens_k" or ends == sorted(ends):  # else two sequences have rows in common
            torch.testing.assert_close(out, want, **peer_tolerance(out.dtype))
        assert out.isfinite().all()


def test_packed_rows_past_the_longest(hopper):
    """A maximum that is too small leaves rows out, and those of other sequences alone."""
    batch = packed(hopper, [100, 30, 150], heads=(4, 4))
    want, want_lse = hopper.fmha(*batch, **batch.packing)
    got, lse = hopper.fmha(*batch, **batch.packing | {"max_seqlen_q": 70})
    for begin, end in ((0, 100), (100, 130), (130, 280)):
        rows = slice(begin, min(begin + 70, end))
        torch.testing.assert_close(got[rows], want[rows], **peer_tolerance(got.dtype))
        torch.testing.assert_close(lse[:, rows], want_lse[:, rows], **peer_tolerance(lse.dtype))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("n_kv", [63, 64, 128, 130])
def test_lengths(hopper, n_kv, d):
    """NaN past the last key of each sequence, whatever follows there, and before the first."""
    q, k, v = hopper.qkv(7, 90, 4, d, n_kv=n_kv, heads_kv=2)
    lengths = [n_kv, 0, 1, 62, 63, n_kv - 1, n_kv // 2]
    pads = [0, 0, 1, 5, 62, 64 if n_kv > 64 else 3, 0]
    at = torch.arange(n_kv, device=q.device)
    used, leftpad = hopper.int32(lengths), hopper.int32(pads)
    nobody = (at >= used[:, None]) | (at < leftpad[:, None])
    k[nobody], v[nobody] = float("nan"), float("nan")
    starts = hopper.int32([0, 3, -20, 5, 100, -200, 64])
    for options in ({}, {"causal": True, "start_pos": "end"}, {"window": (30, 9), "start_pos": starts}):
        check(hopper, q, k, v, f"{options}", seqused_k=used, leftpad_k=leftpad, **options)


def test_many_unlike_sequences(hopper):
    """More CTAs than the GPU holds at once, most of which have no rows."""
    lengths = [(7 * i) % 140 if i % 3 == 0 else i % 5 for i in range(700)]
    batch = packed(hopper, lengths, heads=(4, 4))
    assert cutlass_ext.explain(*batch, **batch.packing).kernel == "short"
    want = cutlass_ext.fmha(*batch, **batch.packing, num_splits=1, causal=True, return_lse=True)
    got = hopper.fmha(*batch, **batch.packing, causal=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **peer_tolerance(a.dtype))


def test_more_sequences_than_a_grid_has(hopper):
    lengths = [1 + i % 3 for i in range(70_000)]
    batch = packed(hopper, lengths, heads=(1, 1), d=8)
    assert cutlass_ext.explain(*batch, **batch.packing).kernel != "short"
    out, _ = hopper.fmha(*batch, **batch.packing)
    assert out.isfinite().all()
