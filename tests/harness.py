"""What the adversary tests share: a small decoder-like model around one operator, and the checks.

Lengths come shuffled and repeated, so that buckets alternate and longer forwards leave their rows
behind for shorter ones; every result is looked at again after all later calls.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import fx_prefill
from fx_prefill.reporting.explain import BreakDetail, GraphReport, Report

WIDTH = 12
"""Features of a row; equal to no token count below."""

MAX_TOKENS = 64
LENGTHS = (2, 15, 16, 17, 40, 64, 65)

CROSSES = "crosses tokens"
HOST = "host scalar"
DATA = "data-dependent"
WRITES = "writes external memory"
RANDOM = "random"
MARKED = "marked by the user"
UNKNOWN = "not known to be row-wise"
ATTENTION = "attention"


def half(*choices: Sequence[Any]) -> list[Any]:
    """Combinations of choices for ``parametrize``; every second is left to ``--full``.

    What is run has every value, and of three choices or more every pair of values of two of them.
    """
    numbered = [list(enumerate(values)) for values in choices]
    return [
        pytest.param(
            *(value for _, value in combination),
            marks=() if sum(number for number, _ in combination) % 2 == 0 else pytest.mark.full,
        )
        for combination in itertools.product(*numbered)
    ]


class Around(nn.Module):
    """Row-wise work, then ``middle``, then row-wise work: a segment on both sides.

    ``middle`` takes rows of shape [batch, tokens, WIDTH] and returns what adds to them.
    """

    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.norm_in, self.norm_out = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.proj_in, self.proj_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = middle
        self.requires_grad_(False)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.proj_in(self.norm_in(x)))

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.proj_out(self.norm_out(x)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.leave(self.middle(self.enter(x)))


def rows(num_tokens: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random rows of shape [batch, num_tokens, WIDTH]; the same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randn(batch, num_tokens, WIDTH, generator=generator)


def shuffled(lengths: Sequence[int] = LENGTHS, rounds: int = 2, seed: int = 0) -> list[int]:
    """``rounds`` shuffles of ``lengths``, one after the other; the same for the same seed."""
    generator = random.Random(seed)
    return [n for _ in range(rounds) for n in generator.sample(list(lengths), len(lengths))]


def assert_same(actual: Any, expected: Any, what: str = "", equal_nan: bool = False) -> None:
    """Equal structure, and equal numbers up to float32 rounding."""
    found, wanted = tree_leaves(actual), tree_leaves(expected)
    assert len(found) == len(wanted), what
    for a, b in zip(found, wanted, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(
                a,
                b,
                rtol=1e-4,
                atol=1e-5,
                equal_nan=equal_nan,
                msg=lambda message: f"{what}: {message}",
            )
        else:
            assert type(a) is type(b) and a == b, what


def copied(value: Any) -> Any:
    """A deep copy of the tensors in a result."""
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, value)


def check(
    module: nn.Module,
    make: Callable[[int, int], Any] = lambda n, seed: rows(n, seed=seed),
    lengths: Iterable[int] | None = None,
    max_tokens: int = MAX_TOKENS,
    replays: bool = True,
    **options: Any,
) -> Report:
    """Compile ``module``, compare it with its own ``forward`` at every length, return the report.

    ``make(num_tokens, seed)`` gives one argument or a tuple of them, the same ones each time.
    """
    compiled = fx_prefill.compile(module, max_tokens=max_tokens, **options)
    kept = []
    for seed, n in enumerate(lengths if lengths is not None else shuffled()):
        actual = module(*_arguments(make, n, seed))
        expected = module.forward(*_arguments(make, n, seed))
        assert_same(actual, expected, f"{n} tokens")
        kept.append((n, actual, copied(expected)))
    for n, actual, expected in kept:
        assert_same(actual, expected, f"{n} tokens, looked at after later calls")
    report = compiled.report()
    if replays:
        assert any(graph.replays for graph in report.graphs), str(report)
    return report


def _arguments(make: Callable[[int, int], Any], n: int, seed: int) -> tuple[Any, ...]:
    made = make(n, seed)
    return made if isinstance(made, tuple) else (made,)


def token_graph(report: Report) -> GraphReport:
    """The one graph that was traced for any token count."""
    graphs = [graph for graph in report.graphs if graph.token_symbol is not None]
    assert len(graphs) == 1, str(report)
    return graphs[0]


def details(report: Report) -> list[BreakDetail]:
    """Every operator that runs eagerly, in all graphs."""
    return [d for graph in report.graphs for part in graph.partitions for d in part.details]


def captured(report: Report) -> set[str]:
    """Operators inside segments."""
    parts = [part for graph in report.graphs for part in graph.partitions]
    return {name for part in parts if part.kind == "segment" for name in part.operators}


def assert_breaks(report: Report, operator: str, *reasons: str) -> None:
    """``operator`` runs eagerly for one of ``reasons``, and there are segments around it."""
    found = [(d.operator, d.reason) for d in details(report)]
    assert any((operator, reason) in found for reason in reasons), (found, str(report))
    assert operator not in captured(report), str(report)
    assert captured(report) & {"linear", "layer_norm"}, str(report)


def assert_captured(report: Report, *operators: str) -> None:
    """``operators`` are inside segments, and none of them runs eagerly."""
    eager = {d.operator for d in details(report)}
    for operator in operators:
        assert operator in captured(report), str(report)
        assert operator not in eager, str(report)
