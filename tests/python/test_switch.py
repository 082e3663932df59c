"""`activate`: PyTorch's `scaled_dot_product_attention`, and what stands on it, computed by `fmha`; and restored."""

import pytest
import torch
import torch.nn.functional as F
from conftest import targets
from oracle import peer_tolerance
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import cutlass_ext
from cutlass_ext import support, switch

aten = torch.ops.aten


@pytest.fixture(scope="module", params=targets(("cpu", "auto"), ("cuda", "auto"), ("cuda", "auto", torch.bfloat16)))
def target(request):
    return request.param


@pytest.fixture(autouse=True)
def off_in_the_end(recwarn):
    support._warned.clear()
    yield
    for device in ("cpu", "cuda"):
        cutlass_ext.deactivate(device)


class Calls:
    """Counts the calls that reach the library's operators, forward and backward."""

    def __init__(self, monkeypatch):
        self.forward = self.backward = 0
        for name in ("attend", "attend_backward"):
            monkeypatch.setattr(switch, name, self.counted(name, getattr(switch, name)))

    def counted(self, name, function):
        def call(*args, **kwargs):
            self.forward += name == "attend"
            self.backward += name == "attend_backward"
            return function(*args, **kwargs)

        return call


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


def bhsd(target, *shapes):
    return [target.randn(*shape).requires_grad_() for shape in shapes]


def results(call, *leaves):
    """What a call gives, and its gradients."""
    out = call(*leaves)
    return [out, *torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel()).view(out.shape).to(out))]


def assert_alike(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        torch.testing.assert_close(a, b, **{n: 8 * x for n, x in peer_tolerance(a.dtype).items()})


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_like_pytorch(target, calls, options, contiguous):
    q, k, v = bhsd(target, *[(2, 4, 70, 32)] * 3)
    if not contiguous:
        q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v))
    call = lambda *qkv: F.scaled_dot_product_attention(*qkv, **options)  # noqa: E731
    want = results(call, q, k, v)
    assert calls.forward == 0
    with cutlass_ext.activate(target.device):
        assert_alike(results(call, q, k, v), want)
    assert (calls.forward, calls.backward) == (1, 1)
    results(call, q, k, v)
    assert calls.forward == 1  # restored


def test_grouped_heads(target, calls):
    q, k, v = bhsd(target, (2, 4, 70, 32), (2, 2, 70, 32), (2, 2, 70, 32))
    call = lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)  # noqa: E731
    want = results(call, q, k, v)
    with cutlass_ext.activate(target.device):
        assert_alike(results(call, q, k, v), want)


@pytest.mark.parametrize("d", [30, 20])
def test_any_head_dim(target, calls, d):
    q, k, v = bhsd(target, *[(2, 4, 33, d)] * 3)
    want = results(F.scaled_dot_product_attention, q, k, v)
    with cutlass_ext.activate(target.device):
        assert_alike(results(F.scaled_dot_product_attention, q, k, v), want)
    written_out = target.cuda and target.dtype == torch.float32 and d % 4  # by PyTorch, which asks nobody then
    assert calls.forward == (0 if written_out else 1)


@pytest.mark.parametrize("kind", ["bool", "float", "learned"])
def test_masks(target, kind, recwarn):
    """Of every kind: nobody is told that PyTorch computes them."""
    q, k, v = bhsd(target, *[(2, 4, 33, 32)] * 3)
    mask = torch.ones(33, 33, device=q.device).tril().bool()
    if kind != "bool":
        mask = target.randn(1, 4, 33, 33).masked_fill(~mask, -torch.inf)
    leaves = (q, k, v, mask.requires_grad_()) if kind == "learned" else (q, k, v)
    call = lambda q, k, v, m=mask: F.scaled_dot_product_attention(q, k, v, attn_mask=m)  # noqa: E731
    want = results(call, *leaves)
    with cutlass_ext.activate(target.device):
        assert_alike(results(call, *leaves), want)
    assert not [w for w in recwarn if "PyTorch's own" in str(w.message)]


def test_what_is_refused_is_pytorchs_and_said_once(target, calls, recwarn):
    if target.cuda and target.dtype != torch.float32:
        pytest.skip("PyTorch's kernels of 16 bits give NaN where the scale is negative")
    q, k, v = bhsd(target, *[(2, 4, 33, 32)] * 3)
    call = lambda *qkv: F.scaled_dot_product_attention(*qkv, scale=-0.5)  # noqa: E731
    want = results(call, q, k, v)
    with cutlass_ext.activate(target.device):
        for _ in range(2):
            assert_alike(results(call, q, k, v), want)
    said = [str(w.message) for w in recwarn if "PyTorch's own" in str(w.message)]
    assert calls.forward == 0 and len(said) == 1 and "scale is -0.5" in said[0]


def test_deterministic_gradients(target, calls):
    q, k, v = bhsd(target, *[(2, 4, 300, 32)] * 3)
    torch.use_deterministic_algorithms(True)
    with cutlass_ext.activate(target.device):
        one, other = (results(F.scaled_dot_product_attention, q, k, v) for _ in range(2))
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)) and calls.backward == 2


@pytest.mark.parametrize("fast", [True, False])
def test_transformer_encoder(target, fast):
    """Its fast path, which runs where nothing requires grad, and the other."""
    layer = nn.TransformerEncoderLayer(64, 4, 80, dropout=0.0, batch_first=True, device=target.device)
    encoder = nn.TransformerEncoder(layer, 2).to(target.dtype).eval()
    x = target.randn(2, 33, 64)
    with torch.set_grad_enabled(not fast):
        want = encoder(x)
        with cutlass_ext.activate(target.device):
            got = encoder(x)
    assert_alike([got], [want])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention(target, calls, causal, training):
    layer = nn.MultiheadAttention(64, 4, batch_first=True, device=target.device, dtype=target.dtype).train(training)
    x = target.randn(2, 33, 64).requires_grad_(training)
    mask = nn.Transformer.generate_square_subsequent_mask(33, device=target.device, dtype=target.dtype)
    options = {"attn_mask": mask, "is_causal": True} if causal else {}
    call = lambda x: layer(x, x, x, need_weights=False, **options)[0]  # noqa: E731
    want = results(call, x) if training else [call(x)]
    with cutlass_ext.activate(target.device):
        assert_alike(results(call, x) if training else [call(x)], want)
    assert calls.forward == 1 or not training


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(target, calls, backend):
    if backend == "inductor" and not target.cuda:
        pytest.skip("on a CPU it writes attention out")
    q, k, v = bhsd(target, *[(2, 4, 33, 32)] * 3)
    call = lambda *qkv: F.scaled_dot_product_attention(*(x * 2 for x in qkv), is_causal=True) + 1  # noqa: E731
    want = results(call, q, k, v)
    torch._dynamo.reset()
    with cutlass_ext.activate(target.device):
        assert_alike(results(torch.compile(call, backend=backend, fullgraph=True), q, k, v), want)
    assert (calls.forward, calls.backward) == (1, 1)


def test_nesting_turns_off_what_it_turned_on(target, calls):
    q, k, v = (x.detach() for x in bhsd(target, *[(2, 4, 33, 32)] * 3))
    with cutlass_ext.activate(target.device):
        with cutlass_ext.activate(target.device):
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
        assert calls.forward == 2
    cutlass_ext.deactivate(target.device)
    F.scaled_dot_product_attention(q, k, v)
    assert calls.forward == 2


@pytest.mark.skipif(not switch._REGISTRY, reason="of torch 2.11")
def test_pytorchs_own_switch():
    """The same one, from either side; cuDNN has its precedence back in the end."""
    if not torch.cuda.is_available():
        assert switch.NAME in torch.nn.attention.list_flash_attention_impls()
        return
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.nn.attention.activate_flash_attention_impl(switch.NAME)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    with cutlass_ext.activate():
        pass
    assert torch.nn.attention.current_flash_attention_impl() == switch.NAME
    torch.nn.attention.restore_flash_attention_impl()
    assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn
    cutlass_ext.activate()
    assert torch.nn.attention.current_flash_attention_impl() == switch.NAME
    cutlass_ext.deactivate()
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.parametrize(
    "shape", [(33, 1), (1, 1), (2, 1, 33, 1), (2, 1, 1, 1), (33, 33), (1, 33), (1, 4, 33, 33)], ids=str
)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_that_are_broadcast(target, shape, kind):
    """Over the keys, too: PyTorch hands them on as they are on a CPU. Its own kernels on a GPU refuse such masks, or
    fail with a misaligned address (2.11): it writes attention out here."""
    q, k, v = bhsd(target, *[(2, 4, 33, 32)] * 3)
    mask = target.randn(*shape) if kind == "float" else torch.ones(shape, dtype=torch.bool, device=q.device)
    call = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):
        want = results(call, q, k, v)
    with cutlass_ext.activate(target.device):
        assert_alike(results(call, q, k, v), want)


@pytest.mark.skipif(torch.version.cuda is not None, reason="of a PyTorch without CUDA")
def test_cuda_without_cuda():
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^device: "):
            cutlass_ext.activate()
    cutlass_ext.deactivate()


@pytest.mark.parametrize("device", ["mps", torch.device("meta"), "CPU", None])
def test_another_device(device):
    for switch_ in (cutlass_ext.activate, cutlass_ext.deactivate):
        with pytest.raises(ValueError, match=r"^device: "):
            switch_(device)


def test_a_device_of_torch():
    with cutlass_ext.activate(torch.device("cpu")):
        assert "cpu" in switch._on
        cutlass_ext.deactivate(torch.device("cpu", 0))
        assert "cpu" not in switch._on


# ------------------------------------------------------------------------------------------------ the operators alone
@pytest.fixture
def operators(target):
    """Those of CUDA, which a CPU has none of: there they are put in place of kernels that only raise."""
    if target.cuda:
        with cutlass_ext.activate():
            yield
        return
    with (
        torch.library._scoped_library("aten", "IMPL") as library,
        torch.library._scoped_library("aten", "IMPL") as ours,
    ):
        for name, compute in switch._OPERATORS["cuda"].items():
            if hasattr(aten, name):
                library.impl(name, lambda *_, **__: 1 / 0, "CPU")
                switch._replace(ours, name, compute, "CPU")
        yield


def assert_like_meta(name, *args, **kwargs):
    """Shapes, dtypes and strides are what PyTorch tells a compiler that they are; returns the results."""
    got = getattr(aten, name)(*args, **kwargs)
    fake = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]
    for a, b in zip(got, getattr(aten, name)(*fake, **kwargs), strict=True):
        if isinstance(b, torch.Tensor) and b.numel():
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert a.dim() == 0 or a.stride() == b.stride()
    return got


@pytest.mark.parametrize("contiguous", [True, False])
def test_flash_operator(target, operators, contiguous):
    q, k, v = (x.detach() for x in bhsd(target, *[(2, 4, 33, 32)] * 3))
    if not contiguous:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    got = assert_like_meta("_scaled_dot_product_flash_attention", q, k, v, 0.0, True, False, scale=0.3)
    bshd = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = target.fmha(*bshd, causal=True, softmax_scale=0.3)
    assert torch.equal(got[0], out.transpose(1, 2)) and torch.equal(got[1], lse)
    dout = torch.randn_like(out)
    gradients = assert_like_meta(
        "_scaled_dot_product_flash_attention_backward", dout.transpose(1, 2), q, k, v, got[0], got[1], None, None, 33,
        33, 0.0, True, got[6], got[7], scale=0.3,
    )  # fmt: skip
    want = target.gradients(*bshd, dout, causal=True, softmax_scale=0.3, deterministic=True)
    assert_alike([x.transpose(1, 2) for x in gradients], want)


def test_efficient_operator(target, operators):
    q, k, v = (x.detach() for x in bhsd(target, (2, 4, 33, 32), (2, 4, 45, 32), (2, 4, 45, 16)))
    got = assert_like_meta("_scaled_dot_product_efficient_attention", q, k, v, None, True, 0.0, True, scale=0.3)
    bshd = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = target.fmha(*bshd, causal=True, softmax_scale=0.3)
    assert torch.equal(got[0], out.transpose(1, 2)) and torch.equal(got[1][..., :33], lse)
    without = aten._scaled_dot_product_efficient_attention(q, k, v, None, False, 0.0, True, scale=0.3)
    assert torch.equal(without[0], got[0]) and without[1].numel() == 0
    dout = torch.randn_like(out)
    *gradients, dbias = aten._scaled_dot_product_efficient_attention_backward(
        dout.transpose(1, 2), q, k, v, None, *got, 0.0, [True, True, True, False], True, scale=0.3
    )
    want = target.gradients(*bshd, dout, causal=True, softmax_scale=0.3, deterministic=True)
    assert_alike([x.transpose(1, 2) for x in gradients], want)
    assert dbias is None


@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_dropout_of_operators(target, operators, name):
    """The backward pass drops what the forward pass dropped, by the seed that goes from one to the other."""
    q, k, v = (x.detach() for x in bhsd(target, *[(2, 4, 33, 32)] * 3))
    forward = getattr(aten, f"_scaled_dot_product_{name}_attention")
    backward = getattr(aten, f"_scaled_dot_product_{name}_attention_backward")
    arguments = (q, k, v, 0.5, True) if name == "flash" else (q, k, v, None, True, 0.5, True)
    got = forward(*arguments)
    dout, bshd = torch.randn_like(q), [x.transpose(1, 2) for x in (q, k, v)]
    if name == "flash":
        seed = got[6].view(torch.int64)
        gradients = backward(dout, q, k, v, got[0], got[1], None, None, 33, 33, 0.5, True, got[6], got[7])
    else:
        seed = torch.stack(got[2:])
        gradients = backward(dout, q, k, v, None, *got, 0.5, [True, True, True, False], True)[:3]
    options = {"causal": True, "dropout_p": 0.5, "dropout_seed": seed}
    assert torch.equal(got[0], target.fmha(*bshd, **options)[0].transpose(1, 2))
    want = target.gradients(*bshd, dout.transpose(1, 2), **options, deterministic=True)
    assert_alike([x.transpose(1, 2) for x in gradients], want)
    assert not torch.equal(forward(*arguments)[0], got[0])


@pytest.mark.parametrize("packed", [True, False])
def test_sequences(target, operators, packed):
    """What nested tensors and `varlen_attn` call: aligned at the end, with windows."""
    q, k, v = target.qkv(2, 33, 4, 32, n_kv=45, heads_kv=2)
    ends, options = [None, None], {"causal": True, "start_pos": "end", "window": (20, -1)}
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        ends = [target.int32([0, 20, 66]), target.int32([0, 45, 90])]
        options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True)) | {
            "max_seqlen_q": 46,
            "max_seqlen_k": 45,
        }
    sizes, windows = (46 if packed else 33, 45), {"window_size_left": 20, "window_size_right": -1}
    out, lse, rng, unused, _ = aten._flash_attention_forward(q, k, v, *ends, *sizes, 0.0, True, False, **windows)
    want = target.fmha(q, k, v, **options)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    dout = torch.randn_like(out)
    gradients = aten._flash_attention_backward(
        dout, q, k, v, out, lse, *ends, *sizes, 0.0, True, rng, unused, **windows
    )
    assert_alike(gradients, target.gradients(q, k, v, dout, **options, deterministic=True))
    if hasattr(aten, "_flash_attention_forward_no_dropout_inplace"):
        into = torch.empty_like(out)
        aten._flash_attention_forward_no_dropout_inplace(into, q, k, v, *ends, *sizes, 0.0, True, False, **windows)
        assert torch.equal(into, out)


@pytest.mark.gpu
def test_varlen_attn():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v = (torch.randn(66, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    ends = torch.tensor([0, 20, 66], dtype=torch.int32, device="cuda")
    call = lambda *qkv: varlen.varlen_attn(*qkv, ends, ends, 46, 46)  # noqa: E731
    want = results(call, q, k, v)
    with cutlass_ext.activate():
        assert_alike(results(call, q, k, v), want)


def test_strides_of_gradients_of_padded_head_dims():
    """Those that a compiler is told of: the cut of what was padded is not left in them."""
    q, k, v = (torch.randn(2, 3, 6, 5, requires_grad=True) for _ in range(3))
    with cutlass_ext.activate("cpu"):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert [x.stride() for x in gradients] == [(90, 5, 15, 1)] * 3
