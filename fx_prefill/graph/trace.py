"""Dynamo's graph in this package's terms: its inputs by role, its token axis, its guards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import GraphError
from ..opaque.calls import states_given
from .normalize import find_fake_mode, normalize, value_of
from .symbols import Bindings, expr_of, free_symbols, is_unbacked, size_exprs, substitute

if TYPE_CHECKING:
    from .masks import MaskClaim


class Role(Enum):
    """What an input of the graph is."""

    SCALAR = "scalar"
    """A host number: SymInt, or a module float."""

    STATIC = "static"
    """A weight or buffer: its address does not change between calls."""

    LIVE = "live"
    """A tensor of this call: ids, embeddings, positions, masks, caches."""


@dataclass(frozen=True)
class SymbolSource:
    """Where a call shows the value of a symbol: argument ``index``, or its size at ``dim``."""

    index: int
    dim: int | None

    def read(self, args: Sequence[Any]) -> Any:
        """Value of the symbol in this call."""
        arg = args[self.index]
        return arg if self.dim is None else int(arg.shape[self.dim])


@dataclass(frozen=True)
class TracedGraph:
    """A normalised graph and what its shapes say.

    ``token_symbol`` is None for a fully static graph. ``folded`` maps the index of a 0-d float
    input to the number compiled in, which a call must still hold. ``claims`` are the masks that
    were taken for causal.
    """

    module: fx.GraphModule
    original: fx.GraphModule
    placeholders: tuple[fx.Node, ...]
    roles: tuple[Role, ...]
    token_symbol: sympy.Symbol | None
    batch_symbols: tuple[sympy.Symbol, ...]
    sources: dict[sympy.Symbol, SymbolSource]
    folded: dict[int, float] = field(default_factory=dict)
    fake_mode: FakeTensorMode | None = None
    claims: tuple[MaskClaim, ...] = ()

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        """Argument index of each placeholder."""
        return {node: index for index, node in enumerate(self.placeholders)}

    @property
    def live(self) -> tuple[fx.Node, ...]:
        """Placeholders whose tensors belong to the call."""
        pairs = zip(self.placeholders, self.roles, strict=True)
        return tuple(node for node, role in pairs if role is Role.LIVE)

    @property
    def static_indices(self) -> tuple[int, ...]:
        """Argument indices of the weights and buffers."""
        return tuple(i for i, role in enumerate(self.roles) if role is Role.STATIC)

    @property
    def device(self) -> torch.device:
        """Where the segments run: the device of most weights, or else of most inputs."""
        pairs = list(zip(self.placeholders, self.roles, strict=True))
        for role in (Role.STATIC, Role.LIVE):
            devices = [value_of(node).device for node, other in pairs if other is role]
            if devices:
                return max(dict.fromkeys(devices), key=devices.count)
        return torch.device("cpu")

    @property
    def size_symbols(self) -> frozenset[sympy.Symbol]:
        """Symbols a segment may depend on: the token count and the batch sizes."""
        tokens = () if self.token_symbol is None else (self.token_symbol,)
        return frozenset((*tokens, *self.batch_symbols))

    def symbol_values(self, args: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """Every symbol's value in this call."""
        return {symbol: source.read(args) for symbol, source in self.sources.items()}

    def guards(self) -> tuple[sympy.Basic, ...]:
        """Conditions on the token count under which the graph is valid.

        Those on other symbols hold for every call: Dynamo checks them.

        Read when asked, not stored: a segment compiler may add some after tracing.
        """
        env = self.fake_mode.shape_env if self.fake_mode is not None else None
        if env is None or self.token_symbol is None:
            return ()
        # Symbols found equal while tracing are replaced by one of them, in guards as in shapes.
        conditions = [env.replace(guard.expr) for guard in env.guards]
        bounds = env.var_to_range.get(self.token_symbol)
        if bounds is not None:
            conditions += [self.token_symbol >= bounds.lower, self.token_symbol <= bounds.upper]
        return tuple(c for c in conditions if self.token_symbol in free_symbols(c))

    def guard_symbols(self) -> frozenset[sympy.Symbol]:
        """Symbols that decide, with the token count, whether the graph is valid."""
        return frozenset().union(*(free_symbols(guard) for guard in self.guards()))

    def broken_guard(self, real: Bindings, bucket: Bindings) -> str | None:
        """A guard that no call with a bucket's token count can fulfil, or None.

        ``real`` are the sizes of this call, ``bucket`` those that a segment depends on. Segments
        are valid at the bucket when *some* call of that many tokens is traced the same way, so the
        sizes they do not depend on (a mask's length, the past) may be as they are, or grow with
        the padding. Breaks keep the real sizes, which Dynamo has checked.
        """
        if self.token_symbol is None:
            return None
        num_tokens = real[self.token_symbol]
        padding = bucket[self.token_symbol] - num_tokens
        others = {symbol: size for symbol, size in real.items() if symbol not in bucket}
        problem = None
        for grows in (
            lambda size: False,
            lambda size: size == num_tokens,
            lambda s: s >= num_tokens,
        ):
            moved = {s: size + padding if grows(size) else size for s, size in others.items()}
            problem = self.holds_at({**moved, **bucket})
            if problem is None:
                return None
        return problem

    def holds_at(self, bindings: Bindings) -> str | None:
        """The first guard that ``bindings`` breaks, as text, or None when all hold."""
        for guard in self.guards():
            if substitute(guard, bindings) != sympy.true:
                return str(guard)
        return None


def trace(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> TracedGraph:
    """Read a graph as Dynamo hands it to a backend.

    ``example_inputs`` are the backend's second argument. Raises GraphError for a graph whose
    symbols cannot be read from a call's arguments.
    """
    fake_mode = find_fake_mode(gm.graph)
    folded = _module_floats(gm, example_inputs)
    module = normalize(gm, fake_mode, folded)
    placeholders = tuple(node for node in module.graph.nodes if node.op == "placeholder")
    states = states_given(module.graph)
    roles = tuple(
        Role.LIVE if node in states else _role(node, example)
        for node, example in zip(placeholders, example_inputs, strict=True)
    )
    live = [node for node, role in zip(placeholders, roles, strict=True) if role is Role.LIVE]
    token = _token_symbol(module.graph, placeholders, roles)
    return TracedGraph(
        module=module,
        original=gm,
        placeholders=placeholders,
        roles=roles,
        token_symbol=token,
        batch_symbols=_batch_symbols(live, token),
        sources=_sources(placeholders),
        folded=folded,
        fake_mode=fake_mode,
    )


def static_indices(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[int, ...]:
    """Positions of weights and buffers among a graph's inputs."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    pairs = enumerate(zip(placeholders, example_inputs, strict=True))
    return tuple(i for i, (node, example) in pairs if _role(node, example) is Role.STATIC)


def _role(node: fx.Node, example: Any) -> Role:
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return Role.SCALAR
    if free_symbols(value):
        return Role.LIVE  # whatever was promised, a tensor that grows with the call is not static
    if "_dynamo_static_input_type" in node.meta.get("tensor_dict", {}):
        return Role.STATIC
    if isinstance(example, torch.nn.Parameter):
        return Role.STATIC
    return Role.LIVE


def _module_floats(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[int, float]:
    """0-d float64 CPU inputs read only through ``.item()``: floats that Dynamo wrapped."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    floats = {}
    for index, node in enumerate(placeholders):
        value, example = value_of(node), example_inputs[index]
        if (
            isinstance(value, torch.Tensor)
            and value.dim() == 0
            and value.dtype == torch.float64
            and value.device.type == "cpu"
            and isinstance(example, torch.Tensor)
            and node.users
            and all(user.op == "call_method" and user.target == "item" for user in node.users)
        ):
            floats[index] = _read_float(node, example)
    return {index: number for index, number in floats.items() if number is not None}


def _read_float(node: fx.Node, example: torch.Tensor) -> float | None:
    constant = getattr(value_of(node), "constant", None)
    for tensor in (example, constant):
        if tensor is not None and type(tensor) is torch.Tensor:
            return float(tensor)
    user = next(iter(node.users))
    hint = getattr(getattr(value_of(user), "node", None), "hint", None)
    return None if hint is None else float(hint)


def _sources(placeholders: Sequence[fx.Node]) -> dict[sympy.Symbol, SymbolSource]:
    """Where each symbol can be read; a SymInt argument is preferred over a tensor's size."""
    sources: dict[sympy.Symbol, SymbolSource] = {}
    seen: set[sympy.Symbol] = set()
    for index, node in enumerate(placeholders):
        value = value_of(node)
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            candidates: list[tuple[int | None, Any]] = [(None, expr_of(value))]
        elif isinstance(value, torch.Tensor):
            candidates = [*enumerate(size_exprs(value))]
        else:
            continue
        for dim, expr in candidates:
            seen |= free_symbols(expr) if isinstance(expr, sympy.Basic) else set()
            if isinstance(expr, sympy.Symbol):
                sources.setdefault(expr, SymbolSource(index, dim))
    lost = sorted(str(symbol) for symbol in seen - set(sources) if not is_unbacked(symbol))
    if lost:
        raise GraphError(
            f"the sizes {', '.join(lost)} cannot be read from the arguments: each must be an "
            "argument itself or a whole dimension of a tensor argument"
        )
    return sources


def _token_symbol(
    graph: fx.Graph, placeholders: Sequence[fx.Node], roles: Sequence[Role]
) -> sympy.Symbol | None:
    """The symbol that counts tokens.

    Weights are applied along it. Of the symbols in the outputs of nodes that read a weight, and
    leaving out those that stand before another such symbol in an input (a batch), it is the one
    that a weight is applied along last: a decoder that attends to an encoder's rows, or merges
    image rows into its own, ends in its own rows. Among those of that last node, it is the one in
    most of those outputs. A graph without weights falls back to all nodes.
    """
    static = {n for n, role in zip(placeholders, roles, strict=True) if role is Role.STATIC}
    live = [n for n, role in zip(placeholders, roles, strict=True) if role is Role.LIVE]
    readable = _sources(placeholders)
    applied: Counter[sympy.Symbol] = Counter()
    last: dict[sympy.Symbol, int] = {}
    for index, node in enumerate(graph.nodes):
        value = value_of(node)
        if node.op == "placeholder" or not isinstance(value, torch.Tensor):
            continue
        if not static or any(arg in static for arg in node.all_input_nodes):
            found = free_symbols(value) & readable.keys()
            applied.update(found)
            last.update(dict.fromkeys(found, index))
    before = {
        earlier
        for node in live
        for earlier, later in _ordered_pairs(value_of(node))
        if earlier in applied and later in applied
    }
    candidates = [symbol for symbol in applied if symbol not in before]
    return max(candidates, key=lambda s: (last[s], applied[s], str(s)), default=None)


def _ordered_pairs(tensor: torch.Tensor) -> list[tuple[sympy.Symbol, sympy.Symbol]]:
    symbols = [size for size in size_exprs(tensor) if isinstance(size, sympy.Symbol)]
    return [
        (earlier, later)
        for position, earlier in enumerate(symbols)
        for later in symbols[position + 1 :]
        if earlier != later
    ]


def _batch_symbols(live: Sequence[fx.Node], token: sympy.Symbol | None) -> tuple[sympy.Symbol, ...]:
    """Symbols standing before the token axis in an input: they become part of the bucket's key."""
    pairs = [pair for node in live for pair in _ordered_pairs(value_of(node))]
    return tuple(dict.fromkeys(earlier for earlier, later in pairs if later == token))
