"""The body of a break, and how its results reach the next segment.

A body that allocates its result and lets an operator write into it (``out = torch.empty_like(q);
attention(q, k, v, out)``) can be given the handoff buffer instead: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph.autocast import ENTER, EXIT
from ..graph.normalize import value_of
from ..graph.operators import operator_name, short_name
from ..graph.partition import Partition
from ..graph.symbols import Bindings, evaluate_sizes, size_exprs

ALLOCATORS = frozenset({"empty", "empty_like", "new_empty"})
RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"})
LAYOUT_READERS = frozenset(
    ["view", "view_as", "as_strided", "unflatten", "view_as_complex", "data_ptr"]
)


@dataclass(frozen=True)
class BreakBody:
    """A break's operators: ``function(*inputs, *given)`` returns the results in order.

    ``given`` holds, for each index in ``direct``, memory in which that result is to be made.
    """

    function: Callable[..., Sequence[Any]]
    direct: tuple[int, ...] = ()
    allocations: tuple[fx.Node, ...] = ()

    def memory_for(self, position: int, rows: torch.Tensor, real: Bindings) -> torch.Tensor | None:
        """``rows`` of a handoff in the shape of an allocation; None where they lie apart."""
        if not rows.is_contiguous():
            return None
        sizes = evaluate_sizes(size_exprs(value_of(self.allocations[position])), real)
        return rows.view(sizes)


def break_body(part: Partition, wanted: Sequence[int]) -> BreakBody:
    """The body of a break, with those of the ``wanted`` results given that can be."""
    direct, allocations = [], []
    for index in wanted:
        node = _allocation(part.outputs[index], part)
        if node is not None and node not in allocations:
            direct.append(index)
            allocations.append(node)
    if not direct:
        return BreakBody(part.module.forward)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(part.module.graph, env))
    last = [node for node in graph.nodes if node.op == "placeholder"]
    copies = _copies(part)
    for position, node in enumerate(allocations):
        old = env[copies[node]]
        with graph.inserting_after(last[-1]) if last else graph.inserting_before():
            last.append(graph.placeholder(f"given{position}"))
        old.replace_all_uses_with(last[-1])
        graph.erase_node(old)
    graph.lint()
    module = fx.GraphModule(part.module, graph, "Break")
    return BreakBody(module.forward, tuple(direct), tuple(allocations))


def _copies(part: Partition) -> dict[fx.Node, fx.Node]:
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
        name = short_name(node)
        if name in ALLOCATORS and operator_name(node.target) in (name, f"aten::{name}"):
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
