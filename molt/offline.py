"""Working from a recorded log: its configuration, its model, a trainer without Ray and vLLM."""

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from molt.config import Config, recorded_config
from molt.model import folder_digests, resolve_model
from molt.process import free_port, packages
from molt.replay.replay import History
from molt.schemas.columns import Row
from molt.schemas.errors import ConfigError
from molt.store import Log
from molt.store.control import Record
from molt.train.advantages import advantages
from molt.train.settings import ENVIRONMENT, trainer_settings

if TYPE_CHECKING:
    from molt.replay.assemble import TrainSequence

RECORDED = ("algo.max_lag", "algo.drop_equal", "algo.lag", "algo.refit_every")
"""Settings that decided what a plan holds: executing it again cannot change them."""


ONE_RANK: dict[str, Any] = {"tp_size": 1, "ep_size": 1, "cp_size": 1}


def other_loss(epoch: Row, overrides: Sequence[str]) -> Config:
    """`recorded_config` for executing a recorded plan otherwise; ConfigError for another key."""
    for text in overrides:
        key = text.partition("=")[0].strip()
        if not key.startswith("algo.") or key in RECORDED:
            raise ConfigError(
                f"--set {text}: a recorded plan can be executed with other algo.* settings, but "
                f"not {', '.join(RECORDED)}: they decided which rollouts it holds"
            )
    return recorded_config(epoch, overrides)


def platform_difference(epoch: Row, config: Config) -> str | None:
    """Why a step of this epoch cannot come out bit for bit here; None if it must."""
    here: Row = {"world_size": 1, "threads": config.train.threads, "packages": packages()}
    there: Row = {**{k: epoch[k] for k in here}, "packages": json.loads(epoch["packages"])}
    differing = {k: (there[k], here[k]) for k in ("world_size", "threads") if there[k] != here[k]}
    for name in sorted(there["packages"].keys() & here["packages"].keys()):
        if name in ("torch", "nemo-automodel", "transformers"):
            pair = there["packages"][name], here["packages"][name]
            differing |= {name: pair} if pair[0] != pair[1] else {}
    if not differing:
        return None
    told = ", ".join(f"{name} was {a}, is {b}" for name, (a, b) in differing.items())
    return f"sums are taken in another order: {told}"


def open_trainer(log: Log, epoch: Row, config: Config | None = None) -> Any:
    """A started `OfflineTrainer` with the settings and the model of `epoch`, on one rank.

    ConfigError if the model's files are not those that the epoch began with.
    """
    os.environ.update(ENVIRONMENT)
    config = config or recorded_config(epoch)
    folder = resolve_model(config.model)
    found = folder_digests(folder)["model"]
    if found != epoch["digests"]["model"]:
        raise ConfigError(
            f"model {config.model} has digest {found}, the run started from "
            f"{epoch['digests']['model']}: these are not the weights it began with"
        )
    from molt.offline_trainer import OfflineTrainer

    address = f"tcp://127.0.0.1:{free_port()}"
    settings = dataclasses.replace(trainer_settings(config, folder), **ONE_RANK)
    trainer = OfflineTrainer(settings, 0, 1, address, None, str(log.path))
    trainer.start()
    return trainer


def group_advantages(rows: Sequence[Row], config: Config) -> list[Row]:
    """Plan rows with the advantages that `config.algo` gives their rewards."""
    algo, out = config.algo, [dict(row) for row in rows]
    for group in dict.fromkeys(row["group_id"] for row in out):
        own = [row for row in out if row["group_id"] == group]
        member = [row["in_baseline"] for row in own]
        values = advantages(
            [row["reward"] for row in own],
            member,
            algo.advantage,
            std_normalize=algo.std_normalize,
        )
        for row, value in zip(own, values, strict=True):
            row["advantage"] = value if row["in_baseline"] else 0.0
    return out


def algorithm_header(config: Config) -> Row:
    """The keys of a plan's header that follow from the algorithm's settings."""
    algo = config.algo
    return {
        "seed": config.run.seed,
        "algorithm": f"{algo.advantage}/{algo.loss}",
        "update_passes": algo.update_passes,
        "mini_batches": algo.mini_batches,
    }


class AsRecorded:
    """A trainer that executes each step with the settings of the epoch that recorded it."""

    def __init__(self, trainer: Any, found: History) -> None:
        self.trainer, self.found = trainer, found
        self._steps = {number: step for step, number in found.plans.items()}

    def load(self, folder: str) -> int:
        step: int = self.trainer.load(folder)
        return step

    def config_of(self, number: int) -> Config:
        """The configuration that the step of this plan was executed with."""
        return recorded_config(self.found.epoch_of(self._steps[number]))

    def execute_plan(self, number: int) -> Any:
        settings = trainer_settings(self.config_of(number), self.trainer.settings.model)
        self.trainer.configure(dataclasses.replace(settings, **ONE_RANK))
        return self.trainer.execute_plan(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Otherwise:
    """A plan as it was, and as another algorithm executes it: per-token values of both.

    Arrays are over the trained tokens, in the order of `sequences`.
    """

    sequences: "list[TrainSequence]"
    before: np.ndarray
    """log pi at the start of the step"""
    recorded: Row
    """{"after", "weight", "advantage"} arrays, and "outcome": of the recorded algorithm"""
    changed: Row | None


def otherwise(trainer: Any, plan: Record, config: Config, other: Config | None) -> Otherwise:
    """Execute `plan` from the trainer's state as recorded, and as `other` would have.

    The trainer ends in the state that the recorded algorithm gives.
    """
    from molt.replay.assemble import assemble

    source = trainer.sources(plan.epoch)
    changed, start = None, trainer.keep_state() if other is not None else None
    if other is not None:
        rows = group_advantages(plan.rows, other)
        altered = dataclasses.replace(plan, rows=rows)
        trainer.configure(trainer_settings(other, trainer.settings.model))
        changed = trainer.traced(plan.header["step"], assemble(source, altered), other.algo.loss)
        trainer.configure(trainer_settings(config, trainer.settings.model))
        trainer.put_state(start)
    sequences = assemble(source, plan)
    recorded = trainer.traced(plan.header["step"], sequences, config.algo.loss)
    return Otherwise(
        sequences=sequences, before=recorded.pop("before"), recorded=recorded, changed=changed
    )


def save_weights(trainer: Any, folder: str | Path) -> None:
    """The trainer's weights as a checkpoint folder that transformers and vLLM open."""
    from safetensors.torch import save_file

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for file in Path(trainer.settings.model).iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin", ".gguf"):
            shutil.copy(file, target / file.name)
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in trainer.export()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
