"""python/serve.py, the example of a serving engine: its pages and its order of work on a shadow of the pool, which
says for each row what was written there, and what it generates against the model alone. And that the examples run."""

from __future__ import annotations

import io
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import BF16, F16, targets
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "python"))
import generate
import serve

ROOM, VOCAB = 160, 61


@pytest.fixture(autouse=True)
def one_thread():
    """Thousands of small operators: a second thread would mostly wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class WatchedPages(serve.Pages):
    """Calls `taken` with each page that gets a new owner."""

    taken = staticmethod(lambda page: None)

    def take(self):
        page = super().take()
        self.taken(page)
        return page


class Shadow(serve.Engine):
    """The engine without a model: a row of a page holds the tokens up to it, and the next token follows from them.

    Every read is of the right prefix, and every write goes to a page's next row, which nobody has written.
    """

    def __init__(self, pages, page_size, chunk, max_batch):
        weights = {"lm_head.weight": torch.empty(0)}
        model = SimpleNamespace(layers=0, kv_heads=0, d=0, weights=weights, cos=torch.empty(ROOM, 0))
        super().__init__(model, pages, page_size, chunk, max_batch)
        self.pages = WatchedPages(pages, page_size)
        self.written = [[] for _ in range(pages)]
        self.pages.taken = lambda page: self.written[page].clear()

    @staticmethod
    def token_after(tokens):
        return hash(tuple(tokens)) % VOCAB

    @classmethod
    def alone(cls, prompt, new_tokens):
        tokens = list(prompt)
        for _ in range(new_tokens):
            tokens.append(cls.token_after(tokens))
        return tokens

    def _compute(self, plan):
        size = self.pages.page_size
        prompts = [rows for request, rows in plan if request.done + rows < len(request.tokens) or rows > 1]
        assert sum(prompts) <= self.chunk and len(plan) <= self.max_batch
        for request, rows in plan:
            for p in range(request.done, request.done + rows):
                page = self.written[request.table[p // size]]
                assert len(page) == p % size, "a row is written twice, or before those in front of it"
                page.append(tuple(request.tokens[: p + 1]))
        for request, rows in plan:
            for p in range(request.done + rows):
                assert self.written[request.table[p // size]][p % size] == tuple(request.tokens[: p + 1])
        tokens = [self.token_after(request.tokens[: request.done + rows]) for request, rows in plan]
        return tokens, [0.0] * len(plan)


def check_pages(engine):
    """After a step: no page is lost or free twice, and what several requests have in common lies there once."""
    pages, size = engine.pages, engine.pages.page_size
    tables = [page for request in engine.running for page in request.table]
    assert [tables.count(page) for page in range(len(pages.references))] == pages.references
    assert set(pages.free) == {page for page, n in enumerate(pages.references) if n == 0}
    assert {page: prefix for prefix, page in pages.page_of.items()} == {
        page: prefix for page, prefix in enumerate(pages.prefix) if prefix
    }
    for request in engine.requests:
        assert (request.state == "running") == (request in engine.running)
        assert (request.state == "waiting") == (request in engine.waiting)
        assert request in engine.running or (not request.table and request.done == 0)
    for request in engine.running:
        assert len(request.table) == -(-request.done // size)
        for i in range(request.done // size):
            assert pages.page_of[request.prefix(i, size)] == request.table[i]
        if request.done % size:
            assert pages.references[request.table[-1]] == 1 and pages.prefix[request.table[-1]] is None
    ages = [request.number for request in [*engine.running, *engine.waiting]]
    assert ages == sorted(ages)


def serve_all(engine, arrivals, steps=0, after_step=lambda engine: None):
    """At least `steps` steps, and until all is served; the requests that were refused are left out."""
    arrivals = list(arrivals)
    while arrivals or engine.running or engine.waiting or engine.steps < steps:
        while arrivals and arrivals[0][0] <= engine.steps:
            _, prompt, new_tokens = arrivals.pop(0)
            try:
                engine.submit(prompt, new_tokens)
            except ValueError as error:
                assert "expected at most" in str(error)
        finished = engine.step()
        assert all(len(request.tokens) == len(request.prompt) + request.new_tokens for request in finished)
        assert engine.steps < 10_000, "no end in sight"
        after_step(engine)
    assert all(request.state == "finished" for request in engine.requests)
    return engine.requests


# ------------------------------------------------------------------------------------------------ on the shadow
@settings(max_examples=80)
@given(
    pages=st.integers(1, 24),
    page_size=st.sampled_from([1, 2, 3, 8, 16]),
    chunk=st.sampled_from([1, 2, 7, 16, 1000]),
    max_batch=st.integers(1, 6),
    rate=st.sampled_from([0.1, 1.0, 20.0]),
    prefix=st.integers(0, 40),
    copies=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_pages_and_order(pages, page_size, chunk, max_batch, rate, prefix, copies, seed):
    engine = Shadow(pages, page_size, chunk, max_batch)
    arrivals = serve.traffic(seed, 20, rate, VOCAB, prompt=24, new_tokens=12, prefix=prefix)
    arrivals = [arrival for arrival in arrivals for _ in range(copies)]
    for request in serve_all(engine, arrivals, after_step=check_pages):
        assert request.tokens == Shadow.alone(request.prompt, request.new_tokens)


def test_a_thousand_steps_of_pages():
    engine = Shadow(pages=30, page_size=8, chunk=24, max_batch=8)
    arrivals = serve.traffic(0, 300, 0.3, VOCAB, prompt=60, new_tokens=40, prefix=32)
    requests = serve_all(engine, arrivals, 1000, check_pages)
    assert all(request.tokens == Shadow.alone(request.prompt, request.new_tokens) for request in requests)
    assert len(requests) == 300 and any(r.preempted for r in requests) and sum(r.shared for r in requests) > 1000


@pytest.mark.parametrize("chunk", [1, 5, 8, 13, 64])
def test_a_shared_prefix_is_stored_once(chunk):
    engine = Shadow(pages=40, page_size=8, chunk=chunk, max_batch=4)
    prefix = list(range(32))
    first, second, third = (engine.submit([*prefix, 40 + i], 60) for i in range(3))  # at once
    while not (first.logits and second.logits and third.logits):
        engine.step()
        check_pages(engine)
    assert first.table[:4] == second.table[:4] == third.table[:4]
    assert [engine.pages.references[page] for page in first.table[:4]] == [3] * 4
    assert len({request.table[4] for request in (first, second, third)}) == 3
    if chunk % 8 == 0:  # a chunk that ends within a page is computed by whoever comes meanwhile, and given back
        assert engine.rows == 32 + sum(len(request.tokens) - 1 - 32 for request in (first, second, third))


@pytest.mark.parametrize("prompt", [range(24), range(27)])
def test_a_page_filled_twice_is_stored_once(prompt):
    """Of equal prompts each request fills the last pages itself, and goes over to those of the first."""
    engine = Shadow(pages=40, page_size=8, chunk=64, max_batch=4)
    requests = [engine.submit(list(prompt), 30) for _ in range(3)]
    for _ in range(20):
        engine.step()
        check_pages(engine)
    full = requests[0].done // 8
    assert full > len(prompt) // 8 and len({tuple(request.table[:full]) for request in requests}) == 1
    assert all(engine.pages.references[page] == 3 for page in requests[0].table[:full])


def test_a_prefix_outlives_its_requests():
    engine = Shadow(pages=10, page_size=8, chunk=64, max_batch=4)
    for computed in (20, 4):  # the same prompt again: whole pages are found, the rest is computed
        before = engine.rows
        engine.submit(list(range(20)), 1)
        engine.step()
        assert engine.rows - before == computed
        assert list(engine.pages.free)[-2:] == [1, 0]  # a prefix is the last to be overwritten, from its end
    engine.submit(list(range(100, 180)), 1)  # takes every page
    engine.step()
    request = engine.submit(list(range(20)), 1)
    engine.step()
    assert request.shared == 0


def test_pages_run_out():
    """Two requests that fit alone and not together: the younger one gives up its pages, and gets what it would have."""
    engine = Shadow(pages=6, page_size=4, chunk=16, max_batch=4)
    old, young = engine.submit([1] * 8, 17), engine.submit([2] * 8, 17)  # 24 rows each, all the pool
    serve_all(engine, [], after_step=check_pages)
    assert old.preempted == 0 < young.preempted
    assert [r.tokens for r in (old, young)] == [Shadow.alone([1] * 8, 17), Shadow.alone([2] * 8, 17)]


def test_what_can_never_fit_is_refused():
    engine = Shadow(pages=6, page_size=4, chunk=16, max_batch=4)
    engine.submit([1] * 8, 17)
    with pytest.raises(ValueError, match="8 and 18 tokens need 25 rows; expected at most 24: there are 6 pages of 4"):
        engine.submit([1] * 8, 18)
    with pytest.raises(ValueError, match=f"the model has {ROOM} positions"):
        Shadow(pages=100, page_size=16, chunk=16, max_batch=4).submit([1] * ROOM, 2)
    for prompt, new_tokens in (([], 1), ([1], 0)):
        with pytest.raises(ValueError, match="expected at least 1 of each"):
            engine.submit(prompt, new_tokens)
    with pytest.raises(ValueError, match=r"are \(6, 4, 0, 4\); expected 1 or more"):
        Shadow(pages=6, page_size=4, chunk=0, max_batch=4)
    assert len(serve_all(engine, [])) == 1


def test_empty_steps():
    engine = Shadow(pages=6, page_size=4, chunk=16, max_batch=4)
    assert [engine.step(), engine.step()] == [[], []]
    request = engine.submit([1], 1)
    assert engine.step() == [request] and engine.step() == []
    assert (engine.steps, engine.rows) == (4, 1)


# ------------------------------------------------------------------------------------------------ with the model
def make_engine(target, pages, page_size, chunk, max_batch):
    sizes = {
        "layers": 1,
        "dim": 64,
        "heads": 4,
        "kv_heads": 2,
        "vocab": VOCAB,
        "weights": None,
        "seed": 0,
        "room": ROOM,
    }
    engine = serve.Engine(
        generate.Model(Namespace(**sizes), target.device, target.dtype), pages, page_size, chunk, max_batch
    )

    def poison(page):
        engine.k[:, page] = engine.v[:, page] = float("nan")

    engine.pages = WatchedPages(pages, page_size)
    engine.pages.taken = poison
    poison(slice(None))
    return engine


def check_against_the_model(engine, target):
    """In float32 the same tokens. A GPU adds in another order, and may choose otherwise between two all but equal."""
    others = sum(serve.check_alone(engine.model, request)[1] for request in engine.requests)
    assert others <= target.cuda or target.dtype != torch.float32


EVERYWHERE = targets(("cpu", "torch"), ("cuda", "auto"), ("cuda", "auto", F16), ("cuda", "auto", BF16))


@pytest.mark.parametrize("target", EVERYWHERE)
@torch.inference_mode()
def test_a_thousand_steps(target):
    engine = make_engine(target, pages=24, page_size=16, chunk=24, max_batch=6)
    arrivals = serve.traffic(1, 200, 0.2, VOCAB, prompt=60, new_tokens=40, prefix=40)
    serve_all(engine, arrivals, 1000)
    assert any(request.preempted for request in engine.requests)
    check_against_the_model(engine, target)


@pytest.mark.parametrize("target", EVERYWHERE)
@pytest.mark.parametrize("chunk, page_size", [(1, 1), (7, 48), (16, 16), (1000, 256)])
@torch.inference_mode()
def test_chunks(target, chunk, page_size):
    """Any chunks in any pages, beside any others: what the request gets alone in one."""
    engine = make_engine(target, 1024 // page_size, page_size, chunk, 4)
    serve_all(engine, serve.traffic(chunk, 8, 1.0, VOCAB, prompt=50, new_tokens=8, prefix=40))
    check_against_the_model(engine, target)
    for request in engine.requests[:4] if target.dtype == torch.float32 else ():
        alone = make_engine(target, 32, 16, 1000, 1)
        (own,) = serve_all(alone, [(0, request.prompt, request.new_tokens)])
        assert own.tokens == request.tokens


# ------------------------------------------------------------------------------------------------ as users run them
@pytest.mark.parametrize("target", targets(("cpu", "torch"), ("cuda", "auto")))
@pytest.mark.parametrize(
    "main, options, says",
    [
        (serve.main, "--plain --requests 6 --new 8 --prompt 90 --pages 8", "tokens equal"),
        (generate.main, "--steps 4 --batch 2", "greedy tokens equal"),
    ],
    ids=["serve", "generate"],
)
def test_examples(target, main, options, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["example", "--device", target.device, *options.split()])
    main()
    out = capsys.readouterr().out
    assert says in out and (main is not serve.main or "refused: prompt and new_tokens: " in out)


@pytest.mark.parametrize(
    "main, options, says",
    [
        (generate.main, "--device cuda", "--device: is cuda, and PyTorch sees no GPU"),
        (serve.main, "--device cuda", "--device: is cuda, and PyTorch sees no GPU"),
        (generate.main, "--heads 3", "--heads: is 3 and --dim 256; expected a head_dim, --dim / --heads, of 4, 8, ..."),
        (generate.main, "--heads 32 --kv-heads 32 --dtype float16 --dim 384", "of 8, 16, ... or 256 (in float16)"),
        (generate.main, "--dim 2048", "--heads: is 4 and --dim 2048; expected a head_dim"),
        (generate.main, "--kv-heads 3", "--kv-heads: is 3; expected a divisor of --heads, 4"),
        (generate.main, "--page-size 10", "--page-size: is 10; expected a power of two or a multiple of 16"),
        (generate.main, "--page-size 8192", "--page-size: is 8192; expected a power of two or a multiple of 16"),
        (generate.main, "--prompt 2", "--prompt: is 2; expected 3 or more"),
        (generate.main, "--weights nowhere", "--weights: is nowhere, where no file is"),
        (serve.main, "--pages 0", "--pages: is 0; expected 1 or more"),
        (serve.main, "--kv-heads 3", "--kv-heads: is 3; expected a divisor of --heads, 4"),
    ],
)  # fmt: skip
def test_options_that_the_model_cannot_have(main, options, says, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["example", *options.split()])
    with pytest.raises(SystemExit):
        main()
    assert says in capsys.readouterr().err


def test_live_table():
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=200)
    engine = Shadow(pages=6, page_size=4, chunk=16, max_batch=1)
    requests = [engine.submit([7, 8, 9], n) for n in (1, 3, 5)]
    engine.step()
    engine.step()
    console.print(serve.live_table(engine, 1.0))
    text = console.file.getvalue()
    assert [request.state for request in requests] == ["finished", "running", "waiting"]
    assert all(word in text for word in ("step 2: 1 run, 1 wait", "finished", "running", "waiting", "1 of 3"))
