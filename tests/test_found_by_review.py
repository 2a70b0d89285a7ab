"""Wrong answers that a review found, each in its smallest form."""

from __future__ import annotations

from typing import Any

import torch
from harness import HOST, MAX_TOKENS, WIDTH, Around, assert_breaks, assert_same, check, rows
from torch import nn

import fx_prefill
from fx_prefill.execution.reasons import FallbackReason

ONES = [1.0] * WIDTH


def test_the_token_count_in_a_list_is_a_value() -> None:
    report = check(Around(lambda x: torch.roll(x, x.shape[1], -1)))
    assert_breaks(report, "roll", HOST)


def test_a_literal_that_is_written_is_made_anew_in_each_call() -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        literal = torch.tensor(ONES)
        literal.add_(1)
        return x * literal

    check(Around(middle))


def test_a_literal_written_by_a_break_is_made_anew_in_each_call() -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        literal = torch.tensor(ONES)
        literal.view(3, 4)[0] += x.mean()
        return x * literal

    check(Around(middle))


class ReturnsLiteral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        literal = torch.tensor(ONES)
        return self.proj(x) * literal, literal


def test_a_literal_that_is_returned_is_the_callers_own() -> None:
    module = ReturnsLiteral()
    fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    for n in (17, 17, 40):
        actual, expected = module(rows(n)), module.forward(rows(n))
        assert_same(actual, expected, f"{n} tokens")
        actual[1].add_(100)


def test_renorm_takes_its_norms_over_the_other_dimensions() -> None:
    report = check(Around(lambda x: torch.renorm(x, 2, -1, 60.0)))
    assert_breaks(report, "renorm", "not known to be row-wise")


def test_as_strided_reads_past_the_view_it_is_given() -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        left = x[0][:, :4]
        return x + torch.as_strided(left, (x.shape[1], WIDTH), (WIDTH, 1))

    check(Around(middle))


def test_a_shape_changed_in_place() -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        total = x.sum(-1, keepdim=True).unsqueeze(0)
        total.squeeze_(0)
        return x + total

    check(Around(middle))


def test_one_operator_on_aliases_and_on_one_tensor_twice() -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        first, second = x * 2, x * 3
        first.add_(first.detach())
        second.add_(second)
        return first + second

    check(Around(middle))


def test_a_function_transform_runs_eagerly_with_its_reason() -> None:
    middle = Around(lambda x: torch.vmap(lambda row: row * 2)(x))
    report = check(middle, replays=False)
    reasons = {reason for graph in report.graphs for reason in graph.fallbacks}
    assert reasons == {str(FallbackReason.UNREADABLE)}


def test_an_input_said_to_be_static_that_grows() -> None:
    def make(n: int, seed: int) -> torch.Tensor:
        x = rows(n, seed=seed)
        torch._dynamo.mark_static_address(x)
        return x

    check(Around(lambda x: x * 2), make)


def test_halves_of_one_split_read_by_a_segment_and_by_breaks() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(40, WIDTH), requires_grad=False)
            self.proj = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            low, high = torch.split(ids[..., None] + torch.arange(2), 1, -1)
            x = self.proj(self.table[low[..., 0]] + high)
            x = x + x.cumsum(1) * low.cumsum(1)
            return self.proj(x) + low + high.flip(1)

    def make(n: int, seed: int) -> torch.Tensor:
        return torch.randint(0, 38, (1, n), generator=torch.Generator().manual_seed(seed))

    check(Split(), make)


def test_side_effects_keep_their_order() -> None:
    seen: list[str] = []

    @torch.library.custom_op("fx_prefill_review::first", mutates_args=())
    def first(x: torch.Tensor) -> None:
        seen.append("first")

    @torch.library.custom_op("fx_prefill_review::second", mutates_args=())
    def second(x: torch.Tensor) -> None:
        seen.append("second")

    for operator in (first, second):
        operator.register_fake(lambda x: None)

    def middle(x: torch.Tensor) -> torch.Tensor:
        first(x.cumsum(1))
        second(x)
        return x

    module = Around(middle)
    fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    for n in (17, 40):
        seen.clear()
        module(rows(n))
        assert seen == ["first", "second"]


def test_rows_of_the_size_of_a_slice_of_a_larger_buffer_still_replay() -> None:
    """``buffer[:, :n]`` of a batch of one: the stride of the batch addresses nothing."""

    def make(n: int, seed: int) -> torch.Tensor:
        return rows(MAX_TOKENS + 8, seed=seed)[:, :n]

    check(Around(lambda x: x - x.mean(1, keepdim=True)), make)
