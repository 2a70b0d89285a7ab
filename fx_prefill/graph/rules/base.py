"""What a rule is: an operator's call in, the state of every output back.

A rule gets an :class:`OpCall` and returns the state of every output, or raises NotRowwise. Only
ATen is listed: everything above it is judged by what it decomposes into. What is not listed here
and touches the token axis is unknown, and unknown means break.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.utils._pytree import tree_leaves

from ..symbols import SYMBOLIC, Expr, expr_of, size_exprs
from ..verdict import BreakReason, Contents, NotRowwise, Opaque, Routing, State, TokenAxis


@dataclass(frozen=True)
class OpCall:
    """One ATen call with its arguments by schema name.

    ``states`` gives the state of each tensor argument by ``id``, and ``contents`` what is known
    of its numbers; ``token`` is the token symbol. ``numbers`` tells sorts apart.
    """

    name: str
    named: dict[str, Any]
    out: Any
    states: dict[int, State]
    token: sympy.Symbol | None
    size_symbols: frozenset[sympy.Symbol]
    contents: dict[int, Contents] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __getitem__(self, name: str) -> Any:
        return self.named.get(name)

    def axis(self, tensor: Any) -> TokenAxis | None:
        """Token axis of an argument; raises for one whose shape could not be placed."""
        if not isinstance(tensor, torch.Tensor):
            return None
        state = self.states.get(id(tensor))
        self.refuse_opaque(tensor)
        if isinstance(state, Routing):
            raise self.crosses(f"reads {state.kind.value} as values")
        assert not isinstance(state, Opaque)
        return state

    def refuse_opaque(self, tensor: torch.Tensor) -> None:
        """Raise for an argument whose shape could not be placed."""
        state = self.states.get(id(tensor))
        if isinstance(state, Opaque):
            raise NotRowwise(state.reason, f"aten.{self.name} reads a tensor where {state.detail}")

    def routing(self, tensor: Any) -> Routing | None:
        """The state of an argument that holds an order, group sizes or the like."""
        state = self.states.get(id(tensor))
        return state if isinstance(state, Routing) else None

    def held(self, tensor: Any) -> Contents | None:
        """What is known of an argument's numbers."""
        return self.contents.get(id(tensor))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor argument, lists flattened."""
        return _flat_tensors(self.named.values())

    @property
    def outputs(self) -> list[torch.Tensor]:
        """Every tensor in the result."""
        return _flat_tensors([self.out])

    def crosses(self, what: str) -> NotRowwise:
        """The error for an operator that mixes tokens."""
        return NotRowwise(BreakReason.CROSSES_TOKENS, f"aten.{self.name} {what}")


def _flat_tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(_flat_tensors(value))
    return found


Rule = Callable[[OpCall], Sequence[State]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule under ATen operator names (without overload or trailing underscore)."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def same_expr(expr: Expr, other: Expr) -> bool:
    return expr == other or sympy.expand(sympy.sympify(expr) - sympy.sympify(other)) == 0


def product_of(sizes: Sequence[Expr]) -> Expr:
    return math.prod(sizes, start=sympy.Integer(1))


def whole_quotient(expr: Expr, divisor: Expr) -> Expr | None:
    """``expr / divisor`` where that is whole for all sizes, else None."""
    quotient = sympy.cancel(sympy.sympify(expr) / sympy.sympify(divisor))
    numerator, denominator = sympy.fraction(quotient)
    if denominator != 1:
        return None
    return int(numerator) if numerator.is_Integer else numerator


def for_all(call: OpCall, state: State) -> list[State]:
    return [state] * len(call.outputs)


SIZE_ARGUMENTS = frozenset(
    "size shape stride repeats split_size split_sizes start end N C HxW".split()
)
"""Arguments that are sizes or bounds; the rules of their operators say what they may be."""


def no_host_values(call: OpCall) -> None:
    """Refuse a symbolic number used as a value rather than as a size, in a list or alone."""
    for name, value in call.named.items():
        for leaf in tree_leaves(value):
            if isinstance(leaf, SYMBOLIC) and name not in SIZE_ARGUMENTS:
                raise NotRowwise(
                    BreakReason.HOST_SCALAR,
                    f"aten.{call.name} uses {expr_of(leaf)} as a value ({name})",
                )


def merge_axes(call: OpCall, rank: int, tensors: Sequence[Any]) -> TokenAxis | None:
    """Common token axis of operands that broadcast to a result of ``rank`` dimensions."""
    merged: TokenAxis | None = None
    for tensor in tensors:
        axis = call.axis(tensor)
        if axis is None:
            continue
        placed = axis.at(rank - tensor.dim() + axis.dim)
        if merged is not None and placed != merged:
            raise call.crosses("combines operands whose token axes do not line up")
        merged = placed
    if merged is not None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and call.axis(tensor) is None:
                dim = merged.dim - (rank - tensor.dim())
                if dim >= 0 and size_exprs(tensor)[dim] != 1:
                    raise call.crosses("lines the token axis up with a fixed dimension")
    return merged


def pointwise(call: OpCall) -> Sequence[State]:
    """Elementwise with broadcasting."""
    rank = max((out.dim() for out in call.outputs), default=0)
    return for_all(call, merge_axes(call, rank, call.tensors))


for _name in (
    "where masked_fill copy clone _to_copy lift_fresh lift_fresh_copy alias detach "
    "contiguous to fill zero clamp lerp addcmul addcdiv positive _conj conj "
    "bitwise_not nan_to_num gelu silu relu leaky_relu elu softplus sigmoid tanh mish "
    "hardswish"
).split():
    RULES[_name] = pointwise


def refuse_axis(call: OpCall, axis: TokenAxis | None, dims: Sequence[int], what: str) -> None:
    """Raise when the token axis is one of ``dims``."""
    if axis is not None and axis.dim in dims:
        raise call.crosses(what)
