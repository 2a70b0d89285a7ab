"""Where captured attention reads what a forward is: offsets of requests, cache slots of rows.

Note [Padding is a request]

The rows of a bucket past the real ones are one more request, the last. So every row is written, no
real row sees them, and offsets need no other length. Their keys and values go to the reserved slot.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from ...errors import ServingError
from ..context import ForwardContext
from ..kv_cache import PagedKVPool
from .packed import PackedBatch
from .slots import StaticSlots
from .upload import Uploads

MAX_CAPTURED_REQUESTS = 8
"""Requests of a captured forward; a kernel looks at each, whether there is one or not."""


class CapturedBatch:
    """Offsets ``[max_requests + 2]`` (int32) and slots ``[max_tokens]`` (int64) at fixed addresses.

    Serves prompts without a cached prefix: their keys and values are rows of the forward.
    """

    def __init__(self, pool: PagedKVPool, max_requests: int = MAX_CAPTURED_REQUESTS) -> None:
        self.max_requests = max_requests
        self._pool = pool
        with torch.inference_mode(False):  # written inside and outside of it
            self._offsets = torch.zeros(max_requests + 2, dtype=torch.int32, device=pool.device)
        self._upload = Uploads(self._offsets)
        self._slots: StaticSlots | None = None

    def allocate(self, max_tokens: int) -> None:
        """Make the slots, once. Raises ServingError for more than were made."""
        if self._slots is None:
            pool = self._pool
            self._slots = StaticSlots(max_tokens, pool.dummy_slot, self._offsets.device)
        if max_tokens > len(self._slots):
            raise ServingError(
                f"this attention backend was captured for up to {len(self._slots)} tokens "
                f"and is asked for {max_tokens}; make a backend of its own for each PrefillGraph"
            )

    def serves(self, ctx: ForwardContext) -> bool:
        """Whether a forward is a few prompts, reads nothing from the cache, and has all slots.

        Without them the live backend says what is missing.
        """
        slots = ctx.write_locations
        if slots is None or slots.shape != (ctx.num_tokens,):
            return False
        return 0 < ctx.num_requests <= self.max_requests and not any(ctx.prefix_lens_host)

    def prepare(self, ctx: ForwardContext, bucket: int) -> None:
        """Write a forward's offsets and slots; nothing waits for the device."""
        assert self._slots is not None, "allocate() comes first"
        self._slots.order()  # before the offsets too
        offsets, num_tokens = [0, *accumulate(ctx.extend_lens_host)], ctx.num_tokens
        offsets += [num_tokens] * (self.max_requests + 1 - len(offsets))
        offsets.append(bucket)  # Note [Padding is a request]
        self._upload(offsets)
        self._slots.prepare(ctx.write_locations)

    def batch(self, num_rows: int) -> PackedBatch:
        """What kernels of a bucket of ``num_rows`` read."""
        assert self._slots is not None, "allocate() comes first"
        longest = max(num_rows, 2)
        return PackedBatch(
            write_locations=self._slots.of(num_rows),
            cu_q=self._offsets,
            cu_k=self._offsets,
            max_q=longest,
            max_k=longest,
            num_keys=num_rows,
        )
