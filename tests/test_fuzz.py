"""Random programs replay to the answers they give uncompiled; a failure prints the program.

`python tests/test_fuzz.py 100 500` tries the seeds from 100 up to 500, and with `experts` behind it
programs of experts.
"""

from __future__ import annotations

import sys
import traceback

import pytest
import torch
from harness import LENGTHS, MAX_TOKENS, copied, shuffled
from programs import Program, module_of, random_program
from torch.utils._pytree import tree_leaves

import fx_prefill

NUM_PROGRAMS = 40

EXPECTED_FALLBACKS = {
    "above the largest bucket",
    "nothing in the graph can be captured",
    "the traced graph is not valid at the bucket",
}


@pytest.mark.parametrize("seed", range(NUM_PROGRAMS))
def test_a_random_program(seed: int) -> None:
    run(random_program(seed))


@pytest.mark.parametrize("seed", range(NUM_PROGRAMS // 2))
def test_a_random_program_of_experts(seed: int) -> None:
    run(random_program(seed, num_steps=12, experts=True))


def run(program: Program) -> None:
    module, reference = module_of(program), module_of(program)  # a program may write its weights
    compiled = fx_prefill.compile(module, max_tokens=MAX_TOKENS)
    kept = []
    for index, num_tokens in enumerate(shuffled(LENGTHS)):
        what = f"call {index}, {num_tokens} tokens"
        arguments = program.arguments(num_tokens, index)
        expected_arguments = program.arguments(num_tokens, index)
        expected = reference(*expected_arguments)
        actual = module(*arguments)
        assert_same(actual, expected, f"{what}, result", program)
        assert_same(arguments, expected_arguments, f"{what}, arguments", program)
        assert_same(list(module.buffers()), list(reference.buffers()), f"{what}, weights", program)
        kept.append((f"{what}, looked at after later calls", actual, copied(expected)))
    for what, actual, expected in kept:
        assert_same(actual, expected, what, program)
    report = compiled.report()
    for graph in report.graphs:
        assert graph.fallbacks.keys() <= EXPECTED_FALLBACKS, f"{graph.fallbacks}\n{program}"
        reasons = {reason for part in graph.partitions for reason in part.reasons}
        assert "padded rows reached real rows" not in reasons, f"{report}\n{program}"


def assert_same(actual: object, expected: object, what: str, program: Program) -> None:
    found, wanted = tree_leaves(actual), tree_leaves(expected)
    assert len(found) == len(wanted), f"{what}\n{program}"
    for position, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(
                a,
                b,
                rtol=1e-7,
                atol=1e-7,
                msg=lambda message, at=position: f"{what}, leaf {at}: {message}\n{program}",
            )
        else:
            assert a == b, f"{what}, leaf {position}: {a} is not {b}\n{program}"


def _hunt(start: int, stop: int, experts: bool = False) -> None:
    for seed in range(start, stop):
        torch._dynamo.reset()
        program = random_program(seed, 12, experts) if experts else random_program(seed)
        try:
            with torch.no_grad():
                run(program)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            print(f"--- seed {seed}: {type(error).__name__} at {last.filename}:{last.lineno}")
            print(str(error)[:2500])
            if str(program) not in str(error)[:2500]:
                print(program)
        print(f"seed {seed} done", file=sys.stderr, flush=True)


if __name__ == "__main__":
    _hunt(*map(int, sys.argv[1:3]), experts="experts" in sys.argv)
