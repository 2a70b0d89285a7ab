"""The ``torch.compile`` backend: the stages, in order."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .errors import FallbackError, GraphError
from .execution.compile import SegmentCache, compile_plan
from .execution.dispatch import PrefillRuntime
from .execution.reasons import FallbackReason
from .graph.masks import drop_causal_masks
from .graph.partition import PartitionPlan, partition
from .graph.rowwise import analyse
from .graph.trace import static_indices, trace
from .options import Options, parse_options
from .reporting.logs import publish
from .reporting.registry import Graph, Registry
from .reporting.traps import warn_of_ties

log = logging.getLogger(__name__)

segment_cache = SegmentCache()
registry = Registry()


def breakable_prefill(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | Options | None = None,
    mode: str | None = None,
) -> Graph:
    """Compile one traced graph into a prefill that replays; the ``torch.compile`` backend.

    ``options`` is the dict given to ``torch.compile``; ``mode`` is accepted and has no effect.
    Raises OptionError for bad options.
    """
    checked = options if isinstance(options, Options) else parse_options(options)
    if _needs_gradients(example_inputs):
        why = (
            "an input requires gradients and grad mode is on: call the model under "
            "torch.no_grad() or torch.inference_mode()"
        )
        return _refuse(gm, example_inputs, checked, FallbackReason.TRAINING, why)
    try:
        plan = build_plan(gm, example_inputs, checked)
    except GraphError as error:
        return _refuse(gm, example_inputs, checked, FallbackReason.UNREADABLE, str(error))
    publish(plan, checked)
    warn_of_ties(plan.traced)
    runtime = PrefillRuntime(compile_plan(plan, checked, segment_cache), checked)
    registry.add(runtime)
    return runtime


def _refuse(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    reason: FallbackReason,
    why: str,
) -> Graph:
    """Let the graph run eagerly, said once; an error under ``strict``."""
    if options.strict:
        raise FallbackError(f"this graph would run eagerly: {reason} ({why})")
    log.warning("this graph runs eagerly: %s (%s)", reason, why)
    weights = [example_inputs[i] for i in static_indices(gm, example_inputs)]
    return registry.add_refused(gm, reason, weights)


def build_plan(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> PartitionPlan:
    """Trace, analyse and partition: all that can be known before anything is compiled."""
    for user_pass in options.passes.pre_partition:
        gm = user_pass(gm, example_inputs)
    traced = drop_causal_masks(trace(gm, example_inputs), options.max_tokens)
    analysis = analyse(traced, options.break_ops, options.rowwise_ops)
    if analysis.unmatched:
        log.warning(
            "break_ops and rowwise_ops: nothing in this graph answers to %s",
            ", ".join(analysis.unmatched),
        )
    return partition(analysis)


def _needs_gradients(example_inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(example, torch.Tensor) and example.requires_grad for example in example_inputs
    )


def _reset() -> None:
    """Called by ``torch._dynamo.reset()``: forget artifacts and graphs."""
    segment_cache.clear()
    registry.clear()


breakable_prefill.reset = _reset  # type: ignore[attr-defined]
