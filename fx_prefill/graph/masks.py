"""Takes attention masks that say no more than "causal" out of the graph.

A mask built from the sizes of the call alone (no tensor of the caller's) is a constant for each
token count. Where it is the causal mask, attention told so runs a kernel that skips half of the
work, needs no mask in memory, and reads grouped keys and values as they are. Models build the mask
all the same: some always do while they are compiled. A mask that stays is turned into numbers
once, where attention would do so in each layer.

Note [A claim is checked at every count]

That the mask is causal is seen by computing it: here at a few counts and at the largest bucket, to
decide whether the graph is rewritten, and once at each count that is served
(:meth:`MaskClaim.holds`). A count at which it is not causal (a sliding window shorter than the
forward) does not use the rewritten graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from .normalize import call, value_of
from .operators import short_name
from .symbols import Bindings, evaluate_scalar, expr_of, free_symbols, is_scalar, size_exprs
from .trace import TracedGraph
from .writes import is_written

PURE = frozenset(
    "arange ones zeros full new_ones new_zeros new_full ones_like zeros_like full_like tril triu "
    "add sub mul neg radd rsub eq ne lt le gt ge and and_ or or_ invert "
    "bitwise_and bitwise_or bitwise_not logical_and logical_or logical_not where masked_fill "
    "unsqueeze squeeze view reshape expand expand_as transpose permute contiguous clone getitem "
    "to bool int long float type_as type diff cumsum flip".split()
)
"""Operators a mask may be made of: each gives the same for the same arguments."""

SAMPLES = (2, 3, 7, 33)
LARGEST_SAMPLE = 8192
"""Tokens; the mask of the largest bucket is computed at no more than this."""

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class MaskClaim:
    """A mask that was taken for causal, as a graph from the sizes of a call to the mask."""

    graph: fx.Graph
    token: sympy.Symbol

    def holds(self, sizes: Bindings, device: torch.device | None = None) -> bool:
        """Whether the mask is the causal one at these sizes; computed on ``device`` if given."""
        values: dict[fx.Node, Any] = {}

        def read(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                return values[arg]
            return device if isinstance(arg, torch.device) and device is not None else arg

        with torch.no_grad():
            for node in self.graph.nodes:
                if node.op == "placeholder":
                    values[node] = evaluate_scalar(expr_of(value_of(node)), sizes)
                    continue
                args = fx.node.map_aggregate(node.args, read)
                kwargs = fx.node.map_aggregate(dict(node.kwargs), read)
                if node.op == "output":
                    return is_causal_mask(args[0], sizes[self.token])
                values[node] = call(node, args, kwargs)
        raise AssertionError("a graph without an output")


def is_causal_mask(mask: torch.Tensor, n: int) -> bool:
    """Whether ``[..., n, n]`` lets each row see itself and the rows before it, and no other."""
    if mask.shape[-2:] != (n, n):  # one that is broadcast over rows is not causal
        return False
    seen = torch.ones(n, n, dtype=torch.bool, device=mask.device).tril_()
    if mask.dtype == torch.bool:
        return bool((mask == seen).all())
    wanted = torch.zeros(n, n, dtype=mask.dtype, device=mask.device)
    return bool((mask == wanted.masked_fill_(~seen, float("-inf"))).all())


def drop_causal_masks(traced: TracedGraph, max_tokens: int) -> TracedGraph:
    """Let attention be causal by flag where its mask is causal by value.

    ``max_tokens`` is the largest bucket. The graph is changed in place (it is the copy that
    normalisation made); the claims it now rests on are in ``traced.claims``.
    """
    if traced.token_symbol is None or max_tokens < 1:
        return traced
    claims: dict[fx.Node, MaskClaim | None] = {}
    for node in list(traced.module.graph.nodes):
        attention = _masked_attention(node, traced.token_symbol)
        if attention is None:
            continue
        mask = attention["attn_mask"]
        if mask not in claims:
            claims[mask] = _claim(traced, mask, max_tokens)
        if claims[mask] is not None:
            _rewrite(node, attention)
    for mask, claim in claims.items():
        if claim is not None:
            _erase_unused(traced, mask)
    _share_biases(traced.module.graph)
    return replace(traced, claims=tuple(claim for claim in claims.values() if claim))


# --- recognising --------------------------------------------------------------------------------

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def sdpa_arguments(node: fx.Node) -> dict[str, Any] | None:
    """Arguments of ``scaled_dot_product_attention`` by name; None for any other node."""
    if node.op != "call_function" or short_name(node) != "scaled_dot_product_attention":
        return None
    return {**dict(zip(_PARAMETERS, node.args, strict=False)), **node.kwargs}


def attends_to_itself(given: dict[str, Any], token: sympy.Symbol) -> bool:
    """Whether queries and keys of an attention are the tokens of this forward, all of them."""
    query, key = (value_of(given[name]) for name in ("query", "key"))
    return size_exprs(query)[-2] == token and size_exprs(key)[-2] == token


def _masked_attention(node: fx.Node, token: sympy.Symbol) -> dict[str, Any] | None:
    given = sdpa_arguments(node)
    if given is None or not isinstance(given.get("attn_mask"), fx.Node):
        return None
    if given.get("is_causal", False) or given.get("dropout_p", 0.0) != 0.0:
        return None
    return given if attends_to_itself(given, token) else None


def _claim(traced: TracedGraph, mask: fx.Node, max_tokens: int) -> MaskClaim | None:
    nodes = _made_from_sizes(traced, mask)
    if nodes is None or traced.token_symbol is None or is_written(traced.module.graph, nodes):
        return None
    claim = MaskClaim(_graph_of(nodes), traced.token_symbol)
    for sizes in _samples(traced, max_tokens):
        # On the host: the plan of a model on the meta device must be that of the real one.
        if not claim.holds(sizes, torch.device("cpu")):
            return None
    return claim


def _made_from_sizes(traced: TracedGraph, mask: fx.Node) -> tuple[fx.Node, ...] | None:
    """Nodes computing ``mask``, in order; None where it depends on more than the call's sizes."""
    needed: set[fx.Node] = set()
    front = [mask]
    while front:
        node = front.pop()
        if node in needed:
            continue
        if is_scalar(value_of(node)):
            if not free_symbols(value_of(node)) <= traced.size_symbols:
                return None
            continue  # a number is known to the host, whatever it was read from
        if not node.op.startswith("call") or short_name(node) not in PURE:
            return None
        needed.add(node)
        front.extend(node.all_input_nodes)
    return tuple(node for node in traced.module.graph.nodes if node in needed)


def _graph_of(nodes: tuple[fx.Node, ...]) -> fx.Graph:
    """A copy of nodes, which later stages may rewire, ending in the last one."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}

    def read(arg: fx.Node) -> fx.Node:
        if arg not in env:
            with graph.inserting_before():
                env[arg] = graph.placeholder(arg.name)
                env[arg].meta["example_value"] = value_of(arg)
        return env[arg]

    for node in nodes:
        env[node] = graph.node_copy(node, read)
    graph.output(env[nodes[-1]])
    return graph


def _samples(traced: TracedGraph, max_tokens: int) -> Iterator[dict[sympy.Symbol, int]]:
    assert traced.token_symbol is not None
    for count in dict.fromkeys((*SAMPLES, min(max_tokens, LARGEST_SAMPLE))):
        sizes = {**dict.fromkeys(traced.batch_symbols, 2), traced.token_symbol: count}
        if count > 1 and count <= max_tokens and traced.holds_at(sizes) is None:
            yield sizes


# --- rewriting ----------------------------------------------------------------------------------


def _rewrite(node: fx.Node, given: dict[str, Any]) -> None:
    query, key, value = given["query"], given["key"], given["value"]
    rest = {k: v for k, v in given.items() if k not in ("query", "key", "value", "attn_mask")}
    rest["is_causal"] = True
    plain_key, plain_value = _before_repeat(key), _before_repeat(value)
    grouped = plain_key is not None and plain_value is not None
    # In single precision no kernel but the one that makes all scores takes grouped heads.
    if grouped and value_of(query).dtype in HALF and not rest.get("enable_gqa", False):
        key, value = plain_key, plain_value
        rest["enable_gqa"] = True
    node.args, node.kwargs = (query, key, value), rest


def _erase_unused(traced: TracedGraph, mask: fx.Node) -> None:
    """Drop what only the mask was made of: left in, it would count as a reader of other nodes."""
    for node in reversed(_made_from_sizes(traced, mask) or ()):
        if not node.users:
            traced.module.graph.erase_node(node)


def _share_biases(graph: fx.Graph) -> None:
    """Make what kernels add to the scores of a bool mask once, not once a layer."""
    readers: dict[tuple[fx.Node, torch.dtype], list[fx.Node]] = {}
    for node in graph.nodes:
        given = sdpa_arguments(node)
        mask = None if given is None else given.get("attn_mask")
        if isinstance(mask, fx.Node) and value_of(mask).dtype == torch.bool:
            dtype = value_of(given["query"]).dtype  # type: ignore[index]
            readers.setdefault((mask, dtype), []).append(node)
    for (mask, dtype), attentions in readers.items():
        if len(attentions) < 2 or is_written(graph, (mask,)):
            continue
        with graph.inserting_after(mask):
            bias = graph.call_function(bias_of, (mask, dtype))
        bias.meta = {k: v for k, v in mask.meta.items() if k not in ("example_value", "val")}
        mask_value = value_of(mask)
        with mask_value.fake_mode:
            bias.meta["example_value"] = mask_value.new_empty(mask_value.shape, dtype=dtype)
        for node in attentions:
            node.replace_input_with(mask, bias)


def bias_of(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zero where a bool mask lets a score be, minus infinity where not."""
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(mask.logical_not(), float("-inf"))


def _before_repeat(node: fx.Node) -> fx.Node | None:
    """``[B, H, n, D]`` whose heads ``node`` repeats, each ``r`` times in a row; None if not so."""
    chain = []
    for step in (_merges, _expands, _inserts):
        if not isinstance(node, fx.Node) or not step(node):
            return None
        chain.append(size_exprs(value_of(node)))
        node = node.args[0]  # type: ignore[assignment]
    if not isinstance(node, fx.Node) or not isinstance(value_of(node), torch.Tensor):
        return None
    merged, expanded, inserted = chain
    plain = size_exprs(value_of(node))
    if len(plain) != 4 or len(expanded) != 5:
        return None
    batch, heads, count, width = plain
    repeats = expanded[2]
    fits = (
        inserted == (batch, heads, 1, count, width)
        and expanded == (batch, heads, repeats, count, width)
        and merged == (batch, heads * repeats, count, width)
    )
    return node if fits else None


def _merges(node: fx.Node) -> bool:
    return short_name(node) in ("reshape", "view", "flatten")


def _expands(node: fx.Node) -> bool:
    return short_name(node) == "expand"


def _inserts(node: fx.Node) -> bool:
    """Whether a node only puts a dimension of size 1 behind the heads."""
    if short_name(node) == "unsqueeze":
        return (node.args[1:] or tuple(node.kwargs.values())) in ((2,), (-3,))
    if short_name(node) != "getitem" or not isinstance(node.args[1], tuple):
        return False
    whole = slice(None)
    return node.args[1] in ((whole, whole, None), (whole, whole, None, whole, whole))
