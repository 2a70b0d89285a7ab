"""What a forward takes beside its context, and what it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


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
