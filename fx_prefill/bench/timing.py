"""Medians of wall and submit times, in milliseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

WARMUPS = 3


@dataclass(frozen=True)
class Timing:
    """Median milliseconds: until the result is there, and until the call returns to the host."""

    wall: float
    submit: float


def measure(function: Callable[[], Any], device: torch.device, repeats: int) -> Timing:
    """Time single calls, each starting with an idle device."""
    for _ in range(WARMUPS):
        function()
    walls, submits = [], []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        function()
        submitted = time.perf_counter()
        _wait(device)
        walls.append(time.perf_counter() - start)
        submits.append(submitted - start)
    return Timing(statistics.median(walls) * 1e3, statistics.median(submits) * 1e3)


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds one call takes, device work included."""
    _wait(device)
    start = time.perf_counter()
    function()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
