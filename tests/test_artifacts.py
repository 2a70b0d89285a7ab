"""What one process compiled, the next one does not: PyTorch's caches work for segments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CODE = """
import json, sys, torch, fx_prefill
from torch._dynamo.utils import counters
sys.path.insert(0, sys.argv[1])
from harness import Around, rows
from test_capture_attention import SelfAttention

artifacts = sys.argv[2]
if sys.argv[3] == "second":
    torch.compiler.load_cache_artifacts(open(artifacts, "rb").read())
module = Around(SelfAttention(is_causal=True))
compiled = fx_prefill.compile(
    module, max_tokens=64, compiler="inductor", capture_attention=True, strict=True
)
with torch.no_grad():
    torch.testing.assert_close(module(rows(20)), module.forward(rows(20)), rtol=1e-4, atol=1e-5)
if sys.argv[3] == "first":
    open(artifacts, "wb").write(torch.compiler.save_cache_artifacts()[0])
print(json.dumps({name: dict(counters[name]) for name in ("inductor", "aot_autograd")}))
"""


def start(which: str, cache: Path, artifacts: Path) -> dict[str, dict[str, int]]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(Path(__file__).parent), str(artifacts), which],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_a_second_start_with_saved_artifacts_compiles_nothing(tmp_path: Path) -> None:
    artifacts = tmp_path / "artifacts"
    first = start("first", tmp_path / "one", artifacts)
    assert first["inductor"]["fxgraph_cache_miss"] == 2, "two distinct segments"
    second = start("second", tmp_path / "other", artifacts)
    assert second["inductor"].get("fxgraph_cache_miss", 0) == 0
    assert second["aot_autograd"].get("autograd_cache_miss", 0) == 0
    assert second["aot_autograd"].get("autograd_cache_bypass", 0) == 0
    assert second["aot_autograd"]["autograd_cache_hit"] == 2
