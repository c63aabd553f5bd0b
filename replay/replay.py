"""Replay: execute recorded steps again from the log alone and compare with what was recorded.

Start = the newest complete checkpoint before the first step asked for, or the model's own weights;
every plan from there on is executed in order. Neither vLLM nor Ray takes part. The trainer comes as
a protocol object from `molt`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from molt.schemas.columns import Row
from molt.schemas.errors import RecoveryError
from molt.store.control import lineage_of
from molt.store.log import Log

MARKER = "COMPLETE"


class ReplayTrainer(Protocol):
    """One trainer rank, seen from the log."""

    def load(self, folder: str) -> int: ...

    def execute_plan(self, number: int) -> Any: ...


@dataclass(slots=True)
class History:
    """Plans, steps and checkpoints of one lineage, by step."""

    plans: dict[int, int] = field(default_factory=dict)
    """step -> number of its plan record."""
    steps: dict[int, Row] = field(default_factory=dict)
    checkpoints: dict[int, Row] = field(default_factory=dict)
    epochs: list[Row] = field(default_factory=list)


def history(log: Log, epoch: int | None = None) -> History:
    """What the control log says of a lineage (default: the newest epoch's)."""
    records = log.records()
    lineage = lineage_of(records, epoch)
    found = History()
    for record in records:
        if not lineage.holds(record.n):
            continue
        if record.kind == "plan":
            found.plans[record.header["step"]] = record.n
        elif record.kind == "step":
            found.steps[record.rows[0]["step"]] = record.rows[0]
        elif record.kind == "checkpoint":
            found.checkpoints[record.rows[0]["step"]] = record.rows[0]
        elif record.kind == "epoch":
            found.epochs.append(record.rows[0])
    return found


def replay(
    log: Log, trainer: ReplayTrainer, found: History, first: int, last: int
) -> Iterator[Row]:
    """Execute the steps up to `last`; yields one comparison per step from `first` on.

    Raises RecoveryError if a plan or step record that is needed is not in the lineage.
    """
    for step in range(first, last + 1):
        if step not in found.plans or step not in found.steps:
            raise RecoveryError(f"step {step} is not recorded; recorded: {_range(found)}")
    done = 0
    for step in sorted((s for s in found.checkpoints if s < first), reverse=True):
        folder = log.path / found.checkpoints[step]["path"]
        if (folder / MARKER).exists():
            done = trainer.load(str(folder))
            break
    for step in range(done + 1, last + 1):
        outcome = trainer.execute_plan(found.plans[step])
        if step >= first:
            yield compare(found.steps[step], outcome)


def compare(recorded: Row, outcome: Any) -> Row:
    """The JSON of one step: recorded and recomputed state digest, loss and gradient norm."""
    values = {
        name: {"recorded": recorded[name], "recomputed": getattr(outcome, name)}
        for name in ("state_digest", "loss", "grad_norm")
    }
    for pair in values.values():
        pair["equal"] = pair["recorded"] == pair["recomputed"]
    ok = all(pair["equal"] for pair in values.values())
    return {"ok": ok, "step": recorded["step"], **values}


def _range(found: History) -> str:
    steps = sorted(found.steps)
    return f"{steps[0]} to {steps[-1]}" if steps else "none"
