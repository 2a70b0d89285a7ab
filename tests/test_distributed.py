"""What ranks must agree on: two real processes over gloo, and rules that need no communication.

A scenario runs in both processes of a pair and returns what it saw; the test looks at both. A rank
that waits for ever shows as a pair that does not end.
"""

from __future__ import annotations

import logging
import os
import pickle
import random
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from harness import Around, assert_breaks, assert_captured, assert_same, check, details
from harness import rows as random_rows
from torch import distributed as dist

import fx_prefill
from fx_prefill import ForwardContext
from fx_prefill.errors import CaptureError, CaptureOutOfMemory, ContextError, ServingError
from fx_prefill.graph.rules import collectives
from fx_prefill.serving.context import ForwardMode
from fx_prefill.serving.distributed import (
    Outcome,
    RankView,
    agree,
    capture_together,
    rank_view,
    require_same,
)

COLLECTIVE = "collective"
BUCKETS = [16, 32, 64]
LENGTHS = (2, 16, 17, 65)


# ---- two processes ------------------------------------------------------------------------------


def run_pair(scenario: Callable[[int], Any], folder: Path, seconds: float = 120) -> list[Any]:
    """What ``scenario(rank)`` returned on each of two ranks."""
    spawn = torch.multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=_run_rank, args=(scenario, r, folder)) for r in range(2)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + seconds
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    waiting = [r for r, process in enumerate(ranks) if process.is_alive()]
    for r in waiting:
        ranks[r].kill()
    assert not waiting, f"ranks {waiting} still wait after {seconds} s"
    results = [pickle.loads((folder / f"rank{r}").read_bytes()) for r in range(2)]
    for result in results:
        assert not isinstance(result, str), result
    return results


def _run_rank(scenario: Callable[[int], Any], rank: int, folder: Path) -> None:
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        result = scenario(rank)
    except BaseException:
        result = traceback.format_exc()
    (folder / f"rank{rank}").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


class Rank:
    """Captures that fail as they are told to, and what became of them on one rank."""

    def __init__(self, fails: dict[int, BaseException] | None = None) -> None:
        self.fails = fails or {}
        self.tried: list[int] = []
        self.discarded: list[int] = []
        self.held: weakref.ref[torch.Tensor] | None = None
        self.held_at_discard = False

    def capture(self, bucket: int) -> None:
        self.tried.append(bucket)
        memory = torch.zeros(8)
        self.held = weakref.ref(memory)
        if bucket in self.fails:
            raise self.fails[bucket]

    def discard(self, bucket: int) -> None:
        self.discarded.append(bucket)
        self.held_at_discard |= self.held is not None and self.held() is not None

    def run(self, **options: Any) -> dict[str, Any]:
        options = {"buckets": BUCKETS, "group": dist.group.WORLD, "discard": self.discard} | options
        captured: Any = None
        error: BaseException | None = None
        try:
            captured = capture_together(capture=self.capture, **options)
        except (Exception, KeyboardInterrupt) as failure:
            error = failure
        return {
            "captured": captured,
            "error": type(error).__name__,
            "text": str(error),
            "cause": type(error.__cause__).__name__ if error else None,
            "tried": self.tried,
            "discarded": self.discarded,
            "held": self.held_at_discard,
        }


def _out_of_memory() -> BaseException:
    wrapped = CaptureError("a compiler failed")
    wrapped.__cause__ = torch.OutOfMemoryError("in a compiler")
    return wrapped


EXHAUSTED: dict[str, Callable[[], BaseException]] = {
    "device": lambda: torch.OutOfMemoryError("no memory"),
    "named": lambda: CaptureOutOfMemory("bucket 32 needs 7 bytes"),
    "host": MemoryError,
    "wrapped": _out_of_memory,
}


def _failing_discard(bucket: int) -> None:
    raise RuntimeError(f"bucket {bucket} stays")


def agreements(rank: int) -> dict[str, Any]:
    world = dist.group.WORLD
    seen: dict[str, Any] = {"all succeed": Rank().run()}
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("fx_prefill.serving.distributed").addHandler(handler)
    seen["one fails"] = Rank({64: ValueError("a kernel of rank 1")} if rank == 1 else {}).run()
    seen["logged"] = [(record.exc_info, record.getMessage()) for record in records]
    for name, make in EXHAUSTED.items():
        seen[f"out of memory: {name}"] = Rank({32: make()} if rank == 0 else {}).run()
    both = {32: ValueError("fails") if rank == 0 else torch.OutOfMemoryError("no memory")}
    seen["one fails, one is out of memory"] = Rank(both).run()
    seen["strict"] = Rank({64: ValueError("first")} if rank == 0 else {}).run(strict=True)
    discard = {"discard": _failing_discard} if rank == 1 else {}
    seen["discard fails"] = Rank({64: ValueError("first")} if rank == 0 else {}).run(**discard)
    seen["other buckets"] = Rank().run(buckets=[16, 32 + rank])
    seen["other strictness"] = Rank().run(strict=rank == 0)
    with torch.inference_mode():
        outcomes = [Outcome.FAILED, Outcome.CAPTURED]
        seen["agree"] = agree(outcomes[rank], world)
    require_same("the plan", {"segments": 3}, world)
    # The last one: a group of which a rank has left an exchange is of no use any more.
    short = dist.new_group(backend="gloo", timeout=timedelta(seconds=4))
    seen["interrupted"] = Rank({32: KeyboardInterrupt()} if rank == 1 else {}).run(group=short)
    return seen


def test_ranks_capture_together(tmp_path: Path) -> None:
    first, second = run_pair(agreements, tmp_path)
    for seen in (first, second):
        good = seen["all succeed"]
        assert good["captured"] == (64, 32, 16) == tuple(good["tried"])
        assert good["discarded"] == []

        left_out = seen["one fails"]
        assert left_out["captured"] == (32, 16)
        assert left_out["tried"] == [64, 32, 16] and left_out["discarded"] == [64]

        for name in (
            *(f"out of memory: {n}" for n in EXHAUSTED),
            "one fails, one is out of memory",
        ):
            stopped = seen[name]
            assert stopped["error"] == "CaptureOutOfMemory", (name, stopped)
            assert "32" in stopped["text"]
            assert stopped["tried"] == [64, 32] and stopped["discarded"] == [32], name

        assert seen["strict"]["error"] == "CaptureError" and seen["strict"]["discarded"] == [64]
        assert seen["discard fails"]["error"] == "CaptureError"
        assert seen["other buckets"]["error"] == "ServingError"
        assert "rank 1: {'buckets': [33, 16]" in seen["other buckets"]["text"]
        assert seen["other strictness"]["error"] == "ServingError"
        assert seen["other buckets"]["tried"] == []
        assert seen["agree"] is Outcome.FAILED

    # Each rank says what happened to itself, and says so where it happened elsewhere.
    assert "another rank" in first["logged"][0][1]
    assert "ValueError: a kernel of rank 1" in second["logged"][0][1]
    assert first["logged"][0][0] is None and second["logged"][0][0] is None
    assert first["out of memory: named"]["text"] == "bucket 32 needs 7 bytes"
    assert "this rank" in first["out of memory: device"]["text"]
    assert first["out of memory: device"]["cause"] == "OutOfMemoryError"
    assert "another rank" in second["out of memory: device"]["text"]
    assert "another rank" in first["one fails, one is out of memory"]["text"]
    assert first["strict"]["cause"] == "ValueError" and "another" in second["strict"]["text"]
    assert second["discard fails"]["cause"] == "RuntimeError"
    # What a failed capture held is free when it is discarded, whoever keeps the error.
    assert not second["one fails"]["held"] and not first["out of memory: device"]["held"]

    assert second["interrupted"]["error"] == "KeyboardInterrupt"
    assert first["interrupted"]["error"] == "CaptureError"
    assert "could not agree" in first["interrupted"]["text"]


# ---- alone --------------------------------------------------------------------------------------


def test_without_a_group_a_rank_decides_alone() -> None:
    assert agree(Outcome.FAILED, None) is Outcome.FAILED
    require_same("anything", object(), None)
    rank = Rank({64: ValueError("alone")})
    assert rank.run(group=None)["captured"] == (32, 16)
    assert rank.discarded == [64]
    exhausted = Rank({32: torch.OutOfMemoryError("no memory")}).run(group=None)
    assert exhausted["error"] == "CaptureOutOfMemory" and exhausted["cause"] == "OutOfMemoryError"


@pytest.fixture
def fake_world() -> Iterator[Any]:
    """Rank 0 of two whose collectives change nothing; a group of PyTorch's own tests."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def gloo_world() -> Iterator[Any]:
    """A group of gloo with this process in it alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_alone_is_asked_nothing(gloo_world: Any) -> None:
    assert agree(Outcome.CAPTURED, gloo_world) is Outcome.CAPTURED


def test_a_group_must_serve_the_cpu(fake_world: Any) -> None:
    class DeviceOnly(dist.ProcessGroup):
        _device_types = (torch.device("cuda"),)

    group = DeviceOnly(0, 2)
    dist.distributed_c10d._world.pg_map[group] = ("nccl", None)
    with pytest.raises(ServingError, match=r"'nccl' serves cuda.*new_group\(ranks, backend"):
        agree(Outcome.CAPTURED, group)
    with pytest.raises(ServingError, match="expected a process group"):
        agree(Outcome.CAPTURED, dist.GroupMember.NON_GROUP_MEMBER)


# ---- collectives in the graph -------------------------------------------------------------------


def reduced(x: torch.Tensor) -> torch.Tensor:
    return funcol.all_reduce(x * 2, "sum", dist.group.WORLD)


def reduced_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y, dist.ReduceOp.MAX)
    return y + 1


def gathered(x: torch.Tensor) -> torch.Tensor:
    """Rows of all ranks one after the other; those of the first are as many as ours."""
    return funcol.all_gather_tensor(x[0], 0, dist.group.WORLD)[: x.shape[1]][None]


def reduced_late(x: torch.Tensor) -> torch.Tensor:
    """The wait comes after a break that keeps its place between the two."""
    started = torch.ops._c10d_functional.all_reduce(x * 2, "sum", dist.group.WORLD.group_name)
    between = gathered(x)
    return torch.ops._c10d_functional.wait_tensor(started) + between.tanh()


def scattered(x: torch.Tensor) -> torch.Tensor:
    part = funcol.reduce_scatter_tensor(x, "sum", 2, dist.group.WORLD)
    return part.repeat(1, 1, x.shape[2] // part.shape[2])


MIDDLES = {
    "functional": (reduced, "all_reduce"),
    "in place": (reduced_in_place, "all_reduce"),
    "waited for late": (reduced_late, "all_reduce"),
    "gather": (gathered, "all_gather_into_tensor"),
    "scatter": (scattered, "reduce_scatter_tensor"),
}

IN_PAIRS = ("functional", "in place", "waited for late")
"""What scatters or only gathers is checked alone: a pair takes its seconds."""


def replays(rank: int) -> dict[str, Any]:
    """Breaks of each model, after its results were compared with eager ones at every length."""
    torch.set_grad_enabled(False)
    seen = {}
    for name in IN_PAIRS:
        torch._dynamo.reset()
        model = Around(MIDDLES[name][0])
        model.proj_in.weight.mul_(1 + rank)  # each rank has a part of the weights
        report = check(model, lambda n, seed: random_rows(n, seed=seed), LENGTHS, compiler="eager")
        seen[name] = [(d.operator, d.reason, d.detail) for d in details(report)]
    return seen


def test_collectives_of_gloo_are_breaks_and_right_on_both_ranks(tmp_path: Path) -> None:
    for seen in run_pair(replays, tmp_path):
        for name in IN_PAIRS:
            for operator in ("all_reduce", "wait_tensor"):
                found = [
                    d for op, reason, d in seen[name] if (op, reason) == (operator, COLLECTIVE)
                ]
                assert found and "gloo on cpu, which cannot be captured" in found[0], seen[name]


@pytest.mark.parametrize("name", ["functional", "in place"])
def test_a_reduction_stays_in_its_segment_where_the_backend_can_be_captured(
    name: str, fake_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "CAPTURABLE_BACKENDS", frozenset(("fake",)))
    report = check(Around(MIDDLES[name][0]), lengths=LENGTHS, compiler="eager")
    assert_captured(report, "all_reduce", "wait_tensor")
    assert all(len(graph.partitions) == 1 for graph in report.graphs if graph.token_symbol)
    assert not details(report)


def test_a_collective_and_its_wait_share_a_partition(
    gloo_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "CAPTURABLE_BACKENDS", frozenset(("gloo",)))
    report = check(Around(reduced_late), lengths=LENGTHS, compiler="eager")
    assert_breaks(report, "all_gather_into_tensor", COLLECTIVE)
    parts = [part for graph in report.graphs for part in graph.partitions]
    started = [part for part in parts if "all_reduce" in part.operators]
    assert started and all("wait_tensor" in part.operators for part in started), str(report)
    waiting = [part for part in parts if "wait_tensor" in part.operators]
    assert all({"all_reduce", "all_gather_into_tensor"} & set(p.operators) for p in waiting)


@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_what_moves_rows_is_a_break_with_any_backend(
    name: str, gloo_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "CAPTURABLE_BACKENDS", frozenset(("gloo",)))
    middle, operator = MIDDLES[name]
    report = check(Around(middle), lengths=LENGTHS, compiler="eager")
    assert_breaks(report, operator, COLLECTIVE)
    assert any("moves rows between ranks" in d.detail for d in details(report))


def test_sorted_entries_are_no_rows_to_other_ranks(
    fake_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "CAPTURABLE_BACKENDS", frozenset(("fake",)))

    def by_key(x: torch.Tensor, reduce: bool) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        order = flat.topk(1).indices.flatten().argsort(stable=True)
        entries = flat[order] * 2
        if reduce:
            entries = funcol.all_reduce(entries, "sum", dist.group.WORLD)
        return entries[order.argsort()].view(x.shape)

    report = check(Around(lambda x: by_key(x, False)), lengths=LENGTHS, compiler="eager")
    assert_captured(report, "argsort")  # or the next lines would show nothing
    report = check(Around(lambda x: by_key(x, True)), lengths=LENGTHS, compiler="eager")
    assert_breaks(report, "all_reduce", COLLECTIVE)
    assert any("sorted entries" in d.detail for d in details(report))


def test_an_unused_collective_is_run_all_the_same(
    fake_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The eager forward of another rank runs it, and would be one collective ahead.
    monkeypatch.setattr(collectives, "CAPTURABLE_BACKENDS", frozenset(("fake",)))

    def unused(x: torch.Tensor) -> torch.Tensor:
        started = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
        torch.ops._c10d_functional.wait_tensor(started)
        return x + 1

    report = check(Around(unused), lengths=LENGTHS, compiler="eager")
    assert_captured(report, "all_reduce")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["functional", "in place"])
def test_nccl_is_captured(name: str, tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        model = Around(MIDDLES[name][0]).cuda()
        compiled = fx_prefill.compile(model, max_tokens=64)
        for n in LENGTHS:
            x = random_rows(n).cuda()
            assert_same(model(x), model.forward(x), f"{n} tokens")
        report = compiled.report()
        assert_captured(report, "all_reduce", "wait_tensor")
        assert any(graph.replays for graph in report.graphs), str(report)
    finally:
        dist.destroy_process_group()


# ---- without communication ----------------------------------------------------------------------

EXTEND, MIXED, DECODE, IDLE = ForwardMode


def on_rank(lengths: list[int], **fields: Any) -> Any:
    return ForwardContext.from_lengths(lengths, **fields)


def of_two(**fields: Any) -> Any:
    """Rank 0 of two, with 5 rows beside 9 of the other."""
    given = {"rank_num_tokens": [5, 9], "rank_modes": [EXTEND, MIXED]} | fields
    return on_rank([2, 3], **given)


def test_alone_a_forward_is_judged_by_its_own_numbers() -> None:
    assert rank_view(on_rank([2, 3], aux_hidden="eagle3")) == RankView(5, None, "eagle3")
    decode = rank_view(on_rank([1, 1], num_decodes=2))
    assert decode.refusal is not None and "decode" in decode.refusal


def test_the_largest_rank_decides_the_bucket() -> None:
    assert rank_view(of_two(), 0) == RankView(9, None, None)


@pytest.mark.parametrize("mode", [DECODE, IDLE])
def test_one_rank_that_does_not_extend_puts_all_on_eager(mode: ForwardMode) -> None:
    view = rank_view(of_two(rank_modes=[EXTEND, mode]), 0)
    assert view.refusal == f"rank 1 is in mode {mode.value}"


def test_aux_modes_must_be_the_same_on_all_ranks() -> None:
    same = of_two(aux_hidden="a", rank_aux_hidden=["a", "a"])
    assert rank_view(same, 0) == RankView(9, None, "a")
    other = rank_view(of_two(aux_hidden="a", rank_aux_hidden=["a", None]), 0)
    assert other.refusal == "rank 0 has aux-hidden mode 'a' and rank 1 has None"


@pytest.mark.parametrize(
    ("fields", "rank", "message"),
    [
        ({"aux_hidden": "a"}, 0, "rank_aux_hidden is not set: the others cannot know"),
        ({"rank_modes": None}, 0, "rank_modes is not; required: both"),
        ({"rank_modes": [EXTEND]}, 0, "rank_modes has 1 entries and rank_num_tokens has 2"),
        ({"rank_num_requests": [2, 1, 1]}, 0, "rank_num_requests has 3 entries"),
        ({"rank_aux_hidden": [None]}, 0, "rank_aux_hidden has 1 entries"),
        ({"rank_num_tokens": [], "rank_modes": []}, 0, "rank_num_tokens has 0 entries"),
        ({"rank_num_tokens": None}, 0, "rank_modes is set and rank_num_tokens is not"),
        ({}, 2, "this is rank 2; required: 0 to 1"),
        ({}, -1, "this is rank -1"),
        ({}, 1, r"rank_num_tokens\[1\] is 9 and this rank has 5"),
        ({"rank_modes": [MIXED, MIXED]}, 0, r"rank_modes\[0\] is .*MIXED.* this rank has .*EXTEND"),
        ({"rank_num_requests": [3, 1]}, 0, r"rank_num_requests\[0\] is 3 and this rank has 2"),
        ({"rank_aux_hidden": ["a", "a"]}, 0, r"rank_aux_hidden\[0\] is 'a' and this rank has None"),
    ],
)
def test_fields_that_would_split_the_ranks_are_errors(
    fields: dict[str, Any], rank: int, message: str
) -> None:
    with pytest.raises(ContextError, match=message):
        rank_view(of_two(**fields), rank)


def test_all_ranks_see_the_same() -> None:
    """Whatever the ranks do, each computes the same view from what they were all told."""
    generator = random.Random(0)
    for _ in range(200):
        ranks = []
        for _ in range(generator.randint(1, 4)):
            num_decodes = generator.randint(0, 2)
            lengths = [generator.randint(1, 9) for _ in range(generator.randint(0, 2))]
            aux = generator.choice([None, "a"])
            ranks.append(
                on_rank(lengths + [1] * num_decodes, num_decodes=num_decodes, aux_hidden=aux)
            )
        views = set()
        for number, ctx in enumerate(ranks):
            ctx.rank_num_tokens = [other.num_tokens for other in ranks]
            ctx.rank_num_requests = [other.num_requests for other in ranks]
            ctx.rank_modes = [other.mode for other in ranks]
            ctx.rank_aux_hidden = [other.aux_hidden for other in ranks]
            views.add(rank_view(ctx, number))
        assert len(views) == 1
        view = views.pop()
        alike = len({ctx.aux_hidden for ctx in ranks}) == 1
        extends = all(ctx.mode in (EXTEND, MIXED) for ctx in ranks)
        assert (view.refusal is None) == (alike and extends)
        assert view.num_tokens == max(ctx.num_tokens for ctx in ranks)


# ---- PrefillGraph on two ranks ------------------------------------------------------------------


def _graph_on(rank: int) -> Any:
    from serving_models import Batch, PackedLM, PlainBackend, pool_for

    graph = fx_prefill.PrefillGraph(
        PackedLM(), attention=PlainBackend(pool_for()), max_tokens=64, group=dist.group.WORLD
    )
    return graph, Batch(graph.attention.pool, [20 + 10 * rank])  # type: ignore[attr-defined]


def _one_rank_cannot_capture(rank: int) -> Any:
    graph, batch = _graph_on(rank)
    capture = graph._capture

    def fails(bucket: int) -> None:
        if rank == 1 and bucket == 48:
            raise RuntimeError("no kernel for this size")
        capture(bucket)

    graph._capture = fails
    with torch.no_grad():
        graph.warmup()
        own = 20 + 10 * rank
        ctx, ids = batch.context([own])
        ctx.rank_num_tokens, ctx.rank_modes = [20, 30], [ForwardMode.EXTEND] * 2
        graph._rank = rank
        replayed = graph.replay(ctx, ids)
        eager = graph._run_eagerly(ctx, graph.decoder.embedding(ids), None, None)
    assert_same(replayed.hidden_states, eager.hidden_states)
    return graph._rules.buckets, dict(graph.report().graphs[0].replays)


def test_a_graph_leaves_out_on_all_ranks_what_one_cannot_capture(tmp_path: Path) -> None:
    assert run_pair(_one_rank_cannot_capture, tmp_path) == [((16, 32, 64), {32: 1})] * 2


def _one_rank_is_out_of_memory(rank: int) -> Any:
    graph, _ = _graph_on(rank)
    if rank == 0:

        def fails(bucket: int) -> None:
            raise torch.OutOfMemoryError("no memory")

        graph._capture = fails
    try:
        with torch.no_grad():
            graph.warmup()
    except CaptureOutOfMemory as error:
        ctx = ForwardContext.from_lengths([20])
        return str(error).split(" while ")[0], graph.why_not(ctx)
    return None


def test_out_of_memory_on_one_rank_ends_the_warmup_of_all(tmp_path: Path) -> None:
    one, other = run_pair(_one_rank_is_out_of_memory, tmp_path)
    not_captured = "nothing is captured yet: call warmup() first"
    assert one == ("this rank ran out of memory", not_captured)
    assert other == ("another rank ran out of memory", not_captured)
