"""Checkpoint folders: all ranks' files, then the marker, then the control record; pruning.

A checkpoint counts when its folder holds `COMPLETE` *and* its record is in the log; anything else
is left over from a crash or a full disk and is removed.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from molt.schemas.columns import Row
from molt.schemas.text import canonical_json
from molt.store.files import fsync_dir, publish
from molt.store.fold import MARKER


@contextlib.contextmanager
def new_folder(log: Path, epoch: int, step: int) -> Iterator[str]:
    """A new folder, as its path in the log. On an error (a full disk) nothing of it stays."""
    path = f"checkpoints/{epoch}-{step}"
    folder = log / path
    _remove(folder)
    folder.mkdir(mode=0o700)
    fsync_dir(folder.parent)
    try:
        yield path
    except BaseException:
        _remove(folder)
        raise


def seal(
    log: Path,
    path: str,
    files: Sequence[tuple[str, int]],
    state_digest: str | None,
    metric: float | None = None,
) -> Row:
    """Write the marker behind `files` (name, bytes), durable already; returns the record's row.

    `metric` decides which checkpoint is the best.
    """
    epoch, step = map(int, path.rpartition("/")[2].split("-"))
    row = {
        "epoch": epoch,
        "step": step,
        "path": path,
        "bytes": sum(size for _, size in files),
        "files": [{"name": name, "bytes": size} for name, size in files],
        "state_digest": state_digest,
    }
    marker = {k: row[k] for k in ("epoch", "step", "files", "state_digest")}
    publish(log / path / MARKER, canonical_json({**marker, "metric": metric}).encode())
    return row


def prune(log: Path, rows: Sequence[Row], keep: int) -> None:
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
