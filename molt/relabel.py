"""Rewards that come after the outcome: late ones and better ones, as revisions in the log.

Nothing is overwritten: the highest revision counts (plans record the row that they used), and an
outcome that is "pending" closes with its first reward.
"""

from molt.schemas.errors import LogCorrupt
from molt.schemas.records import Ref, RewardRow
from molt.store import Log

TRIES = 8


def relabel(
    log: Log,
    rollout_id: str,
    attempt: int,
    name: str,
    value: float | None,
    revision: int,
    source: str,
    *,
    segment: int | None = None,
    token: int | None = None,
) -> Ref:
    """Append one reward durably under the newest epoch; returns its address.

    A new driver may cut off older writers at any moment, and rows behind the cut are invisible:
    then the same row is appended again under the new epoch. Raises SegmentRejected for NaN.

    Example: `relabel(Log.open("runs/demo"), "train-3/0", 0, "human", 1.0, 1, "review")`.
    """
    row = RewardRow(
        rollout_id=rollout_id,
        attempt=attempt,
        segment=segment,
        token=token,
        name=name,
        value=value,
        revision=revision,
        source=source,
    )
    for _ in range(TRIES):
        with log.writer() as writer:
            ticket = writer.append("rewards", row)
        ref = ticket.result()
        if writer.epoch == max((r.epoch for r in log.records() if r.kind == "epoch"), default=0):
            return ref
    raise LogCorrupt(f"{log.path}: a new epoch in each of {TRIES} tries; who starts them?")
