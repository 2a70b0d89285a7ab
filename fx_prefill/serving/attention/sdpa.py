"""Attention with torch's scaled_dot_product_attention: the reference, on any device and dtype.

Extending requests are attended one by one, decoding ones together, padded to the longest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..context import ForwardContext
from ..kv_cache import PagedKVPool
from . import metadata
from .backend import AttentionLayer, register_attention_backend
from .pooled import PooledAttention

Masks = dict[tuple[int, int], torch.Tensor | None]


@dataclass
class _Part:
    """Requests that one call attends: ``rows`` of the batch are ``num_rows`` for each of them.

    ``slots`` ``[num_requests * num_keys]`` are those of the keys; None where the rows are the keys.
    ``last`` ``[num_requests]`` holds the position of the row of decoding requests that differ in
    length. Otherwise the last row is at the last key (the mask is aligned to the lower right).
    """

    rows: slice
    num_requests: int
    num_rows: int
    num_keys: int
    slots: torch.Tensor | None
    last: torch.Tensor | None = None
    masks: Masks = field(default_factory=dict)

    def window(self, layer: AttentionLayer) -> tuple[int, int]:
        """The layer's window, without the ends that reach past all keys."""
        left, right = metadata.window_size(layer)
        if self.last is not None:
            right = 0  # What is right of a decoding row is padding.
        far = self.num_keys - 1
        return (-1 if left >= far else left), (-1 if right >= far else right)

    def mask(self, window: tuple[int, int], device: torch.device) -> torch.Tensor | None:
        """Which keys each row sees, ``[num_requests or 1, 1, num_rows, num_keys]``; None: all.

        Made by the first layer with this window.
        """
        if window not in self.masks:
            self.masks[window] = self._mask(window, device)
        return self.masks[window]

    def _mask(self, window: tuple[int, int], device: torch.device) -> torch.Tensor | None:
        left, right = window
        if self.last is None and self.num_rows == 1:
            right = -1  # Nothing is right of the last row.
        keys = torch.arange(self.num_keys, device=device)
        row = keys[-self.num_rows :][None] if self.last is None else self.last[:, None]
        return metadata.visible(row[:, None, :, None] - keys, left, right)


@dataclass(frozen=True)
class _Batch:
    write_locations: torch.Tensor
    parts: list[_Part]


@register_attention_backend("sdpa")
class SdpaAttention(PooledAttention):
    """Causal or not, windows, soft caps, sinks, grouped heads, values of another width.

    Soft caps and sinks are computed explicitly, with the softmax in float32 or wider.
    """

    def prepared(self, ctx: ForwardContext) -> _Batch:
        """See :class:`PooledAttention`."""
        return _prepare(ctx, self.pool)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        ctx: ForwardContext,
    ) -> None:
        """See :class:`WritingBackend`."""
        batch = self.batch(ctx)
        for part in batch.parts if batch is not None else ():
            rows = part.rows
            if part.slots is None:
                keys, values = k[rows], v[rows]
            else:
                keys, values = self.pool.read(layer.index, part.slots)
            _attend(q[rows], keys.to(q.dtype), values.to(q.dtype), layer, part, out[rows])


def _prepare(ctx: ForwardContext, pool: PagedKVPool) -> _Batch:
    table = metadata.page_table(ctx, pool) if any(ctx.prefix_lens_host) else None
    parts, start = [], 0
    for i in range(ctx.num_extends):
        num_rows, num_keys = ctx.extend_lens_host[i], ctx.seq_lens_host[i]
        rows = slice(start, start + num_rows)
        slots = None
        if ctx.prefix_lens_host[i] and table is not None:
            place = torch.arange(num_keys, device=pool.device)
            slots = _slots(table[i : i + 1], place[None], pool.page_size)
        if num_rows:
            parts.append(_Part(rows, 1, num_rows, num_keys, slots))
        start = rows.stop
    if ctx.num_decodes:
        parts.append(_decodes(ctx, pool, table, start))
    return _Batch(metadata.write_locations(ctx), parts)


def _decodes(
    ctx: ForwardContext, pool: PagedKVPool, table: torch.Tensor | None, start: int
) -> _Part:
    lens = ctx.seq_lens_host[ctx.num_extends :]
    longest, rows = max(lens), slice(start, start + len(lens))
    if table is None:  # All of them are at their first token, which is its only key.
        return _Part(rows, len(lens), 1, 1, None)
    (lengths,) = metadata.to_device([lens], pool.device)
    last = lengths.to(torch.int64) - 1
    # Padding gathers a key of the request itself: a masked NaN would still be one.
    place = torch.minimum(torch.arange(longest, device=pool.device)[None], last[:, None])
    slots = _slots(table[ctx.num_extends : ctx.num_requests], place, pool.page_size)
    return _Part(rows, len(lens), 1, longest, slots, None if min(lens) == longest else last)


def _slots(table: torch.Tensor, place: torch.Tensor, page_size: int) -> torch.Tensor:
    return (table.gather(1, place // page_size) * page_size + place % page_size).view(-1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: AttentionLayer,
    part: _Part,
    out: torch.Tensor,
) -> None:
    q, k, v = (x.unflatten(0, (part.num_requests, -1)).transpose(1, 2) for x in (q, k, v))
    window = part.window(layer)
    if layer.soft_cap is not None or layer.sinks is not None:
        found = _explicit(q, k, v, layer, part.mask(window, q.device))
    else:
        # Only where rows and keys are the same is torch's causal flag the mask we mean.
        causal = window == (-1, 0) and part.num_rows == part.num_keys
        found = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if causal else part.mask(window, q.device),
            is_causal=causal,
            scale=layer.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    out.copy_(found.transpose(1, 2).flatten(0, 1))


def _explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: AttentionLayer,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.to(wide).unflatten(1, (k.shape[1], -1))  # [requests, kv heads, group, rows, width]
    scores = groups @ k.to(wide).transpose(-1, -2)[:, :, None] * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.to(wide).view(k.shape[1], -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]]
    return (weights @ v.to(wide)[:, :, None]).flatten(1, 2).to(q.dtype)
