"""Trains a small GPT on the source of Python's own library through cutlass_ext, then its twin through PyTorch's SDPA.

    python python/train.py                                      # on a GPU in bfloat16, if there is one
    python python/train.py --compile --checkpoint --context 8192 --batch 4
    python python/train.py --device cpu --steps 20 --plot build/train.png
    torchrun --nproc-per-node 8 python/train.py --parallel dp=2,cp=2,tp=2     # and then one process alone

Both begin with the same weights and see the same characters in the same order: all that differs is who computes
attention and its gradients. The two loss curves lie on each other. What they differ by is drawn below them: rounding,
which training amplifies step by step. The model has RMSNorm, rotary embedding and grouped heads; characters are bytes.

With `--parallel` its twin is another: one model is spread over all processes, its batch (dp), its context
(cp, `cutlass_ext.distributed`) and its heads (tp), with FSDP2 for its weights; then the first process trains it alone.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from generate import THETA, rotate
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cutlass_ext as ce
from cutlass_ext.bench import at_least, device_here, progress_bar

DIMENSIONS = "dp", "cp", "tp"  # data, context and tensor parallelism
CHARACTERS, TEXT_BYTES = 256, 4 << 20  # bytes there are; what is read of the library


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


ATTENTION = {"cutlass_ext": partial(ce.fmha, causal=True), "SDPA": sdpa}


class Block(nn.Module):
    """Attention, then an MLP, each on normalised rows and added to what came in."""

    def __init__(self, args: argparse.Namespace, attention: Callable[..., Tensor]):
        super().__init__()
        self.attention, self.d, width = attention, args.width // args.heads, args.width
        self.heads = [args.heads, args.kv_heads, args.kv_heads]  # of q, k and v
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, sum(self.heads) * self.d, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.d)).split(self.heads, 2)  # [B, N, heads, d]
        x = x + self.projection(self.attention(rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Logits `[B, N, 256]` of the next character, of characters `[B, N]`."""

    def __init__(self, args: argparse.Namespace, attention: Callable[..., Tensor]):
        super().__init__()
        self.checkpoint, d = args.checkpoint, args.width // args.heads
        self.embedding = nn.Embedding(CHARACTERS, args.width)
        self.blocks = nn.ModuleList(Block(args, attention) for _ in range(args.layers))
        self.head = nn.Sequential(nn.RMSNorm(args.width), nn.Linear(args.width, CHARACTERS, bias=False))
        angle = torch.arange(args.context)[:, None] * THETA ** (-torch.arange(0, d, 2) / d)
        self.register_buffer("angles", torch.stack([angle.cos(), angle.sin()]))

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters)
        for block in self.blocks:
            call = partial(checkpoint, block, use_reentrant=False) if self.checkpoint else block
            x = call(x, *self.angles)
        return self.head(x)


@dataclass
class Run:
    """What training gave: the loss of each step, tokens a second, and on a GPU the most bytes in use."""

    losses: list[float]
    speed: float
    peak: int | None


def library_text() -> Tensor:
    """The modules of Python's library in the order of their names, one after the other, up to TEXT_BYTES."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes() if len(text) < TEXT_BYTES else b""
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)


class Parallel:
    """Processes in three dimensions: dp has sequences of a batch, cp rows of each, tp heads and columns of blocks."""

    def __init__(self, args: argparse.Namespace):
        self.began = not dist.is_initialized()
        if self.began:
            if args.device == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        sizes = [args.parallel[name] for name in DIMENSIONS]
        self.mesh = dist.device_mesh.init_device_mesh(args.device, sizes, mesh_dim_names=DIMENSIONS)
        self.dp, self.cp, self.tp = (self.mesh[name] for name in DIMENSIONS)
        self.is_first = dist.get_rank() == 0
        self.attention = partial(ce.distributed.fmha, causal=True, group=self.cp)

    def spread(self, model: GPT) -> None:
        """Cuts heads and columns (Megatron's way), and lets FSDP2 gather weights and average gradients."""
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        ways = {"qkv": ColwiseParallel(), "projection": RowwiseParallel(), "mlp.0": ColwiseParallel(),
                "mlp.2": RowwiseParallel()}  # fmt: skip
        for block in model.blocks:
            if self.tp.size() > 1:
                with torch.no_grad():  # q, k and v of a process side by side
                    parts = block.qkv.weight.split([heads * block.d for heads in block.heads])
                    cut = zip(*(part.chunk(self.tp.size()) for part in parts), strict=True)
                    block.qkv.weight.copy_(torch.cat([part for of_rank in cut for part in of_rank]))
                block.heads = [heads // self.tp.size() for heads in block.heads]
                parallelize_module(block, self.tp, ways)
            fully_shard(block, mesh=self.mesh["dp", "cp"])
        fully_shard(model, mesh=self.mesh["dp", "cp"])
        model.angles = ce.distributed.shard(model.angles, group=self.cp)

    def part(self, characters: Tensor) -> Tensor:
        """This process's rows of its sequences, of `[B, N]`."""
        return ce.distributed.shard(characters.chunk(self.dp.size())[self.dp.get_local_rank()], group=self.cp)

    def end(self) -> None:
        """Ends what this began: the first process goes on alone."""
        if self.began:
            dist.destroy_process_group()

    def mean(self, loss: Tensor) -> Tensor:
        """Over all processes; those that have the same rows have the same loss."""
        loss = loss / dist.get_world_size()
        dist.all_reduce(loss)
        return loss


def train(
    args: argparse.Namespace,
    attention: Callable[..., Tensor],
    text: Tensor,
    tick: Callable[[str], None],
    parallel: Parallel | None = None,
) -> Run:
    """A model of the seed whose attention is `attention`; `tick` is told each step the loss, as last looked at."""
    cuda, dtype = args.device == "cuda", getattr(torch, args.dtype)
    torch.manual_seed(args.seed)
    model = GPT(args, attention).to(args.device)
    if parallel:
        parallel.spread(model)
    forward = model
    if args.compile:
        torch.compiler.reset()  # or the second model is compiled as a variant of the first
        forward = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False if parallel else None)  # meshes differ
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.rate, args.steps, cycle_momentum=False)
    begins = torch.randint(len(text) - args.context, (args.steps, args.batch, 1)).to(args.device)
    window = torch.arange(args.context + 1, device=args.device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()

    losses = []
    last_untimed = 10 if args.steps > 20 else 0  # the first steps compile and allocate
    for i in range(args.steps):
        characters = text[begins[i] + window].long()  # [B, N + 1]
        rows = characters[:, :-1], characters[:, 1:]
        seen, expected = map(parallel.part, rows) if parallel else rows
        with torch.autocast(args.device, dtype, enabled=dtype != torch.float32):
            logits = forward(seen)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), expected.flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(parallel.mean(loss.detach()) if parallel else loss.detach())
        if i % 10 == 0:  # to read it is to wait for the GPU
            shown = f"loss {loss.item():.3f}"
        if i == last_untimed:
            start = time.perf_counter()
        tick(shown)
    losses = torch.stack(losses).tolist()
    speed = args.batch * args.context * (args.steps - 1 - last_untimed) / (time.perf_counter() - start)
    return Run(losses, speed, torch.cuda.max_memory_allocated() if cuda else None)


def plot(runs: dict[str, Run], differences: list[float], title: str, path: Path) -> None:
    """The loss curves, the one wide and pale, the other thin upon it; and below them their differences."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, sharex=True, figsize=(6, 5), layout="constrained", height_ratios=(3, 1))
    steps = range(1, len(differences) + 1)
    for (name, run), style in zip(runs.items(), ({"linewidth": 5, "alpha": 0.4}, {"linewidth": 1}), strict=True):
        above.plot(steps, run.losses, label=name, **style)
    below.plot(steps, differences, color="gray", linewidth=1)
    above.set_title(title, fontsize=9)
    above.set(ylabel="loss, nats a character")
    above.legend()
    below.set(xlabel="step", ylabel="difference")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def dimensions(text: str) -> dict[str, int]:
    """`dp=1,cp=2`: how many processes each of DIMENSIONS has, 1 where it is not named."""
    sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    if not set(sizes) <= set(DIMENSIONS) or min(sizes.values()) < 1:
        raise ValueError
    return dict.fromkeys(DIMENSIONS, 1) | sizes


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    for name, small, large, meaning in (
        ("steps", 150, 300, "of training, for each model"), ("batch", 8, 16, "sequences of a step"),
        ("context", 128, 2048, "characters of a sequence"), ("layers", 2, 12, "of the model"),
        ("heads", 4, 12, "query heads"), ("kv-heads", 2, 4, "key/value heads"), ("width", 128, 768, "of the model"),
    ):  # fmt: skip
        meaning += f" (on a CPU {small}, with a GPU {large})"
        least = 2 if name == "steps" else 1  # the first is not timed
        parser.add_argument(f"--{name}", type=at_least(least), default=large if cuda else small, help=meaning)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate at its highest (0.001)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, and of what each step sees (0)")
    parser.add_argument("--device", type=device_here, choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="(on a CPU float32, on a GPU bfloat16)")
    parser.add_argument("--compile", action="store_true", help="both models through torch.compile")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each block in its backward pass")
    parser.add_argument("--parallel", type=dimensions, metavar="dp=1,cp=2,tp=1", help="under torchrun: as above")
    parser.add_argument("--plot", type=Path, default=Path("build/train.png"), help="the picture (build/train.png)")
    parser.add_argument(
        "--threads", type=at_least(1), default=1, help="on a CPU (1: more are slower on one that is busy)"
    )
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    if args.width % (2 * args.heads) or args.heads % args.kv_heads:
        parser.error("--width has to be a multiple of twice --heads, and --heads of --kv-heads")
    if args.parallel and (args.compile or args.kv_heads % args.parallel["tp"] or args.batch % args.parallel["dp"]):
        parser.error("--parallel wants a --batch that dp divides, --kv-heads that tp divides, and no --compile")
    if args.parallel and not dist.is_initialized():
        wanted, there = math.prod(args.parallel.values()), int(os.environ.get("WORLD_SIZE", 0))
        if wanted != there:
            started = f"torchrun started {there}" if there else "torchrun started none"
            parser.error(
                f"--parallel: is of {wanted} processes, and {started}; expected torchrun --nproc-per-node {wanted}"
            )
    return args


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    args, console, runs = parse_arguments(), Console(), {}
    torch.set_num_threads(args.threads)
    text = library_text().to(args.device)
    parallel, models = None, ATTENTION
    if args.parallel:
        parallel = Parallel(args)
        models = {f"{dist.get_world_size()} processes": parallel.attention, "one": ATTENTION["cutlass_ext"]}
        console.quiet = not parallel.is_first
    with progress_bar(console, len(models) * args.steps) as tick:
        for name, attention in models.items():
            gc.collect()  # the model before this one hangs in cycles, and would count as memory of this one
            runs[name] = train(args, attention, text, lambda shown, name=name: tick(f"{name} {shown}"), parallel)
            if parallel:
                parallel.end()
                if not parallel.is_first:
                    return
                parallel = None
    model = f"{args.layers} layers of width {args.width}, {args.heads} heads on {args.kv_heads}"
    title = f"{model}; {args.steps} steps of {args.batch} x {args.context}, {args.dtype} on {args.device}"
    differences = [abs(a - b) for a, b in zip(*(run.losses for run in runs.values()), strict=True)]
    plot(runs, differences, title, args.plot)

    table = Table("attention", "final loss", "tokens/s", "peak memory", title=title, title_justify="left", min_width=80)
    for name, run in runs.items():
        peak = f"{run.peak / 1e9:.2f} GB" if run.peak else "-"
        table.add_row(name, f"{run.losses[-1]:.5f}", f"{run.speed:.0f}", peak)
    console.print(table)
    print(f"largest difference of the two losses of a step: {max(differences):.1e}")
    print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
