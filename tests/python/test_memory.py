"""O(N) memory, measured at two N; no hidden copies; and indices beyond 2^31."""

import dataclasses
import functools
import resource

import pytest
import torch
from conftest import Target
from oracle import assert_same_bits, expect, expect_gradients

import cutlass_ext
from cutlass_ext.measurement import peak_extra_bytes

N, D = 8192, 64  # the larger of two lengths, of which the other is half
ALLOCATOR = 1 << 20  # bytes up to which the caching allocator may round
PARTS = 16 << 20  # more than O and lse of 264 CTAs with 128 rows each, in float32
BEYOND_INT = (1 << 31) + 4096


def assert_linear(target, causal, **options):
    """At either length no more than some copies of the results: two, of float32 on tensor cores three more, the parts
    of q, k and v, and the partial results of as many CTAs as a GPU holds at once; through PyTorch's operators the
    scores of a block of rows and their probabilities, which are 7.8 of bfloat16's copies, and keys and values in
    float32. A score matrix would be 67 and 268 MB."""
    copies, constant = (16, ALLOCATOR) if target.family == "torch" else (2, PARTS)
    for n in (N // 2, N):
        q, k, v = target.qkv(1, n, 1, D)
        if cutlass_ext.explain(q, k, v, causal=causal, backend=target.backend, **options).kernel.endswith("_fp16x2"):
            copies = 5
        call = lambda: cutlass_ext.fmha(q, k, v, causal=causal, backend=target.backend, return_lse=True, **options)  # noqa: B023, E731
        call()  # what is kept from a first call does not count
        extra, results = peak_extra_bytes(call, target.device), n * (D * target.dtype.itemsize + 4)
        assert results <= extra <= copies * results + constant, f"{extra} bytes at N {n}, results of {results}"


@pytest.mark.parametrize("causal", [False, True])
def test_extra_memory(target, causal):
    assert_linear(target, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_extra_memory_of_the_torch_backend(gpu, causal):
    assert_linear(dataclasses.replace(gpu, backend="torch"), causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extra_memory_of_blocks(dtype, causal):
    """The same of calls on a CPU that PyTorch's fused attention does not compute."""
    assert_linear(Target("cpu", "torch", dtype), causal, softcap=30.0)


def test_no_copy_of_a_packed_buffer(gpu):
    """One split, strided inputs: nothing is allocated but the results."""
    q, k, v = gpu.randn(2, 2048, 3, 8, D).unbind(2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = cutlass_ext.fmha(q, k, v, num_splits=1, return_lse=True)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= out.nbytes + lse.nbytes + (2 << 20)  # the allocator may hand out 1 MB more than asked for


# ------------------------------------------------------------------------------------------------ beyond 2^31 elements
@pytest.fixture
def plenty_of_memory(gpu):
    torch.cuda.empty_cache()
    needed = 5 * BEYOND_INT * gpu.dtype.itemsize  # four such tensors, and what making them takes
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GB of free device memory")
    yield
    torch.cuda.empty_cache()


def spread(x, dimension):
    """`x` `[2, 65, 2, D]` with one of its strides so long that its last element lies at 2^31 or past it."""
    strides = {
        "batch": (BEYOND_INT, 2 * D, D, 1),
        "seq": (2 * D, 1 << 26, D, 1),  # 64 rows of 2^26: the last lies at 2^32
        "heads": (65 * D, D, BEYOND_INT, 1),
    }[dimension]
    view = torch.empty((1 << 32) + (1 << 20), dtype=x.dtype, device="cuda").as_strided(x.shape, strides)
    return view.copy_(x)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("dimension", ["batch", "seq", "heads"])
def test_strides_beyond_int(gpu, plenty_of_memory, dimension, which):
    """One of the tensors is spread over 17 GB (16-bit: 9), of which only its own elements are ever written."""
    q, k, v = gpu.qkv(2, 65, 2, D)
    tensors = {"q": q, "k": k, "v": v}
    tensors[which] = spread(tensors[which], dimension)
    expect(q, k, v, causal=True).check(*gpu.fmha(*tensors.values(), causal=True))


def test_output_beyond_int(gpu, plenty_of_memory):
    """More than 2^31 elements of `out`; the rows on both sides of element 2^31 and the last are compared."""
    heads, d, n_kv = 64, D, 8
    n_q = BEYOND_INT // (heads * d) + 1
    q = gpu.randn(1, n_q, 1, d).expand(1, n_q, heads, d)
    k, v = gpu.randn(1, n_kv, heads, d), gpu.randn(1, n_kv, heads, d)
    rows = [0, 1, (1 << 31) // (heads * d) - 1, (1 << 31) // (heads * d), n_q - 2, n_q - 1]
    out, lse = cutlass_ext.fmha(q, k, v, return_lse=True)
    expect(q, k, v, rows=rows).check(out, lse)


def test_every_tensor_beyond_int(gpu, plenty_of_memory):
    """Contiguous tensors of more than 2^31 elements each: the sequences at both ends and around element 2^31."""
    n, heads = 64, 128
    a_sequence = n * heads * D
    q, k, v = (torch.empty(BEYOND_INT // a_sequence + 1, n, heads, D, device="cuda", dtype=gpu.dtype) for _ in "qkv")
    for t in (q, k, v):
        t.normal_()
    out, lse = cutlass_ext.fmha(q, k, v, causal=True, return_lse=True)
    some = [0, (1 << 31) // a_sequence - 1, (1 << 31) // a_sequence, len(q) - 1]
    expect(*(t[some] for t in (q, k, v)), causal=True).check(out[some], lse[some])


@pytest.mark.parametrize("which", ["dout", "q", "k", "v"])
@pytest.mark.parametrize("dimension", ["batch", "seq", "heads"])
def test_gradients_of_strides_beyond_int(gpu, plenty_of_memory, dimension, which):
    q, k, v = gpu.qkv(2, 65, 2, D)
    tensors = {"dout": gpu.randn(*q.shape), "q": q, "k": k, "v": v}
    call = functools.partial(cutlass_ext.fmha_backward, causal=True, deterministic=True)
    results = gpu.fmha(q, k, v, causal=True)
    want = call(*tensors.values(), *results)[:3]
    tensors[which] = spread(tensors[which], dimension)
    assert_same_bits(call(*tensors.values(), *results)[:3], want)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_beyond_int(gpu, plenty_of_memory, deterministic):
    """More than 2^31 elements of dq, all rows and keys of the first head and of the last one compared."""
    heads, d, n_kv, ends = 128, 128, 8, [0, -1]
    n_q = BEYOND_INT // (heads * d) + 1
    q, dout = (gpu.randn(1, n_q, 1, d).expand(1, n_q, heads, d) for _ in range(2))
    k, v = (gpu.randn(1, n_kv, heads, d) for _ in range(2))
    out, lse = cutlass_ext.fmha(q, k, v, return_lse=True)
    got = cutlass_ext.fmha_backward(dout.contiguous(), q, k, v, out, lse, deterministic=deterministic)[:3]
    del out, lse
    expected = expect_gradients(*(t[:, :, ends] for t in (q, k, v, dout)))
    expected.check([t[:, :, ends] for t in got])


def test_refused_calls_keep_nothing():
    """A call that is refused while its arguments are read lets go of those behind the one at fault, too."""
    million = 1 << 20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(40):
        v = torch.ones(8 * million)  # 32 MB
        with pytest.raises(TypeError, match=r"\bk\b"):
            cutlass_ext.fmha(torch.ones(1, 1, 1, 4), None, v.view(1, -1, 1, 4))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak  # KB
    assert grown < 200 * 1024, f"{grown} KB more after 40 refused calls with 32 MB each"
