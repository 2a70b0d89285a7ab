"""Entries sorted by expert and brought back: what is row-wise as a whole though each step is not.

Note [Sorted entries]

A mixture of experts gives each token a few *entries*, one for each expert it goes to; sorts the
entries by expert; multiplies each group with its expert's weight; and puts the entries back. On
the way rows are mixed, and where a real entry stands depends on the padded ones. But work that
treats each entry alone does not care where it stands, so the whole is row-wise if

* the entries went in sorted by one sort ``p``, and come back by the inverse of that same ``p``;
* in between nothing combines two entries, nor an entry with something that is not sorted alike;
* a grouped product finds each entry in the group of its own key: the group ends count the keys of
  ``p`` itself, all of them known to name a group.

The states say so: :class:`TokenAxis` carries the sort its entries are in the ``order`` of, and
:class:`Routing` the numbers of the sort itself. Those depend on all rows, so every operator that
is not in the table below refuses to read them, and no break and no caller ever sees one (note
*Values that stay inside* in ``placement.py``). Capacity, balance losses, anything else that
*counts* entries to decide about them, reads such numbers as values and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..symbols import Expr, free_symbols, size_exprs
from ..verdict import (
    Contents,
    Routing,
    RoutingKind,
    Sorting,
    State,
    TokenAxis,
    sort_size,
)
from .base import OpCall, Rule, for_all, rule, same_expr, whole_quotient

MAX_GROUPS = 1024
"""Above it, ``histc`` in float32 might put a key into its neighbour's bin."""

ROUTING: dict[str, Rule] = {}
"""Rules for calls with a routing tensor among their arguments; no other operator may read one."""

POSITIONAL = (RoutingKind.ORDER, RoutingKind.ROW_OF, RoutingKind.INVERSE)


def _routing_rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            ROUTING[name] = function
        return function

    return register


def entries(by: Sorting, dim: int, in_order: bool) -> TokenAxis:
    """The axis of a sort's entries, before (by token) or after it (in its order)."""
    return TokenAxis(dim, by.outer, by.inner, by if in_order else None)


# --- making an order ----------------------------------------------------------------------------


@rule("sort")
def _sort(call: OpCall) -> Sequence[State]:
    source = call["self"]
    axis = call.axis(source)
    dim = (-1 if call["dim"] is None else call["dim"]) % max(source.dim(), 1)
    if axis is None or axis.dim != dim:
        return [axis, axis]
    if source.dim() != 1 or not axis.in_order:
        raise call.crosses("works along the token axis")
    held = call.held(source)
    by = Sorting(
        number=next(call.numbers),
        outer=axis.outer,
        inner=axis.inner,
        bound=held.bound if held is not None and not source.is_floating_point() else None,
        ascending=not call["descending"],
    )
    return [entries(by, 0, in_order=True), Routing(RoutingKind.ORDER, by)]


@_routing_rule("sort")
def _sort_again(call: OpCall) -> Sequence[State]:
    """``argsort`` of a permutation is its inverse."""
    order = call.routing(call["self"])
    if order is None or order.kind is not RoutingKind.ORDER or call["descending"]:
        raise call.crosses("sorts what a sort made")
    size = sort_size(order.by, call.token)
    counted = TokenAxis(0, inner=whole_quotient(size, call.token))
    return [counted, Routing(RoutingKind.INVERSE, order.by)]


@_routing_rule("floor_divide", "div")
def _row_of(call: OpCall) -> Sequence[State]:
    """``order // inner`` is the token behind each entry."""
    order, count = call.routing(call["self"]), call["other"]
    rounds_down = call.name == "floor_divide" or call["rounding_mode"] in ("floor", "trunc")
    if (
        order is None
        or order.kind is not RoutingKind.ORDER
        or not rounds_down
        or type(count) is not int
        or order.by.inner != count
    ):
        raise call.crosses("computes with the order of a sort")
    return [Routing(RoutingKind.ROW_OF, order.by)]


@_routing_rule("clone", "alias", "detach", "_to_copy")
def _same_numbers(call: OpCall) -> Sequence[State]:
    state = call.routing(call["self"])
    assert state is not None
    wide = {torch.int32, torch.int64}
    if state.kind is RoutingKind.COUNTS:
        wide |= {torch.float32, torch.float64}
    if call.out.dtype not in wide:
        raise call.crosses(f"rounds {state.kind.value}")
    return [state]


@_routing_rule("empty_like", "zeros_like", "ones_like", "full_like")
def _shaped_like(call: OpCall) -> Sequence[State]:
    state = call.routing(call["self"])
    if state is None:
        raise call.crosses("fills with a number that depends on other rows")
    return [entries(state.by, 0, in_order=False) if state.kind in POSITIONAL else None]


# --- going there and back -----------------------------------------------------------------------


@_routing_rule("index", "_unsafe_index")
def _index(call: OpCall) -> Sequence[State]:
    picked = [(dim, index) for dim, index in enumerate(call["indices"]) if index is not None]
    if len(picked) != 1:
        raise call.crosses("picks rows by several indices")
    return [_picked(call, call["self"], *picked[0])]


@_routing_rule("index_select")
def _index_select(call: OpCall) -> Sequence[State]:
    return [_picked(call, call["self"], call["dim"] % call["self"].dim(), call["index"])]


def _picked(call: OpCall, source: Any, dim: int, index: Any) -> State:
    routing = call.routing(index)
    axis = call.axis(source)
    if routing is not None:
        by = routing.by
        sorted_, unsorted = entries(by, dim, in_order=True), entries(by, dim, in_order=False)
        if routing.kind is RoutingKind.ORDER and axis == unsorted:
            return sorted_
        if routing.kind is RoutingKind.ROW_OF and axis == TokenAxis(dim, by.outer):
            return sorted_
        if routing.kind is RoutingKind.INVERSE and axis == sorted_:
            return unsorted
    raise call.crosses("picks rows by an order that is not theirs")


@_routing_rule("index_put")
def _index_put(call: OpCall) -> Sequence[State]:
    """``out[order] = x`` writes every entry once: the way back, or how an inverse is made."""
    target, values, indices = call["self"], call["values"], call["indices"]
    order = call.routing(indices[0]) if len(indices) == 1 else None
    if order is None:
        raise call.crosses("writes rows by an order that is not theirs")
    call.refuse_opaque(target)
    if order.kind is RoutingKind.ROW_OF and call["accumulate"]:
        return [_added(call, target, 0, order.by, values)]
    covers = same_expr(size_exprs(target)[0], sort_size(order.by, call.token))
    if order.kind is not RoutingKind.ORDER or call["accumulate"] or not covers:
        raise call.crosses("writes rows by an order that is not theirs")
    if _is_index(target) and _counts_to(call, values, sort_size(order.by, call.token)):
        return [Routing(RoutingKind.INVERSE, order.by)]
    if call.axis(values) != entries(order.by, 0, in_order=True) or values.dim() != target.dim():
        raise call.crosses("writes rows by an order that is not theirs")
    return [entries(order.by, 0, in_order=False)]


@_routing_rule("index_add")
def _index_add(call: OpCall) -> Sequence[State]:
    dim = call["dim"] % call["self"].dim()
    rows = call.routing(call["index"])
    if rows is None or rows.kind is not RoutingKind.ROW_OF:
        raise call.crosses("adds rows by an order that is not theirs")
    return [_added(call, call["self"], dim, rows.by, call["source"])]


def _added(call: OpCall, target: Any, dim: int, by: Sorting, values: Any) -> State:
    """Each sorted entry is added to its own token."""
    axis = TokenAxis(dim, by.outer)
    fits = call.axis(values) == entries(by, dim, in_order=True) and values.dim() == target.dim()
    if call.axis(target) != axis or not fits:
        raise call.crosses("adds rows by an order that is not theirs")
    return axis


def _is_index(tensor: Any) -> bool:
    return tensor.dim() == 1 and tensor.dtype in (torch.int32, torch.int64)


def _counts_to(call: OpCall, values: Any, size: Expr) -> bool:
    held = call.held(values)
    return held is not None and held.counting is not None and same_expr(held.counting, size)


# --- groups -------------------------------------------------------------------------------------


@rule("histc")
def _histc(call: OpCall) -> Sequence[State]:
    """The size of each group: one bin a key, over the keys of one sort."""
    held = call.held(call["self"])
    by = held.keys if held is not None else None
    bins = call["bins"]
    whole = call["min"] == 0 and call["max"] == bins - 1 and 2 <= bins <= MAX_GROUPS
    if by is None or by.bound is None or by.bound > bins or not by.ascending or not whole:
        raise call.crosses("counts over the token axis")
    return [Routing(RoutingKind.COUNTS, by, bins)]


@_routing_rule("cumsum")
def _ends(call: OpCall) -> Sequence[State]:
    counts = call.routing(call["self"])
    exact = not call.out.is_floating_point()
    if counts is None or counts.kind is not RoutingKind.COUNTS or not exact:
        raise call.crosses("adds up what depends on other rows")
    return [Routing(RoutingKind.ENDS, counts.by, counts.num_groups)]


@_routing_rule("_grouped_mm")
def _grouped_mm(call: OpCall) -> Sequence[State]:
    """Each sorted entry times the weight of its own key."""
    rows, weights, ends = call["self"], call["mat2"], call.routing(call["offs"])
    if (
        ends is None
        or ends.kind is not RoutingKind.ENDS
        or rows.dim() != 2
        or weights.dim() != 3
        or call.axis(weights) is not None
        or call["bias"] is not None
        or size_exprs(weights)[0] != ends.num_groups
        or call.axis(rows) != entries(ends.by, 0, in_order=True)
    ):
        raise call.crosses("multiplies rows in groups that are not theirs")
    return [call.axis(rows)]


def expert_function(call: OpCall) -> Sequence[State]:
    """One of ``operators.EXPERT_FUNCTIONS``: believed here, checked when it is first captured."""
    rows, experts = call["hidden_states"], [call["topk_weights"], call["topk_ids"]]
    axis = call.axis(rows)
    others = [t for t in call.tensors if t is not rows and all(t is not e for e in experts)]
    if axis != TokenAxis(0, axis.outer if axis is not None else 1) or any(
        call.axis(tensor) != axis for tensor in experts
    ):
        raise call.crosses("gets rows and experts that do not line up")
    if any(call.axis(tensor) is not None for tensor in others):
        raise call.crosses("gets a weight or a scale that is token-shaped")
    return for_all(call, axis)


# --- what numbers a tensor holds ----------------------------------------------------------------

_KEEPS_BOUND = frozenset(
    (
        "view _unsafe_view reshape _reshape_alias _reshape_copy expand permute transpose t slice "
        "select split split_with_sizes unbind squeeze unsqueeze index _unsafe_index index_select "
        "gather flip"
    ).split()
)
_COPIES = frozenset("_to_copy clone alias detach contiguous".split())


def contents_of(call: OpCall, states: Sequence[State]) -> list[Contents | None]:
    """What is known of the numbers in each output: nothing, for most operators."""
    count = len(call.outputs)
    held = call.held(call["self"])
    if call.name in ("topk", "sort"):
        return _sorted_contents(call, states)
    if call.name in ("argmax", "argmin"):
        dim = call["dim"]
        bound = (
            None
            if dim is None
            else _fixed(size_exprs(call["self"])[dim] if call["self"].dim() else 1)
        )
        return [None if bound is None else Contents(bound=bound)]
    if call.name == "arange":
        return [_counted(call)]
    if call.name == "clamp":
        return [_clamped(call, held)]
    if held is None:
        return [None] * count
    if call.name in _COPIES:
        return [held if _exact(held, call.out.dtype) else None]
    if call.name in _KEEPS_BOUND and held.bound is not None:
        return [Contents(bound=held.bound)] * count
    return [None] * count


def _sorted_contents(call: OpCall, states: Sequence[State]) -> list[Contents | None]:
    source = call["self"]
    if isinstance(states[1], Routing):
        if states[1].kind is RoutingKind.INVERSE:
            return [Contents(counting=sort_size(states[1].by, call.token)), None]
        return [Contents(bound=states[1].by.bound, keys=states[1].by), None]
    held = call.held(source)
    values = Contents(bound=held.bound) if held is not None and held.bound is not None else None
    dim = -1 if call["dim"] is None else call["dim"]
    bound = _fixed(size_exprs(source)[dim]) if source.dim() else 1
    return [values, None if bound is None else Contents(bound=bound)]


def _counted(call: OpCall) -> Contents | None:
    from_zero = call["start"] in (None, 0) and call["step"] in (None, 1)
    if not from_zero or call.out.is_floating_point():
        return None
    size = size_exprs(call.out)[0]
    return Contents(bound=_fixed(size), counting=size)


def _clamped(call: OpCall, held: Contents | None) -> Contents | None:
    low, high = call["min"], call["max"]
    if call.out.is_floating_point() or not all(x is None or type(x) is int for x in (low, high)):
        return None
    known = held.bound if held is not None else None
    if (low is None and known is None) or (low is not None and low < 0 and known is None):
        return None
    bounds = [b for b in (known, None if high is None else high + 1) if b is not None]
    if not bounds or min(bounds) < 1 or (low or 0) >= min(bounds):
        return None
    return Contents(bound=min(bounds))


def _fixed(size: Any) -> int | None:
    return None if free_symbols(size) else int(size)


def _exact(held: Contents, dtype: torch.dtype) -> bool:
    """Whether all numbers survive a cast to ``dtype``."""
    if dtype in (torch.int32, torch.int64):
        return True
    if dtype.is_floating_point and held.bound is not None:
        return held.bound <= 2 / torch.finfo(dtype).eps
    return False
