"""Modules that run as one opaque eager break: named, traced once, live, and given back."""

from __future__ import annotations

import copy
import logging
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import WIDTH, Around, check, details, rows, token_graph
from torch import nn

import fx_prefill
from fx_prefill.errors import OptionError

CHUNK = 8


class Chunks(nn.Module):
    """A running sum over chunks in a Python loop: traced, it is tied to the number of chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor, *, decay: float = 0.5) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0])
        done = []
        for start in range(0, x.shape[1], CHUNK):
            chunk = x[:, start : start + CHUNK]
            state = decay * state + chunk.mean(1)
            done.append(chunk * self.scale + state[:, None])
        return torch.cat(done, dim=1)


class Looks(nn.Module):
    """Looks at the data, returns several results, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.num_calls = 0

    def forward(self, x: torch.Tensor, sizes: dict[str, Any]) -> tuple[Any, ...]:
        self.num_calls += 1
        self.seen.add_(x.shape[1])
        factor = 2.0 if float(x.sum()) > 0 else 3.0
        doubled = torch.cat([x, x], dim=1) * factor
        return x * factor, None, [doubled, doubled.sum(1)], sizes["rows"][0].flatten(0, 1)


class Two(Around):
    """Two chunked mixers with row-wise work around and between them."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.first, self.second = Chunks(), Chunks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.enter(x))
        return self.leave(self.second(torch.tanh(x) * 2, decay=0.25))


class WithLooks(Around):
    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.looks = Looks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.enter(x)
        scaled, nothing, (doubled, total), flat = self.looks(y, {"rows": (x,), "n": x.shape[1]})
        assert nothing is None
        half = doubled[:, : x.shape[1]] + total[:, None] + flat.view(x.shape)
        return self.leave(scaled + half)


def is_chunks(module: nn.Module) -> bool:
    return isinstance(module, Chunks)


@pytest.mark.parametrize(
    "entry",
    [Chunks, f"{Chunks.__module__}.Chunks", is_chunks, fx_prefill.BreakModule(Chunks)],
    ids=["class", "name", "predicate", "entry"],
)
def test_a_module_may_be_named_in_any_way(entry: Any) -> None:
    model = Two()
    report = check(model, break_modules=[entry])
    graph = token_graph(report)
    assert [p.kind for p in graph.partitions] == ["segment", "break"] * 2 + ["segment"]
    for part in graph.partitions[1::2]:
        assert part.operators[0] == "Chunks" and part.reasons == ("opaque module",)
        assert "test_break_modules.py" in part.source
    assert not any(g.fallbacks.keys() - {"above the largest bucket"} for g in report.graphs)


def test_without_it_the_graph_is_tied_to_the_number_of_chunks() -> None:
    report = check(Two(), lengths=[12, 20, 12, 28], replays=False)
    assert len(report.graphs) > 2


def test_one_entry_needs_no_list() -> None:
    assert token_graph(check(Two(), break_modules=Chunks)).num_breaks == 2


def test_several_results_of_other_sizes() -> None:
    model = WithLooks()
    report = check(model, break_modules=[Looks])
    graph = token_graph(report)
    assert sum("Looks" in part.operators for part in graph.partitions) == 1
    # Once for the compiled call and once for the reference, at each of harness's 14 calls; finding
    # out what it returns leaves no trace in it.
    assert model.looks.num_calls == 28
    assert model.looks.seen.item() == 2 * 2 * sum((2, 15, 16, 17, 40, 64, 65))


def test_batches_of_any_size() -> None:
    model = WithLooks()
    compiled = fx_prefill.compile(model, max_tokens=64, break_modules=[Looks])
    for seed, (batch, n) in enumerate([(2, 20), (3, 33), (1, 20), (2, 7), (5, 20)]):
        x = torch.randn(batch, n, WIDTH, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(model(x), model.forward(x), rtol=1e-4, atol=1e-5)
    assert sum(sum(g.replays.values()) for g in compiled.report().graphs) == 5


def test_a_declared_result_is_used_instead_of_a_run_on_zeros() -> None:
    class Strict(Chunks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.abs().sum() > 0, "run on zeros"
            return super().forward(x)

    model = Two()
    model.first = Strict()
    entry = fx_prefill.BreakModule(Strict, result=lambda module, x: torch.empty_like(x))
    assert token_graph(check(model, break_modules=[entry, Chunks])).num_breaks == 2

    torch._dynamo.reset()
    model = Two()
    model.first = Strict()
    fx_prefill.compile(model, break_modules=[Strict])
    with pytest.raises(Exception, match=r"run on zeros(?s:.*)BreakModule"):
        model(rows(20))


def test_a_wrong_declaration_is_an_error() -> None:
    model = Two()
    wrong = fx_prefill.BreakModule(Chunks, result=lambda module, x, **kw: x[:, :1] * 1)
    fx_prefill.compile(model, break_modules=[wrong])
    with pytest.raises(Exception, match=r"Chunks was declared to return"):
        model(rows(20))


def test_a_result_whose_size_is_the_number_of_chunks_is_refused() -> None:
    class Means(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([chunk.mean(1) for chunk in x.split(CHUNK, dim=1)], dim=1)

    model = Around(nn.Identity())
    model.middle = Means()
    fx_prefill.compile(model, break_modules=[Means])
    with pytest.raises(Exception, match=r"Means cannot be an opaque break: a size of its results"):
        model(rows(20))


@pytest.mark.parametrize(
    ("result", "words"),
    [(lambda x: {"x": x}, "returns a dict"), (lambda x: x.shape[1], "returns a int")],
    ids=["dict", "number"],
)
def test_results_that_a_graph_cannot_hold_are_refused(result: Any, words: str) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return result(x)

    class Model(Around):
        def forward(self, x: torch.Tensor) -> Any:
            return self.leave(self.enter(x)), self.middle(x)

    model = Model(Odd())
    fx_prefill.compile(model, break_modules=[Odd])
    with pytest.raises(Exception, match=words):
        model(rows(20))


def test_arguments_that_a_graph_cannot_hold_are_refused() -> None:
    class Takes(nn.Module):
        def forward(self, x: torch.Tensor, memory: Any) -> torch.Tensor:
            return x * memory.factor

    class Model(Around):
        def forward(self, x: torch.Tensor, memory: Any) -> torch.Tensor:
            return self.leave(self.middle(self.enter(x), memory))

    model = Model(Takes())
    fx_prefill.compile(model, break_modules=[Takes])
    with pytest.raises(Exception, match=r"its argument 1 is a SimpleNamespace"):
        model(rows(20), SimpleNamespace(factor=2.0))


def test_the_module_is_live() -> None:
    """Its weights and attributes are those of the moment of the call, hooks included."""
    model = Two()
    compiled = fx_prefill.compile(model, break_modules=[Chunks])
    x = rows(20)
    model(x)
    model.first.scale.mul_(3)
    model.second.scale = nn.Parameter(torch.ones(WIDTH) * 7, requires_grad=False)
    torch.testing.assert_close(model(x), model.forward(x), rtol=1e-4, atol=1e-5)
    assert len(compiled.report().graphs) == 1
    assert compiled.report().graphs[0].recaptures == 0


def test_a_result_that_is_its_argument() -> None:
    """What a break returns must not be the buffer of a segment, nor the caller's tensor."""

    class Passes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Model(Around):
        def forward(self, x: torch.Tensor) -> Any:
            y = self.middle(self.enter(x))
            return self.leave(y), y

    check(Model(Passes()), break_modules=[Passes])


def test_undo_gives_every_module_its_own_forward_back() -> None:
    model = Two()
    compiled = fx_prefill.compile(model, break_modules=[Chunks])
    model(rows(20))
    compiled.undo()
    assert "forward" not in vars(model.first) and "forward" not in vars(model.second)
    torch.testing.assert_close(model(rows(20)), model.forward(rows(20)))

    def wrapped(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return Chunks.forward(model.first, x, **kwargs) + 1

    model.first.forward = wrapped
    again = fx_prefill.compile(model, break_modules=[Chunks])
    torch.testing.assert_close(model(rows(20)), model.forward(rows(20)), rtol=1e-4, atol=1e-5)
    again.undo()
    assert vars(model.first)["forward"] is wrapped


def test_two_compiled_models_may_share_a_module() -> None:
    model, other = Two(), Two()
    other.first = model.first
    one = fx_prefill.compile(model, break_modules=[Chunks])
    two = fx_prefill.compile(other, break_modules=[Chunks])
    for x in (rows(20), rows(33), rows(20, seed=3)):
        torch.testing.assert_close(model(x), model.forward(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other(x), other.forward(x), rtol=1e-4, atol=1e-5)
    one.undo()
    for x in (rows(21), rows(40)):
        torch.testing.assert_close(other(x), other.forward(x), rtol=1e-4, atol=1e-5)
    assert len(two.report().graphs) == 1
    two.undo()
    assert "forward" not in vars(model.first)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_a_plain_model_with_its_own_weights(how: Any) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Chunks()).requires_grad_(False)
    fx_prefill.compile(model[1:], break_modules=[Chunks]).undo()
    holder = nn.Sequential(*model)
    compiled = fx_prefill.compile(holder, break_modules=[Chunks])
    holder(rows(20))
    twin = how(nn.ModuleList(holder))
    twin[1].scale.zero_()
    expected = twin[1].scale * 0 + Chunks.forward(twin[1], rows(20))
    torch.testing.assert_close(twin[1](rows(20)), expected)
    assert not torch.equal(holder[1](rows(20)), expected)
    compiled.undo()
    torch.testing.assert_close(twin[1](rows(20)), expected)


def test_another_compiler_traces_the_module() -> None:
    model = Two()
    compiled = fx_prefill.compile(model, break_modules=[Chunks])
    other = torch.compile(model.forward, backend="aot_eager")
    for x in (rows(20), rows(33)):
        torch.testing.assert_close(model(x), model.forward(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other(x), model.forward(x), rtol=1e-4, atol=1e-5)
    assert len(compiled.report().graphs) == 1


def test_with_gradients_the_module_is_traced() -> None:
    """A break has no backward: what is trained goes around it, and its gradients are right."""
    model = Two()
    x = rows(20).requires_grad_()
    with torch.enable_grad():
        model.forward(x).square().sum().backward()
        expected, x.grad = x.grad, None
        fx_prefill.compile(model, break_modules=[Chunks])
        model(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_explain_takes_the_modules_too_and_leaves_the_model_alone() -> None:
    model = Two()
    report = fx_prefill.explain(model, rows(20), break_modules=[Chunks])
    assert [d.operator for d in details(report) if d.reason == "opaque module"][::2] == [
        "Chunks",
        "Chunks",
    ]
    assert "forward" not in vars(model.first)
    on_meta = Two().to("meta")
    report = fx_prefill.explain(on_meta, rows(20).to("meta"), break_modules=[Chunks])
    assert token_graph(report).num_breaks == 2


def test_an_entry_that_nothing_answers_to_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fx_prefill"):
        fx_prefill.compile(Two(), break_modules=["no.such.Mixer", Chunks])
    assert "no.such.Mixer" in caplog.text and "Chunks" not in caplog.text.split("accepted")[0]


@pytest.mark.parametrize("entry", ["Chunks", int, 3, torch.Tensor])
def test_an_entry_that_names_no_module_is_an_error(entry: Any) -> None:
    with pytest.raises(OptionError, match="break_modules"):
        fx_prefill.compile(Two(), break_modules=[entry])


def test_a_function_has_no_modules() -> None:
    with pytest.raises(OptionError, match=r"needs an nn\.Module"):
        fx_prefill.compile(lambda x: x, break_modules=[Chunks])


def test_the_plain_door_says_that_it_is_too_late() -> None:
    compiled = torch.compile(
        Two(), backend="breakable_prefill", options={"break_modules": [Chunks]}
    )
    with pytest.raises(Exception, match=r"break_modules' is one of fx_prefill\.compile"):
        compiled(rows(20))


def test_sizes_that_have_to_agree_are_guarded() -> None:
    """A mask's batch and length are symbols of their own, as duck shaping is off."""

    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (x * mask[:, :, None].to(x.dtype)).cumsum(1)

    class Model(Around):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.leave(self.middle(self.enter(x), mask))

    model = Model(Masked())
    compiled = fx_prefill.compile(model, max_tokens=64, break_modules=[Masked])
    for batch, n in [(3, 20), (3, 40), (4, 20), (1, 7), (2, 33), (20, 20)]:
        x, mask = torch.randn(batch, n, WIDTH), torch.ones(batch, n, dtype=torch.long)
        torch.testing.assert_close(model(x, mask), model.forward(x, mask), rtol=1e-4, atol=1e-5)
    x, mask = torch.randn(3, 20, WIDTH), torch.ones(1, 20, dtype=torch.long)
    torch.testing.assert_close(model(x, mask), model.forward(x, mask), rtol=1e-4, atol=1e-5)
    graphs = compiled.report().graphs
    assert sum(sum(graph.replays.values()) for graph in graphs) == 7
