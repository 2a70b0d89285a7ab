"""Notices weights that moved since they were captured.

Note [Addresses are checked]

A recording reads weights where they were when it was made. Every call compares the addresses with
those of that time, so that a moved weight is never read at its old place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..graph.normalize import value_of
from ..graph.symbols import evaluate_sizes, size_exprs
from ..graph.trace import TracedGraph

Comparison = Callable[[list[Any], list[int | None], list[int]], bool]


def _compare_in_python(args: list[Any], addresses: list[int | None], indices: list[int]) -> bool:
    return [args[i].data_ptr() for i in indices] == [addresses[i] for i in indices]


# Builds for CUDA have the same in C++, at a tenth of the time.
_same_addresses: Comparison = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _compare_in_python
)


class Weights:
    """Addresses of a graph's static inputs at the last capture."""

    def __init__(self, traced: TracedGraph) -> None:
        self._traced = traced
        self._indices = list(traced.static_indices)
        self._addresses: list[int | None] = [None] * len(traced.placeholders)
        self._seen: list[weakref.ref[torch.Tensor]] = []
        self._known = False
        self._held: list[torch.UntypedStorage] = []

    def in_place(self, args: list[Any]) -> bool:
        """Whether every weight among a call's arguments is where it was."""
        return self._known and _same_addresses(args, self._addresses, self._indices)

    @property
    def held(self) -> bool:
        """Whether the memory of the last capture's weights cannot be freed."""
        return bool(self._held)

    def hold(self, args: Sequence[Any]) -> None:
        """Keep the memory of this call's weights, whatever becomes of the tensors."""
        self._held = [args[index].untyped_storage() for index in self._indices]

    def let_go(self) -> None:
        """Keep no memory any more."""
        self._held = []

    def num_moved(self, args: Sequence[Any]) -> int:
        """Weights of which the address differs."""
        return sum(args[i].data_ptr() != self._addresses[i] for i in self._indices)

    def remember(self, args: Sequence[Any]) -> None:
        """Take this call's addresses for those of the captures to come."""
        for index in self._indices:
            self._addresses[index] = args[index].data_ptr()
        self._seen = [weakref.ref(args[index]) for index in self._indices]
        self._known = True

    def arguments(self) -> list[Any] | None:
        """Call arguments that hold the weights of the last capture alone; None if some are gone."""
        args: list[Any] = [None] * len(self._addresses)
        for index, ref in zip(self._indices, self._seen, strict=True):
            args[index] = ref()
            if args[index] is None:
                return None
        return args if self._known else None

    def fit(self, args: Sequence[Any]) -> bool:
        """Whether the weights have the shapes, types and devices they were traced with."""
        for index in self._indices:
            traced, live = value_of(self._traced.placeholders[index]), args[index]
            if traced.dtype != live.dtype or traced.device != live.device:
                return False
            if evaluate_sizes(size_exprs(traced), {}) != tuple(live.shape):
                return False
            if traced.stride() != live.stride():
                return False
        return True

    def among(self, tensors: frozenset[int]) -> bool:
        """Whether a weight of the last capture is among these tensors, given by ``id``."""
        return any(id(ref()) in tensors for ref in self._seen if ref() is not None)
