"""Joins segments with the causal attentions between them into one recording for a bucket.

What is compiled stays as it is: a merged segment runs the artifacts of its segments and the
operators of its breaks, one after the other, at the size of the bucket. Recorded as one graph that
is the whole forward without a launch, a handoff copy or a host step between layers.

Note [Layouts between merged partitions]

An artifact is compiled for the strides its inputs were traced with. Across a handoff buffer they
are right by construction; inside a merged segment a break's result is brought into them where the
kernel chose others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..graph.extract import Source, SourceKind
from ..graph.normalize import value_of
from ..graph.partition import Partition, PartitionPlan
from ..graph.symbols import Bindings, Layout, evaluate_scalar, layout_at
from .compile import BoundSegment, CompiledPlan, CompiledSegment, SegmentFn, structural_key


def merge(compiled: CompiledPlan) -> CompiledPlan:
    """The same plan with each run of segments and causal breaks as one segment."""
    segments: dict[int, CompiledSegment] = {}
    merged = merged_partitions(compiled.plan, compiled.partitions, compiled.causal)
    for part, run in merged:
        if len(run) > 1:
            segments[part.index] = MergedSegment.of(compiled, run, part)
        elif part.index in compiled.segments:
            segments[part.index] = compiled.segments[part.index]
    return replace(
        compiled,
        partitions=tuple(part for part, _ in merged),
        segments=segments,
        causal=frozenset(),
        bodies={},
    )


def merged_partitions(
    plan: PartitionPlan, partitions: Sequence[Partition], causal: Collection[int]
) -> list[tuple[Partition, list[Partition]]]:
    """Partitions after merging, each with those it runs.

    The module of a merged partition is that of its first: it is run through its segment only.
    """
    merged = []
    for run in _runs(partitions, causal):
        merged.append((run[0] if len(run) == 1 else _join(plan, partitions, run), run))
    return merged


def _runs(partitions: Sequence[Partition], causal: Collection[int]) -> list[list[Partition]]:
    """Neighbours that may be recorded together; any other partition alone."""
    runs: list[list[Partition]] = []
    open_run = False
    for part in partitions:
        joins = part.is_segment or part.index in causal
        if joins and open_run:
            runs[-1].append(part)
        else:
            runs.append([part])
        open_run = joins
    return [piece for run in runs for piece in ([run] if _has_segment(run) else [[p] for p in run])]


def _has_segment(run: list[Partition]) -> bool:
    return any(part.is_segment for part in run)


def _join(plan: PartitionPlan, partitions: Sequence[Partition], run: list[Partition]) -> Partition:
    made = {node for part in run for node in part.outputs}
    inputs: dict[Any, Source] = {}
    for part in run:
        for source in part.inputs:
            if source.node not in made:
                inputs.setdefault(key_of(source), source)
    inside = {part.index for part in run}
    wanted = {
        source.node
        for part in partitions
        if part.index not in inside
        for source in part.inputs
        if source.kind is SourceKind.VALUE
    }
    wanted |= {result.node for result in plan.results if isinstance(result, Source)}
    return Partition(
        index=run[0].index,
        is_segment=True,
        nodes=tuple(node for part in run for node in part.nodes),
        inputs=tuple(inputs.values()),
        outputs=tuple(node for part in run for node in part.outputs if node in wanted),
        module=run[0].module,
    )


def key_of(source: Source) -> Any:
    """Equal for two sources of one value."""
    if source.kind is SourceKind.SCALAR:
        return source.expr
    return source.kind if source.kind is SourceKind.PADDING else source.node


@dataclass(frozen=True)
class MergedSegment(CompiledSegment):
    """Several artifacts and breaks run as one; call :meth:`bind` for a function.

    Steps of one kind run the same operators on values of the same layout.
    """

    steps: tuple[tuple[Partition, SegmentFn], ...] = ()
    kinds: tuple[Any, ...] = ()
    inputs: tuple[Source, ...] = ()
    outputs: tuple[fx.Node, ...] = ()

    @staticmethod
    def of(compiled: CompiledPlan, run: list[Partition], merged: Partition) -> MergedSegment:
        """The merged segment of a run; its number is its place in the plan."""
        steps: list[tuple[Partition, SegmentFn]] = []
        kinds: list[Any] = []
        for part in run:
            segment = compiled.segments.get(part.index)
            steps.append((part, part.module.forward if segment is None else segment.function))
            key = structural_key(compiled.plan, part) if segment is None else segment.number
            kinds.append(key)
        first = next(iter(compiled.segments.values()))
        return MergedSegment(
            number=merged.index,
            function=_unbound,
            seconds=0.0,
            compiler=first.compiler,
            steps=tuple(steps),
            kinds=tuple(kinds),
            inputs=merged.inputs,
            outputs=merged.outputs,
        )

    def bind(self, bindings: Bindings) -> BoundSegment:
        """Functions from the inputs' values to the outputs, at the sizes of a bucket."""
        dead_after = self._dead_after()
        numbers = self._numbers(bindings)
        layouts = self._layouts(bindings)

        def go(given: tuple[Any, ...], known: dict[Any, Sequence[Any]] | None) -> list[Any]:
            values = dict(zip(map(key_of, self.inputs), given, strict=True))
            values.update(numbers)
            for position, (part, function) in enumerate(self.steps):
                results = None if known is None else known.get(self.kinds[position])
                if results is None:
                    results = function(*[values[key_of(source)] for source in part.inputs])
                    if known is not None:
                        known[self.kinds[position]] = results
                for node, result in zip(part.outputs, results, strict=True):
                    values[node] = _laid_out(result, layouts.get(node))
                del results
                for node in dead_after[position]:
                    del values[node]
            return [values[node] for node in self.outputs]

        def run(*given: Any) -> list[Any]:
            return go(given, None)

        def warm_up(*given: Any) -> list[Any]:
            # A layer like one before it has nothing new to compile, tune or load.
            return go(given, {})

        return BoundSegment(run, warm_up)

    def _numbers(self, bindings: Bindings) -> dict[Any, Any]:
        """Every number that a step reads, by its expression."""
        sources = [source for part, _ in self.steps for source in part.inputs]
        return {
            key_of(source): evaluate_scalar(source.expr, bindings)
            for source in sources
            if source.kind is SourceKind.SCALAR
        }

    def _layouts(self, bindings: Bindings) -> dict[fx.Node, Layout]:
        """Sizes and strides of what breaks make; artifacts make what they were compiled to."""
        breaks = [part for part, _ in self.steps if not part.is_segment]
        made = [node for part in breaks for node in part.outputs]
        nodes = [node for node in made if isinstance(value_of(node), torch.Tensor)]
        return {node: layout_at(value_of(node), bindings) for node in nodes}

    def _dead_after(self) -> list[list[fx.Node]]:
        """What nobody reads after a step, so that its memory serves later ones."""
        last: dict[fx.Node, int] = {}
        for position, (part, _) in enumerate(self.steps):
            last.update(dict.fromkeys(part.outputs, position))
            for source in part.inputs:
                if source.node in last:
                    last[source.node] = position
        dead: list[list[fx.Node]] = [[] for _ in self.steps]
        for node, position in last.items():
            if node not in self.outputs:
                dead[position].append(node)
        return dead


def _unbound(*args: Any) -> Sequence[torch.Tensor]:
    raise AssertionError("a merged segment is bound to the sizes of a bucket before it is run")


def _laid_out(result: Any, layout: Layout | None) -> Any:
    """Note [Layouts between merged partitions]."""
    if layout is None:
        return result
    sizes, strides = layout
    pairs = zip(result.shape, result.stride(), strides, strict=True)
    if all(size == 1 or stride == traced for size, stride, traced in pairs):
        return result
    laid_out = torch.empty_strided(sizes, strides, dtype=result.dtype, device=result.device)
    return laid_out.copy_(result)
