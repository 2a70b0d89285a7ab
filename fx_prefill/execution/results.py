"""Copies what leaves the graph into memory of the caller's own, in few launches.

Keys and values of all layers are alike: one ``torch.cat`` of their real rows makes all of them, as
views of one allocation. One by one they would be a launch each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._prims_common import make_contiguous_strides_for

from ..graph.symbols import Layout

MIN_TOGETHER = 4
"""Equal results from which on they are copied together."""


class CopyOut:
    """The results of a graph that segments made: added one by one, then copied at each call."""

    def __init__(self) -> None:
        self._place: dict[fx.Node, int] = {}
        self._alone: list[Callable[[], torch.Tensor]] = []
        self._sources: list[torch.Tensor] = []
        self._layouts: list[Layout] = []
        self._groups: list[list[int]] | None = None

    def add(
        self,
        node: fx.Node,
        source: torch.Tensor,
        layout: Layout,
        gather: Callable[[], torch.Tensor],
    ) -> int:
        """Place of a result in what :meth:`run` returns.

        ``source`` are its real rows, ``layout`` the sizes and strides the caller is to get,
        ``gather`` copies it alone.
        """
        if node not in self._place:
            self._place[node] = len(self._sources)
            self._sources.append(source)
            self._layouts.append(layout)
            self._alone.append(gather)
        return self._place[node]

    def run(self) -> list[Any]:
        """Fresh copies of all results, in the order of their places."""
        if self._groups is None:
            self._groups = self._grouped()
        copied: list[Any] = [None] * len(self._sources)
        for group in self._groups:
            if len(group) == 1:
                copied[group[0]] = self._alone[group[0]]()
                continue
            together = torch.cat([self._sources[place] for place in group])
            for place, piece in zip(group, together.chunk(len(group)), strict=True):
                copied[place] = piece
        return copied

    def _grouped(self) -> list[list[int]]:
        alike: dict[Any, list[int]] = defaultdict(list)
        for place, (source, (sizes, strides)) in enumerate(
            zip(self._sources, self._layouts, strict=True)
        ):
            plain = (
                source.dim() > 0
                and source.shape == sizes
                and strides == make_contiguous_strides_for(sizes)
            )
            key = (sizes, source.dtype, source.device) if plain else place
            alike[key].append(place)
        groups: list[list[int]] = []
        for places in alike.values():
            together = len(places) >= MIN_TOGETHER
            groups.extend([places] if together else [[place] for place in places])
        return groups
