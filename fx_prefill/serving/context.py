"""What a forward is about, as the engine knows it, and how breaks get to see it.

Note [The context is live]

Nothing of a context is frozen when a bucket is captured. Breaks read it while they run, and
whatever they set on it for their own time is put back, also when they raise.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ContextDecorator
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from enum import Enum
from operator import index
from typing import TYPE_CHECKING, Any

from ..errors import ContextError

if TYPE_CHECKING:
    import torch

    from .attention.backend import AttentionBackend


class ForwardMode(Enum):
    """What the requests of a forward do."""

    EXTEND = "extend"
    """All bring prompt rows: whole prompts, chunks of them, or what follows a cached prefix."""

    MIXED = "mixed"
    """Some bring prompt rows, the others one row each."""

    DECODE = "decode"
    """Each brings one row."""

    IDLE = "idle"
    """There are none: this rank only keeps the others company."""

    @property
    def extends(self) -> bool:
        """Whether prompt rows are among the rows."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)


@dataclass
class ForwardContext:
    """One forward of a batch of requests; rows of requests lie one after the other.

    Requests that extend come first, then those that decode (one row each). Lengths are in tokens;
    ``*_host`` are the same numbers as Python integers, so that nothing waits for the device.

    ``prefix_lens`` rows of a request are in the cache already, ``extend_lens`` rows are in this
    forward, ``seq_lens`` is their sum. ``page_table`` ``[num_requests, max_pages]`` holds the pages
    of each request, ``write_locations`` ``[num_tokens]`` the cache slot of each row. ``positions``
    is ``[num_tokens]``, or ``[3, num_tokens]`` for multimodal rotary embeddings. ``logits_rows``
    are the rows that logits are wanted of; the last of each request where it is None.

    ``rank_*`` say the same of every data-parallel rank, identically on all of them. ``aux_hidden``
    names what hidden states the engine wants beside the last; ``accept_lengths`` narrows the rows
    of a draft (1 to what the request brings, each). ``extra`` is the engine's own. ``attention``
    is what :func:`fx_prefill.attention` runs; ``captured_bucket`` is set while it runs inside
    captured graphs of that many rows, ``rows_written_by`` where those write for that backend.
    """

    mode: ForwardMode
    num_tokens: int
    num_requests: int
    num_extends: int
    seq_lens_host: Sequence[int]
    extend_lens_host: Sequence[int]
    prefix_lens_host: Sequence[int]
    seq_lens: torch.Tensor | None = None
    extend_lens: torch.Tensor | None = None
    prefix_lens: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    write_locations: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    logits_rows: torch.Tensor | None = None
    rank_num_tokens: Sequence[int] | None = None
    rank_num_requests: Sequence[int] | None = None
    rank_modes: Sequence[ForwardMode] | None = None
    rank_aux_hidden: Sequence[str | None] | None = None
    rank_layer_inputs: Sequence[bool] | None = None
    aux_hidden: str | None = None
    accept_lengths: torch.Tensor | None = None
    attention: AttentionBackend | None = None
    captured_bucket: int = 0
    rows_written_by: AttentionBackend | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_lengths(
        cls,
        extend_lens: Sequence[int],
        prefix_lens: Sequence[int] | None = None,
        *,
        num_decodes: int = 0,
        device: torch.device | str = "cpu",
        **fields: Any,
    ) -> ForwardContext:
        """A context made from the lengths of requests; the last ``num_decodes`` of them decode.

        Fills counts, mode, lengths on host and device, plain positions, and the last rows. Other
        ``fields`` are taken as they are. Raises ContextError.
        """
        import torch

        _check_fields(fields)
        extend = _integers("extend_lens", extend_lens)
        prefix = [0] * len(extend) if prefix_lens is None else _integers("prefix_lens", prefix_lens)
        if len(prefix) != len(extend):
            raise ContextError(
                f"there are {len(extend)} extend_lens and {len(prefix)} prefix_lens; "
                "required: one of each for every request"
            )
        seq = [p + e for p, e in zip(prefix, extend, strict=True)]
        # In one copy from pinned memory: others make the host wait for the device.
        where = torch.device(device)
        numbers = [seq, extend, prefix]
        numbers.append([p + i for p, e in zip(prefix, extend, strict=True) for i in range(e)])
        ends = itertools.accumulate(extend)
        numbers.append([end - 1 for end in ends])
        flat = torch.tensor(
            [n for part in numbers for n in part],
            dtype=torch.int64,
            device="cpu",
            pin_memory=where.type == "cuda",
        )
        moved = flat.to(where, non_blocking=True).split([len(part) for part in numbers])
        given: dict[str, Any] = {
            "seq_lens": moved[0].to(torch.int32),
            "extend_lens": moved[1].to(torch.int32),
            "prefix_lens": moved[2].to(torch.int32),
            "positions": moved[3],
            "logits_rows": moved[4],
            "mode": _mode(len(extend), num_decodes),
            **fields,
        }
        ctx = cls(
            num_tokens=sum(extend),
            num_requests=len(extend),
            num_extends=len(extend) - num_decodes,
            seq_lens_host=seq,
            extend_lens_host=extend,
            prefix_lens_host=prefix,
            **given,
        )
        ctx.validate()
        return ctx

    @property
    def num_decodes(self) -> int:
        """Requests that bring one row each, after the extending ones."""
        return self.num_requests - self.num_extends

    @property
    def last_rows(self) -> list[int]:
        """Row of the last token of each request, whose logits say what comes next."""
        return [end - 1 for end in itertools.accumulate(self.extend_lens_host)]

    def validate(self) -> None:
        """Raise ContextError where the fields contradict each other."""
        lengths: dict[str, Any] = {
            "seq_lens_host": self.seq_lens_host,
            "extend_lens_host": self.extend_lens_host,
            "prefix_lens_host": self.prefix_lens_host,
        }
        for name, values in lengths.items():
            if not isinstance(values, Sequence):
                seen = "None" if values is None else f"a {type(values).__name__}"
                raise ContextError(
                    f"{name} is {seen}; required: a list of Python integers, one for each request "
                    "of the forward, so that nothing waits for the device"
                )
            if len(values) != self.num_requests:
                raise ContextError(
                    f"{name} has {len(values)} entries for {self.num_requests} requests; required: "
                    "one for each request of the forward"
                )
            if values and min(values) < 0:
                raise ContextError(f"{name} is {list(values)}; required: no negative lengths")
        if sum(self.extend_lens_host) != self.num_tokens:
            raise ContextError(
                f"extend_lens_host sums to {sum(self.extend_lens_host)} and num_tokens is "
                f"{self.num_tokens}; required: equal, as rows of requests lie one after the other "
                "(a decoding request brings one row)"
            )
        both = zip(self.prefix_lens_host, self.extend_lens_host, strict=True)
        if [p + e for p, e in both] != list(self.seq_lens_host):
            raise ContextError(
                f"seq_lens_host is {list(self.seq_lens_host)}; required: prefix_lens_host + "
                f"extend_lens_host, which is {list(self.prefix_lens_host)} + "
                f"{list(self.extend_lens_host)}"
            )
        if not 0 <= self.num_extends <= self.num_requests:
            raise ContextError(
                f"num_extends is {self.num_extends} of {self.num_requests} requests; required: 0 "
                "to all of them"
            )
        if any(length != 1 for length in self.extend_lens_host[self.num_extends :]):
            raise ContextError(
                f"requests from number {self.num_extends} on decode, but extend_lens_host is "
                f"{list(self.extend_lens_host)}; required: extending requests first, then one row "
                "for each that decodes"
            )

    def pinned(self, **fields: Any) -> Pinned:
        """Fields at other values for the time of a block; put back when it ends or raises."""
        return Pinned(self, fields)


class Pinned:
    """What :meth:`ForwardContext.pinned` returns; a class, as generators cost more at each call."""

    __slots__ = ("_before", "_ctx", "_fields")

    def __init__(self, ctx: ForwardContext, fields: dict[str, Any]) -> None:
        self._ctx, self._fields = ctx, fields

    def __enter__(self) -> None:
        ctx = self._ctx
        self._before = {name: getattr(ctx, name) for name in self._fields}
        try:
            for name, value in self._fields.items():
                setattr(ctx, name, value)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        for name, value in self._before.items():
            setattr(self._ctx, name, value)


_FROM_LENGTHS = ("num_tokens", "num_requests", "num_extends")
_FIELDS = [
    f.name
    for f in fields(ForwardContext)
    if f.name not in _FROM_LENGTHS and not f.name.endswith("_host")
]

_current: ContextVar[ForwardContext | None] = ContextVar("fx_prefill_forward", default=None)


class forward_context(ContextDecorator):
    """Publish a context to the breaks of the forwards inside; the outer one is back afterwards.

    Per thread and per asynchronous task. Its attention backend is told of it first. ``fields`` are
    pinned meanwhile. Raises ContextError where its fields contradict each other.
    """

    def __init__(self, ctx: ForwardContext, **fields: Any) -> None:
        if not isinstance(ctx, ForwardContext):
            raise ContextError(f"expected a ForwardContext, got {type(ctx).__name__}")
        self._ctx, self._fields = ctx, fields
        self._pinned: Pinned | None = None

    def _recreate_cm(self) -> forward_context:
        return forward_context(self._ctx, **self._fields)

    def __enter__(self) -> ForwardContext:
        if self._pinned is not None:
            raise ContextError("this forward_context is entered already; make one for each `with`")
        ctx, pinned = self._ctx, Pinned(self._ctx, self._fields)
        pinned.__enter__()
        self._pinned = pinned
        self._token = _current.set(ctx)
        try:
            ctx.validate()
            _tell_backend(ctx)
        except BaseException:
            self.__exit__()
            raise
        return ctx

    def __exit__(self, *error: object) -> None:
        pinned, self._pinned = self._pinned, None
        try:
            _current.reset(self._token)
        finally:
            if pinned is not None:
                pinned.__exit__()


def _tell_backend(ctx: ForwardContext) -> None:
    backend: Any = ctx.attention
    if backend is None:
        return
    if not hasattr(backend, "init_forward_metadata"):
        raise ContextError(
            f"ForwardContext.attention is {backend!r}; required: an attention backend"
        )
    if ctx.captured_bucket:
        backend.prepare_captured(ctx, ctx.captured_bucket)
    else:
        backend.init_forward_metadata(ctx)


def current_context() -> ForwardContext:
    """The context of the forward going on. Raises ContextError when there is none."""
    ctx = _current.get()
    if ctx is None:
        raise ContextError(
            "a break asked for the forward's context and there is none; run the model through its "
            "PrefillGraph, or inside `with fx_prefill.forward_context(ctx):` (PrefillGraph.close() "
            "gives a transformers model its own attention back)"
        )
    return ctx


def _check_fields(given: Mapping[str, Any]) -> None:
    unknown = [name for name in given if name not in _FIELDS]
    if unknown:
        raise ContextError(
            f"ForwardContext.from_lengths got {unknown[0]}=; accepted: {', '.join(_FIELDS)} "
            "(counts and lengths on the host are made here)"
        )


def _integers(name: str, values: Any) -> list[int]:
    """Lengths as Python integers. Raises ContextError where the host would wait to read them."""
    import torch

    try:
        listed = list(values)
        for value in (values, *listed):
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                raise ContextError(
                    f"{name} is on {value.device}; required: a list of Python integers, as reading "
                    "it there would make the host wait for the device. Pass the list that the "
                    "scheduler counted"
                )
        return [index(value) for value in listed]
    except TypeError as error:
        raise ContextError(
            f"{name} is {values!r}; required: a list of whole numbers, one for each request"
        ) from error


def _mode(num_requests: int, num_decodes: int) -> ForwardMode:
    if num_requests == 0:
        return ForwardMode.IDLE
    if num_decodes == 0:
        return ForwardMode.EXTEND
    return ForwardMode.DECODE if num_decodes == num_requests else ForwardMode.MIXED
