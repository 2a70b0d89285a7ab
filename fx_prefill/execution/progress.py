"""A progress bar over captures, for a person who waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def progress(keys: Sequence[Any], shown: bool | None) -> Iterable[Any]:
    """``keys`` with a bar where tqdm is installed: on a terminal by default, or as ``shown`` says.

    One key is no wait worth a bar.
    """
    if shown is False or len(keys) < 2 or find_spec("tqdm") is None:
        return keys
    bar = import_module("tqdm").tqdm
    quiet = None if shown is None else False  # None: only where there is a terminal
    return bar(keys, desc="capturing", unit="bucket", disable=quiet)
