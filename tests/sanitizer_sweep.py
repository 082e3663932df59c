"""A small sweep for compute-sanitizer: every dtype, head-dim bucket and feature at sizes around tile edges.

verify_gpu.py runs it under each tool, whose name is the argument. The results are compared with the torch path on the
CPU, so that a kernel which compute-sanitizer has kept from running does not count as clean.
"""

import itertools
import sys

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


# of one rounding of P and of the output each, and of values to about 4
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
}


def cases():
    """(dtype, N_q, N_kv, d, d_v, features, elements by which rows are longer than the head dim, query heads or 4)."""
    plain, causal, splits = FEATURES[:3]
    for sizes in itertools.product((1, 33), (31, 130), (32, 64), (64,), FEATURES):
        yield torch.float32, *sizes, 0
    for d, d_v in ((4, 36), (100, 100), (128, 64), (192, 128), (256, 256)):
        yield torch.float32, 65, 129, d, d_v, causal, 0
    yield torch.float32, 0, 5, 64, 64, plain, 0
    yield torch.float32, 5, 0, 64, 64, plain, 0
    for dtype in (torch.float16, torch.bfloat16):
        for d, features in itertools.product((64, 128, 256), (causal, splits)):
            yield dtype, 65, 129, d, d, features, 0
        for d, d_v in ((8, 40), (104, 104), (192, 128)):
            yield dtype, 130, 33, d, d_v, causal, 0
        for padding, d in itertools.product((1, 4), (64, 128)):  # rows that begin on 2 bytes, and on 8
            yield dtype, 33, 130, d, d, causal, padding
        for d, (n_q, n_kv, heads) in itertools.product((64, 128), ((100, 640, 4), (40, 250, 80), (20, 60, 4))):
            yield dtype, n_q, n_kv, d, d, causal | {"start_pos": "end"}, 0, heads  # Hopper's short kernels, both
        for features in FEATURES:
            yield dtype, 1, 130, 64, 64, features, 0
        yield dtype, 0, 5, 64, 64, plain, 0
        yield dtype, 5, 0, 64, 64, plain, 0


def compare(
    dtype: torch.dtype, n_q: int, n_kv: int, d: int, d_v: int, features: dict, padding: int, heads: int = 4
) -> None:
    shapes = (2, n_q, heads, d), (2, n_kv, 2, d), (2, n_kv, 2, d_v)
    q, k, v = (torch.randn(*rows, n + padding).to(dtype) for *rows, n in shapes)
    on_gpu = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in features.items()}
    on_cpu = {name: x for name, x in features.items() if name != "num_splits"}
    expected = cutlass_ext.fmha(q[..., :d], k[..., :d], v[..., :d_v], return_lse=True, **on_cpu)
    q, k, v = q.cuda(), k.cuda(), v.cuda()
    got = cutlass_ext.fmha(q[..., :d], k[..., :d], v[..., :d_v], return_lse=True, **on_gpu)
    what = (dtype, n_q, n_kv, d, d_v, features, padding, heads)
    for a, b, tolerance in zip(got, expected, (TOLERANCES[dtype], TOLERANCES[torch.float32]), strict=True):
        torch.testing.assert_close(a.cpu(), b, **tolerance, msg=lambda text: f"{what}: {text}")


LENGTHS = ([70, 0, 1, 129, 33], [70, 33, 130, 0, 64]), ([5], [200]), ([0, 0], [3, 0])
# Several work items for each multiprocessor, of 0 to 3 key tiles: the buffers of Hopper's persistent CTAs come round.
MANY_LENGTHS = [1 + i % 9 for i in range(150)], [i * 7 % 301 for i in range(150)]
PACKED_FEATURES = (
    {},
    {"causal": True, "start_pos": "end"},
    {"causal": True, "start_pos": "end", "num_splits": 3},
    {"window": (17, 5), "softcap": 20.0, "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
)


def gradient_cases():
    """(dtype, N_q, N_kv or their lengths, d, d_v, features) of backward calls."""
    for dtype in TOLERANCES:
        for features in FEATURES:
            features = {name: x for name, x in features.items() if name != "num_splits"}
            for n_q, n_kv in ((33, 130), (130, 31)):
                yield dtype, n_q, n_kv, 64, 64, features
        for d, d_v in ((128, 128), (192, 128), (256, 256), (40, 8)):
            yield dtype, 65, 129, d, d_v, FEATURES[1]
        for n_q, n_kv in ((0, 5), (5, 0)):
            yield dtype, n_q, n_kv, 64, 64, FEATURES[0]
        for lengths, d in itertools.product(LENGTHS, (64, 128)):
            yield dtype, *lengths, d, d, PACKED_FEATURES[1]


def compare_gradients(dtype: torch.dtype, n_q, n_kv, d: int, d_v: int, features: dict) -> None:
    """`fmha_backward` on the GPU and the CPU, where the results of `fmha` are from."""
    options, rows, keys = dict(features), (2, n_q), (2, n_kv)
    if isinstance(n_q, list):
        rows, keys = (sum(n_q),), (sum(n_kv),)
        for name, lengths in (("q", n_q), ("k", n_kv)):
            options[f"cu_seqlens_{name}"] = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            options[f"max_seqlen_{name}"] = max(lengths)
    shapes = (*rows, 4, d_v), (*rows, 4, d), (*keys, 2, d), (*keys, 2, d_v)
    dout, q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    out, lse = cutlass_ext.fmha(q, k, v, **options, return_lse=True)
    options["dlse"] = torch.randn(lse.shape)
    tensors = dout, q, k, v, out, lse
    expected = cutlass_ext.fmha_backward(*tensors, **options)
    on_gpu = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    got = cutlass_ext.fmha_backward(*(t.cuda() for t in tensors), **on_gpu)
    what = (dtype, n_q, n_kv, d, d_v, features)
    for a, b in zip(got, expected, strict=True):
        largest = b.abs().max().item() if b.numel() else 0.0  # sums of many terms, each rounded
        tolerance = {name: x * (1 + largest) for name, x in TOLERANCES[dtype].items()}
        torch.testing.assert_close(a.cpu(), b, **tolerance, msg=lambda text: f"{what}: {text}")


def pair_cases():
    """(dtype, N_q, N_kv, d, d_v, features) of calls with bias, mask and dropout, of which a family may not take all."""
    seed = torch.tensor([3, -5])
    for dtype, (n_q, n_kv), d in itertools.product(TOLERANCES, ((1, 33), (33, 130), (130, 65)), (64, 128)):
        row = torch.randn(2, 1, 1, n_kv)
        yield dtype, n_q, n_kv, d, d, {"bias": torch.randn(1, 4, n_kv, n_q).mT, "causal": True, "start_pos": "end"}
        yield dtype, n_q, n_kv, d, d, {"bias": torch.randn(2, 4, n_q, n_kv).to(dtype), "softcap": 20.0}
        yield dtype, n_q, n_kv, d, d, {"bias": row, "mask": row > -1, "window": (17, 5)}
        yield dtype, n_q, n_kv, d, d, {"mask": torch.rand(2, 1, n_q, n_kv) < 0.6}
        yield dtype, n_q, n_kv, d, d, {"dropout_p": 0.3, "dropout_seed": seed, "sink": torch.randn(4)}


def packed_cases(many):
    """(dtype, lengths of the queries, of the keys, d, d_v, features), with calls of `many` work items or without."""
    for dtype in TOLERANCES:
        for (lengths_q, lengths_k), features in itertools.product(LENGTHS, PACKED_FEATURES):
            yield dtype, lengths_q, lengths_k, 64, 64, features
        for d, d_v in ((128, 128), (192, 128), (256, 256), (40, 8)):
            yield dtype, *LENGTHS[0], d, d_v, PACKED_FEATURES[1]
        for d in (64, 128, 256) if many else ():
            yield dtype, *MANY_LENGTHS, d, d, PACKED_FEATURES[1]
        used = torch.tensor([70, 5, 0, 0, 63], dtype=torch.int32)
        yield dtype, *LENGTHS[0], 64, 64, {"seqused_k": used, "leftpad_k": used // 4, "causal": True}


def compare_packed(dtype: torch.dtype, lengths_q: list, lengths_k: list, d: int, d_v: int, features: dict) -> None:
    n_q, n_k = sum(lengths_q), sum(lengths_k)
    q, k, v = (torch.randn(*shape).to(dtype) for shape in ((n_q, 4, d), (n_k, 2, d), (n_k, 2, d_v)))
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in (lengths_q, lengths_k))
    options = features | {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    options |= {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k), "return_lse": True}
    expected = cutlass_ext.fmha(q, k, v, **options)
    on_gpu = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    got = cutlass_ext.fmha(q.cuda(), k.cuda(), v.cuda(), **on_gpu)
    what = (dtype, lengths_q, lengths_k, d, d_v, features)
    for a, b, tolerance in zip(got, expected, (TOLERANCES[dtype], TOLERANCES[torch.float32]), strict=True):
        torch.testing.assert_close(a.cpu(), b, **tolerance, msg=lambda text: f"{what}: {text}")


MIX = [70, 0, 1, 129, 5, 1], [70, 33, 140, 200, 0, 700]


def paged_cases(many):
    """(dtype, lengths of the queries, of the keys, page size, d, d_v, features, padded)."""
    for dtype in TOLERANCES:
        for page, features in itertools.product((1, 16, 64, 80), PACKED_FEATURES):
            yield dtype, *MIX, page, 64, 64, features, False
        for page, (d, d_v) in itertools.product((16, 256), ((128, 128), (192, 128), (256, 256), (40, 8))):
            yield dtype, *MIX, page, d, d_v, PACKED_FEATURES[1], False
        for n_q, page in itertools.product((1, 8, 17, 130), (16, 48)):
            yield dtype, [n_q] * 3, [200, 0, n_q], page, 128, 128, PACKED_FEATURES[1], True
        for d in (64, 128, 256) if many else ():
            yield dtype, *MANY_LENGTHS, 16, d, d, PACKED_FEATURES[1], False
        pads = torch.tensor([7, 33, 64, 1, 0, 300], dtype=torch.int32)
        yield dtype, *MIX, 16, 64, 64, {"leftpad_k": pads, "causal": True}, False


def compare_paged(dtype, lengths_q, lengths_k, page, d, d_v, features, padded) -> None:
    """`fmha` over pages on the GPU and the CPU; NaN in what nobody has, -1 in what nobody follows."""
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
    q, k, v = (x.to(dtype) for x in (torch.randn(shape), *pages))
    used = torch.tensor(lengths_k, dtype=torch.int32)
    options = features | {"block_table": table, "seqused_k": used, "return_lse": True}
    if not padded:
        cu_q = torch.tensor([0, *itertools.accumulate(lengths_q)], dtype=torch.int32)
        options |= {"cu_seqlens_q": cu_q, "max_seqlen_q": max(lengths_q)}
    on_cpu = {name: x for name, x in options.items() if name != "num_splits"}
    on_gpu = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    expected = cutlass_ext.fmha(q, k, v, **on_cpu)
    got = cutlass_ext.fmha(q.cuda(), k.cuda(), v.cuda(), **on_gpu)
    what = (dtype, lengths_q, lengths_k, page, d, d_v, features, padded)
    for a, b, tolerance in zip(got, expected, (TOLERANCES[dtype], TOLERANCES[torch.float32]), strict=True):
        torch.testing.assert_close(a.cpu(), b, **tolerance, msg=lambda text: f"{what}: {text}")


def cache_cases():
    """(dtype, N_q, d, d_v, page size, new tokens, rotary dim, options): reading, appending, paged, rotated, split."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for d, page_size, n_new in itertools.product((64, 128, 256), (None, 1, 16), (0, 3)):
            yield dtype, 1, d, d, page_size, n_new, n_new and 32, {"causal": True}
        yield dtype, 5, 192, 128, 64, 5, 24, {"causal": True, "num_splits": 3, "rotary_interleaved": False}
        yield dtype, 16, 64, 64, 16, 16, 64, {"window_size": (20, 0), "softcap": 20.0}
        yield (
            dtype,
            1,
            64,
            64,
            None,
            0,
            0,
            {"num_splits": 4, "cache_leftpad": torch.tensor([3, 0, 1], dtype=torch.int32)},
        )


def compare_cache(dtype, n_q, d, d_v, page_size, n_new, rotary_dim, options) -> None:
    """`flash_attn_with_kvcache` on the GPU and the CPU; of the caches, what is written."""
    lengths, capacity, heads_kv = torch.tensor([130, 0, 77], dtype=torch.int32), 192, 2
    q, k, v = torch.randn(3, n_q, 4, d), torch.randn(3, capacity, heads_kv, d), torch.randn(3, capacity, heads_kv, d_v)
    arguments = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths, **options}
    if page_size:
        order = torch.randperm(3 * capacity // page_size)
        arguments["k_cache"], arguments["v_cache"] = (x.reshape(-1, page_size, heads_kv, x.shape[-1]) for x in (k, v))
        arguments["block_table"] = order.view(3, -1).to(torch.int32)
    if n_new:
        arguments |= {"k": torch.randn(3, n_new, heads_kv, d), "v": torch.randn(3, n_new, heads_kv, d_v)}
    if rotary_dim:
        arguments |= {
            "rotary_cos": torch.randn(capacity, rotary_dim // 2),
            "rotary_sin": torch.randn(capacity, rotary_dim // 2),
        }
    results = []
    for device in ("cpu", "cuda"):
        mine = {
            n: x.to(device, dtype if x.is_floating_point() else x.dtype, copy=True)
            if isinstance(x, torch.Tensor)
            else x
            for n, x in arguments.items()
        }
        out, lse = cutlass_ext.flash_attn_with_kvcache(**mine, return_softmax_lse=True)
        results.append([x.cpu() for x in (out, lse, mine["k_cache"], mine["v_cache"])])
    what = (dtype, n_q, d, d_v, page_size, n_new, rotary_dim, options)
    loose = {name: 2 * x for name, x in TOLERANCES[dtype].items()}  # rotated keys are rounded, too
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, **loose, msg=lambda text: f"{what}: {text}")


if __name__ == "__main__":
    torch.manual_seed(0)
    count = 0
    for case in cases():
        compare(*case)
        count += 1
    # Without them for racecheck, which takes an mbarrier arrival to release what the arriving lane alone did (2025.3.1
    # and 2026.4.0; sixty lines with cuda::barrier show it): a job slot of a Hopper kernel is read by whole warps, one
    # lane arrives for each, and where slots are used again it would report every job.
    many = sys.argv[1:] != ["racecheck"]
    for case in packed_cases(many):
        compare_packed(*case)
        count += 1
    for case in paged_cases(many):
        compare_paged(*case)
        count += 1
    for case in gradient_cases():
        compare_gradients(*case)
        count += 1
    for case in cache_cases():
        compare_cache(*case)
        count += 1
    refused = 0
    for case, function in itertools.product(pair_cases(), ("forward", "backward")):
        try:
            compare(*case, 0) if function == "forward" else compare_gradients(*case)
            count += 1
        except NotImplementedError:
            refused += 1
    print(f"{count} calls agree with the CPU, {refused} were refused")
