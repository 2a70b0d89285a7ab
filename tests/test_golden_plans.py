"""How known models are cut, written down: a change to a rule shows here as a change of a plan.

`EXPECTTEST_ACCEPT=1 pytest tests/test_golden_plans.py` writes the plans anew; read the difference.
"""

from __future__ import annotations

import textwrap
from collections import Counter

import pytest
import torch
from expecttest import assert_expected_inline
from harness import Around, rows

import fx_prefill
from fx_prefill.reporting.explain import PartitionReport, Report

NUM_TOKENS = 20


def plan_text(report: Report) -> str:
    """One entry a partition: a segment with its distinct number, or a break with its reasons."""
    entries = [
        f"{_heading(part)}: {_operators(part)}"
        for graph in report.graphs
        for part in graph.partitions
    ]
    return "\n".join(
        textwrap.fill(entry, 96, subsequent_indent="    ", break_long_words=False)
        for entry in entries
    )


def _heading(part: PartitionReport) -> str:
    if part.kind == "segment":
        return f"segment {part.segment}"
    return f"break ({', '.join(sorted(part.reasons))})"


def _operators(part: PartitionReport) -> str:
    counted = sorted(Counter(part.operators).items())
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in counted)


def require_pinned_transformers() -> None:
    """Other versions of the modelling code have other operators in the same plan."""
    transformers = pytest.importorskip("transformers")
    if not transformers.__version__.startswith("5.17."):
        pytest.skip(f"plans are those of transformers 5.17, this is {transformers.__version__}")


def ids() -> torch.Tensor:
    return torch.arange(NUM_TOKENS)[None]


def test_llama_whole() -> None:
    require_pinned_transformers()
    from families import BY_NAME

    model = BY_NAME["llama"].with_layers(3).whole("sdpa")
    report = fx_prefill.explain(model, input_ids=ids(), use_cache=False)
    assert_expected_inline(
        plan_text(report),
        """\
break (embedding gather): embedding
segment 0: add x4, arange, cat x3, cos, expand x3, float, getitem x8, linear x3, matmul, mean,
    mul x8, neg x2, pow, reshape x2, rsqrt, sin, to x5, transpose x4, unsqueeze x3, view x3
break (attention): scaled_dot_product_attention
segment 1: add x6, cat x2, contiguous x2, expand x2, getitem x6, linear x7, mean x2, mul x9, neg
    x2, pow x2, reshape x3, rsqrt x2, silu, to x4, transpose x4, unsqueeze x2, view x3
break (attention): scaled_dot_product_attention
segment 1: add x6, cat x2, contiguous x2, expand x2, getitem x6, linear x7, mean x2, mul x9, neg
    x2, pow x2, reshape x3, rsqrt x2, silu, to x4, transpose x4, unsqueeze x2, view x3
break (attention): scaled_dot_product_attention
segment 2: add x4, contiguous x2, getitem, linear x4, mean x2, mul x5, pow x2, reshape, rsqrt
    x2, silu, to x4, transpose
break (terminal projection): linear""",
    )


def test_llama_inner_with_a_cache() -> None:
    require_pinned_transformers()
    from families import BY_NAME
    from transformers import DynamicCache

    model = BY_NAME["llama"].with_layers(3).inner("sdpa")
    cache = DynamicCache(config=model.config)
    report = fx_prefill.explain(model, input_ids=ids(), past_key_values=cache, use_cache=True)
    assert_expected_inline(
        plan_text(report),
        """\
break (embedding gather): embedding
segment 0: add x4, arange, cat x3, clone x2, cos, expand x3, float, getitem x8, linear x3,
    matmul, mean, mul x8, neg x2, pow, reshape x2, rsqrt, sin, to x5, transpose x4, unsqueeze
    x3, view x3
break (attention): scaled_dot_product_attention
segment 1: add x6, cat x2, clone x2, contiguous x2, expand x2, getitem x6, linear x7, mean x2,
    mul x9, neg x2, pow x2, reshape x3, rsqrt x2, silu, to x4, transpose x4, unsqueeze x2, view
    x3
break (attention): scaled_dot_product_attention
segment 1: add x6, cat x2, clone x2, contiguous x2, expand x2, getitem x6, linear x7, mean x2,
    mul x9, neg x2, pow x2, reshape x3, rsqrt x2, silu, to x4, transpose x4, unsqueeze x2, view
    x3
break (attention): scaled_dot_product_attention
segment 2: add x4, contiguous x2, linear x4, mean x2, mul x5, pow x2, reshape, rsqrt x2, silu,
    to x4, transpose""",
    )


def test_gemma3_with_sliding_and_full_layers() -> None:
    require_pinned_transformers()
    from families import BY_NAME

    model = BY_NAME["gemma3"].inner("sdpa")
    report = fx_prefill.explain(model, input_ids=ids(), use_cache=False)
    assert_expected_inline(
        plan_text(report),
        """\
break (embedding gather): embedding
segment 0: add x9, arange, cat x4, cos x2, expand x4, float x8, getitem x10, linear x3, matmul
    x2, mean x3, mul x15, neg x2, pow x3, reshape x2, rsqrt x3, sin x2, to x5, transpose x5,
    type_as x3, unsqueeze x3, view x3
break (attention, crosses tokens, only a break reads it): add x3, and_ x4, arange x4, bias_of,
    cumsum, diff, eq, expand, getitem x6, gt, le, ne, new_ones x2, scaled_dot_product_attention,
    sub x2, to x4, unsqueeze
segment 1: add x16, cat x2, contiguous x2, expand x2, float x12, gelu, getitem x6, linear x7,
    mean x6, mul x17, neg x2, pow x6, reshape x3, rsqrt x6, to x2, transpose x4, type_as x6,
    unsqueeze x2, view x3
break (attention): scaled_dot_product_attention
segment 2: add x16, cat x2, contiguous x2, expand x2, float x12, gelu, getitem x6, linear x7,
    mean x6, mul x17, neg x2, pow x6, reshape x3, rsqrt x6, transpose x4, type_as x6, unsqueeze
    x2, view x3
break (attention): scaled_dot_product_attention
segment 3: add x10, contiguous x2, float x8, gelu, linear x4, mean x4, mul x9, pow x4, reshape,
    rsqrt x4, transpose, type_as x4""",
    )


def test_qwen3_next_with_a_cache() -> None:
    require_pinned_transformers()
    from more_families import CASE

    case = CASE["qwen3_next"]
    model = case.model()
    report = fx_prefill.explain(model, **case.arguments(model, ids(), True))
    assert_expected_inline(
        plan_text(report),
        """\
break (embedding gather): embedding
segment 0: add x3, arange, cat, cos, expand, float x6, getitem x2, matmul, mean, mul x4, pow,
    rsqrt, sin, to, transpose, type_as, unsqueeze
break (opaque module): Qwen3NextGatedDeltaNet, getitem x5
segment 1: add x3, copy_ x2, float x2, getitem x3, itruediv, linear x5, mean, mul x4, pow,
    reshape, rsqrt, sigmoid, silu, softmax, sum, to, topk, type_as, view, zeros, zeros_like
break (crosses tokens, only a break reads it, other dynamic size): arange, chunk, clamp_,
    cumsum, empty_like, float, floordiv, ge, getitem x7, grouped_mm_fallback x2, histc,
    masked_fill x2, masked_fill_, mul x2, reshape x2, setitem, silu, sort, to x2, transpose x2,
    unsqueeze x2, view
segment 2: add x4, float x2, mean, mul x2, pow, reshape, rsqrt, sum, to, type_as
break (opaque module): Qwen3NextGatedDeltaNet, getitem x5
segment 1: add x3, copy_ x2, float x2, getitem x3, itruediv, linear x5, mean, mul x4, pow,
    reshape, rsqrt, sigmoid, silu, softmax, sum, to, topk, type_as, view, zeros, zeros_like
break (crosses tokens, only a break reads it, other dynamic size): arange, chunk, clamp_,
    cumsum, empty_like, float, floordiv, ge, getitem x7, grouped_mm_fallback x2, histc,
    masked_fill x2, masked_fill_, mul x2, reshape x2, setitem, silu, sort, to x2, transpose x2,
    unsqueeze x2, view
segment 2: add x4, float x2, mean, mul x2, pow, reshape, rsqrt, sum, to, type_as
break (opaque module): Qwen3NextGatedDeltaNet, getitem x5
segment 1: add x3, copy_ x2, float x2, getitem x3, itruediv, linear x5, mean, mul x4, pow,
    reshape, rsqrt, sigmoid, silu, softmax, sum, to, topk, type_as, view, zeros, zeros_like
break (crosses tokens, only a break reads it, other dynamic size): arange, chunk, clamp_,
    cumsum, empty_like, float, floordiv, ge, getitem x7, grouped_mm_fallback x2, histc,
    masked_fill x2, masked_fill_, mul x2, reshape x2, setitem, silu, sort, to x2, transpose x2,
    unsqueeze x2, view
segment 3: add x10, cat x4, chunk, clone x2, expand x2, float x6, getitem x12, linear x3, mean
    x3, mul x10, neg x2, pow x3, reshape x4, rsqrt x3, sigmoid, sum, to x3, transpose x3,
    type_as x3, unsqueeze x2, view x4
break (attention): scaled_dot_product_attention
segment 4: add x3, contiguous x2, float x2, getitem x2, itruediv, linear x6, mean, mul x5, pow,
    reshape x2, rsqrt, sigmoid, silu, softmax, sum, to, topk, transpose, type_as, view
break (crosses tokens, only a break reads it, other dynamic size): arange, chunk, clamp_,
    cumsum, empty_like, float, floordiv, ge, getitem x7, grouped_mm_fallback x2, histc,
    masked_fill x2, masked_fill_, mul x2, reshape x2, setitem, silu, sort, to x2, transpose x2,
    unsqueeze x2, view
segment 5: add x4, float x2, mean, mul x2, pow, reshape, rsqrt, sum, to, type_as""",
    )


def test_a_mean_over_tokens() -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x - x.mean(1, keepdim=True)) * x

    report = fx_prefill.explain(Around(middle), rows(NUM_TOKENS))
    assert_expected_inline(
        plan_text(report),
        """\
segment 0: add, layer_norm, linear, tanh
break (crosses tokens): mean
segment 1: add, layer_norm, linear, mul, sigmoid, sub, tanh""",
    )


def test_the_token_count_used_as_a_value() -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) / x.shape[1]

    report = fx_prefill.explain(Around(middle), rows(NUM_TOKENS))
    assert_expected_inline(
        plan_text(report),
        """\
segment 0: add, layer_norm, linear, tanh x2
break (host scalar): truediv
segment 1: add, layer_norm, linear, tanh""",
    )


def _mixture(name: str) -> torch.nn.Module:
    from test_expert_families import decoder

    return decoder(name, torch.bfloat16, "grouped_mm")


def test_mixtral_inner() -> None:
    require_pinned_transformers()
    report = fx_prefill.explain(_mixture("mixtral"), input_ids=ids(), use_cache=False)
    assert_expected_inline(
        plan_text(report),
        """\
break (embedding gather): embedding
segment 0: add x4, arange, cat x3, cos, expand, float, getitem x6, linear x3, matmul, mean, mul
    x8, neg x2, pow, rsqrt, sin, to x5, transpose x4, unsqueeze x3, view x3
break (attention): scaled_dot_product_attention
segment 1: _grouped_mm x2, add x6, arange, cat x2, chunk, clamp_, contiguous x2, cumsum,
    empty_like, float x2, floordiv, ge, getitem x13, histc, itruediv, linear x5, masked_fill x2,
    masked_fill_, mean x2, mul x10, neg x2, pow x2, reshape x5, rsqrt x2, setitem, silu,
    softmax, sort, sum x2, to x7, topk, transpose x6, unsqueeze x4, view x5
break (attention): scaled_dot_product_attention
segment 1: _grouped_mm x2, add x6, arange, cat x2, chunk, clamp_, contiguous x2, cumsum,
    empty_like, float x2, floordiv, ge, getitem x13, histc, itruediv, linear x5, masked_fill x2,
    masked_fill_, mean x2, mul x10, neg x2, pow x2, reshape x5, rsqrt x2, setitem, silu,
    softmax, sort, sum x2, to x7, topk, transpose x6, unsqueeze x4, view x5
break (attention): scaled_dot_product_attention
segment 2: _grouped_mm x2, add x4, arange, chunk, clamp_, contiguous x2, cumsum, empty_like,
    float x2, floordiv, ge, getitem x9, histc, itruediv, linear x2, masked_fill x2,
    masked_fill_, mean x2, mul x6, pow x2, reshape x5, rsqrt x2, setitem, silu, softmax, sort,
    sum x2, to x7, topk, transpose x3, unsqueeze x2, view x2""",
    )


def test_mixtral_inner_in_float32() -> None:
    """Grouped products are traced in bfloat16 only: the operator instead of them asks the host."""
    require_pinned_transformers()
    from test_expert_families import decoder

    model = decoder("mixtral", torch.float32, "grouped_mm")
    report = fx_prefill.explain(model, input_ids=ids(), use_cache=False)
    assert_expected_inline(
        plan_text(report),
        """\
break (embedding gather): embedding
segment 0: add x4, arange, cat x3, cos, expand x3, float, getitem x8, linear x3, matmul, mean,
    mul x8, neg x2, pow, reshape x2, rsqrt, sin, to x5, transpose x4, unsqueeze x3, view x3
break (attention): scaled_dot_product_attention
segment 1: add x2, contiguous x2, float, getitem x2, itruediv, linear x2, mean, mul x2, pow,
    reshape x2, rsqrt, softmax, sum, to x2, topk, transpose, view
break (crosses tokens, only a break reads it, other dynamic size): arange, chunk, clamp_,
    cumsum, empty_like, float, floordiv, ge, getitem x7, grouped_mm_fallback x2, histc,
    masked_fill x2, masked_fill_, mul x2, reshape x2, setitem, silu, sort, to x2, transpose x2,
    unsqueeze x2, view
segment 2: add x4, cat x2, expand x2, getitem x6, linear x3, mean, mul x6, neg x2, pow, reshape
    x3, rsqrt, sum, to x3, transpose x3, unsqueeze x2, view x3
break (attention): scaled_dot_product_attention
segment 1: add x2, contiguous x2, float, getitem x2, itruediv, linear x2, mean, mul x2, pow,
    reshape x2, rsqrt, softmax, sum, to x2, topk, transpose, view
break (crosses tokens, only a break reads it, other dynamic size): arange, chunk, clamp_,
    cumsum, empty_like, float, floordiv, ge, getitem x7, grouped_mm_fallback x2, histc,
    masked_fill x2, masked_fill_, mul x2, reshape x2, setitem, silu, sort, to x2, transpose x2,
    unsqueeze x2, view
segment 2: add x4, cat x2, expand x2, getitem x6, linear x3, mean, mul x6, neg x2, pow, reshape
    x3, rsqrt, sum, to x3, transpose x3, unsqueeze x2, view x3
break (attention): scaled_dot_product_attention
segment 1: add x2, contiguous x2, float, getitem x2, itruediv, linear x2, mean, mul x2, pow,
    reshape x2, rsqrt, softmax, sum, to x2, topk, transpose, view
break (crosses tokens, only a break reads it, other dynamic size): arange, chunk, clamp_,
    cumsum, empty_like, float, floordiv, ge, getitem x7, grouped_mm_fallback x2, histc,
    masked_fill x2, masked_fill_, mul x2, reshape x2, setitem, silu, sort, to x2, transpose x2,
    unsqueeze x2, view
segment 3: add x2, mean, mul x2, pow, reshape, rsqrt, sum, to x3""",
    )


def test_a_widening_product_before_a_residual_is_not_terminal() -> None:
    """The last layer of DeepSeek-V3 adds its shared expert, whose second product widens."""
    require_pinned_transformers()
    report = fx_prefill.explain(_mixture("deepseek_v3"), input_ids=ids(), use_cache=False)
    (graph,) = report.graphs
    assert graph.partitions[-1].kind == "segment", str(report)
