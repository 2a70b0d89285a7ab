"""A benchmark's result as text."""

from __future__ import annotations

from .run import Result, Row

LEGEND = """\
Medians in milliseconds, each call starting with an idle device; ratios compare figures of this run.
ours: the module is called, PyTorch's guards included. direct: its graph is called, as an engine
does. floor: the same kernels, attention included, as one CUDA graph at the bucket's size (on a CPU:
one after the other). breaks: those that ran eagerly; us/break: host time of a direct call over
them, what surrounds them included. error: relative, of the last hidden state (ours, then each
compiled baseline's) against the uncompiled model."""


def render(result: Result) -> str:
    """Tables of the set-up and of every length."""
    setup = result.setup
    lines = [
        f"{result.settings.model} ({result.settings.dtype}) on {result.machine}, torch "
        f"{result.torch}, transformers {result.transformers}; {result.segments} segments, "
        f"{result.distinct_segments} distinct",
        f"set-up: trace {setup.trace_s:.1f} s, compile {setup.compile_s:.1f} s, {setup.buckets} "
        f"buckets captured in {setup.capture_s:.2f} s; graphs and buffers {setup.pool_mib:.0f} MiB "
        f"(estimated {setup.estimated_mib:.0f})",
        "",
        *_table(result),
        "",
        LEGEND,
    ]
    return "\n".join(lines)


def _table(result: Result) -> list[str]:
    names = list(result.settings.baselines)
    header = [
        *("tokens", "bucket"),
        *names,
        *("floor", "ours", "submit", "direct", "submit", "ours/floor", "direct/floor"),
        *("breaks", "us/break"),
        *(f"{name}/ours" for name in names),
        "error",
        *(f"{name} error" for name in names if name != "eager"),
    ]
    rows = [header, *(_cells(row, names) for row in result.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _cells(row: Row, names: list[str]) -> list[str]:
    return [
        str(row.tokens),
        str(row.bucket or "eager"),
        *(f"{row.baselines[name].wall:.3f}" for name in names),
        f"{row.floor:.3f}",
        f"{row.ours:.3f}",
        f"{row.ours_submit:.3f}",
        f"{row.direct:.3f}",
        f"{row.direct_submit:.3f}",
        f"{row.ours / row.floor:.3f}",
        f"{row.direct / row.floor:.3f}",
        str(row.breaks),
        f"{row.direct_submit * 1e3 / row.breaks:.1f}" if row.breaks else "-",
        *(f"{row.baselines[name].wall / row.ours:.1f}" for name in names),
        f"{row.error:.1e}",
        *(f"{row.baselines[name].error:.1e}" for name in names if name != "eager"),
    ]
