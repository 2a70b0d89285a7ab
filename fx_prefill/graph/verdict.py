"""The words the analysis answers in: a state for each tensor, a verdict for each node."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import sympy
import torch

from .symbols import Expr, free_symbols, is_unbacked, layout_symbols, size_exprs


class BreakReason(str, Enum):
    """Why a node runs eagerly on the real rows."""

    ATTENTION = "attention"
    CROSSES_TOKENS = "crosses tokens"
    OTHER_SIZE = "other dynamic size"
    HOST_SCALAR = "host scalar"
    DATA_DEPENDENT = "data-dependent"
    WRITES_MEMORY = "writes external memory"
    CPU_TENSOR = "CPU tensor"
    RANDOM = "random"
    MARKED = "marked by the user"
    OPAQUE = "opaque module"
    UNKNOWN = "not known to be row-wise"
    # The reasons below are choices of the partitioner about nodes that could be captured.
    GATHER = "embedding gather"
    TERMINAL = "terminal projection"
    FEEDS_BREAK = "only a break reads it"
    NOT_TOKEN_SHAPED = "not token-shaped"
    ALIAS_ORDER = "in-place order"
    STATE = "interpreter state"
    PADDING_LEAK = "padded rows reached real rows"

    def __str__(self) -> str:
        return self.value


class NotRowwise(Exception):
    """Raised by a rule that cannot show an operator to be row-wise."""

    def __init__(self, reason: BreakReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class TokenAxis:
    """Dimension ``dim`` holds ``outer`` runs of the tokens, one after the other.

    ``outer`` is 1 for a plain ``[..., tokens, ...]`` and the batch for a flattened
    ``[batch * tokens, ...]``, whose real rows are a strided view of ``[batch, tokens, ...]``.
    """

    dim: int
    outer: Expr = 1


@dataclass(frozen=True)
class Opaque:
    """A tensor whose shape the analysis cannot place: only breaks may read it."""

    reason: BreakReason
    detail: str


State = TokenAxis | Opaque | None
"""None is a tensor without a token axis: the same shape at every token count."""


def shape_state(
    tensor: torch.Tensor, token: sympy.Symbol | None, size_symbols: frozenset[sympy.Symbol]
) -> State:
    """State read off a shape alone, for inputs and results of breaks.

    A whole dimension of size ``token`` is the token axis: a break computes it at the real count.
    """
    if is_unbacked(tensor):
        return Opaque(BreakReason.DATA_DEPENDENT, "its size depends on data")
    others = layout_symbols(tensor) - size_symbols
    if others:
        names = ", ".join(sorted(map(str, others)))
        return Opaque(BreakReason.OTHER_SIZE, f"its layout depends on {names}")
    if token is None:
        return None
    dims = [dim for dim, size in enumerate(size_exprs(tensor)) if token in free_symbols(size)]
    if not dims:
        return None
    if len(dims) > 1:
        return Opaque(BreakReason.CROSSES_TOKENS, "every token against every token")
    size = size_exprs(tensor)[dims[0]]
    if size != token:
        return Opaque(BreakReason.OTHER_SIZE, f"dimension {dims[0]} has size {size}")
    return TokenAxis(dims[0])


class Kind(str, Enum):
    """What may be done with a node."""

    CAPTURE = "capture"
    """Row-wise: may go into a segment."""

    BREAK = "break"
    """Runs eagerly on the real rows."""

    HOST = "host"
    """A number computed on the host from the sizes of the call."""

    CONSTANT = "constant"
    """A tensor of literal numbers, made once."""

    SOURCE = "source"
    """A placeholder or attribute."""


@dataclass(frozen=True)
class Verdict:
    """What the analysis found out about one node.

    ``states`` are those of the tensors in its value, in order. ``mutates`` are indices into its
    tensor arguments. ``has_kernel`` is False for pure views.
    """

    kind: Kind
    reason: BreakReason | None = None
    detail: str = ""
    states: tuple[State, ...] = ()
    mutates: tuple[int, ...] = ()
    random: bool = False
    has_kernel: bool = True
    operators: tuple[str, ...] = ()

    @property
    def token_shaped(self) -> bool:
        """Whether some result has a token axis."""
        return any(isinstance(state, TokenAxis) for state in self.states)

    @property
    def pure(self) -> bool:
        """Whether dropping an unused result changes nothing."""
        return not self.mutates and not self.random
