"""What attention over a paged pool has in common: rows are written first, by a call or a graph."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ServingError
from ..context import ForwardContext
from ..kv_cache import PagedKVPool
from . import metadata
from .backend import AttentionLayer

MAX_VIEWS = 256
"""Views of slots that are kept, one for each count: each would cost a microsecond or two."""


class StaticSlots:
    """Slots ``[max_tokens]`` (int64) at an address that does not change, for captured writes.

    Rows of padding, and all rows while nothing may be written, have the reserved slot.
    """

    def __init__(self, pool: PagedKVPool) -> None:
        self._pool = pool
        self._locations: torch.Tensor | None = None
        self._views: dict[int, torch.Tensor] = {}
        self._num_written = 0

    def allocate(self, max_tokens: int) -> None:
        """Make the slots, once. Raises ServingError for more than were made."""
        if self._locations is None:
            size, slot, device = (max_tokens,), self._pool.dummy_slot, self._pool.device
            with torch.inference_mode(False):  # written inside and outside of it
                self._locations = torch.full(size, slot, dtype=torch.int64, device=device)
        if max_tokens > self._locations.shape[0]:
            raise ServingError(
                f"this attention backend was captured for up to {self._locations.shape[0]} tokens "
                f"and is asked for {max_tokens}; make a backend of its own for each PrefillGraph"
            )

    def prepare(self, locations: torch.Tensor | None) -> None:
        """Slots of a forward's rows; None where none may be written."""
        num_rows = 0 if locations is None else locations.shape[0]
        if locations is not None:
            self.of(num_rows).copy_(locations)
        if num_rows < self._num_written:
            self.of(self._num_written)[num_rows:].fill_(self._pool.dummy_slot)
        self._num_written = num_rows

    def of(self, num_rows: int) -> torch.Tensor:
        """The slots of the first rows."""
        view = self._views.get(num_rows)
        if view is None:
            assert self._locations is not None, "allocate() comes first"
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = self._views[num_rows] = self._locations[:num_rows]
        return view


class PooledAttention:
    """Attention over a :class:`PagedKVPool`; subclasses give ``attend``, and what it needs."""

    supports_capture = False
    supports_captured_writes = True

    def __init_subclass__(cls, **more: Any) -> None:
        """One that overrides ``forward`` alone means all of it: its writes stay where they are."""
        super().__init_subclass__(**more)
        own = vars(cls)
        if "forward" in own and "attend" not in own:
            cls.supports_captured_writes = own.get("supports_captured_writes", False)

    def __init__(self, pool: PagedKVPool) -> None:
        self.pool = pool
        self._slots = StaticSlots(pool)
        self._batches = metadata.PerForward(
            lambda ctx: self.prepared(ctx) if ctx.num_tokens else None
        )

    def prepared(self, ctx: ForwardContext) -> Any:
        """What all layers of a forward that has rows need, ``write_locations`` among it."""
        raise NotImplementedError

    def init_forward_metadata(self, ctx: ForwardContext) -> None:
        """Prepare what all layers need. Raises ContextError without pages or locations."""
        self._batches.renew(ctx)

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
        batch = self._batches.of(ctx)
        if batch is not None:
            self.pool.write(layer.index, batch.write_locations, k, v)
            self.attend(q, k, v, layer, out, ctx)

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

    # --- writes in captured graphs --------------------------------------------------------------

    def allocate_writes(self, max_tokens: int) -> None:
        """See :class:`WritingBackend`."""
        self._slots.allocate(max_tokens)

    def prepare_writes(self, ctx: ForwardContext | None) -> None:
        """See :class:`WritingBackend`."""
        self._slots.prepare(None if ctx is None else metadata.write_locations(ctx))

    def write_captured(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
        """See :class:`WritingBackend`."""
        self.pool.write(layer, self._slots.of(k.shape[0]), k, v)
