"""Cuts a placed graph into the fewest alternating segments and breaks.

Stages are numbered: breaks run in even ones, segments in odd ones. A node's stage is the first
that its inputs allow, so the number of stages is the length of the longest alternating chain, and
no order of the nodes could do with fewer. Then nodes that nobody needs yet move down to their
first reader, as long as that makes nothing else live longer.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import TreeSpec, tree_flatten

from .extract import Source, extract
from .normalize import value_of
from .placement import Placement, place
from .rowwise import Analysis
from .symbols import is_scalar
from .trace import TracedGraph
from .verdict import BreakReason, State, Verdict


@dataclass(frozen=True)
class Partition:
    """One step of the plan.

    ``module`` takes the values of ``inputs`` in order and returns a tuple of the values of
    ``outputs``.
    """

    index: int
    is_segment: bool
    nodes: tuple[fx.Node, ...]
    inputs: tuple[Source, ...]
    outputs: tuple[fx.Node, ...]
    module: fx.GraphModule


@dataclass(frozen=True)
class PartitionPlan:
    """The ordered partitions of one traced graph.

    ``results`` are the leaves of the graph's output: a Source, or a literal.
    """

    traced: TracedGraph
    partitions: tuple[Partition, ...]
    verdicts: dict[fx.Node, Verdict]
    results: tuple[Any, ...]
    result_spec: TreeSpec

    @property
    def segments(self) -> tuple[Partition, ...]:
        return tuple(p for p in self.partitions if p.is_segment)

    @property
    def breaks(self) -> tuple[Partition, ...]:
        return tuple(p for p in self.partitions if not p.is_segment)

    def state(self, node: fx.Node) -> State:
        """State of a node whose value is one tensor."""
        states = self.verdicts[node].states
        return states[0] if states else None


def partition(analysis: Analysis) -> PartitionPlan:
    """Order the nodes of an analysed graph into segments and breaks."""
    placement = place(analysis)
    stages = _assign_stages(placement, has_tokens=analysis.traced.token_symbol is not None)
    return _build(analysis.traced, placement, _group_by_stage(placement, stages))


# --- units: nodes that share a partition whatever happens ---------------------------------------


@dataclass
class _Unit:
    nodes: list[fx.Node]
    is_break: bool
    before: set[int]
    after: set[int]


def _make_units(placement: Placement) -> list[_Unit]:
    """Units in an order where every unit comes after those it depends on."""
    edges = _edges(placement)
    components = _strongly_connected(placement.nodes, edges, placement.groups)
    home = {node: index for index, nodes in enumerate(components) for node in nodes}
    units = [
        _Unit(nodes, any(map(placement.is_break, nodes)), set(), set()) for nodes in components
    ]
    for earlier, later in edges:
        if home[earlier] != home[later]:
            units[home[earlier]].after.add(home[later])
            units[home[later]].before.add(home[earlier])
    for unit in units:
        if unit.is_break:
            for node in unit.nodes:
                placement.make_break(node, BreakReason.ALIAS_ORDER, "tied to a break")
    return units


def _edges(placement: Placement) -> list[tuple[fx.Node, fx.Node]]:
    kept = set(placement.nodes)
    edges = [pair for pair in placement.order if pair[0] in kept and pair[1] in kept]
    for node in placement.nodes:
        edges.extend((arg, node) for arg in _producers(node, kept))
    return edges


def _producers(node: fx.Node, kept: set[fx.Node]) -> list[fx.Node]:
    """Nodes to run before ``node``; numbers known to the host are looked through."""
    return [arg for arg in node.all_input_nodes if arg in kept]


def _strongly_connected(
    nodes: list[fx.Node],
    edges: list[tuple[fx.Node, fx.Node]],
    groups: list[set[fx.Node]],
) -> list[list[fx.Node]]:
    """Components in topological order; a group, and all between its members, is one component."""
    successors: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for earlier, later in edges:
        successors[earlier].add(later)
    position = {node: index for index, node in enumerate(nodes)}
    for group in groups:
        members = sorted(group, key=position.__getitem__) if len(group) > 2 else list(group)
        for first, second in zip(members, members[1:] + members[:1], strict=True):
            successors[first].add(second)
    components = _tarjan(
        nodes, {n: sorted(s, key=position.__getitem__) for n, s in successors.items()}
    )
    return [sorted(component, key=position.__getitem__) for component in reversed(components)]


def _tarjan(nodes: list[fx.Node], successors: dict[fx.Node, list[fx.Node]]) -> list[list[fx.Node]]:
    """Tarjan's algorithm without recursion: components, successors first."""
    index: dict[fx.Node, int] = {}
    low: dict[fx.Node, int] = {}
    on_stack: set[fx.Node] = set()
    stack: list[fx.Node] = []
    components: list[list[fx.Node]] = []
    for root in nodes:
        if root in index:
            continue
        work = [(root, iter(successors.get(root, ())))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for succ in rest:
                if succ not in index:
                    index[succ] = low[succ] = len(index)
                    stack.append(succ)
                    on_stack.add(succ)
                    work.append((succ, iter(successors.get(succ, ()))))
                    break
                if succ in on_stack:
                    low[node] = min(low[node], index[succ])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.append(member)
                        if member is node:
                            break
                    components.append(component)
    return components


# --- stages -------------------------------------------------------------------------------------


def _assign_stages(placement: Placement, has_tokens: bool) -> dict[fx.Node, int]:
    """A stage for every node, with segments that are worth a replay."""
    while True:
        units = _make_units(placement)
        stages = _earliest(units)
        _sink(placement, units, stages)
        idle = _idle_segments(placement, units, stages, has_tokens)
        if not idle:
            return {node: stages[index] for index, unit in enumerate(units) for node in unit.nodes}
        for index in idle:
            for node in units[index].nodes:
                placement.make_break(node, BreakReason.NOT_TOKEN_SHAPED)


def _earliest(units: list[_Unit]) -> list[int]:
    stages = [0] * len(units)
    for index, unit in enumerate(units):
        stage = 0 if unit.is_break else 1
        for other in unit.before:
            same_kind = units[other].is_break == unit.is_break
            stage = max(stage, stages[other] + (0 if same_kind else 1))
        stages[index] = stage
    return stages


def _sink(placement: Placement, units: list[_Unit], stages: list[int]) -> None:
    """Move units down to their first reader where that keeps nothing else alive longer."""
    of_weights = _weight_only(placement, units)
    for index in reversed(range(len(units))):
        unit = units[index]
        if not unit.after or any(user.op == "output" for n in unit.nodes for user in n.users):
            continue
        target = min(
            stages[reader] - (0 if units[reader].is_break == unit.is_break else 1)
            for reader in unit.after
        )
        if target > stages[index] and (
            index in of_weights or _may_sink(placement, units, stages, index, target)
        ):
            stages[index] = target
    _join_loose_breaks(placement, units, stages)


def _join_loose_breaks(placement: Placement, units: list[_Unit], stages: list[int]) -> None:
    """Work on the caller's tensors that nothing else reads needs no break of its own."""

    def is_loose(unit: _Unit) -> bool:
        pure = all(placement.verdicts[node].pure for node in unit.nodes)
        return unit.is_break and pure and not unit.before and not unit.after

    others = [stages[i] for i, unit in enumerate(units) if unit.is_break and not is_loose(unit)]
    for index, unit in enumerate(units):
        if others and is_loose(unit):
            stages[index] = min(others)


def _weight_only(placement: Placement, units: list[_Unit]) -> set[int]:
    """Units that only read weights, directly or through each other (``1 + weight``)."""
    found: set[int] = set()
    for index, unit in enumerate(units):
        verdicts = [placement.verdicts[node] for node in unit.nodes]
        if unit.before <= found and all(v.pure and not v.token_shaped for v in verdicts):
            found.add(index)
    return found


def _may_sink(
    placement: Placement, units: list[_Unit], stages: list[int], index: int, target: int
) -> bool:
    unit = units[index]
    verdicts = [placement.verdicts[node] for node in unit.nodes]
    if not all(verdict.pure for verdict in verdicts):
        return False
    if unit.is_break or not any(verdict.has_kernel for verdict in verdicts):
        return True
    # Everything it reads must be there at the target anyway.
    return all(
        any(stages[reader] >= target for reader in units[other].after if reader != index)
        for other in unit.before
    )


def _idle_segments(
    placement: Placement, units: list[_Unit], stages: list[int], has_tokens: bool
) -> list[int]:
    """Units of segments without a token-shaped kernel: not worth a replay."""
    by_stage: dict[int, list[int]] = defaultdict(list)
    for index, stage in enumerate(stages):
        if stage % 2:
            by_stage[stage].append(index)
    idle = []
    for members in by_stage.values():
        verdicts = [placement.verdicts[node] for i in members for node in units[i].nodes]
        if not any(v.has_kernel and (v.token_shaped or not has_tokens) for v in verdicts):
            idle.extend(members)
    return idle


def _group_by_stage(
    placement: Placement, stages: dict[fx.Node, int]
) -> list[tuple[bool, list[fx.Node]]]:
    """Nodes of each partition in original order; neighbours of one kind are merged."""
    groups: list[tuple[bool, list[fx.Node]]] = []
    position = {node: index for index, node in enumerate(placement.nodes)}
    by_stage: dict[int, list[fx.Node]] = defaultdict(list)
    for node in placement.nodes:
        by_stage[stages[node]].append(node)
    for stage in sorted(by_stage):
        nodes = by_stage[stage]
        is_segment = stage % 2 == 1
        if groups and groups[-1][0] == is_segment:
            nodes = sorted(groups.pop()[1] + nodes, key=position.__getitem__)
        groups.append((is_segment, nodes))
    return groups


# --- the plan -----------------------------------------------------------------------------------


def _build(
    traced: TracedGraph, placement: Placement, groups: list[tuple[bool, list[fx.Node]]]
) -> PartitionPlan:
    home = {node: index for index, (_, nodes) in enumerate(groups) for node in nodes}
    output = next(node for node in reversed(traced.module.graph.nodes) if node.op == "output")
    partitions = []
    for index, (is_segment, nodes) in enumerate(groups):
        outputs = tuple(node for node in nodes if _crosses(node, index, home))
        inputs, module = extract(traced, placement.verdicts, nodes, outputs, is_segment)
        partitions.append(Partition(index, is_segment, tuple(nodes), inputs, outputs, module))
    leaves, spec = tree_flatten(output.args[0])
    results = tuple(
        Source.of(traced, placement.verdicts, leaf) if isinstance(leaf, fx.Node) else leaf
        for leaf in leaves
    )
    return PartitionPlan(traced, tuple(partitions), placement.verdicts, results, spec)


def _crosses(node: fx.Node, index: int, home: dict[fx.Node, int]) -> bool:
    """Whether a value is read outside its partition."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor) and not is_scalar(value):
        return False
    return any(user.op == "output" or home.get(user, index) != index for user in node.users)
