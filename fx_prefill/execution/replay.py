"""The flat program of one bucket: copy in, then segment, break, segment, ..., copy out.

Everything that depends on the bucket is bound when the program is made; what depends on the real
count too (the views a break gets) is bound once per count and kept. A call then only fills the
live tensors into a frame and walks a list.

Note [Breaks see real rows]

A break gets views of exactly ``num_tokens`` rows, live tensors as the caller passed them, and
numbers computed from this call. Nothing it reads was frozen when the bucket was captured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._pytree import tree_unflatten

from ..graph.extract import Source, SourceKind
from ..graph.normalize import value_of
from ..graph.operators import operator_name
from ..graph.partition import Partition
from ..graph.symbols import evaluate_scalar, evaluate_sizes, size_exprs, stride_exprs
from ..graph.verdict import TokenAxis
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
from .capture import Recorder, Recording
from .compile import CompiledPlan

Frame = list[Any]
Step = Callable[[Frame], None]

MAX_BOUND_COUNTS = 64
"""Real counts per bucket whose views are kept bound."""

LAYOUT_READERS = frozenset(
    ["view", "view_as", "as_strided", "unflatten", "view_as_complex", "data_ptr"]
)


class BucketProgram:
    """One bucket of one plan, ready to run.

    ``static`` are call arguments of which the weights are bound; ``bindings`` give the bucket and
    the batch. Making the program records every segment.
    """

    def __init__(
        self,
        compiled: CompiledPlan,
        buffers: Buffers,
        recorder: Recorder,
        static: Sequence[Any],
        bindings: dict[sympy.Symbol, int],
    ) -> None:
        self._compiled = compiled
        self._plan = compiled.plan
        self._buffers = buffers
        self._bindings = bindings
        self._producer = {node: p for p in compiled.partitions for node in p.outputs}
        self._slots = _FrameSlots(compiled)
        self._views = {
            (role, node): buffers.view(role, node, bindings) for role, node in buffers.values
        }
        self._order = recorder.order
        self._recordings = self._record_all(recorder, static)
        self._bound: OrderedDict[int | None, _BoundCall] = OrderedDict()

    def run(self, args: Sequence[Any], num_tokens: int | None) -> Any:
        """One live forward: the graph's result, in memory of the caller's own.

        ``args`` are the graph's arguments; ``num_tokens`` is None for a static graph.
        """
        bound = self._bound.get(num_tokens)
        if bound is None:
            bound = self._bound[num_tokens] = _BoundCall(self, num_tokens)
            if len(self._bound) > MAX_BOUND_COUNTS:
                self._bound.popitem(last=False)
        else:
            self._bound.move_to_end(num_tokens)
        self._order()
        return bound.run(args)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lives in memory that this or a later replay overwrites."""
        return self._buffers.owns(tensor) or (
            tensor.untyped_storage().data_ptr() in self._result_addresses
        )

    def _record_all(self, recorder: Recorder, static: Sequence[Any]) -> dict[int, Recording]:
        """Record the segments in plan order, giving outputs back once their readers are done."""
        recordings: dict[int, Recording] = {}
        held: list[tuple[int, Recording, int]] = []  # last use, whose output, which
        for part in self._compiled.partitions:
            if not part.is_segment:
                continue
            for last_use, recording, index in held:
                if last_use < part.index:
                    recording.release(index)
            held = [entry for entry in held if entry[0] >= part.index]
            recording = self._record(part, recorder, static)
            recordings[part.index] = recording
            for index, node in enumerate(part.outputs):
                held.append((self._buffers.last_use[node], recording, index))
                self._views[(RESULT, node)] = recording.outputs[index]
        for _, recording, index in held:
            recording.release(index)
        self._result_addresses = frozenset(
            output.untyped_storage().data_ptr()
            for recording in recordings.values()
            for output in recording.outputs
        )
        return recordings

    def _record(self, part: Partition, recorder: Recorder, static: Sequence[Any]) -> Recording:
        inputs = [self._segment_input(source, static) for source in part.inputs]
        outputs = [self._views[(RESULT, n)] for n in part.outputs if recorder.takes_buffers]
        return recorder.record(self._compiled.segments[part.index].function, inputs, outputs)

    def _segment_input(self, source: Source, static: Sequence[Any]) -> Any:
        if source.kind is SourceKind.SCALAR:
            return evaluate_scalar(source.expr, self._bindings)
        if source.kind is SourceKind.CONSTANT:
            return source.constant
        if source.static:
            return static[source.index]
        assert source.node is not None
        if source.kind is SourceKind.ARGUMENT:
            return self._views[(INPUT, source.node)]
        role = RESULT if self._producer[source.node].is_segment else HANDOFF
        return self._views[(role, source.node)]


class _FrameSlots:
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


class _BoundCall:
    """A bucket's program for one real count: all views made, all steps in a list."""

    def __init__(self, program: BucketProgram, num_tokens: int | None) -> None:
        self._program = program
        self._plan = program._plan
        self._num_tokens = num_tokens
        token = self._plan.traced.token_symbol
        self._real: dict[sympy.Symbol, int] = dict(program._bindings)
        if token is not None and num_tokens is not None:
            self._real[token] = num_tokens
        self._template: Frame = [None] * len(program._slots.index)
        self._live: dict[int, int] = {}
        self._foreign: list[tuple[int, Any]] = []
        self._settled: list[tuple[SlotMemory, torch.Tensor, TokenAxis, int]] = []
        self._copies_in = self._bind_inputs()
        self._fill_template()
        self._steps = [self._bind(part) for part in program._compiled.partitions]
        self._results = [self._bind_result(result) for result in self._plan.results]
        self._bind_tails()

    def run(self, args: Sequence[Any]) -> Any:
        frame = self._template.copy()
        for position, index in self._live.items():
            frame[position] = args[index]
        if self._foreign:
            values = self._plan.traced.symbol_values(args)
            for position, expr in self._foreign:
                frame[position] = evaluate_scalar(expr, values)
        count = self._num_tokens
        for slot, view, axis, outer in self._settled:
            slot.settle(view, axis, outer, count)  # type: ignore[arg-type]
        for target, index in self._copies_in:
            target(args[index])
        for step in self._steps:
            step(frame)
        made: dict[int, Any] = {}
        leaves = [result(frame, made) for result in self._results]
        return tree_unflatten(leaves, self._plan.result_spec)

    # --- binding --------------------------------------------------------------------------------

    def _bind_inputs(self) -> list[tuple[Callable[[torch.Tensor], None], int]]:
        copies = []
        placeholders = self._plan.traced.placeholders
        for role, node in self._program._buffers.values:
            if role == INPUT:
                copies.append((self._writer(role, node), placeholders.index(node)))
        return copies

    def _bind_tails(self) -> None:
        for role, node in self._program._buffers.values:
            axis = self._plan.state(node)
            if role == RESULT or not isinstance(axis, TokenAxis) or self._num_tokens is None:
                continue
            slot = self._program._buffers.slot(role, node)
            if all(slot is not other for other, *_ in self._settled):
                view = self._program._views[(role, node)]
                outer = outer_count(axis, self._real)
                self._settled.append((slot, view, axis, outer))

    def _fill_template(self) -> None:
        """Positions whose value does not change while the count stays the same."""
        for part in self._program._compiled.partitions:
            if not part.is_segment:
                for source in part.inputs:
                    self._fill(source)
        for result in self._plan.results:
            if isinstance(result, Source):
                self._fill(result)

    def _fill(self, source: Source) -> None:
        position = self._program._slots.of(source)
        if source.kind is SourceKind.ARGUMENT:
            self._live[position] = source.index
        elif source.kind is SourceKind.CONSTANT:
            self._template[position] = source.constant
        elif source.kind is SourceKind.SCALAR:
            symbols = source.expr.free_symbols if isinstance(source.expr, sympy.Basic) else set()
            if symbols <= self._real.keys():
                self._template[position] = evaluate_scalar(source.expr, self._real)
            elif (position, source.expr) not in self._foreign:
                self._foreign.append((position, source.expr))
        elif self._made_by_segment(source.node):
            self._template[position] = self._real_view(source.node)  # type: ignore[arg-type]

    def _made_by_segment(self, node: fx.Node | None) -> bool:
        return node is not None and self._program._producer[node].is_segment

    def _real_view(self, node: fx.Node) -> torch.Tensor | None:
        """Real rows of a segment's result; None when they are not one view of it."""
        view = self._program._views[(RESULT, node)]
        axis = self._plan.state(node)
        if not isinstance(axis, TokenAxis) or self._num_tokens is None:
            return view
        if outer_count(axis, self._real) != 1:
            return None
        return view.narrow(axis.dim, 0, self._num_tokens)

    def _real_rows(self, role: str, node: fx.Node) -> torch.Tensor:
        """Real rows of a buffer, a flattened axis split into its runs."""
        view = self._program._views[(role, node)]
        axis = self._plan.state(node)
        if not isinstance(axis, TokenAxis) or self._num_tokens is None:
            return view
        return rows(view, axis, outer_count(axis, self._real), 0, self._num_tokens)

    def _writer(self, role: str, node: fx.Node) -> Callable[[torch.Tensor], None]:
        """Copies a tensor of real rows into a buffer."""
        target = self._real_rows(role, node)
        write, shape = writer(target), target.shape
        if len(shape) == value_of(node).dim():
            return write
        return lambda source: write(source.reshape(shape))  # a flattened axis, split into runs

    def _bind(self, part: Partition) -> Step:
        if part.is_segment:
            replay = self._program._recordings[part.index].replay
            return lambda frame: replay()
        return self._bind_break(part)

    def _bind_break(self, part: Partition) -> Step:
        slots = self._program._slots
        positions = [slots.of(source) for source in part.inputs]
        gathers = [
            (slots.of(source), self._gather(source.node))
            for source in part.inputs
            if self._must_gather(part, source)
        ]
        keeps, writes = self._bind_break_results(part)
        function = part.module.forward
        owns = self._program.owns

        def step(frame: Frame) -> None:
            for position, gather in gathers:
                frame[position] = gather()
            results = function(*[frame[position] for position in positions])
            for index, position in keeps:
                kept = results[index]
                if isinstance(kept, torch.Tensor) and owns(kept):
                    # A view of a segment's result, whose memory a later layer may reuse.
                    kept = kept.clone()
                frame[position] = kept
            for index, write in writes:
                write(results[index])

        return step

    def _bind_break_results(
        self, part: Partition
    ) -> tuple[list[tuple[int, int]], list[tuple[int, Callable[[torch.Tensor], None]]]]:
        """Which results stay in the frame, and which go into a handoff buffer."""
        keeps, writes = [], []
        partitions = self._program._compiled.partitions
        for index, node in enumerate(part.outputs):
            if (HANDOFF, node) in self._program._views:
                writes.append((index, self._writer(HANDOFF, node)))
            read_live = any(
                source.node is node
                for other in partitions
                if not other.is_segment
                for source in other.inputs
            )
            returned = any(
                isinstance(result, Source) and result.node is node for result in self._plan.results
            )
            if read_live or returned:
                keeps.append((index, self._program._slots.index[node]))
        return keeps, writes

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
        traced = evaluate_sizes(stride_exprs(value_of(source.node)), self._real)
        moved = any(
            size > 1 and stride != expected
            for size, stride, expected in zip(view.shape, view.stride(), traced, strict=True)
        )
        return moved and _layout_is_read(part, source)

    def _gather(self, node: fx.Node | None) -> Callable[[], torch.Tensor]:
        assert node is not None
        source = self._real_rows(RESULT, node)
        value = value_of(node)
        sizes = evaluate_sizes(size_exprs(value), self._real)
        strides = evaluate_sizes(stride_exprs(value), self._real)
        dtype, device = value.dtype, value.device

        def gather() -> torch.Tensor:
            target = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
            copy_into(target, source.reshape(sizes))
            return target

        return gather

    def _bind_result(self, result: Any) -> Callable[[Frame, dict[int, Any]], Any]:
        """How one leaf of the graph's output is made; one value returned twice stays one tensor."""
        if not isinstance(result, Source):
            return lambda frame, made: result
        position = self._program._slots.of(result)
        if result.kind is not SourceKind.VALUE:
            return lambda frame, made: frame[position]
        if self._made_by_segment(result.node):
            copy_out = self._gather(result.node)

            def produce(frame: Frame, made: dict[int, Any]) -> Any:
                if position not in made:
                    made[position] = copy_out()
                return made[position]

            return produce
        return lambda frame, made: frame[position]


def _layout_is_read(part: Partition, source: Source) -> bool:
    """Whether an operator of the break depends on the strides of one of its inputs."""
    position = part.inputs.index(source)
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
