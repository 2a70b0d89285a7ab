"""A bucket's program bound to one real count: views made, steps in a list.

A call fills the live tensors into a frame and walks the list. Everything else (views of the real
rows, numbers that follow from the count) was made when the count was first met.

Note [Breaks see real rows]

A break gets views of exactly ``num_tokens`` rows, live tensors as the caller passed them, and
numbers computed from this call. Nothing it reads was frozen when the bucket was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx
from torch._prims_common import make_contiguous_strides_for
from torch.utils._pytree import TreeSpec, tree_unflatten

from ..graph.extract import Source, SourceKind
from ..graph.normalize import value_of
from ..graph.partition import Partition
from ..graph.symbols import (
    Layout,
    evaluate_scalar,
    layout_at,
)
from ..graph.verdict import TokenAxis
from .breaks import BreakBody, layout_is_read
from .buffers import (
    HANDOFF,
    INPUT,
    RESULT,
    Buffers,
    SlotMemory,
    copy_into,
    outer_count,
    rows,
    writer,
)
from .capture import Recording
from .compile import CompiledPlan
from .results import CopyOut

MOVED = object()
"""Returned by a forward whose weights turned out to have moved."""

Frame = list[Any]
Step = Callable[[Frame], Any]


class FrameSlots:
    """Frame positions of the tensors and numbers that breaks and results read."""

    def __init__(self, compiled: CompiledPlan) -> None:
        self.index: dict[Any, int] = {}
        for part in compiled.partitions:
            if not part.is_segment:
                for source in part.inputs:
                    self.of(source)
                for node in part.outputs:
                    self._at(node)
        for result in compiled.plan.results:
            if isinstance(result, Source):
                self.of(result)

    def of(self, source: Source) -> int:
        """Position of a source's value."""
        return self._at(source.expr if source.kind is SourceKind.SCALAR else source.node)

    def _at(self, key: Any) -> int:
        return self.index.setdefault(key, len(self.index))


@dataclass(frozen=True)
class Wiring:
    """What a program's counts have in common."""

    compiled: CompiledPlan
    buffers: Buffers
    bindings: dict[sympy.Symbol, int]
    views: dict[tuple[str, fx.Node], torch.Tensor]
    recordings: dict[int, Recording]
    slots: FrameSlots
    result_addresses: frozenset[int]

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lives in memory that this or a later replay overwrites."""
        return (
            self.buffers.owns(tensor)
            or tensor.untyped_storage().data_ptr() in self.result_addresses
        )


class BoundCall:
    """A program for one real count (None for a static graph)."""

    def __init__(self, wiring: Wiring, num_tokens: int | None) -> None:
        self._wiring = wiring
        self._plan = wiring.compiled.plan
        self._num_tokens = num_tokens
        token = self._plan.traced.token_symbol
        self._real: dict[sympy.Symbol, int] = dict(wiring.bindings)
        if token is not None and num_tokens is not None:
            self._real[token] = num_tokens
        self._producer = {n: p for p in wiring.compiled.partitions for n in p.outputs}
        self._template: Frame = [None] * len(wiring.slots.index)
        self._fixed: set[int] = set()
        self._live: list[tuple[int, int]] = []
        self._foreign: list[tuple[int, Any]] = []
        self._fill_template()
        self._copies_in = self._bind_inputs()
        self._settlers = self._bind_tails()
        self._steps = [self._bind(part) for part in wiring.compiled.partitions]
        self._first = wiring.compiled.steps_before_confirming
        self._copy_out = CopyOut()
        self._leaves = [self._bind_result(result) for result in self._plan.results]
        self._pack = _packer(self._plan.result_spec)

    def run(self, args: Sequence[Any], confirm: Callable[[], bool] | None = None) -> Any:
        """One live forward on the graph's arguments.

        ``confirm`` is asked once the device has its first work; MOVED is returned when it denies.
        """
        frame = self._template.copy()
        for position, index in self._live:
            frame[position] = args[index]
        if self._foreign:
            values = self._plan.traced.symbol_values(args)
            for position, expr in self._foreign:
                frame[position] = evaluate_scalar(expr, values)
        count = self._num_tokens
        if count is not None:
            for settle in self._settlers:
                settle(count)
        for write, index in self._copies_in:
            write(args[index])
        if confirm is None:
            for step in self._steps:
                step(frame)
        elif not self._run_confirmed(frame, confirm):
            return MOVED
        copied = self._copy_out.run()
        return self._pack([leaf(frame, copied) for leaf in self._leaves])

    def _run_confirmed(self, frame: Frame, confirm: Callable[[], bool]) -> bool:
        for step in self._steps[: self._first]:
            step(frame)
        if not confirm():
            return False
        for step in self._steps[self._first :]:
            step(frame)
        return True

    # --- inputs ---------------------------------------------------------------------------------

    def _bind_inputs(self) -> list[tuple[Callable[[torch.Tensor], Any], int]]:
        placeholders = self._plan.traced.placeholders
        return [
            (self._writer(role, node), placeholders.index(node))
            for role, node in self._wiring.buffers.values
            if role == INPUT
        ]

    def _bind_tails(self) -> list[Callable[[int], None]]:
        """What makes the rows past a token count safe, given the count."""
        buffers = self._wiring.buffers
        settlers: dict[SlotMemory, Callable[[int], None]] = {}
        for role, node in buffers.values:
            axis = self._plan.state(node)
            if role == RESULT or not isinstance(axis, TokenAxis) or self._num_tokens is None:
                continue
            slot, view = buffers.slot(role, node), self._wiring.views[(role, node)]
            if slot not in settlers:
                settlers[slot] = slot.settler(view, axis, outer_count(axis, self._real))
        padding = [] if buffers.padding is None else [buffers.padding.set]
        return [*settlers.values(), *padding]

    def _fill_template(self) -> None:
        """Positions whose value does not change while the count stays the same."""
        for part in self._wiring.compiled.partitions:
            if not part.is_segment:
                for source in part.inputs:
                    self._fill(source)
        for result in self._plan.results:
            if isinstance(result, Source):
                self._fill(result)

    def _fill(self, source: Source) -> None:
        position = self._wiring.slots.of(source)
        if source.kind is SourceKind.ARGUMENT:
            if (position, source.index) not in self._live:
                self._live.append((position, source.index))
        elif source.kind is SourceKind.CONSTANT:
            self._fix(position, source.constant)
        elif source.kind is SourceKind.SCALAR:
            symbols = source.expr.free_symbols if isinstance(source.expr, sympy.Basic) else set()
            if symbols <= self._real.keys():
                self._fix(position, evaluate_scalar(source.expr, self._real))
            elif (position, source.expr) not in self._foreign:
                self._foreign.append((position, source.expr))
        elif self._made_by_segment(source.node):
            view = self._real_view(source.node)  # type: ignore[arg-type]
            if view is not None:
                self._fix(position, view)

    def _fix(self, position: int, value: Any) -> None:
        self._template[position] = value
        self._fixed.add(position)

    # --- views ----------------------------------------------------------------------------------

    def _made_by_segment(self, node: fx.Node | None) -> bool:
        return node is not None and node in self._producer and self._producer[node].is_segment

    def _real_view(self, node: fx.Node) -> torch.Tensor | None:
        """Real rows of a segment's result; None when they are not one view of it."""
        view = self._wiring.views.get((RESULT, node))
        axis = self._plan.state(node)
        if view is None or not isinstance(axis, TokenAxis) or self._num_tokens is None:
            return view
        if outer_count(axis, self._real) != 1:
            return None
        return view.narrow(axis.dim, 0, self._num_tokens)

    def _real_rows(self, role: str, node: fx.Node) -> torch.Tensor:
        """Real rows of a buffer, a flattened axis split into its runs."""
        view = self._wiring.views[(role, node)]
        axis = self._plan.state(node)
        if not isinstance(axis, TokenAxis) or self._num_tokens is None:
            return view
        return rows(view, axis, outer_count(axis, self._real), 0, self._num_tokens)

    def _writer(self, role: str, node: fx.Node) -> Callable[[torch.Tensor], Any]:
        """Copies a tensor of real rows into a buffer."""
        target = self._real_rows(role, node)
        write, shape = writer(target), target.shape
        if len(shape) == value_of(node).dim():
            return write
        return lambda source: write(source.reshape(shape))  # a flattened axis, split into runs

    def _layout(self, node: fx.Node) -> Layout:
        """Sizes and strides the model's own forward gives a value at the real count."""
        return layout_at(value_of(node), self._real)

    # --- steps ----------------------------------------------------------------------------------

    def _bind(self, part: Partition) -> Step:
        if part.is_segment:
            replay = self._wiring.recordings[part.index].replay
            return lambda frame: replay()
        return self._bind_break(part)

    def _bind_break(self, part: Partition) -> Step:
        slots = self._wiring.slots
        handoffs, keeps = self._break_results(part)
        body = self._wiring.compiled.break_body(part, [i for i in handoffs if i not in keeps])
        given = self._given_memory(part, body)
        if given is None:
            body, given = BreakBody(part.module.forward), []
        writes = [
            (index, self._writer(HANDOFF, part.outputs[index]))
            for index in handoffs
            if index not in body.direct
        ]
        positions = [slots.of(source) for source in part.inputs]
        gathers = [
            (position, self._gather(source.node))  # type: ignore[arg-type]
            for position, source in zip(positions, part.inputs, strict=True)
            if self._must_gather(part, source)
        ]
        if not gathers and self._fixed.issuperset(positions):
            call = body.bound([self._template[p] for p in positions], given)
            return _fixed_step(call, writes, self._keeper(part, keeps))
        return _step(body.function, positions, given, gathers, writes, self._keeper(part, keeps))

    def _break_results(self, part: Partition) -> tuple[list[int], list[int]]:
        """Indices of results that go into a handoff buffer, and of those kept in the frame."""
        handoffs, keeps = [], []
        for index, node in enumerate(part.outputs):
            if (HANDOFF, node) in self._wiring.views:
                handoffs.append(index)
            if node in self._wiring.compiled.read_live:
                keeps.append(index)
        return handoffs, keeps

    def _given_memory(self, part: Partition, body: BreakBody) -> list[torch.Tensor] | None:
        """Handoff memory for the results a body can make in place; None where one cannot be."""
        given = []
        for position, index in enumerate(body.direct):
            view = self._real_rows(HANDOFF, part.outputs[index])
            memory = body.memory_for(position, view, self._real)
            if memory is None:
                return None
            given.append(memory)
        return given

    def _keeper(self, part: Partition, keeps: list[int]) -> Callable[[Any, Frame], None] | None:
        """Puts results that breaks or the caller read into the frame."""
        if not keeps:
            return None
        places = [(index, self._wiring.slots.index[part.outputs[index]]) for index in keeps]
        owns = self._wiring.owns

        def keep(results: Any, frame: Frame) -> None:
            for index, position in places:
                kept = results[index]
                if isinstance(kept, torch.Tensor) and owns(kept):
                    # A view of a segment's result, whose memory a later layer may reuse.
                    kept = kept.clone()
                frame[position] = kept

        return keep

    def _must_gather(self, part: Partition, source: Source) -> bool:
        """Whether a segment's result has to be copied together for a break.

        Real rows of a flattened axis are several runs. And an operator that reads the layout
        (``view``, custom operators) was traced with the strides of whole rows.
        """
        if source.kind is not SourceKind.VALUE or not self._made_by_segment(source.node):
            return False
        assert source.node is not None
        view = self._real_view(source.node)
        if view is None:
            return True
        pairs = zip(view.shape, view.stride(), self._layout(source.node)[1], strict=True)
        moved = any(size > 1 and stride != traced for size, stride, traced in pairs)
        return moved and layout_is_read(part, part.inputs.index(source))

    def _gather(self, node: fx.Node) -> Callable[[], torch.Tensor]:
        """Copies the real rows of a segment's result together, laid out as the model does."""
        source = self._real_rows(RESULT, node)
        sizes, strides = self._layout(node)
        shaped = source.reshape(sizes)
        is_view = shaped.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        if is_view and strides == make_contiguous_strides_for(sizes):
            return partial(shaped.clone, memory_format=torch.contiguous_format)
        value = value_of(node)
        make = partial(torch.empty_strided, sizes, strides, dtype=value.dtype, device=value.device)

        def gather() -> torch.Tensor:
            target = make()
            copy_into(target, source.reshape(sizes))
            return target

        return gather

    # --- results --------------------------------------------------------------------------------

    def _bind_result(self, result: Any) -> Callable[[Frame, list[Any]], Any]:
        """How one leaf of the graph's output is made; one value returned twice stays one tensor."""
        if not isinstance(result, Source):
            return lambda frame, copied: result
        if result.kind is SourceKind.VALUE and self._made_by_segment(result.node):
            assert result.node is not None
            node = result.node
            place = self._copy_out.add(
                node, self._real_rows(RESULT, node), self._layout(node), self._gather(node)
            )
            return lambda frame, copied: copied[place]
        position = self._wiring.slots.of(result)
        return lambda frame, copied: frame[position]


def _fixed_step(
    call: Callable[[], Any],
    writes: list[tuple[int, Callable[[torch.Tensor], Any]]],
    keep: Callable[[Any, Frame], None] | None,
) -> Step:
    """A break whose arguments are the same in every call of this count."""
    if keep is None and not writes:
        return lambda frame: call()
    if keep is None and len(writes) == 1:
        index, write = writes[0]
        return lambda frame: write(call()[index])

    def step(frame: Frame) -> None:
        results = call()
        if keep is not None:
            keep(results, frame)
        for index, write in writes:
            write(results[index])

    return step


def _step(
    function: Callable[..., Any],
    positions: list[int],
    given: list[torch.Tensor],
    gathers: list[tuple[int, Callable[[], torch.Tensor]]],
    writes: list[tuple[int, Callable[[torch.Tensor], Any]]],
    keep: Callable[[Any, Frame], None] | None,
) -> Step:
    def step(frame: Frame) -> None:
        for position, gather in gathers:
            frame[position] = gather()
        results = function(*[frame[position] for position in positions], *given)
        if keep is not None:
            keep(results, frame)
        for index, write in writes:
            write(results[index])

    return step


def _packer(spec: TreeSpec) -> Callable[[list[Any]], Any]:
    """From leaves to the graph's output, which is nearly always one flat tuple."""
    numbers = list(range(spec.num_leaves))
    whole = tree_unflatten(numbers, spec)
    if type(whole) in (tuple, list) and list(whole) == numbers:
        return type(whole)
    return lambda leaves: tree_unflatten(leaves, spec)
