"""`torch.ops.cutlass_ext.*` as PyTorch sees them: opcheck, torch.compile without recompiling, CUDA graphs."""

import inspect
import sys

import pytest
import torch
from oracle import expect
from torch._dynamo.testing import CompileCounterWithBackend

import cutlass_ext

COMPILE_TIMEOUT = pytest.mark.timeout(180)


@COMPILE_TIMEOUT
@pytest.mark.parametrize("features", [False, True])
def test_opcheck(target, features):
    options = {"causal": True, "backend": target.backend}
    if features:
        options |= {"start_pos": None, "start_positions": target.int32([3, 20]), "softmax_scale": 0.3, "softcap": 4.0,
                    "alibi_slopes": target.vector(4), "sink": target.vector(4), "seqused_k": target.int32([40, 7]),
                    "leftpad_k": target.int32([0, 2]), "num_splits": 2, "return_lse": True}  # fmt: skip
    tensors = tuple(target.qkv(2, 17, 4, 32, n_kv=40, heads_kv=2, d_v=16))
    torch.library.opcheck(torch.ops.cutlass_ext.fmha.default, tensors, options)


PREFILL, BACKWARD, CACHE = cutlass_ext.fmha, cutlass_ext.fmha_backward, cutlass_ext.flash_attn_with_kvcache
OPERATORS = [
    *[(PREFILL, f"fmha{of}") for of in ("", "_torch", "_with_grad", "_with_grad_torch", "_check", "_explain")],
    *[(PREFILL, f"fmha_out{of}") for of in ("", "_torch", "_check", "_explain")],
    *[(BACKWARD, f"fmha_backward{of}") for of in ("", "_torch", "_check", "_explain")],
    *[(CACHE, f"fmha_kvcache{of}") for of in ("", "_torch", "_append", "_append_torch", "_check", "_explain")],
    *[(CACHE, f"fmha_kvcache{of}") for of in ("_out", "_out_torch", "_append_out", "_append_out_torch")],
]


@pytest.mark.parametrize("function,name", OPERATORS, ids=lambda x: x if isinstance(x, str) else "")
def test_the_operators_have_the_defaults_of_the_functions(function, name):
    """A plain call leaves them out; start_pos it does not, which has another where the rows are aligned at the end."""
    schema = getattr(torch.ops.cutlass_ext, name).default._schema
    got = {a.name: a.default_value for a in schema.arguments if a.has_default_value() and a.name != "start_pos"}
    parameters = inspect.signature(function).parameters
    want = {n: p.default for n, p in parameters.items() if n not in ("start_pos", *engine_names(function))}
    want["window_left"], want["window_right"] = want.pop("window", None) or want.pop("window_size")
    want |= {"start_positions": None, "return_lse": want.pop("return_softmax_lse", False)}
    want |= {CACHE: {"cache_len": None}, BACKWARD: {"num_splits": 0}}.get(function, {})
    want |= {} if function is CACHE else {"key_starts": None}
    assert got == {n: x for n, x in want.items() if x is not inspect.Parameter.empty}


def engine_names(function):
    """Arguments of the function that the operators know under other names or not at all."""
    return {CACHE: ("out", "s_aux", "engine"), PREFILL: ("block_mask", "out")}.get(function, ())


class Recorded(Exception):
    """Says with what an operator was called."""


@pytest.mark.parametrize("function", [PREFILL, BACKWARD, CACHE])
def test_every_argument_arrives_under_its_name(function, monkeypatch):
    """One by one, each with a value of its own, at the place that the schema gives it."""

    def record(operator, arguments, _names):
        names = [argument.name for argument in operator._schema.arguments]
        raise Recorded(operator, dict(zip(names, arguments, strict=False)))

    monkeypatch.setattr(sys.modules[function.__module__], "run", record)
    sides = "window_left", "window_right"
    places = {"window": sides, "window_size": sides, "return_softmax_lse": ("return_lse",)}
    given = dict.fromkeys(("causal", "return_lse", "return_softmax_lse", "deterministic"), True)
    given |= {
        "dropout_p": 0.5,
        "softmax_scale": 0.3,
        "softcap": 2.0,
        "bias_grad": False,
        "key_start": 5,
        "head_start": 6,
        "sequence_start": 7,
        "num_splits": 8,
        "max_seqlen_q": 9,
        "max_seqlen_k": 10,
        "out_dtype": torch.float32,
    }
    given |= {"rotary_interleaved": False, "start_pos": 3, "window": (5, 6), "window_size": (5, 6), "backend": "simt"}
    parameters = {n: p for n, p in inspect.signature(function).parameters.items() if n not in engine_names(function)}
    required = {n: torch.ones(1) for n, p in parameters.items() if p.default is inspect.Parameter.empty}
    for name in parameters:
        value = required.get(name, given.get(name, torch.ones(1)))
        with pytest.raises(Recorded) as raised:
            function(**required | {name: value})
        _, got = raised.value.args
        values = value if isinstance(value, tuple) else (value,)
        assert all(got[n] is x for n, x in zip(places.get(name, (name,)), values, strict=True)), name
    tensor = torch.ones(1)
    for name, value, place in (("start_pos", tensor, "start_positions"), ("key_start", tensor, "key_starts"),
                               ("cache_seqlens", 7, "cache_len")):  # fmt: skip
        if name in parameters:
            with pytest.raises(Recorded) as raised:
                function(**required, **{name: value})
            assert raised.value.args[1][place] is value and raised.value.args[1].get(name) in (None, 0)
    for backend in ("auto", "torch") if function is not BACKWARD else ():
        for name in {"softcap", "k"} & (parameters.keys() - required.keys()):
            with pytest.raises(Recorded) as raised:
                function(**required, out=tensor, backend=backend, **{name: 3.0})
            operator, got = raised.value.args
            assert got["out"] is tensor and got[name] == 3.0 and got.get("backend", "auto") == backend
            assert ("_torch" in str(operator)) == (backend == "torch") and ("append" in str(operator)) == (name == "k")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fake_shapes(dtype):
    """Shapes, dtypes and strides of the results are known without data."""
    with torch._subclasses.FakeTensorMode():
        q, k, v = (torch.empty(s, dtype=dtype) for s in ((2, 17, 4, 32), (2, 40, 2, 32), (2, 40, 2, 16)))
        out, lse = cutlass_ext.fmha(q, k, v, return_lse=True)
    assert out.shape == (2, 17, 4, 16) and out.dtype == dtype and out.is_contiguous()
    assert lse.shape == (2, 4, 17) and lse.dtype == torch.float32 and lse.is_contiguous()


def test_out(target):
    """The same results and explanation as without; a graph of torch.compile writes it too; no gradients."""
    q, k, v = target.qkv(2, 17, 4, 32, n_kv=40, heads_kv=2)
    options = {"causal": True, "start_pos": "end", "backend": target.backend}
    want, lse = cutlass_ext.fmha(q, k, v, return_lse=True, **options)
    out = torch.full_like(want, float("nan"))
    got = cutlass_ext.fmha(q, k, v, return_lse=True, out=out, **options)
    assert got[0] is out and torch.equal(out, want) and torch.equal(got[1], lse)
    explanation = cutlass_ext.explain(q, k, v, **options)
    assert cutlass_ext.explain(q, k, v, out=out, **options) == explanation
    cache = {"causal": True, "backend": target.backend}
    explanation = cutlass_ext.explain(cutlass_ext.flash_attn_with_kvcache, q, k, v, **cache)
    assert cutlass_ext.explain(cutlass_ext.flash_attn_with_kvcache, q, k, v, out=out, **cache) == explanation

    torch._dynamo.reset()
    call = torch.compile(lambda out: cutlass_ext.fmha(q, k, v, out=out, **options), backend="aot_eager", fullgraph=True)
    assert torch.equal(call(out.fill_(float("nan"))), want) and torch.equal(out, want)
    for requires in (q, out):
        requires.requires_grad_()
        for function, given in ((cutlass_ext.fmha, options), (cutlass_ext.flash_attn_with_kvcache, cache)):
            with pytest.raises(NotImplementedError, match="requires grad"):
                function(q, k, v, out=out, **given)
        requires.requires_grad_(False)
    with pytest.raises(ValueError, match="out_dtype: does not go with out"):
        cutlass_ext.fmha(q, k, v, out=out, out_dtype=torch.float32, **options)


def compiled(target, dynamic=None, **options):
    """`fmha` alone under torch.compile(fullgraph=True), the same eagerly, and the counter of its compilations."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(q, k, v, start_pos, **tensors):
        return cutlass_ext.fmha(
            q, k, v, causal=True, start_pos=start_pos, return_lse=True, backend=target.backend, **tensors, **options
        )

    return torch.compile(call, backend=counter, fullgraph=True, dynamic=dynamic), call, counter


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@COMPILE_TIMEOUT
@pytest.mark.parametrize("start", ["int", "tensor", "end"])
def test_compile_gives_the_same(target_fp32, start):
    q, k, v = target_fp32.qkv(2, 17, 4, 32, n_kv=80, heads_kv=2)
    start_pos = {"int": 63, "tensor": target_fp32.int32([9, 50]), "end": "end"}[start]
    tensors = {
        "sink": target_fp32.vector(4),
        "alibi_slopes": target_fp32.vector(4),
        "seqused_k": target_fp32.int32([80, 33]),
    }
    fast, eager, counter = compiled(target_fp32, window=(40, -1), softcap=9.0)
    assert_equal(fast(q, k, v, start_pos, **tensors), eager(q, k, v, start_pos, **tensors))
    assert counter.frame_count == 1


@COMPILE_TIMEOUT
@pytest.mark.parametrize("dynamic,warm", [(True, [5]), (None, [5, 9])])
def test_start_pos_does_not_recompile(target_fp32, dynamic, warm):
    """Decoding: the first call compiles for every position, or the second, where only that shows that it changes."""
    q, k, v = target_fp32.qkv(2, 1, 4, 32, n_kv=300)
    fast, eager, counter = compiled(target_fp32, dynamic)
    for start_pos in warm:
        fast(q, k, v, start_pos)
    compilations = counter.frame_count
    for start_pos in (9, 63, 64, 127, 255):
        assert_equal(fast(q, k, v, start_pos), eager(q, k, v, start_pos))
    assert counter.frame_count == compilations


@COMPILE_TIMEOUT
def test_lengths_do_not_recompile(target_fp32):
    """The cache's valid part grows: its length is symbolic too."""
    q, k, v = target_fp32.qkv(2, 1, 4, 32, n_kv=300)
    fast, eager, counter = compiled(target_fp32, dynamic=True)
    fast(q, k[:, :7], v[:, :7], "end")
    compilations = counter.frame_count
    for n in (40, 64, 65, 299):
        assert_equal(fast(q, k[:, :n], v[:, :n], "end"), eager(q, k[:, :n], v[:, :n], "end"))
    assert counter.frame_count == compilations


@COMPILE_TIMEOUT
def test_export(target_fp32):
    class Decode(torch.nn.Module):
        def forward(self, q, k, v):
            return cutlass_ext.fmha(q, k, v, causal=True, start_pos="end")

    q, k, v = target_fp32.qkv(2, 17, 4, 32, n_kv=40)
    program = torch.export.export(Decode(), (q, k, v))
    assert torch.equal(program.module()(q, k, v), Decode()(q, k, v))
    assert "cutlass_ext.fmha.default" in str(program.graph)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("n_q", [3, 200])
def test_cuda_graph(gpu, n_q, num_splits):
    """Captured once, replayed on other contents: also of start_pos and seqused_k, which live on the device."""
    q, k, v = gpu.qkv(2, n_q, 4, 64, n_kv=300)
    start, used = gpu.int32([100, 200]), gpu.int32([300, 250])
    options = {"causal": True, "num_splits": num_splits, "start_pos": start, "seqused_k": used}
    call = lambda: cutlass_ext.fmha(q, k, v, return_lse=True, **options)  # noqa: E731
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for seed in range(3):
        torch.manual_seed(seed)
        for t, fresh in zip((q, k, v), gpu.qkv(2, n_q, 4, 64, n_kv=300), strict=True):
            t.copy_(fresh)
        start.copy_(gpu.int32([37 * seed, 297]))
        used.copy_(gpu.int32([128 + seed, 300]))
        graph.replay()
        assert_equal((out, lse), call())
        expect(q, k, v, causal=True, start_pos=start, seqused_k=used).check(out, lse, small=True)


@pytest.mark.parametrize("n_q", [1, 200])
def test_two_graphs_do_not_share_a_workspace(gpu, n_q):
    """Two captured calls with splits, replayed at the same time on two streams."""
    cases, graphs = [gpu.qkv(1, n_q, 4, 64, n_kv=4096) for _ in range(2)], []
    for case in cases:
        cutlass_ext.fmha(*case, num_splits=4)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = cutlass_ext.fmha(*case, num_splits=4)
        graphs.append((graph, out))
    want = [cutlass_ext.fmha(*case, num_splits=4) for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(50):
        for (graph, out), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                out.fill_(float("nan"))
                graph.replay()
    torch.cuda.synchronize()
    assert_equal([out for _, out in graphs], want)
