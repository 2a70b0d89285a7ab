"""Several sequences at once: which one is padded, and what becomes of the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import CROSSES, WIDTH, rows, token_graph
from torch import nn

import fx_prefill
from fx_prefill.tracing import mark_tokens

OTHER = "other dynamic size"


class Beside(nn.Module):
    """A tower over image rows, deeper than the decoder over rows of text that attend to them."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.tower = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
            self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        seen = torch.tanh(self.tower(image))
        x = torch.tanh(self.enter(x))
        x = x + torch.softmax(x @ seen.mT, -1) @ seen
        return x + torch.tanh(self.leave(x))


def test_the_axis_that_a_weight_is_applied_along_last_is_padded() -> None:
    model = Beside()
    compiled = fx_prefill.compile(model, max_tokens=64, token_dims={0: 1, 1: 1})
    for seed, (text, image) in enumerate([(20, 50), (33, 7), (20, 51), (64, 9), (5, 50)]):
        x, y = rows(text, seed=seed), rows(image, seed=seed + 100)
        torch.testing.assert_close(model(x, y), model.forward(x, y), rtol=1e-4, atol=1e-5)
    graph = token_graph(compiled.report())
    assert graph.replays == {16: 1, 32: 2, 48: 1, 64: 1}
    assert [p.kind for p in graph.partitions].count("segment") >= 2
    eager = {d.reason for p in graph.partitions for d in p.details if d.operator == "linear"}
    assert eager == {OTHER} and CROSSES not in eager


def marked(names: tuple[str, ...], **given: Any) -> dict[str, set[int]]:
    mark_tokens(tuple(given.values()), {}, None, names)
    return {
        name: set(getattr(tensor, "_dynamo_weak_dynamic_indices", ()))
        for name, tensor in given.items()
    }


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"ids": (1, 20), "encoder_hidden_states": (1, 50, WIDTH)}, {"ids": {1}}),
        ({"encoder_hidden_states": (1, 50, WIDTH), "ids": (1, 20)}, {"ids": {1}}),
        ({"input_ids": (1, 50), "decoder_input_ids": (1, 20)}, {"decoder_input_ids": {1}}),
        ({"pixels": (50, WIDTH), "ids": (1, 20)}, {"pixels": {0}, "ids": {1}}),
        ({"embeds": (1, 20, WIDTH), "positions": (1, 20)}, {"embeds": {1}, "positions": {1}}),
        ({"embeds": (1, 20, WIDTH), "mask": (1, 70)}, {"embeds": {1}, "mask": {1}}),
    ],
    ids=["encoder after", "encoder first", "whole", "image", "embeddings", "filled cache"],
)
def test_which_dimensions_are_marked(
    inputs: dict[str, tuple[int, ...]], expected: dict[str, set[int]]
) -> None:
    floating = ("pixels", "embeds", "encoder_hidden_states")
    given = {
        name: torch.zeros(shape, dtype=torch.float32 if name in floating else torch.long)
        for name, shape in inputs.items()
    }
    found = {name: dims for name, dims in marked(tuple(given), **given).items() if dims}
    assert found == expected
