"""Text generation from a paged key/value cache: a small decoder-only transformer, token by token, through cutlass_ext.

    python python/generate.py                                   # on a GPU if there is one; finishes in seconds
    python python/generate.py --dtype float16 --layers 24 --dim 2048 --heads 16 --kv-heads 4 --steps 256
    python python/generate.py --weights model.safetensors --dim 64 --heads 4 --kv-heads 2 --layers 2 --vocab 97

The model is a Llama-like decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU. Its weights come from a
fixed seed, or from a safetensors file with the names of Hugging Face's Llama. Sequences of different lengths are
generated at once: a step appends each one's key and value to its pages and attends to all of them, in one call a
layer. Every step's logits are compared with the same model run without a cache through PyTorch's own attention
(--no-check leaves that out, for timing); in float32 the greedy tokens have to be equal.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import cutlass_ext as ce
from cutlass_ext.bench import at_least, device_here

THETA, EPS = 10000.0, 1e-5
TOLERANCE = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of logits of size 1


def progress(steps: int):
    """`range(steps)` behind a bar, by whichever of tqdm and rich is installed."""
    if not sys.stderr.isatty():
        return range(steps)
    try:
        from tqdm import tqdm

        return tqdm(range(steps), unit="step")
    except ImportError:
        try:
            from rich.progress import track
        except ImportError:
            return range(steps)
        return track(range(steps), description="generating")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file: a length, a JSON header, and the bytes."""
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in dtypes:
            raise SystemExit(f"{path}: {name} is of type {entry['dtype']}; expected one of {', '.join(dtypes)}")
        begin, end = entry["data_offsets"]
        flat = torch.frombuffer(bytearray(body[begin:end]), dtype=dtypes[entry["dtype"]])
        tensors[name] = flat.view(entry["shape"])
    return tensors


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x` `[..., N, heads, d]` by its rows' angles, `cos` and `sin` `[N, d / 2]`, in float32."""
    c, s = (t[:, None].float() for t in (cos, sin))
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)


class Model:
    """A decoder-only transformer whose attention is a function of q, k, v and the layer: with a cache, or without."""

    def __init__(self, args: argparse.Namespace, device: str, dtype: torch.dtype):
        self.layers, self.heads, self.kv_heads, self.d = args.layers, args.heads, args.kv_heads, args.dim // args.heads
        shapes = {"model.embed_tokens.weight": (args.vocab, args.dim), "lm_head.weight": (args.vocab, args.dim)}
        for n in range(args.layers):
            layer, kv = f"model.layers.{n}.", args.kv_heads * self.d
            shapes |= {
                layer + "self_attn.q_proj.weight": (args.dim, args.dim),
                layer + "self_attn.k_proj.weight": (kv, args.dim),
                layer + "self_attn.v_proj.weight": (kv, args.dim),
                layer + "self_attn.o_proj.weight": (args.dim, args.dim),
                layer + "mlp.gate_proj.weight": (3 * args.dim, args.dim),
                layer + "mlp.up_proj.weight": (3 * args.dim, args.dim),
                layer + "mlp.down_proj.weight": (args.dim, 3 * args.dim),
            }
        norms = ["model.norm.weight"]
        norms += [
            f"model.layers.{n}.{x}_layernorm.weight" for n in range(args.layers) for x in ("input", "post_attention")
        ]
        if args.weights:
            weights = read_safetensors(args.weights)
            missing = [name for name in [*shapes, *norms] if name not in weights]
            wrong = [n for n, s in shapes.items() if n in weights and tuple(weights[n].shape) != s]
            if missing or wrong:
                raise SystemExit(
                    f"{args.weights}: missing {missing[:3]}, of another shape {wrong[:3]}: set --dim and so on"
                )
        else:
            generator = torch.Generator().manual_seed(args.seed)
            weights = {n: torch.randn(s, generator=generator) * s[1] ** -0.5 for n, s in shapes.items()}
            weights |= {name: torch.ones(args.dim) for name in norms}
        self.weights = {name: w.to(device, dtype) for name, w in weights.items()}
        frequency = THETA ** (-torch.arange(0, self.d, 2, dtype=torch.float32) / self.d)
        angle = torch.arange(args.room, dtype=torch.float32)[:, None] * frequency
        self.cos, self.sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)

    def __call__(self, tokens: Tensor, attention, rows=slice(None)) -> Tensor:
        """Logits `[B, N, vocab]` of `tokens` `[B, N]`, or of their `rows`; `attention(layer, q, k, v)` rotates, too."""
        w, (B, N) = self.weights, tokens.shape
        x = w["model.embed_tokens.weight"][tokens]
        for n in range(self.layers):
            name = f"model.layers.{n}."
            h = F.rms_norm(x, x.shape[-1:], w[name + "input_layernorm.weight"], EPS)
            q, k, v = (
                (h @ w[f"{name}self_attn.{p}_proj.weight"].T).view(B, N, heads, self.d)
                for p, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
            )
            x = x + attention(n, q, k, v).flatten(2) @ w[name + "self_attn.o_proj.weight"].T
            h = F.rms_norm(x, x.shape[-1:], w[name + "post_attention_layernorm.weight"], EPS)
            gate = F.silu(h @ w[name + "mlp.gate_proj.weight"].T) * (h @ w[name + "mlp.up_proj.weight"].T)
            x = x + gate @ w[name + "mlp.down_proj.weight"].T
        return F.rms_norm(x[:, rows], x.shape[-1:], w["model.norm.weight"], EPS) @ w["lm_head.weight"].T

    def without_cache(self, tokens: Tensor) -> Tensor:
        """The same model on one whole sequence `[1, N]`, through PyTorch's attention."""
        angles = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]

        def attention(_layer, q, k, v):
            q, k, v = (t.transpose(1, 2) for t in (rotate(q, *angles), rotate(k, *angles), v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

        return self(tokens, attention)


class PagedCache:
    """Pages for every layer, handed out to sequences in random order, as a server's free list would after a while."""

    def __init__(self, model: Model, batch: int, room: int, page_size: int):
        pages_each = -(-room // page_size)
        weight = model.weights["lm_head.weight"]
        shape = (model.layers, batch * pages_each, page_size, model.kv_heads, model.d)
        self.k, self.v = (torch.empty(shape, dtype=weight.dtype, device=weight.device) for _ in "kv")
        order = torch.randperm(batch * pages_each, generator=torch.Generator().manual_seed(0))
        self.table = order.view(batch, pages_each).to(weight.device, torch.int32)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=weight.device)
        self.model = model

    def step(self, tokens: Tensor, rows: slice) -> Tensor:
        """Appends `tokens` `[B, N]` to the sequences `rows`, and returns the logits of all of them."""
        table, lengths = self.table[rows], self.lengths[rows]

        def attention(layer, q, k, v):
            return ce.flash_attn_with_kvcache(
                q, self.k[layer], self.v[layer], k, v, self.model.cos, self.model.sin, cache_seqlens=lengths,
                block_table=table, causal=True, rotary_interleaved=False,
            )  # fmt: skip

        logits = self.model(tokens, attention)
        lengths += tokens.shape[1]
        return logits


@torch.inference_mode()
def generate(args: argparse.Namespace) -> None:
    device, dtype = args.device, getattr(torch, args.dtype)
    if dtype == torch.float32:
        torch.backends.cuda.matmul.fp32_precision = "ieee"  # or PyTorch's products, not ours, decide what is equal
    prompts = torch.Generator().manual_seed(args.seed + 1)
    lengths = torch.randint(3, args.prompt + 1, (args.batch,), generator=prompts).tolist()
    args.room = max(lengths) + args.steps
    model = Model(args, device, dtype)
    cache = PagedCache(model, args.batch, args.room, args.page_size)
    texts = [torch.randint(0, args.vocab, (1, n), generator=prompts).to(device) for n in lengths]

    # Prompts first, each of its own length; then all sequences together, a token a step.
    logits = torch.cat([cache.step(text, slice(b, b + 1))[:, -1:] for b, text in enumerate(texts)])
    worst, seconds = 0.0, 0.0
    for step in progress(args.steps):
        tokens = logits[:, -1].float().argmax(-1, keepdim=True)
        if args.check:
            for b, text in enumerate(texts):
                want = model.without_cache(text)[0, -1].float()
                worst = max(worst, (logits[b, -1].float() - want).abs().max().item())
                if worst > TOLERANCE[dtype]:
                    raise SystemExit(f"step {step}, sequence {b}: logits differ by {worst:.1e}")
                if dtype == torch.float32 and want.argmax() != tokens[b, 0]:
                    raise SystemExit(f"step {step}, sequence {b}: greedy tokens differ")
        texts = [torch.cat([text, token[None]], 1) for text, token in zip(texts, tokens, strict=True)]
        start = time.perf_counter()
        logits = cache.step(tokens, slice(None))
        if device == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - start

    print(
        f"{args.batch} sequences, prompts of {min(lengths)} to {max(lengths)} tokens, {args.steps} steps on {device} "
        f"in {args.dtype}, pages of {args.page_size}: {args.batch * args.steps / seconds:.0f} tokens/s"
    )
    if args.check:
        equal = ", greedy tokens equal" if dtype == torch.float32 else ""
        print(f"against the model without a cache, at every step: logits within {worst:.1e}{equal}")
    print("first sequence:", " ".join(map(str, texts[0][0, : lengths[0] + 16].tolist())), "...")


def make_parser(description: str, *options: tuple[str, int, int, str]) -> argparse.ArgumentParser:
    """A parser of `options` (name, default, least, meaning), all integers, and of the model and where it runs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, least, meaning in (
        *options,
        ("layers", 2, 1, "of the model"), ("dim", 256, 1, "its width"), ("heads", 4, 1, "query heads"),
        ("kv-heads", 2, 1, "key/value heads"), ("vocab", 512, 1, "tokens there are"),
        ("page-size", 16, 1, "rows of a page"), ("seed", 0, 0, "of weights and prompts"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=at_least(least), default=default, help=f"{meaning} ({default})")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", type=device_here, choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    parser.add_argument("--weights", type=Path, help="a safetensors file instead of the seed")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="compare with the model alone"
    )
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments, of a model whose heads attention takes, and of pages that it does."""
    args = parser.parse_args()
    step = 4 if args.dtype == "float32" else 8
    d, rest = divmod(args.dim, args.heads)
    if rest or d % step or d > 256:
        parser.error(
            f"--heads: is {args.heads} and --dim {args.dim}; expected a head_dim, --dim / --heads, of {step}, "
            f"{2 * step}, ... or 256 (in {args.dtype})"
        )
    if args.heads % args.kv_heads:
        parser.error(f"--kv-heads: is {args.kv_heads}; expected a divisor of --heads, {args.heads}")
    size = args.page_size
    if size > 4096 or (size % 16 and size & (size - 1)):
        parser.error(f"--page-size: is {size}; expected a power of two or a multiple of 16, up to 4096")
    if args.weights and not args.weights.is_file():
        parser.error(f"--weights: is {args.weights}, where no file is; expected one of safetensors")
    return args


def main() -> None:
    options = (
        ("batch", 4, 1, "sequences at once"), ("prompt", 24, 3, "longest prompt"),
        ("steps", 32, 1, "tokens to generate"),
    )  # fmt: skip
    generate(parse(make_parser(__doc__, *options)))


if __name__ == "__main__":
    main()
