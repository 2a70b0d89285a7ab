"""docs/families.md: one row a family, written by the tests that run the families.

`EXPECTTEST_ACCEPT=1 pytest tests/test_families.py tests/test_more_families.py` writes the rows
anew; read the difference. The order of rows is that of the lists of families.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from fx_prefill.reporting.explain import GraphReport, PartitionReport

PATH = Path(__file__).parent.parent / "docs" / "families.md"

INTRODUCTION = """\
# Families

What the pass makes of decoders in unmodified transformers code, as tiny random models in float32
unless a name says otherwise; the layers of a full-sized model are cut in the same way. Each
replays with outputs equal to those of the uncompiled model at 1, 2, 16, 17, 70, 100 and 128 tokens
in shuffled order, and runs eagerly above the largest bucket. Written by the tests
(`EXPECTTEST_ACCEPT=1 make test`, see `tests/family_table.py`), never by hand.

The plan is that of the inner decoder with an empty KV cache. *distinct* are the segments compiled.
*runs eagerly* has the operators that decide each kind of break, and why they are not captured;
what is eager only since such a break reads or feeds it is left out.

"""

HEADER = ("family", "layers", "segments", "distinct", "breaks", "runs eagerly, and why")
FOLLOWERS = frozenset(
    (
        "only a break reads it",
        "not token-shaped",
        "other dynamic size",
        "in-place order",
        "host scalar",
        "embedding gather",
    )
)
MAX_OPERATORS = 4


def check_row(name: str, num_layers: int, graph: GraphReport, order: Sequence[str]) -> None:
    """Compare the row of a family with the one in the file, or write it there."""
    if not _pinned():
        return
    row = _row(name, num_layers, graph)
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        _write(name, row, order)
    rows = _read()
    assert rows.get(name) == row, (
        f"docs/families.md says\n  {rows.get(name)}\nbut the plan is\n  {row}\n{__doc__}"
    )


def check_names(order: Sequence[str]) -> None:
    """The file has a row for every family, in order, and for no other."""
    if not _pinned():
        pytest.skip("plans are those of transformers 5.17")
    assert list(_read()) == list(order)


def _pinned() -> bool:
    transformers = pytest.importorskip("transformers")
    return transformers.__version__.startswith("5.17.")


def _row(name: str, num_layers: int, graph: GraphReport) -> str:
    why: dict[tuple[str, ...], None] = {}
    for part in graph.partitions:
        if part.kind == "break":
            why.update(dict.fromkeys(_reasons(part)))
    by_reason: dict[str, list[str]] = {}
    for operator, reason in why:
        by_reason.setdefault(reason, []).append(operator)
    text = "; ".join(f"{reason}: {_shortened(ops)}" for reason, ops in sorted(by_reason.items()))
    cells = (name, num_layers, graph.num_segments, graph.num_distinct_segments, graph.num_breaks)
    return f"| {' | '.join(map(str, cells))} | {text} |"


def _reasons(part: PartitionReport) -> list[tuple[str, str]]:
    """Operators of a break with their reasons, without those that only follow others."""
    found = [(f"`{d.operator}`", d.reason) for d in part.details if d.operator != "getitem"]
    leading = [pair for pair in found if pair[1] not in FOLLOWERS]
    return leading or found


def _shortened(operators: list[str]) -> str:
    names = list(Counter(operators))
    more = len(names) - MAX_OPERATORS
    return ", ".join(names[:MAX_OPERATORS]) + (f" and {more} more" if more > 0 else "")


def _read() -> dict[str, str]:
    if not PATH.exists():
        return {}
    lines = [line for line in PATH.read_text().splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines[1:]}


def _write(name: str, row: str, order: Sequence[str]) -> None:
    PATH.parent.mkdir(exist_ok=True)
    with open(PATH, "a") as lock:  # test processes write rows at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = {**_read(), name: row}
        table = [f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}"]
        table += [rows[known] for known in order if known in rows]
        PATH.write_text(INTRODUCTION + "\n".join(table) + "\n")
