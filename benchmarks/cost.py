"""What a replay costs the host when segments and breaks do nothing, and what compiling costs.

    python benchmarks/cost.py                  # on a CPU
    python benchmarks/cost.py --device cuda    # real launches of real segments

A decoder of a few features is planned for real. On a CPU every segment's replay is emptied and
every break returns the same tensors, so that what is left is the bookkeeping: the frame, the copies
at handoffs, the choice of a bucket, the checks. On a GPU the segments are launched, and breaks
write straight into their handoffs with a body that does nothing. The slope over the number of
layers is the cost of one segment and one break, the rest that of a call. Compiling (on a CPU) is
timed for a small Llama of 4 and of 32 layers, with the compiler's own caches off.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch._inductor.config
from torch import fx, nn

import fx_prefill
from fx_prefill.backend import build_plan
from fx_prefill.bench.floor import graph_arguments
from fx_prefill.execution.capture import CopyRecorder
from fx_prefill.execution.compile import CompiledPlan, SegmentCache, compile_plan
from fx_prefill.execution.dispatch import PrefillRuntime
from fx_prefill.graph.normalize import value_of
from fx_prefill.graph.partition import Partition
from fx_prefill.graph.symbols import evaluate_sizes, size_exprs
from fx_prefill.options import Options
from fx_prefill.tracing import mark_tokens, tracing_config

WIDTH = 8
BUCKET = 16
LAYERS = (4, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, {arguments}")
    with torch.no_grad():
        for num_tokens in (BUCKET, BUCKET - 3):
            measure = replay_microseconds if arguments.device == "cpu" else launch_microseconds
            print_replay_cost(num_tokens, arguments.repeats, measure)
        if arguments.device == "cuda":
            return
        with torch._inductor.config.patch(force_disable_caches=True):
            print_compile_cost(arguments.compiler)


# ---- replay -------------------------------------------------------------------------------------


class Mixes(nn.Module):
    """A layer: one segment, and one break with one result."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).cumsum(1)


class EmptyRecorder(CopyRecorder):
    """Recordings whose replay does nothing."""

    def record(self, *args: Any, **kwargs: Any) -> Any:
        recording = super().record(*args, **kwargs)
        recording.replay = lambda: None  # type: ignore[method-assign]
        return recording


class EmptyBreak:
    """Stands for a break's module; returns the same tensors at every call."""

    def __init__(self, part: Partition, num_tokens: int, token: Any) -> None:
        self.graph = part.module.graph
        results = [
            torch.zeros(evaluate_sizes(size_exprs(value_of(node)), {token: num_tokens}))
            for node in part.outputs
        ]
        self.forward: Callable[..., Any] = lambda *args: results


def print_replay_cost(
    num_tokens: int, repeats: int, measure: Callable[[int, int, int], float]
) -> None:
    microseconds = {n: measure(n, num_tokens, repeats) for n in LAYERS}
    few, many = LAYERS
    pair = (microseconds[many] - microseconds[few]) / (many - few)
    besides = microseconds[few] - few * pair
    print(
        f"{num_tokens} tokens in a bucket of {BUCKET}: "
        f"{pair:.2f} us a segment and break, {besides:.1f} us a call besides "
        f"({', '.join(f'{n} layers {us:.1f} us' for n, us in microseconds.items())})"
    )


def replay_microseconds(num_layers: int, num_tokens: int, repeats: int) -> float:
    """Median time of one call of the runtime, without Dynamo's guards in the way."""
    model = nn.Sequential(*[Mixes() for _ in range(num_layers)], nn.Linear(WIDTH, WIDTH))
    made: list[PrefillRuntime] = []
    calls: list[Sequence[Any]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        options = Options(max_tokens=BUCKET, compiler="eager")
        plan = build_plan(gm, example_inputs, options)
        compiled = compile_plan(plan, options, SegmentCache())
        made.append(PrefillRuntime(_emptied(compiled, num_tokens), options, EmptyRecorder()))

        def keep(*args: Any) -> Any:
            calls.append(args)
            return gm.forward(*args)

        return keep

    x = torch.randn(1, num_tokens, WIDTH)
    mark_tokens((x,), {}, None)
    torch._dynamo.reset()
    with tracing_config():
        torch.compile(model.requires_grad_(False), backend=backend)(x)
    (runtime,), args = made, calls[-1]
    microseconds = median_microseconds(lambda: runtime(*args), repeats)
    assert not runtime.counts.fallbacks, runtime.counts
    return microseconds


def _emptied(compiled: CompiledPlan, num_tokens: int) -> CompiledPlan:
    token = compiled.plan.traced.token_symbol
    partitions = tuple(
        part if part.is_segment else replace(part, module=EmptyBreak(part, num_tokens, token))  # type: ignore[arg-type]
        for part in compiled.partitions
    )
    return replace(compiled, partitions=partitions)


# ---- launches -----------------------------------------------------------------------------------


@torch.library.custom_op("fx_prefill_benchmark::mix", mutates_args={"out"})
def mix(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.cumsum(x, 1, out=out)


class MixesInto(Mixes):
    """A layer whose break writes into memory given to it, as an engine's attention does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.proj(x)
        out = torch.empty_like(rows)
        mix(rows, out)
        return out


def launch_microseconds(num_layers: int, num_tokens: int, repeats: int) -> float:
    """Median host time of one call of the runtime on a GPU, with bodies that do nothing."""
    layers = [MixesInto() for _ in range(num_layers)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH)).cuda().requires_grad_(False)
    prefill = fx_prefill.compile(model, max_tokens=BUCKET, compiler="eager", strict=True)
    x = torch.randn(1, num_tokens, WIDTH, device="cuda")
    model(x)
    (runtime,) = prefill.graphs
    args = graph_arguments(runtime, lambda: model(x))
    (program,) = runtime._captures.programs.values()
    bodies = program._compiled.bodies
    assert len(bodies) == num_layers and all(body.direct == (0,) for body in bodies.values())
    for index, body in bodies.items():
        bodies[index] = replace(body, function=lambda *args: ())
    program._bound.clear()
    return median_microseconds(lambda: runtime(*args), repeats, torch.cuda.synchronize)


def median_microseconds(
    call: Callable[[], Any], repeats: int, settle: Callable[[], Any] = lambda: None
) -> float:
    """Median host time of ``call``; ``settle`` runs before each, outside the time."""
    for _ in range(20):
        call()
    times = []
    for _ in range(repeats):
        settle()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


# ---- compiling ----------------------------------------------------------------------------------


def print_compile_cost(compiler: str) -> None:
    from transformers import AutoModel, LlamaConfig

    for num_layers in LAYERS:
        config = LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
        )
        model = AutoModel.from_config(config, attn_implementation="sdpa").eval()
        torch._dynamo.reset()
        prefill = fx_prefill.compile(model.requires_grad_(False), compiler=compiler, max_tokens=64)
        start, cpu = time.perf_counter(), time.process_time()
        model(input_ids=torch.arange(20)[None], use_cache=False)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        (graph,) = prefill.report().graphs
        print(
            f"{num_layers} layers: first call {wall:.1f} s ({cpu:.1f} s of this process), of which "
            f"{graph.compile_seconds:.1f} s {compiler} for {graph.num_distinct_segments} distinct "
            f"of {graph.num_segments} segments"
        )


if __name__ == "__main__":
    main()
