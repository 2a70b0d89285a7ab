"""Traps of tracing: what makes a graph serve fewer calls than it could, and what is said of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
from harness import WIDTH, Around, rows
from torch import nn

import fx_prefill

LIMIT = "recompile_limit"


def warnings_of(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    """Warnings of this package that hold all of the words."""
    records = [r for r in caplog.records if r.levelno == logging.WARNING]
    texts = [r.getMessage() for r in records if r.name.startswith("fx_prefill")]
    return [text for text in texts if all(word in text for word in words)]


def same(model: nn.Module, compiled: Any, *args: torch.Tensor) -> None:
    torch.testing.assert_close(compiled(*args), model.forward(*args), rtol=1e-4, atol=1e-5)


# ---- sizes tied by accident ---------------------------------------------------------------------


def plain(model: nn.Module, **given: Any) -> Any:
    return torch.compile(model, backend="breakable_prefill", dynamic=True, **given)


@pytest.mark.parametrize(
    ("first", "tied"),
    [((20, 20), "dimensions 0 and 1"), ((2, WIDTH), "a weight fixes them to 12")],
    ids=["batch", "hidden size"],
)
def test_a_first_length_equal_to_another_size_is_said_once(
    first: tuple[int, int], tied: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Around(torch.tanh)
    compiled = plain(model)
    with caplog.at_level(logging.WARNING, logger="fx_prefill"):
        same(model, compiled, torch.randn(*first, WIDTH))
    (text,) = warnings_of(caplog, tied)
    assert "fx_prefill.compile" in text and "use_duck_shape" in text
    same(model, compiled, torch.randn(2, 33, WIDTH))


class WithPast(Around):
    """Rows that also read the sum of a cache ``[batch, heads, past, features]``."""

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        return self.leave(self.enter(x) + past.sum((1, 2))[:, None])


def test_a_first_length_equal_to_the_past_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = WithPast(torch.tanh)
    compiled = plain(model)
    with caplog.at_level(logging.WARNING, logger="fx_prefill"):
        same(model, compiled, torch.randn(2, 20, WIDTH), torch.randn(2, 3, 20, WIDTH))
    assert len(warnings_of(caplog, "past", "dimension 2")) == 1
    same(model, compiled, torch.randn(2, 33, WIDTH), torch.randn(2, 3, 20, WIDTH))


class WithMask(Around):
    def forward(self, x: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax((x @ x.mT).masked_fill(~mask, -1e9), -1)
        return self.leave(scores @ self.enter(x) + ids[..., None])


def test_what_belongs_together_is_not_complained_of(caplog: pytest.LogCaptureFixture) -> None:
    """A mask of all tokens against all tokens, and ids as many as rows."""
    model = WithMask(torch.tanh)
    compiled = plain(model)
    with caplog.at_level(logging.WARNING, logger="fx_prefill"):
        for n in (20, 33):
            mask = torch.ones(n, n, dtype=torch.bool).tril()
            same(model, compiled, rows(n), mask, torch.arange(n)[None])
    assert warnings_of(caplog) == []


def test_the_helper_ties_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = Around(torch.tanh)
    compiled = fx_prefill.compile(model, max_tokens=64)
    with caplog.at_level(logging.WARNING, logger="fx_prefill"):
        for shape in ((20, 20), (2, WIDTH), (3, 33), (20, 21)):
            same(model, model, torch.randn(*shape, WIDTH))
    assert warnings_of(caplog) == []
    assert len([g for g in compiled.report().graphs if g.token_symbol]) <= 2


# ---- tied to one length, or to a number of chunks -----------------------------------------------


def over_tokens(x: torch.Tensor) -> torch.Tensor:
    state, done = torch.zeros_like(x[:, 0]), []
    for i in range(x.shape[1]):
        state = 0.5 * state + x[:, i]
        done.append(state)
    return torch.stack(done, 1)


def over_chunks(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([chunk - chunk.mean(1, keepdim=True) for chunk in x.split(16, dim=1)], 1)


@pytest.mark.parametrize("loop", [over_tokens, over_chunks])
def test_a_loop_over_the_length_is_said_once(loop: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Around(loop)
    fx_prefill.compile(model, max_tokens=128)
    with caplog.at_level(logging.WARNING, logger="fx_prefill"):
        for n in (5, 20, 40, 55):
            same(model, model, rows(n))
        assert warnings_of(caplog, "break_modules") == []
        for n in (70, 90):
            same(model, model, rows(n))
    assert len(warnings_of(caplog, "break_modules", "for some lengths only")) == 1


def test_a_window_is_not_complained_of(caplog: pytest.LogCaptureFixture) -> None:
    model = Around(lambda x: x * 2 if x.shape[1] > 24 else x - 1)
    compiled = fx_prefill.compile(model, max_tokens=64)
    with caplog.at_level(logging.WARNING, logger="fx_prefill"):
        for n in (1, 5, 20, 40, 55, 24, 25):
            same(model, model, rows(n))
    assert warnings_of(caplog) == []
    assert len([g for g in compiled.report().graphs if g.token_symbol]) == 2


# ---- past PyTorch's limit -----------------------------------------------------------------------


def test_past_the_recompile_limit_calls_are_counted_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Scaled(Around):
        def forward(self, x: torch.Tensor, scale: str) -> torch.Tensor:
            return self.leave(self.enter(x) * len(scale))

    model = Scaled(torch.tanh)
    compiled = fx_prefill.compile(model, max_tokens=64)
    with caplog.at_level(logging.WARNING), dynamo_config.patch({LIMIT: 2}):
        for length in (1, 2, 3, 4, 3, 1):
            same(model, model, rows(20), "x" * length)
        (text,) = warnings_of(caplog, "PyTorch's limit")
    assert "recompile_limit" in text and "TORCH_LOGS=recompiles" in text
    fallbacks: dict[str, int] = {}
    for graph in compiled.report().graphs:
        fallbacks.update(graph.fallbacks)
    assert fallbacks == {"PyTorch called no graph of this backend": 3}
    assert "ran eagerly 3x" in str(compiled.report())


def test_a_call_that_is_forced_to_be_eager_is_counted() -> None:
    model = Around(torch.tanh)
    compiled = fx_prefill.compile(model, max_tokens=64)
    same(model, model, rows(20))
    with torch.compiler.set_stance("force_eager"):
        same(model, model, rows(20))
    assert compiled.report().graphs[-1].fallbacks == {"PyTorch called no graph of this backend": 1}
