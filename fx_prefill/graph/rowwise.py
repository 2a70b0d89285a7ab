"""The token-axis analysis: for every node a verdict, and for a break its reason.

A guess here ("the first dimension is the tokens", "nothing mixes rows except attention") is wrong
without an error: padded rows leak into real ones. So a node is captured only when every ATen
operator it decomposes into is known to carry the token axis. The node is run once on Dynamo's
fake tensors, the operators it reaches are judged by :mod:`rules`, and the verdict is kept by
signature: the second decoder layer costs a dictionary look-up per node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from .autocast import autocast_of, entered
from .normalize import MISSING, call, value_of
from .operators import aten_matcher, is_attention, matcher, operator_name, short_name
from .rules import RULES, OpCall, no_host_values, pointwise
from .symbols import SYMBOLIC, expr_of, free_symbols, is_scalar, is_unbacked, layout_symbols
from .trace import TracedGraph
from .verdict import BreakReason, Kind, NotRowwise, Opaque, State, TokenAxis, Verdict, shape_state

SIZE_QUERIES = frozenset(
    "size numel nelement dim ndimension stride storage_offset getattr len len__ getitem sym_size "
    "sym_numel sym_stride is_contiguous is_floating_point is_complex element_size".split()
)
SHAPE_MUTATORS = frozenset(
    "squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_ resize_ resize_as_ set_ as_strided_ "
    "rename_ detach_".split()
)
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass(frozen=True)
class Analysis:
    """A traced graph with a verdict for every node."""

    traced: TracedGraph
    verdicts: dict[fx.Node, Verdict]

    def state(self, node: fx.Node) -> State:
        """State of a node whose value is one tensor."""
        states = self.verdicts[node].states
        return states[0] if states else None


def analyse(
    traced: TracedGraph, break_ops: tuple[Any, ...] = (), rowwise_ops: tuple[Any, ...] = ()
) -> Analysis:
    """Judge every node of a traced graph.

    ``break_ops`` and ``rowwise_ops`` are operators, functions, names, or predicates on a node.
    """
    analyzer = _Analyzer(traced, break_ops, rowwise_ops)
    for node in traced.module.graph.nodes:
        if node.op != "output":
            analyzer.judge(node)
    return Analysis(traced, analyzer.verdicts)


class _RowTracker(TorchDispatchMode):
    """Watches the ATen operators of one node and carries states through them."""

    def __init__(self, analyzer: _Analyzer, states: dict[int, State]) -> None:
        super().__init__()
        self.analyzer = analyzer
        self.states = states
        self.fault: NotRowwise | None = None
        self.random = False
        self.has_kernel = False
        self.mutated: set[int] = set()
        self.operators: list[str] = []
        self._alive: list[Any] = []  # ids are only unique while the tensors live

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if _is_query(func, out):
            return out
        self._alive.append((args, kwargs, out))
        named = _bind(func, args, kwargs)
        self._note(func, named)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        try:
            states = self._judge(func, named, out)
            self._check(func, outputs, states)
        except NotRowwise as fault:
            self.fault = self.fault or fault
            states = [self.analyzer.shape_state(leaf) for leaf in outputs]
        for leaf, state in zip(outputs, states, strict=True):
            self.states[id(leaf)] = state
        return out

    def _note(self, func: Any, named: dict[str, Any]) -> None:
        """What the operator does besides computing: randomness, writes, kernels."""
        name = func._schema.name
        self.operators.append(name)
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        short = name.rpartition("::")[2]
        self.has_kernel |= not (func.is_view or short in EMPTY)
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in tree_leaves(named.get(argument.name)):
                    if isinstance(leaf, torch.Tensor):
                        self.mutated.add(leaf.untyped_storage()._cdata)

    def _judge(self, func: Any, named: dict[str, Any], out: Any) -> Sequence[State]:
        analyzer = self.analyzer
        namespace, _, name = func._schema.name.rpartition("::")
        short = name.rstrip("_") if func._schema.is_mutable else name
        if any(is_unbacked(leaf) for leaf in tree_leaves(out)) or (
            torch.Tag.data_dependent_output in func.tags
        ):
            raise NotRowwise(BreakReason.DATA_DEPENDENT, f"{name} makes a size from data")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotRowwise(BreakReason.RANDOM, f"{name} draws random numbers")
        opcall = OpCall(
            short, named, out, self.states, analyzer.token, analyzer.traced.size_symbols
        )
        if is_attention_name(namespace, name):
            raise NotRowwise(BreakReason.ATTENTION, name)
        if analyzer.is_rowwise_aten(func._schema.name):
            return [analyzer.shape_state(leaf) for leaf in opcall.outputs]
        for tensor in opcall.tensors:
            opcall.axis(tensor)  # refuses one whose shape could not be placed
        analyzer.refuse_foreign_scalars(name, named)
        if self._token_free(opcall):
            analyzer.refuse_token_scalars(name, named)
            if namespace == "aten":
                return [None] * len(opcall.outputs)
        if namespace == "aten":
            found = RULES.get(f"{short}.{func._overloadname}") or RULES.get(short)
            if found is None and torch.Tag.pointwise in func.tags:
                found = pointwise
            if found is not None:
                no_host_values(opcall)
                return list(found(opcall))
        raise NotRowwise(BreakReason.UNKNOWN, f"{namespace}.{name}")

    def _token_free(self, opcall: OpCall) -> bool:
        token = self.analyzer.token
        return all(self.states.get(id(t)) is None for t in opcall.tensors) and (
            token is None or not any(token in layout_symbols(out) for out in opcall.outputs)
        )

    def _check(self, func: Any, outputs: list[torch.Tensor], states: Sequence[State]) -> None:
        """A rule may not claim an axis that the shape contradicts."""
        for leaf, state in zip(outputs, states, strict=True):
            problem = self.analyzer.contradiction(leaf, state)
            if problem is not None:
                raise NotRowwise(problem.reason, f"{func._schema.name}: {problem.detail}")


def _is_query(func: Any, out: Any) -> bool:
    """Whether an operator only asks for a size, a device and the like, known without any data."""
    return (
        out is not None
        and not func._schema.is_mutable
        and torch.Tag.data_dependent_output not in func.tags
        and not any(
            isinstance(leaf, torch.Tensor) or is_unbacked(leaf) for leaf in tree_leaves(out)
        )
    )


def is_attention_name(namespace: str, name: str) -> bool:
    """Whether an ATen operator is one of the fused attentions."""
    return namespace == "aten" and "attention" in name


def _bind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by schema name, defaults included."""
    named: dict[str, Any] = {}
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            named[argument.name] = args[position]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        else:
            named[argument.name] = argument.default_value
    return named


class _Analyzer:
    """Verdicts for one graph, with a memory of the signatures already judged."""

    def __init__(
        self, traced: TracedGraph, break_ops: tuple[Any, ...], rowwise_ops: tuple[Any, ...]
    ) -> None:
        self.traced = traced
        self.token = traced.token_symbol
        self.verdicts: dict[fx.Node, Verdict] = {}
        self.is_marked: Callable[[fx.Node], bool] = matcher(break_ops)
        self.is_marked_aten = aten_matcher(break_ops)
        self.is_rowwise: Callable[[fx.Node], bool] = matcher(rowwise_ops)
        self.is_rowwise_aten = aten_matcher(rowwise_ops)
        self.device_type = traced.device.type
        self._known: dict[Any, Verdict] = {}

    # --- states ---------------------------------------------------------------------------------

    def shape_state(self, tensor: torch.Tensor) -> State:
        return shape_state(tensor, self.token, self.traced.size_symbols)

    def contradiction(self, tensor: torch.Tensor, state: State) -> Opaque | None:
        """Why ``state`` cannot be that of ``tensor``, judging by its shape; None if it can."""
        if isinstance(state, Opaque):
            return state
        from_shape = self.shape_state(tensor)
        if from_shape == state:
            return None
        if isinstance(state, TokenAxis) and isinstance(from_shape, Opaque):
            sizes = [expr_of(size) for size in tensor.shape]
            others = [size for dim, size in enumerate(sizes) if dim != state.dim]
            flattened = sympy.expand(sympy.sympify(sizes[state.dim]) - state.outer * self.token)
            if flattened == 0 and self.token not in free_symbols(tuple(others)):
                return None
        if isinstance(from_shape, Opaque):
            return from_shape
        return Opaque(BreakReason.UNKNOWN, f"its token axis is not where expected ({state})")

    def refuse_foreign_scalars(self, name: str, named: dict[str, Any]) -> None:
        """A number that changes between calls may not be baked into a capture."""
        for argument, value in named.items():
            foreign = free_symbols(_scalars_in(value)) - self.traced.size_symbols
            if foreign:
                names = ", ".join(sorted(map(str, foreign)))
                raise NotRowwise(BreakReason.HOST_SCALAR, f"{name} depends on {names} ({argument})")

    def refuse_token_scalars(self, name: str, named: dict[str, Any]) -> None:
        """The token count used as a value by an operator without a token axis."""
        for argument, value in named.items():
            if self.token is not None and self.token in free_symbols(_scalars_in(value)):
                raise NotRowwise(
                    BreakReason.HOST_SCALAR, f"{name} uses the token count as a value ({argument})"
                )

    # --- verdicts -------------------------------------------------------------------------------

    def judge(self, node: fx.Node) -> None:
        value = value_of(node)
        if node.op in ("placeholder", "get_attr"):
            self.verdicts[node] = self._source(value)
        elif self._is_host(node, value):
            self.verdicts[node] = Verdict(Kind.HOST, has_kernel=False)
        else:
            self.verdicts[node] = self._call(node, value)

    def _source(self, value: Any) -> Verdict:
        states = tuple(
            self.shape_state(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)
        )
        return Verdict(Kind.SOURCE, states=states, has_kernel=False)

    def _is_host(self, node: fx.Node, value: Any) -> bool:
        """Whether the sizes of the call are all that the node's value depends on."""
        if is_scalar(value):
            if not free_symbols(value) and _tensor_args(node) and not _asks_for_size(node):
                return False  # an operator that reads a tensor and returns a number
            return free_symbols(value) <= self.traced.sources.keys() and not is_unbacked(value)
        return isinstance(value, torch.Size) or (
            isinstance(value, tuple) and bool(value) and all(is_scalar(item) for item in value)
        )

    def _call(self, node: fx.Node, value: Any) -> Verdict:
        signature = self._signature(node)
        known = self._known.get(signature) if signature is not None else None
        if known is not None:
            return known
        verdict = self._judge_call(node, value)
        if signature is not None:
            self._known[signature] = verdict
        return verdict

    def _judge_call(self, node: fx.Node, value: Any) -> Verdict:
        outputs = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        by_shape = tuple(self.shape_state(leaf) for leaf in outputs)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._higher_order(node, by_shape)
        if _changes_shape_in_place(node):
            detail = f"{operator_name(node.target)} changes a tensor's shape in place"
            return Verdict(Kind.BREAK, BreakReason.ALIAS_ORDER, detail, by_shape, mutates=(0,))
        tracker, result = self._track(node)
        live_number = next((arg for arg in node.all_input_nodes if self._is_live_number(arg)), None)
        if live_number is not None:
            tracker.fault = tracker.fault or NotRowwise(
                BreakReason.HOST_SCALAR, f"it depends on the number {live_number.name}"
            )
        if is_scalar(value):
            tracker.fault = tracker.fault or NotRowwise(
                BreakReason.DATA_DEPENDENT, "a number that the sizes of the call do not give"
            )
        fault = self._named_fault(node, tracker) or tracker.fault or self._placement(node, outputs)
        states = by_shape
        if fault is None:
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            states = tuple(tracker.states.get(id(leaf)) for leaf in leaves)
            fault = self._first_contradiction(outputs, states)
        mutates = self._mutated(node, tracker)
        verdict = Verdict(
            Kind.CAPTURE,
            states=by_shape if fault else states,
            mutates=mutates,
            random=tracker.random,
            has_kernel=tracker.has_kernel,
            operators=tuple(dict.fromkeys(tracker.operators)),
        )
        if fault is not None:
            return replace(verdict, kind=Kind.BREAK, reason=fault.reason, detail=fault.detail)
        if node.target is torch.tensor:
            return replace(verdict, kind=Kind.CONSTANT)
        return verdict

    def _is_live_number(self, node: fx.Node) -> bool:
        """Whether a node gives a number that only running it tells."""
        return is_scalar(value_of(node)) and self.verdicts[node].kind is Kind.BREAK

    def _higher_order(self, node: fx.Node, states: tuple[State, ...]) -> Verdict:
        """Operators over graphs: functional by contract, but for those named after mutation."""
        name = operator_name(node.target)
        writes = len(_tensor_args(node)) if "mutation" in name or "effects" in name else 0
        reason = BreakReason.ATTENTION if is_attention(node) else BreakReason.UNKNOWN
        if self.is_marked(node):
            reason = BreakReason.MARKED
        # A body may draw random numbers; an attention's does not.
        draws = reason is not BreakReason.ATTENTION
        return Verdict(Kind.BREAK, reason, name, states, mutates=tuple(range(writes)), random=draws)

    def _track(self, node: fx.Node) -> tuple[_RowTracker, Any]:
        states: dict[int, State] = {}
        for arg in node.all_input_nodes:
            leaves = [x for x in tree_leaves(value_of(arg)) if isinstance(x, torch.Tensor)]
            for leaf, state in zip(leaves, self.verdicts[arg].states, strict=False):
                states[id(leaf)] = state
        tracker = _RowTracker(self, states)
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        fake_mode = self.traced.fake_mode
        with ExitStack() as stack:
            if fake_mode is not None:
                stack.enter_context(fake_mode)
                if fake_mode.shape_env is not None:
                    stack.enter_context(fake_mode.shape_env.ignore_fresh_unbacked_symbols())
                    stack.enter_context(fake_mode.shape_env.suppress_guards())
            # As Dynamo does: decompositions in C++ may not be able to handle symbolic sizes.
            stack.enter_context(enable_python_dispatcher())
            # Inference mode hides the decomposition of composite operators from dispatch.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(entered(autocast_of(node)))
            stack.enter_context(tracker)
            try:
                result = call(node, args, kwargs)
            except Exception as error:  # an operator without a fake implementation, say
                tracker.fault = NotRowwise(
                    BreakReason.UNKNOWN, f"it cannot be traced: {type(error).__name__}: {error}"
                )
                tracker.random = True  # nothing is known of it, so it keeps its place
                result = value_of(node)
        return tracker, result

    def _named_fault(self, node: fx.Node, tracker: _RowTracker) -> NotRowwise | None:
        """What the operator's name or the user says, before what it decomposes into."""
        marked = next((name for name in tracker.operators if self.is_marked_aten(name)), None)
        if self.is_marked(node) or marked:
            return NotRowwise(BreakReason.MARKED, marked or operator_name(node.target))
        if is_attention(node):
            return NotRowwise(BreakReason.ATTENTION, operator_name(node.target))
        if self.is_rowwise(node) and tracker.fault is not None:
            # The user's word covers what rows do, not sizes that depend on data or memory.
            placed = not any(
                isinstance(state, Opaque)
                for arg in node.all_input_nodes
                for state in self.verdicts[arg].states
            )
            promotable = (BreakReason.UNKNOWN, BreakReason.CROSSES_TOKENS)
            if placed and tracker.fault.reason in promotable:
                tracker.fault = None
                for leaf in tree_leaves(value_of(node)):
                    if isinstance(leaf, torch.Tensor):
                        tracker.states[id(leaf)] = self.shape_state(leaf)
        return None

    def _placement(self, node: fx.Node, outputs: list[torch.Tensor]) -> NotRowwise | None:
        """A captured graph holds device work only: no host tensors."""
        if self.device_type == "cpu":
            return None
        tensors = [value_of(arg) for arg in _tensor_args(node)]
        for tensor in (*tensors, *outputs):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                return NotRowwise(
                    BreakReason.CPU_TENSOR, f"a tensor of shape {tuple(tensor.shape)}"
                )
        return None

    def _first_contradiction(
        self, outputs: list[torch.Tensor], states: Sequence[State]
    ) -> NotRowwise | None:
        if len(outputs) != len(states):
            return NotRowwise(BreakReason.UNKNOWN, "its results do not match the recorded ones")
        for tensor, state in zip(outputs, states, strict=True):
            problem = self.contradiction(tensor, state)
            if problem is not None:
                return NotRowwise(problem.reason, problem.detail)
        return None

    def _mutated(self, node: fx.Node, tracker: _RowTracker) -> tuple[int, ...]:
        return tuple(
            index
            for index, arg in enumerate(_tensor_args(node))
            if any(
                leaf.untyped_storage()._cdata in tracker.mutated
                for leaf in tree_leaves(value_of(arg))
                if isinstance(leaf, torch.Tensor)
            )
        )

    def _signature(self, node: fx.Node) -> Any:
        """Everything a verdict depends on; None when it cannot be compared."""
        if self.is_marked(node) or self.is_rowwise(node):
            return None
        leaves, spec = tree_flatten((node.args, dict(node.kwargs)), is_leaf=_is_slice)
        parts: list[Any] = [node.op, node.target, autocast_of(node), str(spec)]
        seen: dict[Any, int] = {}
        for leaf in leaves:
            parts.append(self._part(leaf, seen))
        key = tuple(parts)
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def _part(self, leaf: Any, seen: dict[Any, int]) -> Any:
        """One argument in a signature; ``seen`` numbers nodes and storages by first use."""
        if isinstance(leaf, slice):
            return ("slice", *(self._part(x, seen) for x in (leaf.start, leaf.stop, leaf.step)))
        if not isinstance(leaf, fx.Node):
            return (type(leaf), leaf)
        value = value_of(leaf)
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()._cdata
            return (
                tuple(expr_of(size) for size in value.shape),
                tuple(expr_of(stride) for stride in value.stride()),
                value.dtype,
                value.device,
                self.verdicts[leaf].states[0],
                seen.setdefault(leaf, len(seen)),
                seen.setdefault(storage, len(seen)),
            )
        if isinstance(value, SYMBOLIC):
            return ("scalar", expr_of(value))
        return ("node", id(leaf))


def _changes_shape_in_place(node: fx.Node) -> bool:
    """Running such an operator on the recorded value would change it a second time."""
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.inplace_view in node.target.tags
    return node.op == "call_method" and node.target in SHAPE_MUTATORS


def _asks_for_size(node: fx.Node) -> bool:
    """Whether a node reads off a tensor what its shape and type tell."""
    return short_name(node).lstrip("_").removesuffix(".default") in SIZE_QUERIES


def _is_slice(value: Any) -> bool:
    return isinstance(value, slice)


def _tensor_args(node: fx.Node) -> list[fx.Node]:
    """Argument nodes holding tensors, in order of first use."""
    return [
        arg
        for arg in node.all_input_nodes
        if value_of(arg) is not MISSING
        and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value_of(arg)))
    ]


def _scalars_in(value: Any) -> tuple[Any, ...]:
    return tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, SYMBOLIC))
