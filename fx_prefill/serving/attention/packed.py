"""All requests of a forward in one call: rows and keys one request after the other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from ..context import ForwardContext
from ..kv_cache import PagedKVPool
from . import metadata


@dataclass(frozen=True)
class PackedBatch:
    """Where rows and keys of each request are, the same for all layers.

    ``cu_q`` and ``cu_k`` ``[num_requests + 1]`` (int32) are the offsets of requests among rows and
    keys. ``index`` gathers all keys from the pool (:meth:`PagedKVPool.gather_index`); None where no
    request has a prefix, and the keys are the rows themselves.
    """

    write_locations: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    num_keys: int
    index: torch.Tensor | None


def pack(ctx: ForwardContext, pool: PagedKVPool) -> PackedBatch:
    """The packed batch of a forward that has rows."""
    rows, keys = ctx.extend_lens_host, ctx.seq_lens_host
    offsets = [[0, *accumulate(rows)], [0, *accumulate(keys)], keys]
    cu_q, cu_k, key_lens = metadata.to_device(offsets, pool.device)
    num_keys = sum(keys)
    index = None
    if any(ctx.prefix_lens_host):
        table = metadata.page_table(ctx, pool)
        index = pool.gather_index(_slots(table, cu_k, key_lens, num_keys, pool.page_size))
    # Kernels take a longest request of one row to mean that each has exactly one.
    max_q = max(rows) if min(rows) else max(2, *rows)
    return PackedBatch(metadata.write_locations(ctx), cu_q, cu_k, max_q, max(keys), num_keys, index)


def gather(
    pool: PagedKVPool, batch: PackedBatch, layer: int, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all requests, whose rows ``k`` and ``v`` are in the pool already."""
    return (k, v) if batch.index is None else pool.gather(layer, batch.index)


def positions(cu: torch.Tensor, lens: torch.Tensor, total: int) -> tuple[torch.Tensor, ...]:
    """The request of each packed entry, and its place within the request, ``[total]`` each."""
    # With its size given, nothing waits for the sum of the lengths.
    request = torch.repeat_interleave(lens.to(torch.int64), output_size=total)
    place = torch.arange(total, device=lens.device) - cu.to(torch.int64)[request]
    return request, place


def _slots(
    table: torch.Tensor, cu_k: torch.Tensor, lens: torch.Tensor, num_keys: int, page_size: int
) -> torch.Tensor:
    request, place = positions(cu_k, lens, num_keys)
    return table[request, place // page_size] * page_size + place % page_size
