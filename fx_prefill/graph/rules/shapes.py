"""Views, permutations, joins and splits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..symbols import Expr, expr_of, free_symbols, size_exprs
from ..verdict import BreakReason, NotRowwise, State, TokenAxis, shape_state
from .base import (
    OpCall,
    for_all,
    merge_axes,
    product_of,
    refuse_axis,
    rule,
    same_expr,
    whole_quotient,
)

INT64_MAX = 2**63 - 1


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy")
def _view(call: OpCall) -> Sequence[State]:
    source = call["self"]
    axis = call.axis(source)
    if axis is None:
        return [shape_state(call.out, call.token, call.size_symbols)]
    return [_reshaped(call, axis, size_exprs(source), size_exprs(call.out))]


def _reshaped(call: OpCall, axis: TokenAxis, old: tuple[Expr, ...], new: tuple[Expr, ...]) -> State:
    """The axis after a reshape: what is before and after the tokens must stay so."""
    before = product_of(old[: axis.dim])
    after = product_of(old[axis.dim + 1 :])
    for dim, size in enumerate(new):
        if call.token not in free_symbols(size):
            continue
        if not axis.in_order:
            # Sorted entries belong to no token by their place: their dimension stays as it is.
            if (
                same_expr(size, old[axis.dim])
                and same_expr(product_of(new[:dim]), before)
                and same_expr(product_of(new[dim + 1 :]), after)
            ):
                return axis.at(dim)
            break
        outer = whole_quotient(before * axis.outer, product_of(new[:dim]))
        inner = whole_quotient(axis.inner * after, product_of(new[dim + 1 :]))
        if outer is not None and inner is not None and same_expr(outer * inner * call.token, size):
            return TokenAxis(dim, outer, inner)
        break
    raise call.crosses(f"folds the token axis with features ({old} -> {new})")


@rule("view.dtype", "view_as_real", "view_as_complex")
def _view_last(call: OpCall) -> Sequence[State]:
    axis = call.axis(call["self"])
    if axis is not None and axis.dim == call["self"].dim() - 1:
        raise call.crosses("reinterprets the token axis")
    return [axis]


@rule("expand")
def _expand(call: OpCall) -> Sequence[State]:
    axis = call.axis(call["self"])
    if axis is None:
        return [shape_state(call.out, call.token, call.size_symbols)]
    return [axis.at(call.out.dim() - call["self"].dim() + axis.dim)]


@rule("permute")
def _permute(call: OpCall) -> Sequence[State]:
    axis, rank = call.axis(call["self"]), call["self"].dim()
    if axis is None:
        return [None]
    return [axis.at([dim % rank for dim in call["dims"]].index(axis.dim))]


@rule("transpose", "t", "numpy_T", "mT")
def _transpose(call: OpCall) -> Sequence[State]:
    axis, rank = call.axis(call["self"]), call["self"].dim()
    if axis is None:
        return [None]
    first, second = call["dim0"], call["dim1"]
    if first is None:
        first, second = (0, 1) if rank == 2 else (0, 0)
    swap = {first % rank: second % rank, second % rank: first % rank}
    return [axis.at(swap.get(axis.dim, axis.dim))]


@rule("unsqueeze")
def _unsqueeze(call: OpCall) -> Sequence[State]:
    axis = call.axis(call["self"])
    if axis is None:
        return [None]
    at = call["dim"] % call.out.dim()
    return [axis.at(axis.dim + (at <= axis.dim))]


@rule("squeeze")
def _squeeze(call: OpCall) -> Sequence[State]:
    source = call["self"]
    axis = call.axis(source)
    if axis is None:
        return [None]
    wanted = call["dim"]
    rank = source.dim()
    dims = range(rank) if wanted is None else [wanted] if isinstance(wanted, int) else wanted
    gone = [dim % rank for dim in dims if size_exprs(source)[dim % rank] == 1]
    return [axis.at(axis.dim - sum(dim < axis.dim for dim in gone))]


@rule("slice")
def _slice(call: OpCall) -> Sequence[State]:
    source = call["self"]
    axis = call.axis(source)
    dim = (call["dim"] or 0) % source.dim()
    start, end, step = (expr_of(call[name]) for name in ("start", "end", "step"))
    whole = start in (None, 0) and step in (None, 1)
    if axis is None:
        # A fixed table cut to the token count: row i is the table's row i.
        state = shape_state(call.out, call.token, call.size_symbols)
        if isinstance(state, TokenAxis) and not (whole and state.dim == dim):
            raise call.crosses("cuts a table at an offset")
        if state is None and free_symbols((call["start"], call["end"])):
            raise NotRowwise(BreakReason.HOST_SCALAR, "aten.slice at a bound that changes")
        return [state]
    if dim == axis.dim:
        if not (whole and (end is None or end == INT64_MAX or end == size_exprs(source)[dim])):
            raise call.crosses("takes part of the token axis")
    elif free_symbols((call["start"], call["end"])):
        raise NotRowwise(BreakReason.HOST_SCALAR, "aten.slice at a bound that changes")
    return [axis]


@rule("select", "unbind")
def _select(call: OpCall) -> Sequence[State]:
    source = call["self"]
    axis = call.axis(source)
    dim = (call["dim"] or 0) % source.dim()
    refuse_axis(call, axis, [dim], "picks along the token axis")
    if axis is None:
        return for_all(call, None)
    return for_all(call, axis.at(axis.dim - (dim < axis.dim)))


@rule("split", "split_with_sizes", "chunk", "tensor_split")
def _split(call: OpCall) -> Sequence[State]:
    source = call["self"]
    axis = call.axis(source)
    refuse_axis(call, axis, [(call["dim"] or 0) % source.dim()], "splits the token axis")
    if axis is None and any(free_symbols(out) - call.size_symbols for out in call.outputs):
        raise NotRowwise(BreakReason.HOST_SCALAR, "aten.split at a size that changes")
    return for_all(call, axis)


@rule("flip", "roll")
def _flip(call: OpCall) -> Sequence[State]:
    axis, rank = call.axis(call["self"]), call["self"].dim()
    dims = [dim % rank for dim in call["dims"] or range(rank)]
    refuse_axis(call, axis, dims, "moves rows along the token axis")
    return [axis]


@rule("constant_pad_nd")
def _pad(call: OpCall) -> Sequence[State]:
    axis, rank = call.axis(call["self"]), call["self"].dim()
    pad = list(call["pad"])
    padded = [rank - 1 - i // 2 for i, width in enumerate(pad) if width != 0]
    refuse_axis(call, axis, padded, "pads the token axis")
    return [axis]


@rule("repeat")
def _repeat(call: OpCall) -> Sequence[State]:
    axis = call.axis(call["self"])
    repeats = [expr_of(count) for count in call["repeats"]]
    if axis is None:
        return [shape_state(call.out, call.token, call.size_symbols)]
    dim = len(repeats) - call["self"].dim() + axis.dim
    if not axis.in_order and repeats[dim] != 1:
        raise call.crosses("repeats sorted entries")
    if free_symbols(tuple(call["repeats"])) - call.size_symbols or call.token in free_symbols(
        tuple(call["repeats"])
    ):
        raise NotRowwise(BreakReason.HOST_SCALAR, "aten.repeat by a count that changes")
    return [TokenAxis(dim, repeats[dim] * axis.outer, axis.inner, axis.order)]


@rule("cat")
def _cat(call: OpCall) -> Sequence[State]:
    parts = [t for t in call["tensors"] if not _is_empty(t)]
    if not parts:
        return [None]
    dim = (call["dim"] or 0) % parts[0].dim()
    axis = merge_axes(call, parts[0].dim(), parts)
    if axis is not None and axis.dim == dim and len(parts) > 1:
        raise call.crosses("joins along the token axis")
    return [axis]


def _is_empty(tensor: torch.Tensor) -> bool:
    return any(size == 0 for size in size_exprs(tensor))


@rule("stack")
def _stack(call: OpCall) -> Sequence[State]:
    parts = call["tensors"]
    axis = merge_axes(call, parts[0].dim(), parts)
    if axis is None:
        return [None]
    at = (call["dim"] or 0) % call.out.dim()
    return [axis.at(axis.dim + (at <= axis.dim))]
