"""Batches of requests with a cache for tests of attention, and what their attention has to be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fx_prefill.serving.attention.backend import make_attention_backend
from fx_prefill.serving.context import ForwardContext
from fx_prefill.serving.kv_cache import PagedKVPool

NUM_LAYERS = 2


@dataclass
class Batch:
    """Rows of a forward, its context, and all keys and values of each request and layer."""

    pool: PagedKVPool
    ctx: ForwardContext
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: list[list[torch.Tensor]]
    values: list[list[torch.Tensor]]


def make_batch(
    lengths: Sequence[tuple[int, int]],
    num_decodes: int = 0,
    *,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (8, 8),
    page_size: int = 4,
    layout: Any = "NHD",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    """Requests of ``(prefix, new)`` tokens; whatever slot they do not use holds NaN."""
    torch.manual_seed(seed)
    num_pages = sum(-(-sum(pair) // page_size) for pair in lengths) + 4
    pool = PagedKVPool(
        NUM_LAYERS,
        num_pages,
        page_size,
        heads[1],
        widths[0],
        v_head_dim=widths[1],
        dtype=dtype,
        device=device,
        layout=layout,
    )
    for held in (*pool.keys, *pool.values):
        held.fill_(float("nan"))
    shuffle_pages(pool, seed)
    pages = [pool.allocate(pool.pages_for(sum(pair))) for pair in lengths]

    def randn(rows: int, num_heads: int, width: int) -> torch.Tensor:
        return torch.randn(rows, num_heads, width).to(device, dtype)

    new = [pair[1] for pair in lengths]
    total = sum(new)
    q = randn(total, heads[0], widths[0])
    k, v = randn(total, heads[1], widths[0]), randn(total, heads[1], widths[1])
    locations, keys, values = [], [[] for _ in lengths], [[] for _ in lengths]
    for i, (prefix, count) in enumerate(lengths):
        slots = torch.tensor(pool.slots(pages[i], 0, prefix + count), device=device)
        locations.append(slots[prefix:])
        rows = slice(sum(new[:i]), sum(new[: i + 1]))
        for layer in range(NUM_LAYERS):
            old_k, old_v = randn(prefix, heads[1], widths[0]), randn(prefix, heads[1], widths[1])
            pool.write(layer, slots[:prefix], old_k, old_v)
            keys[i].append(torch.cat([old_k, k[rows]]))
            values[i].append(torch.cat([old_v, v[rows]]))
    ctx = ForwardContext.from_lengths(
        new,
        [pair[0] for pair in lengths],
        num_decodes=num_decodes,
        device=device,
        page_table=pool.page_table(pages),
        write_locations=torch.cat(locations) if locations else None,
    )
    return Batch(pool, ctx, q, k, v, keys, values)


def with_backend(batch: Batch, name: str) -> Batch:
    batch.ctx.attention = make_attention_backend(name, batch.pool)
    return batch


def shuffle_pages(pool: PagedKVPool, seed: int) -> None:
    pages = pool.allocate(pool.num_free)
    random.Random(seed).shuffle(pages)
    pool.release(pages)


def naive(
    batch: Batch,
    layer: int,
    *,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention one row, one head and one key after the other's rule, in float64."""
    rows, out, row = batch.q.double().cpu(), [], 0
    lengths = zip(batch.ctx.prefix_lens_host, batch.ctx.extend_lens_host, strict=True)
    for i, (prefix, count) in enumerate(lengths):
        keys, values = batch.keys[i][layer].double().cpu(), batch.values[i][layer].double().cpu()
        group = rows.shape[1] // keys.shape[1]
        for position in range(prefix, prefix + count):
            seen = [
                j
                for j in range(prefix + count)
                if (j <= position or not causal) and (window is None or abs(position - j) < window)
            ]
            for head in range(rows.shape[1]):
                mine = keys[seen, head // group]
                scores = mine @ rows[row, head] * rows.shape[2] ** -0.5
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double().cpu()])
                weights = torch.softmax(scores, 0)[: len(seen)]
                out.append(weights @ values[seen, head // group])
            row += 1
    return torch.stack(out).view(row, rows.shape[1], -1)


def random_lengths(rng: random.Random) -> tuple[list[tuple[int, int]], int]:
    """Requests without and with a prefix, in that mixture or alone, then decoding ones."""
    extends = [
        (rng.choice([0, 0, rng.randint(1, 20)]), rng.choice([1, rng.randint(1, 17)]))
        for _ in range(rng.randint(0, 3))
    ]
    decodes = [(rng.randint(0, 20), 1) for _ in range(rng.randint(0 if extends else 1, 3))]
    return extends + decodes, len(decodes)


def random_layer(rng: random.Random, num_heads: int, names: Sequence[str]) -> dict[str, Any]:
    """Arguments of a layer out of those that a backend has."""
    choices = {
        "causal": rng.random() < 0.7,
        "window": rng.choice([None, 1, 3, 7, 64]),
        "soft_cap": rng.choice([None, None, 1.5]),
        "sinks": rng.choice([None, torch.linspace(-1, 1, num_heads)]),
    }
    return {name: value for name, value in choices.items() if name in names}
