"""What attention over a paged pool has in common: rows are written first, by a call or a graph."""

from __future__ import annotations

from typing import Any

import torch

from ..context import ForwardContext
from ..kv_cache import PagedKVPool
from . import metadata
from .backend import AttentionLayer


class PooledAttention:
    """Attention over a :class:`PagedKVPool`; subclasses give ``attend``, and what it needs."""

    supports_capture = False
    supports_captured_writes = True

    def __init__(self, pool: PagedKVPool) -> None:
        self.pool = pool
        self._per_forward = metadata.PerForward[Any]()

    def prepared(self, ctx: ForwardContext) -> Any:
        """What all layers of a forward that has rows need, ``write_locations`` among it."""
        raise NotImplementedError

    def batch(self, ctx: ForwardContext) -> Any:
        """What was prepared for this forward; None where it has no rows."""
        return self._per_forward.of(ctx, self._prepare)

    def _prepare(self, ctx: ForwardContext) -> Any:
        return self.prepared(ctx) if ctx.num_tokens else None

    def init_forward_metadata(self, ctx: ForwardContext) -> None:
        """Prepare what all layers need. Raises ContextError without pages or locations."""
        self._per_forward.renew(ctx, self._prepare)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        ctx: ForwardContext,
    ) -> None:
        """Write K and V to the pool, then attend. See :class:`AttentionBackend`."""
        batch = self.batch(ctx)
        if batch is not None:
            self.write(layer.index, batch.write_locations, k, v)
            self.attend(q, k, v, layer, out, ctx)

    @property
    def reserved_slot(self) -> int:
        """Slot that rows of padding are written to, and nothing reads."""
        return self.pool.dummy_slot

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write rows to slots ``[num_rows]`` (int64) of the pool."""
        self.pool.write(layer, slots, k, v)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        ctx: ForwardContext,
    ) -> None:
        """As ``forward``, K and V being in the pool already."""
        raise NotImplementedError
