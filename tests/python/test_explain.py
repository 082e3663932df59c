"""`explain`: what would run and why, without computing; its errors are those of the call. Here and in other modules
tests go by its fields, never by the words of its reason."""

import pytest
import torch

import cutlass_ext

KERNELS = {  # that a family has
    "torch": {"torch"},
    "simt": {"tiles", "decode"},
    "sm80": {"tiles", "tiles_fp16x2", "decode", "narrow"},
    "sm90": {"persistent", "persistent_fp16x2", "short", "cluster"},
}


def assert_of(explanation, family):
    """That the fields say one thing."""
    assert explanation.backend == family and explanation.kernel in KERNELS[family], explanation
    assert str(explanation) == f"{explanation.backend}: {explanation.reason}" and explanation.reason
    if family != "torch":
        B_r, B_c = explanation.tile
        assert B_r > 0 and B_c > 0 and explanation.splits >= 1 and explanation.ctas >= 1, explanation


@pytest.mark.parametrize("num_splits", [0, 3])
def test_says_what_runs(target, num_splits):
    q, k, v = target.qkv(2, 170, 4, 64)
    explanation = cutlass_ext.explain(q, k, v, causal=True, num_splits=num_splits, backend=target.backend)
    assert_of(explanation, target.family)
    if num_splits and target.family != "torch":
        assert explanation.splits == num_splits
        assert explanation.kernel == ("persistent" if target.family == "sm90" else "tiles")


def test_the_work_of_tiles(kernels):
    """One CTA for each work item, or as many as fit: never more than there are tiles and splits."""
    q, k, v = kernels.qkv(2, 500, 4, 64)
    for num_splits in (1, 3):
        explanation = cutlass_ext.explain(q, k, v, num_splits=num_splits, backend=kernels.backend)
        items = 2 * 4 * -(-500 // explanation.tile[0]) * num_splits
        assert explanation.ctas == items if explanation.kernel == "tiles" else explanation.ctas <= items, explanation


def test_auto_on_the_cpu_is_torch():
    q = torch.randn(1, 8, 1, 16)
    assert_of(cutlass_ext.explain(q, q, q), "torch")


def test_takes_every_argument_of_fmha(target):
    q, k, v = target.qkv(2, 70, 4, 64)
    options = {
        "causal": True, "start_pos": target.int32([1, 2]), "window": (4, 5), "softmax_scale": 0.1, "softcap": 3.0,
        "alibi_slopes": target.vector(4), "sink": target.vector(4), "seqused_k": target.int32([3, 70]),
        "leftpad_k": target.int32([0, 1]), "return_lse": True, "num_splits": 2, "backend": target.backend,
    }  # fmt: skip
    assert_of(cutlass_ext.explain(q, k, v, **options), target.family)
    assert cutlass_ext.explain(cutlass_ext.fmha, q, k, v, **options) == cutlass_ext.explain(q, k, v, **options)


def test_explains_every_function(target_fp32):
    """A call of any public function, by the function and its arguments; what it says is what `fmha` would run."""
    target, ce = target_fp32, cutlass_ext
    q, k, v = target.qkv(2, 70, 4, 64)
    bhsd = [t.transpose(1, 2) for t in (q, k, v)]
    ends = target.int32([0, 70, 140])
    tokens, packing = [t.flatten(0, 1) for t in (q, k, v)], (ends, ends, 70, 70)
    padded = ce.explain(q, k, v, causal=True, start_pos="end")
    for function, *arguments in (
        (ce.flash_attn_func, q, k, v), (ce.flash_attn_kvpacked_func, q, torch.stack([k, v], 2)),
        (ce.flash_attn_qkvpacked_func, torch.stack([q, k, v], 2)),
    ):  # fmt: skip
        assert ce.explain(function, *arguments, causal=True) == padded
    assert ce.explain(ce.scaled_dot_product_attention, *bhsd, is_causal=True) == ce.explain(q, k, v, causal=True)
    names = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), packing, strict=True))
    packed = ce.explain(*tokens, causal=True, start_pos="end", **names)
    for function, *arguments in (
        (ce.flash_attn_varlen_func, *tokens, *packing),
        (ce.flash_attn_varlen_kvpacked_func, tokens[0], torch.stack(tokens[1:], 1), *packing),
        (ce.flash_attn_varlen_qkvpacked_func, torch.stack(tokens, 1), ends, 70),
    ):
        assert ce.explain(function, *arguments, causal=True) == packed


def test_explains_a_call_on_a_cache(target):
    """It writes nothing, and says the family that reads caches."""
    q, k, v = target.qkv(2, 1, 4, 64, n_kv=64, heads_kv=2)
    before = k.clone()
    arguments = {"k": k[:, :1].clone(), "v": v[:, :1].clone(), "cache_seqlens": target.int32([3, 40])}
    explanation = cutlass_ext.explain(cutlass_ext.flash_attn_with_kvcache, q, k, v, **arguments, backend=target.backend)
    assert explanation.backend == target.family and torch.equal(k, before)
    assert explanation.kernel in ("torch", "decode", "narrow", "cluster")
    with pytest.raises(ValueError, match=r"\bcache_seqlens\b"):
        cutlass_ext.explain(cutlass_ext.flash_attn_with_kvcache, q, k, v, cache_seqlens=65, backend=target.backend)


def test_refuses_what_fmha_refuses(target):
    q, k, v = target.qkv(2, 70, 4, 64)
    with pytest.raises(ValueError, match=r"\bsoftcap\b"):
        cutlass_ext.explain(q, k, v, softcap=-1.0, backend=target.backend)


def test_auto_on_cuda(gpu):
    q, k, v = gpu.qkv(1, 170, 1, 16)
    assert_of(cutlass_ext.explain(q, k, v), gpu.family)


def test_calls_of_few_scores(gpu):
    """Hopper has kernels for them, if plain, or leaves them to another family; unless the number of splits is fixed:
    then the kernel must not depend on the batch."""
    hopper = gpu.family == "sm90"
    q, k, v = gpu.qkv(2, 70, 4, 64)
    plain, capped = cutlass_ext.explain(q, k, v), cutlass_ext.explain(q, k, v, softcap=2.0)
    assert plain.backend == gpu.family and plain.kernel == ("short" if hopper else "tiles")
    assert capped.backend == ("sm80" if hopper else gpu.family) and capped.kernel == "tiles"
    for many in (cutlass_ext.explain(q, k, v, num_splits=1), cutlass_ext.explain(*gpu.qkv(400, 70, 4, 128))):
        assert many.backend == gpu.family and many.kernel == ("persistent" if hopper else "tiles")


def test_short_queries_decode(gpu):
    """8 query rows or fewer, unless they are packed or another family is asked for."""
    q, k, v = gpu.qkv(2, 17, 4, 64, n_kv=100)
    short = q[:, :8]
    family = "simt" if gpu.dtype == torch.float32 else "sm80"
    for backend in ("auto", family):
        explanation = cutlass_ext.explain(short, k, v, backend=backend)
        assert backend == "auto" or explanation.backend == family, explanation
        assert explanation.kernel in ("decode", "narrow", "cluster"), explanation
        assert cutlass_ext.explain(q, k, v, backend=backend).kernel in ("tiles", "short", "persistent")
    packing = {"cu_seqlens_q": gpu.int32([0, 4, 8]), "cu_seqlens_k": gpu.int32([0, 50, 100])}
    packing |= {"max_seqlen_q": 4, "max_seqlen_k": 50}
    assert cutlass_ext.explain(short[0], k[0], v[0], **packing).kernel in ("tiles", "heads", "short", "persistent")
    if family == "sm80" and torch.cuda.get_device_capability() == (9, 0):
        explanation = cutlass_ext.explain(short, k, v, backend="sm90")
        assert explanation.backend == "sm90" and explanation.kernel in ("short", "cluster"), explanation


@pytest.mark.parametrize("batch,n_q,n_kv", [(0, 1, 5), (2, 0, 5), (2, 1, 0), (2, 0, 0), (2, 0, 300)])
def test_calls_without_work(target, batch, n_q, n_kv):
    """A family that is asked for is the one that would run; "auto" stays with those of the dtype."""
    q, k, v = target.qkv(batch, n_q, 4, 64, n_kv=n_kv)
    explanation = cutlass_ext.explain(q, k, v, backend=target.backend)
    of_the_dtype = {target.family} if target.family in ("torch", "simt") else {target.family, "sm80"}
    assert explanation.backend in (of_the_dtype if target.backend == "auto" else {target.backend}), explanation
    assert explanation.kernel in KERNELS[explanation.backend], explanation


def test_torch_on_cuda(gpu):
    q, k, v = gpu.qkv(1, 8, 1, 16)
    assert_of(cutlass_ext.explain(q, k, v, backend="torch"), "torch")
