"""All requests of a forward in one call: rows and keys one request after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..context import ForwardContext
from ..kv_cache import Gathered, PagedKVPool
from . import metadata


@dataclass(frozen=True)
class PackedBatch:
    """Where rows and keys of each request are, the same for all layers.

    ``cu_q`` and ``cu_k`` ``[num_requests + 1]`` (int32) are the offsets of requests among rows and
    keys. ``gathered`` takes all keys from the pool; None where no request has a prefix, and the
    keys are the rows themselves. ``used_k`` ``[num_requests]`` (int32) says how many keys of each
    request are real where whole pages are gathered; None where all are.
    """

    write_locations: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    num_keys: int
    gathered: Gathered | None = None
    used_k: torch.Tensor | None = None


def pack(ctx: ForwardContext, pool: PagedKVPool) -> PackedBatch:
    """The packed batch of a forward that has rows."""
    rows, keys = ctx.extend_lens_host, ctx.seq_lens_host
    offsets = [[0, *accumulate(rows)], [0, *accumulate(keys)], keys]
    cu_q, cu_k, lens = metadata.to_device(offsets, pool.device)
    gathered = None
    if any(ctx.prefix_lens_host):
        slots = _slots(metadata.page_table(ctx, pool), cu_k, lens, sum(keys), pool.page_size)
        gathered = pool.gathered_slots(slots)
    return PackedBatch(
        metadata.write_locations(ctx), cu_q, cu_k, _longest(rows), max(keys), sum(keys), gathered
    )


def pack_pages(ctx: ForwardContext, pool: PagedKVPool) -> PackedBatch:
    """The same with whole pages gathered, for kernels that take ``used_k``.

    There are fewer pages than keys: what is to be gathered is listed on the host, where a launch
    for each step of it would take longer, and a page is read in one piece.
    """
    if not any(ctx.prefix_lens_host) or not pool.gathers_pages:
        return pack(ctx, pool)
    table = metadata.page_table(ctx, pool)
    rows, keys, width = ctx.extend_lens_host, ctx.seq_lens_host, table.shape[1]
    counts = [pool.pages_for(length) for length in keys]
    cu_k = [0, *accumulate(count * pool.page_size for count in counts)]
    entries = [i * width + j for i, count in enumerate(counts) for j in range(count)]
    cu_q, cu_keys, used, entry = metadata.to_device(
        [[0, *accumulate(rows)], cu_k, keys, entries], pool.device
    )
    gathered = pool.gathered_pages(table.reshape(-1).index_select(0, entry))
    locations = metadata.write_locations(ctx)
    return PackedBatch(
        locations, cu_q, cu_keys, _longest(rows), max(keys), cu_k[-1], gathered, used
    )


def _longest(rows: Sequence[int]) -> int:
    """Kernels take a longest request of one row to mean that each has exactly one."""
    return max(rows) if min(rows) else max(2, *rows)


def _slots(
    table: torch.Tensor, cu_k: torch.Tensor, lens: torch.Tensor, num_keys: int, page_size: int
) -> torch.Tensor:
    request, place = positions(cu_k, lens, num_keys)
    return table[request, place // page_size] * page_size + place % page_size


def gather(
    batch: PackedBatch, layer: int, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all requests, whose rows ``k`` and ``v`` are in the pool already."""
    return (k, v) if batch.gathered is None else batch.gathered(layer)


def positions(cu: torch.Tensor, lens: torch.Tensor, total: int) -> tuple[torch.Tensor, ...]:
    """The request of each packed entry, and its place within the request, ``[total]`` each."""
    # With its size given, nothing waits for the sum of the lengths.
    request = torch.repeat_interleave(lens.to(torch.int64), output_size=total)
    place = torch.arange(total, device=lens.device) - cu.to(torch.int64)[request]
    return request, place
