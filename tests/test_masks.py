"""Masks that say no more than "causal" leave the graph; any other mask stays."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from harness import LENGTHS, Around, check, details, rows, token_graph
from torch import nn

import fx_prefill
from fx_prefill.execution.reasons import FallbackReason
from fx_prefill.reporting.explain import Report

MASKED = "scaled_dot_product_attention"


class MaskedAttention(nn.Module):
    """Attention of tokens to themselves under ``make(n, x)``."""

    def __init__(self, make: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        mask = self.make(x.shape[1], x)
        y = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        return y.transpose(1, 2).flatten(2)


def compare(n: int, x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(n)
    return at[None, :] <= at[:, None]


def tril(n: int, x: torch.Tensor) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def additive(n: int, x: torch.Tensor) -> torch.Tensor:
    return torch.triu(torch.full((n, n), -math.inf), 1)


def batched(n: int, x: torch.Tensor) -> torch.Tensor:
    return compare(n, x)[None, None].expand(x.shape[0], 1, n, n)


def eager_operators(report: Report) -> set[str]:
    return {detail.operator for detail in details(report)}


@pytest.mark.parametrize("make", [compare, tril, additive, batched])
def test_a_causal_mask_made_of_sizes_is_dropped(make: Callable[..., torch.Tensor]) -> None:
    report = check(Around(MaskedAttention(make)))
    assert eager_operators(report) == {MASKED}, str(report)


def test_a_batch_that_varies_has_its_mask_dropped_too() -> None:
    module = Around(MaskedAttention(batched))
    report = check(module, lambda n, seed: rows(n, batch=2 + seed % 2, seed=seed), lengths=LENGTHS)
    assert "tril" not in eager_operators(report) and "le" not in eager_operators(report)


def strictly_before(n: int, x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(n)
    return (at[None, :] < at[:, None]) | (at[None, :] == 0)


def forwards(n: int, x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(n)
    return at[None, :] >= at[:, None]


def short_window(n: int, x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(n)
    return (at[None, :] <= at[:, None]) & (at[:, None] - at[None, :] < 20)


def of_data(n: int, x: torch.Tensor) -> torch.Tensor:
    return compare(n, x) & (x[0, :, 0] > -100)[None, :]


def almost_causal(n: int, x: torch.Tensor) -> torch.Tensor:
    return torch.triu(torch.full((n, n), -1e4), 1)


@pytest.mark.parametrize("make", [strictly_before, forwards, short_window, of_data, almost_causal])
def test_any_other_mask_is_kept(make: Callable[..., torch.Tensor]) -> None:
    report = check(Around(MaskedAttention(make)))
    assert len(eager_operators(report)) > 1, str(report)


def test_a_count_at_which_the_mask_is_not_causal_runs_eagerly() -> None:
    """Wrong at one count that no sample hits: found when that count is served, never replayed."""

    def odd_one_out(n: int, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(n)
        hole = (at[:, None] == 40) & (at[None, :] == 3) & (at.flip(0)[:, None] == 9)
        return (at[None, :] <= at[:, None]) & ~hole

    report = check(Around(MaskedAttention(odd_one_out)), lengths=[20, 50, 49, 51, 50, 64])
    graph = token_graph(report)
    assert eager_operators(report) == {MASKED}
    assert graph.fallbacks == {str(FallbackReason.MASK): 2}


def test_grouped_heads_are_read_as_they_are_in_half_precision() -> None:
    class Grouped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = x.shape[1]
            query = x.unflatten(-1, (4, -1)).transpose(1, 2)
            key = query[:, ::2]
            repeated = key[:, :, None].expand(1, 2, 2, n, -1).reshape(1, 4, n, -1)
            mask = compare(n, x)
            y = F.scaled_dot_product_attention(query, repeated, repeated, attn_mask=mask)
            return y.transpose(1, 2).flatten(2)

    module = Around(Grouped()).to(torch.bfloat16)
    compiled = fx_prefill.compile(module, max_tokens=64)
    with torch.no_grad():
        for n in (20, 32, 17):
            x = rows(n).to(torch.bfloat16)
            torch.testing.assert_close(module(x), module.forward(x), rtol=2e-2, atol=2e-2)
    (graph,) = compiled.graphs
    (attention,) = [
        node
        for part in graph.compiled.plan.breaks
        for node in part.nodes
        if getattr(node.target, "__name__", "") == MASKED
    ]
    assert attention.kwargs["enable_gqa"] and attention.kwargs["is_causal"]
    captured = {n.name for part in graph.compiled.plan.segments for n in part.nodes}
    assert not any("expand" in name for name in captured)


def test_a_cache_filled_for_the_first_time_is_a_copy_in_the_segment() -> None:
    class Fills(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            key = torch.cat([torch.tensor([], dtype=x.dtype), x], dim=-2)
            return x + key.mean(1, keepdim=True), key

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.around = Around(lambda x: x)
            self.fills = Fills()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.fills(self.around(x))

    report = check(Model(), lambda n, seed: rows(n, seed=seed))
    captured = [
        name
        for part in token_graph(report).partitions
        if part.kind == "segment"
        for name in part.operators
    ]
    assert "clone" in captured and "cat" not in eager_operators(report), str(report)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_repeated_heads_of_a_captured_attention(kv_heads: int) -> None:
    class Grouped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = x.shape[1]
            query = x.unflatten(-1, (4, -1)).transpose(1, 2)
            key = query[:, :kv_heads] * 0.5
            shape = (1, kv_heads, 4 // kv_heads, n, key.shape[-1])
            repeated = key[:, :, None].expand(shape).reshape(1, 4, n, -1)
            mask = compare(n, x)
            y = F.scaled_dot_product_attention(query, repeated, repeated, attn_mask=mask)
            return y.transpose(1, 2).flatten(2)

    check(Around(Grouped()), capture_attention=True)
    module = Around(Grouped()).to(torch.bfloat16)
    compiled = fx_prefill.compile(module, max_tokens=64, capture_attention=True)
    with torch.no_grad():
        for n in (20, 32, 17):
            x = rows(n).to(torch.bfloat16)
            torch.testing.assert_close(module(x), module.forward(x), rtol=2e-2, atol=2e-2)
    (graph,) = compiled.graphs
    assert all(len(p._compiled.partitions) == 1 for p in graph._captures.programs.values())
