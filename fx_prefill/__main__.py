"""The command line: ``python -m fx_prefill bench``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import BenchError, FxPrefillError
from .options import parse_options

EPILOG = """\
examples:
  python -m fx_prefill bench --model qwen3-0.6b
  python -m fx_prefill bench --model qwen3-0.6b --lengths 128 1024 \\
      --baselines eager torch.compile reduce-overhead --json result.json
  python -m fx_prefill bench --model path/to/checkpoint --cache --option max_tokens=4096
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.command(arguments))
    except FxPrefillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fx_prefill", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    bench = commands.add_parser(
        "bench",
        help="time a model's prefill: eager, torch.compile, replayed, and the floor",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.set_defaults(command=_bench)
    bench.add_argument(
        "--model", required=True, help="a named shape (random weights), or a checkpoint directory"
    )
    bench.add_argument("--lengths", nargs="+", metavar="N", help="token counts to measure")
    bench.add_argument("--device", help="cuda where there is one, else cpu")
    bench.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    bench.add_argument("--layers", type=int, help="cut a named shape to this many layers")
    bench.add_argument(
        "--baselines",
        nargs="*",
        default=["eager"],
        help="of: eager, torch.compile, reduce-overhead (each compiled per length, minutes)",
    )
    bench.add_argument("--cache", action="store_true", help="fill a DynamicCache in each call")
    bench.add_argument("--repeats", type=int, default=30, help="calls a median is taken of")
    bench.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the backend, as in the README; may be given again",
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="save all figures here too")
    return parser


def _bench(arguments: argparse.Namespace) -> int:
    from .bench.run import BASELINES, Settings, lengths_of, run
    from .bench.table import render

    unknown = sorted(set(arguments.baselines) - set(BASELINES))
    if unknown:
        raise BenchError(f"no baseline {', '.join(unknown)}; accepted: {', '.join(BASELINES)}")
    for name in ("repeats", "layers"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise BenchError(f"--{name} is {value}; accepted: a whole number of at least 1")
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise BenchError(f"--json {arguments.json}: there is no such directory to write into")
    given: dict[str, Any] = {}
    if arguments.lengths:
        given["lengths"] = lengths_of(arguments.lengths)
    options = dict(_option(text) for text in arguments.option)
    parse_options(options)  # before the minutes that follow
    settings = Settings(
        model=arguments.model,
        device=_device(arguments.device),
        dtype=arguments.dtype,
        baselines=tuple(arguments.baselines),
        cache=arguments.cache,
        repeats=arguments.repeats,
        num_layers=arguments.layers,
        options=options,
        **given,
    )
    result = run(settings, lambda line: print(line, file=sys.stderr))
    print(render(result))
    if arguments.json is not None:
        arguments.json.write_text(result.to_json() + "\n")
    return 0


def _device(name: str | None) -> str:
    import torch

    available = torch.cuda.is_available()
    if name is None:
        return "cuda" if available else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise BenchError(f"--device {name}; accepted: cpu, cuda, cuda:0, ...")
    if name.startswith("cuda") and not available:
        raise BenchError(
            f"--device {name}: torch {torch.__version__} sees no CUDA device; use --device cpu, or "
            "install a CUDA build of torch on a machine with a GPU"
        )
    return name


def _option(text: str) -> tuple[str, Any]:
    """``name=value`` with a Python literal for a value; what is none is taken as text."""
    import ast

    name, equals, value = text.partition("=")
    if not equals:
        raise BenchError(f"--option {text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    sys.exit(main())
