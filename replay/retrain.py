"""Offline runs: plans over rows that other logs hold, executed by the same trainer, step by step.

A fork executes a parent's plans with another algorithm; a retraining plans rollouts that SQL chose,
pass after pass. Both have a control log and checkpoints of their own and recover like any run:
checkpoint, then redo of the plans behind it, which must give the recorded digests (I4, I6).
"""

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from molt.replay import folders
from molt.replay.redo import check_digest, step_row
from molt.replay.replay import History, ReplayTrainer, history, restore
from molt.schemas.columns import Row
from molt.store.control import Record, read_record
from molt.store.log import Log

Planner = Callable[[int], tuple[Row, list[Row]]]
"""step -> (header without `epoch`, rows); the same for the same step, whenever it is called."""

Say = Callable[[int, Row], None]
"""(step, step record's row) after each step."""


class OfflineTrainer(ReplayTrainer, Protocol):
    """What an offline run asks of a trainer rank."""

    def save(self, folder: str) -> list[tuple[str, int]]: ...

    def state_digest(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRun:
    """One epoch of an offline run: `log` is its own, opened by an epoch record already."""

    log: Log
    trainer: OfflineTrainer
    plan: Planner
    describe: Callable[[Sequence[Row]], Row]
    """Plan rows -> metrics of the step that are not the trainer's."""
    every: int
    """Steps between checkpoints."""
    keep: int
    say: Say = lambda step, row: None

    def recover(self, start: Callable[[], int] | None = None) -> int:
        """The last step that was planned, its state in the trainer; steps are recorded again only
        where their record is missing. `start` makes the state of a new run and returns its step.
        """
        found = history(self.log)
        last = max(found.plans, default=0)
        if not found.checkpoints and start is not None:
            begun = start()
            if begun:
                self.checkpoint(begun, self.trainer.state_digest())
            found = history(self.log)
            last = max(last, begun)
        restore(self.log, self.trainer, found, last, lambda s, o: self._redone(found, s, o))
        return last

    def _redone(self, found: History, step: int, outcome: Any) -> None:
        if step not in found.steps:
            self.record(read_record(self.log.path, found.plans[step]), outcome)
        else:
            check_digest(step, outcome.state_digest, found.steps[step]["state_digest"])

    def run(self, after: int, last: int) -> None:
        """Plan, execute and record the steps after `after`, in order."""
        for step in range(after + 1, last + 1):
            header, rows = self.plan(step)
            number = self.log.control.put("plan", rows, header)
            outcome = self.trainer.execute_plan(number)
            self.record(read_record(self.log.path, number), outcome)
            if step == last or step % self.every == 0:
                self.checkpoint(step, outcome.state_digest)

    def record(self, plan: Record, outcome: Any) -> None:
        """Write the step record of an executed plan."""
        metrics = {**self.describe(plan.rows), **outcome.metrics}
        step = plan.header["step"]
        row = step_row(self.log.control.epoch, step, plan.rows, outcome, metrics)
        self.log.control.put("step", [row])
        self.say(step, row)

    def checkpoint(self, step: int, state_digest: str) -> None:
        """Files, marker, record; all but the newest `keep` checkpoints go."""
        log = self.log.path
        with folders.new_folder(log, self.log.control.epoch, step) as path:
            files = self.trainer.save(str(log / path))
            self.log.control.put("checkpoint", [folders.seal(log, path, files, state_digest)])
        folders.prune(log, [*history(self.log).checkpoints.values()], self.keep)


# -- what is planned -------------------------------------------------------------------------------


def forked_plans(
    parent: Log, found: History, header: Row, finish: Callable[[list[Row]], list[Row]]
) -> Planner:
    """The parent's plans, their rows addressed in the parent (log 1, its own sources behind it).

    `header` replaces keys of the recorded one; `finish` sets the advantages.
    """

    def plan(step: int) -> tuple[Row, list[Row]]:
        record = read_record(parent.path, found.plans[step])
        rows = [_readdressed(row) for row in record.rows]
        kept = {k: v for k, v in record.header.items() if k != "epoch"}
        return {**kept, **header}, finish(rows)

    return plan


def _readdressed(row: Row) -> Row:
    def refs(items: Sequence[Mapping[str, Any]]) -> list[Row]:
        return [{**ref, "log": ref["log"] + 1} for ref in items]

    branches = [{**b, "refs": refs(b["refs"])} for b in row["branches"]]
    changed = {"branches": branches, "reward_refs": refs(row["reward_refs"])}
    return {k: v for k, v in {**row, **changed}.items() if k != "at"}


def n_steps(groups: Sequence[Any], per_step: int, passes: int) -> int:
    return passes * math.ceil(len(groups) / per_step)


def passes_over(
    groups: Sequence[list[Row]],
    per_step: int,
    header: Row,
    finish: Callable[[list[Row]], list[Row]],
) -> Planner:
    """All groups once per pass, `per_step` at a time, in an order that H(seed, pass) decides."""
    per_pass = n_steps(groups, per_step, 1)

    def plan(step: int) -> tuple[Row, list[Row]]:
        data_pass, batch = divmod(step - 1, per_pass)
        raw = hashlib.blake2b(f"{header['seed']}/{data_pass}".encode(), digest_size=8).digest()
        order = list(range(len(groups)))
        random.Random(int.from_bytes(raw, "little")).shuffle(order)
        chosen = order[batch * per_step : (batch + 1) * per_step]
        rows = [row for k in chosen for row in finish(groups[k])]
        return {**header, "step": step, "data_pass": data_pass}, rows

    return plan
