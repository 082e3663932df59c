"""Every wrong argument: the exception's type, and that its text names the argument."""

import re

import numpy as np
import pytest
import torch
from oracle import expect

import cutlass_ext
from cutlass_ext import _ops

F16, BF16, F64, INT32, INT64 = torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64
B, N, HEADS, HEADS_KV, D = 2, 6, 4, 2, 16


def valid(device="cpu"):
    """Arguments of `fmha` that pass; each case below spoils some of them."""
    shapes = {"q": (B, N, HEADS, D), "k": (B, N, HEADS_KV, D), "v": (B, N, HEADS_KV, D)}
    return {name: torch.randn(shape, device=device) for name, shape in shapes.items()}


def tensor(*shape, dtype=torch.float32):
    return lambda device: torch.ones(shape, dtype=dtype, device=device)


def transposed(*shape):
    """Of this shape, its last dimension not contiguous."""
    return lambda device: torch.randn(*shape[:-2], shape[-1], shape[-2], device=device).mT


def strided(n, dtype=torch.float32):
    return lambda device: torch.ones(2 * n, dtype=dtype, device=device)[::2]


V, T, NI = ValueError, TypeError, NotImplementedError
# (argument to be named, exception, what replaces valid arguments: values, or functions of the device)
WRONG = [
    # the three tensors: kind, rank, dtype
    *[(name, T, {name: value}) for name in "qkv" for value in (None, [[1.0]], 3.0)],
    *[(name, V, {name: tensor(*shape)}) for name in "qkv" for shape in ((), (6, 4, 16), (1, B, N, 4, D))],
    *[(name, T, {name: tensor(B, N, 2, D, dtype=dtype)}) for name in "qkv" for dtype in (INT64, F64, torch.bool)],
    *[(name, T, {name: tensor(B, N, HEADS_KV, D, dtype=F16)}) for name in "kv"],
    # sizes that do not fit each other
    *[(name, V, {name: tensor(3, N, HEADS_KV, D)}) for name in "kv"],
    ("v", V, {"v": tensor(B, N + 1, HEADS_KV, D)}),
    ("v", V, {"v": tensor(B, N, HEADS_KV + 2, D)}),
    ("k", V, {"k": tensor(B, N, HEADS_KV, D + 4)}),
    ("k", V, {"k": tensor(B, N, 3, D), "v": tensor(B, N, 3, D)}),
    ("k", V, {"k": tensor(B, N, 8, D), "v": tensor(B, N, 8, D)}),
    ("k", V, {"k": tensor(B, N, 0, D), "v": tensor(B, N, 0, D)}),
    ("q", V, {"q": tensor(B, N, 0, D)}),
    # head dims
    *[("q", V, {"q": tensor(B, N, HEADS, d), "k": tensor(B, N, HEADS_KV, d)}) for d in (0, 2, 18, 257, 260)],
    *[("v", V, {"v": tensor(B, N, HEADS_KV, d_v)}) for d_v in (0, 1, 30, 260, 512)],
    *[("q", V, {name: tensor(B, N, 2, 12, dtype=dtype) for name in "qkv"}) for dtype in (F16, BF16)],  # multiples of 8
    # the last dimension
    ("q", V, {"q": transposed(B, N, HEADS, D)}),
    ("k", V, {"k": transposed(B, N, HEADS_KV, D)}),
    ("v", V, {"v": transposed(B, N, HEADS_KV, D)}),
    # numbers
    # finite, above 0, and so in float32, in which scores are computed
    *[("softmax_scale", V, {"softmax_scale": x}) for x in (0.0, -0.1, float("inf"), float("nan"), 1e39, 1e-39, 1e-60)],
    ("softmax_scale", T, {"softmax_scale": "small"}),
    # a tensor's gradient would be missing, and the host would wait for its value; True is no number
    *[(name, T, {name: x}) for name in ("softmax_scale", "softcap", "dropout_p") for x in (True, tensor(), tensor(1))],
    *[("softcap", V, {"softcap": x}) for x in (-1.0, float("inf"), float("nan"), 1e39, 1e-39, 1e-60)],
    *[("softcap", T, {"softcap": x}) for x in (None, "soft")],
    *[("num_splits", V, {"num_splits": x}) for x in (-1, 100_000)],
    *[("num_splits", T, {"num_splits": x}) for x in (None, 1.5, True, tensor(), tensor(2))],
    *[(name, T, {name: x}) for name in ("causal", "deterministic", "return_lse")
      for x in ("yes", None, 1, 0, 1.0, [True])],
    *[("window", V, {"window": x}) for x in ((-2, 0), (0, -5), (1, 2, 3), (), (-(2**70), 0))],
    *[("window", T, {"window": x}) for x in (None, 5, (1.5, 0), (0, 1.5), ("a", "b"), "ab", (None, None), (3, None))],
    *[("start_pos", V, {"start_pos": x}) for x in ("start", "", 1 << 40, -(1 << 31), 1 << 70)],
    *[("start_pos", T, {"start_pos": x}) for x in (None, 1.5, [0, 1], True)],
    ("start_pos", T, {"start_pos": True, "key_start": 3}),
    # vectors: shape, dtype, layout
    *[(name, V, {name: tensor(*shape, dtype=INT32)}) for name in ("start_pos", "seqused_k", "leftpad_k")
      for shape in ((), (B + 1,), (B, 1), (0,))],
    *[(name, T, {name: tensor(B, dtype=dtype)}) for name in ("start_pos", "seqused_k", "leftpad_k")
      for dtype in (INT64, torch.float32)],
    *[(name, T, {name: value}) for name in ("seqused_k", "leftpad_k", "alibi_slopes", "sink") for value in (3, [1, 2])],
    *[("sink", V, {"sink": tensor(*shape)}) for shape in ((), (HEADS_KV,), (B, HEADS), (1,))],
    *[("alibi_slopes", V, {"alibi_slopes": tensor(*shape)})
      for shape in ((), (HEADS_KV,), (HEADS, B), (1, HEADS), (B, HEADS, 1))],
    *[(name, T, {name: tensor(HEADS, dtype=dtype)})
      for name in ("sink", "alibi_slopes") for dtype in (F16, INT32, F64)],
    ("alibi_slopes", T, {"alibi_slopes": tensor(B, HEADS, dtype=F16)}),
    *[(name, V, {name: strided(HEADS)}) for name in ("sink", "alibi_slopes")],
    *[(name, V, {name: strided(B, INT32)}) for name in ("start_pos", "seqused_k", "leftpad_k")],
    # what runs
    *[("backend", V, {"backend": x}) for x in ("cuda", "", "SIMT")],
    *[("backend", T, {"backend": x}) for x in (None, 90)],
    ("atention_mask", T, {"atention_mask": None}),
]  # fmt: skip


def shown(value):
    value = value("cpu") if callable(value) else value
    return f"{str(value.dtype)[6:]}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def case_id(case):
    name, error, spoilt = case
    return f"{error.__name__}-{name}-" + ",".join(f"{k}={shown(x)}" for k, x in spoilt.items())


def on(device, value):
    """A tensor of a parametrised case, moved to the device; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def assert_refused(call, name, error, arguments):
    with pytest.raises(error, match=rf"\b{re.escape(name)}\b") as raised:
        call(**arguments)
    assert type(raised.value) is error
    assert "\n" not in str(raised.value), "one line, without the C++ stack"


@pytest.mark.parametrize("function", ["fmha", "explain"])
@pytest.mark.parametrize("case", WRONG, ids=case_id)
def test_wrong_argument(device, function, case):
    name, error, spoilt = case
    arguments = valid(device) | {k: x(device) if callable(x) else x for k, x in spoilt.items()}
    assert_refused(getattr(cutlass_ext, function), name, error, arguments)


def test_the_valid_arguments_are_valid(device):
    assert cutlass_ext.fmha(**valid(device)).shape == (B, N, HEADS, D)


@pytest.mark.parametrize("backend", ["simt", "sm80", "sm90"])
def test_kernels_do_not_run_on_the_cpu(backend):
    assert_refused(cutlass_ext.fmha, "backend", ValueError, valid() | {"backend": backend})


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k", "v", "start_pos", "seqused_k", "leftpad_k", "sink", "alibi_slopes"])
def test_tensors_on_two_devices(name):
    on_cpu = dict.fromkeys("kv", tensor(B, N, HEADS_KV, D))
    on_cpu |= dict.fromkeys(("start_pos", "seqused_k", "leftpad_k"), tensor(B, dtype=INT32))
    on_cpu |= dict.fromkeys(("sink", "alibi_slopes"), tensor(HEADS))
    assert_refused(cutlass_ext.fmha, name, ValueError, valid("cuda") | {name: on_cpu[name]("cpu")})


@pytest.mark.gpu
def test_q_alone_on_the_cpu():
    assert_refused(cutlass_ext.fmha, "k", ValueError, valid("cuda") | {"q": valid()["q"]})


@pytest.mark.gpu
@pytest.mark.parametrize("backend,dtype", [("simt", F16), ("simt", BF16)])
def test_dtypes_that_a_family_does_not_take(backend, dtype):
    """Never a cast behind the user's back."""
    arguments = {name: t.to(dtype) for name, t in valid("cuda").items()}
    for call in (cutlass_ext.fmha, cutlass_ext.explain):
        assert_refused(call, "q", NotImplementedError, arguments | {"backend": backend})


@pytest.mark.gpu
@pytest.mark.parametrize("backend,dtype", [("auto", F16), ("auto", BF16), ("sm80", F16), ("sm80", BF16)])
def test_16_bit_runs_on_cuda(backend, dtype):
    """On tensor cores, and right."""
    arguments = {name: t.to(dtype) for name, t in valid("cuda").items()}
    out, lse = cutlass_ext.fmha(**arguments, backend=backend, return_lse=True)
    expect(**arguments).check(out, lse, small=True)
    assert cutlass_ext.explain(**arguments, backend=backend).backend in ("sm80", "sm90")[: 1 + (backend == "auto")]


# ------------------------------------------------------------------------------------------------ packed sequences
TOTAL, SEQUENCES = 12, 3
ENDS = torch.tensor([0, 5, 5, 12], dtype=INT32)


def valid_packed(device="cpu"):
    heads = {"q": HEADS, "k": HEADS_KV, "v": HEADS_KV}
    tensors = {name: torch.randn(TOTAL, h, D, device=device) for name, h in heads.items()}
    ends = {name: ENDS.to(device) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return tensors | ends | {"max_seqlen_q": 7, "max_seqlen_k": 7}


WRONG_PACKED = [
    *[(name, V, {name: None}) for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")],
    *[(name, V, {name: tensor(*shape)}) for name in "qkv" for shape in ((TOTAL, D), (1, TOTAL, HEADS, D))],
    ("v", V, {"v": tensor(TOTAL + 1, HEADS_KV, D)}),
    ("k", V, {"k": tensor(TOTAL, 3, D), "v": tensor(TOTAL, 3, D)}),
    ("k", V, {"k": tensor(TOTAL, HEADS_KV, D + 4)}),
    ("k", T, {"k": tensor(TOTAL, HEADS_KV, D, dtype=F16)}),
    ("q", V, {"q": transposed(TOTAL, HEADS, D)}),
    *[("cu_seqlens_q", V, {"cu_seqlens_q": tensor(*shape, dtype=INT32)}) for shape in ((), (0,), (2, 2))],
    *[("cu_seqlens_k", V, {"cu_seqlens_k": tensor(*shape, dtype=INT32)}) for shape in ((), (0,), (SEQUENCES,), (2, 2))],
    *[(name, T, {name: x})
      for name in ("cu_seqlens_q", "cu_seqlens_k") for x in (tensor(SEQUENCES + 1, dtype=INT64), [0, 5, 5, 12])],
    *[(name, V, {name: strided(SEQUENCES + 1, INT32)}) for name in ("cu_seqlens_q", "cu_seqlens_k")],
    *[(name, V, {name: -1}) for name in ("max_seqlen_q", "max_seqlen_k")],
    *[(name, T, {name: x}) for name in ("max_seqlen_q", "max_seqlen_k")
      for x in (7.5, "7", True, tensor(dtype=INT32), tensor(1, dtype=INT32))],  # the host would wait for a tensor
    *[(name, V, {name: tensor(SEQUENCES + 1, dtype=INT32)}) for name in ("start_pos", "seqused_k", "leftpad_k")],
    ("alibi_slopes", V, {"alibi_slopes": tensor(TOTAL, HEADS)}),
]  # fmt: skip


@pytest.mark.parametrize("function", ["fmha", "explain"])
@pytest.mark.parametrize("case", WRONG_PACKED, ids=case_id)
def test_wrong_packed_argument(device, function, case):
    name, error, spoilt = case
    arguments = valid_packed(device) | {k: x(device) if callable(x) else x for k, x in spoilt.items()}
    assert_refused(getattr(cutlass_ext, function), name, error, arguments)


def test_the_valid_packed_arguments_are_valid(device):
    assert cutlass_ext.fmha(**valid_packed(device)).shape == (TOTAL, HEADS, D)


def test_packed_tensors_want_cu_seqlens(device):
    tensors = {name: t for name, t in valid_packed(device).items() if name in "qkv"}
    assert_refused(cutlass_ext.fmha, "cu_seqlens_q", ValueError, tensors)


@pytest.mark.parametrize(
    "name,spoilt",
    [
        ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([0, 5, 4, 12], dtype=INT32)}),
        ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([-1, 5, 5, 12], dtype=INT32)}),
        ("cu_seqlens_k", {"cu_seqlens_k": torch.tensor([0, 5, 5, 13], dtype=INT32)}),
        ("max_seqlen_q", {"max_seqlen_q": 6}),
        ("max_seqlen_k", {"max_seqlen_k": 0}),
    ],
)
def test_lengths_that_only_a_cpu_can_check(name, spoilt):
    assert_refused(cutlass_ext.fmha, name, ValueError, valid_packed() | spoilt)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_cu_seqlens_on_the_cpu(name):
    assert_refused(cutlass_ext.fmha, name, ValueError, valid_packed("cuda") | {name: ENDS})


# ------------------------------------------------------------------------------------------------ gradients
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("others", [{}, {"q": True, "sink": True}], ids=["alone", "with others"])
def test_slopes_have_no_gradient(device, backend, others):
    arguments = valid(device) | {vector: torch.ones(HEADS, device=device) for vector in ("sink", "alibi_slopes")}
    for name in ("alibi_slopes", *others):
        arguments[name].requires_grad_()
    assert_refused(cutlass_ext.fmha, "alibi_slopes", NotImplementedError, arguments | {"backend": backend})
    for allowed in (torch.no_grad(), torch.inference_mode()):
        with allowed:
            assert not cutlass_ext.fmha(**arguments, backend=backend).requires_grad


@pytest.mark.parametrize("name", ["q", "k", "v", "sink"])
def test_keys_in_pages_have_no_gradients(device, name):
    arguments = valid(device) | {"sink": torch.ones(HEADS, device=device)}
    arguments["k"], arguments["v"] = (torch.randn(3, 16, HEADS_KV, D, device=device) for _ in "kv")
    arguments["block_table"] = torch.tensor([[0, 1], [2, 0]], dtype=INT32, device=device)
    arguments[name].requires_grad_()
    assert_refused(cutlass_ext.fmha, "block_table", NotImplementedError, arguments)
    with torch.no_grad():
        assert not cutlass_ext.fmha(**arguments).requires_grad


@pytest.mark.parametrize("spoilt", ["q", "s_aux"])
def test_out_does_not_go_with_gradients(device, spoilt):
    arguments = valid(device) | {"s_aux": torch.ones(HEADS, device=device)}
    arguments["out"] = torch.empty(B, N, HEADS, D, device=device)
    arguments[spoilt].requires_grad_()
    assert_refused(cutlass_ext.flash_attn_func, "out", NotImplementedError, arguments)
    with torch.no_grad():
        assert cutlass_ext.flash_attn_func(**arguments) is arguments["out"]


def test_out_is_not_expanded(device):
    """Results of several rows would be written to one place."""
    arguments = valid(device)
    for expanded in (0, 1, 2):
        shape = [1 if dim == expanded else n for dim, n in enumerate((B, N, HEADS, D))]
        arguments["out"] = torch.empty(shape, device=device).expand(B, N, HEADS, D)
        for function in (cutlass_ext.fmha, cutlass_ext.flash_attn_func):
            assert_refused(function, "out", ValueError, arguments)
    one = {name: x[:1] for name, x in valid(device).items()}
    out = torch.empty(N, HEADS, D, device=device).as_strided((1, N, HEADS, D), (0, HEADS * D, D, 1))
    assert cutlass_ext.fmha(**one, out=out) is out


# ------------------------------------------------------------------------------------------------ flash-attn's names
def flash_arguments(device, name):
    q, k, v = valid(device).values()
    return {
        "flash_attn_func": {"q": q, "k": k, "v": v},
        "flash_attn_kvpacked_func": {"q": q, "kv": torch.stack([k, v], 2)},
        "flash_attn_qkvpacked_func": {"qkv": torch.stack([q, q, q], 2)},
    }[name]


FLASH = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"]


@pytest.mark.parametrize("function", FLASH)
@pytest.mark.parametrize(
    "name,error,value",
    [
        ("dropout_p", V, -0.1),
        ("dropout_p", V, 1.0),
        ("dropout_p", T, "half"),
        ("softmax_scale", V, 0.0),
        ("softmax_scale", V, -1.0),
        ("softmax_scale", T, torch.ones((), requires_grad=True)),
        ("softcap", V, -1.0),
        ("softcap", V, 1e-39),
        ("window_size", V, (1, 2, 3)),
        ("window_size", V, (-2, 0)),
        ("window", T, (1, 0)),  # fmha's name
        ("window_size", T, "ab"),
        ("window_size", T, (1.5, 0)),
        ("alibi_slopes", V, torch.ones(3)),
        ("alibi_slopes", T, torch.ones(HEADS, dtype=F16)),
        ("causal", T, "yes"),
        ("causal", T, None),
        ("return_attn_probs", T, 1),
        ("return_softmax_lse", T, None),
        ("block_table", T, None),
    ],
    ids=str,
)
def test_wrong_argument_of_flash_attn(device, function, name, error, value):
    arguments = flash_arguments(device, function) | {name: on(device, value)}
    assert_refused(getattr(cutlass_ext, function), name, error, arguments)


@pytest.mark.parametrize(
    "function,name,error,value",
    [
        ("flash_attn_func", "q", V, torch.ones(N, HEADS, D)),
        ("flash_attn_func", "k", V, torch.ones(B, N, 3, D)),
        ("flash_attn_func", "v", V, torch.ones(B, N, 4, D)),
        ("flash_attn_kvpacked_func", "q", V, torch.ones(N, HEADS, D)),
        ("flash_attn_kvpacked_func", "kv", V, torch.ones(B, N, 3, HEADS_KV, D)),
        ("flash_attn_kvpacked_func", "kv", V, torch.ones(B, N, 2, D)),
        ("flash_attn_kvpacked_func", "kv", T, None),
        ("flash_attn_qkvpacked_func", "qkv", V, torch.ones(B, N, 2, HEADS, D)),
        ("flash_attn_qkvpacked_func", "qkv", V, torch.ones(B, N, HEADS, D)),
        ("flash_attn_qkvpacked_func", "qkv", T, [1.0]),
    ],
)
def test_wrong_tensor_of_flash_attn(device, function, name, error, value):
    arguments = flash_arguments(device, function) | {name: on(device, value)}
    assert_refused(getattr(cutlass_ext, function), name, error, arguments)


def flash_varlen_arguments(device, name):
    q, k, v, *packing = valid_packed(device).values()
    names = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    packing = dict(zip(names, packing, strict=True))
    return {
        "flash_attn_varlen_func": {"q": q, "k": k, "v": v, **packing},
        "flash_attn_varlen_kvpacked_func": {"q": q, "kv": torch.stack([k, v], 1), **packing},
        "flash_attn_varlen_qkvpacked_func": {
            "qkv": torch.stack([q, q, q], 1), "cu_seqlens": packing["cu_seqlens_q"], "max_seqlen": 7
        },
    }[name]  # fmt: skip


VARLEN, VARLEN_KV, VARLEN_QKV = (f"flash_attn_varlen_{kind}func" for kind in ("", "kvpacked_", "qkvpacked_"))


@pytest.mark.parametrize(
    "function,name,error,value",
    [
        *[(f, "dropout_p", V, 1.0) for f in (VARLEN, VARLEN_KV, VARLEN_QKV)],
        *[(f, "window_size", V, (-2, 0)) for f in (VARLEN, VARLEN_KV, VARLEN_QKV)],
        (VARLEN, "k", V, torch.zeros(TOTAL, 3, D)),
        (VARLEN, "max_seqlen_q", V, None),
        (VARLEN, "max_seqlen_k", V, None),
        (VARLEN, "seqused_k", T, torch.ones(SEQUENCES)),
        (VARLEN, "cu_seqlens_k", V, None),
        (VARLEN, "q", V, torch.ones(1, TOTAL, HEADS, D)),
        (VARLEN_KV, "kv", V, torch.ones(TOTAL, 3, HEADS_KV, D)),
        (VARLEN_KV, "kv", V, torch.ones(1, TOTAL, 2, HEADS_KV, D)),
        (VARLEN_KV, "cu_seqlens_q", T, ENDS.long()),
        (VARLEN_QKV, "qkv", V, torch.ones(TOTAL, 2, HEADS, D)),
        (VARLEN_QKV, "cu_seqlens", T, ENDS.long()),
        (VARLEN_QKV, "cu_seqlens", V, None),
        (VARLEN_QKV, "max_seqlen", V, -3),
        (VARLEN_QKV, "max_seqlen", V, None),
        *[(VARLEN, "max_seqlen_k", T, x) for x in (True, torch.ones(2, dtype=INT32), torch.ones(()))],
        *[(VARLEN_QKV, "max_seqlen", T, x) for x in (True, torch.ones(2, dtype=INT32), torch.tensor(True))],
    ],
    ids=str,
)
def test_wrong_argument_of_flash_attn_varlen(device, function, name, error, value):
    arguments = flash_varlen_arguments(device, function) | {name: on(device, value)}
    assert_refused(getattr(cutlass_ext, function), name, error, arguments)


def test_arguments_that_are_one_buffer_are_named_once(device):
    q = torch.ones(B, N, 3, D, device=device)
    with pytest.raises(ValueError, match=r"the heads of q must be a multiple of those of kv$"):
        cutlass_ext.flash_attn_kvpacked_func(q, torch.ones(B, N, 2, 2, D, device=device))
    renamed = _ops._renamed(ValueError("q is not there; move q, k and v there, q and k"), dict.fromkeys("qkv", "qkv"))
    assert str(renamed) == "qkv is not there; move qkv there, qkv"


@pytest.mark.parametrize(
    "function,arguments",
    [
        *((name, flash_arguments("cpu", name)) for name in FLASH),
        *((name, flash_varlen_arguments("cpu", name)) for name in (VARLEN, VARLEN_KV, VARLEN_QKV)),
        ("flash_attn_with_kvcache", dict(zip(("q", "k_cache", "v_cache"), valid().values(), strict=True))),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_keywords_that_there_are_not(function, arguments):
    """Are said of the function that was called, as Python says it of others."""
    call = getattr(cutlass_ext, function)
    with pytest.raises(TypeError, match=rf"^{function}\(\) got an unexpected keyword argument 'casual'$"):
        call(**arguments, casual=True)
    expected = f"attention_chunk: is 5; expected 0, as {function} does not support it"
    with pytest.raises(NotImplementedError, match=f"^{expected}$"):
        call(**arguments, attention_chunk=5)


# ------------------------------------------------------------------------------------------------ PyTorch's name
@pytest.mark.parametrize(
    "name,error,spoilt",
    [
        ("attn_mask", V, {"attn_mask": torch.ones(N, N + 1, dtype=torch.bool)}),
        ("attn_mask", V, {"attn_mask": torch.ones(1, B, HEADS, N, N)}),
        ("attn_mask", T, {"attn_mask": torch.ones(N, N, dtype=torch.int32)}),
        ("attn_mask", T, {"attn_mask": 1.0}),
        ("dropout_p", V, {"dropout_p": 1.5}),
        ("scale", V, {"scale": 0.0}),
        ("scale", V, {"scale": -2.0}),
        ("scale", T, {"scale": torch.ones(())}),
        ("causal", T, {"causal": True}),  # fmha's names
        ("mask", T, {"mask": None}),
        ("is_causal", T, {"is_causal": "yes"}),
        ("is_causal", T, {"is_causal": None}),
        ("is_causal", T, {"is_causal": 1}),
        ("enable_gqa", V, {"key": torch.ones(B, 2, N, D), "value": torch.ones(B, 2, N, D)}),
        ("query", V, {"query": torch.ones(D)}),
        ("query", V, {"query": torch.ones(HEADS, N, D)}),
        ("query", T, {"query": None}),
        ("key", V, {"key": torch.ones(3, HEADS, N, D)}),
        ("key", V, {"key": torch.ones(B, HEADS, N, D + 4)}),
        ("key", T, {"key": torch.ones(B, HEADS, N, D, dtype=F16)}),
        ("key", V, {"key": torch.ones(B, 3, N, D), "value": torch.ones(B, 3, N, D), "enable_gqa": True}),
        ("value", V, {"value": torch.ones(B, HEADS, N + 1, D)}),
        ("value", T, {"value": torch.ones(B, HEADS, N, D, dtype=INT64)}),
        ("return_lse", T, {"return_lse": True}),
    ],
)
def test_wrong_argument_of_sdpa(device, name, error, spoilt):
    arguments = {n: torch.ones(B, HEADS, N, D) for n in ("query", "key", "value")} | spoilt
    arguments = {n: on(device, x) for n, x in arguments.items()}
    assert_refused(cutlass_ext.scaled_dot_product_attention, name, error, arguments)


@pytest.mark.parametrize("dtype", [INT32, INT64, torch.uint8])
def test_masks_of_integers_are_told_of_bool(device, dtype):
    """Which is what they mostly are."""
    x = torch.ones(B, HEADS, N, D, device=device)
    text = f"attn_mask: has dtype {str(dtype)[6:]}; expected bool, true where a key is visible, or float32, "
    with pytest.raises(TypeError, match=f"^{text}"):
        cutlass_ext.scaled_dot_product_attention(x, x, x, torch.ones(N, N, dtype=dtype, device=device))


@pytest.mark.parametrize("function", ["fmha", "flash_attn_func"])
@pytest.mark.parametrize("layout", ["sparse", "nested"])
def test_tensors_without_strides(device, function, layout):
    given = valid(device)
    q = (
        given["q"].to_sparse()
        if layout == "sparse"
        else torch.nested.nested_tensor(list(given["q"]), layout=torch.jagged)
    )
    assert_refused(getattr(cutlass_ext, function), "q", TypeError, given | {"q": q})


def test_dtypes_in_errors_are_pythons(device):
    ends = torch.tensor([0, N], device=device)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": N, "max_seqlen_k": N}
    with pytest.raises(TypeError, match=r"^cu_seqlens_q: has dtype int64; expected int32$"):
        cutlass_ext.fmha(*(x[0] for x in valid(device).values()), **lengths)
    with pytest.raises(TypeError, match=r"^seqused_k: is of type list; expected a tensor or None$"):
        cutlass_ext.fmha(**valid(device), seqused_k=[1, 2])


def test_a_window_may_be_a_numpy_array(device):
    given = valid(device)
    want = cutlass_ext.fmha(**given, window=(2, 0))
    assert torch.equal(cutlass_ext.fmha(**given, window=np.array([2, 0])), want)


@pytest.mark.parametrize("start_pos", [2**31, -(2**32), 2**40])
def test_positions_beside_a_tensor_are_not_taken_modulo_2_to_the_32(start_pos):
    x, key_start = torch.randn(2, 6, 4, 16), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"start_pos: is {start_pos}; expected a position"):
        cutlass_ext.fmha(x, x, x, causal=True, start_pos=start_pos, key_start=key_start)
    with pytest.raises(ValueError, match=f"start_pos: is {start_pos}; expected a position"):
        cutlass_ext.dropout_mask(2, 4, 6, 6, 0.5, torch.tensor([1, 2]), start_pos=start_pos)
    with pytest.raises(TypeError, match=r"start_pos: is \[1, 2\]; expected an int, "):
        cutlass_ext.fmha(x, x, x, start_pos=[1, 2], key_start=1)


def test_head_dims_that_are_too_large_where_they_are_padded():
    """By the size that the caller gave."""
    x = torch.randn(1, 8, 2, 257)
    with pytest.raises(ValueError, match="q: has head_dim 257; expected one from 1 to 256"):
        cutlass_ext.flash_attn_func(x, x, x)
    with pytest.raises(ValueError, match="v: has head_dim 257; expected one from 1 to 256"):
        cutlass_ext.flash_attn_func(x[..., :9], x[..., :9], x)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16])
def test_dtypes_have_pythons_names(dtype):
    x = torch.zeros(1, 8, 2, 8, dtype=dtype)
    with pytest.raises(TypeError, match=f"q: has dtype {str(dtype)[6:]}; expected float32, float16 or bfloat16"):
        cutlass_ext.fmha(x, x, x)


def test_head_dims_that_differ_where_they_are_padded():
    x = torch.randn(2, 8, 4, 8)
    with pytest.raises(ValueError, match="key: has head_dim 7 and query has 8; they must be equal"):
        cutlass_ext.scaled_dot_product_attention(x, x[..., :7].contiguous(), x)
    with pytest.raises(ValueError, match="k: has head_dim 7 and q has 5; they must be equal"):
        cutlass_ext.flash_attn_func(x[..., :5], x[..., :7], x)
