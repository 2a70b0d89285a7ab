"""All requests in one call of FlexAttention: windows, soft caps and sinks in one fused kernel.

Note [A mask in numbers]

What differs between forwards and layers (requests, positions, window) is in tensors, so that the
functions of mask and score, which are compiled, are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex

from ...tracing import tracing_config
from ..context import ForwardContext
from ..kv_cache import PagedKVPool
from . import metadata
from .backend import AttentionLayer, register_attention_backend
from .packed import PackedBatch, gather, pack, positions
from .pooled import PooledAttention

WITHOUT_END = 2**31 - 1


@dataclass(frozen=True)
class _Batch:
    packed: PackedBatch
    row_request: torch.Tensor
    row_position: torch.Tensor
    key_request: torch.Tensor
    key_position: torch.Tensor
    masks: dict[tuple[int, int], flex.BlockMask] = field(default_factory=dict)

    @property
    def write_locations(self) -> torch.Tensor:
        """Slots of the rows."""
        return self.packed.write_locations

    def mask(self, window: tuple[int, int]) -> flex.BlockMask:
        """Made by the first layer with this window; ``[num_tokens, num_keys]`` in between."""
        if window not in self.masks:
            self.masks[window] = flex.create_block_mask(
                self._visible(window),
                None,
                None,
                self.row_request.shape[0],
                self.key_request.shape[0],
                device=self.row_request.device,
            )
        return self.masks[window]

    def _visible(self, window: tuple[int, int]) -> Callable[..., torch.Tensor]:
        row_request, row_position = self.row_request, self.row_position
        key_request, key_position = self.key_request, self.key_position
        ends = [WITHOUT_END if end < 0 else end for end in window]
        # Apart: where flex traces, an index that is a number becomes a tensor, and the host waits.
        left, right = metadata.to_device([ends], row_request.device)[0].unbind()

        def visible(
            b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor
        ) -> torch.Tensor:
            distance = row_position[row] - key_position[key]
            near = (distance <= left) & (distance >= -right)
            return near & (row_request[row] == key_request[key])

        return visible


@register_attention_backend("flex")
class FlexAttention(PooledAttention):
    """Causal or not, windows, soft caps, sinks and grouped heads; compiled on a GPU only.

    The first forward of a new kind of layer compiles a kernel, also where it has a new soft cap.
    """

    def __init__(self, pool: PagedKVPool) -> None:
        super().__init__(pool)
        self._kernel = _compiled() if pool.device.type == "cuda" else flex.flex_attention

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
        if batch is None:
            return
        k, v = gather(batch.packed, layer.index, k, v)
        q, k, v = (x.to(q.dtype).transpose(0, 1)[None] for x in (q, k, v))
        found = self._kernel(
            q,
            k,
            v,
            score_mod=None if layer.soft_cap is None else _capped(layer.soft_cap),
            block_mask=batch.mask(metadata.window_size(layer)),
            scale=layer.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=None if layer.sinks is None else flex.AuxRequest(lse=True),
        )
        if layer.sinks is not None:
            # A sink adds to the sum of the softmax alone: exp(lse) / (exp(lse) + exp(sink)).
            share = torch.sigmoid(found[1].lse - layer.sinks.view(1, -1, 1))
            found = found[0] * share[..., None].to(q.dtype)
        out.copy_(found[0].transpose(0, 1))


@cache
def _compiled() -> Any:
    # As one graph: where Dynamo gives up on kinds of layers it says so, and runs nothing unfused.
    compiled = torch.compile(flex.flex_attention, dynamic=True, fullgraph=True)

    def attend(*args: Any, **kwargs: Any) -> Any:
        with tracing_config():  # a soft cap that is a tensor cannot be lowered (torch 2.11)
            return compiled(*args, **kwargs)

    return attend


@cache
def _capped(soft_cap: float) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    return capped


def _prepare(ctx: ForwardContext, pool: PagedKVPool) -> _Batch:
    packed = pack(ctx, pool)
    lists = [ctx.extend_lens_host, ctx.seq_lens_host, ctx.prefix_lens_host]
    rows, keys, prefix = metadata.to_device(lists, pool.device)
    row_request, place = positions(packed.cu_q, rows, ctx.num_tokens)
    key_request, key_position = positions(packed.cu_k, keys, packed.num_keys)
    return _Batch(packed, row_request, place + prefix[row_request], key_request, key_position)
