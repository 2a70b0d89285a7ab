"""What a packed prefill costs an engine: against one graph of the same kernels, and on the host.

    python benchmarks/engine.py                      # on a GPU, as in docs/benchmarks.md
    python benchmarks/engine.py --device cpu --layers 2 --dtype float32 --attention sdpa

Batches of 512 tokens, one request and eight, and eight of which seven decode. *floor*: the same
segments and the same attention as one CUDA graph. *busy*: what a replay takes of a device that has
other work before it, as in an engine that schedules ahead; its ratio is to the floor measured so.
*host*: with an attention that does nothing, microseconds of a whole replay at two depths, and of
can_run alone.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn

from fx_prefill import PagedKVPool, PrefillGraph
from fx_prefill.bench.floor import floor
from fx_prefill.bench.models import load
from fx_prefill.bench.timing import measure
from fx_prefill.serving.context import ForwardContext, forward_context

BATCHES = {
    "1 x 512": ([512], [0], 0),
    "8 x 64": ([64] * 8, [0] * 8, 0),
    "8 x 64 after 64": ([64] * 8, [64] * 8, 0),
    "505 and 7 decodes": ([505] + [1] * 7, [0] + [200] * 7, 7),
    "1 x 500": ([500], [0], 0),
}
PAGE = 16


class Nothing:
    """An attention that leaves its rows as they are."""

    supports_capture = False

    def init_forward_metadata(self, ctx: ForwardContext) -> None:
        """Nothing to prepare."""

    def forward(self, q: Any, k: Any, v: Any, layer: Any, out: Any, ctx: ForwardContext) -> None:
        """Nothing to do."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--attention", default="varlen")
    parser.add_argument("--repeats", type=int, default=60)
    arguments = parser.parse_args()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    print(f"{arguments}, torch {torch.__version__}")
    model = load(arguments.model, device=device, dtype=dtype, num_layers=arguments.layers)
    pool = pool_for(model, device, dtype)
    graph = PrefillGraph(model, attention=arguments.attention, pool=pool, max_tokens=512)
    start = time.perf_counter()
    graph.warmup()
    print(f"traced, compiled and captured in {time.perf_counter() - start:.1f} s")
    print("batch  eager  floor  replay  submit  replay/floor  busy  busy/floor  error")
    for name, (extends, prefixes, num_decodes) in BATCHES.items():
        ctx = context(pool, extends, prefixes, num_decodes)
        print(name, *batch_row(graph, ctx, device, arguments.repeats), sep="  ")
    for layers in (2, arguments.layers or 28):
        print(f"{layers} layers:", host_row(arguments.model, layers, device, dtype))


def pool_for(model: nn.Module, device: torch.device, dtype: torch.dtype) -> PagedKVPool:
    config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    shape = (config.num_hidden_layers, 200, PAGE, config.num_key_value_heads, config.head_dim)
    return PagedKVPool(*shape, dtype=dtype, device=device)


def context(
    pool: PagedKVPool, extends: list[int], prefixes: list[int], num_decodes: int
) -> ForwardContext:
    both = list(zip(extends, prefixes, strict=True))
    pages = [pool.allocate(pool.pages_for(e + p)) for e, p in both]
    slots = [
        slot
        for held, (e, p) in zip(pages, both, strict=True)
        for slot in pool.slots(held, p, p + e)
    ]
    ctx = ForwardContext.from_lengths(
        extends,
        prefixes,
        num_decodes=num_decodes,
        device=pool.device,
        page_table=pool.page_table(pages),
        write_locations=torch.tensor(slots, device=pool.device),
    )
    for held in pages:
        pool.release(held)
    return ctx


def batch_row(
    graph: PrefillGraph, ctx: ForwardContext, device: torch.device, repeats: int
) -> list[str]:
    rows = graph.input_embeds(ctx.num_tokens).normal_()
    eager = measure(lambda: graph._run_eagerly(ctx, rows, None, None), device, repeats // 3)
    for _ in range(repeats):  # an engine that serves has called this before
        graph.replay(ctx, inputs_embeds=rows)
    ours = measure(lambda: graph.replay(ctx, inputs_embeds=rows), device, repeats)
    output, wanted = (
        graph.replay(ctx, inputs_embeds=rows),
        graph._run_eagerly(ctx, rows, None, None),
    )
    variant = graph._variants[None]
    assert variant.graph is not None
    given = graph.decoder.arguments(rows, ctx.positions)
    live = {variant.rows_index: given[graph.decoder.rows]}
    if variant.positions_index is not None:
        live[variant.positions_index] = given[graph.decoder.positions or ""]
    args = variant.graph.arguments(ctx.num_tokens, live)
    busy = behind(lambda: graph.replay(ctx, inputs_embeds=rows), device, repeats)
    ctx.attention = graph.attention
    with torch.no_grad(), forward_context(ctx):
        whole = floor(variant.graph.runtime, args)
        lowest = measure(whole, device, repeats)
        lowest_busy = behind(whole, device, repeats)
    difference = output.hidden_states.float() - wanted.hidden_states.float()
    error = float(difference.norm() / wanted.hidden_states.float().norm())
    return [
        *(f"{x:.3f}" for x in (eager.wall, lowest.wall, ours.wall, ours.submit)),
        f"{ours.wall / lowest.wall:.3f}",
        f"{busy:.3f}",
        f"{busy / lowest_busy:.3f}",
        f"{error:.1e}",
    ]


def host_row(name: str, layers: int, device: torch.device, dtype: torch.dtype) -> str:
    """Host microseconds when attention does nothing; means of many calls in a row."""
    model = load(name, device=device, dtype=dtype, num_layers=layers)
    pool = pool_for(model, device, dtype)
    graph = PrefillGraph(model, attention=Nothing(), buckets=[16], compiler="eager")
    graph.warmup()
    ctx = context(pool, [16], [0], 0)
    rows = graph.input_embeds(16)
    whole = microseconds(lambda: graph.replay(ctx, inputs_embeds=rows), device)
    decide = microseconds(lambda: graph.can_run(ctx), device)
    return f"replay {whole:.1f} us on the host, can_run {decide:.2f} us"


def behind(call: Any, device: torch.device, repeats: int) -> float:
    """Median milliseconds of the device for a call that is launched before it can start."""
    if device.type != "cuda":
        return float("nan")
    times = []
    for _ in range(repeats // 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # about 10 ms
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def microseconds(call: Any, device: torch.device, repeats: int = 200) -> float:
    """Median host time of a call that starts with an idle device."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2] * 1e6


if __name__ == "__main__":
    main()
