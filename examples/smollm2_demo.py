"""Prefill a real language model at many lengths through the backend, and check every answer.

The model is SmolLM2-135M-Instruct in unmodified transformers code. Exits with 1 when a compiled
answer differs from the uncompiled one, or when a prompt was not replayed at its bucket.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

import fx_prefill
import smollm2
from fx_prefill import buckets

LENGTHS = (3, 16, 17, 60, 128, 300, 700, 1500)
MAX_TOKENS = 2048
LADDER = buckets.default_ladder(MAX_TOKENS)

# Padded rows change how a float32 matmul is blocked, hence its rounding; the logits reach about 30.
TOLERANCE = 1e-3

QUESTION = "Explain in two sentences why the sky is blue."
NUM_NEW_TOKENS = 60


@dataclass
class Measured:
    """What calls of one prompt gave: the last token's logits of each, and the timed ones' times."""

    logits: list[torch.Tensor] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)


def main() -> int:
    arguments = parse_arguments()
    try:
        model, tokenizer = smollm2.load()
    except smollm2.LoadError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with torch.no_grad():
        failures = demonstrate(model, tokenizer, arguments)
    for failure in failures:
        print(f"FAILED: {failure}")
    if not failures:
        print("All answers agree, and every prefill was replayed.")
    return 1 if failures else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each prompt")
    parser.add_argument("--compiler", default="eager", help="segment compiler: eager or inductor")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    return arguments


def demonstrate(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> list[str]:
    """Print the three parts of the demonstration and return what disagreed."""
    prompts = read_prompts(tokenizer)
    question = encode_question(tokenizer)

    print("\n# Partition of the causal LM\n")
    print(fx_prefill.explain(model, input_ids=prompts[-1], use_cache=False))

    # Everything that serves as reference is computed before the backend touches the model.
    print("\n# Prompts\n")
    print("calling the uncompiled model, which takes up to a few minutes ...", flush=True)
    eager = measure(model, prompts, arguments.repeats)
    expected = generate(model, question)

    print("compiling, then the same calls again ...\n", flush=True)
    prefill = fx_prefill.compile(model, max_tokens=MAX_TOKENS, compiler=arguments.compiler)
    compiled = measure(model, prompts, arguments.repeats)
    failures = check_replayed(prefill.report(), prompts, calls=arguments.repeats + 1)
    failures += compare_prompts(prompts, eager, compiled)

    print("\n# Generation: replayed prefill, then uncompiled decode on the cache that it filled\n")
    failures += compare_generation(model, tokenizer, prefill, question, expected)
    print()
    return failures


def read_prompts(tokenizer: Any) -> list[torch.Tensor]:
    """Return token ids [1, length] for each of LENGTHS, cut from the text beside this file."""
    text = Path(__file__).with_name("prompt.txt").read_text(encoding="utf-8")
    token_ids = tokenizer(text, return_tensors="pt").input_ids
    return [token_ids[:, :length] for length in LENGTHS]


def encode_question(tokenizer: Any) -> torch.Tensor:
    """Return the token ids [1, length] of QUESTION as a chat turn."""
    turns = [{"role": "user", "content": QUESTION}]
    return tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).input_ids


def measure(model: Any, prompts: Sequence[torch.Tensor], repeats: int) -> list[Measured]:
    """Call the model on all prompts once untimed, then `repeats` times.

    Every other round goes from long to short: rows that a long prompt left behind would show.
    """
    results = [Measured() for _ in prompts]
    for number in range(repeats + 1):
        pairs = list(zip(prompts, results, strict=True))
        for token_ids, result in reversed(pairs) if number % 2 else pairs:
            start = time.perf_counter()
            logits = model(input_ids=token_ids, use_cache=False).logits
            elapsed_ms = (time.perf_counter() - start) * 1e3
            # A copy, as the logits of all rows are large.
            result.logits.append(logits[0, -1].clone())
            if number:
                result.times_ms.append(elapsed_ms)
    return results


def generate(model: Any, token_ids: torch.Tensor) -> list[int]:
    """Return the new tokens of transformers' own greedy generation."""
    output = model.generate(
        input_ids=token_ids,
        attention_mask=torch.ones_like(token_ids),
        do_sample=False,
        max_new_tokens=NUM_NEW_TOKENS,
    )
    return output[0, token_ids.shape[1] :].tolist()


def check_replayed(report: Any, prompts: Sequence[torch.Tensor], calls: int) -> list[str]:
    """Return what keeps the report from saying that each prompt replayed `calls` times."""
    expected: Counter[int | None] = Counter()
    for token_ids in prompts:
        expected[buckets.choose(LADDER, token_ids.shape[1])] += calls
    failures = [f"fallback, {count} times: {why}" for why, count in count_fallbacks(report).items()]
    replays = count_replays(report)
    if replays != expected:
        failures.append(f"replays by bucket are {dict(replays)}, expected {dict(expected)}")
    return failures


def count_replays(report: Any) -> Counter[int]:
    """Return the replays by bucket, over all traced graphs."""
    return sum((Counter(graph.replays) for graph in report.graphs), Counter())


def count_fallbacks(report: Any) -> Counter[str]:
    """Return the fallbacks by reason, over all traced graphs."""
    return sum((Counter(graph.fallbacks) for graph in report.graphs), Counter())


def compare_prompts(
    prompts: Sequence[torch.Tensor], eager: Sequence[Measured], compiled: Sequence[Measured]
) -> list[str]:
    """Print the table of prompts and return which of them differ."""
    row = "{:>6}  {:>6}  {:>7}  {:>8}  {:>11}  {:>14}  {:>10}"
    print(
        row.format(
            "tokens", "bucket", "padding", "eager ms", "compiled ms", "max difference", "next token"
        )
    )
    failures = []
    for token_ids, reference, result in zip(prompts, eager, compiled, strict=True):
        length = token_ids.shape[1]
        bucket = buckets.choose(LADDER, length) or length
        wanted = reference.logits[0]
        difference = max(float((logits - wanted).abs().max()) for logits in result.logits)
        same = all(torch.equal(logits.argmax(), wanted.argmax()) for logits in result.logits)
        print(
            row.format(
                length,
                bucket,
                f"{(bucket - length) / bucket:.0%}",
                f"{reference.median_ms:.1f}",
                f"{result.median_ms:.1f}",
                f"{difference:.1e}",
                "same" if same else "DIFFERS",
            )
        )
        if not same:
            failures.append(f"the next token after {length} tokens differs")
        # Written so that NaN fails too.
        if not difference <= TOLERANCE:
            failures.append(f"logits after {length} tokens differ by {difference} > {TOLERANCE}")
    return failures


def compare_generation(
    model: Any, tokenizer: Any, prefill: Any, question: torch.Tensor, expected: list[int]
) -> list[str]:
    """Generate from a replayed prefill, print the text and return how it differs."""
    before = count_replays(prefill.report())
    cache = DynamicCache(config=model.config)
    logits = model(input_ids=question, past_key_values=cache, use_cache=True).logits[:, -1:]
    report = prefill.report()
    prefill.undo()
    tokens = decode(model, logits, cache)

    print(f"> {QUESTION}\n{tokenizer.decode(tokens, skip_special_tokens=True)}\n")
    same = tokens == expected
    print(
        f"{question.shape[1]} prompt tokens, {len(tokens)} new tokens: "
        f"{'equal to' if same else 'DIFFERENT from'} model.generate without the backend"
    )
    failures = []
    if not same:
        failures.append(f"generated {tokens}, model.generate gives {expected}")
    bucket = buckets.choose(LADDER, question.shape[1])
    if count_replays(report) - before != Counter({bucket: 1}):
        failures.append(f"the prefill that fills the cache did not replay at bucket {bucket}")
    return failures


def decode(model: Any, logits: torch.Tensor, cache: DynamicCache) -> list[int]:
    """Continue greedily from the prompt's last logits [1, 1, vocabulary] on its filled cache."""
    tokens: list[int] = []
    while True:
        token = logits.argmax(-1)
        tokens.append(int(token))
        if tokens[-1] == model.generation_config.eos_token_id or len(tokens) == NUM_NEW_TOKENS:
            return tokens
        logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits


if __name__ == "__main__":
    sys.exit(main())
