"""Tensors made from sizes."""

from __future__ import annotations

from collections.abc import Sequence

from ..symbols import SYMBOLIC, expr_of, free_symbols, layout_symbols, size_exprs
from ..verdict import BreakReason, NotRowwise, Opaque, State, TokenAxis, shape_state
from .base import OpCall, rule, whole_quotient


@rule(
    *(
        "full zeros ones empty new_zeros new_ones new_full new_empty empty_strided "
        "new_empty_strided scalar_tensor"
    ).split()
)
def _create(call: OpCall) -> Sequence[State]:
    return [_made(call)]


def _made(call: OpCall) -> State:
    """State of a tensor whose rows are all equal, or count: several entries a token do no harm."""
    state = shape_state(call.out, call.token, call.size_symbols)
    if not isinstance(state, Opaque) or layout_symbols(call.out) - call.size_symbols:
        return state
    sizes = size_exprs(call.out)
    dims = [dim for dim, size in enumerate(sizes) if call.token in free_symbols(size)]
    inner = whole_quotient(sizes[dims[0]], call.token) if len(dims) == 1 else None
    if inner is None or call.token in free_symbols(inner):
        return state
    return TokenAxis(dims[0], inner=inner)


@rule(*["empty_like", "zeros_like", "ones_like", "full_like"])
def _create_like(call: OpCall) -> Sequence[State]:
    return [call.axis(call["self"])]


@rule("arange")
def _arange(call: OpCall) -> Sequence[State]:
    if isinstance(call["start"], SYMBOLIC):
        raise NotRowwise(BreakReason.HOST_SCALAR, f"aten.arange from {expr_of(call['start'])}")
    if free_symbols(call["end"]) - call.size_symbols:
        raise NotRowwise(BreakReason.HOST_SCALAR, f"aten.arange to {expr_of(call['end'])}")
    return [_made(call)]
