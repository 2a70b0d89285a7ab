"""Functional collectives, the form in which Dynamo records ``torch.distributed``.

Note [Collectives over rows]

A reduction over ranks makes each entry from the entries at the same place on every rank, so rows
stay apart as long as all ranks of the group bring the same rows. Eagerly they must, or the shapes
would differ. In a segment all shapes are the bucket's, so it is the choice of the bucket that must
be the same on all ranks (``serving/distributed.py``), and what a padded row holds is summed into
nothing but the same padded row. Sorted entries are no rows: their order is each rank's own.

Gathers, scatters and exchanges put rows at places that depend on the rank and on how many rows
there are; a padded row could land before a real one. They are breaks.

Only a backend that works on the device's stream can be recorded. Gloo works in a thread of the
host, which a recording would not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..verdict import BreakReason, NotRowwise, State, TokenAxis
from .base import OpCall

COLLECTIVE_NAMESPACES = frozenset(
    ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "symm_mem")
)
CAPTURABLE_BACKENDS = frozenset(("nccl",))
SAME_PLACE = frozenset(("all_reduce", "all_reduce_coalesced", "broadcast"))
"""Collectives whose results at a place depend on nothing but that place on the ranks."""
WAIT = "wait_tensor"
REDUCTIONS = frozenset(("sum", "avg", "max", "min", "product"))


def is_collective(name: str) -> bool:
    """Whether a registered operator, ``namespace::name``, is a collective or waits for one."""
    return name.rpartition("::")[0] in COLLECTIVE_NAMESPACES


def starts_collective(operators: Sequence[str]) -> bool:
    """Whether of a node's operators some collective is not waited for within the node."""
    ours = [name for name in operators if is_collective(name)]
    return bool(ours) and not ours[-1].endswith(f"::{WAIT}")


def collective(call: OpCall) -> Sequence[State]:
    """States of a collective's results; NotRowwise where it moves rows or cannot be captured."""
    if call.name == WAIT:
        return _same_rows(call)  # where its collective is a break, so is the wait: placement.py
    if call.name not in SAME_PLACE:
        raise _refusal(f"{call.name} moves rows between ranks")
    reduction = call["reduce_op"]
    if reduction is not None and str(reduction).lower() not in REDUCTIONS:
        raise _refusal(f"{call.name} reduces by {reduction}, which is not known to keep rows apart")
    states = _same_rows(call)
    device = call.tensors[0].device
    backend = backend_of(call["group_name"], device)
    if backend not in CAPTURABLE_BACKENDS:
        seen = f"its group works through {backend}" if backend else "its group is not known"
        raise _refusal(f"{seen} on {device.type}, which cannot be captured")
    return states


def backend_of(group: Any, device: torch.device) -> str | None:
    """Name of the backend that a group (or its name) uses on a device; None where it has none."""
    # Here, as there are builds of torch without it; they have no collectives to ask about.
    from torch.distributed import distributed_c10d as c10d

    try:
        if isinstance(group, str):
            group = c10d._resolve_process_group(group)  # type: ignore[arg-type]
        return str(group._get_backend(device).name()).lower()
    except (RuntimeError, LookupError):
        return None  # no such group here, or none for this device: the refusal says so


def _same_rows(call: OpCall) -> list[State]:
    states: list[State] = []
    for tensor in call.tensors:
        axis: TokenAxis | None = call.axis(tensor)
        if axis is not None and not axis.in_order:
            raise _refusal(f"{call.name} reads sorted entries, whose order is each rank's own")
        states.append(axis)
    return states


def _refusal(detail: str) -> NotRowwise:
    return NotRowwise(BreakReason.COLLECTIVE, detail)
