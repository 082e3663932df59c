"""What pairs of a row and a key have of their own, bias, mask and dropout: of every shape, stride and dtype, with their
gradients, alone, together and with every other feature; what must not leak; the same bits wherever dropout is drawn;
through PyTorch, under its name, FlexAttention's and flash-attn's; the models that ask for them."""

import dataclasses
import functools
import itertools
import math
import re
import shutil

import pytest
import test_features as padded_cases
import test_varlen as packed_cases
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import (
    assert_same_bits,
    attention,
    expect,
    expect_gradients,
    expect_gradients_packed,
    expect_packed,
    keeps,
    peer_tolerance,
)
from test_backward import COMPILE_TIMEOUT, compiled, of_out
from test_errors import assert_refused
from test_varlen import MIXED, packed
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils.checkpoint import checkpoint

import cutlass_ext
from cutlass_ext.measurement import peak_extra_bytes
from cutlass_ext.philox import _philox

NAN, INF = float("nan"), float("inf")
V, T, NI = ValueError, TypeError, NotImplementedError
FEATURES = {"bias": "Bias", "mask": "Mask", "dropout_p": "Dropout"}  # by the argument that asks for them
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BROADCAST = ["".join(dims) for dims in itertools.product("b1", "h1", "i1")]  # dimensions that are not 1


@pytest.fixture(autouse=True)
def sources(pytestconfig):
    attempt.root = pytestconfig.rootpath


def attempt(target, call, backward=False):
    """What `call` gives; None where the kernels refuse one of `FEATURES` by its argument: those of a family that is
    asked for may, those that are chosen where none takes it. Hopper's gradients take no softcap beside a bias."""
    try:
        return call()
    except NotImplementedError as refused:
        argument = str(refused).split(":")[0]
        capped = target.backend == "sm90" and backward and argument == "softcap"
        if not target.cuda or target.backend == "torch" or (argument not in FEATURES and not capped):
            raise
        if target.backend == "auto":
            text = (attempt.root / "csrc/fmha/features.hpp").read_text()
            names = re.findall(r"^  FEATURE\((\w+), \"", text, re.MULTILINE)
            kernels = torch.ops.cutlass_ext.kernels_taking(1 << names.index(FEATURES[argument])).splitlines()
            taking = [k for k in kernels if str(target.dtype)[6:] in k and ("gradients" in k) == backward]
            assert not taking, f"{refused}; but {taking[0]} takes it"
        return None


def tried(target, call, backward=False):
    """The same; the test is skipped where it is refused."""
    results = attempt(target, call, backward)
    if results is None:
        pytest.skip("no kernel takes it")
    return results


def check(target, q, k, v, *, small=True, backward=True, skips=True, num_splits=None, deterministic=False, **options):
    """Results and gradients against the oracle."""
    how = tried if skips else attempt
    run = {"deterministic": deterministic} | ({} if num_splits is None else {"num_splits": num_splits})
    got = how(target, lambda: target.fmha(q, k, v, **options, **run))
    if got is None:
        return
    expect(q, k, v, **options).check(*got, small=small, what=str(list(options)))
    if not backward:
        return
    dout, dlse = of_out(target, q, v)
    got = how(target, lambda: target.gradients(q, k, v, dout, dlse, **options, **run), backward=True)
    if got is not None:
        assert all(t.is_contiguous() for t in got)
        expect_gradients(q, k, v, dout, dlse, **options).check(got, small=small, what=str(list(options)))


def shape_of(dims, q, k):
    """[1 or B, 1 or H_q, 1 or N_q, N_kv]."""
    full = q.shape[0], q.shape[2], q.shape[1]
    return (*(n if dim != "1" else 1 for n, dim in zip(full, dims, strict=True)), k.shape[1])


def bias_of(target, shape, dtype=torch.float32, hidden=0.0):
    """Normal numbers, of which a part is -inf."""
    x = torch.randn(shape, device=target.device).masked_fill(torch.rand(shape, device=target.device) < hidden, -INF)
    return x.to(dtype)


def mask_of(target, shape, visible=0.6):
    return torch.rand(shape, device=target.device) < visible


def seed_of(target, *words):
    return torch.tensor(words or (20, -7), device=target.device)


# ------------------------------------------------------------------------------------------------ shapes and strides
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", BROADCAST)
def test_bias(target, dims, dtype):
    q, k, v = target.qkv(2, 70, 4, 64, n_kv=150, heads_kv=2)
    check(target, q, k, v, bias=bias_of(target, shape_of(dims, q, k), dtype))


@pytest.mark.parametrize("dims", BROADCAST)
def test_mask(target, dims):
    q, k, v = target.qkv(2, 70, 4, 64, n_kv=150, heads_kv=2)
    check(target, q, k, v, mask=mask_of(target, shape_of(dims, q, k)))


STRIDES = {
    "rows apart": lambda make, shape: make((*shape[:3], shape[3] + 13))[..., 5:-8],
    "transposed": lambda make, shape: make((shape[1], shape[3], shape[0], shape[2])).permute(2, 0, 3, 1),
    "heads last": lambda make, shape: make((shape[2], shape[3], shape[1], shape[0])).permute(3, 2, 0, 1),
    "every other key": lambda make, shape: make((*shape[:3], 2 * shape[3]))[..., ::2],
    "expanded": lambda make, shape: make((1, shape[1], 1, shape[3])).expand(shape),
    "one for all keys": lambda make, shape: make((*shape[:3], 1)).expand(shape),
    "backwards": lambda make, shape: make((shape[0], *shape[1:])).flip(3),
}


@pytest.mark.parametrize("of", STRIDES)
@pytest.mark.parametrize("dims", ["bhi", "1h1", "b11"])
def test_strides(target, dims, of):
    q, k, v = target.qkv(2, 40, 4, 32, n_kv=130, heads_kv=2)
    shape = shape_of(dims, q, k)
    check(target, q, k, v, bias=STRIDES[of](functools.partial(bias_of, target, dtype=target.dtype), shape))
    check(target, q, k, v, mask=STRIDES[of](functools.partial(mask_of, target), shape))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dims", BROADCAST)
def test_gradients_of_a_bias_over_several_tiles(target, dims, d):
    """Of 16 bits and in vectors where q is, which Hopper's kernel keeps at hand, and in float32, which it does not;
    keys that end in a tile, or before whole ones, rows that see none, and all that hides keys or draws."""
    q, k, v = target.qkv(3, 300, 4, d, n_kv=400, heads_kv=2)
    shape, mask = shape_of(dims, q, k), mask_of(target, (3, 1, 300, 400))
    mask[0, :, :140, 100:300] = False
    dropout = {"dropout_p": 0.2, "dropout_seed": seed_of(target)}
    lengths = {"seqused_k": target.int32([390, 60, 0]), "leftpad_k": target.int32([131, 3, 0])}
    for dtype in dict.fromkeys((target.dtype, torch.float32)):
        bias = {"bias": bias_of(target, shape, dtype, 0.1)}
        for options in (
            {},
            {"causal": True, "start_pos": "end"},
            {"window": (90, 20)} | lengths,
            {"causal": True, "start_pos": -50, "mask": mask} | dropout,
            {"mask": mask, "key_start": 3} | lengths | dropout,
        ):
            check(target, q, k, v, **bias, **options, skips=False)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("of", ["odd rows", "transposed", "heads last"])
def test_a_bias_that_is_laid_anew(target, of, d, deterministic):
    """Rows that are no whole vectors, or lie across, of which Hopper's kernels want a copy; beside what else changes
    scores, padding in front, and dropout."""
    q, k, v = target.qkv(2, 200, 4, d, n_kv=201, heads_kv=2)
    make = functools.partial(bias_of, target, dtype=target.dtype, hidden=0.1)
    for dims in ("1hi", "bhi"):
        shape = shape_of(dims, q, k)
        bias = make(shape) if of == "odd rows" else STRIDES[of](make, shape)
        for options in (
            {},
            {"softcap": 2.0, "causal": True, "start_pos": "end"},
            {"leftpad_k": target.int32([3, 100]), "seqused_k": target.int32([201, 180])},
            {"dropout_p": 0.3, "dropout_seed": seed_of(target), "mask": mask_of(target, (2, 1, 1, 201))},
        ):
            check(target, q, k, v, bias=bias, deterministic=deterministic, skips=False, **options)


@pytest.mark.parametrize("n_q,n_kv", [(49, 49), (64, 64), (1, 50), (64, 7), (17, 33), (65, 64), (128, 128), (30, 100)])
@pytest.mark.parametrize("d,d_v", [(32, 32), (64, 64), (40, 24)])
def test_small_heads(target, n_q, n_kv, d, d_v):
    """Whose pairs a CTA has all at once, with everything that changes them."""
    q, k, v = target.qkv(3, n_q, 2, d, n_kv=n_kv, d_v=d_v)
    mask, sink = mask_of(target, (3, 1, n_q, n_kv)), target.randn(2).float()
    mask[0, :, n_q // 2 :] = False  # rows without keys
    lengths = {"seqused_k": target.int32([n_kv, n_kv // 2, 0]), "leftpad_k": target.int32([0, n_kv // 4, 0])}
    dropout = {"dropout_p": 0.2, "dropout_seed": seed_of(target), "key_start": 3}
    bias = {"bias": bias_of(target, (1, 2, n_q, n_kv), target.dtype, 0.1)}
    for options in (
        {},
        {"causal": True, "start_pos": "end", "sink": sink},
        {"causal": True, "start_pos": -(n_q // 2), "softcap": 2.0, "mask": mask},
        {"window": (9, 5), "alibi_slopes": torch.rand(2, device=target.device)} | lengths,
        bias | {"mask": mask, "sink": sink} | dropout,
        {"bias": bias_of(target, (3, 1, 1, n_kv))} | lengths | dropout,
        bias | {"softcap": 2.0, "causal": True, "start_pos": 3},
    ):
        check(target, q, k, v, skips=False, **options)


@pytest.mark.parametrize("n", [49, 100])
def test_what_small_heads_hold_where_nobody_looks(target, n):
    """NaN in rows that see no key, by padding, by position or by a mask, and in keys past the last of a sequence or in
    front of its first, beside rows that do not fill a tile."""
    q, k, v = target.qkv(3, n, 2, 32, n_kv=n)
    dout, _ = of_out(target, q, v)
    mask = mask_of(target, (3, 1, n, n))
    mask[..., 0], mask[1, :, 5:9] = True, False
    used, pad = target.int32([n, n - 7, n]), target.int32([0, 0, 11])
    bias = bias_of(target, (1, 2, n, n), target.dtype)
    for options in ({}, {"mask": mask}, {"bias": bias, "mask": mask}, {"causal": True, "start_pos": -6}):
        options = options | {"seqused_k": used, "leftpad_k": pad}
        want = attempt(target, lambda o=options: target.gradients(q, k, v, dout, None, **o), backward=True)
        if want is None:
            continue
        x = [t.clone() for t in (q, k, v, dout)]
        for t in x[1:3]:
            t[1, n - 7 :] = NAN
            t[2, :11] = NAN
        for t in (x[0], x[3]):
            if "mask" in options:
                t[1, 5:9] = NAN
            if "causal" in options:
                t[:, :6] = NAN
        got = target.gradients(*x[:3], x[3], None, **options)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b), list(options)


@pytest.mark.parametrize("n_kv", [888, 904])
@pytest.mark.parametrize("d", [64, 128])
def test_gradients_of_a_bias_with_many_tiles(target, d, n_kv):
    """More than there are multiprocessors, each the sum of several sequences, some of whose tiles nobody sees; an even
    number in a row and an odd one, which leaves a CTA of the last cluster none."""
    q, k, v = target.qkv(4, 900, 6, d, n_kv=n_kv, heads_kv=2)
    bias = bias_of(target, (1, 6, 900, n_kv), target.dtype)
    for options in ({}, {"causal": True}, {"window": (200, 0), "softcap": 20.0}):
        check(target, q, k, v, bias=bias, **options, skips=False)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("n_q,n_kv,left", [(384, 160, 160), (900, 392, 300)])
def test_a_bias_of_rows_that_a_window_leaves_behind(target, n_q, n_kv, left, d):
    """Of a query tile some warpgroups see no key, others several tiles: all let every tile of the bias go."""
    q, k, v = target.qkv(2, n_q, 3, d, n_kv=n_kv)
    for dims in ("1hi", "bhi"):
        bias = bias_of(target, shape_of(dims, q, k), target.dtype)
        check(target, q, k, v, bias=bias, window=(left, -1), backward=False)


# batch, n_q, n_kv, heads, heads_kv, d: as in test_backward.py, whose kernels go through tiles as Hopper's do of a call
# that has nothing but a bias, which the copy engine brings, a mask, or both.
PLAIN_LOOP = {
    "few tiles, split by heads": (1, 600, 600, 16, 1, 64),
    "few tiles, split by both": (2, 520, 700, 12, 2, 128),
    "one head": (1, 900, 1000, 1, 1, 64),
    "dq beside tiles": (10, 520, 1000, 6, 6, 64),
    "wide, dq beside tiles": (10, 1000, 1100, 6, 6, 128),
    "columns that no panel fills": (16, 1030, 900, 5, 5, 104),
    "mirrored": (86, 513, 513, 5, 1, 128),
    "short": (40, 197, 197, 12, 12, 40),
    "whole heads": (30, 300, 257, 6, 6, 64),
    "whole heads, grouped": (40, 130, 257, 6, 3, 64),
}


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softmax_scale": 0.3, "window": (300, 10)}], ids=str)
@pytest.mark.parametrize("shape", PLAIN_LOOP)
def test_gradients_beside_a_bias_alone(hopper, shape, options):
    batch, n_q, n_kv, heads, heads_kv, d = PLAIN_LOOP[shape]
    q, k, v = hopper.qkv(batch, n_q, heads, d, n_kv=n_kv, heads_kv=heads_kv)
    for dims in ("1h", "b1", "bh") if batch < 80 else ("1h",):  # of "bh" dBias is dS, which is written as it is made
        bias = bias_of(hopper, shape_of(dims + "i", q, k), hopper.dtype, 0.1)
        check(hopper, q, k, v, bias=bias, sink=hopper.vector(heads), **options)


def masks_of(target, batch, n_q, n_kv):
    """Of padding, and of blocks of 128 by 128, half of them hidden, with a sequence that sees nothing where there are
    several; and of single pairs."""
    lengths = torch.randint(1, n_kv + 1, (batch, 1, 1, 1), device=target.device)
    yield torch.arange(n_kv, device=target.device) < lengths
    blocks = mask_of(target, (batch, 1, -(-n_q // 128), -(-n_kv // 128)), 0.5)
    blocks[1:2] = False
    yield blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :n_q, :n_kv]
    yield mask_of(target, (1, 1, n_q, n_kv))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softmax_scale": 0.3, "window": (300, 10)}], ids=str)
@pytest.mark.parametrize("shape", PLAIN_LOOP)
def test_gradients_beside_a_mask(hopper, shape, options):
    """Alone, beside a bias that sequences share, and beside one that none do, whose gradient is dS."""
    batch, n_q, n_kv, heads, heads_kv, d = PLAIN_LOOP[shape]
    q, k, v = hopper.qkv(batch, n_q, heads, d, n_kv=n_kv, heads_kv=heads_kv)
    for mask, dims in zip(masks_of(hopper, batch, n_q, n_kv), ("", "1h", "bh" if batch < 80 else ""), strict=True):
        check(hopper, q, k, v, mask=mask, **options)
        if dims:
            bias = bias_of(hopper, shape_of(dims + "i", q, k), hopper.dtype, 0.1)
            check(hopper, q, k, v, mask=mask, bias=bias, sink=hopper.vector(heads), **options)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("n_q", [512, 700])
def test_a_mask_of_keys_has_taller_tiles(hopper, n_q, d):
    """Which on Hopper have three warpgroups at head_dim 64: rows that fill them and not, padding in front, windows."""
    q, k, v = hopper.qkv(16, n_q, 12, d, n_kv=600, heads_kv=4)
    mask = mask_of(hopper, (16, 1, 1, 600))
    mask[0], mask[1, ..., :300], mask[2, ..., 128:] = False, False, False
    for options in ({}, {"causal": True}, {"window": (200, 3), "leftpad_k": hopper.int32([3, 130] + 14 * [0])}):
        check(hopper, q, k, v, mask=mask, num_splits=1, **options, backward=False)  # fixed: not for the short kernels


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "batch,n_q,n_kv,heads,d", [(66, 520, 260, 2, 64), (99, 962, 130, 2, 128), (20, 197, 197, 6, 40)]
)
def test_gradients_beside_dropout_alone(hopper, batch, n_q, n_kv, heads, d, causal):
    """The least work for which dq is made beside tiles, whose draws the oracle takes a while for; and whole heads."""
    q, k, v = hopper.qkv(batch, n_q, heads, d, n_kv=n_kv)
    check(hopper, q, k, v, dropout_p=0.2, dropout_seed=seed_of(hopper), causal=causal)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("lengths", ["seqused_k", "leftpad_k"])
def test_gradients_beside_a_bias_that_holds_anything_outside(hopper, lengths, d):
    """Past the keys, in front of them and above the diagonal, in rows that see nothing, q and dout too."""
    q, k, v = hopper.qkv(3, 600, 4, d, n_kv=520, heads_kv=2)
    options = {lengths: hopper.int32([520, 0, 190] if lengths == "seqused_k" else [0, 520, 77]), "causal": True}
    dout, _ = of_out(hopper, q, v)
    spoilt_q, spoilt_dout = q.clone(), dout.clone()
    spoilt_q[:, 64:130] = spoilt_dout[:, 64:130] = NAN
    for shape in ((1, 4, 600, 520), (3, 4, 600, 520)):
        bias = bias_of(hopper, shape, hopper.dtype)
        bias[:, :, 64:130] = -INF
        want = hopper.gradients(q, k, v, dout, None, bias=bias, **options)
        planted = bias.masked_fill(torch.ones(600, 520, dtype=torch.bool, device=hopper.device).triu(1), NAN)
        got = hopper.gradients(spoilt_q, k, v, spoilt_dout, None, bias=planted, **options)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("n_q,n_kv", [(128, 136), (300, 520), (600, 136)])
def test_gradients_of_a_bias_of_one_row(target, n_q, n_kv, d, deterministic):
    """Its copies are short, so that warpgroups reach the end of a tile apart: none may write where another's bias or
    gradients lie, as one did on Hopper, in some of the calls."""
    q, k, v = target.qkv(3, n_q, 6, d, n_kv=n_kv, heads_kv=3)
    dout, dlse = of_out(target, q, v)
    options = {"bias": bias_of(target, (1, 6, 1, n_kv), target.dtype)}
    expected = expect_gradients(q, k, v, dout, dlse, **options)
    for _ in range(1 if target.device == "cpu" else 8):
        run = functools.partial(target.gradients, q, k, v, dout, dlse, deterministic=deterministic, **options)
        expected.check(tried(target, run, backward=True), small=True)


@pytest.mark.parametrize("n_kv", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257])
@pytest.mark.parametrize("n_q", [1, 2, 17, 64, 130])
def test_lengths_around_words_and_tiles(target, n_q, n_kv):
    """Few rows too, which decode kernels would take."""
    q, k, v = target.qkv(2, n_q, 4, 64, n_kv=n_kv, heads_kv=1)
    options = {"bias": bias_of(target, (1, 4, n_q, n_kv)), "mask": mask_of(target, (2, 1, n_q, n_kv))}
    check(target, q, k, v, **options, dropout_p=0.2, dropout_seed=seed_of(target))
    for name, x in options.items():
        check(target, q, k, v, backward=False, **{name: x})


@pytest.mark.parametrize("d,d_v", [(128, 128), (192, 128), (256, 256), (40, 72)])
def test_head_dims(target, d, d_v):
    q, k, v = target.qkv(1, 130, 2, d, n_kv=200, d_v=d_v)
    wide = target.family == "simt" and max(d, d_v) > 128  # whose gradients are not there yet
    for options in (
        {"bias": bias_of(target, (1, 2, 130, 200)), "causal": True, "start_pos": "end"},
        {"mask": mask_of(target, (1, 1, 130, 200))},
        {"dropout_p": 0.3, "dropout_seed": seed_of(target)},
    ):
        check(target, q, k, v, **options, backward=not wide)
        if wide:
            with pytest.raises(NotImplementedError, match=f"^{next(iter(options))}: no kernel"):
                target.gradients(q, k, v, torch.ones_like(q[..., :d_v]), **options)


@pytest.mark.parametrize("n_kv", [200, 201])  # a bias read two keys at a time, or one
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_query_heads_that_share_keys(target, d, n_kv):
    """Each with a bias, a mask and draws of its own, over several tiles, some of which the mask hides or leaves whole,
    keys at positions that are no multiple of anything."""
    q, k, v = target.qkv(2, 140, 4, d, n_kv=n_kv, heads_kv=2)
    mask = mask_of(target, (2, 4, 140, n_kv))
    mask[:, 1, :70] = False
    mask[:, 2, 64:, :130] = True
    kinds = {
        "bias": {"bias": bias_of(target, (1, 4, 140, n_kv), target.dtype, hidden=0.1)},
        "mask": {"mask": mask},
        "dropout": {"dropout_p": 0.3, "dropout_seed": seed_of(target), "leftpad_k": target.int32([3, 0])},
    }
    backward = not (target.family == "simt" and d > 128)  # which is not there yet
    for options in (*kinds.values(), kinds["bias"] | kinds["mask"] | kinds["dropout"] | {"softcap": 3.0}):
        check(target, q, k, v, **options, backward=backward)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d,dims", [(64, "bhi"), (64, "b11"), (128, "11i")])
def test_gradients_of_hidden_tiles(target, d, dims, deterministic):
    """Tiles that are hidden, shown or cut, of every head its own; rows and keys that see nothing; beside a bias and
    dropout, which ask for the next tile that is seen."""
    q, k, v = target.qkv(2, 600, 2, d, n_kv=520, heads_kv=1)
    *lead, rows, keys = shape_of(dims, q, k)
    tiles = mask_of(target, (*lead, -(-rows // 64), -(-keys // 64)), 0.4)
    tiles[..., :2, :2] = True
    mask = tiles.repeat_interleave(64, 2)[:, :, :rows].repeat_interleave(64, 3)[..., :keys]
    cut = mask & (mask_of(target, mask.shape, 0.5) | mask_of(target, (*lead, 1, 1), 0.5))
    bias = {"bias": bias_of(target, (1, 2, 600, 520), target.dtype)}
    dropout = {"dropout_p": 0.2, "dropout_seed": seed_of(target)}
    for options in (
        {"mask": mask},
        {"mask": cut, "causal": True, "start_pos": "end"},
        {"mask": cut, "leftpad_k": target.int32([0, 70])} | dropout,
        {"mask": mask} | bias | dropout,
        bias,
    ):
        check(target, q, k, v, **options, deterministic=deterministic)


@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)], ids=str)
def test_sizes_of_zero(target, shape):
    batch, n_q, n_kv = shape
    q, k, v = target.qkv(batch, n_q, 4, 32, n_kv=n_kv, heads_kv=2)
    options = {"mask": mask_of(target, (batch, 1, n_q, n_kv)), "dropout_p": 0.5, "dropout_seed": seed_of(target)}
    bias = bias_of(target, (1, 4, 1, n_kv))
    out, lse = tried(target, lambda: target.fmha(q, k, v, bias=bias, **options))
    assert not out.any() and (lse == -INF).all()
    dout, dlse = of_out(target, q, v)
    got = tried(target, lambda: target.gradients(q, k, v, dout, dlse, bias=bias, **options), backward=True)
    assert [t.shape for t in got] == [t.shape for t in (q, k, v, bias)] and not any(t.any() for t in got)


# ------------------------------------------------------------------------------------------------ with other features
COMPANY = {
    "causal": {"causal": True, "start_pos": "end"},
    "window": {"window": (20, 33)},
    "softcap": {"softcap": 3.0},
    "alibi": {"causal": True, "alibi": "[H]"},
    "sink": {"sink": True},
    "lengths": {"seqused_k": [150, 64, 1], "start_pos": "end", "causal": True},
    "leftpad": {"leftpad_k": [5, 140, 0], "start_pos": "end"},
    "everything": padded_cases.FEATURES["everything"],
}


def with_pairs(target, q, k, case):
    """The arguments that this module is about, as a case has them."""
    options = {}
    if case["bias"]:
        dims, dtype, hidden = case["bias"]
        options["bias"] = bias_of(target, shape_of(dims, q, k), DTYPES[dtype], hidden)
    if case["mask"]:
        dims, visible = case["mask"]
        options["mask"] = mask_of(target, shape_of(dims, q, k), visible)
    if case["dropout"]:
        dropout_p, word, head, sequence = case["dropout"]
        options |= {"dropout_p": dropout_p, "dropout_seed": seed_of(target, word, 3 * word), "head_start": head,
                    "sequence_start": sequence}  # fmt: skip
    return options


ALONE = {
    "bias": {"bias": ("1hi", 0, 0.0), "mask": None, "dropout": None},
    "bias of each": {"bias": ("bhi", 2, 0.1), "mask": None, "dropout": None},
    "mask": {"bias": None, "mask": ("b1i", 0.6), "dropout": None},
    "padding": {"bias": None, "mask": ("b11", 0.6), "dropout": None},
    "dropout": {"bias": None, "mask": None, "dropout": (0.2, 11, 0, 0)},
    "all": {"bias": ("b11", 1, 0.0), "mask": ("1hi", 0.7), "dropout": (0.5, 2**40, 5, 9)},
}


@pytest.mark.parametrize("company", COMPANY)
@pytest.mark.parametrize("kind", ALONE)
def test_company(target, kind, company):
    (q, k, v), options = padded_cases.build(target, padded_cases.PLAIN | COMPANY[company])
    check(target, q, k, v, **options, **with_pairs(target, q, k, ALONE[kind]))


@pytest.mark.parametrize("kind", ALONE)
def test_torch_16_bit(target_16_bit, kind):
    (q, k, v), options = padded_cases.build(target_16_bit, padded_cases.PLAIN | COMPANY["everything"])
    check(target_16_bit, q, k, v, **options, **with_pairs(target_16_bit, q, k, ALONE[kind]))


@pytest.mark.parametrize("kind", ALONE)
def test_torch_backend_on_cuda(gpu, kind):
    target = dataclasses.replace(gpu, backend="torch")
    (q, k, v), options = padded_cases.build(target, padded_cases.PLAIN | COMPANY["everything"])
    check(target, q, k, v, **options, **with_pairs(target, q, k, ALONE[kind]))


@st.composite
def cases(draw):
    case = draw(padded_cases.cases())
    dims = st.sampled_from(BROADCAST)
    case["bias"] = draw(st.none() | st.tuples(dims, st.integers(0, 2), st.sampled_from([0.0, 0.0, 0.3])))
    case["mask"] = draw(st.none() | st.tuples(dims, st.sampled_from([0.02, 0.5, 0.9, 1.0])))
    start = st.integers(0, 9)
    case["dropout"] = draw(
        st.none() | st.tuples(st.sampled_from([2**-16, 0.1, 0.5, 0.9]), st.integers(-(2**60), 2**60), start, start)
    )
    return case


@settings(max_examples=60)
@given(case=cases())
def test_any_case(target, case):
    (q, k, v), options = padded_cases.build(target, case)
    options |= with_pairs(target, q, k, case)
    check(target, q, k, v, **options, num_splits=case["num_splits"], skips=False)


@pytest.mark.parametrize("feature", ["plain", "causal, end", "causal, tensor", "alibi", "lengths", "everything"])
def test_packed_dropout(target, feature):
    """A sequence's own rows and keys, and its place in the batch, say what is dropped."""
    batch, options = packed_cases.build(target, packed_cases.PLAIN | packed_cases.FEATURES[feature])
    options |= batch.packing | {"dropout_p": 0.3, "dropout_seed": seed_of(target)}
    got = tried(target, lambda: target.fmha(*batch, **options))
    expect_packed(*batch, **options).check(*got, small=True)
    dout, dlse = of_out(target, batch.q, batch.v)
    got = tried(target, lambda: target.gradients(*batch, dout, dlse, **options), backward=True)
    expect_gradients_packed(*batch, dout, dlse, **options).check(got, small=True)


def test_packed_dropout_of_torch_on_cuda(gpu):
    """There sequences are padded, several at a time."""
    test_packed_dropout(dataclasses.replace(gpu, backend="torch"), "everything")


@pytest.mark.parametrize("n_q", [1, 5, 40])
def test_pages(target, n_q):
    """Bias and mask are as wide as a row of the table has room for."""
    pages, table = [target.randn(9, 16, 2, 64) for _ in "kv"], target.int32([[8, 0, 3, 5], [1, 7, 2, 6]])
    q, used = target.randn(2, n_q, 4, 64), target.int32([61, 20])
    k, v = (x[table.long()].flatten(1, 2) for x in pages)
    for options in (
        {"bias": bias_of(target, (1, 4, n_q, 64))},
        {"mask": mask_of(target, (2, 1, 1, 64))},
        {"dropout_p": 0.4, "dropout_seed": seed_of(target)},
    ):
        call = lambda o=options: target.fmha(q, *pages, block_table=table, seqused_k=used, **o)  # noqa: E731
        expect(q, k, v, seqused_k=used, **options).check(*tried(target, call), small=True)


# ------------------------------------------------------------------------------------------------ what does not count
@pytest.mark.parametrize("plant", [NAN, INF])
def test_what_a_bias_holds_where_a_mask_hides(target, plant):
    q, k, v = target.qkv(2, 70, 4, 64, n_kv=130, heads_kv=2)
    mask, bias = mask_of(target, (2, 4, 70, 130)), bias_of(target, (2, 4, 70, 130))
    dout, dlse = of_out(target, q, v)
    clean = tried(target, lambda: target.fmha(q, k, v, bias=bias, mask=mask))
    planted = bias.masked_fill(~mask, plant)
    assert_same_bits(target.fmha(q, k, v, bias=planted, mask=mask), clean)
    options = {"mask": mask, "deterministic": True}
    want = tried(target, lambda: target.gradients(q, k, v, dout, dlse, bias=bias, **options), backward=True)
    got = target.gradients(q, k, v, dout, dlse, bias=planted, **options)
    assert_same_bits(got, want)
    assert not got[3][~mask].any()


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_what_stands_outside_a_sequence(target, name):
    """Past its keys, before its first one and above the diagonal a bias may be NaN, a mask true."""
    q, k, v = target.qkv(2, 70, 4, 64, n_kv=130, heads_kv=2)
    options = {"seqused_k": target.int32([100, 37]), "leftpad_k": target.int32([3, 0]), "causal": True,
               "start_pos": "end"}  # fmt: skip
    x = bias_of(target, (2, 1, 70, 130)) if name == "bias" else mask_of(target, (2, 1, 70, 130))
    planted, j = x.clone(), torch.arange(130, device=target.device)
    for b, (first, length) in enumerate(((3, 100), (0, 37))):
        position = torch.arange(70, device=target.device)[:, None] + length - 70
        planted[b, 0][(j < first) | (j > position)] = NAN if name == "bias" else True
    want = tried(target, lambda: target.fmha(q, k, v, **{name: x}, **options))
    assert_same_bits(target.fmha(q, k, v, **{name: planted}, **options), want)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("kind", ["mask", "bias", "bias and mask"])
def test_rows_without_a_visible_key(target, kind, sink):
    """0, and -inf or the sink's logit; gradients of 0, whatever stands in their q, dout and out."""
    q, k, v = target.qkv(2, 70, 4, 64, n_kv=130, heads_kv=2)
    seen = mask_of(target, (2, 4, 70, 130), 0.05)
    seen[:, :, ::3] = False
    seen[1] = False
    options = {"sink": target.vector(4)} if sink else {}
    if kind == "mask":
        options["mask"] = seen
    elif kind == "bias":
        options["bias"] = torch.zeros(seen.shape, device=target.device).masked_fill(~seen, -INF)
    else:
        half = mask_of(target, seen.shape, 0.5)
        options["bias"] = torch.zeros(seen.shape, device=target.device).masked_fill(~(seen | half), -INF)
        options["mask"] = seen | ~half
    check(target, q, k, v, **options)
    out, lse = target.fmha(q, k, v, **options)
    empty = ~seen.any(-1)
    assert not out.transpose(1, 2)[empty].any()
    logits = (options["sink"][None, :, None] if sink else lse.new_tensor(-INF)).expand_as(lse)
    # to base 2 and back: of one sink in seven the last bit
    torch.testing.assert_close(lse[empty], logits[empty], rtol=2**-22, atol=0)
    dout, dlse = of_out(target, q, v)
    call = functools.partial(
        cutlass_ext.fmha_backward, backend=target.backend, dlse=dlse, deterministic=True, **options
    )
    want = tried(target, lambda: call(dout, q, k, v, out, lse), backward=True)
    for plant in (NAN, INF):
        spoilt = [t.clone() for t in (q, dout, out)]
        for t in spoilt:
            t.transpose(1, 2)[empty] = plant
        got = call(spoilt[1], spoilt[0], k, v, spoilt[2], lse)
        assert not got[0].transpose(1, 2)[empty].any()
        assert_same_bits(got, want)


@pytest.mark.parametrize("hidden", [-1e5, -1e9, -1e30])
@pytest.mark.parametrize("n_q,n_kv,d", [(40, 60, 32), (70, 130, 64), (100, 300, 128), (3, 300, 128), (64, 200, 96)])
def test_a_bias_that_stands_for_a_mask(target, n_q, n_kv, d, hidden):
    """Large negative numbers where padding is, in the tiles that come first: as a mask has it. A row that has nothing
    else gets something finite, and adds something finite to gradients."""
    q, k, v = target.qkv(2, n_q, 4, d, n_kv=n_kv, heads_kv=2)
    seen = torch.arange(n_kv, device=q.device) < torch.tensor([n_kv // 3, 5], device=q.device)[:, None, None, None]
    seen = seen.expand(2, 1, n_q, n_kv).clone()
    seen[:, :, ::5] &= torch.arange(n_kv, device=q.device) < 3
    dout, dlse = of_out(target, q, v)
    want = tried(target, lambda: target.fmha(q, k, v, mask=seen))
    want_of_gradients = tried(target, lambda: target.gradients(q, k, v, dout, dlse, mask=seen), backward=True)
    tolerance = peer_tolerance(q.dtype)
    for dtype in (torch.float32, torch.bfloat16):
        bias = torch.zeros(seen.shape, dtype=dtype, device=q.device).masked_fill(~seen, hidden)
        out, lse = tried(target, lambda bias=bias: target.fmha(q, k, v, bias=bias))
        torch.testing.assert_close(out, want[0], **tolerance)
        torch.testing.assert_close(lse, want[1], rtol=2e-6, atol=4e-6)
        gradients = target.gradients(q, k, v, dout, dlse, bias=bias)
        for got, of_mask in zip(gradients[:3], want_of_gradients, strict=True):
            torch.testing.assert_close(got, of_mask, atol=2 * tolerance["atol"] * of_mask.abs().max().item(), rtol=0)
        assert not gradients[3].masked_select(~seen).any()
        bias[:, :, 1::3] = hidden
        out, _ = target.fmha(q, k, v, bias=bias)
        assert (out[:, 1::3].abs() <= 1.01 * v.abs().max()).all()
        torch.testing.assert_close(out[:, ::3], want[0][:, ::3], **tolerance)
        if q.dtype != torch.float32:  # whose weights of such rows are not 0, and may be large
            gradients = target.gradients(q, k, v, dout, bias=bias)
            assert all(t.isfinite().all() for t in gradients)


TILES = {  # of 128 rows and 128 keys, i and j: those that are seen
    "none": lambda i, j: i < 0,
    "first": lambda i, j: (j == 0) | (i < 0),
    "last": lambda i, j: j == j.max(),
    "middle": lambda i, j: (j == 2) | (i < 0),
    "rows": lambda i, j: (i != 1) & (j >= 0),
    "every other": lambda i, j: (i + j) % 2 == 0,
    "gaps": lambda i, j: (j % 5 == 1) | (j % 5 == 4) & (i > 0),
}
AROUND_TILES = {
    "alone": {},
    "causal": {"causal": True, "start_pos": "end"},
    "window": {"window": (200, 90), "start_pos": 200},
    "leftpad": {"leftpad_k": [0, 70]},
    "leftpad of blocks": {"leftpad_k": [128, 64]},
    "lengths": {"seqused_k": [150, 700]},
    "splits": {"num_splits": 3},
}


@pytest.mark.parametrize("size", [128, 64])
@pytest.mark.parametrize("around", AROUND_TILES)
def test_masks_of_whole_tiles(target, around, size):
    """What a mask hides in whole is not visited, what it shows in whole is not looked at: anywhere among the keys."""
    n_q, n_kv = 300, 700
    q, k, v = target.qkv(2, n_q, 2, size, n_kv=n_kv, heads_kv=1)
    i, j = (torch.arange(n, device=target.device) // size for n in (n_q, n_kv))
    options = {n: target.int32(x) if isinstance(x, list) else x for n, x in AROUND_TILES[around].items()}
    for kind, tiles in TILES.items():
        mask = tiles(i[:, None], j).expand(2, 2, n_q, n_kv).clone()
        mask[1, 1, :, :5] |= size == 64  # a part of tiles
        check(target, q, k, v, mask=mask, backward=kind == "gaps", skips=False, **options)
        check(target, q, k, v, mask=mask[:1, :1, :1].expand_as(mask), backward=False, skips=False, **options)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("around", AROUND_TILES)
def test_masks_of_more_tiles_than_a_word_has_bits(target, around, d):
    """Hidden, whole and mixed tiles far apart among 71; the halves of a tile's rows see others."""
    q, k, v = target.qkv(2, 150, 2, d, n_kv=9000, heads_kv=1)
    options = {n: target.int32(x) if isinstance(x, list) else x for n, x in AROUND_TILES[around].items()}
    for visible in (0.05, 0.5):
        kind = torch.rand(2, 1, 3, 141, device=target.device).repeat_interleave(64, 2).repeat_interleave(64, 3)
        kind = kind[:, :, :150, :9000]
        mask = (kind < visible) | (kind > 0.95) & mask_of(target, kind.shape, 0.9)
        check(target, q, k, v, mask=mask, backward=False, skips=False, **options)


@pytest.mark.parametrize("d", [64, 128])
def test_tiles_that_nobody_sees_are_not_read(hopper, d):
    """What their keys and values hold does not matter."""
    target = dataclasses.replace(hopper, backend="sm90")
    q, k, v = target.qkv(2, 300, 2, d, n_kv=1000)
    mask = (torch.arange(1000, device="cuda") // 128 % 3 == 1).expand(1, 1, 300, 1000)
    want = tried(target, lambda: target.fmha(q, k, v, mask=mask))
    for t in (k, v):
        t[:, ~mask[0, 0, 0]] = NAN
    assert_same_bits(target.fmha(q, k, v, mask=mask), want)


def test_a_mask_of_many_keys(target_fp32):
    """More tiles than a job of Hopper's kernels has a bit for, and more than one word of the map."""
    for n_kv in (2100, 140_000 if target_fp32.cuda else 5000):
        q, k, v = target_fp32.qkv(1, 130, 1, 64, n_kv=n_kv)
        mask = mask_of(target_fp32, (1, 1, 130, n_kv // 64 + 1), 0.2).repeat_interleave(64, 3)[..., :n_kv]
        check(target_fp32, q, k, v, mask=mask, backward=False)


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("dims", BROADCAST)
def test_a_bias_of_16_bits_by_the_copy_engine(target, dims, d):
    """Rows at multiples of 16 bytes, of tiles that end anywhere; beside whatever else there is."""
    q, k, v = target.qkv(2, 200, 4, d, n_kv=328, heads_kv=2)
    for dtype in (torch.float16, torch.bfloat16):
        bias = bias_of(target, shape_of(dims, q, k), dtype, 0.1)
        check(target, q, k, v, bias=bias, backward=False)
        for options in (
            {"causal": True, "start_pos": "end"},
            {"softcap": 2.0, "leftpad_k": target.int32([3, 200])},
            {"mask": mask_of(target, (2, 1, 200, 328)), "seqused_k": target.int32([0, 300])},
            {"dropout_p": 0.3, "dropout_seed": seed_of(target), "leftpad_k": target.int32([8, 5])},
        ):
            check(target, q, k, v, bias=bias, backward=False, skips=False, **options)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("leftpad", [0, 8, 3])
def test_dropout_over_many_tiles(target, d, leftpad):
    q, k, v = target.qkv(2, 300, 4, d, n_kv=700, heads_kv=2)
    drop = {"dropout_p": 0.3, "dropout_seed": seed_of(target), "leftpad_k": target.int32([leftpad, 0])}
    check(target, q, k, v, **drop)
    check(target, q, k, v, **drop, causal=True, start_pos="end", softcap=3.0, backward=False)


def test_a_mask_of_all_is_none(target):
    q, k, v = target.qkv(2, 70, 4, 64, n_kv=130)
    want = target.fmha(q, k, v)
    every = torch.ones(2, 1, 1, 130, dtype=torch.bool, device=target.device)
    for a, b in zip(tried(target, lambda: target.fmha(q, k, v, mask=every)), want, strict=True):
        torch.testing.assert_close(a, b, **peer_tolerance(target.dtype))


# ------------------------------------------------------------------------------------------------ dropout's bits
def uniform(target, rows, keys):
    """q and k whose scores are 0, so that a weight is 0 where it was dropped alone."""
    return torch.zeros_like(target.randn(2, rows, 4, 64)), torch.zeros_like(target.randn(2, keys, 2, 64))


POSITIONS = [
    {},
    {"start_pos": -30},
    {"start_pos": "end"},
    {"start_pos": [7, -100]},
    {"head_start": 6, "sequence_start": 3},
    {"key_start": 40},
    {"key_start": -27, "start_pos": 12},
    {"key_start": 13, "start_pos": "end"},
    {"key_start": [24, -8], "start_pos": -30},
    {"key_start": [3, 10**6], "start_pos": [7, -100]},
]


@pytest.mark.parametrize("dropout_p", [2**-16, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("options", POSITIONS, ids=str)
def test_the_same_bits_everywhere(target, options, dropout_p):
    """In the output, through an identity as V, and in each gradient: what `dropout_mask` and the oracle say."""
    rows, keys = 60, 64
    options = {n: target.int32(x) if isinstance(x, list) else x for n, x in options.items()}
    drop = {"dropout_p": dropout_p, "dropout_seed": seed_of(target, 987654321987654321, -4)}
    want = cutlass_ext.dropout_mask(2, 4, rows, keys, **drop, **options)
    start, key_start = (options.get(name, 0) for name in ("start_pos", "key_start"))
    for b in range(2):
        key = key_start if isinstance(key_start, int) else int(key_start[b])
        first = key + keys - rows if start == "end" else start if isinstance(start, int) else int(start[b])
        heads, sequence = torch.arange(4) + options.get("head_start", 0), b + options.get("sequence_start", 0)
        positions = torch.arange(rows) + first
        by_oracle = keeps(drop["dropout_p"], drop["dropout_seed"], sequence, heads, positions, torch.arange(keys) + key)
        assert torch.equal(want[b].cpu(), by_oracle)
    eye = torch.eye(64, dtype=target.dtype, device=target.device)
    q, k = uniform(target, rows, keys)
    options |= drop | {"backend": target.backend}
    out, lse = tried(target, lambda: target.fmha(q, k, eye[None, :, None].expand(2, 64, 2, 64), **options))
    assert torch.equal((out != 0).transpose(1, 2), want)  # [B, rows, H, keys]
    delta, dout = torch.zeros_like(lse), eye[None, :rows, None].expand(2, rows, 4, 64).contiguous()
    ones_of = lambda t: torch.ones_like(t)  # noqa: E731
    gradients = lambda *tensors: cutlass_ext.fmha_backward(*tensors, None, lse, delta=delta, **options)  # noqa: E731
    # dV = P^T dO, of one query head of each KV head at a time
    for h in range(4):
        of_head = torch.zeros_like(dout)
        of_head[:, :, h] = dout[:, :, h]
        dv = tried(target, lambda x=of_head: gradients(x, q, k, ones_of(k)), backward=True)[2]
        assert torch.equal((dv[:, :, h // 2, :rows] != 0).mT, want[:, h])
    # dQ = dS K and dK = dS^T Q, of dS = P dP
    keyed = eye[None, :, None].expand(2, 64, 2, 64).contiguous()
    dq = gradients(ones_of(q), q, keyed, ones_of(k))[0]
    assert torch.equal((dq != 0).transpose(1, 2), want)
    for h in range(4):
        of_head = torch.zeros_like(dout)
        of_head[:, :, h] = dout[:, :, h]
        dk = gradients(ones_of(q), of_head, k, ones_of(k))[1]
        assert torch.equal((dk[:, :, h // 2, :rows] != 0).mT, want[:, h])


@pytest.mark.parametrize("d", [64, 128])
def test_dropout_behind_sequences_without_keys(target, d):
    """Of which warps that draw ahead draw nothing: the sequences behind them get what is theirs."""
    lengths = [0, 70, 0, 0, 130, 40, 0, 200] * 2
    q, k, v = target.qkv(len(lengths), 140, 4, d, n_kv=200, heads_kv=2)
    drop = {"dropout_p": 0.4, "dropout_seed": seed_of(target, 3, 4)}
    check(target, q, k, v, seqused_k=target.int32(lengths), backward=False, **drop)


def test_dropout_by_position(target_fp32):
    """A call of some sequences, heads, rows or keys drops what the whole call drops there."""
    seed = seed_of(target_fp32, 5, 6)
    mask = functools.partial(cutlass_ext.dropout_mask, dropout_p=0.3, dropout_seed=seed)
    whole = mask(4, 6, 50, 99)
    assert torch.equal(mask(2, 3, 50, 99, head_start=3, sequence_start=1), whole[1:3, 3:])
    assert torch.equal(mask(4, 6, 20, 99, start_pos=30), whole[:, :, 30:])
    assert torch.equal(mask(4, 6, 50, 43), whole[..., :43])
    assert torch.equal(mask(4, 6, 50, 63, key_start=36), whole[..., 36:])
    key_start = target_fp32.int32([0, 1, 12, 40])
    got = mask(4, 6, 50, 59, key_start=key_start, start_pos=0)
    assert torch.equal(
        got, torch.stack([of[..., first : first + 59] for of, first in zip(whole, key_start, strict=True)])
    )
    q, k, v = target_fp32.qkv(4, 50, 6, 16, n_kv=99)
    options = {"dropout_p": 0.3, "dropout_seed": seed}
    out, _ = tried(target_fp32, lambda: target_fp32.fmha(q, k, v, **options))
    part = [t[1:3, :, 3:] for t in (q, k, v)]
    got, _ = target_fp32.fmha(*part, **options, head_start=3, sequence_start=1)
    torch.testing.assert_close(got, out[1:3, :, 3:], **peer_tolerance(torch.float32))
    got, _ = target_fp32.fmha(q[:, 30:], k, v, start_pos=30, **options)
    torch.testing.assert_close(got, out[:, 30:], **peer_tolerance(torch.float32))


def test_philox_is_philox():
    """Random123's answers to known questions, for 7 rounds: of zeros, and of ones."""
    for counter, key, answer in (
        (0, 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (0xFFFFFFFF, -1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ):
        words = _philox(*([torch.tensor([key & 0xFFFFFFFF])] * 2), *([torch.tensor([counter])] * 4))
        assert [word.item() for word in words] == list(answer)


# ------------------------------------------------------------------------------------------------ dropout's statistics
def test_how_much_is_dropped():
    """Of 4 million weights, within five standard deviations; of p below 2^-33 nothing."""
    for dropout_p in (2**-12, 0.1, 0.25, 0.5, 0.9):
        mask = cutlass_ext.dropout_mask(4, 4, 512, 512, dropout_p, torch.tensor([1, 2]))
        p, n = dropout_p, mask.numel()
        assert abs(mask.float().mean(dtype=torch.float64).item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
    assert cutlass_ext.dropout_mask(1, 1, 64, 64, 2**-34, torch.tensor([1, 2])).all()


def test_weights_are_dropped_independently():
    """Neighbours by key, row, head, sequence, and under seeds that are next to each other, agree as often as strangers;
    counts of 16 weights in a row are binomial (chi-square)."""
    p = 0.5
    mask = functools.partial(cutlass_ext.dropout_mask, 4, 4, 256, 256, p)
    of = {words: mask(torch.tensor(words)).double() - (1 - p) for words in ((1, 2), (2, 2), (1, 3), (1, 2 + 2**32))}
    x = of[1, 2]
    pairs = {f"{dim} {step}": (x.narrow(dim, step, x.shape[dim] - step), x.narrow(dim, 0, x.shape[dim] - step))
             for dim, steps in ((3, (1, 2, 7, 8, 16, 32)), (2, (1, 8, 16)), (1, (1, 2)), (0, (1, 2)))
             for step in steps}  # fmt: skip
    pairs |= {f"{words}": (x, y) for words, y in of.items() if words != (1, 2)}
    pairs |= {f"{words}, the next sequence": (x[1:], y[:-1]) for words, y in of.items()}
    pairs |= {f"{words}, the next head": (x[:, 1:], y[:, :-1]) for words, y in of.items()}
    square, rows = x[..., :128, 128:], x[:, :, 4:8]
    pairs |= {"row and key": (square, x[..., 128:, :128].mT), "row and head": (rows, x[:, :, :4].transpose(1, 2))}
    for what, (a, b) in pairs.items():
        correlation = (a * b).mean().item() / (p * (1 - p))
        assert abs(correlation) < 6 / math.sqrt(a.numel()), what
    for counts in (x.unflatten(3, (-1, 16)).add(1 - p).sum(-1), x.unflatten(2, (-1, 16)).add(1 - p).sum(3)):
        n = counts.numel()
        seen = torch.bincount(counts.flatten().round().long(), minlength=17).double()
        expected = torch.tensor([math.comb(16, i) / 2**16 * n for i in range(17)], dtype=torch.float64)
        chi_square = ((seen - expected) ** 2 / expected).sum().item()
        assert chi_square < 45, f"{chi_square} of 16 degrees of freedom"  # exceeded once in 7000 times


@pytest.mark.parametrize("dropout_p", [0.1, 0.3, 0.75])
def test_weights_of_one_draw_are_dropped_independently(dropout_p):
    """They share part of their numbers: how many of two rows and sixteen keys are dropped is binomial (chi-square)."""
    mask = cutlass_ext.dropout_mask(8, 8, 512, 512, dropout_p, torch.tensor([5, 6]))
    dropped = (~mask).unflatten(3, (-1, 16)).unflatten(2, (-1, 2)).sum((3, 5)).flatten()
    n, p = dropped.numel(), dropout_p
    expected = torch.tensor([math.comb(32, i) * p**i * (1 - p) ** (32 - i) * n for i in range(33)])
    seen = torch.bincount(dropped, minlength=33)
    often = expected > 10
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    seen = torch.cat([seen[often], seen[~often].sum()[None]])
    degrees = len(seen) - 1
    chi_square = ((seen - expected) ** 2 / expected.clamp(min=1)).sum().item()
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees), f"{chi_square} of {degrees} degrees of freedom"


def test_weights_of_one_draw_rarely_dropped():
    """Two of a block are dropped together up to 2^-18 more often than strangers: twice as often of p = 2^-9."""
    p = 2**-9
    mask = cutlass_ext.dropout_mask(8, 8, 512, 512, p, torch.tensor([5, 6]))
    dropped = (~mask).unflatten(3, (-1, 16)).unflatten(2, (-1, 2)).sum((3, 5)).double()
    pairs = math.comb(32, 2) * dropped.numel()
    together = (dropped * (dropped - 1) / 2).sum().item()
    want = pairs * (p**2 + 2**-18)
    assert abs(together - want) < 5 * math.sqrt(want)


def test_the_mean_over_seeds(target_fp32):
    """Of the output, over 400 seeds: what it is without dropout."""
    q, k, v = target_fp32.qkv(1, 8, 2, 16, n_kv=40)
    call = lambda i: target_fp32.fmha(q, k, v, dropout_p=0.25, dropout_seed=seed_of(target_fp32, i, 0))[0]  # noqa: E731
    tried(target_fp32, lambda: call(0))
    outs = torch.stack([call(i) for i in range(400)]).double()
    error = outs.mean(0) - attention(q, k, v)[0]
    assert (error.abs() < 6 * outs.std(0) / 20).all()


# ------------------------------------------------------------------------------------------------ the seed
@pytest.mark.parametrize(
    "function", ["fmha", "flash_attn_func", "flash_attn_varlen_func", "scaled_dot_product_attention"]
)
def test_who_draws_the_seed(target, function):
    """PyTorch's generator, anew for each call; without dropout nobody, and `explain` does not."""
    q, k, v = target.qkv(2, 40, 4, 32)
    call = functools.partial(getattr(cutlass_ext, function), q, k, v)
    if function == "flash_attn_varlen_func":
        batch = packed(target, *MIXED)
        call = functools.partial(cutlass_ext.flash_attn_varlen_func, *batch, *batch.packing.values())
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(tried(target, lambda: call(dropout_p=0.5)))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
    assert not torch.equal(outs[2], call(dropout_p=0.5))
    state = torch.cuda.get_rng_state() if target.cuda else torch.get_rng_state()
    call(dropout_p=0.0)
    cutlass_ext.explain(call, dropout_p=0.5)
    assert torch.equal(state, torch.cuda.get_rng_state() if target.cuda else torch.get_rng_state())


def test_a_seed_that_is_given(target):
    q, k, v = target.qkv(2, 40, 4, 32)
    call = lambda *words: target.fmha(q, k, v, dropout_p=0.5, dropout_seed=seed_of(target, *words))  # noqa: E731
    want = tried(target, lambda: call(1, 2))
    assert_same_bits(call(1, 2), want)
    for words in ((2, 2), (1, 3), (1 + 2**32, 2), (1, 2 + 2**32)):
        assert not torch.equal(call(*words)[0], want[0])
        assert torch.equal(call(*words)[1], want[1])  # lse counts every key
    without = target.fmha(q, k, v)
    assert_same_bits(target.fmha(q, k, v, dropout_p=0.0, dropout_seed=seed_of(target)), without)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(target, use_reentrant):
    """Recomputed with the seed of the first time."""
    q, k, v = target.qkv(2, 70, 4, 32)
    bias, (dout, dlse) = bias_of(target, (1, 4, 70, 70)), of_out(target, q, v)
    leaves = [t.requires_grad_() for t in (q, k, v, bias)]
    call = lambda q, k, v, bias: target.fmha(q, k, 2 * v, bias=bias, dropout_p=0.3, deterministic=True)  # noqa: E731
    torch.manual_seed(3)
    results = tried(target, lambda: call(*leaves))
    want = tried(target, lambda: torch.autograd.grad(results, leaves, (dout, dlse)), backward=True)
    torch.manual_seed(3)
    results = checkpoint(call, *leaves, use_reentrant=use_reentrant)
    torch.randn(5)
    torch.autograd.backward(results, (dout, dlse))
    assert_same_bits([t.grad for t in leaves], want)


@COMPILE_TIMEOUT
def test_compile(target):
    """A graph without breaks, whose calls draw seeds of their own, and the gradients of what was drawn."""
    q, k, v = target.qkv(2, 40, 4, 32)
    bias, mask, (dout, dlse) = bias_of(target, (1, 4, 1, 40)), mask_of(target, (2, 1, 40, 40)), of_out(target, q, v)
    leaves = [t.requires_grad_() for t in (q, k, v, bias)]

    def call(q, k, v, bias):
        return target.fmha(q, k, v, bias=bias, mask=mask, dropout_p=0.3, deterministic=True)

    torch.manual_seed(3)
    first = tried(target, lambda: call(*leaves))
    want = tried(target, lambda: torch.autograd.grad(first, leaves, (dout, dlse)), backward=True)
    second = call(*leaves)
    fast, counter = compiled(call)
    fast(*leaves)
    torch.manual_seed(3)
    results = fast(*leaves)
    assert_same_bits(results, first)
    assert_same_bits(torch.autograd.grad(results, leaves, (dout, dlse)), want)
    assert_same_bits(fast(*leaves), second)
    assert counter.frame_count == 1


@COMPILE_TIMEOUT
@pytest.mark.parametrize("bias_grad", [False, True])
def test_opcheck(target, bias_grad):
    q, k, v = target.qkv(2, 17, 4, 32, n_kv=40, heads_kv=2, d_v=16)
    options = {"bias": bias_of(target, (2, 1, 17, 40)), "mask": mask_of(target, (1, 4, 1, 40)), "dropout_p": 0.2,
               "dropout_seed": seed_of(target), "head_start": 3, "backend": target.backend}  # fmt: skip
    out, lse = tried(target, lambda: cutlass_ext.fmha(q, k, v, return_lse=True, **options))
    ops, of_torch = torch.ops.cutlass_ext, "_torch" if target.backend == "torch" else ""
    torch.library.opcheck(getattr(ops, f"fmha{of_torch}").default, (q, k, v), options | {"return_lse": True})
    options |= {"bias_grad": bias_grad}
    tried(target, lambda: cutlass_ext.fmha_backward(out, q, k, v, out, lse, **options), backward=True)
    torch.library.opcheck(getattr(ops, f"fmha_backward{of_torch}").default, (out, q, k, v, out, lse), options)
    options["bias"].requires_grad_(options.pop("bias_grad"))
    leaves = tuple(t.requires_grad_() for t in (q, k, v))
    torch.library.opcheck(getattr(ops, f"fmha_with_grad{of_torch}").default, leaves, options | {"return_lse": True})


@pytest.mark.parametrize("given", [False, True])
def test_cuda_graph(gpu, given):
    """A replay draws anew, or takes what the given seed holds by then; forward and backward agree."""
    q, k, v = (t.requires_grad_() for t in gpu.qkv(2, 100, 4, 64))
    bias, seed = bias_of(gpu, (1, 4, 100, 100)).requires_grad_(), seed_of(gpu)
    mask, (dout, _) = mask_of(gpu, (2, 1, 1, 100)), of_out(gpu, q, v)

    def step(seed=seed if given else None):
        options = {"bias": bias, "mask": mask, "dropout_p": 0.4, "dropout_seed": seed, "deterministic": True}
        out = cutlass_ext.fmha(q, k, v, **options)
        return out, *torch.autograd.grad(out, (q, k, v, bias), dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tried(gpu, step, backward=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    replays = []
    for words in ((1, 2), (3, 4), (1, 2)):
        seed.copy_(seed_of(gpu, *words))
        graph.replay()
        replays.append([t.clone() for t in results])
        if given:
            assert_same_bits(replays[-1], step())
    assert not torch.equal(replays[0][0], replays[1][0])
    assert torch.equal(replays[0][0], replays[2][0]) == given


# ------------------------------------------------------------------------------------------------ gradients
def test_only_the_bias_requires_grad(target):
    """pytorch #148476; and nobody pays for its gradient where it does not."""
    q, k, v = target.qkv(2, 40, 4, 32, heads_kv=2)
    bias, (dout, dlse) = bias_of(target, (1, 4, 40, 40)), of_out(target, q, v)
    want = tried(target, lambda: target.gradients(q, k, v, dout, dlse, bias=bias, deterministic=True), backward=True)
    leaf = bias.clone().requires_grad_()
    results = target.fmha(q, k, v, bias=leaf, deterministic=True)
    assert_same_bits(torch.autograd.grad(results, leaf, (dout, dlse)), want[3:])
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    results = target.fmha(*leaves, bias=bias, deterministic=True)
    assert_same_bits(torch.autograd.grad(results, leaves, (dout, dlse)), want[:3])
    out, lse = target.fmha(q, k, v, bias=bias)
    options = {"bias": bias, "backend": target.backend, "dlse": dlse, "deterministic": True}
    got = cutlass_ext.fmha_backward(dout, q, k, v, out, lse, **options)
    assert_same_bits(got, want)
    assert_same_bits(cutlass_ext.fmha_backward(dout, q, k, v, out, lse, bias_grad=False, **options), want[:3])


def test_dbias_has_the_same_bits_anyway(target):
    q, k, v = target.qkv(3, 200, 4, 64, heads_kv=2)
    bias, (dout, dlse) = bias_of(target, (1, 4, 200, 200)), of_out(target, q, v)
    call = lambda: target.gradients(q, k, v, dout, dlse, bias=bias)  # noqa: E731
    want = tried(target, call, backward=True)
    for _ in range(10 if target.cuda else 2):
        assert_same_bits(call()[1:], want[1:])


def test_an_expanded_bias_has_the_gradient_of_what_was_expanded(target):
    q, k, v = target.qkv(2, 40, 4, 32)
    table, (dout, dlse) = bias_of(target, (4, 40, 40)).requires_grad_(), of_out(target, q, v)
    want = tried(target, lambda: target.gradients(q, k, v, dout, dlse, bias=table.detach()[None]), backward=True)[3]
    results = target.fmha(q, k, v, bias=table.expand(2, 4, 40, 40))
    (got,) = torch.autograd.grad(results, table, (dout, dlse))
    torch.testing.assert_close(got, want[0], atol=1e-5, rtol=1e-4)


GRADCHECKED = {
    "bias": {"bias": (2, 2, 3, 5)},
    "bias, broadcast": {"bias": (1, 2, 1, 5), "causal": True, "start_pos": "end"},
    "mask": {"mask": (2, 1, 3, 5)},
    "dropout": {"dropout_p": 0.4},
    "all": {"bias": (2, 1, 1, 5), "mask": (1, 2, 3, 5), "dropout_p": 0.4, "softcap": 1.5, "sink": True, "causal": True,
            "start_pos": 1},
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", GRADCHECKED)
def test_gradcheck(device, case):
    leaf = lambda *shape: torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)  # noqa: E731
    options, leaves = dict(GRADCHECKED[case]), {"q": leaf(2, 3, 2, 4), "k": leaf(2, 5, 1, 4), "v": leaf(2, 5, 1, 8)}
    if "bias" in options:
        leaves["bias"] = leaf(*options.pop("bias"))
    if options.pop("sink", False):
        leaves["sink"] = leaf(2)
    if "mask" in options:
        options["mask"] = torch.rand(options["mask"], device=device) < 0.7
    if "dropout_p" in options:
        options["dropout_seed"] = torch.tensor([8, 9], device=device)
    call = lambda *t: cutlass_ext.fmha(**dict(zip(leaves, t, strict=True)), return_lse=True, backend="torch", **options)  # noqa: E731
    finite = call(*leaves.values())[1].isfinite()
    torch.autograd.gradcheck(lambda *t: (call(*t)[0], call(*t)[1][finite]), tuple(leaves.values()))


def test_func(target):
    """torch.func gives what autograd gives."""
    q, k, v = target.qkv(2, 17, 4, 32, n_kv=40, heads_kv=2)
    bias, (dout, dlse) = bias_of(target, (1, 4, 1, 40)), of_out(target, q, v)
    options = {"mask": mask_of(target, (2, 1, 17, 40)), "dropout_p": 0.3, "dropout_seed": seed_of(target),
               "deterministic": True}  # fmt: skip
    want = tried(target, lambda: target.gradients(q, k, v, dout, dlse, bias=bias, **options), backward=True)
    _, vjp = torch.func.vjp(lambda q, k, v, bias: target.fmha(q, k, v, bias=bias, **options), q, k, v, bias)
    assert_same_bits(vjp((dout, dlse)), want)


def test_extra_memory(target_fp32):
    """O(N): a bias and a mask that rows share do not become [B, H, N, N], nor does what dropout draws."""
    for n in (2048, 4096):
        q, k, v = target_fp32.qkv(1, n, 1, 64)
        bias = bias_of(target_fp32, (1, 1, 1, n))
        options = {"bias": bias, "mask": mask_of(target_fp32, (1, 1, 1, n)), "dropout_p": 0.1,
                   "dropout_seed": seed_of(target_fp32), "backend": target_fp32.backend}  # fmt: skip
        out, lse = tried(target_fp32, lambda: target_fp32.fmha(q, k, v, **options))  # noqa: B023
        call = lambda: cutlass_ext.fmha_backward(out, q, k, v, out, lse, **options)  # noqa: B023, E731
        tried(target_fp32, call, backward=True)
        extra, results = peak_extra_bytes(call, target_fp32.device), 3 * q.nbytes
        assert extra <= 6 * results + (48 << 20), f"{extra} bytes at N {n}, results of {results}"


# ------------------------------------------------------------------------------------------------ PyTorch's name
MASKS = [
    (70, 90),
    (1, 90),
    (70, 1),
    (90,),
    (1, 1),
    (),
    (4, 70, 90),
    (4, 1, 90),
    (2, 4, 70, 90),
    (2, 1, 1, 90),
    (1, 1, 70, 90),
]


def by_pytorch(q, k, v, attn_mask, **options):
    """PyTorch's answer in float32; its own dtype has roundings of its own."""
    x = attn_mask.float() if attn_mask.is_floating_point() else attn_mask
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), x, **options)


@pytest.mark.parametrize("kind", ["bool", "float32", "own"])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_sdpa(target, shape, kind):
    q, k, v = (target.randn(2, 4, n, 32) for n in (70, 90, 90))
    dtype = target.dtype if kind == "own" else torch.float32
    attn_mask = mask_of(target, shape, 0.8) if kind == "bool" else bias_of(target, shape, dtype)
    out = tried(target, lambda: cutlass_ext.scaled_dot_product_attention(q, k, v, attn_mask))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = by_pytorch(q, k, v, attn_mask)
    torch.testing.assert_close(out, want.to(out.dtype), **peer_tolerance(target.dtype))


def test_sdpa_of_several_leading_dimensions(target):
    q, k, v = (target.randn(2, 3, 4, n, 32) for n in (40, 50, 50))
    for shape in ((2, 3, 4, 40, 50), (3, 1, 1, 50), (2, 1, 4, 40, 50), (1, 1, 1, 40, 50), (40, 50)):
        x = bias_of(target, shape, target.dtype)
        out = tried(target, lambda x=x: cutlass_ext.scaled_dot_product_attention(q, k, v, attn_mask=x))
        torch.testing.assert_close(out, by_pytorch(q, k, v, x).to(out.dtype), **peer_tolerance(target.dtype))
    q, k, v = (t[0, 0] for t in (q, k, v))
    x = mask_of(target, (4, 40, 50), 0.8)
    out = tried(target, lambda: cutlass_ext.scaled_dot_product_attention(q, k, v, x))
    torch.testing.assert_close(out, by_pytorch(q, k, v, x).to(out.dtype), **peer_tolerance(target.dtype))


def test_sdpa_with_grouped_heads_and_gradients(target):
    q, k, v = (target.randn(2, heads, n, 32) for heads, n in ((8, 70), (2, 90), (2, 90)))
    dout = target.randn(2, 8, 70, 32)
    leaves = [t.requires_grad_() for t in (q, k, v, bias_of(target, (8, 70, 1), target.dtype))]
    out = tried(target, lambda: cutlass_ext.scaled_dot_product_attention(*leaves, enable_gqa=True))
    got = tried(target, lambda: torch.autograd.grad(out, leaves, dout), backward=True)
    want = torch.autograd.grad(by_pytorch(*leaves, enable_gqa=True), leaves, dout.float())
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        # the bias is the same for all keys of a row: its gradient is 0, as a sum of 90 roundings
        torch.testing.assert_close(a, b.to(a.dtype), atol=32 * torch.finfo(target.dtype).eps, rtol=0.05)


def test_sdpa_drops(target):
    q, k, v = (target.randn(2, 4, 40, 32) for _ in "qkv")
    torch.manual_seed(1)
    got = tried(target, lambda: cutlass_ext.scaled_dot_product_attention(q, k, v, None, 0.5, True))
    torch.manual_seed(1)
    want, _ = target.fmha(*(t.transpose(1, 2) for t in (q, k, v)), causal=True, dropout_p=0.5)
    torch.testing.assert_close(got.transpose(1, 2), want, **peer_tolerance(target.dtype))


# ------------------------------------------------------------------------------------------------ FlexAttention's masks
BLOCKS = {
    "causal": lambda b, h, i, j: i >= j,
    "sliding": lambda b, h, i, j: (i >= j) & (i - j < 100),
    "prefix": lambda b, h, i, j: (j < 77) | (i >= j),
    "by head": lambda b, h, i, j: i - j < 40 * (h + 1),
    "documents": lambda b, h, i, j: (i // 97 == j // 97) & (b < 1),
}


@pytest.mark.parametrize("lengths", [(300, 300), (130, 257)], ids=str)
@pytest.mark.parametrize("kind", BLOCKS)
def test_block_mask(target, kind, lengths):
    n_q, n_kv = lengths
    B, H = {"by head": (None, 4), "documents": (2, None)}.get(kind, (None, None))
    block_mask = create_block_mask(BLOCKS[kind], B, H, n_q, n_kv, device=target.device)
    q, k, v = target.qkv(2, n_q, 4, 32, n_kv=n_kv, heads_kv=2)
    b, h, i, j = (torch.arange(n, device=target.device) for n in (B or 1, H or 1, n_q, n_kv))
    mask = BLOCKS[kind](b[:, None, None, None], h[:, None, None], i[:, None], j).expand(len(b), len(h), n_q, n_kv)
    options = {"deterministic": True}
    want = tried(target, lambda: target.fmha(q, k, v, mask=mask))
    assert_same_bits(target.fmha(q, k, v, block_mask=block_mask), want)
    dout, dlse = of_out(target, q, v)
    want = tried(target, lambda: target.gradients(q, k, v, dout, dlse, mask=mask, **options), backward=True)
    assert_same_bits(target.gradients(q, k, v, dout, dlse, block_mask=block_mask, **options), want)


@COMPILE_TIMEOUT
def test_block_mask_under_compile(target_fp32):
    q, k, v = target_fp32.qkv(1, 200, 2, 32)
    make = lambda: create_block_mask(BLOCKS["sliding"], None, None, 200, 200, device=target_fp32.device)  # noqa: E731
    call = lambda q, block_mask: target_fp32.fmha(q, k, v, block_mask=block_mask)  # noqa: E731
    want, block_mask = tried(target_fp32, lambda: call(q, make())), make()
    fast, _ = compiled(call)
    for _ in range(2):  # when the mask is made, and when it is kept
        assert_same_bits(fast(q, block_mask), want)
    assert_same_bits(call(q, block_mask), want)


def test_blocks_alone_say_what_is_visible(target):
    """A BlockMask without a mask_mod, of blocks in any order."""
    counts, indices = (
        torch.tensor([[[1, 2]]], dtype=torch.int32),
        torch.tensor([[[[2, 0, 1], [2, 0, 1]]]], dtype=torch.int32),
    )
    of_device = [t.to(target.device) for t in (counts, indices)]
    block_mask = BlockMask.from_kv_blocks(*of_device, BLOCK_SIZE=(64, 32), seq_lengths=(100, 90))
    q, k, v = target.qkv(2, 100, 4, 32, n_kv=90)
    mask = torch.zeros(1, 1, 100, 90, dtype=torch.bool, device=target.device)
    mask[:, :, :64, 64:] = mask[:, :, 64:, 64:] = mask[:, :, 64:, :32] = True
    got = tried(target, lambda: target.fmha(q, k, v, block_mask=block_mask))
    expect(q, k, v, mask=mask).check(*got, small=True)


def test_mask_mod_is_evaluated_once(target):
    calls = []

    def mask_mod(b, h, i, j):
        calls.append(1)
        return i >= j

    block_mask = create_block_mask(mask_mod, None, None, 200, 200, device=target.device)
    q, k, v = (t.requires_grad_() for t in target.qkv(1, 200, 2, 32))
    calls.clear()
    with torch.inference_mode():
        tried(target, lambda: target.fmha(q, k, v, block_mask=block_mask))
    assert len(calls) == 1
    out, _ = target.fmha(q, k, v, block_mask=block_mask)  # what was made in inference mode may be kept for gradients
    assert len(calls) == 1 and out.requires_grad


# ------------------------------------------------------------------------------------------------ models
def test_t5(target_fp32):
    """Relative position buckets: a table [buckets, heads] becomes a bias that the batch shares; no softmax_scale."""
    n, heads = 60, 4
    q, k, v = (t.requires_grad_() for t in target_fp32.qkv(3, n, heads, 16))
    i = torch.arange(n, device=target_fp32.device)
    distance = (i[:, None] - i).clamp(min=0)
    far = 8 + (torch.log(distance.clamp(min=1) / 8) / math.log(128 / 8) * 8).long()
    bucket = torch.where(distance < 8, distance, far.clamp(max=15))
    table = target_fp32.vector(16, heads).requires_grad_()
    padding = i < target_fp32.int32([60, 41, 7])[:, None]
    dout = target_fp32.randn(3, n, heads, 16)
    leaves = q, k, v, table

    bias = F.embedding(bucket, table).permute(2, 0, 1)[None]
    out = tried(target_fp32, lambda: target_fp32.fmha(q, k, v, bias=bias, mask=padding[:, None, None], causal=True,
                                                      softmax_scale=1.0)[0])  # fmt: skip
    scores = torch.einsum("bihd,bjhd->bhij", q, k) + bias
    scores = scores.masked_fill(~padding[:, None, None] | (i > i[:, None]), -INF)
    want = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    got = tried(target_fp32, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), backward=True)
    for a, b in zip(got, torch.autograd.grad(want, leaves, dout), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_swin(target_fp32):
    """Windows of 7 x 7: a relative bias of each head, and a mask of each window that shifting made; dropout of 0."""
    windows, images, heads, n = 4, 2, 3, 49
    q, k, v = (t.requires_grad_() for t in target_fp32.qkv(images * windows, n, heads, 16))
    table = target_fp32.vector(13 * 13, heads).requires_grad_()
    x = torch.arange(n, device=target_fp32.device)
    dy, dx = x[:, None] // 7 - x // 7 + 6, x[:, None] % 7 - x % 7 + 6
    bias = table[dy * 13 + dx].permute(2, 0, 1)[None]
    region = torch.randint(0, 3, (windows, n), device=target_fp32.device)
    shifted = (region[:, :, None] == region[:, None])[:, None]  # [windows, 1, n, n]
    mask = shifted.repeat(images, 1, 1, 1)
    leaves, dout = (q, k, v, table), target_fp32.randn(images * windows, n, heads, 16)

    out = tried(target_fp32, lambda: target_fp32.fmha(q, k, v, bias=bias, mask=mask)[0])
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4 + bias
    scores = scores.unflatten(0, (images, windows)) + torch.zeros_like(shifted, dtype=q.dtype).masked_fill(
        ~shifted, -100.0
    )
    want = torch.einsum("bhij,bjhd->bihd", scores.flatten(0, 1).softmax(-1), v)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    got = tried(target_fp32, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), backward=True)
    for a, b in zip(got, torch.autograd.grad(want, leaves, dout), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_alphafold(target_fp32):
    """Rows of an alignment attend along residues, with a bias of the pair representation that all rows share, and a
    mask of residues for each row."""
    rows, n, heads, channels = 5, 40, 4, 12
    m, pair = target_fp32.randn(rows, n, heads * 16), target_fp32.randn(n, n, channels).requires_grad_()
    weight = (target_fp32.vector(channels, heads) / 3).requires_grad_()
    there = mask_of(target_fp32, (rows, n), 0.8)
    there[:, 0] = True
    gate = torch.sigmoid(target_fp32.randn(rows, n, heads, 16))
    q, k, v = (m @ target_fp32.randn(heads * 16, heads * 16) / 8 for _ in "qkv")
    q, k, v = (t.unflatten(2, (heads, 16)).requires_grad_() for t in (q, k, v))
    leaves, dout = (q, k, v, pair, weight), target_fp32.randn(rows, n, heads, 16)

    bias = (F.layer_norm(pair, (channels,)) @ weight).permute(2, 0, 1)[None]  # the last dimension is not contiguous
    out = gate * tried(target_fp32, lambda: target_fp32.fmha(q, k, v, bias=bias, mask=there[:, None, None])[0])
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4 + bias + 1e9 * (there[:, None, None].to(q.dtype) - 1)
    want = gate * torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    got = tried(target_fp32, lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), backward=True)
    for a, b in zip(got, torch.autograd.grad(want, leaves, dout), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------ what is wrong
B, N, HEADS, HEADS_KV, D = 2, 6, 4, 2, 16
BOOL, INT64 = torch.bool, torch.int64
WRONG = [
    *[("bias", V, {"bias": torch.ones(s)}) for s in ((), (N, N), (B, HEADS, N), (3, 1, 1, N), (1, HEADS_KV, 1, N))],
    *[("bias", V, {"bias": torch.ones(s)}) for s in ((1, 1, 2, N), (B, HEADS, N, N + 1), (B, HEADS, N, 1))],
    *[("mask", V, {"mask": torch.ones(s, dtype=BOOL)}) for s in ((N, N), (B, N), (B, HEADS, N, 1), (1, 3, 1, N))],
    *[("bias", T, {"bias": torch.ones(1, 1, 1, N, dtype=x)}) for x in (BOOL, torch.int32, torch.float64)],
    *[("mask", T, {"mask": torch.ones(1, 1, 1, N, dtype=x)}) for x in (torch.float32, torch.uint8, torch.int32)],
    *[(name, T, {name: x}) for name in ("bias", "mask") for x in (3.0, [1.0])],
    *[("dropout_p", V, {"dropout_p": x}) for x in (-0.1, 1.0, 1.5, NAN, 1 - 2**-34)],
    *[("dropout_p", T, {"dropout_p": x}) for x in (None, "half")],
    *[("dropout_seed", V, {"dropout_seed": torch.ones(s, dtype=INT64)}) for s in ((), (1,), (3,), (1, 2))],
    ("dropout_seed", V, {"dropout_p": 0.5, "dropout_seed": torch.ones(4, dtype=INT64)[::2]}),
    ("dropout_seed", T, {"dropout_p": 0.5, "dropout_seed": torch.ones(2, dtype=torch.int32)}),
    ("dropout_seed", T, {"dropout_seed": 3}),
    *[(name, V, {name: x}) for name in ("head_start", "sequence_start") for x in (-1, 2**31)],
    *[(name, T, {name: None}) for name in ("head_start", "sequence_start", "key_start")],
    *[(name, T, {name: x}) for name in ("head_start", "sequence_start") for x in (True, torch.ones(()), torch.ones(2))],
    *[("key_start", V, {"key_start": x}) for x in (2**29, -(2**29), 2**70)],
    *[("key_start", T, {"key_start": x}) for x in ("end", 1.0, True, torch.ones(B), torch.ones(B, dtype=INT64))],
    *[("key_start", V, {"key_start": torch.ones(s, dtype=torch.int32)}) for s in ((), (1,), (B + 1,), (B, 1))],
    ("key_start", V, {"key_start": torch.ones(3, dtype=torch.int32), "start_pos": torch.ones(B, dtype=torch.int32)}),
    ("start_pos", V, {"key_start": torch.ones(B, dtype=torch.int32), "start_pos": torch.ones(3, dtype=torch.int32)}),
    ("start_pos", V, {"key_start": -(2**28), "start_pos": 2**28}),
    *[("out_dtype", V, {"out_dtype": x}) for x in (torch.float16, torch.bfloat16, torch.float64, torch.int32)],
    *[("out_dtype", T, {"out_dtype": x}) for x in ("float32", 6, True)],
]  # fmt: skip


def valid(device):
    shapes = {"q": (B, N, HEADS, D), "k": (B, N, HEADS_KV, D), "v": (B, N, HEADS_KV, D)}
    return {name: torch.randn(shape, device=device) for name, shape in shapes.items()}


def on(device, arguments):
    def strided(x):  # `to` makes contiguous
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device).copy_(x)

    return {n: strided(x) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.mark.parametrize("number", range(len(WRONG)), ids=lambda i: f"{i}-{WRONG[i][0]}")
def test_wrong_argument(device, number):
    name, error, spoilt = WRONG[number]
    assert_refused(cutlass_ext.fmha, name, error, valid(device) | on(device, spoilt))
    results = {"dout": torch.randn(B, N, HEADS, D), "out": torch.randn(B, N, HEADS, D), "lse": torch.ones(B, HEADS, N)}
    assert_refused(cutlass_ext.fmha_backward, name, error, valid(device) | on(device, results | spoilt))


def test_gradients_want_a_seed(device):
    results = {"dout": torch.randn(B, N, HEADS, D), "out": torch.randn(B, N, HEADS, D), "lse": torch.ones(B, HEADS, N)}
    arguments = valid(device) | on(device, results)
    assert_refused(cutlass_ext.fmha_backward, "dropout_seed", V, arguments | {"dropout_p": 0.5})
    assert_refused(cutlass_ext.fmha_backward, "bias_grad", T, arguments | {"bias_grad": None})


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 12), (3, 1, 1, 12), (1, HEADS, 5, 5)], ids=str)
def test_packed_sequences_have_neither(device, name, shape):
    packing = {"cu_seqlens_q": torch.tensor([0, 5, 5, 12]), "cu_seqlens_k": torch.tensor([0, 5, 5, 12])}
    arguments = {n: t.reshape(-1, *t.shape[2:]) for n, t in valid(device).items()}
    arguments |= {n: t.to(device, torch.int32) for n, t in packing.items()} | {"max_seqlen_q": 7, "max_seqlen_k": 7}
    of_scores = {"bias": torch.float32, "mask": BOOL}
    x = torch.ones(shape, device=device, dtype=of_scores[name])
    assert_refused(cutlass_ext.fmha, name, NI, arguments | {name: x})


def test_a_block_mask_that_is_changed(target_fp32):
    """What is kept with it is of the `mask_mod` that it had."""
    q, k, v = target_fp32.qkv(1, 200, 2, 32)
    block_mask = create_block_mask(BLOCKS["sliding"], None, None, 200, 200, device=target_fp32.device)
    tried(target_fp32, lambda: target_fp32.fmha(q, k, v, block_mask=block_mask))
    block_mask.mask_mod = lambda b, h, i, j: (i >= j) & (i - j < 3)
    fresh = BlockMask.from_kv_blocks(
        block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices,
        block_mask.BLOCK_SIZE, block_mask.mask_mod, (200, 200),
    )  # fmt: skip
    assert_same_bits(target_fp32.fmha(q, k, v, block_mask=block_mask), target_fp32.fmha(q, k, v, block_mask=fresh))


@pytest.mark.parametrize("strict", [False, True])
def test_a_block_mask_under_export(strict):
    """The mask that it is traced with is no tensor to keep."""

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return cutlass_ext.fmha(q, k, v, block_mask=block_mask)

    q, k, v = (torch.randn(1, 100, 2, 32) for _ in "qkv")
    block_mask = create_block_mask(BLOCKS["sliding"], None, None, 100, 100, device="cpu")
    exported = torch.export.export(Model(), (q, k, v), strict=strict).module()
    got = cutlass_ext.fmha(q, k, v, block_mask=block_mask)
    assert type(got) is torch.Tensor
    torch.testing.assert_close(exported(q, k, v), got)


def test_wrong_block_mask(device):
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device=device)
    assert_refused(cutlass_ext.fmha, "block_mask", T, valid(device) | {"block_mask": torch.ones(N, N)})
    assert_refused(cutlass_ext.fmha, "block_mask", V, valid(device) | {"block_mask": block_mask})
    every = torch.ones(1, 1, 1, N, dtype=BOOL, device=device)
    assert_refused(cutlass_ext.fmha, "block_mask", V, valid(device) | {"block_mask": block_mask, "mask": every})


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile has no compiler here")
def test_compiled_dropout_mask():
    """By C++, whose signed numbers do not wrap around."""
    draw = lambda seed: cutlass_ext.dropout_mask(2, 2, 16, 40, 0.3, seed, key_start=5)  # noqa: E731
    fast = torch.compile(draw, fullgraph=True)
    for seed in ([3, 4], [-(2**63), 2**63 - 1], [-1, -2]):
        seed = torch.tensor(seed)
        assert torch.equal(fast(seed), draw(seed))


@pytest.mark.parametrize(
    "name,error,arguments",
    [
        ("dropout_seed", T, {"dropout_seed": 3}),
        ("dropout_seed", T, {"dropout_seed": torch.ones(2)}),
        ("dropout_seed", V, {"dropout_seed": torch.ones(3, dtype=INT64)}),
        ("dropout_p", V, {"dropout_p": 1.0}),
        ("dropout_p", V, {"dropout_p": -0.5}),
        ("start_pos", V, {"start_pos": torch.ones(3, dtype=torch.int32)}),
        ("start_pos", V, {"start_pos": "begin"}),
        ("key_start", V, {"key_start": torch.ones(3, dtype=torch.int32)}),
        ("dropout_p", T, {"dropout_p": None}),
        ("dropout_p", T, {"dropout_p": torch.tensor(0.5)}),
        *[(name, T, {name: x}) for name in ("start_pos", "key_start") for x in (None, 1.5, torch.ones(2))],
        *[(name, T, {name: x}) for name in ("B", "H", "N_q", "N_kv", "head_start") for x in (None, 1.5, True)],
        *[(name, V, {name: -1}) for name in ("B", "N_kv", "sequence_start")],
    ],
    ids=str,
)
def test_wrong_argument_of_dropout_mask(name, error, arguments):
    given = {"B": 2, "H": 1, "N_q": 3, "N_kv": 4, "dropout_p": 0.5, "dropout_seed": torch.ones(2, dtype=INT64)}
    assert_refused(cutlass_ext.dropout_mask, name, error, given | arguments)


@pytest.mark.parametrize("name", ["bias", "mask", "dropout_p"])
def test_explain(target, name):
    q, k, v = target.qkv(2, 70, 4, 64)
    options = {"bias": bias_of(target, (1, 1, 70, 70))} if name == "bias" else {"mask": mask_of(target, (2, 1, 1, 70))}
    options = {"dropout_p": 0.1} if name == "dropout_p" else options
    explanation = tried(target, lambda: cutlass_ext.explain(q, k, v, backend=target.backend, **options))
    assert explanation.backend in (("simt", "sm80", "sm90") if target.cuda else ("torch",))
