"""Finds breaks whose attention is causal by flag, and makes them safe to run on padded rows.

Note [Causal attention hides the padding]

Padded rows come after all real ones, and a causal attention lets a row see itself and the rows
before it. So real rows do not depend on padded ones, and such a break may be captured at the size
of the bucket, with the segments around it. One thing is left: a kernel multiplies what is hidden
by a weight of zero, and zero times NaN is NaN. So the segments that make keys and values set their
padded rows to zero, in the kernel that writes them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .extract import Source, SourceKind
from .masks import attends_to_itself, sdpa_arguments
from .normalize import value_of
from .partition import Partition, PartitionPlan
from .symbols import layout_at, stride_exprs
from .verdict import BreakReason, TokenAxis

CHOSEN = frozenset({BreakReason.FEEDS_BREAK, BreakReason.NOT_TOKEN_SHAPED})
"""Reasons of row-wise nodes that are in a break by choice."""


def causal_breaks(plan: PartitionPlan) -> dict[int, tuple[fx.Node, ...]]:
    """Breaks that may be captured at a bucket, with the keys and values to zero for each."""
    makers = {node: part for part in plan.segments for node in part.outputs}
    found = {}
    for part in plan.breaks:
        if reads_only(makers, part):
            hidden = _hidden(plan, part, makers)
            if hidden is not None:
                found[part.index] = hidden
    return found


def reads_only(makers: Container[fx.Node], part: Partition) -> bool:
    """Whether all that a break reads is among ``makers``, or the same in every call."""
    return all(
        source.kind is SourceKind.SCALAR or source.static or source.node in makers
        for source in part.inputs
    )


def _hidden(
    plan: PartitionPlan, part: Partition, makers: dict[fx.Node, Partition]
) -> tuple[fx.Node, ...] | None:
    """Keys and values of the attentions of a break; None when something else crosses tokens."""
    hidden: dict[fx.Node, None] = {}
    sizes = plan.traced.size_symbols
    for source in part.inputs:
        if source.kind is SourceKind.SCALAR and not source.expr.free_symbols <= sizes:
            return None
    for node in part.nodes:
        verdict = plan.verdicts[node]
        if verdict.reason in CHOSEN and verdict.pure:
            continue
        given = sdpa_arguments(node)
        if given is None or verdict.reason is not BreakReason.ATTENTION:
            return None
        if not _is_causal(plan, given) or not all(
            _can_be_zeroed(plan, given[name], makers) for name in ("key", "value")
        ):
            return None
        hidden.update({given["key"]: None, given["value"]: None})
    return tuple(hidden) or None


def _is_causal(plan: PartitionPlan, given: dict[str, Any]) -> bool:
    token = plan.traced.token_symbol
    return (
        token is not None
        and given.get("is_causal") is True
        and given.get("attn_mask") is None
        and given.get("dropout_p", 0.0) == 0.0
        and attends_to_itself(given, token)
    )


def _can_be_zeroed(plan: PartitionPlan, node: Any, makers: dict[fx.Node, Partition]) -> bool:
    """Whether a segment makes ``node``, with whole tokens on one axis and rows apart in memory."""
    if node not in makers:
        return False
    axis = plan.state(node)
    plain = isinstance(axis, TokenAxis) and axis.plain and axis.outer == 1
    if not plain or 0 in stride_exprs(value_of(node)):
        return False
    # A segment is compiled for the strides its inputs were traced with; breaks take any.
    return _is_dense(plan, node) or not any(
        source.node is node for part in plan.segments for source in part.inputs
    )


def _is_dense(plan: PartitionPlan, node: fx.Node) -> bool:
    """Whether a value's rows lie one after the other, as they do in its zeroed copy."""
    sizes = {symbol: 3 for symbol in plan.traced.size_symbols}
    shape, strides = layout_at(value_of(node), sizes)
    step = 1
    for dim in reversed(_memory_order(plan, node)):
        if shape[dim] != 1 and strides[dim] != step:
            return False
        step *= shape[dim]
    return True


def _fake_padding(plan: PartitionPlan, node: fx.Node, axis: TokenAxis) -> torch.Tensor:
    value = value_of(node)
    assert plan.traced.fake_mode is not None
    with plan.traced.fake_mode:
        return torch.empty(value.shape[axis.dim], dtype=torch.bool, device=value.device)


# --- zeroing ------------------------------------------------------------------------------------


def _zero_rows(graph: fx.Graph, x: Any, padding: fx.Node, dim: int, order: Sequence[int]) -> Any:
    """``x`` with the rows along ``dim`` set to zero where ``padding`` (bool, one a row) is set.

    Not in place: what a model calls a key may be a slice of a weight. ``order`` are the dimensions
    from the outermost in memory to the innermost, in which the copy is contiguous. Made of torch's
    own functions, as PyTorch caches no artifact with others across processes.
    """
    shape = [1] * len(order)
    shape[order.index(dim)] = -1
    back = tuple(order.index(d) for d in range(len(order)))
    seen = graph.call_function(torch.permute, (x, tuple(order)))
    which = graph.call_function(torch.reshape, (padding, tuple(shape)))
    zeroed = graph.call_function(torch.masked_fill, (seen, which, 0))
    return graph.call_function(torch.permute, (zeroed, back))


def _memory_order(plan: PartitionPlan, node: fx.Node) -> tuple[int, ...]:
    """Dimensions of a value by stride, largest first, seen at some count and batch."""
    traced = plan.traced
    sizes = {symbol: 3 for symbol in traced.size_symbols}
    _, strides = layout_at(value_of(node), sizes)
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def zero_padding(plan: PartitionPlan, part: Partition, nodes: Sequence[fx.Node]) -> Partition:
    """A segment that sets the padded rows of some of its results to zero.

    It takes one more input, the last: a bool vector that is true for the padded rows.
    """
    graph = fx.Graph()
    outputs = list(graph.graph_copy(part.module.graph, {}))  # type: ignore[arg-type]
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        padding = graph.placeholder(f"arg{len(part.inputs)}")
    for index, node in enumerate(part.outputs):
        axis = plan.state(node)
        if node in nodes and isinstance(axis, TokenAxis):
            padding.meta["example_value"] = _fake_padding(plan, node, axis)
            order = _memory_order(plan, node)
            outputs[index] = _zero_rows(graph, outputs[index], padding, axis.dim, order)
    graph.output(tuple(outputs))
    graph.lint()
    return replace(
        part,
        inputs=(*part.inputs, Source(SourceKind.PADDING)),
        module=fx.GraphModule(part.module, graph, "Segment"),
    )
