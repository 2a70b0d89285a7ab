"""PrefillGraph: which forwards replay, and that those that do give what eager ones give."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from serving_models import (
    HIDDEN,
    LAYERS,
    VOCAB,
    Batch,
    PackedLM,
    PlainBackend,
    poison,
    pool_for,
)
from torch import nn

import fx_prefill
from fx_prefill import ForwardContext, ForwardMode, MultimodalInputs, PrefillGraph
from fx_prefill.errors import (
    ContextError,
    FallbackError,
    NotCompiledError,
    OptionError,
    ServingError,
)
from fx_prefill.execution.reasons import FallbackReason
from fx_prefill.serving.context import current_context
from fx_prefill.serving.decisions import Refusal

MAX_TOKENS = 64


def made(**options: Any) -> PrefillGraph:
    """A warm graph of PackedLM over a pool of its own."""
    given = {"attention": PlainBackend(pool_for()), "max_tokens": MAX_TOKENS, **options}
    graph = PrefillGraph(PackedLM(), **given)
    graph.warmup()
    return graph


@pytest.fixture(scope="module")
def shared() -> PrefillGraph:
    """One warm graph for the tests that change nothing of it."""
    torch._dynamo.reset()
    with torch.no_grad():
        return made(aux_hidden={"draft": {"aux": True}})


def pool_of(graph: PrefillGraph) -> Any:
    return graph.attention.pool  # type: ignore[attr-defined]


def alone(graph: PrefillGraph, ids: torch.Tensor) -> torch.Tensor:
    """Logits of one whole request, run eagerly in a pool of its own: [num_tokens, vocab]."""
    eager = PrefillGraph(graph.model, attention=PlainBackend(pool_for()), enforce_eager=True)
    batch = Batch(pool_of(eager), [len(ids)])
    ctx, _ = batch.context([len(ids)])
    return eager.run(ctx, ids, logits_rows=torch.arange(len(ids))).logits  # type: ignore[return-value]


def assert_like_alone(graph: PrefillGraph, batch: Batch, output: Any, ends: list[int]) -> None:
    for number, end in enumerate(ends):
        wanted = alone(graph, batch.ids[number][:end])[-1]
        torch.testing.assert_close(output.logits[number], wanted, rtol=1e-4, atol=1e-5)


# ---- the answers --------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[1], [2], [16], [17], [64], [20, 7, 30], [1, 1, 1]])
def test_whole_prompts(shared: PrefillGraph, lengths: list[int]) -> None:
    batch = Batch(pool_of(shared), lengths, seed=sum(lengths))
    ctx, ids = batch.context(lengths)
    output = shared.replay(ctx, ids)
    assert output.replayed and output.hidden_states.shape == (sum(lengths), HIDDEN)
    assert_like_alone(shared, batch, output, lengths)


def test_chunks_prefix_hits_and_decodes_in_one_batch(shared: PrefillGraph) -> None:
    batch = Batch(pool_of(shared), [40, 21, 9, 13])
    ctx, ids = batch.context([24, 20, 8, 12])
    shared.replay(ctx, ids)
    # A second chunk, a whole rest, two that decode one token.
    ctx, ids = batch.context([10, 1, 1, 1], [24, 20, 8, 12], num_decodes=2)
    assert ctx.mode is ForwardMode.MIXED
    output = shared.replay(ctx, ids)
    assert output.replayed
    assert_like_alone(shared, batch, output, [34, 21, 9, 13])


def test_alternating_buckets_and_garbage_in_the_padding(shared: PrefillGraph) -> None:
    """Rows that a longer forward left behind, NaN among them, do not reach a shorter one."""
    for number, n in enumerate((60, 17, 3, 64, 33, 1, 16, 50, 2)):
        batch = Batch(pool_of(shared), [n], seed=number)
        ctx, ids = batch.context([n])
        if number % 3 == 0:
            bad = torch.full((n, HIDDEN), float("nan"))
            shared.replay(ctx, inputs_embeds=bad)
            poison(pool_of(shared))
        assert_like_alone(shared, batch, shared.replay(ctx, ids), [n])
        batch.release()


def test_slots_of_others_stay_as_they_are(shared: PrefillGraph) -> None:
    pool = pool_of(shared)
    others, batch = Batch(pool, [30, 9]), Batch(pool, [21])
    ctx, ids = others.context([30, 9])
    shared.replay(ctx, ids)
    before = [x.clone() for x in (*pool.keys, *pool.values)]
    ctx, ids = batch.context([21])
    shared.replay(ctx, ids)
    written = ctx.write_locations
    for old, new in zip(before, (*pool.keys, *pool.values), strict=True):
        kept = torch.ones(pool.num_pages * pool.page_size, dtype=torch.bool)
        kept[written] = False
        rows = [x.view(-1, *x.shape[2:])[kept].view(torch.int32) for x in (old, new)]
        assert torch.equal(*rows)


def test_results_are_the_callers_own(shared: PrefillGraph) -> None:
    batch = Batch(pool_of(shared), [20])
    ctx, ids = batch.context([20])
    first = shared.replay(ctx, ids)
    kept = copy.deepcopy((first.logits, first.hidden_states))
    for seed in range(3):
        other = Batch(pool_of(shared), [25], seed=seed)
        shared.replay(*other.context([25]))
    assert torch.equal(first.logits, kept[0])  # type: ignore[arg-type]
    assert torch.equal(first.hidden_states, kept[1])


def test_text_and_multimodal_forwards_replay_the_same_graphs() -> None:
    graph = made()
    batch = Batch(pool_of(graph), [20])
    ctx, ids = batch.context([20])
    text = graph.replay(ctx, ids)
    rows = graph.input_embeds(20).copy_(graph.decoder.embedding(ids))
    image = graph.replay(ctx, inputs_embeds=rows, multimodal=MultimodalInputs())
    assert torch.equal(text.hidden_states, image.hidden_states)
    assert graph.replays == {"extend": 1, "extend, multimodal": 1}
    (runtime,) = graph.report().graphs
    assert runtime.replays == {32: 2} and runtime.recaptures == 0
    assert fx_prefill.report(graph) == graph.report()
    with pytest.raises(NotCompiledError, match=r"PrefillGraph has a warmup\(\) of its own"):
        fx_prefill.warmup(graph)


def test_rows_asked_for_and_accepted_rows(shared: PrefillGraph) -> None:
    batch = Batch(pool_of(shared), [12, 20])
    ctx, ids = batch.context([12, 20])
    every = shared.replay(ctx, ids, logits_rows=torch.arange(32)).logits
    assert every is not None
    last = shared.replay(ctx, ids).logits
    torch.testing.assert_close(last, every[[11, 31]])
    ctx.accept_lengths = torch.tensor([3, 5])
    torch.testing.assert_close(shared.replay(ctx, ids).logits, every[[2, 16]])


def test_declared_auxiliary_states_are_a_variant_of_their_own(shared: PrefillGraph) -> None:
    batch = Batch(pool_of(shared), [20])
    ctx, ids = batch.context([20], aux_hidden="draft")
    output = shared.replay(ctx, ids)
    wanted = shared._run_eagerly(ctx, shared.decoder.embedding(ids), None, None)
    assert len(output.aux_hidden_states) == 2
    for actual, expected in zip(output.aux_hidden_states, wanted.aux_hidden_states, strict=True):
        assert actual.shape == (20, HIDDEN)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# ---- decisions ----------------------------------------------------------------------------------


def plain(lengths: list[int], num_decodes: int = 0, **fields: Any) -> Any:
    return ForwardContext.from_lengths(lengths, num_decodes=num_decodes, **fields)


@pytest.mark.parametrize(
    ("ctx", "reason"),
    [
        (plain([1, 1], num_decodes=2), Refusal.DECODE),
        (plain([]), Refusal.IDLE),
        (plain([40, 25]), Refusal.TOO_LONG),
        (plain([20], aux_hidden="other"), Refusal.AUX_HIDDEN),
        (plain([30, 1, 1], num_decodes=2), None),
        (plain([64]), None),
        (plain([1]), None),
        (plain([20], aux_hidden="draft"), None),
    ],
)
def test_what_replays(shared: PrefillGraph, ctx: Any, reason: Refusal | None) -> None:
    assert shared.can_run(ctx) is (reason is None)
    seen = shared.why_not(ctx)
    assert (seen is None) if reason is None else (seen or "").startswith(str(reason))


def test_a_refused_forward_is_an_error_or_runs_eagerly() -> None:
    graph = made()
    batch = Batch(pool_of(graph), [MAX_TOKENS + 1])
    ctx, ids = batch.context([MAX_TOKENS + 1])
    said = "above the largest captured bucket (65 tokens, bucket 64)"
    assert graph.why_not(ctx) == said
    with pytest.raises(FallbackError, match=re.escape(f"does not replay: {said}. Ask")):
        graph.replay(ctx, ids)
    output = graph.run(ctx, ids)
    assert not output.replayed
    assert graph.refusals == {str(Refusal.TOO_LONG): 1} and not graph.replays
    assert_like_alone(graph, batch, output, [MAX_TOKENS + 1])


def test_before_warmup_nothing_replays_and_warmup_runs_nothing() -> None:
    backend = PlainBackend(pool_for())
    backend.forward = None  # type: ignore[method-assign,assignment]
    before = [x.clone() for x in backend.pool.keys]
    graph = PrefillGraph(PackedLM(), attention=backend, max_tokens=MAX_TOKENS)
    assert graph.why_not(plain([20])) == str(Refusal.NOT_CAPTURED)
    graph.warmup()
    assert graph.can_run(plain([20]))
    for old, new in zip(before, backend.pool.keys, strict=True):
        assert torch.equal(old.view(torch.int32), new.view(torch.int32))


@pytest.mark.parametrize(
    ("options", "buckets"),
    [
        ({"max_tokens": 48}, (16, 32, 48)),
        ({"max_tokens": 2048, "chunked_prefill_size": 40}, (16, 32, 40)),
        ({"buckets": [8, 50], "chunked_prefill_size": 16}, (8, 50)),
    ],
)
def test_the_ladder(options: dict[str, Any], buckets: tuple[int, ...]) -> None:
    graph = PrefillGraph(PackedLM(), attention=PlainBackend(pool_for()), **options)
    graph.warmup()
    assert graph._rules.buckets == buckets


def test_without_padding_only_exact_sizes_replay() -> None:
    graph = made(padding=False, max_tokens=32)
    assert graph.can_run(plain([16])) and graph.can_run(plain([10, 22]))
    said = str(Refusal.EXACT_ONLY)
    assert graph.why_not(plain([17])) == f"{said} (17 tokens, nearest buckets 16 and 32)"
    assert graph.why_not(plain([3])) == f"{said} (3 tokens, nearest bucket 16)"
    graph.run(*Batch(pool_of(graph), [17]).context([17]))
    assert graph.refusals == {said: 1}


def test_a_bucket_far_above_the_count_is_not_used() -> None:
    graph = made(buckets=[8, 64])
    assert graph.can_run(plain([5])) and graph.can_run(plain([32]))
    said = "20 tokens, bucket 64, 3.2 times as many; accepted: 2 times"
    assert graph.why_not(plain([20])) == f"{Refusal.PADDING_RATIO} ({said})"
    graph.run(*Batch(pool_of(graph), [20]).context([20]))
    assert graph.refusals == {str(Refusal.PADDING_RATIO): 1}


def encoder() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.BertModel(
        transformers.BertConfig(**small, intermediate_size=24, vocab_size=VOCAB)
    )


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (PackedLM, {"enforce_eager": True}, Refusal.EAGER),
        (PackedLM, {"task": "embed"}, Refusal.EMBEDDING),
        (encoder, {}, Refusal.ENCODER),
    ],
)
def test_models_that_never_replay(
    model: Callable[[], nn.Module], options: dict[str, Any], reason: Refusal
) -> None:
    graph = PrefillGraph(model(), attention=PlainBackend(pool_for()), **options)
    graph.warmup()
    assert graph.why_not(plain([20])) == str(reason)


def test_inputs_of_single_layers_run_eagerly() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = PackedLM().model
            self.embed_tokens, self.layers = self.inner.embed_tokens, self.inner.layers

        def forward(
            self,
            inputs_embeds: torch.Tensor,
            positions: torch.Tensor,
            deepstack: torch.Tensor | None = None,
        ) -> torch.Tensor:
            rows = self.inner(inputs_embeds, positions)
            return rows if deepstack is None else rows + deepstack

    graph = PrefillGraph(Deep(), attention=PlainBackend(pool_for()), max_tokens=MAX_TOKENS)
    graph.warmup()
    batch = Batch(pool_of(graph), [20])
    ctx, ids = batch.context([20])
    deep = MultimodalInputs({"deepstack": torch.ones(20, HIDDEN)})
    assert graph.why_not(ctx, deep) == str(Refusal.LAYER_INPUTS)
    with_it = graph.run(ctx, ids, multimodal=deep).hidden_states
    assert graph.can_run(ctx, MultimodalInputs())
    without = graph.run(ctx, ids, multimodal=MultimodalInputs()).hidden_states
    torch.testing.assert_close(with_it, without + 1)


def test_other_breaks_see_no_row_of_padding() -> None:
    """One row runs beside a row of padding, which only the attention operator knows to leave."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = PackedLM().model
            self.embed_tokens, self.layers = self.inner.embed_tokens, self.inner.layers

        def forward(self, inputs_embeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            x = self.inner(inputs_embeds, positions)
            return x - x.mean(0, keepdim=True)

    graph = PrefillGraph(Centred(), attention=PlainBackend(pool_for()), max_tokens=MAX_TOKENS)
    graph.warmup()
    for n in (1, 2, 20):
        batch = Batch(pool_of(graph), [n])
        ctx, ids = batch.context([n])
        assert graph.why_not(ctx) == (str(Refusal.ONE_ROW) if n == 1 else None)
        found = graph.run(ctx, ids).hidden_states
        torch.testing.assert_close(found.mean(0), torch.zeros(HIDDEN), rtol=0, atol=1e-5)


# ---- several ranks -----------------------------------------------------------------------------


def ranks(counts: list[int], **fields: Any) -> dict[str, Any]:
    """The replicated fields of data-parallel ranks with these token counts, this one the first."""
    modes = [ForwardMode.EXTEND if n else ForwardMode.IDLE for n in counts]
    return {"rank_num_tokens": counts, "rank_modes": modes, **fields}


def test_every_rank_takes_the_bucket_of_the_largest() -> None:
    graph = made()
    batch = Batch(pool_of(graph), [20])
    ctx, ids = batch.context([20], **ranks([20, 50, 33]))
    assert_like_alone(graph, batch, graph.replay(ctx, ids), [20])
    assert graph.report().graphs[0].replays == {64: 1}
    assert list(ctx.rank_num_tokens or ()) == [20, 50, 33]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (ranks([20, 0]), "rank 1 is in mode idle"),
        (ranks([20, 90]), "bucket (90 tokens on the largest rank, bucket 64)"),
        (ranks([20, 5], rank_aux_hidden=[None, "draft"]), "rank 1 has 'draft'"),
        (ranks([20, 5], rank_layer_inputs=[False, True]), str(Refusal.LAYER_INPUTS)),
        (ranks([20, 5], rank_layer_inputs=[False, False]), None),
    ],
)
def test_what_one_rank_does_decides_for_all(
    shared: PrefillGraph, fields: dict[str, Any], reason: str | None
) -> None:
    seen = shared.why_not(plain([20], **fields))
    assert (seen is None) if reason is None else (seen is not None and reason in seen)


def test_what_other_ranks_cannot_know_is_an_error(shared: PrefillGraph) -> None:
    with pytest.raises(ContextError, match="set rank_aux_hidden"):
        shared.can_run(plain([20], aux_hidden="draft", **ranks([20, 5])))
    with pytest.raises(ContextError, match="set rank_layer_inputs"):
        shared.can_run(plain([20], **ranks([20, 5])), MultimodalInputs({"deepstack": 1}))


# ---- failures -----------------------------------------------------------------------------------


def test_a_backend_that_fails_leaves_the_context_and_the_next_forward_right() -> None:
    graph = made()
    batch = Batch(pool_of(graph), [20, 5])
    ctx, ids = batch.context([20, 5], rank_num_requests=[2])
    before = {k: v for k, v in vars(ctx).items() if not isinstance(v, torch.Tensor)}
    graph.attention.fail_in_layer = 3  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="the backend broke"):
        graph.replay(ctx, ids)
    assert {k: v for k, v in vars(ctx).items() if not isinstance(v, torch.Tensor)} == before
    with pytest.raises(ContextError, match="forward_context"):
        current_context()
    graph.attention.fail_in_layer = None  # type: ignore[attr-defined]
    assert_like_alone(graph, batch, graph.replay(ctx, ids), [20, 5])


def test_replaced_weights_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    graph = made()
    batch = Batch(pool_of(graph), [20])
    ctx, ids = batch.context([20])
    graph.replay(ctx, ids)
    first = graph.model.model.layers[1].mlp[0]  # type: ignore[union-attr,index]
    first.weight = nn.Parameter(first.weight.detach() * 3, requires_grad=False)  # type: ignore[union-attr]
    assert_like_alone(graph, batch, graph.replay(ctx, ids), [20])
    assert "weights have moved" in caplog.text
    assert graph.report().graphs[0].recaptures == 1


def test_a_forward_that_falls_back_reads_the_weights_of_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = made()
    batch = Batch(pool_of(graph), [20])
    ctx, ids = batch.context([20])
    graph.replay(ctx, ids)
    runtime = graph._graph(None).runtime
    monkeypatch.setattr(runtime, "decide", lambda *args, **given: FallbackReason.GUARD)
    first = graph.model.model.layers[1].mlp[0]  # type: ignore[union-attr,index]
    first.weight = nn.Parameter(first.weight.detach() * 3, requires_grad=False)  # type: ignore[union-attr]
    assert_like_alone(graph, batch, graph.replay(ctx, ids), [20])
    assert graph.report().graphs[0].fallbacks == {str(FallbackReason.GUARD): 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": None}, "got neither of input_ids and inputs_embeds"),
        ({"input_ids": torch.zeros(5, dtype=torch.int64)}, "input_ids are \\[5\\]; required"),
        ({"positions": torch.zeros(3, 20, dtype=torch.int64)}, "needs \\(20,\\)"),
        ({"positions": None}, "needs \\(20,\\)"),
    ],
)
def test_bad_inputs_say_what_is_required(
    shared: PrefillGraph, change: dict[str, Any], message: str
) -> None:
    batch = Batch(pool_of(shared), [20])
    ctx, ids = batch.context([20])
    given = {"input_ids": ids, **change}
    if "positions" in given:
        ctx.positions = given.pop("positions")
    with pytest.raises(ContextError, match=message):
        shared.replay(ctx, **given)


def test_options_are_checked() -> None:
    backend = PlainBackend(pool_for())
    with pytest.raises(OptionError, match="unknown option 'foo'"):
        PrefillGraph(PackedLM(), attention=backend, foo=1)
    with pytest.raises(ServingError, match="'generate' or 'embed'"):
        PrefillGraph(PackedLM(), attention=backend, task="classify")
    with pytest.raises(ServingError, match="no attention backend 'no such'"):
        PrefillGraph(PackedLM(), attention="no such")
    with pytest.raises(OptionError, match="at least 2 rows"):
        PrefillGraph(PackedLM(), attention=backend, buckets=[1, 16])
    with pytest.raises(OptionError, match=r"max_tokens is 0, which disables.*enforce_eager=True"):
        PrefillGraph(PackedLM(), attention=backend, max_tokens=0)
    PrefillGraph(PackedLM(), attention=backend, max_tokens=0, enforce_eager=True).warmup()
    with pytest.raises(ServingError, match="which is for transformers models"):
        PrefillGraph(PackedLM(), attention=backend, aux_hidden={"draft": [1]})
    with pytest.raises(ServingError, match="a list of layers"):
        PrefillGraph(PackedLM(), attention=backend, aux_hidden={"draft": "last"})


def test_another_autocast_state_runs_eagerly() -> None:
    graph = made(max_tokens=32)
    batch = Batch(pool_of(graph), [20])
    ctx, ids = batch.context([20])
    assert graph.can_run(ctx)
    with torch.autocast("cpu", torch.bfloat16):
        assert graph.why_not(ctx) == str(Refusal.AUTOCAST)
    assert graph.run(ctx, ids).replayed


def test_a_forward_from_inside_a_break_runs_eagerly() -> None:
    graph = made(max_tokens=32)
    outer, inner = Batch(pool_of(graph), [20], 1), Batch(pool_of(graph), [10], 2)
    inner_ctx, inner_ids = inner.context([10])
    backend, seen = graph.attention, []

    class Asks(PlainBackend):
        def forward(self, q: Any, k: Any, v: Any, layer: Any, out: Any, ctx: Any) -> None:
            if layer.index == 2 and ctx is not inner_ctx:
                seen.append(graph.run(inner_ctx, inner_ids))
            super().forward(q, k, v, layer, out, ctx)

    asks = Asks(pool_of(graph))
    inner_ctx.attention = backend
    ctx, ids = outer.context([20], attention=asks)
    assert_like_alone(graph, outer, graph.replay(ctx, ids), [20])
    assert len(seen) == 1 and not seen[0].replayed
    assert_like_alone(graph, inner, seen[0], [10])


def test_kinds_are_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    graph = made()
    batch = Batch(pool_of(graph), [20, 8])
    with caplog.at_level(logging.INFO, "fx_prefill.serving"):
        for _ in range(3):
            graph.replay(*batch.context([20, 8]))
            graph.replay(*batch.context([10, 1], [10, 7], num_decodes=1))
    said = [r.getMessage() for r in caplog.records if "replays captured graphs" in r.getMessage()]
    assert [line.rpartition(": ")[2] for line in said] == ["extend", "mixed"]
    assert graph.replays == {"extend": 3, "mixed": 3}


# ---- finding the decoder ------------------------------------------------------------------------


def test_a_wrapper_is_unwrapped_to_its_text_model() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision_tower = PackedLM()
            self.language_model = PackedLM()

    wrapper = Wrapper()
    graph = PrefillGraph(wrapper, attention=PlainBackend(pool_for()))
    assert graph.decoder.module is wrapper.language_model.model
    assert graph.decoder.head is wrapper.language_model.lm_head


def test_what_is_not_found_is_listed_and_may_be_given() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = PackedLM().model
            self.table = self.body.embed_tokens
            self.body.words = self.body.embed_tokens
            del self.body.embed_tokens

    odd = Odd()
    with pytest.raises(
        ServingError, match=r"ModuleList called layers.*body: PackedDecoder.*decoder="
    ):
        PrefillGraph(odd, attention=PlainBackend(pool_for()))
    with pytest.raises(ServingError, match="Pass embedding="):
        PrefillGraph(odd, attention=PlainBackend(pool_for()), decoder=odd.body)
    with pytest.raises(
        ServingError, match="Pass decoder= beside embedding=: the module that takes"
    ):
        PrefillGraph(odd, attention=PlainBackend(pool_for()), embedding=odd.table)
    graph = PrefillGraph(
        odd, attention=PlainBackend(pool_for()), decoder=odd.body, embedding=odd.table
    )
    assert graph.decoder.head is None
    assert len(graph.decoder.module.layers) == LAYERS  # type: ignore[arg-type]


def test_the_attention_names_are_public() -> None:
    for name in ("attention", "ForwardContext", "PagedKVPool", "PrefillGraph"):
        assert getattr(fx_prefill, name) is not None
