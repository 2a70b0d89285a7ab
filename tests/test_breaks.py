"""What a break costs and how its result reaches the next segment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Around, assert_same, check, rows, shuffled
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fx_prefill

seen: list[int] = []


@torch.library.custom_op("fx_prefill_tests::mean_into", mutates_args={"out"})
def mean_into(x: torch.Tensor, out: torch.Tensor) -> None:
    seen.append(out.data_ptr())
    out.copy_(x - x.mean(-2, keepdim=True))


@mean_into.register_fake
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    return None


class WritesOut(nn.Module):
    """An operator that writes into memory allocated for it, as engines' attentions do."""

    def __init__(self, flat: bool = False, returned: bool = False) -> None:
        super().__init__()
        self.flat, self.returned = flat, returned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.flat:
            out = torch.empty(x.shape[0], x.shape[1], 3, 4)
            mean_into(x.view(out.shape).transpose(1, 2), out.transpose(1, 2))
            return out.view(x.shape)
        out = torch.empty_like(x)
        mean_into(x, out)
        return out


class Operators(TorchDispatchMode):
    """Operators that reach the dispatcher, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._schema.name != "aten::_unsafe_view":
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("flat", [False, True])
def test_an_operator_with_an_out_argument_writes_straight_into_the_handoff(flat: bool) -> None:
    module = Around(WritesOut(flat))
    compiled = fx_prefill.compile(module, max_tokens=64)
    kept = []
    with torch.no_grad():
        module(rows(20))
        seen.clear()
        for seed, n in enumerate(shuffled()):
            kept.append((module(rows(n, seed=seed)), module.forward(rows(n, seed=seed)), n))
    for actual, expected, n in kept:
        assert_same(actual, expected, f"{n} tokens")
    ours = [pointer for pointer in seen if _in_handoff(compiled, pointer)]
    replayed = sum(sum(graph.counts.replays.values()) for graph in compiled.graphs) - 1
    assert len(ours) == replayed > 0


def _in_handoff(compiled: Any, pointer: int) -> bool:
    for graph in compiled.graphs:
        for buffers in graph._captures._buffers.values():
            for memory in buffers._memory:
                start = memory.flat.data_ptr()
                if start <= pointer < start + memory.flat.numel() * memory.flat.element_size():
                    return True
    return False


def test_a_result_the_caller_gets_too_is_not_made_in_the_handoff() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.around = Around(lambda x: x)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = torch.empty_like(x)
            mean_into(self.around.enter(x), out)
            return self.around.leave(out), out

    check(Returns())


def test_memory_nobody_writes_is_still_allocated() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            zero = torch.empty_like(x).zero_()
            return zero + x - x.mean(1, keepdim=True)

    check(Around(Reads()))


@pytest.mark.parametrize("filled", [False, True], ids=["empty cache", "filled cache"])
def test_a_break_of_an_unmodified_llama_runs_few_operators(filled: bool) -> None:
    pytest.importorskip("transformers")
    from families import BY_NAME
    from transformers import DynamicCache

    model = BY_NAME["llama"].with_layers(3).inner("sdpa")
    compiled = fx_prefill.compile(model, max_tokens=64)

    def call(n: int) -> None:
        cache = DynamicCache()
        if filled:
            model.forward(torch.arange(9)[None], past_key_values=cache)
        model(torch.arange(n)[None], past_key_values=cache)

    with torch.no_grad():
        for n in (20, 22, 20):
            call(n)
        graph = compiled.graphs[-1]
        program = graph._captures.programs[(32, ())]
        bound = program._bound[20]
        counts = []

        def counted(step: Any) -> Any:
            def run(frame: Any) -> None:
                with Operators() as operators:
                    step(frame)
                counts.append(len(operators.names))

            return run

        parts = program._compiled.partitions
        bound._steps = [
            step if part.is_segment else counted(step)
            for step, part in zip(bound._steps, parts, strict=True)
        ]
        call(20)
    inner = counts[2:]  # after the embedding, and the first layer with its mask
    assert len(inner) == 2
    assert max(inner) <= (2 if not filled else 6), counts
