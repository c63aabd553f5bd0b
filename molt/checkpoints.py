"""Checkpoints: all ranks' files, then the marker, then the control record; pruning of old ones.

A checkpoint counts when its folder holds `COMPLETE` *and* its record is in the log; anything else
is left over from a crash or a full disk and is removed.
"""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molt.replay.redo import same_weights, sketch_of
from molt.replay.replay import History
from molt.schemas.columns import Row
from molt.schemas.errors import RecoveryError, TrainerError
from molt.schemas.text import canonical_json
from molt.store.files import fsync_dir, publish

if TYPE_CHECKING:
    from molt.loop import Run

MARKER = "COMPLETE"


async def load(
    run: "Run", found: History, same_bits: Callable[[Row], bool]
) -> tuple[int, str | None]:
    """Load the newest sound checkpoint of the lineage: (step, state_digest of the state now).

    (0, None) = the model's own weights. One that cannot be read, or whose state is not the recorded
    one, is passed over with a word: the plans after an older one are simply executed again. A
    checkpoint of another world size has other digests: its weights are compared by their sketch.
    """
    rows = [found.checkpoints[step] for step in sorted(found.checkpoints, reverse=True)]
    complete = [r for r in rows if (run.log.path / r["path"] / MARKER).exists()]
    for row in complete:
        try:
            with run.screen.phase(f"loading the checkpoint of step {row['step']}"):
                await run.cluster.on_trainers("load", str(run.log.path / row["path"]))
                digest = await run.cluster.on_trainers("state_digest")
        except TrainerError as error:
            run.screen.say(f"{row['path']} cannot be read: {error}")
            continue
        if same_bits(row):
            sound = digest == row["state_digest"]
        else:
            recorded = sketch_of(found.steps[row["step"]])
            sound = recorded is not None and same_weights(
                await run.cluster.on_trainers("sketch"), recorded
            )
        if sound:
            return row["step"], digest
        run.screen.say(
            f"{row['path']} is damaged: its state is {digest}, recorded {row['state_digest']}"
        )
    if complete:
        raise RecoveryError(
            f"none of the {len(complete)} checkpoints in {run.log.path / 'checkpoints'} can be "
            "used. Restore one from a copy, or remove their folders: the run then starts from the "
            "model's own weights and executes all plans again"
        )
    return 0, None


async def save(run: "Run", metric: float | None) -> None:
    """Write the checkpoint of `run.step`: files fsynced by every rank, marker, record, pruning.

    `metric` decides which one is the best. On an error (a full disk) nothing of it stays.
    """
    path = f"checkpoints/{run.epoch}-{run.step}"
    folder = run.log.path / path
    _remove(folder)
    folder.mkdir(mode=0o700)
    fsync_dir(folder.parent)
    try:
        files = await run.cluster.on_trainers("save", str(folder))
        row = {
            "epoch": run.epoch,
            "step": run.step,
            "path": path,
            "bytes": sum(size for _, size in files),
            "files": [{"name": name, "bytes": size} for name, size in files],
            "state_digest": run.state_digest,
        }
        marker = {k: row[k] for k in ("epoch", "step", "files", "state_digest")}
        publish(folder / MARKER, canonical_json({**marker, "metric": metric}).encode())
        run.log.control.put("checkpoint", [row])
    except BaseException:
        _remove(folder)
        raise
    run.fold.update()
    prune(run.log.path, run.fold.checkpoints, run.config.checkpoint.keep)


def prune(log: Path, rows: list[Row], keep: int) -> None:
    """Delete all but the newest `keep` checkpoints of this lineage and the best one by metric."""
    complete = [log / row["path"] for row in rows if (log / row["path"] / MARKER).exists()]
    scored = [(m, i) for i, folder in enumerate(complete) if (m := _metric(folder)) is not None]
    best = complete[max(scored)[1]] if scored else None
    for folder in complete[:-keep]:
        if folder != best:
            _remove(folder)


def sweep(log: Path, paths: set[str]) -> list[str]:
    """Remove checkpoint folders without a record: what a crash in mid-write left behind."""
    left = [f for f in (log / "checkpoints").iterdir() if f"checkpoints/{f.name}" not in paths]
    for folder in left:
        _remove(folder)
    return [folder.name for folder in left if not folder.name.startswith(".")]


def _metric(folder: Path) -> float | None:
    value: Any = json.loads((folder / MARKER).read_bytes()).get("metric")
    return None if value is None else float(value)


def _remove(folder: Path) -> None:
    """Out of sight at once, then deleted."""
    if not folder.exists():
        return
    gone = folder.with_name(f".retired-{folder.name.removeprefix('.retired-')}")
    if gone != folder:
        folder.rename(gone)
        fsync_dir(gone.parent)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(gone)
