"""`cutlass_ext.distributed` on processes of this machine, over gloo, against one call of the whole; two GPUs, NCCL.

Four processes are started once; each test runs a function of this module on the first, or on some, of them.
"""

import contextlib
import io
import itertools
import os
import queue
import re
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing import assert_close

import cutlass_ext as ce
from cutlass_ext.distributed import bench, model
from cutlass_ext.distributed.spread import Spread

GROUPS = {1: [2], 2: [1, 3], 3: [0, 1, 2], 4: [0, 1, 2, 3]}  # ranks of a group are not those of the program
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ANSWER_S = 60


def serve(rank, size, port, device, tasks, answers):
    """A process of the pool: does what it is told, and answers with what came of it."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "NCCL_NVLS_ENABLE": "0",
    }
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=size)
    groups = {n: dist.new_group(ranks) for n, ranks in GROUPS.items() if max(ranks) < size}
    groups.setdefault(size, dist.group.WORLD)
    while (task := tasks.get()) is not None:
        function, ranks, arguments = task
        group = groups[ranks]
        if dist.get_rank(group) < 0:
            continue
        try:
            torch.manual_seed(0)
            answers.put((dist.get_rank(group), None, function(group, *arguments)))
        except Exception as error:
            answers.put((dist.get_rank(group), f"{type(error).__name__}: {error}", traceback.format_exc()))
    answers.close()
    answers.join_thread()
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo that lets go of its last tensor while Python ends would abort the process


class Pool:
    """Processes; `run(function, ranks, ...)` calls `function(group, ...)` on a group, and gives its ranks' results."""

    def __init__(self, size, device="cpu"):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        # A fork of a process that has imported PyTorch, and nothing more, starts at once; CUDA wants new processes.
        context = mp.get_context("spawn" if device == "cuda" else "forkserver")
        if device == "cpu":
            context.set_forkserver_preload(["pytest", "torch.distributed", "torch.testing"])
        self.tasks, self.answers = [context.Queue() for _ in range(size)], context.Queue()
        self.processes = [
            context.Process(target=serve, args=(r, size, port, device, self.tasks[r], self.answers), daemon=True)
            for r in range(size)
        ]
        for process in self.processes:
            process.start()

    def answers_of(self, function, ranks, *arguments, expected=None, ends=False):
        """Errors, by rank, and results; `ends`: a rank does once it has answered, as a program that has failed."""
        for tasks in self.tasks:
            tasks.put((function, ranks, arguments))
            if ends:
                tasks.put(None)
        found = {}
        try:
            for _ in range(ranks if expected is None else expected):
                rank, error, result = self.answers.get(timeout=ANSWER_S)
                found[rank] = error, result
        except queue.Empty:
            pytest.fail(f"ranks that answered: {sorted(found)}; the others hang")
        return found

    def run(self, function, ranks, *arguments):
        found = self.answers_of(function, ranks, *arguments)
        failures = [f"rank {rank}: {text}" for rank, (error, text) in found.items() if error]
        assert not failures, "\n".join(failures)
        return [found[rank][1] for rank in range(ranks)]

    def errors(self, function, ranks, *arguments):
        found = self.answers_of(function, ranks, *arguments)
        return [found[rank][0] for rank in range(ranks)]

    def close(self):
        for tasks in self.tasks:
            tasks.put(None)
        for process in self.processes:
            process.join(10)
            process.kill()


@pytest.fixture(scope="module")
def pool():
    pool = Pool(4)
    yield pool
    pool.close()


# ------------------------------------------------------------------------------------------------ against one process
LENGTHS = [13, 1, 0, 24, 5]


def bound_of(dtype):
    return dict.fromkeys(("rtol", "atol"), 2e-5 if dtype == torch.float32 else 2e-2)


def compare(group, layout, method, options, packed, dtype=torch.float32, device="cpu", N=24, H_q=4):
    """Outputs and gradients of the ranks' shards against one call of the whole; loss through out and lse."""
    B, H_kv, d, d_v = 2, 2, 16, 8
    ends = [0, *itertools.accumulate(LENGTHS)] if packed else None
    rows = (ends[-1],) if packed else (B, N)
    to = {"device": device, "dtype": dtype}
    q, k, v = (torch.randn(*rows, H, x, **to) for H, x in ((H_q, d), (H_kv, d), (H_kv, d_v)))
    dout, dlse = torch.randn(*rows, H_q, d_v, **to), torch.randn(*rows, H_q, device=device).mT
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    sink = options.pop("sink", None)
    cut = {"group": group, "layout": layout, "cu_seqlens": ends}
    lse_dim = {"dim": -1} | cut

    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink) if x is not None]
    whole = {}
    if packed:
        cu = torch.tensor(ends, dtype=torch.int32, device=device)
        whole = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": max(LENGTHS), "max_seqlen_k": max(LENGTHS)}
    of_sink = {"sink": leaves[3]} if sink is not None else {}
    want = ce.fmha(*leaves[:3], return_lse=True, **options, **of_sink, **whole)
    seen = want[1].isfinite()  # rows without keys have an lse of -inf, through which nothing flows
    loss = (want[0] * dout).sum() + want[1].masked_fill(~seen, 0).mul(dlse).sum()
    want_gradients = torch.autograd.grad(loss, leaves)

    parts = [ce.distributed.shard(x, **cut).requires_grad_() for x in (q, k, v)]
    of_sink = {}
    if sink is not None:
        of_sink = {"sink": sink.clone().requires_grad_()}
    got = ce.distributed.fmha(*parts, method=method, return_lse=True, **options, **of_sink, **cut)
    assert got[0].dtype == dtype and got[1].is_contiguous()
    seen = got[1].isfinite()
    loss = (got[0] * ce.distributed.shard(dout, **cut)).sum()
    loss = loss + got[1].masked_fill(~seen, 0).mul(ce.distributed.shard(dlse, **lse_dim)).sum()
    gradients = list(torch.autograd.grad(loss, [*parts, *of_sink.values()]))
    bound = bound_of(dtype)
    assert_close(ce.distributed.gather(got[0], **cut), want[0], **bound)
    assert_close(ce.distributed.gather(got[1], **lse_dim), want[1], **bound)
    for part, expected in zip(gradients[:3], want_gradients, strict=False):
        assert_close(ce.distributed.gather(part, **cut), expected, **bound)
    if sink is not None:
        dist.all_reduce(gradients[3], group=group)
        assert_close(gradients[3], want_gradients[3], **bound)


SLOPES, SINK = torch.tensor([0.5, 0.25, 0.1, 0.01]), torch.tensor([0.5, -1.0, 2.0, 0.0])
FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "causal window": {"causal": True, "window": (5, -1)},
    "alibi": {"causal": True, "alibi_slopes": SLOPES},
    "sink": {"causal": True, "sink": SINK},
    "sink window softcap": {"sink": SINK, "window": (4, -1), "softcap": 3.0, "softmax_scale": 0.4},
    "all": {"causal": True, "window": (9, -1), "alibi_slopes": SLOPES, "sink": SINK, "softcap": 3.0},
}


SEED = torch.tensor([7, 11])
DROPOUT = {"causal": True, "dropout_p": 0.3, "dropout_seed": SEED, "head_start": 2, "sequence_start": 1}
LAYOUTS = [("zigzag", name) for name in FEATURES] + [("contiguous", name) for name in ("causal", "all")]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("layout,features", [*LAYOUTS, ("zigzag", "dropout"), ("contiguous", "dropout")])
def test_ring(pool, ranks, layout, packed, features):
    pool.run(compare, ranks, layout, "ring", FEATURES.get(features, DROPOUT), packed)


def rounds_once(group, options):
    """The ring's 16 bits against those of float32's results, which on a CPU have no other error."""
    q, k, v = (torch.randn(1, 48, H, 16).bfloat16() for H in (4, 2, 2))
    want = ce.fmha(q.float(), k.float(), v.float(), **options)
    parts = [ce.distributed.shard(x, group=group) for x in (q, k, v)]
    got = ce.distributed.gather(ce.distributed.fmha(*parts, group=group, method="ring", **options), group=group)
    assert_close(got.float(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("features", ["causal", "alibi", "dropout"])
def test_parts_of_a_ring_are_not_rounded(pool, features):
    pool.run(rounds_once, 4, FEATURES.get(features, DROPOUT))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", [2, 4])  # of two KV heads: one a rank, and one for two ranks
@pytest.mark.parametrize("features", ["causal", "all", "dropout"])
def test_all_to_all(pool, ranks, layout, packed, features):
    pool.run(compare, ranks, layout, "all_to_all", FEATURES.get(features, DROPOUT), packed)


def compare_gathered(group, layout, options, packed, in_pieces, *arguments):
    """With the keys in one piece or in two, and kept for the backward pass or gathered again."""
    from cutlass_ext.distributed import all_gather

    before = all_gather.PIECES_BYTES, all_gather.KEPT_BYTES
    all_gather.PIECES_BYTES, all_gather.KEPT_BYTES = (0, 1 << 27) if in_pieces else (1 << 23, 0)
    try:
        compare(group, layout, "all_gather", options, packed, *arguments)
    finally:
        all_gather.PIECES_BYTES, all_gather.KEPT_BYTES = before


@pytest.mark.parametrize("in_pieces", [True, False], ids=["pieces kept", "whole again"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("layout,features", [*LAYOUTS, ("zigzag", "dropout")])
def test_all_gather(pool, ranks, layout, packed, features, in_pieces):
    pool.run(compare_gathered, ranks, layout, FEATURES.get(features, DROPOUT), packed, in_pieces)


def compare_odd(group):
    """bfloat16 at addresses that are no multiples of 16 bytes."""
    cut, bound = {"group": group}, bound_of(torch.bfloat16)

    def tensor(H):
        return torch.randn(2, 24, H, 16).bfloat16()

    q, k, v, dout = (tensor(H) for H in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    want = ce.fmha(*leaves, causal=True)
    want = [want, *torch.autograd.grad(want, leaves, dout)]
    parts = []
    for x in (q, k, v):
        x = ce.distributed.shard(x.detach(), **cut)
        memory = torch.empty(x.numel() + 1, dtype=x.dtype)
        parts.append(memory[1:].view_as(x).copy_(x).requires_grad_())
    got = ce.distributed.fmha(*parts, method="all_gather", causal=True, **cut)
    got = [got, *torch.autograd.grad(got, parts, ce.distributed.shard(dout, **cut))]
    for part, expected in zip(got, want, strict=True):
        assert_close(ce.distributed.gather(part, **cut), expected, **bound)


def test_all_gather_of_odd_addresses(pool):
    pool.run(compare_odd, 2)


def test_copies_of_16_bytes():
    """Where all tensors have such elements, and only there."""
    from cutlass_ext.distributed.all_gather import _wide

    x = torch.zeros(4, 6, 16, dtype=torch.bfloat16)

    def is_wide(*tensors):
        (size,) = {x.element_size() for x in _wide(*tensors)}
        return size == 16

    assert is_wide(x, x[:, 1:3], x[..., 8:], x.transpose(0, 1), x.float(), x[:0])
    assert not is_wide(x, x[..., 4:]) and not is_wide(x, x[..., :4]) and not is_wide(x, x.mT)
    assert not is_wide(torch.zeros(4, 12, dtype=torch.bfloat16)) and not is_wide(x.flatten()[1:-7])


@pytest.fixture(scope="module")
def eight():
    pool = Pool(8)
    yield pool
    pool.close()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("method,features", [("ring", "all"), ("all_to_all", "causal"), ("all_gather", "all")])
def test_eight_ranks(eight, method, features, packed):
    """A host of GPUs; of packed sequences some ranks have no rows."""
    H_q = 8 if method == "all_to_all" else 4
    eight.run(compare, 8, "zigzag", method, FEATURES[features], packed, torch.float32, "cpu", 48, H_q)


@pytest.mark.parametrize("method", ["ring", "all_to_all", "all_gather", "auto"])
def test_one_rank(pool, method):
    pool.run(compare, 1, "zigzag", method, FEATURES["all"], False)


def under_autocast(group, method):
    """As `fmha` does it: q, k and v are cast, whatever goes round, and gradients are the leaves' own."""
    x, of = torch.randn(3, 1, 40, 4, 16), {"group": group}
    leaves = [ce.distributed.shard(part, **of).requires_grad_() for part in x]
    cast = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    with torch.autocast("cpu", torch.bfloat16):
        got = ce.distributed.fmha(*leaves, causal=True, method=method, **of)
    want = ce.distributed.fmha(*cast, causal=True, method=method, **of)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)
    gradients = torch.autograd.grad(got.float().sum(), leaves)
    for gradient, other in zip(gradients, torch.autograd.grad(want.float().sum(), cast), strict=True):
        assert gradient.dtype == torch.float32 and torch.equal(gradient, other.float())


@pytest.mark.parametrize("method", ["ring", "all_to_all", "all_gather"])
def test_autocast(pool, method):
    pool.run(under_autocast, 2, method)


def decode_under_autocast(group):
    q, k, v = torch.randn(1, 1, 4, 16), torch.randn(1, 9, 4, 16), torch.randn(1, 9, 4, 16)
    dist.broadcast(q, group=group, group_src=0)
    with torch.autocast("cpu", torch.bfloat16):
        got = ce.distributed.decode(q, k, v, group=group)
    assert torch.equal(got, ce.distributed.decode(q.bfloat16(), k.bfloat16(), v.bfloat16(), group=group))


def test_decode_under_autocast(pool):
    pool.run(decode_under_autocast, 2)


def on_another_default_device(group):
    x = torch.randn(1, 24, 4, 16)  # lengths that no other test has: what is made for them is kept
    torch.set_default_device("meta")
    try:
        part = ce.distributed.shard(x, group=group)
        assert ce.distributed.fmha(part, part, part, causal=True, group=group).device.type == "cpu"
    finally:
        torch.set_default_device("cpu")


def test_another_default_device(pool):
    pool.run(on_another_default_device, 2)


def wrong_shards(group):
    for x, name, error in ((torch.arange(8), "dim", ValueError), ([1, 2], "x", TypeError)):
        for function in (ce.distributed.shard, ce.distributed.gather):
            with pytest.raises(error, match=f"{name}: "):
                function(x, group=group)


def test_wrong_shards(pool):
    pool.run(wrong_shards, 2)


def inference_first(group, cu_seqlens, method):
    cut = {"group": group, "cu_seqlens": cu_seqlens}
    x = torch.randn(*([40] if cu_seqlens else [1, 40]), 4, 16)
    results = []
    for mode in (torch.inference_mode, torch.enable_grad):
        with mode():
            part = ce.distributed.shard(x.clone().requires_grad_(), **cut)
            results.append(ce.distributed.fmha(part, part, part, causal=True, method=method, **cut))
    results[1].sum().backward()
    assert torch.equal(*results)


@pytest.mark.parametrize("cu_seqlens", [None, [0, 17, 40]], ids=["padded", "packed"])
@pytest.mark.parametrize("method", ["ring", "all_to_all", "all_gather"])
def test_training_after_inference(pool, method, cu_seqlens):
    """What is kept from call to call serves both."""
    pool.run(inference_first, 4, cu_seqlens, method)


@pytest.mark.parametrize("method", ["ring", "all_to_all", "all_gather"])
def test_16_bits(pool, method):
    pool.run(compare, 2, "zigzag", method, FEATURES["causal"], False, torch.bfloat16)


@pytest.fixture(scope="module")
def gpu_pool():
    pool = Pool(2, "cuda")
    yield pool
    pool.close()


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["ring", "all_to_all", "all_gather"])
@pytest.mark.parametrize("features", [*FEATURES, "dropout"])
def test_two_gpus(gpu_pool, method, features, dtype, packed):
    gpu_pool.run(compare, 2, "zigzag", method, FEATURES.get(features, DROPOUT), packed, dtype, "cuda")


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize("in_pieces", [True, False], ids=["pieces kept", "whole again"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("features", ["causal", "all", "dropout"])
def test_two_gpus_gather(gpu_pool, features, packed, in_pieces):
    options = FEATURES.get(features, DROPOUT)
    gpu_pool.run(compare_gathered, 2, "zigzag", options, packed, in_pieces, torch.bfloat16, "cuda")


def long_runs(group, method):
    """Two thousand rows a rank, thrice: messages and calls that overlap, in any order, change no bit."""
    cut = {"group": group}
    inputs = [torch.randn(1, 4096, H, 128, device="cuda").bfloat16() for H in (32, 8, 8)]
    whole = [x.clone().requires_grad_() for x in inputs]
    want = ce.fmha(*whole, causal=True, deterministic=True)
    want = [want, *torch.autograd.grad(want, whole, want.detach())]
    leaves = [ce.distributed.shard(x, **cut).requires_grad_() for x in inputs]
    dout, runs = ce.distributed.shard(want[0].detach(), **cut), []
    for _ in range(3):
        out = ce.distributed.fmha(*leaves, causal=True, deterministic=True, method=method, **cut)
        runs.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    for got, expected in zip(runs[0], want, strict=True):
        assert_close(ce.distributed.gather(got, **cut), expected.detach(), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize("method", ["ring", "all_to_all", "all_gather"])
def test_two_gpus_same_bits(gpu_pool, method):
    gpu_pool.run(long_runs, 2, method)


def torch_context_parallel(group):
    """PyTorch's context parallelism, whose operators `activate` replaces, against one call of the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn import functional  # of which it replaces the function, while it lasts

    mesh = init_device_mesh("cuda", (dist.get_world_size(group),))
    q, k, v = (torch.randn(1, 4, 512, 64, device="cuda").bfloat16() for _ in range(3))
    whole = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    want = ce.fmha(*whole, causal=True)
    gradients = torch.autograd.grad(want.sum(), whole)
    with ce.activate(), context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = functional.scaled_dot_product_attention(*leaves, is_causal=True)
        out.sum().backward()
    # it balances the load as zigzag does
    got = [ce.distributed.gather(x.transpose(1, 2).contiguous(), group=group) for x in (out, *(x.grad for x in leaves))]
    for a, b in zip(got, (want, *gradients), strict=True):
        assert_close(a, b, rtol=2e-2, atol=3e-2)


@pytest.mark.gpu
@TWO_GPUS
def test_torch_context_parallel(gpu_pool):
    gpu_pool.run(torch_context_parallel, 2)


# ------------------------------------------------------------------------------------------------ shards
def round_trip(group, layout, dim, cu_seqlens):
    x = torch.arange(2.0 * 24 * 3).view(2, 24, 3).transpose(0, 1)  # rows in dimension 0, not contiguous
    x = x.movedim(0, dim).requires_grad_()
    part = ce.distributed.shard(x, group=group, layout=layout, dim=dim, cu_seqlens=cu_seqlens)
    whole = ce.distributed.gather(part, group=group, layout=layout, dim=dim, cu_seqlens=cu_seqlens)
    assert torch.equal(whole, x) and whole.is_contiguous()
    weight = dist.get_rank(group) + 1  # the gradients of all ranks are summed, and each goes to the rows it is of
    (gradient,) = torch.autograd.grad((whole * x.detach()).sum() * weight, x)
    dist.all_reduce(gradient, group=group)
    assert torch.equal(gradient, x * sum(range(1, dist.get_world_size(group) + 1)))
    return part.movedim(dim, 0)[:, 0, 0].tolist()


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 5, 6, 24]], ids=["padded", "packed"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_shard_and_gather(pool, layout, cu_seqlens, dim):
    shards = pool.run(round_trip, 2, layout, dim, cu_seqlens)
    rows = [[int(x) // 3 for x in shard] for shard in shards]
    if cu_seqlens is None and layout == "contiguous":
        assert rows == [list(range(12)), list(range(12, 24))]
    elif cu_seqlens is None:
        assert rows == [[*range(6), *range(18, 24)], list(range(6, 18))]
    else:
        assert sorted(rows[0] + rows[1]) == list(range(24)) and all(abs(len(r) - 12) <= 2 for r in rows)


def test_zigzag_balances_causal_work():
    """Pairs of a row and a key that it sees, of each rank: equal but for those on the diagonal."""
    spread = Spread((64,), 4, "zigzag", False)
    work = [sum(row + 1 for row in spread.rows_of(r, torch.device("cpu")).tolist()) for r in range(4)]
    assert max(work) == min(work)
    contiguous = Spread((64,), 4, "contiguous", False)
    work = [sum(row + 1 for row in contiguous.rows_of(r, torch.device("cpu")).tolist()) for r in range(4)]
    assert max(work) > 6 * min(work)


# ------------------------------------------------------------------------------------------------ what is sent
def messages(group, layout, options):
    """Who is sent how many rows of keys, in a call: the messages of a ring."""
    sent, plain = [], dist.P2POp.__new__
    q, k, v = (torch.randn(1, 8, H, 16) for H in (4, 2, 2))

    def recorded(cls, op, tensor, *args, **kwargs):
        if op is dist.isend:
            sent.append((kwargs["group_peer"], tensor.numel() // (2 * 2 * 16)))
        return plain(cls, op, tensor, *args, **kwargs)

    dist.P2POp.__new__ = staticmethod(recorded)
    try:
        ce.distributed.fmha(q, k, v, group=group, layout=layout, method="ring", **options)
    finally:
        dist.P2POp.__new__ = staticmethod(plain)
    return sorted(sent)


def test_keys_that_nobody_sees_are_not_sent(pool):
    """In a ring of four with eight rows each: all to all; causal, chunks to later ranks only; a window, to the next."""
    everyone = [[(to, 8) for to in range(4) if to != rank] for rank in range(4)]
    assert pool.run(messages, 4, "zigzag", {}) == everyone
    causal = [[(to, 8 if to > rank else 0) for to in range(4)] for rank in range(4)]
    assert pool.run(messages, 4, "contiguous", {"causal": True}) == [[m for m in row if m[1]] for row in causal]
    halves = [[(to, 4 if to > rank else 8) for to in range(4) if to != rank] for rank in range(4)]
    assert pool.run(messages, 4, "zigzag", {"causal": True}) == halves
    window = {"causal": True, "window": (8, -1)}
    assert pool.run(messages, 4, "contiguous", window) == [[(1, 8)], [(2, 8)], [(3, 8)], []]


def bits(group, method):
    q, k, v = (torch.randn(2, 8, H, 16, requires_grad=True) for H in (4, 2, 2))
    out = ce.distributed.fmha(q, k, v, group=group, method=method, causal=True)
    return [x.detach().view(torch.int32).tolist() for x in (out, *torch.autograd.grad(out.sum(), (q, k, v)))]


@pytest.mark.parametrize("method", ["ring", "all_to_all", "all_gather"])
def test_same_bits_run_after_run(pool, method):
    assert pool.run(bits, 2, method) == pool.run(bits, 2, method)


def drawn_seed(group):
    torch.manual_seed(dist.get_rank(group))  # the first rank's generator draws for all
    q = torch.randn(1, 8, 4, 16)
    x = torch.eye(16).view(1, 16, 1, 16).expand(1, 16, 4, 16)
    rows = slice(dist.get_rank(group) * 8, dist.get_rank(group) * 8 + 8)
    options = {"group": group, "layout": "contiguous", "dropout_p": 0.5}
    out = ce.distributed.fmha(torch.zeros_like(q), x[:, rows], x[:, rows].contiguous(), **options)
    return (out != 0).tolist()


def test_the_first_rank_draws_the_seed(pool):
    """Values that are unit vectors show which weights were kept."""
    kept = torch.tensor(pool.run(drawn_seed, 2))[:, 0].flatten(0, 1).permute(1, 0, 2)
    generator = torch.Generator().manual_seed(0)
    torch.randn(1, 8, 4, 16, generator=generator)
    seed = torch.randint(2**63 - 1, (2,), generator=generator)
    assert torch.equal(kept, ce.dropout_mask(1, 4, 16, 16, 0.5, seed)[0])


def compiled(group, method):
    """By torch.compile, which leaves the messages alone."""
    of = {"group": group}
    q, k, v = (ce.distributed.shard(x, **of).requires_grad_() for x in torch.randn(3, 1, 40, 4, 16))
    call = lambda q, k, v: ce.distributed.fmha(q, k, v, causal=True, method=method, **of)  # noqa: E731
    fast, want = torch.compile(call, backend="aot_eager")(q, k, v), call(q, k, v)
    assert torch.equal(fast, want)
    gradients = torch.autograd.grad(fast.sum(), (q, k, v))
    for gradient, other in zip(gradients, torch.autograd.grad(want.sum(), (q, k, v)), strict=True):
        assert_close(gradient, other)


@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_torch_compile(pool, method):
    pool.run(compiled, 2, method)


def chosen(group, rows, H_q, H_kv, window=(-1, -1)):
    from cutlass_ext.distributed import interface, spread

    q, k = (torch.empty(1, rows, H, 128, dtype=torch.bfloat16, device="meta") for H in (H_q, H_kv))
    spread = spread.spread_of(rows * group.size(), None, group.size(), "zigzag", "q")
    return interface._method("auto", q, k, k, spread, True, window)


def test_auto(pool):
    """What the model says is faster, and the heads allow; K and V of all ranks while they are small; windows in a
    ring."""
    assert pool.run(chosen, 2, 1 << 15, 32, 8) == ["all_gather"] * 2
    assert pool.run(chosen, 3, 1 << 14, 32, 8) == ["all_gather"] * 3
    assert pool.run(chosen, 2, 1 << 18, 32, 8) == ["ring"] * 2  # 2 GB
    assert pool.run(chosen, 3, 1 << 18, 32, 8) == ["ring"] * 3
    assert pool.run(chosen, 4, 1 << 10, 32, 8, (1000, 0)) == ["ring"] * 4


# ------------------------------------------------------------------------------------------------ decode
def decode_compare(group, options, N_q, paged, dtype=torch.float32, device="cpu"):
    """Ranks with 0 to 9 keys of each of three sequences, in order."""
    B, H_q, H_kv, d = 3, 4, 2, 16
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    counts = torch.randint(0, 10, (ranks, B), dtype=torch.int32).to(device)
    total = counts.sum(0).int()
    sizes = (N_q, H_q), (10 * ranks, H_kv), (10 * ranks, H_kv)
    q, k, v = (torch.randn(B, n, H, d, device=device).to(dtype) for n, H in sizes)
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    start = total - N_q
    want = ce.fmha(q, k, v, seqused_k=total, start_pos=start, return_lse=True, **options)
    first = counts[:rank].sum(0).int()
    own = [k.new_full((B, 12, H_kv, d), torch.nan) for _ in range(2)]
    for b in range(B):
        for to, x in zip(own, (k, v), strict=True):
            to[b, : counts[rank, b]] = x[b, first[b] : first[b] + counts[rank, b]]
    table = None
    if paged:  # pages of four
        own = [x.view(B * 3, 4, H_kv, d) for x in own]
        table = torch.arange(B * 3, dtype=torch.int32, device=device).view(B, 3)
    got = ce.distributed.decode(
        q, *own, group=group, seqused_k=counts[rank], start_pos=start, key_start=first, block_table=table,
        return_lse=True, **options,
    )  # fmt: skip
    assert_close(got, want, **bound_of(dtype))
    return [x.float().view(torch.int32).tolist() for x in got]


@pytest.mark.parametrize("features", ["full", "all"])
@pytest.mark.parametrize("paged", [False, True], ids=["padded", "pages"])
@pytest.mark.parametrize("ranks,N_q", [(2, 1), (3, 4), (4, 1)])
def test_decode(pool, ranks, N_q, paged, features):
    results = pool.run(decode_compare, ranks, FEATURES[features], N_q, paged)
    assert all(result == results[0] for result in results)


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize("features", ["full", "all"])
@pytest.mark.parametrize("paged", [False, True], ids=["padded", "pages"])
@pytest.mark.parametrize("dtype,N_q", [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 4)], ids=str)
def test_two_gpus_decode(gpu_pool, dtype, N_q, paged, features):
    first, second = gpu_pool.run(decode_compare, 2, FEATURES[features], N_q, paged, dtype, "cuda")
    assert first == second


# ------------------------------------------------------------------------------------------------ what fails
def call(group, of_ranks, function="fmha", device="cpu"):
    """A call with arguments of its own on some ranks: `of_ranks[rank]`, or `of_ranks[None]` on the others."""
    arguments = of_ranks.get(dist.get_rank(group), of_ranks.get(None, {})).copy()
    shapes = arguments.pop("shapes", [(1, 4, 4, 16), (1, 4, 2, 16), (1, 4, 2, 16)])
    to = {"dtype": arguments.pop("dtype", None), "device": device}
    tensors = [torch.randn(shape, **to) for shape in shapes]
    return getattr(ce.distributed, function)(*tensors, group=group, **arguments)


SHORTER = [(1, 2, 4, 16), (1, 2, 2, 16), (1, 2, 2, 16)]
PACKED = [(3, 4, 16), (3, 2, 16), (3, 2, 16)]


@pytest.mark.parametrize(
    "of_ranks,texts",
    [
        ({1: {"shapes": SHORTER}}, ["q: is", "[1, 4, 4, 16]", "[1, 2, 4, 16]", "rank 0", "rank 1"]),
        ({1: {"causal": True}}, ["causal: is False on rank 0 and True on rank 1"]),
        ({2: {"window": (3, 0)}}, ["window: is (-1, -1) on rank 0 and (3, 0) on rank 2"]),
        ({3: {"return_lse": True}}, ["return_lse: is False on rank 0 and True on rank 3"]),  # all-to-all would send it
        ({0: {"dtype": torch.bfloat16}}, ["q: is torch.bfloat16", "rank 1"]),
        ({2: {"method": "ring"}}, ["method: is all_gather on rank 0 and ring on rank 2"]),
        ({2: {"softcap": -1.0}}, ["ValueError: softcap", "(rank 2 of 4)"]),
        ({1: {"layout": "striped"}}, ['layout: is \'striped\'; expected "zigzag" or "contiguous" (rank 1 of 4)']),
        ({3: {"shapes": [(1, 4, 4, 16), (1, 3, 2, 16), (1, 4, 2, 16)]}}, ["k: has 3 rows and q 4", "(rank 3 of 4)"]),
        ({0: {"shapes": [(4, 4, 16)] * 3}}, ["ValueError: q: has shape [4, 4, 16]", "(rank 0 of 4)"]),
        ({3: {"alibi_slopes": torch.ones(5)}}, ["ValueError: alibi_slopes", "(rank 3 of 4)"]),
        ({None: {"shapes": [(1, 3, 4, 16)] * 3}}, ["q: the whole has 12 rows; expected a multiple of 8", "of 4 ranks"]),
        ({None: {"shapes": PACKED, "cu_seqlens": [0, 8]}}, ["q: has 3 rows; expected 2"]),
        ({None: {"shapes": PACKED, "cu_seqlens": [0, 8, 7]}}, ["cu_seqlens: is [0, 8, 7]"]),
        ({None: {"shapes": [(1, 4, 3, 16)] * 3, "method": "all_to_all"}}, ["method: all_to_all", "3 query heads"]),
        ({1: {"shapes": PACKED, "cu_seqlens": [0, 12]}}, ["q: is", "[1, 4, 4, 16]", "[rows, 4, 16]", "rank 1"]),
        ({1: {"sink": [0.5]}}, ["(rank 1 of 4)"]),
        ({None: {"method": "tree"}}, ["ValueError: method: is 'tree'"]),
    ],
)
def test_errors_on_all_ranks(pool, of_ranks, texts):
    """What is wrong on one rank is said on all of them, and the next call works."""
    for error in pool.errors(call, 4, of_ranks):
        assert error is not None and all(text in error for text in texts), error
    pool.run(call, 4, {})


def call_of_many(group, of_ranks):
    """As more ranks than send to each other would."""
    from cutlass_ext.distributed import agreement

    before, agreement.DIRECT_RANKS = agreement.DIRECT_RANKS, 1
    try:
        call(group, of_ranks)
    finally:
        agreement.DIRECT_RANKS = before


def test_errors_of_many_ranks(pool):
    for error in pool.errors(call_of_many, 4, {2: {"softcap": -1.0, "method": "all_gather"}}):
        assert "ValueError: softcap" in error and "(rank 2 of 4)" in error
    pool.run(call_of_many, 4, {})


def test_errors_of_all_gather(pool):
    """Which begins before the others have answered."""
    options = {"method": "all_gather", "causal": True}
    for error in pool.errors(call, 4, {None: options, 1: options | {"window": (2, 0)}}):
        assert "ValueError: window: is (-1, -1) on rank 0 and (2, 0) on rank 1" in error
    for error in pool.errors(call, 4, {None: options, 3: options | {"softcap": -1.0}}):
        assert "ValueError: softcap" in error and "(rank 3 of 4)" in error
    pool.run(call, 4, {None: options})


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize(
    "of_ranks,texts",
    [
        ({1: {"causal": True}}, ["ValueError: causal: is False on rank 0 and True on rank 1"]),
        ({1: {"softcap": -1.0}}, ["ValueError: softcap", "(rank 1 of 2)"]),
        ({1: {"shapes": SHORTER}}, ["q: is", "[1, 4, 4, 16]", "[1, 2, 4, 16]", "rank 0", "rank 1"]),
    ],
)
def test_two_gpus_errors(gpu_pool, of_ranks, texts):
    """Over NCCL arguments go round on the host, over gloo."""
    for error in gpu_pool.errors(call, 2, of_ranks, "fmha", "cuda"):
        assert error is not None and all(text in error for text in texts), error
    gpu_pool.run(call, 2, {}, "fmha", "cuda")


def test_errors_of_shards_and_decode(pool):
    def shapes(*shape):
        return {"shapes": [shape]}

    for error in pool.errors(call, 2, {0: shapes(1, 4, 3), 1: shapes(1, 2, 3)}, "gather"):
        assert "ValueError: spread of rows: is (8,) on rank 0 and (4,) on rank 1" in error
    for error in pool.errors(call, 2, {None: shapes(1, 7, 3)}, "shard"):
        assert "ValueError: x: the whole has 7 rows; expected a multiple of 4" in error
    for error in pool.errors(call, 2, {None: shapes(7, 3) | {"cu_seqlens": [0, 8]}}, "shard"):
        assert "ValueError: x: has 7 rows; expected 8" in error
    for error in pool.errors(call, 2, {1: {"start_pos": "end"}}, "decode"):
        assert "ValueError: start_pos" in error and "(rank 1 of 2)" in error
    for error in pool.errors(call, 2, {1: {"softcap": 2.0}}, "decode"):
        assert "softcap: is 0.0 on rank 0 and 2.0 on rank 1" in error


def test_errors_without_a_group():
    x = torch.randn(1, 4, 2, 16)
    with pytest.raises(RuntimeError, match="is not initialised"):
        ce.distributed.fmha(x, x, x)


def dies(group, method, check, backward, device="cpu"):
    """Before the call, or between its passes; on a GPU before the second call."""
    q, k, v = (torch.randn(1, 6, 3, 16, device=device, requires_grad=backward) for _ in "qkv")
    options = {"group": group, "layout": "contiguous", "method": method, "check": check}
    if backward or device == "cuda":
        out = ce.distributed.fmha(q, k, v, **options)
    dist.barrier(group)  # until all of them have their groups
    if dist.get_rank(group) == 1:
        os._exit(0)
    torch.autograd.grad(out.sum(), (q, k, v)) if backward else ce.distributed.fmha(q, k, v, **options)


MISSING = {
    "ring": r"k and v of step \d did not",
    "all_to_all": "heads and rows were not",
    "all_gather": "k and v did not",
}


@pytest.mark.parametrize(
    "method,check,backward,missing",
    [
        ("ring", True, False, "rank 1 is gone"),
        *[(method, False, False, missing) for method, missing in MISSING.items()],
        *[(method, False, True, "") for method in MISSING],
    ],
)
def test_a_dead_rank(method, check, backward, missing):
    """Found out by the check of arguments, or without it by the messages, forward and backward. A rank may wait for one
    that has found out before it: for that, these end, too."""
    pool = Pool(3)
    try:
        found = pool.answers_of(dies, 3, method, check, backward, expected=2, ends=True)
    finally:
        pool.close()
    for rank, (error, _) in found.items():
        assert re.match(f"RuntimeError: rank {rank} of 3: {missing}", error), found
        missing = missing.replace("rank 1", f"rank (1|{rank})")  # the second may miss the first one, which has ended


@pytest.mark.gpu
@TWO_GPUS
def test_a_dead_rank_of_two_gpus():
    """Its host is missed at once, before NCCL would wait for it."""
    pool = Pool(2, "cuda")
    try:
        found = pool.answers_of(dies, 2, "ring", True, False, "cuda", expected=1)
    finally:
        pool.close()
    assert found[0][0].startswith("RuntimeError: rank 0 of 2: rank 1 is gone"), found


def stays_away(group, method, check):
    """The first rank alone makes a call, in a group with a timeout of its own."""
    impatient = dist.new_group(dist.get_process_group_ranks(group), timeout=timedelta(seconds=3))
    begin = monotonic()
    if dist.get_rank(group) == 0:
        x = torch.randn(1, 8, 4, 16)
        with pytest.raises(RuntimeError, match=r"^rank 0 of 4: ") as raised:
            ce.distributed.fmha(x, x, x, group=impatient, method=method, check=check)
        assert monotonic() - begin < 30
        return str(raised.value)
    sleep(4)  # or its connections close, which is a death
    return ""


@pytest.mark.parametrize("method,check", [("ring", True), ("ring", False), ("all_gather", False)])
def test_a_rank_that_stays_away(pool, method, check):
    """The others wait as long as the group's timeout says, and say whom for."""
    first, *_ = pool.run(stays_away, 4, method, check)
    assert re.search(r"rank [123] is gone, or did not make this call" if check else MISSING[method], first), first


def without_cpu_tensors(group):
    """The check in a group that stands for NCCL's: its backend says that it takes no CPU tensors."""
    from cutlass_ext.distributed import agreement

    takes, patient = dist.get_backend_config, dist.new_group(timeout=timedelta(seconds=77))
    dist.get_backend_config = lambda _: "cuda:gloo"
    try:
        host = agreement._between_hosts(patient)
        assert host is not patient and host is agreement._between_hosts(patient)
        assert host.options._timeout == timedelta(seconds=77)
        call(patient, {})
        try:
            call(patient, {2: {"softcap": -1.0}})
        except ValueError as error:
            return str(error)
    finally:
        dist.get_backend_config = takes


def test_hosts_that_have_no_group(pool):
    """NCCL's groups get gloo beside them, with their timeout (gloo's own is half an hour), whatever other groups each
    rank is in: of this pool's they are in two to three."""
    assert all("softcap" in text and "(rank 2 of 4)" in text for text in pool.run(without_cpu_tensors, 4))


# ------------------------------------------------------------------------------------------------ python/train.py
def train_in_parallel(group, options, path, device="cpu"):
    """What the first process prints of a training on all of them and then on one."""
    sys.path.append(str(Path(__file__).parents[2] / "python"))
    import train

    tiny = f"--device {device} --steps 3 --batch 2 --context 32 --layers 2 --heads 4 --kv-heads 2 --width 32"
    sys.argv = ["train.py", *f"{tiny} {options} --plot {path}".split()]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train.main()
    return out.getvalue()


@pytest.mark.parametrize(
    "options,bound",
    [
        ("--parallel cp=2,tp=2", 1e-5),
        ("--parallel dp=2,cp=2", 1e-5),
        ("--parallel dp=2,tp=2", 1e-5),
        ("--parallel cp=4 --dtype bfloat16 --checkpoint", 2e-2),
    ],
)
def test_training_in_parallel(pool, options, bound, tmp_path):
    """The loss curve of one process, by data, context and tensor parallelism."""
    first, *others = pool.run(train_in_parallel, 4, options, str(tmp_path / "curves.png"))
    assert float(re.search(r"largest difference .*: (\S+)", first)[1]) <= bound
    assert "4 processes" in first and others == [""] * 3


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize("parallel", ["dp=2", "cp=2", "tp=2"])
def test_two_gpus_train(gpu_pool, parallel, tmp_path):
    options = f"--parallel {parallel} --dtype float32"
    first, second = gpu_pool.run(train_in_parallel, 2, options, str(tmp_path / "curves.png"), "cuda")
    assert float(re.search(r"largest difference .*: (\S+)", first)[1]) <= 1e-4
    assert "2 processes" in first and second == ""


# ------------------------------------------------------------------------------------------------ bench
def test_model():
    """More GPUs are faster, and never more than as many times; heads that cannot be cut have no all-to-all."""
    machine = model.Machine()
    call = model.Attention((1 << 17,), 32, 8, 128, True)
    for backward in (False, True):
        one = model.one_gpu_ms(call, machine, backward)
        assert model.ring_ms(call, machine, 1, backward) == one
        for time in model.MODELS.values():
            times = [time(call, machine, gpus, backward) for gpus in (2, 4, 8)]
            assert times == sorted(times, reverse=True) and all(
                t > one / n for t, n in zip(times, (2, 4, 8), strict=True)
            )
    assert model.all_to_all_ms(call, machine, 3, False) is None


def test_bench_model(capsys):
    bench.main(["--model", "8", "64", "--tokens", "131072"])
    out = capsys.readouterr().out
    assert "not measured" in out and all(out.count(f"| {m} |") == n for m, n in (("ring", 4), ("all_to_all", 2)))


def bench_rows(group, *options):
    sizes = "--tokens 64 --heads 4 --kv-heads 2 --head-dim 16 --rounds 2"
    args = bench.parse_arguments(["--device", "cpu", *sizes.split(), *options])
    return list(bench.measure(args, 64, True, model.Machine()))


@pytest.mark.parametrize("options", [[], ["--packed", "5"]], ids=["padded", "packed"])
def test_bench(pool, options):
    for rows in pool.run(bench_rows, 4, *options):
        plain = [] if options else ["plain all_gather"]
        assert [row["method"] for row in rows] == ["ring", "all_to_all", "all_gather", *plain]
        assert all(row["ms"] > 0 and row["difference"] <= 2e-2 and row["GPUs"] == 4 for row in rows)
        results = 64 // 4 * 16 * (4 + 4 + 2 + 2) * 2 / 1e6  # out, dq, dk, dv
        assert all(results <= row["peak MB"] < 100 * results for row in rows)
