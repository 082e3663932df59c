"""`explain`: what would run and why, without computing; its errors are those of the call."""

import pytest
import torch

import cutlass_ext


@pytest.mark.parametrize("num_splits", [0, 3])
def test_says_what_runs(target, num_splits):
    q, k, v = target.qkv(2, 170, 4, 64)
    explanation = cutlass_ext.explain(q, k, v, causal=True, num_splits=num_splits, backend=target.backend)
    assert explanation.backend == target.family
    assert len(explanation.reason) > 10
    assert str(explanation) == f"{explanation.backend}: {explanation.reason}"


def test_auto_on_the_cpu_is_torch():
    q = torch.randn(1, 8, 1, 16)
    assert cutlass_ext.explain(q, q, q).backend == "torch"


def test_takes_every_argument_of_fmha(target):
    q, k, v = target.qkv(2, 70, 4, 64)
    options = {
        "causal": True, "start_pos": target.int32([1, 2]), "window": (4, 5), "softmax_scale": 0.1, "softcap": 3.0,
        "alibi_slopes": target.vector(4), "sink": target.vector(4), "seqused_k": target.int32([3, 70]),
        "leftpad_k": target.int32([0, 1]), "return_lse": True, "num_splits": 2, "backend": target.backend,
    }  # fmt: skip
    assert cutlass_ext.explain(q, k, v, **options).reason


def test_refuses_what_fmha_refuses(target):
    q, k, v = target.qkv(2, 70, 4, 64)
    with pytest.raises(ValueError, match=r"\bsoftcap\b"):
        cutlass_ext.explain(q, k, v, softcap=-1.0, backend=target.backend)


def test_auto_on_cuda(gpu):
    q, k, v = gpu.qkv(1, 170, 1, 16)
    assert cutlass_ext.explain(q, k, v).backend == gpu.family


def test_calls_of_few_scores(gpu):
    """Hopper has kernels for them, if plain, or leaves them to another family; unless the number of splits is fixed:
    then the kernel must not depend on the batch."""
    hopper = gpu.family == "sm90"
    q, k, v = gpu.qkv(2, 70, 4, 64)
    plain, capped = cutlass_ext.explain(q, k, v), cutlass_ext.explain(q, k, v, softcap=2.0)
    assert plain.backend == gpu.family and ("short launch" in plain.reason) == hopper
    assert capped.backend == ("sm80" if hopper else gpu.family)
    assert ("sm90 does not run it: its pipeline" in capped.reason) == hopper
    for many in (cutlass_ext.explain(q, k, v, num_splits=1), cutlass_ext.explain(*gpu.qkv(400, 70, 4, 128))):
        assert many.backend == gpu.family and "short launch" not in many.reason


def test_short_queries_decode(gpu):
    """16 query rows or fewer, unless they are packed or another family is asked for."""
    q, k, v = gpu.qkv(2, 17, 4, 64, n_kv=100)
    short = q[:, :16]
    family = "simt" if gpu.dtype == torch.float32 else "sm80"
    for backend in ("auto", family):
        explanation = cutlass_ext.explain(short, k, v, backend=backend)
        assert explanation.backend == family and "decode" in explanation.reason
        assert "decode" not in cutlass_ext.explain(q, k, v, backend=backend).reason
    packing = {"cu_seqlens_q": gpu.int32([0, 8, 16]), "cu_seqlens_k": gpu.int32([0, 50, 100])}
    packing |= {"max_seqlen_q": 8, "max_seqlen_k": 50}
    assert "decode" not in cutlass_ext.explain(short[0], k[0], v[0], **packing).reason
    if family == "sm80" and torch.cuda.get_device_capability() == (9, 0):
        explanation = cutlass_ext.explain(short, k, v, backend="sm90")
        assert explanation.backend == "sm90" and "decode" not in explanation.reason


@pytest.mark.parametrize("batch,n_q,n_kv", [(0, 1, 5), (2, 0, 5), (2, 1, 0), (2, 0, 0), (2, 0, 300)])
def test_calls_without_work(target, batch, n_q, n_kv):
    q, k, v = target.qkv(batch, n_q, 4, 64, n_kv=n_kv)
    assert cutlass_ext.explain(q, k, v, backend=target.backend).backend in ("torch", "simt", "sm80", "sm90")


def test_torch_on_cuda(gpu):
    q, k, v = gpu.qkv(1, 8, 1, 16)
    assert cutlass_ext.explain(q, k, v, backend="torch").backend == "torch"
