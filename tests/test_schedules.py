"""Random schedules over the example engine: whatever the batch, each request is as if alone."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_models import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, PackedLM, PlainBackend, pool_for

from fx_prefill import ForwardContext, PagedKVPool, PrefillGraph, PrefillOutput
from fx_prefill.errors import ContextError
from fx_prefill.serving.attention.backend import make_attention_backend
from fx_prefill.serving.context import current_context

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from engine import Engine, PrefixCache, Request

NUM_SCHEDULES = 200
MAX_TOKENS = 64
LONGEST_PROMPT, MOST_NEW = 60, 10
NAN = float("nan")


class PoisonedPool(PagedKVPool):
    """A pool for PackedLM with NaN wherever nothing may be read: page 0 and pages nobody has."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(LAYERS, num_pages, page_size, KV_HEADS, HEAD_DIM, dtype=torch.float32)
        self.poison(range(num_pages))

    def poison(self, pages: Iterable[int]) -> None:
        for held in (*self.keys, *self.values):
            held[list(pages)] = NAN

    def release(self, pages: Iterable[int]) -> None:
        before = self.num_free
        super().release(pages)
        self.poison(self._free[before:])


class Watched:
    """A graph whose forwards may write to their own slots alone, with what they were about."""

    def __init__(self, graph: PrefillGraph, pool: PagedKVPool) -> None:
        self.graph, self.pool = graph, pool
        self.why_not = graph.why_not
        self.ctx: ForwardContext | None = None

    def run(self, ctx: ForwardContext, ids: torch.Tensor) -> PrefillOutput:
        self.ctx = ctx
        assert ctx.write_locations is not None
        before = [bits(held) for held in self._held()]
        output = self.graph.run(ctx, ids)
        others = torch.ones(len(before[0]), dtype=torch.bool)
        others[ctx.write_locations] = False
        for old, held in zip(before, self._held(), strict=True):
            new = bits(held)
            assert torch.equal(new[others], old[others]), "slots of others changed"
            assert new[~others].view(torch.float32).isfinite().all()
        return output

    def _held(self) -> tuple[torch.Tensor, ...]:
        return (*self.pool.keys, *self.pool.values)


def bits(held: torch.Tensor) -> torch.Tensor:
    """A copy of a layer's cache as integers ``[num_slots, width]``: NaN is equal to itself."""
    return held.view(torch.int32).flatten(0, 1).flatten(1).clone()


@dataclass
class Schedule:
    """A pool, an engine's settings, and when requests arrive and are aborted."""

    pool: PoisonedPool
    backend: Any
    token_budget: int
    max_requests: int
    arrivals: list[tuple[int, Request]]
    aborts: dict[int, list[Request]]


def schedule(seed: int) -> Schedule:
    rng = random.Random(seed)
    shared = [random_ids(rng, LONGEST_PROMPT) for _ in range(2)]
    arrivals: list[tuple[int, Request]] = []
    aborts: dict[int, list[Request]] = {}
    step = 0
    for number in range(rng.randint(2, 8)):
        request = Request(
            prompt(rng, shared),
            max_new_tokens=rng.randint(1, MOST_NEW),
            temperature=rng.choice([0.0, 0.0, 0.9]),
            seed=number,
            stop_tokens=rng.sample(range(VOCAB), 2),
        )
        arrivals.append((step, request))
        if rng.random() < 0.2:
            aborts.setdefault(step + rng.randint(0, 8), []).append(request)
        step += rng.choice([0, 0, 0, 1, 4])
    page_size = rng.choice([1, 2, 3, 4, 4, 8, 16])
    needs = [len(r.prompt) + r.max_new_tokens for _, r in arrivals]
    # Little more than the longest needs alone, or as much as several do.
    room = int(max(needs) * rng.choice([1.0, rng.uniform(1.0, 1.5), rng.uniform(1.5, 4.0)]))
    pool = PoisonedPool(2 + room // page_size, page_size)
    backend = PlainBackend(pool) if seed % 2 else make_attention_backend("sdpa", pool)
    budget = rng.choice([rng.randint(1, 12), *[rng.randint(12, MAX_TOKENS)] * 2, MAX_TOKENS])
    return Schedule(pool, backend, budget, rng.randint(1, 8), arrivals, aborts)


def random_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def prompt(rng: random.Random, shared: Sequence[list[int]]) -> list[int]:
    length = rng.randint(1, rng.choice([12, LONGEST_PROMPT]))
    if rng.random() < 0.3:
        return random_ids(rng, length)
    known = rng.choice(shared)[: rng.randint(length // 2, length)]
    return known + random_ids(rng, length - len(known))


@dataclass
class Seen:
    """What the schedules had in them, so that the test cannot pass for lack of it."""

    counts: Counter[str] = field(default_factory=Counter)

    def note(self, step: Any, ctx: ForwardContext) -> None:
        if not ctx.mode.extends:
            self.counts["decode"] += 1
            return
        self.counts["extend"] += 1
        self.counts["replayed"] += step.output.replayed
        self.counts["mixed"] += ctx.num_decodes > 0
        self.counts["chunks"] += sum(
            end < len(request.prompt)
            for (request, _), end in zip(step.batch, ctx.seq_lens_host, strict=True)
        )


@pytest.fixture(scope="module")
def model() -> PackedLM:
    return PackedLM()


@pytest.fixture(scope="module")
def graph(model: PackedLM) -> PrefillGraph:
    """One warm graph for all schedules, each of which brings its own pool and backend."""
    torch._dynamo.reset()
    made = PrefillGraph(model, attention=PlainBackend(pool_for()), max_tokens=MAX_TOKENS)
    made.warmup()
    return made


def logits_alone(model: PackedLM, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after each token of one request, in one eager forward: ``[num_tokens, vocab]``."""
    pool = pool_for(num_pages=2, page_size=len(tokens))
    eager = PrefillGraph(model, attention=PlainBackend(pool), enforce_eager=True)
    ctx = ForwardContext.from_lengths(
        [len(tokens)],
        page_table=pool.page_table([[1]]),
        write_locations=torch.arange(len(tokens), 2 * len(tokens)),
    )
    output = eager.run(ctx, torch.tensor(tokens), logits_rows=torch.arange(len(tokens)))
    assert output.logits is not None
    return output.logits


def assert_as_if_alone(
    model: PackedLM, request: Request, logits: Sequence[tuple[int, torch.Tensor]]
) -> None:
    """Its logits (by the tokens they follow) and tokens are those of the request alone, eagerly."""
    wanted = logits_alone(model, request.tokens)
    for num_tokens, actual in logits:
        torch.testing.assert_close(actual, wanted[num_tokens - 1], rtol=1e-4, atol=1e-5)
    fresh = Request(request.prompt, temperature=request.temperature, seed=request.seed)
    for row, token in zip(wanted[len(request.prompt) - 1 :], request.output, strict=False):
        assert token == (fresh.draw(row) if request.temperature else int(row.argmax()))


def run_schedule(plan: Schedule, graph: PrefillGraph, model: PackedLM, seen: Seen) -> None:
    watched: Any = Watched(graph, plan.pool)
    engine = Engine(
        watched,
        plan.pool,
        token_budget=plan.token_budget,
        max_requests=plan.max_requests,
        attention=plan.backend,
    )
    arriving, aborts = list(plan.arrivals), dict(plan.aborts)
    logits: dict[Request, list[tuple[int, torch.Tensor]]] = {r: [] for _, r in arriving}
    now = 0
    while arriving or engine.busy:
        assert now < 2000, "the engine makes no progress"
        while arriving and arriving[0][0] <= now:
            engine.submit(arriving.pop(0)[1])
        for request in aborts.pop(now, ()):
            seen.counts["aborts"] += request.status in ("waiting", "running")
            engine.abort(request)
        if engine.busy:
            step = engine.step()
            seen.note(step, watched.ctx)
            ends, output = watched.ctx.seq_lens_host, step.output.logits
            for (request, rows), end, row in zip(step.batch, ends, output, strict=True):
                seen.counts["prefix hits"] += not logits[request] and end > rows
                logits[request].append((end, row))
        now += 1
    for request, found in logits.items():
        assert request.status in ("finished", "aborted") and not request.pages
        seen.counts["preemptions"] += request.num_preemptions
        assert_as_if_alone(model, request, found)
    engine.prefix_cache.clear()
    assert plan.pool.num_free == plan.pool.num_pages - 1


@pytest.mark.slow
def test_random_schedules(graph: PrefillGraph, model: PackedLM) -> None:
    seen = Seen()
    for seed in range(NUM_SCHEDULES):
        try:
            run_schedule(schedule(seed), graph, model, seen)
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
    counts = seen.counts
    assert counts["replayed"] == counts["extend"] > 5 * NUM_SCHEDULES
    for kind in ("mixed", "chunks", "prefix hits", "decode", "aborts", "preemptions"):
        assert counts[kind] >= NUM_SCHEDULES // 10, (kind, counts)


# ---- the engine's own rules ---------------------------------------------------------------------


def engine_with(graph: PrefillGraph, num_pages: int = 40, **options: Any) -> Engine:
    pool = PoisonedPool(num_pages, page_size=4)
    return Engine(graph, pool, attention=PlainBackend(pool), **options)


def served(engine: Engine, *requests: Request) -> list[Any]:
    """The steps until all requests are over."""
    for request in requests:
        engine.submit(request)
    steps = []
    while engine.busy:
        steps.append(engine.step())
    return steps


def test_a_forward_that_fails_is_tried_again(graph: PrefillGraph, model: PackedLM) -> None:
    engine = engine_with(graph)
    requests = [Request(range(20), 5), Request(range(7, 16), 5, temperature=0.7)]
    engine.submit(requests[0])
    engine.step()
    engine.submit(requests[1])
    backend: Any = engine.attention
    for layer in (3, 0):
        backend.fail_in_layer = layer
        with pytest.raises(RuntimeError, match="the backend broke"):
            engine.step()
        with pytest.raises(ContextError, match="forward_context"):
            current_context()
    backend.fail_in_layer = None
    served(engine)
    for request in requests:
        assert len(request.output) == 5
        assert_as_if_alone(model, request, [])


def test_a_known_prefix_is_not_computed_again(graph: PrefillGraph) -> None:
    engine = engine_with(graph)
    first, same, longer = (Request(range(n), 1) for n in (20, 20, 23))
    rows = [step.num_prompt_rows for r in (first, same, longer) for step in served(engine, r)]
    # One row is left over for the logits, and a page that is not full is nobody else's.
    assert rows == [20, 4, 3]
    assert same.output == first.output


def test_decodes_come_after_what_extends(graph: PrefillGraph) -> None:
    engine = engine_with(graph, token_budget=8)
    old, new = Request([1, 2], 6), Request(range(20), 1)
    engine.submit(old)
    engine.step()
    engine.submit(new)
    steps = [engine.step() for _ in range(3)]
    assert [step.batch for step in steps] == [[(new, 7), (old, 1)]] * 2 + [[(new, 6), (old, 1)]]
    assert [step.output.replayed for step in steps] == [True] * 3


def test_the_request_admitted_last_waits_when_pages_run_out(
    graph: PrefillGraph, model: PackedLM
) -> None:
    engine = engine_with(graph, num_pages=8)
    old, new = Request(range(12), 12), Request(range(30, 42), 12)
    served(engine, old, new)
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)
    for request in (old, new):
        assert_as_if_alone(model, request, [])


def test_what_no_pool_holds_is_refused(graph: PrefillGraph) -> None:
    engine = engine_with(graph, num_pages=5)
    with pytest.raises(ValueError, match="needs 5 pages and the pool has 4"):
        engine.submit(Request(range(14), 4))
    served(engine, fits := Request(range(14), 3))
    assert len(fits.output) == 3
    for wrong in (Request([], 1), Request([1], 0), fits):
        with pytest.raises(ValueError, match="required"):
            engine.submit(wrong)


def test_pages_that_others_hold_are_not_waited_for(graph: PrefillGraph) -> None:
    engine = engine_with(graph, num_pages=5)
    with pytest.raises(RuntimeError, match="0 requests wait"):
        engine.step()
    theirs = engine.pool.allocate(4)
    engine.submit(request := Request([1], 1))
    with pytest.raises(RuntimeError, match="1 requests wait"):
        engine.step()
    engine.pool.release(theirs)
    served(engine)
    assert request.status == "finished"


def test_aborts_free_pages_at_once(graph: PrefillGraph) -> None:
    engine = engine_with(graph, max_requests=1)
    running, waiting = Request(range(10), 4), Request(range(10), 4)
    engine.submit(running)
    engine.submit(waiting)
    engine.step()
    for request in (waiting, running, running):
        engine.abort(request)
        assert request.status == "aborted" and not request.pages
    assert not engine.busy
    engine.prefix_cache.clear()
    assert engine.pool.num_free == engine.pool.num_pages - 1


def test_prefixes_go_least_recently_used_first() -> None:
    pool = PoisonedPool(20, page_size=2)
    cache = PrefixCache(pool)
    kept = {}
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4]):
        pages = pool.allocate(2)
        cache.keep(tokens, pages)
        pool.release(pages)
        kept.setdefault(tokens[0], pages)

    def known(*tokens: int) -> list[int]:
        pool.release(found := cache.take([*tokens, 0]))
        return found

    assert known(1, 2, 3, 4) == kept[1] and known(1, 2, 9, 9) == kept[1][:1]
    cache.evict(1)
    assert known(5, 6, 7, 8) == kept[5][:1]  # the prefix outlives what continued it
    cache.evict(1, held=kept[5])
    assert known(5, 6) == kept[5][:1] and known(1, 2, 3, 4) == kept[1][:1]
    cache.evict(3)  # there are two: freeing them would not be enough
    assert known(5, 6) and known(1, 2)
    cache.clear()
    assert pool.num_free == 19
