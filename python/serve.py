"""Continuous batching over a paged key/value cache: the core of a serving engine, on generate.py's model.

    python python/serve.py                                      # on a GPU if there is one; finishes in seconds
    python python/serve.py --plain --rate 2 --pages 20          # lines instead of a live table; pages run out
    python python/serve.py --dtype bfloat16 --layers 24 --dim 2048 --heads 16 --kv-heads 4 --requests 256 \\
        --max-batch 64 --pages 4096 --chunk 512

Requests arrive at random. A step computes one row of every sequence that decodes, and chunks of the prompts of others,
by one `flash_attn_varlen_func` a layer for all of them: packed queries, keys in pages. A prefix that several requests
have lies in the pool once, in whole pages. When pages run out, the youngest request gives its own back and waits.

At the end every sequence is compared with what the model gives for it alone, without a cache, through PyTorch's
attention (--no-check leaves that out). In float32 the greedy tokens are equal, but where the two best logits are closer
than rounding; in 16 bits a token counts as right whose logit alone is within twice the tolerance of the best: either
may be off by it.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import statistics
import sys
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from generate import TOLERANCE, Model, make_parser, parse, rotate
from torch import Tensor

import cutlass_ext as ce


class Pages:
    """Which pages are free, how many requests refer to each, and which one holds which prefix.

    A page is known by its prefix: the hash of all tokens up to the page's end. A free page keeps what it holds until it
    is taken, the one that has been free for longest first, so that a prefix outlives the requests that had it.
    """

    def __init__(self, count: int, page_size: int):
        self.page_size = page_size
        self.references = [0] * count
        self.free = OrderedDict.fromkeys(range(count))  # from the first to be taken to the last
        self.prefix: list[bytes | None] = [None] * count
        self.page_of: dict[bytes, int] = {}

    def take(self) -> int:
        """A free page, referred to once; what it held is forgotten."""
        page, _ = self.free.popitem(last=False)
        self.page_of.pop(self.prefix[page], None)
        self.prefix[page], self.references[page] = None, 1
        return page

    def refer(self, page: int) -> None:
        """One more request has `page`, free or not."""
        self.free.pop(page, None)
        self.references[page] += 1

    def release(self, page: int) -> None:
        """One request fewer has `page`; it is free after the last."""
        self.references[page] -= 1
        if self.references[page] == 0:
            self.free[page] = None
            self.free.move_to_end(page, last=self.prefix[page] is not None)

    def enter(self, prefix: bytes, page: int) -> int:
        """Notes that `page` holds `prefix`, unless another one does: the page that does."""
        if prefix not in self.page_of:
            self.page_of[prefix], self.prefix[page] = page, prefix
        return self.page_of[prefix]


@dataclass(eq=False)
class Request:
    """A prompt, what has been generated after it, and the pages where the keys and values of the first `done` lie."""

    number: int
    prompt: list[int]
    new_tokens: int  # to be generated
    state: str = "waiting"
    tokens: list[int] = field(default_factory=list)  # the prompt, then what has been generated
    logits: list[float] = field(default_factory=list)  # of each generated token
    table: list[int] = field(default_factory=list)  # its pages, in the order of its rows
    done: int = 0
    shared: int = 0  # rows found in pages, not computed
    preempted: int = 0  # times that it gave its pages back
    arrived: float = 0.0
    first_token: float = 0.0  # seconds from its arrival to the first token
    _prefixes: list[bytes] = field(default_factory=list)

    def prefix(self, i: int, page_size: int) -> bytes:
        """The hash of the tokens up to the end of page `i`: that of the page before, and of the page's own."""
        for n in range(len(self._prefixes), i + 1):
            own = array("q", self.tokens[n * page_size : (n + 1) * page_size]).tobytes()
            self._prefixes.append(hashlib.sha256((self._prefixes[-1] if n else b"") + own).digest())
        return self._prefixes[i]


class Engine:
    """Serves requests with `model`, at most `max_batch` at once, from `pages` pages of `page_size` rows.

    A step computes at most `chunk` rows of prompts, beside one row of each sequence that decodes. Requests are served
    in the order in which they came: those in `running` are older than those in `waiting`, and both are in that order.
    """

    def __init__(self, model: Model, pages: int, page_size: int = 16, chunk: int = 64, max_batch: int = 8):
        if min(pages, page_size, chunk, max_batch) < 1:
            raise ValueError(
                f"pages, page_size, chunk and max_batch: are {(pages, page_size, chunk, max_batch)}; expected 1 or more"
            )
        self.model, self.chunk, self.max_batch = model, chunk, max_batch
        self.pages = Pages(pages, page_size)
        weight = model.weights["lm_head.weight"]
        self.device, room = weight.device, (model.layers, pages, page_size, model.kv_heads, model.d)
        self.k, self.v = (torch.empty(room, dtype=weight.dtype, device=self.device) for _ in "kv")
        self.requests: list[Request] = []  # all there have been
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.rows = self.steps = 0  # computed so far

    def submit(self, prompt: list[int], new_tokens: int) -> Request:
        """A request for `new_tokens` tokens after `prompt`, which waits from now on.

        Raises:
            ValueError: a request that could not be served even alone.
        """
        size, count, room = self.pages.page_size, len(self.pages.references), self.model.cos.shape[0]
        if not prompt or new_tokens < 1:
            raise ValueError(
                f"prompt and new_tokens: are of {len(prompt)} tokens and {new_tokens}; expected at least 1 of each"
            )
        rows = len(prompt) + new_tokens - 1  # the last token's key is never needed
        if rows > min(count * size, room):
            raise ValueError(
                f"prompt and new_tokens: {len(prompt)} and {new_tokens} tokens need {rows} rows; expected at most "
                f"{min(count * size, room)}: there are {count} pages of {size} rows, and the model has {room} positions"
            )
        request = Request(len(self.requests), prompt, new_tokens, tokens=list(prompt), arrived=time.perf_counter())
        self.requests.append(request)
        self.waiting.append(request)
        return request

    def step(self) -> list[Request]:
        """Computes rows of every request that there is room for; the requests that are finished now."""
        plan = self._plan()
        finished = []
        for (request, rows), token, logit in zip(plan, *self._compute(plan), strict=True):
            begin, request.done = request.done, request.done + rows
            self._enter(request, begin, request.done, swap=True)
            if request.done < len(request.tokens):
                continue
            if len(request.tokens) == len(request.prompt):
                request.first_token = time.perf_counter() - request.arrived
            request.tokens.append(token)
            request.logits.append(logit)
            if len(request.logits) == request.new_tokens:
                self._leave(request, "finished")
                finished.append(request)
        self.steps += 1
        self.rows += sum(rows for _, rows in plan)
        return finished

    def _plan(self) -> list[tuple[Request, int]]:
        """Who has how many rows in this step; their pages are in their tables then."""
        plan, budget = [], self.chunk

        def add(request: Request) -> None:
            nonlocal budget
            missing = len(request.tokens) - request.done
            rows = 1 if missing == 1 else min(missing, budget)
            if rows == 0 or not self._allocate(request, request.done + rows):
                return
            budget -= rows if missing > 1 else 0
            # Others find these pages in this very step: a layer writes all new keys before anyone reads them.
            self._enter(request, request.done, request.done + rows)
            plan.append((request, rows))

        before = list(self.running)
        for request in before:
            if request in self.running:  # and has not lost its pages to an older one
                self._share(request)
                add(request)
        if self.running != before:
            return plan  # nobody comes in on the pages of those who had to leave
        while self.waiting and budget > 0 and len(self.running) < self.max_batch:
            request = self.waiting[0]
            self._share(request)
            if self._pages_for(request, len(request.tokens)) > len(self.pages.free):
                request.shared -= request.done
                self._leave(request, "waiting")
                break
            self.waiting.popleft()
            request.state = "running"
            self.running.append(request)
            add(request)
        return plan

    def _pages_for(self, request: Request, rows: int) -> int:
        """How many pages `request` lacks for `rows` rows."""
        return -(-rows // self.pages.page_size) - len(request.table)

    def _share(self, request: Request) -> None:
        """Takes what others have computed of the request's tokens, in whole pages, but for the last row."""
        size = self.pages.page_size
        while request.done % size == 0 and request.done + size < len(request.tokens):
            page = self.pages.page_of.get(request.prefix(len(request.table), size))
            if page is None:
                break
            self.pages.refer(page)
            request.table.append(page)
            request.done += size
            request.shared += size

    def _allocate(self, request: Request, rows: int) -> bool:
        """Pages for `rows` rows of `request`; false if it had to give up its own, being the youngest."""
        while (missing := self._pages_for(request, rows)) > len(self.pages.free):
            youngest = self.running[-1]
            self._leave(youngest, "waiting")
            youngest.preempted += 1
            self.waiting.appendleft(youngest)
            if youngest is request:
                return False
        request.table += [self.pages.take() for _ in range(missing)]
        return True

    def _enter(self, request: Request, begin: int, end: int, swap: bool = False) -> None:
        """Makes the pages that rows `begin` to `end` fill known by their prefix; with `swap` the request goes over to
        the page of whoever was first, and gives its own back."""
        for i in range(begin // self.pages.page_size, end // self.pages.page_size):
            own = request.table[i]
            page = self.pages.enter(request.prefix(i, self.pages.page_size), own)
            if swap and page != own:
                self.pages.refer(page)
                self.pages.release(own)
                request.table[i] = page

    def _leave(self, request: Request, state: str) -> None:
        """Takes all pages from `request`. The last ones first: a prefix is of no use without its beginning."""
        for page in reversed(request.table):
            self.pages.release(page)
        request.table, request.done, request.state = [], 0, state
        if request in self.running:
            self.running.remove(request)

    def _compute(self, plan: list[tuple[Request, int]]) -> tuple[list[int], list[float]]:
        """The greedy token after the last row of each request in the plan, and its logit."""
        if not plan:
            return [], []
        size, width = self.pages.page_size, max(len(request.table) for request, _ in plan)
        tokens, positions, slots, ends, lengths, table = [], [], [], [0], [], []
        for request, rows in plan:
            new = range(request.done, request.done + rows)
            tokens += request.tokens[new.start : new.stop]
            positions += new
            slots += [request.table[p // size] * size + p % size for p in new]
            ends.append(len(tokens))
            lengths.append(new.stop)
            table.append(request.table + [-1] * (width - len(request.table)))

        def on_device(values: list, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(self.device)

        tokens, positions, slots = (on_device(x, torch.int64) for x in (tokens, positions, slots))
        cu_seqlens_q, seqused_k, block_table = on_device(ends), on_device(lengths), on_device(table)
        cos, sin = self.model.cos[positions], self.model.sin[positions]
        max_q, max_k = max(rows for _, rows in plan), max(lengths)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """`q` `[1, rows, heads, d]` against all keys of each row's sequence, those of `k` and `v` among them."""
            k_pages, v_pages = self.k[layer], self.v[layer]  # [pages, page_size, kv_heads, d]
            k_pages.flatten(0, 1)[slots] = rotate(k[0], cos, sin)
            v_pages.flatten(0, 1)[slots] = v[0]
            out = ce.flash_attn_varlen_func(
                rotate(q[0], cos, sin), k_pages, v_pages, cu_seqlens_q, None, max_q, max_k, causal=True,
                block_table=block_table, seqused_k=seqused_k,
            )  # fmt: skip
            return out[None]

        logits = self.model(tokens[None], attention, rows=cu_seqlens_q[1:].long() - 1)[0]
        best, token = logits.float().max(-1)
        return token.tolist(), best.tolist()


def traffic(
    seed: int, requests: int, rate: float, vocab: int, prompt: int = 64, new_tokens: int = 32, prefix: int = 40
) -> Iterator[tuple[int, list[int], int]]:
    """Requests as (step of arrival, prompt, tokens to generate); `rate` of them come in a step on average.

    Two in three prompts begin with one of two prefixes of `prefix` tokens, as those of one application do. After it
    come 1 to `prompt` tokens of their own, and 1 to `new_tokens` are asked for.
    """
    draw, now = random.Random(seed), 0.0
    prefixes = [[draw.randrange(vocab) for _ in range(prefix)] for _ in range(2)]
    for _ in range(requests):
        now += draw.expovariate(rate)
        own = [draw.randrange(vocab) for _ in range(draw.randint(1, prompt))]
        yield int(now), draw.choice([*prefixes, []]) + own, draw.randint(1, new_tokens)


def check_alone(model: Model, request: Request) -> tuple[float, int]:
    """Compares `request` with the model on its tokens alone, `[1, N]` at once and without a cache.

    If the best logit after each prefix is that of the token that was generated, then greedy decoding alone gives the
    same tokens. Returns the largest difference of a logit, and how many tokens are not the best one alone; those are as
    good as the best within twice the tolerance, or it raises SystemExit.
    """
    tokens = torch.tensor([request.tokens[:-1]], device=model.cos.device)
    logits = model.without_cache(tokens)[0, len(request.prompt) - 1 :].float()  # [generated, vocab]
    generated = torch.tensor(request.tokens[len(request.prompt) :], device=logits.device)
    own = logits.gather(1, generated[:, None])[:, 0]
    worst = (own - torch.tensor(request.logits, device=own.device)).abs().max().item()
    gap, tolerance = (logits.amax(1) - own).max().item(), TOLERANCE[model.cos.dtype]
    if not (worst <= tolerance and gap <= 2 * tolerance):  # NaN is neither
        raise SystemExit(f"request {request.number}: logits differ by {worst:.1e} from alone, the best by {gap:.1e}")
    return worst, int((logits.argmax(1) != generated).sum())


def live_display(plain: bool):
    """A context: rich's live display where it is installed and somebody looks, or else None."""
    if not plain and sys.stdout.isatty():
        try:
            from rich.live import Live

            return Live(auto_refresh=False)
        except ImportError:
            pass
    return contextlib.nullcontext()


def summary(engine: Engine, seconds: float) -> str:
    """A line on the whole engine."""
    references, generated = engine.pages.references, sum(len(request.logits) for request in engine.requests)
    return (
        f"step {engine.steps}: {len(engine.running)} run, {len(engine.waiting)} wait, "
        f"pages {sum(n > 0 for n in references)} of {len(references)}, {sum(n > 1 for n in references)} shared, "
        f"{generated} tokens, {generated / max(seconds, 1e-9):.0f} tokens/s"
    )


def live_table(engine: Engine, seconds: float):
    """The requests that run, the next that wait and the last that finished, as rich draws them."""
    from rich.table import Table

    table = Table(title=summary(engine, seconds), title_justify="left", title_style="bold")
    for column in ("request", "state", "prompt", "in pages", "shared rows", "generated", "first token", "last tokens"):
        table.add_column(column, no_wrap=True)
    finished = [request for request in engine.requests if request.state == "finished"]
    for request in [*finished[-6:], *engine.running, *list(engine.waiting)[:6]]:
        table.add_row(
            str(request.number), request.state, str(len(request.prompt)), f"{request.done} of {len(request.tokens)}",
            str(request.shared), f"{len(request.logits)} of {request.new_tokens}",
            f"{1e3 * request.first_token:.0f} ms" if request.logits else "",
            " ".join(map(str, request.tokens[len(request.prompt) :][-6:])),
            style={"running": "green", "waiting": "yellow"}.get(request.state, "dim"),
        )  # fmt: skip
    return table


@torch.inference_mode()
def main() -> None:
    parser = make_parser(
        __doc__, ("requests", 40, 0, "that arrive"), ("pages", 36, 1, "in the pool"),
        ("chunk", 64, 1, "rows of prompts in a step"), ("max-batch", 8, 1, "served at once"),
        ("prompt", 64, 1, "longest prompt after its prefix"), ("prefix", 40, 0, "tokens that prompts have in common"),
        ("new", 32, 1, "most tokens to generate"), ("steps", 0, 0, "of the engine at most, 0 for no limit"),
        ("threads", 1, 1, "on a CPU: for the small model one is faster, by far where others use the CPU too"),
    )  # fmt: skip
    parser.add_argument("--rate", type=float, default=0.5, help="requests that arrive in a step, on average (0.5)")
    parser.add_argument("--plain", action="store_true", help="a line every 50 steps instead of a live table")
    args = parse(parser)
    torch.set_num_threads(args.threads)
    if args.dtype == "float32":
        torch.backends.cuda.matmul.fp32_precision = "ieee"  # or PyTorch's products, not ours, decide what is equal
    args.room = args.prefix + args.prompt + args.new
    model = Model(args, args.device, getattr(torch, args.dtype))
    engine = Engine(model, args.pages, args.page_size, args.chunk, args.max_batch)
    arrivals = deque(traffic(args.seed, args.requests, args.rate, args.vocab, args.prompt, args.new, args.prefix))

    refused, most_pages, seconds, drawn, start = [], 0, 0.0, 0.0, time.perf_counter()
    with live_display(args.plain) as live:
        while (arrivals or engine.running or engine.waiting) and not 0 < args.steps <= engine.steps:
            while arrivals and arrivals[0][0] <= engine.steps:
                _, prompt, new_tokens = arrivals.popleft()
                try:
                    engine.submit(prompt, new_tokens)
                except ValueError as error:
                    refused.append(str(error))
            engine.step()
            most_pages = max(most_pages, sum(n > 0 for n in engine.pages.references))
            seconds = time.perf_counter() - start
            if live and seconds > drawn + 0.1:
                live.update(live_table(engine, seconds), refresh=True)
                drawn = seconds
            elif not live and engine.steps % 50 == 0:
                print(summary(engine, seconds), flush=True)
        if live:
            live.update(live_table(engine, seconds), refresh=True)
        else:
            print(summary(engine, seconds))

    answered = [request for request in engine.requests if request.logits]
    first = [1e3 * request.first_token for request in answered] or [0.0]
    print(
        f"{sum(request.state == 'finished' for request in answered)} of {args.requests} requests served on "
        f"{args.device} in {args.dtype}: {engine.rows} rows computed, "
        f"{sum(request.shared for request in answered)} found in pages; "
        f"at most {most_pages} pages of {args.page_size} rows in use; "
        f"{sum(request.preempted for request in engine.requests)} preemptions; "
        f"first token after {statistics.median(first):.0f} ms in the median, {max(first):.0f} ms at most"
    )
    for why in refused:
        print("refused:", why)
    if args.check:
        results = [check_alone(model, request) for request in answered]
        total, other = sum(len(request.logits) for request in answered), sum(n for _, n in results)
        print(
            f"each sequence against the model alone, without a cache: {total - other} of {total} tokens equal"
            + f", {other} as good within rounding" * (other > 0)
            + f"; logits within {max((worst for worst, _ in results), default=0.0):.1e}"
        )


if __name__ == "__main__":
    main()
