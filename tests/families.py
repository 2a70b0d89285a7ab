"""Tiny random models of the decoder families that must replay, from unmodified transformers code.

No other dimension of a model equals a token count that the tests use, the vocabulary is larger
than the hidden size, and a sliding window is shorter than the longest prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import nn

VOCAB = 112

# A layer with a window keeps the last `window - 1` rows in a filled DynamicCache, and the traced
# graph is then valid on one side of `window - 1` only: one graph for shorter and one for longer
# prompts. Above 33, so that the bucket of a 17-token prompt is on the prompt's own side.
SLIDING_WINDOW = 40

_SPECIAL_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_MULTI_HEAD: dict[str, Any] = {
    **_SPECIAL_TOKENS,
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 192,
}
_GROUPED: dict[str, Any] = {**_MULTI_HEAD, "num_key_value_heads": 2}
_SLIDING: dict[str, Any] = {**_GROUPED, "head_dim": 8, "sliding_window": SLIDING_WINDOW}


@dataclass(frozen=True)
class Family:
    """One model family: its transformers configuration class and the arguments of a tiny model.

    `uniform` says that all layers have one structure; `sliding` that some layer has a window.
    `loading` goes to `from_config`; `part` names the submodule that is the decoder.
    """

    name: str
    config_class: str
    arguments: dict[str, Any]
    uniform: bool = True
    sliding: bool = False
    loading: dict[str, Any] = field(default_factory=dict)
    part: str = ""

    @property
    def num_layers(self) -> int:
        return int(self.arguments.get("num_hidden_layers") or self.arguments["n_layer"])

    def with_arguments(self, **arguments: Any) -> Family:
        return replace(self, arguments={**self.arguments, **arguments})

    def with_layers(self, num_layers: int) -> Family:
        key = "n_layer" if "n_layer" in self.arguments else "num_hidden_layers"
        return self.with_arguments(**{key: num_layers})

    def config(self) -> Any:
        return getattr(transformers, self.config_class)(**self.arguments)

    def inner(self, attention: str) -> nn.Module:
        """The decoder without its vocabulary projection: float32, eval mode, random weights."""
        return self._build(transformers.AutoModel.from_config, attention)

    def whole(self, attention: str) -> nn.Module:
        """The causal language model: float32, eval mode, random weights."""
        return self._build(transformers.AutoModelForCausalLM.from_config, attention)

    def _build(self, from_config: Callable[..., nn.Module], attention: str) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            given = {"attn_implementation": attention, "dtype": torch.float32, **self.loading}
            model = from_config(self.config(), **given)
            _enlarge_weights(model)
        return model.get_submodule(self.part).eval().requires_grad_(False)


def _enlarge_weights(model: nn.Module) -> None:
    """Give every layer a say in the result: as initialised, the layers of a decoder hardly have."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        else:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)


FAMILIES: tuple[Family, ...] = (
    Family("llama", "LlamaConfig", {**_GROUPED, "head_dim": 8}),
    Family("qwen2", "Qwen2Config", _GROUPED),
    Family("qwen3", "Qwen3Config", {**_GROUPED, "head_dim": 8}),
    Family("mistral", "MistralConfig", _SLIDING, sliding=True),
    Family(
        "gemma2",
        "Gemma2Config",
        {**_SLIDING, "query_pre_attn_scalar": 8},
        uniform=False,
        sliding=True,
    ),
    Family(
        "gemma3",
        "Gemma3TextConfig",
        {
            **_SLIDING,
            "query_pre_attn_scalar": 8,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        uniform=False,
        sliding=True,
    ),
    Family("phi3", "Phi3Config", _GROUPED),
    Family("gpt_neox", "GPTNeoXConfig", _MULTI_HEAD),
    Family(
        "opt",
        "OPTConfig",
        {
            **_SPECIAL_TOKENS,
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "word_embed_proj_dim": 48,
            "ffn_dim": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 192,
        },
    ),
    Family(
        "gpt2",
        "GPT2Config",
        {
            **_SPECIAL_TOKENS,
            "vocab_size": VOCAB,
            "n_embd": 48,
            "n_inner": 80,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 192,
        },
    ),
)

BY_NAME: dict[str, Family] = {family.name: family for family in FAMILIES}
