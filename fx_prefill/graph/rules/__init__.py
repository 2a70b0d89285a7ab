"""How each ATen operator carries the token axis, or why it cannot.

Only ATen is listed, and the collectives of ``torch.distributed``, which decompose into nothing:
everything above is judged by what it decomposes into. What is not listed
here and touches the token axis is unknown, and unknown means break.
"""

from __future__ import annotations

from . import creation, dimensions, gathers, products, routing, shapes
from .base import RULES, OpCall, no_host_values, pointwise
from .collectives import collective, is_collective, starts_collective
from .lookups import LOOKUPS, in_range
from .routing import ROUTING, contents_of, expert_function

__all__ = [
    "LOOKUPS",
    "ROUTING",
    "RULES",
    "OpCall",
    "collective",
    "contents_of",
    "creation",
    "dimensions",
    "expert_function",
    "gathers",
    "in_range",
    "is_collective",
    "no_host_values",
    "pointwise",
    "products",
    "routing",
    "shapes",
    "starts_collective",
]
