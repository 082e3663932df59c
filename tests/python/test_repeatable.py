"""The same call gives the same bits: run after run, on any stream, whatever else is in the batch."""

import functools

import pytest
import torch
from oracle import assert_same_bits

import cutlass_ext

CASES = {
    "prefill": ((2, 300, 4, 64), {}),
    "single head": ((1, 700, 1, 64), {}),
    "decode": ((3, 1, 8, 64), {"n_kv": 1500, "heads_kv": 2}),
    "d 256": ((1, 140, 4, 256), {"heads_kv": 1}),
    "d 128, d_v 64": ((2, 65, 4, 128), {"n_kv": 333, "d_v": 64}),
}


def differs(got, want):
    """Whether a bit does, as a tensor: the host goes on."""
    return torch.stack(
        [(a.view(torch.int32) != b.view(torch.int32)).any() for a, b in zip(got, want, strict=True)]
    ).any()


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("n_q,d", [(700, 64), (700, 128), (130, 256)])
def test_1000_times(kernels, n_q, d, num_splits):
    """One call behind the other, with more work than fits on the GPU at once: which CTA takes what is chance."""
    q, k, v = kernels.qkv(3, n_q, 30, d, heads_kv=6)
    options = {"causal": True, "num_splits": num_splits, "seqused_k": kernels.int32([n_q, 65, n_q - 1])}
    want = kernels.fmha(q, k, v, **options)
    runs = (kernels.fmha(q, k, v, **options) for _ in range(1000))
    assert not torch.stack([differs(run, want) for run in runs]).any()


@pytest.mark.parametrize("n_q,d", [(700, 64), (700, 128), (130, 256)])
def test_gradients_1000_times(kernels, n_q, d):
    """Bit for bit where that is asked for. Where it is not, dq differs by the order of its sums and nothing else."""
    q, k, v = kernels.qkv(3, n_q, 30, d, heads_kv=6)
    dout, options = kernels.randn(*q.shape), {"causal": True, "seqused_k": kernels.int32([n_q, 65, n_q - 1])}
    results = dout, q, k, v, *kernels.fmha(q, k, v, **options)
    call = functools.partial(cutlass_ext.fmha_backward, *results, backend=kernels.backend, **options)
    want = call(deterministic=True)[:3]
    runs = (call(deterministic=True)[:3] for _ in range(1000))
    assert not torch.stack([differs(run, want) for run in runs]).any()
    dq, *of_keys = call()[:3]
    size, distances = dq.float().norm(), []
    for _ in range(200):
        run = call()[:3]
        assert_same_bits(run[1:], of_keys)
        distances.append((run[0].float() - dq.float()).norm() / size)
    assert torch.stack(distances).max() <= torch.finfo(q.dtype).eps


@pytest.mark.parametrize("num_splits", [0, 1, 4])
@pytest.mark.parametrize("case", CASES)
def test_20_times(target, case, num_splits):
    shape, sizes = CASES[case]
    q, k, v = target.qkv(*shape, **sizes)
    options = {"causal": True, "start_pos": "end", "num_splits": num_splits, "sink": target.vector(shape[2])}
    want = target.fmha(q, k, v, **options)
    for _ in range(20):
        assert_same_bits(target.fmha(q, k, v, **options), want)


def test_auto_is_what_explain_says(gpu):
    for shape, sizes in CASES.values():
        q, k, v = gpu.qkv(*shape, **sizes)
        backends = "auto", cutlass_ext.explain(q, k, v).backend
        runs = [cutlass_ext.fmha(q, k, v, backend=backend, return_lse=True) for backend in backends]
        assert_same_bits(*runs)


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize("case", CASES)
def test_a_sequence_does_not_depend_on_its_batch(gpu, case, num_splits):
    """With num_splits fixed: alone, in a batch, and among sequences of other lengths."""
    (_, *shape), sizes = CASES[case]
    q, k, v = gpu.qkv(5, *shape, **sizes)
    options = {"causal": True, "start_pos": "end", "num_splits": num_splits}
    n_kv = k.shape[1]
    used = gpu.int32([n_kv, n_kv // 2, 1, n_kv - 1, n_kv // 3])
    out, lse = gpu.fmha(q, k, v, seqused_k=used, **options)
    for b in range(5):
        alone = gpu.fmha(*(t[b : b + 1] for t in (q, k, v)), seqused_k=used[b : b + 1], **options)
        assert_same_bits(alone, (out[b : b + 1], lse[b : b + 1]))


@pytest.mark.parametrize("num_splits", [1, 3, 9])
@pytest.mark.parametrize("n_q,d", [(300, 64), (1, 64), (300, 128), (100, 64), (100, 256)])
def test_a_sequence_does_not_depend_on_a_batch_that_fills_the_gpu(gpu, n_q, d, num_splits):
    """Alone it leaves most multiprocessors idle: whatever is chosen by that must not show in the bits."""
    q, k, v = gpu.qkv(400 if n_q == 1 else 64, n_q, 8, d, n_kv=400)
    options = {"causal": True, "start_pos": "end", "num_splits": num_splits}
    out, lse = gpu.fmha(q, k, v, **options)
    alone = gpu.fmha(q[7:8], k[7:8], v[7:8], **options)
    assert_same_bits(alone, (out[7:8], lse[7:8]))


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("n_q", [8, 300])
def test_two_streams(gpu, n_q, num_splits):
    """Calls on two streams at once do not meet: not in the workspace of the splits, not in the outputs, not in the
    counter by which persistent CTAs take their work."""
    cases = [gpu.qkv(1, n_q, 4, 64, n_kv=2000) for _ in range(2)]
    want = [gpu.fmha(*case, num_splits=num_splits) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    got = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(cutlass_ext.fmha(*cases[i], num_splits=num_splits, return_lse=True))
    torch.cuda.synchronize()
    for i in range(2):
        for result in got[i]:
            assert_same_bits(result, want[i])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("n_q", [70, 900])
def test_gradients_on_two_streams(gpu, n_q, deterministic):
    """Their sums of dq, and the counters beside those, do not meet either."""
    cases = []
    for _ in range(2):
        q, k, v = gpu.qkv(2, n_q, 6, 64, heads_kv=3)
        cases.append((gpu.randn(*q.shape), q, k, v, *gpu.fmha(q, k, v, causal=True)))
    call = functools.partial(cutlass_ext.fmha_backward, causal=True, deterministic=deterministic)
    want = [call(*case)[:3] for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    got = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(call(*cases[i])[:3])
    torch.cuda.synchronize()
    for i in range(2):
        dq, *of_keys = want[i]
        for result in got[i]:
            assert_same_bits(result[1:], of_keys)
            if deterministic:
                assert_same_bits(result[:1], [dq])
            assert (result[0].float() - dq.float()).norm() <= torch.finfo(dq.dtype).eps * dq.float().norm()


def test_runs_on_the_current_stream(gpu):
    """What the current stream writes late, the call reads; what the default stream holds now would be wrong."""
    q, k, v = gpu.qkv(1, 64, 2, 64)
    want = gpu.fmha(q, k, v)
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        late.copy_(q)
        got = cutlass_ext.fmha(late, k, v, return_lse=True)
        got = [t.clone() for t in got]
    torch.cuda.synchronize()
    assert_same_bits(got, want)
