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
    from .serving.attention.backend import (
        AttentionBackend,
        AttentionLayer,
        register_attention_backend,
    )
    from .serving.attention.op import attention
    from .serving.context import ForwardContext, ForwardMode, current_context, forward_context
    from .serving.forwards import MultimodalInputs, PrefillOutput
    from .serving.kv_cache import PagedKVPool
    from .serving.prefill_graph import PrefillGraph

__version__ = "0.1.0"

_EXPORTS = {
    "AttentionBackend": ".serving.attention.backend",
    "AttentionLayer": ".serving.attention.backend",
    "BreakModule": ".opaque.select",
    "CompiledPrefill": ".api",
    "ForwardContext": ".serving.context",
    "ForwardMode": ".serving.context",
    "Options": ".options",
    "MultimodalInputs": ".serving.forwards",
    "PagedKVPool": ".serving.kv_cache",
    "PrefillGraph": ".serving.prefill_graph",
    "PrefillOutput": ".serving.forwards",
    "attention": ".serving.attention.op",
    "compile": ".api",
    "current_context": ".serving.context",
    "explain": ".api",
    "forward_context": ".serving.context",
    "register_attention_backend": ".serving.attention.backend",
    "report": ".api",
    "warmup": ".api",
}

__all__ = [
    "AttentionBackend",
    "AttentionLayer",
    "BreakModule",
    "CompiledPrefill",
    "ForwardContext",
    "ForwardMode",
    "MultimodalInputs",
    "Options",
    "PagedKVPool",
    "PrefillGraph",
    "PrefillOutput",
    "__version__",
    "attention",
    "compile",
    "current_context",
    "explain",
    "forward_context",
    "register_attention_backend",
    "report",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
