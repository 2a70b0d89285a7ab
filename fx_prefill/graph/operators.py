"""Names of operators: what a node calls, what the user marked, what is an attention."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch import fx

from ..opaque.calls import opaque_name

ATTENTION_NAMESPACES = frozenset(
    (
        "flash_attn flash_attn_2 flash_attn_3 flash_attn_4 flashinfer torch_attn "
        "vllm_flash_attn xformers xformers_flash mamba_ssm causal_conv1d fla"
    ).split()
)
ATTENTION_WORDS = ("attention", "attn", "selective_scan", "ssd_chunk", "delta_rule", "linear_scan")

EXPERT_FUNCTIONS = frozenset(("vllm::outplace_fused_experts", "sglang::outplace_fused_experts"))
"""Whole mixtures of experts in one operator, rows in and rows out. Nobody can look inside them, and
some of their quantised modes take a scale over all rows: that they keep rows apart is believed only
until ``execution/verify.py`` has checked the segment."""

GROUPED = EXPERT_FUNCTIONS | {
    f"aten::{name}"
    for name in ("_grouped_mm", "index_add", "index_add_", "index_put", "index_put_")
}
"""Operators that may round a row otherwise when other rows fall into its group."""


def operator_name(target: Any) -> str:
    """``namespace::name`` for registered operators, a plain name for functions and methods."""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order::{target.name()}"
    return getattr(target, "__name__", None) or type(target).__name__


def short_name(node: fx.Node) -> str:
    """The operator of a node without its namespace, or the module it runs, as shown in tables."""
    opaque = opaque_name(node)
    if opaque is not None:
        return opaque
    name = operator_name(node.target).rpartition("::")[2]
    # ``==`` is recorded as eq by one version of torch and as __eq__ by another.
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def torch_name(node: fx.Node) -> str:
    """The operator of a node that is PyTorch's own, in any spelling; empty for those of others.

    What somebody else calls ``select`` or ``flatten`` may do anything.
    """
    target = node.target
    if node.op == "call_method":
        return str(target)
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        namespace, _, name = operator_name(target).rpartition("::")
        return name if namespace == "aten" else ""
    return short_name(node) if target is operator.getitem or _is_torch_function(target) else ""


def is_attention(node: fx.Node) -> bool:
    """Whether a node's operator mixes tokens by its purpose, in any spelling known here."""
    name = operator_name(node.target)
    namespace, _, short = name.rpartition("::")
    if namespace in ATTENTION_NAMESPACES:
        return True
    if node.op == "call_method":
        return False
    registered = bool(namespace) or inspect.isbuiltin(node.target)
    torch_function = (getattr(node.target, "__module__", None) or "").startswith("torch.")
    return (registered or torch_function) and any(word in short for word in ATTENTION_WORDS)


class Matcher:
    """Tests nodes against the entries of ``break_ops`` or ``rowwise_ops``; knows what matched."""

    def __init__(self, entries: tuple[Any, ...]) -> None:
        # An operator made by torch.library.custom_op keeps the registered one inside.
        self._entries = [getattr(entry, "_opoverload", entry) for entry in entries]
        self._matched: set[int] = set()

    def node(self, node: fx.Node) -> bool:
        """Whether an entry names the operator of a node, or a predicate accepts the node."""
        return self._note([_names(entry, node) for entry in self._entries])

    def operator(self, name: str) -> bool:
        """Whether an entry names a registered operator that a node decomposes into."""
        return self._note([_has_own_name(e) and _same_name(e, name) for e in self._entries])

    def unmatched(self) -> tuple[str, ...]:
        """Entries that never matched anything."""
        left = [e for i, e in enumerate(self._entries) if i not in self._matched]
        return tuple(operator_name(entry) for entry in left)

    def _note(self, hits: list[bool]) -> bool:
        self._matched.update(index for index, hit in enumerate(hits) if hit)
        return any(hits)


def _names(entry: Any, node: fx.Node) -> bool:
    if _is_predicate(entry):
        return bool(entry(node))
    if node.target is entry or (node.op == "call_method" and _method_of(node) is entry):
        return True
    if _is_torch_function(entry):
        written = node.op == "call_method" or _is_torch_function(node.target)
        return written and entry.__name__ == short_name(node)
    if not _has_own_name(entry):
        return False
    if not isinstance(node.target, str) and _has_own_name(node.target):
        return _same_name(entry, operator_name(node.target))
    # F.linear, x.cumsum(...) and the like are recorded as they are written.
    namespace, _, short = _normal(operator_name(entry)).rpartition("::")
    return namespace == "aten" and short == short_name(node)


def _is_torch_function(entry: Any) -> bool:
    """``torch.cumsum``, ``torch.Tensor.cumsum`` and the like: one operator in several spellings."""
    name = getattr(entry, "__name__", None)
    homes = (torch, torch.Tensor, torch.nn.functional)
    return isinstance(name, str) and any(getattr(home, name, None) is entry for home in homes)


def _same_name(entry: Any, name: str) -> bool:
    return _normal(operator_name(entry)) == _normal(name)


def _normal(name: str) -> str:
    """One spelling for ``ns::op``, ``ns.op`` and ``ns::op.overload``."""
    namespace, _, rest = name.replace("::", ".").partition(".")
    return f"{namespace}::{rest.partition('.')[0]}"


def _has_own_name(entry: Any) -> bool:
    if isinstance(entry, str):
        return "::" in entry or "." in entry
    return isinstance(entry, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def _method_of(node: fx.Node) -> Any:
    return getattr(torch.Tensor, str(node.target), None)


def _is_predicate(entry: Any) -> bool:
    """Lambdas, and functions of one parameter called ``node`` or annotated fx.Node, decide."""
    if not inspect.isfunction(entry):
        return False
    if entry.__name__ == "<lambda>":
        return True
    parameters = list(inspect.signature(entry).parameters.values())
    if len(parameters) != 1:
        return False
    annotation = parameters[0].annotation
    return parameters[0].name == "node" or annotation in (fx.Node, "fx.Node", "torch.fx.Node")
