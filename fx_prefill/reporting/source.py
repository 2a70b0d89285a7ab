"""The user's own source line behind a node."""

from __future__ import annotations

import re
from pathlib import PurePath

from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def source_line(node: fx.Node) -> str:
    """``file.py:123 in function: code`` of the innermost user frame, or an empty string."""
    trace = node.meta.get("stack_trace") or ""
    frames = list(_FRAME.finditer(trace))
    if not frames:
        return ""
    own = [frame for frame in frames if not _between(frame["file"])]
    if not own:
        return ""
    last = own[-1]
    code = trace[last.end() :].strip().splitlines()
    where = f"{PurePath(last['file']).name}:{last['line']}"
    return f"{where} {code[0].strip()}" if code else where


def _between(file: str) -> bool:
    """Whether a frame stands between the user's code and what is traced: ours, and hook calls."""
    parts = PurePath(file).parts
    ours = "fx_prefill" in parts and parts[-1] in ("tracing.py", "calls.py", "transformers.py")
    return ours or parts[-4:] == ("torch", "nn", "modules", "module.py")
