"""Segment compilers on whole decoders: Inductor, and a callable of the user's own.

What happens when a compiler fails is in test_options.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import MAX_TOKENS, Around, assert_same, check, rows, shuffled, token_graph
from torch import fx, nn

import fx_prefill

MODEL_MAX_TOKENS = 128
MODEL_LENGTHS = (2, 15, 16, 17, 100, MODEL_MAX_TOKENS, MODEL_MAX_TOKENS + 1)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Graphs that Inductor was given."""
    import torch._inductor

    seen: list[fx.GraphModule] = []
    original = torch._inductor.standalone_compile

    def noting(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        seen.append(gm)
        assert kwargs["dynamic_shapes"] == "from_graph"
        return original(gm, *args, **kwargs)

    monkeypatch.setattr(torch._inductor, "standalone_compile", noting)
    return seen


@pytest.fixture
def no_retrace() -> Iterator[Callable[[], Any]]:
    """A context in which Dynamo may not trace a frame again."""
    yield lambda: torch._dynamo.config.patch(error_on_recompile=True)


def ids(num_tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(0, 112, (1, num_tokens), generator=generator)


def hidden_states(call: Callable[..., Any], num_tokens: int, seed: int) -> torch.Tensor:
    return call(input_ids=ids(num_tokens, seed), use_cache=False).last_hidden_state


def check_model(model: nn.Module, no_retrace: Callable[[], Any], **options: Any) -> Any:
    """Every length against eager; traced once; each distinct segment compiled once."""
    compiled = fx_prefill.compile(model, max_tokens=MODEL_MAX_TOKENS, **options)
    hidden_states(model, 20, 0)
    kept = []
    with no_retrace():
        for index, num_tokens in enumerate(shuffled(MODEL_LENGTHS, rounds=1)):
            actual = hidden_states(model, num_tokens, index)
            expected = hidden_states(model.forward, num_tokens, index)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
            kept.append((actual, expected))
    for actual, expected in kept:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    (graph,) = compiled.report().graphs
    assert graph.replays == {16: 3, 32: 2, 112: 1, 128: 1}
    assert graph.fallbacks == {"above the largest bucket": 1}
    return graph


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_inductor(
    name: str, compilations: list[fx.GraphModule], no_retrace: Callable[[], Any]
) -> None:
    pytest.importorskip("transformers")
    from families import BY_NAME

    model = BY_NAME[name].inner("sdpa")
    graph = check_model(model, no_retrace, compiler="inductor")
    assert graph.compiler == "inductor" and graph.compile_seconds > 0
    assert graph.num_segments == BY_NAME[name].num_layers + 1
    assert len(compilations) == graph.num_distinct_segments


def test_inductor_compiles_a_repeated_layer_once(compilations: list[fx.GraphModule]) -> None:
    layers = [Around(lambda x: x - x.mean(1, keepdim=True)) for _ in range(4)]
    graph = token_graph(check(nn.Sequential(*layers), compiler="inductor"))
    assert graph.num_segments == 5
    assert len(compilations) == graph.num_distinct_segments == 3


def test_a_compiler_of_the_users_own_on_a_decoder(no_retrace: Callable[[], Any]) -> None:
    pytest.importorskip("transformers")
    from families import BY_NAME

    seen: list[fx.GraphModule] = []

    def own(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        assert len(example_inputs) == len(placeholders)
        seen.append(gm)
        return gm.forward

    graph = check_model(BY_NAME["llama"].with_layers(3).inner("sdpa"), no_retrace, compiler=own)
    assert graph.compiler == "own"
    assert len(seen) == graph.num_distinct_segments == 3
    assert graph.num_segments == 4


def test_an_artifact_may_return_its_one_result_bare() -> None:
    def own(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            results = gm(*args)
            return results[0] if len(results) == 1 else results

        return run

    check(Around(lambda x: x.flip(1)), compiler=own)


def test_an_artifact_that_mixes_rows_is_demoted_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong optimisation of one segment: that one runs its own operators, the other replays."""

    def own(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if not any(node.target is torch.sigmoid for node in gm.graph.nodes):
            return gm.forward
        return lambda *args: [out - out.amax(1, keepdim=True) for out in gm(*args)]

    def middle(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x - x.mean(1, keepdim=True))

    with caplog.at_level(logging.WARNING, logger="fx_prefill"):
        report = check(Around(middle), compiler=own)
    assert caplog.text.count("padded rows reach real rows") == 1
    assert "the segment compiler mixes rows" in caplog.text
    graph = token_graph(report)
    first, *_, last = graph.partitions
    assert first.kind == "segment"
    assert last.kind == "break" and last.reasons == ("padded rows reached real rows",)
    assert sum(graph.replays.values()) == 12


def test_an_artifact_that_fails_when_it_runs_leaves_the_answer_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def own(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            raise RuntimeError("an unsupported size")

        return run

    module = Around(lambda x: x - x.mean(1, keepdim=True))
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS, compiler=own)
    with caplog.at_level(logging.WARNING, logger="fx_prefill"):
        for n in shuffled(rounds=1):
            assert_same(module(rows(n)), module.forward(rows(n)), f"{n} tokens")
    assert "an unsupported size" in caplog.text
    graph = token_graph(compiled.report())
    assert graph.replays == {} and graph.fallbacks["nothing in the graph can be captured"] == 6
