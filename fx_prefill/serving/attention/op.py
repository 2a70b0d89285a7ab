"""One operator for the attention of a layer: a break whose body sees the live context.

Note [Written where it is read]

The operator writes into memory that it is given. In a replay that is the buffer the next segment
reads, so nothing is copied; rows past the real ones are not touched.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ...errors import ContextError, ServingError
from ...execution.breaks import PYTHON_BODIES
from ...execution.prologue import Prologue
from ..context import current_context
from .backend import AttentionLayer, WritingBackend
from .slots import StaticSlots

NAME = "fx_prefill::attention"
NO_WINDOW = 0
NO_CAP = 0.0

_library = torch.library.Library("fx_prefill", "DEF")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, int layer, float scale, bool causal, "
    "int window, float soft_cap, Tensor(a!) out) -> ()"
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    scale: float | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of packed rows with the live context's cache: ``[num_tokens, num_heads, width]``.

    ``q`` ``[num_tokens, num_heads, head_dim]``, ``k`` ``[num_tokens, num_kv_heads, head_dim]``,
    ``v`` ``[num_tokens, num_kv_heads, v_head_dim]``. ``layer`` is the number of the layer, or a
    module with ``layer_idx``, ``layer_id`` or ``layer_number``; ``scale`` is ``head_dim ** -0.5``
    by default. The rest is that of :class:`AttentionLayer`. Runs ``ctx.attention`` of the current
    :class:`ForwardContext`. Raises ServingError for other shapes, ContextError without a context.
    """
    _check_shapes(q, k, v)
    _check_numbers(window, soft_cap, sinks, q.shape[1])
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    torch.ops.fx_prefill.attention(
        q,
        k,
        v,
        sinks,
        _layer_number(layer),
        q.shape[-1] ** -0.5 if scale is None else float(scale),
        causal,
        NO_WINDOW if window is None else window,
        NO_CAP if soft_cap is None else soft_cap,
        out,
    )
    return out


def run_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
    out: torch.Tensor,
    written: bool = False,
) -> None:
    """The body of the operator: the backend of the live context, on the real rows.

    ``written``: the graph before it has written K and V, if the context says so of this backend.
    """
    ctx = current_context()
    backend: Any = ctx.attention
    if backend is None:
        raise ContextError(
            f"layer {layer}: the forward's context has no attention backend; set "
            "ForwardContext.attention"
        )
    made = _layer if sinks is None else AttentionLayer
    what = made(layer, scale, causal, window or None, soft_cap or None, sinks)
    if ctx.captured_bucket:
        if backend.forward_captured(q, k, v, what, out) is not None:
            raise _not_written(layer, "forward_captured", backend)
        return
    num_tokens = ctx.num_tokens
    if q.shape[0] != num_tokens:
        if q.shape[0] < num_tokens:
            raise ContextError(
                f"layer {layer}: attention got {q.shape[0]} rows and the context's num_tokens is "
                f"{num_tokens}; required: at least as many rows"
            )
        # Rows that the engine padded itself: only real ones reach the cache.
        out[num_tokens:].zero_()
        q, k, v, out = q[:num_tokens], k[:num_tokens], v[:num_tokens], out[:num_tokens]
    writer: Any = ctx.rows_written_by if written else None
    run = writer.attend if writer is backend else backend.forward
    if run(q, k, v, what, out, ctx) is not None:
        raise _not_written(layer, run.__name__, backend)


def _not_written(layer: int, method: str, backend: Any) -> ServingError:
    return ServingError(
        f"layer {layer}: {method} of {type(backend).__name__} returned something; required: None, "
        "as the next segment reads what was written to `out`, and nothing else"
    )


def run_after_write(*args: Any) -> None:
    """The body where the graph before it may have written K and V."""
    run_attention(*args, written=True)  # type: ignore[misc]


def captured_writes(backend: WritingBackend, slots: StaticSlots) -> dict[str, Prologue]:
    """What captured graphs do of the operator where a backend's writes are in them."""

    def write(k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
        backend.write(layer, slots.of(k.shape[0]), k, v)

    return {NAME: Prologue((1, 2, 4), 2, write, run_after_write)}


_library.impl("attention", run_attention, "CompositeExplicitAutograd")
PYTHON_BODIES[NAME] = run_attention


@torch.library.register_fake("fx_prefill::attention", lib=_library)
def _fake(*args: Any) -> None:
    return None


@lru_cache(maxsize=4096)
def _layer(*what: Any) -> AttentionLayer:
    """The same layer at every call, unless it holds a tensor, which must not be kept alive."""
    return AttentionLayer(*what)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    seen = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 3:
        raise ServingError(f"attention got {seen}; required: [num_tokens, heads, width] each")
    if q.shape[-1] != k.shape[-1] or k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise ServingError(
            f"attention got {seen}; required: q and k of one width, k and v of as many heads, and "
            "a whole number of query heads for each of them"
        )


def _check_numbers(
    window: int | None, soft_cap: float | None, sinks: torch.Tensor | None, num_heads: int
) -> None:
    if window is not None and window < 1:
        raise ServingError(f"attention got window={window}; required: at least 1 token, or None")
    if soft_cap is not None and soft_cap <= 0:
        raise ServingError(f"attention got soft_cap={soft_cap}; required: above 0, or None")
    if sinks is not None and list(sinks.shape) != [num_heads]:
        raise ServingError(
            f"attention got sinks {list(sinks.shape)}; required: one score for each of the "
            f"{num_heads} query heads"
        )


def _layer_number(layer: Any) -> int:
    if isinstance(layer, int):
        return layer
    for name in ("layer_idx", "layer_id", "layer_number"):
        number = getattr(layer, name, None)
        if isinstance(number, int):
            return number
    raise ServingError(
        f"attention got the layer {type(layer).__name__}; required: its number, or a module with "
        "layer_idx, layer_id or layer_number"
    )
