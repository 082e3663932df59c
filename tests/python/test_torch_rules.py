"""What PyTorch does with operators: opcheck, autocast, vmap, flops, torch.compile, export, AOTInductor, DTensor."""

import functools
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import NOT_HOPPER, targets
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import cutlass_ext

ops = torch.ops.cutlass_ext


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------ opcheck
def prefill(target, packed):
    q, k, v = target.qkv(2, 17, 4, 32, n_kv=40, heads_kv=2, d_v=16)
    options = {"causal": True, "window_left": 20, "softcap": 4.0, "sink": target.vector(4), "return_lse": True,
               "seqused_k": target.int32([40, 7]), "alibi_slopes": target.vector(4), "start_pos": None}  # fmt: skip
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        options |= {"cu_seqlens_q": target.int32([0, 20, 34]), "cu_seqlens_k": target.int32([0, 40, 80])}
        options |= {"max_seqlen_q": 20, "max_seqlen_k": 40}
    return (q, k, v), options


def of_pairs(target):
    """What rows and keys have of their own, and positions of keys, beside the options of `prefill`."""
    return {
        "bias": target.randn(1, 4, 1, 40), "mask": target.randn(2, 1, 17, 40) < 1.0, "dropout_p": 0.25,
        "dropout_seed": torch.tensor([3, 5], device=target.device), "head_start": 2, "sequence_start": 1,
        "key_starts": target.int32([4, 9]),
    }  # fmt: skip


KINDS = ["padded", "packed", "pairs"]
OPERATORS = {
    "forward": ["fmha", "fmha_torch", "fmha_with_grad", "fmha_with_grad_torch"],
    "backward": ["fmha_backward", "fmha_backward_torch"],
    "cache": ["fmha_kvcache", "fmha_kvcache_torch", "fmha_kvcache_append", "fmha_kvcache_append_torch"],
    "out": ["fmha_out", "fmha_out_torch", "fmha_kvcache_out", "fmha_kvcache_out_torch", "fmha_kvcache_append_out",
            "fmha_kvcache_append_out_torch"],
    "mask": ["pack_mask"],
}  # fmt: skip


def test_every_operator_is_checked():
    """Those of checks and explanations below, too; what tells tests of kernels has no tensors."""
    registered = {name.removeprefix("cutlass_ext::") for name in torch._C._dispatch_get_all_op_names()
                  if name.startswith("cutlass_ext::")}  # fmt: skip
    checked = {name for names in OPERATORS.values() for name in names}
    checked |= {f"{name}_{of}" for name in CHECKED for of in ("check", "explain")}
    assert registered == checked | {"kernels_taking"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATORS["forward"])
def test_opcheck_forward(target_fp32, name, kind):
    tensors, options = prefill(target_fp32, kind == "packed")
    options |= of_pairs(target_fp32) if kind == "pairs" else {}
    if "with_grad" in name:
        tensors = tuple(x.requires_grad_() for x in tensors)
        for of in ("sink", "bias"):
            if of in options:
                options[of].requires_grad_()
    torch.library.opcheck(getattr(ops, name).default, tensors, options | {"backend": "auto"})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fmha_out", "fmha_out_torch"])
def test_opcheck_out(target_fp32, name, kind):
    tensors, options = prefill(target_fp32, kind == "packed")
    options |= of_pairs(target_fp32) if kind == "pairs" else {}
    out = tensors[0].new_empty(*tensors[0].shape[:-1], 16)
    torch.library.opcheck(getattr(ops, name).default, (*tensors, out), options | {"backend": "auto"})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATORS["backward"])
def test_opcheck_backward(target_fp32, name, kind):
    (q, k, v), options = prefill(target_fp32, kind == "packed")
    options |= of_pairs(target_fp32) if kind == "pairs" else {}
    out, lse = ops.fmha(q, k, v, **options)
    options |= {"return_lse": False, "deterministic": True, "bias_grad": kind == "pairs"}
    torch.library.opcheck(getattr(ops, name).default, (torch.randn_like(out), q, k, v, out, lse), options)


@pytest.mark.gpu
@NOT_HOPPER
@pytest.mark.parametrize("options", [{"precision": "high"}, {}], ids=str)
def test_opcheck_of_tensor_cores(options):
    """float32 in two parts, and Hopper's kernels of 16 bits, here without gradients, whose sums are in any order."""
    dtype = torch.float32 if "precision" in options else torch.bfloat16
    q, k, v = (torch.randn(2, 70, 4, 64, device="cuda", dtype=dtype) for _ in "qkv")
    torch.library.opcheck(ops.fmha.default, (q, k, v), {"causal": True, "return_lse": True} | options)


@pytest.mark.gpu
def test_opcheck_pack_mask():
    for shape in ((1, 1, 17, 40), (2, 3, 130, 200)):
        torch.library.opcheck(ops.pack_mask.default, (torch.randn(shape, device="cuda") < 0.0,))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", [*OPERATORS["cache"], *(name for name in OPERATORS["out"] if "cache" in name)])
def test_opcheck_cache(target_fp32, name, paged):
    q, k, v = target_fp32.qkv(2, 3, 4, 32, n_kv=40, heads_kv=2)
    options = {"cache_seqlens": target_fp32.int32([30, 7]), "causal": True, "start_pos": None, "return_lse": True}
    new = (k[:, :3].clone(), v[:, :3].clone()) if "append" in name else (None, None)
    if paged:
        k, v = (x.reshape(5, 16, 2, 32) for x in (k, v))
        options["block_table"] = target_fp32.int32([[3, 0], [1, 4]])
        if "append" in name:
            options |= {name: target_fp32.randn(50, 8) for name in ("rotary_cos", "rotary_sin")}
    out = (torch.empty_like(q),) if name in OPERATORS["out"] else ()
    torch.library.opcheck(getattr(ops, name).default, (q, k, v, *out, *new), options)


CHECKED = ["fmha", "fmha_out", "fmha_backward", "fmha_kvcache", "fmha_kvcache_out"]


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck_checks_and_explanations(target_fp32, name):
    (q, k, v), _ = prefill(target_fp32, False)
    of_rows, dout = q.new_zeros(2, 4, 17), v.new_zeros(2, 17, 4, 16)
    tensors = {
        "fmha": (q, k, v), "fmha_out": (q, k, v, dout), "fmha_backward": (dout, q, k, v, None, of_rows, of_rows),
        "fmha_kvcache": (q, k, v, None, None), "fmha_kvcache_out": (q, k, v, dout, None, None),
    }[name]  # fmt: skip
    schema_and_more = ("test_schema", "test_autograd_registration")
    for of in ("check", "explain"):
        torch.library.opcheck(getattr(ops, f"{name}_{of}").default, tensors, test_utils=schema_and_more)


# ------------------------------------------------------------------------------------------------ autocast
@pytest.fixture(params=targets(("cpu", "auto"), ("cuda", "auto")))
def on(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(on, dtype):
    """q, k and v are cast, whatever they are, but for float64; gradients have their leaves' dtype."""
    q, k, v = on.qkv(2, 70, 4, 32)
    low, sink = [x.to(dtype) for x in (q, k, v)], on.vector(4)
    want = cutlass_ext.fmha(*low, causal=True, sink=sink)
    leaves = [q.clone().requires_grad_(), k.to(torch.bfloat16), v.to(torch.float16)]
    with torch.autocast(on.device, dtype):
        assert torch.equal(cutlass_ext.fmha(q, k, v, causal=True, sink=sink), want)
        assert cutlass_ext.fmha(q, k, v, backend="torch").dtype == dtype
        mixed = cutlass_ext.fmha(*leaves)
        same = cutlass_ext.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        if on.cuda:
            assert cutlass_ext.explain(q, k, v).backend != "simt"
        with torch.autocast(on.device, enabled=False):
            assert cutlass_ext.fmha(q, k, v).dtype == torch.float32
        for out in (torch.empty_like(q), torch.empty_like(q, dtype=dtype)):
            assert torch.equal(cutlass_ext.fmha(q, k, v, causal=True, sink=sink, out=out), want.to(out.dtype))
    assert mixed.dtype == same.dtype == dtype
    (dq,) = torch.autograd.grad(mixed.float().sum(), leaves[:1])
    assert dq.dtype == torch.float32 and dq.any()

    def loss(q):
        with torch.autocast(on.device, dtype):
            return cutlass_ext.fmha(q, *leaves[1:]).float().sum()

    assert torch.equal(torch.func.grad(loss)(q), dq)
    if not on.cuda:
        with torch.autocast(on.device, dtype):
            assert cutlass_ext.fmha(q.double(), k.double(), v.double()).dtype == torch.float64


@pytest.mark.timeout(300)
def test_autocast_compiled(on):
    q, k, v = on.qkv(2, 70, 4, 32)
    torch._dynamo.reset()

    def call(q, k, v):
        with torch.autocast(on.device, torch.bfloat16):
            return cutlass_ext.fmha(q * 2, k, v, causal=True)

    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v), call(q, k, v))


# ------------------------------------------------------------------------------------------------ vmap
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, None), (0, 2, None)], ids=str)
def test_vmap(on, in_dims, backend):
    """As a loop; in one call where only the batch grows."""
    tensors = [torch.stack(parts) for parts in zip(*(on.qkv(2, 17, 4, 32, n_kv=30) for _ in range(3)), strict=True)]
    tensors = [x[0] if d is None else x.movedim(0, d) for x, d in zip(tensors, in_dims, strict=True)]
    options = {
        "causal": True,
        "seqused_k": on.int32([30, 9]),
        "sink": on.vector(4),
        "return_lse": True,
        "backend": backend,
    }

    def call(q, k, v):
        return cutlass_ext.fmha(q, k, v, **options)

    got = torch.vmap(call, in_dims)(*tensors)
    for i in range(3):
        parts = [x if d is None else x.select(d, i) for x, d in zip(tensors, in_dims, strict=True)]
        for a, b in zip(got, call(*parts), strict=True):
            torch.testing.assert_close(a[i], b, atol=1e-6, rtol=1e-6)


def test_vmap_of_a_batch_of_one(on):
    """What is merged then is a view, of strides 0 where it is the same for all, which no kernel reads."""
    q, k, v = on.qkv(1, 5, 4, 8)
    many, length = on.randn(3, 1, 5, 4, 8), on.int32([3])
    for options in ({"seqused_k": length}, {"start_pos": length, "causal": True}):
        call = functools.partial(cutlass_ext.fmha, k=k, v=v, backend=on.backend, **options)
        assert_equal(torch.vmap(call)(many), torch.stack([call(x) for x in many]))
    jacobian = torch.func.jacrev(lambda x: cutlass_ext.fmha(x, k, v, backend=on.backend))(q)
    rows = [torch.zeros_like(q) for _ in range(3)]
    for n, row in enumerate(rows):
        row[0, n, n, n] = 1
        leaf = q.clone().requires_grad_()
        (want,) = torch.autograd.grad(cutlass_ext.fmha(leaf, k, v, backend=on.backend), leaf, row)
        torch.testing.assert_close(jacobian[0, n, n, n], want)
    out, lse = cutlass_ext.fmha(q, k, v, return_lse=True, backend=on.backend)
    one = functools.partial(cutlass_ext.fmha_backward, backend=on.backend)
    got = torch.vmap(lambda dout, lse: one(dout, q, k, v, out, lse)[0], (0, None))(many, lse)
    assert_equal(got, torch.stack([one(dout, q, k, v, out, lse)[0] for dout in many]))
    got = torch.vmap(lambda x: one(many[0], x, k, v, out, lse)[0])(many)
    assert_equal(got, torch.stack([one(many[0], x, k, v, out, lse)[0] for x in many]))


def test_vmap_takes_one_call(on):
    """Where it can: what would be a loop is a batch."""
    q, k, v = (x.unflatten(0, (3, 2)) for x in on.qkv(6, 17, 4, 32))
    with FlopCounterMode(display=False) as one:
        torch.vmap(cutlass_ext.fmha)(q, k, v)
    with torch.profiler.profile() as profile:
        torch.vmap(cutlass_ext.fmha)(q, k, v)
    assert sum(event.name == "cutlass_ext::fmha" for event in profile.events()) <= 2  # itself, and below vmap
    assert one.get_total_flops() == 4 * 6 * 4 * 17 * 17 * 32


@pytest.mark.parametrize("each", ["sink", "packed", "slopes"])
def test_vmap_of_what_is_no_batch(on, each):
    """A sink of each element, packed sequences, slopes."""
    q, k, v = (x.unflatten(0, (3, 2)) for x in on.qkv(6, 17, 4, 32))
    extra, name = on.vector(3, 4), "sink"
    options = {}
    if each == "packed":
        q, k, v, ends = *(x.flatten(1, 2) for x in (q, k, v)), on.int32([0, 20, 34])
        options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 20, "max_seqlen_k": 20}
    elif each == "slopes":
        extra, name = on.vector(3, 2, 4), "alibi_slopes"
    call = lambda q, k, v, x: cutlass_ext.fmha(q, k, v, **options, **{name: x})  # noqa: E731
    got = torch.vmap(call)(q, k, v, extra)
    for i in range(3):
        torch.testing.assert_close(got[i], call(q[i], k[i], v[i], extra[i]), atol=1e-6, rtol=1e-6)


def test_vmap_of_a_cache(on):
    """Reading it is a loop; what is written to is refused."""
    q, keys, values = on.qkv(2, 1, 4, 32, n_kv=40)
    queries, lengths = torch.stack([q, 2 * q, -q]), on.int32([40, 9])

    def call(q, **options):
        return cutlass_ext.flash_attn_with_kvcache(q, keys, values, cache_seqlens=lengths, **options)

    torch.testing.assert_close(torch.vmap(call)(queries), torch.stack([call(x) for x in queries]))
    with pytest.raises(NotImplementedError, match="k_cache: is written to"):
        torch.vmap(lambda q: call(q, k=q, v=q))(queries)
    with pytest.raises(NotImplementedError, match="out: is written to"):
        torch.vmap(lambda q: cutlass_ext.fmha(q, keys, values, out=torch.empty_like(q)))(queries)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_vmap_of_what_requires_grad_outside(on, backend):
    """A tensor of vmap says that it requires no grad, whatever the one outside says; gradients are those of a loop."""
    q, k, v = on.qkv(6, 17, 4, 32)
    many, w = q.unflatten(0, (3, 2)), on.randn(32, 32)
    call = lambda q: cutlass_ext.fmha(q, k[:2], v[:2], causal=True, backend=backend, deterministic=True)  # noqa: E731
    results = []
    for each in (lambda f, x: torch.vmap(f)(x), lambda f, x: torch.stack([f(x[i]) for i in range(3)])):
        leaves = many.clone().requires_grad_(), w.clone().requires_grad_()
        out = each(lambda q, w=leaves[1]: call(q @ w), leaves[0])
        results.append(torch.autograd.grad(out.square().sum(), leaves))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)  # of w sums in another order


def test_vmap_refuses_what_has_no_gradient_outside(on):
    q, k, v = on.qkv(2, 1, 4, 32, n_kv=40)
    queries, slopes = torch.stack([q, -q]), on.vector(4).requires_grad_()
    with pytest.raises(NotImplementedError, match="alibi_slopes: requires grad"):
        torch.vmap(lambda q: cutlass_ext.fmha(q, k, v, alibi_slopes=slopes))(queries)
    queries.requires_grad_()
    with pytest.raises(NotImplementedError, match="q: requires grad, and there is no backward pass of a cache"):
        torch.vmap(lambda q: cutlass_ext.flash_attn_with_kvcache(q, k, v))(queries)
    with torch.no_grad():
        assert torch.vmap(lambda q: cutlass_ext.flash_attn_with_kvcache(q, k, v))(queries).shape == queries.shape


FORWARD_MODE = {
    "jvp": lambda f, q, t: torch.func.jvp(f, (q,), (t,)),
    "jacfwd": lambda f, q, t: torch.func.jacfwd(lambda x: f(x).sum())(q),
    "hessian": lambda f, q, t: torch.func.hessian(lambda x: f(x).sum())(q),
}


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("mode", FORWARD_MODE)
def test_forward_mode_is_refused(on, mode, backend):
    """Tangents of 0 would be wrong; what has none is computed."""
    q, k, v = on.qkv(1, 5, 2, 32)
    with pytest.raises(NotImplementedError, match="forward mode"):
        FORWARD_MODE[mode](lambda x: cutlass_ext.fmha(x, k, v, backend=backend), q, torch.ones_like(q))
    with pytest.raises(NotImplementedError, match="query: has a tangent"):
        torch.func.jvp(lambda x: cutlass_ext.scaled_dot_product_attention(x, k, v), (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(k, k)
        with pytest.raises(NotImplementedError, match="k_cache: has a tangent"):
            cutlass_ext.flash_attn_with_kvcache(q, dual, v)
    known = cutlass_ext.fmha(q, k, v, backend=backend)
    _, tangent = torch.func.jvp(lambda x: x * cutlass_ext.fmha(q, k, v, backend=backend), (q,), (torch.ones_like(q),))
    torch.testing.assert_close(tangent, known)


@pytest.mark.parametrize("with_sink", [False, True])
def test_gradients_of_each_sample(on, with_sink):
    q, k, v = (x.unflatten(0, (3, 2)) for x in on.qkv(6, 17, 4, 32))
    sink = on.vector(4) if with_sink else None

    def loss(q, k, v):
        return cutlass_ext.fmha(q, k, v, causal=True, sink=sink, deterministic=True).square().sum()

    got = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(q, k, v)
    for i in range(3):
        leaves = [x[i].clone().requires_grad_() for x in (q, k, v)]
        for a, b in zip(got, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(a[i], b, atol=1e-6, rtol=1e-5)


# ------------------------------------------------------------------------------------------------ flops
def counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_flops(on):
    """PyTorch's count of the same attention, masks not taken off; backwards with S computed again."""
    q, k, v = (x.requires_grad_() for x in on.qkv(2, 17, 4, 32, n_kv=30, heads_kv=2, d_v=16))
    pairs = 2 * 4 * 17 * 30
    assert counted(lambda: cutlass_ext.fmha(q, k, v, causal=True)) == 2 * pairs * (32 + 16)
    assert counted(lambda: cutlass_ext.fmha(q.detach(), k.detach(), v.detach(), backend="torch")) == 2 * pairs * (
        32 + 16
    )
    both = counted(lambda: cutlass_ext.fmha(q, k, v).sum().backward())
    assert both == 2 * pairs * (32 + 16) + 2 * pairs * (3 * 32 + 2 * 16)
    with torch.device("meta"):
        meta = [torch.empty(x.shape) for x in (q, k, v)]
    assert counted(lambda: ops.fmha(*meta)) == 2 * pairs * (32 + 16)


def test_operators_that_autocast_does_not_know(on):
    """Gradients and caches are computed in the dtype that they have, by PyTorch's operators too."""
    q, k, v = (x.requires_grad_() for x in on.qkv(2, 33, 4, 16, heads_kv=2))
    lengths = torch.tensor([20, 33], dtype=torch.int32, device=q.device)
    out, lse = cutlass_ext.fmha(q, k, v, softcap=5.0, return_lse=True)
    dout = torch.randn_like(out)
    detached = dout, q.detach(), k.detach(), v.detach(), out.detach(), lse.detach()
    calls = (
        lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
        lambda: cutlass_ext.fmha_backward(*detached, softcap=5.0, backend="torch")[:3],
        lambda: [cutlass_ext.flash_attn_with_kvcache(q.detach()[:, :1], *detached[2:4], cache_seqlens=lengths)],
    )
    for call in calls:
        plain = call()
        with torch.autocast(q.device.type, torch.bfloat16):
            under = call()
        for a, b in zip(under, plain, strict=True):
            assert a.dtype == q.dtype
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_compiled_autograd_of_an_eager_call(on):
    tensors = on.qkv(2, 6, 4, 16, heads_kv=2)
    grads = []
    for compiled in (False, True):
        x = [t.detach().clone().requires_grad_() for t in tensors]
        loss = cutlass_ext.fmha(*x, causal=True).square().sum()
        if compiled:
            with torch._dynamo.compiled_autograd._enable(lambda gm: torch.compile(gm, backend="aot_eager")):
                loss.backward()
        else:
            loss.backward()
        grads.append([t.grad for t in x])
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "name", ["q", "k", "v", "sink", "bias", "mask", "seqused_k", "start_pos", "dropout_seed", "out"]
)
def test_meta_beside_another_device(on, name, requires_grad):
    """Such a call goes where shapes are worked out alone, and would return memory that nobody wrote."""
    q, k, v = on.qkv(2, 6, 4, 16)
    options = {
        "sink": torch.zeros(4),
        "bias": torch.zeros(1, 4, 6, 6),
        "mask": torch.ones(1, 1, 6, 6, dtype=torch.bool),
        "seqused_k": torch.ones(2, dtype=torch.int32),
        "start_pos": torch.ones(2, dtype=torch.int32),
        "dropout_seed": torch.ones(2, dtype=torch.int64),
        "out": torch.empty(2, 6, 4, 16),
    }
    call = {"q": q, "k": k, "v": v}
    call["v"].requires_grad_(requires_grad and name != "out")
    call[name] = call.get(name, options.get(name)).to("meta")
    if name == "dropout_seed":
        call["dropout_p"] = 0.1
    named = "k" if name == "q" else name  # which is then the first that is elsewhere
    with pytest.raises(ValueError, match=f"^{named}: is on another device than q; move it there"):
        cutlass_ext.fmha(**call)


def test_flops_like_pytorchs(on):
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in on.qkv(2, 64, 4, 32))
    calls = torch.nn.functional.scaled_dot_product_attention, cutlass_ext.scaled_dot_product_attention
    if not on.cuda:  # of a CPU's own operator PyTorch has no formula
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            want, got = (counted(lambda call=call: call(q, k, v)) for call in calls)
    else:
        want, got = (counted(lambda call=call: call(q, k, v).sum().backward()) for call in calls)
    assert got == want


def test_flops_of_packed_sequences_and_caches(on):
    q, k, v = on.qkv(1, 34, 4, 32, heads_kv=2)
    ends = on.int32([0, 20, 34])
    packed = [x[0] for x in (q, k, v)]
    pairs = 4 * (20 * 20 + 14 * 14)
    assert counted(lambda: cutlass_ext.flash_attn_varlen_func(*packed, ends, ends, 20, 20)) == 2 * pairs * 64
    with torch._subclasses.FakeTensorMode() as fake:
        packed, ends = [fake.from_tensor(x) for x in packed], fake.from_tensor(ends)
        assert counted(lambda: cutlass_ext.flash_attn_varlen_func(*packed, ends, ends, 20, 20)) == 2 * 4 * 2 * 400 * 64
    q, k, v = on.qkv(2, 1, 4, 32, n_kv=64, heads_kv=2)
    lengths = on.int32([3, 60])
    call = lambda *kv, **more: cutlass_ext.flash_attn_with_kvcache(q, *kv, cache_seqlens=lengths, **more)  # noqa: E731
    assert counted(lambda: call(k, v)) == 2 * (2 * 4 * 64) * 64
    pages = [x.unflatten(1, (4, 16)).flatten(0, 1) for x in (k, v)]
    table = on.int32([[0, 1, 2], [4, 5, 6]])
    assert counted(lambda: call(*pages, block_table=table)) == 2 * (2 * 4 * 48) * 64


# ------------------------------------------------------------------------------------------------ compile, export
@pytest.mark.timeout(300)
def test_a_training_step_of_any_sizes_compiles_once(on):
    """Forward and backward, batch and lengths that change: no graph break, one compilation."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def loss(q, k, v):
        return cutlass_ext.fmha(q, k, v, causal=True, deterministic=True).square().sum()

    fast = torch.compile(loss, backend=counter, fullgraph=True, dynamic=True)
    compilations = []
    for batch, n in ((3, 17), (2, 40), (5, 64), (2, 129)):
        leaves = [x.requires_grad_() for x in on.qkv(batch, n, 4, 32, heads_kv=2)]
        assert_equal(torch.autograd.grad(fast(*leaves), leaves), torch.autograd.grad(loss(*leaves), leaves))
        compilations.append(counter.frame_count)
    assert len(set(compilations)) == 1


@pytest.mark.timeout(300)
def test_packed_lengths_do_not_recompile(on):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(q, k, v, ends, longest):
        return cutlass_ext.flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=True)

    fast = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    compilations = []
    for lengths in ((5, 12), (20, 3, 9), (40, 41)):
        tensors = [x[0] for x in on.qkv(1, sum(lengths), 4, 32)]
        ends = torch.nn.functional.pad(on.int32(lengths).cumsum(0, dtype=torch.int32), (1, 0))
        assert torch.equal(fast(*tensors, ends, max(lengths)), call(*tensors, ends, max(lengths)))
        compilations.append(counter.frame_count)
    assert len(set(compilations)) == 1


class Layer(torch.nn.Module):
    """Attention between two projections."""

    def __init__(self):
        super().__init__()
        self.into, self.out = torch.nn.Linear(64, 3 * 64), torch.nn.Linear(64, 64)

    def forward(self, x):
        qkv = self.into(x).unflatten(-1, (3, 4, 16))
        return self.out(cutlass_ext.flash_attn_qkvpacked_func(qkv, causal=True).flatten(2))


@pytest.fixture
def exported(on):
    """A layer exported for batches and lengths of any size, and the layer."""
    layer = Layer().to(on.device).eval()
    sizes = {"x": {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("rows", max=1024)}}
    with torch.no_grad():
        return torch.export.export(layer, (on.randn(3, 17, 64),), dynamic_shapes=sizes), layer


@pytest.mark.timeout(300)
def test_export_of_any_sizes(on, exported, tmp_path):
    """Saved, and loaded again."""
    program, layer = exported
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for batch, n in ((3, 17), (2, 40), (5, 100)):
        x = on.randn(batch, n, 64)
        with torch.no_grad():
            assert torch.equal(loaded(x), layer(x))


PACKAGE_OF_PYTORCH = """
import sys, torch
device, path = sys.argv[1:]
layer = torch.nn.Linear(8, 8).to(device)
program = torch.export.export(layer, (torch.randn(2, 8, device=device),))
torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=path))
"""


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
def test_aot_inductor_package(on, exported, tmp_path):
    """The operator stands in a compiled package, which runs where cutlass_ext is imported. On an H200 machine with
    torch 2.11.0+cu130 a process that loads any package, one of PyTorch's Linear too, ends with signal 11."""
    command = [sys.executable, "-c", PACKAGE_OF_PYTORCH, str(on.device), str(tmp_path / "plain.pt2")]
    if (code := subprocess.run(command, capture_output=True).returncode) < 0:
        pytest.skip(f"loading a package of PyTorch's own layer ends the process with signal {-code} here")
    program, layer = exported
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    loaded = torch._inductor.aoti_load_package(path)
    for batch, n in ((3, 17), (2, 40)):
        x = on.randn(batch, n, 64)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), layer(x), atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------ DTensor
def sharded(rank, path, check):
    """One of two processes; `check` gets a mesh of both."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    try:
        from cutlass_ext.adapters import dtensor

        for _ in range(2):
            dtensor.register()
        torch.manual_seed(0)
        check(torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    finally:
        torch.distributed.destroy_process_group()
    # DTensor keeps the mesh, and with it gloo's threads. Where one of them lets go of a tensor while Python ends, the
    # process aborts ("terminate called without an active exception"; pytorch/pytorch#179291).
    os._exit(0)


def check_dense(mesh):
    """By heads and by sequences nothing is communicated but the sink's gradient; results are those of one device."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    shapes = (2, 7, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16), (4,)
    used, slopes, dout = torch.tensor([9, 4], dtype=torch.int32), torch.rand(4), torch.randn(2, 7, 4, 16)
    for rows, of_heads, of_sequences in (
        (Shard(2), Shard(0), Replicate()),
        (Shard(0), Replicate(), Shard(0)),
        (Replicate(), Replicate(), Replicate()),
    ):
        leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
        cut = [distribute_tensor(x.detach(), mesh, [rows]) for x in leaves[:3]]
        cut.append(distribute_tensor(leaves[3].detach(), mesh, [of_heads]))
        cut = [x.requires_grad_() for x in cut]
        options = {"seqused_k": used, "alibi_slopes": slopes, "key_start": torch.tensor([1, 3], dtype=torch.int32)}
        places = {"seqused_k": of_sequences, "alibi_slopes": of_heads, "key_start": of_sequences}
        cut_options = {name: distribute_tensor(x, mesh, [places[name]]) for name, x in options.items()}
        plain = cutlass_ext.fmha(*cut[:3], sink=cut[3], **cut_options)  # whose lse is empty, and remembered so
        out, lse = cutlass_ext.fmha(*cut[:3], sink=cut[3], return_lse=True, **cut_options)
        assert out.placements == plain.placements == (rows,)
        gradients = torch.autograd.grad(out, cut, distribute_tensor(dout, mesh, [rows]))
        assert [x.placements[0] for x in gradients[:3]] == [rows] * 3
        assert gradients[3].placements[0] == (Partial() if rows == Shard(0) else of_heads)
        want, want_lse = cutlass_ext.fmha(*leaves[:3], sink=leaves[3], return_lse=True, **options)
        want_gradients = torch.autograd.grad(want, leaves, dout)
        for a, b in zip((out, plain, lse, *gradients), (want, want, want_lse, *want_gradients), strict=True):
            torch.testing.assert_close(a.full_tensor(), b)


def check_packed_and_uneven(mesh):
    """Packed sequences by heads; three KV heads on two devices, and rows cut up, are redistributed first."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    q, k, v = torch.randn(16, 4, 16), torch.randn(16, 2, 16), torch.randn(16, 2, 16)
    ends = torch.tensor([0, 7, 16], dtype=torch.int32)
    everywhere = distribute_tensor(ends, mesh, [Replicate()])
    cut = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)]
    got = cutlass_ext.flash_attn_varlen_func(*cut, everywhere, everywhere, 9, 9, causal=True, return_softmax_lse=True)
    want = cutlass_ext.flash_attn_varlen_func(q, k, v, ends, ends, 9, 9, causal=True, return_softmax_lse=True)
    assert [x.placements[0] for x in got] == [Shard(1), Shard(0)]
    for heads, dim in ((3, 2), (4, 1)):
        tensors = [torch.randn(3, 8, heads, 16) for _ in "qkv"]
        got += (cutlass_ext.fmha(*(distribute_tensor(x, mesh, [Shard(dim)]) for x in tensors)),)
        want += (cutlass_ext.fmha(*tensors),)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.full_tensor(), b)


@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.distributed.is_available(), reason="a PyTorch without torch.distributed")
@pytest.mark.parametrize("check", [check_dense, check_packed_and_uneven])
def test_dtensor(check, tmp_path):
    torch.multiprocessing.spawn(sharded, (str(tmp_path / "store"), check), nprocs=2)
