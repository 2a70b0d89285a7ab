"""Options: what is accepted, what an error says, and what each one changes in a live graph."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness import (
    MAX_TOKENS,
    Around,
    assert_breaks,
    assert_same,
    captured,
    check,
    rows,
    shuffled,
    token_graph,
)
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed

import fx_prefill
from fx_prefill.api import report as report_of
from fx_prefill.errors import FallbackError, NotCompiledError, OptionError, SegmentCompileError
from fx_prefill.execution.reasons import FallbackReason
from fx_prefill.options import Options, Passes, parse_options


def decoder() -> Around:
    return Around(lambda x: x - x.mean(1, keepdim=True))


# ---- validation ---------------------------------------------------------------------------------

REJECTED: list[tuple[str, Any, str]] = [
    ("max_tokens", -1, "0 to disable"),
    ("max_tokens", 1.5, "whole number"),
    ("max_tokens", True, "whole number"),
    ("max_tokens", "2048", "whole number"),
    ("max_tokens", None, "whole number"),
    ("buckets", [], "non-empty"),
    ("buckets", [0, 16], "at least 1"),
    ("buckets", [16, 32.0], "whole"),
    ("buckets", [True], "whole"),
    ("buckets", "16,32", "sequence"),
    ("buckets", 16, "sequence"),
    ("padding", 1, "True or False"),
    ("padding", "off", "True or False"),
    ("max_padding_ratio", 0.5, "at least 1"),
    ("max_padding_ratio", "2", "number"),
    ("max_padding_ratio", True, "number"),
    ("max_padding_ratio", float("nan"), "number"),
    ("compiler", "Inductor", "'inductor', 'eager'"),
    ("compiler", 3, "callable"),
    ("break_ops", [3], "'namespace::op'"),
    ("rowwise_ops", {"a": 1}, "'namespace::op'"),
    ("capture", "eager", "'lazy' or 'all'"),
    ("capture", None, "'lazy' or 'all'"),
    ("passes", 3, "callable"),
    ("passes", {"before": print}, "'pre_partition' and 'post_partition'"),
    ("passes", {"pre_partition": [3]}, "callable"),
    ("strict", "yes", "True or False"),
]


@pytest.mark.parametrize(("name", "value", "accepted"), REJECTED)
def test_an_error_names_the_option_what_was_seen_and_what_is_accepted(
    name: str, value: Any, accepted: str
) -> None:
    with pytest.raises(OptionError) as caught:
        parse_options({name: value})
    message = str(caught.value)
    assert repr(name) in message and accepted in message


def test_an_unknown_option_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(OptionError) as caught:
        parse_options({"max_token": 64})
    assert "'max_token'" in str(caught.value)
    for field in dataclasses.fields(Options):
        assert field.name in str(caught.value)


def test_a_ceiling_that_contradicts_the_buckets_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"'max_tokens' is 128.*64"):
        parse_options({"buckets": [16, 64], "max_tokens": 128})
    with pytest.raises(OptionError, match=r"'max_tokens' is 0"):
        parse_options({"buckets": [16, 64], "max_tokens": 0})
    assert parse_options({"buckets": [16, 64], "max_tokens": 64}).max_tokens == 64


def test_errors_of_options_are_value_errors_and_come_before_tracing() -> None:
    with pytest.raises(ValueError):
        fx_prefill.compile(decoder(), max_tokens=-1)


def test_errors_of_options_through_torch_compile() -> None:
    module = torch.compile(decoder(), backend="breakable_prefill", options={"buckets": []})
    with pytest.raises((OptionError, BackendCompilerFailed), match="'buckets'"):
        module(rows(17))


def test_defaults() -> None:
    options = parse_options(None)
    assert options == Options() == parse_options({})
    assert options.max_tokens == options.ladder[-1] == 2048
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.max_tokens = 3  # type: ignore[misc]


def test_what_is_parsed_compares_and_hashes() -> None:
    # Equal options must reuse compiled code.
    raw = {"buckets": [64, 16], "passes": {"pre_partition": [print]}, "break_ops": ["a::b"]}
    assert parse_options(raw) == parse_options(dict(raw))
    assert hash(parse_options(raw)) == hash(parse_options(dict(raw)))
    assert parse_options({"passes": print}).passes == Passes(pre_partition=(print,))


# ---- buckets ------------------------------------------------------------------------------------


def test_explicit_buckets_are_honoured_exactly() -> None:
    options = parse_options({"buckets": [33, 5, 12, 5]})
    assert options.ladder == (5, 12, 33)
    report = check(decoder(), buckets=[33, 5, 12, 5], max_tokens=33, max_padding_ratio=10)
    graph = token_graph(report)
    assert graph.buckets == (5, 12, 33)
    # 2 -> 5; 15, 16, 17 -> 33; 40, 64, 65 are above.
    assert graph.replays == {5: 2, 33: 6}
    assert graph.fallbacks == {str(FallbackReason.TOO_LONG): 6}


def test_without_padding_only_an_exact_size_replays() -> None:
    graph = token_graph(check(decoder(), padding=False))
    assert graph.replays == {16: 2, 64: 2}
    assert graph.fallbacks == {
        str(FallbackReason.PADDING_OFF): 8,
        str(FallbackReason.TOO_LONG): 2,
    }
    assert graph.padded_rows == 0 and graph.real_rows == 2 * (16 + 64)


def test_a_ceiling_for_padding_spares_the_smallest_rung() -> None:
    graph = token_graph(check(decoder(), max_padding_ratio=1.25))
    # 17 -> 32 is above the ceiling, 40 -> 48 is not, 2 -> 16 is on the smallest rung.
    assert graph.replays == {16: 6, 48: 2, 64: 2}
    assert graph.fallbacks[str(FallbackReason.PADDING_RATIO)] == 2


def test_rows_are_counted() -> None:
    graph = token_graph(check(decoder(), lengths=[2, 16, 40]))
    assert (graph.real_rows, graph.padded_rows) == (58, 14 + 0 + 8)


def test_zero_tokens_disable_replay() -> None:
    report = check(decoder(), max_tokens=0, replays=False)
    (graph,) = report.graphs
    assert graph.refused == str(FallbackReason.DISABLED) and not graph.replays
    assert graph.fallbacks == {str(FallbackReason.DISABLED): len(shuffled())}


# ---- strict -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "num_tokens", "reason"),
    [
        ({"max_tokens": 64}, 65, FallbackReason.TOO_LONG),
        ({"padding": False}, 17, FallbackReason.PADDING_OFF),
        ({"max_padding_ratio": 1.2}, 17, FallbackReason.PADDING_RATIO),
    ],
)
def test_strict_raises_instead_of_falling_back(
    options: dict[str, Any], num_tokens: int, reason: FallbackReason
) -> None:
    module = decoder()
    compiled = fx_prefill.compile(module, strict=True, **options)
    module(rows(16))
    with pytest.raises(FallbackError) as caught:
        module(rows(num_tokens))
    assert str(reason) in str(caught.value) and f"{num_tokens} tokens" in str(caught.value)
    assert_same(module(rows(16)), module.forward(rows(16)), "after the error")
    assert token_graph(compiled.report()).replays == {16: 2}


def test_strict_replays_what_can_replay() -> None:
    check(decoder(), lengths=shuffled([2, 16, 17, 64]), strict=True)


# ---- capture ------------------------------------------------------------------------------------


def test_lazy_capture_meets_one_bucket_at_a_time() -> None:
    assert token_graph(check(decoder(), lengths=[17, 40])).captured == (32, 48)


def test_capture_all_captures_the_ladder_at_the_first_call() -> None:
    graph = token_graph(check(decoder(), lengths=[17], capture="all"))
    assert graph.captured == (16, 32, 48, 64)
    assert graph.replays == {32: 1}


def test_warmup_captures_the_ladder() -> None:
    module = decoder()
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    report = compiled.warmup(rows(17))
    assert token_graph(report).captured == (16, 32, 48, 64)
    for n in shuffled():
        assert_same(module(rows(n)), module.forward(rows(n)), f"{n} tokens")


# ---- passes -------------------------------------------------------------------------------------


def _relu_for_tanh(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    for node in gm.graph.nodes:
        if node.target is torch.tanh:
            node.target = torch.relu
    gm.recompile()
    return gm


def test_a_pass_before_partitioning_replaces_an_operator_everywhere() -> None:
    module = decoder()
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS, passes=_relu_for_tanh)

    def expected(x: torch.Tensor) -> torch.Tensor:
        x = x + torch.relu(module.proj_in(module.norm_in(x)))
        x = x - x.mean(1, keepdim=True)
        return x + torch.relu(module.proj_out(module.norm_out(x)))

    for n in shuffled():  # 65 runs the fallback, which must be the same model
        assert_same(module(rows(n)), expected(rows(n)), f"{n} tokens")
    assert "relu" in captured(compiled.report())


def test_passes_run_in_order() -> None:
    seen: list[str] = []

    def noting(name: str) -> Any:
        def note(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
            assert isinstance(gm, fx.GraphModule)
            placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
            assert len(example_inputs) == len(placeholders)
            seen.append(name)
            return gm

        return note

    passes = {"pre_partition": [noting("a"), noting("b")], "post_partition": noting("c")}
    check(decoder(), lengths=[17, 40], passes=passes)
    assert seen == ["a", "b", "c", "c"], "the two segments differ"


def test_a_pass_after_partitioning_sees_each_distinct_segment_once() -> None:
    seen: list[fx.GraphModule] = []

    def note(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        seen.append(gm)
        return gm

    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([decoder() for _ in range(5)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    graph = token_graph(check(Deep(), passes={"post_partition": note}))
    assert graph.num_segments == 6 and graph.num_breaks == 5
    assert graph.num_distinct_segments == len(seen) == 3


def test_a_pass_after_partitioning_changes_the_segment() -> None:
    def add_one(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
        output = next(node for node in gm.graph.nodes if node.op == "output")
        with gm.graph.inserting_before(output):
            raised = [gm.graph.call_function(torch.add, (x, 1)) for x in output.args[0]]
            output.args = (tuple(raised),)
        gm.recompile()
        return gm

    module = Around(lambda x: x)
    fx_prefill.compile(module, max_tokens=MAX_TOKENS, passes={"post_partition": add_one})
    assert_same(module(rows(17)), module.forward(rows(17)) + 1)


# ---- compilers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("returns", [tuple, list])
def test_a_compiler_of_the_users_own(returns: Any) -> None:
    calls: list[int] = []

    def own(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        calls.append(len(example_inputs))

        def run(*args: Any) -> Any:
            return returns(gm(*args))

        return run

    report = check(decoder(), compiler=own)
    assert len(calls) == 2
    assert token_graph(report).compiler == "own"


def _broken(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    raise RuntimeError("no such kernel")


def test_a_failing_compiler_warns_and_the_answer_is_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="fx_prefill"):
        check(decoder(), compiler=_broken)
    assert "'_broken' failed" in caplog.text and "no such kernel" in caplog.text


def test_a_failing_compiler_is_an_error_under_strict() -> None:
    module = decoder()
    fx_prefill.compile(module, max_tokens=MAX_TOKENS, compiler=_broken, strict=True)
    with pytest.raises(BackendCompilerFailed) as caught:
        module(rows(17))
    assert isinstance(caught.value.inner_exception, SegmentCompileError)
    assert "_broken" in str(caught.value) and "no such kernel" in str(caught.value)


def test_a_compiler_that_mixes_rows_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    def mixing(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return lambda *args: [out + out.sum(1, keepdim=True) for out in gm(*args)]

    with caplog.at_level(logging.WARNING, logger="fx_prefill"):
        check(decoder(), compiler=mixing, replays=False)
    assert "padded rows reach real rows" in caplog.text


def test_two_compilers_do_not_share_a_segment() -> None:
    used: list[str] = []

    def named(name: str) -> Any:
        def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            used.append(name)
            return gm

        return compiler

    check(decoder(), lengths=[17], compiler=named("first"))
    check(decoder(), lengths=[17], compiler=named("second"))
    assert used == ["first", "first", "second", "second"]


# ---- the helper ---------------------------------------------------------------------------------


def test_undo_gives_the_module_back() -> None:
    module = decoder()
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    module(rows(17))
    with pytest.raises(TypeError, match="compiled already"):
        fx_prefill.compile(module)
    compiled.undo()
    before = token_graph(compiled.report()).replays if compiled.report().graphs else {}
    module(rows(17))
    after = token_graph(compiled.report()).replays if compiled.report().graphs else {}
    assert before == after
    fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    assert_same(module(rows(17)), module.forward(rows(17)))


def test_through_torch_compile_by_name() -> None:
    module = decoder()
    compiled = torch.compile(module, backend="breakable_prefill", options={"max_tokens": 64})
    for n in shuffled():
        assert_same(compiled(rows(n)), module.forward(rows(n)), f"{n} tokens")
    graphs = report_of(compiled).graphs
    assert any(graph.replays for graph in graphs)


def test_two_models_of_one_class_keep_their_own_options_and_weights() -> None:
    first, second = decoder(), decoder()
    second.proj_in.weight.mul_(-1)
    one = fx_prefill.compile(first, max_tokens=MAX_TOKENS)
    two = fx_prefill.compile(second, buckets=[20, 64])
    for n in shuffled():
        assert_same(first(rows(n)), first.forward(rows(n)), f"first, {n} tokens")
        assert_same(second(rows(n)), second.forward(rows(n)), f"second, {n} tokens")
    assert token_graph(one.report()).buckets == (16, 32, 48, 64)
    assert token_graph(two.report()).buckets == (20, 64)


def test_a_report_shows_graphs_of_its_own_module_only() -> None:
    module, other = decoder(), decoder()
    other.register_buffer("prompt", rows(17))
    fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    module(other.prompt)  # an input of one model that another one owns
    assert report_of(module).graphs
    with pytest.raises(NotCompiledError):
        report_of(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"specialize": [16], "compiler": "eager"}, "'specialize' has no effect with the compiler"),
        ({"max_autotune": True}, "'max_autotune' has no effect without 'specialize'"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_options(options)


@pytest.mark.parametrize(
    ("token_dims", "message"),
    [
        ([1], "accepted: a mapping"),
        ({"x": "1"}, "accepted: a mapping"),
        ({"ids": 1}, "names 'ids'; Around takes x"),
    ],
)
def test_token_dims_are_checked(token_dims: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        fx_prefill.compile(Around(torch.tanh), token_dims=token_dims)


def test_a_handle_that_was_undone_says_so() -> None:
    handle = fx_prefill.compile(Around(torch.tanh), max_tokens=16)
    handle.undo()
    with pytest.raises(fx_prefill.errors.NotCompiledError, match=r"undo\(\) gave this model back"):
        handle.warmup(rows(10))


@pytest.mark.parametrize("named", [torch.cumsum, torch.Tensor.cumsum, torch.ops.aten.cumsum])
@pytest.mark.parametrize("method", [False, True])
def test_an_operator_is_named_in_any_of_its_spellings(named: Any, method: bool) -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(2) if method else torch.cumsum(x, 2)

    compiled = fx_prefill.compile(Around(middle), max_tokens=16, break_ops=[named])
    compiled(rows(10))
    assert_breaks(compiled.report(), "cumsum", "marked by the user")


def test_the_report_says_what_is_captured_and_what_waits() -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x.unflatten(-1, (2, -1)).transpose(1, 2)
            y = torch.nn.functional.scaled_dot_product_attention(q, q * 2, q, is_causal=True)
            return y.transpose(1, 2).flatten(2)

    compiled = fx_prefill.compile(
        Around(Attention()), max_tokens=64, capture="queued", capture_attention=True
    )
    compiled(rows(20))
    (graph,) = compiled.report().graphs
    assert graph.queued == (32,) and not graph.captured_attention
    assert "waiting for warmup(): buckets 32" in str(compiled.report())
    (graph,) = compiled.warmup().graphs
    assert not graph.queued and graph.captured_attention == {32: 1}
    assert "attention captured with its segments in buckets 32: 1 of 1 breaks" in str(
        compiled.report()
    )
