"""How each ATen operator carries the token axis, or why it cannot.

A rule gets an :class:`OpCall` and returns the state of every output, or raises NotRowwise. Only
ATen is listed: everything above it is judged by what it decomposes into. What is not listed here
and touches the token axis is unknown, and unknown means break.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils._pytree import tree_leaves

from .symbols import SYMBOLIC, Expr, expr_of, free_symbols, size_exprs
from .verdict import BreakReason, NotRowwise, Opaque, State, TokenAxis, shape_state

INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class OpCall:
    """One ATen call with its arguments by schema name.

    ``states`` gives the state of each tensor argument by ``id``; ``token`` is the token symbol.
    """

    name: str
    named: dict[str, Any]
    out: Any
    states: dict[int, State]
    token: sympy.Symbol | None
    size_symbols: frozenset[sympy.Symbol]

    def __getitem__(self, name: str) -> Any:
        return self.named.get(name)

    def axis(self, tensor: Any) -> TokenAxis | None:
        """Token axis of an argument; raises for one whose shape could not be placed."""
        if not isinstance(tensor, torch.Tensor):
            return None
        state = self.states.get(id(tensor))
        if isinstance(state, Opaque):
            raise NotRowwise(state.reason, f"aten.{self.name} reads a tensor where {state.detail}")
        return state

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor argument, lists flattened."""
        return _flat_tensors(self.named.values())

    @property
    def outputs(self) -> list[torch.Tensor]:
        """Every tensor in the result."""
        return _flat_tensors([self.out])

    def crosses(self, what: str) -> NotRowwise:
        """The error for an operator that mixes tokens."""
        return NotRowwise(BreakReason.CROSSES_TOKENS, f"aten.{self.name} {what}")


def _flat_tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(_flat_tensors(value))
    return found


Rule = Callable[[OpCall], Sequence[State]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule under ATen operator names (without overload or trailing underscore)."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def _same(expr: Expr, other: Expr) -> bool:
    return expr == other or sympy.expand(sympy.sympify(expr) - sympy.sympify(other)) == 0


def _product(sizes: Sequence[Expr]) -> Expr:
    return math.prod(sizes, start=sympy.Integer(1))


def _all(call: OpCall, state: State) -> list[State]:
    return [state] * len(call.outputs)


SIZE_ARGUMENTS = frozenset(
    "size shape stride repeats split_size split_sizes start end N C HxW".split()
)
"""Arguments that are sizes or bounds; the rules of their operators say what they may be."""


def no_host_values(call: OpCall) -> None:
    """Refuse a symbolic number used as a value rather than as a size, in a list or alone."""
    for name, value in call.named.items():
        for leaf in tree_leaves(value):
            if isinstance(leaf, SYMBOLIC) and name not in SIZE_ARGUMENTS:
                raise NotRowwise(
                    BreakReason.HOST_SCALAR,
                    f"aten.{call.name} uses {expr_of(leaf)} as a value ({name})",
                )


def _merge(call: OpCall, rank: int, tensors: Sequence[Any]) -> TokenAxis | None:
    """Common token axis of operands that broadcast to a result of ``rank`` dimensions."""
    merged: TokenAxis | None = None
    for tensor in tensors:
        axis = call.axis(tensor)
        if axis is None:
            continue
        placed = TokenAxis(rank - tensor.dim() + axis.dim, axis.outer)
        if merged is not None and placed != merged:
            raise call.crosses("combines operands whose token axes do not line up")
        merged = placed
    if merged is not None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and call.axis(tensor) is None:
                dim = merged.dim - (rank - tensor.dim())
                if dim >= 0 and size_exprs(tensor)[dim] != 1:
                    raise call.crosses("lines the token axis up with a fixed dimension")
    return merged


def pointwise(call: OpCall) -> Sequence[State]:
    """Elementwise with broadcasting."""
    rank = max((out.dim() for out in call.outputs), default=0)
    return _all(call, _merge(call, rank, call.tensors))


for _name in (
    "where masked_fill copy clone _to_copy lift_fresh lift_fresh_copy alias detach "
    "contiguous to fill zero clamp lerp addcmul addcdiv positive _conj conj "
    "bitwise_not nan_to_num gelu silu relu leaky_relu elu softplus sigmoid tanh mish "
    "hardswish"
).split():
    RULES[_name] = pointwise


# --- shapes -------------------------------------------------------------------------------------


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy")
def _view(call: OpCall) -> Sequence[State]:
    source = call["self"]
    axis = call.axis(source)
    if axis is None:
        return [shape_state(call.out, call.token, call.size_symbols)]
    return [_reshaped(call, axis, size_exprs(source), size_exprs(call.out))]


def _reshaped(call: OpCall, axis: TokenAxis, old: tuple[Expr, ...], new: tuple[Expr, ...]) -> State:
    """The axis after a reshape: what is before and after the tokens must stay so."""
    before = sympy.sympify(_product(old[: axis.dim])) * axis.outer
    after = _product(old[axis.dim + 1 :])
    for dim, size in enumerate(new):
        if call.token not in free_symbols(size):
            continue
        outer = sympy.cancel(sympy.sympify(size) / call.token)
        if call.token in outer.free_symbols or outer.is_integer is False:
            break
        if _same(_product(new[:dim]) * outer, before) and _same(_product(new[dim + 1 :]), after):
            return TokenAxis(dim, int(outer) if outer.is_Integer else outer)
        break
    raise call.crosses(f"folds the token axis with features ({old} -> {new})")


@rule("view.dtype", "view_as_real", "view_as_complex")
def _view_last(call: OpCall) -> Sequence[State]:
    axis = call.axis(call["self"])
    if axis is not None and axis.dim == call["self"].dim() - 1:
        raise call.crosses("reinterprets the token axis")
    return [axis]


@rule("expand")
def _expand(call: OpCall) -> Sequence[State]:
    axis = call.axis(call["self"])
    if axis is None:
        return [shape_state(call.out, call.token, call.size_symbols)]
    return [TokenAxis(call.out.dim() - call["self"].dim() + axis.dim, axis.outer)]


@rule("permute")
def _permute(call: OpCall) -> Sequence[State]:
    axis, rank = call.axis(call["self"]), call["self"].dim()
    if axis is None:
        return [None]
    return [TokenAxis([dim % rank for dim in call["dims"]].index(axis.dim), axis.outer)]


@rule("transpose", "t", "numpy_T", "mT")
def _transpose(call: OpCall) -> Sequence[State]:
    axis, rank = call.axis(call["self"]), call["self"].dim()
    if axis is None:
        return [None]
    first, second = call["dim0"], call["dim1"]
    if first is None:
        first, second = (0, 1) if rank == 2 else (0, 0)
    swap = {first % rank: second % rank, second % rank: first % rank}
    return [TokenAxis(swap.get(axis.dim, axis.dim), axis.outer)]


@rule("unsqueeze")
def _unsqueeze(call: OpCall) -> Sequence[State]:
    axis = call.axis(call["self"])
    if axis is None:
        return [None]
    at = call["dim"] % call.out.dim()
    return [TokenAxis(axis.dim + (at <= axis.dim), axis.outer)]


@rule("squeeze")
def _squeeze(call: OpCall) -> Sequence[State]:
    source = call["self"]
    axis = call.axis(source)
    if axis is None:
        return [None]
    wanted = call["dim"]
    rank = source.dim()
    dims = range(rank) if wanted is None else [wanted] if isinstance(wanted, int) else wanted
    gone = [dim % rank for dim in dims if size_exprs(source)[dim % rank] == 1]
    return [TokenAxis(axis.dim - sum(dim < axis.dim for dim in gone), axis.outer)]


@rule("slice")
def _slice(call: OpCall) -> Sequence[State]:
    source = call["self"]
    axis = call.axis(source)
    dim = (call["dim"] or 0) % source.dim()
    start, end, step = (expr_of(call[name]) for name in ("start", "end", "step"))
    whole = start in (None, 0) and step in (None, 1)
    if axis is None:
        # A fixed table cut to the token count: row i is the table's row i.
        state = shape_state(call.out, call.token, call.size_symbols)
        if isinstance(state, TokenAxis) and not (whole and state.dim == dim):
            raise call.crosses("cuts a table at an offset")
        if state is None and free_symbols((call["start"], call["end"])):
            raise NotRowwise(BreakReason.HOST_SCALAR, "aten.slice at a bound that changes")
        return [state]
    if dim == axis.dim:
        if not (whole and (end is None or end == INT64_MAX or end == size_exprs(source)[dim])):
            raise call.crosses("takes part of the token axis")
    elif free_symbols((call["start"], call["end"])):
        raise NotRowwise(BreakReason.HOST_SCALAR, "aten.slice at a bound that changes")
    return [axis]


def _refuse_axis(call: OpCall, axis: TokenAxis | None, dims: Sequence[int], what: str) -> None:
    if axis is not None and axis.dim in dims:
        raise call.crosses(what)


@rule("select", "unbind")
def _select(call: OpCall) -> Sequence[State]:
    source = call["self"]
    axis = call.axis(source)
    dim = (call["dim"] or 0) % source.dim()
    _refuse_axis(call, axis, [dim], "picks along the token axis")
    if axis is None:
        return _all(call, None)
    return _all(call, TokenAxis(axis.dim - (dim < axis.dim), axis.outer))


@rule("split", "split_with_sizes", "chunk", "tensor_split")
def _split(call: OpCall) -> Sequence[State]:
    source = call["self"]
    axis = call.axis(source)
    _refuse_axis(call, axis, [(call["dim"] or 0) % source.dim()], "splits the token axis")
    if axis is None and any(free_symbols(out) - call.size_symbols for out in call.outputs):
        raise NotRowwise(BreakReason.HOST_SCALAR, "aten.split at a size that changes")
    return _all(call, axis)


@rule("flip", "roll")
def _flip(call: OpCall) -> Sequence[State]:
    axis, rank = call.axis(call["self"]), call["self"].dim()
    dims = [dim % rank for dim in call["dims"] or range(rank)]
    _refuse_axis(call, axis, dims, "moves rows along the token axis")
    return [axis]


@rule("constant_pad_nd")
def _pad(call: OpCall) -> Sequence[State]:
    axis, rank = call.axis(call["self"]), call["self"].dim()
    pad = list(call["pad"])
    padded = [rank - 1 - i // 2 for i, width in enumerate(pad) if width != 0]
    _refuse_axis(call, axis, padded, "pads the token axis")
    return [axis]


@rule("repeat")
def _repeat(call: OpCall) -> Sequence[State]:
    axis = call.axis(call["self"])
    repeats = [expr_of(count) for count in call["repeats"]]
    if axis is None:
        return [shape_state(call.out, call.token, call.size_symbols)]
    dim = len(repeats) - call["self"].dim() + axis.dim
    if free_symbols(tuple(call["repeats"])) - call.size_symbols or call.token in free_symbols(
        tuple(call["repeats"])
    ):
        raise NotRowwise(BreakReason.HOST_SCALAR, "aten.repeat by a count that changes")
    return [TokenAxis(dim, repeats[dim] * axis.outer)]


@rule("cat")
def _cat(call: OpCall) -> Sequence[State]:
    parts = [t for t in call["tensors"] if not _is_empty(t)]
    if not parts:
        return [None]
    dim = (call["dim"] or 0) % parts[0].dim()
    axis = _merge(call, parts[0].dim(), parts)
    if axis is not None and axis.dim == dim and len(parts) > 1:
        raise call.crosses("joins along the token axis")
    return [axis]


def _is_empty(tensor: torch.Tensor) -> bool:
    return any(size == 0 for size in size_exprs(tensor))


@rule("stack")
def _stack(call: OpCall) -> Sequence[State]:
    parts = call["tensors"]
    axis = _merge(call, parts[0].dim(), parts)
    if axis is None:
        return [None]
    at = (call["dim"] or 0) % call.out.dim()
    return [TokenAxis(axis.dim + (at <= axis.dim), axis.outer)]


# --- matrix products ----------------------------------------------------------------------------


def _product_axis(call: OpCall, left: Any, right: Any) -> TokenAxis | None:
    """Axis of ``left @ right`` for 2-D or 3-D operands: rows and columns, never contraction."""
    rank = left.dim()
    row, column = rank - 2, rank - 1
    a, b = call.axis(left), call.axis(right)
    if (a is not None and a.dim == column) or (b is not None and b.dim == row):
        raise call.crosses("contracts over the token axis")
    if a is not None and b is not None:
        if a == b and a.dim < row:
            return a
        raise call.crosses("multiplies every token with every token")
    if (a is not None and a.dim < row) or (b is not None and b.dim < row):
        raise call.crosses("lines the token axis up with a fixed dimension")
    return a if a is not None else b


@rule("mm", "bmm")
def _mm(call: OpCall) -> Sequence[State]:
    return [_product_axis(call, call["self"], call["mat2"])]


@rule("addmm", "baddbmm")
def _addmm(call: OpCall) -> Sequence[State]:
    left, right = call["mat1"], call["mat2"]
    if left is None:
        left, right = call["batch1"], call["batch2"]
    axis = _product_axis(call, left, right)
    bias = call["self"]
    if call.axis(bias) is not None and call.axis(bias) != axis:
        raise call.crosses("adds a bias whose token axis does not line up")
    return [axis]


@rule("_scaled_mm")
def _scaled_mm(call: OpCall) -> Sequence[State]:
    axis = _product_axis(call, call["self"], call["mat2"])
    for name in ("scale_a", "scale_b", "bias"):
        scale = call.axis(call[name])
        if scale is not None and scale != axis:
            raise call.crosses("is scaled along another axis than its rows")
    return [axis]


@rule("mv")
def _mv(call: OpCall) -> Sequence[State]:
    matrix, vector = call.axis(call["self"]), call.axis(call["vec"])
    if vector is not None or (matrix is not None and matrix.dim == 1):
        raise call.crosses("contracts over the token axis")
    return [matrix]


@rule("linear")
def _linear(call: OpCall) -> Sequence[State]:
    axis = call.axis(call["input"])
    if call.axis(call["weight"]) is not None or call.axis(call["bias"]) is not None:
        raise call.crosses("uses a token-shaped weight")
    _refuse_axis(call, axis, [call["input"].dim() - 1], "contracts over the token axis")
    return [axis]


@rule("convolution")
def _convolution(call: OpCall) -> Sequence[State]:
    axis = call.axis(call["input"])
    if call.axis(call["weight"]) is not None or (axis is not None and axis.dim != 0):
        raise call.crosses("slides over the token axis")
    return [axis]


# --- along a dimension --------------------------------------------------------------------------


def _dims(call: OpCall, tensor: torch.Tensor) -> list[int]:
    """Normalised ``dim`` argument; all dimensions when it is absent or empty."""
    wanted = call["dim"]
    rank = max(tensor.dim(), 1)
    if wanted is None or wanted == []:
        return list(range(rank))
    return [dim % rank for dim in ([wanted] if isinstance(wanted, int) else wanted)]


@rule(
    *(
        "sum nansum mean nanmean amax amin prod any all var std var_mean std_mean "
        "logsumexp norm linalg_vector_norm max min argmax argmin median nanmedian mode "
        "kthvalue aminmax count_nonzero"
    ).split()
)
def _reduction(call: OpCall) -> Sequence[State]:
    if call["other"] is not None:  # max.other and min.other are elementwise
        return pointwise(call)
    source = call["self"]
    axis = call.axis(source)
    dims = _dims(call, source)
    _refuse_axis(call, axis, dims, "reduces over the token axis")
    if axis is None or call["keepdim"]:
        return _all(call, axis)
    return _all(call, TokenAxis(axis.dim - sum(dim < axis.dim for dim in dims), axis.outer))


@rule(
    *(
        "_softmax _log_softmax softmax log_softmax _safe_softmax cumsum cumprod cummax "
        "cummin logcumsumexp sort argsort topk glu unfold"
    ).split()
)
def _along(call: OpCall) -> Sequence[State]:
    source = call["self"]
    axis = call.axis(source)
    wanted = call["dim"] if call["dim"] is not None else call["dimension"]
    wanted = -1 if wanted is None else wanted
    _refuse_axis(call, axis, [wanted % max(source.dim(), 1)], "works along the token axis")
    return _all(call, axis)


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(call: OpCall) -> Sequence[State]:
    source = call["input"]
    axis = call.axis(source)
    first = source.dim() - len(call["normalized_shape"])
    _refuse_axis(call, axis, range(first, source.dim()), "normalises over the token axis")
    if call.axis(call["weight"]) is not None or call.axis(call["bias"]) is not None:
        raise call.crosses("uses a token-shaped weight")
    return _all(call, axis)


@rule("native_group_norm")
def _group_norm(call: OpCall) -> Sequence[State]:
    axis = call.axis(call["input"])
    if axis is not None and axis.dim != 0:
        raise call.crosses("normalises over the token axis")
    return _all(call, axis)


@rule(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_no_update",
)
def _batch_norm(call: OpCall) -> Sequence[State]:
    axis = call.axis(call["input"])
    if call["training"]:
        raise call.crosses("takes its statistics over all rows")
    _refuse_axis(call, axis, [1], "normalises along the token axis")
    return [axis, *([None] * (len(call.outputs) - 1))]


# --- gathers ------------------------------------------------------------------------------------


@rule("embedding")
def _embedding(call: OpCall) -> Sequence[State]:
    if call.axis(call["weight"]) is not None:
        raise call.crosses("looks rows up in a token-shaped table")
    return [call.axis(call["indices"])]


@rule("index_select")
def _index_select(call: OpCall) -> Sequence[State]:
    source, index = call.axis(call["self"]), call.axis(call["index"])
    dim = call["dim"] % call["self"].dim()
    if source is None:
        return [None if index is None else TokenAxis(dim, index.outer)]
    if index is not None or source.dim == dim:
        raise call.crosses("picks rows along the token axis")
    return [source]


@rule("index", "_unsafe_index")
def _index(call: OpCall) -> Sequence[State]:
    source, indices = call["self"], call["indices"]
    where = [dim for dim, index in enumerate(indices) if index is not None]
    if any(indices[dim].dtype in (torch.bool, torch.uint8) for dim in where):
        raise NotRowwise(BreakReason.DATA_DEPENDENT, "aten.index by a mask")
    rank = max(indices[dim].dim() for dim in where)
    picked = _merge(call, rank, [indices[dim] for dim in where])
    axis = call.axis(source)
    if axis is None and picked is None:
        return [None]
    if where != list(range(where[0], where[0] + len(where))):
        raise NotRowwise(BreakReason.UNKNOWN, "aten.index with separated index tensors")
    if axis is None and picked is not None:
        return [TokenAxis(where[0] + picked.dim, picked.outer)]
    if axis is None or picked is not None or axis.dim in where:
        raise call.crosses("picks rows along the token axis")
    moved = axis.dim if axis.dim < where[0] else axis.dim - len(where) + rank
    return [TokenAxis(moved, axis.outer)]


@rule("gather")
def _gather(call: OpCall) -> Sequence[State]:
    source, index = call.axis(call["self"]), call.axis(call["index"])
    dim = call["dim"] % max(call["self"].dim(), 1)
    if source is None and (index is None or index.dim == dim):
        return [index]
    if source != index or (source is not None and source.dim == dim):
        raise call.crosses("picks rows along the token axis")
    return [source]


@rule("scatter", "scatter_add", "scatter_reduce")
def _scatter(call: OpCall) -> Sequence[State]:
    axis = call.axis(call["self"])
    dim = call["dim"] % max(call["self"].dim(), 1)
    _refuse_axis(call, axis, [dim], "writes along the token axis")
    for operand in (call["index"], call["src"]):
        if isinstance(operand, torch.Tensor) and call.axis(operand) != axis:
            raise call.crosses("writes operands whose token axes do not line up")
    return [axis]


# --- creation -----------------------------------------------------------------------------------


@rule(
    *(
        "full zeros ones empty new_zeros new_ones new_full new_empty empty_strided "
        "new_empty_strided scalar_tensor"
    ).split()
)
def _create(call: OpCall) -> Sequence[State]:
    return [shape_state(call.out, call.token, call.size_symbols)]


@rule(*["empty_like", "zeros_like", "ones_like", "full_like"])
def _create_like(call: OpCall) -> Sequence[State]:
    return [call.axis(call["self"])]


@rule("arange")
def _arange(call: OpCall) -> Sequence[State]:
    if isinstance(call["start"], SYMBOLIC):
        raise NotRowwise(BreakReason.HOST_SCALAR, f"aten.arange from {expr_of(call['start'])}")
    if free_symbols(call["end"]) - call.size_symbols:
        raise NotRowwise(BreakReason.HOST_SCALAR, f"aten.arange to {expr_of(call['end'])}")
    return [shape_state(call.out, call.token, call.size_symbols)]
