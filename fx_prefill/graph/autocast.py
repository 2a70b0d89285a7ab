"""Autocast regions inside a model, as a property of each node instead of two nodes around many.

Dynamo records ``with torch.autocast(...)`` as an enter and an exit node. Cut anywhere between the
two, every later operator would run without it. So the pair is taken out, each node remembers what
autocast is to it, and a partition enters and leaves around its own nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx

ENTER = torch.amp.autocast_mode._enter_autocast
EXIT = torch.amp.autocast_mode._exit_autocast
META = "fx_prefill_autocast"

Autocast = tuple[tuple[Any, ...], ...]
"""Arguments of the enter calls in force, outermost first."""


def lift_regions(graph: fx.Graph) -> None:
    """Replace enter and exit nodes by a mark on the nodes between them.

    A region that leaves autocast as it is around the whole graph marks nothing.
    """
    stack: list[tuple[fx.Node, tuple[Any, ...]]] = []
    for node in list(graph.nodes):
        if node.target is ENTER:
            stack.append((node, tuple(node.args)))
        elif node.target is EXIT:
            stack = [entry for entry in stack if entry[0] is not node.args[0]]
        elif node.op in ("call_function", "call_method"):
            node.meta[META] = _without_effect_removed(tuple(args for _, args in stack))
    for node in reversed(graph.nodes):
        if node.target is ENTER or node.target is EXIT:
            graph.erase_node(node)


def _without_effect_removed(stack: Autocast) -> Autocast:
    changes = {args[0]: args[2] if len(args) > 2 else True for args in stack}
    ambient = all(
        not enabled and not torch.is_autocast_enabled(device) for device, enabled in changes.items()
    )
    return () if ambient else stack


def autocast_of(node: fx.Node) -> Autocast:
    """What autocast is to a node; empty when it is as around the graph."""
    return node.meta.get(META, ())


@contextmanager
def entered(autocast: Autocast) -> Iterator[None]:
    """Run under a node's autocast."""
    with ExitStack() as stack:
        for args in autocast:
            stack.callback(EXIT, ENTER(*args))
        yield


def copy_under_autocast(graph: fx.Graph, nodes: Sequence[fx.Node], copy: Any) -> None:
    """Call ``copy(node)`` for each node, with enter and exit nodes around runs that need them."""
    current: Autocast = ()
    entries: list[fx.Node] = []
    for node in nodes:
        wanted = autocast_of(node)
        if wanted != current:
            _leave(graph, entries)
            entries = [graph.call_function(ENTER, args) for args in wanted]
            current = wanted
        copy(node)
    _leave(graph, entries)


def _leave(graph: fx.Graph, entries: list[fx.Node]) -> None:
    for entry in reversed(entries):
        graph.call_function(EXIT, (entry,))
