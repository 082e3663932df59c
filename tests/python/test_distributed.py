"""`cutlass_ext.distributed` on processes of this machine, over gloo, against one call of the whole; with two GPUs, NCCL.

Four processes are started once; each test runs a function of this module on the first, or on some, of them.
"""

import itertools
import os
import queue
import socket
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing import assert_close

import cutlass_ext as ce

GROUPS = {2: [1, 3], 3: [0, 1, 2], 4: [0, 1, 2, 3]}  # ranks of a group are not those of the program
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ANSWER_S = 60


def serve(rank, size, port, device, tasks, answers):
    """A process of the pool: does what it is told, and answers with what came of it."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
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
    dist.destroy_process_group()


class Pool:
    """Processes; `run(function, ranks, ...)` calls `function(group, ...)` on a group, and gives its ranks' results."""

    def __init__(self, size, device="cpu"):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        context = mp.get_context("spawn")
        self.tasks, self.answers = [context.Queue() for _ in range(size)], context.Queue()
        self.processes = [
            context.Process(target=serve, args=(r, size, port, device, self.tasks[r], self.answers), daemon=True)
            for r in range(size)
        ]
        for process in self.processes:
            process.start()

    def answers_of(self, function, ranks, *arguments, expected=None):
        """Errors, by rank, and results."""
        for tasks in self.tasks:
            tasks.put((function, ranks, arguments))
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


def compare(group, layout, method, options, packed, dtype=torch.float32, device="cpu"):
    """Outputs and gradients of the ranks' shards against one call of the whole; loss through out and lse."""
    B, N, H_q, H_kv, d, d_v = 2, 24, 4, 2, 16, 8
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
    bound = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
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


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("features", FEATURES)
def test_ring(pool, ranks, layout, packed, features):
    pool.run(compare, ranks, layout, "ring", FEATURES[features], packed)


SEED = torch.tensor([7, 11])


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ranks", [2, 4])  # of two key heads: one a rank, and one for two ranks
@pytest.mark.parametrize("features", ["causal", "all", "dropout"])
def test_all_to_all(pool, ranks, layout, packed, features):
    options = {"dropout_p": 0.3, "dropout_seed": SEED, "head_start": 2, "sequence_start": 1}
    pool.run(compare, ranks, layout, "all_to_all", FEATURES.get(features, options), packed)


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
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
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize("features", FEATURES)
def test_two_gpus(gpu_pool, method, features, dtype, packed):
    gpu_pool.run(compare, 2, "zigzag", method, FEATURES[features], packed, dtype, "cuda")
