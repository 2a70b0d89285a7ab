"""Which graphs are alive, and whose weights they were compiled for."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..execution.dispatch import Counts, FallbackReason, PrefillRuntime
from ..options import Options


@dataclass(eq=False)
class RefusedGraph:
    """A graph that always runs eagerly, with its reason."""

    gm: fx.GraphModule
    reason: FallbackReason
    options: Options
    counts: Counts = field(default_factory=Counts)

    def __call__(self, *args: Any) -> Any:
        self.counts.fallbacks[str(self.reason)] += 1
        return self.gm(*args)


class Registry:
    """Finds the graphs of a module by the tensors they read.

    Dynamo keeps a compiled graph alive; entries here are weak and go when it goes.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[weakref.ref[Any], frozenset[int]]] = []

    def add(self, graph: PrefillRuntime | RefusedGraph, example_inputs: Sequence[Any]) -> None:
        """Remember a graph under the static tensors among its example inputs."""
        tensors = [x for x in example_inputs if isinstance(x, torch.Tensor)]
        self._entries.append((weakref.ref(graph), frozenset(map(id, tensors))))

    def add_refused(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        reason: FallbackReason,
        options: Options,
    ) -> RefusedGraph:
        """Remember a graph that runs eagerly, and return what Dynamo should call."""
        graph = RefusedGraph(gm, reason, options)
        self.add(graph, example_inputs)
        return graph

    def find(self, tensors: Iterable[torch.Tensor]) -> list[PrefillRuntime | RefusedGraph]:
        """Graphs compiled for any of ``tensors``, oldest first."""
        wanted = frozenset(map(id, tensors))
        self._entries = [entry for entry in self._entries if entry[0]() is not None]
        found = [ref() for ref, ids in self._entries if ids & wanted]
        return [graph for graph in found if graph is not None]

    def clear(self) -> None:
        """Forget every graph."""
        self._entries.clear()
