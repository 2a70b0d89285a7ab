"""The benchmark command on a CPU: its table, its file, its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from fx_prefill.__main__ import main
from fx_prefill.bench.models import SHAPES


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    kind, given = SHAPES["qwen3-0.6b"]
    small = {
        **given,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
    }
    monkeypatch.setitem(SHAPES, "tiny", (kind, small))
    return "tiny"


@pytest.mark.parametrize("cache", [False, True])
def test_the_command_prints_a_table_and_saves_the_figures(
    tiny: str, cache: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    arguments = ["bench", "--model", tiny, "--layers", "2", "--device", "cpu", "--repeats", "2"]
    arguments += ["--dtype", "float32", "--lengths", "20", "100", "--json", str(file)]
    arguments += ["--option", "max_tokens=64", *(["--cache"] if cache else [])]
    assert main(arguments) == 0
    result = json.loads(file.read_text())
    assert [row["tokens"] for row in result["rows"]] == [20, 100]
    assert [row["bucket"] for row in result["rows"]] == [32, None]
    for row in result["rows"]:
        assert row["error"] < 1e-5
        assert min(row["floor"], row["ours"], row["direct"], row["baselines"]["eager"]["wall"]) > 0
        assert row["baselines"]["eager"]["error"] == 0
    assert result["setup"]["buckets"] == 4
    table = capsys.readouterr().out
    assert "ours/floor" in table and "20      32" in table and "eager" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such-model"], "no model 'no-such-model'"),
        (["--model", "qwen3-0.6b", "--lengths", "1"], "at least 2"),
        (["--model", "qwen3-0.6b", "--lengths", "few"], "at least 2"),
        (["--model", "qwen3-0.6b", "--baselines", "magic"], "no baseline magic"),
        (["--model", "qwen3-0.6b", "--device", "tpu"], "accepted: cpu, cuda"),
        (["--model", "qwen3-0.6b", "--option", "novalue"], "NAME=VALUE"),
        (["--model", "qwen3-0.6b", "--option", "foo=1"], "unknown option 'foo'"),
        (["--model", "qwen3-0.6b", "--layers", "0"], "at least 1"),
        (["--model", "qwen3-0.6b", "--repeats", "0"], "at least 1"),
        (["--model", "qwen3-0.6b", "--json", "/no/such/place/x.json"], "no such directory"),
    ],
)
def test_bad_arguments_say_what_is_accepted(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
