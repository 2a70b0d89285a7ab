"""The words the analysis answers in: a state for each tensor, a verdict for each node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import sympy
import torch

from .symbols import Expr, free_symbols, is_unbacked, layout_symbols, size_exprs


class BreakReason(str, Enum):
    """Why a node runs eagerly on the real rows."""

    ATTENTION = "attention"
    COLLECTIVE = "collective"
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
class Sorting:
    """One sort of ``outer * tokens * inner`` entries, told from every other by ``number``.

    ``bound`` says that all keys are in ``[0, bound)``; None when that is not known.
    """

    number: int
    outer: Expr
    inner: Expr
    bound: int | None
    ascending: bool


@dataclass(frozen=True)
class TokenAxis:
    """Dimension ``dim`` holds ``outer`` runs of the tokens, each token ``inner`` times in a row.

    ``outer`` is 1 for a plain ``[..., tokens, ...]`` and the batch for a flattened
    ``[batch * tokens, ...]``, whose real rows are a strided view of ``[batch, tokens, ...]``.
    ``inner`` is not 1 where a token has several entries, one for each of its experts. With an
    ``order``, the entries stand in the order that this sort gave them.
    """

    dim: int
    outer: Expr = 1
    inner: Expr = 1
    order: Sorting | None = None

    def at(self, dim: int) -> TokenAxis:
        """The same axis at another dimension."""
        return replace(self, dim=dim)

    @property
    def in_order(self) -> bool:
        """Whether entries stand by token, as they do in everything that is not sorted."""
        return self.order is None

    @property
    def plain(self) -> bool:
        """Whether the axis has one entry a token, by token: what buffers and breaks understand."""
        return self.order is None and self.inner == 1


class RoutingKind(str, Enum):
    """What the numbers of a routing tensor are; ``p`` is the permutation of a sort."""

    ORDER = "the order of a sort"
    """``p``: entry ``p[i]`` came to place ``i``."""

    ROW_OF = "the rows behind the order of a sort"
    """``p // inner``: the token whose entry came to place ``i``."""

    INVERSE = "the inverse of the order of a sort"
    """The place that entry ``i`` came to."""

    COUNTS = "group sizes"
    """How many entries have each key, those of padded rows included."""

    ENDS = "group ends"
    """Where each key's entries end among the sorted ones."""


@dataclass(frozen=True)
class Routing:
    """Numbers that depend on all rows, padded ones too, and are right only where they belong.

    No operator may read them but those that :mod:`rules.routing` lists: see the note there.
    """

    kind: RoutingKind
    by: Sorting
    num_groups: int = 0


@dataclass(frozen=True)
class Opaque:
    """A tensor whose shape the analysis cannot place: only breaks may read it."""

    reason: BreakReason
    detail: str


State = TokenAxis | Routing | Opaque | None
"""None is a tensor without a token axis: the same shape at every token count."""


def is_local(state: State) -> bool:
    """Whether a value makes sense only beside its makers and readers, in one partition.

    Which padded rows are among sorted entries, and where, only the sort knows: nobody can take the
    real rows out of such a value at a boundary.
    """
    return isinstance(state, Routing) or (isinstance(state, TokenAxis) and not state.plain)


@dataclass(frozen=True)
class Contents:
    """What is known of the numbers in a tensor, beyond where its rows are.

    ``bound``: all are whole and in ``[0, bound)``. ``keys``: they are the keys of this sort, in
    its order. ``counting``: they are 0, 1, 2, ... up to this size.
    """

    bound: int | None = None
    keys: Sorting | None = None
    counting: Expr | None = None


def sort_size(by: Sorting, token: sympy.Symbol | None) -> Expr:
    """How many entries a sort has."""
    return by.outer * by.inner * token


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

    ``states`` and ``contents`` are those of the tensors in its value, in order. ``mutates`` are
    indices into its tensor arguments, and ``after`` says what each of those holds afterwards.
    ``in_range`` is False for a look-up by token whose indices may lie outside its table.
    ``has_kernel`` is False for pure views.
    """

    kind: Kind
    reason: BreakReason | None = None
    detail: str = ""
    states: tuple[State, ...] = ()
    contents: tuple[Contents | None, ...] = ()
    mutates: tuple[int, ...] = ()
    after: tuple[tuple[State, Contents | None], ...] = ()
    in_range: bool = True
    random: bool = False
    has_kernel: bool = True
    operators: tuple[str, ...] = ()

    @property
    def token_shaped(self) -> bool:
        """Whether some result has a token axis."""
        return any(isinstance(state, TokenAxis) for state in self.states)

    @property
    def local(self) -> bool:
        """Whether some result must not leave its partition."""
        return any(map(is_local, self.states))

    @property
    def pure(self) -> bool:
        """Whether dropping an unused result changes nothing."""
        return not self.mutates and not self.random
