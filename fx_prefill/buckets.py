"""The ladder of padded token counts, and the choice of a rung for a live count."""

from __future__ import annotations

from bisect import bisect_left

SMALLEST = 16
"""Smallest rung of the default ladder, in tokens."""

LARGEST_STEP = 512
"""Widest distance between two rungs of the default ladder, in tokens."""


def default_ladder(max_tokens: int) -> tuple[int, ...]:
    """Rungs from 16 to ``max_tokens``, each step about an eighth of the size.

    A step is the largest power of two not above size/8, held between 16 and 512, so padding
    costs at most an eighth once past 128 tokens. The top rung is exactly ``max_tokens``.
    """
    if max_tokens <= 0:
        return ()
    rungs = []
    size = SMALLEST
    while size < max_tokens:
        rungs.append(size)
        size += _step(size)
    rungs.append(max_tokens)
    return tuple(rungs)


def _step(size: int) -> int:
    power = 1 << max((size // 8).bit_length() - 1, 0)
    return min(max(power, SMALLEST), LARGEST_STEP)


def choose(ladder: tuple[int, ...], num_tokens: int) -> int | None:
    """Smallest rung not below ``num_tokens``, or None above the top rung."""
    index = bisect_left(ladder, num_tokens)
    return ladder[index] if index < len(ladder) else None
