"""Time the prefill of a Hugging Face decoder with random weights: eager, replayed, and the floor.

    python benchmarks/prefill.py --model qwen3-0.6b

The floor is the same compiled segments and the same breaks as one CUDA graph: no launch cost, no
handoff, and attention captured too, which a real prefill cannot have. Times are medians, in
milliseconds; ratios compare figures of one run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModel, Qwen3Config

import fx_prefill
from fx_prefill.execution.dispatch import PrefillRuntime
from fx_prefill.graph.extract import SourceKind

CONFIGS = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}
LENGTHS = (16, 64, 128, 256, 512, 1000, 1024, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-0.6b")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    with torch.no_grad():
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    config = Qwen3Config(
        num_key_value_heads=8, head_dim=128, vocab_size=151936, **CONFIGS[arguments.model]
    )
    with torch.device("cuda"):
        model = AutoModel.from_config(config, dtype=torch.bfloat16).eval()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments}")

    def embeds(n: int) -> dict[str, Any]:
        rows = torch.randn(1, n, config.hidden_size, device="cuda", dtype=torch.bfloat16)
        return {"inputs_embeds": rows, "use_cache": False}

    prefill = fx_prefill.compile(model, compiler=arguments.compiler)
    start = time.perf_counter()
    model(**embeds(64))
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    reserved = torch.cuda.memory_reserved()
    start = time.perf_counter()
    report = prefill.warmup(**embeds(64))
    torch.cuda.synchronize()
    ladder = time.perf_counter() - start
    graph = report.graphs[0]
    captured = len(graph.captured)
    print(
        f"first call {first:.1f} s (compile {graph.compile_seconds:.1f} s), "
        f"{captured} buckets captured in {ladder:.1f} s, "
        f"{(torch.cuda.memory_reserved() - reserved) / 2**20:.0f} MiB more reserved; "
        f"{graph.num_segments} segments, {graph.num_distinct_segments} distinct"
    )
    runtime = prefill.graphs[0]
    print("tokens  bucket  eager  replay  submit  floor  replay/floor  eager/replay  rel. error")
    for n in arguments.lengths:
        given = embeds(n)
        eager = wall_ms(lambda given=given: model.forward(**given), arguments.repeats)
        replay = wall_ms(lambda given=given: model(**given), arguments.repeats)
        submit = submit_ms(lambda given=given: model(**given), arguments.repeats)
        bucket = runtime.options.choose_bucket(n)
        floor = floor_ms(runtime, model, embeds(bucket), arguments.repeats)
        a, b = model(**given)[0].float(), model.forward(**given)[0].float()
        error = float((a - b).norm() / b.norm())
        print(
            f"{n:6d}  {bucket:6d}  {eager:5.2f}  {replay:6.3f}  {submit:6.3f}  {floor:5.3f}  "
            f"{replay / floor:12.3f}  {eager / replay:12.1f}  {error:10.1e}"
        )


def wall_ms(function: Callable[[], Any], repeats: int) -> float:
    """Median time of one call, device work included."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def submit_ms(function: Callable[[], Any], repeats: int) -> float:
    """Median time until a call returns to the host."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def floor_ms(runtime: PrefillRuntime, model: Any, given: dict[str, Any], repeats: int) -> float:
    """Time of the same segments and breaks captured as one graph at a bucket-sized input."""
    args = graph_arguments(runtime, model, given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        flat(runtime, args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flat(runtime, args)
    return wall_ms(graph.replay, repeats)


def graph_arguments(runtime: PrefillRuntime, model: Any, given: dict[str, Any]) -> list[Any]:
    """The arguments Dynamo passes to the graph for a call."""
    seen: list[Any] = []
    original = runtime._run

    def spy(args: Any) -> Any:
        seen[:] = args
        return original(args)

    runtime._run = spy  # type: ignore[method-assign]
    try:
        model(**given)
    finally:
        runtime._run = original  # type: ignore[method-assign]
    return list(seen)


def flat(runtime: PrefillRuntime, args: list[Any]) -> None:
    """Run every partition on live tensors, one after the other."""
    compiled = runtime.compiled
    values: dict[Any, Any] = {}
    symbols = compiled.plan.traced.symbol_values(args)
    for part in compiled.partitions:
        inputs = []
        for source in part.inputs:
            if source.kind is SourceKind.ARGUMENT:
                inputs.append(args[source.index])
            elif source.kind is SourceKind.CONSTANT:
                inputs.append(source.constant)
            elif source.kind is SourceKind.SCALAR:
                inputs.append(int(source.expr.xreplace(symbols)))
            else:
                inputs.append(values[source.node])
        segment = compiled.segments.get(part.index)
        function = part.module.forward if segment is None else segment.function
        values.update(zip(part.outputs, function(*inputs), strict=True))


if __name__ == "__main__":
    main()
