"""Metrics of a step, as they stand in `steps.metrics`, and the clock of the driver's phases."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from molt.schemas.errors import MoltError, TrainerError
from molt.store.fold import Fold, Group

Outcome = Mapping[str, Any]
"""A `rollouts` row."""
OFFSET_STEPS = 3
RIGHT = 1.0
"""A rollout counts as solved (pass@1) from this reward on."""


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
        "lags": {str(lag): n for lag, n in sorted(Counter(lags).items())},
        "pass_at_1": statistics.fmean(r >= RIGHT for r in rewards) if rewards else None,
    }


def rollout_metrics(trained: Sequence[Outcome], dropped: Sequence[Outcome]) -> dict[str, Any]:
    """Lengths and truncation of the rollouts that a plan settles, and regenerated tokens of all.

    `lengths.trained` and `.issued` are deciles (10 % to 90 %) of the sampled tokens per rollout;
    issued = trained + dropped since the last step. If they differ, long rollouts are being lost.
    """
    n, lost = ([o["counts"]["sampled"] for o in side] for side in (trained, dropped))
    return {
        "lengths": {
            "mean": statistics.fmean(n) if n else None,
            "max": max(n, default=None),
            "trained": _deciles(n),
            "issued": _deciles([*n, *lost]),
        },
        "truncated": sum(o["status"] == "truncated" for o in trained) / max(len(trained), 1),
        "regenerated_tokens": sum(o["counts"]["regenerated"] for o in (*trained, *dropped)),
    }


def _deciles(lengths: Sequence[int]) -> list[float]:
    if not lengths:
        return []
    found: list[float] = np.quantile(lengths, np.arange(1, 10) / 10).tolist()
    return found


def at_path(metrics: dict[str, Any], path: str) -> float | None:
    """The number at "a.b.c"; None if there is none."""
    found: Any = metrics
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return float(found) if isinstance(found, int | float) else None


class OffsetTest:
    """Stops a run whose logprobs belong to the token before or after (invariant I3 d).

    One step can look so by chance; `OFFSET_STEPS` in a row with the same shift do not. What counts
    is what steps recorded, so a restart changes nothing; a step with too few tokens says nothing.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[int, int]] = []

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take in a recorded step."""
        shift = (metrics.get("offset") or {}).get("shift")
        if shift is not None:
            self._steps = [*self._steps, (step, shift)][1 - OFFSET_STEPS :]

    def check(self, step: int, metrics: Mapping[str, Any]) -> None:
        """TrainerError if `step`, which is not recorded yet, is the last of such a row."""
        found = metrics.get("offset") or {}
        row = [n for n, shift in self._steps if shift == found.get("shift")]
        if found.get("shift") and len(row) == OFFSET_STEPS - 1:
            raise TrainerError(
                f"step {step}: the engine's logprobs fit the trainer's {found['shift']:+d} token "
                f"away (mean gap {found['gap_shifted']:.3g} there, {found['gap']:.3g} in place, "
                f"{found['tokens']} tokens), as in the steps {', '.join(map(str, row))}: they are "
                "shifted, so the step is not recorded. Find what appends them (molt show LOG "
                f"ROLLOUT), then go on from before: --from {row[0] - 1}"
            )


class Meter:
    """What the driver counts between two steps; `take()` hands it over and begins anew."""

    def __init__(self) -> None:
        self.clock = StepClock()
        self._begin()

    def _begin(self) -> None:
        self.drops: Counter[str] = Counter()
        self.dropped: list[Outcome] = []
        self.commit_s: list[float] = []
        """Seconds from append, or put, to durable."""
        self.redone = self.recompute_tokens = self.reissued = 0
        self.trained: Sequence[Outcome] = ()
        """Of the plan; `dropped`: since the last step."""
        self.refit: dict[str, float] = {}
        """`Publisher.parts` of the refit before this step."""
        self.recomputed: dict[str, float] = {}
        """`Publisher.recomputed`: of the tokens whose KV a refit dropped those that were computed
        again, a shared prompt once, and the seconds of the engine's steps that did it."""

    def drop(self, reason: str, outcomes: Sequence[Outcome]) -> None:
        self.drops[reason.partition(":")[0]] += 1
        self.dropped += outcomes

    def take(self) -> dict[str, Any]:
        seconds = self.clock.lap()
        whole = max(sum(seconds.values()), 1e-9)
        waits = seconds.get("generation", 0.0) + seconds.get("evaluation", 0.0)
        empty = dict(self.clock.empty)
        paused = seconds.get("refit", 0.0) - self.refit.get("score_s", 0.0)  # that comes before
        paused = max(paused, empty.pop("refit", 0.0))
        found = {
            **rollout_metrics(self.trained, self.dropped),
            "seconds": seconds,
            "idle": {
                "trainer": round(waits / whole, 4),
                "engines": round((paused + sum(empty.values())) / whole, 4),
            },
            "drops": dict(self.drops),
            "commit_s": {
                "mean": statistics.fmean(self.commit_s) if self.commit_s else None,
                "max": max(self.commit_s, default=None),
            },
            "recompute_tokens": self.recompute_tokens,
            "recomputed": self.recomputed,
            "refit": {name: round(seconds, 4) for name, seconds in self.refit.items()},
            "reissued": self.reissued,
            "redone": self.redone,
        }
        self._begin()
        return found


class StepClock:
    """Seconds of each phase since the last step, and how long nothing has finished."""

    def __init__(self) -> None:
        self._phase, self._since = "start", time.perf_counter()
        self._spent: dict[str, float] = {}
        self._spent_empty: dict[str, float] = {}
        self._playing: int | None = None
        """None until the first call of a worker is told of."""
        self.empty: dict[str, float] = {}
        """Of the last lap, by phase: seconds in which no worker was playing."""
        self._last_news = time.monotonic()
        self._finished = 0

    def start(self, phase: str) -> None:
        """End the current phase and begin another."""
        self._spend()
        self._phase = phase
        self._last_news = time.monotonic()

    def playing(self, change: int) -> None:
        """A call of a worker began (1) or ended (-1): without any, the engines have no work."""
        self._spend()
        self._playing = (self._playing or 0) + change

    def _spend(self) -> None:
        now = time.perf_counter()
        for spent in (self._spent, self._spent_empty)[: 1 + (self._playing == 0)]:
            spent[self._phase] = spent.get(self._phase, 0.0) + now - self._since
        self._since = now

    def lap(self) -> dict[str, float]:
        """Seconds by phase since the last lap; begins the next one."""
        self.start(self._phase)
        spent, self._spent = self._spent, {}
        self.empty, self._spent_empty = self._spent_empty, {}
        for found in (spent, self.empty):
            found.pop("start", None)
        return {name: round(seconds, 4) for name, seconds in spent.items()}

    def check_stuck(self, news: bool, limit_s: float, fold: Fold) -> None:
        """MoltError saying who waits for whom if no rollout finished for `limit_s`.

        `news` = a group was played to its end, whatever is known of its rewards.
        """
        open_groups = [g for purpose in ("train", "eval") for g in fold.open_groups(purpose)]
        missing = {
            g.group_id: [r for r in g.rollout_ids() if fold.finished(g, r) is None]
            for g in open_groups
        }
        finished = sum(g.n - len(missing[g.group_id]) for g in open_groups)
        if news or finished != self._finished:
            self._last_news, self._finished = time.monotonic(), finished
        waited = time.monotonic() - self._last_news
        if waited < limit_s:
            return
        lines = [_who_waits(g, missing[g.group_id]) for g in open_groups if missing[g.group_id]]
        raise MoltError(
            f"nothing finished for {waited:.0f} s. The trainer waits for groups; the groups wait: "
            f"{'; '.join(lines[:8]) or 'none is open'}. A rollout waits for its agent (logs/worker-"
            "*.log), bounded by agent.deadline_s, for its engine (logs/engine-*.log), or, if its "
            "outcome is pending, for its first reward; run.stuck_s bounds this wait"
        )

    def check_hung(self, who: str, began: float, limit_s: float) -> None:
        """MoltError if this phase has waited for `who` since `began` (monotonic) for `limit_s`."""
        waited = time.monotonic() - began
        if waited >= limit_s:
            raise MoltError(
                f"{self._phase} did not end in {waited:.0f} s. The driver waits for {who} (logs/"
                "trainer-*.log, logs/engine-*.log), which hangs or needs longer: run.stuck_s "
                "bounds this wait. The log is whole: start the same command to resume"
            )


def _who_waits(group: Group, missing: Sequence[str]) -> str:
    attempts = [a for r in missing for a in group.attempts.get(r, {}).values()]
    unscored = sum(a.outcome is not None for a in attempts)
    tokens = sum(a.n_sampled for a in attempts)
    what = f"{group.group_id} for {len(missing)}/{group.n} rollouts ({tokens} tokens)"
    return f"{what}, {unscored} pending" if unscored else what
