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
    keys are the rows themselves.
    """

    write_locations: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    num_keys: int
    gathered: Gathered | None


def pack(ctx: ForwardContext, pool: PagedKVPool) -> PackedBatch:
    """The packed batch of a forward that has rows."""
    rows, keys = ctx.extend_lens_host, ctx.seq_lens_host
    offsets = [0, *accumulate(rows), 0, *accumulate(keys)]
    parts = [torch.tensor(offsets, dtype=torch.int32, device="cpu")]
    table = metadata.page_table(ctx, pool) if any(ctx.prefix_lens_host) else None
    if table is not None:
        parts += _places(keys, table.shape[1], pool)
    cu, *places = metadata.upload(parts, pool.device)
    cu_q, cu_k = cu.chunk(2)
    gathered = None
    if table is not None:
        entry, offset = places
        pages = table.reshape(-1).index_select(0, entry)
        slots = torch.add(offset.view(-1, len(entry)), pages, alpha=pool.page_size)
        gathered = Gathered(pool, slots.view(-1))
    # Kernels take a longest request of one row to mean that each has exactly one.
    max_q = max(rows) if min(rows) else max(2, *rows)
    locations = metadata.write_locations(ctx)
    return PackedBatch(locations, cu_q, cu_k, max_q, max(keys), sum(keys), gathered)


def _places(lens: Sequence[int], width: int, pool: PagedKVPool) -> list[torch.Tensor]:
    """Entry of the flat page table and offset in the page of every key, on the host.

    The offsets have what leads from the keys to the values added, where the pool has both in one.
    A launch for each of these steps would take longer than all of them together.
    """
    counts = torch.tensor(lens, dtype=torch.int64, device="cpu")
    request = torch.repeat_interleave(counts)
    place = torch.arange(len(request), device="cpu") - (counts.cumsum(0) - counts)[request]
    entry = request.mul_(width).add_(place // pool.page_size)
    offset = place.remainder_(pool.page_size)
    return [entry, torch.cat([offset + start for start in pool.starts])]


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
