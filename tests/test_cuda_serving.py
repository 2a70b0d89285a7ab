"""PrefillGraph on a GPU: captured buckets, live attention, an engine's decode graphs beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from serving_models import HEAD_DIM, KV_HEADS, LAYERS, VOCAB, Batch, PackedLM, poison

from fx_prefill import ForwardContext, PagedKVPool, PrefillGraph
from fx_prefill.errors import ServingError
from fx_prefill.serving.attention.upload import HALF, Uploads

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

MAX_TOKENS = 128


def pool_on_gpu(dtype: torch.dtype) -> PagedKVPool:
    pool = PagedKVPool(LAYERS, 400, 4, KV_HEADS, HEAD_DIM, dtype=dtype, device="cuda")
    poison(pool)
    return pool


def made(attention: str, dtype: torch.dtype, **options: Any) -> PrefillGraph:
    model = PackedLM().to(dtype).cuda()
    graph = PrefillGraph(
        model, attention=attention, pool=pool_on_gpu(dtype), max_tokens=MAX_TOKENS, **options
    )
    graph.warmup()
    return graph


class GpuBatch(Batch):
    def __init__(self, pool: Any, lengths: list[int], seed: int = 0) -> None:
        super().__init__(pool, lengths, seed)
        self.ids = [ids.cuda() for ids in self.ids]

    def context(self, *args: Any, **fields: Any) -> Any:
        ctx, ids = super().context(*args, device="cuda", **fields)
        ctx.write_locations = ctx.write_locations.cuda()
        return ctx, ids


def alone(graph: PrefillGraph, ids: torch.Tensor) -> torch.Tensor:
    dtype = next(graph.model.parameters()).dtype
    eager = PrefillGraph(graph.model, attention="sdpa", pool=pool_on_gpu(dtype), enforce_eager=True)
    batch = GpuBatch(eager.attention.pool, [len(ids)])  # type: ignore[attr-defined]
    ctx, _ = batch.context([len(ids)])
    logits = eager.run(ctx, ids).logits
    assert logits is not None
    return logits[-1]


CASES = [
    ("sdpa", torch.float32, "eager"),
    ("sdpa", torch.float32, "inductor"),
    ("varlen", torch.bfloat16, "eager"),
    ("varlen", torch.bfloat16, "inductor"),
]


@pytest.mark.parametrize(("attention", "dtype", "compiler"), CASES)
def test_batches_give_what_requests_give_alone(
    attention: str, dtype: torch.dtype, compiler: str
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    graph = made(attention, dtype, compiler=compiler)
    pool = graph.attention.pool  # type: ignore[attr-defined]
    kept = []
    for seed, lengths in enumerate(([20], [128], [1], [60, 33, 7], [2], [100, 20], [17, 1, 1])):
        batch = GpuBatch(pool, [n + 9 for n in lengths], seed)
        first = graph.replay(*batch.context(lengths))
        ctx, ids = batch.context(
            [9] + [1] * (len(lengths) - 1), lengths, num_decodes=len(lengths) - 1
        )
        second = graph.replay(ctx, ids)
        ends = [lengths[0] + 9, *(n + 1 for n in lengths[1:])]
        for output, counts in ((first, lengths), (second, ends)):
            for number, end in enumerate(counts):
                wanted = alone(graph, batch.ids[number][:end])
                kept.append((output.logits[number], wanted))  # type: ignore[index]
        batch.release()
        poison(pool)
    close = (1e-3, 1e-4) if dtype is torch.float32 else (5e-2, 5e-2)
    for actual, wanted in kept:
        torch.testing.assert_close(actual, wanted, rtol=close[0], atol=close[1])
    assert sum(graph.replays.values()) == 14


@pytest.mark.parametrize(("attention", "dtype"), [(c[0], c[1]) for c in CASES[::2]])
@pytest.mark.parametrize("prefix", [0, 3], ids=["prompts", "mixed"])
def test_nothing_waits_for_the_device_in_a_replay(
    attention: str, dtype: torch.dtype, prefix: int
) -> None:
    graph = made(attention, dtype, compiler="eager")
    inside = {16, 32, 48, 64, 80, 96, 112, 128} if attention == "varlen" else set()
    assert graph._with_attention == inside
    batch = GpuBatch(graph.attention.pool, [60, 33, 7])  # type: ignore[attr-defined]
    ctx, ids = batch.context([50, 30, 1], [0, prefix, 2 * prefix], num_decodes=bool(prefix))
    graph.replay(ctx, ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.replay(ctx, ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_decode_graphs_of_the_engine_live_beside_it() -> None:
    """Both replayed in turns, each with a pool of its own; neither overwrites the other."""
    graph = made("sdpa", torch.float32, compiler="eager")
    head = graph.model.lm_head
    static = torch.zeros(4, head.in_features, device="cuda")  # type: ignore[arg-type]
    with torch.cuda.stream(torch.cuda.Stream()):
        head(static)
    torch.cuda.synchronize()
    decode = torch.cuda.CUDAGraph()
    with torch.cuda.graph(decode):
        decoded = head(static).sin() * 2
    batch = GpuBatch(graph.attention.pool, [60])  # type: ignore[attr-defined]
    ctx, ids = batch.context([60])
    wanted = alone(graph, ids)
    for step in range(4):
        static.fill_(step)
        decode.replay()
        output = graph.replay(ctx, ids)
        assert output.logits is not None and output.logits.shape == (1, VOCAB)
        torch.testing.assert_close(output.logits[0], wanted, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(decoded, head(static).sin() * 2)


def test_varlen_says_what_it_needs() -> None:
    with pytest.raises(ServingError, match="required: a CUDA pool of bfloat16"):
        PrefillGraph(PackedLM().cuda(), attention="varlen", pool=pool_on_gpu(torch.float32))


def test_uploads_that_the_device_has_not_reached_keep_their_numbers() -> None:
    target = torch.zeros(3, dtype=torch.int32, device="cuda")
    upload, seen = Uploads(target), []
    torch.cuda._sleep(int(2e8))
    for number in range(5 * HALF):
        upload([number, number + 1, number + 2])
        seen.append(target.clone())
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        other.wait_stream(torch.cuda.default_stream())
        for number in range(5 * HALF, 6 * HALF):
            upload([number, number + 1, number + 2])
            seen.append(target.clone())
    torch.cuda.synchronize()
    assert [x.tolist() for x in seen] == [[n, n + 1, n + 2] for n in range(6 * HALF)]


@pytest.mark.parametrize(("attention", "dtype"), [(c[0], c[1]) for c in CASES[::2]])
def test_a_replay_on_another_stream_leaves_the_slots_of_the_last_one(
    attention: str, dtype: torch.dtype
) -> None:
    graph = made(attention, dtype, compiler="eager")
    pool = graph.attention.pool  # type: ignore[attr-defined]
    batches = [GpuBatch(pool, [n], seed) for seed, n in enumerate((90, 50))]
    halves = [batch.context([len(batch.ids[0]) - 9]) for batch in batches]
    torch.cuda.synchronize()
    for ctx, ids in halves:  # the second is called while the device has not begun with the first
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(int(2e8))
            graph.replay(ctx, ids)
    torch.cuda.synchronize()
    close = (1e-3, 1e-4) if dtype is torch.float32 else (5e-2, 5e-2)
    for batch in batches:
        ids = batch.ids[0]
        output = graph.replay(*batch.context([9], [len(ids) - 9]))
        wanted = alone(graph, ids)
        torch.testing.assert_close(output.logits[0], wanted, rtol=close[0], atol=close[1])


class Copies:
    """Attention that can be in anybody's capture: each row's result is its query."""

    supports_capture = False
    supports_captured_writes = True
    reserved_slot = 0

    def init_forward_metadata(self, ctx: ForwardContext) -> None:
        pass

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        pass

    def attend(self, q: Any, k: Any, v: Any, layer: Any, out: Any, ctx: ForwardContext) -> None:
        out.copy_(q)

    forward = attend


def test_a_capture_of_the_caller_runs_the_model_as_it_is() -> None:
    model = PackedLM().cuda()
    graph = PrefillGraph(model, attention=Copies(), max_tokens=MAX_TOKENS, compiler="eager")
    graph.warmup()
    rows = torch.randn(40, model.model.embed_tokens.embedding_dim, device="cuda")
    slots = torch.arange(40, device="cuda")
    ctx = ForwardContext.from_lengths([40], device="cuda", write_locations=slots)
    expected = graph.replay(ctx, inputs_embeds=rows)
    theirs = torch.cuda.CUDAGraph()
    with torch.cuda.graph(theirs):
        captured = graph.run(ctx, inputs_embeds=rows)
    theirs.replay()
    torch.testing.assert_close(captured.hidden_states, expected.hidden_states)
    assert expected.replayed and not captured.replayed
    again = graph.replay(ctx, inputs_embeds=rows)
    torch.testing.assert_close(again.hidden_states, expected.hidden_states)
