"""Where metrics go besides the log: TensorBoard and Weights & Biases (offline), both optional.

The log stays the source; a sink that is missing or fails is an error at the start, never later.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from molt.config import Config
from molt.schemas.errors import ConfigError


class Sinks:
    """The sinks of `run.sinks`; their files lie in the log's folder."""

    def __init__(self, config: Config) -> None:
        self._tensorboard: Any = None
        self._wandb: Any = None
        for name in config.run.sinks:
            if name == "tensorboard":
                module = _package("tensorboard", "torch.utils.tensorboard")
                folder = Path(config.run.dir) / "tensorboard"
                self._tensorboard = module.SummaryWriter(str(folder))
            elif name == "wandb":
                wandb = _package("wandb", "wandb")
                self._wandb = wandb.init(
                    mode="offline",
                    settings=wandb.Settings(silent=True, console="off"),
                    dir=config.run.dir,
                    project="molt",
                    name=config.run.name or Path(config.run.dir).name,
                )
            else:
                raise ConfigError(f"run.sinks has '{name}'; known: tensorboard, wandb")

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """All numbers of a step, nested names joined by slashes."""
        numbers = dict(flat(metrics))
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def close(self) -> None:
        """Flush what is buffered."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def flat(metrics: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """("a/b", value) of every number.

    >>> dict(flat({"lag": 1, "kl": {"mean": 0.5, "note": "x"}}))
    {'lag': 1.0, 'kl/mean': 0.5}
    """
    for name, value in metrics.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)


def _package(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"run.sinks has '{name}', but: {error}; pip install {name}") from None
