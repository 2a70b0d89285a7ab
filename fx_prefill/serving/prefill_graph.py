"""Prefill of an engine's packed batches: decide, replay, and the rows that the engine wants."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import ContextError, FallbackError, ServingError
from ..options import Options, parse_options
from ..reporting.explain import Report, describe_runtime, hints_of
from .attention.backend import AttentionBackend, make_attention_backend
from .context import ForwardContext, forward_context
from .decisions import Refusal, Rules
from .decoder import Decoder, find_decoder
from .direct import DirectGraph
from .hugging_face import is_hugging_face, use_live_attention
from .logits import checked_logits, wanted_rows
from .variants import Variant, trace_variant

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MultimodalInputs:
    """What a multimodal forward has beside embeddings that are merged already.

    ``layer_inputs`` are inputs that single layers read (deepstack), by the name of the decoder's
    parameter: such a forward runs eagerly.
    """

    layer_inputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PrefillOutput:
    """What a forward gave.

    ``logits`` ``[rows, vocab]`` are None for a model without a head; ``hidden_states``
    ``[num_tokens, hidden]``; ``aux_hidden_states`` as declared, real rows each.
    """

    logits: torch.Tensor | None
    hidden_states: torch.Tensor
    aux_hidden_states: tuple[torch.Tensor, ...]
    replayed: bool


class PrefillGraph:
    """The prefill of one model for an engine with its own scheduler and KV cache.

    ``model`` is a causal LM, a multimodal wrapper of one, or a decoder; ``decoder``,
    ``embedding``, ``head`` and ``logits`` (hidden states to logits) say by hand what is not found.
    ``attention`` is a backend, or the name of one that is made with ``pool``. ``buckets`` are used
    exactly as given; otherwise ``chunked_prefill_size``, the most rows a forward brings, clamps
    the ladder up to ``max_tokens``. ``aux_hidden`` declares sets of auxiliary hidden states by
    name: layers of a transformers model (0 is the embedding), or keyword arguments with which a
    decoder of your own returns ``(hidden, [aux, ...])``. ``task="embed"`` and ``enforce_eager``
    never replay. Other options are those of the backend. Raises ServingError, OptionError.
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
        **options: Any,
    ) -> None:
        self.model = model
        self.options: Options = _options(max_tokens, buckets, chunked_prefill_size, options)
        self.attention = make_attention_backend(attention, pool)
        self.replays: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        never = _never(model, task, enforce_eager)
        self._rules = Rules(never=never)
        self._embeds: torch.Tensor | None = None
        self._variants: dict[str | None, Variant] = {}
        if never in (Refusal.EMBEDDING, Refusal.ENCODER):
            return
        if is_hugging_face(model):
            use_live_attention(model)
        self.decoder: Decoder = find_decoder(model, decoder, embedding, head)
        self._logits = logits or checked_logits(model, self.decoder)
        declared: dict[str | None, Any] = {None: ()}
        declared.update(aux_hidden or {})
        for name, what in declared.items():
            self._variants[name] = Variant.of(self.decoder, what)
        self._rules = self._rules_with(())

    # --- capture --------------------------------------------------------------------------------

    def warmup(self) -> None:
        """Trace, compile and capture every bucket of every declared variant; once, before serving.

        Runs no forward: no cache slot, page or metadata is needed. Raises CaptureOutOfMemory.
        """
        if self._rules.never is not None:
            return
        for name, variant in self._variants.items():
            if variant.graph is None:
                self._variants[name] = trace_variant(self.decoder, variant, self.options)
        captured = [size for size in reversed(self.options.ladder) if self._capture(size)]
        self._rules = self._rules_with(sorted(captured))
        log.info("captured %s", captured)

    def _capture(self, bucket: int) -> bool:
        """Capture a bucket in every variant; in all of them or in none."""
        graphs = [self._graph(name) for name in self._variants]
        done = all(
            graph.runtime.capture_bucket(graph.arguments(bucket, {}), bucket) for graph in graphs
        )
        if not done:
            self._drop(bucket)
        return done

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
        """Why :meth:`replay` does not serve this forward; None when it does."""
        decision = self._decide(ctx, multimodal)
        return str(decision) if isinstance(decision, Refusal) else None

    def _decide(self, ctx: ForwardContext, multimodal: MultimodalInputs | None) -> int | Refusal:
        decision = self._rules.decide(
            ctx,
            num_tokens=ctx.num_tokens,
            aux_hidden=ctx.aux_hidden,
            layer_inputs=multimodal is not None and bool(multimodal.layer_inputs),
        )
        one_row = ctx.num_tokens == 1 and isinstance(decision, int)
        if one_row and not self._variants[ctx.aux_hidden].takes_one_row:
            return Refusal.ONE_ROW
        return decision

    # --- forwards -------------------------------------------------------------------------------

    def input_embeds(self, num_tokens: int) -> torch.Tensor:
        """The first rows ``[num_tokens, hidden]`` of a buffer to embed a forward's rows into.

        The next forward's rows go to the same place.
        """
        if self._embeds is None or self._embeds.shape[0] < num_tokens:
            weight = next(self.decoder.embedding.parameters())
            rows = max(num_tokens, self.options.max_tokens)
            size = self._hidden_size()
            self._embeds = torch.zeros(rows, size, dtype=weight.dtype, device=weight.device)
        return self._embeds[:num_tokens]

    def _hidden_size(self) -> int:
        one = torch.zeros(1, dtype=torch.int64, device=next(self.model.parameters()).device)
        return int(self.decoder.embedding(one).shape[-1])

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
        decision = self._decide(ctx, multimodal)
        rows = self._rows(ctx, input_ids, inputs_embeds)
        if isinstance(decision, Refusal):
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
        accepted one. Raises FallbackError where :meth:`why_not` has a reason, ContextError.
        """
        decision = self._decide(ctx, multimodal)
        if isinstance(decision, Refusal):
            raise FallbackError(
                f"this forward ({ctx.num_tokens} tokens, {ctx.mode.value}) does not replay: "
                f"{decision}. Ask can_run() first, or call run()"
            )
        rows = self._rows(ctx, input_ids, inputs_embeds)
        return self._replay(ctx, rows, decision, multimodal, logits_rows)

    def _rows(
        self,
        ctx: ForwardContext,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
    ) -> torch.Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ContextError("give one of input_ids and inputs_embeds")
        if inputs_embeds is not None:
            rows = inputs_embeds
        else:
            with torch.no_grad():
                rows = self.decoder.embedding(input_ids)
        if rows.dim() != 2 or rows.shape[0] != ctx.num_tokens:
            raise ContextError(
                f"a forward of {ctx.num_tokens} tokens got embeddings {list(rows.shape)}; "
                "required: [num_tokens, hidden], requests one after the other (ids: [num_tokens])"
            )
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
        with torch.no_grad(), self._published(ctx):
            found = variant.replay(rows, self._positions(ctx), bucket)
        self._count(ctx, multimodal)
        return self._output(ctx, found, logits_rows, replayed=True)

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
        more = {} if multimodal is None else dict(multimodal.layer_inputs)
        with torch.no_grad(), self._published(ctx):
            found = self._variants[ctx.aux_hidden].run(rows, self._positions(ctx), more)
        return self._output(ctx, found, logits_rows, replayed=False)

    def _published(self, ctx: ForwardContext) -> AbstractContextManager[Any]:
        """The context, with what a break may change put back when the forward is over."""
        return _published(ctx, self.attention if ctx.attention is None else ctx.attention)

    def _positions(self, ctx: ForwardContext) -> torch.Tensor | None:
        if self.decoder.positions is None:
            return None
        wanted = self.decoder.position_shape(ctx.num_tokens)
        seen = None if ctx.positions is None else tuple(ctx.positions.shape)
        if seen != wanted:
            raise ContextError(
                f"ctx.positions has the shape {seen}; this model's decoder needs {wanted}"
            )
        return ctx.positions

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

    def report(self) -> Report:
        """What was planned and what ran, of every variant traced so far."""
        runtimes = [v.graph.runtime for v in self._variants.values() if v.graph is not None]
        return Report(tuple(describe_runtime(r, hints_of(r.compiled.plan)) for r in runtimes))


class _published:
    """``forward_context`` with counts and backend pinned; a class, as it is on the hot path."""

    def __init__(self, ctx: ForwardContext, attention: AttentionBackend) -> None:
        self._ctx, self._attention = ctx, attention
        self._inner: Any = nullcontext()

    def __enter__(self) -> ForwardContext:
        ctx = self._ctx
        self._saved = (
            ctx.num_tokens,
            ctx.rank_num_tokens,
            ctx.rank_num_requests,
            ctx.attention,
        )
        ctx.attention = self._attention
        self._inner = forward_context(ctx)
        try:
            return self._inner.__enter__()
        except BaseException:
            self._restore()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            self._restore()

    def _restore(self) -> None:
        ctx = self._ctx
        ctx.num_tokens, ctx.rank_num_tokens, ctx.rank_num_requests, ctx.attention = self._saved


def _options(
    max_tokens: int, buckets: Sequence[int] | None, chunk: int | None, options: Mapping[str, Any]
) -> Options:
    given = dict(options)
    if buckets is not None:
        given["buckets"] = buckets
    else:
        given["max_tokens"] = max_tokens if chunk is None else min(max_tokens, chunk)
    given.setdefault("pin_weights", True)
    return parse_options(given)


def _never(model: nn.Module, task: str, enforce_eager: bool) -> Refusal | None:
    if task not in ("generate", "embed"):
        raise ServingError(f"task is {task!r}; accepted: 'generate' or 'embed'")
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) or _sees_ahead(model):
        return Refusal.ENCODER
    if task == "embed":
        return Refusal.EMBEDDING
    return Refusal.EAGER if enforce_eager else None


def _sees_ahead(model: nn.Module) -> bool:
    flags = [getattr(module, "is_causal", None) for module in model.modules()]
    return False in flags and True not in flags
