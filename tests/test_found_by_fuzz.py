"""What random programs found, made small."""

from __future__ import annotations

import math

import torch
from harness import Around, check, rows, token_graph
from torch import nn
from torch.nn import functional as F

RECORDING_FAILED = "recording a segment failed"


class Scaled(nn.Module):
    """``x[:, :-1]`` makes a graph of its own for two tokens: a static one, with a host float."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = x.shape[1]
        x = x.clone()
        x[:, 1:] = x[:, :-1].clone()
        return (x * math.sqrt(s)).sin()


def test_a_host_float_of_a_static_graph_is_not_truncated() -> None:
    check(Scaled(), lengths=(40, 2, 17, 2))


def test_a_host_fraction_of_a_static_graph_is_not_truncated() -> None:
    class Fraction(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            s = x.shape[1]
            torch.linspace(0, 1, s)  # ties the graph to this length
            return (x * (1.0 / s)).sin()

    check(Fraction(), lengths=(65, 17, 65))


def test_a_tensor_read_only_for_its_dtype() -> None:
    """``y`` has a token count that nothing ties to that of ``x``."""

    class Ones(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.tanh(y.new_ones(1, x.shape[1], x.shape[2]) - x)

    report = check(Ones(), lambda n, seed: (rows(n, seed=seed), rows(n, seed=seed + 1)))
    assert RECORDING_FAILED not in token_graph(report).fallbacks


def test_an_index_of_scatter_from_a_break() -> None:
    """Padded rows of an index may be anything: the look-up is checked, on a GPU it is fatal."""

    def middle(x: torch.Tensor) -> torch.Tensor:
        index = x.topk(3, -1).indices.flip(1)
        return torch.zeros_like(x).scatter(-1, index, 1.0) * x

    assert RECORDING_FAILED not in token_graph(check(Around(middle))).fallbacks


def test_arithmetic_on_an_index_of_scatter() -> None:
    """Zeros in padded rows become -1 there."""

    def middle(x: torch.Tensor) -> torch.Tensor:
        index = (x.topk(3, -1).indices + 1).flip(1)
        return torch.zeros_like(x).scatter(-1, index - 1, 1.0) * x

    assert RECORDING_FAILED not in token_graph(check(Around(middle))).fallbacks


def test_arithmetic_on_a_class_of_one_hot() -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        index = (x.argmax(-1) + 1).flip(1)
        return F.one_hot(index - 1, x.shape[-1]) * x

    assert RECORDING_FAILED not in token_graph(check(Around(middle))).fallbacks
