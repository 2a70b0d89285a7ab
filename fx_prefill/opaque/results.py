"""What an opaque module returns: shapes while tracing, memory of the graph's own when run.

Note [Shapes of an opaque module]

A module that works in chunks has inner sizes that depend on the number of chunks, so running it on
symbolic sizes would tie the trace to that number, which is what an opaque break avoids. Instead it
is run for real, on zeros, at three small sizes, and each size of a result must be explained by the
sizes of the arguments at all three. An entry of ``break_modules`` that says what the module
returns needs no such run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import sympy
import torch
from torch import nn
from torch._prims_common import make_contiguous_strides_for
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..errors import OpaqueModuleError

PROBES = (18, 35, 81)
"""Sizes that stand for the first unknown size of a module's arguments; later ones are a few more.

Above the widths of short convolutions, and on both sides of a chunk of 64.
"""

Recipe = Callable[[Sequence[Any]], Any]
"""A size of a result from the sizes of the arguments."""


@dataclass(frozen=True)
class _Leaf:
    """One tensor of a result."""

    recipes: tuple[Recipe, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _Made:
    """Results of a module for one form of its arguments.

    ``equal`` are pairs of sizes that have to be the same for the module to run.
    """

    leaves: tuple[_Leaf | None, ...]
    spec: Any
    equal: tuple[tuple[int, int], ...]


class FakeResults:
    """Results of one module by shape alone, worked out once for each form of its arguments."""

    def __init__(self, declared: Callable[..., Any] | None) -> None:
        self._declared = declared
        self._checked = False
        self._known: dict[Any, _Made] = {}

    def fake(
        self,
        call: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        place: int | str | None,
        states: Sequence[Any],
    ) -> tuple[Any, tuple[Any, ...]]:
        """The results on fake arguments; states that the call writes are written here too."""
        for state in tree_leaves(states):
            if isinstance(state, torch.Tensor):
                state.zero_()  # tells whoever traces that the call writes this memory
        if self._declared is not None and place is None:
            return self._declared(call.module, *args, **kwargs), ()
        leaves, spec = tree_flatten((args, kwargs, states))
        sizes = _sizes(leaves)
        key = (tuple(map(_form, leaves)), _numbered(map(_hint, sizes)), str(spec), place)
        if key not in self._known:
            self._known[key] = _find_out(call, leaves, spec, place)
        made = self._known[key]
        for i, j in made.equal:
            bool(sizes[i] == sizes[j])  # asked for, so that Dynamo guards on it
        return tree_unflatten([_make(leaf, sizes) for leaf in made.leaves], made.spec)

    def check(self, call: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Compare the first real result with what was declared. Raises OpaqueModuleError."""
        if self._declared is None or self._checked:
            return
        expected = _outline(self._declared(call.module, *args, **kwargs))
        if _outline(result) != expected:
            raise OpaqueModuleError(
                f"{type(call.module).__name__} was declared to return {expected} and returned "
                f"{_outline(result)}; correct the `result` of its BreakModule entry"
            )
        self._checked = True


def own(name: str, results: Any, given: Sequence[Any]) -> Any:
    """``results`` contiguous and in memory shared with nothing given and not with each other.

    Raises OpaqueModuleError for a result that is no tensor, None, tuple or list of them.
    """
    taken = {leaf.untyped_storage()._cdata for leaf in given if isinstance(leaf, torch.Tensor)}

    def one(value: Any) -> Any:
        if value is None:
            return None
        if type(value) in (tuple, list):
            return type(value)(one(item) for item in value)
        if not isinstance(value, torch.Tensor):
            raise OpaqueModuleError(
                f"{name.partition('#')[0]} cannot be an opaque break: it returns a "
                f"{type(value).__name__}; it may return tensors, None, and tuples or lists of them"
            )
        value = value.contiguous()
        strides = make_contiguous_strides_for(value.shape)
        if value.stride() != strides:
            # contiguous() leaves the stride of a dimension of size 1, on which Dynamo guards.
            value = value.as_strided(value.shape, strides)
        if value.untyped_storage()._cdata in taken:
            value = value.clone()
        taken.add(value.untyped_storage()._cdata)
        return value

    return one(results)


# --- running the module on zeros -----------------------------------------------------------------


def _find_out(call: Any, leaves: Sequence[Any], spec: Any, place: Any) -> _Made:
    """What the module returns for arguments of this form.

    Unknown sizes are taken to be independent of each other. Where the module cannot run like that
    (the batch of its mask must be that of its rows), those are taken to be equal that are equal in
    this call, and stand in the same dimension or else anywhere; and at last as large as a size that
    is fixed, where one of these is (rows that may have any batch, a mask that has one).
    """
    sizes = _sizes(leaves)
    places = _places(leaves)
    groupings: list[list[Any]] = [
        [_expr(size) for size in sizes],
        [(_hint(size), dim) for size, dim in zip(sizes, places, strict=True)],
        [_hint(size) for size in sizes],
    ]
    for grouping, pinning in [
        *((g, False) for g in groupings),
        *((g, True) for g in groupings[1:]),
    ]:
        groups = _grouped(sizes, grouping)
        fixed = _fixed(sizes, grouping, groups) if pinning else {}
        try:
            rounds = [_probe(call, leaves, spec, place, groups, fixed, base) for base in PROBES]
        except OpaqueModuleError:
            raise
        except Exception as error:
            failure = error
            continue
        equal = (*_equal_sizes(sizes, groups), *fixed.values())
        return _explained(call, rounds, equal)
    raise OpaqueModuleError(
        f"{type(call.module).__name__} was run on zeros to see what it returns, and failed with "
        f"{type(failure).__name__}: {failure}. Say what it returns: "
        "break_modules=[fx_prefill.BreakModule(match, result=...)]"
    ) from failure


def _probe(
    call: Any,
    leaves: Sequence[Any],
    spec: Any,
    place: Any,
    groups: dict[sympy.Symbol, int],
    fixed: dict[int, tuple[int, int]],
    base: int,
) -> tuple[list[int], list[Any], Any]:
    """Run the module once: sizes of the arguments, results, and their structure."""
    given = _sizes(leaves)
    values = {
        symbol: given[fixed[number][0]] if number in fixed else base + 2 * number
        for symbol, number in groups.items()
    }
    zeros = [_zeros(leaf, values) for leaf in leaves]
    args, kwargs, states = tree_unflatten(zeros, spec)
    sizes = _sizes(zeros)
    with _outside_the_trace(), _untouched(call.module):
        result = call.run(args, kwargs, place, states)
    return (sizes, *tree_flatten(result))


def _explained(call: Any, rounds: Sequence[Any], equal: Sequence[tuple[int, int]]) -> _Made:
    """Results whose sizes follow from those of the arguments in every round."""
    sizes = [sizes for sizes, _, _ in rounds]
    made: list[_Leaf | None] = []
    for position, tensor in enumerate(rounds[0][1]):
        if tensor is None:
            made.append(None)
            continue
        shapes = [tuple(results[position].shape) for _, results, _ in rounds]
        recipes = tuple(
            _recipe(call, sizes, [shape[dim] for shape in shapes]) for dim in range(tensor.dim())
        )
        made.append(_Leaf(recipes, tensor.dtype, tensor.device))
    return _Made(tuple(made), rounds[0][2], tuple(equal))


def _grouped(sizes: Sequence[Any], grouping: Sequence[Any]) -> dict[sympy.Symbol, int]:
    """Number of the group of each unknown size; those of one group get the same value."""
    numbers: dict[Any, int] = {}
    groups: dict[sympy.Symbol, int] = {}
    for size, group in zip(sizes, grouping, strict=True):
        expr = _expr(size)
        if isinstance(expr, sympy.Symbol):
            groups.setdefault(expr, numbers.setdefault(group, len(numbers)))
        elif isinstance(expr, sympy.Basic):
            for symbol in expr.free_symbols:
                groups.setdefault(symbol, numbers.setdefault(symbol, len(numbers)))
    return groups


def _fixed(
    sizes: Sequence[Any], grouping: Sequence[Any], groups: dict[sympy.Symbol, int]
) -> dict[int, tuple[int, int]]:
    """For each group that a fixed size belongs to: its place, and that of one of the group."""
    unknown: dict[Any, int] = {}
    for index, (size, group) in enumerate(zip(sizes, grouping, strict=True)):
        if _expr(size) in groups:
            unknown.setdefault(group, index)
    return {
        groups[_expr(sizes[unknown[group]])]: (index, unknown[group])
        for index, (size, group) in enumerate(zip(sizes, grouping, strict=True))
        if isinstance(_expr(size), int) and group in unknown
    }


def _equal_sizes(
    sizes: Sequence[Any], groups: dict[sympy.Symbol, int]
) -> Iterator[tuple[int, int]]:
    first: dict[int, int] = {}
    for index, size in enumerate(sizes):
        number = groups.get(_expr(size))
        if number is not None and first.setdefault(number, index) != index:
            yield first[number], index


def _recipe(call: Any, sizes: list[list[int]], seen: list[int]) -> Recipe:
    """How a size of a result, seen at each probe, follows from the sizes of the arguments."""
    if len(set(seen)) == 1:
        return lambda given: seen[0]
    columns = [list(column) for column in zip(*sizes, strict=True)]
    moving = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    for i in moving:
        if columns[i] == seen:
            return lambda given, i=i: given[i]  # type: ignore[misc]
    for i, j in combinations_with_replacement(moving, 2):
        if [a * b for a, b in zip(columns[i], columns[j], strict=True)] == seen:
            return lambda given, i=i, j=j: given[i] * given[j]  # type: ignore[misc]
        if [a + b for a, b in zip(columns[i], columns[j], strict=True)] == seen:
            return lambda given, i=i, j=j: given[i] + given[j]  # type: ignore[misc]
    for i in moving:
        factor, rest = divmod(seen[1] - seen[0], columns[i][1] - columns[i][0])
        offset = seen[0] - factor * columns[i][0]
        if rest == 0 and [factor * a + offset for a in columns[i]] == seen:
            return lambda given, i=i: factor * given[i] + offset  # type: ignore[misc]
    raise OpaqueModuleError(
        f"{type(call.module).__name__} cannot be an opaque break: a size of its results was "
        f"{seen} for arguments of sizes {[columns[i] for i in moving]}, which is no sum, product "
        "or multiple of them; break at a larger module whose results follow its arguments"
    )


def _make(leaf: _Leaf | None, sizes: Sequence[Any]) -> torch.Tensor | None:
    if leaf is None:
        return None
    shape = [recipe(sizes) for recipe in leaf.recipes]
    return torch.empty(shape, dtype=leaf.dtype, device=leaf.device)


def _places(leaves: Sequence[Any]) -> list[int]:
    """For every size, the dimension it is of; -1 for a number."""
    places: list[int] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            places.extend(range(leaf.dim()))
        elif isinstance(leaf, (int, torch.SymInt)) and not isinstance(leaf, bool):
            places.append(-1)
    return places


def _sizes(leaves: Sequence[Any]) -> list[Any]:
    """Every size among the arguments, in order: dimensions of tensors, and whole numbers."""
    sizes: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            sizes.extend(leaf.shape)
        elif isinstance(leaf, (int, torch.SymInt)) and not isinstance(leaf, bool):
            sizes.append(leaf)
    return sizes


def _expr(value: Any) -> Any:
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


def _hint(size: Any) -> Any:
    """The value of a size in the call that is traced; itself where nothing is known of it."""
    node = size.node if isinstance(size, torch.SymInt) else None
    return size if node is None else node.hint if node.has_hint() else str(node.expr)


def _numbered(values: Iterable[Any]) -> tuple[int, ...]:
    """Equal values by equal numbers, in order of first appearance."""
    numbers: dict[Any, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in values)


def _form(leaf: Any) -> Any:
    """What the results depend on in one argument."""
    if isinstance(leaf, torch.Tensor):
        return (tuple(_expr(size) for size in leaf.shape), leaf.dtype, leaf.device)
    return (type(leaf).__name__, _expr(leaf))


def _zeros(leaf: Any, values: dict[sympy.Symbol, int]) -> Any:
    def concrete(value: Any) -> Any:
        expr = _expr(value)
        return int(expr.subs(values)) if isinstance(expr, sympy.Basic) else value

    if isinstance(leaf, torch.Tensor):
        sizes = [concrete(size) for size in leaf.shape]
        with _outside_the_trace():
            return torch.zeros(sizes, dtype=leaf.dtype, device=leaf.device)
    return concrete(leaf)


@contextmanager
def _outside_the_trace() -> Iterator[None]:
    """Real tensors and plain eager code, although Dynamo is in the middle of tracing."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C._DisablePythonDispatcher())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Give a module back its attributes and its buffers' contents as they were."""
    attributes = [(part, _copy_of(vars(part))) for part in module.modules()]
    contents = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for part, saved in attributes:
            vars(part).clear()
            vars(part).update(saved)
        for buffer, content in contents:
            buffer.detach().copy_(content)


def _copy_of(attributes: dict[str, Any]) -> dict[str, Any]:
    own_dicts = ("_buffers", "_parameters", "_modules")
    return {name: dict(value) if name in own_dicts else value for name, value in attributes.items()}


def _outline(result: Any) -> Any:
    """Shapes, dtypes and devices of a result."""
    return tree_map(
        lambda x: (tuple(x.shape), x.dtype, x.device) if isinstance(x, torch.Tensor) else x,
        list(result) if isinstance(result, (tuple, list)) else result,
    )
