"""Memory: told before capture, kept under a limit, and given back when a capture fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Around, assert_same, rows, token_graph

import fx_prefill
from fx_prefill.errors import CaptureOutOfMemory, NotCompiledError, OptionError
from fx_prefill.execution.allocator import LARGE_PIECE, SMALL_PIECE, PoolModel
from fx_prefill.execution.capture import CopyRecorder
from fx_prefill.execution.reasons import FallbackReason

MIB = 1 << 20


def compiled_model(**options: Any) -> tuple[Any, Any]:
    module = Around(lambda x: x - x.mean(1, keepdim=True))
    return module, fx_prefill.compile(module, **{"max_tokens": 64, **options})


# --- the allocator's model ----------------------------------------------------------------------


def test_a_pool_grows_by_whole_pieces_and_reuses_what_is_free() -> None:
    pool = PoolModel()
    small = [pool.allocate(1000) for _ in range(100)]
    assert pool.num_bytes == SMALL_PIECE
    large = pool.allocate(4 * MIB)
    assert pool.num_bytes == SMALL_PIECE + LARGE_PIECE
    pool.release(large)
    again = [pool.allocate(4 * MIB) for _ in range(5)]
    assert pool.num_bytes == SMALL_PIECE + LARGE_PIECE
    pool.allocate(13 * MIB)
    assert pool.num_bytes == SMALL_PIECE + LARGE_PIECE + 14 * MIB
    for block in (*small, *again):
        pool.release(block)
    assert pool.allocate(20 * MIB).size == 20 * MIB, "free neighbours are joined"
    assert pool.num_bytes == SMALL_PIECE + LARGE_PIECE + 14 * MIB


# --- the estimate -------------------------------------------------------------------------------


@pytest.mark.parametrize("capture_attention", [True, False])
def test_on_a_cpu_the_estimate_is_what_the_buffers_take(capture_attention: bool) -> None:
    module, compiled = compiled_model(capture_attention=capture_attention)
    explained = fx_prefill.explain(compiled, rows(20)).graphs[0].graph_bytes_estimate
    with torch.no_grad():
        module(rows(20))
    (graph,) = compiled.graphs
    report = token_graph(compiled.report())
    assert report.graph_bytes_estimate == explained > 0
    assert graph.graph_bytes == explained


# --- the limit ----------------------------------------------------------------------------------


def test_buckets_above_the_limit_are_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    module, compiled = compiled_model()
    top = fx_prefill.explain(compiled, rows(20)).graphs[0].graph_bytes_estimate
    compiled.undo()
    limited = fx_prefill.compile(module, max_tokens=64, max_graph_memory=top * 2 // 3)
    with torch.no_grad():
        for n in (20, 32, 33, 64):
            assert_same(module(rows(n)), module.forward(rows(n)), f"{n} tokens")
    graph = token_graph(limited.report())
    assert graph.replays == {32: 2}
    assert graph.fallbacks == {str(FallbackReason.MEMORY): 2}
    assert "max_graph_memory" in caplog.text and "buckets above 32" in caplog.text
    assert limited.graphs[0].graph_bytes <= top * 2 // 3


def test_a_limit_that_nothing_fits_under_runs_eagerly() -> None:
    module, compiled = compiled_model(max_graph_memory=1)
    with torch.no_grad():
        assert_same(module(rows(20)), module.forward(rows(20)))
    assert token_graph(compiled.report()).fallbacks == {str(FallbackReason.MEMORY): 1}


@pytest.mark.parametrize(
    ("given", "expected"), [(5, 5), ("1B", 1), ("2 KiB", 2048), ("1.5GiB", 3 << 29), (None, None)]
)
def test_a_limit_is_bytes_or_text(given: Any, expected: int | None) -> None:
    assert fx_prefill.compile(lambda x: x, max_graph_memory=given).options.max_graph_memory == (
        expected
    )


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "many", "5", "5 GB", ""])
def test_a_bad_limit_is_refused(bad: Any) -> None:
    with pytest.raises(OptionError, match=r"max_graph_memory.*accepted"):
        fx_prefill.compile(lambda x: x, max_graph_memory=bad)


def test_a_warmup_with_a_forward_that_fits_no_bucket_captures_the_others() -> None:
    _, compiled = compiled_model()
    report = compiled.warmup(rows(100))
    assert token_graph(report).captured == (16, 32, 48, 64)


def test_a_warmup_takes_the_module_too_and_nothing_else() -> None:
    module, _ = compiled_model()
    assert token_graph(fx_prefill.warmup(module, rows(20))).captured == (16, 32, 48, 64)
    for other in (Around(lambda x: x), 3):
        with pytest.raises(NotCompiledError, match="capture='all'"):
            fx_prefill.warmup(other, rows(20))


# --- failures -----------------------------------------------------------------------------------


class Failing(CopyRecorder):
    """Raises at one recording."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.left, self.error = at, error

    def record(self, *given: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return super().record(*given)


def fail(compiled: Any, module: Any, at: int, error: BaseException) -> Any:
    """Trace, then let the recording number ``at`` of the next bucket fail."""
    with torch.no_grad():
        module(rows(20))
    (graph,) = compiled.graphs
    graph._captures._recorder = Failing(at, error)
    return graph


@pytest.mark.parametrize("at", [1, 2])
def test_out_of_memory_is_loud_and_leaves_nothing(at: int) -> None:
    module, compiled = compiled_model()
    graph = fail(compiled, module, at, torch.OutOfMemoryError("Tried to allocate 3 GiB."))
    before = graph.captured, graph.graph_bytes
    with torch.no_grad():
        with pytest.raises(CaptureOutOfMemory) as caught:
            module(rows(40))
        text = str(caught.value)
        assert "bucket 48" in text and "Tried to allocate 3 GiB" in text
        assert "max_tokens" in text and "max_graph_memory" in text
        assert (graph.captured, graph.graph_bytes) == before
        assert_same(module(rows(20)), module.forward(rows(20)))
        assert_same(module(rows(40)), module.forward(rows(40)), "captured once there is memory")
    assert token_graph(compiled.report()).replays == {32: 2, 48: 1}


def test_out_of_memory_in_the_first_capture_leaves_no_buffer() -> None:
    module, compiled = compiled_model(capture="queued")
    graph = fail(compiled, module, 2, torch.OutOfMemoryError("Tried to allocate 3 GiB."))
    with pytest.raises(CaptureOutOfMemory):
        compiled.warmup()
    assert graph.captured == () and graph.graph_bytes == 0


@pytest.mark.parametrize("at", [1, 2])
def test_any_other_failure_runs_eagerly_with_its_reason(at: int) -> None:
    module, compiled = compiled_model()
    graph = fail(compiled, module, at, RuntimeError("no such stream"))
    before = graph.captured, graph.graph_bytes
    with torch.no_grad():
        for _ in range(2):
            assert_same(module(rows(40)), module.forward(rows(40)))
    assert (graph.captured, graph.graph_bytes) == before
    report = token_graph(compiled.report())
    assert report.fallbacks == {str(FallbackReason.CAPTURE_FAILED): 2}


# --- when to capture ----------------------------------------------------------------------------


def test_queued_buckets_run_eagerly_until_the_next_warmup() -> None:
    module, compiled = compiled_model(capture="queued")
    with torch.no_grad():
        for n in (20, 50, 20):
            assert_same(module(rows(n)), module.forward(rows(n)), f"{n} tokens")
        (graph,) = compiled.graphs
        assert graph.captured == ()
        report = compiled.warmup()
        assert token_graph(report).captured == (32, 64)
        for n in (20, 50):
            assert_same(module(rows(n)), module.forward(rows(n)), f"{n} tokens")
    report = token_graph(compiled.report())
    assert report.fallbacks == {str(FallbackReason.QUEUED): 3}
    assert report.replays == {32: 1, 64: 1}


def test_a_warmup_with_arguments_captures_the_ladder_of_a_queue_too() -> None:
    _, compiled = compiled_model(capture="queued")
    report = fx_prefill.warmup(compiled, rows(20))
    assert token_graph(report).captured == (16, 32, 48, 64)


@pytest.mark.parametrize("shown", [True, False, None])
def test_a_progress_bar_shows_when_asked_for(
    shown: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    _, compiled = compiled_model(progress=shown)
    compiled.warmup(rows(20))
    assert ("capturing" in capsys.readouterr().err) is (shown is True)


# --- weights that are held ----------------------------------------------------------------------


def test_held_weights_that_moved_are_noticed_before_a_result_leaves() -> None:
    module, compiled = compiled_model(pin_weights=True)
    with torch.no_grad():
        for n in (20, 40, 20):
            assert_same(module(rows(n)), module.forward(rows(n)), f"{n} tokens")
        for parameter in module.parameters():
            parameter.data = parameter.data * 1.5
        for n in (20, 40, 20):
            assert_same(module(rows(n)), module.forward(rows(n)), f"{n} tokens, moved")
    report = token_graph(compiled.report())
    assert report.recaptures == 1
    assert sum(report.replays.values()) == 6 and not report.fallbacks
