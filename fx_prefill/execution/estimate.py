"""How much memory the graphs of a bucket will take, told before anything is captured.

All buckets share one pool, so what counts is the largest. Its requests are run through a model of
the allocator, in plan order and with the sizes of the bucket: what a partition hands on lives until
its last reader, what a segment makes on the way lives while it is read there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ..graph.normalize import value_of
from ..graph.partition import Partition, PartitionPlan
from ..graph.placement import MATMULS
from ..graph.symbols import Bindings, evaluate_sizes, free_symbols, size_exprs
from ..graph.verdict import BreakReason
from ..graph.writes import storages
from .allocator import Block, PoolModel
from .buffers import plan_memory


def graph_bytes(
    plan: PartitionPlan,
    partitions: Sequence[Partition],
    bindings: Bindings,
    *,
    fused: bool,
    pooled: bool,
) -> int:
    """Bytes of buffers and of the captures' pool at the bucket in ``bindings``.

    ``fused`` tells whether the segment compiler fuses; ``pooled`` whether segments' results live in
    a pool (on a GPU) or in buffers.
    """
    buffers = plan_memory(plan, partitions, results=not pooled).num_bytes(bindings)
    return buffers + (pool_bytes(plan, partitions, bindings, fused) if pooled else 0)


def pool_bytes(
    plan: PartitionPlan, partitions: Sequence[Partition], bindings: Bindings, fused: bool
) -> int:
    """Device memory of the pool after the segments of one bucket were captured in plan order."""
    last_use = plan_memory(plan, partitions).last_use
    pool = PoolModel()
    held: dict[int, tuple[Block, int]] = {}  # storage: block, partition after which it is free
    for part in partitions:
        if not part.is_segment:
            continue
        for storage in [s for s, (_, until) in held.items() if until < part.index]:
            pool.release(held.pop(storage)[0])
        blocks = _walk(plan, part, bindings, fused, pool)
        for node in part.outputs:
            until = last_use.get(node, part.index)
            for storage in storages(node):
                if storage in blocks:
                    held[storage] = (blocks.pop(storage), until)
                elif storage in held:
                    held[storage] = (held[storage][0], max(held[storage][1], until))
                else:  # a view of an input is copied
                    held[storage] = (pool.allocate(_bytes(node, bindings)), until)
    return pool.num_bytes


def _walk(
    plan: PartitionPlan, part: Partition, bindings: Bindings, fused: bool, pool: PoolModel
) -> dict[int, Block]:
    """Run a segment's requests through the pool; the blocks of its results by storage."""
    kept = _materialised(plan, part) if fused else None
    outputs = {storage for node in part.outputs for storage in storages(node)}
    inside = set(part.nodes)
    borrowed = {
        storage
        for node in part.nodes
        for arg in node.all_input_nodes
        if arg not in inside
        for storage in storages(arg)
    }
    last_read = _last_reads(part)
    live: dict[int, Block] = {}
    for position, node in enumerate(part.nodes):
        for storage in storages(node) - borrowed:
            if storage not in live and (kept is None or storage in kept):
                live[storage] = pool.allocate(_bytes(node, bindings))
        for storage in [s for s in live if s not in outputs and last_read[s] <= position]:
            pool.release(live.pop(storage))
    return live


def _last_reads(part: Partition) -> dict[int, int]:
    """Position of the last node that reads or makes each storage."""
    found: dict[int, int] = {}
    for position, node in enumerate(part.nodes):
        for arg in (node, *node.all_input_nodes):
            found.update(dict.fromkeys(storages(arg), position))
    return found


def _materialised(plan: PartitionPlan, part: Partition) -> set[int]:
    """Storages that a fusing compiler writes to memory.

    Those that matrix products read and make, those that leave, and those still read after the next
    matrix product: kernels are fused between products only.
    """
    kept = {storage for node in part.outputs for storage in storages(node)}
    made_in: dict[int, int] = {}
    region = 0
    for node in part.nodes:
        verdict = plan.verdicts[node]
        whole = MATMULS & set(verdict.operators) or verdict.reason is BreakReason.ATTENTION
        region += bool(whole)
        for value in (node, *node.all_input_nodes):
            for storage in storages(value):
                if whole or made_in.setdefault(storage, region) != region:
                    kept.add(storage)
    return kept


def _bytes(node: fx.Node, bindings: Bindings) -> int:
    """Bytes of the tensors in a node's value."""
    return sum(
        math.prod(_sizes(leaf, bindings)) * leaf.element_size()
        for leaf in tree_leaves(value_of(node))
        if isinstance(leaf, torch.Tensor)
    )


def _sizes(tensor: torch.Tensor, bindings: Bindings) -> tuple[Any, ...]:
    """Sizes at the bucket; one that depends on more has no place in a segment's memory."""
    known = free_symbols(tensor) <= bindings.keys()
    return evaluate_sizes(size_exprs(tensor), bindings) if known else (0,)
