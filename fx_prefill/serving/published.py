"""A forward's context as breaks see it for the time of that forward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from .attention.backend import AttentionBackend
from .context import ForwardContext, forward_context


class Published:
    """``forward_context`` with counts and backend pinned; a class, as it is on the hot path."""

    def __init__(
        self, ctx: ForwardContext, attention: AttentionBackend, captured_bucket: int
    ) -> None:
        self._ctx, self._attention, self._bucket = ctx, attention, captured_bucket
        self._inner: Any = nullcontext()

    def __enter__(self) -> ForwardContext:
        ctx = self._ctx
        self._saved = (
            ctx.num_tokens,
            ctx.rank_num_tokens,
            ctx.rank_num_requests,
            ctx.attention,
            ctx.captured_bucket,
        )
        ctx.attention, ctx.captured_bucket = self._attention, self._bucket
        self._inner = forward_context(ctx)
        try:
            return self._inner.__enter__()
        except BaseException:
            self._restore()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            self._restore()

    def _restore(self) -> None:
        ctx = self._ctx
        (
            ctx.num_tokens,
            ctx.rank_num_tokens,
            ctx.rank_num_requests,
            ctx.attention,
            ctx.captured_bucket,
        ) = self._saved
