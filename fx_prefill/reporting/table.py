"""A report as aligned plain text; repeated layers are shown once with their count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .explain import GraphReport, PartitionReport, Report

HEADER = ("#", "kind", "id", "ops", "operators", "why eager", "bytes", "source")
MAX_OPERATORS = 46
MAX_SOURCE = 64


def render(report: Report) -> str:
    """The whole report as text."""
    if not report.graphs:
        return "no graph has been traced yet"
    parts = []
    for number, graph in enumerate(report.graphs):
        parts.append(f"graph {number}: {_headline(graph)}")
        if graph.partitions:
            parts.append(_table(graph))
        parts.extend(_footnotes(graph))
    return "\n".join(parts)


def _headline(graph: GraphReport) -> str:
    if graph.refused is not None:
        return f"runs eagerly: {graph.refused}"
    axis = f"tokens {graph.token_symbol}" if graph.token_symbol else "fixed sizes, one bucket"
    batch = f", batch {', '.join(graph.batch_symbols)}" if graph.batch_symbols else ""
    return (
        f"{graph.num_segments} segments ({graph.num_distinct_segments} distinct), "
        f"{graph.num_breaks} breaks; {axis}{batch}; "
        f"about {format_bytes(graph.graph_bytes_estimate)} of memory for all buckets"
    )


def format_bytes(count: int) -> str:
    """Bytes in the largest unit that leaves a number of at least 1."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _table(graph: GraphReport) -> str:
    rows: list[tuple[str, ...]] = [HEADER]
    for start, length, times in _collapse([_signature(p) for p in graph.partitions]):
        for offset in range(length):
            part = graph.partitions[start + offset]
            mark = f"x{times}" if times > 1 else ""
            rows.append(_cells(part, mark))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(f"  {line}" for line in lines)


def _cells(part: PartitionReport, mark: str) -> tuple[str, ...]:
    return (
        f"{part.index}{' ' + mark if mark else ''}",
        part.kind,
        "" if part.segment is None else str(part.segment),
        str(len(part.operators)),
        _operators(part.operators),
        ", ".join(part.reasons),
        format_bytes(part.bytes),
        part.source[:MAX_SOURCE],
    )


def _operators(names: Sequence[str]) -> str:
    counted = Counter(names)
    shown = ""
    for name, count in counted.most_common():
        item = name if count == 1 else f"{name} x{count}"
        longer = f"{shown}, {item}" if shown else item
        if len(longer) > MAX_OPERATORS:
            return f"{shown}, ..." if shown else f"{item[:MAX_OPERATORS]}..."
        shown = longer
    return shown


def _signature(part: PartitionReport) -> tuple[object, ...]:
    return (part.kind, part.segment, part.operators, part.reasons)


def _collapse(signatures: Sequence[object]) -> list[tuple[int, int, int]]:
    """Runs of the sequence: (start, length, times) with repeats of one or two rows folded."""
    runs = []
    position = 0
    while position < len(signatures):
        length, times = 1, 1
        for candidate in (2, 1):
            repeats = _repeats(signatures, position, candidate)
            if repeats > 1:
                length, times = candidate, repeats
                break
        runs.append((position, length, times))
        position += length * times
    return runs


def _repeats(signatures: Sequence[object], start: int, length: int) -> int:
    block = list(signatures[start : start + length])
    times = 1
    while list(signatures[start + times * length : start + (times + 1) * length]) == block:
        times += 1
    return times


def _footnotes(graph: GraphReport) -> list[str]:
    notes = []
    unknown = {
        f"{detail.operator} ({detail.detail})"
        for part in graph.partitions
        for detail in part.details
        if detail.reason == "not known to be row-wise"
    }
    if unknown:
        notes.append(
            f"  not known to be row-wise: {', '.join(sorted(unknown))}; "
            "if rows do not mix in it, name it in rowwise_ops"
        )
    if graph.buckets:
        usable = [b for b in graph.buckets if b not in graph.unusable_buckets]
        notes.append(f"  buckets: {_ladder(usable)}; forwards that fit none run eagerly")
    for bucket, problem in list(graph.unusable_buckets.items())[:4]:
        notes.append(f"  bucket {bucket} is not used: the traced graph needs {problem}")
    if graph.compiler:
        notes.append(f"  compiler {graph.compiler}, {graph.compile_seconds:.1f} s")
    if graph.captured_attention:
        inside, ladder = graph.captured_attention.values(), _ladder(list(graph.captured_attention))
        notes.append(
            f"  attention captured with its segments in buckets {ladder}: {max(inside)} of "
            f"{graph.num_breaks} breaks"
        )
    if graph.captured_writes:
        notes.append(
            f"  cache writes captured with the segments before {graph.captured_writes} of "
            f"{graph.num_breaks} breaks"
        )
    if graph.queued:
        notes.append(f"  waiting for warmup(): buckets {_ladder(graph.queued)}")
    if graph.replays or graph.fallbacks:
        replays = ", ".join(
            f"{bucket or 'exact size'}: {count}" for bucket, count in graph.replays.items()
        )
        notes.append(
            f"  replays by bucket {{{replays}}}, {graph.real_rows} real and "
            f"{graph.padded_rows} padded rows"
        )
    notes.extend(f"  ran eagerly {count}x: {why}" for why, count in graph.fallbacks.items())
    if graph.recaptures:
        notes.append(f"  captured again {graph.recaptures}x because weights moved")
    if graph.evicted_batches:
        notes.append(f"  gave up the programs of a batch {graph.evicted_batches}x (max_batches)")
    return notes


def _ladder(buckets: Sequence[int]) -> str:
    if len(buckets) <= 8:
        return ", ".join(map(str, buckets)) or "none"
    return f"{', '.join(map(str, buckets[:4]))}, ..., {buckets[-1]} ({len(buckets)} sizes)"
