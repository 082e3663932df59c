"""A small sweep for compute-sanitizer: every kernel that the GPU chooses, every feature, at sizes around tile edges.

verify_gpu.py runs it under each tool, whose name is the argument, in shards: `--shard I/N` makes every N-th call, from
the I-th on. The results are compared with the torch path on the CPU, so that a kernel which compute-sanitizer has kept
from running does not count as clean.
"""

import argparse
import itertools

import torch

import cutlass_ext

FEATURES = (
    {},
    {"causal": True},
    {"causal": True, "start_pos": "end", "num_splits": 3},
    {"window": (17, 5), "softcap": 20.0},
    {"causal": True, "start_pos": torch.tensor([3, -2], dtype=torch.int32)},
    {"seqused_k": torch.tensor([7, 0], dtype=torch.int32), "leftpad_k": torch.tensor([2, 0], dtype=torch.int32)},
    {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]), "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
)
PLAIN, CAUSAL = FEATURES[:2]
# Of a family's tiles the largest that the rows fill, without a heuristic; on Hopper those of the persistent kernels.
LARGEST = {"causal": True, "num_splits": 1}
SM80 = {"causal": True, "backend": "sm80"}  # which Hopper chooses for few calls; of float32 in parts
HIGH = {"causal": True, "precision": "high"}  # float32 on Hopper's tensor cores
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

HALVES = torch.float16, torch.bfloat16
# of one rounding of P and of the output each, and of values to about 4
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def tolerance(dtype: torch.dtype, factor: float = 1.0) -> dict[str, float]:
    return {name: factor * x for name, x in TOLERANCES[dtype].items()}


def agree(case: tuple, function, tensors: tuple, options: dict, tolerance_of) -> None:
    """That `function(*tensors, **options)` gives the same on the GPU and the CPU; `tolerance_of` a result there."""
    of_a_gpu = {"backend", "precision"}
    expected = function(*tensors, **{name: x for name, x in options.items() if name not in of_a_gpu})
    on_gpu = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    got = function(*(t.cuda() for t in tensors), **on_gpu)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, **tolerance_of(b), msg=lambda text: f"{case}: {text}")


def packing(**lengths: list[int]) -> dict:
    """The arguments of packed sequences that have so many rows of q, and of k."""
    options = {f"max_seqlen_{of}": max(rows) for of, rows in lengths.items()}
    for of, rows in lengths.items():
        options[f"cu_seqlens_{of}"] = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
    return options


def single_and_half(cases):
    """`cases`, which lack the dtype, in float32 and in one of the others, which are the same code, by turns."""
    for i, case in enumerate(cases):
        yield torch.float32, *case
        yield HALVES[i % 2], *case


# ------------------------------------------------------------------------------------------------ padded sequences
def padded_cases():
    """(dtype, N_q, N_kv, d, d_v, features, elements by which rows are longer than the head dim or 0, query heads or
    4)."""
    for (n_q, n_kv, d), features in itertools.product(((1, 130, 32), (33, 31, 64), (33, 130, 64)), FEATURES):
        yield torch.float32, n_q, n_kv, d, 64, features
    for d, (n_q, options) in itertools.product(
        (32, 64, 96, 128, 192, 224, 256), ((65, LARGEST), (33, LARGEST), (65, CAUSAL))
    ):
        yield torch.float32, n_q, 129, d, d, options
    for d, d_v in ((4, 36), (100, 100), (192, 128)):
        yield torch.float32, 65, 129, d, d_v, CAUSAL
    for d, d_v in ((64, 64), (128, 128), (192, 128), (40, 8)) if HOPPER else ():
        yield torch.float32, 65, 129, d, d_v, HIGH
        yield torch.float32, 130, 200, d, d_v, HIGH | FEATURES[6]
    for features in (*FEATURES[3:6], {"sink": FEATURES[6]["sink"]}) if HOPPER else ():
        yield torch.float32, 130, 200, 64, 64, HIGH | features
    for d, features in itertools.product((64, 128, 256), ({}, *FEATURES[3:7])):
        yield torch.float32, 130, 200, d, d, SM80 | features
    for i, features in enumerate((*FEATURES, *({"out_dtype": torch.float32, "num_splits": n} for n in (1, 3)))):
        yield HALVES[i % 2], 130, 200, 64, 64, {"num_splits": 1} | features
    for dtype in HALVES:
        for features in (*FEATURES, {"out_dtype": torch.float32}):
            yield dtype, 1, 130, 64, 64, features
        for d, d_v in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)):
            yield dtype, 65, 129, d, d_v, LARGEST
            yield dtype, 65, 129, d, d_v, {"num_splits": 3, "softcap": 20.0}
        for d, (n_q, options) in itertools.product((64, 128, 192, 256), ((65, LARGEST), (33, LARGEST), (65, {}))):
            yield dtype, n_q, 129, d, d, SM80 | options
        for d in (72, 80, 96, 104, 112):  # on Hopper tiles of 192 rows, and of 128
            yield dtype, 130, 200, d, d, CAUSAL | {"num_splits": 1}
            yield dtype, 33, 130, d, d, CAUSAL | {"num_splits": 2}
        for d, d_v in ((8, 40), (104, 104)):
            yield dtype, 130, 33, d, d_v, CAUSAL
        # Tiles of 192 rows, one for each multiprocessor, where those of 128 would be twice as many.
        yield dtype, 190, 400, 128, 128, PLAIN, 0, torch.cuda.get_device_properties(0).multi_processor_count // 2
        for padding, d in itertools.product((1, 4), (64, 128)):  # rows that begin on 2 bytes, and on 8
            yield dtype, 33, 130, d, d, CAUSAL, padding
        for d, (n_q, n_kv, heads) in itertools.product((64, 128), ((100, 640, 4), (40, 250, 80), (20, 60, 4))):
            yield dtype, n_q, n_kv, d, d, CAUSAL | {"start_pos": "end"}, 0, heads  # Hopper's short kernels, both
        for d, (n_q, n_kv) in itertools.product((64, 128), ((130, 65), (520, 200))):
            pairs, keys = torch.rand(2, 1, n_q, n_kv) < 0.6, torch.rand(2, 1, 1, n_kv) < 0.6
            yield dtype, n_q, n_kv, d, d, CAUSAL | {"mask": keys}  # Hopper's short kernels
            blocks = torch.rand(2, 4, -(-n_q // 64), -(-n_kv // 64)).repeat_interleave(64, 2).repeat_interleave(64, 3)
            yield dtype, n_q, n_kv, d, d, {"mask": blocks[..., :n_q, :n_kv] < 0.5, "window": (50, 9), "start_pos": 90}
            for mask in (pairs, keys):  # its persistent ones, which alone take a fixed number of splits
                yield dtype, n_q, n_kv, d, d, {"mask": mask, "num_splits": 1}
        # The same with dropout or a bias, whose rows are vectors, or are copied to such.
        drop = {"dropout_p": 0.3, "dropout_seed": torch.tensor([3, -5]), "key_start": 5}
        for d, (n_q, n_kv) in itertools.product((64, 128), ((130, 72), (75, 197))):
            bias, keys = {"bias": torch.randn(1, 4, n_q, n_kv).to(dtype)}, {"mask": torch.rand(2, 1, 1, n_kv) < 0.6}
            for beside in (drop, drop | keys, bias, bias | keys, bias | drop, bias | keys | drop):
                yield dtype, n_q, n_kv, d, d, CAUSAL | {"start_pos": "end"} | beside
                yield dtype, n_q, n_kv, d, d, beside | {"num_splits": 1}
        for features in (CAUSAL, {"window": (17, 5)}):
            used, pads = torch.tensor([130, 65], dtype=torch.int32), torch.tensor([3, 64], dtype=torch.int32)
            yield dtype, 70, 140, 128, 128, features | {"seqused_k": used, "leftpad_k": pads}
    for dtype, (n_q, n_kv) in itertools.product(TOLERANCES, ((0, 5), (5, 0))):
        yield dtype, n_q, n_kv, 64, 64, PLAIN


def compare_padded(dtype, n_q, n_kv, d, d_v, features, padding=0, heads=4) -> None:
    case = dtype, n_q, n_kv, d, d_v, features, padding, heads
    shapes = (2, n_q, heads, d), (2, n_kv, 2, d), (2, n_kv, 2, d_v)
    longer = tuple(torch.randn(*rows, n + padding).to(dtype) for *rows, n in shapes)

    def call(q, k, v, **options):
        return cutlass_ext.fmha(q[..., :d], k[..., :d], v[..., :d_v], return_lse=True, **options)

    agree(case, call, longer, features, lambda t: tolerance(dtype if t.dim() == 4 else t.dtype))


# ------------------------------------------------------------------------------------------------ packed sequences
LENGTHS = ([70, 0, 1, 129, 33], [70, 33, 130, 0, 64]), ([5], [200]), ([0, 0], [3, 0])
# Several work items for each multiprocessor, of 0 to 3 key tiles: the buffers of Hopper's persistent CTAs come round.
MANY_LENGTHS = [1 + i % 9 for i in range(150)], [i * 7 % 301 for i in range(150)]
PACKED_FEATURES = (
    {},
    {"causal": True, "start_pos": "end"},
    {"causal": True, "start_pos": "end", "num_splits": 3},
    {"window": (17, 5), "softcap": 20.0, "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
)


def packed_cases(many):
    """(dtype, lengths of the queries, of the keys, d, d_v, features), with calls of `many` work items or without."""
    for dtype, features, lengths in single_and_half(itertools.product(PACKED_FEATURES, LENGTHS)):
        yield dtype, *lengths, 64, 64, features
    for dtype in TOLERANCES:
        for d, d_v in ((128, 128), (192, 128), (256, 256), (40, 8)):
            yield dtype, *LENGTHS[0], d, d_v, PACKED_FEATURES[1]
        used = torch.tensor([70, 5, 0, 0, 63], dtype=torch.int32)
        yield dtype, *LENGTHS[0], 64, 64, {"seqused_k": used, "leftpad_k": used // 4, "causal": True}
    for lengths in LENGTHS if HOPPER else ():
        yield torch.float32, *lengths, 64, 64, HIGH
    for dtype, d in itertools.product(HALVES, (64, 128, 256) if many else ()):
        yield dtype, *MANY_LENGTHS, d, d, PACKED_FEATURES[1] | {"num_splits": 1}  # fixed: not for the short kernels


def compare_packed(dtype, lengths_q, lengths_k, d, d_v, features) -> None:
    n_q, n_k = sum(lengths_q), sum(lengths_k)
    tensors = tuple(torch.randn(*shape).to(dtype) for shape in ((n_q, 4, d), (n_k, 2, d), (n_k, 2, d_v)))
    options = features | packing(q=lengths_q, k=lengths_k) | {"return_lse": True}
    case = dtype, lengths_q, lengths_k, d, d_v, features
    agree(case, cutlass_ext.fmha, tensors, options, lambda t: tolerance(t.dtype))


# ------------------------------------------------------------------------------------------------ pages
MIX = [70, 0, 1, 129, 5, 1], [70, 33, 140, 200, 0, 700]


def paged_cases(many):
    """(dtype, lengths of the queries, of the keys, page size, d, d_v, features, padded)."""
    for dtype, features, page in single_and_half(itertools.product(PACKED_FEATURES, (1, 16, 64, 80, 256))):
        yield dtype, *MIX, page, 64, 64, features, False
    for dtype, n_q, page in single_and_half(itertools.product((1, 8, 17, 130), (16, 48))):
        yield dtype, [n_q] * 3, [200, 0, n_q], page, 128, 128, PACKED_FEATURES[1], True
    pads = torch.tensor([7, 33, 64, 1, 0, 300], dtype=torch.int32)
    for dtype in TOLERANCES:
        for d, d_v in ((128, 128), (192, 128), (256, 256), (40, 8)):
            yield dtype, *MIX, 16, d, d_v, PACKED_FEATURES[1], False
        for d in (64, 128):
            yield dtype, [1, 0, 1], [140, 33, 200], 16, d, d, PACKED_FEATURES[1], False
        yield dtype, *MIX, 16, 64, 64, {"leftpad_k": pads, "causal": True}, False
    for d, d_v in ((64, 64), (128, 128), (192, 128)) if HOPPER else ():
        yield torch.float32, *MIX, 16, d, d_v, HIGH | {"start_pos": "end"}, False
        yield torch.float32, [130] * 3, [200, 0, 130], 48, d, d_v, HIGH, True
        yield torch.float32, *MIX, 16, d, d_v, HIGH | {"leftpad_k": pads}, False
    for dtype, d in itertools.product(HALVES, (64, 128, 256) if many else ()):
        yield dtype, *MANY_LENGTHS, 16, d, d, PACKED_FEATURES[1], False


def compare_paged(dtype, lengths_q, lengths_k, page, d, d_v, features, padded) -> None:
    """With NaN in what nobody has, -1 in what nobody follows."""
    counts = [-(-n // page) for n in lengths_k]
    order = torch.randperm(sum(counts) + 2).tolist()
    table = torch.full((len(counts), max(counts) + 1), -1, dtype=torch.int32)
    pages = [torch.full((len(order), page, 2, n), float("nan")) for n in (d, d_v)]
    for b, n in enumerate(lengths_k):
        table[b, : counts[b]] = torch.tensor([order.pop() for _ in range(counts[b])], dtype=torch.int32)
        j = torch.arange(n)
        for held in pages:
            held[table[b, j // page].long(), j % page] = torch.randn(n, *held.shape[2:])
    shape = (len(lengths_q), lengths_q[0], 4, d) if padded else (sum(lengths_q), 4, d)
    tensors = tuple(x.to(dtype) for x in (torch.randn(shape), *pages))
    used = torch.tensor(lengths_k, dtype=torch.int32)
    options = features | {"block_table": table, "seqused_k": used, "return_lse": True}
    options |= {} if padded else packing(q=lengths_q)
    case = dtype, lengths_q, lengths_k, page, d, d_v, features, padded
    agree(case, cutlass_ext.fmha, tensors, options, lambda t: tolerance(t.dtype))


# ------------------------------------------------------------------------------------------------ gradients
MANY = 40  # sequences


def gradient_cases(many):
    """(dtype, N_q, N_kv or their lengths, d, d_v, features) of backward calls, of `many` tiles too or not."""
    for dtype, sizes, features in single_and_half(itertools.product(((33, 130), (130, 31)), FEATURES)):
        yield dtype, *sizes, 64, 64, {name: x for name, x in features.items() if name != "num_splits"}
    for dtype in TOLERANCES:
        for d, d_v in ((32, 32), (128, 128), (192, 128), (256, 256), (40, 8)):
            yield dtype, 65, 129, d, d_v, CAUSAL
        for n_q, n_kv in ((0, 5), (5, 0)):
            yield dtype, n_q, n_kv, 64, 64, PLAIN
        for lengths, d in itertools.product(LENGTHS, (64, 128)):
            yield dtype, *lengths, d, d, PACKED_FEATURES[1]
    for d, d_v in ((64, 64), (128, 128), (40, 8)) if HOPPER else ():
        yield torch.float32, 65, 129, d, d_v, HIGH
        yield torch.float32, *LENGTHS[0], d, d_v, HIGH
    for d, features in itertools.product((64, 128), ({}, *FEATURES[3:7])):
        yield torch.float32, 130, 200, d, d, SM80 | features
    yield torch.float32, *LENGTHS[0], 40, 8, SM80
    for d in (32, 64, 128):  # on CUDA cores, keys enough for tiles that add to dQ
        yield torch.float32, 140, 300, d, d, CAUSAL | {"backend": "simt"}
    for dtype in HALVES:
        for d in (64, 128, 256):
            yield dtype, 65, 129, d, d, {"causal": True, "softcap": 20.0}
        for d in (64, 128, 192, 256):
            yield dtype, 65, 129, d, d, SM80
        for (n_q, d), features in itertools.product(
            ((70, 64), (150, 128), (150, 192), (270, 256)), ({"causal": False}, {"start_pos": -9})
        ):
            yield dtype, n_q, 200, d, d, SM80 | features  # rows enough for those that add to dQ
        for d, features in itertools.product((64, 128), (CAUSAL, {"softcap": 20.0})):
            yield dtype, 520, 33, d, d, features  # rows enough for the kernels that add to dQ
        for n_kv, d, d_v in ((140, 96, 96), (33, 192, 192), (200, 192, 128)):  # two CTAs share a tile of the last two
            yield dtype, 520, n_kv, d, d_v, CAUSAL
        for n in (64, 200):  # heads enough for the kernel whose CTAs go through all keys of one
            yield dtype, [n] * MANY, [150] * MANY, 64, 64, CAUSAL
        for features in (PLAIN, CAUSAL):  # more rows than that, and tiles enough for three warpgroups
            yield dtype, [260] * MANY, [150] * MANY, 64, 64, features
        yield dtype, 65, 300, 96, 96, CAUSAL  # three tiles of keys, which a cluster has
        for keys, d in ((150, 64), (520, 128)) if many else ():  # which add to dQ in their order
            yield dtype, [520] * MANY, [keys] * MANY, d, d, CAUSAL | {"deterministic": True}
        for features in (PLAIN, CAUSAL):  # so few tiles that CTAs share them, of keys and of rows
            yield dtype, 520, 140, 256, 256, features
            yield dtype, 140, 520, 128, 128, features


def cases_beside_tiles():
    """The same of tiles of keys in three waves, beside which dQ is made."""
    keys = 96 * torch.cuda.get_device_properties(0).multi_processor_count + 28
    for dtype in HALVES:
        yield dtype, 520, keys, 64, 64, PLAIN


def small_head_cases():
    """The same of heads that a CTA has all pairs of; of (128, 100) gradients alone."""
    dropout = {"dropout_p": 0.3, "dropout_seed": torch.tensor([3, -5]), "key_start": 5}
    for dtype, (n_q, n_kv, d, d_v) in itertools.product(
        HALVES, ((49, 49, 32, 32), (64, 37, 64, 40), (128, 100, 64, 64))
    ):
        bias, mask = torch.randn(1, 4, n_q, n_kv), torch.rand(2, 1, n_q, n_kv) < 0.6
        lengths = {"seqused_k": torch.tensor([n_kv, 20], dtype=torch.int32)}
        lengths["leftpad_k"] = torch.tensor([0, 3], dtype=torch.int32)
        yield dtype, n_q, n_kv, d, d_v, {"alibi_slopes": torch.rand(4)} | lengths
        yield dtype, n_q, n_kv, d, d_v, {"bias": bias.to(dtype), "mask": mask, "sink": torch.randn(4)} | dropout
        yield dtype, n_q, n_kv, d, d_v, {"bias": bias, "mask": mask} | dropout | SM80
        yield dtype, n_q, n_kv, d, d_v, {"softcap": 20.0, "mask": mask, "causal": True, "start_pos": "end"}
        yield dtype, n_q, n_kv, d, d_v, {"bias": bias, "window": (17, 5)} | SM80
        yield dtype, n_q, n_kv, d, d_v, {"start_pos": -9, "causal": True} | SM80


def compare_small_heads(*case) -> None:
    compare_gradients(*case, heads_kv=4)


def for_racecheck(dtype, n_q, n_kv, d, d_v, features) -> tuple | None:
    """The case, where one of Hopper's kernels for all gradients would load keys to registers that a warp has zeroed, or
    P that another warpgroup has stored, in those for each; none where a CTA has all keys of a head in any case, and may
    load values to registers from a stage in which a warp zeroes rows."""
    if dtype not in HALVES:
        return dtype, n_q, n_kv, d, d_v, features
    is_narrow, keys_are_cut = max(d, d_v) <= 64, isinstance(n_q, list) or "seqused_k" in features
    rows, keys, batch = (max(n_q), max(n_kv), len(n_q)) if isinstance(n_q, list) else (n_q, n_kv, 2)
    if is_narrow and rows <= 256 and (keys <= 128 or batch == MANY) and (keys_are_cut or features):
        return None
    if max(d, d_v) > 128 and features.get("backend") != "sm80":
        features = features | {"deterministic": True}
    if is_narrow and keys_are_cut:  # softcap: else tiles of keys add in order, in one kernel
        features = {"softcap": 20.0} | features | {"deterministic": True}
    return dtype, n_q, n_kv, d, d_v, features


def compare_gradients(dtype, n_q, n_kv, d, d_v, features, heads_kv=2) -> None:
    """`fmha_backward` on the results of `fmha` on the CPU."""
    options, rows, keys = dict(features), (2, n_q), (2, n_kv)
    if isinstance(n_q, list):
        rows, keys = (sum(n_q),), (sum(n_kv),)
        options |= packing(q=n_q, k=n_kv)
    shapes = (*rows, 4, d_v), (*rows, 4, d), (*keys, heads_kv, d), (*keys, heads_kv, d_v)
    dout, q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    on_cpu = {name: x for name, x in options.items() if name not in ("backend", "precision")}
    out, lse = cutlass_ext.fmha(q, k, v, **on_cpu, return_lse=True)
    options["dlse"] = torch.randn(lse.shape)

    def tolerance_of(t):  # sums of many terms, each rounded
        return tolerance(dtype, 1 + (t.abs().max().item() if t.numel() else 0.0))

    case = dtype, n_q, n_kv, d, d_v, features, heads_kv
    agree(case, cutlass_ext.fmha_backward, (dout, q, k, v, out, lse), options, tolerance_of)


# ------------------------------------------------------------------------------------------------ bias, mask, dropout
def pair_cases(many):
    """(dtype, N_q, N_kv, d, d_v, features) of calls with bias, mask and dropout, with calls of `many` tiles or
    without."""
    sizes = (1, 33), (33, 130), (130, 65)
    dropout = {"dropout_p": 0.3, "dropout_seed": torch.tensor([3, -5]), "key_start": 5, "causal": True}
    for dtype, (n_q, n_kv), d in [
        *single_and_half(itertools.product(sizes, (64,))),
        *itertools.product(TOLERANCES, sizes[1:2], (128,)),
        *((dtype, (520, 70), d) for dtype, d in zip(HALVES, (64, 128), strict=True)),
    ]:
        row = torch.randn(2, 1, 1, n_kv)
        yield dtype, n_q, n_kv, d, d, {"bias": torch.randn(1, 4, n_kv, n_q).mT, "causal": True, "start_pos": "end"}
        for way in ({}, {"precision": "high"}) if dtype == torch.float32 and n_q > 1 else ({},):
            yield dtype, n_q, n_kv, d, d, way | {"bias": torch.randn(2, 4, n_q, n_kv).to(dtype), "softcap": 20.0}
            yield dtype, n_q, n_kv, d, d, way | {"bias": row, "mask": row > -1, "window": (17, 5)}
            yield dtype, n_q, n_kv, d, d, way | {"mask": torch.rand(2, 1, n_q, n_kv) < 0.6}
            yield dtype, n_q, n_kv, d, d, way | dropout | {"sink": torch.randn(4)}
    # Biases that Hopper's dBias keeps in shared memory: with every other feature, in parts; with tiles enough that the
    # buffers of its persistent CTAs come round; one for all rows, whose columns warps add up.
    for dtype, d in zip(HALVES, (64, 128), strict=True):
        lengths = {"seqused_k": torch.tensor([200, 264], dtype=torch.int32)}
        lengths["leftpad_k"] = torch.tensor([0, 20], dtype=torch.int32)
        bias = torch.randn(1, 4, 130, 264).to(dtype)
        yield dtype, 130, 264, d, d, dropout | lengths | {"bias": bias, "mask": torch.rand(2, 1, 130, 264) < 0.6}
        if many:
            keys = 888 if d == 64 else 904  # an odd and an even number of tiles, of which a cluster has two
            yield dtype, 900, keys, d, d, {"bias": torch.randn(2, 4, 900, keys).to(dtype), "window": (300, 100)}
            mask = torch.rand(2, 1, 600, 600) < 0.6  # beside which tiles of keys add to dQ in their order
            yield dtype, 600, 600, d, d, CAUSAL | {"mask": mask, "deterministic": True}
        yield dtype, 130, 72, d, d, {"bias": torch.randn(1, 1, 1, 72).to(dtype)}
        yield dtype, 130, 137, d, d, {"bias": torch.randn(130, 137, 4).to(dtype).permute(2, 0, 1)[None]}


# ------------------------------------------------------------------------------------------------ caches
def cache_cases():
    """(dtype, N_q, d, d_v, page size, new tokens, rotary dim, options, query heads or 4): reading, appending, paged,
    rotated, split."""
    for dtype, n_new, d, page_size in single_and_half(itertools.product((0, 3), (64, 128, 256), (None, 1, 16))):
        yield dtype, 1, d, d, page_size, n_new, n_new and 32, CAUSAL
    for dtype in TOLERANCES:
        yield dtype, 5, 192, 128, 64, 5, 24, {"causal": True, "num_splits": 3, "rotary_interleaved": False}
        yield dtype, 16, 64, 64, 16, 16, 64, {"window_size": (20, 0), "softcap": 20.0}
        pads = {"cache_leftpad": torch.tensor([3, 0, 1], dtype=torch.int32)}
        yield dtype, 1, 64, 64, None, 0, 0, {"num_splits": 4} | pads
        yield dtype, 40, 64, 64, 16, 40, 32, CAUSAL  # a chunk, which a launch of its own appends before
    for dtype in HALVES:
        for d, d_v in ((64, 64), (128, 128), (192, 128), (256, 256)):
            yield dtype, 1, d, d_v, 16, 0, 0, SM80
            yield dtype, 1, d, d_v, None, 3, 32, SM80
            yield dtype, 1, d, d_v, None, 3, 32, CAUSAL
            yield dtype, 16, d, d_v, 16, 0, 0, SM80
            yield dtype, 1, d, d_v, 16, 0, 0, CAUSAL, 64  # 32 rows of a KV head, on Hopper in query tiles


def compare_cache(dtype, n_q, d, d_v, page_size, n_new, rotary_dim, options, heads=4) -> None:
    """`flash_attn_with_kvcache`; of the caches, what is written."""
    lengths, capacity, heads_kv = torch.tensor([130, 0, 77], dtype=torch.int32), 192, 2
    shapes = (3, n_q, heads, d), (3, capacity, heads_kv, d), (3, capacity, heads_kv, d_v)
    q, k, v = (torch.randn(shape) for shape in shapes)
    arguments = {"cache_seqlens": lengths, **options}
    if page_size:
        order = torch.randperm(3 * capacity // page_size)
        k, v = (x.reshape(-1, page_size, heads_kv, x.shape[-1]) for x in (k, v))
        arguments["block_table"] = order.view(3, -1).to(torch.int32)
    if n_new:
        arguments |= {"k": torch.randn(3, n_new, heads_kv, d), "v": torch.randn(3, n_new, heads_kv, d_v)}
    if rotary_dim:
        arguments |= {name: torch.randn(capacity, rotary_dim // 2) for name in ("rotary_cos", "rotary_sin")}
    arguments = {
        name: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in arguments.items()
    }

    def call(q, k_cache, v_cache, **options):
        caches = k_cache.clone(), v_cache.clone()
        return *cutlass_ext.flash_attn_with_kvcache(q, *caches, return_softmax_lse=True, **options), *caches

    case = dtype, n_q, d, d_v, page_size, n_new, rotary_dim, options, heads
    # rotated keys are rounded, too
    agree(case, call, tuple(t.to(dtype) for t in (q, k, v)), arguments, lambda t: tolerance(dtype, 2))


# ------------------------------------------------------------------------------------------------ all of them
def calls(tool: str):
    """(function, its arguments) of each call of the sweep."""
    many = tool != "racecheck"
    for compare, cases in (
        (compare_padded, padded_cases()),
        (compare_packed, packed_cases(many)),
        (compare_paged, paged_cases(many)),
        (compare_gradients, gradient_cases(many)),
        (compare_cache, cache_cases()),
        (compare_padded, pair_cases(many)),
        (compare_gradients, pair_cases(many)),
        (compare_padded, small_head_cases()),
        (compare_small_heads, small_head_cases()),
        (compare_gradients, cases_beside_tiles() if tool == "memcheck" else ()),
    ):
        for case in cases:
            if not many and compare is compare_gradients:
                case = for_racecheck(*case)
            if case:
                yield compare, case


def shard_of(text: str) -> tuple[int, int]:
    first, step = map(int, text.split("/"))
    return first, step


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", nargs="?", default="memcheck")
    parser.add_argument("--shard", type=shard_of, default=(0, 1), metavar="I/N", help="I from 0 on")
    options = parser.parse_args()
    # Without them for racecheck, which takes an mbarrier arrival to release what the arriving lane alone did (2025.3.1
    # and 2026.4.0; sixty lines with cuda::barrier show it): a job slot of a Hopper kernel is read by whole warps, one
    # lane arrives for each, and where slots are used again it would report every job; nor the gradients that read by
    # load instructions what a warp has zeroed or another warpgroup stored, of which one lane says that it is there.
    # dQ beside tiles is for memcheck alone: it wants such slots, and initcheck does not see what the copy engine writes
    # to memory (it reports those three sections of dQ, and not the fourth, which a launch writes).
    torch.manual_seed(0)  # for the tensors that are part of a case; those of a call have its number as seed
    first, step = options.shard
    count = 0
    for number, (compare, case) in enumerate(calls(options.tool)):
        if number % step != first:
            continue
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(number)
            compare(*case)
        count += 1
    print(f"{count} calls agree with the CPU")
