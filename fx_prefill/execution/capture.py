"""Records a segment once and replays it; the one file that knows CUDA graphs.

Note [Addresses are fixed]

A recording reads its inputs at fixed addresses and leaves its outputs at fixed addresses. A CPU
does that by copying into buffers given to it, a GPU by capturing into a private memory pool. All
that is around it (buckets, handoffs, tails, liveness) is the same for both, and so is tested on a
CPU.

Note [Outputs in the pool are not owned]

All buckets capture into one pool. An output's memory is held by its recording only until the last
segment that may run before its last reader has been captured; then it is given back, and later
captures use it again. Readers have a tensor over the same address that owns nothing. That is safe
because the pool serves captures alone, the graphs keep it alive, and a plan's replays and breaks
run in plan order on one stream.

Note [A capture that cannot be ended]

What a capture forbids (a synchronisation, say) makes it invalid, and then PyTorch's ``capture_end``
raises before it has undone what ``capture_begin`` did: the allocator goes on recording to the pool,
the pool has a user that never leaves, and (on torch 2.11) the device's random number generator
believes that it is being captured, so that every random number of the process raises from then on.
The first two are undone by hand, the last by a capture that ends. Later captures take another pool,
as one that has lost its last user cannot be used again.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ..errors import CaptureError
from .buffers import writer
from .compile import BoundSegment, SegmentFn

log = logging.getLogger(__name__)


class Recording(Protocol):
    """A segment bound to its memory.

    ``outputs`` are bucket-sized tensors at fixed addresses; ``replay`` computes them from what the
    inputs hold now.
    """

    outputs: tuple[torch.Tensor, ...]

    def replay(self) -> None:
        """Launch the segment."""

    def release(self, index: int) -> None:
        """Let later recordings use the memory of one output."""


class Recorder(Protocol):
    """Makes recordings for one device."""

    takes_buffers: bool
    """Whether outputs go to buffers given to ``record``, or to memory of the recorder's own."""

    def record(
        self, segment: BoundSegment, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]
    ) -> Recording:
        """Record ``segment`` on inputs whose addresses will not change."""

    def is_capturing(self) -> bool:
        """Whether the caller is recording something of its own right now."""

    def order(self) -> None:
        """Make this call's device work come after that of the last call."""

    def num_bytes(self) -> int:
        """Bytes of memory of the recorder's own."""


def whole_graph(function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """``function`` as one CUDA graph in a pool of its own; itself where there are no graphs.

    For measuring what a replay is compared with.
    """
    if device.type != "cuda":
        return function
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def recorder_for(device: torch.device) -> Recorder:
    """The recorder of a device: CUDA graphs on a GPU, copies elsewhere."""
    return CudaGraphRecorder(device) if device.type == "cuda" else CopyRecorder()


# --- without device graphs ----------------------------------------------------------------------


class CopyRecording:
    """Runs the segment again and copies its results to their addresses."""

    def __init__(
        self, function: SegmentFn, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]
    ) -> None:
        self.outputs = tuple(outputs)
        self._function = function
        self._inputs = tuple(inputs)
        self._writers = [writer(output) for output in outputs]

    def replay(self) -> None:
        results = self._function(*self._inputs)
        for write, result in zip(self._writers, results, strict=True):
            write(result)

    def release(self, index: int) -> None:
        """Buffers are shared by the memory plan; there is nothing to give back."""


class CopyRecorder:
    """Recorder without device graphs."""

    takes_buffers = True

    def record(
        self, segment: BoundSegment, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]
    ) -> CopyRecording:
        return CopyRecording(segment.run, inputs, outputs)

    def is_capturing(self) -> bool:
        return False

    def order(self) -> None:
        """Host work is in order."""

    def num_bytes(self) -> int:
        return 0


# --- CUDA graphs --------------------------------------------------------------------------------


class CudaGraphRecording:
    """One captured segment."""

    def __init__(self, graph: torch.cuda.CUDAGraph, owned: Sequence[torch.Tensor]) -> None:
        # Without the Python method around the C++ one, unless it has something to watch.
        watched = getattr(graph, "_tracker", None) is not None
        self.replay = graph.replay if watched else super(torch.cuda.CUDAGraph, graph).replay
        self.outputs = tuple(_unowned(tensor) for tensor in owned)
        self._owned: list[torch.Tensor | None] = list(owned)

    def release(self, index: int) -> None:
        self._owned[index] = None


class CudaGraphRecorder:
    """Captures segments into one pool, on one side stream."""

    takes_buffers = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._pools = [self._pool]
        self._scratch = torch.zeros(1, device=device)
        self._order = StreamOrder(device)

    def record(
        self, segment: BoundSegment, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]
    ) -> CudaGraphRecording:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(self._stream):
                segment.warm_up(*inputs)  # compiles, tunes and loads all that the capture needs
                recording = self._capture(segment.run, inputs)
                # Later recordings warm up on these outputs: they must hold what a segment computes.
                recording.replay()
        finally:
            current.wait_stream(self._stream)
        return recording

    def _capture(self, function: SegmentFn, inputs: Sequence[Any]) -> CudaGraphRecording:
        graph = torch.cuda.CUDAGraph()
        with _no_garbage_collection():
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                results = _apart(function(*inputs), inputs)
                graph.capture_end()
            except Exception as error:
                self._abandon(graph)
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise CaptureError(
                    f"a segment cannot be captured: {type(error).__name__}: {error}"
                ) from error
        return CudaGraphRecording(graph, results)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed and undo what it began; what matters was raised already."""
        try:
            graph.capture_end()
        except RuntimeError as error:
            log.debug("ending a failed capture: %s", str(error))
            self._undo_begin()
        graph.reset()

    def _undo_begin(self) -> None:
        """Note [A capture that cannot be ended]."""
        device = self._scratch.device.index
        try:
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)
        except RuntimeError as error:  # it ended, or had not begun
            log.debug("the allocator was not recording: %s", str(error))
        self._pool = torch.cuda.graph_pool_handle()  # the old one may have lost its last user
        self._pools.append(self._pool)
        clean = torch.cuda.CUDAGraph()
        try:
            clean.capture_begin(capture_error_mode="thread_local")
            self._scratch.zero_()
            clean.capture_end()
        except RuntimeError as error:
            log.warning("random numbers may fail after a failed capture: %s", str(error))
        clean.reset()

    def num_bytes(self) -> int:
        pools = {tuple(pool) for pool in self._pools}
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) in pools
        )

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def order(self) -> None:
        self._order()


class StreamOrder:
    """Called before device work that reuses memory: it waits for that of the last call's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.Stream(device).device_index if device.type == "cuda" else -1
        self._last_stream = 0
        self._last: torch.cuda.Stream | None = None

    def __call__(self) -> None:
        if self._device.type != "cuda":
            return  # host work is in order
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        if raw == self._last_stream and self._last is not None:
            return
        current = torch.cuda.current_stream(self._device)
        if self._last is not None:
            current.wait_stream(self._last)
        self._last_stream, self._last = raw, current


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection inside a capture may free device memory, which a capture forbids."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _apart(results: Sequence[torch.Tensor], inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Outputs in memory of their own: one that is a view of an input would change with it."""
    held = {
        tensor.untyped_storage().data_ptr() for tensor in inputs if isinstance(tensor, torch.Tensor)
    }
    return [
        result.clone() if result.untyped_storage().data_ptr() in held else result
        for result in results
    ]


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep it."""
    storage = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(borrowed, tensor.storage_offset(), tensor.shape, tensor.stride())
