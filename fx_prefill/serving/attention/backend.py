"""What an attention backend is, and the ones known by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ...errors import ServingError

if TYPE_CHECKING:
    import torch

    from ..context import ForwardContext


@dataclass(frozen=True)
class AttentionLayer:
    """What one layer's attention is, beside its rows.

    ``window`` counts the tokens a row sees, itself included; None for all before it. A row that is
    not ``causal`` sees as many to its right. ``soft_cap`` bounds scores as ``cap * tanh(score /
    cap)``. ``sinks`` ``[num_heads]`` are scores that take part in the softmax and bring no value.
    """

    index: int
    scale: float
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """Attention of a packed batch, with a KV cache of its own choice.

    ``supports_capture`` says that it is a :class:`CapturableBackend` too. One that has
    ``supports_captured_writes``, and it is true, is a :class:`WritingBackend`.
    """

    supports_capture: bool

    def init_forward_metadata(self, ctx: ForwardContext) -> None:
        """Prepare what all layers of this forward need; called once before the first."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        ctx: ForwardContext,
    ) -> None:
        """Write K and V of the real rows to the cache, and the attention of each row to ``out``.

        ``q`` ``[num_tokens, num_heads, head_dim]``, ``k`` ``[num_tokens, num_kv_heads, head_dim]``,
        ``v`` ``[num_tokens, num_kv_heads, v_head_dim]``, ``out`` ``[num_tokens, num_heads,
        v_head_dim]``: the real rows only, requests one after the other as in ``ctx``.
        """


class CapturableBackend(AttentionBackend, Protocol):
    """A backend whose attention of some forwards may be inside the captured graphs.

    Captured kernels read nothing but device memory at addresses that do not change. What differs
    between forwards is written there before each replay: PrefillGraphs that run in several threads
    need a backend each.
    """

    def allocate_captured(self, max_tokens: int) -> None:
        """Make the memory that captured kernels read, for buckets up to ``max_tokens``; once."""

    def serves_captured(self, ctx: ForwardContext) -> bool:
        """Whether a forward is of the kind that was captured."""

    def prepare_captured(self, ctx: ForwardContext, bucket: int) -> None:
        """Write what this forward is into that memory; rows from ``num_tokens`` on are padding.

        Padding must reach no other row, and be written to the reserved slot if anywhere.
        """

    def forward_captured(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
    ) -> None:
        """As ``forward``, for all rows of a bucket, padding included; every row is written."""


class WritingBackend(AttentionBackend, Protocol):
    """A backend whose writes to the cache may be in the captured graphs, whatever the batch is.

    A graph writes all rows of a bucket; those that are padding have the ``reserved_slot``, which
    nothing may read. Where ``forward`` is overridden below ``write`` and ``attend``, they are not
    what it does, and it is called as it is.
    """

    supports_captured_writes: bool
    reserved_slot: int

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write rows to slots ``[num_rows]`` (int64); also runs while a graph is captured."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        ctx: ForwardContext,
    ) -> None:
        """As ``forward``, K and V being in the cache already."""


Factory = Callable[..., AttentionBackend]
F = TypeVar("F", bound=Factory)

_factories: dict[str, Factory] = {}

# Imported when asked for: two of them need libraries that few have installed.
_BUILT_IN = {
    "flash_attn": f"{__package__}.optional",
    "flashinfer": f"{__package__}.optional",
    "flex": f"{__package__}.flex",
    "sdpa": f"{__package__}.sdpa",
    "varlen": f"{__package__}.varlen",
}


def register_attention_backend(name: str) -> Callable[[F], F]:
    """Make a backend known by name: a decorator of its class, or of a function that makes one.

    It is called with the KV pool: ``factory(pool)``. Raises ServingError when the name is taken.
    """

    def register(factory: F) -> F:
        module = getattr(factory, "__module__", None)
        if name in _factories or _BUILT_IN.get(name, module) != module:
            raise ServingError(f"an attention backend called {name!r} is registered already")
        _factories[name] = factory
        return factory

    return register


def make_attention_backend(backend: Any, pool: Any) -> AttentionBackend:
    """A backend by name, or itself where one is given. Raises ServingError for unknown names."""
    if not isinstance(backend, str):
        return _checked(backend)
    if backend not in _factories and backend in _BUILT_IN:
        import_module(_BUILT_IN[backend])
    if backend not in _factories:
        known = ", ".join(sorted({*_BUILT_IN, *_factories}))
        raise ServingError(
            f"no attention backend {backend!r}; known: {known}. "
            "fx_prefill.register_attention_backend adds one"
        )
    if pool is None:
        raise ServingError(
            f"the attention backend {backend!r} is made with a KV pool, and there is none: pass "
            "pool="
        )
    if backend in _BUILT_IN and not all(hasattr(pool, name) for name in _OF_A_POOL):
        raise ServingError(
            f"the attention backend {backend!r} got a {type(pool).__name__}; required: a "
            "PagedKVPool as pool="
        )
    return _checked(_factories[backend](pool))


_OF_A_POOL = ("dtype", "device", "head_dim", "v_head_dim")
_WRITING = ("reserved_slot", "write", "attend")
_CAPTURABLE = ("allocate_captured", "serves_captured", "prepare_captured", "forward_captured")


def writes_in_graphs(backend: Any) -> bool:
    """Whether a backend is a :class:`WritingBackend`, all of which belongs together.

    One that overrides ``forward`` alone, or wraps another, means its ``forward``.
    """
    kind = type(backend)
    if not getattr(kind, "supports_captured_writes", False):
        return False
    if "forward" in getattr(backend, "__dict__", ()):
        return False

    def place(name: str) -> int:
        mro = kind.__mro__
        return next((i for i, base in enumerate(mro) if name in vars(base)), len(mro))

    return place("forward") >= min(place("attend"), place("supports_captured_writes"))


def _checked(backend: Any) -> AttentionBackend:
    needed = ["init_forward_metadata", "forward", "supports_capture"]
    if getattr(backend, "supports_capture", False):
        needed += _CAPTURABLE
    if writes_in_graphs(backend):
        needed += _WRITING
    missing = [name for name in needed if not hasattr(backend, name)]
    if missing or isinstance(backend, type):
        seen = f"the class {backend.__name__}" if isinstance(backend, type) else repr(backend)
        lacks = f", without {', '.join(missing)}" if missing else ""
        raise ServingError(
            f"attention is {seen}{lacks}; required: the name of a backend, or an object with "
            f"{', '.join(needed)}"
        )
    return backend
