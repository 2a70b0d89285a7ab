"""Decides for each live forward: which bucket replays it, or why none does."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from torch._dynamo.utils import counters

from ..errors import FallbackError
from ..graph.normalize import MISSING
from ..options import Options
from .bound import MOVED
from .capture import Recorder, recorder_for
from .captures import NEVER_HIDDEN, Captures, Key
from .compile import CompiledPlan
from .programs import Batch, BatchKeys
from .progress import progress
from .prologue import Prologue
from .reasons import OTHER_BUCKETS_MAY_SERVE, Counts, FallbackReason, Outdated
from .replay import BucketProgram
from .weights import Weights

log = logging.getLogger(__name__)

MAX_RECAPTURES = 8
"""Times that moved weights are captured again before the graph stays eager."""


MAX_KNOWN_GUARDS = 4096
"""Answers kept on whether a bucket may serve a call of given sizes."""

_whole_ladder: ContextVar[bool] = ContextVar("fx_prefill_whole_ladder", default=False)


def _as_they_are(args: list[Any]) -> list[Any]:
    return args


@contextmanager
def whole_ladder() -> Iterator[None]:
    """Forwards inside capture every bucket of their graph instead of their own only."""
    token = _whole_ladder.set(True)
    try:
        yield
    finally:
        _whole_ladder.reset(token)


class PrefillRuntime:
    """A compiled plan and the programs of its buckets; what the backend hands to Dynamo."""

    def __init__(self, compiled: CompiledPlan, options: Options, recorder: Recorder | None = None):
        self.options = options
        self.counts = Counts()
        self.refused = _refusal(compiled, options)
        self._traced = compiled.plan.traced
        self.recorder = recorder or recorder_for(compiled.plan.traced.device)
        self._captures = Captures(compiled, options, self.recorder)
        self._queue: dict[Key, None] = {}
        self._batches = BatchKeys(options.max_batches)
        self._weights = Weights(self._traced)
        self._weights_fit = True
        self._unusable: dict[Key, FallbackReason] = {}
        self._guards: dict[Any, Any] = {}
        self._claims: dict[tuple[tuple[int, ...], int | None], bool] = {}
        self._known: dict[tuple[int, int | None], Key] = {}
        self._guard_symbols: frozenset[Any] | None = None
        self._lock = threading.RLock()
        self._running = False

    def __call__(self, *args: Any) -> Any:
        with self._lock:
            if self._running:
                return self._fall_back(FallbackReason.REENTERED, args)
            self._running = True
            try:
                return self._run(list(args))
            finally:
                self._running = False

    # --- one forward ----------------------------------------------------------------------------

    def run_at(
        self, args: list[Any], bucket: int, refresh: Callable[[list[Any]], list[Any]]
    ) -> Any:
        """One forward in a bucket that the caller chose, at least as large as its token count.

        ``args`` are the graph's arguments, as for a call; ``refresh`` brings their weights up to
        date, which waits until the device has work where weights are pinned. Where that bucket
        cannot serve, the FallbackReason is counted and returned: no guards have shown that the
        traced graph fits, so what runs instead is the caller's.
        """
        with self._lock:
            if self._running:
                return self._refuse(FallbackReason.REENTERED, args)
            self._running = True
            try:
                return self._run_known(args, bucket, refresh)
            except Outdated:
                return self._refuse(FallbackReason.MODULE_REPLACED, args)
            finally:
                self._running = False

    def _run_known(
        self, args: list[Any], bucket: int, refresh: Callable[[list[Any]], list[Any]]
    ) -> Any:
        """A call of sizes seen before goes straight to its program.

        Nothing that was decided then can be otherwise now, but what is looked at here: calls of
        :meth:`run_at` differ in their token count, weights and tensors only.
        """
        num_tokens = self._num_tokens(args)
        key = self._known.get((bucket, num_tokens))
        program = None if key is None else self._captures.programs.get(key)
        if program is None or not self._weights.held or self.recorder.is_capturing():
            return self._run(args, bucket, refresh)
        assert key is not None
        return self._replay(program, key, args, num_tokens, bucket, refresh, late=True)

    def capture_bucket(self, args: list[Any], bucket: int) -> bool:
        """Capture one bucket; whether it is ready to replay.

        Of ``args``, a call's arguments, the weights and the sizes that are not the token count are
        read. Raises CaptureOutOfMemory.
        """
        with self._lock:
            if self.refused is not None or not self._weights_usable(args):
                return False
            key = (bucket, self._batch(args))
            if not self._fits(bucket, key[1]) or self._broken_guard(key, args) is not None:
                return False
            self._make_room(key[1])
            return key in self._captures.programs or self._capture(key, args) is not None

    def capture_prologues(self, prologues: Mapping[str, Prologue]) -> None:
        """Capture first parts of breaks with the segments before them; before any bucket is."""
        self._captures.compiled = replace(self._captures.compiled, prologues=prologues)

    def drop_bucket(self, bucket: int) -> None:
        """Give up what a bucket captured and do not capture it again."""
        with self._lock:
            for key in [key for key in self._captures.programs if key[0] == bucket]:
                del self._captures.programs[key]
                self._unusable[key] = FallbackReason.CAPTURE_FAILED

    def _run(
        self,
        args: list[Any],
        bucket: int | None = None,
        refresh: Callable[[list[Any]], list[Any]] = _as_they_are,
    ) -> Any:
        fall_back = self._fall_back if bucket is None else self._refuse
        # Held memory cannot be freed, so what is launched on it may be looked at afterwards.
        late = self._weights.held
        if not late:
            args = refresh(args)
        decision = self.decide(args, weights_later=late, bucket=bucket)
        if late and decision not in self._captures.programs:
            args = refresh(args)  # what follows reads them
        if isinstance(decision, FallbackReason):
            if _whole_ladder.get() and decision in OTHER_BUCKETS_MAY_SERVE:
                self._make_room(self._batch(args))
                self._capture_ladder(self._batch(args), args)
            return fall_back(decision, args)
        num_tokens = self._num_tokens(args)
        self._make_room(decision[1])
        program = self._program(decision, args)
        if isinstance(program, FallbackReason):
            return fall_back(program, args)
        if bucket is not None and len(self._known) < MAX_KNOWN_GUARDS:
            self._known[(bucket, num_tokens)] = decision
        return self._replay(program, decision, args, num_tokens, bucket, refresh, late)

    def _replay(
        self,
        program: BucketProgram,
        key: Key,
        args: list[Any],
        num_tokens: int | None,
        bucket: int | None,
        refresh: Callable[[list[Any]], list[Any]],
        late: bool,
    ) -> Any:
        """Run a program, ``late``: its weights are looked at when the device has work."""
        confirm = (lambda: self._weights.in_place(refresh(args))) if late else None
        try:
            result = program.run(args, num_tokens, confirm)
        except Exception:
            # Without device graphs a segment meets moved weights before they are looked at.
            if confirm is None or confirm():
                raise
            result = MOVED
        if result is MOVED:
            self._weights.let_go()
            return self._run(args, bucket, refresh)
        self._count(key[0], num_tokens)
        return result

    def _count(self, bucket: int | None, num_tokens: int | None) -> None:
        counters["fx_prefill"]["replay"] += 1
        self.counts.replays[bucket or 0] += 1
        if bucket is not None and num_tokens is not None:
            self.counts.real_rows += num_tokens
            self.counts.padded_rows += bucket - num_tokens

    def decide(
        self, args: list[Any], weights_later: bool = False, bucket: int | None = None
    ) -> Key | FallbackReason:
        """The program for a call (in the bucket, if one is given), or why none may serve it."""
        if self.refused is not None:
            return self.refused
        if self.recorder.is_capturing():
            return FallbackReason.CALLER_CAPTURES
        if any(float(args[i]) != number for i, number in self._traced.folded.items()):
            return FallbackReason.MODULE_FLOAT
        if not weights_later and not self._weights_usable(args):
            return FallbackReason.WEIGHTS_CHANGED
        num_tokens = self._num_tokens(args)
        chosen = self._bucket(num_tokens) if bucket is None else bucket
        if isinstance(chosen, FallbackReason):
            return chosen
        key = (chosen, self._batch(args))
        if chosen is not None and not self._fits(chosen, key[1]):
            return FallbackReason.MEMORY
        if self._broken_guard(key, args) is not None:
            return FallbackReason.GUARD
        if not self._claims_hold(key[1], num_tokens):
            return FallbackReason.MASK
        return self._unusable.get(key, key)

    def _fits(self, bucket: int, batch: tuple[int, ...]) -> bool:
        top = self._captures.top(batch)
        return top is not None and bucket <= top

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
            known = self._traced.broken_guard(
                self._traced.symbol_values(args), self._captures.bindings(key)
            )
            if len(self._guards) >= MAX_KNOWN_GUARDS:
                self._guards.clear()
            self._guards[(key, others)] = known
            if known is not None:
                log.info("bucket %s is not used: the traced graph needs %s", key[0], known)
        return known

    def _claims_hold(self, batch: tuple[int, ...], num_tokens: int | None) -> bool:
        """Note [A claim is checked at every count], in ``graph/masks.py``."""
        if not self._traced.claims:
            return True
        known = self._claims.get((batch, num_tokens))
        if known is None:
            sizes = self._captures.bindings((num_tokens, batch))
            known = all(claim.holds(sizes) for claim in self._traced.claims)
            if len(self._claims) >= MAX_KNOWN_GUARDS:
                self._claims.clear()
            self._claims[(batch, num_tokens)] = known
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
        self._refuse(reason, args)
        return self._traced.original(*args)

    def _refuse(self, reason: FallbackReason, args: Sequence[Any]) -> FallbackReason:
        self.counts.fallbacks[str(reason)] += 1
        counters["fx_prefill"][f"fallback: {reason}"] += 1
        if self.options.strict:
            raise FallbackError(
                f"this forward ({self._describe(args)}) would run eagerly: {reason}; under "
                "strict=True that is an error"
            )
        return reason

    def _describe(self, args: Sequence[Any]) -> str:
        count = self._num_tokens(args)
        return "a static graph" if count is None else f"{count} tokens"

    def reads(self, tensors: frozenset[int]) -> bool:
        """Whether a weight of the last call is among these tensors, given by ``id``."""
        return self._weights.among(tensors)

    # --- weights --------------------------------------------------------------------------------

    def _weights_usable(self, args: list[Any]) -> bool:
        """Whether captures can read the weights of this call; moved ones are captured again."""
        if self._weights.in_place(args):
            return self._weights_fit
        if self._captures.programs:
            self.counts.recaptures += 1
            log.warning(
                "%d weights have moved since capture; %s",
                self._weights.num_moved(args),
                "the graph is captured again"
                if self.counts.recaptures <= MAX_RECAPTURES
                else "they keep moving, so the graph now runs eagerly",
            )
            self._captures.forget()
        self._weights.remember(args)
        self._weights_fit = self.counts.recaptures <= MAX_RECAPTURES and self._weights.fit(args)
        if self.options.pin_weights and self._weights_fit:
            self._weights.hold(args)
        return self._weights_fit

    # --- capture --------------------------------------------------------------------------------

    def _make_room(self, batch: Batch) -> None:
        """Give up the batch that was of use the longest ago, if this one is one too many."""
        old = self._batches.use(batch)
        if old is not None:
            self.counts.evicted_batches += 1
            log.info(
                "batch %s gives up its programs for batch %s (max_batches=%d)",
                list(old),
                list(batch),
                self.options.max_batches,
            )
            self._captures.forget_batch(old)

    @property
    def compiled(self) -> CompiledPlan:
        """The plan as it is compiled; what failed its check runs eagerly in it."""
        return self._captures.compiled

    @property
    def captured(self) -> tuple[Key, ...]:
        """Buckets, with their batch, that are ready to replay."""
        return tuple(self._captures.programs)

    @property
    def queued(self) -> tuple[Key, ...]:
        """Buckets, with their batch, that calls asked for and the next warm-up captures."""
        return tuple(self._queue)

    @property
    def captured_breaks(self) -> dict[int, int]:
        """Breaks that are inside the recording of a captured bucket; buckets with none left out."""
        found = {}
        planned = sum(not part.is_segment for part in self.compiled.partitions)
        for bucket, _ in self._captures.programs:
            left = self._captures.compiled_for(bucket).partitions
            inside = planned - sum(not part.is_segment for part in left)
            if bucket is not None and inside:
                found[bucket] = inside
        return dict(sorted(found.items()))

    @property
    def graph_bytes(self) -> int:
        """Bytes that buffers and captured graphs take now."""
        return self._captures.num_bytes

    def breaks_at(self, num_tokens: int) -> int:
        """Breaks that run eagerly in a captured forward of this many tokens; 0 if none is."""
        bucket = self._bucket(num_tokens)
        if isinstance(bucket, FallbackReason):
            return 0
        return sum(not part.is_segment for part in self._captures.compiled_for(bucket).partitions)

    def capture_queued(self) -> None:
        """Capture the buckets that calls asked for and did not get, largest first.

        Does nothing once the weights those calls had are gone.
        """
        with self._lock:
            static = self._weights.arguments()
            if static is not None and self._weights_usable(static):
                keys = sorted(self._queue, key=lambda key: -(key[0] or 0))
                for key in progress(keys, self.options.progress):
                    self._make_room(key[1])
                    self._capture(key, static)
                self._queue.clear()

    def _program(self, key: Key, args: Sequence[Any]) -> BucketProgram | FallbackReason:
        known = self._captures.programs.get(key)
        if _whole_ladder.get() or (self.options.capture == "all" and not self._captures.programs):
            self._capture_ladder(key[1], args)
            known = self._captures.programs.get(key)
        if known is not None:
            return known
        if self.options.capture == "queued" and not _whole_ladder.get():
            self._queue[key] = None
            return FallbackReason.QUEUED
        return self._capture(key, args) or self.refused or self._unusable[key]

    def _capture_ladder(self, batch: tuple[int, ...], args: Sequence[Any]) -> None:
        top = self._captures.top(batch)
        ladder: list[int | None] = [None]
        if self._traced.token_symbol is not None:
            ladder = [b for b in reversed(self.options.ladder) if top is not None and b <= top]
        missing = [
            (bucket, batch)
            for bucket in ladder
            if (bucket, batch) not in self._captures.programs
            and (bucket, batch) not in self._unusable
            and self._broken_guard((bucket, batch), args) is None
        ]
        for key in progress(missing, self.options.progress):
            self._capture(key, args)

    def _capture(self, key: Key, args: Sequence[Any]) -> BucketProgram | None:
        try:
            self._captures.check(key, args)
            if not self.compiled.segments:
                self.refused = FallbackReason.NO_SEGMENT
                return None
            return self._captures.make(key, args)
        except NEVER_HIDDEN:
            raise
        except Exception as error:
            if self.options.strict:
                raise
            # As text: a traceback that a log handler keeps would keep the memory of the capture.
            text = "".join(traceback.format_exception(error))
            log.error("bucket %s could not be captured; it runs eagerly\n%s", key[0], text)
            self._unusable[key] = FallbackReason.CAPTURE_FAILED
            return None


def _refusal(compiled: CompiledPlan, options: Options) -> FallbackReason | None:
    if not options.ladder:
        return FallbackReason.DISABLED
    if not compiled.segments:
        return FallbackReason.NO_SEGMENT
    return None
