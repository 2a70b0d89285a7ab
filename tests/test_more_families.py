"""Experts, mixers, positions that follow the length, cross attention: the same answers, replayed.

The reference is `model.forward(...)`, which stays uncompiled when a module is compiled in place.
"""

from __future__ import annotations

import importlib
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from families import VOCAB
from family_table import check_row
from more_families import CASE, CASES, ORDER, Case
from torch.utils._pytree import tree_leaves

import fx_prefill
from fx_prefill.integrations.transformers import MIXERS
from fx_prefill.reporting.explain import GraphReport

MAX_TOKENS = 128
LENGTHS = (1, 2, 16, 17, 70, 100, MAX_TOKENS, MAX_TOKENS + 1)
# What the default ladder makes of LENGTHS above 1, which is a graph of its own.
BUCKETS = Counter({16: 2, 32: 1, 80: 1, 112: 1, 128: 1})


def token_ids(num_tokens: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(3, VOCAB, (batch, num_tokens), generator=generator)


def tensors_of(output: Any) -> dict[str, torch.Tensor]:
    """What a call returned: hidden states, and all that its cache holds."""
    tensors = {"hidden states": output[0]}
    past = getattr(output, "past_key_values", None) or getattr(output, "cache_params", None)
    parts = [past]
    if past is not None and not hasattr(past, "layers"):
        parts = [past.self_attention_cache, past.cross_attention_cache]
    for part, cache in enumerate(parts if past is not None else ()):
        for index, layer in enumerate(cache.layers):
            held = {name: x for name, x in vars(layer).items() if name != "indexer_keys"}
            for number, leaf in enumerate(tree_leaves(held)):
                if isinstance(leaf, torch.Tensor):
                    tensors[f"cache {part} layer {index} tensor {number}"] = leaf
    return tensors


def assert_same(actual: Any, expected: Any, what: str, dtype: torch.dtype = torch.float32) -> None:
    assert actual.keys() == expected.keys(), what
    rtol, atol = (1e-4, 5e-5) if dtype is torch.float32 else (5e-2, 5e-2)
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name],
            tensor,
            rtol=rtol,
            atol=atol,
            msg=lambda message, name=name: f"{what}, {name}: {message}",
        )


def assert_replays_like_eager(
    case: Case, model: nn.Module, lengths: Any, cache: bool, device: str = "cpu"
) -> None:
    def given() -> dict[str, Any]:
        arguments = case.arguments(model, ids, cache)
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}

    kept = []
    for index, num_tokens in enumerate(lengths):
        what = f"call {index}, {num_tokens} tokens"
        ids = token_ids(num_tokens, index)
        actual = tensors_of(model(**given()))
        expected = tensors_of(model.forward(**given()))
        assert_same(actual, expected, what, case.dtype)
        kept.append((what, actual, expected))
    for what, actual, expected in kept:
        assert_same(actual, expected, f"{what}, read again after the later calls", case.dtype)


def token_graphs(report: Any) -> list[GraphReport]:
    return [graph for graph in report.graphs if graph.token_symbol is not None]


def assert_breaks(case: Case, graph: GraphReport) -> None:
    found = Counter(r for p in graph.partitions if p.kind == "break" for r in p.reasons)
    wanted = Counter(case.breaks)
    assert found & wanted == wanted, (found, str(graph.partitions))
    assert found["opaque module"] == wanted["opaque module"], found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_family_replays(case: Case) -> None:
    model = case.model()
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS)
    lengths = random.Random(0).sample(LENGTHS, len(LENGTHS))
    assert_replays_like_eager(case, model, lengths, cache=True)

    report = prefill.report()
    graphs = token_graphs(report)
    if case.beside_an_encoder:
        # In the graph of one token only the encoder's rows, 32 there, are an axis.
        (single,) = [graph for graph in graphs if graph.num_segments == 1]
        assert single.replays == {32: 1} and not single.fallbacks
        graphs.remove(single)
    assert sum((Counter(graph.replays) for graph in graphs), Counter()) == BUCKETS
    fallbacks = sum((Counter(graph.fallbacks) for graph in report.graphs), Counter())
    assert fallbacks == {"above the largest bucket": 1}
    # A graph with a window (GPT-OSS) is valid on one side of it only. An encoder's rows have a
    # fixed number in the first graph, and any number in the second.
    assert len(graphs) == (2 if case.name == "gpt_oss" or case.beside_an_encoder else 1), report
    assert_breaks(case, graphs[-1])
    check_row(case.name, case.num_layers, graphs[-1], ORDER)


# ---- mixers and their caches --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba2", "jamba"])
def test_a_cache_made_inside_and_continued(name: str) -> None:
    """A second prompt goes on from the state that the replayed first one left behind."""
    case = CASE[name]
    model = case.model()
    fx_prefill.compile(model, max_tokens=MAX_TOKENS)
    key = "cache_params" if name == "mamba2" else "past_key_values"
    for index, (first, second) in enumerate([(20, 33), (70, 2), (17, 1), (33, 20)]):
        ours, theirs = model(token_ids(first)), model.forward(token_ids(first))
        more = token_ids(second, seed=index)
        one = model(more, **{key: getattr(ours, key)})
        two = model.forward(more, **{key: getattr(theirs, key)})
        assert getattr(one, key) is getattr(ours, key)
        assert_same(tensors_of(one), tensors_of(two), f"{first} then {second} tokens")


@pytest.mark.parametrize("name", ["qwen3_next"])
def test_generate_gives_the_same_tokens(name: str) -> None:
    model = CASE[name].family.whole(CASE[name].attention)
    prompts = [token_ids(n, batch=b) for n, b in ((20, 1), (33, 1))]

    def generated() -> list[Any]:
        return [
            model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).tolist()
            for ids in prompts
        ]

    expected = generated()
    inner = model.get_submodule("backbone" if name == "mamba2" else "model")
    prefill = fx_prefill.compile(inner, max_tokens=MAX_TOKENS)
    assert generated() == expected
    replays = sum((Counter(g.replays) for g in token_graphs(prefill.report())), Counter())
    assert sum(replays.values()) >= len(prompts)


def test_states_made_by_an_eager_call_are_not_weights() -> None:
    """transformers marks them as static: taken for weights, each new cache would be a moved one."""
    model = CASE["mamba2"].model()
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS)
    for seed in range(4):
        ours, theirs = model.forward(token_ids(20, seed)), model.forward(token_ids(20, seed))
        more = token_ids(33, seed)
        one = model(more, cache_params=ours.cache_params)
        two = model.forward(more, cache_params=theirs.cache_params)
        assert_same(tensors_of(one), tensors_of(two), f"cache {seed}")
    (graph,) = prefill.report().graphs
    assert graph.recaptures == 0 and graph.replays == {48: 4}


def test_a_reset_cache_starts_anew() -> None:
    case = CASE["mamba2"]
    model = case.model()
    fx_prefill.compile(model, max_tokens=MAX_TOKENS)
    ours, theirs = (case.arguments(model, token_ids(20), True) for _ in range(2))
    for ids in (token_ids(20), token_ids(33, seed=1), token_ids(20, seed=2)):
        one = model(**{**ours, "input_ids": ids})
        two = model.forward(**{**theirs, "input_ids": ids})
        assert_same(tensors_of(one), tensors_of(two), f"{ids.shape[1]} tokens")
        for past in (ours["cache_params"], theirs["cache_params"]):
            past.reset()


def test_left_padding_reaches_the_mixers() -> None:
    model = CASE["mamba2"].model()
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS)
    for num_tokens in (20, 33, 70):
        ids = token_ids(num_tokens, batch=2)
        mask = torch.ones_like(ids)
        mask[1, :5] = 0
        given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        actual, expected = model(**given)[0], model.forward(**given)[0]
        torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=5e-5)
        torch.testing.assert_close(actual[1, 5:], expected[1, 5:], rtol=1e-4, atol=5e-5)
    assert len(prefill.report().graphs) == 1


def test_attention_named_by_the_user_fills_its_cache() -> None:
    case = CASE["smollm3"]
    model = case.model()
    prefill = fx_prefill.compile(
        model,
        max_tokens=MAX_TOKENS,
        break_modules=["transformers.models.smollm3.modeling_smollm3.SmolLM3Attention"],
    )
    assert_replays_like_eager(case, model, (20, 33, 2, 20), cache=True)
    (graph,) = token_graphs(prefill.report())
    found = Counter(r for p in graph.partitions for r in p.reasons)
    assert found["opaque module"] == 2 and found["attention"] == 0
    ours, theirs = (case.arguments(model, token_ids(20), True) for _ in range(2))
    model(**ours), model.forward(**theirs)
    more = token_ids(17, seed=5)
    one = model(more, past_key_values=ours["past_key_values"])
    two = model.forward(more, past_key_values=theirs["past_key_values"])
    assert_same(tensors_of(one), tensors_of(two), "17 more tokens")


def test_names_of_the_table_are_names_of_transformers() -> None:
    for name in MIXERS:
        module, _, cls = name.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), cls), nn.Module)


def test_the_table_may_be_switched_off() -> None:
    model = CASE["phi3 longrope"].model()
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS, break_modules=None)
    ids = token_ids(20)
    actual, expected = model(ids).last_hidden_state, model.forward(ids).last_hidden_state
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=5e-5)
    found = {r for g in prefill.report().graphs for p in g.partitions for r in p.reasons}
    assert "opaque module" not in found


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "phi3 longrope"])
def test_explain_on_the_meta_device(name: str) -> None:
    case = CASE[name]
    with torch.device("meta"):
        model = case.model()
    ids = torch.zeros(1, 20, dtype=torch.long, device="meta")
    report = fx_prefill.explain(model, **case.arguments(model, ids, False))
    (graph,) = token_graphs(report)
    assert_breaks(case, graph)


def test_mamba2_takes_a_mask_of_one_batch_after_rows_of_any() -> None:
    model = CASE["mamba2"].model()
    fx_prefill.compile(model, max_tokens=64)
    for batch, masked in ((1, False), (3, True), (2, False), (3, True)):
        given = {"input_ids": torch.arange(10).repeat(batch, 1) % VOCAB}
        if masked:
            given["attention_mask"] = torch.ones(batch, 10, dtype=torch.long)
            given["attention_mask"][0, :4] = 0
        actual, expected = model(**given)[0], model.forward(**given)[0]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
