"""`flash_attn_with_kvcache` against the oracle: contiguous and paged caches, appending, rotary embedding, steps."""

import pytest
import torch
from conftest import FLOAT32, HOPPER_ALONE, TENSOR_CORES, poison_like_results, targets
from oracle import expect, peer_tolerance, rotate

import cutlass_ext

NAN = float("nan")
HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (64, 128), (8, 40)]
PAGE_SIZES = [None, 1, 2, 16, 64, 256]


@pytest.fixture(scope="session", params=targets(*FLOAT32, *TENSOR_CORES, *HOPPER_ALONE))
def target(request):
    """Every way of reading a cache; on Hopper "auto" and "sm90" run clusters where they can, "sm90" all else in query
    tiles, and "sm80" what other GPUs run."""
    return request.param


def call(target, q, k_cache, v_cache, **kwargs):
    if target.cuda:
        poison_like_results(q, v_cache)
    return cutlass_ext.flash_attn_with_kvcache(
        q, k_cache, v_cache, backend=target.backend, return_softmax_lse=True, **kwargs
    )


def paged(cache, page_size, spare=3):
    """`cache` [B, N, H, d] as pages in random order, NaN in those that nobody has, and the block table."""
    if page_size is None:
        return cache, None
    B, N = cache.shape[:2]
    order = torch.randperm(B * (N // page_size) + spare, device=cache.device)[: B * (N // page_size)]
    pages = cache.new_full((len(order) + spare, page_size, *cache.shape[2:]), NAN)
    pages[order] = cache.reshape(len(order), page_size, *cache.shape[2:])
    return pages, order.view(B, -1).to(torch.int32)


def paged_pair(k, v, page_size):
    """K and V under one block table; an argument for the call."""
    if page_size is None:
        return k, v, {}
    joint, table = paged(torch.cat([k, v], -1), page_size)
    d = k.shape[-1]
    return joint[..., :d].contiguous(), joint[..., d:].contiguous(), {"block_table": table}


def unpaged(pages, table):
    return pages if table is None else pages[table.long()].flatten(1, 2)


def poison_tails(cache, lengths):
    for b, n in enumerate(lengths):
        cache[b, n:] = NAN


def check_case(
    target, lengths, n_q, heads_q, heads_kv, d, *, d_v=None, capacity=512, page_size=None, num_splits=0, **kw
):
    """Random caches whose tails and spare pages hold NaN, against the oracle."""
    q, k, v = target.qkv(len(lengths), n_q, heads_q, d, n_kv=capacity, heads_kv=heads_kv, d_v=d_v)
    poison_tails(k, lengths), poison_tails(v, lengths)
    lens = target.int32(lengths)
    want = expect(q, k, v, seqused_k=lens, **{"start_pos": "end"} | kw)
    renamed = {"window": "window_size", "leftpad_k": "cache_leftpad"}
    options = {renamed.get(name, name): value for name, value in kw.items()}
    k, v, table = paged_pair(k, v, page_size)
    got = call(target, q, k, v, cache_seqlens=lens, num_splits=num_splits, **table, **options)
    want.check(*got, small=True, what=f"lengths {lengths}, page {page_size}")


# ------------------------------------------------------------------------------------------------ reading
@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("n_q", [1, 5])
@pytest.mark.parametrize("d,d_v", HEAD_DIMS)
def test_head_dims(target, d, d_v, n_q, num_splits):
    check_case(target, [300, 37], n_q, 8, 2, d, d_v=d_v, capacity=320, causal=True, num_splits=num_splits)


@pytest.mark.parametrize("n_q", [1, 2, 16])
@pytest.mark.parametrize("heads_q,heads_kv", [(1, 1), (4, 2), (10, 2), (8, 1), (32, 1), (32, 8), (6, 2)])
def test_heads(target, heads_q, heads_kv, n_q):
    check_case(target, [512, 0, 129], n_q, heads_q, heads_kv, 64, causal=True)


@pytest.mark.parametrize("num_splits", [0, 1, 4])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages(target, page_size, num_splits):
    check_case(target, [512, 77, 0, 256], 2, 8, 2, 64, page_size=page_size, causal=True, num_splits=num_splits)
    check_case(target, [512, 1], 1, 4, 4, 128, page_size=page_size, num_splits=num_splits)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("n_q", [1, 4, 16])
@pytest.mark.parametrize("feature", ["window", "causal window", "softcap", "alibi", "sink", "leftpad", "start", "all"])
def test_features(target, feature, n_q, page_size):
    slopes, batch_slopes, sink = target.vector(8).abs(), target.vector(3, 8).abs(), target.vector(8)
    features = {
        "window": {"window": (17, 5)},
        "causal window": {"window": (100, 0), "causal": True},
        "softcap": {"softcap": 5.0},
        "alibi": {"alibi_slopes": slopes, "causal": True},
        "sink": {"sink": sink},
        "leftpad": {"leftpad_k": target.int32([3, 100, 0])},
        "start": {"causal": True, "start_pos": target.int32([5, -3, 600])},
        "all": {"causal": True, "window": (50, -1), "softcap": 9.0, "alibi_slopes": batch_slopes, "sink": sink,
                "leftpad_k": target.int32([0, 64, 0])},
    }[feature]  # fmt: skip
    check_case(target, [500, 130, 0], n_q, 8, 2, 64, page_size=page_size, **features)


@pytest.mark.parametrize("batch", [1, 32, 33, 40, 256, 257, 300])
def test_ragged(target, batch):
    lengths = torch.randint(0, 200, (batch,), generator=torch.Generator().manual_seed(batch)).tolist()
    check_case(target, lengths, 1, 8, 2, 64, capacity=208, page_size=16)


@pytest.mark.parametrize("page_size", [None, 8, 16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("n_q,heads_q", [(1, 1), (1, 8), (2, 4), (8, 1), (1, 7), (3, 3)])
def test_at_most_eight_packed_rows(target, n_q, heads_q, d, masked, page_size):
    """The calls of the narrow and cluster kernels and, with nine rows or pages of 8, their neighbours; sequences that
    end on tile edges, next to them, and without a key, several to a CTA and several CTAs to one."""
    mask = {"causal": True, "window": (100, -1)} if masked else {}
    lengths = [0, 700, 0, 0, 1, 15, 16, 17, 64, 65, 512, 3, 0]
    check_case(target, lengths, n_q, 2 * heads_q, 2, d, capacity=704, page_size=page_size, **mask)
    check_case(target, [700], n_q, 2 * heads_q, 2, d, capacity=704, page_size=page_size, **mask)


CLUSTERS = {8: (1, 2), 4: (8, 2), 2: (8, 5)}  # CTAs of a cluster: sequences and KV heads that an H200 has so many for


def explain(target, q, k, v, **options):
    return cutlass_ext.explain(q, k, v, backend=target.backend, **options)


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("d,turns", [(64, 8), (128, 5)])
@pytest.mark.parametrize("size", CLUSTERS)
def test_clusters(hopper, size, d, turns, page_size):
    """Lengths around tiles, around one tile for every warp of a cluster, and around as many as a ring holds."""
    batch, heads_kv = CLUSTERS[size]
    step = size * 8 * 16
    lengths = [0, 1, 15, 16, 17, 100, *(i * step + more for i in range(1, turns) for more in (-1, 0, 1, 17))]
    capacity = turns * step
    options = {"capacity": capacity, "page_size": page_size}
    explanation = explain(hopper, *hopper.qkv(batch, 1, heads_kv, d, n_kv=capacity))
    assert explanation.kernel == "cluster" and explanation.ctas == size * batch * heads_kv, explanation
    for first in range(0, len(lengths), batch):
        some = (lengths[first:] + lengths)[:batch]
        check_case(hopper, some, 1, 4 * heads_kv, heads_kv, d, **options)
        check_case(hopper, some, 2, 4 * heads_kv, heads_kv, d, window=(300, -1), causal=True, **options)


@pytest.mark.parametrize("page_size", [None, 16])
def test_the_longest_calls_of_clusters(hopper, page_size):
    for n, options in ((4096, {}), (40_000, {"window": (4000, 0)}), (40_000, {"window": (90, 3), "causal": True})):
        case = {"n_kv": n, "heads_kv": 32}
        explanation = explain(hopper, *hopper.qkv(1, 1, 64, 64, **case), start_pos="end", **options)
        assert explanation.kernel == "cluster" and explanation.ctas == 2 * 32, explanation
        check_case(hopper, [n - 7], 1, 64, 32, 64, capacity=n, page_size=page_size, **options)


def test_clusters_where_they_pay(hopper):
    def kernel(batch, heads_kv, n_kv, **options):
        q, k, v = hopper.qkv(batch, 1, heads_kv, 64, n_kv=n_kv)
        return explain(hopper, q, k, v, **options).kernel

    assert kernel(1, 8, 0) == kernel(1, 8, 16_384) == "cluster" and kernel(1, 8, 16_385) == "narrow"
    assert kernel(1, 2, 8192) == "cluster" and kernel(1, 2, 8193) == "narrow"  # few CTAs
    assert kernel(8, 2, 8192) == "cluster" and kernel(8, 2, 8193) == "narrow"  # alike
    used = hopper.int32([1] * 8)
    assert kernel(8, 2, 4096, seqused_k=used) == "cluster" and kernel(8, 2, 4097, seqused_k=used) == "narrow"
    assert kernel(8, 2, 9000, seqused_k=used, window=(100, 0)) == "cluster"
    assert kernel(200, 2, 100) == "narrow" and kernel(1, 8, 100, num_splits=2) == "decode"
    q, k, v = hopper.qkv(1, 1, 8, 64, n_kv=100)
    assert cutlass_ext.explain(q, k, v).backend == cutlass_ext.explain(q, k, v, backend="sm90").backend == "sm90"
    portable = cutlass_ext.explain(q, k, v, backend="sm80")
    assert portable.backend == "sm80" and portable.kernel == "narrow"


def test_a_cluster_gives_the_same_bits_each_time(hopper):
    q, k, v = hopper.qkv(3, 1, 32, 128, n_kv=1500, heads_kv=8)
    lens = hopper.int32([1500, 700, 3])
    want = call(hopper, q, k, v, cache_seqlens=lens)
    for _ in range(200):
        assert all(torch.equal(a, b) for a, b in zip(call(hopper, q, k, v, cache_seqlens=lens), want, strict=True))


@pytest.mark.parametrize("n_q", [65, 300])
def test_many_query_rows(target, n_q):
    """A chunk of a prompt: more rows than a tile."""
    check_case(target, [512, 300], n_q, 8, 2, 64, page_size=64, causal=True)


@pytest.mark.parametrize("n_q", [1, 8])
def test_one_long_sequence(gpu, n_q):
    check_case(gpu, [69_999], n_q, 8, 2, 128, capacity=70_000)


@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
@pytest.mark.parametrize("n_q,heads_per_kv", [(1, 16), (3, 3), (5, 4), (8, 4), (16, 4), (33, 1), (13, 5), (40, 4)])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_tall_tiles(hopper, d, n_q, heads_per_kv, page_size):
    """More than 8 packed rows, one tile of them or several, in query tiles on Hopper's tensor cores: sequences that end
    on tile edges and next to them, that fill the ring and go around it, and without a key. With softcap or ALiBi some
    of these decode."""
    lengths, capacity = [768, 0, 63, 64, 65, 31, 32, 33, 1, 0, 700, 384], 768
    shape = n_q, 2 * heads_per_kv, 2, d
    q, k, v = hopper.qkv(len(lengths), *shape[:2], d, n_kv=capacity, heads_kv=2)
    lens = hopper.int32(lengths)
    explanation = cutlass_ext.explain(cutlass_ext.flash_attn_with_kvcache, q, k, v, cache_seqlens=lens)
    assert explanation.backend == "sm90" and explanation.kernel in ("persistent", "short"), explanation
    options = {"capacity": capacity, "page_size": page_size}
    check_case(hopper, lengths, *shape, **options)
    check_case(hopper, lengths, *shape, causal=True, window=(200, -1), num_splits=3, **options)
    more = {"softcap": 9.0, "alibi_slopes": hopper.vector(shape[1]).abs(), "sink": hopper.vector(shape[1])}
    leftpad = hopper.int32([n // 3 for n in lengths])
    check_case(hopper, lengths, *shape, causal=True, leftpad_k=leftpad, **more, **options)


def test_cache_seqlens_int_and_none(target):
    q, k, v = target.qkv(2, 1, 4, 64, n_kv=96, heads_kv=2)
    runs = [call(target, q, k, v, cache_seqlens=n) for n in (96, target.int32([96, 96]), None)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
    expect(q, k[:, :40], v[:, :40]).check(*call(target, q, k, v, cache_seqlens=40), small=True)


def test_batch_index(target):
    q, k, v = target.qkv(5, 1, 4, 64, n_kv=96, heads_kv=2)
    lens, index = target.int32([50, 96, 7]), target.int32([4, 0, 2])
    rows = index.long()
    want = call(target, q[:3], k[rows], v[rows], cache_seqlens=lens, num_splits=2)
    got = call(target, q[:3], k, v, cache_seqlens=lens, cache_batch_idx=index, num_splits=2)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_pages_shared_between_sequences(target):
    """Two sequences with a common prefix of four pages."""
    q, k, v = target.qkv(2, 1, 4, 64, n_kv=128, heads_kv=2)
    k[1, :64], v[1, :64] = k[0, :64], v[0, :64]
    want = call(target, q, k, v, num_splits=1)
    k_pages, v_pages, table = paged_pair(k, v, 16)
    table["block_table"][1, :4] = table["block_table"][0, :4]
    got = call(target, q, k_pages, v_pages, num_splits=1, **table)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_rows_of_a_prefill(target):
    q, k, v = target.qkv(2, 200, 4, 64, heads_kv=2)
    out, lse = target.fmha(q, k, v, causal=True)
    k_pages, v_pages, table = paged_pair(torch.cat([k, k[:, :8]], 1), torch.cat([v, v[:, :8]], 1), 16)
    for n in (1, 16, 17, 64, 128, 200):
        row = call(target, q[:, n - 1 : n], k_pages, v_pages, cache_seqlens=n, causal=True, **table)
        torch.testing.assert_close(row[0], out[:, n - 1 : n], **peer_tolerance(target.dtype))
        torch.testing.assert_close(row[1], lse[..., n - 1 : n], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("n_new", [0, 2])
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("more", [1, 4], ids=["2 bytes", "8 bytes"])
def test_rows_off_16_bytes(target, more, page_size, n_new):
    """As `fmha` takes them: rows of a cache, of q and of the new tokens that begin anywhere."""
    q, k, v = target.qkv(2, 1, 4, 64, n_kv=64, heads_kv=2)
    _, k_new, v_new = target.qkv(2, n_new, 2, 64)
    odd = lambda x: x.new_zeros(*x.shape[:-1], x.shape[-1] + more)[..., more:].copy_(x)  # noqa: E731
    lens = target.int32([40, 9])
    k, v, table = paged_pair(k, v, page_size)
    k, v = odd(k), odd(v)
    new_tokens = {"k": odd(k_new), "v": odd(v_new)} if n_new else {}
    if target.backend == "sm90":
        with pytest.raises(NotImplementedError, match="16 bytes"):
            call(target, odd(q), k, v, cache_seqlens=lens, **new_tokens, **table)
        return
    got = call(target, odd(q), k, v, cache_seqlens=lens, **new_tokens, **table)
    k, v = (unpaged(cache, table.get("block_table")) for cache in (k, v))
    for b, n in enumerate(lens.tolist()):
        assert torch.equal(k[b, n : n + n_new], k_new[b]) and torch.equal(v[b, n : n + n_new], v_new[b])
    expect(q, k, v, seqused_k=lens + n_new).check(*got, small=True)


def test_strides_of_dimensions_of_one_mean_nothing(target):
    """One sequence, one KV head, one new token, whose strides are odd."""
    q, k, v = target.qkv(1, 1, 4, 64, n_kv=64, heads_kv=1)
    _, k_new, v_new = target.qkv(1, 1, 1, 64)

    def strange(x):
        strides = [stride if n > 1 else 3 for n, stride in zip(x.shape, x.stride(), strict=True)]
        return x.as_strided(x.shape, [*strides[:3], 1])

    args = {"cache_seqlens": target.int32([40])}
    want = call(target, q, k.clone(), v.clone(), k=k_new, v=v_new, **args)
    got = call(target, strange(q), strange(k), strange(v), k=strange(k_new), v=strange(v_new), **args)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ------------------------------------------------------------------------------------------------ isolation and bits
@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("page_size", [None, 16])
def test_tails_and_stale_pages_do_not_matter(target, page_size, num_splits):
    """Bit for bit, whatever lies beyond a sequence's keys: NaN, infinities, or nothing."""
    q, k, v = target.qkv(3, 2, 8, 64, n_kv=256, heads_kv=2)
    lengths = [256, 100, 0]
    k, v, table = paged_pair(k, v, page_size)
    options = {"cache_seqlens": target.int32(lengths), "causal": True, "num_splits": num_splits, **table}
    want = call(target, q, k, v, **options)
    for fill in (NAN, float("inf"), -float("inf")):
        for cache in (k, v):
            if page_size is None:
                for b, n in enumerate(lengths):
                    cache[b, n:] = fill
            else:
                used = table["block_table"]
                kept = torch.cat([used[b, : -(-n // page_size)] for b, n in enumerate(lengths)]).long()
                stale = torch.ones(len(cache), dtype=torch.bool, device=cache.device)
                stale[kept] = False
                cache[stale] = fill
                cache[used[1, 100 // page_size].long(), 100 % page_size :] = fill
        got = call(target, q, k, v, **options)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), fill


def test_table_entries_past_a_sequence_are_not_followed(target):
    q, k, v = target.qkv(2, 1, 4, 64, n_kv=128, heads_kv=2)
    k, v, table = paged_pair(k, v, 16)
    options = {"cache_seqlens": target.int32([33, 128]), "num_splits": 2}
    want = call(target, q, k, v, **options, **table)
    table["block_table"][0, 3:] = 1 << 30
    got = call(target, q, k, v, **options, **table)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("num_splits", [1, 2, 7])
def test_a_sequence_does_not_depend_on_its_batch(target, num_splits):
    """With num_splits fixed: alone and in a batch that fills the GPU, the same bits."""
    lengths = torch.randint(0, 300, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    q, k, v = target.qkv(64, 1, 8, 64, n_kv=304, heads_kv=2)
    k, v, table = paged_pair(k, v, 16)
    lens, table = target.int32(lengths), table["block_table"]
    out, lse = call(target, q, k, v, cache_seqlens=lens, block_table=table, num_splits=num_splits)
    for b in (0, 13, 63):
        one = slice(b, b + 1)
        got = call(target, q[one], k, v, cache_seqlens=lens[one], block_table=table[one], num_splits=num_splits)
        assert torch.equal(got[0], out[one]) and torch.equal(got[1], lse[one])


@pytest.mark.parametrize("num_splits", [0, 5])
@pytest.mark.parametrize("n_q,d", [(1, 128), (10, 64), (10, 128), (10, 256)])
def test_100_times(gpu, n_q, d, num_splits):
    q, k, v = gpu.qkv(7, n_q, 8, d, n_kv=1000, heads_kv=2)
    options = {"cache_seqlens": gpu.int32([1000, 3, 0, 512, 999, 64, 700]), "num_splits": num_splits}
    want = call(gpu, q, k, v, **options)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(call(gpu, q, k, v, **options), want, strict=True))


def test_two_streams(gpu):
    """Counters and workspaces of calls on two streams at once do not meet."""
    cases = [gpu.qkv(3, 1, 8, 128, n_kv=3000, heads_kv=2) for _ in range(2)]
    want = [call(gpu, *case) for case in cases]
    streams, got = [torch.cuda.Stream() for _ in cases], [[], []]
    torch.cuda.synchronize()
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(call(gpu, *cases[i]))
    torch.cuda.synchronize()
    for i in range(2):
        assert all(torch.equal(a, b) for run in got[i] for a, b in zip(run, want[i], strict=True))


# ------------------------------------------------------------------------------------------------ appending
def tables(target, positions, dim):
    angle = torch.arange(positions)[:, None] / 100.0 ** (torch.arange(dim // 2) / (dim // 2))
    return angle.cos().to(target.device, target.dtype), angle.sin().to(target.device, target.dtype)


def rotated(target, lens, rotary, positions, *rows):
    """Options of a causal call with `rotary`, (dim, interleaved) or None, and `rows` as it turns them."""
    if not rotary:
        return {}, *rows
    cos, sin = tables(target, positions, rotary[0])
    steps = (lens[:, None] + torch.arange(x.shape[1], device=target.device) for x in rows)
    turned = (rotate(x, at, cos, sin, rotary[1]) for x, at in zip(rows, steps, strict=True))
    return {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary[1]}, *turned


@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
@pytest.mark.parametrize("n_new,n_q", [(1, 1), (3, 3), (5, 1), (20, 20)])
@pytest.mark.parametrize("rotary", [None, (64, True), (64, False), (24, False), (6, True)])
def test_append(target, rotary, n_new, n_q, page_size):
    """New tokens go where they belong, across page edges; nothing else changes; the call's own queries see them."""
    lengths, capacity, d = [0, 15, 100], 128, 64
    q, k, v = target.qkv(3, n_q, 8, d, n_kv=capacity, heads_kv=2)
    _, k_new, v_new = target.qkv(3, n_new, 2, d)
    poison_tails(k, lengths), poison_tails(v, lengths)
    lens = target.int32(lengths)
    options, want_q, turned = rotated(target, lens, rotary, capacity, q, k_new)
    want_k, want_v = k.clone(), v.clone()
    for b, n in enumerate(lengths):
        want_k[b, n : n + n_new], want_v[b, n : n + n_new] = turned[b], v_new[b]
    k, v, table = paged_pair(k, v, page_size)
    got = call(target, q, k, v, k=k_new, v=v_new, cache_seqlens=lens, causal=True, **options, **table)
    k, v = (unpaged(cache, table.get("block_table")) for cache in (k, v))
    tolerance = peer_tolerance(target.dtype) if rotary else {"atol": 0, "rtol": 0}
    torch.testing.assert_close(k, want_k, equal_nan=True, **tolerance)
    torch.testing.assert_close(v, want_v, equal_nan=True, atol=0, rtol=0)
    # the keys as they were written, so that one rounding more or less of a rotated one is not counted
    expected = expect(want_q, k, v, causal=True, start_pos="end", seqused_k=lens + n_new)
    if rotary:
        torch.testing.assert_close(got[0].double(), expected.out, **peer_tolerance(target.dtype))
    else:
        expected.check(*got, small=True)


def check_appends(hopper, kernel, lengths, capacity, d, n_new, n_q, rotary, page_size, slopes=None):
    """New tokens of sequences that may have no room for them, with and without masks, by the kernel of that name."""
    q, k, v = hopper.qkv(len(lengths), n_q, 8, d, n_kv=capacity, heads_kv=2)
    _, k_new, v_new = hopper.qkv(len(lengths), n_new, 2, d)
    poison_tails(k, lengths), poison_tails(v, lengths)
    lens, options = hopper.int32(lengths), {"alibi_slopes": slopes}
    want_k, want_v, turned, turned_by_mask = k.clone(), v.clone(), k_new, {False: q, True: q}
    if rotary:
        dim, interleaved = int(rotary[0] * d), rotary[1]
        cos, sin = tables(hopper, capacity + max(n_new, n_q), dim)
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
        turned = rotate(k_new, lens[:, None] + torch.arange(n_new, device="cuda"), cos, sin, interleaved)
        for masked in (False, True):
            steps = torch.arange(n_q, device="cuda") * masked
            turned_by_mask[masked] = rotate(q, lens[:, None] + steps, cos, sin, interleaved)
    for b, n in enumerate(lengths):
        fitting = min(n_new, capacity - n)
        want_k[b, n : n + fitting], want_v[b, n : n + fitting] = turned[b, :fitting], v_new[b, :fitting]
    k, v, table = paged_pair(k, v, page_size)
    explanation = cutlass_ext.explain(
        cutlass_ext.flash_attn_with_kvcache, q, k, v, k=k_new, v=v_new, cache_seqlens=lens, **options, **table
    )
    assert (explanation.backend, explanation.kernel) == kernel, explanation
    for mask in ({}, {"causal": True}, {"causal": True, "window_size": (300, -1)}):
        caches = k.clone(), v.clone()
        got = call(hopper, q, *caches, k=k_new, v=v_new, cache_seqlens=lens, **mask, **options, **table)
        held = [unpaged(cache, table.get("block_table")) for cache in caches]
        exact, rounded = {"atol": 0, "rtol": 0}, peer_tolerance(hopper.dtype)
        torch.testing.assert_close(held[0], want_k, equal_nan=True, **(rounded if rotary else exact))
        torch.testing.assert_close(held[1], want_v, equal_nan=True, **exact)
        visible = {"causal": bool(mask), "window": mask.get("window_size", (-1, -1)), "start_pos": "end"}
        used = (lens + n_new).clamp(max=capacity)
        expected = expect(turned_by_mask[bool(mask)], *held, seqused_k=used, alibi_slopes=slopes, **visible)
        expected.check(*got, small=True, rotated=bool(rotary))


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("rotary", [None, (1.0, True), (1.0, False), (0.375, False)])
@pytest.mark.parametrize("n_new,n_q", [(1, 1), (2, 2), (17, 1), (40, 2)])
@pytest.mark.parametrize("d", [64, 128])
def test_clusters_append(hopper, d, n_new, n_q, rotary, page_size):
    """In a first turn and in later ones, over tile edges, up to the end of the cache and beyond."""
    lengths = [0, 1, 15, 16, 17, 1020, 1024, 1500, 2040]
    check_appends(hopper, ("sm90", "cluster"), lengths, 2048, d, n_new, n_q, rotary, page_size)


@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
@pytest.mark.parametrize("rotary", [None, (1.0, True), (0.375, False)])
@pytest.mark.parametrize("n_new,n_q", [(8, 8), (70, 5), (20, 16), (1, 30)])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("alibi", [False, True])
def test_tall_tiles_append(hopper, alibi, d, n_new, n_q, rotary, page_size):
    """By query tiles, and, of up to 16 rows whose heads have slopes of their own, by tiles that decode."""
    lengths = [0, 31, 32, 33, 63, 64, 65, 300, 500]
    decodes, slopes = alibi and n_q <= 16, hopper.vector(8).abs() if alibi else None
    kernel = ("sm80", "decode") if decodes else ("sm90", "persistent")
    check_appends(hopper, kernel, lengths, 512, d, n_new, n_q, rotary, page_size, slopes)


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("rotary", [None, (16, False), (16, True), (20, False), (20, True), (72, True), (64, False)])
@pytest.mark.parametrize("d,d_v", [(72, 40), (128, 128)])
def test_chunks_append(target, d, d_v, rotary, padding):
    """By a launch of its own, 16 bytes at a time or, where rows begin anywhere or rotary pairs are no whole vectors,
    column by column; heads that do not come in fours; other widths of V. What attention then reads is the same."""
    lengths, capacity, n_new, n_q = [0, 3, 40], 64, 21, 18
    longer = [target.qkv(3, n, h, d + padding, d_v=d_v + padding, n_kv=n) for n, h in ((n_q, 10), (n_new, 5))]
    q, k_new, v_new = longer[0][0][..., :d], longer[1][1][..., :d], longer[1][2][..., :d_v]
    if not target.takes(q, k_new, v_new):
        pytest.skip("rows that begin anywhere")
    _, k, v = target.qkv(3, 1, 5, d, n_kv=capacity, d_v=d_v)
    poison_tails(k, lengths), poison_tails(v, lengths)
    lens = target.int32(lengths)
    options, want_q, turned = rotated(target, lens, rotary, capacity, q, k_new)
    want_k, want_v = k.clone(), v.clone()
    for b, n in enumerate(lengths):
        want_k[b, n : n + n_new], want_v[b, n : n + n_new] = turned[b], v_new[b]
    got = call(target, q, k, v, k=k_new, v=v_new, cache_seqlens=lens, causal=True, **options)
    tolerance = peer_tolerance(target.dtype) if rotary else {"atol": 0, "rtol": 0}
    torch.testing.assert_close(k, want_k, equal_nan=True, **tolerance)
    torch.testing.assert_close(v, want_v, equal_nan=True, atol=0, rtol=0)
    expected = expect(want_q, k, v, causal=True, start_pos="end", seqused_k=lens + n_new)
    expected.check(*got, small=True, rotated=bool(rotary))


def test_append_turns_q_by_one_position_without_a_mask(target):
    """As flash-attn: without causal or a window all query rows are rotated as at `cache_seqlens`."""
    q, k, v = target.qkv(1, 3, 4, 64, n_kv=64, heads_kv=2)
    _, k_new, v_new = target.qkv(1, 3, 2, 64)
    cos, sin = tables(target, 64, 64)
    args = {"k": k_new, "v": v_new, "cache_seqlens": target.int32([20]), "rotary_cos": cos, "rotary_sin": sin}
    out, _ = call(target, q, k, v, **args)
    turned = torch.stack([rotate(row, 20, cos, sin, True) for row in q[0]])[None]
    want = expect(turned, k[:, :23], v[:, :23])
    torch.testing.assert_close(out.double(), want.out, **peer_tolerance(target.dtype))


@pytest.mark.parametrize("page_size", [None, 16])
def test_append_stops_at_the_end_of_the_cache(target, page_size):
    q, k, v = target.qkv(2, 1, 4, 64, n_kv=64, heads_kv=2)
    _, k_new, v_new = target.qkv(2, 4, 2, 64)
    want = k.clone()
    want[0, 62:], want[1, 10:14] = k_new[0, :2], k_new[1]
    k, v, table = paged_pair(k, v, page_size)
    call(target, q, k, v, k=k_new, v=v_new, cache_seqlens=target.int32([62, 10]), **table)
    assert torch.equal(unpaged(k, table.get("block_table")), want)


def test_append_with_a_window_that_hides_the_new_keys(target):
    """They are written whoever sees them."""
    q, k, v = target.qkv(1, 1, 4, 64, n_kv=256, heads_kv=2)
    _, k_new, v_new = target.qkv(1, 70, 2, 64)
    got = call(target, q, k, v, k=k_new, v=v_new, cache_seqlens=target.int32([100]), window_size=(3, 0), causal=True,
               start_pos=50)  # fmt: skip
    assert torch.equal(k[:, 100:170], k_new) and torch.equal(v[:, 100:170], v_new)
    expect(q, k, v, window=(3, 0), causal=True, start_pos=50).check(*got, small=True)


def test_append_far_from_what_a_window_shows(target):
    """New keys at the end, queries at the beginning: more tiles between them than a cluster has a use for."""
    q, k, v = target.qkv(1, 1, 4, 64, n_kv=40_000, heads_kv=2)
    k, v, table = paged_pair(k, v, 16)
    _, k_new, v_new = target.qkv(1, 3, 2, 64)
    got = call(target, q, k, v, k=k_new, v=v_new, cache_seqlens=target.int32([39_990]), window_size=(90, 0),
               causal=True, start_pos=200, **table)  # fmt: skip
    k, v = (unpaged(cache, table["block_table"]) for cache in (k, v))
    assert torch.equal(k[:, 39_990:39_993], k_new) and torch.equal(v[:, 39_990:39_993], v_new)
    expect(q, k[:, :39_993], v[:, :39_993], window=(90, 0), causal=True, start_pos=200).check(*got, small=True)


def test_append_by_batch_index_and_leftpad(target):
    q, k, v = target.qkv(2, 2, 4, 64, n_kv=96, heads_kv=2)
    k, v = torch.cat([k, k]), torch.cat([v, v])
    _, k_new, v_new = target.qkv(2, 2, 2, 64)
    cos, sin = tables(target, 96, 32)
    lens, pads, rows = target.int32([40, 11]), target.int32([7, 0]), [3, 1]
    got = call(target, q, k, v, k=k_new, v=v_new, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lens,
               cache_batch_idx=target.int32(rows), cache_leftpad=pads, causal=True)  # fmt: skip
    turned = q.clone()
    for b in range(2):
        for i in range(2):
            position = lens[b].item() + i  # the padding counts, as in flash-attn
            turned[b, i] = rotate(q[b, i], position, cos, sin, True)
            new = rotate(k_new[b, i], position, cos, sin, True)
            torch.testing.assert_close(k[rows[b], lens[b] + i], new, **peer_tolerance(target.dtype))
    want = expect(turned, k[rows], v[rows], causal=True, start_pos="end", seqused_k=lens + 2, leftpad_k=pads)
    torch.testing.assert_close(got[0].double(), want.out, **peer_tolerance(target.dtype))


def test_append_without_queries(target):
    """The cache grows all the same."""
    q, k, v = target.qkv(2, 0, 4, 64, n_kv=32, heads_kv=2)
    _, k_new, v_new = target.qkv(2, 3, 2, 64)
    want_k, want_v = k.clone(), v.clone()
    for b, n in enumerate((5, 20)):
        want_k[b, n : n + 3], want_v[b, n : n + 3] = k_new[b], v_new[b]
    out, lse = call(target, q, k, v, k=k_new, v=v_new, cache_seqlens=target.int32([5, 20]))
    assert out.shape == (2, 0, 4, 64) and lse.shape == (2, 4, 0)
    assert torch.equal(k, want_k) and torch.equal(v, want_v)


@pytest.mark.parametrize("n_new", [1, 20])
@pytest.mark.parametrize("by", ["block_table", "cache_batch_idx"])
@pytest.mark.parametrize("outside", [-1, -(1 << 31), 6, 1 << 30])
def test_idle_slots(target, outside, by, n_new):
    """What a slot whose entries lie outside the cache would append is dropped, and its neighbours are what they are
    without it; without keys it gives zeros, whatever its entries are."""
    q = target.randn(3, 1, 4, 64)
    buffers = [target.randn(8, 32, 2, 64) for _ in "kv"]
    caches = [buffer[1:7] for buffer in buffers]  # six rows, or pages; what lies around them may not change either
    _, k_new, v_new = target.qkv(3, n_new, 2, 64)
    rows, lens = target.int32([2, outside, 4]), target.int32([7, 0, 12])
    where = {by: rows if by == "cache_batch_idx" else rows[:, None].contiguous()}
    out, lse = call(target, q, *caches, cache_seqlens=lens, **where)
    assert not out[1].any() and lse[1].isneginf().all()
    want = [buffer.clone() for buffer in buffers]
    for buffer, new in zip(want, (k_new, v_new), strict=True):
        buffer[3, 7 : 7 + n_new], buffer[5, 12 : 12 + n_new] = new[0], new[2]
    got = call(target, q, *caches, k=k_new, v=v_new, cache_seqlens=lens, **where)
    for buffer, expected in zip(buffers, want, strict=True):
        assert torch.equal(buffer, expected)
    held = [cache[[2, 4]] for cache in caches]
    active = [0, 2]
    expected = expect(q[active], *held, seqused_k=lens[active] + n_new)
    expected.check(got[0][active], got[1][active], small=True)


def test_append_to_a_lazy_clone(target):
    """Of a copy-on-write clone the original keeps its contents, and the other way round."""
    for writes_to_the_clone in (True, False):
        q, k, v = target.qkv(2, 1, 4, 64, n_kv=32, heads_kv=2)
        _, k_new, v_new = target.qkv(2, 1, 2, 64)
        before = k.clone(), v.clone()
        clones = torch._lazy_clone(k), torch._lazy_clone(v)
        written, kept = (clones, (k, v)) if writes_to_the_clone else ((k, v), clones)
        call(target, q, *written, k=k_new, v=v_new, cache_seqlens=target.int32([5, 20]))
        for a, b, new, old in zip(written, kept, (k_new, v_new), before, strict=True):
            assert torch.equal(b, old)
            assert torch.equal(a[0, 5], new[0, 0]) and torch.equal(a[1, 20], new[1, 0])


@pytest.mark.parametrize("causal", [False, True])
def test_rotary_without_new_tokens(target, causal):
    """q is rotated all the same."""
    q, k, v = target.qkv(2, 3, 4, 64, n_kv=64, heads_kv=2)
    empty = {"k": k[:, :0], "v": v[:, :0]}
    cos, sin = tables(target, 64, 64)
    lens = target.int32([20, 7])
    got = call(target, q, k, v, **empty, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lens, causal=causal)
    steps = torch.arange(3, device=q.device) * causal
    turned = rotate(q, lens[:, None] + steps, cos, sin, True)
    expect(turned, k, v, causal=causal, start_pos="end", seqused_k=lens).check(*got, small=True, rotated=True)


@pytest.mark.parametrize("window", [(2**30, -1), (2**31 - 1, -1), (-1, 2**31 - 1), (2**70, 2**30)])
def test_an_unbounded_window_does_not_move_the_rotation(target, window):
    """Rows are turned at their own positions under causal or a window; a window without end is none."""
    q, k, v = target.qkv(1, 3, 4, 64, n_kv=64, heads_kv=2)
    _, k_new, v_new = target.qkv(1, 3, 2, 64)
    cos, sin = tables(target, 64, 64)
    args = {"k": k_new, "v": v_new, "cache_seqlens": target.int32([20]), "rotary_cos": cos, "rotary_sin": sin}
    want = call(target, q, k.clone(), v.clone(), **args)
    got = call(target, q, k, v, window_size=window, **args)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ------------------------------------------------------------------------------------------------ chunks
def chunk(target, lengths, n_q, n_new, *, heads=(4, 2), d=64, d_v=None, capacity=768, page_size=None, rotary=None,
          index=None, pads=None, laid=lambda x: x, **mask):  # fmt: skip
    """Many query rows: query tiles over what a launch before them has written. NaN in all that nobody reads."""
    batch = len(lengths)
    q, k, v = target.qkv(batch, n_q, heads[0], d, n_kv=capacity, heads_kv=heads[1], d_v=d_v)
    _, k_new, v_new = target.qkv(batch, n_new, heads[1], d, d_v=d_v)
    poison_tails(k, lengths), poison_tails(v, lengths)
    for b, pad in enumerate(pads or []):
        k[b, :pad], v[b, :pad] = NAN, NAN
    lens, options, want_k, want_v, want_q, turned = target.int32(lengths), {}, k.clone(), v.clone(), q, k_new
    if rotary:
        cos, sin = tables(target, capacity + n_new, rotary[0])
        options = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": rotary[1]}
        turned = rotate(k_new, lens[:, None] + torch.arange(n_new, device=q.device), cos, sin, rotary[1])
        positions = lens[:, None] + torch.arange(n_q, device=q.device) * bool(mask)
        want_q = rotate(q, positions.clamp(max=len(cos) - 1), cos, sin, rotary[1])
    for b, n in enumerate(lengths):
        fitting = min(n_new, capacity - n)
        want_k[b, n : n + fitting], want_v[b, n : n + fitting] = turned[b, :fitting], v_new[b, :fitting]
    if pads:
        options["cache_leftpad"] = target.int32(pads)
    if index:
        options["cache_batch_idx"] = target.int32(index)
        rows = max(index) + 2
        k, v = (x.new_full((rows, *x.shape[1:]), NAN).index_copy_(0, target.int32(index).long(), x) for x in (k, v))
    k, v, table = paged_pair(k, v, page_size)
    k, v = laid(k), laid(v)
    if n_new or rotary:
        options |= {"k": laid(k_new), "v": laid(v_new)}
    options |= {"cache_seqlens": lens, **table, **mask}
    if target.cuda:
        explanation = cutlass_ext.explain(
            cutlass_ext.flash_attn_with_kvcache, laid(q), k, v, backend=target.backend, **options
        )
        assert explanation.kernel in ("persistent", "tiles", "short"), explanation
    got = call(target, laid(q), k, v, **options)
    k, v = (unpaged(cache, table.get("block_table")) for cache in (k, v))
    if index:
        spare = [b for b in range(len(k)) if b not in index]
        assert k[spare].isnan().all() and v[spare].isnan().all()
        k, v = k[index], v[index]
    exact, rounded = {"atol": 0, "rtol": 0}, peer_tolerance(target.dtype)
    torch.testing.assert_close(k, want_k, equal_nan=True, **(rounded if rotary else exact))
    torch.testing.assert_close(v, want_v, equal_nan=True, **exact)
    visible = {"causal": bool(mask), "window": mask.get("window_size", (-1, -1)), "start_pos": "end"}
    leftpad = {"leftpad_k": options["cache_leftpad"]} if pads else {}
    expected = expect(want_q, k, v, seqused_k=(lens + n_new).clamp(max=capacity), **visible, **leftpad)
    expected.check(*got, small=True, rotated=bool(rotary))


RAGGED = [0, 1, 47, 300, 760]  # the last one's new keys do not fit


@pytest.mark.parametrize("page_size", [None, 16, 48, 256])
@pytest.mark.parametrize("rotary", [None, (64, True), (64, False), (24, False), (6, True)])
@pytest.mark.parametrize("n_q,n_new", [(17, 17), (300, 300), (64, 5), (100, 0), (20, 170)])
def test_chunks(target, n_q, n_new, rotary, page_size):
    chunk(target, RAGGED, n_q, n_new, rotary=rotary, page_size=page_size, causal=True)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("mask", [{}, {"causal": True, "window_size": (90, -1)}], ids=["full", "window"])
@pytest.mark.parametrize("where", [{"index": [3, 0, 6, 2, 4]}, {"pads": [0, 1, 20, 300, 5]}], ids=["index", "leftpad"])
def test_chunks_by_batch_index_and_leftpad(target, where, mask, page_size):
    if page_size and "index" in where:
        pytest.skip("a table of pages says the same")
    chunk(target, RAGGED, 40, 40, rotary=(64, False), page_size=page_size, **where, **mask)


@pytest.mark.parametrize("d,d_v", HEAD_DIMS)
def test_chunks_of_head_dims(target, d, d_v):
    chunk(target, [200, 31], 70, 70, heads=(10, 5), d=d, d_v=d_v, rotary=(d // 8 * 4, False), page_size=16, causal=True)


@pytest.mark.parametrize("page_size", [None, 16])
def test_chunks_off_16_bytes(target, page_size):
    odd = lambda x: x.new_zeros(*x.shape[:-1], x.shape[-1] + 1)[..., 1:].copy_(x)  # noqa: E731
    if target.backend == "sm90":
        with pytest.raises(NotImplementedError, match="16 bytes"):
            chunk(target, [200, 31], 33, 33, page_size=page_size, laid=odd, causal=True)
        return
    chunk(target, [200, 31], 33, 33, rotary=(64, True), page_size=page_size, laid=odd, causal=True)


@pytest.mark.timeout(180)
def test_generation_with_changing_batch_membership(target):
    """100 steps: sequences come and go, each step appends a token to whoever is there."""
    page_size, pages, heads, heads_kv, d = 16, 64, 4, 2, 64
    generator = torch.Generator().manual_seed(5)
    k = target.randn(pages, page_size, heads_kv, d).fill_(NAN)
    v = k.clone()
    free, batch, steps = list(range(pages)), [], 0

    def draw(n):
        return int(torch.randint(0, n, (), generator=generator))

    while steps < 100:
        if len(batch) < 6 and draw(3) == 0:
            batch.append({"table": [], "k": [], "v": []})
        if batch and draw(8) == 0:
            free += batch.pop(draw(len(batch)))["table"]  # its pages go to others as they are
        batch = [s for s in batch if len(s["k"]) < 90]
        free = [p for p in range(pages) if not any(p in s["table"] for s in batch)]
        if not batch:
            continue
        for s in batch:
            if len(s["k"]) % page_size == 0:
                s["table"].append(free.pop(draw(len(free))))
        q, k_new, v_new = target.qkv(len(batch), 1, heads, d, heads_kv=heads_kv)
        table = target.int32([(s["table"] + [0] * 6)[:6] for s in batch])
        lens = target.int32([len(s["k"]) for s in batch])
        out, _ = call(target, q, k, v, k=k_new, v=v_new, cache_seqlens=lens, block_table=table, causal=True)
        for b, s in enumerate(batch):
            s["k"].append(k_new[b, 0]), s["v"].append(v_new[b, 0])
        if steps % 10 == 9:
            for b, s in enumerate(batch):
                own = torch.stack(s["k"])[None], torch.stack(s["v"])[None]
                expect(q[b : b + 1], *own).check(out[b : b + 1], small=True)
        steps += 1


def test_cuda_graph_over_growing_lengths(gpu):
    """Captured once; every replay appends a token and sees all before it."""
    steps, start = 40, [0, 30, 500]
    k_cache, v_cache = (gpu.randn(3, 576, 2, 64).fill_(NAN) for _ in "kv")
    k_all, v_all = gpu.randn(3, 576, 2, 64), gpu.randn(3, 576, 2, 64)
    for b, n in enumerate(start):
        k_cache[b, :n], v_cache[b, :n] = k_all[b, :n], v_all[b, :n]
    k, v, table = paged_pair(k_cache, v_cache, 16)
    lens, q = gpu.int32(start), gpu.randn(3, 1, 4, 64)
    k_new, v_new = gpu.randn(3, 1, 2, 64), gpu.randn(3, 1, 2, 64)

    def step():
        out = call(gpu, q, k, v, k=k_new, v=v_new, cache_seqlens=lens, causal=True, **table)
        lens.add_(1)
        return out

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    rows = torch.arange(3, device="cuda")
    for _ in range(steps):
        q.copy_(gpu.randn(3, 1, 4, 64))
        k_new.copy_(k_all[rows, lens.long()][:, None]), v_new.copy_(v_all[rows, lens.long()][:, None])
        graph.replay()
        expect(q, k_all, v_all, seqused_k=lens).check(out, lse, small=True)


def test_two_graphs_at_once(gpu):
    """Each captured call has counters of its own."""
    cases, graphs = [gpu.qkv(2, 1, 8, 128, n_kv=4096, heads_kv=2) for _ in range(2)], []
    want = [call(gpu, *case)[0] for case in cases]
    for case in cases:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _ = call(gpu, *case)
        graphs.append((graph, out))
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(50):
        for (graph, out), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                out.fill_(NAN)
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, w) for (_, out), w in zip(graphs, want, strict=True))


# ------------------------------------------------------------------------------------------------ the operators
@pytest.mark.timeout(180)
@pytest.mark.parametrize("append", [False, True])
def test_opcheck(target, append):
    q, k, v = target.qkv(2, 1, 4, 64, n_kv=32, heads_kv=2)
    _, k_new, v_new = target.qkv(2, 1, 2, 64)
    options = {"cache_seqlens": target.int32([3, 20]), "return_lse": append, "backend": target.backend}
    op = torch.ops.cutlass_ext.fmha_kvcache
    if append:
        op, options = torch.ops.cutlass_ext.fmha_kvcache_append, options | {"k": k_new, "v": v_new}
    torch.library.opcheck(op.default, (q, k, v), options)


@pytest.mark.timeout(180)
def test_compile_does_not_recompile_as_the_cache_grows(target_fp32):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    q, k, v = target_fp32.qkv(2, 1, 4, 64, n_kv=64, heads_kv=2)
    _, k_new, v_new = target_fp32.qkv(2, 1, 2, 64)
    lens = target_fp32.int32([0, 17])

    def step(q, k, v, k_new, v_new, lens):
        return cutlass_ext.flash_attn_with_kvcache(
            q, k, v, k_new, v_new, cache_seqlens=lens, causal=True, backend=target_fp32.backend
        )

    fast, k_fast, v_fast = torch.compile(step, backend=counter, fullgraph=True), k.clone(), v.clone()
    for _ in range(4):
        got, want = fast(q, k_fast, v_fast, k_new, v_new, lens), step(q, k, v, k_new, v_new, lens)
        assert torch.equal(got, want) and torch.equal(k_fast, k) and torch.equal(v_fast, v)
        lens += 1
    assert counter.frame_count == 1


# ------------------------------------------------------------------------------------------------ errors
def valid(device="cpu"):
    make = lambda *shape: torch.zeros(shape, device=device)  # noqa: E731
    return {"q": make(2, 1, 4, 64), "k_cache": make(2, 32, 2, 64), "v_cache": make(2, 32, 2, 64)}


def new(n=1, d=64):
    return {"k": torch.zeros(2, n, 2, d), "v": torch.zeros(2, n, 2, d)}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


V, T = ValueError, TypeError
PAGES = {"k_cache": torch.zeros(4, 16, 2, 64), "v_cache": torch.zeros(4, 16, 2, 64)}
LENS = {"cache_seqlens": int32(1, 2)}
ROTARY = {"rotary_cos": torch.zeros(32, 16), "rotary_sin": torch.zeros(32, 16)}
WRONG = [
    ("q", V, {"q": torch.zeros(2, 4, 64)}),
    ("k_cache", V, {"k_cache": torch.zeros(3, 32, 2, 64), "v_cache": torch.zeros(3, 32, 2, 64)}),
    ("k_cache", V, {"k_cache": torch.zeros(2, 32, 2, 32)}),
    ("k_cache", V, {"k_cache": torch.zeros(2, 32, 3, 64), "v_cache": torch.zeros(2, 32, 3, 64)}),
    ("k_cache", T, {"k_cache": torch.zeros(2, 32, 2, 64, dtype=torch.float16)}),
    ("k_cache", T, {"k_cache": None}),
    ("v_cache", V, {"v_cache": torch.zeros(2, 31, 2, 64)}),
    ("v", V, {"k": torch.zeros(2, 1, 2, 64)}),
    ("k", V, {**new(), "k": torch.zeros(2, 1, 3, 64), **LENS}),
    ("v", V, {**new(), "v": torch.zeros(2, 2, 2, 64), **LENS}),
    ("cache_seqlens", V, new()),
    ("cache_seqlens", V, {"cache_seqlens": 33}),
    ("cache_seqlens", V, {"cache_seqlens": -1}),
    ("cache_seqlens", V, {**new(), "cache_seqlens": 32}),
    ("cache_seqlens", V, {"cache_seqlens": int32(1)}),
    ("cache_seqlens", T, {"cache_seqlens": torch.zeros(2)}),
    ("cache_seqlens", T, {"cache_seqlens": 1.5}),
    ("cache_batch_idx", V, {"cache_batch_idx": int32(1)}),
    ("cache_leftpad", T, {"cache_leftpad": torch.zeros(2)}),
    ("block_table", T, {**PAGES, "block_table": torch.zeros(2, 2)}),
    ("block_table", V, {**PAGES, "block_table": torch.zeros(3, 2, dtype=torch.int32)}),
    ("cache_batch_idx", V, {**PAGES, "block_table": torch.zeros(2, 2, dtype=torch.int32),
                            "cache_batch_idx": int32(0, 1)}),
    ("k_cache", V, {"k_cache": torch.zeros(4, 24, 2, 64), "v_cache": torch.zeros(4, 24, 2, 64),
                    "block_table": torch.zeros(2, 2, dtype=torch.int32)}),
    ("rotary_sin", V, {**new(), **LENS, "rotary_cos": ROTARY["rotary_cos"]}),
    ("rotary_cos", V, ROTARY),
    ("rotary_cos", V, {**new(), **LENS, "rotary_cos": torch.zeros(32, 40), "rotary_sin": torch.zeros(32, 40)}),
    ("rotary_cos", T, {**new(), **LENS, "rotary_cos": torch.zeros(32, 16, dtype=torch.float16),
                       "rotary_sin": torch.zeros(32, 16, dtype=torch.float16)}),
    ("rotary_sin", V, {**new(), **LENS, **ROTARY, "rotary_sin": torch.zeros(31, 16)}),
    # a row for each position, as far as the host sees: of the keys that are there, the new ones, and the rows of q
    ("rotary_cos", V, {**new(), "cache_seqlens": 16, **{name: x[:16] for name, x in ROTARY.items()}}),
    ("rotary_cos", V, {**new(0), "cache_seqlens": 32, **ROTARY}),
    ("rotary_cos", V, {**new(), "cache_seqlens": 30, "q": torch.zeros(2, 3, 4, 64), "causal": True, **ROTARY}),
    ("out", V, {"out": torch.zeros(2, 1, 1, 64).expand(2, 1, 4, 64)}),
    *[("softmax_scale", V, {"softmax_scale": x}) for x in (0.0, 1e39, 1e-60)],
    *[("softcap", V, {"softcap": x}) for x in (-1.0, 1e39, 1e-39)],
    ("window_size", V, {"window_size": (1, 2, 3)}),
    ("window_size", V, {"window_size": (-2, 0)}),
    *[("window_size", T, {"window_size": x}) for x in ("ab", (1.5, 0))],
    ("softmax_scale", T, {"softmax_scale": torch.ones((), requires_grad=True)}),
    ("cache_seqlens", T, {"cache_seqlens": True}),
    ("return_softmax_lse", T, {"return_softmax_lse": 1}),
    ("alibi_slopes", V, {"alibi_slopes": torch.ones(3)}),
    ("sink", V, {"sink": torch.ones(3)}),
    ("start_pos", V, {"start_pos": "start"}),
    ("start_pos", V, {"start_pos": int32(1)}),
    ("num_splits", V, {"num_splits": -1}),
    ("backend", V, {"backend": "cuda"}),
    *[("causal", T, {"causal": x}) for x in ("yes", None, 1)],
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name,error,spoilt", WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_argument(device, name, error, spoilt):
    arguments = valid() | spoilt

    def moved(x):  # what is expanded stays so
        return x[tuple(slice(1 if step == 0 else None) for step in x.stride())].to(device).expand(x.shape)

    arguments = {n: moved(x) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    with pytest.raises(error, match=rf"\b{name}\b") as raised:
        cutlass_ext.flash_attn_with_kvcache(**arguments)
    assert type(raised.value) is error and "\n" not in str(raised.value)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v", "sink", "alibi_slopes"])
def test_grad_is_refused(device, name):
    arguments = valid() | new() | LENS | {"sink": torch.zeros(4), "alibi_slopes": torch.ones(4)}
    arguments = {n: x.to(device) for n, x in arguments.items()}
    arguments[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=rf"\b{name}\b.*requires grad"):
        cutlass_ext.flash_attn_with_kvcache(**arguments)
    with torch.no_grad():
        assert not cutlass_ext.flash_attn_with_kvcache(**arguments).requires_grad


def test_hopper_alone(hopper):
    arguments = {n: x.to("cuda", hopper.dtype) for n, x in valid().items()}
    out = cutlass_ext.flash_attn_with_kvcache(**arguments, backend="sm90")
    assert torch.equal(out, cutlass_ext.flash_attn_with_kvcache(**arguments))
    arguments = {n: x.cuda() for n, x in valid().items()}
    with pytest.raises(NotImplementedError, match='q: no kernel of backend "sm90" for this GPU takes float32'):
        cutlass_ext.flash_attn_with_kvcache(**arguments, backend="sm90")
