"""The program of one bucket: its segments recorded, and a flat list of steps for each count.

Making a program records every segment at the bucket. What depends on the real count too is bound
once for each count and kept (:mod:`bound`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from ..graph.extract import Source, SourceKind
from ..graph.partition import Partition
from .bound import BoundCall, FrameSlots, Wiring
from .buffers import HANDOFF, INPUT, RESULT, Buffers
from .capture import Recorder, Recording
from .compile import BoundSegment, CompiledPlan, nothing_new

MAX_BOUND_COUNTS = 64
"""Real counts per bucket whose views are kept bound."""


class BucketProgram:
    """One bucket of one plan, ready to run.

    ``static`` are call arguments of which the weights are bound; ``bindings`` give the bucket and
    the batch.
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
        self._buffers = buffers
        self._bindings = bindings
        self._producer = {node: p for p in compiled.partitions for node in p.outputs}
        self._views = {
            (role, node): buffers.view(role, node, bindings) for role, node in buffers.values
        }
        self._warm: set[int] = set()  # segments that ran at this bucket
        recordings = self._record_all(recorder, static)
        self._wiring = Wiring(
            compiled=compiled,
            buffers=buffers,
            bindings=bindings,
            views=self._views,
            recordings=recordings,
            slots=FrameSlots(compiled),
            result_addresses=frozenset(
                output.untyped_storage().data_ptr()
                for recording in recordings.values()
                for output in recording.outputs
            ),
        )
        self._order = recorder.order
        self._bound: OrderedDict[int | None, BoundCall] = OrderedDict()

    def run(
        self,
        args: Sequence[Any],
        num_tokens: int | None,
        confirm: Callable[[], bool] | None = None,
    ) -> Any:
        """One live forward: the graph's result, in memory of the caller's own.

        ``args`` are the graph's arguments; ``num_tokens`` is None for a static graph. ``confirm``
        is that of :meth:`BoundCall.run`.
        """
        bound = self._bound.get(num_tokens)
        if bound is None:
            bound = self._bound[num_tokens] = BoundCall(self._wiring, num_tokens)
            if len(self._bound) > MAX_BOUND_COUNTS:
                self._bound.popitem(last=False)
        else:
            self._bound.move_to_end(num_tokens)
        self._order()
        return bound.run(args, confirm)

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
        return recordings

    def _record(self, part: Partition, recorder: Recorder, static: Sequence[Any]) -> Recording:
        inputs = [self._segment_input(source, static) for source in part.inputs]
        outputs = [self._views[(RESULT, n)] for n in part.outputs if recorder.takes_buffers]
        segment = self._compiled.segments[part.index]
        bound = segment.bind(self._bindings)
        if segment.number in self._warm:
            bound = BoundSegment(bound.run, warm_up=nothing_new)
        self._warm.add(segment.number)
        bound = self._with_prologues(part, bound)
        return recorder.record(bound, inputs, outputs)

    def _with_prologues(self, part: Partition, bound: BoundSegment) -> BoundSegment:
        """The segment, and behind it the first parts of breaks that read what it makes."""
        placed = self._compiled.placed.get(part.index, ())
        if not placed:
            return bound
        bindings, views = self._bindings, self._views

        def run(*inputs: Any) -> Sequence[torch.Tensor]:
            results = bound.run(*inputs)
            made = dict(zip(part.outputs, results, strict=True))
            for prologue in placed:
                prologue.on(lambda node: made.get(node, views.get((RESULT, node))), bindings)  # type: ignore[arg-type,return-value]
            return results

        return BoundSegment(run, warm_up=bound.warm_up if bound.warm_up is nothing_new else run)

    def _segment_input(self, source: Source, static: Sequence[Any]) -> Any:
        if source.kind is SourceKind.PADDING:
            token = self._compiled.plan.traced.token_symbol
            assert token is not None and self._buffers.padding is not None
            return self._buffers.padding.rows[: self._bindings[token]]
        if source.static or source.kind is SourceKind.SCALAR:
            return source.value(static, self._bindings)
        assert source.node is not None
        if source.kind is SourceKind.ARGUMENT:
            return self._views[(INPUT, source.node)]
        role = RESULT if self._producer[source.node].is_segment else HANDOFF
        return self._views[(role, source.node)]
