"""All requests in one call of the flash kernel behind torch.nn.attention.varlen.

Note [The operator under varlen_attn]

This runs once for each layer, and on a GPU the host is what is slow. ``varlen_attn`` and
``varlen_attn_out`` are custom operators in Python around one aten operator each, which takes fewer
key than query heads by itself; ``enable_gqa`` only switches off a check. So the aten operator is
called directly: the one that writes to ``out`` where torch has it (not in 2.11), else the other.

Note [Never one row at most]

With a longest request of one row, grouped heads and no window, the kernel rearranges ``out`` in a
copy and leaves the one it was given unwritten. A longest of two rows is also true and avoids that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import ServingError
from ..context import ForwardContext
from ..kv_cache import PagedKVPool
from . import metadata
from .backend import AttentionLayer, register_attention_backend
from .captured import MAX_CAPTURED_REQUESTS, CapturedBatch
from .packed import PackedBatch, gather, pack_pages
from .pooled import PooledAttention

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


@register_attention_backend("varlen")
class VarlenAttention(PooledAttention):
    """Causal or not, windows and grouped heads, in bfloat16 or float16 on a GPU.

    Raises ServingError for a pool elsewhere, of another dtype, or with values of another width.
    """

    supports_capture = True

    def __init__(
        self, pool: PagedKVPool, max_captured_requests: int = MAX_CAPTURED_REQUESTS
    ) -> None:
        _check_pool(pool)
        super().__init__(pool)
        self._kernel = _kernel()
        self._captured = CapturedBatch(pool, max_captured_requests)

    def prepared(self, ctx: ForwardContext) -> PackedBatch:
        """See :class:`PooledAttention`."""
        return pack_pages(ctx, self.pool)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        ctx: ForwardContext,
    ) -> None:
        """See :class:`WritingBackend`.

        Raises ServingError for soft caps, sinks, and rows of another dtype than the pool's.
        """
        batch = self.batch(ctx)
        if batch is not None:
            self._run(q, k, v, layer, out, batch)

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        batch: PackedBatch,
    ) -> None:
        self._check(layer, q)
        k, v = gather(batch, layer.index, k, v)
        left, right = metadata.window_size(layer)
        self._kernel(
            out,
            q,
            k,
            v,
            batch.cu_q,
            batch.cu_k,
            max(batch.max_q, 2),  # See Note [Never one row at most].
            batch.max_k,
            0.0,  # dropout
            left < 0 and right == 0,  # is_causal
            False,  # return_debug_mask
            scale=layer.scale,
            window_size_left=left,
            window_size_right=right,
            seqused_k=batch.used_k,
        )

    def _check(self, layer: AttentionLayer, q: torch.Tensor) -> None:
        if layer.soft_cap is not None or layer.sinks is not None:
            metadata.refuse("varlen", layer, soft_cap="'sdpa' or 'flex'", sinks="'sdpa' or 'flex'")
        if q.dtype is not self.pool.dtype:
            raise ServingError(
                f"layer {layer.index}: the attention backend 'varlen' got {q.dtype} rows and a "
                f"pool of {self.pool.dtype}; required: one dtype, or the backend 'sdpa'"
            )

    # --- inside captured graphs: prompts without prefix, a few at a time ------------------------

    def allocate_captured(self, max_tokens: int) -> None:
        """See :class:`CapturableBackend`."""
        self._captured.allocate(max_tokens)

    def serves_captured(self, ctx: ForwardContext) -> bool:
        """Prompts, or first chunks of them: what they read is in this forward."""
        return self._captured.serves(ctx)

    def prepare_captured(self, ctx: ForwardContext, bucket: int) -> None:
        """See :class:`CapturableBackend`."""
        self._captured.prepare(ctx, bucket)

    def forward_captured(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
    ) -> None:
        """See :class:`CapturableBackend`."""
        batch = self._captured.batch(q.shape[0])
        self.write(layer.index, batch.write_locations, k, v)
        self._run(q, k, v, layer, out, batch)


def _kernel() -> Callable[..., Any]:
    """The aten operator, ``out`` first. See Note [The operator under varlen_attn]."""
    in_place = getattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace", None)
    if in_place is not None:
        return in_place.default
    functional = torch.ops.aten._flash_attention_forward.default

    def copying(out: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        out.copy_(functional(*args, **kwargs)[0])

    return copying


def _check_pool(pool: PagedKVPool) -> None:
    seen = None
    if pool.device.type != "cuda":
        seen = f"a pool on {pool.device}"
    elif pool.dtype not in DTYPES:
        seen = f"a pool of {pool.dtype}"
    elif pool.head_dim != pool.v_head_dim:
        seen = f"head_dim {pool.head_dim} and v_head_dim {pool.v_head_dim}"
    elif pool.head_dim % 8 or pool.head_dim > MAX_HEAD_DIM:
        seen = f"head_dim {pool.head_dim}"
    if seen is not None:
        raise ServingError(
            f"the attention backend 'varlen' got {seen}; required: a CUDA pool of bfloat16 or "
            f"float16, keys and values of one width, a multiple of 8 up to {MAX_HEAD_DIM}; use "
            "the backend 'sdpa'"
        )
