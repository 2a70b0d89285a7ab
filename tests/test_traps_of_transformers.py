"""Traps that need a model of transformers: ``generate``, caches made late, windows in caches."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
import torch.fx.experimental._config as fx_config

pytest.importorskip("transformers")

from families import BY_NAME, VOCAB
from transformers import DynamicCache, StaticCache

import fx_prefill
from fx_prefill.errors import NotCompiledError


def token_ids(num_tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(3, VOCAB, (1, num_tokens), generator=generator)


def generated(model: Any, num_tokens: int) -> list[Any]:
    ids = token_ids(num_tokens)
    return model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0).tolist()


def test_generate_of_what_torch_compile_returns_is_eager_and_the_report_says_why() -> None:
    """It calls the original module, so this package never hears of it."""
    model = BY_NAME["llama"].whole("sdpa")
    compiled = torch.compile(model, backend="breakable_prefill")
    generated(compiled, 20)
    with pytest.raises(NotCompiledError, match=r"torch\.compile\(model\)\.generate.*in place"):
        fx_prefill.report(compiled)


@pytest.mark.parametrize("scope", ["whole", "inner"])
def test_generate_of_a_model_compiled_in_place_replays(scope: str) -> None:
    model = BY_NAME["llama"].whole("sdpa")
    expected = [generated(model, n) for n in (20, 33)]
    target = model if scope == "whole" else model.model
    target.compile(backend="breakable_prefill")
    assert [generated(model, n) for n in (20, 33)] == expected
    replays = sum((Counter(g.replays) for g in fx_prefill.report(model).graphs), Counter())
    # The plain door traces the first prompt for its own length, and the second for all.
    assert replays[48] == 1 and replays[0] >= 1


def static_cache(model: Any, early: bool) -> StaticCache:
    cache = StaticCache(config=model.config, max_cache_len=64)
    if early:
        cache.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))
    return cache


@pytest.mark.parametrize(("early", "num_graphs"), [(False, 2), (True, 1)])
def test_a_cache_that_makes_its_tensors_late_costs_one_more_graph(
    early: bool, num_graphs: int
) -> None:
    model = BY_NAME["llama"].inner("sdpa")
    prefill = fx_prefill.compile(model, max_tokens=64)
    ours, theirs = static_cache(model, early), static_cache(model, early)
    for index, num_tokens in enumerate((20, 33, 20, 40)):
        ids = token_ids(num_tokens, index)
        given = {"input_ids": ids, "position_ids": torch.arange(num_tokens)[None]}
        one = model(**given, past_key_values=ours)[0]
        two = model.forward(**given, past_key_values=theirs)[0]
        torch.testing.assert_close(one, two, rtol=1e-4, atol=2e-5)
        ours.reset(), theirs.reset()
    assert len(prefill.report().graphs) == num_graphs


def test_a_cache_that_crosses_its_window(caplog: pytest.LogCaptureFixture) -> None:
    """Chunks of a prompt, below, across and beyond a window of 40; nothing to warn of."""
    caplog.set_level(logging.WARNING, logger="fx_prefill")
    model = BY_NAME["mistral"].inner("sdpa")
    prefill = fx_prefill.compile(model, max_tokens=64)
    for seed, chunks in enumerate([(20, 17, 30), (50, 17)]):
        ours, theirs = (DynamicCache(config=model.config) for _ in range(2))
        for index, num_tokens in enumerate(chunks):
            ids = token_ids(num_tokens, seed + index)
            one = model(ids, past_key_values=ours).last_hidden_state
            two = model.forward(ids, past_key_values=theirs).last_hidden_state
            torch.testing.assert_close(one, two, rtol=1e-4, atol=2e-5)
    graphs = prefill.report().graphs
    assert "break_modules" not in caplog.text
    # Empty and filled, below and beyond the window, and each crossing: below PyTorch's limit of 8.
    assert len(graphs) <= 5
    assert sum(sum(graph.replays.values()) for graph in graphs) >= 4


def test_settings_of_tracing_are_as_they_were() -> None:
    before = fx_config.use_duck_shape
    fx_prefill.compile(BY_NAME["llama"].inner("sdpa"))(token_ids(20))
    assert fx_config.use_duck_shape == before
