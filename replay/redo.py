"""Redo: load checkpoint T, execute the plans after T again, compare with what was recorded.

The trainer comes as a protocol object, so the same code serves recovery, `molt replay` and tests.
Nothing is sampled and nothing is written here: the caller writes a step whose record is missing.
"""

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from molt.schemas.errors import RecoveryError
from molt.schemas.text import canonical_json


class StepOutcome(Protocol):
    """What executing a plan returns."""

    @property
    def state_digest(self) -> str: ...


PlanExecutor = Callable[[int], Awaitable[Any]]
"""Executes the plan of a control record's number on every rank; returns rank 0's outcome."""


def plan_digest(rows: Sequence[Mapping[str, Any]]) -> str:
    """32 hex digits over a plan's rows as read, `at` apart: a `step` names what it executed."""
    plain = [{k: v for k, v in row.items() if k != "at"} for row in rows]
    for row in plain:
        row["chain_digest"] = (row.get("chain_digest") or b"").hex()
    return hashlib.blake2b(canonical_json(plain).encode(), digest_size=16).hexdigest()


def check_digest(step: int, outcome: StepOutcome, recorded: str | None) -> None:
    """RecoveryError if a recomputed `state_digest` is not the recorded one."""
    if recorded is None or outcome.state_digest == recorded:
        return
    raise RecoveryError(
        f"redo of step {step}: state_digest {outcome.state_digest}, recorded {recorded}. The state "
        "is not the one that was trained; check that threads, world size, packages and the "
        "algorithm's settings are those of the epoch that recorded it "
        '(`molt sql LOG "select * from epochs"`)'
    )


async def redo(
    executor: PlanExecutor, plans: Mapping[int, int], recorded: Mapping[int, str], after: int
) -> AsyncIterator[tuple[int, StepOutcome]]:
    """Execute the plans of the steps after `after`, in order; yields (step, outcome).

    `plans` maps step -> number of the plan record, `recorded` step -> state_digest. A step without
    a record (the driver died before it was written) is executed and left to the caller to record.
    """
    for step in sorted(s for s in plans if s > after):
        outcome = await executor(plans[step])
        check_digest(step, outcome, recorded.get(step))
        yield step, outcome
