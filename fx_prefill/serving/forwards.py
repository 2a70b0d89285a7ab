"""What a forward takes beside its context, and what it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import ContextError
from .context import ForwardContext
from .decoder import Decoder


@dataclass(frozen=True)
class MultimodalInputs:
    """What a multimodal forward has beside embeddings that are merged already.

    ``layer_inputs`` are inputs that single layers read (deepstack), by the name of the decoder's
    parameter: such a forward runs eagerly.
    """

    layer_inputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PrefillOutput:
    """What a forward gave.

    ``logits`` ``[rows, vocab]`` are None for a model without a head; ``hidden_states``
    ``[num_tokens, hidden]``; ``aux_hidden_states`` as declared, real rows each.
    """

    logits: torch.Tensor | None
    hidden_states: torch.Tensor
    aux_hidden_states: tuple[torch.Tensor, ...]
    replayed: bool


def given_rows(
    ctx: ForwardContext,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    embedding: nn.Module,
) -> torch.Tensor:
    """The embedded rows of a forward, given as such or as ids. Raises ContextError."""
    if (input_ids is None) == (inputs_embeds is None):
        seen = "neither" if input_ids is None else "both"
        raise ContextError(f"got {seen} of input_ids and inputs_embeds; required: one of them")
    if inputs_embeds is not None:
        return inputs_embeds
    assert input_ids is not None
    if list(input_ids.shape) != [ctx.num_tokens]:
        raise ContextError(
            f"input_ids are {list(input_ids.shape)}; required: [{ctx.num_tokens}], the ids of all "
            "requests one after the other"
        )
    with torch.no_grad():
        rows: torch.Tensor = embedding(input_ids)
    return rows


def check_rows(ctx: ForwardContext, rows: torch.Tensor, width: int) -> None:
    """Raise ContextError for embedded rows of another shape than ``[num_tokens, width]``."""
    if rows.dim() != 2 or rows.shape[0] != ctx.num_tokens:
        raise ContextError(
            f"inputs_embeds are {list(rows.shape)}; required: [num_tokens, hidden] with the "
            f"{ctx.num_tokens} rows of all requests one after the other"
        )
    if rows.shape[1] != width:
        raise ContextError(
            f"inputs_embeds are {list(rows.shape)}; required: rows of {width}, the width of the "
            "model's embedding"
        )


def given_positions(ctx: ForwardContext, decoder: Decoder) -> torch.Tensor | None:
    """Positions of a forward; None for a decoder that takes none. Raises ContextError."""
    if decoder.positions is None:
        return None
    wanted = decoder.position_shape(ctx.num_tokens)
    given = ctx.positions
    if not isinstance(given, torch.Tensor) or tuple(given.shape) != wanted:
        seen = tuple(given.shape) if isinstance(given, torch.Tensor) else given
        raise ContextError(
            f"ctx.positions is {seen}; this model's decoder needs {wanted}, a tensor, as "
            "ForwardContext.from_lengths makes it (three rows for multimodal rotary embeddings)"
        )
    return given
