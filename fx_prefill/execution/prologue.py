"""What an operator in a break does first, moved into the graph captured before the break.

An attention that keeps a cache first writes the rows it was given, whatever the batch looks like.
That part reads nothing live but where to write, so it may be captured at the size of the bucket,
behind the segment that made the rows; what is left of the break is the attention itself.

Note [All or none]

Either every such operator of a plan has its first part captured, or none has: what a forward has to
bring about before it starts does not depend on the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph.extract import Source, SourceKind
from ..graph.operators import operator_name
from ..graph.partition import Partition, PartitionPlan
from ..graph.symbols import Bindings, evaluate_scalar
from ..graph.verdict import TokenAxis
from .breaks import copies_of, is_view


@dataclass(frozen=True)
class Prologue:
    """The first part of an operator: ``run`` on some of its ``arguments``, by position.

    Tensors among them are rows of a bucket, ``[bucket, ...]``. ``rest`` takes the operator's place
    in the bodies of breaks.
    """

    arguments: tuple[int, ...]
    run: Callable[..., None]
    rest: Callable[..., Any]


@dataclass(frozen=True)
class Placed:
    """A prologue and what makes its arguments from the inputs of its break."""

    sources: tuple[Source, ...]
    views: Callable[..., Sequence[Any]]
    run: Callable[..., None]

    def on(self, lookup: Callable[[fx.Node], torch.Tensor], bindings: Bindings) -> None:
        """Run it, on values found by ``lookup``."""
        given = [
            evaluate_scalar(source.expr, bindings)
            if source.kind is SourceKind.SCALAR
            else lookup(source.node)  # type: ignore[arg-type]
            for source in self.sources
        ]
        self.run(*self.views(*given))


def place_prologues(
    plan: PartitionPlan, partitions: Sequence[Partition], prologues: Mapping[str, Prologue]
) -> dict[int, list[Placed]]:
    """Prologues by the index of the segment that they come behind; see Note [All or none]."""
    makers = {node: part.index for part in partitions if part.is_segment for node in part.outputs}
    placed: dict[int, list[Placed]] = {}
    for part in partitions:
        if part.is_segment:
            continue
        for node in part.nodes:
            prologue = prologues.get(operator_name(node.target))
            if prologue is None:
                continue
            found = _place(plan, part, node, prologue)
            behind = [] if found is None else [makers.get(node) for node in _values(found)]
            if found is None or not behind or None in behind:
                return {}
            last = max(index for index in behind if index is not None)
            placed.setdefault(last, []).append(found)
    return placed


def _values(placed: Placed) -> list[fx.Node]:
    values = [source for source in placed.sources if source.kind is not SourceKind.SCALAR]
    return [source.node for source in values if source.node is not None]


def _place(
    plan: PartitionPlan, part: Partition, node: fx.Node, prologue: Prologue
) -> Placed | None:
    """None where an argument is more than a view of rows, or a number of the call."""
    if node.kwargs or len(node.args) <= max(prologue.arguments):
        return None
    wanted = [node.args[position] for position in prologue.arguments]
    rows = [arg for arg in wanted if isinstance(arg, fx.Node)]
    if not all(_one_row_a_token(plan, row) for row in rows):
        return None
    placeholders = [n for n in part.module.graph.nodes if n.op == "placeholder"]
    given = {s.node: n for s, n in zip(part.inputs, placeholders, strict=True) if s.node}
    inside = {**given, **copies_of(part)}
    needed = _needed([inside[row] for row in rows], placeholders)
    if needed is None:
        return None
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for copied in part.module.graph.nodes:
        if copied in needed:
            env[copied] = graph.node_copy(copied, env.__getitem__)
    graph.output(tuple(env[inside[a]] if isinstance(a, fx.Node) else a for a in wanted))
    pairs = zip(part.inputs, placeholders, strict=True)
    sources = tuple(source for source, placeholder in pairs if placeholder in needed)
    known = plan.traced.size_symbols
    if any(s.kind is SourceKind.SCALAR and not s.expr.free_symbols <= known for s in sources):
        return None
    views = fx.GraphModule(part.module, graph, "Prologue").forward
    return Placed(sources, views, prologue.run)


def _one_row_a_token(plan: PartitionPlan, node: fx.Node) -> bool:
    axis = plan.state(node)
    return isinstance(axis, TokenAxis) and axis.dim == 0 and axis.outer == 1 and axis.plain


def _needed(wanted: Sequence[fx.Node], placeholders: Sequence[fx.Node]) -> set[fx.Node] | None:
    """What makes ``wanted``; None where that is more than looking at inputs."""
    needed: set[fx.Node] = set()
    front = list(wanted)
    while front:
        node = front.pop()
        if not (node in placeholders or is_view(node)):
            return None
        if node not in needed:
            needed.add(node)
            front.extend(node.all_input_nodes)
    return needed
