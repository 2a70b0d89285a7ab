"""Prompts in a batch: padded along the tokens, the batch a part of the key, a bound on the keys."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from harness import WIDTH, Around, assert_same, rows, token_graph
from test_adversaries import runtimes

import fx_prefill
from fx_prefill.errors import OptionError
from fx_prefill.execution.programs import BatchKeys

MAX_TOKENS = 64
LENGTHS = (2, 15, 16, 17, 40, 64, 65)


def padded_batch(batch: int, num_tokens: int, side: str, seed: int) -> dict[str, torch.Tensor]:
    """Ids, and a mask that leaves out up to all but one token of each prompt on one side."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * num_tokens + batch)
    ids = torch.randint(3, 112, (batch, num_tokens), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        left_out = int(torch.randint(0, num_tokens, (1,), generator=generator))
        part = slice(0, left_out) if side == "left" else slice(num_tokens - left_out, None)
        mask[row, part] = 0
        ids[row, part] = 0
    return {"input_ids": ids, "attention_mask": mask}


def with_positions(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As ``generate`` does: positions count from the first token that the mask leaves in."""
    positions = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return {**given, "position_ids": positions}


def assert_replays_like_eager(model: Any, calls: list[dict[str, torch.Tensor]]) -> None:
    kept = []
    for given in calls:
        what = f"{list(given['input_ids'].shape)}"
        seen = given["attention_mask"].bool()
        actual = model(**given, use_cache=False).last_hidden_state
        expected = model.forward(**given, use_cache=False).last_hidden_state
        torch.testing.assert_close(
            actual[seen], expected[seen], rtol=1e-4, atol=2e-5, msg=lambda m, w=what: f"{w}: {m}"
        )
        kept.append((actual, actual.clone()))
    for actual, then in kept:
        assert torch.equal(actual, then)


def llama() -> Any:
    pytest.importorskip("transformers")
    from families import BY_NAME

    return BY_NAME["llama"].inner("sdpa")


@pytest.mark.parametrize("side", ["left", "right"])
def test_batch_of_three_with_padding_and_a_mask(side: str) -> None:
    model = llama()
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS)
    lengths = random.Random(0).sample([*LENGTHS, *LENGTHS], 2 * len(LENGTHS))
    calls = [with_positions(padded_batch(3, n, side, i)) for i, n in enumerate(lengths)]
    assert_replays_like_eager(model, calls)
    (graph,) = prefill.report().graphs
    assert sum(graph.replays.values()) == 2 * (len(LENGTHS) - 1), str(prefill.report())
    assert graph.fallbacks == {"above the largest bucket": 2}


def test_batches_of_one_to_eight_in_random_order() -> None:
    model = llama()
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS)
    generator = random.Random(1)
    batches = [*range(1, 9), *range(1, 9)]
    generator.shuffle(batches)
    calls = [
        with_positions(padded_batch(batch, generator.choice(LENGTHS[:-1]), "left", i))
        for i, batch in enumerate(batches)
    ]
    assert_replays_like_eager(model, calls)
    graphs = prefill.report().graphs
    # PyTorch traces a batch of one, and the first other batch, as graphs of their own.
    assert len(graphs) <= 3, str(prefill.report())
    assert sum(sum(graph.replays.values()) for graph in graphs) == len(calls)
    assert not any(graph.fallbacks or graph.evicted_batches for graph in graphs)


# ---- the bound ----------------------------------------------------------------------------------


def test_the_batch_of_use_the_longest_ago_goes_first() -> None:
    keys = BatchKeys(2)
    assert [keys.use(batch) for batch in ((1,), (2,), (1,), (3,), (1,), (2,))] == [
        None,
        None,
        None,
        (2,),
        None,
        (3,),
    ]


def test_programs_and_buffers_of_a_batch_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    module = Around(lambda x: x - x.mean(1, keepdim=True))
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS, max_batches=2)
    kept = []
    batches = [2, 3, 4, 3, 5, 3, 2, 6, 3, 4, 5, 2]
    with caplog.at_level(logging.INFO, "fx_prefill"):
        for seed, batch in enumerate(batches):
            x = rows((17, 40, 64)[seed % 3], batch, seed)
            actual, expected = module(x), module.forward(x)
            assert_same(actual, expected, f"batch {batch}")
            kept.append((actual, expected))
            for runtime in runtimes():
                assert len({key[1] for key in runtime.captured}) <= 2
                assert len(runtime._captures._buffers) <= 2
    for actual, expected in kept:
        assert_same(actual, expected, "looked at after later calls")
    graphs = compiled.report().graphs
    (graph,) = [graph for graph in graphs if graph.batch_symbols]
    assert graph.evicted_batches >= 5, str(compiled.report())
    assert f"gave up the programs of a batch {graph.evicted_batches}x" in str(compiled.report())
    assert "max_batches=2" in caplog.text
    assert not graph.fallbacks


def test_a_graph_without_a_batch_gives_up_nothing() -> None:
    module = Around(lambda x: x - x.mean(1, keepdim=True))
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS, max_batches=1)
    for n in LENGTHS:
        module(rows(n))
    graph = token_graph(compiled.report())
    assert graph.evicted_batches == 0 and sum(graph.replays.values()) == len(LENGTHS) - 1


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8"])
def test_a_wrong_bound_is_an_error(value: Any) -> None:
    with pytest.raises(OptionError, match=r"max_batches.*at least 1"):
        fx_prefill.compile(torch.nn.Linear(WIDTH, WIDTH), max_batches=value)
