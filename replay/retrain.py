"""What offline runs plan: rows that other logs hold, in plans of their own (I4).

A fork executes a parent's plans with another algorithm; a retraining plans rollouts that SQL chose,
pass after pass. `molt.offline_runs` executes both.
"""

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from molt.replay.replay import History
from molt.schemas.columns import Row
from molt.store.control import read_record
from molt.store.log import Log

Planner = Callable[[int], tuple[Row, list[Row]]]
"""step -> (header without `epoch`, rows); the same for the same step, whenever it is called."""


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
