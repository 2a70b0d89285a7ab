"""Every failure this package can raise, by name."""

from __future__ import annotations


class FxPrefillError(Exception):
    """Base of every error raised by fx_prefill."""


class OptionError(FxPrefillError, ValueError):
    """An option is unknown, has the wrong type, or contradicts another."""


class GraphError(FxPrefillError):
    """The traced graph has a form the pass cannot read; says which node."""


class PaddingError(FxPrefillError):
    """A captured segment let padded rows reach real rows; names the node."""


class SegmentCompileError(FxPrefillError):
    """The segment compiler failed; names the segment and the compiler."""


class CaptureError(FxPrefillError):
    """A segment could not be recorded; names the segment and the bucket."""


class CaptureOutOfMemory(CaptureError):
    """A capture ran out of memory; names the bytes, what is free, and the options to lower."""


class BenchError(FxPrefillError):
    """A benchmark was asked for something it does not have; says what there is."""


class FallbackError(FxPrefillError):
    """Under ``strict``, a forward that would have run eagerly; says why."""


class NotCompiledError(FxPrefillError):
    """A report or warm-up was asked of something this backend never compiled."""


class OpaqueModuleError(FxPrefillError):
    """A module of ``break_modules`` cannot be one opaque break; says why and what to do."""


class ContextError(FxPrefillError):
    """A forward's context is missing or contradicts itself; says which field, and what it needs."""


class ServingError(FxPrefillError):
    """An engine asked for something this model or backend cannot do; says what can be done."""
