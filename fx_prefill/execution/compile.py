"""Compiles each distinct segment once.

Weights are inputs of a segment, so the middle segments of a decoder differ in nothing: they share
one artifact, found by a structural key over operators, wiring, shapes, strides and dtypes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import sympy
import torch
from torch import fx

from ..errors import SegmentCompileError
from ..graph.causal import causal_breaks, zero_padding
from ..graph.extract import Source, SourceKind
from ..graph.normalize import value_of
from ..graph.operators import operator_name
from ..graph.partition import Partition, PartitionPlan
from ..graph.symbols import Bindings, expr_of, is_scalar
from ..options import Options
from .breaks import PYTHON_BODIES, BreakBody, break_body
from .inductor import compile_standalone
from .prologue import Placed, Prologue, place_prologues

log = logging.getLogger(__name__)

SegmentFn = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True)
class BoundSegment:
    """A segment at given sizes; ``warm_up`` does once what ``run`` does, as far as it is new."""

    run: SegmentFn
    warm_up: SegmentFn


def nothing_new(*args: Any) -> Sequence[torch.Tensor]:
    """The warm-up of a segment that ran before at the same sizes."""
    return ()


@dataclass(frozen=True)
class CompiledSegment:
    """One artifact: called with the partition's inputs, returns its outputs in order."""

    number: int
    function: SegmentFn
    seconds: float
    compiler: str

    def bind(self, bindings: Bindings) -> BoundSegment:
        """The function at given sizes; an artifact serves all sizes."""
        return BoundSegment(self.function, self.function)


@dataclass(frozen=True)
class CompiledPlan:
    """A plan whose segments can run; ``demoted`` says why a planned segment runs eagerly.

    ``causal`` are the breaks that may be captured with the segments around them, ``prologues`` the
    operators whose first part may be, by name.
    """

    plan: PartitionPlan
    partitions: tuple[Partition, ...]
    segments: dict[int, CompiledSegment]
    demoted: dict[int, str]
    causal: frozenset[int] = frozenset()
    prologues: Mapping[str, Prologue] = field(default_factory=dict)
    bodies: dict[int, BreakBody] = field(default_factory=dict)

    def break_body(self, part: Partition, direct: Sequence[int]) -> BreakBody:
        """The body of a break; ``direct`` are results that may be made in their handoffs."""
        if part.index not in self.bodies:
            rest = {name: p.rest for name, p in self.prologues.items()} if self.placed else {}
            self.bodies[part.index] = break_body(part, direct, {**PYTHON_BODIES, **rest})
        return self.bodies[part.index]

    @cached_property
    def placed(self) -> dict[int, list[Placed]]:
        """The prologues that are captured, by the index of the segment they come behind."""
        return place_prologues(self.plan, self.partitions, self.prologues)

    @cached_property
    def needs_padding(self) -> bool:
        """Whether a segment reads which rows are padded."""
        sources = [source for part in self.partitions for source in part.inputs]
        return any(source.kind is SourceKind.PADDING for source in sources)

    @cached_property
    def steps_before_confirming(self) -> int:
        """Partitions up to the first segment, if running them twice changes nothing; else 0."""
        for position, part in enumerate(self.partitions):
            if part.is_segment:
                return position + 1
            if not all(self.plan.verdicts[node].pure for node in part.nodes):
                return 0
        return 0

    @cached_property
    def read_live(self) -> frozenset[fx.Node]:
        """Values that a break or the caller reads as they are made, not from a buffer."""
        sources = [s for part in self.partitions if not part.is_segment for s in part.inputs]
        sources += [result for result in self.plan.results if isinstance(result, Source)]
        return frozenset(s.node for s in sources if s.kind is SourceKind.VALUE)  # type: ignore[misc]

    def demote(self, numbers: dict[int, str]) -> CompiledPlan:
        """The same plan with the distinct segments ``numbers`` run as breaks, and why."""
        reasons = {
            index: numbers[segment.number]
            for index, segment in self.segments.items()
            if segment.number in numbers
        }
        # As planned, without zeroing: a break sees no padded rows.
        planned = {part.index: part for part in self.plan.partitions}
        lost = {node for index in reasons for node in planned[index].outputs}
        return replace(
            self,
            partitions=tuple(
                replace(planned[p.index], is_segment=False) if p.index in reasons else p
                for p in self.partitions
            ),
            causal=frozenset(
                index
                for index in self.causal
                if lost.isdisjoint(source.node for source in planned[index].inputs)
            ),
            segments={i: s for i, s in self.segments.items() if i not in reasons},
            demoted={**self.demoted, **reasons},
            bodies={},
        )


class SegmentCache:
    """Artifacts by structural key; shared by all graphs of a process."""

    def __init__(self) -> None:
        self._artifacts: dict[Any, tuple[SegmentFn, float]] = {}

    def get(self, key: Any, make: Callable[[], SegmentFn]) -> tuple[SegmentFn, float]:
        """The artifact under ``key`` with the seconds it took now (0 when it was there)."""
        known = self._artifacts.get(key)
        if known is not None:
            return known[0], 0.0
        start = time.perf_counter()
        function = make()
        seconds = time.perf_counter() - start
        self._artifacts[key] = (function, seconds)
        return function, seconds

    def clear(self) -> None:
        """Forget all artifacts."""
        self._artifacts.clear()


def compile_plan(plan: PartitionPlan, options: Options, cache: SegmentCache) -> CompiledPlan:
    """Compile every distinct segment of ``plan``.

    A segment that the compiler rejects runs its own operators instead, with a warning; under
    ``strict`` that is a SegmentCompileError.
    """
    compiler = compiler_for(plan, options)
    numbers: dict[Any, int] = {}
    segments = {}
    causal = causal_breaks(plan) if captures_attention(plan, options) else {}
    partitions = _with_zeroed_padding(plan, causal)
    for part in partitions:
        if not part.is_segment:
            continue
        key = structural_key(plan, part)
        number = numbers.setdefault(key, len(numbers))
        ambient = (_name(compiler), compiler, options.passes, _autocast_state())
        function, seconds = cache.get((key, ambient), partial(_compile, part, compiler, options))
        segments[part.index] = CompiledSegment(number, function, seconds, _name(compiler))
    return CompiledPlan(plan, partitions, segments, {}, frozenset(causal))


def fuses(compiled: CompiledPlan) -> bool:
    """Whether the segment compiler keeps fused values out of memory."""
    return any(segment.compiler != "eager" for segment in compiled.segments.values())


def has_graphs(device: torch.device) -> bool:
    """Whether segments become device graphs; a model on the meta device is meant for such one."""
    return device.type in ("cuda", "meta")


def captures_attention(plan: PartitionPlan, options: Options) -> bool:
    """Whether causal attention is captured at some bucket."""
    if options.capture_attention is None:
        return has_graphs(plan.traced.device)
    return options.capture_attention


def compiler_for(plan: PartitionPlan, options: Options) -> Any:
    """What compiles the segments of a plan."""
    default = "inductor" if has_graphs(plan.traced.device) else "eager"
    return options.compiler or default


def _with_zeroed_padding(
    plan: PartitionPlan, causal: dict[int, tuple[fx.Node, ...]]
) -> tuple[Partition, ...]:
    hidden = {node for nodes in causal.values() for node in nodes}
    return tuple(
        zero_padding(plan, part, tuple(hidden))
        if part.is_segment and not hidden.isdisjoint(part.outputs)
        else part
        for part in plan.partitions
    )


def _name(compiler: Any) -> str:
    return compiler if isinstance(compiler, str) else getattr(compiler, "__name__", repr(compiler))


def _autocast_state() -> tuple[Any, ...]:
    return tuple(
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    )


# --- one segment --------------------------------------------------------------------------------


def _compile(part: Partition, compiler: Any, options: Options) -> SegmentFn:
    module = part.module
    inputs = example_inputs(module)
    with torch.inference_mode(False), torch.no_grad():
        for user_pass in options.passes.post_partition:
            module = user_pass(module, inputs)
        if compiler == "eager":
            return module.forward
        try:
            if compiler == "inductor":
                return as_sequence(compile_standalone(module, inputs, dynamic_shapes="from_graph"))
            return as_sequence(compiler(module, inputs))
        except Exception as error:
            message = (
                f"compiler {_name(compiler)!r} failed on segment {part.index} "
                f"({len(part.nodes)} operators): {type(error).__name__}: {error}"
            )
            if options.strict:
                raise SegmentCompileError(message) from error
            log.warning("%s; the segment runs its operators uncompiled", message)
            return module.forward


def example_inputs(module: fx.GraphModule) -> list[Any]:
    """Fake values of a partition module's placeholders."""
    return [value_of(node) for node in module.graph.nodes if node.op == "placeholder"]


def as_sequence(function: Callable[..., Any]) -> SegmentFn:
    """A segment function of a compiler's: they differ in returning a tensor, a tuple or a list."""

    def run(*args: Any) -> Sequence[torch.Tensor]:
        result = function(*args)
        return (result,) if isinstance(result, torch.Tensor) else result

    return run


# --- the structural key -------------------------------------------------------------------------


def structural_key(plan: PartitionPlan, part: Partition) -> Any:
    """Equal for two segments exactly when one artifact serves both.

    The symbols are named by what they count, so that segments of separately traced graphs match.
    """
    traced = plan.traced
    names: dict[sympy.Symbol, sympy.Symbol] = {}
    if traced.token_symbol is not None:
        names[traced.token_symbol] = sympy.Symbol("tokens", integer=True)
    for position, symbol in enumerate(traced.batch_symbols):
        names[symbol] = sympy.Symbol(f"batch{position}", integer=True)
    indices = {node: i for i, node in enumerate(part.module.graph.nodes)}
    return tuple(_node_key(node, indices, names) for node in part.module.graph.nodes)


def _node_key(node: fx.Node, indices: dict[fx.Node, int], names: dict[Any, Any]) -> Any:
    if node.op == "placeholder":
        return ("placeholder", _value_key(value_of(node), names))
    target = (
        node.target if isinstance(node.target, str) else (operator_name(node.target), node.target)
    )
    return (node.op, target, _arg_key(node.args, indices), _arg_key(node.kwargs, indices))


def _value_key(value: Any, names: dict[Any, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return (
            tuple(_expr_key(size, names) for size in value.shape),
            tuple(_expr_key(stride, names) for stride in value.stride()),
            value.dtype,
            value.device,
        )
    return _expr_key(value, names) if is_scalar(value) else repr(value)


def _expr_key(value: Any, names: dict[Any, Any]) -> str:
    expr = expr_of(value)
    return str(expr.xreplace(names)) if isinstance(expr, sympy.Basic) else repr(expr)


def _arg_key(arg: Any, indices: dict[fx.Node, int]) -> Any:
    if isinstance(arg, fx.Node):
        return ("node", indices[arg])
    if isinstance(arg, (tuple, list)):
        return (type(arg).__name__, *(_arg_key(item, indices) for item in arg))
    if isinstance(arg, dict):
        return tuple((name, _arg_key(item, indices)) for name, item in sorted(arg.items()))
    if isinstance(arg, slice):
        return ("slice", *(_arg_key(item, indices) for item in (arg.start, arg.stop, arg.step)))
    return (type(arg).__name__, repr(arg))
