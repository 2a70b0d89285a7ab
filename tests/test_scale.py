"""Scale on paper: the largest dense decoder is planned without its weights, in linear work."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import WIDTH, Around, rows
from torch import fx, nn

from fx_prefill.backend import build_plan
from fx_prefill.execution.compile import structural_key
from fx_prefill.options import Options
from fx_prefill.tracing import mark_tokens, tracing_config

LAYERS_OF_405B = 126
MAX_RSS_GIB = 6.0


@pytest.mark.slow
def test_llama_405b_is_explained_on_the_meta_device() -> None:
    """Llama-3.1-405B: in a process of its own, because peak memory is that of a process."""
    pytest.importorskip("transformers")
    script = f"""
        import json
        import resource
        import torch
        import fx_prefill
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            vocab_size=128256,
            hidden_size=16384,
            intermediate_size=53248,
            num_hidden_layers={LAYERS_OF_405B},
            num_attention_heads=128,
            num_key_value_heads=8,
            max_position_embeddings=131072,
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            ).eval()
        ids = torch.zeros(1, 64, dtype=torch.long, device="meta")
        (graph,) = fx_prefill.explain(model, input_ids=ids, use_cache=False).graphs
        print(json.dumps({{
            "segments": graph.num_segments,
            "distinct": graph.num_distinct_segments,
            "breaks": graph.num_breaks,
            "rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }}))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["segments"] == LAYERS_OF_405B + 1
    assert found["distinct"] == 3
    assert found["breaks"] == LAYERS_OF_405B + 2  # attention; the embedding; the vocabulary
    assert found["rss_gib"] < MAX_RSS_GIB, found


# ---- linear in the number of layers -------------------------------------------------------------


class Layer(nn.Module):
    """Attention and two experts that each row is sorted to: every kind of group a plan can have."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        self.register_buffer("literal", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        flat = x.view(-1, WIDTH)
        order = flat[:, :2].topk(1).indices.reshape(-1).argsort()
        y = flat[order] * torch.tensor([2.0] * WIDTH)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0))
        return x + y.tanh_()[back].view(x.shape)


def planned(num_layers: int) -> tuple[int, Any]:
    """Lines of the package that ran to plan a decoder, and its plan."""
    seen: list[tuple[int, Any]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        seen.append(_counted(lambda: build_plan(gm, example_inputs, Options())))
        return gm.forward

    model = Around(nn.Sequential(*[Layer() for _ in range(num_layers)])).requires_grad_(False)
    x = rows(20)
    mark_tokens((x,), {}, None)
    with tracing_config():
        torch.compile(model, backend=backend)(x)
    ((lines, plan),) = seen
    return lines, plan


def _counted(function: Any) -> tuple[int, Any]:
    """Lines of fx_prefill that a call runs, each turn of a loop or comprehension on its own."""
    lines = 0

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    def enter(frame: Any, event: str, argument: Any) -> Any:
        return count if "fx_prefill" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        result = function()
    finally:
        sys.settrace(before)
    return lines, result


def test_planning_is_linear_in_the_number_of_layers() -> None:
    counts, plans = {}, {}
    for num_layers in (4, 8, 16):
        torch._dynamo.reset()
        counts[num_layers], plans[num_layers] = planned(num_layers)
    for num_layers, plan in plans.items():
        assert len(plan.segments) == num_layers + 1
        assert len({structural_key(plan, part) for part in plan.segments}) == 3
    # Twice as many layers more take twice the lines more: exactly so when every step is linear.
    assert counts[16] - counts[8] <= 2.01 * (counts[8] - counts[4]), counts
