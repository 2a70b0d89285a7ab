"""Whether a forward replays, from what its context says and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .context import ForwardContext, ForwardMode


class Refusal(str, Enum):
    """Why a forward of an engine does not replay."""

    EAGER = "the engine asked for eager forwards (enforce_eager)"
    EMBEDDING = "an embedding model gives no next tokens; its forwards run eagerly"
    ENCODER = "the model is or has an encoder: rows see what follows them"
    DECODE = "a pure decode batch, which the engine's own decode graphs serve"
    IDLE = "an idle forward has no rows"
    NO_EXTEND = "no request brings prompt rows"
    TOO_LONG = "above the largest captured bucket"
    EXACT_ONLY = "padding is off and no captured bucket has this size"
    PADDING_RATIO = "the bucket is above max_padding_ratio"
    NOT_CAPTURED = "nothing is captured yet: call warmup() first"
    NONE_LEFT = "warmup() could capture no bucket: its log and report() say why"
    AUX_HIDDEN = "these auxiliary hidden states were not declared: PrefillGraph(aux_hidden=...)"
    LAYER_INPUTS = "inputs of single layers (deepstack) are not part of the graph"
    AUTOCAST = "autocast is not as it was when the graph was captured"
    ONE_ROW = "one row, and breaks other than attention that would see a row of padding beside it"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Rules:
    """What was captured and what the engine declared; ``never`` refuses every forward.

    ``warm``: the warm-up is over, whatever it captured.
    """

    buckets: tuple[int, ...] = ()
    padding: bool = True
    max_padding_ratio: float = 2.0
    aux_hidden: frozenset[str | None] = frozenset({None})
    never: Refusal | None = None
    warm: bool = False

    def decide(
        self,
        ctx: ForwardContext,
        *,
        num_tokens: int,
        aux_hidden: str | None,
        layer_inputs: bool = False,
    ) -> int | Refusal:
        """The bucket of a forward, or why it does not replay.

        ``num_tokens`` is that of the largest rank and ``aux_hidden`` that of all ranks.
        """
        kind = self.never or _kind_refusal(ctx)
        if kind is not None:
            return kind
        if layer_inputs:
            return Refusal.LAYER_INPUTS
        if aux_hidden not in self.aux_hidden:
            return Refusal.AUX_HIDDEN
        return self._bucket(num_tokens)

    def _bucket(self, num_tokens: int) -> int | Refusal:
        if not self.buckets:
            return Refusal.NONE_LEFT if self.warm else Refusal.NOT_CAPTURED
        bucket = next((size for size in self.buckets if size >= num_tokens), None)
        if bucket is None:
            return Refusal.TOO_LONG
        if bucket != num_tokens and not self.padding:
            return Refusal.EXACT_ONLY
        if bucket > self.buckets[0] and bucket > num_tokens * self.max_padding_ratio:
            return Refusal.PADDING_RATIO
        return bucket

    def numbers(self, refusal: str, num_tokens: int) -> str | None:
        """The count and the buckets that a refusal is about; None where it is about neither."""
        above = next((size for size in self.buckets if size >= num_tokens), 0)
        if refusal is Refusal.TOO_LONG:
            return f"bucket {self.buckets[-1]}"
        if refusal is Refusal.EXACT_ONLY:
            below = [size for size in self.buckets if size < num_tokens][-1:]
            return f"nearest bucket{'s' if below else ''} {' and '.join(map(str, [*below, above]))}"
        if refusal is Refusal.PADDING_RATIO:
            times = f"{above / num_tokens:.4g} times as many"
            return f"bucket {above}, {times}; accepted: {self.max_padding_ratio:g} times"
        return None


def _kind_refusal(ctx: ForwardContext) -> Refusal | None:
    if ctx.mode is ForwardMode.DECODE:
        return Refusal.DECODE
    if ctx.mode is ForwardMode.IDLE or ctx.num_tokens == 0:
        return Refusal.IDLE
    return None if ctx.num_extends > 0 else Refusal.NO_EXTEND
