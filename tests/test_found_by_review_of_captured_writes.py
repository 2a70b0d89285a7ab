"""Faults that a review of the captured cache writes found: each was a wrong answer, or a crash."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from serving_models import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    Batch,
    Layer,
    PackedLM,
    pool_for,
)
from test_prefill_graph import assert_like_alone
from torch import nn

import fx_prefill
from fx_prefill import ForwardContext, PagedKVPool, PrefillGraph, forward_context
from fx_prefill.errors import ContextError
from fx_prefill.execution.reasons import FallbackReason
from fx_prefill.serving.attention.packed import gather, pack
from fx_prefill.serving.attention.sdpa import SdpaAttention

MAX_TOKENS = 64
CAPTURED = "cache writes captured"


def with_layers(kind: type[Changed], *places: int) -> PrefillGraph:
    """A warm graph of a model that has layers of this kind at some places."""
    torch._dynamo.reset()
    model = PackedLM()
    for place in places:
        model.model.layers[place] = kind(model.model.layers[place])
    graph = PrefillGraph(model, attention=SdpaAttention(pool_for()), max_tokens=MAX_TOKENS)
    graph.warmup()
    return graph


def in_two_chunks(graph: PrefillGraph, pool: PagedKVPool, lengths: list[int]) -> torch.Tensor:
    """Logits of the second halves of some requests, which read what the first ones wrote."""
    batch = Batch(pool, lengths)
    firsts = [length // 2 for length in lengths]
    graph.run(*batch.context(firsts))
    rest = [length - first for length, first in zip(lengths, firsts, strict=True)]
    logits = graph.run(*batch.context(rest, firsts)).logits
    assert logits is not None
    return logits


def assert_like_eager(graph: PrefillGraph, lengths: list[int]) -> None:
    pool = pool_for()
    alone = PrefillGraph(graph.model, attention="sdpa", pool=pool, enforce_eager=True)
    expected = in_two_chunks(alone, pool, lengths)
    seen = in_two_chunks(graph, graph.attention.pool, lengths)  # type: ignore[attr-defined]
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)


class Changed(nn.Module):
    """A layer that does what ``keys_and_values`` says to its keys and values."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def keys_and_values(self, k: Any, v: Any) -> tuple[Any, Any]:
        return k, v

    def attend(self, q: Any, k: Any, v: Any) -> torch.Tensor:
        return fx_prefill.attention(q, k, v, self.layer.layer_id)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        y = layer.norm(x)
        q = layer.q(y).view(-1, HEADS, HEAD_DIM) * turn
        k, v = layer.kv(y).view(-1, 2 * KV_HEADS, HEAD_DIM).chunk(2, 1)
        k, v = self.keys_and_values(k * turn, v)
        x = x + layer.o(self.attend(q, k, v).flatten(1))
        return x + layer.mlp(layer.after(x))


# --- what may be captured -----------------------------------------------------------------------


class LastKey(Changed):
    def keys_and_values(self, k: Any, v: Any) -> tuple[Any, Any]:
        return k[-1:].expand(k.shape[0], -1, -1), v


class FirstValue(Changed):
    def keys_and_values(self, k: Any, v: Any) -> tuple[Any, Any]:
        return k, v[:1].expand_as(v)


class Table(Changed):
    """Values that are no row of the forward."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.register_buffer("table", torch.randn(2 * MAX_TOKENS, KV_HEADS, HEAD_DIM))

    def keys_and_values(self, k: Any, v: Any) -> tuple[Any, Any]:
        return k, self.table[: k.shape[0]]


@pytest.mark.parametrize("kind", [LastKey, FirstValue, Table])
def test_keys_that_are_not_rows_of_a_segment_are_written_live(kind: type[Changed]) -> None:
    graph = with_layers(kind, 1)
    for length in (40, 2, 2 * MAX_TOKENS, 67):
        assert_like_eager(graph, [length])


class Twice(Changed):
    """Attends twice through the cache of one layer, to other keys each time."""

    def attend(self, q: Any, k: Any, v: Any) -> torch.Tensor:
        number = self.layer.layer_id
        first = fx_prefill.attention(q, k, v, number)
        return first + fx_prefill.attention(q, v, k, number)


def test_two_attentions_of_one_layer_write_in_their_order() -> None:
    graph = with_layers(Twice, 2)
    assert_like_eager(graph, [40, 15])
    assert CAPTURED not in str(graph.report())


class Shared(Changed):
    """Attends twice to the same keys, as layers that share a cache do."""

    def attend(self, q: Any, k: Any, v: Any) -> torch.Tensor:
        number = self.layer.layer_id
        return fx_prefill.attention(q, k, v, number) - fx_prefill.attention(2 * q, k, v, number)


def test_two_attentions_to_the_same_keys_are_captured() -> None:
    graph = with_layers(Shared, 2)
    assert_like_eager(graph, [40, 15])
    assert CAPTURED in str(graph.report())


POOLS: list[PagedKVPool] = []
"""What the operator below looks into."""


@torch.library.custom_op("fx_prefill_tests::look", mutates_args=("seen",))
def look(seen: torch.Tensor, like: torch.Tensor, layer: int) -> None:
    """An engine's own look at the cache, before the rows of this forward are in it."""
    seen[layer] = POOLS[-1].keys[layer].nan_to_num().double().sum()


class Looking(Changed):
    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.register_buffer("seen", torch.zeros(LAYERS, dtype=torch.float64))

    def attend(self, q: Any, k: Any, v: Any) -> torch.Tensor:
        look(self.seen, q, self.layer.layer_id)
        return super().attend(q, k, v)


def test_nothing_that_looks_at_the_cache_is_overtaken() -> None:
    graph = with_layers(Looking, 1)
    pool = graph.attention.pool  # type: ignore[attr-defined]
    POOLS.append(pool)
    layer: Any = graph.model.model.layers[1]  # type: ignore[union-attr,index]
    batch = Batch(pool, [40])
    seen = []
    for start in (0, 20):
        before = pool.keys[1].nan_to_num().double().sum()
        output = graph.replay(*batch.context([20], [start]))
        seen.append(layer.seen[1].item())
        torch.testing.assert_close(layer.seen[1], before)
    assert seen[0] == 0 != seen[1] and CAPTURED not in str(graph.report())
    assert_like_alone(graph, batch, output, [40])


# --- whose rows a graph wrote -------------------------------------------------------------------


class Asking(SdpaAttention):
    """Runs a forward of the same graph inside of a layer."""

    inner: Any = None

    def attend(self, q: Any, k: Any, v: Any, layer: Any, out: Any, ctx: Any) -> None:
        if layer.index == 1 and self.inner is not None:
            ask, self.inner = self.inner, None
            ask()
        super().attend(q, k, v, layer, out, ctx)


def test_a_forward_inside_a_layer_leaves_the_slots_of_the_outer_one() -> None:
    backend = Asking(pool_for())
    graph = PrefillGraph(PackedLM(), attention=backend, max_tokens=MAX_TOKENS)
    graph.warmup()
    outer, inner = Batch(backend.pool, [40]), Batch(backend.pool, [18], 1)
    seen: list[Any] = []
    backend.inner = lambda: seen.append(graph.run(*inner.context([9])))
    graph.replay(*outer.context([20]))
    assert not seen[0].replayed
    for batch, length in ((outer, 40), (inner, 18)):
        half = length // 2
        assert_like_alone(graph, batch, graph.replay(*batch.context([half], [half])), [length])


def test_a_capture_of_the_caller_keeps_the_slots_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = with_layers(Changed)
    pool = graph.attention.pool  # type: ignore[attr-defined]
    graph.replay(*Batch(pool, [20]).context([20]))
    variant, slots = graph._variants[None], graph._slots
    assert variant.graph is not None and slots is not None
    before = slots.of(MAX_TOKENS).clone()
    monkeypatch.setattr(variant.graph.runtime.recorder, "is_capturing", lambda: True)
    batch = Batch(pool, [30])
    output = graph.run(*batch.context([30]))
    assert not output.replayed and graph.refusals[str(FallbackReason.CALLER_CAPTURES)] == 1
    assert torch.equal(slots.of(MAX_TOKENS), before)
    assert_like_alone(graph, batch, output, [30])


class Switching(SdpaAttention):
    """Hands the later layers to another backend, which has a pool of its own."""

    other: Any = None

    def attend(self, q: Any, k: Any, v: Any, layer: Any, out: Any, ctx: Any) -> None:
        super().attend(q, k, v, layer, out, ctx)
        if layer.index == 1 and self.other is not None:
            self.other.init_forward_metadata(ctx)
            ctx.attention = self.other


def test_a_backend_of_the_later_layers_writes_its_rows_itself() -> None:
    backend = Switching(pool_for())
    graph = PrefillGraph(PackedLM(), attention=backend, max_tokens=MAX_TOKENS)
    graph.warmup()
    backend.other = SdpaAttention(pool_for())
    batch = Batch(backend.pool, [20])
    ctx, ids = batch.context([20])
    assert_like_alone(graph, batch, graph.replay(ctx, ids), [20])
    keys = backend.other.pool.read(2, ctx.write_locations)[0]
    assert keys.isfinite().all() and keys.any()


def test_the_backend_of_a_graph_stays_the_one_that_its_graphs_write_to() -> None:
    graph = PrefillGraph(PackedLM(), attention="sdpa", pool=pool_for())
    with pytest.raises(AttributeError, match="attention"):
        graph.attention = SdpaAttention(pool_for())  # type: ignore[misc]


class _Doubles:
    def forward(self, q: Any, k: Any, v: Any, layer: Any, out: Any, ctx: Any) -> None:
        super().forward(q, k, v, layer, out, ctx)  # type: ignore[misc]
        out.mul_(2)


class Mixed(_Doubles, SdpaAttention):
    pass


def _patched(pool: PagedKVPool) -> SdpaAttention:
    backend = SdpaAttention(pool)
    inner = backend.forward

    def forward(q: Any, k: Any, v: Any, layer: Any, out: Any, ctx: Any) -> None:
        inner(q, k, v, layer, out, ctx)
        out.mul_(2)

    backend.forward = forward  # type: ignore[method-assign]
    return backend


@pytest.mark.parametrize("make", [Mixed, _patched])
def test_any_forward_that_is_somebodys_own_is_called(make: Any) -> None:
    outputs = []
    for eager in (False, True):
        pool = pool_for()
        graph = PrefillGraph(PackedLM(), attention=make(pool), enforce_eager=eager)
        graph.warmup()
        output = graph.run(*Batch(pool, [20]).context([20]))
        assert output.replayed is not eager
        outputs.append(output.logits)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


# --- pools and contexts -------------------------------------------------------------------------


class Scaled(PagedKVPool):
    """A pool that keeps halves, as quantised ones keep scaled values."""

    def write(self, layer: int, locations: Any, k: Any, v: Any) -> None:
        super().write(layer, locations, k / 2, v / 2)

    def read(self, layer: int, locations: Any) -> tuple[Any, Any]:
        keys, values = super().read(layer, locations)
        return keys * 2, values * 2


def test_a_pool_with_a_reading_of_its_own_is_read_that_way() -> None:
    pool = Scaled(LAYERS, 40, 4, KV_HEADS, HEAD_DIM, dtype=torch.float32)
    batch = Batch(pool, [20])
    ctx, _ = batch.context([4], [16])
    rows = torch.randn(20, KV_HEADS, HEAD_DIM)
    pool.write(1, torch.tensor(pool.slots(batch.pages[0], 0, 20)), rows, 2 * rows)
    assert not pool.gathers_pages
    k, v = gather(pack(ctx, pool), 1, rows, rows)
    torch.testing.assert_close(k, rows)
    torch.testing.assert_close(v, 2 * rows)


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("v_head_dim", [HEAD_DIM, 4])
@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
def test_a_copy_of_a_pool_is_one_memory_still(copied: Any, v_head_dim: int, layout: Any) -> None:
    given = {"dtype": torch.float32, "layout": layout, "v_head_dim": v_head_dim}
    pool = PagedKVPool(2, 10, 4, KV_HEADS, HEAD_DIM, **given)
    pages = pool.allocate(2)
    slots = torch.tensor(pool.slots(pages, 0, 6))
    k, v = torch.randn(6, KV_HEADS, HEAD_DIM), torch.randn(6, KV_HEADS, v_head_dim)
    pool.write(0, slots, k, v)
    other = copied(pool)
    torch.testing.assert_close(other.read(0, slots), (k, v))
    other.write(1, slots, 2 * k, 2 * v)
    for read in (other.gathered_slots(slots)(1), other.read(1, slots)):
        torch.testing.assert_close(read, (2 * k, 2 * v))
    assert other.keys[1].any() and other.values[1].any() and not pool.keys[1].any()
    assert other.num_free == pool.num_free and other.allocate(1) == pool.allocate(1)


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
def test_a_copy_of_a_backend_has_prepared_nothing(copied: Any) -> None:
    graph = with_layers(Changed)
    pool = graph.attention.pool  # type: ignore[attr-defined]
    graph.replay(*Batch(pool, [20]).context([20]))
    backend = copied(graph.attention)
    other = PrefillGraph(PackedLM(), attention=backend, max_tokens=MAX_TOKENS)
    other.warmup()
    batch = Batch(backend.pool, [30])
    assert_like_alone(other, batch, other.replay(*batch.context([30])), [30])


def test_a_context_manager_is_entered_once_at_a_time() -> None:
    ctx = ForwardContext.from_lengths([3])
    published = forward_context(ctx, captured_bucket=8)
    with published:
        with pytest.raises(ContextError, match="entered already"), published:
            pass
        assert ctx.captured_bucket == 8
    assert ctx.captured_bucket == 0
    with published:  # and again, one after the other
        assert ctx.captured_bucket == 8
    assert ctx.captured_bucket == 0


def test_a_context_decorates_a_function_that_calls_itself() -> None:
    ctx = ForwardContext.from_lengths([3])
    seen: list[int] = []

    @forward_context(ctx, captured_bucket=8)
    def step(depth: int) -> None:
        if depth:
            step(depth - 1)
        seen.append(ctx.captured_bucket)

    step(2)
    assert seen == [8, 8, 8] and ctx.captured_bucket == 0


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
