"""Unmodified transformers decoders replay: the same answers, one break per attention layer.

The reference is `model.forward(...)`, which stays uncompiled when a module is compiled in place.
"""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from families import BY_NAME, FAMILIES, VOCAB, Family
from family_table import check_names, check_row
from harness import half
from more_families import ORDER
from transformers import DynamicCache

import fx_prefill

MAX_TOKENS = 128
LENGTHS = (2, 15, 16, 17, 100, MAX_TOKENS, MAX_TOKENS + 1)
# What the default ladder makes of LENGTHS: from 16, in steps of 16 up to 128.
BUCKETS = Counter({16: 3, 32: 1, 112: 1, 128: 1})
# Every length twice, with other tokens: the first meets a bucket (capture), the second replays it
# after other lengths have left their rows in the buffers.
ROUNDS = 2


# ---- calls, and what they must return -----------------------------------------------------------


def shuffled(lengths: Sequence[int], rounds: int = ROUNDS, seed: int = 0) -> list[int]:
    """`rounds` shuffles of `lengths`, one after the other; the same for the same seed."""
    generator = random.Random(seed)
    order: list[int] = []
    for _ in range(rounds):
        order += generator.sample(list(lengths), len(lengths))
    return order


def token_ids(num_tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(0, VOCAB, (1, num_tokens), generator=generator)


def call_arguments(model: nn.Module, ids: torch.Tensor, cache: bool) -> dict[str, Any]:
    if cache:
        past = DynamicCache(config=model.config)
        return {"input_ids": ids, "past_key_values": past, "use_cache": True}
    return {"input_ids": ids, "use_cache": False}


def tensors_of(output: Any) -> dict[str, torch.Tensor]:
    """The tensors that a call returned, by name: hidden states or logits, and the filled cache."""
    name = "logits" if hasattr(output, "logits") else "last_hidden_state"
    tensors = {name: getattr(output, name)}
    past = output.past_key_values
    for index, layer in enumerate(past.layers if past is not None else ()):
        tensors[f"keys of layer {index}"] = layer.keys
        tensors[f"values of layer {index}"] = layer.values
    return tensors


def assert_same(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str
) -> None:
    assert actual.keys() == expected.keys(), what
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name],
            tensor,
            rtol=1e-4,
            atol=2e-5,
            msg=lambda message, name=name: f"{what}, {name}: {message}",
        )


def assert_same_cache(actual: DynamicCache, expected: DynamicCache, what: str) -> None:
    """The caller's own cache object was filled, and counts the same tokens."""
    assert len(actual.layers) == len(expected.layers), what
    for index in range(len(expected.layers)):
        assert actual.get_seq_length(index) == expected.get_seq_length(index), what


def assert_replays_like_eager(
    model: nn.Module,
    lengths: Sequence[int],
    arguments: Callable[[nn.Module, int, int], dict[str, Any]],
) -> None:
    """Calls `model` at each length; each answer is right at once, and still right after the last.

    `arguments(model, num_tokens, index)` makes the arguments of call `index` anew each time.
    """
    kept: list[tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
    for index, num_tokens in enumerate(lengths):
        what = f"call {index}, {num_tokens} tokens"
        given = arguments(model, num_tokens, index)
        output = model(**given)
        reference = model.forward(**arguments(model, num_tokens, index))
        actual, expected = tensors_of(output), tensors_of(reference)
        assert_same(actual, expected, what)
        if given.get("past_key_values") is not None:
            assert output.past_key_values is given["past_key_values"], what
            assert_same_cache(output.past_key_values, reference.past_key_values, what)
        kept.append((what, actual, expected))
    for what, actual, expected in kept:
        assert_same(actual, expected, f"{what}, read again after the later calls")


# ---- what the report says -----------------------------------------------------------------------


def total_replays(report: Any) -> Counter[int]:
    return sum((Counter(graph.replays) for graph in report.graphs), Counter())


def total_fallbacks(report: Any) -> Counter[str]:
    return sum((Counter(graph.fallbacks) for graph in report.graphs), Counter())


def breaks_between_segments(graph: Any) -> list[Any]:
    kinds = [partition.kind for partition in graph.partitions]
    first = kinds.index("segment")
    last = len(kinds) - 1 - kinds[::-1].index("segment")
    return [p for p in graph.partitions[first : last + 1] if p.kind == "break"]


def assert_one_break_per_layer(graph: Any, family: Family, attention: str, scope: str) -> None:
    """L+1 segments with L attention breaks between them; a prologue; for a whole LM a tail."""
    plan = "\n".join(f"{p.kind}: {p.reasons} {p.operators}" for p in graph.partitions)
    kinds = [partition.kind for partition in graph.partitions]
    for kind, following in pairwise(kinds):
        assert kind != following, plan  # adjacent partitions of one kind would be one
    assert graph.num_segments == kinds.count("segment") == family.num_layers + 1, plan
    assert graph.num_breaks == kinds.count("break"), plan

    between = breaks_between_segments(graph)
    assert len(between) == family.num_layers, plan
    kernel = "scaled_dot_product_attention" if attention == "sdpa" else "softmax"
    for partition in between:
        assert partition.reasons, plan
        assert sum(kernel in operator for operator in partition.operators) == 1, plan
        if attention == "sdpa":
            assert "attention" in partition.reasons, plan

    tail = graph.partitions[-1]
    if scope == "whole":
        assert graph.partitions[0].kind == "break", plan
        assert "embedding gather" in graph.partitions[0].reasons, plan
        assert tail.kind == "break" and "terminal projection" in tail.reasons, plan
    else:
        assert tail.kind == "segment", plan
    assert family.num_layers <= graph.num_breaks, plan
    assert graph.num_breaks <= family.num_layers + 1 + (scope == "whole"), plan


# ---- the families -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "attention", "cache"), half(["inner", "whole"], ["sdpa", "eager"], [True, False])
)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_family_replays(family: Family, scope: str, attention: str, cache: bool) -> None:
    model = getattr(family, scope)(attention)
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS)

    assert_replays_like_eager(
        model,
        shuffled(LENGTHS),
        lambda model, num_tokens, seed: call_arguments(model, token_ids(num_tokens, seed), cache),
    )

    report = prefill.report()
    # A window in a filled cache makes the graph valid on one side of the window only.
    assert len(report.graphs) == (2 if cache and family.sliding else 1)
    assert total_replays(report) == Counter({b: ROUNDS * n for b, n in BUCKETS.items()})
    assert total_fallbacks(report) == {"above the largest bucket": ROUNDS}
    for graph in report.graphs:
        assert_one_break_per_layer(graph, family, attention, scope)
        if family.uniform:
            assert graph.num_distinct_segments <= 3
    if (scope, attention, cache) == ("inner", "sdpa", True):
        check_row(family.name, family.num_layers, report.graphs[0], ORDER)


def test_the_table_of_families_has_every_family() -> None:
    check_names(ORDER)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.uniform], ids=lambda f: f.name)
def test_a_uniform_decoder_has_three_distinct_segments_whatever_its_depth(family: Family) -> None:
    family = family.with_layers(5)
    model = family.inner("sdpa")
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS)
    model(**call_arguments(model, token_ids(20), cache=False))

    (graph,) = prefill.report().graphs
    assert_one_break_per_layer(graph, family, "sdpa", "inner")
    assert graph.num_distinct_segments <= 3


# ---- variations on one family -------------------------------------------------------------------


def without_cache(model: nn.Module, num_tokens: int, seed: int) -> dict[str, Any]:
    return call_arguments(model, token_ids(num_tokens, seed), cache=False)


def with_cache(model: nn.Module, num_tokens: int, seed: int) -> dict[str, Any]:
    return call_arguments(model, token_ids(num_tokens, seed), cache=True)


@pytest.mark.parametrize("cache", [False, True], ids=["no_cache", "dynamic_cache"])
def test_inference_mode(cache: bool) -> None:
    model = BY_NAME["llama"].inner("sdpa")
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS)
    with torch.inference_mode():
        assert_replays_like_eager(model, shuffled(LENGTHS), with_cache if cache else without_cache)
    report = prefill.report()
    assert len(report.graphs) == 1
    assert sum(total_replays(report).values()) == ROUNDS * 6


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad])
def test_buffers_made_in_one_grad_mode_serve_the_other(first: Callable[[], Any]) -> None:
    """A buffer made in inference mode may not be written outside it: torch refuses."""
    second = torch.no_grad if first is torch.inference_mode else torch.inference_mode
    model = BY_NAME["llama"].inner("sdpa")
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS)
    for index, mode in enumerate((first, second, first)):
        with mode():
            lengths = shuffled((2, 17, 100), rounds=1, seed=index)
            assert_replays_like_eager(model, lengths, with_cache)
    assert sum(total_replays(prefill.report()).values()) == 9


def test_inputs_embeds_and_input_ids_both_replay() -> None:
    """48 and 8 tokens: as many as the hidden size and the head dimension."""
    model = BY_NAME["llama"].inner("sdpa")
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS)

    def arguments(model: nn.Module, num_tokens: int, index: int) -> dict[str, Any]:
        ids = token_ids(num_tokens, index)
        if index % 2:
            return {"input_ids": ids, "use_cache": False}
        embeds = nn.functional.embedding(ids, model.get_input_embeddings().weight)
        return {"inputs_embeds": embeds, "use_cache": False}

    lengths = [48, 48, *shuffled((*LENGTHS, 8, 48)), 8]
    assert_replays_like_eager(model, lengths, arguments)

    report = prefill.report()
    assert len(report.graphs) == 2
    num_above = lengths.count(MAX_TOKENS + 1)
    assert total_fallbacks(report) == {"above the largest bucket": num_above}
    assert sum(total_replays(report).values()) == len(lengths) - num_above
    for graph in report.graphs:
        assert graph.num_segments == 3
        assert len(breaks_between_segments(graph)) == 2


def test_logits_of_the_last_token_only() -> None:
    family = BY_NAME["llama"]
    model = family.whole("sdpa")
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS)
    assert_replays_like_eager(
        model,
        shuffled(LENGTHS),
        lambda *call: {**with_cache(*call), "logits_to_keep": 1},
    )
    report = prefill.report()
    assert len(report.graphs) == 1
    assert_one_break_per_layer(report.graphs[0], family, "sdpa", "whole")
    assert sum(total_replays(report).values()) == ROUNDS * 6


@pytest.mark.parametrize(("name", "attention"), [("mistral", "eager"), ("gemma3", "sdpa")])
def test_a_bucket_on_the_other_side_of_the_window_is_not_used(name: str, attention: str) -> None:
    """With a window of 24 the graph of prompts below 23 tokens may not run at bucket 32."""
    model = BY_NAME[name].with_arguments(sliding_window=24).inner(attention)
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS)
    lengths = shuffled((2, 16, 17, 22, 23, 24, 25, 32, 33, 100))
    assert_replays_like_eager(model, lengths, with_cache)

    report = prefill.report()
    assert len(report.graphs) == 2
    replays, fallbacks = total_replays(report), total_fallbacks(report)
    assert sum(replays.values()) + sum(fallbacks.values()) == len(lengths)
    assert sum(replays.values()) >= ROUNDS * 8  # all but 17 and 22, which have no bucket


# ---- the plain door -----------------------------------------------------------------------------

# 1 is a graph of its own; 16, met first, a static one; from the second length on one for all.
PLAIN_LENGTHS = (16, 100, 1, 17, 2, MAX_TOKENS, 1, MAX_TOKENS + 1, 16, 100)


@pytest.mark.parametrize(("scope", "cache"), half(["inner", "whole"], [False, True]))
def test_plain_door(scope: str, cache: bool) -> None:
    model = getattr(BY_NAME["llama"], scope)("sdpa")
    compiled = torch.compile(model, backend="breakable_prefill", options={"max_tokens": MAX_TOKENS})
    kept = []
    for index, num_tokens in enumerate(PLAIN_LENGTHS):
        arguments = with_cache if cache else without_cache
        actual = tensors_of(compiled(**arguments(model, num_tokens, index)))
        expected = tensors_of(model(**arguments(model, num_tokens, index)))
        assert_same(actual, expected, f"call {index}, {num_tokens} tokens")
        kept.append((actual, expected))
    for actual, expected in kept:
        assert_same(actual, expected, "read again after the later calls")


def test_plain_door_needs_no_import() -> None:
    script = f"""
        import sys
        import torch
        from families import BY_NAME

        assert "fx_prefill" not in sys.modules
        model = BY_NAME["llama"].inner("sdpa")
        compiled = torch.compile(model, backend="breakable_prefill")
        with torch.no_grad():
            for num_tokens in {PLAIN_LENGTHS}:
                ids = torch.arange(num_tokens)[None] * 7 % {VOCAB}
                actual = compiled(ids, use_cache=False).last_hidden_state
                expected = model(ids, use_cache=False).last_hidden_state
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)
        assert "fx_prefill.backend" in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
