"""Look-ups and scatters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..verdict import BreakReason, NotRowwise, State
from .base import OpCall, merge_axes, refuse_axis, rule


@rule("embedding")
def _embedding(call: OpCall) -> Sequence[State]:
    if call.axis(call["weight"]) is not None:
        raise call.crosses("looks rows up in a token-shaped table")
    return [call.axis(call["indices"])]


@rule("index_select")
def _index_select(call: OpCall) -> Sequence[State]:
    source, index = call.axis(call["self"]), call.axis(call["index"])
    dim = call["dim"] % call["self"].dim()
    if source is None:
        return [None if index is None else index.at(dim)]
    if index is not None or source.dim == dim:
        raise call.crosses("picks rows along the token axis")
    return [source]


@rule("index", "_unsafe_index")
def _index(call: OpCall) -> Sequence[State]:
    source, indices = call["self"], call["indices"]
    where = [dim for dim, index in enumerate(indices) if index is not None]
    if any(indices[dim].dtype in (torch.bool, torch.uint8) for dim in where):
        raise NotRowwise(BreakReason.DATA_DEPENDENT, "aten.index by a mask")
    rank = max(indices[dim].dim() for dim in where)
    picked = merge_axes(call, rank, [indices[dim] for dim in where])
    axis = call.axis(source)
    if axis is None and picked is None:
        return [None]
    if where != list(range(where[0], where[0] + len(where))):
        raise NotRowwise(BreakReason.UNKNOWN, "aten.index with separated index tensors")
    if axis is None and picked is not None:
        return [picked.at(where[0] + picked.dim)]
    if axis is None or picked is not None or axis.dim in where:
        raise call.crosses("picks rows along the token axis")
    moved = axis.dim if axis.dim < where[0] else axis.dim - len(where) + rank
    return [axis.at(moved)]


@rule("gather")
def _gather(call: OpCall) -> Sequence[State]:
    source, index = call.axis(call["self"]), call.axis(call["index"])
    dim = call["dim"] % max(call["self"].dim(), 1)
    if source is None and (index is None or index.dim == dim):
        return [index]
    if source != index or (source is not None and source.dim == dim):
        raise call.crosses("picks rows along the token axis")
    return [source]


@rule("scatter", "scatter_add", "scatter_reduce")
def _scatter(call: OpCall) -> Sequence[State]:
    axis = call.axis(call["self"])
    dim = call["dim"] % max(call["self"].dim(), 1)
    refuse_axis(call, axis, [dim], "writes along the token axis")
    for operand in (call["index"], call["src"]):
        if isinstance(operand, torch.Tensor) and call.axis(operand) != axis:
            raise call.crosses("writes operands whose token axes do not line up")
    return [axis]
