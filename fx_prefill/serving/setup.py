"""What an engine says of its model, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..errors import OptionError, ServingError
from ..options import Options, parse_options
from .decisions import Refusal


def options_of(
    max_tokens: int, buckets: Sequence[int] | None, chunk: int | None, options: Mapping[str, Any]
) -> Options:
    """Options of the backend: an explicit ladder as it is, any other up to the budget of a chunk.

    Raises OptionError.
    """
    given = dict(options)
    if chunk is not None and (not isinstance(chunk, int) or chunk < 2):
        raise OptionError(
            f"chunked_prefill_size is {chunk!r}; accepted: a whole number of rows of at least 2"
        )
    if buckets is not None:
        given["buckets"] = buckets
    else:
        given["max_tokens"] = max_tokens if chunk is None else min(max_tokens, chunk)
    given.setdefault("pin_weights", True)
    checked = parse_options(given)
    if checked.ladder and checked.ladder[0] < 2:
        raise OptionError(
            f"the smallest bucket is {checked.ladder[0]}; required: at least 2 rows, as PyTorch "
            "traces one row as a graph of its own (a forward of one row replays in a larger bucket)"
        )
    return checked


def check_replays_wanted(options: Options, never: Refusal | None) -> None:
    """Raise OptionError where no bucket is asked for and nobody said that none is wanted."""
    if not options.ladder and never is None:
        raise OptionError(
            "max_tokens is 0, which disables replay, and capturing is what a PrefillGraph is for; "
            "pass enforce_eager=True to run every forward eagerly, or at least 2 tokens"
        )


def checked_model(model: Any) -> nn.Module:
    """The model, if it is one that was not compiled yet. Raises ServingError."""
    if isinstance(model, nn.Module) and not hasattr(model, "_orig_mod"):
        return model
    raise ServingError(
        f"PrefillGraph got a {type(model).__name__}; required: the module itself, not compiled by "
        "torch.compile or fx_prefill.compile: it is traced here"
    )


def declared_variants(aux_hidden: Any) -> dict[str | None, Any]:
    """Declared sets of auxiliary hidden states by name, with that of none. Raises ServingError."""
    if aux_hidden is not None and not isinstance(aux_hidden, Mapping):
        raise ServingError(
            f"aux_hidden is {aux_hidden!r}; accepted: a mapping of names to lists of layers, or to "
            "keyword arguments of the decoder"
        )
    return {None: (), **(aux_hidden or {})}


def never_replays(model: nn.Module, task: str, enforce_eager: bool) -> Refusal | None:
    """Why no forward of this model replays; None where some may. Raises ServingError."""
    if task not in ("generate", "embed"):
        raise ServingError(f"task is {task!r}; accepted: 'generate' or 'embed'")
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) or _sees_ahead(model):
        return Refusal.ENCODER
    if task == "embed":
        return Refusal.EMBEDDING
    return Refusal.EAGER if enforce_eager else None


def _sees_ahead(model: nn.Module) -> bool:
    flags = [getattr(module, "is_causal", None) for module in model.modules()]
    return False in flags and True not in flags
