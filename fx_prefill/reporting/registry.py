"""Which graphs are alive, and whose weights they read."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..execution.dispatch import PrefillRuntime
from ..execution.reasons import Counts, FallbackReason


@dataclass(eq=False)
class RefusedGraph:
    """A graph that always runs eagerly, with its reason."""

    gm: fx.GraphModule
    reason: FallbackReason
    weights: tuple[weakref.ref[torch.Tensor], ...]
    counts: Counts = field(default_factory=Counts)

    def __call__(self, *args: Any) -> Any:
        self.counts.fallbacks[str(self.reason)] += 1
        return self.gm(*args)

    def reads(self, tensors: frozenset[int]) -> bool:
        """Whether a weight is among these tensors, given by ``id``."""
        return any(id(ref()) in tensors for ref in self.weights if ref() is not None)


Graph = PrefillRuntime | RefusedGraph


class Registry:
    """Finds the graphs of a module by the weights they read.

    Dynamo keeps a compiled graph alive; entries here are weak and go when it goes.
    """

    def __init__(self) -> None:
        self._entries: list[weakref.ref[Graph]] = []

    def add(self, graph: Graph) -> None:
        """Remember a graph."""
        self._entries.append(weakref.ref(graph))

    def add_refused(
        self, gm: fx.GraphModule, reason: FallbackReason, weights: Sequence[torch.Tensor]
    ) -> RefusedGraph:
        """Remember a graph that runs eagerly, and return what Dynamo should call."""
        graph = RefusedGraph(gm, reason, tuple(weakref.ref(weight) for weight in weights))
        self.add(graph)
        return graph

    def find(self, tensors: Iterable[torch.Tensor]) -> list[Graph]:
        """Graphs that read any of ``tensors``, oldest first."""
        wanted = frozenset(map(id, tensors))
        self._entries = [ref for ref in self._entries if ref() is not None]
        alive = [ref() for ref in self._entries]
        return [graph for graph in alive if graph is not None and graph.reads(wanted)]

    def clear(self) -> None:
        """Forget every graph."""
        self._entries.clear()
