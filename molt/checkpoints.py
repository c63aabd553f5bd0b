"""Checkpoints: all ranks' files, then the marker, then the control record; pruning of old ones.

A checkpoint counts when its folder holds `COMPLETE` *and* its record is in the lineage; anything
else is left-over of a crash and is removed before the folder is used again.
"""

import shutil
from typing import TYPE_CHECKING, Any

from molt.schemas.errors import RecoveryError, TrainerError
from molt.schemas.text import canonical_json
from molt.store import Log
from molt.store.files import fsync_dir, publish
from molt.store.fold import Fold

if TYPE_CHECKING:
    from molt.loop import Run

MARKER = "COMPLETE"


async def load(run: "Run") -> dict[str, Any] | None:
    """Load the newest sound checkpoint of the lineage; None to start from the model's weights.

    One that cannot be read, or whose state has another digest than its record, is passed over with
    a word: the plans after an older one are simply executed again.
    """
    complete = [r for r in run.fold.checkpoints if (run.log.path / r["path"] / MARKER).exists()]
    for row in reversed(complete):
        try:
            with run.screen.phase(f"loading the checkpoint of step {row['step']}"):
                await run.cluster.on_trainers("load", str(run.log.path / row["path"]))
                found = await run.cluster.on_trainers("state_digest")
        except TrainerError as error:
            run.screen.say(f"{row['path']} cannot be read: {error}")
            continue
        if found == row["state_digest"]:
            return row
        run.screen.say(
            f"{row['path']} is damaged: its state is {found}, recorded {row['state_digest']}"
        )
    if complete:
        raise RecoveryError(
            f"none of the {len(complete)} checkpoints in {run.log.path / 'checkpoints'} can be "
            "used. Restore one from a copy, or remove their folders: the run then starts from the "
            "model's own weights and executes all plans again"
        )
    return None


async def save(run: "Run", state_digest: str) -> None:
    """Write the checkpoint of `run.step`: files fsynced by every rank, marker, record, pruning."""
    path = f"checkpoints/{run.epoch}-{run.step}"
    folder = run.log.path / path
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    fsync_dir(folder.parent)
    files = await run.cluster.on_trainers("save", str(folder))
    row = {
        "epoch": run.epoch,
        "step": run.step,
        "path": path,
        "bytes": sum(size for _, size in files),
        "files": [{"name": name, "bytes": size} for name, size in files],
        "state_digest": state_digest,
    }
    marker = {k: row[k] for k in ("epoch", "step", "files", "state_digest")}
    publish(folder / MARKER, canonical_json(marker).encode())
    run.log.control.put("checkpoint", [row])
    run.fold.update()
    prune(run.log, run.fold, run.config.checkpoint.keep)


def prune(log: Log, fold: Fold, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints of this lineage, each out of sight at once."""
    known = [log.path / row["path"] for row in fold.checkpoints]
    complete = [folder for folder in known if (folder / MARKER).exists()]
    for folder in complete[:-keep]:
        gone = folder.with_name(f".retired-{folder.name}")
        folder.rename(gone)
        fsync_dir(gone.parent)
    for left_over in (log.path / "checkpoints").glob(".retired-*"):
        shutil.rmtree(left_over)
