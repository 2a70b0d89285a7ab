"""Brings a Dynamo graph into the few forms the analysis reads.

The caller's graph is never touched: it stays whole for eager fallback, and a copy is rewritten.

* nested regions (``invoke_subgraph``, activation checkpointing) are inlined, so that attention
  inside them is seen;
* module floats that ``dynamic=True`` turned into 0-d tensors become Python numbers again;
* autocast regions become marks on their nodes;
* nodes that only set interpreter state (grad mode, API logging) are dropped: everything here is
  compiled and run without gradients;
* a ``cat`` with nothing (a KV cache filled for the first time) becomes a copy;
* a tuple of tensors is only ever read through ``getitem``, so that no tuple has to cross a
  partition boundary.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..errors import GraphError
from .autocast import autocast_of, entered, lift_regions
from .symbols import SYMBOLIC, is_scalar

INLINED = ("invoke_subgraph", "wrap", "tag_activation_checkpoint")
DROPPED = (torch._C._log_api_usage_once, torch._C._set_grad_enabled)
MISSING = object()


def value_of(node: fx.Node) -> Any:
    """The fake value Dynamo recorded for ``node``, or MISSING."""
    return node.meta.get("example_value", node.meta.get("val", MISSING))


def find_fake_mode(graph: fx.Graph) -> FakeTensorMode | None:
    """The fake mode the graph was traced under; None for a graph without tensors."""
    for node in graph.nodes:
        for leaf in torch.utils._pytree.tree_leaves(value_of(node)):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return None


def normalize(
    gm: fx.GraphModule, fake_mode: FakeTensorMode | None, folded: dict[int, float]
) -> fx.GraphModule:
    """A rewritten copy of ``gm``; ``folded`` maps placeholder index to the float it holds."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = fx.GraphModule(gm, graph)
    _refuse_transforms(copy.graph)
    _inline_regions(copy)
    _drop_state_nodes(copy.graph)
    lift_regions(copy.graph)
    _fold_floats(copy.graph, folded)
    _propagate_missing(copy, fake_mode)
    _drop_empty_parts(copy.graph)
    _untuple(copy.graph)
    copy.graph.lint()
    copy.recompile()
    return copy


def _refuse_transforms(graph: fx.Graph) -> None:
    """A vmap or grad inside the graph wraps every tensor between two state calls."""
    for node in graph.nodes:
        if "increment_nesting" in getattr(node.target, "__name__", ""):
            raise GraphError(
                f"the graph holds a function transform ({node.target.__name__}), whose tensors "
                "cannot be read one by one; move torch.vmap or torch.func out of the model"
            )


def _inline_regions(gm: fx.GraphModule) -> None:
    """Replace each nested region by its body, again and again until none is left."""
    while calls := [node for node in gm.graph.nodes if _is_region(node)]:
        for call in calls:
            _inline(gm, call)


def _is_region(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.HigherOrderOperator)
        and node.target.name() in INLINED
    )


def _inline(gm: fx.GraphModule, call: fx.Node) -> None:
    region = call.args[0]
    if not isinstance(region, fx.Node) or region.op != "get_attr":
        raise GraphError(f"region {call.format_node()} has no graph of its own to inline")
    body = gm.get_submodule(str(region.target))
    skip = 2 if call.target.name() == "invoke_subgraph" else 1  # type: ignore[union-attr]
    operands = list(call.args[skip:])
    mapping: dict[fx.Node, Any] = {}
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:  # type: ignore[union-attr]
            if node.op == "placeholder":
                mapping[node] = operands.pop(0)
            elif node.op == "output":
                results = fx.map_arg(node.args[0], mapping.__getitem__)
            else:
                mapping[node] = _copy_into(gm, body, node, mapping)  # type: ignore[arg-type]
    _replace_results(call, results)
    gm.graph.erase_node(call)
    if not region.users:
        gm.graph.erase_node(region)


def _copy_into(
    gm: fx.GraphModule, body: fx.GraphModule, node: fx.Node, mapping: dict[fx.Node, Any]
) -> fx.Node:
    copied = gm.graph.node_copy(node, mapping.__getitem__)
    # The body was traced once for all its calls: its recorded values alias one another across
    # calls, which would look like shared memory. They are computed again for this call.
    copied.meta.pop("example_value", None)
    copied.meta.pop("val", None)
    if node.op == "get_attr":
        copied.target = _adopt(gm, body, str(node.target))
    return copied


def _adopt(gm: fx.GraphModule, body: fx.GraphModule, name: str) -> str:
    owner: Any = body
    for part in name.split("."):
        owner = getattr(owner, part)
    taken = f"_inlined_{name.replace('.', '_')}"
    index = 0
    while hasattr(gm, f"{taken}_{index}") and getattr(gm, f"{taken}_{index}") is not owner:
        index += 1
    setattr(gm, f"{taken}_{index}", owner)
    return f"{taken}_{index}"


def _replace_results(call: fx.Node, results: Any) -> None:
    if isinstance(results, fx.Node):
        call.replace_all_uses_with(results)
        return
    for user in list(call.users):
        if user.target is not operator.getitem:
            raise GraphError(
                f"{user.format_node()} reads all results of the region {call.name} at once; "
                "only single results can be read when a region is inlined"
            )
        user.replace_all_uses_with(results[user.args[1]])
        user.graph.erase_node(user)


def _drop_state_nodes(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in DROPPED and not node.users:
            graph.erase_node(node)


def _fold_floats(graph: fx.Graph, folded: dict[int, float]) -> None:
    """Turn ``.item()`` of a 0-d float input back into the number it holds."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for index, number in folded.items():
        for user in list(placeholders[index].users):
            if user.op == "call_method" and user.target == "item":
                _replace_by_number(user, number)


def _replace_by_number(node: fx.Node, number: Any) -> None:
    users = list(node.users)

    def swap(arg: fx.Node) -> Any:
        return number if arg is node else arg

    for user in users:
        user.args = fx.map_arg(user.args, swap)
        user.kwargs = fx.map_arg(user.kwargs, swap)
    node.graph.erase_node(node)
    for user in users:
        if _is_host_arithmetic(user) and not user.all_input_nodes:
            _replace_by_number(user, user.target(*user.args, **user.kwargs))  # type: ignore[operator]


def _is_host_arithmetic(node: fx.Node) -> bool:
    if node.op != "call_function" or not is_scalar(value_of(node)):
        return False
    module = getattr(node.target, "__module__", None)
    return module in ("_operator", "math", "builtins") or node.target in (
        torch.sym_float,
        torch.sym_int,
        torch.sym_max,
        torch.sym_min,
        math.sqrt,
    )


def _propagate_missing(gm: fx.GraphModule, fake_mode: FakeTensorMode | None) -> None:
    """Compute fake values for nodes that a pass or an inlining left without one."""
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output") and value_of(node) is MISSING:
            node.meta["example_value"] = _run_fake(gm, node, fake_mode)


def _run_fake(gm: fx.GraphModule, node: fx.Node, fake_mode: FakeTensorMode | None) -> Any:
    if node.op == "get_attr":
        owner: Any = gm
        for part in str(node.target).split("."):
            owner = getattr(owner, part)
        if isinstance(owner, torch.Tensor) and fake_mode is not None:
            return fake_mode.from_tensor(owner, static_shapes=True)
        return owner
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    with ExitStack() as stack:
        if fake_mode is not None:
            stack.enter_context(fake_mode)
            if fake_mode.shape_env is not None:
                stack.enter_context(fake_mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(torch.no_grad())
        stack.enter_context(entered(autocast_of(node)))
        return call(node, args, kwargs)


def call(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a call node's operator on given arguments."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_function":
        return node.target(*args, **kwargs)  # type: ignore[operator]
    raise GraphError(f"cannot run a {node.op} node: {node.format_node()}")


def _drop_empty_parts(graph: fx.Graph) -> None:
    """Turn a ``cat`` of empty tensors and one other into a copy of that one.

    A KV cache that is filled for the first time puts the new rows behind nothing.
    """
    for node in graph.nodes:
        parts = node.args[0] if node.op == "call_function" and node.args else None
        if node.target is not torch.cat or not isinstance(parts, (list, tuple)):
            continue
        if not set(node.kwargs) <= {"dim", "axis"}:
            continue
        values = [value_of(part) for part in parts if isinstance(part, fx.Node)]
        full = [part for part in parts if not _is_empty(value_of(part))]
        result = value_of(node)
        if len(values) != len(parts) or len(full) != 1 or len(parts) < 2:
            continue
        if value_of(full[0]).dtype == result.dtype and result.is_contiguous():
            node.target = torch.clone
            node.args, node.kwargs = (full[0],), {"memory_format": torch.contiguous_format}


def _is_empty(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and any(
        isinstance(size, int) and size == 0 for size in value.shape
    )


def _untuple(graph: fx.Graph) -> None:
    """Give every reader of a whole tuple the tuple's items instead."""
    for node in list(graph.nodes):
        value = value_of(node)
        if not isinstance(value, (tuple, list)) or not any(
            isinstance(item, (torch.Tensor, *SYMBOLIC)) for item in value
        ):
            continue
        readers = [user for user in node.users if user.target is not operator.getitem]
        if readers:
            items = _items_of(graph, node, value)
            for reader in readers:
                reader.args = _swap(reader.args, node, items)
                reader.kwargs = _swap(reader.kwargs, node, items)


def _items_of(graph: fx.Graph, node: fx.Node, value: Sequence[Any]) -> list[fx.Node]:
    items = []
    with graph.inserting_after(node):
        for index in reversed(range(len(value))):
            item = graph.call_function(operator.getitem, (node, index))
            item.meta = dict(node.meta)
            item.meta["example_value"] = value[index]
            items.append(item)
    return items[::-1]


def _swap(args: Any, node: fx.Node, items: list[fx.Node]) -> Any:
    """``args`` with ``node`` replaced by the list of its items, at any depth."""
    if args is node:
        return list(items)
    if isinstance(args, (tuple, list)):
        return type(args)(_swap(arg, node, items) for arg in args)
    if isinstance(args, dict):
        return {key: _swap(arg, node, items) for key, arg in args.items()}
    if isinstance(args, slice):
        return slice(*(_swap(a, node, items) for a in (args.start, args.stop, args.step)))
    return args
