"""A small sweep for compute-sanitizer: every head-dim bucket and feature at sizes around tile edges.

verify_gpu.py runs it under each tool. The results are compared with the torch path on the CPU, so that a kernel which
compute-sanitizer has kept from running does not count as clean.
"""

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


def cases():
    """(N_q, N_kv, d, d_v, features)."""
    yield from itertools.product((1, 33), (31, 130), (32, 64), (64,), FEATURES)
    yield from ((65, 129, d, d_v, FEATURES[1]) for d, d_v in ((4, 36), (100, 100), (128, 64), (192, 128), (256, 256)))
    yield (0, 5, 64, 64, {})
    yield (5, 0, 64, 64, {})


def compare(n_q: int, n_kv: int, d: int, d_v: int, features: dict) -> None:
    q, k, v = torch.randn(2, n_q, 4, d), torch.randn(2, n_kv, 2, d), torch.randn(2, n_kv, 2, d_v)
    on_gpu = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in features.items()}
    on_cpu = {name: x for name, x in features.items() if name != "num_splits"}
    expected = cutlass_ext.fmha(q, k, v, return_lse=True, **on_cpu)
    got = cutlass_ext.fmha(q.cuda(), k.cuda(), v.cuda(), return_lse=True, **on_gpu)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(
            a.cpu(), b, rtol=1e-4, atol=1e-5, msg=lambda text: f"{(n_q, n_kv, d, d_v, features)}: {text}"
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    count = 0
    for case in cases():
        compare(*case)
        count += 1
    print(f"{count} calls agree with the CPU")
