"""Unmodified transformers models behind PrefillGraph: packed or alone, requests give the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from families import BY_NAME, VOCAB
from more_families import CASE

import fx_prefill
from fx_prefill import ForwardContext, PagedKVPool, PrefillGraph
from fx_prefill.errors import ServingError

LENGTHS = [20, 7, 30]
FIRST = [13, 7, 21]


def pool_of(model: Any, widths: tuple[int, int] | None) -> PagedKVPool:
    """A pool with NaN in the reserved page."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    k_width, v_width = widths or (width, width)
    pool = PagedKVPool(
        config.num_hidden_layers, 60, 4, kv_heads, k_width, v_head_dim=v_width, dtype=torch.float32
    )
    for held in (*pool.keys, *pool.values):
        held[0] = float("nan")
    return pool


def forward(
    graph: PrefillGraph, pool: Any, ids: Any, pages: Any, starts: list[int], ends: list[int]
) -> Any:
    """One replay of rows ``starts`` to ``ends`` of each request."""
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    pairs = list(zip(pages, starts, ends, strict=True))
    slots = [slot for held, start, end in pairs for slot in pool.slots(held, start, end)]
    ctx = ForwardContext.from_lengths(
        lengths,
        starts,
        page_table=pool.page_table(pages),
        write_locations=torch.tensor(slots),
    )
    if graph.decoder.position_rows == 3:
        assert ctx.positions is not None
        ctx.positions = ctx.positions.expand(3, -1).contiguous()
    rows = [x[start:end] for x, start, end in zip(ids, starts, ends, strict=True)]
    return graph.replay(ctx, torch.cat(rows))


CASES = {
    "llama": (2, True, None),
    "gemma2": (2, True, None),
    "gemma3": (3, True, None),
    "gpt2": (3, False, None),
    "gpt_oss": (4, False, None),
    "qwen3_vl text": (2, True, None),
    "deepseek_v3": (None, None, (14, 10)),
}
"""Breaks, whether one row replays too, and widths of keys and values where they differ."""


@pytest.mark.parametrize("name", CASES)
def test_packed_requests_and_chunks(name: str) -> None:
    breaks, one_row, widths = CASES[name]
    model = BY_NAME[name].whole("eager") if name in BY_NAME else CASE[name].family.inner("eager")
    reference = copy.deepcopy(model)
    pool = pool_of(model, widths)
    graph = PrefillGraph(model, attention="sdpa", pool=pool, max_tokens=64)
    graph.warmup()
    if breaks is not None:
        assert graph.report().graphs[0].num_breaks == breaks
        assert graph._variants[None].takes_one_row is one_row

    ids = [torch.randint(3, VOCAB, (n,)) for n in LENGTHS]
    pages = [pool.allocate(pool.pages_for(n)) for n in LENGTHS]
    done = [0, 0, 0]
    for ends in (FIRST, [FIRST[0], FIRST[1], LENGTHS[2]], LENGTHS):
        live = [i for i in range(3) if ends[i] > done[i]]
        output = forward(
            graph,
            pool,
            [ids[i] for i in live],
            [pages[i] for i in live],
            [done[i] for i in live],
            [ends[i] for i in live],
        )
        for number, i in enumerate(live):
            expected = reference(ids[i][None, : ends[i]], use_cache=False)
            if output.logits is not None:
                actual, wanted = output.logits[number], expected.logits[0, -1]
            else:
                counts = torch.tensor([ends[j] - done[j] for j in live]).cumsum(0)
                actual, wanted = output.hidden_states[counts[number] - 1], expected[0][0, -1]
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=5e-5)
        done = list(ends)


def test_layers_of_a_transformers_model_as_auxiliary_states() -> None:
    model = BY_NAME["llama"].whole("sdpa")
    reference = copy.deepcopy(model)
    pool = pool_of(model, None)
    graph = PrefillGraph(
        model, attention="sdpa", pool=pool, max_tokens=32, aux_hidden={"draft": [0, 1]}
    )
    graph.warmup()
    ids = torch.randint(3, VOCAB, (20,))
    pages = pool.allocate(5)
    ctx = ForwardContext.from_lengths(
        [20],
        page_table=pool.page_table([pages]),
        write_locations=torch.tensor(pool.slots(pages, 0, 20)),
        aux_hidden="draft",
    )
    output = graph.replay(ctx, ids)
    expected = reference(ids[None], use_cache=False, output_hidden_states=True).hidden_states
    assert len(output.aux_hidden_states) == 2
    for number, actual in enumerate(output.aux_hidden_states):
        torch.testing.assert_close(actual, expected[number][0], rtol=1e-4, atol=5e-5)


def test_layers_that_are_not_there_are_named() -> None:
    model = BY_NAME["llama"].whole("sdpa")
    with pytest.raises(ServingError, match=r"name \[9\]; LlamaModel has 0 .* to 2"):
        PrefillGraph(
            model, attention="sdpa", pool=pool_of(model, None), aux_hidden={"draft": [0, 9]}
        )


@pytest.mark.parametrize(
    ("config", "more"),
    [
        ("CohereConfig", {"logit_scale": 0.25}),
        ("GraniteConfig", {"logits_scaling": 3.0}),
        ("Gemma2Config", {"final_logit_softcapping": 5.0}),
    ],
)
def test_logits_are_scaled_and_capped_as_the_model_does(config: str, more: Any) -> None:
    small = {
        "vocab_size": 64,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "pad_token_id": 0,
    }
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**{**small, **more})
    )
    graph = PrefillGraph(model, attention="sdpa", pool=pool_of(model, None))
    hidden = torch.randn(3, 24) * 3
    assert graph._logits is not None
    plain = model.lm_head(hidden)
    assert not torch.allclose(graph._logits(hidden), plain)


def test_a_model_with_a_tail_of_its_own_is_refused() -> None:
    class Odd(transformers.LlamaForCausalLM):  # type: ignore[misc,name-defined]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits.sin()
            return output

    config = BY_NAME["llama"].whole("sdpa").config
    model = Odd(config)
    pool = pool_of(model, None)
    with pytest.raises(ServingError, match="pass logits="):
        PrefillGraph(model, attention="sdpa", pool=pool)
    graph = PrefillGraph(
        model, attention="sdpa", pool=pool, logits=lambda hidden: model.lm_head(hidden).sin()
    )
    assert graph.decoder.module is model.model


def test_close_gives_the_model_back_as_it_was() -> None:
    model = BY_NAME["llama"].whole("sdpa")
    ids = torch.randint(3, VOCAB, (1, 20))
    expected = model(ids, use_cache=False).logits
    graph = PrefillGraph(model, attention="sdpa", pool=pool_of(model, None), max_tokens=16)
    graph.warmup()
    graph.close()
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert not graph.can_run(ForwardContext.from_lengths([10])) and not graph.report().graphs


@pytest.mark.parametrize("part", ["whole", "inner"])
def test_a_model_with_the_live_attention_is_not_compiled(part: str) -> None:
    """Its calls would find no context; said when it is compiled, and not in a layer's attention."""
    whole = BY_NAME["llama"].whole("sdpa")
    model = whole if part == "whole" else whole.model
    graph = PrefillGraph(whole, attention="sdpa", pool=pool_of(whole, None), max_tokens=16)
    with pytest.raises(TypeError, match=r"PrefillGraph has switched the attention of Llama.*close"):
        fx_prefill.compile(model)
    assert model._compiled_call_impl is None
    graph.close()
    fx_prefill.compile(model).undo()


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VL", "Gemma3"])
def test_multimodal_models_are_unwrapped_to_their_text_model(name: str) -> None:
    text: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "pad_token_id": 0,
    }
    if name != "Gemma3":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
        text["rope_parameters"] = rope
    vision = {"depth": 1, "num_hidden_layers": 1, "hidden_size": 24, "num_heads": 2}
    vision |= {"num_attention_heads": 2, "intermediate_size": 24, "out_hidden_size": 24}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    pool = PagedKVPool(1, 20, 4, 1, 12, dtype=torch.float32)
    graph = PrefillGraph(model, attention="sdpa", pool=pool, max_tokens=32)
    graph.warmup()
    assert graph.decoder.module is model.model.language_model
    assert graph.decoder.position_rows == (1 if name == "Gemma3" else 3)
    pages = pool.allocate(5)
    ctx = ForwardContext.from_lengths(
        [20],
        page_table=pool.page_table([pages]),
        write_locations=torch.tensor(pool.slots(pages, 0, 20)),
    )
    assert ctx.positions is not None
    if graph.decoder.position_rows == 3:
        ctx.positions = torch.stack([ctx.positions, ctx.positions // 2, ctx.positions % 3])
    rows = torch.randn(20, 24)  # merged by the engine from text and images
    replayed = graph.replay(ctx, inputs_embeds=rows)
    eager = graph._run_eagerly(ctx, rows, None, None)
    torch.testing.assert_close(replayed.logits, eager.logits, rtol=1e-4, atol=5e-5)
