"""Faults that a review of the engine seam found, each as what its user met."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_models import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    Batch,
    PackedDecoder,
    PackedLM,
    PlainBackend,
    pool_for,
)
from test_captured_attention_of_engines import Capturable
from test_distributed import run_pair
from test_prefill_graph import MAX_TOKENS, assert_like_alone, made, pool_of
from torch import distributed as dist
from torch import nn

from fx_prefill import (
    ForwardContext,
    ForwardMode,
    MultimodalInputs,
    PagedKVPool,
    PrefillGraph,
)
from fx_prefill.errors import CaptureError, ContextError, ServingError
from fx_prefill.execution.reasons import FallbackReason
from fx_prefill.serving.attention.captured import CapturedBatch
from fx_prefill.serving.attention.metadata import to_device
from fx_prefill.serving.decisions import Refusal

# ---- what is called like a view, and is none ----------------------------------------------------

_library = torch.library.Library("fx_prefill_test_views", "FRAGMENT")
_library.define("select(Tensor x) -> Tensor")
_library.define("fill(Tensor x, Tensor(a!) out) -> ()")
_library.define("flatten(Tensor x) -> Tensor")
for name, body in {
    "select": lambda x: x.flip(0) * 2,
    "fill": lambda x, out: [out.copy_(x.flip(0)), None][1],
    "flatten": lambda x: x + 1,
}.items():
    _library.impl(name, body, "CPU")
ops = torch.ops.fx_prefill_test_views
torch.library.register_fake("fx_prefill_test_views::select", torch.empty_like, lib=_library)
torch.library.register_fake("fx_prefill_test_views::flatten", torch.empty_like, lib=_library)
torch.library.register_fake("fx_prefill_test_views::fill", lambda x, out: None, lib=_library)


def _like_a_view(x: torch.Tensor) -> torch.Tensor:
    return ops.select(x)


def _like_a_reshape(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    ops.fill(x, out)
    return ops.flatten(out)


@pytest.mark.parametrize("mix", [_like_a_view, _like_a_reshape])
def test_operators_of_others_are_not_taken_for_views(mix: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(mix(self.before(x)))

    model = Model().requires_grad_(False)
    options = {"buckets": [16], "compiler": "eager"}
    compiled = torch.compile(model, backend="breakable_prefill", options=options)
    for _ in range(3):
        x = torch.randn(9, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), model(x))


# ---- the model changes --------------------------------------------------------------------------


def test_a_replaced_module_is_noticed() -> None:
    graph = made()
    batch = Batch(pool_of(graph), [9])
    ctx, ids = batch.context([9])
    assert graph.run(ctx, ids).replayed
    graph.model.model.layers[0].q = nn.Linear(HIDDEN, HEADS * HEAD_DIM).requires_grad_(False)
    output = graph.run(ctx, ids)
    assert not output.replayed
    assert graph.refusals[str(FallbackReason.MODULE_REPLACED)] == 1
    assert_like_alone(graph, batch, output, [9])
    graph.close()
    graph.warmup()
    output = graph.run(ctx, ids)
    assert output.replayed
    assert_like_alone(graph, batch, output, [9])


class _Scaled(PackedDecoder):
    """Holds a tensor and a number that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gain = torch.ones(HIDDEN), 1.0

    def forward(self, inputs_embeds: torch.Tensor, positions: torch.Tensor) -> Any:
        return super().forward(inputs_embeds * self.table * self.gain, positions)


def _replays_with_another(name: str) -> None:
    model = PackedLM()
    model.model = _Scaled().requires_grad_(False)
    graph = PrefillGraph(model, attention=PlainBackend(pool_for()), max_tokens=MAX_TOKENS)
    graph.warmup()
    batch = Batch(pool_of(graph), [9])
    ctx, ids = batch.context([9])
    assert_like_alone(graph, batch, graph.run(ctx, ids), [9])
    setattr(model.model, name, getattr(model.model, name) * 3)
    assert_like_alone(graph, batch, graph.run(ctx, ids), [9])


def test_a_replaced_tensor_that_is_not_registered_is_noticed() -> None:
    _replays_with_another("table")


@pytest.mark.xfail(
    strict=True,
    reason="numbers (and flags, and tensors in lists) of modules are read when they are traced; "
    "Dynamo's guards would notice a change, and the direct call has none",
)
def test_a_changed_number_of_a_module_is_noticed() -> None:
    _replays_with_another("gain")


def test_weights_of_another_dtype_run_the_model_and_not_its_trace() -> None:
    backend = Capturable(pool_for(dtype=torch.float64))
    graph = PrefillGraph(PackedLM(), attention=backend, max_tokens=MAX_TOKENS)
    graph.warmup()
    graph.model.double()
    batch = Batch(backend.pool, [9])
    ctx, ids = batch.context([9])
    output = graph.run(ctx, ids)
    assert not output.replayed and output.hidden_states.dtype is torch.float64
    assert graph.refusals[str(FallbackReason.WEIGHTS_CHANGED)] == 1
    assert not graph.replays


def test_what_captured_attention_falls_back_to_is_live() -> None:
    """Kernels of a bucket read offsets up to its end: they may not get the real rows alone."""
    backend = Capturable(pool_for())
    graph = PrefillGraph(PackedLM(), attention=backend, max_tokens=MAX_TOKENS)
    graph.warmup()
    seen, inner = [], backend.forward_captured

    def watched(q: torch.Tensor, *rest: Any) -> None:
        seen.append(q.shape[0])
        inner(q, *rest)

    backend.forward_captured = watched  # type: ignore[method-assign]
    runtime = graph._variants[None].captured
    assert runtime is not None
    runtime._running = True  # as from inside a break of its own
    batch = Batch(backend.pool, [9])
    ctx, ids = batch.context([9])
    output = graph.run(ctx, ids)
    assert seen == [] and backend.live_layers > 0 and not output.replayed
    assert ctx.captured_bucket == 0
    assert_like_alone(graph, batch, output, [9])


def test_close_frees_captures_though_pytorch_keeps_the_backend() -> None:
    graph = made()
    runtime = weakref.ref(graph._variants[None].graph.runtime)  # type: ignore[union-attr]
    graph.close()
    gc.collect()
    assert runtime() is None


# ---- ranks --------------------------------------------------------------------------------------


def _why_on_each_rank(graph: PrefillGraph, counts: list[int]) -> list[str | None]:
    """The decision of each data-parallel rank on one forward."""
    found = []
    for rank, count in enumerate(counts):
        modes = (ForwardMode.EXTEND,) * len(counts)
        ctx = ForwardContext.from_lengths([count], rank_num_tokens=counts, rank_modes=modes)
        graph._rank = rank
        found.append(graph.why_not(ctx))
    graph._rank = 0
    return found


def test_ranks_agree_where_one_has_one_row_or_none() -> None:
    graph = made()
    variant = graph._variants[None]
    object.__setattr__(variant, "takes_one_row", False)
    one = _why_on_each_rank(graph, [1, 9])
    assert one[0] is not None and one == [one[0]] * 2
    none = _why_on_each_rank(graph, [0, 9])
    assert none == ["rank 0 has no rows"] * 2
    assert _why_on_each_rank(graph, [2, 9]) == [None, None]


def test_a_mode_that_its_requests_contradict_is_an_error_between_ranks() -> None:
    modes = (ForwardMode.MIXED, ForwardMode.EXTEND)
    ctx = ForwardContext.from_lengths(
        [1, 1], num_decodes=2, mode=ForwardMode.MIXED, rank_num_tokens=(2, 9), rank_modes=modes
    )
    with pytest.raises(ContextError, match="no request of this rank extends"):
        made().why_not(ctx)


def test_layer_inputs_that_the_others_were_not_told_of_are_not_dropped() -> None:
    graph = made()
    fields = {"rank_num_tokens": (9, 9), "rank_modes": (ForwardMode.EXTEND,) * 2}
    ctx = ForwardContext.from_lengths([9], rank_layer_inputs=(False, False), **fields)
    with pytest.raises(ContextError, match="rank_layer_inputs"):
        graph.why_not(ctx, MultimodalInputs({"deepstack": 1}))


def _eager_on_one(rank: int) -> list[str]:
    graph = PrefillGraph(
        PackedLM(),
        attention=PlainBackend(pool_for()),
        max_tokens=MAX_TOKENS,
        enforce_eager=rank == 1,
        group=dist.group.WORLD,
    )
    with pytest.raises(ServingError) as caught:
        graph.warmup()
    return [str(caught.value)]


def _not_traced_on_one(rank: int) -> list[str]:
    graph = PrefillGraph(
        PackedLM(),
        attention=PlainBackend(pool_for()),
        max_tokens=MAX_TOKENS,
        group=dist.group.WORLD,
    )
    if rank == 1:
        graph.model.model.forward = lambda inputs_embeds, positions: 3
    with pytest.raises((AttributeError, TypeError, ServingError, CaptureError, IndexError)) as got:
        graph.warmup()
    return [str(got.value)]


def test_no_rank_waits_for_one_that_is_eager(tmp_path: Path) -> None:
    seen = run_pair(_eager_on_one, tmp_path)
    assert all("must be the same on all ranks" in text for (text,) in seen)


def test_no_rank_waits_for_one_that_cannot_trace(tmp_path: Path) -> None:
    seen = run_pair(_not_traced_on_one, tmp_path)
    assert "another rank could not trace the model" in seen[0][0]
    assert "another rank" not in seen[1][0]


# ---- what an engine hands over ------------------------------------------------------------------


def test_embeddings_of_another_width_are_not_broadcast() -> None:
    graph = made()
    ctx, _ = Batch(pool_of(graph), [9]).context([9])
    with pytest.raises(ContextError, match="required: rows of 24"):
        graph.run(ctx, inputs_embeds=torch.randn(9, 1))


@pytest.mark.parametrize("slots", [None, 1, 8])
def test_captured_attention_needs_all_write_locations_too(slots: int | None) -> None:
    backend = Capturable(pool_for())
    ctx, _ = Batch(backend.pool, [9]).context([9])
    assert backend.serves_captured(ctx)
    ctx.write_locations = None if slots is None else ctx.write_locations[:slots]  # type: ignore[index]
    assert not backend.serves_captured(ctx)


def test_negative_lengths_are_an_error() -> None:
    with pytest.raises(ContextError, match="no negative lengths"):
        ForwardContext.from_lengths([-2, 7])
    with pytest.raises(ContextError, match="no negative lengths"):
        ForwardContext.from_lengths([2, 7], [0, -1])


@pytest.mark.parametrize("inside", [True, False])
def test_made_inside_inference_mode_and_used_outside_or_the_reverse(inside: bool) -> None:
    with torch.inference_mode(inside):
        backend = Capturable(pool_for())
        graph = PrefillGraph(PackedLM(), attention=backend, max_tokens=MAX_TOKENS)
        graph.warmup()
    with torch.inference_mode(not inside):
        batch = Batch(backend.pool, [9])
        ctx, ids = batch.context([9])
        rows = graph.input_embeds(9)
        rows.copy_(graph.decoder.embedding(ids))
        output = graph.run(ctx, inputs_embeds=rows)
        assert output.replayed and backend.live_layers == 0
    with torch.inference_mode(inside):
        graph.input_embeds(9).zero_()
        assert_like_alone(graph, batch, output, [9])


def test_another_default_device_changes_nothing() -> None:
    """Engines set one while they load a model; what is copied to a device is made on the CPU."""
    cpu = torch.device("cpu")
    pool = PagedKVPool(1, 8, 4, 2, 8, dtype=torch.float32, device=cpu)
    pages = [pool.allocate(2)]
    captured = CapturedBatch(pool)
    captured.allocate(16)
    with torch.device("meta"):
        ctx = ForwardContext.from_lengths([5], device=cpu)
        table, (lens,) = pool.page_table(pages), to_device([[5]], cpu)
        captured.prepare(ctx, 16)
    assert {x.device for x in (ctx.positions, table, lens)} == {cpu}  # type: ignore[union-attr]


def test_a_warm_graph_without_buckets_does_not_ask_for_a_warm_up() -> None:
    def fails(bucket: int) -> None:
        raise CaptureError("not this one")

    graph = PrefillGraph(PackedLM(), attention=PlainBackend(pool_for()), max_tokens=16)
    graph._capture = fails  # type: ignore[method-assign]
    graph.warmup()
    ctx, _ = Batch(pool_of(graph), [9]).context([9])
    assert graph.why_not(ctx) == str(Refusal.NONE_LEFT)


def test_a_model_that_never_replays_says_so_when_it_is_run() -> None:
    graph = PrefillGraph(PackedLM(), attention=PlainBackend(pool_for()), task="embed")
    graph.warmup()
    ctx, ids = Batch(pool_of(graph), [9]).context([9])
    with pytest.raises(ServingError, match="an embedding model gives no next tokens"):
        graph.run(ctx, ids)
    with pytest.raises(ServingError, match="Call the model itself"):
        graph.input_embeds(9)


# ---- transformers models ------------------------------------------------------------------------


def _llama() -> tuple[Any, PagedKVPool]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    return model, PagedKVPool(2, 40, 4, 2, 8, dtype=torch.float32)


def _second_chunk(graph: PrefillGraph, pool: PagedKVPool) -> torch.Tensor:
    batch = Batch(pool, [12])
    graph.run(*batch.context([8]))
    output = graph.run(*batch.context([4], [8]))
    batch.release()
    return output.logits  # type: ignore[return-value]


def test_a_closed_graph_does_not_run_the_attention_that_it_gave_back() -> None:
    """It would write no cache, and a later chunk would not see the first."""
    model, pool = _llama()
    graph = PrefillGraph(model, pool=pool, max_tokens=32)
    graph.warmup()
    wanted = _second_chunk(graph, pool)
    graph.close()
    with pytest.raises(ServingError, match="'sdpa'; required: 'fx_prefill'"):
        _second_chunk(graph, pool)
    for held in (*pool.keys, *pool.values):
        held.zero_()
    graph.warmup()
    torch.testing.assert_close(_second_chunk(graph, pool), wanted)
    assert sum(graph.replays.values()) == 4


def test_closing_one_graph_of_a_model_leaves_the_other_its_attention() -> None:
    model, pool = _llama()
    graph = PrefillGraph(model, pool=pool, enforce_eager=True)
    other = PrefillGraph(model, pool=pool, enforce_eager=True)
    wanted = _second_chunk(other, pool)
    graph.close()
    graph.close()  # a second time gives nothing back
    for held in (*pool.keys, *pool.values):
        held.zero_()
    torch.testing.assert_close(_second_chunk(other, pool), wanted)
    other.close()
    assert model.config._attn_implementation == "sdpa"


def test_a_graph_that_cannot_be_made_leaves_the_model_as_it_was() -> None:
    model, pool = _llama()
    with pytest.raises(ServingError):
        PrefillGraph(model, pool=pool, decoder=nn.Linear(3, 3))
    assert model.config._attn_implementation == "sdpa"
