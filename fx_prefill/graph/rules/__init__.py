"""How each ATen operator carries the token axis, or why it cannot.

Only ATen is listed: everything above it is judged by what it decomposes into. What is not listed
here and touches the token axis is unknown, and unknown means break.
"""

from __future__ import annotations

from . import creation, dimensions, gathers, products, shapes
from .base import RULES, OpCall, no_host_values, pointwise

__all__ = [
    "RULES",
    "OpCall",
    "creation",
    "dimensions",
    "gathers",
    "no_host_values",
    "pointwise",
    "products",
    "shapes",
]
