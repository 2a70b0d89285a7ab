"""One compiled module called from several threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch._dynamo.config as dynamo_config
import torch.fx.experimental._config as fx_config
from harness import MAX_TOKENS, Around, assert_same, rows, shuffled, token_graph

import fx_prefill
from fx_prefill.tracing import tracing_config

TIMEOUT_S = 60


def test_threads_get_their_own_rows() -> None:
    module = Around(lambda x: x - x.mean(1, keepdim=True))
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    module(rows(17))
    start = threading.Barrier(3)

    def serve(seed: int) -> int:
        start.wait(TIMEOUT_S)
        with torch.no_grad():
            for n in shuffled(rounds=8, seed=seed):
                x = rows(n, seed=seed)
                assert_same(module(x), module.forward(x), f"thread {seed}, {n} tokens")
        return seed

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(serve, range(3), timeout=TIMEOUT_S)) == [0, 1, 2]
    graph = token_graph(compiled.report())
    assert sum(graph.replays.values()) == 1 + 3 * 8 * 6, "no call was refused for another's sake"


def test_threads_meet_at_the_first_call() -> None:
    module = Around(lambda x: x - x.mean(1, keepdim=True))
    fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    start = threading.Barrier(2)

    def first(n: int) -> None:
        start.wait(TIMEOUT_S)
        with torch.no_grad():
            assert_same(module(rows(n)), module.forward(rows(n)), f"{n} tokens")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(first, (17, 40), timeout=TIMEOUT_S))


def test_overlapping_calls_leave_the_configuration_as_it_was() -> None:
    """Calls that overlap in two threads may not restore each other's settings."""
    before = fx_config.use_duck_shape, dynamo_config.specialize_float
    first, second = tracing_config(), tracing_config()
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with second:
            entered.set()
            left.wait(TIMEOUT_S)

    thread = threading.Thread(target=other)
    with first:
        thread.start()
        assert entered.wait(TIMEOUT_S)
    left.set()
    thread.join(TIMEOUT_S)
    assert (fx_config.use_duck_shape, dynamo_config.specialize_float) == before
