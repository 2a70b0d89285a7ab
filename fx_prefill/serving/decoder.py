"""Finds the parts of a model that prefill needs: the decoder, its embedding, its head."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..errors import ServingError

LAYERS = ("layers", "h", "blocks", "block")
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "tok_embeddings", "word_embeddings", "embedding")
HEADS = ("lm_head", "embed_out", "output")
EMBEDS = ("inputs_embeds", "input_embeds", "hidden_states")
POSITIONS = ("position_ids", "positions")
OTHER_SENSES = ("vis", "audio", "image", "video", "speech", "encoder", "draft", "mtp")
"""Parts of names of towers that read something else than text."""


@dataclass(frozen=True)
class Decoder:
    """A decoder and what is around it; ``head`` is None where the model has none.

    ``rows`` and ``positions`` name the parameters of its ``forward`` that take embeddings and
    positions. ``batched``: it takes ``[1, num_tokens, ...]``, not ``[num_tokens, ...]``.
    ``position_rows``: 3 for multimodal rotary embeddings.
    """

    module: nn.Module
    embedding: nn.Module
    head: nn.Module | None
    rows: str
    positions: str | None
    batched: bool
    position_rows: int = 1

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return len(_child(self.module, LAYERS) or ())

    @property
    def device(self) -> torch.device:
        """Where the embedding is, by what it holds, or else by what the decoder does.

        Raises ServingError where both hold nothing.
        """
        parts = (self.embedding, self.module)
        held = (x for part in parts for x in chain(part.parameters(), part.buffers()))
        tensor = next(held, None)
        if tensor is None:
            raise ServingError(
                f"neither the embedding {type(self.embedding).__name__} nor the decoder "
                f"{type(self.module).__name__} has a parameter or a buffer; required: one, as the "
                "graph is made on its device. Register the table of the embedding as a buffer"
            )
        return tensor.device

    def sample_rows(self, num_tokens: int) -> torch.Tensor:
        """Embedded rows ``[num_tokens, hidden]`` of some token, to trace and to check with."""
        with torch.no_grad():
            return self.embedding(torch.zeros(num_tokens, dtype=torch.int64, device=self.device))

    def position_shape(self, num_tokens: int) -> tuple[int, ...]:
        """Shape of the positions of a forward."""
        return (num_tokens,) if self.position_rows == 1 else (self.position_rows, num_tokens)

    def arguments(self, embeds: torch.Tensor, positions: torch.Tensor | None) -> dict[str, Any]:
        """Arguments of its ``forward`` for packed rows and their positions."""
        given: dict[str, Any] = {self.rows: embeds[None] if self.batched else embeds}
        if self.positions is not None and positions is not None:
            # [1, num_tokens], or [3, 1, num_tokens] for multimodal rotary embeddings
            given[self.positions] = positions.unsqueeze(-2) if self.batched else positions
        if self.batched:
            given["use_cache"] = False
        return given


def find_decoder(
    model: nn.Module,
    decoder: nn.Module | None = None,
    embedding: nn.Module | None = None,
    head: nn.Module | None = None,
) -> Decoder:
    """The text decoder of a model, multimodal wrappers unwrapped; what is given is taken.

    Raises ServingError that lists what was looked for.
    """
    _check_modules(decoder=decoder, embedding=embedding)
    module = decoder if decoder is not None else _search(model, embedding)
    table = embedding if embedding is not None else _child(module, EMBEDDINGS)
    if table is None and hasattr(model, "get_input_embeddings"):
        table = model.get_input_embeddings()  # type: ignore[operator]
    if table is None:
        raise ServingError(
            f"the decoder {type(module).__name__} has no embedding; looked for "
            f"{', '.join(EMBEDDINGS)} and get_input_embeddings(). Pass embedding="
        )
    names = list(inspect.signature(module.forward).parameters)
    rows = next((name for name in EMBEDS if name in names), None)
    if rows is None:
        raise ServingError(
            f"forward of the decoder {type(module).__name__} takes {', '.join(names)}; required: "
            f"embedded rows as one of {', '.join(EMBEDS)}. Wrap it in a module that takes them "
            "and pass that as decoder="
        )
    positions = next((name for name in POSITIONS if name in names), None)
    return Decoder(
        module=module,
        embedding=table,
        head=head if head is not None else _head(model),
        rows=rows,
        positions=positions,
        batched="position_ids" in names or "use_cache" in names,
        position_rows=3 if _is_mrope(module) else 1,
    )


def _check_modules(**given: Any) -> None:
    for name, part in given.items():
        if part is not None and not isinstance(part, nn.Module):
            raise ServingError(f"{name} is a {type(part).__name__}; required: a module")


def _search(model: nn.Module, embedding: nn.Module | None) -> nn.Module:
    """The outermost module that has a list of layers and an embedding of its own."""
    seen = []
    for name, module in _breadth_first(model):
        layers = _child(module, LAYERS)
        if isinstance(layers, nn.ModuleList) and _child(module, EMBEDDINGS) is not None:
            return module
        seen.append(f"{name or '(the model)'}: {type(module).__name__}")
    alone = "decoder= beside embedding=: the module that takes embedded rows"
    missing = "decoder= (and embedding=, head=)" if embedding is None else alone
    raise ServingError(
        f"no text decoder in {type(model).__name__}: looked for a module with a ModuleList called "
        f"{', '.join(LAYERS)} and an embedding called {', '.join(EMBEDDINGS)} in "
        f"{'; '.join(seen[:12])}. Pass {missing}"
    )


def _breadth_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    front = deque([("", model)])
    while front:
        name, module = front.popleft()
        yield name, module
        for child, inside in module.named_children():
            if any(word in child.lower() for word in OTHER_SENSES):
                continue
            if not isinstance(inside, nn.ModuleList):
                front.append((f"{name}.{child}".lstrip("."), inside))


def _child(module: nn.Module, names: tuple[str, ...]) -> Any:
    children = dict(module.named_children())
    return next((children[name] for name in names if name in children), None)


def _head(model: nn.Module) -> nn.Module | None:
    if hasattr(model, "get_output_embeddings"):
        found: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
        if found is not None:
            return found
    for _, module in _breadth_first(model):
        found = _child(module, HEADS)
        if found is not None:
            return found
    return None


def _is_mrope(module: nn.Module) -> bool:
    rope = getattr(getattr(module, "config", None), "rope_parameters", None)
    return isinstance(rope, dict) and "mrope_section" in rope
