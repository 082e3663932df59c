"""`python -m cutlass_ext.distributed.bench`: attention over all GPUs of this machine, or of a torchrun, beside one GPU.

    python -m cutlass_ext.distributed.bench                       # all GPUs of this machine
    torchrun --nproc-per-node 8 --nnodes 8 ... -m cutlass_ext.distributed.bench
    python -m cutlass_ext.distributed.bench --device cpu --processes 2 --tokens 512     # does it run?
    python -m cutlass_ext.distributed.bench --packed 16           # sequences of many lengths, packed
    python -m cutlass_ext.distributed.bench --model 8 64          # what to expect; nothing runs

For people who want to know what several GPUs make of a long sequence. Each row is checked against one GPU before it is
timed. A time is the median over rounds of the slowest rank's, of calls one after the other for a few milliseconds;
efficiency is the time of one GPU for the whole over GPUs times that. `plain all_gather` is what anyone would write with
`gather` and two calls. `torch` is PyTorch's context parallelism with cuDNN's attention, for which K and V are repeated,
as it knows no grouped heads; there is no such row where PyTorch has no such thing, and neither row of packed sequences.
The columns of the model are model.py's, with the rates of one GPU and of a transfer between two as measured here;
`peak MB` is the most that a call holds on a rank beyond its inputs, the results counted, NCCL's own buffers not.
"""

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn import functional  # of which PyTorch's context parallelism replaces the function, while it lasts

from ..bench import device_here
from ..interface import fmha as fmha_of_one
from ..measurement import peak_extra_bytes, sample_ms
from . import fmha, gather, shard
from .model import MODELS, Attention, Machine, one_gpu_ms

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}  # of the largest value of one GPU's
CALLS_MS, MAX_CALLS = 10.0, 20  # of a sample, so that ranks that leave the barrier one after the other do not count
HEADER = (
    "tokens", "pass", "method", "GPUs", "one GPU ms", "ms", "efficiency", "model ms", "model", "difference", "peak MB",
)  # fmt: skip


def plain_all_gather(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Each rank's rows, two chunks, with the keys of all."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    k, v = gather(k), gather(v)
    rows = q.shape[1] // 2
    chunks = zip(q.split(rows, 1), (rank, 2 * ranks - 1 - rank), strict=True)
    return torch.cat([fmha_of_one(part, k, v, causal=causal, start_pos=chunk * rows) for part, chunk in chunks], 1)


def of_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """PyTorch's, inside `torch_context`: it cuts sequences up as zigzag does."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


@contextlib.contextmanager
def torch_context(device: str) -> Iterator[None]:
    """In which PyTorch's attention is that of all ranks."""
    if device == "cpu":
        raise NotImplementedError("PyTorch has no context parallelism on a CPU")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ranks = dist.get_world_size()
    cut = torch.zeros(2 * ranks, device="cuda")  # it wants something to cut up
    mesh = init_device_mesh("cuda", (ranks,))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), context_parallel(mesh, buffers=[cut], buffer_seq_dims=[0]):
        yield


PADDED = {"plain all_gather": plain_all_gather, "torch": of_torch}  # of one sequence alone


def lengths_of(args: argparse.Namespace, tokens: int) -> tuple[int, ...]:
    """One sequence, or packed ones of lengths like 1, 2, 3, ..."""
    n = args.packed or 1
    ends = [tokens * i * (i + 1) // (n * (n + 1)) for i in range(n + 1)]
    return tuple(end - begin for begin, end in itertools.pairwise(ends))


def passes(call: Callable[[], Tensor], inputs: list[Tensor], dout: Tensor, backward: bool) -> list[Tensor]:
    """The output, or the output and the gradients."""
    if not backward:
        with torch.no_grad():
            return [call()]
    out = call()
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def most(x: float, device: str) -> float:
    """Of all ranks."""
    found = torch.tensor(float(x), device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def slowest_ms(run: Callable[[], object], rounds: int, device: str) -> float:
    flag = torch.zeros(1, device=device)

    def sample(repeats: int) -> float:
        dist.barrier()
        return most(sample_ms(run, repeats, device, lambda: dist.all_reduce(flag)), device)

    repeats = 1 if device == "cpu" else max(1, min(MAX_CALLS, round(CALLS_MS / sample(1))))
    return statistics.median(sample(repeats) for _ in range(rounds))


def transfer_gbs(device: str, rounds: int) -> float:
    """Of each rank to the next, all at once, 64 MB."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sent = torch.zeros(1 << (26 if device == "cuda" else 20), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def run() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    run()
    return sent.numel() / slowest_ms(run, rounds, device) / 1e6


def measure(args: argparse.Namespace, tokens: int, backward: bool, machine: Machine) -> Iterator[dict]:
    """A row for each method that takes the call."""
    ranks, dtype = dist.get_world_size(), getattr(torch, args.dtype)
    torch.manual_seed(0)  # the same tensors on all ranks
    lengths = lengths_of(args, tokens)
    ends = [0, *itertools.accumulate(lengths)] if args.packed else None
    packing: dict[str, object] = {}
    if ends:
        at = torch.tensor(ends, dtype=torch.int32, device=args.device)
        packing = {"cu_seqlens_q": at, "cu_seqlens_k": at, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    heads, rows = (args.heads, args.kv_heads, args.kv_heads, args.heads), (tokens,) if ends else (1, tokens)
    *whole, dout = (torch.randn(*rows, H, args.head_dim, device=args.device).to(dtype) for H in heads)
    whole = [x.requires_grad_(backward) for x in whole]

    def alone(inputs=whole, dout=dout) -> list[Tensor]:
        return passes(lambda: fmha_of_one(*inputs, causal=args.causal, **packing), inputs, dout, backward)

    expected = [shard(x, cu_seqlens=ends) for x in alone()]
    one = slowest_ms(alone, args.rounds, args.device)
    inputs = [shard(x.detach(), cu_seqlens=ends).requires_grad_(backward) for x in whole]
    dout = shard(dout, cu_seqlens=ends)
    call = Attention(lengths, args.heads, args.kv_heads, args.head_dim, args.causal)
    assumed = one_gpu_ms(call, machine, backward)
    machine = replace(
        machine,
        forward_tflops=machine.forward_tflops * assumed / one,
        backward_tflops=machine.backward_tflops * assumed / one,
    )
    for name in args.methods:
        expect = MODELS[name](call, machine, ranks, backward) if name in MODELS else None
        if expect is None and (name in MODELS or args.packed):
            continue

        def run(name=name) -> list[Tensor]:
            if name in PADDED:
                return passes(lambda: PADDED[name](*inputs, args.causal), inputs, dout, backward)
            options = {"method": name, "causal": args.causal, "cu_seqlens": ends}
            return passes(lambda: fmha(*inputs, **options), inputs, dout, backward)

        with contextlib.ExitStack() as around:
            try:
                if name == "torch":
                    around.enter_context(torch_context(args.device))
                results = run()
            except Exception as absent:
                if name != "torch":
                    raise
                if dist.get_rank() == 0:
                    print(f"no row of {name}: {absent}", file=sys.stderr)
                continue
            differences = [(a - b).abs().max() / b.abs().max() for a, b in zip(results, expected, strict=True)]
            worst = most(torch.stack(differences).max().item(), args.device)
            if not worst <= TOLERANCE[dtype]:
                raise SystemExit(f"Wrong: {name}, {tokens} tokens: {worst:.1e} of the largest value of one GPU")
            del results, differences
            ms = slowest_ms(run, args.rounds, args.device)
            peak = most(peak_extra_bytes(run, args.device), args.device)
        yield {
            "tokens": tokens, "pass": "forward and backward" if backward else "forward", "method": name, "GPUs": ranks,
            "one GPU ms": one, "ms": ms, "efficiency": one / ranks / ms, "model ms": expect,
            "model": one / ranks / expect if expect else None, "difference": worst, "peak MB": peak / 1e6,
        }  # fmt: skip


def modelled(args: argparse.Namespace, gpus: int, tokens: int, backward: bool) -> Iterator[dict]:
    """The same rows by the model alone."""
    call = Attention(lengths_of(args, tokens), args.heads, args.kv_heads, args.head_dim, args.causal)
    one = one_gpu_ms(call, Machine(), backward)
    for name, model in MODELS.items():
        expect = model(call, Machine(), gpus, backward)
        if expect is not None:
            yield {
                "tokens": tokens, "pass": "forward and backward" if backward else "forward", "method": name,
                "GPUs": gpus, "one GPU ms": one, "ms": None, "efficiency": None, "model ms": expect,
                "model": one / gpus / expect, "difference": None, "peak MB": None,
            }  # fmt: skip


def line(row: dict) -> str:
    def text(name: str) -> str:
        x = row[name]
        if x is None:
            return "-"
        if name in ("efficiency", "model"):
            return f"{100 * x:.1f}%"
        if name == "difference":
            return f"{x:.1e}"
        if name == "peak MB":
            return f"{x:.0f}" if x >= 10 else f"{x:.2f}"
        return f"{x:.3f}" if isinstance(x, float) else f"{x:,}" if isinstance(x, int) else x

    return "| " + " | ".join(text(name) for name in HEADER) + " |"


def work(rank: int, args: argparse.Namespace) -> None:
    """A process of the group: rank `rank`, unless torchrun says which."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.processes)}
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast, which nothing here uses
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    if args.device == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True  # messages get multiprocessors before kernels that wait for some
        dist.init_process_group("nccl", pg_options=options)
    else:
        dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    gbs = transfer_gbs(args.device, args.rounds) if dist.get_world_size() > 1 else Machine().host_gbs
    machine = replace(Machine(), host_gbs=gbs, network_gbs=gbs)
    rows = []
    if first:
        name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        print(f"{dist.get_world_size()} x {name}, torch {torch.__version__}, {args.dtype}, {args.heads} query heads,")
        how = ("" if args.causal else "not ") + "causal" + (f", {args.packed} packed sequences" if args.packed else "")
        print(f"{args.kv_heads} KV heads, d {args.head_dim}, {how}; {gbs:.1f} GB/s\n")
        print_header()
    for tokens in args.tokens:
        for backward in (False, True):
            for row in measure(args, tokens, backward, machine):
                rows.append(row)
                if first:
                    print(line(row), flush=True)
    if first and args.json:
        args.json.write_text(json.dumps({"gbs": gbs, "machine": asdict(machine), "rows": rows}, indent=1))
    dist.destroy_process_group()


def print_header() -> None:
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", type=device_here, choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    parser.add_argument("--processes", type=int, help="without torchrun (as many as there are GPUs, on a CPU 2)")
    parser.add_argument("--tokens", type=int, nargs="+", help="(on a GPU 16384 65536 131072, on a CPU 512)")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--not-causal", dest="causal", action="store_false")
    parser.add_argument(
        "--packed", type=int, metavar="SEQUENCES", help="so many packed ones, of lengths like 1, 2, ..."
    )
    parser.add_argument("--methods", nargs="+", choices=[*MODELS, *PADDED], default=[*MODELS, *PADDED])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--model", type=int, nargs="+", metavar="GPUS", help="print what to expect of so many, and end")
    args = parser.parse_args(arguments)
    args.processes = args.processes or (torch.cuda.device_count() if args.device == "cuda" else 2)
    long = args.device == "cuda" or args.model
    args.tokens = args.tokens or ([1 << 14, 1 << 16, 1 << 17] if long else [512])
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    if args.model:
        print("Model, not measured.\n")
        print_header()
        for gpus in args.model:
            for tokens in args.tokens:
                for backward in (False, True):
                    for row in modelled(args, gpus, tokens, backward):
                        print(line(row))
    elif "RANK" in os.environ:
        work(0, args)
    else:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
        mp.spawn(work, (args,), args.processes)


if __name__ == "__main__":
    main()
