"""Rollout-level advantages: rewards of one group -> one scalar per rollout, written into the plan.

Runs on the driver, without torch. Invariant: statistics are over rollouts, never over training
rows, so a rollout that became several branches weighs as much as any other.
"""

import math
import statistics
from collections.abc import Callable, Sequence

from molt.schemas.errors import ConfigError, TrainerError

TOLERANCE = 1e-6
"""Rewards of a group that differ by no more than this are equal: the group teaches nothing."""


def _grpo(
    rewards: Sequence[float], baseline: Sequence[float], member: Sequence[bool]
) -> list[float]:
    """r - mean(baseline); Shao et al. 2024 (DeepSeekMath), section 4.1, before the division."""
    mean = math.fsum(baseline) / len(baseline)
    return [reward - mean for reward in rewards]


def _rloo(
    rewards: Sequence[float], baseline: Sequence[float], member: Sequence[bool]
) -> list[float]:
    """r - mean of the *other* baseline members; Ahmadian et al. 2024 (RLOO)."""
    total, n = math.fsum(baseline), len(baseline)
    out = []
    for reward, inside in zip(rewards, member, strict=True):
        others = n - inside
        out.append(reward - (total - inside * reward) / others if others else 0.0)
    return out


ESTIMATORS: dict[str, Callable[..., list[float]]] = {"grpo": _grpo, "rloo": _rloo, "cispo": _grpo}


def zero_variance(rewards: Sequence[float | None]) -> bool:
    """True when all scored rewards of a group are equal within TOLERANCE (also for 0 or 1 of them).

    >>> zero_variance([0.3, 0.30000000000000004, None]), zero_variance([0.0, 0.8])
    (True, False)
    """
    scored = [reward for reward in rewards if reward is not None]
    return not scored or max(scored) - min(scored) <= TOLERANCE


def advantages(
    rewards: Sequence[float | None],
    in_baseline: Sequence[bool],
    name: str = "grpo",
    std_normalize: bool = False,
) -> list[float]:
    """One advantage per rollout of a group.

    `rewards[i]` is None for a rollout that could not be scored: its advantage is 0.0 and it is not
    in the baseline. `in_baseline[i]` says whether rollout i counts in the group's mean (and in its
    standard deviation, the sample one). A group of zero variance gives exactly 0.0 everywhere.
    Raises ConfigError for an unknown estimator, TrainerError for a reward that is not finite and
    for rewards too large to be averaged.

    >>> advantages([1.0, 0.0, 0.0, 1.0], [True] * 4)
    [0.5, -0.5, -0.5, 0.5]
    """
    if name not in ESTIMATORS:
        raise ConfigError(f"algorithm {name!r} is unknown; choose one of {sorted(ESTIMATORS)}")
    for index, reward in enumerate(rewards):
        if reward is not None and not math.isfinite(reward):
            raise TrainerError(
                f"reward {reward} of group member {index} is not finite; record None"
            )
    members = [b and r is not None for b, r in zip(in_baseline, rewards, strict=True)]
    baseline = [r for r, b in zip(rewards, members, strict=True) if b and r is not None]
    if zero_variance(rewards) or not baseline:
        return [0.0] * len(rewards)
    try:
        values = ESTIMATORS[name]([r or 0.0 for r in rewards], baseline, members)
        if std_normalize:
            scale = statistics.stdev(baseline) + TOLERANCE if len(baseline) > 1 else 1.0
            values = [value / scale for value in values]
    except OverflowError:
        worst = max(baseline, key=abs)
        raise TrainerError(
            f"rewards like {worst:g} are too large to be averaged: scale them down"
        ) from None
    return [0.0 if r is None else value for r, value in zip(rewards, values, strict=True)]
