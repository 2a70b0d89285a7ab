"""The captured programs of one graph: made when first needed, given back when one fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import CaptureOutOfMemory, PaddingError
from ..graph.causal import causal_breaks
from ..graph.partition import Partition, PartitionPlan
from ..graph.trace import TracedGraph
from ..options import Options
from .buffers import Buffers, PaddingRows, plan_memory
from .capture import Recorder
from .compile import CompiledPlan, captures_attention, compiler_for, fuses, has_graphs
from .estimate import graph_bytes
from .merge import merge, merged_partitions
from .programs import Batch
from .replay import BucketProgram
from .specialize import specialized
from .verify import checked_plan

log = logging.getLogger(__name__)

CAPTURED_ATTENTION_TOKENS = 2048
"""Largest bucket whose causal attention is captured when nothing is asked for: its work grows with
the square of the bucket, what a break costs does not."""

NEVER_HIDDEN = (PaddingError, MemoryError, CaptureOutOfMemory)
"""Failures of a capture that no eager fallback hides."""

Key = tuple[int | None, Batch]
"""Bucket (None for a static graph) and batch sizes."""


class Captures:
    """Programs by bucket and batch, the buffers they share, and the recorder that makes them."""

    def __init__(self, compiled: CompiledPlan, options: Options, recorder: Recorder) -> None:
        self.compiled = compiled
        self.programs: dict[Key, BucketProgram] = {}
        self._options = options
        self._recorder = recorder
        self._traced: TracedGraph = compiled.plan.traced
        self._merged: CompiledPlan | None = None
        self._buffers: dict[tuple[Batch, bool], Buffers] = {}
        self._tops: dict[Batch, int | None] = {}
        self._checked = False

    @property
    def num_bytes(self) -> int:
        """Bytes that buffers and captured graphs take now."""
        return self._recorder.num_bytes() + sum(b.num_bytes for b in self._buffers.values())

    def bindings(self, key: Key) -> dict[Any, int]:
        """Sizes at a bucket and batch, by symbol."""
        bucket, batch = key
        bindings = dict(zip(self._traced.batch_symbols, batch, strict=True))
        if self._traced.token_symbol is not None and bucket is not None:
            bindings[self._traced.token_symbol] = bucket
        return bindings

    def check(self, key: Key, static: Sequence[Any]) -> None:
        """Check the padding proof, once; what fails runs eagerly from then on."""
        if not self._checked:
            bindings = self.bindings(key)
            strict = self._options.strict
            self.compiled = checked_plan(self.compiled, bindings, static, strict=strict)
            token = self._traced.token_symbol
            self._checked = token is None or bindings[token] > 1

    def make(self, key: Key, static: Sequence[Any]) -> BucketProgram:
        """Capture a bucket. A failure leaves no graph and no buffer of its own behind.

        ``static`` are call arguments of which the weights are read. Raises CaptureOutOfMemory.
        """
        self.check(key, static)
        compiled = self.compiled_for(key[0])
        known = (key[1], compiled is self._merged)
        if key[0] in self._options.specialize:
            compiled = self._specialized(key, static)
        try:
            buffers = self._buffers.get(known) or self._make_buffers(key, compiled)
            program = BucketProgram(compiled, buffers, self._recorder, static, self.bindings(key))
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(key, error) from error
        self._buffers[known] = buffers
        self.programs[key] = program
        return program

    def _specialized(self, key: Key, static: Sequence[Any]) -> CompiledPlan:
        plan = specialized(self.compiled, static, self.bindings(key), self._options)
        captures_attention = plan.causal and takes_attention(self._options, key[0])
        return merge(plan) if captures_attention else plan

    def forget_batch(self, batch: Batch) -> None:
        """Drop the programs and buffers of one batch."""
        for key in [key for key in self.programs if key[1] == batch]:
            del self.programs[key]
        for known in [known for known in self._buffers if known[0] == batch]:
            del self._buffers[known]

    def forget(self) -> None:
        """Drop every program; their buffers stay for those that replace them."""
        self.programs.clear()

    def compiled_for(self, bucket: int | None) -> CompiledPlan:
        """The plan as a bucket runs it: with its causal attention captured, or eager."""
        if not self.compiled.causal or not takes_attention(self._options, bucket):
            return self.compiled
        if self._merged is None:
            self._merged = merge(self.compiled)
        return self._merged

    # --- memory ---------------------------------------------------------------------------------

    def estimate(self, key: Key) -> int:
        """Bytes of buffers and graphs when this is the largest bucket captured."""
        return estimated_bytes(self.compiled_for(key[0]), self.bindings(key))

    def top(self, batch: Batch) -> int | None:
        """The largest bucket that ``max_graph_memory`` allows; None when it allows none."""
        if batch not in self._tops:
            self._tops[batch] = self._find_top(batch)
        return self._tops[batch]

    def _find_top(self, batch: Batch) -> int | None:
        ladder, limit = self._options.ladder, self._options.max_graph_memory
        if limit is None or self._traced.token_symbol is None:
            return ladder[-1]
        fitting = [bucket for bucket in ladder if self.estimate((bucket, batch)) <= limit]
        if len(fitting) < len(ladder):
            log.warning(
                "max_graph_memory is %d bytes: buckets above %s are left out (%d is estimated to "
                "take %d bytes); longer forwards run eagerly",
                limit,
                fitting[-1] if fitting else 0,
                ladder[-1],
                self.estimate((ladder[-1], batch)),
            )
        return fitting[-1] if fitting else None

    def _make_buffers(self, key: Key, compiled: CompiledPlan) -> Buffers:
        top = self.bindings(key)
        padding = None
        largest = self.top(key[1])
        if self._traced.token_symbol is not None and largest is not None:
            top[self._traced.token_symbol] = largest
            if compiled.needs_padding:
                padding = PaddingRows(largest, self._traced.device)
        memory = plan_memory(compiled.plan, compiled.partitions, self._recorder.takes_buffers)
        return Buffers(memory, top, padding)

    def _out_of_memory(self, key: Key, error: BaseException) -> CaptureOutOfMemory:
        free = ""
        if self._traced.device.type == "cuda":
            free = f"{torch.cuda.mem_get_info(self._traced.device)[0]} bytes are free; "
        return CaptureOutOfMemory(
            f"out of memory while capturing bucket {key[0]} (batch {list(key[1]) or 'fixed'}): its "
            f"graphs and buffers are estimated to take {self.estimate(key)} bytes; {free}"
            f"{str(error).splitlines()[0]} What this capture had made was given back. Lower "
            "max_tokens, give fewer or smaller buckets, or set max_graph_memory to the bytes there "
            "are"
        )


def estimated_bytes(compiled: CompiledPlan, bindings: dict[Any, int]) -> int:
    """Bytes a compiled plan will take at a bucket."""
    return graph_bytes(
        compiled.plan,
        compiled.partitions,
        bindings,
        fused=fuses(compiled),
        pooled=has_graphs(compiled.plan.traced.device),
    )


def planned_bytes(plan: PartitionPlan, options: Options, bindings: dict[Any, int]) -> int:
    """The same for a plan that nothing has been compiled for."""
    partitions: Sequence[Partition] = plan.partitions
    bucket = bindings.get(plan.traced.token_symbol)
    if captures_attention(plan, options) and takes_attention(options, bucket):
        causal = causal_breaks(plan)
        partitions = [part for part, _ in merged_partitions(plan, partitions, causal)]
    return graph_bytes(
        plan,
        partitions,
        bindings,
        fused=compiler_for(plan, options) != "eager",
        pooled=has_graphs(plan.traced.device),
    )


def takes_attention(options: Options, bucket: int | None) -> bool:
    """Whether a bucket captures its causal attention, where that is done at all."""
    asked = options.capture_attention is not None
    return bucket is not None and (asked or bucket <= CAPTURED_ATTENTION_TOKENS)
