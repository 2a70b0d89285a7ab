"""Makes a partition's own graph module out of nodes of the whole graph.

``torch.fx.passes.split_module`` is not used: without its ``keep_original_order`` it has emitted a
reader before an in-place writer, and its handling of SymInts and attributes has changed with every
release. What is needed here is small, and needs the order given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import sympy
import torch
from torch import fx

from ..errors import GraphError
from .autocast import copy_under_autocast
from .normalize import value_of
from .symbols import Bindings, Expr, evaluate_scalar, expr_of, is_scalar
from .trace import Role, TracedGraph
from .verdict import Kind, Verdict

CONSTANT = "fx_prefill_constant"


class SourceKind(Enum):
    """Where a value comes from when the plan runs."""

    ARGUMENT = "argument"
    """Argument ``index`` of the call: a live tensor, or a weight."""

    CONSTANT = "constant"
    """A tensor that belongs to the graph."""

    SCALAR = "scalar"
    """A number computed from the sizes of the call."""

    VALUE = "value"
    """A result of another partition."""

    PADDING = "padding"
    """A bool vector on the device: true for the padded rows of the bucket."""


@dataclass(frozen=True)
class Source:
    """One input of a partition, or one result of the graph."""

    kind: SourceKind
    node: fx.Node | None = None
    index: int = -1
    expr: Expr = None
    constant: torch.Tensor | None = None
    static: bool = False

    def value(self, args: Sequence[Any], sizes: Bindings) -> Any:
        """What needs no memory of ours: a number at given sizes, a weight, a constant."""
        if self.kind is SourceKind.SCALAR:
            return evaluate_scalar(self.expr, sizes)
        return self.constant if self.kind is SourceKind.CONSTANT else args[self.index]

    @staticmethod
    def of(traced: TracedGraph, verdicts: dict[fx.Node, Verdict], node: fx.Node) -> Source:
        """Where the value of ``node`` comes from, seen from outside its partition."""
        value = value_of(node)
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            index = traced.position[node]
            static = traced.roles[index] is Role.STATIC
            return Source(SourceKind.ARGUMENT, node, index=index, static=static)
        if node.op == "get_attr":
            tensor = _attribute(traced.module, node)
            return Source(SourceKind.CONSTANT, node, constant=tensor, static=True)
        if verdicts[node].kind is Kind.CONSTANT:
            return Source(SourceKind.CONSTANT, node, constant=_literal(node), static=True)
        if is_scalar(value) and verdicts[node].kind in (Kind.HOST, Kind.SOURCE):
            return Source(SourceKind.SCALAR, node, expr=expr_of(value))
        return Source(SourceKind.VALUE, node)


def _literal(node: fx.Node) -> torch.Tensor:
    """The tensor of a ``torch.tensor`` node: one for all its readers."""
    if CONSTANT not in node.meta:
        node.meta[CONSTANT] = torch.tensor(*node.args, **node.kwargs)  # type: ignore[arg-type]
    return node.meta[CONSTANT]


def _attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    owner: Any = module
    for part in str(node.target).split("."):
        owner = getattr(owner, part)
    return owner


def extract(
    traced: TracedGraph,
    verdicts: dict[fx.Node, Verdict],
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    is_segment: bool,
) -> tuple[tuple[Source, ...], fx.GraphModule]:
    """Sources of the inputs, and a module from those inputs to a tuple of ``outputs``.

    Static inputs come first, then tensors, then numbers, each in order of first use, so that
    equal segments of different layers have equal modules.
    """
    inside = set(nodes)
    graph = fx.Graph()
    root = torch.nn.Module()
    sources = _collect(traced, verdicts, nodes, inside)
    env: dict[fx.Node, Any] = {}
    scalars: dict[Any, fx.Node] = {}
    for position, source in enumerate(sources):
        placeholder = graph.placeholder(f"arg{position}")
        assert source.node is not None
        placeholder.meta["example_value"] = placeholder.meta["val"] = value_of(source.node)
        if source.kind is SourceKind.SCALAR:
            scalars[source.expr] = placeholder
        else:
            env[source.node] = placeholder

    def resolve(arg: fx.Node) -> Any:
        return _resolve(arg, env, scalars, traced, root, graph)

    def copy(node: fx.Node) -> None:
        env[node] = graph.node_copy(node, resolve)

    copy_under_autocast(graph, nodes, copy)
    graph.output(tuple(env[node] for node in outputs))
    graph.lint()
    module = fx.GraphModule(root, graph, "Segment" if is_segment else "Break")
    return tuple(sources), module


def _collect(
    traced: TracedGraph,
    verdicts: dict[fx.Node, Verdict],
    nodes: Sequence[fx.Node],
    inside: set[fx.Node],
) -> list[Source]:
    found: dict[Any, Source] = {}
    for node in nodes:
        for arg in node.all_input_nodes:
            if arg in inside or _is_submodule(traced, arg):
                continue
            for source in _sources_of(traced, verdicts, arg):
                key = source.expr if source.kind is SourceKind.SCALAR else source.node
                found.setdefault(key, source)
    return sorted(found.values(), key=_rank)


def _rank(source: Source) -> int:
    """Static, then tensors, then numbers. A layer's residual is an argument of the call in the
    first layer and a value in the others: the two rank alike, so that their segments are equal."""
    if source.static:
        return 0
    return 2 if source.kind is SourceKind.SCALAR else 1


def _sources_of(
    traced: TracedGraph, verdicts: dict[fx.Node, Verdict], arg: fx.Node
) -> list[Source]:
    value = value_of(arg)
    if isinstance(value, (torch.Size, tuple, list)) and verdicts[arg].kind is Kind.HOST:
        return [
            Source(SourceKind.SCALAR, _Literal(item), expr=expr_of(item))  # type: ignore[arg-type]
            for item in value
            if _is_symbolic(item)
        ]
    source = Source.of(traced, verdicts, arg)
    if source.kind is SourceKind.SCALAR and not _is_symbolic(value):
        return []
    return [source]


class _Literal:
    """Stands for a number inside a ``torch.Size``, which has no node of its own."""

    def __init__(self, value: Any) -> None:
        self.meta = {"example_value": value}


def _is_symbolic(value: Any) -> bool:
    expr = expr_of(value)
    return isinstance(expr, sympy.Basic) and bool(expr.free_symbols)


def _is_submodule(traced: TracedGraph, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(_attribute(traced.module, node), torch.nn.Module)


def _resolve(
    arg: fx.Node,
    env: dict[fx.Node, Any],
    scalars: dict[Any, fx.Node],
    traced: TracedGraph,
    root: torch.nn.Module,
    graph: fx.Graph,
) -> Any:
    """What stands for ``arg`` inside the partition."""
    if arg in env:
        return env[arg]
    value = value_of(arg)
    if _is_submodule(traced, arg):
        name = str(arg.target).replace(".", "_")
        root.add_module(name, _attribute(traced.module, arg))
        env[arg] = graph.get_attr(name)
        return env[arg]
    if isinstance(value, (torch.Size, tuple, list)):
        return tuple(_scalar(item, scalars) for item in value)
    if is_scalar(value):
        return _scalar(value, scalars)
    raise GraphError(f"{arg.format_node()} is read by a partition but made by none")


def _scalar(value: Any, scalars: dict[Any, fx.Node]) -> Any:
    if not _is_symbolic(value):
        return evaluate_scalar(expr_of(value), {})
    return scalars[expr_of(value)]
