"""Launch-free LLM prefill: a ``torch.compile`` backend that replays CUDA graphs between attentions.

Importing this package does not import torch: ``torch`` itself may import it while starting up
(``TORCH_LOGS="+fx_prefill"``), so the public names below are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import CompiledPrefill, compile, explain, report, warmup
    from .opaque.select import BreakModule
    from .options import Options

__version__ = "0.1.0"

_EXPORTS = {
    "BreakModule": ".opaque.select",
    "CompiledPrefill": ".api",
    "Options": ".options",
    "compile": ".api",
    "explain": ".api",
    "report": ".api",
    "warmup": ".api",
}

__all__ = [
    "BreakModule",
    "CompiledPrefill",
    "Options",
    "__version__",
    "compile",
    "explain",
    "report",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
