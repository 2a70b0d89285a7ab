"""A plan, and what ran of it, as plain data: built for people, printed by :mod:`table`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import fx

from ..execution.buffers import HANDOFF, INPUT, RESULT, plan_memory, value_bytes
from ..execution.captures import planned_bytes
from ..execution.compile import structural_key
from ..execution.dispatch import PrefillRuntime
from ..execution.reasons import Counts, FallbackReason
from ..graph.operators import short_name
from ..graph.partition import Partition, PartitionPlan
from ..graph.symbols import Bindings, evaluate_scalar
from ..graph.verdict import BreakReason
from ..options import Options
from .registry import RefusedGraph
from .source import source_line

_SHOWN_FIRST = (
    BreakReason.OPAQUE,
    BreakReason.ATTENTION,
    BreakReason.COLLECTIVE,
    BreakReason.CROSSES_TOKENS,
)


@dataclass(frozen=True)
class BreakDetail:
    """One operator of a break, and why it is not captured."""

    operator: str
    reason: str
    detail: str
    source: str


@dataclass(frozen=True)
class PartitionReport:
    """One row of the partition table.

    ``segment`` numbers the distinct segment (None for a break). ``bytes`` is what the partition's
    results take in our buffers at the largest bucket.
    """

    index: int
    kind: str
    operators: tuple[str, ...]
    reasons: tuple[str, ...]
    details: tuple[BreakDetail, ...]
    source: str
    segment: int | None
    bytes: int


@dataclass(frozen=True)
class GraphReport:
    """One traced graph: its plan and, when it is live, its counts."""

    partitions: tuple[PartitionReport, ...] = ()
    token_symbol: str | None = None
    batch_symbols: tuple[str, ...] = ()
    buckets: tuple[int, ...] = ()
    unusable_buckets: dict[int, str] = field(default_factory=dict)
    compiler: str = ""
    compile_seconds: float = 0.0
    buffer_bytes: int = 0
    graph_bytes_estimate: int = 0
    refused: str | None = None
    captured: tuple[int, ...] = ()
    captured_attention: dict[int, int] = field(default_factory=dict)
    """Breaks that are inside the recording, by captured bucket; buckets with none left out."""

    captured_writes: int = 0
    """Breaks whose cache writes are in the graph before them."""

    queued: tuple[int, ...] = ()
    replays: dict[int, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    real_rows: int = 0
    padded_rows: int = 0
    recaptures: int = 0
    evicted_batches: int = 0

    @property
    def num_segments(self) -> int:
        """Segments in plan order, repeats counted."""
        return sum(p.kind == "segment" for p in self.partitions)

    @property
    def num_breaks(self) -> int:
        """Breaks in plan order."""
        return sum(p.kind == "break" for p in self.partitions)

    @property
    def num_distinct_segments(self) -> int:
        """Segments that had to be compiled."""
        return len({p.segment for p in self.partitions if p.segment is not None})


@dataclass(frozen=True)
class Report:
    """All graphs traced for a model; ``print`` it for a table."""

    graphs: tuple[GraphReport, ...]

    def __str__(self) -> str:
        from .table import render

        return render(self)

    def to_json(self) -> str:
        """The whole report as JSON."""
        return json.dumps(asdict(self), indent=2)


def describe_plan(plan: PartitionPlan, options: Options, hints: Bindings) -> GraphReport:
    """Report on a plan that nothing has been compiled for."""
    numbers: dict[Any, int] = {}
    segments = {
        part.index: numbers.setdefault(structural_key(plan, part), len(numbers))
        for part in plan.segments
    }
    refused = None
    if not options.ladder:
        refused = str(FallbackReason.DISABLED)
    elif not segments:
        refused = str(FallbackReason.NO_SEGMENT)
    return _describe(plan, plan.partitions, segments, {}, options, hints, refused)


def describe_runtime(runtime: PrefillRuntime, hints: Bindings) -> GraphReport:
    """Report on a live graph, with what its forwards did."""
    compiled = runtime.compiled
    segments = {index: segment.number for index, segment in compiled.segments.items()}
    base = _describe(
        compiled.plan,
        compiled.partitions,
        segments,
        compiled.demoted,
        runtime.options,
        hints,
        None if runtime.refused is None else str(runtime.refused),
    )
    first = next(iter(compiled.segments.values()), None)
    return _with_counts(
        base,
        runtime.counts,
        compiler=first.compiler if first else "",
        compile_seconds=sum(segment.seconds for segment in compiled.segments.values()),
        captured=tuple(sorted({bucket or 0 for bucket, _ in runtime.captured})),
        captured_attention=runtime.captured_breaks,
        captured_writes=sum(map(len, compiled.placed.values())),
        queued=tuple(sorted({bucket or 0 for bucket, _ in runtime.queued})),
    )


def describe_refused(graph: RefusedGraph) -> GraphReport:
    """Report on a graph that always runs eagerly."""
    return _with_counts(GraphReport(refused=str(graph.reason)), graph.counts)


def _with_counts(report: GraphReport, counts: Counts, **more: Any) -> GraphReport:
    return replace(
        report,
        replays=dict(sorted(counts.replays.items())),
        fallbacks=dict(counts.fallbacks),
        real_rows=counts.real_rows,
        padded_rows=counts.padded_rows,
        recaptures=counts.recaptures,
        evicted_batches=counts.evicted_batches,
        **more,
    )


def _describe(
    plan: PartitionPlan,
    partitions: Sequence[Partition],
    segments: dict[int, int],
    demoted: dict[int, str],
    options: Options,
    hints: Bindings,
    refused: str | None,
) -> GraphReport:
    traced = plan.traced
    top = dict(hints)
    if traced.token_symbol is not None and options.ladder:
        top[traced.token_symbol] = options.ladder[-1]
    memory = plan_memory(plan, partitions)
    rows = []
    for part in partitions:
        names = [HANDOFF, INPUT] if not part.is_segment else [RESULT]
        held = sum(
            value_bytes(node, top)
            for node in part.outputs
            if any((role, node) in memory.slot_of for role in names)
        )
        rows.append(_row(plan, part, segments.get(part.index), demoted.get(part.index), held))
    unusable = {}
    if traced.token_symbol is not None:
        for bucket in options.ladder:
            sizes = {s: n for s, n in hints.items() if s in traced.size_symbols}
            problem = traced.broken_guard(hints, {**sizes, traced.token_symbol: bucket})
            if problem is not None:
                unusable[bucket] = problem
    return GraphReport(
        partitions=tuple(rows),
        token_symbol=None if traced.token_symbol is None else str(traced.token_symbol),
        batch_symbols=tuple(map(str, traced.batch_symbols)),
        buckets=options.ladder if traced.token_symbol is not None else (),
        unusable_buckets=unusable,
        buffer_bytes=memory.num_bytes(top),
        graph_bytes_estimate=planned_bytes(plan, options, top) if segments else 0,
        refused=refused,
    )


def _row(
    plan: PartitionPlan, part: Partition, segment: int | None, demoted: str | None, held: int
) -> PartitionReport:
    verdicts = plan.verdicts
    details = []
    reasons: Counter[str] = Counter()
    if demoted is not None:
        reasons[str(BreakReason.PADDING_LEAK)] += 1
        details.append(BreakDetail("segment", str(BreakReason.PADDING_LEAK), demoted, ""))
    for node in part.nodes:
        verdict = verdicts[node]
        if not part.is_segment and verdict.reason is not None:
            reasons[str(verdict.reason)] += 1
            details.append(
                BreakDetail(
                    short_name(node), str(verdict.reason), verdict.detail, source_line(node)
                )
            )
    return PartitionReport(
        index=part.index,
        kind="segment" if part.is_segment else "break",
        operators=tuple(short_name(node) for node in part.nodes),
        reasons=tuple(_in_order_of_weight(reasons)),
        details=tuple(details),
        source=source_line(_spokesman(plan, part)),
        segment=segment,
        bytes=held,
    )


def _in_order_of_weight(reasons: Counter[str]) -> list[str]:
    first = [str(reason) for reason in _SHOWN_FIRST if str(reason) in reasons]
    return first + [reason for reason in reasons if reason not in first]


def _spokesman(plan: PartitionPlan, part: Partition) -> fx.Node:
    """The node whose source line says best what a partition is."""
    for reason in _SHOWN_FIRST:
        for node in part.nodes:
            if plan.verdicts[node].reason is reason:
                return node
    return next((n for n in part.nodes if plan.verdicts[n].has_kernel), part.nodes[0])


def hints_of(plan: PartitionPlan) -> dict[Any, int]:
    """Sizes the graph was traced at, by symbol."""
    env = plan.traced.fake_mode.shape_env if plan.traced.fake_mode is not None else None
    if env is None:
        return {}
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    return {s: evaluate_scalar(known[s], {}) for s in plan.traced.sources if s in known}
