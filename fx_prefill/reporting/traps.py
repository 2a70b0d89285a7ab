"""Notices traces that serve fewer calls than they should, and says once what to do about it.

None of these makes a wrong answer: Dynamo guards on what it assumed. They make calls that were to
replay trace again, and in the end run eagerly.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from ..execution.dispatch import PrefillRuntime
from ..graph.symbols import substitute
from ..graph.trace import TracedGraph
from ..options import Options

log = logging.getLogger(__name__)

MAX_FORMS = 4
"""Graphs that differ in the lengths they serve before that is said.

A window makes four: empty and filled cache, prompt within it and beyond. PyTorch's limit is 8.
"""


def tied_sizes(traced: TracedGraph) -> str | None:
    """What duck shaping tied to another size because both were equal in the first call, or None.

    With ``use_duck_shape`` on, all unknown sizes that are equal in the call that is traced get one
    symbol. That is meant for masks and positions, and goes wrong for a batch, a hidden size or a
    past that is as large as the prompt by accident: the graph then needs them equal for ever.
    """
    env = traced.fake_mode.shape_env if traced.fake_mode is not None else None
    if env is None or not getattr(env, "duck_shape", False):
        return None
    for symbol, sources in env.var_to_sources.items():
        places = [_place(source) for source in sources]
        known = [place for place in places if place is not None]
        tied = _one_tensor_twice(known, traced) or _past_of_a_cache(known, traced)
        if tied is not None:
            size = env.replacements.get(symbol, symbol)
            fixed = f", and a weight fixes them to {size}" if size != symbol else ""
            return f"{tied} were equal in the traced call, and have to stay so{fixed}"
    return None


def warn_of_ties(traced: TracedGraph) -> None:
    """Say what :func:`tied_sizes` found, and what to do."""
    tied = tied_sizes(traced)
    if tied is not None:
        log.warning(
            "%s: other lengths will be traced again. Use fx_prefill.compile(model), or set "
            "torch.fx.experimental._config.use_duck_shape = False before the first call and mark "
            "the token dimension (torch._dynamo.mark_dynamic(ids, 1))",
            tied,
        )


Place = tuple[str, int]
"""Name of an input, and one of its dimensions."""


def _place(source: Any) -> Place | None:
    base, dim = getattr(source, "base", None), getattr(source, "idx", None)
    if base is None or dim is None:
        return None
    return _name(base), int(dim)


def _one_tensor_twice(places: Sequence[Place], traced: TracedGraph) -> str | None:
    """Two dimensions of one input: its batch or features, tied to its tokens."""
    for position, (name, dim) in enumerate(places):
        for other, dim_too in places[position + 1 :]:
            if other == name and not _may_be_square(name, (dim, dim_too), traced):
                return f"dimensions {dim} and {dim_too} of {name}"
    return None


def _may_be_square(name: str, dims: tuple[int, int], traced: TracedGraph) -> bool:
    """Whether an input may be a mask of every token against every token."""
    tensor = _input(name, traced)
    if tensor is None:
        return True
    last_two = {dim % tensor.dim() for dim in dims} == {tensor.dim() - 2, tensor.dim() - 1}
    a_mask = tensor.dtype is torch.bool or tensor.dim() == 4
    return last_two and (a_mask or (tensor.dim() == 2 and tensor.is_floating_point()))


def _past_of_a_cache(places: Sequence[Place], traced: TracedGraph) -> str | None:
    """Rows of keys or values of an earlier call, tied to the tokens of this one."""
    cached = [(name, dim) for name, dim in places if dim == 2 and _rank(name, traced) == 4]
    others = [(name, dim) for name, dim in places if _rank(name, traced) in (1, 2, 3)]
    squares = {name for name, dim in places if dim == 3}
    for name, dim in cached:
        if others and name not in squares:
            return f"dimension {dim} of {name} and dimension {others[0][1]} of {others[0][0]}"
    return None


def _rank(name: str, traced: TracedGraph) -> int | None:
    tensor = _input(name, traced)
    return None if tensor is None else tensor.dim()


def _input(name: str, traced: TracedGraph) -> torch.Tensor | None:
    for node in traced.original.graph.nodes:
        source = getattr(node.meta.get("grapharg"), "source", None)
        value = node.meta.get("example_value")
        if source is not None and _name(source) == name and isinstance(value, torch.Tensor):
            return value
    return None


def _name(source: Any) -> str:
    return str(source.name() if callable(source.name) else source.name)  # a method up to torch 2.11


class LengthWatch:
    """Counts the forms in which one model was traced, by the lengths that each serves."""

    def __init__(self) -> None:
        self._forms: set[Any] = set()
        self._said = False

    def see(self, graph: Any, options: Options) -> None:
        """Note a new graph, and warn once when there are more forms than a window explains."""
        if not isinstance(graph, PrefillRuntime) or self._said or not options.ladder:
            return
        traced = graph.compiled.plan.traced
        form, why = _form_of(traced, options)
        if form is not None:
            self._forms.add(form)
        if len(self._forms) <= MAX_FORMS:
            return
        self._said = True
        log.warning(
            "this model was traced %d times, each for some lengths only (the last: %s). Something "
            "in it depends on the token count as a number: a Python loop over tokens or chunks, a "
            "branch on the length. TORCH_LOGS=recompiles shows where; name that module in "
            "fx_prefill.compile(..., break_modules=[...]) to run it as one eager break",
            len(self._forms),
            why,
        )


def _form_of(traced: TracedGraph, options: Options) -> tuple[Any, str]:
    """Lengths that a graph serves, and as text; None for one that serves all, or only one row."""
    if traced.token_symbol is None:
        sizes = _live_sizes(traced)
        return (sizes, "fixed sizes") if sizes is not None else (None, "")
    # Conditions on other sizes too (the past, a mask's length) are met by some calls of any length.
    own = [guard for guard in traced.guards() if guard.free_symbols == {traced.token_symbol}]
    served = tuple(
        bucket
        for bucket in options.ladder
        if all(substitute(guard, {traced.token_symbol: bucket}) == sympy.true for guard in own)
    )
    if served == options.ladder:
        return None, ""
    return served, ", ".join(map(str, own))


def _live_sizes(traced: TracedGraph) -> tuple[Any, ...] | None:
    """Sizes of the inputs of a graph of fixed sizes; None where each has one row at most."""
    tensors = [node.meta["example_value"] for node in traced.live]
    rows = [x.shape[-2] for x in tensors if x.is_floating_point() and x.dim() in (2, 3)]
    rows += [x.shape[-1] for x in tensors if not x.is_floating_point() and x.dim() in (1, 2)]
    return tuple(map(str, rows)) if any(count > 1 for count in rows) else None
