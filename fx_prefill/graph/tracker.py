"""Watches the ATen operators one node decomposes into, and carries states through them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .operators import EXPERT_FUNCTIONS
from .rules import (
    ROUTING,
    RULES,
    OpCall,
    collective,
    contents_of,
    expert_function,
    in_range,
    is_collective,
    no_host_values,
    pointwise,
)
from .symbols import SYMBOLIC, expr_of, free_symbols, is_unbacked, layout_symbols
from .verdict import (
    BreakReason,
    Contents,
    NotRowwise,
    Opaque,
    Routing,
    RoutingKind,
    State,
    TokenAxis,
    is_local,
    shape_state,
    sort_size,
)

OVERWRITTEN = Opaque(BreakReason.CROSSES_TOKENS, "sorted entries were written over in place")
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


Known = tuple[State, Contents | None]
"""What is known of a tensor: where its rows are, and what its numbers are."""


class Axes:
    """What a traced graph's sizes say about the tensors in it."""

    def __init__(self, token: sympy.Symbol | None, size_symbols: frozenset[sympy.Symbol]) -> None:
        self.token = token
        self.size_symbols = size_symbols
        self.numbers = itertools.count()

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
        misplaced = Opaque(BreakReason.UNKNOWN, f"its token axis is not where expected ({state})")
        if is_unbacked(tensor) or layout_symbols(tensor) - self.size_symbols:
            return from_shape if isinstance(from_shape, Opaque) else misplaced
        sizes = [expr_of(size) for size in tensor.shape]
        if isinstance(state, Routing):
            return None if self._fits_routing(sizes, state) else misplaced
        if isinstance(state, TokenAxis):
            others = [size for dim, size in enumerate(sizes) if dim != state.dim]
            expected = state.outer * state.inner * self.token
            if sympy.expand(
                sympy.sympify(sizes[state.dim]) - expected
            ) == 0 and self.token not in free_symbols(tuple(others)):
                return None
        return from_shape if isinstance(from_shape, Opaque) else misplaced

    def _fits_routing(self, sizes: list[Any], state: Routing) -> bool:
        if len(sizes) != 1:
            return False
        if state.kind in (RoutingKind.COUNTS, RoutingKind.ENDS):
            return bool(sizes[0] == state.num_groups)
        return bool(sympy.expand(sizes[0] - sort_size(state.by, self.token)) == 0)

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
    """Watches the ATen operators of one node and carries states through them.

    ``arguments`` are the tensors that the node reads, with what is known of each.
    """

    def __init__(
        self,
        axes: Axes,
        arguments: Sequence[tuple[torch.Tensor, Known]],
        is_rowwise: Callable[[str], bool],
    ) -> None:
        super().__init__()
        self.axes = axes
        self.is_rowwise = is_rowwise
        self.states: dict[int, State] = {}
        self.contents: dict[int, Contents] = {}
        self.in_range = True
        self._by_storage: dict[int, list[torch.Tensor]] = defaultdict(list)
        for tensor, known in arguments:
            self._know(tensor, *known)
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
        contents: Sequence[Contents | None] = [None] * len(outputs)
        opcall = self._opcall(func, named, out)
        try:
            states = self._judge(func, opcall)
            self._check(func, outputs, states)
            contents = contents_of(opcall, states)
        except NotRowwise as fault:
            self.fault = self.fault or fault
            states = [self.axes.shape_state(leaf) for leaf in outputs]
        self.in_range &= in_range(opcall)
        self._forget_written(func, named)
        for leaf, state, held in zip(outputs, states, contents, strict=True):
            self._know(leaf, state, held)
        return out

    def known(self, tensor: torch.Tensor) -> Known:
        """State and contents of a tensor, as they are now."""
        return self.states.get(id(tensor)), self.contents.get(id(tensor))

    def _know(self, tensor: torch.Tensor, state: State, held: Contents | None) -> None:
        self.states[id(tensor)] = state
        if held is not None:
            self.contents[id(tensor)] = held
        if held is not None or is_local(state):
            self._by_storage[tensor.untyped_storage()._cdata].append(tensor)

    def _opcall(self, func: Any, named: dict[str, Any], out: Any) -> OpCall:
        name = func._schema.name.rpartition("::")[2]
        short = name.rstrip("_") if func._schema.is_mutable else name
        axes = self.axes
        return OpCall(
            short,
            named,
            out,
            self.states,
            axes.token,
            axes.size_symbols,
            self.contents,
            axes.numbers,
        )

    def _forget_written(self, func: Any, named: dict[str, Any]) -> None:
        """What was known of numbers that are now others; the shape still says where rows are."""
        for written in _written(func, named):
            for tensor in self._by_storage.pop(written.untyped_storage()._cdata, ()):
                self.contents.pop(id(tensor), None)
                self.states[id(tensor)] = forgotten(self.states[id(tensor)])

    def _note(self, func: Any, named: dict[str, Any]) -> None:
        """What the operator does besides computing: randomness, writes, kernels."""
        name = func._schema.name
        self.operators.append(name)
        # A collective draws nothing, but other ranks run it too: it keeps its place.
        self.random |= torch.Tag.nondeterministic_seeded in func.tags or is_collective(name)
        short = name.rpartition("::")[2]
        self.has_kernel |= not (func.is_view or short in EMPTY)
        self.mutated.update(leaf.untyped_storage()._cdata for leaf in _written(func, named))

    def _judge(self, func: Any, opcall: OpCall) -> Sequence[State]:
        axes, named, out, short = self.axes, opcall.named, opcall.out, opcall.name
        namespace, _, name = func._schema.name.rpartition("::")
        if any(is_unbacked(leaf) for leaf in tree_leaves(out)) or (
            torch.Tag.data_dependent_output in func.tags
        ):
            raise NotRowwise(BreakReason.DATA_DEPENDENT, f"{name} makes a size from data")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotRowwise(BreakReason.RANDOM, f"{name} draws random numbers")
        if is_attention_name(namespace, name):
            raise NotRowwise(BreakReason.ATTENTION, name)
        if self.is_rowwise(func._schema.name):
            return [axes.shape_state(leaf) for leaf in opcall.outputs]
        for tensor in opcall.tensors:
            opcall.refuse_opaque(tensor)
        axes.refuse_foreign_scalars(name, named)
        if self._token_free(opcall):
            axes.refuse_token_scalars(name, named)
            if namespace == "aten":
                return [None] * len(opcall.outputs)
        routed = next(filter(None, map(opcall.routing, opcall.tensors)), None)
        if routed is not None:
            if namespace != "aten" or short not in ROUTING:
                raise opcall.crosses(f"reads {routed.kind.value} as values")
            no_host_values(opcall)
            return list(ROUTING[short](opcall))
        if is_collective(func._schema.name):
            return list(collective(opcall))
        if func._schema.name in EXPERT_FUNCTIONS:
            return list(expert_function(opcall))
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


def forgotten(state: State) -> State:
    """The state of a tensor after a write that nobody followed."""
    return OVERWRITTEN if is_local(state) else state


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


def _written(func: Any, named: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operator writes to."""
    return [
        leaf
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(named.get(argument.name))
        if isinstance(leaf, torch.Tensor)
    ]


def _scalars_in(value: Any) -> tuple[Any, ...]:
    return tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, SYMBOLIC))
