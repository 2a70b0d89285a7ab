"""Which capturable nodes run eagerly all the same, and which nodes must stay together.

The analysis says what *may* be captured. This says where capturing would be wrong or wasteful
although each node alone could be: memory written in place, the embedding gather, the vocabulary
projection, and work that only a break reads.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import fx

from .normalize import value_of
from .operators import short_name
from .rowwise import Analysis
from .rules import LOOKUPS, is_collective, starts_collective
from .symbols import is_scalar, size_exprs
from .trace import Role
from .verdict import BreakReason, Kind, Verdict
from .writes import storages

MATMULS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm")
)

GATHERS = frozenset(f"aten::{name}{suffix}" for name in LOOKUPS for suffix in ("", "_"))
BASE_READERS = frozenset(
    f"aten::{name}"
    for name in ("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")
)


@dataclass
class Placement:
    """Nodes to run, their verdicts after placement, and what ties them to each other.

    ``groups`` are sets of nodes that must share a partition; ``order`` are pairs that must keep
    their order although no data flows between them.
    """

    nodes: list[fx.Node]
    verdicts: dict[fx.Node, Verdict]
    groups: list[set[fx.Node]] = field(default_factory=list)
    order: set[tuple[fx.Node, fx.Node]] = field(default_factory=set)

    def is_break(self, node: fx.Node) -> bool:
        """Whether a node runs eagerly."""
        return self.verdicts[node].kind is Kind.BREAK

    def make_break(self, node: fx.Node, reason: BreakReason, detail: str = "") -> None:
        """Turn a capturable node into a break; a node that already is one keeps its reason."""
        verdict = self.verdicts[node]
        if verdict.kind is not Kind.BREAK:
            self.verdicts[node] = replace(verdict, kind=Kind.BREAK, reason=reason, detail=detail)


def place(analysis: Analysis) -> Placement:
    """Decide the placement of every node that has an effect on the result."""
    graph = analysis.traced.module.graph
    placement = Placement(_live_nodes(analysis), dict(analysis.verdicts))
    sources = _Sources(analysis)
    _keep_multi_results(placement)
    _take_constants(placement)
    _keep_in_place_order(placement, analysis)
    _keep_state_regions(placement)
    _keep_random_order(placement)
    _keep_collectives_whole(placement)
    _break_views_of_arguments(placement, sources)
    _break_gathers(placement)
    _keep_entries_inside(placement)
    _break_terminal_projections(placement, sources, graph)
    _break_what_only_breaks_read(placement, sources, graph)
    return placement


class _Sources:
    """Placeholders by role, and what a node reads."""

    def __init__(self, analysis: Analysis) -> None:
        pairs = zip(analysis.traced.placeholders, analysis.traced.roles, strict=True)
        self.role = dict(pairs)

    def is_static(self, node: fx.Node) -> bool:
        return node.op == "get_attr" or self.role.get(node) is Role.STATIC

    def is_live(self, node: fx.Node) -> bool:
        return self.role.get(node) is Role.LIVE


def _live_nodes(analysis: Analysis) -> list[fx.Node]:
    """Call nodes that the outputs, or memory, depend on."""
    wanted: set[fx.Node] = set()
    live = []
    for node in reversed(analysis.traced.module.graph.nodes):
        if node.op == "output":
            wanted.update(node.all_input_nodes)
            continue
        verdict = analysis.verdicts[node]
        if verdict.kind in (Kind.SOURCE, Kind.HOST):
            continue
        effect = not verdict.pure or value_of(node) is None
        if node in wanted or effect:
            wanted.update(node.all_input_nodes)
            live.append(node)
    return live[::-1]


def _keep_multi_results(placement: Placement) -> None:
    """``getitem`` stays with its producer: a tuple never crosses a boundary."""
    kept = set(placement.nodes)
    for node in placement.nodes:
        if _is_item(node) and node.target is operator.getitem:
            producer = node.args[0]
            if producer in kept:
                placement.groups.append({node, producer})  # type: ignore[arg-type]
                if placement.is_break(producer):  # type: ignore[arg-type]
                    verdict = placement.verdicts[producer]  # type: ignore[index]
                    placement.make_break(node, verdict.reason or BreakReason.UNKNOWN)


def _take_constants(placement: Placement) -> None:
    """Tensors of literals are made once, unless somebody could write to them between calls."""
    exposed: set[int] = set()
    for node in placement.nodes:
        exposed |= _written(node, placement.verdicts[node])
        if any(user.op == "output" for user in node.users):
            exposed |= storages(node)
    taken: set[fx.Node] = set()
    for node in placement.nodes:
        if placement.verdicts[node].kind is Kind.CONSTANT:
            if exposed.isdisjoint(storages(node)):
                taken.add(node)
            else:
                placement.make_break(node, BreakReason.HOST_SCALAR, "made anew in each call")
    placement.nodes[:] = [node for node in placement.nodes if node not in taken]


# --- memory written in place --------------------------------------------------------------------


def _written(node: fx.Node, verdict: Verdict) -> set[int]:
    tensors = [arg for arg in node.all_input_nodes if storages(arg)]
    return {storage for index in verdict.mutates for storage in storages(tensors[index])}


def _keep_in_place_order(placement: Placement, analysis: Analysis) -> None:
    """Note [In-place order]

    A partition's results are copied to buffers, so two partitions never share memory that one of
    them writes. Memory of the caller (a KV cache, a module buffer) that some node writes is
    touched by breaks only, in the original order. Memory of the graph that is written after it was
    made stays in one partition until its last write: makers, readers and writers are one group,
    and if one of them is a break, all are.
    """
    touching: dict[int, list[fx.Node]] = defaultdict(list)
    writers: dict[int, set[fx.Node]] = defaultdict(set)
    for node in placement.nodes:
        for storage in _written(node, placement.verdicts[node]):
            writers[storage].add(node)
        if BASE_READERS.intersection(placement.verdicts[node].operators):
            # It reads the whole memory of its argument, of which only a view would cross.
            for storage in set().union(*map(storages, node.all_input_nodes)):
                writers[storage].add(node)
        for storage in set().union(storages(node), *map(storages, node.all_input_nodes)):
            touching[storage].append(node)
    external = {
        storage
        for node, verdict in analysis.verdicts.items()
        if verdict.kind is Kind.SOURCE
        for storage in storages(node)
    }
    for storage, writing in writers.items():
        nodes = touching[storage]
        _chain(placement, nodes, writing)
        if storage in external:
            for node in nodes:
                wrote = storage in _written(node, placement.verdicts[node])
                reason = BreakReason.WRITES_MEMORY if wrote else BreakReason.ALIAS_ORDER
                placement.make_break(node, reason, "memory the graph does not own")
        else:
            last = max(nodes.index(node) for node in writing)
            placement.groups.append(set(nodes[: last + 1]))


def _chain(placement: Placement, nodes: list[fx.Node], writing: set[fx.Node]) -> None:
    """Order each write after everything before it and before everything after it."""
    since: list[fx.Node] = []
    writer: fx.Node | None = None
    for node in nodes:
        if writer is not None:
            placement.order.add((writer, node))
        if node in writing:
            placement.order.update((earlier, node) for earlier in since)
            writer, since = node, []
        else:
            since.append(node)


def _keep_random_order(placement: Placement) -> None:
    """Random draws, side effects, and what nothing is known of keep their order."""
    drawing = [
        node
        for node in placement.nodes
        if placement.verdicts[node].random
        or (value_of(node) is None and not placement.verdicts[node].mutates)
    ]
    placement.order.update(pairwise(drawing))


def _keep_state_regions(placement: Placement) -> None:
    """Calls that set interpreter state (a choice of attention kernels, say) bind what follows.

    They return nothing and read no tensor. All from the first to the last of them is one break, in
    the original order.
    """
    setters = [node for node in placement.nodes if _sets_state(node)]
    if setters:
        first = placement.nodes.index(setters[0])
        last = placement.nodes.index(setters[-1]) if len(setters) > 1 else len(placement.nodes) - 1
        region = placement.nodes[first : last + 1]
        for node in region:
            placement.make_break(node, BreakReason.STATE, short_name(setters[0]))
        placement.groups.append(set(region))
    for node in placement.nodes:
        if not _crossable(node):
            placement.groups.append({node, *(u for u in node.users if u.op != "output")})


def _keep_collectives_whole(placement: Placement) -> None:
    """A collective and the wait for its result share a partition.

    Until it has been waited for the result holds nothing: a boundary would copy that, and a
    recording cannot end before what runs beside it has come back.
    """
    kept = set(placement.nodes)
    for node in placement.nodes:
        if not starts_collective(placement.verdicts[node].operators):
            continue
        group = _until_waited(placement, node) & kept
        placement.groups.append(group)
        cause = next((n for n in placement.nodes if n in group and placement.is_break(n)), None)
        if cause is not None:
            detail = placement.verdicts[cause].detail
            for member in group:
                placement.make_break(member, BreakReason.COLLECTIVE, detail)


def _until_waited(placement: Placement, start: fx.Node) -> set[fx.Node]:
    """A collective, the waits for it, and what is done to its result before them."""
    found, front = {start}, [start]
    while front:
        for user in front.pop().users:
            if user not in placement.verdicts or user in found:
                continue
            found.add(user)
            if not any(map(is_collective, placement.verdicts[user].operators)):
                front.append(user)
    return found


def _sets_state(node: fx.Node) -> bool:
    name = short_name(node)
    checks = "assert" in name or "check" in name
    return value_of(node) is None and not checks and not any(map(storages, node.all_input_nodes))


def _crossable(node: fx.Node) -> bool:
    """Whether a value is a tensor or a number, which a boundary can carry."""
    value = value_of(node)
    return value is None or is_scalar(value) or bool(storages(node))


# --- nodes better run eagerly -------------------------------------------------------------------


def _break_views_of_arguments(placement: Placement, sources: _Sources) -> None:
    """A view of the caller's tensor that is only returned: the caller gets its own memory back."""
    for node in reversed(placement.nodes):
        source = _through_views(placement, node)
        is_view = source is not node and source.op in ("placeholder", "get_attr")
        if is_view and all(u.op == "output" or placement.is_break(u) for u in node.users):
            placement.make_break(node, BreakReason.FEEDS_BREAK, "a view of an argument")


def _break_gathers(placement: Placement) -> None:
    """Note [Indices in padded rows]

    Look-ups by token: ids, positions. An index in a padded row may be outside the table (positions
    up to a bucket larger than it, arithmetic on zeros), which is an error on a CPU and the end of
    the process on a GPU. So they run on real rows only, but for indices that are in range whatever
    the rows hold: positions that topk found, say (``rules/lookups.py``). The token embedding is
    one of these look-ups: a call with ids and one with embeddings share all segments.
    """
    for node in placement.nodes:
        if not placement.verdicts[node].in_range:
            placement.make_break(node, BreakReason.GATHER)


def _keep_entries_inside(placement: Placement) -> None:
    """Note [Values that stay inside]

    Sorted entries, several entries a token, group sizes: in a bucket these count padded rows too,
    and nothing at a boundary can take the real rows out. Makers and readers of such a value share a
    partition, and if one of them has to run eagerly, all do: on real rows they are what they are.
    """
    members: dict[fx.Node, set[fx.Node]] = {}
    for node in placement.nodes:
        if not placement.verdicts[node].local:
            continue
        group = {node}
        for other in (node, *(user for user in node.users if user.op != "output")):
            group |= members.get(other, {other})
        for other in group:
            members[other] = group
    ordered_groups: dict[int, list[fx.Node]] = defaultdict(list)
    for node in placement.nodes:
        if node in members:
            ordered_groups[id(members[node])].append(node)
    for ordered in ordered_groups.values():
        placement.groups.append(set(ordered))
        cause = next((node for node in ordered if placement.is_break(node)), None)
        shown = [node for node in ordered if any(user.op == "output" for user in node.users)]
        left = next((node for node in shown if placement.verdicts[node].local), None)
        if cause is not None:
            reason = placement.verdicts[cause].reason or BreakReason.UNKNOWN
            detail = f"its entries go through {short_name(cause)}"
        elif left is not None:
            reason, detail = BreakReason.CROSSES_TOKENS, f"{left.name} leaves the graph"
        else:
            continue
        for node in ordered:
            placement.make_break(node, reason, detail)


def _through_views(placement: Placement, node: fx.Node) -> fx.Node:
    while node.op.startswith("call") and not placement.verdicts[node].has_kernel:
        inputs = [arg for arg in node.all_input_nodes if storages(arg)]
        if not inputs:
            break
        node = inputs[0]
    return node


def _break_terminal_projections(placement: Placement, sources: _Sources, graph: fx.Graph) -> None:
    """The vocabulary projection: a product with a weight, wider than its input, only returned.

    Its result is the caller's, for real rows only: run eagerly it is written straight there, and
    logits for padded rows never exist. A product whose result joins other rows (the residual after
    the shared expert of a last layer) is not the end of a model but of a layer.
    """
    returned_only: set[fx.Node] = set()
    for node in reversed(placement.nodes):
        if node.users and all(u.op == "output" or u in returned_only for u in node.users):
            returned_only.add(node)
    last = _last_matmuls(placement, returned_only)
    tail: set[fx.Node] = set()
    for root in last:
        after = _descendants(placement, [root]) if _widens(root, sources) else set()
        if not _joins_rows(placement, after - {root}, after):
            tail |= after
    kept = [n for n in placement.nodes if n not in tail and not placement.is_break(n)]
    if any(MATMULS & set(placement.verdicts[n].operators) for n in kept):
        for node in placement.nodes:
            if node in tail:
                placement.make_break(node, BreakReason.TERMINAL)


def _joins_rows(placement: Placement, nodes: set[fx.Node], tail: set[fx.Node]) -> bool:
    return any(
        placement.verdicts[arg].token_shaped and arg not in tail
        for node in nodes
        for arg in node.all_input_nodes
    )


def _last_matmuls(placement: Placement, returned_only: set[fx.Node]) -> list[fx.Node]:
    """Matrix products that are only returned and feed no other matrix product."""
    feeds_matmul: set[fx.Node] = set()
    last = []
    for node in reversed(placement.nodes):
        if node not in returned_only:
            continue
        if any(user in feeds_matmul or _is_matmul(user) for user in node.users):
            feeds_matmul.add(node)
        elif _is_matmul(node):
            last.append(node)
    return last


def _widens(node: fx.Node, sources: _Sources) -> bool:
    tensors = [arg for arg in node.all_input_nodes if storages(arg)]
    rows = [arg for arg in tensors if not sources.is_static(arg)]
    value = value_of(node)
    if len(rows) != 1 or len(tensors) < 2 or not isinstance(value, torch.Tensor):
        return False
    if not isinstance(value_of(rows[0]), torch.Tensor) or min(value.dim(), 2) < 2:
        return False
    wide, narrow = size_exprs(value)[-1], size_exprs(value_of(rows[0]))[-1]
    return isinstance(wide, int) and isinstance(narrow, int) and wide > narrow


def _is_matmul(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return name.rpartition("::")[2].split(".")[0] in ("linear", "matmul", "mm", "addmm", "bmm")


def _descendants(placement: Placement, roots: Iterable[fx.Node]) -> set[fx.Node]:
    found = set(roots)
    for node in placement.nodes:
        if any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


def _break_what_only_breaks_read(placement: Placement, sources: _Sources, graph: fx.Graph) -> None:
    """Index arithmetic for masks goes where the masks are built, before the first segment.

    Such nodes depend on no weight and no floating-point input. One that a segment reads too is
    run twice, which is cheaper than carrying it across.
    """
    early = _index_arithmetic(placement, sources)
    ordered = {node for pair in placement.order for node in pair}
    for node in reversed(list(placement.nodes)):
        if node not in early or placement.is_break(node) or not placement.verdicts[node].pure:
            continue
        breaking = [u for u in node.users if u in placement.verdicts and placement.is_break(u)]
        if not breaking:
            continue
        if len(breaking) == len(node.users):
            placement.make_break(node, BreakReason.FEEDS_BREAK)
        elif node not in ordered and not _is_item(node):
            _duplicate_for(placement, graph, node, breaking)


def _is_item(node: fx.Node) -> bool:
    """Whether a node makes a tuple or takes an item of one: the two have to stay together."""
    if not isinstance(value_of(node), torch.Tensor):
        return True
    return node.target is operator.getitem and not isinstance(
        value_of(node.args[0]),  # type: ignore[arg-type]
        torch.Tensor,
    )


def _index_arithmetic(placement: Placement, sources: _Sources) -> set[fx.Node]:
    early: set[fx.Node] = set()
    for node in placement.nodes:
        if all(
            not storages(arg)
            or arg in early
            or (sources.is_live(arg) and not value_of(arg).is_floating_point())
            for arg in node.all_input_nodes
        ):
            early.add(node)
    return early


def _duplicate_for(
    placement: Placement, graph: fx.Graph, node: fx.Node, readers: list[fx.Node]
) -> None:
    with graph.inserting_after(node):
        twin = graph.node_copy(node)
    for reader in readers:
        reader.replace_input_with(node, twin)
    placement.nodes.insert(placement.nodes.index(node) + 1, twin)
    placement.verdicts[twin] = placement.verdicts[node]
    placement.make_break(twin, BreakReason.FEEDS_BREAK)
