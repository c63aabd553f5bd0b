"""What becomes of a rollout whose tokens are older than the limit: one rule for every reader.

The loop, `molt retrain` (by the step that trained a rollout in its own log) and the SQL macro
`lag_decision` (store/sql.py) give equal answers.
"""

POLICIES = ("wait", "keep", "mask", "drop")
NEARLY = 0.8
"""Share of its token budget from which on a group is worth waiting for."""


def decide(lag: int | None, max_lag: int, policy: str) -> str:
    """ "train", "mask" (train, but not the tokens above `max_lag`) or "drop".

    `lag` is the largest of the rollout's sampled tokens, None without any. `wait` tolerates twice
    the limit: it has waited, and what a group lost by being passed over is bounded.

    >>> [decide(lag, 1, "wait") for lag in (None, 1, 2, 3)]
    ['train', 'train', 'train', 'drop']
    >>> [decide(2, 1, policy) for policy in ("keep", "mask", "drop")]
    ['train', 'mask', 'drop']
    """
    if lag is None or lag <= max_lag or policy == "keep":
        return "train"
    if policy == "mask":
        return "mask"
    return "train" if policy == "wait" and lag <= 2 * max_lag else "drop"


def holds_back(lag_next: int, max_lag: int, progress: float) -> bool:
    """`wait`: True if the next step must wait for this unfinished group.

    `lag_next` is the lag it would have one step later, `progress` the share of its token budget
    that is sampled. A group that is nearly there is waited for at the limit, any group before it
    would be dropped: so nothing is dropped for being slow.
    """
    return lag_next > max_lag and (progress > NEARLY or lag_next > 2 * max_lag)
