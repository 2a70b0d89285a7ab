"""Watches the ATen operators one node decomposes into, and carries states through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .rules import RULES, OpCall, no_host_values, pointwise
from .symbols import SYMBOLIC, expr_of, free_symbols, is_unbacked, layout_symbols
from .verdict import BreakReason, NotRowwise, Opaque, State, TokenAxis, shape_state

EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class Axes:
    """What a traced graph's sizes say about the tensors in it."""

    def __init__(self, token: sympy.Symbol | None, size_symbols: frozenset[sympy.Symbol]) -> None:
        self.token = token
        self.size_symbols = size_symbols

    def shape_state(self, tensor: torch.Tensor) -> State:
        """State of a tensor judged by its shape alone."""
        return shape_state(tensor, self.token, self.size_symbols)

    def contradiction(self, tensor: torch.Tensor, state: State) -> Opaque | None:
        """Why ``state`` cannot be that of ``tensor``, judging by its shape; None if it can."""
        if isinstance(state, Opaque):
            return state
        from_shape = self.shape_state(tensor)
        if from_shape == state:
            return None
        if isinstance(state, TokenAxis) and isinstance(from_shape, Opaque):
            sizes = [expr_of(size) for size in tensor.shape]
            others = [size for dim, size in enumerate(sizes) if dim != state.dim]
            flattened = sympy.expand(sympy.sympify(sizes[state.dim]) - state.outer * self.token)
            if flattened == 0 and self.token not in free_symbols(tuple(others)):
                return None
        if isinstance(from_shape, Opaque):
            return from_shape
        return Opaque(BreakReason.UNKNOWN, f"its token axis is not where expected ({state})")

    def refuse_foreign_scalars(self, name: str, named: dict[str, Any]) -> None:
        """A number that changes between calls may not be baked into a capture."""
        for argument, value in named.items():
            foreign = free_symbols(_scalars_in(value)) - self.size_symbols
            if foreign:
                names = ", ".join(sorted(map(str, foreign)))
                raise NotRowwise(BreakReason.HOST_SCALAR, f"{name} depends on {names} ({argument})")

    def refuse_token_scalars(self, name: str, named: dict[str, Any]) -> None:
        """The token count used as a value by an operator without a token axis."""
        for argument, value in named.items():
            if self.token is not None and self.token in free_symbols(_scalars_in(value)):
                raise NotRowwise(
                    BreakReason.HOST_SCALAR, f"{name} uses the token count as a value ({argument})"
                )


class RowTracker(TorchDispatchMode):
    """Watches the ATen operators of one node and carries states through them."""

    def __init__(
        self, axes: Axes, states: dict[int, State], is_rowwise: Callable[[str], bool]
    ) -> None:
        super().__init__()
        self.axes = axes
        self.is_rowwise = is_rowwise
        self.states = states
        self.fault: NotRowwise | None = None
        self.random = False
        self.has_kernel = False
        self.mutated: set[int] = set()
        self.operators: list[str] = []
        self._alive: list[Any] = []  # ids are only unique while the tensors live

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if _is_query(func, out):
            return out
        self._alive.append((args, kwargs, out))
        named = _bind(func, args, kwargs)
        self._note(func, named)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        try:
            states = self._judge(func, named, out)
            self._check(func, outputs, states)
        except NotRowwise as fault:
            self.fault = self.fault or fault
            states = [self.axes.shape_state(leaf) for leaf in outputs]
        for leaf, state in zip(outputs, states, strict=True):
            self.states[id(leaf)] = state
        return out

    def _note(self, func: Any, named: dict[str, Any]) -> None:
        """What the operator does besides computing: randomness, writes, kernels."""
        name = func._schema.name
        self.operators.append(name)
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        short = name.rpartition("::")[2]
        self.has_kernel |= not (func.is_view or short in EMPTY)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in tree_leaves(named.get(argument.name)):
                    if isinstance(leaf, torch.Tensor):
                        self.mutated.add(leaf.untyped_storage()._cdata)

    def _judge(self, func: Any, named: dict[str, Any], out: Any) -> Sequence[State]:
        axes = self.axes
        namespace, _, name = func._schema.name.rpartition("::")
        short = name.rstrip("_") if func._schema.is_mutable else name
        if any(is_unbacked(leaf) for leaf in tree_leaves(out)) or (
            torch.Tag.data_dependent_output in func.tags
        ):
            raise NotRowwise(BreakReason.DATA_DEPENDENT, f"{name} makes a size from data")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotRowwise(BreakReason.RANDOM, f"{name} draws random numbers")
        opcall = OpCall(short, named, out, self.states, axes.token, axes.size_symbols)
        if is_attention_name(namespace, name):
            raise NotRowwise(BreakReason.ATTENTION, name)
        if self.is_rowwise(func._schema.name):
            return [axes.shape_state(leaf) for leaf in opcall.outputs]
        for tensor in opcall.tensors:
            opcall.axis(tensor)  # refuses one whose shape could not be placed
        axes.refuse_foreign_scalars(name, named)
        if self._token_free(opcall):
            axes.refuse_token_scalars(name, named)
            if namespace == "aten":
                return [None] * len(opcall.outputs)
        if namespace == "aten":
            found = RULES.get(f"{short}.{func._overloadname}") or RULES.get(short)
            if found is None and torch.Tag.pointwise in func.tags:
                found = pointwise
            if found is not None:
                no_host_values(opcall)
                return list(found(opcall))
        raise NotRowwise(BreakReason.UNKNOWN, f"{namespace}.{name}")

    def _token_free(self, opcall: OpCall) -> bool:
        token = self.axes.token
        return all(self.states.get(id(t)) is None for t in opcall.tensors) and (
            token is None or not any(token in layout_symbols(out) for out in opcall.outputs)
        )

    def _check(self, func: Any, outputs: list[torch.Tensor], states: Sequence[State]) -> None:
        """A rule may not claim an axis that the shape contradicts."""
        for leaf, state in zip(outputs, states, strict=True):
            problem = self.axes.contradiction(leaf, state)
            if problem is not None:
                raise NotRowwise(problem.reason, f"{func._schema.name}: {problem.detail}")


def _is_query(func: Any, out: Any) -> bool:
    """Whether an operator only asks for a size, a device and the like, known without any data."""
    return (
        out is not None
        and not func._schema.is_mutable
        and torch.Tag.data_dependent_output not in func.tags
        and not any(
            isinstance(leaf, torch.Tensor) or is_unbacked(leaf) for leaf in tree_leaves(out)
        )
    )


def is_attention_name(namespace: str, name: str) -> bool:
    """Whether an ATen operator is one of the fused attentions."""
    return namespace == "aten" and "attention" in name


def _bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by schema name, defaults included."""
    named: dict[str, Any] = {}
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            named[argument.name] = args[position]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        else:
            named[argument.name] = argument.default_value
    return named


def _scalars_in(value: Any) -> tuple[Any, ...]:
    return tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, SYMBOLIC))
