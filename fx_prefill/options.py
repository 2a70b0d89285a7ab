"""The user's choices, validated once when ``torch.compile`` is called."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from .buckets import choose, default_ladder
from .errors import OptionError

Compiler = Callable[..., Any]
Pass = Callable[..., Any]

COMPILERS = ("inductor", "eager")
CAPTURE_MODES = ("lazy", "all", "queued")
MEMORY_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
PASS_STAGES = ("pre_partition", "post_partition")
DEFAULT_MAX_TOKENS = 2048
DEFAULT_MAX_PADDING_RATIO = 2.0
DEFAULT_MAX_BATCHES = 8


@dataclass(frozen=True)
class Passes:
    """User graph passes ``(gm, example_inputs) -> gm``, by the stage they run at."""

    pre_partition: tuple[Pass, ...] = ()
    post_partition: tuple[Pass, ...] = ()


@dataclass(frozen=True)
class Options:
    """Validated options; see the table in the README for what each one does."""

    max_tokens: int = DEFAULT_MAX_TOKENS
    buckets: tuple[int, ...] | None = None
    padding: bool = True
    max_padding_ratio: float = DEFAULT_MAX_PADDING_RATIO
    max_batches: int = DEFAULT_MAX_BATCHES
    compiler: str | Compiler | None = None
    break_ops: tuple[Any, ...] = ()
    rowwise_ops: tuple[Any, ...] = ()
    capture: str = "lazy"
    capture_attention: bool | None = None
    max_graph_memory: int | None = None
    specialize: tuple[int, ...] = ()
    max_autotune: bool = False
    progress: bool | None = None
    pin_weights: bool = False
    passes: Passes = field(default_factory=Passes)
    strict: bool = False

    @cached_property
    def ladder(self) -> tuple[int, ...]:
        """Sorted bucket sizes in tokens; empty when replay is disabled."""
        return self.buckets if self.buckets is not None else default_ladder(self.max_tokens)

    def choose_bucket(self, num_tokens: int) -> int | None:
        """Smallest bucket holding ``num_tokens``; None above the largest."""
        return choose(self.ladder, num_tokens)


def parse_options(raw: Mapping[str, Any] | None) -> Options:
    """Validate the dict given as ``torch.compile(..., options=)``.

    Raises OptionError naming the option, the value seen and the values accepted.
    """
    raw = dict(raw or {})
    known = [f.name for f in fields(Options)]
    if "break_modules" in raw:
        raise OptionError(
            "option 'break_modules' is one of fx_prefill.compile and fx_prefill.explain: "
            "torch.compile has traced the modules before its backend is asked"
        )
    unknown = sorted(set(raw) - set(known))
    if unknown:
        raise OptionError(
            f"unknown option {', '.join(map(repr, unknown))}; accepted options: {', '.join(known)}"
        )
    explicit_max = "max_tokens" in raw
    checked = {name: _CHECKS[name](raw[name]) for name in raw}
    buckets = checked.get("buckets")
    if buckets is not None:
        top = buckets[-1]
        if explicit_max and checked["max_tokens"] != top:
            raise OptionError(
                f"option 'max_tokens' is {checked['max_tokens']} but the largest of 'buckets' is "
                f"{top}, which is the ceiling; give one of the two, or make them equal"
            )
        checked["max_tokens"] = top
    options = Options(**checked)
    _refuse_without_effect(options)
    foreign = sorted(set(options.specialize) - set(options.ladder))
    if foreign:
        raise OptionError(
            f"option 'specialize' names {', '.join(map(str, foreign))}, which no bucket has; the "
            f"buckets are {', '.join(map(str, options.ladder)) or 'none (max_tokens=0)'}"
        )
    return options


def _refuse_without_effect(options: Options) -> None:
    if options.specialize and options.compiler not in (None, "inductor"):
        raise OptionError(
            f"option 'specialize' has no effect with the compiler {options.compiler!r}: only "
            "Inductor specializes buckets; leave one of the two out"
        )
    if options.max_autotune and not options.specialize:
        raise OptionError(
            "option 'max_autotune' has no effect without 'specialize': only artifacts of buckets "
            "named there are tuned"
        )


def _fail(name: str, value: object, accepted: str) -> OptionError:
    seen = f"{value!r} ({type(value).__name__})"
    return OptionError(f"option {name!r} is {seen}; accepted: {accepted}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_max_tokens(value: Any) -> int:
    if not _is_int(value) or value < 0:
        raise _fail("max_tokens", value, "a whole number of tokens, 0 to disable replay")
    return int(value)


def _check_buckets(value: Any, name: str = "buckets") -> tuple[int, ...] | None:
    if value is None:
        return None
    accepted = "a non-empty sequence of whole token counts of at least 1"
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, set, frozenset)):
        raise _fail(name, value, accepted)
    if not value or not all(_is_int(size) and size >= 1 for size in value):
        raise _fail(name, value, accepted)
    return tuple(sorted(set(value)))


def _check_bool(name: str) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise _fail(name, value, "True or False")
        return value

    return check


def _check_ratio(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 1:
        raise _fail("max_padding_ratio", value, "a number of at least 1 (bucket / tokens)")
    return float(value)


def _check_max_batches(value: Any) -> int:
    if not _is_int(value) or value < 1:
        raise _fail("max_batches", value, "a whole number of batch sizes of at least 1")
    return int(value)


def _check_compiler(value: Any) -> str | Compiler | None:
    if value is None or callable(value) or (isinstance(value, str) and value in COMPILERS):
        return value
    raise _fail(
        "compiler", value, f"{', '.join(map(repr, COMPILERS))}, or a callable (gm, example_inputs)"
    )


def _check_ops(name: str) -> Callable[[Any], tuple[Any, ...]]:
    accepted = "operators, functions, 'namespace::op' strings, or predicates on an fx.Node"

    def check(value: Any) -> tuple[Any, ...]:
        entries = tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else (value,)
        for entry in entries:
            named = isinstance(entry, str) and "::" in entry
            if not callable(entry) and not named and not hasattr(entry, "_opoverload"):
                raise _fail(name, entry, accepted)
        return entries

    return check


def _check_capture(value: Any) -> str:
    if not isinstance(value, str) or value not in CAPTURE_MODES:
        raise _fail("capture", value, " or ".join(map(repr, CAPTURE_MODES)))
    return value


def _check_passes(value: Any) -> Passes:
    accepted = (
        "a callable (gm, example_inputs) -> gm, a sequence of them (run before partitioning), or a "
        f"dict with the keys {' and '.join(map(repr, PASS_STAGES))}"
    )
    if isinstance(value, Passes):
        return value
    if not isinstance(value, Mapping):
        value = {"pre_partition": value}
    stages = {}
    for stage, passes in value.items():
        if stage not in PASS_STAGES:
            raise OptionError(f"option 'passes' has the key {stage!r}; accepted: {accepted}")
        entries = tuple(passes) if isinstance(passes, (list, tuple)) else (passes,)
        if not all(callable(entry) for entry in entries):
            raise _fail("passes", passes, accepted)
        stages[stage] = entries
    return Passes(**stages)


def _check_choice(name: str, decider: str) -> Callable[[Any], bool | None]:
    def check(value: Any) -> bool | None:
        if value is not None and not isinstance(value, bool):
            raise _fail(name, value, f"True, False, or None to let {decider} decide")
        return value

    return check


def _check_memory(value: Any) -> int | None:
    accepted = "a whole number of bytes of at least 1, text like '512MiB' or '2GiB', or None"
    if value is None:
        return None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(\w+)\s*", value)
        if match is None or match[2] not in MEMORY_UNITS:
            raise _fail("max_graph_memory", value, accepted)
        value = int(float(match[1]) * MEMORY_UNITS[match[2]])
    if not _is_int(value) or value < 1:
        raise _fail("max_graph_memory", value, accepted)
    return int(value)


def _check_specialize(value: Any) -> tuple[int, ...]:
    return () if value is None or value == () else _check_buckets(value, "specialize") or ()


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "max_tokens": _check_max_tokens,
    "buckets": _check_buckets,
    "padding": _check_bool("padding"),
    "max_padding_ratio": _check_ratio,
    "max_batches": _check_max_batches,
    "compiler": _check_compiler,
    "break_ops": _check_ops("break_ops"),
    "rowwise_ops": _check_ops("rowwise_ops"),
    "capture": _check_capture,
    "capture_attention": _check_choice("capture_attention", "the device"),
    "max_graph_memory": _check_memory,
    "specialize": _check_specialize,
    "max_autotune": _check_bool("max_autotune"),
    "pin_weights": _check_bool("pin_weights"),
    "progress": _check_choice("progress", "the terminal"),
    "passes": _check_passes,
    "strict": _check_bool("strict"),
}
