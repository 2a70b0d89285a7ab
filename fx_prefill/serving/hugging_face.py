"""Hugging Face models with the attention of the live context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..errors import ServingError
from ..integrations.transformers import LIVE_ATTENTION
from .attention.op import attention


@dataclass
class _Use:
    """What a model's attention was before, and how many graphs need ours."""

    before: str
    count: int = 0


_uses: WeakKeyDictionary[nn.Module, _Use] = WeakKeyDictionary()


def is_hugging_face(model: nn.Module) -> bool:
    """Whether a model is one of transformers', whose attention can be chosen by name."""
    return hasattr(model, "set_attn_implementation") and hasattr(model, "config")


def use_live_attention(model: Any) -> Callable[[], None]:
    """Let every layer of a transformers model call :func:`fx_prefill.attention`.

    No mask is built: what a row sees follows from the context. Returns what puts the model's own
    attention back, once all who asked have done so. Raises ServingError where the model does not
    let its attention be chosen.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(LIVE_ATTENTION, live_attention)
    use = _uses.get(model) or _Use(model.config._attn_implementation)
    model.set_attn_implementation(LIVE_ATTENTION)
    if model.config._attn_implementation != LIVE_ATTENTION:
        raise ServingError(
            f"{type(model).__name__} does not let its attention be chosen (it stays "
            f"{use.before!r}); call fx_prefill.attention in its layers instead"
        )
    _uses[model] = use
    use.count += 1

    def restore() -> None:
        use.count -= 1
        if use.count == 0:
            del _uses[model]
            model.set_attn_implementation(use.before)

    return restore


def require_live_attention(model: Any) -> None:
    """Raise ServingError for a transformers model whose attention is another one now.

    It would neither write the cache of the context nor read it.
    """
    if is_hugging_face(model) and model.config._attn_implementation != LIVE_ATTENTION:
        raise ServingError(
            f"the attention of {type(model).__name__} is {model.config._attn_implementation!r}; "
            f"required: {LIVE_ATTENTION!r}, which PrefillGraph sets and close() gives back. Call "
            "warmup() again, or make another PrefillGraph"
        )


def live_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in transformers' form: ``[1, num_heads, num_tokens, head_dim]`` in, rows out."""
    if query.shape[0] != 1 or attention_mask is not None or kwargs.get("position_bias") is not None:
        raise ServingError(
            f"{type(module).__name__} calls attention with a batch of {query.shape[0]}"
            f"{', a mask' if attention_mask is not None else ''}; required: packed rows, "
            "[1, num_tokens, ...], without mask or position bias"
        )
    q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = attention(
        q,
        k,
        v,
        layer=module,
        scale=scaling,
        causal=bool(causal),
        window=sliding_window,
        soft_cap=softcap,
        sinks=s_aux,
    )
    return out[None], None
