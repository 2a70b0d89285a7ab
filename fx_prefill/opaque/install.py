"""Puts opaque calls in place of the ``forward`` of chosen modules, and takes them out again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..errors import OptionError
from ..integrations import transformers as hf
from .calls import OpaqueCall
from .select import ACCEPTED, BreakModule, matches, parse_break_modules

log = logging.getLogger(__name__)

BUILT_IN: tuple[BreakModule, ...] = (
    *(BreakModule(name, hf.mixer_result) for name in hf.MIXERS),
    BreakModule(hf.follows_the_length, hf.rotary_result),
    BreakModule(hf.loops_over_experts, hf.like_first),
)
"""Modules of other libraries that are known to trace badly."""


class OpaqueModules:
    """The opaque modules of one model, from :meth:`install` to :meth:`restore`."""

    def __init__(self, calls: list[OpaqueCall]) -> None:
        self._calls = calls

    @property
    def names(self) -> tuple[str, ...]:
        """Classes of the modules, in model order, repeats included."""
        return tuple(type(call.module).__name__ for call in self._calls)

    @classmethod
    def install(cls, model: Any, break_modules: Any) -> OpaqueModules:
        """Make modules of ``model`` opaque: those of the built-in table and of ``break_modules``.

        ``None`` leaves all modules alone, those of the table too. Raises OptionError for entries
        that name no module, or a ``model`` that is not one.
        """
        if break_modules is None:
            return cls([])
        entries = parse_break_modules(break_modules)
        if not isinstance(model, nn.Module):
            if entries:
                raise OptionError(
                    "option 'break_modules' needs an nn.Module to look for modules in, and this "
                    f"is a {type(model).__name__}"
                )
            return cls([])
        calls = []
        used: set[int] = set()
        for module, entry in list(matches(model, (*entries, *BUILT_IN))):
            used.add(id(entry))
            calls.append(_replace(module, entry, required=any(entry is e for e in entries)))
        unused = [entry.name for entry in entries if id(entry) not in used]
        if unused:
            log.warning(
                "break_modules: no module of this %s answers to %s; accepted are %s",
                type(model).__name__,
                ", ".join(unused),
                ACCEPTED,
            )
        return cls(calls)

    def restore(self) -> None:
        """Give every module its own ``forward`` back, unless another model still shares it."""
        for call in self._calls:
            call.users -= 1
            if call.users == 0 and vars(call.module).get("forward") is call:
                if call.replaced_attribute:
                    call.module.forward = call.original
                else:
                    del call.module.forward
        self._calls = []


def _replace(module: nn.Module, entry: BreakModule, required: bool) -> OpaqueCall:
    current = vars(module).get("forward")
    # Two compiled models may share a module, and a model and its inner decoder do.
    call = (
        current if isinstance(current, OpaqueCall) else OpaqueCall(module, entry.result, required)
    )
    call.users += 1
    module.forward = call
    return call


@contextmanager
def installed(model: Any, break_modules: Any) -> Iterator[OpaqueModules]:
    """Opaque modules for the length of a ``with`` block."""
    opaque = OpaqueModules.install(model, break_modules)
    try:
        yield opaque
    finally:
        opaque.restore()
