"""How each ATen operator carries the token axis, or why it cannot.

Only ATen is listed: everything above it is judged by what it decomposes into. What is not listed
here and touches the token axis is unknown, and unknown means break.
"""

from __future__ import annotations

from . import creation, dimensions, gathers, products, routing, shapes
from .base import RULES, OpCall, no_host_values, pointwise
from .lookups import LOOKUPS, in_range
from .routing import ROUTING, contents_of, expert_function

__all__ = [
    "LOOKUPS",
    "ROUTING",
    "RULES",
    "OpCall",
    "contents_of",
    "creation",
    "dimensions",
    "expert_function",
    "gathers",
    "in_range",
    "no_host_values",
    "pointwise",
    "products",
    "routing",
    "shapes",
]
