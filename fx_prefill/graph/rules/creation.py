"""Tensors made from sizes."""

from __future__ import annotations

from collections.abc import Sequence

from ..symbols import SYMBOLIC, expr_of, free_symbols
from ..verdict import BreakReason, NotRowwise, State, shape_state
from .base import OpCall, rule


@rule(
    *(
        "full zeros ones empty new_zeros new_ones new_full new_empty empty_strided "
        "new_empty_strided scalar_tensor"
    ).split()
)
def _create(call: OpCall) -> Sequence[State]:
    return [shape_state(call.out, call.token, call.size_symbols)]


@rule(*["empty_like", "zeros_like", "ones_like", "full_like"])
def _create_like(call: OpCall) -> Sequence[State]:
    return [call.axis(call["self"])]


@rule("arange")
def _arange(call: OpCall) -> Sequence[State]:
    if isinstance(call["start"], SYMBOLIC):
        raise NotRowwise(BreakReason.HOST_SCALAR, f"aten.arange from {expr_of(call['start'])}")
    if free_symbols(call["end"]) - call.size_symbols:
        raise NotRowwise(BreakReason.HOST_SCALAR, f"aten.arange to {expr_of(call['end'])}")
    return [shape_state(call.out, call.token, call.size_symbols)]
