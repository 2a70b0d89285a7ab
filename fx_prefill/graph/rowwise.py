"""The token-axis analysis: for every node a verdict, and for a break its reason.

A guess here ("the first dimension is the tokens", "nothing mixes rows except attention") is wrong
without an error: padded rows leak into real ones. So a node is captured only when every ATen
operator it decomposes into is known to carry the token axis. The node is run once on Dynamo's
fake tensors, the operators it reaches are judged by :mod:`rules`, and the verdict is kept by
signature: the second decoder layer costs a dictionary look-up per node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._pytree import tree_flatten, tree_leaves

from ..opaque.calls import opaque_name
from .autocast import autocast_of, entered
from .normalize import MISSING, call, value_of
from .operators import Matcher, is_attention, operator_name, short_name
from .symbols import SYMBOLIC, expr_of, free_symbols, is_scalar, is_unbacked
from .trace import TracedGraph
from .tracker import Axes, Known, RowTracker, forgotten
from .verdict import BreakReason, Contents, Kind, NotRowwise, Opaque, State, Verdict, is_local

SIZE_QUERIES = frozenset(
    "size numel nelement dim ndimension stride storage_offset getattr len len__ getitem sym_size "
    "sym_numel sym_stride is_contiguous is_floating_point is_complex element_size".split()
)
SHAPE_MUTATORS = frozenset(
    "squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_ resize_ resize_as_ set_ as_strided_ "
    "rename_ detach_".split()
)


@dataclass(frozen=True)
class Analysis:
    """A traced graph with a verdict for every node.

    ``unmatched`` names the entries of ``break_ops`` and ``rowwise_ops`` that no node answers to.
    """

    traced: TracedGraph
    verdicts: dict[fx.Node, Verdict]
    unmatched: tuple[str, ...] = ()

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
    unmatched = (*analyzer.marked.unmatched(), *analyzer.rowwise.unmatched())
    return Analysis(traced, analyzer.verdicts, unmatched)


class _Analyzer:
    """Verdicts for one graph, with a memory of the signatures already judged."""

    def __init__(
        self, traced: TracedGraph, break_ops: tuple[Any, ...], rowwise_ops: tuple[Any, ...]
    ) -> None:
        self.traced = traced
        self.axes = Axes(traced.token_symbol, traced.size_symbols)
        self.verdicts: dict[fx.Node, Verdict] = {}
        self.marked = Matcher(break_ops)
        self.rowwise = Matcher(rowwise_ops)
        self.device_type = traced.device.type
        self._known: dict[Any, Verdict] = {}
        self._written: dict[fx.Node, list[Known]] = {}
        self._touching: dict[int, list[fx.Node]] = defaultdict(list)

    # --- verdicts -------------------------------------------------------------------------------

    def judge(self, node: fx.Node) -> None:
        value = value_of(node)
        if node.op in ("placeholder", "get_attr"):
            self.verdicts[node] = self._source(value)
        elif self._is_host(node, value):
            self.verdicts[node] = Verdict(Kind.HOST, has_kernel=False)
        else:
            self.verdicts[node] = self._call(node, value)
            self._follow_writes(node)

    def _follow_writes(self, node: fx.Node) -> None:
        """What is known of numbers is right until they are written over.

        States of whole rows outlive a write, as the shape does; an order and the like do not.
        """
        verdict = self.verdicts[node]
        tensors = _tensor_args(node)
        for position, index in enumerate(verdict.mutates):
            arg = tensors[index]
            for storage in _storages(arg):
                for other in self._touching.pop(storage, ()):
                    self._written[other] = [
                        (forgotten(state), None) if own == storage else (state, held)
                        for own, (state, held) in zip(
                            _storages(other), self._now(other), strict=True
                        )
                    ]
            if verdict.after and isinstance(value_of(arg), torch.Tensor):
                self._written[arg] = [verdict.after[position]]
                self._touch(arg)
        if verdict.local or any(verdict.contents):
            self._touch(node)

    def _touch(self, node: fx.Node) -> None:
        for storage in set(_storages(node)):
            self._touching[storage].append(node)

    def _now(self, node: fx.Node) -> list[Known]:
        """What is known of each tensor in a node's value at this point of the graph."""
        if node in self._written:
            return self._written[node]
        verdict = self.verdicts[node]
        contents = verdict.contents or (None,) * len(verdict.states)
        return list(zip(verdict.states, contents, strict=True))

    def _source(self, value: Any) -> Verdict:
        states = tuple(
            self.axes.shape_state(leaf)
            for leaf in tree_leaves(value)
            if isinstance(leaf, torch.Tensor)
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
        if signature is not None and not verdict.local:  # each sort is one of its own
            self._known[signature] = verdict
        return verdict

    def _judge_call(self, node: fx.Node, value: Any) -> Verdict:
        outputs = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        by_shape = tuple(self.axes.shape_state(leaf) for leaf in outputs)
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
        contents: tuple[Contents | None, ...] = (None,) * len(outputs)
        if fault is None:
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            states = tuple(tracker.known(leaf)[0] for leaf in leaves)
            contents = tuple(tracker.known(leaf)[1] for leaf in leaves)
            fault = self._first_contradiction(outputs, states)
        mutates = self._mutated(node, tracker)
        verdict = Verdict(
            Kind.CAPTURE,
            states=by_shape if fault else states,
            contents=(None,) * len(outputs) if fault else contents,
            mutates=mutates,
            after=self._after(node, tracker, mutates, fault),
            in_range=tracker.in_range,
            random=tracker.random,
            has_kernel=tracker.has_kernel,
            operators=tuple(dict.fromkeys(tracker.operators)),
        )
        if fault is not None:
            return replace(verdict, kind=Kind.BREAK, reason=fault.reason, detail=fault.detail)
        if node.target is torch.tensor:
            return replace(verdict, kind=Kind.CONSTANT)
        return verdict

    def _after(
        self, node: fx.Node, tracker: RowTracker, mutates: Sequence[int], fault: NotRowwise | None
    ) -> tuple[Known, ...]:
        """What is known of each written argument once the node has run."""
        tensors = _tensor_args(node)
        known: list[Known] = []
        for index in mutates:
            arg = tensors[index]
            leaf = value_of(arg)
            if fault is None and isinstance(leaf, torch.Tensor):
                known.append(tracker.known(leaf))
            else:
                known.append((forgotten(self._now(arg)[0][0]), None))
        return tuple(known)

    def _is_live_number(self, node: fx.Node) -> bool:
        """Whether a node gives a number that only running it tells."""
        return is_scalar(value_of(node)) and self.verdicts[node].kind is Kind.BREAK

    def _higher_order(self, node: fx.Node, states: tuple[State, ...]) -> Verdict:
        """Operators over graphs: functional by contract, but for those named after mutation."""
        name = operator_name(node.target)
        writes = len(_tensor_args(node)) if "mutation" in name or "effects" in name else 0
        reason = BreakReason.ATTENTION if is_attention(node) else BreakReason.UNKNOWN
        if self.marked.node(node):
            reason = BreakReason.MARKED
        # A body may draw random numbers; an attention's does not.
        draws = reason is not BreakReason.ATTENTION
        return Verdict(Kind.BREAK, reason, name, states, mutates=tuple(range(writes)), random=draws)

    def _track(self, node: fx.Node) -> tuple[RowTracker, Any]:
        arguments: list[tuple[torch.Tensor, Known]] = []
        for arg in node.all_input_nodes:
            leaves = [x for x in tree_leaves(value_of(arg)) if isinstance(x, torch.Tensor)]
            arguments += zip(leaves, self._now(arg), strict=False)
        tracker = RowTracker(self.axes, arguments, self.rowwise.operator)
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

    def _named_fault(self, node: fx.Node, tracker: RowTracker) -> NotRowwise | None:
        """What the operator's name or the user says, before what it decomposes into."""
        opaque = opaque_name(node)
        if opaque is not None:
            tracker.random = True  # it may do anything, so it keeps its place
            return NotRowwise(BreakReason.OPAQUE, f"{opaque} runs as a whole")
        marked = next((name for name in tracker.operators if self.marked.operator(name)), None)
        if self.marked.node(node) or marked:
            return NotRowwise(BreakReason.MARKED, marked or operator_name(node.target))
        if is_attention(node):
            return NotRowwise(BreakReason.ATTENTION, operator_name(node.target))
        if self.rowwise.node(node) and tracker.fault is not None:
            # The user's word covers what rows do, not sizes that depend on data or memory.
            placed = not any(
                isinstance(state, Opaque)
                for arg in node.all_input_nodes
                for state, _ in self._now(arg)
            )
            promotable = (BreakReason.UNKNOWN, BreakReason.CROSSES_TOKENS)
            if placed and tracker.fault.reason in promotable:
                tracker.fault = None
                for leaf in tree_leaves(value_of(node)):
                    if isinstance(leaf, torch.Tensor):
                        tracker.states[id(leaf)] = self.axes.shape_state(leaf)
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
            problem = self.axes.contradiction(tensor, state)
            if problem is not None:
                return NotRowwise(problem.reason, problem.detail)
        return None

    def _mutated(self, node: fx.Node, tracker: RowTracker) -> tuple[int, ...]:
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
        if self.marked.node(node) or self.rowwise.node(node):
            return None
        if any(is_local(state) for arg in node.all_input_nodes for state, _ in self._now(arg)):
            return None  # it may name a sort, which is in no other layer
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
                self._now(leaf)[0],
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


def _storages(node: fx.Node) -> list[int]:
    """The storage behind each tensor in a node's value."""
    return [
        leaf.untyped_storage()._cdata
        for leaf in tree_leaves(value_of(node))
        if isinstance(leaf, torch.Tensor)
    ]


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
