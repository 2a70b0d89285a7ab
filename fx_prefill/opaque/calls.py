"""A module whose ``forward`` is one node of the traced graph.

Traced through, such a module ties the graph to a number of chunks or to one length, or cuts it in
two. So while Dynamo traces, its ``forward`` is one call to :func:`call_opaque`, which Dynamo writes
into the graph as it stands. What the call needs of a KV cache goes in as tensors and comes out as
tensors, and Dynamo sees them written back: a cache made inside the model works like one passed in.

Note [An opaque module is live]

The node holds the key of the module, not its weights: each call runs the module as it is then, with
its own hooks, buffers and Python state. Only the shapes of its results are fixed by the trace.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from ..errors import OpaqueModuleError
from ..integrations.transformers import CacheAccess
from .results import FakeResults, own

_numbers = count()
_calls: weakref.WeakValueDictionary[str, OpaqueCall] = weakref.WeakValueDictionary()


class _Tracing:
    """Whether a call of a model compiled here is going on, in any thread.

    Dynamo guards on ``active``: a number of calls would change between them.
    """

    def __init__(self) -> None:
        self.active = False
        self._inside = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:
            self._inside += number
            self.active = self._inside > 0


_tracing = _Tracing()


@contextmanager
def opaque_calls() -> Iterator[None]:
    """Opaque modules are one node in what Dynamo traces now.

    Outside, other compilers trace through them: their graphs go where nothing knows such a node.
    """
    _tracing.add(1)
    try:
        yield
    finally:
        _tracing.add(-1)


class OpaqueCall:
    """Stands in for ``module.forward``: itself outside a trace, one node inside.

    ``result`` is that of :class:`~fx_prefill.opaque.select.BreakModule`. ``required`` says that
    the user named this module, so that arguments an opaque call cannot carry are an error; a
    module that only the built-in table names is then traced through instead.
    """

    def __init__(
        self, module: nn.Module, result: Callable[..., Any] | None = None, required: bool = True
    ) -> None:
        self.module = module
        self.original: Callable[..., Any] = module.forward
        self.replaced_attribute = "forward" in vars(module)
        self.key = f"{type(module).__name__}#{next(_numbers)}"
        self.required = required
        self.users = 0
        self.results = FakeResults(result)
        _calls[self.key] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # With gradients the module is traced through, or run: a break has no backward.
        if _tracing.active and torch.compiler.is_compiling() and not torch.is_grad_enabled():
            return self._as_one_node(args, kwargs)
        return self.original(*args, **kwargs)

    def __reduce__(self) -> Any:
        # A copy of the module gets its own plain forward: this object belongs to one module.
        if self.replaced_attribute:
            return _same, (self.original,)
        return getattr, (self.module, "forward")

    def _as_one_node(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Traced by Dynamo, up to the call of :func:`call_opaque`."""
        place, cache = _find_cache(args, kwargs)
        plain_args = tuple(None if i == place else value for i, value in enumerate(args))
        plain_kwargs = {n: None if n == place else value for n, value in kwargs.items()}
        problem = _problem(plain_args, plain_kwargs)
        if problem is None and cache is not None:
            problem = CacheAccess.problem(self.module, cache)
        if problem is not None:
            if self.required:
                refuse_opaque(self.key, problem)
            return self.original(*args, **kwargs)
        states = () if cache is None else CacheAccess.take(self.module, cache)
        result, written = call_opaque(self.key, plain_args, plain_kwargs, place, states)
        if cache is not None:
            CacheAccess.put(self.module, cache, written)
        return result

    # --- outside the trace ----------------------------------------------------------------------

    def run(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        place: int | str | None,
        states: Sequence[Any],
    ) -> tuple[Any, tuple[Any, ...]]:
        """Run the module now: its results, and the states that it made anew."""
        args, kwargs = list(args), dict(kwargs)
        cache = None
        if place is not None:
            cache = CacheAccess.stand_in(self.module, states)
            if isinstance(place, int):
                args[place] = cache
            else:
                kwargs[place] = cache
        result = self.original(*args, **kwargs)
        written = () if cache is None else CacheAccess.collect(self.module, cache, states)
        given = tree_leaves((args, kwargs, states))
        return own(self.key, (result, written), given)


def _same(value: Any) -> Any:
    return value


def _find_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str | None, Any]:
    """Position or name of the first argument that is a cache, and the cache; traced by Dynamo."""
    for position, value in enumerate(args):
        if CacheAccess.reads(value):
            return position, value
    for name, value in kwargs.items():
        if CacheAccess.reads(value):
            return name, value
    return None, None


def _problem(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Which argument a graph's node cannot hold; traced by Dynamo."""
    for position, value in enumerate(args):
        if not _can_cross(value):
            return f"its argument {position} is a {type(value).__name__}"
    for name, value in kwargs.items():
        if not _can_cross(value):
            return f"its argument {name!r} is a {type(value).__name__}"
    return None


def _can_cross(value: Any) -> bool:
    """Whether an argument is made of what a graph's node can hold; traced by Dynamo."""
    if isinstance(value, (tuple, list)):
        return all(_can_cross(item) for item in value)
    if isinstance(value, dict):
        return all(_can_cross(item) for item in value.values())
    return value is None or isinstance(
        value, (torch.Tensor, bool, int, float, str, torch.dtype, torch.device)
    )


@torch._dynamo.allow_in_graph
def call_opaque(
    key: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    place: int | str | None,
    states: Sequence[Any],
) -> tuple[Any, tuple[Any, ...]]:
    """The node: results of the module ``key``, and the states of its cache made anew.

    ``place`` is the argument (position or name, None for none) where a cache holding ``states``
    stands; tensors in ``states`` are written in place.
    """
    call = _calls.get(key)
    if call is None:
        raise OpaqueModuleError(f"the module {key.partition('#')[0]} of this graph is gone")
    if _is_fake(key, (args, kwargs, states)):
        return call.results.fake(call, args, kwargs, place, states)
    result, written = call.run(args, kwargs, place, states)
    if place is None:
        call.results.check(call, args, kwargs, result)
    return result, written


@torch._dynamo.allow_in_graph
def refuse_opaque(key: str, problem: str) -> None:
    """Raise from inside a trace; a plain ``raise`` there would only end the trace."""
    raise OpaqueModuleError(
        f"{key.partition('#')[0]} cannot be an opaque break: {problem}. Its arguments may be "
        "tensors, numbers, strings, tuples, lists and dicts of them, and a transformers cache; "
        "take it out of break_modules, or pass it what it needs in one of these forms"
    )


def _is_fake(key: str, values: Any) -> bool:
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            return isinstance(leaf, FakeTensor)
    raise OpaqueModuleError(
        f"{key.partition('#')[0]} cannot be an opaque break: it is called without any tensor"
    )


def opaque_name(node: fx.Node) -> str | None:
    """Class of the module that a node runs as a whole; None for any other node."""
    if node.target is call_opaque:
        return str(node.args[0]).partition("#")[0]
    return None


def states_given(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes whose tensors opaque calls are given as states of a cache, and write in place.

    A cache marks them as static, which they are to its own owner only: each call may bring another.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is call_opaque:
            fx.map_arg(node.args[4], found.add)
    return frozenset(found)
