"""Checkpoints: all ranks' files, then the marker, then the control record; pruning of old ones.

A checkpoint counts when its folder holds `COMPLETE` *and* its record is in the lineage; anything
else is left-over of a crash and is removed before the folder is used again.
"""

import shutil
from typing import TYPE_CHECKING, Any

from molt.schemas.text import canonical_json
from molt.store import Log
from molt.store.files import fsync_dir, publish
from molt.store.fold import Fold

if TYPE_CHECKING:
    from molt.loop import Run

MARKER = "COMPLETE"


def latest(log: Log, fold: Fold) -> dict[str, Any] | None:
    """The newest complete checkpoint of the lineage; None to start from the model's weights."""
    for row in reversed(fold.checkpoints):
        if (log.path / row["path"] / MARKER).exists():
            return row
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
