"""What the tests of the engine seam share: a decoder of packed rows, a plain backend, schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import fx_prefill
from fx_prefill import ForwardContext

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 61, 24, 4, 2, 8, 4


class PlainBackend:
    """Attention request by request in a few lines, with a paged pool."""

    supports_capture = False

    def __init__(self, pool: fx_prefill.PagedKVPool) -> None:
        self.pool = pool
        self.fail_in_layer: int | None = None

    def init_forward_metadata(self, ctx: fx_prefill.ForwardContext) -> None:
        assert ctx.page_table is not None
        pages = ctx.page_table.tolist()
        self.slots = [
            torch.tensor(self.pool.slots(pages[i], 0, length), dtype=torch.int64)
            for i, length in enumerate(ctx.seq_lens_host)
        ]

    def forward(self, q: Any, k: Any, v: Any, layer: Any, out: Any, ctx: Any) -> None:
        if layer.index == self.fail_in_layer:
            ctx.num_tokens, ctx.rank_num_tokens = 1, (1, 2, 3)
            raise RuntimeError("the backend broke")
        self.pool.write(layer.index, ctx.write_locations, k, v)
        start = 0
        for slots, prefix, length in zip(
            self.slots, ctx.prefix_lens_host, ctx.extend_lens_host, strict=True
        ):
            keys, values = self.pool.read(layer.index, slots)
            group = q.shape[1] // k.shape[1]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q[start : start + length], keys) * layer.scale
            rows = torch.arange(prefix, prefix + length)[:, None]
            seen = torch.arange(len(slots))[None] <= rows
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[start : start + length] = torch.einsum("hqk,khd->qhd", weights, values)
            start += length


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_id = index
        self.norm, self.after = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.kv = nn.Linear(HIDDEN, 2 * KV_HEADS * HEAD_DIM)
        self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 40), nn.GELU(), nn.Linear(40, HIDDEN))

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q = self.q(y).view(-1, HEADS, HEAD_DIM) * turn
        k, v = self.kv(y).view(-1, 2 * KV_HEADS, HEAD_DIM).chunk(2, 1)
        x = x + self.o(fx_prefill.attention(q, k * turn, v, self).flatten(1))
        return x + self.mlp(self.after(x))


class PackedDecoder(nn.Module):
    """An engine's own decoder: rows of all requests one after the other, no batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(i) for i in range(LAYERS))

    def forward(
        self, inputs_embeds: torch.Tensor, positions: torch.Tensor, aux: bool = False
    ) -> Any:
        turn = (1 + 0.1 * torch.sin(positions.float() * 0.3))[:, None, None]
        turn = turn.to(inputs_embeds.dtype)
        x, kept = inputs_embeds, []
        for layer in self.layers:
            kept.append(x)
            x = layer(x, turn)
        return (x, [kept[1], kept[3]]) if aux else x


class PackedLM(nn.Module):
    """The decoder with a head, as engines name them."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = PackedDecoder()
            self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.requires_grad_(False)


def pool_for(page_size: int = 4, num_pages: int = 400, **more: Any) -> fx_prefill.PagedKVPool:
    """A pool for PackedLM with NaN where nothing may read: the reserved page."""
    given = {"dtype": torch.float32, **more}
    pool = fx_prefill.PagedKVPool(LAYERS, num_pages, page_size, KV_HEADS, HEAD_DIM, **given)
    poison(pool)
    return pool


def poison(pool: fx_prefill.PagedKVPool) -> None:
    """NaN in every page that no request has; the reserved one among them."""
    free = [0, *pool._free]
    for held in (*pool.keys, *pool.values):
        held[free] = float("nan")


class Batch:
    """Requests with pages of their own, and the context of a forward over some of their rows."""

    def __init__(self, pool: fx_prefill.PagedKVPool, lengths: Sequence[int], seed: int = 0) -> None:
        self.pool = pool
        generator = torch.Generator().manual_seed(seed)
        self.ids = [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]
        self.pages = [pool.allocate(pool.pages_for(n)) for n in lengths]

    def context(
        self,
        extends: Sequence[int],
        prefixes: Sequence[int] | None = None,
        num_decodes: int = 0,
        **fields: Any,
    ) -> tuple[fx_prefill.ForwardContext, torch.Tensor]:
        """The context, and the ids of its rows."""
        starts = [0] * len(extends) if prefixes is None else list(prefixes)
        pairs = list(zip(starts, extends, strict=True))
        slots = [
            slot
            for pages, (start, n) in zip(self.pages, pairs, strict=False)
            for slot in self.pool.slots(pages, start, start + n)
        ]
        ids = [ids[start : start + n] for ids, (start, n) in zip(self.ids, pairs, strict=False)]
        ctx = ForwardContext.from_lengths(
            extends,
            starts,
            num_decodes=num_decodes,
            page_table=self.pool.page_table(self.pages[: len(extends)]),
            write_locations=torch.tensor(slots),
            **fields,
        )
        return ctx, torch.cat(ids)

    def release(self) -> None:
        for pages in self.pages:
            self.pool.release(pages)
