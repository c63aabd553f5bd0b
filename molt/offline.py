"""Working from a recorded log: its configuration, its model, a trainer without Ray and vLLM."""

import json
import os
from typing import Any

from molt.cluster import free_port
from molt.config import Config, build
from molt.model import folder_digests, resolve_model
from molt.schemas.errors import ConfigError
from molt.store import Log
from molt.train.settings import ENVIRONMENT, trainer_settings


def recorded_config(epoch: dict[str, Any]) -> Config:
    """The configuration of an epoch record."""
    config: Config = build(Config, json.loads(epoch["config"]), "")
    return config


def open_trainer(log: Log, epoch: dict[str, Any]) -> Any:
    """A started trainer with the settings and the model of `epoch`; ConfigError if they differ.

    One rank only: a run of several ranks computes other bits on one.
    """
    os.environ.update(ENVIRONMENT)
    config = recorded_config(epoch)
    if epoch["world_size"] != 1:
        raise ConfigError(
            f"this epoch trained on {epoch['world_size']} ranks; replay runs on one rank so far, "
            "where sums are taken in another order and bits differ"
        )
    folder = resolve_model(config.model)
    found = folder_digests(folder)["model"]
    if found != epoch["digests"]["model"]:
        raise ConfigError(
            f"model {config.model} has digest {found}, the run started from "
            f"{epoch['digests']['model']}: these are not the weights it began with"
        )
    from molt.train.actor import TrainerActor

    trainer = TrainerActor(
        trainer_settings(config, folder),
        0,
        1,
        f"tcp://127.0.0.1:{free_port()}",
        None,
        str(log.path),
    )
    trainer.start()
    return trainer
