"""What a run learned, from its log alone: a table, a picture, and an honest verdict.

*Learned* = the lower bound of the 95 % bootstrap interval of (held-out accuracy after - before) is
above 0 *and* the mean reward of the last five steps is at least 0.15 above that of the first five.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from molt.schemas.columns import Row
from molt.store import Log

GAIN_MIN = 0.15
WINDOW = 5
CORRECT = 1.0
"""A held-out answer counts as right from this reward on."""
RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures of one run; None where the log does not hold them yet."""

    steps: int
    reward_first: float | None
    reward_last: float | None
    accuracy_before: float | None
    accuracy_after: float | None
    gain: float | None
    gain_low: float | None
    """Lower bound of the 95 % bootstrap interval of accuracy_after - accuracy_before."""
    gain_high: float | None
    heldout: int
    learned: bool


def bootstrap(before: np.ndarray, after: np.ndarray) -> tuple[float, float, float]:
    """(mean, 2.5 %, 97.5 %) of after - before, resampling prompts; paired where ids agree."""
    rng = np.random.default_rng(0)
    difference = after.astype(float) - before.astype(float)
    picks = rng.integers(0, len(difference), (RESAMPLES, len(difference)))
    means = difference[picks].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(difference.mean()), float(low), float(high)


def judge(rewards: list[float], before: np.ndarray, after: np.ndarray) -> Report:
    """The verdict from step rewards and per-prompt correctness before and after."""
    paired = len(before) == len(after) > 0
    gain, low, high = bootstrap(before, after) if paired else (None, None, None)
    enough = len(rewards) >= 2 * WINDOW
    first = float(np.mean(rewards[:WINDOW])) if enough else None
    last = float(np.mean(rewards[-WINDOW:])) if enough else None
    rose = first is not None and last is not None and last - first >= GAIN_MIN
    return Report(
        steps=len(rewards),
        reward_first=first,
        reward_last=last,
        accuracy_before=float(before.mean()) if len(before) else None,
        accuracy_after=float(after.mean()) if len(after) else None,
        gain=gain,
        gain_low=low,
        gain_high=high,
        heldout=len(before),
        learned=rose and low is not None and low > 0,
    )


def report(log: Log) -> Report:
    """Read step rewards and held-out answers through SQL."""
    rows = log.sql(
        "select avg(reward) from plans where in_baseline and step in (select step from steps) "
        "group by step order by step"
    ).fetchall()
    return judge([float(r) for (r,) in rows], heldout(log, "min"), heldout(log, "max"))


def heldout(log: Log, which: str) -> np.ndarray:
    """[prompts] bool: answered right at the first ("min") or last ("max") evaluated step."""
    rows = log.sql(
        f"""
        with asked as (
            select group_id, ordinal, prompt, cast(split_part(dataset, '@', 2) as int) as at_step
            from prompts where purpose = 'eval' and reason = 'new'
        ), answered as (
            select group_id, max(value) as value from rewards r
            join (select distinct group_id, rollout_id from rollouts) using (rollout_id)
            group by group_id
        )
        select prompt, coalesce(value, 0) >= {CORRECT}
        from asked left join answered using (group_id)
        where at_step = (select {which}(at_step) from asked)
          and (select count(distinct at_step) from asked) > 1
        order by prompt
        """
    ).fetchall()
    return np.array([bool(ok) for _, ok in rows])


COLUMNS = {
    "step": ("step", "d"),
    "reward": ("reward", ".3f"),
    "lag": ("lag", ".0f"),
    "loss": ("loss", ".4f"),
    "grad norm": ("grad_norm", ".3f"),
    "gap lag 0": ("gap_lag0", ".1e"),
    "tokens": ("n_tokens", "d"),
    "seconds": ("seconds", ".1f"),
}
"""Heading -> (key of `steps`, format)."""


def print_table(log: Log, found: Report, console: Console) -> None:
    """One row per step and the verdict."""
    table = Table(title=f"{log.run_id}: {found.steps} steps")
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    rows = [
        ["-" if row[key] is None else format(row[key], style) for key, style in COLUMNS.values()]
        for row in steps(log)
    ]
    if len(rows) > 12:
        rows[5:-6] = [["..."] * len(COLUMNS)]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for line in verdict(found):
        console.print(line, markup=False)


def steps(log: Log) -> list[Row]:
    """Per step: reward, lag, loss, grad_norm, mean gaps of all tokens and at lag 0, n_tokens,
    seconds.
    """
    rows: list[Row] = (
        log.sql(
            """
        select step, (metrics->>'$.reward')::double as reward,
            (metrics->>'$.lag_max')::double as lag, loss, grad_norm,
            (metrics->>'$.mismatch.all.mean')::double as gap,
            (metrics->>'$.mismatch."0".mean')::double as gap_lag0, n_tokens,
            (metrics->>'$.seconds.training')::double as seconds
        from steps order by step
        """
        )
        .to_arrow_table()
        .to_pylist()
    )
    return rows


def verdict(found: Report) -> list[str]:
    """The figures in words."""
    lines = []
    if found.reward_first is not None and found.reward_last is not None:
        lines.append(
            f"mean reward of the first {WINDOW} steps {found.reward_first:.3f}, of the last "
            f"{WINDOW} {found.reward_last:.3f} (needed: +{GAIN_MIN})"
        )
    if found.gain is not None:
        lines.append(
            f"held-out greedy accuracy on {found.heldout} prompts: {found.accuracy_before:.3f} -> "
            f"{found.accuracy_after:.3f}, difference {found.gain:+.3f} "
            f"(95 % bootstrap {found.gain_low:+.3f} to {found.gain_high:+.3f})"
        )
    if found.gain is None or found.reward_first is None:
        lines.append("too little to judge learning: it takes 10 steps and two evaluations")
    else:
        lines.append("LEARNED" if found.learned else "not learned (by this statistic)")
    return lines


def draw(log: Log, path: Path) -> None:
    """reward.png: reward, lag and engine-trainer mismatch over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = steps(log)
    x = [r["step"] for r in rows]
    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(7, 7), layout="constrained")
    axes[0].plot(x, [r["reward"] for r in rows], marker="o")
    axes[0].set(ylabel="mean reward", title=log.run_id, ylim=(0, 1.05))
    axes[1].step(x, [r["lag"] for r in rows], where="mid")
    axes[1].set(ylabel="lag (versions)", ylim=(-0.2, 2.2))
    axes[2].plot(x, [r["gap"] for r in rows], marker=".", label="all tokens")
    axes[2].plot(x, [r["gap_lag0"] for r in rows], marker=".", label="lag 0")
    axes[2].set(ylabel="mean |log p gap|", xlabel="step", yscale="log")
    axes[2].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
