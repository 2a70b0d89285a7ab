"""The ladder of padded token counts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fx_prefill.buckets import LARGEST_STEP, SMALLEST, choose, default_ladder


def test_the_default_ladder_has_forty_rungs() -> None:
    ladder = default_ladder(2048)
    assert len(ladder) == 40
    assert ladder[:10] == (16, 32, 48, 64, 80, 96, 112, 128, 144, 160)
    assert ladder[-5:] == (1536, 1664, 1792, 1920, 2048)


@pytest.mark.parametrize("top", [17, 64, 100, 128, 1000, 2048, 2049, 8192, 20_000])
def test_steps_are_the_largest_power_of_two_not_above_an_eighth(top: int) -> None:
    ladder = default_ladder(top)
    assert ladder[0] == SMALLEST and ladder[-1] == top
    for low, high in pairwise(ladder[:-1]):
        step = high - low
        assert step & (step - 1) == 0, "a power of two"
        assert SMALLEST <= step <= LARGEST_STEP
        assert step <= max(low // 8, SMALLEST)
        assert 2 * step > low // 8 or step == LARGEST_STEP, "the largest one"
    assert ladder[-1] - ladder[-2] <= LARGEST_STEP
    assert list(ladder) == sorted(set(ladder))


@pytest.mark.parametrize(
    ("top", "ladder"),
    [(0, ()), (1, (1,)), (15, (15,)), (16, (16,)), (17, (16, 17)), (40, (16, 32, 40))],
)
def test_small_ladders_end_exactly_at_the_top(top: int, ladder: tuple[int, ...]) -> None:
    assert default_ladder(top) == ladder


def test_padding_costs_an_eighth_at_most_past_128_tokens() -> None:
    ladder = default_ladder(8192)
    for num_tokens in range(129, 8193):
        bucket = choose(ladder, num_tokens)
        assert bucket is not None and bucket - num_tokens < num_tokens / 8


@pytest.mark.parametrize(
    ("num_tokens", "bucket"),
    [(0, 16), (1, 16), (16, 16), (17, 32), (32, 32), (33, 40), (40, 40), (41, None)],
)
def test_the_smallest_rung_not_below_the_count_is_chosen(
    num_tokens: int, bucket: int | None
) -> None:
    assert choose((16, 32, 40), num_tokens) == bucket


def test_no_rung_in_an_empty_ladder() -> None:
    assert choose((), 1) is None
