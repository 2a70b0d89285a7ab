"""Publishes a plan where PyTorch's own tools look: the log, and the trace that tlparse reads."""

from __future__ import annotations

import logging

from torch._logging import trace_structured

from ..graph.partition import PartitionPlan
from ..options import Options
from .explain import Report, describe_plan, hints_of

log = logging.getLogger("fx_prefill.plan")


def publish(plan: PartitionPlan, options: Options) -> None:
    """Log a new plan at DEBUG (``TORCH_LOGS="+fx_prefill"``) and add it to a structured trace.

    The table is only made where somebody reads it.
    """
    text = ""

    def table() -> str:
        nonlocal text
        text = text or str(Report((describe_plan(plan, options, hints_of(plan)),)))
        return text

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "fx_prefill_plan", "encoding": "string"},
        payload_fn=table,
    )
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", table())
