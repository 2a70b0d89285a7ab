"""What a backend prepares once for all layers of a forward, without waiting for the device.

Note [Nothing waits]

Lengths come from the ``*_host`` lists of the context, and reach a GPU in one copy from pinned
memory. Everything longer than a list of requests (slots to gather, masks) is computed there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from ...errors import ContextError, ServingError
from ..context import ForwardContext
from ..kv_cache import PagedKVPool
from .backend import AttentionLayer

T = TypeVar("T")


class PerForward(Generic[T]):
    """What was made of the last context; made again when another one comes by.

    So a backend that several threads, tasks or nested contexts share gives each what is its own.
    """

    def __init__(self) -> None:
        self._last: tuple[Callable[[], ForwardContext | None], Any] = (_nothing, None)

    def renew(self, ctx: ForwardContext, make: Callable[[ForwardContext], T]) -> T:
        """Made now, also for a context seen before, whose lengths may be new."""
        made = make(ctx)
        # One assignment: another thread sees this pair or the one before, no mixture.
        self._last = (weakref.ref(ctx), made)
        return made

    def of(self, ctx: ForwardContext, make: Callable[[ForwardContext], T]) -> T:
        """What belongs to this context."""
        seen, made = self._last
        return made if seen() is ctx else self.renew(ctx, make)

    def __deepcopy__(self, memo: Any) -> PerForward[T]:
        """A copy of a backend has prepared nothing: what this one holds is of its own pool."""
        return PerForward()

    def __reduce__(self) -> Any:
        return (PerForward, ())


def _nothing() -> None:
    return None


def window_size(layer: AttentionLayer) -> tuple[int, int]:
    """How far a row sees to the left and to the right of itself; -1 is without end."""
    far = -1 if layer.window is None else layer.window - 1
    return far, 0 if layer.causal else far


def visible(distance: torch.Tensor, left: int, right: int) -> torch.Tensor | None:
    """Which keys a row sees, by ``distance``: its position minus that of the key. None for all."""
    seen = None
    if right >= 0:
        seen = distance >= -right
    if left >= 0:
        near = distance <= left
        seen = near if seen is None else seen & near
    return seen


def to_device(lists: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Lists of integers as int32 tensors, in one copy. See Note [Nothing waits]."""
    flat = [number for numbers in lists for number in numbers]
    pinned = device.type == "cuda"  # and on the CPU, also where the default device is another
    host = torch.tensor(flat, dtype=torch.int32, device="cpu", pin_memory=pinned)
    moved = host.to(device, non_blocking=True)
    return list(moved.split([len(numbers) for numbers in lists]))


def write_locations(ctx: ForwardContext) -> torch.Tensor:
    """Slots of the real rows ``[num_tokens]`` (int64). Raises ContextError without them."""
    found = ctx.write_locations
    if not isinstance(found, torch.Tensor) or list(found.shape) != [ctx.num_tokens]:
        seen = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise ContextError(
            f"write_locations is {seen}; required: an int64 tensor [{ctx.num_tokens}] of the cache "
            "slots of all rows, made of what PagedKVPool.slots gives for each request"
        )
    return found.to(torch.int64)


def page_table(ctx: ForwardContext, pool: PagedKVPool) -> torch.Tensor:
    """Pages of all requests, integers. Raises ContextError where some would be missing."""
    found, needed = ctx.page_table, pool.pages_for(max(ctx.seq_lens_host, default=0))
    if (
        not isinstance(found, torch.Tensor)
        or found.dim() != 2
        or found.is_floating_point()
        or found.shape[0] != ctx.num_requests
        or found.shape[1] < needed
    ):
        seen = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else found
        raise ContextError(
            f"page_table is {seen}; required: "
            f"{ctx.num_requests} requests with up to {needed} pages of {pool.page_size} tokens, "
            "as PagedKVPool.page_table makes it"
        )
    return found


def refuse(name: str, layer: AttentionLayer, **limits: str) -> None:
    """Raise ServingError for what of ``soft_cap``, ``sinks``, … a backend lacks and a layer has."""
    for field, instead in limits.items():
        value = getattr(layer, field)
        if value is not None:
            seen = "sinks" if field == "sinks" else f"{field}={value}"
            raise ServingError(
                f"layer {layer.index} has {seen} and the attention backend {name!r} cannot do "
                f"that; required: none, or the backend {instead}"
            )
