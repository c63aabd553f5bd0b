"""Checkpoints of the trainer's state: torch DCP files, durable before `save` returns.

Every rank writes its own shards; loading reshards, so another world size may read them. The
COMPLETE marker is the driver's: it is written after all ranks have returned from here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from molt.schemas.errors import TrainerError
from molt.store.files import fsync_dir


def save(folder: Path, state: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Write `state` (name -> tensor or DTensor) into `folder`, fsynced. Collective.

    Returns (file relative to `folder`, bytes) of all files, the same on every rank. Raises
    TrainerError when they cannot be written (a full disk).
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    try:
        dcp_save(dict(state), storage_writer=writer)
    except (OSError, RuntimeError, CheckpointException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise TrainerError(
            f"checkpoint {folder} cannot be written: {reason}; free some space, then start the "
            "same command again: the plans since the last checkpoint are redone"
        ) from error
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "COMPLETE")
    for path in (folder, folder.parent):
        fsync_dir(path)
    dist.barrier()
    return [(str(path.relative_to(folder)), path.stat().st_size) for path in files]


def load(folder: Path, state: Mapping[str, Any]) -> None:
    """Fill the tensors of `state` in place from `folder`. Collective.

    Raises TrainerError when the folder does not hold exactly such a state (another model, a file
    that is missing or cut).
    """
    if not (folder / ".metadata").is_file():
        raise TrainerError(f"checkpoint {folder} has no .metadata; start from an older checkpoint")
    try:
        dcp_load(dict(state), storage_reader=FileSystemReader(folder))
    except (OSError, RuntimeError, ValueError, KeyError, CheckpointException) as error:
        reason = str(error).strip().splitlines()[-1]
        raise TrainerError(
            f"checkpoint {folder} cannot be loaded: {reason}; start from an older checkpoint "
            "(the plans after it are redone) or check that the model is the same"
        ) from error


def trainer_state(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, step: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Everything a step depends on, by flat names: parameters, moments, counters.

    Random numbers and schedules are functions of (seed, step, rank), so the step counter stands
    for all of them.
    """
    state = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        for kind, value in optimizer.state[parameter].items():
            state[f"optimizer.{kind}.{name}"] = value
    state["trainer.step"] = step
    return state
