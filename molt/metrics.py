"""Metrics of a step, as they stand in `steps.metrics`, and the clock of the driver's phases."""

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

from molt.schemas.errors import MoltError
from molt.store.fold import Fold


def plan_metrics(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Reward, baseline and lag over the rollouts of a plan; plain JSON values."""
    rewards = [r["reward"] for r in rows if r["in_baseline"]]
    lags = [r["lag_max"] for r in rows if r["lag_max"] is not None]
    by_group: dict[str, list[float]] = {}
    for r in rows:
        if r["in_baseline"]:
            by_group.setdefault(r["group_id"], []).append(r["reward"])
    equal = sum(max(g) - min(g) <= 1e-6 for g in by_group.values())
    return {
        "reward": math.fsum(rewards) / len(rewards) if rewards else None,
        "reward_std": statistics.pstdev(rewards) if rewards else None,
        "reward_max_per_group": statistics.fmean(max(g) for g in by_group.values())
        if by_group
        else None,
        "groups_equal": equal,
        "rollouts_excluded": sum(not r["in_baseline"] for r in rows),
        "lag_max": max(lags, default=None),
        "lag_mean": statistics.fmean(lags) if lags else None,
    }


class StepClock:
    """Seconds of each phase since the last step, and how long nothing has finished."""

    def __init__(self) -> None:
        self._phase, self._since = "start", time.perf_counter()
        self._spent: dict[str, float] = {}
        self._last_news = time.monotonic()

    def start(self, phase: str) -> None:
        """End the current phase and begin another."""
        now = time.perf_counter()
        self._spent[self._phase] = self._spent.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now
        self._last_news = time.monotonic()

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap; begins the next one."""
        self.start(self._phase)
        spent, self._spent = self._spent, {}
        spent.pop("start", None)
        return {name: round(seconds, 4) for name, seconds in spent.items()}

    def check_stuck(self, news: bool, limit_s: float, fold: Fold) -> None:
        """MoltError saying who waits for whom if nothing finished for `limit_s`."""
        if news:
            self._last_news = time.monotonic()
        waited = time.monotonic() - self._last_news
        if waited < limit_s:
            return
        waiting = [
            f"{g.group_id} ({sum(fold.finished(g, r) is not None for r in g.rollout_ids())}/{g.n})"
            for purpose in ("train", "eval")
            for g in fold.open_groups(purpose)
        ]
        raise MoltError(
            f"nothing finished for {waited:.0f} s; waiting for rollouts of "
            f"{', '.join(waiting[:8]) or 'no group'}. See logs/worker-0.log and logs/engine-0.log "
            "in the log's folder; agent.deadline_s bounds a rollout, run.stuck_s this wait"
        )
