"""Symbolic sizes as sympy expressions: reading, testing and evaluating them.

Dynamo names a SymInt placeholder ``s77`` while its expression may be ``s70``; everything here
reads ``.node.expr``, which follows the equalities found while tracing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

Expr = Any
"""A sympy expression or a plain int."""

Bindings = Mapping[sympy.Symbol, int]

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def expr_of(value: Any) -> Expr:
    """The sympy expression of a symbolic scalar; plain numbers pass through."""
    return value.node.expr if isinstance(value, SYMBOLIC) else value


def size_exprs(tensor: torch.Tensor) -> tuple[Expr, ...]:
    """Sizes of a (fake) tensor as expressions."""
    return tuple(expr_of(size) for size in tensor.shape)


def stride_exprs(tensor: torch.Tensor) -> tuple[Expr, ...]:
    """Strides of a (fake) tensor as expressions, in elements.

    The stride of a dimension of size 1 addresses nothing: whatever it was (``buffer[:, :n]`` has
    that of the buffer), it is given as that of a contiguous tensor.
    """
    strides: list[Expr] = [expr_of(stride) for stride in tensor.stride()]
    sizes = size_exprs(tensor)
    for dim in reversed(range(len(sizes))):
        if sizes[dim] == 1:
            last = dim + 1 == len(sizes)
            strides[dim] = 1 if last else sizes[dim + 1] * strides[dim + 1]
    return tuple(strides)


def free_symbols(value: Any) -> frozenset[sympy.Symbol]:
    """Symbols in a scalar, a tensor's sizes, or any sequence of those."""
    if isinstance(value, torch.Tensor):
        return free_symbols(value.shape)
    if isinstance(value, (list, tuple)):
        return frozenset().union(*(free_symbols(item) for item in value))
    expr = expr_of(value)
    return frozenset(expr.free_symbols) if isinstance(expr, sympy.Basic) else frozenset()


def layout_symbols(tensor: torch.Tensor) -> frozenset[sympy.Symbol]:
    """Symbols in a tensor's sizes and strides."""
    return free_symbols((size_exprs(tensor), stride_exprs(tensor)))


def is_unbacked(value: Any) -> bool:
    """Whether a scalar or tensor size depends on data, not on input shapes."""
    if isinstance(value, torch.Tensor):
        return any(is_unbacked(size) for size in value.shape)
    return isinstance(value, SYMBOLIC) and bool(free_unbacked_symbols(value))


def is_scalar(value: Any) -> bool:
    """Whether a node's value is a number the host knows, symbolic or not."""
    return isinstance(value, (int, float, bool, *SYMBOLIC))


def substitute(expr: Expr, bindings: Bindings) -> Any:
    """Value of ``expr`` with ``bindings`` put in; still symbolic where one is missing."""
    if not isinstance(expr, sympy.Basic):
        return expr
    return expr.xreplace({symbol: sympy.Integer(n) for symbol, n in bindings.items()})


def evaluate(expr: Expr, bindings: Bindings) -> int:
    """Integer value of ``expr``; raises TypeError when a symbol is unbound."""
    return int(substitute(expr, bindings))


def evaluate_scalar(expr: Expr, bindings: Bindings) -> Any:
    """Python bool, int or float for ``expr``."""
    value = substitute(expr, bindings)
    if isinstance(value, sympy.logic.boolalg.BooleanAtom):
        return bool(value)
    if isinstance(value, sympy.Basic):
        return int(value) if value.is_Integer else float(value)
    return value


def evaluate_sizes(exprs: Iterable[Expr], bindings: Bindings) -> tuple[int, ...]:
    """Concrete sizes or strides under ``bindings``."""
    return tuple(evaluate(expr, bindings) for expr in exprs)


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes, and strides in elements."""


def layout_at(tensor: torch.Tensor, bindings: Bindings) -> Layout:
    """Sizes and strides of a (fake) tensor under ``bindings``."""
    sizes = evaluate_sizes(size_exprs(tensor), bindings)
    return sizes, evaluate_sizes(stride_exprs(tensor), bindings)
