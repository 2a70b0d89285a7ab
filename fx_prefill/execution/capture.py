"""Records a segment once and replays it; the one file that will call CUDA graphs.

Note [Addresses are fixed]

A recording reads its inputs at fixed addresses and writes its outputs at fixed addresses. On a CPU
that is done by copying; everything around it (buckets, buffers, handoffs, tails) is the same for
both, and so is tested on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .buffers import copy_into
from .compile import SegmentFn


class Recording(Protocol):
    """A segment bound to its memory."""

    def replay(self) -> None:
        """Compute the outputs from what the inputs hold now."""


class Recorder(Protocol):
    """Makes recordings for one device."""

    def record(
        self, function: SegmentFn, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]
    ) -> Recording:
        """Bind ``function`` to inputs and outputs whose addresses will not change."""


class CopyRecording:
    """Runs the segment again and copies its results to their addresses."""

    __slots__ = ("_function", "_inputs", "_outputs")

    def __init__(
        self, function: SegmentFn, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]
    ) -> None:
        self._function = function
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)

    def replay(self) -> None:
        results = self._function(*self._inputs)
        for target, result in zip(self._outputs, results, strict=True):
            copy_into(target, result)


class CopyRecorder:
    """Recorder without device graphs."""

    def record(
        self, function: SegmentFn, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]
    ) -> CopyRecording:
        return CopyRecording(function, inputs, outputs)
