"""Small lists of integers to device memory, without the host waiting or allocating.

Note [Reused when the device is past it]

Pinned memory made for one copy costs an allocation and an event at each. Here a few buffers take
turns. Half of them are used again only after an event recorded behind their last copies: by then
that has nearly always happened, and the host waits only when it is that many forwards ahead.
"""

from __future__ import annotations

import ctypes

import torch

HALF = 8
MAX_STREAMS = 4
"""Streams with buffers of their own; an event of one says nothing about copies of another."""


class Uploads:
    """Copies int32 numbers into ``target`` ``[length]``, on the current stream."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self._rings: dict[int, _Ring] = {}

    def __call__(self, numbers: list[int]) -> None:
        """Write ``numbers``, as many as the target has."""
        target = self._target
        if target.device.type != "cuda":
            target.copy_(torch.tensor(numbers, dtype=torch.int32, device="cpu"))
            return
        stream = torch._C._cuda_getCurrentRawStream(target.device.index)
        ring = self._rings.get(stream)
        if ring is None and len(self._rings) < MAX_STREAMS:
            ring = self._rings[stream] = _Ring(target.shape[0], target.device)
        if ring is None:
            host = torch.tensor(numbers, dtype=torch.int32, device="cpu", pin_memory=True)
        else:
            host = ring.filled(numbers)
        target.copy_(host, non_blocking=True)


class _Ring:
    """Pinned buffers in turn. See Note [Reused when the device is past it]."""

    def __init__(self, length: int, device: torch.device) -> None:
        self._device = device
        with torch.inference_mode(False):  # read inside and outside of it
            self._buffers = [
                torch.zeros(length, dtype=torch.int32, device="cpu", pin_memory=True)
                for _ in range(2 * HALF)
            ]
        # Written as memory: an operator for it would cost as much as the copy.
        kind = ctypes.c_int32 * length
        self._numbers = [kind.from_address(buffer.data_ptr()) for buffer in self._buffers]
        self._copied = (torch.cuda.Event(), torch.cuda.Event())
        self._next = 0

    def filled(self, numbers: list[int]) -> torch.Tensor:
        """The next buffer, holding ``numbers``."""
        place = self._next
        half, offset = divmod(place, HALF)
        if offset == 0:
            self._copied[1 - half].record(torch.cuda.current_stream(self._device))
            self._copied[half].synchronize()
        self._numbers[place][:] = numbers  # type: ignore[assignment]
        self._next = (place + 1) % (2 * HALF)
        return self._buffers[place]
