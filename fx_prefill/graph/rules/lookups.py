"""Whether every index of a look-up by token is inside its table, whatever the padded rows hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..symbols import size_exprs
from ..verdict import TokenAxis
from .base import OpCall

LOOKUPS = frozenset(
    (
        "embedding index index_select gather _unsafe_index scatter scatter_add scatter_reduce "
        "index_put index_add one_hot outplace_fused_experts"
    ).split()
)
"""Operators that take an index for each token."""


def in_range(call: OpCall) -> bool:
    """Whether a call is no look-up by token, or one whose indices are known to be in range."""
    if call.name not in LOOKUPS:
        return True
    return all(_inside(call, index, size) for index, size in _indices(call))


def _indices(call: OpCall) -> Iterator[tuple[Any, Any]]:
    """Each index tensor with the size of the dimension it looks into."""
    if call.name == "embedding":
        yield call["indices"], size_exprs(call["weight"])[0]
    elif call.name in ("index", "_unsafe_index", "index_put"):
        for dim, index in enumerate(call["indices"]):
            if index is not None:
                yield index, size_exprs(call["self"])[dim]
    elif call.name == "outplace_fused_experts":
        yield call["topk_ids"], size_exprs(call["w1"])[0]
    elif call.name == "one_hot":
        yield call["self"], call["num_classes"]
    else:
        source = call["self"]
        yield call["index"], size_exprs(source)[call["dim"]] if source.dim() else 1


def _inside(call: OpCall, index: torch.Tensor, size: Any) -> bool:
    # A routing tensor is in range by what it is; one without a token axis is the same in each call.
    if not isinstance(call.states.get(id(index)), TokenAxis):
        return True
    held = call.held(index)
    return (
        held is not None
        and held.bound is not None
        and isinstance(size, int)
        and (held.bound <= size)
    )
