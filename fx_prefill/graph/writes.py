"""Whether anything in a graph may write to the memory of a value; unknown means yes."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from .normalize import value_of
from .operators import operator_name

IN_PLACE = frozenset(
    "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift iconcat "
    "setitem delitem".split()
)


def is_written(graph: fx.Graph, nodes: Iterable[fx.Node]) -> bool:
    """Whether a node of ``graph`` may write to memory that one of ``nodes`` lives in."""
    memory = frozenset().union(*map(storages, nodes))
    return any(
        may_write(node)
        and not memory.isdisjoint(frozenset().union(*map(storages, node.all_input_nodes)))
        for node in graph.nodes
        if node.op.startswith("call")
    )


def storages(node: fx.Node) -> frozenset[int]:
    """Identities of the memory behind a node's tensors."""
    return frozenset(
        leaf.untyped_storage()._cdata
        for leaf in tree_leaves(value_of(node))
        if isinstance(leaf, torch.Tensor)
    )


def may_write(node: fx.Node) -> bool:
    """Whether a call may change a tensor it is given."""
    name = operator_name(node.target).rpartition("::")[2]
    plain = name.strip("_")
    if node.kwargs.get("out") is not None or plain in IN_PLACE:
        return True
    if node.op == "call_method":
        return name.endswith("_") and not name.endswith("__")
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, o)._schema.is_mutable for o in target.overloads())
    module = getattr(target, "__module__", None) or ""
    if module in ("_operator", "math", "builtins"):
        return False  # and_, or_ and not_ write nothing
    if name.endswith("_") and not name.endswith("__"):
        return True
    if inspect.isbuiltin(target):
        return False
    if module.startswith("torch") and inspect.isfunction(target):
        return bool(_inplace_flag(node))
    return getattr(operator, name, None) is not target


def _inplace_flag(node: fx.Node) -> Any:
    """The value of a function's ``inplace`` argument; True where its signature cannot be read."""
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return True
    return bound.arguments.get("inplace", False)
