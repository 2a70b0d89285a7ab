"""Decisions that all ranks agree on: what was captured, and which bucket a forward takes.

Note [Nobody waits for ever]

A rank that fails alone and says nothing leaves the others in a collective that it never joins. So
after each bucket all ranks meet on a CPU group, whatever happened to them, out of memory included,
and act on the worst outcome. A CPU group, as a rank that is out of device memory, or whose device
work failed, can still answer there. What leaves a rank without an answer (Ctrl-C, an engine that
ends the process) ends the wait of the others too: with an error at once when the process is gone,
and otherwise after the timeout that the group was made with.

Note [The same decision without a word]

A live forward cannot afford an agreement. Its bucket, and whether it replays at all, are computed
by each rank from the ``rank_*`` fields, which are the same on all of them. A fact that only one
rank knows must not reach the decision: that rank would replay a bucket while the others wait in a
collective of another shape.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import distributed as dist

from ..errors import CaptureError, CaptureOutOfMemory, ContextError, ServingError
from ..execution.dispatch import PrefillRuntime
from ..graph.partition import PartitionPlan
from ..graph.rules import is_collective
from .context import ForwardContext, ForwardMode

log = logging.getLogger(__name__)


class Outcome(IntEnum):
    """What became of a bucket on one rank; the least of all ranks is what became of it."""

    OUT_OF_MEMORY = 0
    FAILED = 1
    CAPTURED = 2


# --- with communication, while capturing --------------------------------------------------------


def agree(outcome: Outcome, group: dist.ProcessGroup | None) -> Outcome:
    """The worst outcome of all ranks of a CPU group; without a group, or alone in it, one's own.

    Raises ServingError for a group that cannot reduce on the CPU, and CaptureError when another
    rank does not answer within the group's timeout.
    """
    if _alone(group):
        return outcome
    worst = torch.tensor([int(outcome)], dtype=torch.int64, device="cpu")
    with _answered():
        dist.all_reduce(worst, op=dist.ReduceOp.MIN, group=group)
    return Outcome(int(worst))


def require_same(what: str, value: Any, group: dist.ProcessGroup | None) -> None:
    """Raise ServingError on every rank unless ``value``, which must pickle, is equal on all."""
    if _alone(group):
        return
    values: list[Any] = [None] * dist.get_world_size(group)
    with _answered():
        dist.all_gather_object(values, value, group=group)
    if any(other != values[0] for other in values):
        seen = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
        raise ServingError(
            f"{what} must be the same on all ranks of the group and is not ({seen}); give every "
            "rank the same model and options"
        )


def capture_together(
    buckets: Iterable[int],
    capture: Callable[[int], object],
    discard: Callable[[int], object],
    group: dist.ProcessGroup | None,
    *,
    strict: bool = False,
) -> tuple[int, ...]:
    """Capture buckets on all ranks, largest first; returns those that every rank captured.

    ``capture`` raises where it fails. ``discard`` gives up what a rank has of a bucket, which may
    be nothing. Where a rank runs out of memory every rank discards the bucket and raises
    CaptureOutOfMemory. Where one fails otherwise, all leave the bucket out and go on; under
    ``strict`` all raise CaptureError. Be strict where segments hold collectives
    (:func:`captures_collectives`): the ranks that did not fail have launched some that the failing
    one never joins, and nothing may follow those.

    Raises ServingError where ranks are given different buckets.
    """
    wanted = sorted(set(buckets), reverse=True)
    require_same("what to capture", {"buckets": wanted, "strict": strict}, group)
    captured = []
    for bucket in wanted:
        error = _failure(bucket, capture)
        agreed = agree(_outcome(error), group)
        if agreed is Outcome.CAPTURED:
            captured.append(bucket)
        elif agreed is Outcome.OUT_OF_MEMORY or strict:
            raise _given_up(bucket, discard, error, agreed)
        else:
            why = "another rank could not capture it" if error is None else _text_of(error)
            log.error("bucket %d is left out on all ranks: %s", bucket, why)
            error = None  # and with it the memory that its frames may still hold
            _discard_together(bucket, discard, group)
    return tuple(captured)


def do_together(what: str, do: Callable[[], object], group: dist.ProcessGroup | None) -> None:
    """Do on all ranks what may fail on one before any meet; then every rank raises."""
    error = _failure(0, lambda _: do())
    if agree(_outcome(error), group) is Outcome.CAPTURED:
        return
    if error is not None:
        raise error
    raise CaptureError(f"another rank could not {what}, so no rank goes on; see that rank's error")


def forbid_falling_back_alone(runtimes: Sequence[PrefillRuntime]) -> bool:
    """Whether segments hold collectives; a forward that falls back is then an error.

    Other ranks would wait in a collective of another shape.
    """
    found = any(captures_collectives(runtime.compiled.plan) for runtime in runtimes)
    if found:
        for runtime in runtimes:
            runtime.options = replace(runtime.options, strict=True)
    return found


def captures_collectives(plan: PartitionPlan) -> bool:
    """Whether a segment of a plan holds a collective."""
    nodes = (node for part in plan.segments for node in part.nodes)
    return any(is_collective(name) for node in nodes for name in plan.verdicts[node].operators)


def _failure(bucket: int, capture: Callable[[int], object]) -> Exception | None:
    """Capture a bucket; what it raised, with the tensors of its frames let go.

    KeyboardInterrupt, SystemExit and the like pass: note [Nobody waits for ever] says how the
    other ranks come to know. Answering for the user here would make Ctrl-C wait for them.
    """
    try:
        capture(bucket)
    except Exception as error:
        for cause in _causes(error):
            traceback.clear_frames(cause.__traceback__)
        return error
    return None


def _outcome(error: Exception | None) -> Outcome:
    if error is None:
        return Outcome.CAPTURED
    exhausted = (torch.OutOfMemoryError, CaptureOutOfMemory, MemoryError)
    ran_out = any(isinstance(cause, exhausted) for cause in _causes(error))
    return Outcome.OUT_OF_MEMORY if ran_out else Outcome.FAILED


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it was raised from: compilers wrap an out-of-memory in one of their own."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _text_of(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def _given_up(
    bucket: int, discard: Callable[[int], object], error: Exception | None, agreed: Outcome
) -> Exception:
    """Discard a bucket for good; the error that this rank raises, as all others do."""
    left = _failure(bucket, discard)
    if left is not None:
        log.error("bucket %d could not be given up: %s", bucket, _text_of(left))
    if isinstance(error, CaptureOutOfMemory):
        return error
    own = error is not None and _outcome(error) is agreed
    where = "this rank" if own else "another rank"
    made: Exception
    if agreed is Outcome.OUT_OF_MEMORY:
        made = CaptureOutOfMemory(
            f"{where} ran out of memory while capturing bucket {bucket}, so no rank goes on. Lower "
            "max_tokens, give fewer or smaller buckets, or set max_graph_memory, on all ranks"
        )
    else:
        made = CaptureError(
            f"{where} could not capture bucket {bucket}, and under strict=True, or with "
            "collectives in segments, no rank goes on; see the cause, or that rank's error"
        )
    made.__cause__ = error
    return made


def _discard_together(
    bucket: int, discard: Callable[[int], object], group: dist.ProcessGroup | None
) -> None:
    """Discard on all ranks; where that fails on one, all raise instead of going on without it."""
    error = _failure(bucket, discard)
    if agree(_outcome(error), group) is not Outcome.CAPTURED:
        where = "another rank" if error is None else "this rank"
        raise CaptureError(
            f"{where} could not give up what it had of bucket {bucket} after a failed capture, so "
            "no rank goes on; see the cause, or that rank's error"
        ) from error


@contextmanager
def _answered() -> Iterator[None]:
    """Says in our words that an exchange with the other ranks did not come about."""
    try:
        yield
    except RuntimeError as error:  # what torch.distributed raises derives from it
        raise CaptureError(
            f"the ranks could not agree: {error} Another rank has ended, was interrupted, or took "
            "longer than the timeout of the group; see that rank's error, or make the group with a "
            "longer `timeout`"
        ) from error


def _alone(group: dist.ProcessGroup | None) -> bool:
    """Whether there is nobody to agree with. Raises ServingError for an unfit group."""
    if group is None:
        return True
    if not isinstance(group, dist.ProcessGroup):
        raise ServingError(
            f"expected a process group, got {group!r}; a rank that is no member of a group cannot "
            "agree with it (new_group returns a marker on such ranks)"
        )
    if group.size() == 1:
        return True
    devices = sorted(device.type for device in group._device_types)
    if "cpu" not in devices:
        raise ServingError(
            f"ranks agree on the CPU, and this group of backend {dist.get_backend(group)!r} serves "
            f"{', '.join(devices) or 'no device'}; a rank that is out of device memory could not "
            "answer there. Make a group for it with "
            '`torch.distributed.new_group(ranks, backend="gloo")`'
        )
    return False


# --- without communication, at each forward -----------------------------------------------------


@dataclass(frozen=True)
class RankView:
    """What all ranks know of a forward, computed alike on each of them.

    ``num_tokens`` is the count that decides the bucket: the largest of all ranks. ``refusal`` says
    why no rank may replay. ``aux_hidden`` is the mode of all ranks; None under a refusal.
    """

    num_tokens: int
    refusal: str | None
    aux_hidden: str | None


def rank_view(ctx: ForwardContext, rank: int = 0) -> RankView:
    """What decides on a forward, from fields that are the same on all ranks.

    ``rank`` is this rank's place in the ``rank_*`` fields. Raises ContextError where those fields
    are incomplete, contradict this rank's own, or would let ranks decide differently.
    """
    if ctx.rank_num_tokens is None:
        _require_no_rank_fields(ctx)
        refusal = None if ctx.mode.extends else f"a forward of mode {ctx.mode.value}"
        return RankView(ctx.num_tokens, refusal, None if refusal else ctx.aux_hidden)
    modes = _modes(ctx)
    _require_one_length(ctx, len(ctx.rank_num_tokens))
    _require_own_entries(ctx, rank)
    aux = _aux_modes(ctx)
    refusal = _idle_rank(modes, ctx.rank_num_tokens) or _mixed_aux(aux)
    return RankView(max(ctx.rank_num_tokens), refusal, None if refusal else aux[0])


def _modes(ctx: ForwardContext) -> Sequence[Any]:
    if ctx.rank_modes is None:
        raise ContextError(
            "rank_num_tokens is set and rank_modes is not; required: both, as one rank that does "
            "not extend puts all of them on eager"
        )
    return ctx.rank_modes


def _aux_modes(ctx: ForwardContext) -> Sequence[str | None]:
    """The aux-hidden mode of each rank."""
    num_ranks = len(ctx.rank_num_tokens or ())
    if ctx.rank_aux_hidden is not None:
        return ctx.rank_aux_hidden
    if ctx.aux_hidden is not None and num_ranks > 1:
        raise ContextError(
            f"aux_hidden is {ctx.aux_hidden!r} on this rank, there are {num_ranks} ranks, and "
            "rank_aux_hidden is not set: the others cannot know, so the ranks would decide "
            "differently and wait for each other; set rank_aux_hidden to the modes of all ranks, "
            "on all of them"
        )
    return [ctx.aux_hidden] * num_ranks


_OWN_FIELDS = ("rank_num_tokens", "rank_modes", "rank_num_requests", "rank_aux_hidden")
_RANK_FIELDS = (*_OWN_FIELDS, "rank_layer_inputs")


def _require_no_rank_fields(ctx: ForwardContext) -> None:
    for name in _RANK_FIELDS[1:]:
        if getattr(ctx, name) is not None:
            raise ContextError(
                f"{name} is set and rank_num_tokens is not; required: the counts of all ranks, of "
                "which the largest decides the bucket"
            )


def _require_one_length(ctx: ForwardContext, num_ranks: int) -> None:
    for name in _RANK_FIELDS:
        entries = getattr(ctx, name)
        if entries is not None and (len(entries) != num_ranks or num_ranks == 0):
            raise ContextError(
                f"{name} has {len(entries)} entries and rank_num_tokens has {num_ranks}; required: "
                "one for each data-parallel rank"
            )


def _require_own_entries(ctx: ForwardContext, rank: int) -> None:
    """This rank's entries say what the context says, or the other ranks were told otherwise."""
    num_ranks = len(ctx.rank_num_tokens or ())
    if not 0 <= rank < num_ranks:
        raise ContextError(f"this is rank {rank}; required: 0 to {num_ranks - 1}")
    if ctx.mode.extends and ctx.num_extends == 0 and ctx.num_tokens:
        raise ContextError(
            f"mode is {ctx.mode.value} and no request of this rank extends; required: the mode of "
            "what it brings, as the other ranks decide by it"
        )
    own = (ctx.num_tokens, ctx.mode, ctx.num_requests, ctx.aux_hidden)
    for name, value in zip(_OWN_FIELDS, own, strict=True):
        entries = getattr(ctx, name)
        if entries is not None and entries[rank] != value:
            raise ContextError(
                f"{name}[{rank}] is {entries[rank]!r} and this rank has {value!r}; required: "
                "equal, as the other ranks decide by that entry"
            )


def _idle_rank(modes: Sequence[Any], counts: Sequence[int]) -> str | None:
    for rank, mode in enumerate(modes):
        if mode is not ForwardMode.EXTEND and not mode.extends:  # asked at each forward
            return f"rank {rank} is in mode {mode.value}"
    return None if min(counts) else f"rank {list(counts).index(0)} has no rows"


def _mixed_aux(aux: Sequence[str | None]) -> str | None:
    if aux.count(aux[0]) == len(aux):
        return None
    for rank, mode in enumerate(aux):
        if mode != aux[0]:
            return f"rank 0 has aux-hidden mode {aux[0]!r} and rank {rank} has {mode!r}"
    return None


def layer_inputs_of_any(ctx: ForwardContext, own: bool, rank: int) -> bool:
    """Whether a rank brings inputs of single layers, which the others must know of.

    ``own``: whether this one does. Raises ContextError where the others do not know.
    """
    if ctx.rank_layer_inputs is None:
        if own:
            raise ContextError(
                f"rank {rank} brings inputs of single layers, so it cannot replay, and the other "
                "ranks do not know; set rank_layer_inputs to what every rank brings, on all of them"
            )
        return False
    if ctx.rank_layer_inputs[rank] != own:
        raise ContextError(
            f"rank_layer_inputs[{rank}] is {ctx.rank_layer_inputs[rank]} and this rank brings "
            f"{'some' if own else 'none'}; required: what it brings, as the other ranks decide by "
            "that entry"
        )
    return any(ctx.rank_layer_inputs)
