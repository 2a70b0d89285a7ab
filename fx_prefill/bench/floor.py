"""The floor: the same compiled segments and the same breaks without anything around them.

On a GPU they are captured as one graph at the size of the bucket: no launch, no handoff, attention
included. On a CPU they run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..execution.capture import whole_graph
from ..execution.dispatch import PrefillRuntime
from ..graph.extract import SourceKind


def floor(runtime: PrefillRuntime, args: list[Any]) -> Callable[[], Any]:
    """A function that runs the floor once on a graph's arguments of a bucket's size."""
    return whole_graph(lambda: _flat(runtime, args), runtime.compiled.plan.traced.device)


def graph_arguments(runtime: PrefillRuntime, call: Callable[[], Any]) -> list[Any]:
    """What the graph is called with when ``call`` runs the model."""
    seen: list[Any] = []
    original = runtime._run

    def spy(args: list[Any], *more: Any) -> Any:
        seen[:] = args
        return original(args, *more)

    runtime._run = spy  # type: ignore[method-assign,assignment]
    try:
        call()
    finally:
        runtime._run = original  # type: ignore[method-assign]
    return list(seen)


def _flat(runtime: PrefillRuntime, args: list[Any]) -> None:
    compiled = runtime.compiled
    traced = compiled.plan.traced
    values: dict[Any, Any] = {}
    sizes = traced.symbol_values(args)
    for part in compiled.partitions:
        inputs = []
        for source in part.inputs:
            if source.kind is SourceKind.VALUE:
                inputs.append(values[source.node])
            elif source.kind is SourceKind.PADDING:
                token = traced.token_symbol
                assert token is not None
                inputs.append(torch.zeros(sizes[token], dtype=torch.bool, device=traced.device))
            else:
                inputs.append(source.value(args, sizes))
        segment = compiled.segments.get(part.index)
        function = part.module.forward if segment is None else segment.function
        values.update(zip(part.outputs, function(*inputs), strict=True))
