"""How far each way of running a decoder is from the same decoder in float32.

    python benchmarks/error.py                          # on a GPU, as in docs/benchmarks.md
    python benchmarks/error.py --device cpu --layers 2 --lengths 17 40

Relative errors of the last hidden state, in bfloat16: eager, torch.compile (compiled for that
length), and replayed with Inductor's and with eager kernels.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch

import fx_prefill
from fx_prefill.bench.models import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1000])
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    model = load(
        arguments.model,
        device=torch.device(arguments.device),
        dtype=torch.bfloat16,
        num_layers=arguments.layers,
    )
    exact = copy.deepcopy(model).float()
    width = model.config.get_text_config().hidden_size
    print(f"{arguments}, torch {torch.__version__}")
    print("tokens  eager  torch.compile  inductor segments  eager segments")
    for num_tokens in arguments.lengths:
        rows = torch.randn(1, num_tokens, width, device=arguments.device, dtype=torch.bfloat16)
        with torch.no_grad():
            wanted = exact(inputs_embeds=rows.float(), use_cache=False)[0]
            errors = [relative(call(rows), wanted) for call in ways(model)]
        print(num_tokens, *(f"{error:.2e}" for error in errors), sep="  ")


def ways(model: Any) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """The calls to compare, in the order of the table's columns."""

    def eager(rows: torch.Tensor) -> torch.Tensor:
        return model.forward(inputs_embeds=rows, use_cache=False)[0]

    def compiled(rows: torch.Tensor) -> torch.Tensor:
        torch._dynamo.reset()
        return torch.compile(model, dynamic=False)(inputs_embeds=rows, use_cache=False)[0]

    def replayed(compiler: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def call(rows: torch.Tensor) -> torch.Tensor:
            torch._dynamo.reset()
            prefill = fx_prefill.compile(model, compiler=compiler, strict=True)
            result = model(inputs_embeds=rows, use_cache=False)[0]
            prefill.undo()
            return result

        return call

    return [eager, compiled, replayed("inductor"), replayed("eager")]


def relative(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((actual.float() - wanted).norm() / wanted.norm())


if __name__ == "__main__":
    main()
