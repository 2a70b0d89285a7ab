"""Attention backends of packed batches against a loop over rows, heads and keys in float64.

Slots that no request uses hold NaN, in the reserved page too, and pages are in no order.
"""

from __future__ import annotations

import random
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from serving_batches import (
    NUM_LAYERS,
    Batch,
    make_batch,
    naive,
    random_layer,
    random_lengths,
    with_backend,
)

import fx_prefill
from fx_prefill import forward_context
from fx_prefill.errors import ContextError, ServingError
from fx_prefill.serving.attention import varlen
from fx_prefill.serving.attention.backend import make_attention_backend

ALL = ("causal", "window", "soft_cap", "sinks")
BACKENDS = {
    "sdpa": ALL,
    "flex": ALL,
    "varlen": ("causal", "window"),
    "varlen_copying": ("causal", "window"),
    "flash_attn": ("causal", "window", "soft_cap"),
    "flashinfer": ("causal", "window", "soft_cap"),
}
SAME_WIDTH = ("varlen", "varlen_copying", "flash_attn")


# --- stand-ins of kernels that do not run here --------------------------------------------------


def reference(
    q: torch.Tensor,
    requests: list[tuple[slice, torch.Tensor, torch.Tensor]],
    scale: float,
    window: tuple[int, int],
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """What flash kernels compute of rows and keys of requests, aligned to the lower right."""
    out = []
    for rows, k, v in requests:
        mine = q[rows]
        group = mine.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", mine, k) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        row = torch.arange(len(mine))[:, None] + len(k) - len(mine)
        distance = row - torch.arange(len(k))
        for end, far in ((window[0], distance), (window[1], -distance)):
            if end >= 0:
                scores = scores.masked_fill(far > end, float("-inf"))
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(out)


def by_offsets(
    k: torch.Tensor, v: torch.Tensor, cu_q: Any, cu_k: Any, used: Any = None
) -> list[Any]:
    assert cu_q.dtype == cu_k.dtype == torch.int32
    q, n = cu_q.tolist(), cu_k.tolist()
    assert (n[-1], n[-1]) == (len(k), len(v))
    ends = n[1:]
    if used is not None:
        assert used.dtype == torch.int32
        assert all(used <= (cu_k[1:] - cu_k[:-1]))
        ends = [start + length for start, length in zip(n, used.tolist(), strict=False)]
    return [
        (slice(q[i], q[i + 1]), k[n[i] : end], v[n[i] : end])
        for i, end in enumerate(ends)
        if q[i] < q[i + 1]
    ]


def longest(cu: torch.Tensor) -> int:
    return int(cu.diff().max())


def aten_flash(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, dropout: float,
    is_causal: bool, debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
    seqused_k: Any = None, alibi_slopes: Any = None, block_table: Any = None,
    num_splits: Any = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    assert (dropout, debug) == (0.0, False)
    most = longest(cu_k) if seqused_k is None else int(seqused_k.max())
    assert (max_q, max_k) == (max(longest(cu_q), 2), most)
    window = (window_size_left, window_size_right)
    assert is_causal == (window == (-1, 0))
    none = q.new_empty(0)
    requests = by_offsets(k, v, cu_q, cu_k, seqused_k)
    return reference(q, requests, scale, window), none, none, none, none


def aten_flash_in_place(out: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    found, *rest = aten_flash(*args, **kwargs)
    out.copy_(found)
    return rest[0]


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
) -> torch.Tensor:  # fmt: skip
    # A longest of one row says that each request has exactly one.
    least = 1 if cu_seqlens_q.diff().min() else 2
    assert max_seqlen_q == max(longest(cu_seqlens_q), least)
    assert max_seqlen_k == longest(cu_seqlens_k)
    window = (window_size[0], 0 if causal else window_size[1])
    requests = by_offsets(k, v, cu_seqlens_q, cu_seqlens_k)
    return reference(q, requests, softmax_scale, window, softcap)


class PagedWrapper:
    """BatchPrefillWithPagedKVCacheWrapper, as far as it is documented and used."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        self.layout = kv_layout

    def plan(
        self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any,
        paged_kv_last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        page_size: int, head_dim_vo: Any = None, *, causal: bool = False, sm_scale: Any = None,
        window_left: int = -1, logits_soft_cap: Any = None, q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert paged_kv_indices.dtype == torch.int32
        self.q, self.pages = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.indices, self.last = paged_kv_indices.tolist(), paged_kv_last_page_len.tolist()
        assert len(self.indices) == self.pages[-1]
        assert all(1 <= n <= page_size for n in self.last)
        self.shapes = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size)
        self.dtypes = (q_data_type, kv_data_type)
        self.how = (sm_scale, (window_left, 0 if causal else -1), logits_soft_cap or 0.0)

    def run(self, q: Any, paged_kv_cache: Any, *, out: torch.Tensor) -> torch.Tensor:
        held = [x if self.layout == "NHD" else x.transpose(1, 2) for x in paged_kv_cache]
        size = held[0].shape[1]
        assert self.shapes == (q.shape[1], *held[0].shape[2:], held[1].shape[3], size)
        assert self.dtypes == (q.dtype, held[0].dtype)
        requests = []
        for i, last in enumerate(self.last):
            pages = self.indices[self.pages[i] : self.pages[i + 1]]
            num = (len(pages) - 1) * size + last
            rows = slice(self.q[i], self.q[i + 1])
            requests.append((rows, *(x[pages].flatten(0, 1)[:num] for x in held)))
        return out.copy_(reference(q, requests, *self.how))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins, so that indices and arguments are tested on a CPU."""
    flash = types.ModuleType("flash_attn")
    flash.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    infer = types.ModuleType("flashinfer")
    infer.BatchPrefillWithPagedKVCacheWrapper = PagedWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    monkeypatch.setitem(sys.modules, "flashinfer", infer)
    monkeypatch.setattr(varlen, "_check_pool", lambda pool: None)
    # Under the real operators, so that their schemas check the arguments.
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", aten_flash, "CPU")
        if hasattr(torch.ops.aten, IN_PLACE):
            library.impl(IN_PLACE, aten_flash_in_place, "CPU")
        yield


IN_PLACE = "_flash_attention_forward_no_dropout_inplace"


def use(batch: Batch, name: str, monkeypatch: pytest.MonkeyPatch) -> Batch:
    if name == "varlen_copying":  # As in torch 2.11.
        with monkeypatch.context() as patched:
            patched.setattr(torch.ops.aten, IN_PLACE, None, raising=False)
            return with_backend(batch, "varlen")
    return with_backend(batch, name)


# --- against the loop ---------------------------------------------------------------------------


def bits(pool: Any) -> list[torch.Tensor]:
    """All slots of the pool as integers, ``[num_slots, ...]``, so that NaN equals itself."""
    found = []
    for held in (*pool.keys, *pool.values):
        rows = held if pool.layout == "NHD" else held.transpose(1, 2)
        kind = torch.int32 if held.dtype == torch.float32 else torch.int16
        found.append(rows.flatten(0, 1).contiguous().view(kind).clone())
    return found


def check(batch: Batch, how: dict[str, Any], tolerance: float = 1e-5, padding: int = 0) -> None:
    """All layers give what the loop gives, write the rows to their slots, and nothing else."""
    before, ctx = bits(batch.pool), batch.ctx
    q, k, v = (
        torch.cat([x, torch.full_like(x[:1], 7.0).expand(padding, -1, -1)]) if padding else x
        for x in (batch.q, batch.k, batch.v)
    )
    with forward_context(ctx):
        found = [fx_prefill.attention(q, k, v, i, **how) for i in range(NUM_LAYERS)]
    for layer, out in enumerate(found):
        assert out[ctx.num_tokens :].eq(0).all()
        actual = out[: ctx.num_tokens].double().cpu()
        expected = naive(batch, layer, **how)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    for held, was in zip(bits(batch.pool), before, strict=True):
        was[ctx.write_locations] = held[ctx.write_locations]
        assert torch.equal(held, was), "a slot of another row was written"
    for layer in range(NUM_LAYERS):
        keys, values = batch.pool.read(layer, ctx.write_locations)
        assert torch.equal(keys, batch.k) and torch.equal(values, batch.v)


def check_random(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    lengths, num_decodes = random_lengths(rng)
    heads = rng.choice([(2, 2), (4, 2), (4, 1), (8, 2)])
    widths = (8, 8) if name in SAME_WIDTH or rng.random() < 0.6 else (12, 8)
    batch = make_batch(
        lengths,
        num_decodes,
        heads=heads,
        widths=widths,
        page_size=rng.choice([1, 4, 16]),
        layout=rng.choice(["NHD", "HND"]),
        seed=seed,
    )
    how = random_layer(rng, heads[0], BACKENDS[name])
    if name == "flashinfer" and not how["causal"]:
        how["window"] = None
    check(use(batch, name, monkeypatch), how, padding=rng.choice([0, 3]))


@pytest.mark.parametrize("seed", range(40))
def test_sdpa_equals_the_loop(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_random("sdpa", seed, monkeypatch)


@pytest.mark.parametrize("seed", range(8))
def test_flex_equals_the_loop(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_random("flex", seed, monkeypatch)


@pytest.mark.parametrize("name", ["varlen", "varlen_copying", "flash_attn", "flashinfer"])
@pytest.mark.parametrize("seed", range(10))
def test_kernels_are_given_what_they_need(
    name: str, seed: int, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_random(name, seed, monkeypatch)


CASES: dict[str, dict[str, Any]] = {
    "whole prompts": dict(lengths=[(0, 5), (0, 1), (0, 9)]),
    "one row of one request": dict(lengths=[(0, 1)]),
    "chunks": dict(lengths=[(4, 5), (16, 3)]),
    "a prompt beside a chunk": dict(lengths=[(0, 5), (7, 2)]),
    "prompts, chunks and decodes": dict(lengths=[(0, 6), (3, 2), (9, 1), (2, 1)], num_decodes=2),
    "decodes of one length": dict(lengths=[(6, 1), (6, 1)], num_decodes=2),
    "decodes of many lengths": dict(lengths=[(1, 1), (30, 1), (0, 1)], num_decodes=3),
    "first tokens that decode": dict(lengths=[(0, 1), (0, 1)], num_decodes=2),
    "a request without rows": dict(lengths=[(5, 0), (2, 3)]),
    "a request without rows beside one row": dict(lengths=[(5, 0), (2, 1)]),
}


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("name", [*BACKENDS])
@pytest.mark.parametrize("case", [*CASES])
def test_mixtures_of_requests(
    case: str, name: str, window: int | None, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(use(make_batch(**CASES[case]), name, monkeypatch), {"window": window})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("soft_cap", [None, 20.0])
def test_sdpa_in_half_precision(dtype: torch.dtype, soft_cap: float | None) -> None:
    batch = with_backend(make_batch([(0, 6), (5, 3), (8, 1)], 1, dtype=dtype), "sdpa")
    check(batch, {"soft_cap": soft_cap}, tolerance=2e-2)


def test_layers_of_one_forward_may_differ() -> None:
    batch = with_backend(make_batch([(0, 9), (6, 4), (12, 1)], 1), "sdpa")
    ways: list[dict[str, Any]] = [{"window": 3}, {}, {"window": 5}, {"causal": False}]
    with forward_context(batch.ctx):
        for how in ways:
            found = fx_prefill.attention(batch.q, batch.k, batch.v, 1, **how)
            torch.testing.assert_close(found.double(), naive(batch, 1, **how), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*BACKENDS])
def test_no_rows_are_no_work(name: str, kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = use(make_batch([]), name, monkeypatch)
    q = torch.zeros(0, 4, 8)
    with forward_context(batch.ctx):
        assert fx_prefill.attention(q, q[:, :2], q[:, :2], 0).shape == (0, 4, 8)


@pytest.mark.parametrize("name", ["sdpa", "varlen", "flash_attn", "flashinfer"])
def test_contexts_that_take_turns_keep_their_own_lengths(
    name: str, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = use(make_batch([(3, 4), (0, 2)], num_decodes=0), name, monkeypatch)
    inner = make_batch([(5, 1), (0, 5)], seed=1)
    inner.ctx.attention = outer.ctx.attention
    backend = outer.ctx.attention
    with forward_context(outer.ctx):
        backend.pool = inner.pool
        with forward_context(inner.ctx):
            found = fx_prefill.attention(inner.q, inner.k, inner.v, 0)
        torch.testing.assert_close(found.double(), naive(inner, 0), rtol=1e-5, atol=1e-5)
        backend.pool = outer.pool
        found = fx_prefill.attention(outer.q, outer.k, outer.v, 0)
        torch.testing.assert_close(found.double(), naive(outer, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["sdpa", "varlen", "flash_attn", "flashinfer", "flex"])
def test_missing_pages_or_locations_are_refused(
    name: str, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = use(make_batch([(3, 4)]), name, monkeypatch)
    for field, wrong in (
        ("write_locations", None),
        ("write_locations", torch.zeros(3, dtype=torch.int64)),
        ("page_table", None),
        ("page_table", torch.zeros(1, 1, dtype=torch.int32)),
        ("page_table", torch.zeros(0, 2, dtype=torch.int32)),
    ):
        with (
            batch.ctx.pinned(**{field: wrong}),
            pytest.raises(ContextError, match=f"{field} is .*; required"),
        ):
            forward_context(batch.ctx).__enter__()


# --- refusals and names -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("varlen", {"soft_cap": 2.0}, "soft_cap=2.0 and the attention backend 'varlen'"),
        ("varlen", {"sinks": torch.zeros(4)}, "has sinks and the attention backend 'varlen'"),
        ("flash_attn", {"sinks": torch.zeros(4)}, "required: none, or the backend 'sdpa'"),
        ("flashinfer", {"sinks": torch.zeros(4)}, "required: none, or the backend 'sdpa'"),
        ("flashinfer", {"window": 3, "causal": False}, "window=3 and the attention backend"),
    ],
)
def test_what_a_backend_lacks_is_refused_by_name(
    name: str, how: dict[str, Any], said: str, kernels: None
) -> None:
    batch = with_backend(make_batch([(0, 3)]), name)
    with forward_context(batch.ctx), pytest.raises(ServingError, match=said):
        fx_prefill.attention(batch.q, batch.k, batch.v, 0, **how)


def test_varlen_refuses_rows_of_another_dtype(kernels: None) -> None:
    batch = with_backend(make_batch([(0, 3)], dtype=torch.bfloat16), "varlen")
    q, k, v = batch.q.float(), batch.k.float(), batch.v.float()
    with forward_context(batch.ctx), pytest.raises(ServingError, match=r"got torch.float32 rows"):
        fx_prefill.attention(q, k, v, 0)


class Pool(types.SimpleNamespace):
    """What a backend asks of a pool before it uses it."""

    def __init__(self, **changes: Any) -> None:
        given = dict(device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=64, v_head_dim=64)
        super().__init__(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"device": torch.device("cpu")}, "got a pool on cpu"),
        ({"dtype": torch.float32}, "got a pool of torch.float32"),
        ({"v_head_dim": 32}, "got head_dim 64 and v_head_dim 32"),
        ({"head_dim": 20, "v_head_dim": 20}, "got head_dim 20"),
        ({"head_dim": 320, "v_head_dim": 320}, "got head_dim 320"),
    ],
)
def test_varlen_says_what_pool_it_needs(changes: dict[str, Any], seen: str) -> None:
    with pytest.raises(ServingError, match=f"{seen}; required: a CUDA pool.*use the.* 'sdpa'"):
        make_attention_backend("varlen", Pool(**changes))


@pytest.mark.parametrize(
    ("name", "module", "pip_name"),
    [
        ("flash_attn", "flash_attn", "flash-attn"),
        ("flashinfer", "flashinfer", "flashinfer-python"),
    ],
)
def test_a_library_that_is_not_there_is_named(
    name: str, module: str, pip_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ServingError, match=f"package '{module}'.*pip install {pip_name}"):
        make_attention_backend(name, Pool())


def test_flash_attn_refuses_values_of_another_width(kernels: None) -> None:
    with pytest.raises(ServingError, match="head_dim 64 and v_head_dim 32"):
        make_attention_backend("flash_attn", Pool(v_head_dim=32))


def test_an_unknown_name_lists_those_there_are() -> None:
    said = "no attention backend 'fast'; known: flash_attn, flashinfer, flex, sdpa.*, varlen"
    with pytest.raises(ServingError, match=said):
        make_attention_backend("fast", None)


def test_names_that_are_built_in_or_taken_are_refused() -> None:
    for name in ("sdpa", "flashinfer"):
        with pytest.raises(ServingError, match=f"called '{name}' is registered already"):
            fx_prefill.register_attention_backend(name)(Pool)


def test_a_backend_of_ones_own_is_known_by_name() -> None:
    class Own:
        supports_capture = False
        init_forward_metadata = forward = print

        def __init__(self, pool: Any) -> None:
            self.pool = pool

    name = "of_ones_own"
    fx_prefill.register_attention_backend(name)(Own)
    assert make_attention_backend(name, 7).pool == 7  # type: ignore[attr-defined]
    with pytest.raises(ServingError, match="registered already"):
        fx_prefill.register_attention_backend(name)(Pool)
    own = Own(8)
    assert make_attention_backend(own, None) is own


def test_backends_are_imported_when_asked_for() -> None:
    code = """
import sys
import fx_prefill
from fx_prefill.serving.attention.backend import make_attention_backend
before = [name for name in sys.modules if name.startswith("fx_prefill.serving.attention.")]
from fx_prefill.serving.kv_cache import PagedKVPool
print(type(make_attention_backend("sdpa", PagedKVPool(1, 2, 1, 1, 8))).__name__)
print(before, "fx_prefill.serving.attention.flex" in sys.modules, "flashinfer" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [
        "SdpaAttention",
        "['fx_prefill.serving.attention.backend'] False False",
    ]


# --- on a GPU -----------------------------------------------------------------------------------

cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ON_CUDA = [pytest.param(name, marks=cuda) for name in ("sdpa", "varlen", "flex")]


def cuda_batch(name: str, case: str, **changes: Any) -> Batch:
    given: dict[str, Any] = dict(
        dtype=torch.bfloat16, device="cuda", widths=(64, 64), page_size=16, **CASES[case]
    )
    return with_backend(make_batch(**{**given, **changes}), name)


@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("case", [*CASES])
@pytest.mark.parametrize("how", [{}, {"window": 3}, {"causal": False}], ids=str)
def test_mixtures_of_requests_on_a_gpu(name: str, case: str, how: dict[str, Any]) -> None:
    check(cuda_batch(name, case), how, tolerance=3e-2)


@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (8, 1)])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_groups_and_layouts_on_a_gpu(name: str, heads: tuple[int, int], layout: str) -> None:
    for case in ("prompts, chunks and decodes", "decodes of many lengths"):
        check(cuda_batch(name, case, heads=heads, layout=layout), {}, tolerance=3e-2)


@pytest.mark.parametrize("name", ON_CUDA)
def test_rows_padded_by_the_engine_on_a_gpu(name: str) -> None:
    check(cuda_batch(name, "prompts, chunks and decodes"), {}, tolerance=3e-2, padding=5)


@pytest.mark.parametrize("name", [n for n in ON_CUDA if n.values[0] != "varlen"])
def test_soft_caps_and_sinks_on_a_gpu(name: str) -> None:
    for how in ({"soft_cap": 1.5}, {"sinks": torch.linspace(-1, 1, 4, device="cuda")}):
        check(cuda_batch(name, "prompts, chunks and decodes"), how, tolerance=3e-2)


@pytest.mark.parametrize("name", [n for n in ON_CUDA if n.values[0] != "varlen"])
def test_values_of_another_width_on_a_gpu(name: str) -> None:
    batch = cuda_batch(name, "prompts, chunks and decodes", widths=(128, 64))
    check(batch, {}, tolerance=3e-2)


@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("window", [None, 3])
def test_no_layer_waits_for_the_device(name: str, layout: str, window: int | None) -> None:
    batch = cuda_batch(name, "prompts, chunks and decodes", layout=layout)

    def run() -> torch.Tensor:
        with forward_context(batch.ctx):
            for layer in range(NUM_LAYERS):
                found = fx_prefill.attention(batch.q, batch.k, batch.v, layer, window=window)
        return found

    run()  # Loads kernels, and compiles them.
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = naive(batch, NUM_LAYERS - 1, window=window)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=3e-2, atol=3e-2)
