"""Hugging Face modules that Dynamo traces badly, by name, and how their caches are read.

Importing this imports nothing of transformers: names are strings, caches are told by what they can
do, and only where one of its caches is at hand are its classes used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LIVE_ATTENTION = "fx_prefill"
"""Name under which a model's layers call the attention of the live context."""

MIXERS = tuple(
    f"transformers.models.{package}.modeling_{package}.{name}"
    for package, names in {
        "bamba": "BambaMixer",
        "falcon_h1": "FalconH1Mixer",
        "falcon_mamba": "FalconMambaMixer",
        "granitemoehybrid": "GraniteMoeHybridMambaLayer",
        "jamba": "JambaMambaMixer",
        "kimi_linear": "KimiLinearDeltaAttention",
        "lfm2": "Lfm2ShortConv",
        "lfm2_moe": "Lfm2MoeShortConv",
        "mamba": "MambaMixer",
        "mamba2": "Mamba2Mixer",
        "nemotron_h": "NemotronHMamba2Mixer",
        "olmo_hybrid": "OlmoHybridGatedDeltaNet",
        "qwen3_5": "Qwen3_5GatedDeltaNet",
        "qwen3_5_moe": "Qwen3_5MoeGatedDeltaNet",
        "qwen3_next": "Qwen3NextGatedDeltaNet",
        "zamba": "ZambaMambaMixer",
        "zamba2": "Zamba2MambaMixer",
    }.items()
    for name in names.split()
)
"""Mixers of whole sequences: state-space models, gated delta nets, short convolutions.

Traced, they give one graph per number of chunks (a Python loop over chunks), or one per length (a
loop over tokens), or a graph for each state of their cache.
"""


def like_first(module: nn.Module, first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A result shaped as the first argument, as that of a mixer or of experts is."""
    return torch.empty_like(first, memory_format=torch.contiguous_format)


def mixer_result(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A mixer's result: its hidden states may be given by position or by name."""
    return like_first(module, args[0] if args else kwargs["hidden_states"])


def follows_the_length(module: nn.Module) -> bool:
    """Whether a rotary embedding picks its frequencies by the length (longrope, dynamic NTK).

    It branches on the largest position, a number in device memory, and keeps what it picked in
    its buffers.
    """
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else (kind,)
    return _is_transformers(module) and any(
        isinstance(k, str) and ("dynamic" in k or k == "longrope") for k in kinds
    )


def rotary_result(
    module: nn.Module, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, ``[batch, tokens, rotary size]``."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    width = 2 * getattr(module, f"{prefix}inv_freq").shape[0]
    shape = (*position_ids.shape, width)
    return x.new_empty(shape), x.new_empty(shape)


NO_LOOP = frozenset(("InklingSharedExperts", "JetMoeParallelExperts", "Llama4TextExperts"))
"""Modules called experts that are products of whole tensors, or return other sizes."""


def loops_over_experts(module: nn.Module) -> bool:
    """Whether these are experts run in a Python loop over those that were hit.

    Which ones are hit is data: the loop cannot be traced. The other implementations of transformers
    (``grouped_mm``, ``batched_mm``) can.
    """
    name = type(module).__name__
    if not _is_transformers(module) or not name.endswith("Experts") or name in NO_LOOP:
        return False
    config = getattr(module, "config", None)
    return getattr(config, "_experts_implementation", "eager") in (None, "eager")


def _is_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.models.")


class CacheAccess:
    """What an opaque module needs of a transformers cache, as tensors, and back.

    Only the layer of the module itself (``module.layer_idx``) is read and written. All but
    ``stand_in`` and ``collect`` are traced by Dynamo, so they use nothing but attributes.
    """

    @staticmethod
    def reads(value: Any) -> bool:
        """Whether a value is a cache."""
        return hasattr(value, "layers") and hasattr(value, "get_seq_length")

    @staticmethod
    def problem(module: nn.Module, cache: Any) -> str | None:
        """Why a cache cannot be read, or None."""
        index = getattr(module, "layer_idx", None)
        if index is None:
            return "it is given a cache but has no layer_idx that says which layer is its own"
        if index >= len(cache.layers):
            return f"its cache has {len(cache.layers)} layers and none at its layer_idx {index}"
        layer = cache.layers[index]
        if hasattr(layer, "conv_states"):
            return "its cache records the past" if layer.record_past else None
        if type(layer).__name__ == "DynamicLayer":
            return None
        return f"its cache has a {type(layer).__name__} at its layer"

    @staticmethod
    def take(module: nn.Module, cache: Any) -> tuple[Any, ...]:
        """Tensors of the module's layer that hold something, None for the others.

        ``(convolution, recurrence, has a past)`` for each state of a linear layer; ``(keys,
        values)`` for an attention layer.
        """
        layer = cache.layers[module.layer_idx]
        if not hasattr(layer, "conv_states"):
            return (layer.keys, layer.values) if layer.is_initialized else (None, None)
        states = []
        for i in range(len(layer.conv_states)):
            has_past = layer.has_previous_state[i]
            # A layer that was reset keeps its tensors, and starts as an empty one does.
            convolution = layer.conv_states[i] if has_past else None
            recurrence = layer.recurrent_states[i]
            if layer.is_conv_states_initialized[i] and not has_past:
                recurrence = None
            states.append((convolution, recurrence, has_past))
        return tuple(states)

    @staticmethod
    def put(module: nn.Module, cache: Any, written: Any) -> None:
        """Give the layer the states that the call made anew, as the module would have."""
        index = module.layer_idx
        layer = cache.layers[index]
        if not hasattr(layer, "conv_states"):
            if layer.is_initialized:
                layer.keys, layer.values = written
            else:
                cache.update(written[0], written[1], index)
            return
        for i in range(len(written)):
            convolution, recurrence = written[i]
            if convolution is not None:
                cache.update_conv_state(convolution, index, i)
            if recurrence is not None:
                layer.update_recurrent_state(recurrence, i)

    # --- outside the trace ----------------------------------------------------------------------

    @staticmethod
    def stand_in(module: nn.Module, states: Any) -> Any:
        """A cache whose layer holds the given states."""
        from transformers import cache_utils

        if len(states) == 2 and not isinstance(states[0], (tuple, list)):
            layer: Any = cache_utils.DynamicLayer()
            if states[0] is not None:
                layer.lazy_initialization(states[0], states[1])
                layer.keys, layer.values = states
        else:
            layer = cache_utils.LinearAttentionLayer(number_of_states=len(states))
            for i, (convolution, recurrence, has_past) in enumerate(states):
                _fill(layer, i, convolution, recurrence, has_past)
        index: int = module.layer_idx  # type: ignore[assignment]
        return cache_utils.Cache(layers=[layer] * (index + 1))

    @staticmethod
    def collect(module: nn.Module, cache: Any, states: Any) -> tuple[Any, ...]:
        """States that the call made anew; those written in place are None."""
        layer = cache.layers[module.layer_idx]
        if not hasattr(layer, "conv_states"):
            return layer.keys, layer.values
        written = []
        for i, (convolution, recurrence, _) in enumerate(states):
            written.append(
                (
                    _settle(convolution, layer.conv_states[i]),
                    _settle(recurrence, layer.recurrent_states[i]),
                )
            )
        return tuple(written)


def _fill(layer: Any, i: int, convolution: Any, recurrence: Any, has_past: bool) -> None:
    given = convolution if convolution is not None else recurrence
    if given is None:
        return
    layer.dtype, layer.device = given.dtype, given.device
    layer.has_previous_state[i] = has_past
    if convolution is not None:
        layer.conv_states[i] = convolution
        layer.conv_kernel_size[i] = convolution.shape[-1]
        layer.is_conv_states_initialized[i] = True
    if recurrence is not None:
        layer.recurrent_states[i] = recurrence
        layer.is_recurrent_states_initialized[i] = True


def _settle(given: torch.Tensor | None, now: torch.Tensor | None) -> torch.Tensor | None:
    """The state to write back: a given one is written in place even if it was replaced."""
    if given is None or now is None:
        return now
    if now is not given:
        given.copy_(now)
    return None
