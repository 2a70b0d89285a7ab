"""The body of a break, and how its results reach the next segment.

A body that allocates its result and lets an operator write into it (``out = torch.empty_like(q);
attention(q, k, v, out)``) can be given the handoff buffer instead: nothing is copied.

Note [Views of what stays]

Most of a break's inputs are views of memory at fixed addresses. What a body does with them first
(transposing heads, cutting rows) is a view again, so it is made once for each count and not at each
call: every operator that PyTorch runs costs the host a microsecond or more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from ..graph.autocast import ENTER, EXIT
from ..graph.normalize import value_of
from ..graph.operators import operator_name, torch_name
from ..graph.partition import Partition
from ..graph.symbols import Bindings, evaluate_sizes, size_exprs

ALLOCATORS = frozenset({"empty", "empty_like", "new_empty"})
RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"})
LAYOUT_READERS = frozenset(
    ["view", "view_as", "as_strided", "unflatten", "view_as_complex", "data_ptr"]
)


VIEWS = frozenset(
    "view view_as transpose permute t swapaxes unsqueeze squeeze unflatten expand narrow select "
    "movedim chunk split unbind getitem".split()
)
PYTHON_BODIES: dict[str, Callable[..., Any]] = {}
"""Operators of this package whose body is called as it is, not through PyTorch's dispatcher."""


@dataclass(frozen=True)
class BreakBody:
    """A break's operators: ``function(*inputs, *given)`` returns the results in order.

    ``given`` holds, for each index in ``direct``, memory in which that result is to be made.
    ``views(*inputs)`` are what ``rest(*views, *given)`` needs to do the same, for inputs at fixed
    addresses; Note [Views of what stays].
    """

    function: Callable[..., Sequence[Any]]
    direct: tuple[int, ...] = ()
    allocations: tuple[fx.Node, ...] = ()
    views: Callable[..., Sequence[Any]] | None = None
    rest: Callable[..., Sequence[Any]] | None = None

    def bound(self, inputs: Sequence[Any], given: Sequence[Any]) -> Callable[[], Sequence[Any]]:
        """The body on inputs that are the same in every call."""
        if self.views is None or self.rest is None:
            return partial(self.function, *inputs, *given)
        return partial(self.rest, *self.views(*inputs), *given)

    def memory_for(self, position: int, rows: torch.Tensor, real: Bindings) -> torch.Tensor | None:
        """``rows`` of a handoff in the shape of an allocation; None where they lie apart."""
        if not rows.is_contiguous():
            return None
        sizes = evaluate_sizes(size_exprs(value_of(self.allocations[position])), real)
        return rows.view(sizes)


def break_body(
    part: Partition, wanted: Sequence[int], bodies: Mapping[str, Callable[..., Any]] = PYTHON_BODIES
) -> BreakBody:
    """The body of a break, with those of the ``wanted`` results given that can be.

    ``bodies`` are called in place of the operators with their names.
    """
    direct, allocations = [], []
    for index in wanted:
        node = _allocation(part.outputs[index], part)
        if node is not None and node not in allocations:
            direct.append(index)
            allocations.append(node)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(part.module.graph, env))
    last = [node for node in graph.nodes if node.op == "placeholder"]
    num_inputs = len(last)
    copies = copies_of(part)
    for position, node in enumerate(allocations):
        old = env[copies[node]]
        with graph.inserting_after(last[-1]) if last else graph.inserting_before():
            last.append(graph.placeholder(f"given{position}"))
        old.replace_all_uses_with(last[-1])
        graph.erase_node(old)
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = bodies.get(operator_name(node.target), node.target)
    graph.lint()
    module = fx.GraphModule(part.module, graph, "Break")
    views, rest = _split_views(module, num_inputs)
    return BreakBody(module.forward, tuple(direct), tuple(allocations), views, rest)


def _split_views(
    module: fx.GraphModule, num_inputs: int
) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """A body as the views it makes of its first inputs, and the rest; None where it makes none."""
    nodes = list(module.graph.nodes)
    early = set(nodes[:num_inputs])
    for node in nodes[num_inputs:]:
        if is_view(node) and all(given in early for given in node.all_input_nodes):
            early.add(node)
    if len(early) == num_inputs:
        return None, None
    kept = [n for n in nodes if n in early and any(user not in early for user in n.users)]
    first = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node in early:
            env[node] = first.node_copy(node, env.__getitem__)
    first.output(tuple(env[node] for node in kept))
    second = fx.Graph()
    env = {node: second.placeholder(f"view{i}") for i, node in enumerate(kept)}
    for node in nodes:
        if node not in early:
            env[node] = second.node_copy(node, env.__getitem__)
    forwards = [fx.GraphModule(module, graph, "Break").forward for graph in (first, second)]
    return forwards[0], forwards[1]


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at the memory of its inputs, whatever their layout."""
    if node.op not in ("call_function", "call_method") or torch_name(node) not in VIEWS:
        return False
    if torch_name(node) != "getitem":
        return True
    index = node.args[1]
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(part, (int, slice, type(None), type(...))) for part in parts)


def copies_of(part: Partition) -> dict[fx.Node, fx.Node]:
    """Nodes of the whole graph to their copies in the partition's own module."""
    calls = [
        node
        for node in part.module.graph.nodes
        if node.op.startswith("call") and node.target not in (ENTER, EXIT)
    ]
    return dict(zip(part.nodes, calls, strict=True))


def _allocation(node: fx.Node, part: Partition) -> fx.Node | None:
    """The node that allocates the memory of a result and leaves it to be written."""
    while node in part.nodes:
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or not value.is_contiguous():
            return None
        name = torch_name(node)
        if name in ALLOCATORS:
            return node if len(node.users) > 1 else None  # somebody has to write it
        if name not in RESHAPES:
            return None
        node = node.args[0]  # type: ignore[assignment]
    return None


def layout_is_read(part: Partition, position: int) -> bool:
    """Whether an operator of a break depends on the strides of its input at ``position``."""
    placeholder = [n for n in part.module.graph.nodes if n.op == "placeholder"][position]
    seen: set[fx.Node] = set()
    front = list(placeholder.users)
    while front:
        node = front.pop()
        if node in seen or node.op == "output":
            continue
        seen.add(node)
        if _reads_layout(node):
            return True
        front.extend(node.users)
    return False


def _reads_layout(node: fx.Node) -> bool:
    namespace, _, name = operator_name(node.target).rpartition("::")
    if namespace:
        return namespace != "aten" or name in LAYOUT_READERS
    return name in LAYOUT_READERS
