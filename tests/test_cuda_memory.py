"""Memory and failures on a GPU: one pool, its size foretold, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from families import BY_NAME
from test_cuda import arguments_at, check_lengths, private_pools
from test_families import MAX_TOKENS, total_fallbacks

import fx_prefill
from fx_prefill.bench.models import load
from fx_prefill.errors import CaptureOutOfMemory
from fx_prefill.execution.reasons import FallbackReason

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def decoder(num_layers: int = 3) -> Any:
    return load(
        "qwen3-0.6b",
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        num_layers=num_layers,
    )


def call(model: Any, num_tokens: int, cache: bool = False) -> Any:
    embeds = torch.randn(1, num_tokens, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        return model(inputs_embeds=embeds, use_cache=cache)


def pool_of(compiled: Any) -> int:
    (graph,) = compiled.graphs
    return graph._captures._recorder.num_bytes()


@pytest.mark.parametrize("capture_attention", [True, False])
def test_the_ladder_takes_what_its_largest_bucket_takes(capture_attention: bool) -> None:
    model = decoder()
    options = {"capture_attention": capture_attention, "compiler": "eager"}
    alone = fx_prefill.compile(model, buckets=[1024], **options)
    call(model, 1000)
    largest = pool_of(alone)
    alone.undo()
    ladder = fx_prefill.compile(model, max_tokens=1024, capture="all", **options)
    call(model, 100)
    assert len(ladder.graphs[0].captured) > 20
    assert pool_of(ladder) <= 1.15 * largest


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
@pytest.mark.parametrize("cache", [False, True])
def test_the_estimate_is_near_what_is_used(compiler: str, cache: bool) -> None:
    model = decoder()
    compiled = fx_prefill.compile(model, compiler=compiler, capture="all", buckets=[512, 2048])
    call(model, 100, cache)
    call(model, 500, cache)
    (graph,) = compiled.graphs
    estimate = compiled.report().graphs[0].graph_bytes_estimate
    assert 0.75 * graph.graph_bytes <= estimate <= 1.25 * graph.graph_bytes


class Breaks:
    """A segment compiler whose result raises at one of its calls."""

    def __init__(self, error: Callable[[], BaseException], at: int) -> None:
        self.error, self.left = error, at

    def __call__(self, module: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            result = module(*args)
            self.left -= 1
            if self.left == 0:
                raise self.error()
            return result

        return run


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("Tried to allocate 1 TiB.")


CALLS_OF_CHECK = 6
"""The padding check runs each of the three distinct segments twice."""


@pytest.mark.parametrize("capture_attention", [True, False])
@pytest.mark.parametrize("step", range(1, 12))
def test_a_capture_that_fails_anywhere_gives_its_pool_back(
    step: int, capture_attention: bool
) -> None:
    before = private_pools()
    model = BY_NAME["llama"].with_layers(3).inner("sdpa").cuda()
    failing = Breaks(lambda: RuntimeError("injected"), CALLS_OF_CHECK + step)
    compiled = fx_prefill.compile(
        model, max_tokens=MAX_TOKENS, compiler=failing, capture_attention=capture_attention
    )
    check_lengths(model, lengths=(20, 20))
    failed = total_fallbacks(compiled.report()).get(str(FallbackReason.CAPTURE_FAILED), 0)
    if failing.left <= 0:
        assert failed == 2
        assert private_pools() <= before
        assert compiled.graphs[0].graph_bytes == 0
    check_lengths(model, lengths=(100, 40))


@pytest.mark.parametrize("step", [1, 3, 5])
def test_out_of_memory_anywhere_is_loud_and_leaves_nothing(step: int) -> None:
    before = private_pools()
    model = BY_NAME["llama"].with_layers(3).inner("sdpa").cuda()
    failing = Breaks(out_of_memory, CALLS_OF_CHECK + step)
    compiled = fx_prefill.compile(model, max_tokens=MAX_TOKENS, compiler=failing)
    with torch.no_grad(), pytest.raises(CaptureOutOfMemory, match="bytes are free"):
        model(**arguments_at(model, 20, 0, cache=False))
    assert private_pools() <= before
    assert compiled.graphs[0].graph_bytes == 0
    check_lengths(model, lengths=(20, 100))


@pytest.mark.parametrize("method", ["capture_begin", "capture_end"])
def test_a_graph_that_cannot_be_captured_runs_eagerly(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = private_pools()
    model = BY_NAME["llama"].inner("sdpa").cuda()
    compiled = fx_prefill.compile(model, max_tokens=MAX_TOKENS, compiler="eager")

    real = getattr(torch.cuda.CUDAGraph, method)

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        if method == "capture_end":
            real(self, *args, **kwargs)  # a capture that ends in an error has ended
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, method, refuse)
        check_lengths(model, lengths=(20, 20))
    assert total_fallbacks(compiled.report()) == {str(FallbackReason.CAPTURE_FAILED): 2}
    assert private_pools() <= before
    check_lengths(model, lengths=(100, 40))


def test_a_limit_below_the_largest_bucket_holds() -> None:
    model = decoder()
    compiled = fx_prefill.compile(model, compiler="eager", capture="all", max_graph_memory="40MiB")
    call(model, 100)
    call(model, 2000)
    (graph,) = compiled.graphs
    piece = 20 << 20  # the allocator takes this much at a time
    assert graph.captured and graph.graph_bytes <= (40 << 20) + piece
    assert total_fallbacks(compiled.report()) == {str(FallbackReason.MEMORY): 1}


@pytest.mark.parametrize("setting", ["expandable_segments:True", "expandable_segments:False"])
def test_a_process_of_its_own_replays_and_exits_clean(setting: str) -> None:
    code = """
import sys, torch, fx_prefill
sys.path.insert(0, sys.argv[1])
from families import BY_NAME
from test_cuda import check_lengths
model = BY_NAME["llama"].inner("sdpa").cuda()
fx_prefill.compile(model, max_tokens=128, compiler="eager")
check_lengths(model, cache=True, lengths=(17, 100, 2, 128, 64))
torch.cuda.empty_cache()
check_lengths(model, cache=True, lengths=(17, 100, 2, 128, 64))
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting},
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("done"), done.stderr
