"""Which batch sizes keep captured programs.

A batch is part of a program's key, and each batch has buffers of its own: traffic that brings every
batch from 1 to 256 would capture all of them and hold all of their memory.
"""

from __future__ import annotations

from collections import OrderedDict

Batch = tuple[int, ...]
"""Sizes of the batch dimensions of a call; empty when the graph has none."""


class BatchKeys:
    """The batches that have programs, in the order they were last of use."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._last_used: OrderedDict[Batch, None] = OrderedDict()

    def use(self, batch: Batch) -> Batch | None:
        """Note that ``batch`` is of use now; the batch to give up for it, if it is one too many."""
        self._last_used[batch] = None
        self._last_used.move_to_end(batch)
        if len(self._last_used) <= self._limit:
            return None
        return self._last_used.popitem(last=False)[0]
