"""Checkpoints on the driver's side: half-written, full disk, best by metric, pruning, sweeping."""

import asyncio
import errno
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import factories as make
import pytest
from rich.console import Console

from molt import checkpoints
from molt.replay.folders import sweep
from molt.schemas.errors import Fenced, TrainerError
from molt.screen import Screen
from molt.store import Log
from molt.store.fold import COLUMNS, STREAMS, Fold


class Disk:
    """The trainer's end of `save`: writes one file, or half of it and then fails."""

    def __init__(self) -> None:
        self.full = False

    async def on_trainers(self, method: str, folder: str) -> list[tuple[str, int]]:
        file = Path(folder) / "__0_0.distcp"
        file.write_bytes(b"w" * (8 if self.full else 16))
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        return [(file.name, 16)]


def run_of(log: Log, keep: int = 2) -> Any:
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    fold.update()
    return SimpleNamespace(
        log=log,
        fold=fold,
        epoch=1,
        step=0,
        state_digest="",
        cluster=Disk(),
        config=SimpleNamespace(checkpoint=SimpleNamespace(keep=keep)),
        screen=Screen(Console(file=io.StringIO())),
    )


def save(run: Any, step: int, metric: float | None = None) -> None:
    run.step, run.state_digest = step, f"{step:016x}"
    asyncio.run(checkpoints.save(run, metric))


def folders(log: Log) -> set[str]:
    return {f.name for f in (log.path / "checkpoints").iterdir()}


def test_the_newest_and_the_best_are_kept(log: Log) -> None:
    run = run_of(log)
    for step, metric in ((1, 0.1), (2, 0.9), (3, 0.4), (4, None), (5, 0.9), (6, 0.2)):
        save(run, step, metric)
        assert f"1-{step}" in folders(log)
    assert folders(log) == {"1-5", "1-6"}, "equal metrics: the newer one"
    for step in (7, 8):
        save(run, step, 0.3)
    assert folders(log) == {"1-5", "1-7", "1-8"}
    marker = json.loads((log.path / "checkpoints/1-5/COMPLETE").read_bytes())
    assert marker["metric"] == 0.9


def test_a_full_disk_leaves_nothing_half_written(log: Log) -> None:
    run = run_of(log)
    save(run, 1)
    run.cluster.full = True
    with pytest.raises(OSError, match="No space left"):
        save(run, 2)
    assert folders(log) == {"1-1"}
    assert [r["step"] for r in run.fold.checkpoints] == [1]
    run.cluster.full = False
    save(run, 2)
    assert folders(log) == {"1-1", "1-2"} and len(run.fold.checkpoints) == 2


def test_a_driver_that_lost_its_log_in_a_checkpoint_is_fenced(log: Log) -> None:
    """It slept while another one took over and swept the folder that it was writing."""
    run = run_of(log)
    write = run.cluster.on_trainers

    async def sleep(method: str, folder: str) -> Any:
        files = await write(method, folder)
        make.open_epoch(Log.open(log.path))
        assert sweep(log.path, set()) == ["1-1"]
        return files

    run.cluster.on_trainers = sleep
    with pytest.raises(Fenced, match="Another driver has taken over"):
        save(run, 1)
    assert folders(log) == set()


def test_what_a_crash_left_behind_is_swept(log: Log) -> None:
    run = run_of(log)
    save(run, 1)
    for name in ("1-2", ".retired-1-0"):
        folder = log.path / "checkpoints" / name
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(b"half")
    known = {row["path"] for row in run.fold.checkpoints}
    assert sweep(log.path, known) == ["1-2"]
    assert folders(log) == {"1-1"}


class Trainers:
    """The trainer's end of `load`: which state a folder holds, as its digest and its sketch."""

    def __init__(self, states: dict[str, tuple[str, dict[str, list[float]]]]) -> None:
        self.states, self.now = states, ("0" * 16, {"w": [0.0, 0.0]})

    async def on_trainers(self, method: str, *args: str) -> Any:
        if method == "load":
            name = Path(args[0]).name
            if name not in self.states:
                raise TrainerError(f"checkpoint {name} cannot be loaded")
            self.now = self.states[name]
        return {"load": 0, "state_digest": self.now[0], "sketch": self.now[1]}[method]


@pytest.mark.parametrize("same_bits", [True, False])
def test_a_checkpoint_counts_by_bits_or_by_sketch(log: Log, same_bits: bool) -> None:
    """Of a torn, a wrong and a sound one the sound one is loaded, at both kinds of settings."""
    from molt.replay.replay import history

    run = run_of(log, keep=9)
    for step in (1, 2, 3):
        values = [5.0, 1.0 + step]
        sketch = [{"name": "w", "values": values}]
        log.control.put("step", [make.step_row(1, step, sketch=sketch)])
        save(run, step)
    shown = {"1-1": ("0" * 15 + "1", {"w": [5.0, 2.0]}), "1-2": ("f" * 16, {"w": [5.0, 2.9]})}
    run.cluster = Trainers(shown)
    asked = []

    async def configure(row: Any) -> None:
        asked.append(row["step"])

    load = checkpoints.load(run, history(log), lambda _: same_bits, configure)
    assert asyncio.run(load) == (1, "0" * 15 + "1")
    assert asked == [3, 2, 1], "before each of them"
    text = run.screen.console.file.getvalue()
    assert "1-3 cannot be read" in text and "1-2 is damaged" in text
