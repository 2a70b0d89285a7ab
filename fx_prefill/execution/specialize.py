"""Artifacts for one bucket: compiled for its sizes, where the general ones serve every size.

A compiler that knows the sizes can choose tiles and split reductions for them. It costs one compile
of every distinct segment for each bucket asked for, at that bucket's first capture.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..errors import PaddingError
from ..graph.extract import Source, SourceKind
from ..graph.normalize import value_of
from ..graph.symbols import Bindings, layout_at
from ..options import Options
from .buffers import extent
from .compile import CompiledPlan, CompiledSegment, SegmentFn, as_sequence
from .inductor import compile_standalone
from .verify import leak_of

log = logging.getLogger(__name__)


def specialized(
    compiled: CompiledPlan, static: Sequence[Any], bindings: Bindings, options: Options
) -> CompiledPlan:
    """The plan with an artifact of its own for each distinct segment at the sizes of a bucket.

    ``static`` are call arguments of which the weights are read. A segment that the compiler
    rejects, or whose artifact fails the padding check, keeps its general artifact, with a warning
    (an error if ``strict``). Segments that run uncompiled stay so.
    """
    made: dict[int, CompiledSegment] = {}
    segments = {}
    for part in compiled.partitions:
        segment = compiled.segments.get(part.index)
        if segment is None:
            continue
        if segment.number not in made:
            inputs = [_example(source, node, static, bindings) for source, node in _inputs(part)]
            special = _compile(segment, part.module, inputs, options)
            if special is not segment:
                leak = leak_of(compiled, part, special.function, bindings, static)
                special = segment if _rejected(segment, leak, options) else special
            made[segment.number] = special
        segments[part.index] = made[segment.number]
    return replace(compiled, segments=segments, bodies={})


def _rejected(segment: CompiledSegment, leak: str | None, options: Options) -> bool:
    if leak is None:
        return False
    text = f"segment {segment.number} specialized for a bucket failed its check: {leak}"
    if options.strict:
        raise PaddingError(text)
    log.warning("%s; it keeps its general artifact", text)
    return True


def _inputs(part: Any) -> list[tuple[Source, fx.Node]]:
    placeholders = [node for node in part.module.graph.nodes if node.op == "placeholder"]
    return list(zip(part.inputs, placeholders, strict=True))


def _example(source: Source, node: fx.Node, static: Sequence[Any], bindings: Bindings) -> Any:
    if source.static or source.kind is SourceKind.SCALAR:
        return source.value(static, bindings)
    value = value_of(node)
    sizes, strides = layout_at(value, bindings)
    flat = torch.zeros(extent(node, bindings), dtype=value.dtype, device=value.device)
    return flat.as_strided(sizes, strides)


def _compile(
    segment: CompiledSegment, module: fx.GraphModule, inputs: list[Any], options: Options
) -> CompiledSegment:
    start = time.perf_counter()
    if segment.compiler != "inductor":
        return segment
    try:
        with torch.inference_mode(False), torch.no_grad():
            function = _inductor(module, inputs, options.max_autotune)
    except Exception as error:
        if options.strict:
            raise
        log.warning(
            "segment %d is not specialized: %s: %s", segment.number, type(error).__name__, error
        )
        return segment
    return replace(segment, function=function, seconds=time.perf_counter() - start)


def _inductor(module: fx.GraphModule, inputs: list[Any], max_autotune: bool) -> SegmentFn:
    # Values recorded while tracing belong to another fake mode and other sizes.
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.meta = {}
    return as_sequence(
        compile_standalone(
            fx.GraphModule(module, graph),
            inputs,
            dynamic_shapes="from_example_inputs",
            patches={"max_autotune": True} if max_autotune else None,
        )
    )
