"""One way of calling the decoder: with which auxiliary hidden states, and its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import CaptureError, ServingError
from ..execution.breaks import ALLOCATORS
from ..execution.dispatch import PrefillRuntime
from ..execution.reasons import FallbackReason
from ..graph.causal import CHOSEN, reads_only
from ..graph.operators import operator_name, torch_name
from ..options import Options
from .attention.op import captured_writes
from .attention.slots import StaticSlots
from .decoder import Decoder
from .direct import DirectGraph, trace_directly
from .fit import ATTENTION, check_attention

SAMPLE_TOKENS = 24


@dataclass(frozen=True)
class Variant:
    """A call of the decoder that returns hidden states and auxiliary ones, packed rows each.

    ``extra`` are keyword arguments of the decoder, ``layers`` which of the hidden states that a
    transformers model lists are wanted. ``outputs`` are the places of the results among those of
    the graph, or the names of inputs. ``captured`` is the same plan with its attention inside the
    captured graphs.
    """

    decoder: Decoder
    extra: Mapping[str, Any]
    layers: tuple[int, ...] = ()
    graph: DirectGraph | None = None
    rows_index: int = 0
    positions_index: int | None = None
    outputs: tuple[int | str, ...] = ()
    takes_one_row: bool = False
    captured: PrefillRuntime | None = None

    @staticmethod
    def of(decoder: Decoder, declared: Any) -> Variant:
        """A variant as it is declared: layers, or keyword arguments. Raises ServingError."""
        if isinstance(declared, Mapping):
            return Variant(decoder, dict(declared))
        if isinstance(declared, (list, tuple)) and all(isinstance(n, int) for n in declared):
            _check_layers(decoder, declared)
            extra = {"output_hidden_states": True} if declared else {}
            return Variant(decoder, extra, tuple(declared))
        raise ServingError(
            f"auxiliary hidden states are declared as {declared!r}; accepted: a list of layers, or "
            "a mapping of keyword arguments of the decoder"
        )

    def call(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The function that is traced, and run where nothing replays."""
        forward, layers = self.decoder.module.forward, self.layers

        def call(**given: Any) -> tuple[torch.Tensor, ...]:
            return _states(forward(**given), layers)

        return call

    def run(
        self, rows: torch.Tensor, positions: torch.Tensor | None, more: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        """The decoder eagerly: hidden states and auxiliary ones, ``[num_tokens, hidden]`` each."""
        given = self.decoder.arguments(rows, positions)
        return self._packed(self.call()(**given, **self.extra, **more))

    def caller_captures(self) -> bool:
        """Whether the caller is capturing a graph of its own, in which nothing is replayed."""
        assert self.graph is not None
        return self.graph.runtime.recorder.is_capturing()

    def replay(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor | None,
        bucket: int,
        with_attention: bool = False,
    ) -> list[torch.Tensor] | FallbackReason:
        """The same from the captured graphs of a bucket, ``with_attention`` inside them or not.

        Where they cannot serve, nothing has run that counts, and the reason is returned.
        """
        assert self.graph is not None
        runtime = self.captured if with_attention else self.graph.runtime
        assert runtime is not None
        num_tokens = rows.shape[0]
        if num_tokens == 1:  # Note [One row]
            rows = torch.cat([rows, torch.zeros_like(rows)])
            positions = None if positions is None else torch.cat([positions, positions], -1)
        given = self.decoder.arguments(rows, positions)
        live = {self.rows_index: given[self.decoder.rows]}
        if self.positions_index is not None:
            live[self.positions_index] = given[self.decoder.positions or ""]
        args = self.graph.arguments(rows.shape[0], live)
        results = runtime.run_at(args, bucket, self.graph.refresh)
        if isinstance(results, FallbackReason):
            return results
        # An input that comes back (the embeddings) may be in memory that the next forward reuses.
        found = self._packed(
            [given[x].clone() if isinstance(x, str) else results[x] for x in self.outputs]
        )
        return found if num_tokens > 1 else [states[:1] for states in found]

    def capture_attention(self, bucket: int) -> None:
        """Capture a bucket with its attention. Raises CaptureError where some would run eagerly."""
        assert self.graph is not None and self.captured is not None
        args = self.graph.refresh(self.graph.arguments(bucket, {}))
        done = self.captured.capture_bucket(args, bucket)
        compiled = self.captured.compiled  # attention that fails its check is not captured
        breaks = {part.index for part in compiled.partitions if not part.is_segment}
        if not done or not breaks <= compiled.causal:
            raise CaptureError(
                f"attention stays eager in bucket {bucket}: it could not be captured, or lets "
                "padded rows reach real ones"
            )

    def _packed(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [x[0] for x in states] if self.decoder.batched else list(states)


def trace_with(
    backend: Any, slots: StaticSlots | None, variant: Variant, options: Options
) -> Variant:
    """The variant with its graph, and with what of an attention backend is to be captured.

    ``slots`` are where its captured writes go, for a backend that has them.

    Raises ServingError where it cannot be replayed, or backend and decoder do not fit.
    """
    made = _traced(variant.decoder, variant, options)
    assert made.graph is not None
    runtime, name = made.graph.runtime, type(made.decoder.module).__name__
    check_attention(runtime.compiled.plan, name, getattr(backend, "pool", None))
    if slots is not None:
        runtime.capture_prologues(captured_writes(backend, slots))
    if backend.supports_capture and options.capture_attention is not False:
        backend.allocate_captured(options.max_tokens)
        made = _with_captured_attention(made, options)
    return made


def _traced(decoder: Decoder, variant: Variant, options: Options) -> Variant:
    rows = torch.zeros_like(decoder.sample_rows(SAMPLE_TOKENS))
    positions = None
    if decoder.positions is not None:
        shape = decoder.position_shape(SAMPLE_TOKENS)
        positions = torch.zeros(shape, dtype=torch.int64, device=decoder.device)
    given = decoder.arguments(rows, positions)
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    graph, outputs = trace_directly(
        variant.call(), decoder.module, {**given, **variant.extra}, options, decoder.rows
    )
    if variant.extra and not outputs[1:]:
        raise ServingError(
            f"{type(decoder.module).__name__} returns no auxiliary hidden states for "
            f"{dict(variant.extra)}; required: (hidden, [aux, ...]), or, for a transformers model, "
            "aux_hidden={name: [layers]}"
        )
    places = graph.indices(tensors)
    if decoder.rows not in places:
        raise ServingError(f"{type(decoder.module).__name__} does not read {decoder.rows}")
    return replace(
        variant,
        graph=graph,
        rows_index=places[decoder.rows],
        positions_index=places.get(decoder.positions or ""),
        outputs=outputs,
        takes_one_row=_breaks_at_attention_only(graph),
    )


def _with_captured_attention(variant: Variant, options: Options) -> Variant:
    """The variant with a second runtime of the same artifacts and memory pool.

    Unchanged where a break does more than attention of what segments made.
    """
    assert variant.graph is not None
    runtime = variant.graph.runtime
    plan = runtime.compiled.plan
    made = {node for part in plan.segments for node in part.outputs}
    if not variant.takes_one_row or not all(reads_only(made, part) for part in plan.breaks):
        return variant
    compiled = replace(
        runtime.compiled,
        causal=frozenset(part.index for part in plan.breaks),
        prologues={},
        bodies={},
    )
    asked = replace(options, capture_attention=True)
    return replace(variant, captured=PrefillRuntime(compiled, asked, recorder=runtime.recorder))


def _check_layers(decoder: Decoder, layers: Sequence[int]) -> None:
    if layers and not decoder.batched:
        raise ServingError(
            f"auxiliary hidden states of {type(decoder.module).__name__} are declared as layers, "
            f"{list(layers)}, which is for transformers models; required for a decoder of your "
            "own: keyword arguments with which it returns (hidden, [aux, ...])"
        )
    num_layers = decoder.num_layers
    wrong = [number for number in layers if not 0 <= number <= num_layers]
    if wrong:
        raise ServingError(
            f"auxiliary hidden states name {wrong}; {type(decoder.module).__name__} has 0 (the "
            f"embedding) to {num_layers} (after the last layer)"
        )


def _states(output: Any, layers: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Hidden states and auxiliary ones of what a decoder returned."""
    if isinstance(output, torch.Tensor):
        return (output,)
    if layers:
        return (output[0], *(output.hidden_states[number] for number in layers))
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], (list, tuple)):
        return (output[0], *output[1])
    return (output[0],)


def _breaks_at_attention_only(graph: DirectGraph) -> bool:
    """Note [One row]: PyTorch traces one row as a graph of its own, so a row of padding joins it.

    The attention operator leaves rows past ``num_tokens`` alone; what else runs eagerly would see
    the row of padding.
    """
    plan = graph.runtime.compiled.plan
    for part in plan.breaks:
        for node in part.nodes:
            verdict = plan.verdicts[node]
            chosen = verdict.reason in CHOSEN and verdict.pure
            attends = operator_name(node.target) == ATTENTION or torch_name(node) in ALLOCATORS
            if not chosen and not attends:
                return False
    return True
