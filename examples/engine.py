"""A small serving engine over PrefillGraph: continuous batching, chunked prefill, prefix caching.

`Engine` knows no model: it packs rows of requests, keeps their pages and reads logits. `main` lets
it serve SmolLM2-135M-Instruct with and without captured graphs, then each request alone. Exits with
1 when float32 tokens differ from those of the request alone (bfloat16 rounds otherwise in batches
of other sizes, so there they are only counted), or when no prefill was replayed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import torch

from fx_prefill import AttentionBackend, ForwardContext, PagedKVPool, PrefillGraph, PrefillOutput

Status = Literal["new", "waiting", "running", "finished", "aborted"]


@dataclass(eq=False)
class Request:
    """A prompt, how to continue it, and what became of it; ``temperature`` 0 is greedy.

    ``num_computed`` of its ``tokens`` (prompt and output) have their K and V in ``pages``.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    stop_tokens: Collection[int] = ()
    status: Status = field(init=False, default="new")
    tokens: list[int] = field(init=False)
    pages: list[int] = field(init=False, default_factory=list)
    num_computed: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    submitted_s: float = field(init=False, default=0.0)
    first_token_s: float = field(init=False, default=0.0)  # after it was submitted
    generator: torch.Generator | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        """The new tokens so far."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_missing(self) -> int:
        """Tokens whose K and V are not in the cache yet."""
        return len(self.tokens) - self.num_computed

    @property
    def decodes(self) -> bool:
        """Whether all it brings is the token it made last."""
        return self.num_missing == 1 and len(self.tokens) > len(self.prompt)

    def draw(self, logits: torch.Tensor) -> int:
        """A token from ``[vocab]`` logits; draws are the request's own, whatever its batch."""
        if self.generator is None:
            self.generator = torch.Generator(logits.device).manual_seed(self.seed)
        weights = torch.softmax(logits.float() / self.temperature, -1)
        return int(torch.multinomial(weights, 1, generator=self.generator))


class PrefixCache:
    """Full pages by the hash of all tokens up to their end; the least recently used go first.

    It is a user of each page it lists, beside the requests that share it.
    """

    def __init__(self, pool: PagedKVPool) -> None:
        self._pool = pool
        self._pages: OrderedDict[bytes, int] = OrderedDict()

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Pages of the longest known prefix, with the caller as one more user.

        At least one token is left over, as its row gives the logits.
        """
        known = takewhile(self._pages.__contains__, self._keys(tokens[:-1]))
        found = [self._pages[key] for key in known]
        self._pool.share(found)
        return found

    def keep(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """List the full pages of a request, whose ``tokens`` are all in the cache."""
        # Backwards, so that a prefix is used after, and outlives, what continues it.
        for key, page in reversed(list(zip(self._keys(tokens), pages, strict=False))):
            if key not in self._pages:
                self._pages[key] = page
                self._pool.share([page])
            self._pages.move_to_end(key)

    def evict(self, num_pages: int, held: Collection[int] = ()) -> None:
        """Free this many pages that no request holds; none where there are fewer."""
        idle = [key for key, page in self._pages.items() if page not in held]
        for key in idle[:num_pages] if len(idle) >= num_pages else ():
            self._pool.release([self._pages.pop(key)])

    def clear(self) -> None:
        """Forget all pages."""
        self.evict(len(self._pages))

    def _keys(self, tokens: Sequence[int]) -> list[bytes]:
        keys, before, size = [], b"", self._pool.page_size
        for start in range(0, len(tokens) - size + 1, size):
            page = repr(list(tokens[start : start + size]))
            before = hashlib.sha256(before + page.encode()).digest()
            keys.append(before)
        return keys


Batch = list[tuple[Request, int]]  # and the rows of each


@dataclass(frozen=True)
class Step:
    """One forward: the requests and their rows, what it gave, and why it did not replay."""

    batch: Batch
    num_prompt_rows: int
    output: PrefillOutput
    refusal: str | None
    seconds: float


class Engine:
    """Serves requests from one pool, with one packed forward of ``graph`` at a time.

    Its rows are the next chunks of prompts, then one for each request that decodes; at most
    ``token_budget`` together. ``attention`` replaces the graph's backend. When pages run out,
    prefixes that nobody uses go first, then the request admitted last waits again.
    """

    def __init__(
        self,
        graph: PrefillGraph,
        pool: PagedKVPool,
        *,
        token_budget: int = 256,
        max_requests: int = 8,
        attention: AttentionBackend | None = None,
    ) -> None:
        self.graph, self.pool, self.attention = graph, pool, attention
        # Each request that decodes needs a row.
        self.token_budget, self.max_requests = token_budget, min(max_requests, token_budget)
        self.prefix_cache = PrefixCache(pool)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError for one that the pool can never hold."""
        if request.status != "new" or not request.prompt or request.max_new_tokens < 1:
            raise ValueError("required: a new request, a prompt token and a token to make")
        # The last token is returned and never attended to.
        num_pages = self.pool.pages_for(len(request.prompt) + request.max_new_tokens - 1)
        if num_pages > self.pool.num_pages - 1:
            have = self.pool.num_pages - 1
            raise ValueError(f"the request needs {num_pages} pages and the pool has {have}")
        request.status, request.submitted_s = "waiting", time.perf_counter()
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Drop a request between two steps; one that is over stays as it is."""
        if request.status in ("waiting", "running"):
            self._leave(request, "aborted")

    def step(self) -> Step:
        """One forward; when it raises, the next step tries again. RuntimeError if none can run."""
        start = time.perf_counter()
        if not (batch := self._schedule()):
            raise RuntimeError(f"nothing can run: {len(self.waiting)} requests wait for pages")
        prompt_rows = sum(rows for request, rows in batch if not request.decodes)
        ctx, ids = self._pack(batch)
        output = self.graph.run(ctx, ids)
        refusal = None if output.replayed else self.graph.why_not(ctx)
        assert output.logits is not None, "a model without a head makes no tokens"
        self._advance(batch, output.logits)
        return Step(batch, prompt_rows, output, refusal, time.perf_counter() - start)

    def _schedule(self) -> Batch:
        """What the next forward runs."""
        budget = self.token_budget - sum(request.decodes for request in self.running)
        batch: Batch = []
        for request in list(self.running):
            rows = 1 if request.decodes else min(request.num_missing, budget)
            if rows and request.status == "running" and self._make_room(request, rows):
                budget -= 0 if request.decodes else rows
                batch.append((request, rows))
        while self.waiting and budget and self._admit(request := self.waiting[0]):
            rows = min(request.num_missing, budget)
            budget -= rows
            batch.append((request, rows))
        return sorted(batch, key=lambda item: item[0].decodes)

    def _admit(self, request: Request) -> bool:
        """Run the first waiting request if there are a place and pages for all its tokens."""
        if len(self.running) == self.max_requests:
            return False
        request.pages = self.prefix_cache.take(request.tokens)
        request.num_computed = len(request.pages) * self.pool.page_size
        self.running.append(request)
        if not self._grow(request, len(request.tokens)):
            self._leave(request, "waiting")
            return False
        self.waiting.popleft()
        request.status = "running"
        return True

    def _make_room(self, request: Request, rows: int) -> bool:
        """Give a running request pages for its next rows; False if it has to wait for them."""
        while not self._grow(request, request.num_computed + rows):
            last = self.running[-1]
            self.prefix_cache.keep(last.tokens[: last.num_computed], last.pages)
            last.num_preemptions += 1
            self._leave(last, "waiting")
            self.waiting.appendleft(last)
            if last is request:
                return False
        return True

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Give a request pages up to so many tokens if they are free or evicting frees them."""
        lacking = max(self.pool.pages_for(num_tokens) - len(request.pages), 0)
        if lacking > self.pool.num_free:
            held = {page for running in self.running for page in running.pages}
            self.prefix_cache.evict(lacking - self.pool.num_free, held)
        if lacking > self.pool.num_free:
            return False
        request.pages += self.pool.allocate(lacking)
        return True

    def _leave(self, request: Request, status: Status) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        self.pool.release(request.pages)
        request.pages, request.num_computed, request.status = [], 0, status

    def _pack(self, batch: Batch) -> tuple[ForwardContext, torch.Tensor]:
        """The context of a forward and the ids of its rows."""
        ids: list[int] = []
        slots: list[int] = []
        for request, rows in batch:
            start, stop = request.num_computed, request.num_computed + rows
            ids += request.tokens[start:stop]
            slots += self.pool.slots(request.pages, start, stop)
        device = self.pool.device
        # In one copy from pinned memory: others make the host wait for the device.
        packed = torch.tensor([ids, slots], pin_memory=device.type == "cuda")
        row_ids, write_locations = packed.to(device, non_blocking=True)
        ctx = ForwardContext.from_lengths(
            [rows for _, rows in batch],
            [request.num_computed for request, _ in batch],
            num_decodes=sum(request.decodes for request, _ in batch),
            device=device,
            page_table=self.pool.page_table([request.pages for request, _ in batch]),
            write_locations=write_locations,
            attention=self.attention,
        )
        return ctx, row_ids

    def _advance(self, batch: Batch, logits: torch.Tensor) -> None:
        """Note what is in the cache now, and add a token where all before it are."""
        best = logits.argmax(-1).tolist()  # one wait for the device
        for i, (request, rows) in enumerate(batch):
            request.num_computed += rows
            if request.num_missing:
                continue  # More chunks follow: the next token is known.
            if not request.output:
                self.prefix_cache.keep(request.tokens, request.pages)
                request.first_token_s = time.perf_counter() - request.submitted_s
            token = request.draw(logits[i]) if request.temperature else best[i]
            request.tokens.append(token)
            if len(request.output) == request.max_new_tokens or token in request.stop_tokens:
                self._leave(request, "finished")


# --- demonstration ------------------------------------------------------------------------------

NUM_PAGES, PAGE_SIZE, TOKEN_BUDGET, NEW_TOKENS, NUM_SHARED = 40, 16, 128, 6, 90
LENGTHS = (5, 150, 40, 100, 17, 240, 64, 130)
QUESTIONS = ("Why is the sky blue?", "Name a river.", "What is 12 times 12?", "Who are you?")


def main() -> int:
    import smollm2

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--attention", help="default: varlen for bfloat16 on CUDA, else sdpa")
    parser.add_argument("--compiler", default="eager", help="segment compiler: eager or inductor")
    arguments = parser.parse_args()
    try:
        model, tokenizer = smollm2.load()
    except smollm2.LoadError as error:
        sys.exit(f"error: {error}")
    model.to(arguments.device, getattr(torch, arguments.dtype))
    varlen = model.device.type == "cuda" and model.dtype is torch.bfloat16
    attention = arguments.attention or ("varlen" if varlen else "sdpa")
    print(f"{model.device}, {model.dtype}, {attention} attention, {arguments.compiler} segments\n")
    return compare(model, tokenizer, attention=attention, compiler=arguments.compiler)


def compare(model: Any, tokenizer: Any, **options: Any) -> int:
    """Serve a workload with the graph, eagerly, and request by request; return the exit status."""
    config, on = model.config, {"dtype": model.dtype, "device": model.device}
    heads = (config.num_key_value_heads, config.hidden_size // config.num_attention_heads)
    pool = PagedKVPool(config.num_hidden_layers, NUM_PAGES, PAGE_SIZE, *heads, **on)
    graph = PrefillGraph(model, pool=pool, chunked_prefill_size=TOKEN_BUDGET, **options)
    eager = PrefillGraph(model, pool=pool, enforce_eager=True, **options)
    graph.warmup()
    serve(graph, pool, workload(tokenizer)[:2])  # untimed: first forwards set things up
    runs = [serve(used, pool, workload(tokenizer)) for used in (graph, eager)]
    print(f"{'':32}{'with the graph':>16}{'eager':>16}")
    for label in runs[0].table():
        print(f"{label:32}" + "".join(f"{run.table()[label]:>16}" for run in runs))
    for reason, count in Counter(step.refusal for run in runs for step in run.prefills).items():
        print(f"{count} prefill steps {f'eager: {reason}' if reason else 'replayed'}")
    alone = [tokens for one in workload(tokenizer) for tokens in serve(eager, pool, [one]).outputs]
    differ = [a != b for run in runs for a, b in zip(run.outputs, alone, strict=True)]
    print(f"\n{sum(differ)} of {len(differ)} outputs differ from the request alone, run eagerly")
    return int((model.dtype is torch.float32 and any(differ)) or not graph.replays)


def workload(tokenizer: Any) -> list[Request]:
    """Texts of many lengths, then questions on a shared one; every third output is sampled."""
    ids = tokenizer(Path(__file__).with_name("prompt.txt").read_text(encoding="utf-8")).input_ids
    prompts = [ids[length : 2 * length] for length in LENGTHS]
    prompts += [ids[:NUM_SHARED] + tokenizer(question).input_ids for question in QUESTIONS]
    return [Request(p, NEW_TOKENS, 0.8 * (i % 3 == 2), seed=i) for i, p in enumerate(prompts)]


@dataclass(frozen=True)
class Served:
    """What serving a workload gave."""

    requests: list[Request]
    steps: list[Step]
    seconds: float

    @property
    def outputs(self) -> list[list[int]]:
        return [request.output for request in self.requests]

    @property
    def prefills(self) -> list[Step]:
        return [step for step in self.steps if step.num_prompt_rows]

    def table(self) -> dict[str, str]:
        replayed = sum(step.output.replayed for step in self.prefills)
        rows = sum(step.num_prompt_rows for step in self.prefills)
        waits_ms = sorted(1e3 * request.first_token_s for request in self.requests)
        middle, p90 = (waits_ms[int(part * len(waits_ms))] for part in (0.5, 0.9))
        return {
            "requests": str(len(self.requests)),
            "prompt tokens": str(sum(len(request.prompt) for request in self.requests)),
            "of them not from the cache": str(rows),
            "generated tokens": str(sum(map(len, self.outputs))),
            "preemptions": str(sum(request.num_preemptions for request in self.requests)),
            "prefill steps replayed / eager": f"{replayed} / {len(self.prefills) - replayed}",
            "seconds": f"{self.seconds:.2f}",
            "prefill tokens per s": f"{rows / sum(step.seconds for step in self.prefills):.0f}",
            "first token ms, median / p90": f"{middle:.0f} / {p90:.0f}",
        }


def serve(graph: PrefillGraph, pool: PagedKVPool, requests: list[Request]) -> Served:
    """Serve requests that arrive one every other step."""
    engine = Engine(graph, pool, token_budget=TOKEN_BUDGET)
    steps: list[Step] = []
    arriving = deque(requests)
    start = time.perf_counter()
    while arriving or engine.busy:
        if arriving and (len(steps) % 2 == 0 or not engine.busy):
            engine.submit(arriving.popleft())
        steps.append(engine.step())
    engine.prefix_cache.clear()
    return Served(requests, steps, time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
