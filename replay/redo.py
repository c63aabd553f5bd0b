"""Redo: load checkpoint T, execute the plans after T again, compare with what was recorded.

The trainer comes as a protocol object, so the same code serves recovery, `molt replay` and tests.
Nothing is sampled and nothing is written here: the caller writes a step whose record is missing.
At equal settings the bits must agree; at others (ranks, threads, packages) the sketches.
"""

import hashlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from molt.replay.sources import log_of
from molt.schemas.columns import Row
from molt.schemas.errors import RecoveryError
from molt.schemas.text import canonical_json

Sketch = Mapping[str, Sequence[float]]
"""Per tensor: its L2 norm, then projections (float64)."""


def plan_digest(rows: Sequence[Mapping[str, Any]]) -> str:
    """32 hex digits over a plan's rows as read, `at` apart: a `step` names what it executed."""
    plain = [{k: v for k, v in row.items() if k != "at"} for row in rows]
    for row in plain:
        row["chain_digest"] = (row.get("chain_digest") or b"").hex()
    return hashlib.blake2b(canonical_json(plain).encode(), digest_size=16).hexdigest()


def plan_counts(rows: Sequence[Row]) -> Row:
    """What a `step` says of the plan that it executed."""
    groups = {(log_of(row), row["group_id"]) for row in rows}
    return {"rollouts": len(rows), "groups": len(groups), "plan": plan_digest(rows)}


def step_row(epoch: int, step: int, rows: Sequence[Row], outcome: Any, metrics: Row) -> Row:
    """The `step` record of a plan's rows; `outcome` is what the trainer returned for them."""
    names = ("updates", "loss", "grad_norm", "n_tokens", "state_digest")
    return {
        "epoch": epoch,
        "step": step,
        **{name: getattr(outcome, name) for name in names},
        "counts": canonical_json(plan_counts(rows)),
        "metrics": canonical_json(metrics),
        "sketch": sketch_rows(outcome.sketch),
    }


def sketch_rows(sketch: Sketch | None) -> list[Row] | None:
    """As the `step` record holds it."""
    return None if sketch is None else [{"name": n, "values": v} for n, v in sketch.items()]


def sketch_of(step: Row) -> Sketch | None:
    """The sketch of a `step` record; None if it was recorded without."""
    rows = step["sketch"]
    return None if rows is None else {row["name"]: list(row["values"]) for row in rows}


def distance(a: Sketch, b: Sketch) -> float:
    """Root of the summed squares of all projections' differences; RecoveryError on other names."""
    if a.keys() != b.keys():
        raise RecoveryError(f"other parameters: {sorted(a.keys() ^ b.keys())[:4]}")
    pairs = (pair for n in a for pair in zip(a[n][1:], b[n][1:], strict=True))
    return math.sqrt(sum((x - y) ** 2 for x, y in pairs))


def same_weights(a: Sketch, b: Sketch) -> bool:
    """True if two sketches differ by no more than the order of summation explains."""
    return distance(a, b) <= 1e-6 * math.sqrt(sum(values[0] ** 2 for values in b.values()))


def check_digest(step: int, found: str, recorded: str) -> None:
    """RecoveryError if a recomputed `state_digest` is not the recorded one."""
    if found != recorded:
        raise RecoveryError(
            f"redo of step {step}: state_digest {found}, recorded {recorded}. The state is not the "
            "one that was trained; check that threads, world size, packages and the algorithm's "
            'settings are those of the epoch that recorded it (`molt sql LOG "select * from '
            'epochs"`)'
        )


def sketch_gap(
    found: Sketch | None, recorded: Sketch | None, before: Sketch | None
) -> float | None:
    """Distance from the recorded weights, relative to how far training moved them from `before`.

    None if a sketch is missing; 0.0 where only the order of summation differs.
    """
    if found is None or recorded is None or before is None:
        return None
    if same_weights(found, recorded):
        return 0.0
    return distance(found, recorded) / max(distance(recorded, before), 1e-30)


def check_sketch(step: int, gap: float | None, limit: float) -> None:
    """RecoveryError above `limit`, or without sketches: then only bits could tell, and these
    settings cannot reproduce them.
    """
    if gap is None:
        raise RecoveryError(
            f"redo of step {step} at other settings than it was trained with needs sketches, and "
            "train.sketch is or was off: resume with the settings of the epoch that recorded it"
        )
    if gap > limit:
        raise RecoveryError(
            f"redo of step {step} at other settings: the weights are {gap:.1%} of the way that "
            f"training had moved them away from the recorded ones (limit {limit:.0%})"
        )


async def redo(
    executor: Callable[[int], Awaitable[Any]],
    plans: Mapping[int, int],
    recorded: Mapping[int, Row],
    after: int,
    *,
    same_bits: Callable[[Row], bool] = lambda _: True,
    before: Sketch | None = None,
    limit: float = 0.0,
) -> AsyncIterator[tuple[int, Any, float | None]]:
    """Execute the plans of the steps after `after`, in order; yields (step, outcome, gap).

    `plans` maps step -> number of the plan record, which `executor` executes on every rank, and
    `recorded` step -> its `step` record. A step without a record (the driver died before it was
    written) is executed and left to the caller to record. Where `same_bits(record)` is false the
    sketches are compared, relative to `before`, the sketch of the state that redo starts from;
    `gap` is then their distance, else None.
    """
    for step in sorted(s for s in plans if s > after):
        outcome, gap = await executor(plans[step]), None
        row = recorded.get(step)
        if row is not None and same_bits(row):
            check_digest(step, outcome.state_digest, row["state_digest"])
        elif row is not None:
            gap = sketch_gap(outcome.sketch, sketch_of(row), before)
            check_sketch(step, gap, limit)
        yield step, outcome, gap
