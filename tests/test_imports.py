"""What importing costs, and which way imports point."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fx_prefill

PACKAGE = Path(fx_prefill.__file__).parent
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

# Imports point down this list only; a directory stands for all its files.
LAYERS = (
    "bench",
    "serving",
    "api",
    "backend",
    "reporting",
    "execution",
    "graph",
    "opaque",
    "integrations",
    "tracing",
    "options",
    "buckets",
    "errors",
)


def layer_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[str, ...]]:
    """Dotted names, from the package root, of what a file of this package imports from it."""
    package = ("fx_prefill", *path.parts[:-1])
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = (*base, *(node.module or "").split(".")) if node.module else base
            if name[:1] == ("fx_prefill",):
                for alias in node.names if len(name) == 1 else [None]:
                    yield name[1:] if alias is None else (alias.name,)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "fx_prefill":
                    yield tuple(alias.name.split(".")[1:])


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, fx_prefill; dir(fx_prefill); print('torch' in sys.modules)"
    assert run(code) == "False"


def test_options_and_errors_do_not_import_torch() -> None:
    code = "import sys, fx_prefill.errors, fx_prefill.options; print('torch' in sys.modules)"
    assert run(code) == "False"


def test_every_public_name_is_there() -> None:
    for name in fx_prefill.__all__:
        assert getattr(fx_prefill, name) is not None
    assert set(fx_prefill.__all__) <= set(dir(fx_prefill))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fx_prefill.no_such_name


def test_no_module_hides_a_public_name() -> None:
    # Importing fx_prefill.report as a package would bind it over the function of that name.
    code = "import fx_prefill as f, fx_prefill.api; print(callable(f.report), callable(f.compile))"
    assert run(code) == "True True"


def test_every_layer_is_in_the_list() -> None:
    found = {layer_of(path) for path in FILES} - {"__init__", "__main__"}
    assert found >= set(LAYERS)
    assert found <= set(LAYERS), "place new layers in LAYERS"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_point_one_way(path: Path) -> None:
    layer = layer_of(path)
    if layer not in LAYERS:
        pytest.skip("a front door: may import everything")
    below = LAYERS[LAYERS.index(layer) :]
    for name in imported(path):
        assert name and name[0] in below, f"{path} imports {'.'.join(name)}"


def test_the_import_reader_sees_imports() -> None:
    assert ("graph", "normalize") in set(imported(Path("execution/dispatch.py")))
    assert ("options",) in set(imported(Path("backend.py")))


@pytest.mark.parametrize("path", [p for p in FILES if p.parts[0] == "graph"], ids=str)
def test_the_graph_stage_knows_nothing_of_cuda(path: Path) -> None:
    assert "torch.cuda" not in (PACKAGE / path).read_text()


@pytest.mark.parametrize("path", FILES, ids=str)
def test_only_capture_calls_cuda_graphs(path: Path) -> None:
    if path == Path("execution/capture.py"):
        return
    tree = ast.parse((PACKAGE / path).read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & {"CUDAGraph", "graph_pool_handle", "make_graphed_callables"}, path
