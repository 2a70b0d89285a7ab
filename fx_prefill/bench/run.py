"""One benchmark run: what is measured, in which order, as plain data."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..api import CompiledPrefill, compile
from ..errors import BenchError
from ..execution.dispatch import PrefillRuntime
from .floor import floor, graph_arguments
from .models import load
from .timing import measure, seconds

BASELINES = ("eager", "torch.compile", "reduce-overhead")


@dataclass(frozen=True)
class Settings:
    """What to run; the command line's arguments."""

    model: str
    device: str
    dtype: str = "bfloat16"
    lengths: tuple[int, ...] = (16, 64, 128, 256, 512, 1000, 1024, 2048)
    baselines: tuple[str, ...] = ("eager",)
    cache: bool = False
    repeats: int = 30
    num_layers: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Baseline:
    """What one baseline took, and how far its last hidden state is from the eager one, relative."""

    wall: float
    error: float


@dataclass(frozen=True)
class Row:
    """One length; milliseconds. ``ours`` calls the module, ``direct`` its graph without guards."""

    tokens: int
    bucket: int | None
    baselines: dict[str, Baseline]
    floor: float
    ours: float
    ours_submit: float
    direct: float
    direct_submit: float
    breaks: int
    """Breaks that ran eagerly at this bucket; 0 also where nothing was replayed."""
    error: float
    """Of the last hidden state against the module run eagerly, relative."""


@dataclass(frozen=True)
class Setup:
    """Seconds and bytes before the first measured call."""

    trace_s: float
    compile_s: float
    capture_s: float
    buckets: int
    pool_mib: float
    estimated_mib: float


@dataclass(frozen=True)
class Result:
    """All figures of a run, with what they were measured on."""

    settings: Settings
    machine: str
    torch: str
    transformers: str
    segments: int
    distinct_segments: int
    setup: Setup
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """The result as JSON."""
        return json.dumps(asdict(self), indent=2)


def run(settings: Settings, say: Callable[[str], None] = lambda line: None) -> Result:
    """Measure one model; ``say`` is told what happens next."""
    import transformers

    device = torch.device(settings.device)
    say(f"loading {settings.model}")
    model = load(
        settings.model,
        device=device,
        dtype=getattr(torch, settings.dtype),
        num_layers=settings.num_layers,
    )
    inputs = _Inputs(model, device, settings.cache)
    with torch.no_grad():
        baselines = _baselines(model, inputs, settings, say)
        prefill = compile(model, **settings.options)
        setup = _set_up(prefill, inputs, device, settings, say)
        runtime = _runtime(prefill)
        rows = []
        for n in settings.lengths:
            say(f"measuring {n} tokens")
            rows.append(_row(n, prefill, runtime, inputs, settings, baselines))
    graph = prefill.report().graphs[0]
    return Result(
        settings=settings,
        machine=torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        torch=torch.__version__,
        transformers=transformers.__version__,
        segments=graph.num_segments,
        distinct_segments=graph.num_distinct_segments,
        setup=setup,
        rows=tuple(rows),
    )


class _Inputs:
    """Arguments of one prefill: embeddings, and a cache to fill if asked for."""

    def __init__(self, model: Any, device: torch.device, cache: bool) -> None:
        self._width = model.config.get_text_config().hidden_size
        self._dtype = next(model.parameters()).dtype
        self._device = device
        self._cache = cache

    def __call__(self, num_tokens: int) -> dict[str, Any]:
        rows = torch.randn(1, num_tokens, self._width, device=self._device, dtype=self._dtype)
        return {"inputs_embeds": rows, "use_cache": self._cache}


def _baselines(
    model: Any, inputs: _Inputs, settings: Settings, say: Callable[[str], None]
) -> dict[int, dict[str, Baseline]]:
    """Each baseline at each length; compiled ones are compiled for it alone."""
    device = torch.device(settings.device)
    found: dict[int, dict[str, Baseline]] = {n: {} for n in settings.lengths}
    for name in settings.baselines:
        for n in settings.lengths:
            say(f"{name} at {n} tokens")
            call = _baseline(model, name)
            given = inputs(n)
            wall = measure(lambda: call(**given), device, settings.repeats).wall  # noqa: B023
            found[n][name] = Baseline(wall, _error(call(**given), model.forward(**given)))
            torch._dynamo.reset()
    return found


def _baseline(model: Any, name: str) -> Callable[..., Any]:
    if name == "eager":
        return model.forward
    if name == "torch.compile":
        return torch.compile(model, dynamic=False)
    if name == "reduce-overhead":
        return torch.compile(model, dynamic=False, mode="reduce-overhead")
    raise BenchError(f"no baseline {name!r}: give some of {', '.join(BASELINES)}")


def _set_up(
    prefill: CompiledPrefill,
    inputs: _Inputs,
    device: torch.device,
    settings: Settings,
    say: Callable[[str], None],
) -> Setup:
    say("tracing and compiling")
    sample = inputs(min(settings.lengths))
    first = seconds(lambda: prefill.module(**sample), device)
    runtime = _runtime(prefill)
    compile_s = sum(segment.seconds for segment in runtime.compiled.segments.values())
    say("capturing every bucket")
    capture_s = seconds(lambda: prefill.warmup(**sample), device)
    report = prefill.report().graphs[0]
    return Setup(
        trace_s=first - compile_s,
        compile_s=compile_s,
        capture_s=capture_s,
        buckets=len(report.captured),
        pool_mib=runtime.graph_bytes / 2**20,
        estimated_mib=report.graph_bytes_estimate / 2**20,
    )


def _runtime(prefill: CompiledPrefill) -> PrefillRuntime:
    runtimes = [graph for graph in prefill.graphs if isinstance(graph, PrefillRuntime)]
    if not runtimes:
        raise BenchError(f"nothing of this model replays: {prefill.report()}")
    return runtimes[-1]


def _row(
    n: int,
    prefill: CompiledPrefill,
    runtime: PrefillRuntime,
    inputs: _Inputs,
    settings: Settings,
    baselines: dict[int, dict[str, Baseline]],
) -> Row:
    device = torch.device(settings.device)
    given = inputs(n)
    model = prefill.module
    ours = measure(lambda: model(**given), device, settings.repeats)
    args = graph_arguments(runtime, lambda: model(**given))
    direct = measure(lambda: runtime(*args), device, settings.repeats)
    bucket = runtime.options.choose_bucket(n)
    whole = graph_arguments(runtime, lambda: model(**inputs(bucket or n)))
    lowest = measure(floor(runtime, whole), device, settings.repeats)
    return Row(
        tokens=n,
        bucket=bucket,
        baselines=baselines[n],
        floor=lowest.wall,
        ours=ours.wall,
        ours_submit=ours.submit,
        direct=direct.wall,
        direct_submit=direct.submit,
        breaks=runtime.breaks_at(n),
        error=_error(model(**given), model.forward(**given)),  # type: ignore[attr-defined]
    )


def _error(actual: Any, expected: Any) -> float:
    last, eager = actual[0].float(), expected[0].float()
    return float((last - eager).norm() / eager.norm())


def lengths_of(text: Sequence[str]) -> tuple[int, ...]:
    """Lengths given on the command line. Raises BenchError for anything but counts from 2 up."""
    if not all(item.isdigit() and int(item) >= 2 for item in text):
        raise BenchError(
            f"lengths are {' '.join(text)}; accepted: whole token counts of at least 2 (one token "
            "is a graph of its own)"
        )
    return tuple(sorted({int(item) for item in text}))
