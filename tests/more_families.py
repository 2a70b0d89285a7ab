"""Tiny random models beyond the dense decoders: experts, mixers, positions that follow the length,
several sequences at once.

`arguments` and `result` say how each is called, as they do not all take the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from families import _GROUPED, _MULTI_HEAD, _SPECIAL_TOKENS, FAMILIES, SLIDING_WINDOW, VOCAB, Family
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache

_HEADS_OF_8: dict[str, Any] = {**_GROUPED, "head_dim": 8}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Frequencies change at 64 tokens, half of the longest prompt that replays.
_ORIGINAL = 64


def _mrope(sections: list[int], **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    return {"rope_parameters": {**rope, **more}}


def _longrope(width: int) -> dict[str, Any]:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 3.0,
        "short_factor": [1.0] * (width // 2),
        "long_factor": [1.5] * (width // 2),
        "original_max_position_embeddings": _ORIGINAL,
    }
    return {"rope_parameters": rope, "original_max_position_embeddings": _ORIGINAL}


def causal(model: nn.Module, ids: torch.Tensor, cache: bool) -> dict[str, Any]:
    if not cache:
        return {"input_ids": ids, "use_cache": False}
    past = DynamicCache(config=model.config)
    return {"input_ids": ids, "past_key_values": past, "use_cache": True}


def state_space(model: nn.Module, ids: torch.Tensor, cache: bool) -> dict[str, Any]:
    if not cache:
        return {"input_ids": ids, "use_cache": False}
    past = DynamicCache(config=model.config)
    return {"input_ids": ids, "cache_params": past, "use_cache": True}


def with_image_positions(model: nn.Module, ids: torch.Tensor, cache: bool) -> dict[str, Any]:
    """Temporal, vertical and horizontal positions, as of an image that starts at token 4."""
    count = torch.arange(ids.shape[1])
    positions = torch.stack(
        [count, count.clamp(max=4) + count // 5, count.clamp(max=4) + count % 5]
    )
    return {**causal(model, ids, cache), "position_ids": positions[:, None]}


def encoder_only(model: nn.Module, ids: torch.Tensor, cache: bool) -> dict[str, Any]:
    return {"input_ids": ids}


def beside_an_encoder(model: nn.Module, ids: torch.Tensor, cache: bool) -> dict[str, Any]:
    """An encoder's rows, of another number at each length."""
    num_rows = 31 + ids.shape[1] % 3
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(1, num_rows, model.config.d_model, generator=generator)
    given = {"input_ids": ids, "encoder_hidden_states": rows, "use_cache": cache}
    if cache:
        config = model.config
        given["past_key_values"] = EncoderDecoderCache(
            DynamicCache(config=config), DynamicCache(config=config)
        )
    return given


@dataclass(frozen=True)
class Case:
    """A family, how to call it, and in how many breaks of which kind its layers are cut.

    `breaks` counts partitions by a reason they must have (a partition may have several).
    """

    family: Family
    breaks: dict[str, int]
    arguments: Callable[[nn.Module, torch.Tensor, bool], dict[str, Any]] = causal
    dtype: torch.dtype = torch.float32
    attention: str = "sdpa"

    @property
    def beside_an_encoder(self) -> bool:
        return self.arguments is beside_an_encoder

    @property
    def num_layers(self) -> int:
        given = self.family.arguments
        names = ("num_hidden_layers", "decoder_layers", "num_decoder_layers")
        return next(int(given[name]) for name in names if name in given)

    @property
    def name(self) -> str:
        return self.family.name

    def model(self) -> nn.Module:
        return self.family.inner(self.attention)


def _case(
    name: str,
    config_class: str,
    given: dict[str, Any],
    breaks: dict[str, int],
    arguments: Callable[[nn.Module, torch.Tensor, bool], dict[str, Any]] = causal,
    attention: str = "sdpa",
    **loading: Any,
) -> Case:
    part = "decoder" if arguments is beside_an_encoder else ""
    family = Family(name, config_class, given, loading=loading, part=part)
    return Case(family, breaks, arguments, loading.get("dtype", torch.float32), attention)


_QWEN3_MOE = {**_HEADS_OF_8, **_EXPERTS, "num_experts": 4}

CASES: tuple[Case, ...] = (
    _case("smollm3", "SmolLM3Config", {**_GROUPED, "no_rope_layers": [1, 0]}, {"attention": 2}),
    _case(
        "mixtral",
        "MixtralConfig",
        {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"attention": 2},
    ),
    _case("qwen3_moe grouped_mm", "Qwen3MoeConfig", _QWEN3_MOE, {"attention": 2}),
    _case(
        "qwen3_moe grouped_mm bfloat16",
        "Qwen3MoeConfig",
        _QWEN3_MOE,
        {"attention": 2},
        dtype=torch.bfloat16,
    ),
    _case(
        "qwen3_moe batched_mm",
        "Qwen3MoeConfig",
        _QWEN3_MOE,
        {"attention": 2},
        experts_implementation="batched_mm",
    ),
    _case(
        "qwen3_moe eager experts",
        "Qwen3MoeConfig",
        _QWEN3_MOE,
        {"attention": 2, "opaque module": 2},
        experts_implementation="eager",
    ),
    _case(
        "gpt_oss",
        "GptOssConfig",
        {
            **_HEADS_OF_8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": SLIDING_WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        {"crosses tokens": 2},
        attention="eager",
    ),
    _case(
        "deepseek_v3",
        "DeepseekV3Config",
        {
            **_MULTI_HEAD,
            **_EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 20,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 6,
            "v_head_dim": 10,
        },
        {"attention": 2},
    ),
    _case(
        "qwen2_5_vl text",
        "Qwen2_5_VLTextConfig",
        {**_GROUPED, **_mrope([2, 2, 2])},
        {"attention": 2},
        with_image_positions,
    ),
    _case(
        "qwen3_vl text",
        "Qwen3VLTextConfig",
        {**_HEADS_OF_8, **_mrope([2, 1, 1], mrope_interleaved=True)},
        {"attention": 2},
        with_image_positions,
    ),
    _case(
        "qwen3_next",
        "Qwen3NextConfig",
        {
            **_HEADS_OF_8,
            **_EXPERTS,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "shared_expert_intermediate_size": 52,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        {"opaque module": 3, "attention": 1},
    ),
    _case(
        "mamba2",
        "Mamba2Config",
        {
            **_SPECIAL_TOKENS,
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 24,
            "state_size": 8,
            "n_groups": 1,
            "chunk_size": 16,
        },
        {"opaque module": 2},
        state_space,
        attention="eager",
    ),
    _case(
        "jamba",
        "JambaConfig",
        {
            **_GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 6,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 4,
            "expert_layer_offset": 3,
        },
        {"opaque module": 1, "attention": 1},
    ),
    _case(
        "phi3 longrope",
        "Phi3Config",
        {**_GROUPED, **_longrope(12)},
        {"opaque module": 1, "attention": 2},
    ),
    _case(
        "llama dynamic rope",
        "LlamaConfig",
        {
            **_HEADS_OF_8,
            "max_position_embeddings": _ORIGINAL,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        },
        {"opaque module": 1, "attention": 2},
    ),
    _case(
        "whisper decoder",
        "WhisperConfig",
        {
            **_SPECIAL_TOKENS,
            "vocab_size": VOCAB,
            "d_model": 48,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 80,
            "decoder_ffn_dim": 80,
            "max_target_positions": 192,
            "decoder_start_token_id": 1,
        },
        {"attention": 4, "other dynamic size": 1},
        beside_an_encoder,
    ),
    _case(
        "t5 decoder",
        "T5Config",
        {
            "vocab_size": VOCAB,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
            "d_model": 48,
            "d_kv": 8,
            "d_ff": 80,
            "num_layers": 1,
            "num_decoder_layers": 2,
            "num_heads": 4,
        },
        {"attention": 4, "other dynamic size": 1},
        beside_an_encoder,
    ),
    _case(
        "bert",
        "BertConfig",
        {**_MULTI_HEAD, "num_hidden_layers": 2},
        {"attention": 2},
        encoder_only,
    ),
)

ORDER: tuple[str, ...] = (*(f.name for f in FAMILIES), *(case.name for case in CASES))
"""Rows of docs/families.md."""

CASE: dict[str, Case] = {case.name: case for case in CASES}
