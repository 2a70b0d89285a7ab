"""Prefill of an engine's packed batches: decide, replay, and the rows that the engine wants."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..errors import ContextError, FallbackError, ServingError
from ..execution.reasons import FallbackReason
from ..options import Options
from ..reporting.explain import Report, describe_runtime, hints_of
from .attention import metadata
from .attention.backend import AttentionBackend, make_attention_backend, writes_in_graphs
from .attention.slots import StaticSlots
from .context import ForwardContext, forward_context
from .decisions import Refusal, Rules
from .decoder import Decoder, find_decoder
from .direct import DirectGraph
from .distributed import (
    capture_together,
    do_together,
    forbid_falling_back_alone,
    layer_inputs_of_any,
    rank_view,
    require_same,
)
from .forwards import MultimodalInputs, PrefillOutput, check_rows, given_positions, given_rows
from .hugging_face import is_hugging_face, require_live_attention, use_live_attention
from .logits import checked_logits, wanted_rows
from .setup import check_replays_wanted, checked_model, declared_variants, never_replays, options_of
from .variants import Variant, trace_with

log = logging.getLogger(__name__)


class PrefillGraph:
    """The prefill of one model for an engine with its own scheduler and KV cache.

    ``model`` is a causal LM, a multimodal wrapper of one, or a decoder; ``decoder``,
    ``embedding``, ``head`` and ``logits`` (hidden states to logits) say by hand what is not found.
    ``attention`` is a backend, or the name of one that is made with ``pool``. ``buckets`` are used
    exactly as given; otherwise ``chunked_prefill_size``, the most rows a forward brings, clamps
    the ladder up to ``max_tokens``. ``aux_hidden`` declares sets of auxiliary hidden states by
    name: layers of a transformers model (0 is the embedding), or keyword arguments with which a
    decoder of your own returns ``(hidden, [aux, ...])``. ``task="embed"`` and ``enforce_eager``
    never replay. ``group`` is a CPU process group of all ranks that must agree on what is
    captured, ``rank`` this one's place among the data-parallel ones. Other options are those of the
    backend. Raises ServingError, OptionError.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        attention: AttentionBackend | str = "sdpa",
        pool: Any = None,
        max_tokens: int = 2048,
        buckets: Sequence[int] | None = None,
        chunked_prefill_size: int | None = None,
        decoder: nn.Module | None = None,
        embedding: nn.Module | None = None,
        head: nn.Module | None = None,
        logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
        aux_hidden: Mapping[str, Any] | None = None,
        task: str = "generate",
        enforce_eager: bool = False,
        group: Any = None,
        rank: int = 0,
        **options: Any,
    ) -> None:
        self.model = checked_model(model)
        self.options: Options = options_of(max_tokens, buckets, chunked_prefill_size, options)
        self._attention = make_attention_backend(attention, pool)
        self._slots: StaticSlots | None = None
        self.replays: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self._group, self._rank = group, rank
        self._lock = threading.RLock()
        self._with_attention: frozenset[int] = frozenset()
        never = never_replays(model, task, enforce_eager)
        check_replays_wanted(self.options, never)
        self._rules = Rules(never=never)
        self._restore: Callable[[], None] | None = None
        self._embeds: torch.Tensor | None = None
        self._autocast: torch.dtype | None = None
        self._replaying = False
        self._variants: dict[str | None, Variant] = {}
        if never in (Refusal.EMBEDDING, Refusal.ENCODER):
            return
        self._use_live_attention()
        try:
            self.decoder: Decoder = find_decoder(model, decoder, embedding, head)
            self._logits = logits or checked_logits(model, self.decoder)
            for name, what in declared_variants(aux_hidden).items():
                self._variants[name] = Variant.of(self.decoder, what)
        except BaseException:
            self.close()  # the model is as it was
            raise
        self._rules = self._rules_with(())

    @property
    def attention(self) -> AttentionBackend:
        """The backend; a forward may bring another one, in ``ctx.attention``."""
        return self._attention

    def _use_live_attention(self) -> None:
        if self._restore is None and is_hugging_face(self.model):
            # Also when nobody calls close(): the model is as it was once its graph is gone.
            self._restore = weakref.finalize(self, use_live_attention(self.model))
            self._restore.atexit = False

    # --- capture --------------------------------------------------------------------------------

    def warmup(self) -> None:
        """Trace, compile and capture every bucket of every declared variant; once, before serving.

        Runs no forward: no cache slot, page or metadata is needed. Raises CaptureOutOfMemory.
        """
        require_same("whether forwards may replay", self._rules.never, self._group)
        if self._variants:
            self._use_live_attention()  # close() gave it back
        if self._rules.never is not None:
            return
        do_together("trace the model", self._trace, self._group)
        runtimes = [self._graph(name).runtime for name in self._variants]
        strict = forbid_falling_back_alone(runtimes) or self.options.strict
        with torch.no_grad(), self._lock:
            if self._slots is not None:
                self._slots.prepare(None)
            captured = capture_together(
                self.options.ladder, self._capture, self._drop, self._group, strict=strict
            )
            if all(variant.captured for variant in self._variants.values()):
                inside = capture_together(
                    captured, self._capture_attention, _keep, self._group, strict=strict
                )
                self._with_attention = frozenset(inside)
        demoted = [sorted(self._graph(n).runtime.compiled.demoted) for n in self._variants]
        require_same("what failed the padding check", demoted, self._group)
        self._rules = replace(self._rules_with(sorted(captured)), warm=True)
        log.info("captured %s, with attention %s", captured, sorted(self._with_attention))

    def _trace(self) -> None:
        require_live_attention(self.model)
        self._autocast = self._autocast_now()
        if self._slots is None and writes_in_graphs(self.attention):
            reserved = self.attention.reserved_slot  # type: ignore[attr-defined]
            self._slots = StaticSlots(self.options.max_tokens, reserved, self.decoder.device)
        for name, variant in self._variants.items():
            if variant.graph is None:
                self._variants[name] = trace_with(
                    self.attention, self._slots, variant, self.options
                )

    def _capture(self, bucket: int) -> None:
        """Capture a bucket in every variant. Raises CaptureError where one does not come about."""
        for name in self._variants:
            self._graph(name).capture(bucket)

    def _capture_attention(self, bucket: int) -> None:
        """Capture a bucket once more, in every variant, with its attention. Raises CaptureError.

        One made-up request of half the bucket, no row of which has a slot, is what captured kernels
        read meanwhile: the padding check finds real rows and padded ones.
        """
        sample = ForwardContext.from_lengths([max(1, bucket // 2)], device=self.decoder.device)
        with self._published(sample, bucket):
            for variant in self._variants.values():
                variant.capture_attention(bucket)

    def _drop(self, bucket: int) -> None:
        for name in self._variants:
            self._graph(name).runtime.drop_bucket(bucket)

    def _rules_with(self, buckets: Sequence[int]) -> Rules:
        return Rules(
            buckets=tuple(buckets),
            padding=self.options.padding,
            max_padding_ratio=self.options.max_padding_ratio,
            aux_hidden=frozenset(self._variants),
            never=self._rules.never,
        )

    def _graph(self, name: str | None) -> DirectGraph:
        graph = self._variants[name].graph
        assert graph is not None, "warmup() traces every variant"
        return graph

    # --- decisions ------------------------------------------------------------------------------

    def can_run(self, ctx: ForwardContext, multimodal: MultimodalInputs | None = None) -> bool:
        """Whether :meth:`replay` serves this forward."""
        return isinstance(self._decide(ctx, multimodal), int)

    def why_not(
        self, ctx: ForwardContext, multimodal: MultimodalInputs | None = None
    ) -> str | None:
        """Why :meth:`replay` does not serve this forward, with numbers; None when it does."""
        decision = self._decide(ctx, multimodal)
        return None if isinstance(decision, int) else self._with_numbers(decision, ctx)

    def _decide(self, ctx: ForwardContext, multimodal: MultimodalInputs | None) -> int | str:
        layer_inputs = multimodal is not None and bool(multimodal.layer_inputs)
        if ctx.rank_num_tokens is None:
            num_tokens, aux_hidden = ctx.num_tokens, ctx.aux_hidden
            fewest = num_tokens
        else:
            view = rank_view(ctx, self._rank)
            if view.refusal is not None:
                return view.refusal
            num_tokens, aux_hidden = view.num_tokens, view.aux_hidden
            fewest = min(ctx.rank_num_tokens)
            layer_inputs = layer_inputs_of_any(ctx, layer_inputs, self._rank)
        decision = self._rules.decide(
            ctx, num_tokens=num_tokens, aux_hidden=aux_hidden, layer_inputs=layer_inputs
        )
        one_row = fewest == 1 and isinstance(decision, int)  # on whichever rank
        if one_row and not self._variants[ctx.aux_hidden].takes_one_row:
            return Refusal.ONE_ROW
        if isinstance(decision, int) and self._autocast_now() != self._autocast:
            return Refusal.AUTOCAST
        return decision

    def _with_numbers(self, refusal: str, ctx: ForwardContext) -> str:
        """A refusal as it is told; counters keep the plain reason, as each count is another key."""
        counts = ctx.rank_num_tokens or (ctx.num_tokens,)
        numbers = self._rules.numbers(refusal, max(counts))
        if numbers is None:
            return str(refusal)
        where = " on the largest rank" if len(counts) > 1 else ""
        return f"{refusal} ({max(counts)} tokens{where}, {numbers})"

    def _autocast_now(self) -> torch.dtype | None:
        """What autocast rounds to on the model's device; None while it is off."""
        kind = self._device_type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    @cached_property
    def _device_type(self) -> str:
        return self.decoder.device.type

    # --- forwards -------------------------------------------------------------------------------

    def input_embeds(self, num_tokens: int) -> torch.Tensor:
        """The first rows ``[num_tokens, hidden]`` of a buffer to embed a forward's rows into.

        The next forward's rows go to the same place.
        """
        if self._embeds is None or self._embeds.shape[0] < num_tokens:
            self._require_decoder()
            row = self.decoder.sample_rows(1)
            shape = (max(num_tokens, self.options.max_tokens), self._hidden_size)
            with torch.inference_mode(False):  # written inside and outside of it
                self._embeds = torch.zeros(shape, dtype=row.dtype, device=row.device)
        return self._embeds[:num_tokens]

    @cached_property
    def _hidden_size(self) -> int:
        return int(self.decoder.sample_rows(1).shape[-1])

    def _require_decoder(self) -> None:
        if not self._variants:
            raise ServingError(
                f"PrefillGraph runs no forward of {type(self.model).__name__}: "
                f"{self._rules.never}. Call the model itself"
            )

    def run(
        self,
        ctx: ForwardContext,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        multimodal: MultimodalInputs | None = None,
        logits_rows: torch.Tensor | None = None,
    ) -> PrefillOutput:
        """One forward: replayed where it can be, otherwise eagerly, counted under its reason.

        Arguments and result are those of :meth:`replay`.
        """
        self._require_decoder()
        if ctx.num_tokens == 0:
            raise ContextError("an idle forward has no rows to run; required: at least one request")
        decision = self._decide(ctx, multimodal)
        rows = self._rows(ctx, input_ids, inputs_embeds)
        if not isinstance(decision, int):
            self.refusals[str(decision)] += 1
            return self._run_eagerly(ctx, rows, multimodal, logits_rows)
        return self._replay(ctx, rows, decision, multimodal, logits_rows)

    def replay(
        self,
        ctx: ForwardContext,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        multimodal: MultimodalInputs | None = None,
        logits_rows: torch.Tensor | None = None,
    ) -> PrefillOutput:
        """One forward from the captured graphs.

        ``input_ids`` ``[num_tokens]`` or ``inputs_embeds`` ``[num_tokens, hidden]``; positions,
        pages and lengths are those of ``ctx``. ``logits_rows`` are the rows that logits are wanted
        of; by default the last row of each request, or with ``ctx.accept_lengths`` its last
        accepted one (counts on a GPU are taken at their word: to check them the host would have to
        wait). What is only seen here (a weight of another dtype, a replaced module) makes
        the forward run eagerly, counted. Raises FallbackError where :meth:`why_not` has a reason,
        ContextError.
        """
        decision = self._decide(ctx, multimodal)
        if not isinstance(decision, int):
            raise FallbackError(
                f"this forward ({ctx.num_tokens} tokens, {ctx.mode.value}) does not replay: "
                f"{self._with_numbers(decision, ctx)}. Ask can_run() first, or call run()"
            )
        rows = self._rows(ctx, input_ids, inputs_embeds)
        return self._replay(ctx, rows, decision, multimodal, logits_rows)

    def _rows(
        self,
        ctx: ForwardContext,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
    ) -> torch.Tensor:
        rows = given_rows(ctx, input_ids, inputs_embeds, self.decoder.embedding)
        check_rows(ctx, rows, self._hidden_size)
        return rows

    def _replay(
        self,
        ctx: ForwardContext,
        rows: torch.Tensor,
        bucket: int,
        multimodal: MultimodalInputs | None,
        logits_rows: torch.Tensor | None,
    ) -> PrefillOutput:
        variant = self._variants[ctx.aux_hidden]
        found: list[torch.Tensor] | FallbackReason = FallbackReason.REENTERED
        with self._lock:
            if not self._replaying:  # or a break of this very graph asks
                self._replaying = True
                try:
                    found = self._replay_alone(variant, ctx, rows, bucket)
                finally:
                    self._replaying = False
        if isinstance(found, FallbackReason):
            if not self.refusals[str(found)]:
                log.warning("a forward that was captured runs eagerly: %s", found)
            self.refusals[str(found)] += 1
            return self._run_eagerly(ctx, rows, multimodal, logits_rows)
        self._count(ctx, multimodal)
        return self._output(ctx, found, logits_rows, replayed=True)

    def _replay_alone(
        self, variant: Variant, ctx: ForwardContext, rows: torch.Tensor, bucket: int
    ) -> list[torch.Tensor] | FallbackReason:
        if variant.caller_captures():  # before any memory of the replay is touched
            return FallbackReason.CALLER_CAPTURES
        own = ctx.attention is None or ctx.attention is self.attention
        inside = own and bucket in self._with_attention and self._serves_captured(ctx)
        written = own and not inside and self._slots is not None
        positions = given_positions(ctx, self.decoder)
        with torch.no_grad(), self._published(ctx, bucket if inside else 0, written):
            if self._slots is not None and not inside:
                # Also where none is wanted: the last forward's slots are there.
                self._slots.prepare(metadata.write_locations(ctx) if written else None)
            return variant.replay(rows, positions, bucket, inside)

    def _run_eagerly(
        self,
        ctx: ForwardContext,
        rows: torch.Tensor,
        multimodal: MultimodalInputs | None,
        logits_rows: torch.Tensor | None,
    ) -> PrefillOutput:
        if ctx.aux_hidden not in self._variants:
            raise ServingError(
                f"aux_hidden is {ctx.aux_hidden!r}; declared when the graph was made: "
                f"{', '.join(map(repr, filter(None, self._variants))) or 'none'}"
            )
        require_live_attention(self.model)
        more = {} if multimodal is None else dict(multimodal.layer_inputs)
        with torch.no_grad(), self._published(ctx):
            found = self._variants[ctx.aux_hidden].run(
                rows, given_positions(ctx, self.decoder), more
            )
        return self._output(ctx, found, logits_rows, replayed=False)

    def _serves_captured(self, ctx: ForwardContext) -> bool:
        """Whether attention of this forward is what the captured graphs have inside them."""
        return self.attention.serves_captured(ctx)  # type: ignore[attr-defined]

    def _published(
        self, ctx: ForwardContext, captured_bucket: int = 0, written: bool = False
    ) -> forward_context:
        """The context, with what a break may change put back when the forward is over."""
        return forward_context(
            ctx,
            num_tokens=ctx.num_tokens,
            rank_num_tokens=ctx.rank_num_tokens,
            rank_num_requests=ctx.rank_num_requests,
            attention=self.attention if ctx.attention is None else ctx.attention,
            captured_bucket=captured_bucket,
            rows_written_by=self.attention if written else None,
        )

    def _output(
        self,
        ctx: ForwardContext,
        found: Sequence[torch.Tensor],
        logits_rows: torch.Tensor | None,
        replayed: bool,
    ) -> PrefillOutput:
        hidden, *aux = found
        logits = None
        if self._logits is not None:
            with torch.no_grad():
                logits = self._logits(hidden[wanted_rows(ctx, hidden, logits_rows)])
        return PrefillOutput(logits, hidden, tuple(aux), replayed)

    def _count(self, ctx: ForwardContext, multimodal: MultimodalInputs | None) -> None:
        kind = ctx.mode.value
        if multimodal is not None:
            kind += ", multimodal"
        if ctx.aux_hidden is not None:
            kind += f", {ctx.aux_hidden}"
        if not self.replays[kind]:
            log.info("prefill replays captured graphs: %s", kind)
        self.replays[kind] += 1

    def close(self) -> None:
        """Give back captured graphs, buffers, and the attention that a transformers model had."""
        for name, variant in self._variants.items():
            self._variants[name] = replace(variant, graph=None, captured=None)
        self._rules, self._with_attention = self._rules_with(()), frozenset()
        if self._restore is not None:
            self._restore()
            self._restore = None

    def report(self) -> Report:
        """What was planned and what ran, of every variant traced so far."""
        variants = self._variants.values()
        runtimes = [v.graph.runtime for v in variants if v.graph is not None]
        runtimes += [v.captured for v in variants if v.captured is not None]
        return Report(tuple(describe_runtime(r, hints_of(r.compiled.plan)) for r in runtimes))


def _keep(bucket: int) -> None:
    """A bucket that is not captured with its attention is captured without; nothing is given up."""
