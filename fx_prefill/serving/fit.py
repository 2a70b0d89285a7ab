"""Whether a traced decoder, the attention it calls and the KV pool belong together."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import fx

from ..errors import ServingError
from ..graph.normalize import value_of
from ..graph.operators import operator_name, short_name
from ..graph.partition import PartitionPlan
from ..graph.verdict import BreakReason
from ..reporting.source import source_line
from .kv_cache import PagedKVPool

log = logging.getLogger(__name__)

ATTENTION = "fx_prefill::attention"


def check_attention(plan: PartitionPlan, name: str, pool: Any) -> None:
    """Raise ServingError where a decoder attends by itself, or its rows do not fit the pool.

    An attention of its own would take the rows of all requests for one sequence.
    """
    nodes = [node for part in plan.breaks for node in part.nodes]
    live = [node for node in nodes if operator_name(node.target) == ATTENTION]
    others = [n for n in nodes if plan.verdicts[n].reason is BreakReason.ATTENTION]
    own = [node for node in others if node not in live]
    if own or not live:
        seen = f"{short_name(own[0])} at {source_line(own[0])}" if own else "no attention"
        raise ServingError(
            f"{name} has {seen}; required: fx_prefill.attention(q, k, v, layer) in every layer, "
            "which keeps requests apart and reads and writes the KV pool"
        )
    crossing = [n for n in nodes if plan.verdicts[n].reason is BreakReason.CROSSES_TOKENS]
    if crossing:
        log.warning(
            "%s at %s sees the rows of all requests of a forward together",
            short_name(crossing[0]),
            source_line(crossing[0]),
        )
    if isinstance(pool, PagedKVPool):
        for node in live:
            _check_pool(node, name, pool)
        _check_dtype(_tensor(live[0], 1).dtype, pool)


def _tensor(node: fx.Node, position: int) -> torch.Tensor:
    argument = node.args[position]
    assert isinstance(argument, fx.Node)
    return value_of(argument)


def _check_pool(node: fx.Node, name: str, pool: PagedKVPool) -> None:
    k, v, layer = _tensor(node, 1), _tensor(node, 2), node.args[4]
    seen = (int(k.shape[1]), int(k.shape[2]), int(v.shape[2]))
    have = (pool.num_kv_heads, pool.head_dim, pool.v_head_dim)
    if seen != have:
        raise ServingError(
            f"layer {layer} of {name} makes {seen[0]} KV heads with keys of {seen[1]} and values "
            f"of {seen[2]}, and the pool has {have[0]} with {have[1]} and {have[2]}; make the pool "
            f"with num_kv_heads={seen[0]}, head_dim={seen[1]}, v_head_dim={seen[2]}"
        )
    if not isinstance(layer, int) or not 0 <= layer < pool.num_layers:
        raise ServingError(
            f"{name} has a layer {layer} and the pool has layers 0 to {pool.num_layers - 1}; make "
            "the pool with as many layers as the model has"
        )


def _check_dtype(dtype: torch.dtype, pool: PagedKVPool) -> None:
    if not pool.dtype.is_floating_point:
        raise ServingError(f"the pool is {pool.dtype}; required: a floating-point type")
    if pool.dtype != dtype:
        log.warning("keys and values are %s and the pool rounds them to %s", dtype, pool.dtype)
