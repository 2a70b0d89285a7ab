"""Attention with FlashInfer and with flash-attn, where they are installed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch

from ...errors import ServingError
from ..context import ForwardContext
from ..kv_cache import PagedKVPool
from . import metadata
from .backend import AttentionLayer, register_attention_backend
from .packed import PackedBatch, gather, pack, positions
from .pooled import PooledAttention

WORKSPACE_BYTES = 128 * 2**20
"""What FlashInfer recommends for its split-k results."""


def _library(module: str, pip_name: str, backend: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ServingError(
            f"the attention backend {backend!r} needs the package {module!r}, which cannot be "
            f"imported ({error}); required: `pip install {pip_name}`, or the backend 'sdpa'"
        ) from error


@register_attention_backend("flash_attn")
class FlashAttnAttention(PooledAttention):
    """``flash_attn_varlen_func`` on gathered keys: causal or not, windows, soft caps, groups.

    Raises ServingError without flash-attn, and for values of another width than keys.
    """

    def __init__(self, pool: PagedKVPool) -> None:
        self._kernel = _library("flash_attn", "flash-attn", "flash_attn").flash_attn_varlen_func
        if pool.head_dim != pool.v_head_dim:
            raise ServingError(
                f"the attention backend 'flash_attn' got head_dim {pool.head_dim} and v_head_dim "
                f"{pool.v_head_dim}; required: one width, or the backend 'sdpa'"
            )
        super().__init__(pool)

    def prepared(self, ctx: ForwardContext) -> PackedBatch:
        """See :class:`PooledAttention`."""
        return pack(ctx, self.pool)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        ctx: ForwardContext,
    ) -> None:
        """See :class:`WritingBackend`. Raises ServingError for sinks."""
        metadata.refuse("flash_attn", layer, sinks="'sdpa' or 'flex'")
        batch = self.batch(ctx)
        if batch is None:
            return
        k, v = gather(batch, layer.index, k, v)
        found = self._kernel(
            q,
            k.to(q.dtype),
            v.to(q.dtype),
            batch.cu_q,
            batch.cu_k,
            batch.max_q,
            batch.max_k,
            softmax_scale=layer.scale,
            causal=layer.causal,
            window_size=metadata.window_size(layer),
            softcap=layer.soft_cap or 0.0,
        )
        out.copy_(found)


@dataclass(frozen=True)
class _Pages:
    """A batch in FlashInfer's terms: offsets on the host, pages of the requests on the device."""

    write_locations: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor


@register_attention_backend("flashinfer")
class FlashInferAttention(PooledAttention):
    """``BatchPrefillWithPagedKVCacheWrapper`` on the pages of the pool, in either layout.

    Causal or not, causal windows, soft caps, groups, values of another width where FlashInfer has
    them. Raises ServingError without FlashInfer.
    """

    def __init__(self, pool: PagedKVPool) -> None:
        self._flashinfer = _library("flashinfer", "flashinfer-python", "flashinfer")
        super().__init__(pool)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._wrappers: dict[tuple[Any, ...], tuple[Any, _Pages]] = {}

    def prepared(self, ctx: ForwardContext) -> _Pages:
        """See :class:`PooledAttention`."""
        return _pages(ctx, self.pool)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        ctx: ForwardContext,
    ) -> None:
        """See :class:`WritingBackend`. Raises ServingError for sinks."""
        metadata.refuse("flashinfer", layer, sinks="'sdpa' or 'flex'")
        if not layer.causal:
            metadata.refuse("flashinfer", layer, window="'sdpa' or 'flex', as it is not causal")
        batch = self.batch(ctx)
        if batch is None:
            return
        pool, index = self.pool, layer.index
        wrapper = self._planned(q, layer, batch)
        wrapper.run(q, (pool.keys[index], pool.values[index]), out=out)

    def _planned(self, q: torch.Tensor, layer: AttentionLayer, batch: _Pages) -> Any:
        """A wrapper planned for this forward, by the first layer of its kind."""
        pool = self.pool
        window, _ = metadata.window_size(layer)
        kind = (q.shape[1], q.dtype, layer.causal, window, layer.soft_cap, layer.scale)
        wrapper, planned_for = self._wrappers.get(kind, (None, None))
        if planned_for is batch:
            return wrapper
        if wrapper is None:
            make = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
            wrapper = make(self._workspace, pool.layout)
        wrapper.plan(
            batch.qo_indptr,
            batch.kv_indptr,
            batch.kv_indices,
            batch.last_page_len,
            q.shape[1],
            pool.num_kv_heads,
            pool.head_dim,
            pool.page_size,
            head_dim_vo=pool.v_head_dim,
            causal=layer.causal,
            sm_scale=layer.scale,
            window_left=window,
            logits_soft_cap=layer.soft_cap,
            q_data_type=q.dtype,
            kv_data_type=pool.dtype,
        )
        self._wrappers[kind] = wrapper, batch
        return wrapper


def _pages(ctx: ForwardContext, pool: PagedKVPool) -> _Pages:
    counts = [pool.pages_for(length) for length in ctx.seq_lens_host]
    offsets = [0, *accumulate(counts)]
    cu, lens = metadata.to_device([offsets, counts], pool.device)
    request, place = positions(cu, lens, offsets[-1])
    # Its plan reads the offsets on the host: given there, nothing waits for the device.
    qo, kv, last = (
        torch.tensor(numbers, dtype=torch.int32)
        for numbers in (
            [0, *accumulate(ctx.extend_lens_host)],
            offsets,
            [(length - 1) % pool.page_size + 1 for length in ctx.seq_lens_host],
        )
    )
    indices = metadata.page_table(ctx, pool)[request, place].to(torch.int32)
    return _Pages(metadata.write_locations(ctx), qo, kv, indices, last)
