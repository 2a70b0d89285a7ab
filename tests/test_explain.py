"""Explain, report, warmup and undo: what a user is told, and that telling changes nothing."""

from __future__ import annotations

import json
import resource
import time
from typing import Any

import pytest
import torch
from harness import MAX_TOKENS, Around, assert_same, rows, token_graph
from serving_models import PackedLM, pool_for
from torch import nn

import fx_prefill
from fx_prefill.errors import NotCompiledError, OptionError


def decoder() -> Around:
    return Around(lambda x: x - x.mean(1, keepdim=True))


# ---- explain ------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", [fx_prefill.explain, fx_prefill.compile])
def test_what_cannot_be_called_is_refused_by_name(door: Any) -> None:
    with pytest.raises(TypeError, match=r"a function, got int$"):
        door(3)
    graph = fx_prefill.PrefillGraph(PackedLM(), pool=pool_for())
    with pytest.raises(TypeError, match=r"got PrefillGraph; its own report\(\)"):
        door(graph)


def test_explain_of_a_large_model_on_the_meta_device() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(1, 20, dtype=torch.long, device="meta")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    report = fx_prefill.explain(model, input_ids=ids, use_cache=False)
    seconds = time.perf_counter() - start
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    (graph,) = report.graphs
    assert graph.num_segments == 5 and graph.num_distinct_segments == 3
    assert graph.buffer_bytes > 100 * 2**20  # at 2048 tokens, of which nothing was allocated
    assert grown_kib < 200 * 2**10
    assert seconds < 60
    assert all(parameter.is_meta for parameter in model.parameters())


def test_explain_runs_nothing() -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        return noted(x) - x.mean(1, keepdim=True)

    ran = []

    @torch.library.custom_op("fx_prefill_explain_test::noted", mutates_args=())
    def noted(x: torch.Tensor) -> torch.Tensor:
        ran.append(x.shape)
        return x.clone()

    noted.register_fake(torch.empty_like)
    module = Around(middle)
    given = rows(17)
    report = fx_prefill.explain(module, given)
    assert "noted" in str(report) and ran == []
    assert torch.equal(given, rows(17))
    module(given)
    assert len(ran) == 1


def test_explain_leaves_a_cache_empty_and_the_module_uncompiled() -> None:
    pytest.importorskip("transformers")
    from families import BY_NAME
    from transformers import DynamicCache

    model = BY_NAME["llama"].inner("sdpa")
    cache = DynamicCache(config=model.config)
    ids = torch.arange(20)[None]
    report = fx_prefill.explain(model, input_ids=ids, past_key_values=cache, use_cache=True)
    assert len(report.graphs) == 1
    assert cache.get_seq_length() == 0
    assert all(not layer.is_initialized for layer in cache.layers)

    assert model._compiled_call_impl is None
    with pytest.raises(NotCompiledError, match="no graph of this LlamaModel was compiled"):
        fx_prefill.report(model)
    output = model(input_ids=ids, past_key_values=cache, use_cache=True)
    assert output.past_key_values.get_seq_length() == 20


def test_explain_does_not_write_what_the_model_writes() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.inner = decoder()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return self.inner(x)

    module = Counting()
    fx_prefill.explain(module, rows(17))
    assert module.calls == 0


def test_the_table_says_what_matters() -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True)  # this line is named

    text = str(fx_prefill.explain(Around(middle), rows(17), prefill_options={"max_tokens": 64}))
    assert "2 segments (2 distinct), 1 breaks" in text
    assert "crosses tokens" in text
    assert "linear" in text and "mean" in text
    assert "test_explain.py:" in text and "x.mean(1, keepdim=True)" in text
    assert "buckets: 16, 32, 48, 64; forwards that fit none run eagerly" in text
    header = next(line for line in text.splitlines() if "why eager" in line)
    assert all(word in header for word in ("kind", "operators", "bytes", "source"))


def test_the_table_folds_repeated_layers() -> None:
    model = nn.Sequential(*(decoder() for _ in range(6)))
    text = str(fx_prefill.explain(model, rows(17)))
    assert "7 segments (3 distinct), 6 breaks" in text
    assert "x5" in text
    assert sum("crosses tokens" in line for line in text.splitlines()) <= 2


def test_what_would_fall_back_is_explained() -> None:
    def disabled() -> str:
        return str(fx_prefill.explain(decoder(), rows(17), prefill_options={"max_tokens": 0}))

    assert "runs eagerly: replay is disabled (max_tokens=0)" in disabled()
    nothing = fx_prefill.explain(lambda x: x.cumsum(1), rows(17))
    assert "runs eagerly: nothing in the graph can be captured" in str(nothing)


def test_json_round_trips() -> None:
    module = decoder()
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    for n in (17, 65):
        module(rows(n))
    report = compiled.report()
    (graph,) = json.loads(report.to_json())["graphs"]
    live = token_graph(report)
    assert [p["kind"] for p in graph["partitions"]] == [p.kind for p in live.partitions]
    assert [p["operators"] for p in graph["partitions"]] == [
        list(p.operators) for p in live.partitions
    ]
    assert {int(bucket): count for bucket, count in graph["replays"].items()} == live.replays
    assert graph["fallbacks"] == live.fallbacks
    assert graph["buckets"] == list(live.buckets)


def test_bad_options_are_errors_at_once() -> None:
    def never(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("traced")

    with pytest.raises(OptionError, match="max_tokens"):
        fx_prefill.explain(never, rows(17), prefill_options={"max_tokens": -1})
    with pytest.raises(OptionError, match="'bucket'"):
        fx_prefill.explain(never, rows(17), prefill_options={"bucket": [16]})
    with pytest.raises(OptionError, match="max_tokens"):
        fx_prefill.compile(never, max_tokens=-1)


def test_explain_of_a_compiled_model_uses_its_options() -> None:
    module = decoder()
    compiled = fx_prefill.compile(module, buckets=[20, 40])
    assert token_graph(fx_prefill.explain(compiled, rows(17))).buckets == (20, 40)
    assert compiled.report().graphs == ()


def takes_anything(x: torch.Tensor, **more: object) -> torch.Tensor:
    return x - x.mean(1, keepdim=True)


@pytest.mark.parametrize("name", ["max_tokens", "buckets", "options"])
def test_an_option_is_not_swallowed_as_an_argument_of_the_model(name: str) -> None:
    said = f"explain.. got {name}=, .*takes_anything; pass prefill_options="
    with pytest.raises(OptionError, match=said):
        fx_prefill.explain(takes_anything, rows(17), **{name: 64})
    compiled = fx_prefill.compile(takes_anything, max_tokens=32)
    with pytest.raises(OptionError, match=r"give it to fx_prefill\.compile"):
        fx_prefill.explain(compiled, rows(17), **{name: 64})
    with pytest.raises(OptionError, match=f"warmup.. got {name}=.*give it to fx_prefill.compile"):
        fx_prefill.warmup(compiled, rows(17), **{name: 64})


def test_an_argument_that_the_model_names_may_be_called_like_an_option() -> None:
    def shifted(x: torch.Tensor, padding: float, **more: object) -> torch.Tensor:
        return (x + padding).cumsum(1)

    (graph,) = fx_prefill.explain(shifted, rows(17), padding=2.0, other=1).graphs
    assert graph.num_breaks


@pytest.mark.parametrize("given", [{"prefill_options": {"max_tokens": 8}}, {"break_modules": None}])
def test_options_of_a_compiled_model_cannot_be_given_again(given: dict[str, object]) -> None:
    compiled = fx_prefill.compile(decoder(), max_tokens=32)
    with pytest.raises(OptionError, match=f"{next(iter(given))}=.* compiled already"):
        fx_prefill.explain(compiled, rows(17), **given)


# ---- report -------------------------------------------------------------------------------------

CALLS = (17, 20, 16, 64, 65, 17, 100)
REPLAYS = {16: 1, 32: 3, 64: 1}
FALLBACKS = {"above the largest bucket": 2}
REAL_ROWS = 17 + 20 + 16 + 64 + 17
PADDED_ROWS = 15 + 12 + 0 + 0 + 15


def assert_counted(report: fx_prefill.Report) -> None:
    graph = token_graph(report)
    assert graph.replays == REPLAYS
    assert graph.fallbacks == FALLBACKS
    assert (graph.real_rows, graph.padded_rows) == (REAL_ROWS, PADDED_ROWS)
    assert graph.captured == (16, 32, 64)
    assert graph.recaptures == 0
    text = str(report)
    assert "replays by bucket {16: 1, 32: 3, 64: 1}, 134 real and 42 padded rows" in text
    assert "ran eagerly 2x: above the largest bucket" in text


def test_a_live_report_counts_what_was_called() -> None:
    module = decoder()
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    assert compiled.report().graphs == ()
    assert str(compiled.report()) == "no graph has been traced yet"
    for n in CALLS:
        module(rows(n))
    assert_counted(compiled.report())
    assert_counted(fx_prefill.report(compiled))
    assert_counted(fx_prefill.report(module))


def test_a_report_of_what_torch_compile_returned() -> None:
    module = decoder()
    compiled = torch.compile(
        module, backend="breakable_prefill", dynamic=True, options={"max_tokens": MAX_TOKENS}
    )
    with pytest.raises(NotCompiledError):
        fx_prefill.report(compiled)
    for n in CALLS:
        compiled(rows(n))
    assert_counted(fx_prefill.report(compiled))
    assert_counted(fx_prefill.report(module))


def test_a_report_of_a_function() -> None:
    inner = decoder()
    compiled = fx_prefill.compile(lambda x: inner(x), max_tokens=MAX_TOKENS)
    for n in CALLS:
        compiled(rows(n))
    assert_counted(fx_prefill.report(compiled))
    with pytest.raises(NotCompiledError, match="not a function"):
        fx_prefill.report(lambda x: x)


def test_a_report_of_what_was_never_compiled_says_what_to_do() -> None:
    with pytest.raises(NotCompiledError, match="compile it and call it once"):
        fx_prefill.report(decoder())


def test_a_copy_is_not_the_original() -> None:
    """A report is a value: later calls do not change it."""
    module = decoder()
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    module(rows(17))
    early = compiled.report()
    module(rows(17))
    assert token_graph(early).replays == {32: 1}
    assert token_graph(compiled.report()).replays == {32: 2}


# ---- warmup, undo, reset ------------------------------------------------------------------------


def test_warmup_captures_the_whole_ladder() -> None:
    module = decoder()
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    report = fx_prefill.warmup(compiled, rows(17))
    assert token_graph(report).captured == token_graph(report).buckets == (16, 32, 48, 64)
    assert_same(module(rows(5)), module.forward(rows(5)))


def test_undo_runs_the_module_uncompiled() -> None:
    module = decoder()
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    module(rows(17))
    with pytest.raises(TypeError, match="compiled already"):
        fx_prefill.compile(module)
    with pytest.raises(TypeError, match="undo"):
        fx_prefill.compile(compiled)
    compiled.undo()
    assert module._compiled_call_impl is None
    assert torch.equal(module(rows(17)), module.forward(rows(17)))

    again = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    module(rows(17))
    assert token_graph(again.report()).replays == {32: 1}


def test_a_reset_of_dynamo_forgets() -> None:
    module = decoder()
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    module(rows(17))
    assert fx_prefill.report(module).graphs
    torch._dynamo.reset()
    assert compiled.report().graphs == ()
    module(rows(17))
    assert token_graph(compiled.report()).replays == {32: 1}
