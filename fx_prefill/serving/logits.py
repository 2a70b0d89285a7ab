"""From hidden states to the logits that an engine wants, eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ContextError, ServingError
from .context import ForwardContext
from .decoder import Decoder
from .hugging_face import is_hugging_face

Logits = Callable[[torch.Tensor], torch.Tensor]


def wanted_rows(
    ctx: ForwardContext, hidden: torch.Tensor, asked: torch.Tensor | None
) -> torch.Tensor:
    """Rows to compute logits of: those asked for, or each request's last (accepted) one.

    Made on the device from the lengths there, so that nothing waits.
    """
    if asked is not None:
        return asked
    if 0 in ctx.extend_lens_host:
        raise ContextError(
            f"extend_lens_host is {list(ctx.extend_lens_host)}, and a request that brings no row "
            "has no logits; required: logits_rows=, or that request left out of the forward"
        )
    if ctx.accept_lengths is not None:
        if ctx.extend_lens is None:
            raise ContextError("accept_lengths is set and extend_lens is not; required: both")
        _check_accepted(ctx)
        starts = ctx.extend_lens.cumsum(0) - ctx.extend_lens
        return starts + ctx.accept_lengths - 1
    if ctx.logits_rows is not None:
        return ctx.logits_rows
    if ctx.extend_lens is None:
        return torch.tensor(ctx.last_rows, device=hidden.device)
    return ctx.extend_lens.cumsum(0) - 1


def _check_accepted(ctx: ForwardContext) -> None:
    """Counts on a GPU are not looked at, as the host would wait: they are the engine's word."""
    accepted, brought = ctx.accept_lengths, ctx.extend_lens
    assert brought is not None
    if not isinstance(accepted, torch.Tensor) or accepted.shape != brought.shape:
        seen = list(accepted.shape) if isinstance(accepted, torch.Tensor) else accepted
        raise ContextError(
            f"accept_lengths is {seen}; required: a tensor [{ctx.num_requests}], a count for each "
            "request"
        )
    if accepted.device.type == "cpu" and not bool(((accepted >= 1) & (accepted <= brought)).all()):
        raise ContextError(
            f"accept_lengths is {accepted.tolist()}; required: 1 to the rows that each request "
            f"brings, {list(ctx.extend_lens_host)}"
        )


def checked_logits(model: nn.Module, decoder: Decoder) -> Logits | None:
    """Hidden states ``[rows, hidden]`` to logits, as the model's own forward makes them.

    None where there is no head. A transformers model is asked: its own forward on hidden states
    must give the same. Raises ServingError where it does not.
    """
    logits = _logits(decoder, getattr(model, "config", None))
    if logits is None or not is_hugging_face(model) or model is decoder.module:
        return logits
    expected = _own_logits(model, decoder, hidden := _sample(decoder))
    actual = logits(hidden)
    if actual.shape != expected.shape or not torch.equal(actual, expected):
        raise ServingError(
            f"{type(model).__name__} does more between hidden states and logits than its head, a "
            "scale and a cap; pass logits= (hidden states [rows, hidden] to logits)"
        )
    return logits


def _logits(decoder: Decoder, config: Any) -> Logits | None:
    head = decoder.head
    if head is None:
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = _number(text, "logit_scale") or 1.0
    divisor = _number(text, "logits_scaling") or 1.0
    cap = _number(text, "final_logit_softcapping")

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        made = head(hidden)
        if scale != 1.0:
            made = made * scale
        if divisor != 1.0:
            made = made / divisor
        return torch.tanh(made / cap) * cap if cap else made

    return logits


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _sample(decoder: Decoder) -> torch.Tensor:
    rows = decoder.sample_rows(2)
    steps = torch.arange(rows.numel(), device=rows.device) % 7 - 3
    return steps.view_as(rows).to(rows.dtype)


def _own_logits(model: Any, decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
    """What the model's forward makes of these hidden states: its decoder returns just them."""
    from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions as Output

    module = decoder.module
    own = vars(module).get("forward")
    module.forward = lambda *args, **kwargs: Output(last_hidden_state=hidden[None])  # type: ignore[arg-type]
    try:
        with torch.no_grad():
            return model(inputs_embeds=hidden[None], use_cache=False).logits[0]
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise ServingError(
            f"{type(model).__name__} did not say how it makes logits ({type(error).__name__}: "
            f"{error}); pass logits= (hidden states [rows, hidden] to logits)"
        ) from error
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
