"""Mixture of experts: entries sorted by expert and brought back are row-wise, lookalikes are not.

Each lookalike differs from the real thing in one step. It must run on real rows, with the answer
of the uncompiled model, whatever the padded rows are routed to.

In bfloat16 throughout: grouped products are traced in no other type. Its rounding on a CPU does not
depend on how many rows there are, so answers agree far below a unit of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import (
    CROSSES,
    MAX_TOKENS,
    UNKNOWN,
    WIDTH,
    Around,
    assert_breaks,
    assert_captured,
    assert_same,
    captured,
    check,
    details,
    rows,
    shuffled,
    token_graph,
)

import fx_prefill

NUM_EXPERTS = 4
TOP_K = 2
INNER = 16
WIDE = 16
"""Features inside a mixture: grouped products want rows of a multiple of 16 bytes."""

_generator = torch.Generator().manual_seed(3)


def _weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator).mul(0.4).bfloat16()


ROUTER, OTHER_ROUTER = _weight(NUM_EXPERTS, WIDE), _weight(NUM_EXPERTS, WIDE)
UP, DOWN = _weight(NUM_EXPERTS, WIDE, INNER), _weight(NUM_EXPERTS, INNER, WIDE)
BIAS = _weight(NUM_EXPERTS, WIDE)

LEAK = "padded rows reached real rows"

Step = Callable[..., Any]


def around(middle: Callable[[torch.Tensor], torch.Tensor]) -> Around:
    return Around(middle).bfloat16()


def arguments(batch: int = 1) -> Callable[[int, int], torch.Tensor]:
    return lambda n, seed: rows(n, batch, seed).bfloat16()


def widened(x: torch.Tensor) -> torch.Tensor:
    """Rows of ``[batch, tokens, WIDTH]`` as ``[batch * tokens, WIDE]``."""
    return F.pad(x.reshape(-1, WIDTH), (0, WIDE - WIDTH))


def top(x: torch.Tensor, router: torch.Tensor = ROUTER, k: int = TOP_K) -> Any:
    """Weights and expert ids of each row, [rows, k]."""
    return F.linear(x, router).softmax(-1).topk(k, dim=-1)


def inverse_of(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0))
    return inverse


def ends_of(keys: torch.Tensor, bins: int = NUM_EXPERTS) -> torch.Tensor:
    sizes = torch.histc(keys.float(), bins=bins, min=0, max=bins - 1)
    return sizes.cumsum(0, dtype=torch.int32)


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in steps, of which a test replaces one.

    ``order(ids, x)`` gives sorted keys and the order of the entries, ``pick(x, order)`` the sorted
    rows, ``ends(keys, x)`` the group ends, ``work(y, ends)`` the experts, ``back(y, order, x)``
    the entries by token again.
    """

    k: int = TOP_K
    order: Step = lambda ids, x: ids.sort()
    pick: Step = lambda x, order, k: x[order // k]
    ends: Step = lambda keys, x: ends_of(keys)
    work: Step = lambda y, ends: F.grouped_mm(
        F.silu(F.grouped_mm(y, UP, offs=ends)), DOWN, offs=ends
    )
    back: Step = lambda y, order, x: y[inverse_of(order)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        flat = widened(x)
        weights, ids = top(flat, k=self.k)
        keys, order = self.order(ids.reshape(-1), flat)
        y = self.work(self.pick(flat, order, self.k), self.ends(keys, flat))
        y = y * weights.reshape(-1)[order].unsqueeze(-1)
        y = self.back(y, order, flat)
        return x + y.view(-1, self.k, WIDE).sum(1)[:, :WIDTH].reshape(x.shape)


MIXTURE = Mixture()


def with_steps(**steps: Any) -> Mixture:
    return replace(MIXTURE, **steps)


def scattered_back(y: torch.Tensor, order: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(y)
    out[order] = y
    return out


def added_back(x: torch.Tensor) -> torch.Tensor:
    flat = widened(x)
    weights, ids = top(flat)
    keys, order = ids.reshape(-1).sort(stable=True)
    y = MIXTURE.work(flat[order // TOP_K], ends_of(keys)) * weights.reshape(-1)[order][:, None]
    return x + torch.zeros_like(flat).index_add_(0, order // TOP_K, y)[:, :WIDTH].reshape(x.shape)


def one_weight_a_row(x: torch.Tensor) -> torch.Tensor:
    flat = widened(x)
    weights, ids = top(flat)
    y = flat.repeat_interleave(TOP_K, dim=0)
    chosen = ids.reshape(-1).clamp(0, NUM_EXPERTS - 1)
    y = F.silu(torch.bmm(y.unsqueeze(1), UP[chosen]))
    y = torch.bmm(y, DOWN[chosen]).squeeze(1) * weights.reshape(-1)[:, None]
    return x + y.view(-1, TOP_K, WIDE).sum(1)[:, :WIDTH].reshape(x.shape)


# ---- what is row-wise as a whole ----------------------------------------------------------------

CAPTURED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "inverse by assignment": (MIXTURE, "sort"),
    "inverse by argsort": (with_steps(back=lambda y, p, x: y[p.argsort()]), "sort"),
    "scattered back": (with_steps(back=scattered_back), "sort"),
    "added back": (added_back, "sort"),
    "one expert a token": (replace(MIXTURE, k=1), "sort"),
    "all experts": (replace(MIXTURE, k=NUM_EXPERTS), "sort"),
    "picked by index_select": (
        with_steps(pick=lambda x, p, k: x.index_select(0, torch.div(p, k, rounding_mode="floor"))),
        "sort",
    ),
    "expanded, then picked": (
        with_steps(pick=lambda x, p, k: x[:, None].expand(-1, k, -1).reshape(-1, WIDE)[p]),
        "sort",
    ),
    "keys clamped after they were counted": (
        with_steps(
            ends=lambda keys, x: (ends_of(keys), keys.clamp_(max=NUM_EXPERTS - 1))[0],
        ),
        "sort",
    ),
    "a bias for each expert": (
        with_steps(
            ends=lambda keys, x: (ends_of(keys), BIAS[keys]),
            work=lambda y, more: MIXTURE.work(y, more[0]).add_(more[1]),
        ),
        "sort",
    ),
    "one weight a row": (one_weight_a_row, "bmm"),
}


@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.parametrize("batch", [1, 3])
def test_experts_are_captured(name: str, batch: int) -> None:
    middle, operator = CAPTURED[name]
    report = check(around(middle), make=arguments(batch))
    assert_captured(report, operator)
    assert token_graph(report).num_breaks == 0, str(report)
    assert LEAK not in {detail.reason for detail in details(report)}, str(report)


# ---- what only looks like it --------------------------------------------------------------------


def in_place(tensor: torch.Tensor, write: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    write(tensor)
    return tensor


def other_order(x: torch.Tensor) -> torch.Tensor:
    return top(x, OTHER_ROUTER).indices.reshape(-1).argsort()


def through_a_view(ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, order = ids.sort()
    order.view(-1, TOP_K).copy_(order.view(-1, TOP_K).flip(1))
    return keys, order


def inverse_written_over(y: torch.Tensor, order: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    inverse = inverse_of(order)
    inverse.remainder_(3)
    return y[inverse]


def counted_backwards(y: torch.Tensor, order: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0) - 1, -1, -1)
    return y[inverse]


def counted_in_halves(y: torch.Tensor, order: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0)) // 2
    return y[inverse]


def counted_in_swapped_pairs(y: torch.Tensor, order: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0)) ^ 1
    return y[inverse]


def accumulated(y: torch.Tensor, order: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    inverse = torch.ones_like(order)
    inverse.index_put_((order // 2,), torch.arange(order.size(0)), accumulate=True)
    return y[inverse % order.size(0)]


def capacity(x: torch.Tensor) -> torch.Tensor:
    """Each expert takes the first rows that want it, and drops the rest."""
    flat = widened(x)
    ids = top(flat).indices
    wants = F.one_hot(ids, NUM_EXPERTS).sum(1)
    place = wants.flip(0).cumsum(0).flip(0)
    kept = (wants * (place <= 5)).to(x.dtype)
    return x + (kept @ ROUTER)[:, :WIDTH].reshape(x.shape)


def capacity_by_place(x: torch.Tensor) -> torch.Tensor:
    """The same by a sort: an entry's place in its group."""
    flat = widened(x)
    _, ids = top(flat)
    keys, order = ids.reshape(-1).sort(stable=True)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), ends_of(keys)[:-1]])
    place = torch.arange(order.size(0)) - starts[keys]
    y = flat[order // TOP_K] * (place < 5)[:, None]
    return x + y[inverse_of(order)].view(-1, TOP_K, WIDE).sum(1)[:, :WIDTH].reshape(x.shape)


def experts_choose(x: torch.Tensor) -> torch.Tensor:
    """Each expert takes the rows with the highest score."""
    flat = widened(x)
    best = F.linear(flat, ROUTER).topk(2, dim=0)
    added = flat[best.indices].sum((0, 1))
    return x + added[:WIDTH]


def balanced(x: torch.Tensor) -> torch.Tensor:
    flat = widened(x)
    keys, _ = top(flat).indices.reshape(-1).sort()
    load = torch.histc(keys.float(), bins=NUM_EXPERTS, min=0, max=NUM_EXPERTS - 1)
    return x + ((load / load.sum()).to(x.dtype) @ ROUTER)[:WIDTH]


LOOKALIKES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the order instead of its inverse": with_steps(back=lambda y, p, x: y[p]),
    "no way back": with_steps(back=lambda y, p, x: y),
    "the inverse twice": with_steps(back=lambda y, p, x: y[inverse_of(p)][inverse_of(p)]),
    "inverse of another order": with_steps(back=lambda y, p, x: y[inverse_of(other_order(x))]),
    "argsort of another order": with_steps(back=lambda y, p, x: y[other_order(x).argsort()]),
    "argsort, largest first": with_steps(back=lambda y, p, x: y[p.argsort(descending=True)]),
    "scattered by the inverse": with_steps(
        back=lambda y, p, x: scattered_back(y, inverse_of(p), x)
    ),
    "scattered by another order": with_steps(
        back=lambda y, p, x: scattered_back(y, other_order(x), x)
    ),
    "an inverse that counts backwards": with_steps(back=counted_backwards),
    "an inverse that counts in halves": with_steps(back=counted_in_halves),
    "an inverse that counts in swapped pairs": with_steps(back=counted_in_swapped_pairs),
    "an inverse that was added up": with_steps(back=accumulated),
    "an inverse written over": with_steps(back=inverse_written_over),
    "an order written over": with_steps(
        order=lambda ids, x: (ids.sort()[0], in_place(ids.argsort(), lambda p: p.copy_(p.flip(0))))
    ),
    "an order written over through a view": with_steps(order=through_a_view),
    "rows of another order": with_steps(pick=lambda x, p, k: x[other_order(x) // k]),
    "rows for another number of experts": with_steps(pick=lambda x, p, k: x[p // (2 * k)]),
    "the order as rows": with_steps(pick=lambda x, p, k: x[p % x.shape[0]]),
    "ends of another sort": with_steps(
        ends=lambda keys, x: ends_of(top(x, OTHER_ROUTER).indices.reshape(-1).sort()[0])
    ),
    "ends of other bins": with_steps(
        ends=lambda keys, x: ends_of(keys, 2 * NUM_EXPERTS - 1)[: 2 * NUM_EXPERTS : 2]
    ),
    "ends moved": with_steps(
        ends=lambda keys, x: torch.cat([ends_of(keys)[:-1] // 2, ends_of(keys)[-1:]])
    ),
    "ends of changed keys": with_steps(
        ends=lambda keys, x: ends_of(in_place(keys, lambda k: k.clamp_(max=1)))
    ),
    "ends of keys changed through an alias": with_steps(
        ends=lambda keys, x: (keys.detach().clamp_(max=1), ends_of(keys))[1]
    ),
    "largest expert first": with_steps(order=lambda ids, x: ids.sort(descending=True)),
    "keys that may name no expert": with_steps(
        order=lambda ids, x: ((x.repeat_interleave(2, 0)[:, 0] * 2).long() % NUM_EXPERTS).sort()
    ),
    "an expert that adds up its group": with_steps(
        work=lambda y, ends: MIXTURE.work(y.cumsum(0), ends)
    ),
    "a mean over all entries": with_steps(
        work=lambda y, ends: MIXTURE.work(y - y.mean(0, keepdim=True), ends)
    ),
    "neighbours in the order": with_steps(work=lambda y, ends: MIXTURE.work(y.roll(1, 0), ends)),
    "pairs in the order": with_steps(
        work=lambda y, ends: MIXTURE.work(y.view(-1, 2, WIDE).flip(1).reshape(-1, WIDE), ends)
    ),
    "sorted and unsorted together": with_steps(
        work=lambda y, ends: MIXTURE.work(y, ends) + y.sort(0).values
    ),
    "group ends as values": with_steps(
        work=lambda y, ends: MIXTURE.work(y, ends) * (1 + ends[0] * 0.01)
    ),
    "the order as values": with_steps(
        back=lambda y, p, x: y[inverse_of(p)] + p[:, None].to(y.dtype) * 0.01
    ),
    "the inverse as values": with_steps(
        back=lambda y, p, x: y[inverse_of(p)] + inverse_of(p)[:, None].to(y.dtype) * 0.01
    ),
    "capacity, first come": capacity,
    "capacity by place": capacity_by_place,
    "experts choose tokens": experts_choose,
    "balance as a value": balanced,
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_only_looks_like_experts_runs_on_real_rows(name: str) -> None:
    report = check(around(LOOKALIKES[name]), arguments(), lengths=shuffled(rounds=1))
    graph = token_graph(report)
    assert graph.num_breaks >= 1, str(report)
    assert not captured(report) & {"sort", "argsort", "histc", "_grouped_mm"}, str(report)
    assert captured(report) & {"linear", "layer_norm"}, str(report)
    reasons = {detail.reason for detail in details(report)}
    assert reasons & {CROSSES, UNKNOWN, "host scalar", "other dynamic size"}, str(report)
    # The proof must find it, not the check that comes after it.
    assert LEAK not in reasons, str(report)


@pytest.mark.parametrize("name", ["inverse by assignment", "added back", "one weight a row"])
def test_nan_and_garbage_in_padded_rows_do_not_reach_real_ones(name: str) -> None:
    module = around(CAPTURED[name][0])
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    for value in (float("nan"), float("inf"), 1e6):
        for bucket, n in ((64, 40), (32, 17), (16, 2)):
            x = rows(bucket).bfloat16()
            x[:, n:] = value
            assert_same(module(x)[:, :n], module.forward(x[:, :n]), f"{n} of {bucket} rows")
    assert token_graph(compiled.report()).num_breaks == 0


def test_sorted_entries_that_the_caller_gets_are_those_of_real_rows() -> None:
    class Shows(Around):
        def forward(self, x: torch.Tensor) -> Any:
            y = self.enter(x)
            keys, order = top(widened(y)).indices.reshape(-1).sort(stable=True)
            return self.leave(y), keys, order

    report = check(Shows(lambda x: x).bfloat16(), arguments())
    assert_breaks(report, "sort", CROSSES)


def eager_operators(report: Any) -> set[tuple[str, str]]:
    return {(detail.operator, detail.reason) for detail in details(report)}


def test_the_largest_of_some_numbers_are_no_positions() -> None:
    """In real rows 2, in padded ones 5, which is outside the table: only positions are in range."""
    table = torch.randn(3, WIDTH)

    def middle(x: torch.Tensor) -> torch.Tensor:
        numbers = 5 - 3 * (x[..., :4] != 0).long()
        return x + table[numbers.topk(1).values.squeeze(-1)]

    assert ("getitem", "embedding gather") in eager_operators(check(Around(middle)))


def test_positions_in_a_larger_dimension_may_be_outside_a_table() -> None:
    """The largest of a real row is among its first three features, that of a zero row anywhere."""
    table = torch.randn(3, WIDTH)

    def middle(x: torch.Tensor) -> torch.Tensor:
        scores = torch.cat([x[..., :3].abs(), torch.zeros_like(x[..., 3:])], -1)
        return x + table[scores.argmax(-1)]

    assert ("getitem", "embedding gather") in eager_operators(check(Around(middle)))


# ---- known expert functions ---------------------------------------------------------------------


def _fused(x: Any, w1: Any, w2: Any, weights: Any, ids: Any) -> torch.Tensor:
    keys, order = ids.reshape(-1).sort()
    y = F.grouped_mm(
        F.silu(F.grouped_mm(x[order // TOP_K], w1, offs=ends_of(keys))), w2, offs=ends_of(keys)
    )
    y = y * weights.reshape(-1)[order][:, None]
    return y[inverse_of(order)].view(-1, TOP_K, WIDE).sum(1)


def _fused_with_one_scale(x: Any, w1: Any, w2: Any, weights: Any, ids: Any) -> torch.Tensor:
    """As with a quantisation scale over all rows, padded ones too."""
    scale = x.abs().amax() / 7
    return _fused((x / scale).round() * scale, w1, w2, weights, ids)


@pytest.fixture
def expert_function() -> Any:
    """Registers ``vllm::outplace_fused_experts`` with a body that the test chooses."""
    body: list[Any] = [_fused]
    library = torch.library.Library("vllm", "FRAGMENT")
    if hasattr(torch.ops.vllm, "outplace_fused_experts"):
        pytest.skip("vLLM is installed: its own operator has that name")
    library.define(
        "outplace_fused_experts(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, "
        "Tensor topk_ids) -> Tensor"
    )
    library.impl("outplace_fused_experts", lambda *args: body[0](*args), "CPU")
    library.impl("outplace_fused_experts", lambda x, *_: torch.empty_like(x), "Meta")
    yield body
    library._destroy()


def _calls_function(x: torch.Tensor) -> torch.Tensor:
    flat = widened(x)
    weights, ids = top(flat)
    out = torch.ops.vllm.outplace_fused_experts(flat, UP, DOWN, weights, ids)
    return x + out[:, :WIDTH].reshape(x.shape)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_known_expert_function_is_believed_and_checked(expert_function: Any, batch: int) -> None:
    report = check(around(_calls_function), arguments(batch))
    assert_captured(report, "outplace_fused_experts")
    assert token_graph(report).num_breaks == 0, str(report)


def test_a_known_expert_function_that_leaks_runs_on_real_rows(
    expert_function: Any, caplog: pytest.LogCaptureFixture
) -> None:
    expert_function[0] = _fused_with_one_scale
    report = check(around(_calls_function), arguments(), lengths=[40, 17, 64, 40], replays=False)
    assert "outplace_fused_experts" not in captured(report), str(report)
    assert "padded rows reach real rows" in caplog.text
