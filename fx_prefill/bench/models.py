"""The models a benchmark can name: real shapes with random weights, or a local checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import BenchError

_QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "qwen3",
        {
            **_QWEN3,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
        },
    ),
    "qwen3-8b": (
        "qwen3",
        {
            **_QWEN3,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
        },
    ),
    "llama-8b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
}
"""Model type and configuration of each shape that has a name."""


def load(
    name: str, *, device: torch.device, dtype: torch.dtype, num_layers: int | None = None
) -> torch.nn.Module:
    """The inner decoder of a named shape (random weights) or of a checkpoint directory.

    ``num_layers`` cuts a named shape short. Raises BenchError for a name that is neither.
    """
    transformers = _transformers()
    if name in SHAPES:
        kind, given = SHAPES[name]
        config = transformers.AutoConfig.for_model(kind, **given)
        if num_layers is not None:
            config.num_hidden_layers = num_layers
        with torch.device(device):
            model = transformers.AutoModel.from_config(config, dtype=dtype)
    elif Path(name).is_dir():
        model = transformers.AutoModel.from_pretrained(name, dtype=dtype).to(device)
    else:
        raise BenchError(
            f"no model {name!r}: give one of {', '.join(SHAPES)}, or the directory of a "
            "Hugging Face checkpoint"
        )
    return model.eval().requires_grad_(False)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise BenchError(
            "the benchmark needs transformers for its models: pip install 'fx-prefill[hf]'"
        ) from error
    return transformers
