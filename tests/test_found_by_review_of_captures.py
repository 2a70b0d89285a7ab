"""Faults that a review of captured attention, masks and captures planted and found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Around, assert_same, check, rows
from test_memory import compiled_model
from torch import nn

import fx_prefill
from fx_prefill.execution import capture

attention = F.scaled_dot_product_attention


def heads(x: torch.Tensor, count: int = 2) -> torch.Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def joined(y: torch.Tensor) -> torch.Tensor:
    return y.transpose(1, 2).flatten(2)


class Layers(nn.Module):
    """Two attentions under one mask made by ``make(n, x)``."""

    def __init__(self, make: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.make, self.around = make, Around(lambda x: x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.around.enter(x)
        mask = self.make(x.shape[1], x)
        for _ in range(2):
            x = joined(attention(heads(x), heads(x) * 0.5, heads(x).flip(-1), attn_mask=mask))
        return self.around.leave(x)


def broadcast(n: int, x: torch.Tensor) -> torch.Tensor:
    return torch.ones(1, 1, dtype=torch.bool)


def set_later(n: int, x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    mask[:, 1:2] = True
    return mask


def filled_later(n: int, x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(n)
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    mask.masked_fill_(at[:, None] - at[None, :] >= 3, False)
    return mask


def written_through_its_base(n: int, x: torch.Tensor) -> torch.Tensor:
    base = torch.triu(torch.full((n, n), -math.inf), 1)
    view = base[None, None]
    base += torch.arange(n)[None, :] * 0.1
    return view


def of_data_written_later(n: int, x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(n)
    mask = (at[None] <= at[:, None]) & (x[0, :, 0] > -1)[None]
    mask.logical_or_(torch.eye(n, dtype=torch.bool))
    return mask


@pytest.mark.parametrize(
    "make", [broadcast, set_later, filled_later, written_through_its_base, of_data_written_later]
)
def test_masks_that_are_not_what_they_were_made_as(make: Callable[..., torch.Tensor]) -> None:
    check(Layers(make))


def test_memory_behind_a_dropped_mask_is_still_returned() -> None:
    class Returns(Layers):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.around.enter(x)
            base = torch.zeros(x.shape[1], x.shape[1])
            mask = base
            mask += torch.triu(torch.full(base.shape, -math.inf), 1)
            return joined(attention(heads(x), heads(x), heads(x), attn_mask=mask)), base

    check(Returns(broadcast))


def test_heads_that_change_places_are_not_taken_for_repeated_ones() -> None:
    class Swapped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = x.shape[1]
            query = heads(x, 4)
            key = query[:, ::2][:, [1, 0], None].expand(1, 2, 2, n, 3).reshape(1, 4, n, 3)
            mask = torch.ones(n, n, dtype=torch.bool).tril()
            return joined(attention(query, key, key, attn_mask=mask))

    module = Around(Swapped()).to(torch.bfloat16)
    fx_prefill.compile(module, max_tokens=64)
    with torch.no_grad():
        for n in (20, 32, 17):
            x = rows(n).to(torch.bfloat16)
            torch.testing.assert_close(module(x), module.forward(x), rtol=2e-2, atol=2e-2)


def test_keys_that_are_a_slice_of_a_weight_leave_it_as_it_is() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.around = Around(lambda x: x)
            self.drop = nn.Dropout(0.1)
            self.table = nn.Parameter(torch.randn(64, 12), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.around.enter(x)
            key = heads(self.drop(self.table[: x.shape[1]])[None])
            y = attention(heads(x), key, heads(x).flip(-1), is_causal=True)
            return self.around.leave(joined(y))

    module = Table().eval()
    before = module.table.clone()
    check(module, capture_attention=True, lengths=[20, 17, 16, 40, 12])
    assert torch.equal(module.table, before)


@torch.library.custom_op("fx_prefill_tests::mixes_rows", mutates_args=())
def mixes_rows(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(1, keepdim=True)


@mixes_rows.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_demoted_segment_that_fed_a_captured_attention_runs_as_planned() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Around(lambda x: x), Around(lambda x: x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first.leave(mixes_rows(self.first.enter(x)))
            y = attention(heads(x), heads(x) * 0.5, heads(x).flip(-1), is_causal=True)
            return self.second(joined(y))

    check(Model(), capture_attention=True, rowwise_ops=("fx_prefill_tests::mixes_rows",))


@pytest.mark.parametrize("pin_weights", [False, True])
def test_weights_swapped_before_a_queue_is_captured_and_back_after(
    pin_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(self: Any, segment: Any, inputs: Any, outputs: Any) -> Any:
        # As a device graph does: addresses are kept, not parameters.
        kept = [i.detach() if isinstance(i, torch.Tensor) else i for i in inputs]
        return capture.CopyRecording(segment.run, kept, outputs)

    monkeypatch.setattr(capture.CopyRecorder, "record", record)
    module, compiled = compiled_model(capture="queued", pin_weights=pin_weights)
    with torch.no_grad():
        module(rows(20))
        own = module.proj_in.weight.data
        module.proj_in.weight.data = own * 3 + 1
        compiled.warmup()
        module.proj_in.weight.data = own
        for n in (20, 30):
            assert_same(module(rows(n)), module.forward(rows(n)), f"{n} tokens")


def test_buffers_made_in_inference_mode_serve_outside_of_it() -> None:
    class Attends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return joined(attention(heads(x), heads(x) * 0.5, heads(x).flip(-1), is_causal=True))

    module = Around(Attends())
    compiled = fx_prefill.compile(module, max_tokens=64, capture="queued", capture_attention=True)
    with torch.no_grad():
        module(rows(20))
    with torch.inference_mode():
        compiled.warmup()
    with torch.no_grad():
        assert_same(module(rows(20)), module.forward(rows(20)))


def test_a_cat_into_memory_of_the_model_is_left_alone() -> None:
    class Into(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.around = Around(lambda x: x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.around.enter(x)
            out = torch.zeros_like(x)
            torch.cat([x, torch.empty(1, 0, 12)], 1, out=out)
            return self.around.leave(out) + out.mean(1, keepdim=True)

    check(Into())


def test_queues_and_long_warmups_keep_to_the_number_of_batches() -> None:
    module, compiled = compiled_model(max_batches=2, capture="queued")
    with torch.no_grad():
        for batch in range(2, 8):
            module(rows(20, batch=batch))
        compiled.warmup()
        for batch in range(2, 8):
            compiled.warmup(rows(80, batch=batch))
    for graph in compiled.graphs:
        assert len({batch for _, batch in graph.captured}) <= 2
