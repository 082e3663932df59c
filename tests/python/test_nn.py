"""`cutlass_ext.nn.MultiheadAttention` against PyTorch's: weights, arguments, results and gradients."""

import copy
from contextlib import nullcontext

import pytest
import torch
from conftest import targets
from oracle import peer_tolerance
from torch import nn

import cutlass_ext.nn as ce_nn
from cutlass_ext import support

E, H, B, N, S = 64, 4, 3, 17, 23


@pytest.fixture(scope="module", params=targets(("cpu", "auto"), ("cuda", "auto"), ("cuda", "auto", torch.bfloat16)))
def target(request):
    return request.param


def pair(target, **options):
    """PyTorch's module and ours, of the same weights, none of which is 0."""
    theirs = nn.MultiheadAttention(E, H, device=target.device, dtype=target.dtype, **options)
    for parameter in theirs.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return theirs, ce_nn.MultiheadAttention.from_torch(theirs)


def assert_alike(got, want):
    tolerance = {n: 16 * x for n, x in peer_tolerance(want.dtype).items()}
    torch.testing.assert_close(got, want, **tolerance)


def compared(theirs, ours, *tensors, hint=False, **options):
    """Outputs, weights, and the gradients of inputs and parameters; with `hint` ours gets is_causal."""
    found = []
    for module in (theirs, ours):
        leaf_of = {x: x.detach().requires_grad_() for x in tensors}
        leaves = list(leaf_of.values())
        causal = {"is_causal": True} if hint and module is ours else {}
        out, weights = module(*(leaf_of[x] for x in tensors), **options, **causal)
        dout = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
        gradients = torch.autograd.grad(out, [*leaves, *module.parameters()], dout)
        found.append([out, *([] if weights is None else [weights]), *gradients])
    for got, want in zip(found[1], found[0], strict=True):
        assert_alike(got, want)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_self_attention(target, need_weights, batch_first, bias):
    theirs, ours = pair(target, batch_first=batch_first, bias=bias)
    x = target.randn(*((B, N, E) if batch_first else (N, B, E)))
    compared(theirs, ours, x, x, x, need_weights=need_weights)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dims", [{}, {"kdim": 24, "vdim": 40}], ids=str)
def test_cross_attention(target, need_weights, dims):
    theirs, ours = pair(target, batch_first=True, **dims)
    tensors = [target.randn(B, n, d) for n, d in ((N, E), (S, dims.get("kdim", E)), (S, dims.get("vdim", E)))]
    compared(theirs, ours, *tensors, need_weights=need_weights, average_attn_weights=False)


@pytest.mark.parametrize("need_weights", [False, True])
def test_without_a_batch(target, need_weights):
    theirs, ours = pair(target)
    x, padding = target.randn(N, E), torch.arange(N, device=target.device) >= 12
    compared(theirs, ours, x, x, x, key_padding_mask=padding, need_weights=need_weights)


PADDING, ATTN = ["bool", "float"], [None, "bool", "float", "heads", "causal"]


@pytest.mark.parametrize("more", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("attn", ATTN)
@pytest.mark.parametrize("padding", [None, *PADDING])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_masks(target, need_weights, padding, attn, more):
    theirs, ours = pair(target, batch_first=True, **more)
    x = target.randn(B, N, E)
    options = {"need_weights": need_weights}
    lengths = torch.tensor([17, 9, 1], device=x.device)
    if padding is not None:
        options["key_padding_mask"] = torch.arange(N, device=x.device) >= lengths[:, None]
    if attn in ("bool", "heads", "causal"):
        options["attn_mask"] = torch.ones(N, N, dtype=torch.bool, device=x.device).triu(1)
    elif attn == "float":
        options["attn_mask"] = target.randn(N, N)
    if attn == "heads":
        options["attn_mask"] = options["attn_mask"].expand(B * H, -1, -1).clone()
        options["attn_mask"][3, 5, 2] = True
    if padding == "float":
        hidden = options["key_padding_mask"]
        options["key_padding_mask"] = target.randn(B, N).masked_fill(hidden, -torch.inf)
    compared(theirs, ours, x, x, x, **options, hint=attn == "causal")


def test_causal_needs_no_mask(target):
    theirs, ours = pair(target, batch_first=True)
    x, mask = target.randn(B, N, E), nn.Transformer.generate_square_subsequent_mask(N, device=target.device)
    want = theirs(x, x, x, attn_mask=mask.to(target.dtype), need_weights=False)[0]
    for need_weights in (False, True):
        assert_alike(ours(x, x, x, need_weights=need_weights, is_causal=True)[0], want)


def test_rows_that_see_no_key_are_0(target):
    _, ours = pair(target, batch_first=True, bias=False)
    x = target.randn(B, N, E)
    hidden = torch.zeros(B, N, dtype=torch.bool, device=target.device)
    hidden[1] = True
    out, weights = ours(x, x, x, key_padding_mask=hidden)
    assert not out[1].any() and not weights[1].any() and out[0].all()


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("need_weights", [False, True])
def test_grouped_heads(target, need_weights, num_kv_heads):
    """Like PyTorch's module whose KV heads are copies."""
    options = {"device": target.device, "dtype": target.dtype, "batch_first": True, "add_bias_kv": True}
    ours, theirs = (
        ce_nn.MultiheadAttention(E, H, num_kv_heads=num_kv_heads, **options),
        nn.MultiheadAttention(E, H, **options),
    )
    assert ours.in_proj_weight.shape == (E + 2 * num_kv_heads * E // H, E)

    def repeated(x, dim):
        heads = x.unflatten(dim, (num_kv_heads, -1)).repeat_interleave(H // num_kv_heads, dim)
        return heads.flatten(dim, dim + 1)

    state = ours.state_dict()
    for name in ("in_proj_weight", "in_proj_bias"):
        q, k, v = state[name].split(ours._rows)
        state[name] = torch.cat([q, repeated(k, 0), repeated(v, 0)])
    for name in ("bias_k", "bias_v"):
        state[name] = repeated(state[name], 2)
    theirs.load_state_dict(state)
    x = target.randn(B, N, E)
    got, want = (module(x, x, x, need_weights=need_weights) for module in (ours, theirs))
    assert_alike(got[0], want[0])
    assert_alike(got[1], want[1]) if need_weights else None


def test_state_dicts_go_both_ways():
    """Keys, shapes and, for a seed, first values."""
    for options in ({}, {"bias": False}, {"kdim": 24, "vdim": 40}, {"add_bias_kv": True}):
        modules = []
        for cls in (nn.MultiheadAttention, ce_nn.MultiheadAttention):
            torch.manual_seed(3)
            modules.append(cls(E, H, **options))
        states = [module.state_dict() for module in modules]
        assert list(states[0]) == list(states[1])
        assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())
        modules[0].load_state_dict(states[1])
        modules[1].load_state_dict(states[0])
        copy.deepcopy(modules[1])


def test_dropout(target):
    """In training alone; the weights returned are those after it, and make the output."""
    theirs, ours = pair(target, batch_first=True, dropout=0.5)
    x = target.randn(B, N, E)
    assert not torch.equal(ours(x, x, x, need_weights=False)[0], ours(x, x, x, need_weights=False)[0])
    _, weights = ours(x, x, x, average_attn_weights=False)
    assert 0.3 < (weights == 0).float().mean() < 0.7
    theirs.eval(), ours.eval()
    assert_alike(ours(x, x, x, need_weights=False)[0], theirs(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_replace_attention(target, training, padded):
    """In PyTorch's own layers, whose fused inference would go past it; parameters are the same objects."""
    layer = nn.TransformerEncoderLayer(E, H, 80, dropout=0.0, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 2).to(target.device, target.dtype).train(training)
    ours = copy.deepcopy(theirs)
    parameters = dict(ours.named_parameters())
    assert ce_nn.replace_attention(ours) is ours
    assert all(parameters[name] is x for name, x in ours.named_parameters())
    kinds = [type(module) for module in ours.modules()]
    assert kinds.count(ce_nn.MultiheadAttention) == 2 and nn.MultiheadAttention not in kinds
    calls = []
    for module in ours.layers:
        module.self_attn.register_forward_hook(lambda *_: calls.append(1))
    x = target.randn(B, N, E)
    hidden = torch.arange(N, device=x.device) >= torch.tensor([17, 9, 1], device=x.device)[:, None] if padded else None
    with torch.set_grad_enabled(training):
        got, want = (encoder(x, src_key_padding_mask=hidden) for encoder in (ours, theirs))
    seen = slice(None) if hidden is None else ~hidden
    assert_alike(got[seen], want[seen])
    assert len(calls) == 2


def test_replace_attention_of_the_module_itself_and_of_a_shared_one():
    module = nn.MultiheadAttention(E, H).eval()
    ours = ce_nn.replace_attention(module)
    assert type(ours) is ce_nn.MultiheadAttention and not ours.training
    model = nn.ModuleDict({"a": module, "b": nn.Sequential(module)})
    ce_nn.replace_attention(model)
    assert model["a"] is model["b"][0]


@pytest.mark.timeout(300)
def test_compile(target):
    _, ours = pair(target, batch_first=True)
    x = target.randn(B, N, E)
    torch._dynamo.reset()
    fast = torch.compile(ours, backend="aot_eager", fullgraph=True)
    got, want = (module(x, x, x, need_weights=False, is_causal=True)[0] for module in (fast, ours))
    assert_alike(got, want)


WRONG = [
    (ValueError, "query", {"query": torch.zeros(2, 5, 60)}),
    (ValueError, "key", {"key": torch.zeros(5, 64)}),
    (ValueError, "key", {"key": torch.zeros(1, 5, 64), "value": torch.zeros(1, 5, 64)}),
    (TypeError, "key", {"key": None}),
    (ValueError, "value", {"value": torch.zeros(2, 6, 64)}),
    (TypeError, "attn_mask", {"attn_mask": "causal"}),
    (TypeError, "is_causal", {"is_causal": 1}),
    (ValueError, "key_padding_mask", {"key_padding_mask": torch.zeros(2, 6, dtype=torch.bool)}),
    (TypeError, "key_padding_mask", {"key_padding_mask": torch.zeros(2, 5, dtype=torch.int32)}),
    (ValueError, "attn_mask", {"attn_mask": torch.zeros(5, 6)}),
    (ValueError, "attn_mask", {"attn_mask": torch.zeros(2, 5, 5)}),
]


@pytest.mark.parametrize("error,name,wrong", WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_errors_name_the_argument(error, name, wrong):
    tensors = {"query": torch.zeros(2, 5, 64), "key": torch.zeros(2, 5, 64), "value": torch.zeros(2, 5, 64)}
    with pytest.raises(error, match=rf"^{name}: "):
        ce_nn.MultiheadAttention(64, 4, batch_first=True)(**tensors | wrong)


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="embed_dim"):
        ce_nn.MultiheadAttention(64, 5)
    with pytest.raises(ValueError, match="num_kv_heads"):
        ce_nn.MultiheadAttention(64, 4, num_kv_heads=3)
    with pytest.raises(TypeError, match="module"):
        ce_nn.MultiheadAttention.from_torch(nn.Linear(2, 2))


def test_what_falls_back_is_said_once(recwarn):
    support._warned.clear()
    ours = ce_nn.MultiheadAttention(64, 4, batch_first=True, dtype=torch.float32)
    wide = ce_nn.MultiheadAttention(1040, 4, batch_first=True)
    for _ in range(2):
        x = torch.randn(2, 5, 64)
        ours(x, x, x, need_weights=False)
        x = torch.randn(2, 5, 1040)
        wide(x, x, x, need_weights=False)
    said = [str(w.message) for w in recwarn if "PyTorch's own" in str(w.message)]
    assert len(said) == 1 and "head_dim 260" in said[0]


def test_gradients_of_rows_without_keys_are_finite_beside_weights():
    ours = ce_nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 4, 16, requires_grad=True)
    padding = torch.zeros(2, 4, dtype=torch.bool)
    padding[1] = True
    out, weights = ours(x, x, x, key_padding_mask=padding)
    out.sum().backward()
    assert not weights[1].any()
    assert not x.grad[1].any() and x.grad[0].any()
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())


def test_dropout_of_all_weights():
    ours = ce_nn.MultiheadAttention(16, 2, dropout=1.0)
    x = torch.randn(3, 16)
    theirs = nn.MultiheadAttention(16, 2, dropout=1.0)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x, x, x, need_weights=False)[0], theirs(x, x, x, need_weights=False)[0])


def hooked(module):
    module.register_forward_hook(lambda *_: None)
    return module


def parametrized(module):
    return nn.utils.parametrizations.spectral_norm(module, "in_proj_weight")


def with_buffer(module):
    module.register_buffer("mark", torch.zeros(2))
    return module


def with_module(module):
    module.lora = nn.Linear(2, 2)
    return module


def with_state_dict_hook(module):
    module.register_state_dict_post_hook(lambda *_: None)
    return module


@pytest.mark.parametrize("attach", [hooked, parametrized, with_buffer, with_module, with_state_dict_hook])
def test_what_would_be_lost_is_not_taken(attach):
    module = attach(nn.MultiheadAttention(16, 2))
    with pytest.raises(ValueError, match=r"^module: has"):
        ce_nn.MultiheadAttention.from_torch(module)
    model = nn.ModuleDict({"a": module, "b": nn.MultiheadAttention(16, 2)})
    is_subclass = type(module) is not nn.MultiheadAttention
    with nullcontext() if is_subclass else pytest.warns(RuntimeWarning, match="a stays as it is"):
        ce_nn.replace_attention(model)
    assert model["a"] is module and isinstance(model["b"], ce_nn.MultiheadAttention)


def test_a_module_under_two_names_is_replaced_under_both():
    model = nn.Module()
    model.a = model.b = nn.MultiheadAttention(16, 2)
    ce_nn.replace_attention(model)
    assert model.a is model.b and isinstance(model.a, ce_nn.MultiheadAttention)


def test_a_mask_of_float64_is_named():
    ours, x = ce_nn.MultiheadAttention(16, 2), torch.randn(3, 16)
    with pytest.raises(TypeError, match=r"^attn_mask: has dtype float64"):
        ours(x, x, x, attn_mask=torch.zeros(3, 3, dtype=torch.float64), need_weights=False)
