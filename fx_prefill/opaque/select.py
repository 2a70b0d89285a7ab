"""Which modules of a model become opaque breaks: by class, by qualified name, by predicate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import OptionError

ACCEPTED = (
    "module classes, qualified class names ('package.module.Class'), predicates on a module, and "
    "BreakModule entries"
)


@dataclass(frozen=True)
class BreakModule:
    """An entry of ``break_modules`` that also says what the module returns.

    ``match`` is a class, a qualified class name or a predicate. ``result(module, *args, **kwargs)``
    returns tensors of the shapes, dtypes and devices of the module's results, made from the sizes
    of its arguments (``torch.empty_like(x)``); without it the module is tried on rows of zeros.
    """

    match: type | str | Callable[[nn.Module], bool]
    result: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.match, str) and "." in self.match:
            return
        if not callable(self.match) or (
            isinstance(self.match, type) and not issubclass(self.match, nn.Module)
        ):
            raise OptionError(
                f"option 'break_modules' has the entry {self.match!r}; accepted: {ACCEPTED}"
            )

    def accepts(self, module: nn.Module) -> bool:
        """Whether ``module`` is one of those meant."""
        if isinstance(self.match, str):
            return any(qualified_name(cls) == self.match for cls in type(module).__mro__)
        if isinstance(self.match, type):
            return isinstance(module, self.match)
        return bool(self.match(module))

    @property
    def name(self) -> str:
        """What to call this entry in a message."""
        if isinstance(self.match, str):
            return self.match
        return getattr(self.match, "__qualname__", None) or repr(self.match)


def qualified_name(cls: type) -> str:
    """``package.module.Class``, as break modules are named."""
    return f"{cls.__module__}.{cls.__qualname__}"


def parse_break_modules(value: Any) -> tuple[BreakModule, ...]:
    """Entries as given by the user. Raises OptionError for anything that names no module."""
    if isinstance(value, (str, BreakModule)) or not isinstance(value, Iterable):
        value = (value,)
    return tuple(entry if isinstance(entry, BreakModule) else BreakModule(entry) for entry in value)


def matches(
    root: nn.Module, entries: tuple[BreakModule, ...]
) -> Iterator[tuple[nn.Module, BreakModule]]:
    """Modules inside ``root`` that an entry accepts, with that entry; none inside another.

    ``root`` itself is what gets compiled, and is left alone.
    """
    seen: set[int] = set()
    front = list(root.children())[::-1]
    while front:
        module = front.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        entry = next((entry for entry in entries if entry.accepts(module)), None)
        if entry is not None:
            yield module, entry
        else:
            front.extend(list(module.children())[::-1])
