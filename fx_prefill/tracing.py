"""How the helper traces: one graph for all lengths, with nothing tied to it by accident."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch.fx.experimental._config as fx_config

_numbers = count()


class _SharedSettings:
    """Settings that all threads see (torch before 2.13): the last to leave restores them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._saved = (False, False)

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._saved = _read()
            self._inside += 1
            _write(TRACING)

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                _write(self._saved)


_shared = _SharedSettings()

TRACING = (False, True)
"""Duck shaping, and specialised floats."""


def _read() -> tuple[bool, bool]:
    return fx_config.use_duck_shape, dynamo_config.specialize_float


def _write(values: tuple[bool, bool]) -> None:
    fx_config.use_duck_shape, dynamo_config.specialize_float = values


def _settings_are_per_thread() -> bool:
    entry = dynamo_config._config["specialize_float"]  # type: ignore[attr-defined]
    return isinstance(getattr(entry, "user_override", None), ContextVar)


@contextmanager
def tracing_config() -> Iterator[None]:
    """Duck shaping off, module floats specialised.

    Duck shaping would tie the token count to any other size that happens to be equal in the first
    call (head size, batch). Unspecialised floats become 0-d tensors with ``.item()``.
    """
    if _settings_are_per_thread():
        saved = _read()
        _write(TRACING)
        try:
            yield
        finally:
            _write(saved)
        return
    _shared.enter()
    try:
        yield
    finally:
        _shared.leave()


def fresh_frame(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` behind a code object of its own.

    Dynamo keeps its compiled code, and counts recompiles, per code object; without this all
    models compiled here would share one and run into each other's limit.
    """

    def prefill(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    code = prefill.__code__.replace(co_name=f"prefill_{next(_numbers)}")
    return types.FunctionType(code, globals(), code.co_name, None, prefill.__closure__)


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of a function's positional parameters, without ``self``; as far as they are known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin, or a callable that hides what it takes
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def mark_tokens(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    token_dims: Mapping[str | int, int] | None,
    names: Sequence[str] = (),
) -> None:
    """Tell Dynamo which dimensions count tokens, so that the first trace is already dynamic.

    ``token_dims`` maps argument names or positions to dimensions; ``names`` are those of positional
    arguments. Without ``token_dims`` two inputs give token counts: the first floating-point input
    of rank 2 or 3 that of its rows (``[..., tokens, features]``), the first integer input of rank 1
    or 2 that of its last dimension (``[..., tokens]``). Inputs called ``encoder_...`` belong to
    another sequence and give none; beside inputs called ``decoder_...`` only those do. All inputs
    are marked where their shape agrees with a count (see :func:`_token_dims`). A mark is a hint: a
    model that needs one exact length is traced for that length, and which axis is the tokens' is
    read off the traced graph.
    """
    named: dict[str | int, Any] = dict(enumerate(args))
    named.update(kwargs)
    tensors = {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}
    if token_dims is not None:
        for name, dim in token_dims.items():
            if name in tensors:
                _mark(tensors[name], dim)
        return
    called = {
        names[name] if isinstance(name, int) and name < len(names) else str(name): tensor
        for name, tensor in tensors.items()
    }
    counts = _token_counts(_own_inputs(called))
    for tensor in tensors.values():
        for dim in _token_dims(tensor):
            if tensor.shape[dim] in counts:
                _mark(tensor, dim)


def _own_inputs(called: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Inputs of the decoder itself, of a model that may read another sequence too."""
    own = [tensor for name, tensor in called.items() if name.startswith("decoder_")]
    return own or [tensor for name, tensor in called.items() if not name.startswith("encoder_")]


def _mark(tensor: torch.Tensor, dim: int) -> None:
    # One row is always a graph of its own: Dynamo specialises sizes 0 and 1.
    if tensor.shape[dim] > 1:
        torch._dynamo.maybe_mark_dynamic(tensor, dim % tensor.dim())


def _token_counts(tensors: Sequence[torch.Tensor]) -> set[int]:
    rows = [x.shape[-2] for x in tensors if x.is_floating_point() and x.dim() in (2, 3)]
    ids = [x.shape[-1] for x in tensors if not x.is_floating_point() and x.dim() in (1, 2)]
    return {*rows[:1], *ids[:1]}


def _token_dims(tensor: torch.Tensor) -> list[int]:
    """Dimensions that may count tokens: rows of features, ids and positions, sides of a mask."""
    if tensor.dim() > 3:
        return list(range(tensor.dim()))
    if tensor.is_floating_point():
        return [tensor.dim() - 2] if tensor.dim() > 1 else []
    return [tensor.dim() - 1] if tensor.dim() else []
