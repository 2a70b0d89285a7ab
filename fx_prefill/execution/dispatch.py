"""Decides for each live forward: which bucket replays it, or why none does.

Note [A refusal has a reason]

Every forward that does not replay runs the graph Dynamo traced, untouched, and is counted under
its reason. Under ``strict`` it raises FallbackError instead.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch._dynamo.utils import counters

from ..errors import FallbackError, PaddingError
from ..graph.normalize import MISSING, value_of
from ..graph.partition import Partition
from ..graph.symbols import evaluate_sizes, size_exprs
from ..options import Options
from .buffers import Buffers, plan_memory
from .capture import Recorder, recorder_for
from .compile import CompiledPlan, CompiledSegment
from .programs import Batch, BatchKeys
from .replay import BucketProgram
from .verify import find_leak

log = logging.getLogger(__name__)

MAX_RECAPTURES = 8
"""Times that moved weights are captured again before the graph stays eager."""


MAX_KNOWN_GUARDS = 4096
"""Answers kept on whether a bucket may serve a call of given sizes."""

_whole_ladder: ContextVar[bool] = ContextVar("fx_prefill_whole_ladder", default=False)


@contextmanager
def whole_ladder() -> Iterator[None]:
    """Forwards inside capture every bucket of their graph instead of their own only."""
    token = _whole_ladder.set(True)
    try:
        yield
    finally:
        _whole_ladder.reset(token)


class FallbackReason(str, Enum):
    """Why a live forward runs eagerly."""

    DISABLED = "replay is disabled (max_tokens=0)"
    TOO_LONG = "above the largest bucket"
    PADDING_OFF = "padding is off and no bucket has this size"
    PADDING_RATIO = "the bucket is above max_padding_ratio"
    GUARD = "the traced graph is not valid at the bucket"
    TRAINING = "gradients are needed"
    UNREADABLE = "the traced graph has a form the pass cannot read"
    WEIGHTS_CHANGED = "a weight changed its shape or keeps moving"
    MODULE_FLOAT = "a module's float changed"
    NO_SEGMENT = "nothing in the graph can be captured"
    CAPTURE_FAILED = "recording a segment failed"
    REENTERED = "called again from inside a replay"
    CALLER_CAPTURES = "the caller is capturing a graph of its own"

    def __str__(self) -> str:
        return self.value


@dataclass
class Counts:
    """What one graph's live forwards did."""

    replays: Counter[int] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    real_rows: int = 0
    padded_rows: int = 0
    recaptures: int = 0
    evicted_batches: int = 0


Key = tuple[int | None, tuple[int, ...]]
"""Bucket (None for a static graph) and batch sizes."""


class PrefillRuntime:
    """A compiled plan and the programs of its buckets; what the backend hands to Dynamo."""

    def __init__(self, compiled: CompiledPlan, options: Options, recorder: Recorder | None = None):
        self.compiled = compiled
        self.options = options
        self.counts = Counts()
        self.refused = _refusal(compiled, options)
        self._traced = compiled.plan.traced
        self._recorder = recorder or recorder_for(compiled.plan.traced.device)
        self._programs: dict[Key, BucketProgram] = {}
        self._buffers: dict[tuple[int, ...], Buffers] = {}
        self._batches = BatchKeys(options.max_batches)
        self._addresses: list[int] = []
        self._weights: list[weakref.ref[torch.Tensor]] = []
        self._weights_fit = True
        self._verified = False
        self._unusable: dict[Key, FallbackReason] = {}
        self._guards: dict[Any, Any] = {}
        self._guard_symbols: frozenset[Any] | None = None
        self._lock = threading.RLock()
        self._running = False

    def __call__(self, *args: Any) -> Any:
        with self._lock:
            if self._running:
                return self._fall_back(FallbackReason.REENTERED, args)
            self._running = True
            try:
                return self._run(args)
            finally:
                self._running = False

    # --- one forward ----------------------------------------------------------------------------

    def _run(self, args: Sequence[Any]) -> Any:
        decision = self.decide(args)
        if isinstance(decision, FallbackReason):
            return self._fall_back(decision, args)
        num_tokens = self._num_tokens(args)
        self._make_room(decision[1])
        program = self._program(decision, args)
        if program is None:
            reason = self.refused or self._unusable.get(decision, FallbackReason.GUARD)
            return self._fall_back(reason, args)
        bucket = decision[0]
        counters["fx_prefill"]["replay"] += 1
        self.counts.replays[bucket or 0] += 1
        if bucket is not None and num_tokens is not None:
            self.counts.real_rows += num_tokens
            self.counts.padded_rows += bucket - num_tokens
        return program.run(args, num_tokens)

    def decide(self, args: Sequence[Any]) -> Key | FallbackReason:
        """The program for a call, or the reason why none may serve it."""
        if self.refused is not None:
            return self.refused
        if self._recorder.is_capturing():
            return FallbackReason.CALLER_CAPTURES
        if any(float(args[i]) != number for i, number in self._traced.folded.items()):
            return FallbackReason.MODULE_FLOAT
        if not self._weights_in_place(args):
            return FallbackReason.WEIGHTS_CHANGED
        num_tokens = self._num_tokens(args)
        bucket = self._bucket(num_tokens)
        if isinstance(bucket, FallbackReason):
            return bucket
        key = (bucket, self._batch(args))
        if self._broken_guard(key, args) is not None:
            return FallbackReason.GUARD
        return self._unusable.get(key, key)

    def _broken_guard(self, key: Key, args: Sequence[Any]) -> str | None:
        """The guard of the traced graph that a bucket breaks, given this call's other sizes."""
        if self._guard_symbols is None:
            self._guard_symbols = self._traced.guard_symbols() - self._traced.size_symbols
        sources = self._traced.sources
        others = tuple(sources[s].read(args) for s in self._guard_symbols if s in sources)
        if others:  # what they may become at the bucket depends on the real count too
            others = (*others, self._num_tokens(args))
        known = self._guards.get((key, others), MISSING)
        if known is MISSING:
            known = self._traced.broken_guard(self._traced.symbol_values(args), self._bindings(key))
            if len(self._guards) >= MAX_KNOWN_GUARDS:
                self._guards.clear()
            self._guards[(key, others)] = known
            if known is not None:
                log.info("bucket %s is not used: the traced graph needs %s", key[0], known)
        return known

    def _num_tokens(self, args: Sequence[Any]) -> int | None:
        token = self._traced.token_symbol
        return None if token is None else int(self._traced.sources[token].read(args))

    def _batch(self, args: Sequence[Any]) -> tuple[int, ...]:
        return tuple(self._traced.sources[s].read(args) for s in self._traced.batch_symbols)

    def _bucket(self, num_tokens: int | None) -> int | FallbackReason | None:
        if num_tokens is None:
            return None  # a fully static graph is one exact bucket
        bucket = self.options.choose_bucket(num_tokens)
        if bucket is None:
            return FallbackReason.TOO_LONG
        if bucket == num_tokens:
            return bucket
        if not self.options.padding:
            return FallbackReason.PADDING_OFF
        smallest = self.options.ladder[0]
        if bucket > smallest and bucket > num_tokens * self.options.max_padding_ratio:
            return FallbackReason.PADDING_RATIO
        return bucket

    def _fall_back(self, reason: FallbackReason, args: Sequence[Any]) -> Any:
        self.counts.fallbacks[str(reason)] += 1
        counters["fx_prefill"][f"fallback: {reason}"] += 1
        if self.options.strict:
            raise FallbackError(
                f"this forward ({self._describe(args)}) would run eagerly: {reason}; under "
                "strict=True that is an error"
            )
        return self._traced.original(*args)

    def _describe(self, args: Sequence[Any]) -> str:
        count = self._num_tokens(args)
        return "a static graph" if count is None else f"{count} tokens"

    def reads(self, tensors: frozenset[int]) -> bool:
        """Whether a weight of the last call is among these tensors, given by ``id``."""
        return any(id(ref()) in tensors for ref in self._weights if ref() is not None)

    # --- weights --------------------------------------------------------------------------------

    def _weights_in_place(self, args: Sequence[Any]) -> bool:
        """Note [Addresses are checked]: a moved weight is never read at its old place."""
        static = [args[i] for i in self._traced.static_indices]
        addresses = [tensor.data_ptr() for tensor in static]
        if addresses == self._addresses:
            return self._weights_fit
        if self._programs:
            self.counts.recaptures += 1
            log.warning(
                "%d weights have moved since capture; %s",
                sum(a != b for a, b in zip(addresses, self._addresses, strict=True)),
                "the graph is captured again"
                if self.counts.recaptures <= MAX_RECAPTURES
                else "they keep moving, so the graph now runs eagerly",
            )
            self._programs.clear()
        self._addresses = addresses
        self._weights = [weakref.ref(tensor) for tensor in static]
        self._weights_fit = self.counts.recaptures <= MAX_RECAPTURES and self._weights_have_shape(
            args
        )
        return self._weights_fit

    def _weights_have_shape(self, args: Sequence[Any]) -> bool:
        for index in self._traced.static_indices:
            traced, live = value_of(self._traced.placeholders[index]), args[index]
            if traced.dtype != live.dtype or traced.device != live.device:
                return False
            if evaluate_sizes(size_exprs(traced), {}) != tuple(live.shape):
                return False
            if traced.stride() != live.stride():
                return False
        return True

    # --- capture --------------------------------------------------------------------------------

    def _make_room(self, batch: Batch) -> None:
        """Give up the batch that was of use the longest ago, if this one is one too many."""
        old = self._batches.use(batch)
        if old is None:
            return
        self.counts.evicted_batches += 1
        log.info(
            "batch %s gives up its programs for batch %s (max_batches=%d)",
            list(old),
            list(batch),
            self.options.max_batches,
        )
        for key in [key for key in self._programs if key[1] == old]:
            del self._programs[key]
        self._buffers.pop(old, None)

    def _program(self, key: Key, args: Sequence[Any]) -> BucketProgram | None:
        known = self._programs.get(key)
        if _whole_ladder.get() or (self.options.capture == "all" and not self._programs):
            self._capture_ladder(key[1], args)
            known = self._programs.get(key)
        return known or self._capture(key, args)

    @property
    def captured(self) -> tuple[Key, ...]:
        """Buckets, with their batch, that are ready to replay."""
        return tuple(self._programs)

    def _capture_ladder(self, batch: tuple[int, ...], args: Sequence[Any]) -> None:
        has_tokens = self._traced.token_symbol is not None
        for bucket in reversed(self.options.ladder) if has_tokens else (None,):
            if (bucket, batch) not in self._programs and (bucket, batch) not in self._unusable:
                self._capture((bucket, batch), args)

    def _capture(self, key: Key, args: Sequence[Any]) -> BucketProgram | None:
        bindings = self._bindings(key)
        if self._broken_guard(key, args) is not None:
            return None
        try:
            self._verify(bindings, args)
            if not self.compiled.segments:
                self.refused = FallbackReason.NO_SEGMENT
                return None
            buffers = self._buffers_for(key, bindings)
            program = BucketProgram(self.compiled, buffers, self._recorder, args, bindings)
        except (PaddingError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:
            if self.options.strict:
                raise
            log.exception("bucket %s could not be captured; it runs eagerly", key[0])
            self._unusable[key] = FallbackReason.CAPTURE_FAILED
            return None
        self._programs[key] = program
        return program

    def _bindings(self, key: Key) -> dict[Any, int]:
        bucket, batch = key
        bindings = dict(zip(self._traced.batch_symbols, batch, strict=True))
        if self._traced.token_symbol is not None and bucket is not None:
            bindings[self._traced.token_symbol] = bucket
        return bindings

    def _buffers_for(self, key: Key, bindings: dict[Any, int]) -> Buffers:
        batch = key[1]
        if batch not in self._buffers:
            top = dict(bindings)
            if self._traced.token_symbol is not None:
                top[self._traced.token_symbol] = self.options.ladder[-1]
            memory = plan_memory(
                self.compiled.plan, self.compiled.partitions, self._recorder.takes_buffers
            )
            self._buffers[batch] = Buffers(memory, top)
        return self._buffers[batch]

    def _verify(self, bindings: dict[Any, int], args: Sequence[Any]) -> None:
        """Check the padding proof once for every distinct segment; demote what fails."""
        if self._verified:
            return
        leaks: dict[int, str] = {}
        checked: set[int] = set()
        for part in self.compiled.partitions:
            segment = self.compiled.segments.get(part.index)
            if segment is None or segment.number in checked:
                continue
            checked.add(segment.number)
            leak = self._leak(part, segment, bindings, args)
            if leak is not None:
                leaks[segment.number] = leak
        if leaks:
            text = "; ".join(f"segment {number}: {leak}" for number, leak in leaks.items())
            if self.options.strict:
                raise PaddingError(f"segments failed their check at a bucket: {text}")
            log.warning("segments that failed their check at a bucket run eagerly: %s", text)
            self.compiled = self.compiled.demote(leaks)
        token = self._traced.token_symbol
        self._verified = token is None or bindings[token] > 1

    def _leak(
        self,
        part: Partition,
        segment: CompiledSegment,
        bindings: dict[Any, int],
        args: Sequence[Any],
    ) -> str | None:
        try:
            leak = find_leak(self.compiled.plan, part, segment.function, args, bindings)
            return leak and f"padded rows reach real rows at {leak}"
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # Rows nobody asked for must not be able to stop a forward either.
            return f"it fails with garbage in padded rows ({type(error).__name__}: {error})"


def _refusal(compiled: CompiledPlan, options: Options) -> FallbackReason | None:
    if not options.ladder:
        return FallbackReason.DISABLED
    if not compiled.segments:
        return FallbackReason.NO_SEGMENT
    return None
