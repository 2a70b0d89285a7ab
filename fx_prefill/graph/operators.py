"""Names of operators: what a node calls, what the user marked, what is an attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

ATTENTION_NAMESPACES = frozenset(
    (
        "flash_attn flash_attn_2 flash_attn_3 flash_attn_4 flashinfer torch_attn "
        "vllm_flash_attn xformers xformers_flash mamba_ssm causal_conv1d fla"
    ).split()
)
ATTENTION_WORDS = ("attention", "attn", "selective_scan", "ssd_chunk", "delta_rule", "linear_scan")


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
    """The operator of a node without its namespace, as shown in tables."""
    name = operator_name(node.target).rpartition("::")[2]
    # ``==`` is recorded as eq by one version of torch and as __eq__ by another.
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


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


def matcher(entries: tuple[Any, ...]) -> Callable[[fx.Node], bool]:
    """A test of a node against the entries of ``break_ops`` or ``rowwise_ops``."""
    entries = tuple(getattr(entry, "_opoverload", entry) for entry in entries)
    predicates = [entry for entry in entries if _is_predicate(entry)]
    operators = [entry for entry in entries if not _is_predicate(entry)]
    names = {_normal(operator_name(entry)) for entry in operators if _has_own_name(entry)}
    identities = {id(entry) for entry in operators}
    # F.linear, x.cumsum(...) and the like are recorded as they are written.
    aten = {name.rpartition("::")[2] for name in names if name.startswith("aten::")}

    def matches(node: fx.Node) -> bool:
        if id(node.target) in identities or _method_of(node) in identities:
            return True
        if not isinstance(node.target, str) and _has_own_name(node.target):
            if _normal(operator_name(node.target)) in names:
                return True
        elif short_name(node) in aten:
            return True
        return any(predicate(node) for predicate in predicates)

    return matches


def aten_matcher(entries: tuple[Any, ...]) -> Callable[[str], bool]:
    """A test of a registered operator's name against the same entries."""
    entries = tuple(getattr(entry, "_opoverload", entry) for entry in entries)
    names = {_normal(operator_name(e)) for e in entries if _has_own_name(e)}
    return lambda name: _normal(name) in names


def _normal(name: str) -> str:
    """One spelling for ``ns::op``, ``ns.op`` and ``ns::op.overload``."""
    namespace, _, rest = name.replace("::", ".").partition(".")
    return f"{namespace}::{rest.partition('.')[0]}"


def _has_own_name(entry: Any) -> bool:
    if isinstance(entry, str):
        return "::" in entry or "." in entry
    return isinstance(entry, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def _method_of(node: fx.Node) -> int | None:
    if node.op != "call_method":
        return None
    return id(getattr(torch.Tensor, str(node.target), None))


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
