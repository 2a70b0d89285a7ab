"""Causal attention captured with the segments around it: at the bucket, exact for the real rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Around, assert_same, check, details, rows, shuffled, token_graph
from torch import nn

import fx_prefill
from fx_prefill.execution import captures
from fx_prefill.execution.merge import MergedSegment


class SelfAttention(nn.Module):
    """Two heads over rows of WIDTH features; ``how`` goes to the attention."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = x.unflatten(-1, (2, -1)).transpose(1, 2)
        key, value = query * 0.5, query.flip(-1)
        y = F.scaled_dot_product_attention(query, key, value, **self.how)
        return y.transpose(1, 2).flatten(2)


def merged_programs(compiled: Any) -> int:
    """Programs in which an attention is inside a recording."""
    return sum(
        any(isinstance(s, MergedSegment) for s in program._compiled.segments.values())
        for graph in compiled.graphs
        for program in graph._captures.programs.values()
    )


def test_captured_causal_attention_gives_the_same_rows() -> None:
    report = check(Around(SelfAttention(is_causal=True)), capture_attention=True)
    assert token_graph(report).num_breaks == 1  # the plan is the same; its execution is not


def test_the_forward_is_one_recording() -> None:
    module = Around(SelfAttention(is_causal=True))
    compiled = fx_prefill.compile(module, max_tokens=64, capture_attention=True)
    with torch.no_grad():
        for n in (20, 64, 33):
            module(rows(n))
    assert merged_programs(compiled) == 3
    (graph,) = compiled.graphs
    for program in graph._captures.programs.values():
        assert len(program._compiled.partitions) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_a_longer_forward_left_behind_stays_hidden(bad: float) -> None:
    module = Around(SelfAttention(is_causal=True))
    fx_prefill.compile(module, max_tokens=64, capture_attention=True)
    with torch.no_grad():
        spoiled = rows(60)
        spoiled[:, 30:] = bad
        module(spoiled)
        for n in (50, 20, 35, 2):
            assert_same(module(rows(n)), module.forward(rows(n)), f"{n} tokens")


def test_rows_that_become_nan_in_the_padding_stay_hidden() -> None:
    """Zero rows divided by their norm are NaN: in keys and values of padded rows, every time."""

    class Normalised(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            unit = x / x.norm(dim=-1, keepdim=True)
            return SelfAttention(is_causal=True)(unit)

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(Normalised()(x * 2))

    assert Normalised()(torch.zeros(1, 4, 12)).isnan().all()
    check(Model(), capture_attention=True)


@pytest.mark.parametrize(
    "how", [{}, {"is_causal": True, "dropout_p": 0.5}], ids=["not causal", "dropout"]
)
def test_attention_that_sees_what_follows_is_never_captured(how: dict[str, Any]) -> None:
    module = Around(SelfAttention(**how))
    compiled = fx_prefill.compile(module, max_tokens=64, capture_attention=True)
    with torch.no_grad():
        for n in shuffled():
            torch.manual_seed(n)
            actual = module(rows(n))
            torch.manual_seed(n)
            assert_same(actual, module.forward(rows(n)), f"{n} tokens")
    assert merged_programs(compiled) == 0


def test_a_kernel_that_does_not_hide_is_found_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The claim that causal attention hides the padding is checked, not believed."""
    real = F.scaled_dot_product_attention

    def leaky(query: Any, key: Any, value: Any) -> tuple[torch.Tensor]:
        return (real(query, key, value),)

    module = Around(SelfAttention(is_causal=True))
    compiled = fx_prefill.compile(module, max_tokens=64, capture_attention=True)
    original = captures.checked_plan

    def with_leak(plan: Any, *given: Any, **options: Any) -> Any:
        for part in plan.partitions:
            if part.index in plan.causal:
                monkeypatch.setattr(part.module, "forward", leaky, raising=False)
        return original(plan, *given, **options)

    monkeypatch.setattr(captures, "checked_plan", with_leak)
    with torch.no_grad():
        module(rows(20))
    assert merged_programs(compiled) == 0
    assert "attention is not captured: padded rows reach real rows" in caplog.text


def test_by_default_a_cpu_does_not_capture_attention_and_long_buckets_do_not() -> None:
    module = Around(SelfAttention(is_causal=True))
    compiled = fx_prefill.compile(module, max_tokens=64)
    with torch.no_grad():
        module(rows(20))
    assert merged_programs(compiled) == 0
    takes = captures.takes_attention
    options = compiled.options
    assert takes(options, captures.CAPTURED_ATTENTION_TOKENS)
    assert not takes(options, captures.CAPTURED_ATTENTION_TOKENS + 1)


@pytest.mark.parametrize("eager", [False, True], ids=["whole", "an eager break in each layer"])
def test_results_of_many_layers_come_back_whole_and_owned(eager: bool) -> None:
    """With a break left in each layer there are more partitions than merged segments."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Around(SelfAttention(is_causal=True)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            kept = []
            for layer in self.layers:
                kept += [x.unflatten(-1, (2, -1)).transpose(1, 2).clone(), x * 2]
                x = layer(x)
                if eager:
                    x = x + torch.tanh(x.cumsum(1))
            return x, kept

    for captured in (True, False):
        report = check(Layers(), capture_attention=captured)
        assert details(report)
