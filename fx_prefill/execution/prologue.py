"""What an operator in a break does first, moved into the graph captured before the break.

An attention that keeps a cache first writes the rows it was given, whatever the batch looks like.
That part reads nothing live but where to write, so it may be captured at the size of the bucket,
behind the segment that made the rows; what is left of the break is the attention itself.

Note [All or none]

Either every such operator of a plan has its first part captured, or none has: what a forward has to
bring about before it starts does not depend on the layer.

Note [Earlier than it stands]

A captured first part runs before everything that stands between its segment and its operator. So
none of that may have an effect, other such operators excepted; and those that write to one place
write the same rows, whichever is first.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph.causal import CHOSEN
from ..graph.extract import Source, SourceKind
from ..graph.normalize import value_of
from ..graph.operators import operator_name
from ..graph.partition import Partition, PartitionPlan
from ..graph.symbols import Bindings, evaluate_scalar
from ..graph.verdict import TokenAxis
from .breaks import copies_of, is_view


@dataclass(frozen=True)
class Prologue:
    """The first part of an operator: ``run`` on some of its ``arguments``, by position.

    Tensors among them are rows of a bucket, ``[bucket, ...]``; the one numbered ``place`` says
    where they are written. ``rest`` takes the operator's place in the bodies of breaks.
    """

    arguments: tuple[int, ...]
    place: int
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
    written: dict[Any, list[Any]] = {}
    for position, part in enumerate(partitions):
        for node in () if part.is_segment else part.nodes:
            prologue = prologues.get(operator_name(node.target))
            if prologue is None:
                continue
            found = _place(plan, part, node, prologue)
            behind = [] if found is None else [makers.get(value) for value in _values(found)]
            if found is None or not behind or None in behind:
                return {}
            last = max(index for index in behind if index is not None)
            passed = _passed(partitions[:position], last, part, node)
            if not all(_no_effect(plan, other, prologues) for other in passed):
                return {}
            given = [node.args[i] for i in prologue.arguments]
            if written.setdefault(given[prologue.place], given) != given:
                return {}
            placed.setdefault(last, []).append(found)
    return placed


def _passed(
    before: Sequence[Partition], segment: int, part: Partition, node: fx.Node
) -> list[fx.Node]:
    """What an operator's first part comes before; Note [Earlier than it stands]."""
    behind = [other.index for other in before].index(segment) + 1
    early = part.nodes[: part.nodes.index(node)]
    return [*(passed for other in before[behind:] for passed in other.nodes), *early]


def _no_effect(plan: PartitionPlan, node: fx.Node, prologues: Mapping[str, Prologue]) -> bool:
    if operator_name(node.target) in prologues:
        return True
    # What returns nothing is there for an effect that no schema has to say.
    return plan.verdicts[node].pure and value_of(node) is not None


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
    if isinstance(wanted[prologue.place], fx.Node) or not all(
        _one_row_a_token(plan, row) for row in rows
    ):
        return None
    placeholders = [n for n in part.module.graph.nodes if n.op == "placeholder"]
    given = {s.node: n for s, n in zip(part.inputs, placeholders, strict=True) if s.node}
    copies = copies_of(part)
    inside = {**given, **copies}
    looks = {copies[node] for node in part.nodes if _only_looks(plan, node)}
    needed = _needed([inside[row] for row in rows], {*placeholders, *looks})
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
    if not all(_is_known(plan, source) for source in sources):
        return None
    views = fx.GraphModule(part.module, graph, "Prologue").forward
    return Placed(sources, views, prologue.run)


def _is_known(plan: PartitionPlan, source: Source) -> bool:
    """Whether a segment may have made it, or the sizes of a call give it."""
    if source.kind is SourceKind.SCALAR:
        return bool(source.expr.free_symbols <= plan.traced.size_symbols)
    return source.kind is SourceKind.VALUE


def _one_row_a_token(plan: PartitionPlan, node: fx.Node) -> bool:
    axis = plan.state(node)
    return isinstance(axis, TokenAxis) and axis.dim == 0 and axis.outer == 1 and axis.plain


def _only_looks(plan: PartitionPlan, node: fx.Node) -> bool:
    """Whether a node of a break looks at each row alone, so that it may see a whole bucket."""
    verdict = plan.verdicts[node]
    return is_view(node) and verdict.reason in CHOSEN and verdict.pure


def _needed(wanted: Sequence[fx.Node], allowed: Container[fx.Node]) -> set[fx.Node] | None:
    """What makes ``wanted``; None where that is more than what is ``allowed``."""
    needed: set[fx.Node] = set()
    front = list(wanted)
    while front:
        node = front.pop()
        if node not in allowed:
            return None
        if node not in needed:
            needed.add(node)
            front.extend(node.all_input_nodes)
    return needed
