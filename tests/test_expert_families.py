"""Mixture-of-experts decoders of transformers: one break an attention layer, none for experts.

Experts run as `grouped_mm` (in bfloat16 captured; in float32 an operator that asks the host for the
group sizes stands in, and that layer's experts are a break) or as `batched_mm`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from families import VOCAB, _enlarge_weights
from harness import half

import fx_prefill

MAX_TOKENS = 128
LENGTHS = (17, 100, 2, 128, 16, 33, 129, 17, 100, 15)
LAYERS = 3

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 8, "num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "sliding_window": 40,
            "layer_types": ["full_attention"] * LAYERS,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}


def decoder(name: str, dtype: torch.dtype, experts: str) -> torch.nn.Module:
    config_class, arguments = CONFIGS[name]
    config = getattr(transformers, config_class)(**{**_COMMON, **arguments})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(
            config,
            attn_implementation="eager" if name == "gpt_oss" else "sdpa",
            dtype=dtype,
            experts_implementation=experts,
        )
        _enlarge_weights(model)
    return model.eval().requires_grad_(False)


def token_ids(num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return torch.randint(0, VOCAB, (1, num_tokens), generator=generator)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Rounding may send a row on the edge between two experts to the other one: few may differ."""
    close = 0.1 if actual.dtype == torch.bfloat16 else 1e-3
    off = ((actual - expected).abs() > close).any(-1).float().mean()
    assert off <= 0.02, f"{what}: {off:.0%} of the rows differ"


@pytest.mark.parametrize(
    ("name", "dtype", "experts"),
    half(list(CONFIGS), [torch.bfloat16, torch.float32], ["grouped_mm", "batched_mm"]),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_expert_family_replays(name: str, dtype: torch.dtype, experts: str) -> None:
    model = decoder(name, dtype, experts)
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS)
    for index, num_tokens in enumerate(LENGTHS):
        ids = token_ids(num_tokens, index)
        actual = model(input_ids=ids, use_cache=False).last_hidden_state
        expected = model.forward(input_ids=ids, use_cache=False).last_hidden_state
        assert_same(actual, expected, f"call {index}, {num_tokens} tokens")

    report = prefill.report()
    (graph,) = report.graphs
    assert sum(graph.replays.values()) == len(LENGTHS) - 1, str(report)
    assert graph.fallbacks == {"above the largest bucket": 1}
    reasons = Counter(reason for part in graph.partitions for reason in part.reasons)
    assert "padded rows reached real rows" not in reasons, str(report)
    moe_layers = LAYERS - (name == "deepseek_v3")
    falls_back = experts == "grouped_mm" and dtype == torch.float32
    assert graph.num_segments == LAYERS + 1 + (moe_layers if falls_back else 0), str(report)
    assert graph.num_breaks == LAYERS + 1 + (moe_layers if falls_back else 0), str(report)
