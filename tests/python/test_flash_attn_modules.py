"""`adapters.flash_attn.install`: the modules that other packages import, under their names, with their arguments."""

import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys

import pytest
import torch
from oracle import expect, expect_gradients, expect_packed, rotate

import cutlass_ext
from cutlass_ext.adapters import flash_attn as adapter

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) for name in ("flash_attn", "flash_attn_interface")),
    reason="the real package is installed",
)


@pytest.fixture
def installed():
    adapter.install()
    yield
    adapter.uninstall()


def test_imports_of_all_kinds(installed):
    import flash_attn
    import flash_attn.layers.rotary
    from flash_attn import flash_attn_func, flash_attn_with_kvcache  # noqa: F401
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input  # noqa: F401
    from flash_attn.flash_attn_interface import (  # noqa: F401
        _flash_attn_forward,
        _wrapped_flash_attn_backward,
        flash_attn_varlen_qkvpacked_func,
    )
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb  # noqa: F401
    from flash_attn_interface import flash_attn_varlen_func  # noqa: F401

    assert flash_attn_func is cutlass_ext.flash_attn_func
    assert flash_attn.layers.rotary.apply_rotary_emb is apply_rotary_emb
    assert (
        flash_attn.__version__ == importlib.metadata.version("flash-attn") == importlib.metadata.version("flash_attn")
    )
    assert importlib.util.find_spec("flash_attn") is not None
    assert "flash_attn" not in importlib.metadata.packages_distributions()
    with pytest.raises(ImportError):
        import flash_attn.ops.rms_norm


def test_splits_are_combined(installed):
    """Partial results of halves of the keys, in FlashAttention-3's shapes, are those of all keys."""
    from flash_attn_interface import flash_attn_combine, get_scheduler_metadata

    q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 12, 4, 16), torch.randn(2, 12, 4, 16)
    want, want_lse = cutlass_ext.fmha(q, k, v, return_lse=True)
    halves = [cutlass_ext.fmha(q, k[:, of], v[:, of], return_lse=True) for of in (slice(0, 5), slice(5, 12))]
    outs, lses = (torch.stack(parts) for parts in zip(*halves, strict=True))
    out, lse = flash_attn_combine(outs, lses.transpose(-1, -2))
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse.transpose(-1, -2))
    into = torch.empty_like(want, dtype=torch.bfloat16)
    assert flash_attn_combine(outs, lses.transpose(-1, -2), into)[0] is into
    assert torch.equal(into, out.bfloat16())
    assert flash_attn_combine(outs, lses.transpose(-1, -2), out_dtype=torch.float16)[0].dtype == torch.float16
    with pytest.raises(ValueError, match="lse_partial: has shape"):
        flash_attn_combine(outs, lses)
    with pytest.raises(ValueError, match=r"out: is torch\.float32"):
        flash_attn_combine(outs, lses.transpose(-1, -2), torch.empty(3))
    for name, arguments in (("out_partial", ([1], 2)), ("lse_partial", (outs, 2)), ("out", (outs, lses, 3))):
        with pytest.raises(TypeError, match=f"^{name}: is of type (list|int); expected a tensor$"):
            flash_attn_combine(*arguments)
    assert get_scheduler_metadata(2, 1, 99, 4, 4, 16, torch.tensor([3, 9]), causal=True) is None


def test_nothing_is_left_behind():
    with pytest.raises(ImportError):
        import flash_attn  # noqa: F401
    adapter.install()
    adapter.install()
    adapter.uninstall()
    adapter.uninstall()
    assert not [name for name in sys.modules if name.startswith("flash_attn")]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")


def test_the_real_one_stays_unless_told_otherwise(monkeypatch):
    real, inner = (type(sys)(name) for name in ("flash_attn", "flash_attn.losses"))
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    monkeypatch.setitem(sys.modules, "flash_attn.losses", inner)
    with pytest.raises(RuntimeError, match="flash_attn"):
        adapter.install()
    adapter.install(replace=True)
    assert sys.modules["flash_attn"] is not real and "flash_attn.losses" not in sys.modules
    adapter.uninstall()
    assert sys.modules["flash_attn"] is real and sys.modules["flash_attn.losses"] is inner


DIFFUSERS = """
import torch
import cutlass_ext.adapters.flash_attn
cutlass_ext.adapters.flash_attn.install()
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
q, k, v = (torch.randn(1, 8, 2, 16, dtype=torch.bfloat16) for _ in "qkv")
with attention_backend("flash"):
    got = dispatch_attention_fn(q, k, v)
assert torch.equal(got, cutlass_ext.flash_attn_func(q, k, v))
"""


@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed")
def test_diffusers_finds_it():
    """In a process of its own: what diffusers sees when it is imported it keeps."""
    done = subprocess.run([sys.executable, "-c", DIFFUSERS], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------ FlashAttention-3
def test_flash_attention_3_by_position(target, installed):
    from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

    q, k, v = target.qkv(2, 70, 4, 32, n_kv=90, heads_kv=2)
    more = [None] * 4  # qv and what is of fp8
    out, lse = flash_attn_func(q, k, v, 0.3, True, *more, (20, -1), 0, 5.0, return_attn_probs=True)
    expect(q, k, v, causal=True, start_pos="end", window=(20, -1), softmax_scale=0.3, softcap=5.0).check(out, lse)
    ends = target.int32([0, 30, 140]), target.int32([0, 90, 180])
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    out = flash_attn_varlen_func(*packed, *ends, 110, 90, None, None, 0.3, True)
    names = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    expect_packed(*packed, **names, causal=True, start_pos="end", softmax_scale=0.3).check(out)


def test_flash_attention_3_packed_in_one_tensor(target, installed):
    from flash_attn_interface import flash_attn_qkvpacked_func

    q, k, v = target.qkv(2, 50, 4, 32, heads_kv=2)
    scales = [None] * 3
    qkv = torch.cat([q, k, v], 2).requires_grad_()
    out, lse = flash_attn_qkvpacked_func(qkv, 0.3, True, *scales, (20, -1), num_heads_q=4, return_attn_probs=True)
    options = {"causal": True, "window": (20, -1), "softmax_scale": 0.3}
    expect(q, k, v, **options).check(out, lse)
    out.sum().backward()
    assert qkv.grad.abs().amax((0, 1, 3)).min() > 0
    alike = torch.stack([q[:, :, :2], k, v], 2)
    expect(q[:, :, :2], k, v, **options).check(flash_attn_qkvpacked_func(alike, 0.3, True, *scales, (20, -1)))
    with pytest.raises(ValueError, match="num_heads_q"):
        flash_attn_qkvpacked_func(qkv)


@pytest.mark.parametrize(
    "name,error,qkv,num_heads_q",
    [
        *[("num_heads_q", ValueError, torch.zeros(2, 5, 7, 8), n) for n in (None, -1, 0, 4, 7, 9)],
        ("num_heads_q", ValueError, torch.zeros(2, 5, 8, 8), 8),
        *[("qkv", ValueError, torch.zeros(shape), 2) for shape in ((2, 5, 2, 4, 8), (2, 5, 4, 3, 8), (5, 6, 8))],
        ("qkv", TypeError, [1.0], 2),
    ],
)
def test_heads_of_a_packed_tensor_that_do_not_add_up(installed, name, error, qkv, num_heads_q):
    """None of them is lost without a word."""
    from flash_attn.layers.rotary import apply_rotary_emb_qkv_
    from flash_attn_interface import flash_attn_qkvpacked_func

    with pytest.raises(error, match=f"^{name}: "):
        flash_attn_qkvpacked_func(qkv, num_heads_q=num_heads_q)
    with pytest.raises(error, match=f"^{name}: "):
        apply_rotary_emb_qkv_(qkv, torch.zeros(5, 4), torch.zeros(5, 4), num_heads_q=num_heads_q)


def test_errors_of_a_packed_tensor_name_it(installed):
    from flash_attn_interface import flash_attn_qkvpacked_func

    with pytest.raises(TypeError, match=r"^qkv: has dtype int32"):
        flash_attn_qkvpacked_func(torch.zeros(2, 5, 4, 8, dtype=torch.int32), num_heads_q=2)
    with pytest.raises(TypeError, match=r"^return_attn_probs: "):
        flash_attn_qkvpacked_func(torch.zeros(2, 5, 4, 8), num_heads_q=2, return_attn_probs=1)


def test_flash_attention_3_cache(target, installed):
    from flash_attn_interface import flash_attn_with_kvcache

    q, k, v = target.qkv(2, 3, 4, 32, n_kv=64, heads_kv=2)
    pages = [x.unflatten(1, (4, 16)).flatten(0, 1) for x in (k, v)]
    table, lengths = target.int32([[0, 1, 2, 3], [4, 5, 6, 7]]), target.int32([60, 9])
    out = flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, page_table=table, causal=True)
    expect(q, k, v, causal=True, start_pos="end", seqused_k=lengths).check(out, small=True)


@pytest.mark.parametrize("name", adapter._ORDERS)
def test_flash_attention_3_refuses_by_name(installed, name):
    import flash_attn_interface

    function = getattr(flash_attn_interface, name)
    assert {"window_size", "softcap", "s_aux", "num_splits"} <= set(inspect.signature(function).parameters)
    q = torch.zeros(2, 6, 4, 16)
    ends, tensors = torch.zeros(3, dtype=torch.int32), {}
    if "varlen" in name:
        tensors = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 1, "max_seqlen_k": 1}
    names = ("q", "k_cache", "v_cache") if "cache" in name else ("q", "k", "v")
    with pytest.raises(NotImplementedError, match="qv"):
        function(**dict.fromkeys(names, q), **tensors, qv=q)
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'nonsense'$"):
        function(**dict.fromkeys(names, q), **tensors, nonsense=1)
    with pytest.raises(TypeError, match=rf"^{name}\(\) missing a required argument: '{names[1]}'$"):
        function(q)


# ------------------------------------------------------------------------------------------------ single passes
@pytest.mark.parametrize("packed", [False, True])
def test_passes_one_by_one(target, installed, packed):
    from flash_attn import flash_attn_interface as passes

    q, k, v = target.qkv(1, 70, 4, 32, n_kv=90, heads_kv=2)
    options = {"causal": True, "start_pos": "end", "window": (30, 0), "softcap": 5.0, "softmax_scale": 0.3}
    arguments, dout = (0.0, 0.3, True, 30, 0, 5.0, None), torch.randn_like(q)
    want, gradients = expect(q, k, v, **options), expect_gradients(q, k, v, dout, **options)
    place, into = [], [torch.full_like(x, float("nan")) for x in (q, k, v)]
    suffix, tensors = "", (q, k, v)
    if packed:
        place, suffix, tensors = [target.int32([0, 70]), target.int32([0, 90]), 70, 90], "_varlen", (q[0], k[0], v[0])
    forward, backward = (getattr(passes, f"_flash_attn{suffix}_{of}") for of in ("forward", "backward"))
    out, lse, _, rng_state = forward(*tensors, *place, *arguments)
    want.check(out[None] if packed else out, lse[None] if packed else lse)
    results = [x[0] for x in into] if packed else into
    dout = dout[0] if packed else dout
    delta = backward(dout, *tensors, out, lse, *results, *place, *arguments, True, rng_state)
    gradients.check(into)
    assert delta.shape == lse.shape and delta.dtype == torch.float32
    with pytest.raises(NotImplementedError, match="dropout_p"):
        forward(*tensors, *place, 0.1, *arguments[1:])
    with pytest.raises(ValueError, match=r"^softmax_scale: is 0"):  # which is not to say the default
        forward(*tensors, *place, 0.0, 0.0, *arguments[2:])
    with pytest.raises(ValueError, match=r"^softmax_scale: is 0"):
        backward(dout, *tensors, out, lse, *results, *place, 0.0, 0.0, *arguments[2:], True, rng_state)


# ------------------------------------------------------------------------------------------------ habits
@pytest.mark.parametrize("d,d_v", [(30, 30), (32, 20), (17, 32)])
def test_any_head_dim(target, d, d_v):
    """Padded, here alone; the scale is that of the head dim that was given."""
    q, k, v = (x.requires_grad_() for x in target.qkv(2, 40, 4, d, n_kv=50, heads_kv=2, d_v=d_v))
    dout = target.randn(2, 40, 4, d_v)
    out, lse = cutlass_ext.flash_attn_func(q, k, v, causal=True, return_softmax_lse=True)
    options = {"causal": True, "start_pos": "end"}
    tensors = [x.detach() for x in (q, k, v)]
    expect(*tensors, **options).check(out.detach(), lse.detach())
    expect_gradients(*tensors, dout, **options).check(torch.autograd.grad(out, (q, k, v), dout))
    with pytest.raises(ValueError, match="head_dim"):
        cutlass_ext.fmha(*target.qkv(2, 40, 4, 30))


def test_a_last_dimension_that_is_not_contiguous_is_copied(target):
    q, k, v = (x.mT.contiguous().mT for x in target.qkv(2, 40, 4, 32))
    assert q.stride(-1) != 1
    expect(q, k, v, start_pos="end").check(cutlass_ext.flash_attn_func(q, k, v))
    ends = target.int32([0, 40, 80])
    packed = [x.flatten(0, 1).mT.contiguous().mT for x in (q, k, v)]
    out = cutlass_ext.flash_attn_varlen_func(*packed, ends, ends, 40, 40)
    expect_packed(*packed, cu_seqlens_q=ends, cu_seqlens_k=ends, start_pos="end").check(out)


def test_head_dims_that_differ_are_refused_though_padding_would_make_them_equal():
    with pytest.raises(ValueError, match="head_dim"):
        cutlass_ext.flash_attn_func(torch.zeros(1, 5, 2, 30), torch.zeros(1, 5, 2, 32), torch.zeros(1, 5, 2, 32))


# ------------------------------------------------------------------------------------------------ bert_padding
def test_unpad_and_pad(target, installed):
    from flash_attn.bert_padding import pad_input, unpad_input

    x = target.randn(3, 7, 4, 8).requires_grad_()
    mask = torch.arange(7, device=x.device) < target.int32([5, 0, 7])[:, None]
    rows, indices, ends, longest, used = unpad_input(x, mask)
    assert torch.equal(rows, x[mask]) and ends.tolist() == [0, 5, 5, 12] and longest == 7 and used.tolist() == [5, 0, 7]
    assert ends.dtype == used.dtype == torch.int32
    back = pad_input(rows, indices, 3, 7)
    assert torch.equal(back, x.masked_fill(~mask[..., None, None], 0.0))
    (dx,) = torch.autograd.grad(back.float().square().sum(), x)
    assert torch.equal(dx, 2 * back.detach())
    also = torch.zeros_like(mask)
    also[1, 0] = True
    rows, _, ends, _, used = unpad_input(x, mask.int(), also.int())
    assert len(rows) == 13 and ends.tolist() == [0, 5, 6, 13] and used.tolist() == [5, 0, 7]


def test_unpad_sequences_in_one_row(target, installed):
    from flash_attn.bert_padding import unpad_input_for_concatenated_sequences

    x = target.randn(2, 6, 8)
    lengths = target.int32([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, ends, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert ends.tolist() == [0, 2, 5, 11] and longest == 6 and indices.tolist() == [*range(5), *range(6, 12)]
    assert torch.equal(rows, torch.cat([x[0, :5], x[1]]))


# ------------------------------------------------------------------------------------------------ layers.rotary
def tables(target, positions, half):
    angles = torch.randn(positions, half, device=target.device)
    return angles.cos().to(target.dtype), angles.sin().to(target.dtype)


def assert_close(got, want):
    torch.testing.assert_close(got, want, atol=2 * torch.finfo(got.dtype).eps * 4, rtol=4 * torch.finfo(got.dtype).eps)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_apply_rotary_emb(target, installed, interleaved, packed, per_sequence):
    from flash_attn.layers.rotary import apply_rotary_emb

    cos, sin = tables(target, 40, 6)
    offsets = target.int32([3, 11]) if per_sequence else 5
    starts = offsets.tolist() if per_sequence else [5, 5]
    if packed:
        x, ends = target.randn(19, 4, 16), target.int32([0, 12, 19])
        positions = [*range(starts[0], starts[0] + 12), *range(starts[1], starts[1] + 7)]
        options = {"cu_seqlens": ends, "max_seqlen": 12}
    else:
        x, options = target.randn(2, 12, 4, 16), {}
        positions = [[start + i for i in range(12)] for start in starts]
    got = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets, **options)
    assert_close(got, rotate(x, positions, cos, sin, interleaved))
    same = apply_rotary_emb(x, cos, sin, interleaved, True, offsets, **options)
    assert same is x and torch.equal(x, got)


def test_rotary_gradients(target, installed):
    """A rotation back."""
    from flash_attn.layers.rotary import apply_rotary_emb

    cos, sin = tables(target, 12, 8)
    x, dout = target.randn(2, 12, 4, 16).requires_grad_(), target.randn(2, 12, 4, 16)
    (dx,) = torch.autograd.grad(apply_rotary_emb(x, cos, sin), x, dout)
    assert_close(dx, apply_rotary_emb(dout, cos, -sin))


@pytest.mark.parametrize("grouped", [False, True])
def test_rotary_embedding(target, installed, grouped):
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb

    rotary = RotaryEmbedding(16, device=target.device)
    inverse = 10000.0 ** (-torch.arange(0, 16, 2, device=target.device) / 16)
    angles = (torch.arange(12, device=target.device) + 3)[:, None] * inverse
    cos, sin = angles.cos().to(target.dtype), angles.sin().to(target.dtype)
    qkv = target.randn(2, 12, 8, 16) if grouped else target.randn(2, 12, 3, 4, 16)
    q, k, v = qkv.split([4, 2, 2], 2) if grouped else qkv.unbind(2)
    want = [apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin), v.clone()]
    got = rotary(qkv, seqlen_offset=3, num_heads_q=4 if grouped else None)
    assert got is qkv
    for a, b in zip(got.split([4, 2, 2], 2) if grouped else got.unbind(2), want, strict=True):
        assert_close(a, b)
    q, kv = target.randn(2, 12, 4, 16), target.randn(2, 12, 2, 4, 16)
    want = apply_rotary_emb(q, cos, sin), apply_rotary_emb(kv[:, :, 0], cos, sin)
    got = rotary(q, kv, seqlen_offset=target.int32([3, 3]), max_seqlen=15)
    assert_close(got[0], want[0])
    assert_close(got[1][:, :, 0], want[1])


@pytest.mark.parametrize("grouped", [False, True])
def test_rotary_in_place_of_what_requires_grad(installed, grouped):
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb

    rotary, x = RotaryEmbedding(16), torch.randn(2, 5, 12, 16, requires_grad=True)
    heads = {"num_heads_q": 6} if grouped else {}
    qkv = (x * 1).view(2, 5, 12, 16) if grouped else (x * 1).view(2, 5, 3, 4, 16)
    weights = torch.randn(qkv.shape)
    (got,) = torch.autograd.grad((rotary(qkv, **heads) * weights).sum(), x)
    angles = torch.outer(torch.arange(5.0), rotary.inv_freq)
    rotated = x.detach().requires_grad_()
    turned = apply_rotary_emb(rotated[:, :, : 9 if grouped else 8], angles.cos(), angles.sin())
    want = torch.cat([turned, rotated[:, :, turned.shape[2] :]], 2)
    (want,) = torch.autograd.grad((want * weights.view(want.shape)).sum(), rotated)
    assert_close(got, want)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_by_angles_of_rows(installed, interleaved, each):
    from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_torch

    x, angles = torch.randn(2, 5, 3, 16), torch.randn(5, 4)
    cos, sin = angles.cos(), angles.sin()
    of_rows = [t.expand(2, -1, -1) if each else t for t in (cos, sin)]
    assert_close(apply_rotary_emb_torch(x, *of_rows, interleaved), apply_rotary_emb(x, cos, sin, interleaved))


def test_rows_and_a_residual(installed):
    from flash_attn.bert_padding import index_first_axis_residual

    x = torch.randn(4, 3, requires_grad=True)
    rows, residual = index_first_axis_residual(x, torch.tensor([2, 0]))
    assert torch.equal(rows, x[[2, 0]]) and rows.requires_grad
    assert torch.equal(residual, x) and not residual.requires_grad


def test_packed_pass_over_pages_takes_lengths_of_keys(installed):
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward, flash_attn_varlen_func

    q, k, v = torch.randn(3, 2, 8), torch.randn(4, 16, 2, 8), torch.randn(4, 16, 2, 8)
    table, ends_q, ends_k = (torch.tensor(x, dtype=torch.int32) for x in ([[0, 1]], [0, 3], [0, 5]))
    want = flash_attn_varlen_func(q, k, v, ends_q, ends_k, 3, 5, block_table=table)
    got = _flash_attn_varlen_forward(q, k, v, ends_q, ends_k, 3, 5, 0.0, 8**-0.5, False, block_table=table)[0]
    assert torch.equal(got, want)
    used = torch.tensor([7], dtype=torch.int32)
    got = _flash_attn_varlen_forward(
        q, k, v, ends_q, ends_k, 3, 5, 0.0, 8**-0.5, False, block_table=table, seqused_k=used
    )[0]
    longest = flash_attn_varlen_func(q, k, v, ends_q, None, 3, 7, block_table=table, seqused_k=used)
    assert torch.equal(got, longest) and not torch.equal(got, want)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k_new", "rotary_seqlens"])
def test_what_a_cache_of_flash_attention_3_takes_besides_is_refused(installed, name):
    from flash_attn_interface import flash_attn_with_kvcache

    cache = torch.zeros(1, 16, 2, 8)
    with pytest.raises(NotImplementedError, match=f"^{name}:"):
        flash_attn_with_kvcache(cache[:, :1], cache, cache, **{name: torch.tensor([0, 1], dtype=torch.int32)})


def test_rotary_says_what_it_wants(installed):
    from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb_qkv_

    with pytest.raises(NotImplementedError, match="scale_base"):
        RotaryEmbedding(16, scale_base=512)
    with pytest.raises(ValueError, match="max_seqlen"):
        RotaryEmbedding(16)(torch.zeros(2, 5, 3, 4, 16), seqlen_offset=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="num_heads_q"):
        apply_rotary_emb_qkv_(torch.zeros(2, 5, 8, 16), torch.zeros(5, 8), torch.zeros(5, 8))


@pytest.mark.parametrize(
    "name,error,spoilt",
    [
        ("x", TypeError, {"x": None}),
        ("x", ValueError, {"x": torch.zeros(5, 4, 16)}),
        ("cos", ValueError, {"cos": torch.zeros(4, 8), "sin": torch.zeros(4, 8)}),  # fewer rows than positions
        ("cos", ValueError, {"seqlen_offsets": 4}),
        ("cos", ValueError, {"seqlen_offsets": -1}),
        ("cos", ValueError, {"cos": torch.zeros(8, 9), "sin": torch.zeros(8, 9)}),
        ("cos", ValueError, {"cos": torch.zeros(1, 8, 8)}),
        ("sin", ValueError, {"sin": torch.zeros(8, 4)}),
    ],
)
def test_wrong_argument_of_rotary(installed, name, error, spoilt):
    from flash_attn.layers.rotary import apply_rotary_emb

    given = {"x": torch.zeros(2, 5, 4, 16), "cos": torch.zeros(8, 8), "sin": torch.zeros(8, 8)}
    with pytest.raises(error, match=f"^{name}: "):
        apply_rotary_emb(**given | spoilt)


ENDS = torch.tensor([0, 6, 10], dtype=torch.int32)


@pytest.mark.parametrize(
    "name,error,spoilt",
    [
        ("cu_seqlens", TypeError, {"cu_seqlens": [0, 6, 10]}),
        ("cu_seqlens", ValueError, {"cu_seqlens": ENDS[None]}),
        ("cu_seqlens", ValueError, {"cu_seqlens": ENDS.float()}),
        ("cos", ValueError, {"max_seqlen": 9}),
        ("cos", ValueError, {"max_seqlen": 6, "seqlen_offsets": 3}),
        ("cos", ValueError, {"max_seqlen": 6, "seqlen_offsets": -1}),
        ("cos", ValueError, {"max_seqlen": 9, "seqlen_offsets": torch.zeros(2, dtype=torch.int32)}),
    ],
)
def test_wrong_argument_of_rotary_of_packed_sequences(installed, name, error, spoilt):
    from flash_attn.layers.rotary import apply_rotary_emb

    given = {"x": torch.zeros(10, 4, 16), "cos": torch.zeros(8, 8), "sin": torch.zeros(8, 8), "cu_seqlens": ENDS}
    assert apply_rotary_emb(**given, max_seqlen=6, seqlen_offsets=2).shape == (10, 4, 16)
    with pytest.raises(error, match=f"^{name}: "):
        apply_rotary_emb(**given | spoilt)


@pytest.mark.parametrize(
    "name,error,spoilt",
    [
        ("x", TypeError, {"x": None}),
        ("x", ValueError, {"x": torch.zeros(5, 4, 16)}),
        ("cos", ValueError, {"cos": torch.zeros(3, 8), "sin": torch.zeros(3, 8)}),
        ("cos", ValueError, {"cos": torch.zeros(3, 5, 8), "sin": torch.zeros(3, 5, 8)}),
        ("cos", ValueError, {"cos": torch.zeros(5, 9), "sin": torch.zeros(5, 9)}),
        ("cos", ValueError, {"cos": torch.zeros(())}),
        ("sin", ValueError, {"sin": torch.zeros(5, 4)}),
    ],
)
def test_wrong_argument_of_rotary_by_angles_of_rows(installed, name, error, spoilt):
    from flash_attn.layers.rotary import apply_rotary_emb_torch

    given = {"x": torch.zeros(2, 5, 4, 16), "cos": torch.zeros(5, 8), "sin": torch.zeros(5, 8)}
    with pytest.raises(error, match=f"^{name}: "):
        apply_rotary_emb_torch(**given | spoilt)


def test_wrong_keys_of_rotary(installed):
    from flash_attn.layers.rotary import apply_rotary_emb_kv_

    with pytest.raises(ValueError, match=r"^kv: has shape"):
        apply_rotary_emb_kv_(torch.zeros(2, 5, 3, 4, 16), torch.zeros(5, 8), torch.zeros(5, 8))


def test_masks_of_another_length_are_refused(installed):
    """Their rows would be those of other tokens."""
    from flash_attn.bert_padding import unpad_input, unpad_input_for_concatenated_sequences

    x = torch.zeros(2, 5, 8)

    def ones(*shape):
        return torch.ones(shape, dtype=torch.int32)

    for mask in (ones(2, 3), ones(2, 1, 1, 5), ones(10)):
        with pytest.raises(ValueError, match=r"^attention_mask: has shape"):
            unpad_input(x, mask)
    with pytest.raises(ValueError, match=r"^unused_mask: "):
        unpad_input(x, ones(2, 5), ones(2, 4))
    with pytest.raises(ValueError, match=r"^attention_mask_in_length: "):
        unpad_input_for_concatenated_sequences(x, torch.ones(2, 4, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"^attention_mask: "):
        unpad_input(x, None)


def test_masks_are_not_of_floats(installed):
    """Of which 0 may mean a row to keep, and 0.5 nothing."""
    from flash_attn.bert_padding import unpad_input, unpad_input_for_concatenated_sequences

    x, mask = torch.zeros(2, 5, 8), torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"^attention_mask: has dtype float32; expected bool or int$"):
        unpad_input(x, mask.float())
    with pytest.raises(TypeError, match=r"^unused_mask: has dtype float16; expected bool or int$"):
        unpad_input(x, mask, mask.half())
    for dtype in (torch.bool, torch.float32):
        with pytest.raises(TypeError, match=r"^attention_mask_in_length: has dtype .*; expected int$"):
            unpad_input_for_concatenated_sequences(x, mask.to(dtype))


def test_a_row_is_counted_once(installed):
    """Whatever number a mask has for it, and where both have one."""
    from flash_attn.bert_padding import unpad_input

    x, mask = torch.randn(2, 3, 8), torch.tensor([[1, 1, 0], [1, 0, 0]])
    want = unpad_input(x, mask.bool())
    for got in (unpad_input(x, 2 * mask), unpad_input(x, -mask), unpad_input(x, mask, mask)):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(got, want, strict=True))
    assert want[2].tolist() == [0, 2, 3] and want[3] == 2


@pytest.mark.parametrize("lengths", [[[2, 2, 0], [1, 0, 0]], [[-1, 3, 0], [1, 0, 0]], [[3, 0, 0], [3, 3, 3]]])
def test_lengths_that_a_row_has_no_room_for(installed, lengths):
    from flash_attn.bert_padding import unpad_input_for_concatenated_sequences

    with pytest.raises(ValueError, match=r"^attention_mask_in_length: has a row"):
        unpad_input_for_concatenated_sequences(torch.zeros(2, 3, 8), torch.tensor(lengths))


def test_errors_go_by_the_names_of_flash_attention_3(installed):
    import flash_attn_interface

    pages = torch.zeros(4, 16, 2, 16)
    with pytest.raises(TypeError, match=r"^page_table: "):
        flash_attn_interface.flash_attn_with_kvcache(
            torch.zeros(2, 1, 2, 16), pages, pages, page_table=torch.zeros(2, 2)
        )
