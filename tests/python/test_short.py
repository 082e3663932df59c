"""The kernels of Hopper for short launches: tiles of 64 rows and keys, by one warpgroup with one stage and by two with
two each. Against the oracle; everything else that "auto" runs in other modules is often theirs, too."""

import pytest
import torch
from oracle import expect

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
