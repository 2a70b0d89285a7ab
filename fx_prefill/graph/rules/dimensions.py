"""Reductions, softmaxes, norms: what works along a dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..verdict import State
from .base import OpCall, for_all, pointwise, refuse_axis, rule


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
    refuse_axis(call, axis, dims, "reduces over the token axis")
    if axis is None or call["keepdim"]:
        return for_all(call, axis)
    return for_all(call, axis.at(axis.dim - sum(dim < axis.dim for dim in dims)))


@rule(
    *(
        "_softmax _log_softmax softmax log_softmax _safe_softmax cumsum cumprod cummax "
        "cummin logcumsumexp argsort topk glu unfold"
    ).split()
)
def _along(call: OpCall) -> Sequence[State]:
    source = call["self"]
    axis = call.axis(source)
    wanted = call["dim"] if call["dim"] is not None else call["dimension"]
    wanted = -1 if wanted is None else wanted
    refuse_axis(call, axis, [wanted % max(source.dim(), 1)], "works along the token axis")
    return for_all(call, axis)


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(call: OpCall) -> Sequence[State]:
    source = call["input"]
    axis = call.axis(source)
    first = source.dim() - len(call["normalized_shape"])
    refuse_axis(call, axis, range(first, source.dim()), "normalises over the token axis")
    if call.axis(call["weight"]) is not None or call.axis(call["bias"]) is not None:
        raise call.crosses("uses a token-shaped weight")
    return for_all(call, axis)


@rule("native_group_norm")
def _group_norm(call: OpCall) -> Sequence[State]:
    axis = call.axis(call["input"])
    if axis is not None and axis.dim != 0:
        raise call.crosses("normalises over the token axis")
    return for_all(call, axis)


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
    refuse_axis(call, axis, [1], "normalises along the token axis")
    return [axis, *([None] * (len(call.outputs) - 1))]
