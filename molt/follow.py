"""`molt tail` and `molt runs`: what happens in a log, and which logs a folder holds.

Both only read; `molt tail` follows a log that is being written, by polling, sooner with hints.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from molt.schemas.columns import to_rows
from molt.schemas.errors import LogGap, MoltError
from molt.store import Log
from molt.store.commit import Commit
from molt.store.control import Record

STREAMS = frozenset({"prompts", "rollouts", "rewards"})
POLL_S = 0.5
POLLS_LATE = 5
"""After so many polls what is missing is not late."""


def events(log: Log, *, follow: bool) -> Iterator[str]:
    """One line per event, oldest records first; with `follow` it goes on for ever.

    LogGap if something is missing: at once after what is there, or when a tail stops waiting.
    """
    tail, polls_left = log.tail(streams=STREAMS), POLLS_LATE
    with contextlib.closing(tail):
        while True:
            records, commits = tail.poll()
            yield from (record_line(r) for r in records)
            for commit in commits:
                yield from commit_lines(commit)
            polls_left -= 1
            if not follow and not tail.missing:
                return
            if not follow and polls_left < 1:
                raise LogGap(
                    f"{', '.join(tail.missing)} missing, and nothing behind it was read; run "
                    "`molt doctor` on the log"
                )
            tail.wait(POLL_S)


def record_line(record: Record) -> str:
    """A control record in words."""
    row = record.rows[0] if record.rows else {}
    return f"{_time(row)} {record.n:>6} {record.kind:<10} {_words(record, row)}"


def _words(record: Record, row: dict[str, Any]) -> str:
    if record.kind == "epoch":
        parent = row["parent_epoch"]
        return f"epoch {record.epoch}" + (f", after epoch {parent}" if parent else ", a new run")
    if record.kind == "plan":
        rewards = [r["reward"] for r in record.rows if r["in_baseline"]]
        mean = sum(rewards) / len(rewards) if rewards else float("nan")
        groups = len({r["group_id"] for r in record.rows})
        return f"step {record.header['step']}: {groups} groups, mean reward {mean:.3f}"
    if record.kind == "drop":
        return ", ".join(f"{r['rollout_id'] or r['group_id']}: {r['reason']}" for r in record.rows)
    if record.kind == "step":
        return f"step {row['step']}: loss {row['loss']:.4f}, {row['n_tokens']} tokens trained"
    if record.kind == "policy":
        gap = row["probe"]["mean_gap"]
        return f"version {record.epoch}.{row['version']} on the engines, probe gap {gap:.2g}"
    return f"step {row['step']}: {row['bytes'] / 1e6:.0f} MB in {row['path']}"


def commit_lines(commit: Commit) -> Iterator[str]:
    """Data rows in words: issued prompts, outcomes, rewards."""
    for row in to_rows(commit.table):
        if commit.stream == "prompts":
            text = f"{row['group_id']} {row['reason']}, {row['n']} rollouts"
        elif commit.stream == "rollouts":
            reason = f" ({row['reason']})" if row["reason"] else ""
            text = f"{row['rollout_id']} {row['status']}{reason}, {row['counts']['sampled']} tokens"
        else:
            text = f"{row['rollout_id']} {row['name']} = {row['value']}"
        yield f"{_time(row)} {'':>6} {commit.stream:<10} {text}"


def _time(row: dict[str, Any]) -> str:
    return row["at"].strftime("%H:%M:%S") if "at" in row else " " * 8


def runs(folder: Path) -> Iterator[dict[str, Any]]:
    """One row per log directly in `folder` (or `folder` itself), newest step's reward included."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    for path in [folder, *sorted(p for p in folder.iterdir() if p.is_dir())]:
        if not (path / "format.json").exists():
            continue
        row: dict[str, Any] = {"log": str(path), "run_id": "", "epochs": 0, "steps": 0}
        row |= {"reward": None, "problem": None}
        try:
            log = Log.open(path)
            records = log.records()
            steps = [r.rows[0] for r in records if r.kind == "step"]
            row["run_id"], row["epochs"] = log.run_id, sum(r.kind == "epoch" for r in records)
            row["steps"] = max((s["step"] for s in steps), default=0)
            row["reward"] = json.loads(steps[-1]["metrics"]).get("reward") if steps else None
        except (MoltError, OSError) as error:
            row["problem"] = str(error)
        yield row
