"""Why a live forward runs eagerly, and counts of what forwards did.

Note [A refusal has a reason]

Every forward that does not replay runs the graph Dynamo traced, untouched, and is counted under
its reason. Under ``strict`` it raises FallbackError instead.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum


class FallbackReason(str, Enum):
    """Why a live forward runs eagerly."""

    DISABLED = "replay is disabled (max_tokens=0)"
    TOO_LONG = "above the largest bucket"
    PADDING_OFF = "padding is off and no bucket has this size"
    PADDING_RATIO = "the bucket is above max_padding_ratio"
    GUARD = "the traced graph is not valid at the bucket"
    MASK = "the attention mask is not causal at this count"
    TRAINING = "gradients are needed"
    UNREADABLE = "the traced graph has a form the pass cannot read"
    WEIGHTS_CHANGED = "a weight changed its shape or keeps moving"
    MODULE_FLOAT = "a module's float changed"
    MODULE_REPLACED = "a module was replaced since it was traced; close(), then warmup()"
    NO_SEGMENT = "nothing in the graph can be captured"
    CAPTURE_FAILED = "recording a segment failed"
    REENTERED = "called again from inside a replay"
    QUEUED = "its bucket waits to be captured by the next warmup()"
    MEMORY = "its bucket is above max_graph_memory"
    CALLER_CAPTURES = "the caller is capturing a graph of its own"

    def __str__(self) -> str:
        return self.value


OTHER_BUCKETS_MAY_SERVE = (
    FallbackReason.TOO_LONG,
    FallbackReason.PADDING_OFF,
    FallbackReason.PADDING_RATIO,
    FallbackReason.GUARD,
    FallbackReason.MASK,
    FallbackReason.MEMORY,
)
"""Reasons that hold for one count: a warm-up with it captures the ladder all the same."""


class Outdated(Exception):
    """What ``refresh`` of :meth:`PrefillRuntime.run_at` raises: the graph is of another model."""


@dataclass
class Counts:
    """What one graph's live forwards did."""

    replays: Counter[int] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    real_rows: int = 0
    padded_rows: int = 0
    recaptures: int = 0
    evicted_batches: int = 0
