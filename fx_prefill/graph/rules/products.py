"""Matrix products and convolutions: tokens as rows, never as contraction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..verdict import State, TokenAxis
from .base import OpCall, refuse_axis, rule


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
    refuse_axis(call, axis, [call["input"].dim() - 1], "contracts over the token axis")
    return [axis]


@rule("convolution")
def _convolution(call: OpCall) -> Sequence[State]:
    axis = call.axis(call["input"])
    if call.axis(call["weight"]) is not None or (axis is not None and axis.dim != 0):
        raise call.crosses("slides over the token axis")
    return [axis]
