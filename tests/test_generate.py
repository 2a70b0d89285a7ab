"""``generate`` of unmodified transformers: its prefill replays, its tokens are the same."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from families import BY_NAME, VOCAB
from harness import half

import fx_prefill
from fx_prefill.errors import OptionError


def generated(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    output = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    return output.tolist()


def left_padded(batch: int, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch, num_tokens), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 3 * row] = 0
    return ids, mask


@pytest.mark.parametrize(("name", "batch"), half(["llama", "gemma3"], [1, 3]))
def test_the_prefill_of_generate_replays(name: str, batch: int) -> None:
    """The mask has a length of its own, which the traced graph compares with the token count."""
    model = BY_NAME[name].whole("sdpa")
    prompts = [left_padded(batch, n, seed) for seed, n in enumerate((20, 30, 17))]
    expected = [generated(model, *prompt) for prompt in prompts]
    prefill = fx_prefill.compile(model.model, max_tokens=128)
    assert [generated(model, *prompt) for prompt in prompts] == expected
    first = prefill.report().graphs[0]
    assert first.token_symbol is not None
    assert first.replays == {32: 3}
    assert not any(graph.fallbacks for graph in prefill.report().graphs)


def marked_operators(entry: Any) -> list[str]:
    report = fx_prefill.explain(
        BY_NAME["llama"].inner("sdpa"),
        input_ids=torch.arange(20)[None],
        use_cache=False,
        prefill_options={"break_ops": [entry]},
    )
    return [
        detail.operator
        for partition in report.graphs[0].partitions
        for detail in partition.details
        if detail.reason == "marked by the user"
    ]


@pytest.mark.parametrize(
    "entry",
    [
        torch.nn.functional.silu,
        torch.ops.aten.silu,
        torch.ops.aten.silu.default,
        "aten::silu",
        lambda anything: getattr(anything.target, "__name__", "") == "silu",
    ],
    ids=["function", "packet", "overload", "name", "lambda"],
)
def test_an_operator_may_be_named_in_any_way(entry: Any) -> None:
    assert marked_operators(entry) == ["silu"] * BY_NAME["llama"].num_layers


def test_a_composite_operator_may_be_named_by_its_aten_name() -> None:
    assert marked_operators("aten::linear") == ["linear"] * 7 * BY_NAME["llama"].num_layers


def test_a_name_that_nothing_answers_to_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fx_prefill"):
        assert marked_operators("aten::no_such_operator") == []
    assert "aten::no_such_operator" in caplog.text


def test_a_name_without_a_namespace_is_an_error() -> None:
    with pytest.raises(OptionError, match="break_ops"):
        fx_prefill.compile(BY_NAME["llama"].inner("sdpa"), break_ops=["mul"])
