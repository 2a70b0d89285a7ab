"""Memory at stable addresses: static inputs, handoffs into segments, segment results.

Every buffer is flat and sized for the largest bucket; a bucket uses a view with the strides its
segments were compiled for. (A slice of a larger tensor would have the strides of the larger one.)
Two values share a slot only when they have the same layout and plan order proves that the first
is dead before the second is written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph.extract import SourceKind
from ..graph.normalize import value_of
from ..graph.partition import Partition, PartitionPlan
from ..graph.symbols import Bindings, evaluate, layout_at, size_exprs, stride_exprs
from ..graph.verdict import TokenAxis

INPUT, HANDOFF, RESULT = "input", "handoff", "result"


@dataclass(frozen=True)
class Slot:
    """A flat buffer's place in the memory plan: which values use it, and their layout."""

    role: str
    example: fx.Node
    axis: TokenAxis | None


@dataclass(frozen=True)
class MemoryPlan:
    """Slot of every value that needs memory of ours.

    ``last_use`` is the index of the partition after which a segment's result is not read any more;
    one past that of the last partition for a result of the graph. (Indices are those of the plan:
    after merging they have gaps, and are not positions.)
    """

    slots: tuple[Slot, ...]
    slot_of: dict[tuple[str, fx.Node], int]
    last_use: dict[fx.Node, int]

    def num_bytes(self, bindings: Bindings) -> int:
        """Bytes of all slots under ``bindings`` (the largest bucket and a batch)."""
        return sum(value_bytes(slot.example, bindings) for slot in self.slots)


def value_bytes(node: fx.Node, bindings: Bindings) -> int:
    """Bytes a value takes in a buffer."""
    return extent(node, bindings) * value_of(node).element_size()


def extent(node: fx.Node, bindings: Bindings) -> int:
    """Elements between the first and the last address of a value, both included."""
    value = value_of(node)
    sizes, strides = layout_at(value, bindings)
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def plan_memory(
    plan: PartitionPlan, partitions: Sequence[Partition], results: bool = True
) -> MemoryPlan:
    """Give each value a slot, sharing by liveness in plan order.

    Without ``results``, what segments make has no slot: the recorder has memory of its own.
    """
    lifetimes = _lifetimes(plan, partitions)
    last_use = {node: end for (role, node), (_, end) in lifetimes.items() if role == RESULT}
    slots: list[Slot] = []
    free_from: list[int] = []
    by_layout: dict[Any, list[int]] = defaultdict(list)
    slot_of = {}
    for (role, node), (start, end) in sorted(lifetimes.items(), key=lambda item: item[1][0]):
        if role == RESULT and not results:
            continue
        layout = (role, *_layout_key(node))
        reusable = [i for i in by_layout[layout] if free_from[i] < start and role != INPUT]
        if reusable:
            index = reusable[0]
        else:
            index = len(slots)
            state = plan.state(node)
            slots.append(Slot(role, node, state if isinstance(state, TokenAxis) else None))
            free_from.append(end)
            by_layout[layout].append(index)
        free_from[index] = end
        slot_of[(role, node)] = index
    return MemoryPlan(tuple(slots), slot_of, last_use)


def _layout_key(node: fx.Node) -> Any:
    value = value_of(node)
    return (size_exprs(value), stride_exprs(value), value.dtype, value.device)


def _lifetimes(
    plan: PartitionPlan, partitions: Sequence[Partition]
) -> dict[tuple[str, fx.Node], tuple[int, int]]:
    """First and last partition index at which a value's memory is in use."""
    producer = {node: part for part in partitions for node in part.outputs}
    lifetimes: dict[tuple[str, fx.Node], tuple[int, int]] = {}
    for part in partitions:
        if part.is_segment:
            for node in part.outputs:
                lifetimes[(RESULT, node)] = (part.index, part.index)
    for part in partitions:
        for source in part.inputs:
            key = _memory_key(source, part, producer)
            if key is not None:
                made = producer.get(key[1])
                start = -1 if made is None else made.index
                known = lifetimes.get(key, (start, start))
                lifetimes[key] = (known[0], max(known[1], part.index))
    end = 1 + max((part.index for part in partitions), default=-1)
    for result in plan.results:
        returned = (RESULT, getattr(result, "node", None))
        if returned in lifetimes:
            lifetimes[returned] = (lifetimes[returned][0], end)
    return lifetimes


def _memory_key(
    source: Any, part: Partition, producer: dict[fx.Node, Partition]
) -> tuple[str, fx.Node] | None:
    """The buffer through which ``part`` reads ``source``; None when it reads a live tensor."""
    if source.kind is SourceKind.ARGUMENT:
        return (INPUT, source.node) if part.is_segment and not source.static else None
    if source.kind is not SourceKind.VALUE:
        return None
    if producer[source.node].is_segment:
        return (RESULT, source.node)
    return (HANDOFF, source.node) if part.is_segment else None


class SlotMemory:
    """The memory of one slot, and how many of its rows an earlier forward left behind."""

    def __init__(self, slot: Slot, top: Bindings) -> None:
        value = value_of(slot.example)
        self.slot = slot
        self.flat = torch.zeros(extent(slot.example, top), dtype=value.dtype, device=value.device)
        self._high = 0
        self._view: torch.Tensor | None = None

    def view(self, node: fx.Node, bindings: Bindings) -> torch.Tensor:
        """The slot as ``node`` at a bucket: its sizes, its strides."""
        value = value_of(node)
        sizes, strides = layout_at(value, bindings)
        return self.flat.as_strided(sizes, strides)

    def settler(self, view: torch.Tensor, axis: TokenAxis, outer: int) -> Callable[[int], None]:
        """Zeroes the rows from a token count on that an earlier, longer forward wrote.

        ``view`` is the slot at the current bucket. Where rows lie one after the other from the
        buffer's start, a row has one address in all buckets and the mark holds across them;
        elsewhere a change of bucket makes the whole tail suspect.
        """
        bucket = view.shape[axis.dim] // outer
        leading = all(size == 1 for size in view.shape[: axis.dim]) and outer == 1

        def settle(num_tokens: int) -> None:
            if not leading and self._view is not view:
                self._high = bucket
            self._view = view
            dirty = min(self._high, bucket)
            if dirty > num_tokens:
                rows(view, axis, outer, num_tokens, dirty).zero_()
            if self._high <= bucket:
                self._high = num_tokens

        return settle


def rows(view: torch.Tensor, axis: TokenAxis, outer: int, start: int, stop: int) -> torch.Tensor:
    """Token rows ``start`` to ``stop`` of a bucket-sized tensor, as a view.

    A flattened axis of ``outer`` runs comes back split: ``[..., outer, stop - start, ...]``.
    """
    if outer == 1:
        return view.narrow(axis.dim, start, stop - start)
    split = view.unflatten(axis.dim, (outer, -1))
    return split.narrow(axis.dim + 1, start, stop - start)


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, also where dimensions of ``target`` are expanded and share one address."""
    writer(target)(source)


def writer(target: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    """A function that copies a tensor of equal shape into ``target``, bound once."""
    pairs = enumerate(zip(target.shape, target.stride(), strict=True))
    expanded = [dim for dim, (size, stride) in pairs if stride == 0 and size > 1]
    if not expanded:
        return target.copy_

    def first(tensor: torch.Tensor) -> torch.Tensor:
        for dim in expanded:
            tensor = tensor.narrow(dim, 0, 1)
        return tensor

    writable = first(target)
    return lambda source: writable.copy_(first(source))


class PaddingRows:
    """A bool vector on the device that tells padded rows: true from the real count on."""

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # written inside and outside of it
            self.rows = torch.ones(max_tokens, dtype=torch.bool, device=device)
        self._count = 0

    def set(self, num_tokens: int) -> None:
        """Mark the rows from ``num_tokens``; no work while the count stays the same."""
        if num_tokens > self._count:
            self.rows[self._count : num_tokens].fill_(False)
        elif num_tokens < self._count:
            self.rows[num_tokens : self._count].fill_(True)
        self._count = num_tokens


class Buffers:
    """All slots of one plan for one batch, allocated once for the largest bucket.

    ``padding`` is there for a plan whose segments zero their padded rows.
    """

    def __init__(
        self, memory: MemoryPlan, top: Bindings, padding: PaddingRows | None = None
    ) -> None:
        self.padding = padding
        # Made outside inference mode, so that they can be written inside and outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._memory = [SlotMemory(slot, top) for slot in memory.slots]
        self._plan = memory
        self.last_use = memory.last_use
        self.addresses = frozenset(
            memory.flat.untyped_storage().data_ptr() for memory in self._memory
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        held = sum(m.flat.numel() * m.flat.element_size() for m in self._memory)
        return held + (0 if self.padding is None else self.padding.rows.numel())

    @property
    def values(self) -> tuple[tuple[str, fx.Node], ...]:
        """Every (role, value) that has memory here."""
        return tuple(self._plan.slot_of)

    def slot(self, role: str, node: fx.Node) -> SlotMemory:
        """Memory of a value in a role; KeyError when it needs none."""
        return self._memory[self._plan.slot_of[(role, node)]]

    def view(self, role: str, node: fx.Node, bindings: Bindings) -> torch.Tensor:
        """A value's bucket-sized tensor."""
        return self.slot(role, node).view(node, bindings)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lives in memory that a later replay overwrites."""
        return tensor.untyped_storage().data_ptr() in self.addresses


def outer_count(axis: TokenAxis, bindings: Bindings) -> int:
    """How many runs of the tokens a flattened axis holds."""
    return evaluate(axis.outer, bindings)
