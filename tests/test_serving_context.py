"""The live context: who sees which, and what it refuses."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

import fx_prefill
from fx_prefill import ForwardContext, ForwardMode, current_context, forward_context
from fx_prefill.errors import ContextError, ServingError


class Recorder:
    """A backend that says which context it was told of and ran with."""

    supports_capture = False

    def __init__(self) -> None:
        self.told: list[ForwardContext] = []
        self.ran: list[ForwardContext] = []

    def init_forward_metadata(self, ctx: ForwardContext) -> None:
        self.told.append(ctx)

    def forward(self, q: Any, k: Any, v: Any, layer: Any, out: torch.Tensor, ctx: Any) -> None:
        self.ran.append(ctx)
        out.fill_(1)


def rows(num_tokens: int) -> torch.Tensor:
    return torch.zeros(num_tokens, 2, 4)


def attend(num_tokens: int) -> torch.Tensor:
    return fx_prefill.attention(rows(num_tokens), rows(num_tokens), rows(num_tokens), 0)


def test_attention_without_a_context_says_so() -> None:
    with pytest.raises(ContextError, match="there is none; run the model through its"):
        attend(2)


def test_attention_without_a_backend_says_so() -> None:
    with (
        forward_context(ForwardContext.from_lengths([2])),
        pytest.raises(ContextError, match="layer 0: the forward's context has no attention"),
    ):
        attend(2)


def test_fewer_rows_than_tokens_are_refused() -> None:
    ctx = ForwardContext.from_lengths([3], attention=Recorder())
    with (
        forward_context(ctx),
        pytest.raises(ContextError, match="got 2 rows and the context's num_tokens is 3"),
    ):
        attend(2)


def test_a_context_is_a_forward_context() -> None:
    with pytest.raises(ContextError, match="expected a ForwardContext, got dict"):
        forward_context({}).__enter__()


def test_the_backend_is_told_before_the_first_layer() -> None:
    backend = Recorder()
    ctx = ForwardContext.from_lengths([2], attention=backend)
    with forward_context(ctx) as published:
        assert published is ctx
        assert backend.told == [ctx]
        assert attend(2).eq(1).all()
    assert len(backend.told) == len(backend.ran) == 1


@pytest.mark.parametrize("rows_given", [2, 3])
def test_a_backend_that_returns_its_result_is_told_to_write_it(rows_given: int) -> None:
    class Returns(Recorder):
        def forward(self, q: Any, k: Any, v: Any, layer: Any, out: torch.Tensor, ctx: Any) -> Any:
            return torch.ones_like(out)

    said = "layer 0: forward of Returns returned something; required: None, .* written to `out`"
    with (
        forward_context(ForwardContext.from_lengths([2], attention=Returns())),
        pytest.raises(ServingError, match=said),
    ):
        attend(rows_given)


def test_a_captured_backend_that_returns_its_result_is_told_to_write_it() -> None:
    class Returns(Recorder):
        def prepare_captured(self, ctx: ForwardContext, bucket: int) -> None: ...

        def forward_captured(self, q: Any, k: Any, v: Any, layer: Any, out: torch.Tensor) -> Any:
            return out

    ctx = ForwardContext.from_lengths([2], attention=Returns(), captured_bucket=2)
    with (
        forward_context(ctx),
        pytest.raises(ServingError, match="forward_captured of Returns returned something"),
    ):
        attend(2)


def test_the_outer_context_is_back_after_the_inner_and_after_an_error() -> None:
    outer, inner = ForwardContext.from_lengths([2]), ForwardContext.from_lengths([3])
    with forward_context(outer):
        with forward_context(inner):
            assert current_context() is inner
        assert current_context() is outer
        with pytest.raises(ZeroDivisionError), forward_context(inner):
            raise ZeroDivisionError
        assert current_context() is outer
    with pytest.raises(ContextError):
        current_context()


def test_a_backend_that_refuses_the_context_leaves_none_behind() -> None:
    class Refuses(Recorder):
        def init_forward_metadata(self, ctx: ForwardContext) -> None:
            raise ContextError("no pages")

    with pytest.raises(ContextError, match="no pages"):
        forward_context(ForwardContext.from_lengths([2], attention=Refuses())).__enter__()
    with pytest.raises(ContextError, match="there is none"):
        current_context()


def test_threads_see_their_own_context() -> None:
    seen: list[Any] = []
    barrier = threading.Barrier(2)

    def run(ctx: ForwardContext) -> None:
        with forward_context(ctx):
            barrier.wait(10)
            seen.append(current_context() is ctx)
            barrier.wait(10)

    def without() -> None:
        with pytest.raises(ContextError):
            current_context()
        seen.append(True)

    with forward_context(ForwardContext.from_lengths([1])):
        threads = [
            threading.Thread(target=run, args=(ForwardContext.from_lengths([n]),)) for n in (2, 3)
        ]
        threads.append(threading.Thread(target=without))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert seen == [True, True, True]


def test_tasks_see_their_own_context() -> None:
    async def run(ctx: ForwardContext) -> bool:
        with forward_context(ctx):
            await asyncio.sleep(0)
            same = current_context() is ctx
            await asyncio.sleep(0)
        return same

    async def both() -> list[bool]:
        return await asyncio.gather(
            run(ForwardContext.from_lengths([2])), run(ForwardContext.from_lengths([3]))
        )

    assert asyncio.run(both()) == [True, True]


def test_pinned_fields_are_put_back() -> None:
    ctx = ForwardContext.from_lengths([2])
    with pytest.raises(ZeroDivisionError), ctx.pinned(num_tokens=1, aux_hidden="last"):
        assert (ctx.num_tokens, ctx.aux_hidden) == (1, "last")
        raise ZeroDivisionError
    assert (ctx.num_tokens, ctx.aux_hidden) == (2, None)


def test_pinning_a_field_that_is_not_there_changes_nothing() -> None:
    ctx = ForwardContext.from_lengths([2])
    with pytest.raises(AttributeError, match="tokens"), ctx.pinned(num_tokens=1, tokens=2):
        pass
    assert ctx.num_tokens == 2


def valid(**changes: Any) -> ForwardContext:
    given: dict[str, Any] = dict(
        mode=ForwardMode.MIXED,
        num_tokens=4,
        num_requests=2,
        num_extends=1,
        seq_lens_host=[5, 9],
        extend_lens_host=[3, 1],
        prefix_lens_host=[2, 8],
    )
    return ForwardContext(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seq_lens_host": [5]}, "seq_lens_host has 1 entries for 2 requests"),
        ({"seq_lens_host": None}, "seq_lens_host is None; required: a list of Python integers"),
        ({"extend_lens_host": torch.tensor([3, 1])}, "extend_lens_host is a Tensor; required"),
        ({"prefix_lens_host": [2, 8, 1]}, "prefix_lens_host has 3 entries"),
        ({"num_tokens": 5}, "extend_lens_host sums to 4 and num_tokens is 5"),
        ({"seq_lens_host": [5, 8]}, r"required: prefix_lens_host \+ extend_lens_host"),
        ({"num_extends": 3}, "num_extends is 3 of 2 requests"),
        ({"num_extends": -1}, "num_extends is -1 of 2 requests"),
        ({"num_extends": 0}, "requests from number 0 on decode, but extend_lens_host is"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, Any], said: str) -> None:
    valid().validate()
    with pytest.raises(ContextError, match=said):
        valid(**changes).validate()


ON_A_DEVICE = torch.ones(2, dtype=torch.int64, device="meta")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((ON_A_DEVICE,), "extend_lens is on meta; required: a list .*wait for the device"),
        ((list(ON_A_DEVICE),), "extend_lens is on meta"),
        (([3, 4], ON_A_DEVICE), "prefix_lens is on meta"),
        ((None,), "extend_lens is None; required: a list of whole numbers"),
        (([3, 4.0],), r"extend_lens is \[3, 4.0\]; required: a list of whole numbers"),
        (([3, 4], [[1], [2]]), "prefix_lens is .*; required: a list of whole numbers"),
    ],
)
def test_lengths_are_numbers_of_the_host(given: Any, said: str) -> None:
    with pytest.raises(ContextError, match=said):
        ForwardContext.from_lengths(*given)


def test_lengths_in_an_array_of_the_host_become_integers() -> None:
    ctx = ForwardContext.from_lengths(torch.tensor([3, 4]), torch.tensor([1, 0]).numpy())
    assert ctx.extend_lens_host == [3, 4] and ctx.seq_lens_host == [4, 4]
    numbers = [ctx.num_tokens, *ctx.extend_lens_host, *ctx.prefix_lens_host, *ctx.seq_lens_host]
    assert {type(number) for number in numbers} == {int}


@pytest.mark.parametrize("name", ["pages", "num_tokens"])
def test_fields_that_are_not_there_are_refused(name: str) -> None:
    with pytest.raises(ContextError, match=f"got {name}=; accepted: .*page_table, .*extra"):
        ForwardContext.from_lengths([3], **{name: 1})


def test_counts_and_modes_follow_from_lengths() -> None:
    ctx = ForwardContext.from_lengths([3, 1, 1], [2, 0, 8], num_decodes=2)
    assert (ctx.num_tokens, ctx.num_extends, ctx.num_decodes) == (5, 1, 2)
    assert ctx.mode is ForwardMode.MIXED and ctx.mode.extends
    assert ctx.last_rows == [2, 3, 4]
    assert ctx.positions is not None and ctx.positions.tolist() == [2, 3, 4, 0, 8]
    assert ctx.seq_lens is not None and ctx.seq_lens.tolist() == [5, 1, 9]
    assert ForwardContext.from_lengths([3]).mode is ForwardMode.EXTEND
    assert ForwardContext.from_lengths([1], [4], num_decodes=1).mode is ForwardMode.DECODE
    assert ForwardContext.from_lengths([]).mode is ForwardMode.IDLE
