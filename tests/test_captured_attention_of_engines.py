"""Attention of an engine inside the captured graphs: prompts only, whatever else stays live."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from serving_models import HIDDEN, Batch, PackedLM, PlainBackend, poison, pool_for
from test_prefill_graph import alone, assert_like_alone, pool_of

from fx_prefill import PrefillGraph
from fx_prefill.errors import ServingError
from fx_prefill.execution.merge import MergedSegment
from fx_prefill.serving.attention.captured import CapturedBatch

MAX_TOKENS = 64


class Capturable(PlainBackend):
    """Reads what a captured kernel would: offsets and slots at fixed addresses."""

    supports_capture = True

    def __init__(self, pool: Any, leaks: bool = False) -> None:
        super().__init__(pool)
        self.captured = CapturedBatch(pool, max_requests=3)
        self.leaks = leaks
        self.live_layers = 0

    def allocate_captured(self, max_tokens: int) -> None:
        self.captured.allocate(max_tokens)

    def serves_captured(self, ctx: Any) -> bool:
        return self.captured.serves(ctx)

    def prepare_captured(self, ctx: Any, bucket: int) -> None:
        self.captured.prepare(ctx, bucket)

    def forward(self, *args: Any) -> None:
        self.live_layers += 1
        super().forward(*args)

    def forward_captured(self, q: Any, k: Any, v: Any, layer: Any, out: Any) -> None:
        batch = self.captured.batch(q.shape[0])
        self.pool.write(layer.index, batch.write_locations, k, v)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        offsets = [0, q.shape[0]] if self.leaks else batch.cu_q.tolist()
        for start, stop in zip(offsets, offsets[1:], strict=False):
            rows = slice(start, stop)
            scores = torch.einsum("qhd,khd->hqk", q[rows], k[rows]) * layer.scale
            hidden = torch.ones(stop - start, stop - start).triu(1).bool()
            if self.leaks:
                hidden = torch.zeros_like(hidden)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, v[rows])


def made(backend: Any) -> PrefillGraph:
    graph = PrefillGraph(PackedLM(), attention=backend, max_tokens=MAX_TOKENS)
    graph.warmup()
    return graph


def test_prompts_are_one_recording_and_the_rest_is_live() -> None:
    backend = Capturable(pool_for())
    graph = made(backend)
    runtime = graph._variants[None].captured
    assert runtime is not None
    for program in runtime._captures.programs.values():
        (part,) = program._compiled.partitions
        assert isinstance(program._compiled.segments[part.index], MergedSegment)
    kept = []
    for seed, lengths in enumerate(([20], [60], [1], [7, 5, 30], [2, 2], [64], [33, 1])):
        batch = Batch(backend.pool, [n + 2 for n in lengths], seed)
        first = graph.replay(*batch.context(lengths))
        assert backend.live_layers == 0
        assert_like_alone(graph, batch, first, lengths)
        decodes = len(lengths) - 1
        ctx, ids = batch.context([2] + [1] * decodes, lengths, num_decodes=decodes)
        second = graph.replay(ctx, ids)
        assert backend.live_layers > 0
        backend.live_layers = 0
        kept.append((batch, first, lengths))
        kept.append((batch, second, [lengths[0] + 2, *(n + 1 for n in lengths[1:])]))
    for batch, output, ends in kept:
        assert_like_alone(graph, batch, output, ends)


def test_more_requests_than_were_captured_are_live() -> None:
    backend = Capturable(pool_for())
    graph = made(backend)
    batch = Batch(backend.pool, [5, 6, 7, 8])
    output = graph.replay(*batch.context([5, 6, 7, 8]))
    assert backend.live_layers > 0
    assert_like_alone(graph, batch, output, [5, 6, 7, 8])


def test_padding_is_written_to_the_reserved_slot_alone() -> None:
    backend = Capturable(pool_for())
    graph = made(backend)
    pool = backend.pool
    long, short = Batch(pool, [60], 1), Batch(pool, [20], 2)
    graph.replay(*long.context([60]))
    ctx, ids = short.context([20])
    before = [x.clone() for x in (*pool.keys, *pool.values)]
    graph.replay(ctx, ids)
    allowed = {pool.dummy_slot, *ctx.write_locations.tolist()}
    for old, new in zip(before, (*pool.keys, *pool.values), strict=True):
        same = [x.view(-1, *x.shape[2:]).flatten(1).view(torch.int32) for x in (old, new)]
        changed = (same[0] != same[1]).any(1).nonzero().flatten().tolist()
        assert set(changed) <= allowed
    batch = Batch(pool, [3], 3)
    assert_like_alone(graph, batch, graph.replay(*batch.context([3])), [3])


def test_garbage_of_longer_forwards_stays_hidden() -> None:
    backend = Capturable(pool_for())
    graph = made(backend)
    for seed, n in enumerate((60, 20, 33, 1)):
        batch = Batch(backend.pool, [n], seed)
        ctx, ids = batch.context([n])
        graph.replay(ctx, inputs_embeds=torch.full((n, HIDDEN), float("nan")))
        poison(backend.pool)
        torch.testing.assert_close(
            graph.replay(ctx, ids).logits[0],  # type: ignore[index]
            alone(graph, ids)[-1],
            rtol=1e-4,
            atol=1e-5,
        )


def test_attention_that_lets_padding_through_is_not_captured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody has to believe a backend: the check of the padding proof runs its kernel."""
    backend = Capturable(pool_for(), leaks=True)
    graph = made(backend)
    assert "padded rows reach real rows" in caplog.text
    batch = Batch(backend.pool, [20])
    assert_like_alone(graph, batch, graph.replay(*batch.context([20])), [20])


def test_one_backend_serves_one_size() -> None:
    backend = Capturable(pool_for())
    made(backend)
    with pytest.raises(ServingError, match="make a backend of its own for each PrefillGraph"):
        backend.allocate_captured(MAX_TOKENS + 1)
    assert pool_of(PrefillGraph(PackedLM(), attention=backend)) is backend.pool
