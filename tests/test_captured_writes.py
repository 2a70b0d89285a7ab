"""Cache writes inside the captured graphs, whatever the batch is; attention itself stays live."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from serving_models import HEAD_DIM, KV_HEADS, LAYERS, Batch, PackedLM, PlainBackend, pool_for
from test_prefill_graph import assert_like_alone
from torch import nn

import fx_prefill
from fx_prefill import PagedKVPool, PrefillGraph
from fx_prefill.errors import ServingError
from fx_prefill.serving.attention.sdpa import SdpaAttention

MAX_TOKENS = 64


class Counting(SdpaAttention):
    """Counts what is live: layers that write and attend, and those that only attend."""

    def __init__(self, pool: PagedKVPool) -> None:
        super().__init__(pool)
        self.wrote = self.attended = 0
        self.fail_in_layer: int | None = None

    def forward(self, *args: Any) -> None:
        self.wrote += 1
        super().forward(*args)

    def attend(self, q: Any, k: Any, v: Any, layer: Any, out: Any, ctx: Any) -> None:
        self.attended += 1
        if layer.index == self.fail_in_layer:
            raise RuntimeError("the backend broke")
        super().attend(q, k, v, layer, out, ctx)

    def counts(self) -> tuple[int, int]:
        seen, self.wrote, self.attended = (self.wrote, self.attended), 0, 0
        return seen


def made(model: nn.Module | None = None, **options: Any) -> tuple[PrefillGraph, Counting]:
    backend = Counting(pool_for())
    given = {"attention": backend, "max_tokens": MAX_TOKENS, **options}
    graph = PrefillGraph(PackedLM() if model is None else model, **given)
    graph.warmup()
    return graph, backend


def written_slots(before: list[torch.Tensor], pool: PagedKVPool) -> set[int]:
    """Slots of which any layer has other bits than before."""
    changed: set[int] = set()
    for old, new in zip(before, (*pool.keys, *pool.values), strict=True):
        bits = [x.flatten(0, 1).flatten(1).view(torch.int32) for x in (old, new)]
        changed.update((bits[0] != bits[1]).any(1).nonzero().flatten().tolist())
    return changed


def copied(pool: PagedKVPool) -> list[torch.Tensor]:
    return [held.clone() for held in (*pool.keys, *pool.values)]


def test_every_kind_of_batch_is_written_by_the_graph_to_its_own_slots() -> None:
    graph, backend = made()
    pool = backend.pool
    batch = Batch(pool, [40, 9, 30])
    steps = [  # rows, prefixes, decodes
        ([20, 9, 12], [0, 0, 0], 0),
        ([20], [20], 0),
    ]
    for extends, prefixes, num_decodes in steps:
        ctx, ids = batch.context(extends, prefixes, num_decodes)
        before = copied(pool)
        graph.replay(ctx, ids)
        assert backend.counts() == (0, LAYERS)
        real = set(ctx.write_locations.tolist())
        assert written_slots(before, pool) in (real, real | {pool.dummy_slot})
    said = f"cache writes captured with the segments before {LAYERS} of {LAYERS} breaks"
    assert said in str(graph.report())
    mixed = Batch(pool, [40, 9, 30])
    graph.replay(*mixed.context([39, 8, 3]))
    ctx, ids = mixed.context([1, 1], [39, 8], num_decodes=1)
    assert_like_alone(graph, mixed, graph.replay(ctx, ids), [40, 9])
    alone = Batch(pool, [1])
    before = copied(pool)
    ctx, ids = alone.context([1])
    assert_like_alone(graph, alone, graph.replay(ctx, ids), [1])
    assert written_slots(before, pool) <= {*ctx.write_locations.tolist(), pool.dummy_slot}


def test_what_does_not_replay_writes_its_rows_itself() -> None:
    graph, backend = made()
    graph.replay(*Batch(backend.pool, [20]).context([20]))
    backend.counts()
    batch = Batch(backend.pool, [MAX_TOKENS + 1])
    output = graph.run(*batch.context([MAX_TOKENS + 1]))
    assert not output.replayed and backend.counts() == (LAYERS, LAYERS)
    assert_like_alone(graph, batch, output, [MAX_TOKENS + 1])


def test_another_backend_of_one_forward_writes_alone() -> None:
    graph, backend = made()
    graph.replay(*Batch(backend.pool, [20]).context([20]))
    kept = copied(backend.pool)
    other = PlainBackend(pool_for())
    batch = Batch(other.pool, [30])
    ctx, ids = batch.context([30], attention=other)
    backend.counts()
    assert_like_alone(graph, batch, graph.replay(ctx, ids), [30])
    assert backend.counts() == (0, 0)
    assert written_slots(kept, backend.pool) <= {backend.pool.dummy_slot}


def test_weights_that_moved_are_captured_again_into_the_slots_of_this_forward() -> None:
    graph, backend = made()
    first, second = Batch(backend.pool, [20]), Batch(backend.pool, [33], 1)
    graph.replay(*first.context([20]))
    linear: Any = graph.model.model.layers[1].mlp[0]  # type: ignore[union-attr,index]
    linear.weight = nn.Parameter(linear.weight.detach() * 3, requires_grad=False)
    before = copied(backend.pool)
    ctx, ids = second.context([33])
    backend.counts()
    assert_like_alone(graph, second, graph.replay(ctx, ids), [33])
    allowed = {*ctx.write_locations.tolist(), backend.pool.dummy_slot}
    assert written_slots(before, backend.pool) <= allowed
    assert backend.counts()[0] == 0


def test_a_second_warm_up_writes_to_no_request() -> None:
    graph, backend = made()
    graph.replay(*Batch(backend.pool, [20]).context([20]))
    before = copied(backend.pool)
    graph.close()
    graph.warmup()
    assert written_slots(before, backend.pool) <= {backend.pool.dummy_slot}


def test_a_layer_that_raises_leaves_the_next_forward_right() -> None:
    graph, backend = made()
    batch = Batch(backend.pool, [20])
    backend.fail_in_layer = 3
    with pytest.raises(RuntimeError, match="broke"):
        graph.replay(*batch.context([20]))
    backend.fail_in_layer = None
    assert_like_alone(graph, batch, graph.replay(*batch.context([20])), [20])


class Late(nn.Module):
    """A layer whose keys are made in the break: they are flipped along the tokens twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        inner: Any = self.layer
        y = inner.norm(x)
        q = inner.q(y).view(-1, 4, HEAD_DIM) * turn
        k, v = inner.kv(y).view(-1, 2 * KV_HEADS, HEAD_DIM).chunk(2, 1)
        k = (k * turn).flip(0).flip(0)
        x = x + inner.o(fx_prefill.attention(q, k, v, inner.layer_id).flatten(1))
        return x + inner.mlp(inner.after(x))


def test_keys_that_a_break_makes_are_written_by_breaks_in_all_layers() -> None:
    model = PackedLM()
    model.model.layers[2] = Late(model.model.layers[2])
    graph, backend = made(model)
    batch = Batch(backend.pool, [20])
    output = graph.replay(*batch.context([20]))
    assert backend.counts() == (LAYERS, LAYERS)
    assert_like_alone(graph, batch, output, [20])


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_unmodified_models_write_in_the_graph(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    name = {"qwen3": "Qwen3", "gemma3": "Gemma3Text"}[family]
    causal = {"qwen3": "Qwen3", "gemma3": "Gemma3"}[family]
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=61,
    )
    model = getattr(transformers, f"{causal}ForCausalLM")(config).eval()
    pool = PagedKVPool(2, 60, 4, 2, 16, dtype=torch.float32)
    backend = Counting(pool)
    graph = PrefillGraph(model, attention=backend, max_tokens=32)
    graph.warmup()
    batch = Batch(pool, [20, 5])
    replayed = graph.replay(*batch.context([20, 5]))
    assert backend.counts() == (0, 2)
    eager = PrefillGraph(model, attention="sdpa", pool=pool, enforce_eager=True)
    expected = eager.run(*batch.context([20, 5]))
    torch.testing.assert_close(replayed.logits, expected.logits, rtol=1e-4, atol=1e-5)


class Forward(SdpaAttention):
    """Somebody's own, made when ``forward`` was all there was."""

    def forward(self, q: Any, k: Any, v: Any, layer: Any, out: Any, ctx: Any) -> None:
        super().forward(q, k, v, layer, out, ctx)
        out.mul_(2)


def test_a_forward_that_is_overridden_alone_is_what_runs() -> None:
    pool = pool_for()
    graph = PrefillGraph(PackedLM(), attention=Forward(pool), max_tokens=MAX_TOKENS)
    graph.warmup()
    batch = Batch(pool, [20])
    replayed = graph.replay(*batch.context([20]))
    eager = PrefillGraph(graph.model, attention=Forward(pool), enforce_eager=True)
    expected = eager.run(*batch.context([20]))
    torch.testing.assert_close(replayed.logits, expected.logits, rtol=1e-4, atol=1e-5)
    assert "cache writes captured" not in str(graph.report())


def test_graphs_of_several_sizes_share_a_backend() -> None:
    graph, backend = made()
    large = PrefillGraph(graph.model, attention=backend, max_tokens=2 * MAX_TOKENS)
    large.warmup()
    small, wide = Batch(backend.pool, [20]), Batch(backend.pool, [100], 1)
    backend.counts()
    for one, batch, num_rows in ((graph, small, 20), (large, wide, 100), (graph, small, 20)):
        assert_like_alone(one, batch, one.replay(*batch.context([num_rows])), [num_rows])
    assert_like_alone(large, wide, large.replay(*wide.context([5], [95])), [100])


class Incomplete(PlainBackend):
    supports_captured_writes = True


def test_a_backend_that_promises_captured_writes_has_all_of_them() -> None:
    with pytest.raises(ServingError, match=r"without reserved_slot, write, attend"):
        PrefillGraph(PackedLM(), attention=Incomplete(pool_for()))
