"""Weights replaced or moved after capture are noticed, never read at the old place."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from harness import MAX_TOKENS, Around, assert_same, rows, token_graph
from torch import nn

import fx_prefill
from fx_prefill.execution.dispatch import MAX_RECAPTURES
from fx_prefill.execution.reasons import FallbackReason

Replace = Callable[[Around], None]


def decoder() -> Around:
    return Around(lambda x: x - x.mean(1, keepdim=True))


def assert_right(module: nn.Module, what: str) -> None:
    for n in (17, 2, 40, 16):
        assert_same(module(rows(n)), module.forward(rows(n)), f"{what}, {n} tokens")


def by_data(module: Around) -> None:
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter)


def by_one_data(module: Around) -> None:
    module.proj_out.weight.data = module.proj_out.weight.data * -2


def by_assignment(module: Around) -> None:
    module.proj_in.weight = nn.Parameter(torch.randn(12, 12), requires_grad=False)


def by_state_dict(module: Around) -> None:
    state = {name: torch.randn_like(value) for name, value in module.state_dict().items()}
    module.load_state_dict(state, assign=True)
    module.requires_grad_(False)


def by_dtype_and_back(module: Around) -> None:
    module.to(torch.float64)
    module.to(torch.float32)
    module.proj_in.weight.mul_(2)


def by_submodule(module: Around) -> None:
    module.proj_out = nn.Linear(12, 12).requires_grad_(False)


def by_swap(module: Around) -> None:
    first, second = module.proj_in.weight, module.proj_out.weight
    first.data, second.data = second.data, first.data


REPLACEMENTS = (
    by_data,
    by_one_data,
    by_assignment,
    by_state_dict,
    by_dtype_and_back,
    by_submodule,
    by_swap,
)


@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_replaced_weights_are_read(replace: Replace) -> None:
    module = decoder()
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    assert_right(module, "before")
    before = module(rows(17))
    old = [parameter.data for parameter in module.parameters()]  # so that no address is reused
    replace(module)
    assert_right(module, "after")
    assert not torch.equal(module(rows(17)), before), "the replacement changes the result"
    graphs = compiled.report().graphs
    assert sum(sum(graph.replays.values()) for graph in graphs) >= 5
    assert len(old) == 8


@pytest.mark.parametrize("replace", [by_data, by_one_data, by_swap])
def test_a_moved_weight_is_captured_again_with_a_warning(
    replace: Replace, caplog: pytest.LogCaptureFixture
) -> None:
    module = decoder()
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    assert_right(module, "before")
    assert "moved" not in caplog.text
    old = [parameter.data for parameter in module.parameters()]
    with caplog.at_level(logging.WARNING, logger="fx_prefill"):
        replace(module)
        assert_right(module, "after")
    assert "weights have moved since capture" in caplog.text
    graph = token_graph(compiled.report())
    assert graph.recaptures == 1 and not graph.fallbacks
    assert sum(graph.replays.values()) == 8
    assert len(old) == 8


def test_written_weights_are_read_without_a_new_capture() -> None:
    module = decoder()
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    assert_right(module, "before")
    module.proj_in.weight.mul_(3)
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})
    assert_right(module, "after")
    assert token_graph(compiled.report()).recaptures == 0


def test_a_weight_that_keeps_moving_makes_the_graph_eager(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = decoder()
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    module(rows(17))
    old = []
    with caplog.at_level(logging.WARNING, logger="fx_prefill"):
        for _ in range(MAX_RECAPTURES + 3):
            old.append(module.proj_in.weight.data)
            by_one_data(module)
            module.proj_in.weight.data = torch.randn(12, 12)
            assert_same(module(rows(17)), module.forward(rows(17)))
    assert "keep moving" in caplog.text
    graph = token_graph(compiled.report())
    assert graph.recaptures == MAX_RECAPTURES + 1, "counted once for each capture given up"
    assert graph.fallbacks == {str(FallbackReason.WEIGHTS_CHANGED): 3}
    # Said once and meant: it stays eager when the weight stands still again.
    replays = dict(graph.replays)
    assert_right(module, "afterwards")
    after = token_graph(compiled.report())
    assert after.replays == replays
    assert after.fallbacks == {str(FallbackReason.WEIGHTS_CHANGED): 7}


def test_a_weight_of_another_layout_is_right() -> None:
    module = decoder()
    fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    assert_right(module, "before")
    module.proj_in.weight.data = torch.randn(12, 12).t()
    assert_right(module, "transposed")
    assert_right(module, "transposed, called again")


def test_a_weight_of_another_shape_is_right() -> None:
    module = decoder()
    fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    assert_right(module, "before")
    module.proj_in = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 12)).requires_grad_(False)
    assert_right(module, "two layers")
    first, second = module.proj_in
    first.weight.data, first.bias.data = torch.randn(28, 12), torch.randn(28)
    second.weight.data = torch.randn(12, 28)
    assert_right(module, "wider")


def test_a_replaced_buffer_is_read() -> None:
    class Scaled(Around):
        def __init__(self) -> None:
            super().__init__(lambda x: x * self.scale - x.mean(1, keepdim=True))
            self.register_buffer("scale", torch.ones(12))

    module = Scaled()
    fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    assert_right(module, "before")
    module.scale = torch.randn(12)
    assert_right(module, "assigned")
    module.scale.data = torch.randn(12)
    assert_right(module, "moved")


def test_dtype_back_and_forth_replays_in_both() -> None:
    module = decoder()
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
        module.to(dtype)
        for n in (17, 40):
            x = rows(n).to(dtype)
            assert_same(module(x), module.forward(x), f"{dtype}, {n} tokens")
    assert all(graph.replays for graph in compiled.report().graphs)
