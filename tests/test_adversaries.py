"""Models built to catch a wrong proof: rows that mix, counts used as values, memory, views.

A wrong capture shows as a wrong number (padded rows reach real ones), a missing one as a plan
without the expected break; each test looks at both.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import (
    ATTENTION,
    CROSSES,
    DATA,
    HOST,
    LENGTHS,
    MARKED,
    MAX_TOKENS,
    RANDOM,
    UNKNOWN,
    WIDTH,
    WRITES,
    Around,
    assert_breaks,
    assert_captured,
    assert_same,
    captured,
    check,
    copied,
    details,
    rows,
    shuffled,
    token_graph,
)
from torch import nn

import fx_prefill
from fx_prefill.errors import FallbackError, PaddingError
from fx_prefill.execution.buffers import INPUT
from fx_prefill.execution.reasons import FallbackReason

Middle = Callable[[torch.Tensor], torch.Tensor]

TABLE = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(1))
KERNEL = torch.randn(WIDTH, WIDTH, 3, generator=torch.Generator().manual_seed(2)) * 0.2


def count(x: torch.Tensor) -> int:
    return x.shape[1]


def over_channels(function: Middle) -> Middle:
    """Apply what wants [batch, channels, length] to rows."""
    return lambda x: function(x.transpose(1, 2)).transpose(1, 2)


# ---- operators that mix rows --------------------------------------------------------------------

MIXES_ROWS: dict[str, tuple[Middle, str]] = {
    "mean over tokens": (lambda x: x + x.mean(1, keepdim=True), "mean"),
    "mean over everything": (lambda x: x + x.mean(), "mean"),
    "centred": (lambda x: x - x.mean(1, keepdim=True), "mean"),
    "cumsum": (lambda x: x.cumsum(1), "cumsum"),
    "cummax": (lambda x: x.cummax(1).values, "cummax"),
    "softmax": (lambda x: x.softmax(1), "softmax"),
    "log_softmax": (lambda x: F.log_softmax(x, 1), "log_softmax"),
    "conv1d": (over_channels(lambda c: F.conv1d(c, KERNEL, padding=1)), "conv1d"),
    "adaptive pool": (
        over_channels(lambda c: c + F.adaptive_avg_pool1d(c, 1)),
        "adaptive_avg_pool1d",
    ),
    "flip": (lambda x: x.flip(1), "flip"),
    "roll": (lambda x: x.roll(1, 1), "roll"),
    "flat roll": (lambda x: x.roll(3), "roll"),
    "sort": (lambda x: x.sort(1).values, "sort"),
    "argsort": (lambda x: x + x.argsort(1), "argsort"),
    "topk": (lambda x: x + x.topk(2, dim=1).values.sum(1, keepdim=True), "topk"),
    "largest per column": (lambda x: x / x.abs().amax(1, keepdim=True), "amax"),
    "largest of all": (lambda x: x / x.abs().max(), "max"),
    "median": (lambda x: x + x.median(1, keepdim=True).values, "median"),
    "deviation": (lambda x: x + x.std(1, keepdim=True), "std"),
    "norm over everything": (lambda x: x / x.norm(), "norm"),
    "normalize over tokens": (lambda x: F.normalize(x, dim=1), "normalize"),
    "instance norm": (over_channels(F.instance_norm), "instance_norm"),
    "group norm": (over_channels(lambda c: F.group_norm(c, 3)), "group_norm"),
    "response norm over tokens": (lambda x: F.local_response_norm(x, 3), "local_response_norm"),
    "every token with every token": (lambda x: x + x @ x.transpose(1, 2) @ x, "matmul"),
    "joined along tokens": (lambda x: torch.cat([x, x], 1)[:, : count(x)], "cat"),
    "padded along tokens": (lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1], "pad"),
    "repeated along tokens": (
        lambda x: x.repeat_interleave(2, 1)[:, : count(x)],
        "repeat_interleave",
    ),
    "folded into one row": (lambda x: x + x.reshape(1, -1).sum(1)[:, None, None], "reshape"),
    "folded into features": (lambda x: x + x.reshape(-1).view(WIDTH, -1).sum(), "reshape"),
    "first row": (lambda x: x + x[:, :1], "getitem"),
    "last row": (lambda x: x + x[:, -1:], "getitem"),
    "last row without its axis": (lambda x: x + x[:, -1].unsqueeze(1), "getitem"),
    "every second row": (lambda x: x + x[:, ::2].sum(1, keepdim=True), "getitem"),
    "half of two copies": (lambda x: x.repeat(1, 2, 1)[:, : count(x)], "getitem"),
    "gather along tokens": (lambda x: x.gather(1, x.argsort(1)), "gather"),
    "backwards by index": (lambda x: x[:, torch.arange(count(x) - 1, -1, -1)], "getitem"),
    "sum of positions": (lambda x: x + torch.arange(count(x)).sum(), "sum"),
    "sum of a cut table": (lambda x: x + TABLE[: count(x)].sum(0), "sum"),
    "a table cut at an offset": (lambda x: x + TABLE[10 : count(x) + 10], "getitem"),
    "the end of a table": (lambda x: x + TABLE[-count(x) :], "getitem"),
}


@pytest.mark.parametrize("name", MIXES_ROWS)
def test_operators_that_mix_rows_run_on_real_rows(name: str) -> None:
    middle, operator = MIXES_ROWS[name]
    report = check(Around(middle))
    assert_breaks(report, operator, CROSSES)
    assert token_graph(report).num_segments >= 1


@pytest.mark.parametrize(
    ("middle", "operator"),
    [
        pytest.param(over_channels(lambda c: F.avg_pool1d(c, 3, 1, 1)), "avg_pool1d", id="pool"),
        pytest.param(lambda x: torch.fft.fft(x, dim=1).real, "fft_fft", id="fft"),
        pytest.param(lambda x: x[0].tril()[None], "tril", id="tril"),
    ],
)
def test_operators_without_a_rule_run_on_real_rows(middle: Middle, operator: str) -> None:
    assert_breaks(check(Around(middle)), operator, UNKNOWN)


FEW = [17, 2, 40, 17, 2]


def test_max_pool_over_tokens_is_traced_for_each_length_and_right() -> None:
    report = check(
        Around(over_channels(lambda c: F.max_pool1d(c, 3, 1, 1))), lengths=FEW, replays=False
    )
    assert "max_pool1d" not in captured(report) or not any(
        graph.token_symbol for graph in report.graphs
    )


def test_a_graph_for_one_exact_length_replays() -> None:
    # max_pool1d ties the trace to its length: one static graph for each length, one exact bucket.
    report = check(
        Around(over_channels(lambda c: F.max_pool1d(c, 3, 1, 1))), lengths=[17, 17, 40, 17]
    )
    assert sum(sum(graph.replays.values()) for graph in report.graphs) == 4


# ---- the same operators along other axes, and views, stay captured ------------------------------

ROWWISE: dict[str, tuple[Middle, tuple[str, ...]]] = {
    "softmax": (lambda x: x.softmax(-1), ("softmax",)),
    "mean": (lambda x: x - x.mean(-1, keepdim=True), ("mean",)),
    "cumsum": (lambda x: x.cumsum(2), ("cumsum",)),
    "flip": (lambda x: x.flip(2), ("flip",)),
    "sort": (lambda x: x.sort(-1).values, ("sort",)),
    "topk": (lambda x: x + x.topk(2).values.sum(-1, keepdim=True), ("topk",)),
    "part of the features": (lambda x: torch.cat([x[..., 6:], x[..., :6]], -1), ("cat",)),
    "heads": (
        lambda x: x.view(*x.shape[:2], 3, 4).transpose(1, 2).transpose(1, 2).flatten(2),
        ("view",),
    ),
    "flattened batch": (lambda x: x.reshape(-1, WIDTH).tanh().view(x.shape), ("reshape",)),
    "positions": (lambda x: x + torch.arange(count(x))[None, :, None] * 0.01, ("arange",)),
    "the start of a table": (lambda x: x + TABLE[: count(x)], ("add",)),
    "two copies summed": (lambda x: x.repeat(1, 2, 1).view(1, 2, -1, WIDTH).sum(1), ("repeat",)),
    "in place": (lambda x: x.mul(2).mul_(3), ("mul_",)),
}


@pytest.mark.parametrize("name", ROWWISE)
def test_rowwise_operators_are_captured(name: str) -> None:
    middle, operators = ROWWISE[name]
    report = check(Around(middle))
    assert_captured(report, *operators)
    assert token_graph(report).num_breaks == 0


# ---- the token count as a value -----------------------------------------------------------------

COUNT_AS_VALUE: dict[str, tuple[Middle, str]] = {
    "divided": (lambda x: x / count(x), "truediv"),
    "multiplied": (lambda x: x * count(x), "mul"),
    "subtracted from": (lambda x: count(x) - x, "sub"),
    "number of elements": (lambda x: x / x.numel(), "truediv"),
    "rounded down": (lambda x: x * (count(x) // 16), "mul"),
    "remainder": (lambda x: x * (count(x) % 7), "mul"),
    "bounded": (lambda x: x * min(count(x), 40), "mul"),
    "compared": (lambda x: x * (count(x) > 40), "mul"),
    "square root": (lambda x: x / math.sqrt(count(x)), "truediv"),
    "exponent": (lambda x: x.abs() ** (1.0 / (count(x) + 1)), "pow"),
    "scale of the second operand": (lambda x: torch.add(x, x, alpha=count(x)), "add"),
    "weight of a blend": (lambda x: torch.lerp(x, x * 2, 1.0 / count(x)), "lerp"),
    "bound": (lambda x: x.clamp(max=count(x) / 100), "clamp"),
    "slope": (lambda x: F.leaky_relu(x, 1 / count(x)), "leaky_relu"),
    "threshold": (lambda x: x + (x > count(x) / 100).float(), "gt"),
    "choice": (lambda x: torch.where(x > 0, count(x), x), "where"),
    "filled under a mask": (lambda x: x.masked_fill(x > 0, count(x)), "masked_fill"),
    "filled": (lambda x: x + torch.full((count(x),), count(x))[None, :, None], "full"),
    "filled in place": (lambda x: x + torch.zeros(count(x), 1).fill_(count(x)), "fill_"),
    "a tensor of it": (lambda x: x + torch.tensor([count(x)]), "tensor"),
    "distance from the end": (
        lambda x: x + (torch.arange(count(x)) - count(x))[None, :, None],
        "sub",
    ),
    "relative position": (
        lambda x: x + (torch.arange(count(x)) / count(x))[None, :, None],
        "truediv",
    ),
    "counting down": (lambda x: x + torch.arange(count(x) - 1, -1, -1)[None, :, None], "arange"),
    "row of a table": (lambda x: x + TABLE[count(x)], "select"),
}


@pytest.mark.parametrize("name", COUNT_AS_VALUE)
def test_the_token_count_is_not_baked_as_a_value(name: str) -> None:
    middle, operator = COUNT_AS_VALUE[name]
    report = check(Around(middle))
    assert (operator, HOST) in [(d.operator, d.reason) for d in details(report)], str(report)
    assert token_graph(report).num_segments >= 1


@pytest.mark.parametrize(
    "middle",
    [
        pytest.param(lambda x: x + torch.linspace(0, 1, count(x))[None, :, None], id="linspace"),
        pytest.param(lambda x: x * math.log(count(x)), id="logarithm"),
        pytest.param(lambda x: F.layer_norm(x, (WIDTH,), eps=1.0 / count(x)), id="epsilon"),
    ],
)
def test_counts_that_dynamo_ties_to_one_length_are_right(middle: Middle) -> None:
    check(Around(middle), lengths=FEW, replays=False)


def test_a_table_is_not_read_past_its_end() -> None:
    table = TABLE[:60]
    report = check(Around(lambda x: x + table[: count(x)]), lengths=shuffled([2, 17, 40, 59, 60]))
    assert 64 in token_graph(report).unusable_buckets


# ---- branches and bounds on the token count -----------------------------------------------------


def test_a_branch_on_the_token_count_is_not_reused_on_its_other_side() -> None:
    report = check(Around(lambda x: x * 2 if count(x) > 40 else x * 3))
    below, above = (
        next(graph for graph in report.graphs if side(graph.replays)) for side in (_small, _large)
    )
    # The bucket of 40 rows is 48, on the wrong side for the graph that was traced at 40.
    assert 48 in below.unusable_buckets and 48 not in above.unusable_buckets
    assert below.fallbacks[str(FallbackReason.GUARD)] == 2


def _small(replays: dict[int, int]) -> bool:
    return bool(replays) and max(replays) <= 40


def _large(replays: dict[int, int]) -> bool:
    return bool(replays) and min(replays) > 40


@pytest.mark.parametrize("window", [8, 20, 48])
def test_a_window_bound_crossing_the_ladder(window: int) -> None:
    report = check(Around(lambda x: x + x[:, -window:].mean(1, keepdim=True)))
    assert_breaks(report, "getitem", CROSSES)
    for graph in report.graphs:
        counts = [n for n in graph.replays if n]
        assert all(n > window for n in counts) or all(n <= window for n in counts), str(report)


def test_lengths_that_must_be_multiples() -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        return x.view(1, count(x) // 8, 8, WIDTH).flip(2).reshape(x.shape)

    report = check(Around(middle), lengths=shuffled([8, 16, 24, 40, 56, 64]))
    assert all(bucket % 8 == 0 for graph in report.graphs for bucket in graph.replays)


# ---- data-dependent -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "middle",
    [
        pytest.param(lambda x: x + x[x > 0].sum(), id="boolean mask"),
        pytest.param(lambda x: x + (x > 0).nonzero().sum(), id="nonzero"),
        pytest.param(lambda x: x * x.sum().item(), id="item"),
    ],
)
@pytest.mark.parametrize("in_one_graph", [False, True])
def test_data_dependent_operators(middle: Middle, in_one_graph: bool) -> None:
    with torch._dynamo.config.patch(
        capture_scalar_outputs=in_one_graph, capture_dynamic_output_shape_ops=in_one_graph
    ):
        report = check(Around(middle))
    graphs = [graph for graph in report.graphs if graph.token_symbol is not None]
    if in_one_graph:
        assert len(graphs) == 1
        assert DATA in {d.reason for d in details(report)}
        assert graphs[0].num_segments == 2
    else:
        assert len(graphs) >= 2, "one graph before and one after"


# ---- state: buffers, caches, random numbers -----------------------------------------------------


def check_with_state(make: Callable[[], nn.Module]) -> Any:
    """Compare with an uncompiled twin that takes the same calls, state included."""
    module, twin = make(), make()
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    for seed, n in enumerate(shuffled()):
        torch.manual_seed(seed)
        actual = module(rows(n, seed=seed))
        torch.manual_seed(seed)
        expected = twin(rows(n, seed=seed))
        assert_same(actual, expected, f"{n} tokens")
        assert_same(dict(module.named_buffers()), dict(twin.named_buffers()), f"after {n} tokens")
    report = compiled.report()
    assert any(graph.replays for graph in report.graphs), str(report)
    return report


class WithBatchNorm(Around):
    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.batch_norm = nn.BatchNorm1d(WIDTH).requires_grad_(False)
        self.batch_norm.running_mean.uniform_(-1, 1, generator=torch.Generator().manual_seed(3))
        self.middle = over_channels(self.batch_norm)


def test_batch_norm_in_train_mode_takes_statistics_of_real_rows() -> None:
    report = check_with_state(WithBatchNorm)
    assert_breaks(report, "batch_norm", CROSSES)


def test_batch_norm_in_eval_mode_is_captured() -> None:
    report = check(WithBatchNorm().eval())
    assert_captured(report, "batch_norm")


class Counting(Around):
    def __init__(self) -> None:
        super().__init__(self.count_and_add)
        self.register_buffer("calls", torch.zeros(()))

    def count_and_add(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


def test_a_counter_written_in_place_counts_calls() -> None:
    # Verification runs segments twice at capture: a captured write would count too often.
    assert_breaks(check_with_state(Counting), "add_", WRITES)


class Mirror(Around):
    """Keeps the rows of the last call, as a KV cache does; ``how`` is the spelling of the write."""

    def __init__(self, how: str) -> None:
        super().__init__(self.keep)
        self.how = how
        self.register_buffer("cache", torch.zeros(1, 80, WIDTH))

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "slice":
            self.cache[:, : count(x)] = x
        elif self.how == "copy_":
            self.cache[:, : count(x)].copy_(x)
        else:
            self.cache.index_copy_(1, torch.arange(count(x)), x)
        return x + self.cache.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("how", "operator"), [("slice", "setitem"), ("copy_", "copy_"), ("index_copy_", "index_copy_")]
)
def test_a_cache_gets_real_rows_only(how: str, operator: str) -> None:
    report = check_with_state(lambda: Mirror(how))
    reasons = {d.reason for d in details(report) if d.operator == operator}
    assert reasons and operator not in captured(report), str(report)


def test_an_argument_written_in_place_is_written() -> None:
    module = Around(lambda x: x)
    outer = nn.ModuleList([module])

    class WritesInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = outer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            y = self.inner[0](x)
            x.add_(y)
            return y

    module = WritesInput()
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    for seed, n in enumerate(shuffled()):
        mine, theirs = rows(n, seed=seed), rows(n, seed=seed)
        assert_same(module(mine), module.forward(theirs), f"{n} tokens")
        assert_same(mine, theirs, f"the argument of {n} tokens")
    assert_breaks(compiled.report(), "mul_", WRITES)


class TwoDropouts(Around):
    def __init__(self) -> None:
        super().__init__(self.drop)
        self.p = 0.3

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(x, self.p, training=True)
        y = self.enter(y) + torch.randn(WIDTH)
        return F.dropout(y, self.p, training=True) + torch.rand_like(x)


def test_random_numbers_are_drawn_in_order_for_real_rows() -> None:
    report = check_with_state(TwoDropouts)
    assert_breaks(report, "dropout", RANDOM)
    assert_breaks(report, "rand_like", RANDOM)


def test_module_floats_are_live() -> None:
    class Scaled(Around):
        def __init__(self) -> None:
            super().__init__(lambda x: x * self.scale)
            self.scale = 0.5

    module = Scaled()
    fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    for seed, n in enumerate(shuffled()):
        module.scale = 0.5 + seed % 3
        assert_same(module(rows(n)), module.forward(rows(n)), f"scale {module.scale}")


# ---- padding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["before a segment", "out of a break"])
def test_non_finite_rows_of_a_call_do_not_reach_the_next(value: float, where: str) -> None:
    # (rows * 0) is NaN for a padded row that holds NaN or inf: sums over rows would show it.
    module = Around(lambda x: x + x.mean(1, keepdim=True).clamp(-1, 1))
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    for n, shorter in ((64, 40), (17, 2), (48, 33), (40, 15)):
        poisoned = rows(n)
        poisoned[:, n - 1 if where == "before a segment" else slice(None)] = value
        module(poisoned)
        for m in (shorter, n):
            assert_same(module(rows(m, seed=1)), module.forward(rows(m, seed=1)), f"{m} after {n}")
    assert token_graph(compiled.report()).replays


def runtimes() -> list[Any]:
    from fx_prefill.backend import registry

    return [graph for ref in registry._entries if (graph := ref()) is not None]


@pytest.mark.parametrize(
    "middle",
    [
        pytest.param(lambda x: x - x.mean(1, keepdim=True), id="one break"),
        pytest.param(lambda x: x.reshape(-1, WIDTH).cumsum(0).view(x.shape), id="flattened"),
        pytest.param(lambda x: x.softmax(-1), id="no break"),
    ],
)
def test_nan_in_padded_rows_stays_there(middle: Middle) -> None:
    """Rows are independent: whatever the tails hold, real rows are right."""
    module = Around(middle)
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    for n in (64, 17, 40):
        module(rows(n))
    planted = 0
    for n in (17, 2, 40, 63):
        for runtime in runtimes():
            for buffers in runtime._captures._buffers.values():
                for memory in buffers._memory:
                    if memory.flat.is_floating_point():
                        memory.flat.fill_(float("nan"))
                        memory._high = 0  # so that the tails are taken for clean
                        planted += 1
        assert_same(module(rows(n, seed=1)), module.forward(rows(n, seed=1)), f"{n} tokens")
    assert planted and token_graph(compiled.report()).replays


def test_tails_are_cleared_of_an_earlier_longer_forward() -> None:
    module = Around(lambda x: x - x.mean(1, keepdim=True))
    fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    module(rows(64))
    module(rows(40))
    module(rows(17))
    (runtime,) = runtimes()
    (buffers,) = runtime._captures._buffers.values()
    for role, node in buffers.values:
        if role != "result":
            flat = buffers.slot(role, node).flat.view(-1, WIDTH)
            assert bool(flat[:17].any()) and not flat[17:32].any(), (role, node)
    assert INPUT in {role for role, _ in buffers.values}


def test_a_batch_with_left_padding_and_a_mask() -> None:
    class Masked(Around):
        def __init__(self) -> None:
            super().__init__(lambda x: x)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            y = self.enter(x)
            heads = y.view(*y.shape[:2], 3, 4).transpose(1, 2)
            causal = torch.ones(count(x), count(x), dtype=torch.bool).tril()
            allowed = causal[None, None] & mask[:, None, None, :].bool()
            allowed = allowed | torch.eye(count(x), dtype=torch.bool)
            mixed = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=allowed)
            return self.leave(y + mixed.transpose(1, 2).flatten(2)) * mask[..., None]

    def make(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.ones(3, n, dtype=torch.int64)
        mask[1, : n // 2] = 0
        mask[2, : n - 1] = 0
        return rows(n, batch=3, seed=seed), mask

    report = check(Masked(), make)
    assert_breaks(report, "scaled_dot_product_attention", ATTENTION)
    assert token_graph(report).num_segments == 2


def test_batches_alternate() -> None:
    def make(n: int, seed: int) -> torch.Tensor:
        return rows(n, batch=2 + seed % 3, seed=seed)

    report = check(
        Around(lambda x: x.reshape(-1, WIDTH).view(x.shape) - x.mean(1, keepdim=True)), make
    )
    assert_breaks(report, "mean", CROSSES)


def test_two_token_shaped_inputs_of_which_one_broadcasts() -> None:
    class Two(Around):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x + y) * y

    short = Two(lambda x: x - x.mean(1, keepdim=True))
    report = check(short, lambda n, seed: (rows(n, seed=seed), rows(1, seed=seed)))
    assert_breaks(report, "mean", CROSSES)
    torch._dynamo.reset()
    full = Two(lambda x: x - x.mean(1, keepdim=True))
    check(full, lambda n, seed: (rows(n, seed=seed), rows(n, seed=seed + 50)))


# ---- in place -----------------------------------------------------------------------------------


def _features_zeroed(x: torch.Tensor) -> torch.Tensor:
    y = x.tanh()
    y *= 2
    y[..., :4] = 0
    return y


def test_in_place_work_on_a_segments_own_memory_is_captured() -> None:
    report = check(Around(_features_zeroed))
    assert token_graph(report).num_breaks == 0


def _attend(x: torch.Tensor) -> torch.Tensor:
    heads = x.view(*x.shape[:2], 3, 4).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


def _written_after_attention(x: torch.Tensor) -> torch.Tensor:
    y = x.tanh()
    mixed = _attend(y)
    y.mul_(2)
    return y + mixed


def _first_row_zeroed(x: torch.Tensor) -> torch.Tensor:
    y = x.tanh()
    mixed = _attend(y)
    y[:, 0] = 0
    return y + mixed


def _view_written_after_attention(x: torch.Tensor) -> torch.Tensor:
    y = x.tanh()
    view = y[..., :4]
    mixed = _attend(y)
    view.zero_()
    return y + mixed


def _attention_result_written(x: torch.Tensor) -> torch.Tensor:
    mixed = _attend(x.tanh())
    before = mixed.sum(-1, keepdim=True)
    mixed.mul_(2)
    return mixed + before


@pytest.mark.parametrize(
    "middle",
    [
        _written_after_attention,
        _first_row_zeroed,
        _view_written_after_attention,
        _attention_result_written,
    ],
)
def test_in_place_work_across_a_break_keeps_its_order(middle: Middle) -> None:
    report = check(Around(middle))
    assert_breaks(report, "scaled_dot_product_attention", ATTENTION)


# ---- custom operators ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    """Operators of a namespace of our own: out-of-place and out-parameter ones, honest and not."""
    live: dict[str, int] = {}

    @torch.library.custom_op("adversary::attend_out", mutates_args={"out"})
    def attend_out(x: torch.Tensor, out: torch.Tensor) -> None:
        assert x.shape[1] == out.shape[1] == live["tokens"], (x.shape, out.shape, live)
        out.copy_(x.cumsum(1) / x.shape[1])

    @torch.library.custom_op("adversary::scale", mutates_args=())
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @torch.library.custom_op("adversary::lie", mutates_args=())
    def lie(x: torch.Tensor) -> torch.Tensor:
        return x + x.sum(1, keepdim=True)

    attend_out.register_fake(lambda x, out: None)
    scale.register_fake(torch.empty_like)
    lie.register_fake(torch.empty_like)
    yield live


def test_an_operator_with_an_out_parameter_sees_real_rows(ops: dict[str, int]) -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.adversary.attend_out(x, out)
        return x + out

    def make(n: int, seed: int) -> torch.Tensor:
        ops["tokens"] = n
        return rows(n, seed=seed)

    report = check(Around(middle), make)
    assert_breaks(report, "attend_out", UNKNOWN)
    assert token_graph(report).num_segments == 2


def test_an_unknown_operator_is_a_break_that_one_line_promotes(ops: dict[str, int]) -> None:
    report = check(Around(torch.ops.adversary.scale))
    assert_breaks(report, "scale", UNKNOWN)
    for entry in ("adversary::scale", torch.ops.adversary.scale, torch.ops.adversary.scale.default):
        torch._dynamo.reset()
        report = check(Around(torch.ops.adversary.scale), rowwise_ops=[entry])
        assert_captured(report, "scale")


def test_a_false_promise_is_found_at_capture(
    ops: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="fx_prefill"):
        report = check(
            Around(torch.ops.adversary.lie), rowwise_ops=["adversary::lie"], replays=False
        )
    assert "padded rows reach real rows" in caplog.text and "lie" in caplog.text
    assert any(d.reason == "padded rows reached real rows" for d in details(report)), str(report)


def test_a_false_promise_is_an_error_under_strict(ops: dict[str, int]) -> None:
    module = Around(torch.ops.adversary.lie)
    fx_prefill.compile(module, max_tokens=64, rowwise_ops=["adversary::lie"], strict=True)
    with pytest.raises(PaddingError, match="lie"):
        module(rows(17))


def test_a_false_promise_is_found_whatever_the_first_length(ops: dict[str, int]) -> None:
    # The first bucket is met exactly: no padded row is there, and the proof must be checked still.
    check(
        Around(torch.ops.adversary.lie),
        lengths=[16, 15, 2, 64, 40],
        rowwise_ops=["adversary::lie"],
        replays=False,
    )


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(torch.tanh, id="function"),
        pytest.param(torch.ops.aten.tanh.default, id="overload"),
        pytest.param(torch.ops.aten.tanh, id="packet"),
        pytest.param("aten::tanh", id="name"),
        pytest.param(lambda node: "tanh" in str(node.target), id="predicate"),
    ],
)
def test_break_ops_break(entry: Any) -> None:
    report = check(Around(lambda x: x * 2), break_ops=[entry])
    assert_breaks(report, "tanh", MARKED)
    assert token_graph(report).num_breaks == 2


# ---- what is returned ---------------------------------------------------------------------------


class Layers(nn.Module):
    """Three layers of attention; ``what`` they return besides the hidden rows, layer by layer."""

    def __init__(self, what: Middle) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Around(_attend) for _ in range(3)])
        self.what = what
        for index, layer in enumerate(self.layers):
            layer.proj_in.weight.mul_(1 + index)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        kept = []
        for layer in self.layers:
            keys = layer.enter(x)
            kept.append(self.what(keys))
            x = layer.leave(x + _attend(keys))
        return [x, *kept]


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(lambda k: k[:, -1:], id="last row"),
        pytest.param(lambda k: k[:, :2], id="first rows"),
        pytest.param(lambda k: k[:, -1], id="selected row"),
        pytest.param(lambda k: k[:, ::2], id="every second row"),
        pytest.param(lambda k: k.transpose(1, 2), id="captured view"),
        pytest.param(lambda k: k[..., :4], id="part of the features"),
        pytest.param(lambda k: k.flip(1)[:, :1], id="view of a new tensor"),
        pytest.param(lambda k: (k[:, -1:], k, k[:, :1]), id="several"),
    ],
)
def test_views_of_every_layer_are_the_callers_own(what: Middle) -> None:
    # Layers share memory: a view of layer 0 that is kept by reference shows rows of layer 2.
    report = check(Layers(what))
    assert token_graph(report).num_segments == 4


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: dict[str, Any]


def _outputs(x: torch.Tensor, y: torch.Tensor, mean: torch.Tensor) -> dict[str, Any]:
    return {
        "twice": (y, y),
        "input": (x, y),
        "view of an output": (y, y[..., :4], y.transpose(1, 2)),
        "view of a break": (mean, mean[..., :4]),
        "numbers": (y, y.shape[1], y.shape[1] * 2 + 1, 7, None, "text"),
        "nested": {"a": [y, {"b": (mean, x.shape[1] // 2)}], "c": y * 2},
        "view of the input": (x[..., :4], y),
        "literal": (y, torch.ones(3), torch.arange(x.shape[1])),
    }


@pytest.mark.parametrize("name", _outputs(*(torch.zeros(1, 2, 8),) * 3))
def test_outputs_of_every_form(name: str) -> None:
    class Returning(Around):
        def forward(self, x: torch.Tensor) -> Any:
            y = self.enter(x)
            mean = y.mean(1, keepdim=True)
            return _outputs(x, self.leave(y - mean), mean)[name]

    check(Returning(lambda x: x))


def test_an_output_dataclass() -> None:
    class Returning(Around):
        def forward(self, x: torch.Tensor) -> Output:
            y = self.enter(x)
            return Output(self.leave(y - y.mean(1, keepdim=True)), {"rows": y, "n": count(x)})

    module = Returning(lambda x: x)
    fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    for n in shuffled():
        actual, expected = module(rows(n)), module.forward(rows(n))
        assert type(actual) is Output
        assert_same(dataclasses.asdict(actual), dataclasses.asdict(expected), f"{n} tokens")


def test_one_value_returned_twice_is_one_tensor_and_an_input_is_itself() -> None:
    class Returning(Around):
        def forward(self, x: torch.Tensor) -> Any:
            y = self.enter(x)
            return y, x, y

    module = Returning(lambda x: x)
    fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    x = rows(17)
    first, same, second = module(x)
    assert first is second and same is x


def test_what_a_caller_writes_into_a_result_stays_with_the_caller() -> None:
    module = Layers(lambda k: k[:, -1:])
    fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    for n in shuffled():
        for result in module(rows(n)):
            result.fill_(float("nan"))
        assert_same(module(rows(n)), module.forward(rows(n)), f"{n} tokens")


# ---- regions, contexts, modes -------------------------------------------------------------------


def _checkpointed(x: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda y: _attend(y.tanh()) + y, x, use_reentrant=False)


_region = torch.compiler.nested_compile_region(lambda y: _attend(y.tanh()) + y)


@pytest.mark.parametrize(
    "middle",
    [
        pytest.param(_checkpointed, id="checkpoint"),
        pytest.param(lambda x: _region(_region(x)), id="nested_compile_region"),
    ],
)
def test_attention_inside_regions_is_seen(middle: Middle) -> None:
    report = check(Around(middle))
    assert_breaks(report, "scaled_dot_product_attention", ATTENTION)


def _lower_precision(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ TABLE[:WIDTH]
    return y.float() + x @ TABLE[:WIDTH]


def _lower_precision_around_attention(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ TABLE[:WIDTH]
        y = _attend(y) @ TABLE[:WIDTH]
    return y.float() + x @ TABLE[:WIDTH]


def _lower_precision_after_attention(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = _attend(x @ TABLE[:WIDTH]).float()
        y = mixed @ TABLE[:WIDTH]
    return y.float() + x @ TABLE[:WIDTH]


def _both_sides(x: torch.Tensor) -> torch.Tensor:
    outside = x @ TABLE[:WIDTH]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = x @ TABLE[:WIDTH]
    # Whether the precision was lower, not by how much: that depends on how a kernel rounds.
    lower = ((inside.float() - outside).abs().amax(-1, keepdim=True) > 1e-4).float()
    return outside + lower


@pytest.mark.parametrize(
    "middle",
    [
        _lower_precision,
        _lower_precision_around_attention,
        _lower_precision_after_attention,
        _both_sides,
    ],
)
def test_autocast_covers_the_operators_it_covered(middle: Middle) -> None:
    report = check(Around(middle))
    assert not torch.is_autocast_enabled("cpu")
    reasons = {reason for graph in report.graphs for reason in graph.fallbacks}
    assert str(FallbackReason.CAPTURE_FAILED) not in reasons, str(report)


def test_autocast_outside_the_model_is_part_of_the_graph() -> None:
    module = Around(lambda x: x - x.mean(1, keepdim=True))
    fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    for n in shuffled():
        for enabled in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                actual, expected = module(rows(n)), module.forward(rows(n))
            torch.testing.assert_close(
                actual, expected, rtol=1e-4 if not enabled else 2e-2, atol=1e-2
            )


def test_a_graph_that_needs_gradients_runs_eagerly() -> None:
    module = Around(lambda x: x - x.mean(1, keepdim=True)).requires_grad_(True)
    twin = copy.deepcopy(module)
    twin.middle = module.middle
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    with torch.enable_grad():
        for n in (17, 40, 2):
            module(rows(n)).square().sum().backward()
            twin.forward(rows(n)).square().sum().backward()
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    (graph,) = compiled.report().graphs
    assert graph.refused == str(FallbackReason.TRAINING) and not graph.replays
    assert graph.fallbacks == {str(FallbackReason.TRAINING): 3}
    # The same module without gradients replays.
    assert_same(module(rows(17)), module.forward(rows(17)))
    assert any(graph.replays for graph in compiled.report().graphs)


def test_inference_mode_and_no_grad_alternate() -> None:
    module = Around(lambda x: x - x.mean(1, keepdim=True))
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    for index, n in enumerate(shuffled()):
        with torch.inference_mode(index % 2 == 0):
            assert_same(module(rows(n)), module.forward(rows(n)), f"{n} tokens")
    assert any(graph.replays for graph in compiled.report().graphs)


def test_a_single_token_is_right() -> None:
    check(Around(lambda x: x - x.mean(1, keepdim=True) * 0.5), lengths=[1, 17, 1, 2, 1, 16])


def test_an_empty_call_is_right() -> None:
    check(Around(lambda x: x.cumsum(1)), lengths=[17, 0, 16, 0])


def test_lengths_above_the_ladder_are_counted() -> None:
    report = check(Around(lambda x: x.flip(1)))
    above = [n for n in shuffled() if n > MAX_TOKENS]
    assert token_graph(report).fallbacks == {str(FallbackReason.TOO_LONG): len(above)}
    assert sum(token_graph(report).replays.values()) == len(shuffled()) - len(above)
    assert max(LENGTHS) > MAX_TOKENS


def test_strict_raises_where_a_forward_would_fall_back() -> None:
    module = Around(lambda x: x.flip(1))
    fx_prefill.compile(module, max_tokens=MAX_TOKENS, strict=True)
    module(rows(17))
    with pytest.raises(FallbackError, match=r"65 tokens.*above the largest bucket"):
        module(rows(65))


def test_reports_name_the_operator_and_the_users_line() -> None:
    report = check(Around(lambda x: x.cumsum(1)))
    (detail,) = [d for d in details(report) if d.operator == "cumsum"]
    assert "along the token axis" in detail.detail
    assert "test_adversaries.py" in detail.source, detail


@pytest.mark.parametrize("seed", range(6))
def test_operators_in_random_order(seed: int) -> None:
    generator = random.Random(seed)
    pool = [
        middle for middle, _ in (*MIXES_ROWS.values(), *ROWWISE.values(), *COUNT_AS_VALUE.values())
    ]
    chosen = generator.sample(pool, 4)

    class Chain(Around):
        def forward(self, x: torch.Tensor) -> Any:
            kept = []
            for step in chosen:
                x = self.enter(F.layer_norm(step(self.leave(x)), (WIDTH,)))
                kept.append(x)
            return kept

    check(Chain(lambda x: x), lengths=shuffled(seed=seed, rounds=1), replays=False)


def test_copies_are_real() -> None:
    """The harness itself: a shared tensor would make every comparison with later calls idle."""
    x = rows(2)
    kept = copied([x])
    x.zero_()
    assert bool(kept[0].any())


# ---- look-ups by token --------------------------------------------------------------------------


def test_a_look_up_by_position_never_reads_past_its_table() -> None:
    """A table of 40 rows and 33 to 40 tokens: the bucket, 48, is larger than the table."""
    middle = Around(lambda x: x + F.embedding(torch.arange(count(x)), TABLE[:40]))
    report = check(middle, lengths=(33, 40, 2, 37))
    assert token_graph(report).replays == {16: 1, 48: 3}
    assert_breaks(report, "embedding", "embedding gather")


def test_an_index_that_topk_made_may_be_looked_up_in_a_segment() -> None:
    """Routing of experts: what topk returns is in range, whatever a padded row holds."""
    weights = torch.arange(float(WIDTH))
    report = check(Around(lambda x: x * weights[x.topk(2, -1).indices].sum(-1, keepdim=True)))
    assert_captured(report, "topk", "getitem")
