"""Replay: execute recorded steps again from the log alone and compare with what was recorded.

Start = the newest complete checkpoint before the first step asked for, or the model's own weights;
every plan from there on is executed in order. Neither vLLM nor Ray takes part. The trainer comes as
a protocol object from `molt`. Where bits cannot agree, the sketches must.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from molt.replay.redo import sketch_gap, sketch_of
from molt.schemas.columns import Row
from molt.schemas.errors import ConfigError
from molt.store.control import lineage_of
from molt.store.fold import MARKER
from molt.store.log import Log

CLOSE = 1e-3
"""Where bits cannot agree: relative tolerance of loss and gradient norm."""
SKETCH_CLOSE = 0.05
"""... and of the weights, relative to how far the step moved them."""


class ReplayTrainer(Protocol):
    """One trainer rank, seen from the log."""

    def load(self, folder: str) -> int: ...

    def execute_plan(self, number: int) -> Any: ...


@dataclass(slots=True)
class History:
    """Plans, steps and checkpoints of one lineage, by step."""

    plans: dict[int, int] = field(default_factory=dict)
    """step -> number of its plan record."""
    planned_in: dict[int, int] = field(default_factory=dict)
    """step -> epoch of its plan: a later one may have executed and recorded it."""
    steps: dict[int, Row] = field(default_factory=dict)
    checkpoints: dict[int, Row] = field(default_factory=dict)
    epochs: list[Row] = field(default_factory=list)

    def epoch_of(self, step: int) -> Row:
        """The epoch that recorded a step; the newest one if its record is missing."""
        row = self.steps.get(step)
        epochs = {e["epoch"]: e for e in self.epochs}
        return epochs[row["epoch"]] if row else self.epochs[-1]

    def check(self, first: int, last: int, *, recorded: bool) -> None:
        """ConfigError unless all these steps are planned and, if asked, recorded too."""
        known = self.plans.keys() & self.steps.keys() if recorded else self.plans.keys()
        missing = [step for step in range(first, last + 1) if step not in known]
        if missing:
            there = f"{min(known)} to {max(known)}" if known else "none"
            word = "recorded" if recorded else "planned"
            raise ConfigError(f"step {missing[0]} is not {word}; {word}: {there}")

    def complete(self, log: Path) -> list[Row]:
        """The checkpoints whose folders are whole, in the order of steps."""
        return [
            r for _, r in sorted(self.checkpoints.items()) if (log / r["path"] / MARKER).exists()
        ]


def history(log: Log) -> History:
    """What the control log says of the newest epoch's lineage."""
    records = log.records()
    lineage = lineage_of(records)
    found = History()
    for record in records:
        if not lineage.holds(record.n):
            continue
        if record.kind == "plan":
            found.plans[record.header["step"]] = record.n
            found.planned_in[record.header["step"]] = record.epoch
        elif record.kind == "step":
            found.steps[record.rows[0]["step"]] = record.rows[0]
        elif record.kind == "checkpoint":
            found.checkpoints[record.rows[0]["step"]] = record.rows[0]
        elif record.kind == "epoch":
            found.epochs.append(record.rows[0])
    return found


def restore(
    log: Log,
    trainer: ReplayTrainer,
    found: History,
    last: int,
    check: Callable[[int, Any], None] = lambda step, outcome: None,
) -> int:
    """Bring the trainer to the state after step `last`: checkpoint, then the plans behind it.

    `check(step, outcome)` sees every step that is executed. Returns the checkpoint's step, 0 for
    the model's own weights. ConfigError if a plan that is needed is not in the lineage.
    """
    usable = [row for row in found.complete(log.path) if row["step"] <= last]
    start = trainer.load(str(log.path / usable[-1]["path"])) if usable else 0
    found.check(start + 1, last, recorded=False)
    for step in range(start + 1, last + 1):
        check(step, trainer.execute_plan(found.plans[step]))
    return start


def replay(
    log: Log,
    trainer: ReplayTrainer,
    found: History,
    first: int,
    last: int,
    differs: str | None = None,
    execute: Callable[[int], Any] | None = None,
) -> Iterator[Row]:
    """Execute the steps up to `last`; yields one comparison per step from `first` on.

    `differs` says why bits cannot agree here (None: they must); `execute(plan record's number)`
    replaces the trainer's own execution of the steps asked for, and must end in the same state.
    ConfigError if a plan or step record that is needed is not in the lineage.
    """
    found.check(first, last, recorded=True)
    restore(log, trainer, found, first - 1)
    for step in range(first, last + 1):
        outcome = (execute or trainer.execute_plan)(found.plans[step])
        yield compare(found.steps[step], outcome, differs, found.steps.get(step - 1))


def compare(
    recorded: Row, outcome: Any, differs: str | None = None, before: Row | None = None
) -> Row:
    """The JSON of one step: recorded and recomputed state digest, loss and gradient norm.

    With a reason why digests cannot agree, `ok` asks for the sketches, losses and gradient norms to
    be close instead; without sketches (of this step and of `before` it) for the last two alone.
    """
    values: dict[str, Row] = {
        name: {"recorded": recorded[name], "recomputed": getattr(outcome, name)}
        for name in ("state_digest", "loss", "grad_norm")
    }
    for pair in values.values():
        pair["equal"] = pair["recorded"] == pair["recomputed"]
    ok = all(pair["equal"] for pair in values.values())
    row: Row = {"ok": ok, "step": recorded["step"], **values}
    if differs is None or ok:
        return row
    gap = sketch_gap(outcome.sketch, sketch_of(recorded), sketch_of(before) if before else None)
    row["ok"] = (gap is None or gap <= SKETCH_CLOSE) and all(
        math.isclose(row[n]["recorded"], row[n]["recomputed"], rel_tol=CLOSE, abs_tol=CLOSE)
        for n in ("loss", "grad_norm")
    )
    row["reason"] = differs + ("; there are no sketches to compare" if gap is None else "")
    row["sketch"] = gap if gap is None else {"gap": gap, "limit": SKETCH_CLOSE}
    return row
