"""Where rings of buffers fill and come round, and where the work runs out: the edges of pipelined and persistent
kernels, by the tiles that `explain` names. Against the oracle."""

import itertools

import pytest
import torch
from oracle import expect

import cutlass_ext

HEAD_DIMS = [
    (64, 64), (72, 72), (80, 80), (96, 96), (104, 104), (112, 112), (128, 128), (192, 192), (192, 128), (256, 256),
]  # fmt: skip
MOST_STAGES = 4  # tiles of K and V in flight: two or three today


def tile_of(target, q, k, v, **options):
    """(B_r, B_c) of the kernel that runs a call."""
    return cutlass_ext.explain(q, k, v, backend=target.backend, **options).tile


@pytest.mark.parametrize("features", [{"causal": True, "start_pos": "end"}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize("d,d_v", HEAD_DIMS)
def test_keys_around_the_stages_of_a_pipeline(kernels, d, d_v, features):
    """One key less than whole tiles, as many, and one more, for every number of tiles that a ring may hold and the one
    after; query rows of a whole tile and one more."""
    options = features | {"num_splits": 1}  # then the tile follows from N_q alone
    B_r, B_c = tile_of(kernels, *kernels.qkv(1, 300, 2, d, d_v=d_v), **options)
    for n_kv in (tiles * B_c + more for tiles in range(1, MOST_STAGES + 2) for more in (-1, 0, 1)):
        q, k, v = kernels.qkv(1, B_r + 1, 2, d, n_kv=n_kv, heads_kv=1, d_v=d_v)
        assert tile_of(kernels, q, k, v, **options) == (B_r, B_c)
        expect(q, k, v, **features).check(*kernels.fmha(q, k, v, **options), small=True, what=f"{n_kv=}")


@pytest.mark.parametrize("d,d_v", [(128, 128), (120, 120), (128, 120), (120, 128)])
def test_tall_tiles_of_128_columns(hopper, d, d_v):
    """As many heads as multiprocessors, of more rows than a tile of 128 has and more keys than the short kernels take:
    tiles of 192 rows are one wave. Causal calls and fixed splits have none."""
    heads = torch.cuda.get_device_properties(0).multi_processor_count
    for n_q, n_kv in itertools.product((129, 192), (tiles * 80 + more for tiles in (5, 6, 7) for more in (-1, 0, 1))):
        q, k, v = hopper.qkv(1, n_q, heads, d, n_kv=n_kv, d_v=d_v)
        assert tile_of(hopper, q, k, v) == (192, 80)
        rows = [0, 1, 63, 64, 127, 128, n_q - 1]
        expect(q, k, v, rows=rows).check(*hopper.fmha(q, k, v), small=True, what=f"{n_q=}, {n_kv=}")
    assert tile_of(hopper, q, k, v, causal=True) != (192, 80)
    assert tile_of(hopper, q, k, v, num_splits=1) == (128, 128)


@pytest.mark.parametrize("num_splits", [2, 3])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_splits_of_fewer_tiles_than_stages(kernels, d, num_splits):
    """Splits of no tile, of one and of several, in turn on the same CTA."""
    _, B_c = tile_of(kernels, *kernels.qkv(1, 300, 2, d), num_splits=num_splits)
    for tiles in range(1, 2 * num_splits + 2):
        q, k, v = kernels.qkv(1, 70, 100, d, n_kv=tiles * B_c - 1, heads_kv=1)
        expect(q, k, v).check(*kernels.fmha(q, k, v, num_splits=num_splits), small=True, what=f"{tiles=}")


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_as_many_work_items_as_multiprocessors(kernels, more, d):
    """One fewer, as many, one more: with one CTA a multiprocessor the last item is somebody's second."""
    heads = torch.cuda.get_device_properties(0).multi_processor_count + more
    q, k, v = kernels.qkv(1, 40, heads, d, n_kv=150, heads_kv=1)
    expect(q, k, v).check(*kernels.fmha(q, k, v, num_splits=1))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("lengths", [[300, 0, 129, 1, 0, 256], [0] * 6, [0, 0, 0, 0, 0, 300]], ids=str)
def test_many_work_items_to_a_cta(kernels, lengths, d):
    """Dozens for each, of many key tiles, of one, and of none, behind each other in every order."""
    heads = 4 * torch.cuda.get_device_properties(0).multi_processor_count
    options = {"causal": True, "start_pos": "end", "seqused_k": kernels.int32(lengths)}
    q, k, v = kernels.qkv(6, 200, heads, d, n_kv=300, heads_kv=4)
    rows = [0, 1, 63, 64, 127, 128, 198, 199]
    expect(q, k, v, rows=rows, **options).check(*kernels.fmha(q, k, v, num_splits=1, **options))


@pytest.mark.parametrize("window", [(-1, -1), (5000, 0)], ids=str)
@pytest.mark.parametrize("n_q,d", [(1, 64), (100, 64), (200, 128), (70, 256)])
def test_131072_keys(kernels, n_q, d, window):
    q, k, v = kernels.qkv(1, n_q, 4, d, n_kv=131_072, heads_kv=2)
    options = {"causal": True, "start_pos": "end", "window": window}
    expect(q, k, v, **options).check(*kernels.fmha(q, k, v, **options), small=n_q == 1)
