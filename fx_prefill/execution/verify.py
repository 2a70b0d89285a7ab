"""Checks the proof: real rows of a segment do not change with what is in the padded ones.

Each distinct segment is run twice at a bucket, with equal real rows and different finite garbage
behind them. Real rows of all results must be equal to the bit.

Note [Rounding in groups]

Where a segment multiplies rows in groups (experts), garbage is routed too, and the groups of the
two runs differ in size. A kernel may then round a real row otherwise, without any leak. Garbage
cannot be made to route alike: the segment itself decides that. So there real rows must be equal up
to a few units of rounding at the scale of the result, which a leak of garbage a thousand times
larger does not pass for. Every segment without such an operator is held to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..errors import PaddingError
from ..graph.autocast import ENTER, EXIT
from ..graph.extract import SourceKind
from ..graph.normalize import value_of
from ..graph.operators import GROUPED
from ..graph.partition import Partition, PartitionPlan
from ..graph.placement import GATHERS
from ..graph.symbols import (
    Bindings,
    evaluate_scalar,
    expr_of,
    layout_at,
    size_exprs,
)
from ..graph.verdict import TokenAxis, is_local
from .buffers import copy_into, extent, outer_count, rows
from .compile import CompiledPlan, SegmentFn, structural_key

log = logging.getLogger(__name__)

LARGEST_INDEX = 1024
ROUNDINGS = 16
"""Units of rounding that groups of another size may make, at the scale of a whole result."""
LARGE = 1000.0
"""Scale of the second garbage: what leaks only above a threshold shows."""
SEED = 0


def checked_plan(
    compiled: CompiledPlan, bindings: Bindings, static: Sequence[Any], *, strict: bool
) -> CompiledPlan:
    """The plan with segments that fail the check as breaks, and breaks that fail not captured.

    ``static`` are call arguments of which the weights are read. Raises PaddingError if ``strict``.
    """
    leaks: dict[int, str] = {}
    seen: set[int] = set()
    for part in compiled.partitions:
        segment = compiled.segments.get(part.index)
        if segment is not None and segment.number not in seen:
            seen.add(segment.number)
            leak = leak_of(compiled, part, segment.function, bindings, static)
            if leak is not None:
                leaks[segment.number] = leak
    if leaks:
        text = "; ".join(f"segment {number}: {leak}" for number, leak in leaks.items())
        if strict:
            raise PaddingError(f"segments failed their check at a bucket: {text}")
        log.warning("segments that failed their check at a bucket run eagerly: %s", text)
        compiled = compiled.demote(leaks)
    return _check_attention(compiled, bindings, static)


def _check_attention(
    compiled: CompiledPlan, bindings: Bindings, static: Sequence[Any]
) -> CompiledPlan:
    """Attention that does not hide what comes after a row is not captured."""
    found: dict[Any, str | None] = {}
    leaking = set()
    for part in compiled.partitions:
        if part.index in compiled.causal:
            key = structural_key(compiled.plan, part)
            if key not in found:
                found[key] = leak_of(compiled, part, part.module.forward, bindings, static)
            if found[key]:
                leaking.add(part.index)
    for leak in filter(None, found.values()):
        log.warning("attention is not captured: %s", leak)
    return replace(compiled, causal=compiled.causal - leaking)


def leak_of(
    compiled: CompiledPlan,
    part: Partition,
    function: SegmentFn,
    bindings: Bindings,
    static: Sequence[Any],
) -> str | None:
    """What :func:`find_leak` says of a partition run by ``function``, a failure to run included."""
    try:
        leak = find_leak(compiled.plan, part, function, static, bindings)
        return leak and f"padded rows reach real rows at {leak}"
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Rows nobody asked for must not be able to stop a forward either.
        return f"it fails with garbage in padded rows ({type(error).__name__}: {error})"


def find_leak(
    plan: PartitionPlan,
    part: Partition,
    function: SegmentFn,
    static: Sequence[Any],
    bindings: Bindings,
) -> str | None:
    """Where padded rows reach real ones in a segment, or None.

    ``static`` are the call's arguments, of which only the weights are read; ``bindings`` give the
    bucket. The bucket must have room for a padded row.
    """
    token = plan.traced.token_symbol
    if token is None or bindings[token] < 2:
        return None
    num_tokens = bindings[token] // 2
    first, second = _garbage_pair(plan, part, static, bindings, num_tokens)
    roundings = ROUNDINGS if _multiplies_groups(plan, part) else 0
    with torch.inference_mode(False), torch.no_grad():
        before, after = function(*first), function(*second)
        for node, a, b in zip(part.outputs, before, after, strict=True):
            if not _equal_real_rows(plan, node, a, b, bindings, num_tokens, roundings):
                return _first_leak(plan, part, first, second, bindings, num_tokens, roundings) or (
                    f"the compiled segment's result {node.name} (its operators alone are row-wise: "
                    "the segment compiler mixes rows)"
                )
    return None


def _garbage_pair(
    plan: PartitionPlan,
    part: Partition,
    static: Sequence[Any],
    bindings: Bindings,
    num_tokens: int,
) -> tuple[list[Any], list[Any]]:
    """Two argument lists that differ only in the padded rows of token-shaped inputs."""
    limit = _index_limit(plan, part)
    token = plan.traced.token_symbol
    assert token is not None
    generator = torch.Generator().manual_seed(SEED)
    first: list[Any] = []
    second: list[Any] = []
    for source in part.inputs:
        if source.kind is SourceKind.SCALAR:
            value = other = evaluate_scalar(source.expr, bindings)
        elif source.kind is SourceKind.PADDING:
            rows_at = torch.arange(bindings[token], device=plan.traced.device)
            value = other = rows_at >= num_tokens
        elif source.static:
            value = other = source.constant if source.constant is not None else static[source.index]
        else:
            assert source.node is not None
            value = _random_like(source.node, bindings, limit, generator)
            other = _random_like(source.node, bindings, limit, generator, scale=LARGE)
            axis = plan.state(source.node)
            if isinstance(axis, TokenAxis):
                outer = outer_count(axis, bindings)
                copy_into(
                    rows(other, axis, outer, 0, num_tokens), rows(value, axis, outer, 0, num_tokens)
                )
            else:
                other = value
        first.append(value)
        second.append(other)
    return first, second


def _index_limit(plan: PartitionPlan, part: Partition) -> int:
    """Largest index that no table read by the segment would refuse."""
    sizes = [LARGEST_INDEX]
    for node in part.nodes:
        if GATHERS.intersection(plan.verdicts[node].operators):
            for arg in (node, *node.all_input_nodes):
                value = value_of(arg)
                if isinstance(value, torch.Tensor) and value.dim():
                    sizes.extend(s for s in size_exprs(value) if isinstance(s, int))
    return max(min(sizes), 1)


def _random_like(
    node: fx.Node,
    bindings: Bindings,
    limit: int,
    generator: torch.Generator,
    scale: float = 1.0,
) -> torch.Tensor:
    """Finite random contents in a value's own layout."""
    value = value_of(node)
    sizes, strides = layout_at(value, bindings)
    count = extent(node, bindings)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        flat = (torch.randn(count, generator=generator) * scale).to(value.dtype)
    elif value.dtype == torch.bool:
        flat = torch.randint(0, 2, (count,), generator=generator).to(torch.bool)
    else:
        top = min(limit, torch.iinfo(value.dtype).max)
        flat = torch.randint(0, top, (count,), generator=generator).to(value.dtype)
    return flat.to(value.device).as_strided(sizes, strides)


def _equal_real_rows(
    plan: PartitionPlan,
    node: fx.Node,
    a: torch.Tensor,
    b: torch.Tensor,
    bindings: Bindings,
    num_tokens: int,
    roundings: int,
) -> bool:
    axis = plan.state(node)
    if isinstance(axis, TokenAxis):
        outer = outer_count(axis, bindings)
        a, b = (rows(t, axis, outer, 0, num_tokens) for t in (a, b))
    same = (a == b) | ((a != a) & (b != b))  # NaN equals NaN here
    if roundings and a.is_floating_point() and a.numel():
        finite = torch.where(a.isfinite(), a, 0)
        same |= (a - b).abs() <= roundings * torch.finfo(a.dtype).eps * finite.abs().max()
    return bool(same.all())


def _multiplies_groups(plan: PartitionPlan, part: Partition) -> bool:
    return any(GROUPED.intersection(plan.verdicts[node].operators) for node in part.nodes)


def _first_leak(
    plan: PartitionPlan,
    part: Partition,
    first: list[Any],
    second: list[Any],
    bindings: Bindings,
    num_tokens: int,
    roundings: int,
) -> str | None:
    """The first node whose real rows differ when the segment's own operators are run."""
    runs = []
    for inputs in (first, second):
        interpreter = _Recorder(part.module)
        interpreter.run(*inputs)
        runs.append(interpreter.values)
    copies = [
        node
        for node in part.module.graph.nodes
        if node.op in ("call_function", "call_method") and node.target not in (ENTER, EXIT)
    ]
    # What zeroes padded rows comes last, and is of no node of the plan.
    for original, copy in zip(part.nodes, copies[: len(part.nodes)], strict=True):
        a, b = runs[0].get(copy), runs[1].get(copy)
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            continue
        if is_local(plan.state(original)):
            continue  # which of its rows are real, only the next plain value tells
        if not _equal_real_rows(plan, original, a, b, bindings, num_tokens, roundings):
            shape = tuple(map(str, map(expr_of, value_of(original).shape)))
            where = (original.meta.get("stack_trace") or "").strip().splitlines()[-2:]
            return f"node {original.name} ({original.target}, shape {shape}) {' '.join(where)}"
    return None


class _Recorder(fx.Interpreter):
    """Keeps every intermediate value."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n] = value.clone() if isinstance(value, torch.Tensor) else value
        return value
