"""Artifacts for one bucket: used at that bucket only, and checked like the general ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import MAX_TOKENS, Around, assert_same, rows
from torch import fx

import fx_prefill
from fx_prefill.errors import PaddingError
from fx_prefill.execution import specialize

Artifact = Callable[..., Any]


class Mean(torch.nn.Module):
    """A break between two segments: no row of it belongs to one token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.mean(1, keepdim=True)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that each specialized artifact was run on."""
    seen: list[int] = []
    original = specialize._inductor

    def noting(module: fx.GraphModule, inputs: list[Any], max_autotune: bool) -> Artifact:
        function = original(module, inputs, max_autotune)

        def run(*given: Any) -> Any:
            seen.append(
                max(x.shape[1] for x in given if isinstance(x, torch.Tensor) and x.ndim > 1)
            )
            return function(*given)

        return run

    monkeypatch.setattr(specialize, "_inductor", noting)
    return seen


def test_only_the_bucket_asked_for_runs_them(sizes: list[int]) -> None:
    module = Around(Mean())
    compiled = fx_prefill.compile(
        module, max_tokens=MAX_TOKENS, compiler="inductor", specialize=(32,), strict=True
    )
    for n in (20, 64, 32, 17, 40):
        assert_same(module(rows(n)), module.forward(rows(n)), f"{n} tokens")
    assert set(sizes) == {32}
    (graph,) = compiled.report().graphs
    assert graph.replays == {32: 3, 48: 1, 64: 1}


def mixes_rows(module: fx.GraphModule, inputs: list[Any], max_autotune: bool) -> Artifact:
    def run(*given: Any) -> Any:
        return [result + result.sum(1, keepdim=True) for result in module(*given)]

    return run


def test_one_that_mixes_rows_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(specialize, "_inductor", mixes_rows)
    module = Around(Mean())
    compiled = fx_prefill.compile(
        module, max_tokens=MAX_TOKENS, compiler="inductor", specialize=(32,)
    )
    with caplog.at_level(logging.WARNING):
        assert_same(module(rows(20)), module.forward(rows(20)))
    assert "specialized for a bucket failed its check" in caplog.text
    assert compiled.report().graphs[0].replays == {32: 1}


def test_strict_makes_it_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialize, "_inductor", mixes_rows)
    module = Around(Mean())
    fx_prefill.compile(
        module, max_tokens=MAX_TOKENS, compiler="inductor", specialize=(32,), strict=True
    )
    with pytest.raises(PaddingError, match="specialized for a bucket"):
        module(rows(20))
