"""What does not belong together is said when the graph is made, not in the middle of a forward."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from serving_models import (
    HEAD_DIM,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    Batch,
    PackedLM,
    PlainBackend,
    pool_for,
)
from torch import nn

import fx_prefill
from fx_prefill import ForwardContext, PagedKVPool, PrefillGraph
from fx_prefill.errors import ContextError, OptionError, ServingError


def pool_with(**changes: Any) -> PagedKVPool:
    shape = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, **changes}
    return PagedKVPool(num_pages=30, page_size=4, **{"dtype": torch.float32, **shape})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 1}, "make the pool with num_kv_heads=2, head_dim=8, v_head_dim=8"),
        ({"head_dim": 4}, "make the pool with num_kv_heads=2, head_dim=8"),
        ({"v_head_dim": 4}, "v_head_dim=8"),
        ({"num_layers": 2}, "has a layer 2 and the pool has layers 0 to 1"),
        ({"dtype": torch.int8}, "required: a floating-point type"),
    ],
)
def test_a_pool_that_does_not_fit_the_model(changes: dict[str, Any], message: str) -> None:
    graph = PrefillGraph(PackedLM(), attention="sdpa", pool=pool_with(**changes), max_tokens=16)
    with pytest.raises(ServingError, match=message):
        graph.warmup()


def test_a_pool_that_rounds_is_said(caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_with(dtype=torch.bfloat16)
    PrefillGraph(PackedLM(), attention="sdpa", pool=pool, max_tokens=16).warmup()
    assert "the pool rounds them to torch.bfloat16" in caplog.text


class Own(nn.Module):
    """A decoder that forgot the live attention."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        inner = PackedLM().model
        self.embed_tokens, self.layers, self.attends = inner.embed_tokens, inner.layers, attends

    def forward(self, inputs_embeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = inputs_embeds + positions[:, None]
        for layer in self.layers:
            if self.attends:
                rows = layer.norm(x)[None]
                x = x + F.scaled_dot_product_attention(rows, rows, rows, is_causal=True)[0]
            x = x + layer.mlp(layer.after(x))
        return x


@pytest.mark.parametrize("attends", [True, False])
def test_a_decoder_without_live_attention_is_refused(attends: bool) -> None:
    graph = PrefillGraph(Own(attends), attention=PlainBackend(pool_for()), max_tokens=16)
    seen = "scaled_dot_product_attention at" if attends else "no attention"
    with pytest.raises(ServingError, match=f"{seen}.*required: fx_prefill.attention"):
        graph.warmup()


def test_what_sees_all_requests_together_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Centred(Own):
        def forward(self, inputs_embeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            x = inputs_embeds - inputs_embeds.mean(0, keepdim=True)
            return self.layers[0](x, positions[:, None, None].float())

    PrefillGraph(Centred(True), attention=PlainBackend(pool_for()), max_tokens=16).warmup()
    assert "mean at" in caplog.text and "rows of all requests" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention": "sdpa"}, "is made with a KV pool"),
        ({"attention": "sdpa", "pool": object()}, "required: a PagedKVPool"),
        ({"attention": None}, "without init_forward_metadata, forward, supports_capture"),
        ({"attention": PlainBackend}, "attention is the class PlainBackend"),
        ({"model": "llama"}, "got a str; required: the module itself"),
        ({"model": torch.compile(PackedLM())}, "not compiled by"),
        ({"aux_hidden": [1, 2]}, "accepted: a mapping of names"),
        ({"aux_hidden": {"draft": {}}}, None),
        ({"embedding": torch.sin}, "embedding is a builtin.* module"),
        ({"decoder": "model"}, "decoder is a str; required: a module"),
    ],
)
def test_what_cannot_be_a_graph(given: dict[str, Any], message: str | None) -> None:
    given = {"model": PackedLM(), "attention": PlainBackend(pool_for()), **given}
    if message is None:
        PrefillGraph(given.pop("model"), **given)
        return
    with pytest.raises(ServingError, match=message):
        PrefillGraph(given.pop("model"), **given)


@pytest.mark.parametrize("size", [0, -5, "many"])
def test_a_chunk_is_some_rows(size: Any) -> None:
    with pytest.raises(OptionError, match=r"chunked_prefill_size is .* at least 2"):
        PrefillGraph(PackedLM(), attention=PlainBackend(pool_for()), chunked_prefill_size=size)


def test_declared_states_that_do_not_come_are_an_error() -> None:
    graph = PrefillGraph(
        PackedLM(),
        attention=PlainBackend(pool_for()),
        max_tokens=16,
        aux_hidden={"draft": {"aux": False}},
    )
    with pytest.raises(ServingError, match="returns no auxiliary hidden states"):
        graph.warmup()


def test_a_request_without_rows_and_an_idle_forward() -> None:
    pool = pool_for()
    graph = PrefillGraph(PackedLM(), attention=PlainBackend(pool))
    ctx, ids = Batch(pool, [20, 5]).context([20, 0])
    with pytest.raises(ContextError, match="a request that brings no row has no logits"):
        graph.run(ctx, ids)
    assert graph.run(ctx, ids, logits_rows=torch.tensor([19])).logits is not None
    with pytest.raises(ContextError, match="an idle forward has no rows"):
        graph.run(ForwardContext.from_lengths([]), torch.empty(0, dtype=torch.int64))


@pytest.mark.parametrize("accepted", [[10, 0], [15, 3], [1], None])
def test_accepted_counts_stay_within_their_request(accepted: list[int] | None) -> None:
    pool = pool_for()
    graph = PrefillGraph(PackedLM(), attention=PlainBackend(pool), enforce_eager=True)
    ctx, ids = Batch(pool, [10, 10]).context([10, 10])
    ctx.accept_lengths = torch.tensor(accepted) if accepted else [10, 10]  # type: ignore[assignment]
    with pytest.raises(ContextError, match="accept_lengths is"):
        graph.run(ctx, ids)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("write_locations", [4, 5, 6]),
        ("write_locations", torch.arange(4)),
        ("page_table", torch.ones(1, 2)),
        ("page_table", [[1, 2]]),
        ("page_table", torch.tensor([[1, 2], [3, 4]])),
        ("page_table", torch.tensor([1, 2])),
    ],
)
def test_places_in_the_cache_are_tensors_of_their_shape(field: str, value: Any) -> None:
    pool = pool_with()
    graph = PrefillGraph(PackedLM(), attention="sdpa", pool=pool, enforce_eager=True)
    ctx, ids = Batch(pool, [6]).context([3], [3])
    setattr(ctx, field, value)
    with pytest.raises(ContextError, match=f"{field} is .*required"):
        graph.run(ctx, ids)


class Buffered(nn.Module):
    """An embedding without parameters, whose rows are wider than its table's numbers."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        table = torch.randn(VOCAB, HIDDEN).half()
        self.hidden = [table]
        if registered:
            self.register_buffer("table", table)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.hidden[0][ids].float()


@pytest.mark.parametrize("registered", [True, False])
def test_an_embedding_without_parameters(registered: bool) -> None:
    model, pool = PackedLM(), pool_for()
    given = {"decoder": model.model, "embedding": Buffered(registered)}
    graph = PrefillGraph(model, attention=PlainBackend(pool), max_tokens=16, **given)
    graph.warmup()
    ctx, ids = Batch(pool, [9]).context([9])
    rows = graph.input_embeds(9)
    assert rows.dtype is torch.float32 and rows.device == ids.device
    output = graph.replay(ctx, inputs_embeds=rows.copy_(graph.decoder.embedding(ids)))
    torch.testing.assert_close(output.hidden_states, graph.replay(ctx, ids).hidden_states)


def test_nothing_that_says_which_device_is_an_error() -> None:
    class Bare(nn.Module):
        def forward(self, inputs_embeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return inputs_embeds

    graph = PrefillGraph(
        Bare(), attention=PlainBackend(pool_for()), decoder=Bare(), embedding=Buffered(False)
    )
    with pytest.raises(ServingError, match=r"embedding Buffered.*decoder Bare has a parameter or"):
        graph.warmup()


def test_a_graph_that_is_dropped_gives_the_model_back() -> None:
    pytest.importorskip("transformers")
    from families import BY_NAME

    model = BY_NAME["llama"].whole("sdpa")
    config = model.config
    pool = PagedKVPool(2, 10, 4, config.num_key_value_heads, 12, dtype=torch.float32)
    graph = PrefillGraph(model, attention="sdpa", pool=pool)
    assert config._attn_implementation == "fx_prefill"
    del graph
    gc.collect()
    assert config._attn_implementation == "sdpa"


def test_the_backend_of_the_readme_works() -> None:
    """The class in the README's section for engine builders, as it stands there."""
    from pathlib import Path

    text = (Path(__file__).parent.parent / "README.md").read_text()
    start = text.index("  class MyAttention:")
    stop = text.index("  ```", start)
    code = "\n".join(line[2:] for line in text[start:stop].splitlines())
    space: dict[str, Any] = {"torch": torch, "fx_prefill": fx_prefill}
    exec(code, space)
    pool = pool_for()
    graph = PrefillGraph(PackedLM(), attention=space["MyAttention"](pool), max_tokens=64)
    graph.warmup()
    plain = PrefillGraph(graph.model, attention=PlainBackend(pool), enforce_eager=True)
    batch = Batch(pool, [30, 12, 9])
    for extends, prefixes, decodes in (([20, 12, 8], [0, 0, 0], 0), ([10, 1], [20, 11], 1)):
        ctx, ids = batch.context(extends, prefixes, num_decodes=decodes)
        expected = plain.run(ctx, ids).logits
        torch.testing.assert_close(graph.replay(ctx, ids).logits, expected, rtol=1e-4, atol=1e-5)
