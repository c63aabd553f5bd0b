"""Working from a recorded log: its configuration, its model, a trainer without Ray and vLLM."""

import dataclasses
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from molt.config import Config, recorded_config
from molt.model import folder_digests, resolve_model
from molt.process import packages, rendezvous
from molt.replay.assemble import TrainSequence, assemble
from molt.replay.replay import History
from molt.replay.sources import log_of
from molt.schemas.columns import Row
from molt.schemas.errors import ConfigError
from molt.store import Log
from molt.store.control import Record
from molt.train.advantages import advantages
from molt.train.settings import ENVIRONMENT, TrainerSettings, trainer_settings

RECORDED = ("algo.max_lag", "algo.drop_equal", "algo.lag", "algo.refit_every")
"""Settings that decided what a plan holds: executing it again cannot change them."""


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

    alone = one_rank(config, folder)
    trainer = OfflineTrainer(alone, 0, 1, rendezvous(), None, str(log.path))
    trainer.start()
    return trainer


def one_rank(config: Config, model_folder: str) -> TrainerSettings:
    """The settings of a trainer that is alone, whatever the ranks of `config`."""
    settings = trainer_settings(config, model_folder)
    return dataclasses.replace(settings, tp_size=1, ep_size=1, cp_size=1)


def group_advantages(rows: Sequence[Row], config: Config) -> list[Row]:
    """Plan rows with the advantages that `config.algo` gives their rewards."""
    algo, out = config.algo, [dict(row) for row in rows]
    groups: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in out:
        groups[log_of(row), row["group_id"]].append(row)
    for own in groups.values():
        rewards, member = ([row[name] for row in own] for name in ("reward", "in_baseline"))
        values = advantages(rewards, member, algo.advantage, std_normalize=algo.std_normalize)
        for row, value in zip(own, values, strict=True):
            row["advantage"] = value if row["in_baseline"] else 0.0
    return out


def as_saved(trainer: Any, found: History, checkpoint: Row) -> None:
    """Give the trainer's state the parts that a checkpoint's has: `algo.kl_target` decides."""
    epoch = next(e for e in found.epochs if e["epoch"] == checkpoint["epoch"])
    kl_target = recorded_config(epoch).algo.kl_target
    trainer.configure(dataclasses.replace(trainer.settings, kl_target=kl_target))


class AsRecorded:
    """A trainer that executes each step with the settings of the epoch that planned it."""

    def __init__(self, trainer: Any, found: History) -> None:
        self.trainer, self.found = trainer, found
        self._steps = {number: step for step, number in found.plans.items()}
        # A coefficient that adapts begins where its own epoch began, not where the newest one did.
        trainer.configure(dataclasses.replace(trainer.settings, kl_target=None))

    def load(self, folder: str) -> int:
        saved = next(r for r in self.found.checkpoints.values() if folder.endswith(r["path"]))
        as_saved(self.trainer, self.found, saved)
        step: int = self.trainer.load(folder)
        return step

    def config_of(self, number: int) -> Config:
        """The configuration that the step of this plan was executed with."""
        planned_in = self.found.planned_in[self._steps[number]]
        return recorded_config(next(e for e in self.found.epochs if e["epoch"] == planned_in))

    def execute_plan(self, number: int) -> Any:
        self.trainer.configure(one_rank(self.config_of(number), self.trainer.settings.model))
        return self.trainer.execute_plan(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Otherwise:
    """A plan as it was, and as another algorithm executes it."""

    sequences: list[TrainSequence]
    columns: dict[str, np.ndarray]
    """Over the trained tokens, in the order of `sequences`: "before" = log pi at the start of the
    step; "after", "weight", "advantage", and the same of the other algorithm as "other_...".
    """
    outcome: Any
    other: Any
    """None without another algorithm."""


def otherwise(trainer: Any, plan: Record, config: Config, other: Config | None) -> Otherwise:
    """Execute `plan` from the trainer's state as recorded, and as `other` would have.

    The trainer ends in the state that the recorded algorithm gives.
    """
    source, folder = trainer.sources(plan.epoch), trainer.settings.model
    step, changed, own = plan.header["step"], {}, one_rank(config, folder)
    trainer.configure(own)
    if other is not None:
        start = trainer.keep_state()
        altered = dataclasses.replace(plan, rows=group_advantages(plan.rows, other))
        trainer.configure(one_rank(other, folder))
        changed = trainer.traced(step, assemble(source, altered))
        trainer.configure(own)
        trainer.put_state(start)
    sequences = assemble(source, plan)
    found = trainer.traced(step, sequences)
    outcome, other_outcome = found.pop("outcome"), changed.pop("outcome", None)
    columns = found | {f"other_{k}": v for k, v in changed.items() if k != "before"}
    return Otherwise(sequences=sequences, columns=columns, outcome=outcome, other=other_outcome)


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
