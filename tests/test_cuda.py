"""What only a GPU shows: captured segments, their pool, streams and address changes."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from families import FAMILIES, Family
from more_families import CASES, Case
from test_families import (
    LENGTHS,
    MAX_TOKENS,
    assert_same,
    call_arguments,
    shuffled,
    tensors_of,
    token_ids,
    total_fallbacks,
    total_replays,
)
from test_more_families import assert_replays_like_eager

import fx_prefill
from fx_prefill.execution.reasons import FallbackReason

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

BY_NAME = {family.name: family for family in FAMILIES}


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def arguments_at(model: nn.Module, num_tokens: int, seed: int, cache: bool) -> dict[str, Any]:
    return call_arguments(model, token_ids(num_tokens, seed).cuda(), cache)


def check_lengths(model: nn.Module, cache: bool = False, lengths: Any = None) -> None:
    """Every answer is right at once, and still right after all later calls."""
    kept = []
    for seed, n in enumerate(lengths or shuffled(LENGTHS)):
        actual = tensors_of(model(**arguments_at(model, n, seed, cache)))
        expected = tensors_of(model.forward(**arguments_at(model, n, seed, cache)))
        assert_same(actual, expected, f"{n} tokens")
        kept.append((n, actual, expected))
    for n, actual, expected in kept:
        assert_same(actual, expected, f"{n} tokens, read again after the later calls")


@pytest.mark.parametrize("cache", [False, True], ids=["no_cache", "dynamic_cache"])
@pytest.mark.parametrize(
    ("attention", "captured"),
    [("sdpa", True), ("sdpa", False), ("eager", None)],
    ids=["sdpa_captured", "sdpa", "eager"],
)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_family_replays_captured_segments(
    family: Family, attention: str, captured: bool | None, cache: bool
) -> None:
    model = family.whole(attention).cuda()
    prefill = fx_prefill.compile(
        model, max_tokens=MAX_TOKENS, compiler="eager", capture_attention=captured
    )
    check_lengths(model, cache)
    assert set(total_fallbacks(prefill.report())) == {"above the largest bucket"}
    assert sum(total_replays(prefill.report()).values()) == 2 * (len(LENGTHS) - 1)


@pytest.mark.parametrize("cache", [False, True], ids=["no_cache", "dynamic_cache"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_experts_mixers_and_encoders_replay(case: Case, cache: bool) -> None:
    model = case.model().cuda()
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS, compiler="eager")
    assert_replays_like_eager(case, model, (17, 100, 2, 128, 129, 33, 17), cache, device="cuda")
    fallbacks = sum((Counter(g.fallbacks) for g in prefill.report().graphs), Counter[str]())
    # A graph of GPT-OSS is valid on one side of its window; 33 tokens in 48 rows are on both.
    outside = fallbacks.pop(str(FallbackReason.GUARD), 0)
    assert outside == (1 if case.name == "gpt_oss" and cache else 0)
    assert fallbacks == {"above the largest bucket": 1}
    assert sum(total_replays(prefill.report()).values()) == 6 - outside


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_inductor_is_the_default_compiler(name: str) -> None:
    model = BY_NAME[name].whole("sdpa").cuda()
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS)
    check_lengths(model, cache=True)
    assert {graph.compiler for graph in prefill.report().graphs} == {"inductor"}


def test_eager_segments_give_the_bits_of_a_bucket_sized_forward() -> None:
    # With sdpa, transformers takes another kernel when it is compiled: it builds the mask then.
    model = BY_NAME["llama"].inner("eager").cuda()
    fx_prefill.compile(model, max_tokens=MAX_TOKENS, compiler="eager")
    for n in (16, 64, 128, 32):
        given = arguments_at(model, n, n, cache=False)
        actual = model(**given).last_hidden_state
        expected = model.forward(**given).last_hidden_state
        assert torch.equal(actual, expected)


def test_two_models_and_allocator_churn_do_not_disturb_each_other() -> None:
    first, second = (BY_NAME[n].inner("sdpa").cuda() for n in ("llama", "qwen3"))
    for model in (first, second):
        fx_prefill.compile(model, max_tokens=MAX_TOKENS, compiler="eager")
    for _ in range(3):
        for model in (first, second):
            check_lengths(model, cache=True, lengths=(100, 17, 2, 128))
        torch.cuda.empty_cache()
        churn = [torch.full((1 << 18,), float("nan"), device="cuda") for _ in range(8)]
        del churn


def test_1000_random_lengths_compile_and_capture_nothing_new() -> None:
    model = BY_NAME["qwen3"].inner("sdpa").cuda()
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS, compiler="eager", strict=True)
    prefill.warmup(**arguments_at(model, 20, 0, cache=False))
    captured = prefill.graphs[0].captured
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, MAX_TOKENS + 1, (1000,), generator=generator).tolist()
    check_lengths(model, lengths=lengths)
    assert [graph.captured for graph in prefill.graphs] == [captured]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_grad_modes_share_captures_on_the_callers_stream(context: Any) -> None:
    model = BY_NAME["llama"].inner("sdpa").cuda()
    fx_prefill.compile(model, max_tokens=MAX_TOKENS, compiler="eager", pin_weights=True)
    with torch.no_grad():
        model(**arguments_at(model, 20, 0, cache=True))
    with context(), torch.cuda.stream(torch.cuda.Stream()):
        check_lengths(model, cache=True, lengths=(20, 100, 31))
        torch.cuda.synchronize()


def test_artifacts_for_one_bucket_give_the_same_rows() -> None:
    model = BY_NAME["llama"].inner("sdpa").cuda()
    fx_prefill.compile(model, max_tokens=MAX_TOKENS, specialize=(32, 128), strict=True)
    check_lengths(model, cache=True, lengths=(20, 100, 32, 128, 40))


def test_non_finite_rows_of_a_longer_forward_do_not_reach_a_shorter_one() -> None:
    model = BY_NAME["llama"].inner("sdpa").cuda()
    fx_prefill.compile(model, max_tokens=MAX_TOKENS, compiler="eager")
    embeds = torch.randn(1, 90, model.config.hidden_size, device="cuda")
    embeds[:, 50:] = float("nan")
    model(inputs_embeds=embeds, use_cache=False)
    clean = torch.randn(1, 40, model.config.hidden_size, device="cuda")
    actual = model(inputs_embeds=clean, use_cache=False).last_hidden_state
    expected = model.forward(inputs_embeds=clean, use_cache=False).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)


def test_moved_weights_are_captured_again() -> None:
    model = BY_NAME["llama"].inner("sdpa").cuda()
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS, compiler="eager")
    check_lengths(model, lengths=(20, 100))
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.25
    check_lengths(model, lengths=(20, 100))
    assert sum(graph.recaptures for graph in prefill.report().graphs) == 1


def test_a_capture_of_the_caller_is_left_alone() -> None:
    model = BY_NAME["llama"].inner("sdpa").cuda()
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS, compiler="eager")
    given = arguments_at(model, 32, 0, cache=False)
    expected = model(**given).last_hidden_state
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model(**given).last_hidden_state
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, expected, rtol=1e-4, atol=2e-5)
    assert total_fallbacks(prefill.report())[str(FallbackReason.CALLER_CAPTURES)] == 1


def test_streams_and_threads_get_their_own_rows() -> None:
    model = BY_NAME["llama"].inner("sdpa").cuda()
    fx_prefill.compile(model, max_tokens=MAX_TOKENS, compiler="eager")
    check_lengths(model, lengths=(17, 100))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for n in (17, 100, 3, 64):
                    given = arguments_at(model, n, seed, cache=False)
                    actual = model(**given).last_hidden_state
                    expected = model.forward(**given).last_hidden_state
                    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


class Synchronises(nn.Module):
    """A segment compiler's result that waits for the device, which a capture forbids."""

    active = False

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        if Synchronises.active:
            torch.cuda.synchronize()
        return self.module(*args)


def test_a_segment_that_cannot_be_captured_runs_eagerly_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither memory nor a random number generator or allocator that takes itself for captured."""
    before = private_pools()
    model = BY_NAME["llama"].inner("sdpa").cuda()
    prefill = fx_prefill.compile(
        model, max_tokens=MAX_TOKENS, compiler=lambda gm, inputs: Synchronises(gm)
    )
    monkeypatch.setattr(Synchronises, "active", True)
    check_lengths(model, lengths=(20, 100, 20))
    assert total_fallbacks(prefill.report()) == {str(FallbackReason.CAPTURE_FAILED): 3}
    assert torch.rand(4, device="cuda").isfinite().all()
    assert private_pools() <= before

    monkeypatch.setattr(Synchronises, "active", False)
    check_lengths(model, cache=False, lengths=(40, 64, 20, 40))
    assert total_replays(prefill.report()) == {48: 2, 64: 1}
    torch.cuda.synchronize()


def private_pools() -> set[tuple[int, int]]:
    """Memory pools other than the allocator's own that still hold memory."""
    gc.collect()
    torch.cuda.empty_cache()
    pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
    return pools - {(0, 0)}


def test_a_deleted_model_gives_its_pool_back() -> None:
    before = private_pools()
    model = BY_NAME["llama"].inner("sdpa").cuda()
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS, compiler="eager")
    check_lengths(model, cache=True, lengths=(20, 100))
    assert len(private_pools() - before) == 1, "one pool for all buckets"
    prefill.undo()
    del model, prefill
    torch._dynamo.reset()
    assert private_pools() <= before
