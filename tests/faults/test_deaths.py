"""A real process ends at every file-system call of a run: what it acknowledged is there, whole."""

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import children
import factories as make
import pytest
from faulty import DyingOs

import molt.store.files
from molt.store import Log
from molt.store.doctor import doctor
from molt.store.sql import run_sql

CALLS_MAX = 200
STREAMS = ("prompts", "segments", "rewards", "rollouts")
SEGMENTS = [make.segment(rollout_id=f"train-{i}/0", ids=range(1, 30 + i)) for i in range(4)]


def run(conn: Connection, path: str, n: int, after: bool) -> None:
    """Two groups and their plans, then one more; reports each row and record once it is durable."""
    log = Log.open(path)
    dying = DyingOs(n, after=after, really=True)
    molt.store.files.os = dying  # type: ignore[assignment]
    make.open_epoch(log)
    log.control.put("policy", [make.policy(1, 0)])
    w = log.writer(linger_s=60)
    for i in range(3):
        tickets = {
            "prompts": w.append("prompts", make.prompt(i, n=1)),
            "segments": w.append("segments", SEGMENTS[i]),
            "rewards": w.append("rewards", make.reward(f"train-{i}/0")),
        }
        if i < 2:  # this row flushes at once, in the writer's own thread
            row = make.rollout(f"train-{i}/0", digests=[SEGMENTS[i]["digest"]])
            tickets["rollouts"] = w.append("rollouts", row)
            tickets["rollouts"].result()
        else:
            w.flush()
        for stream, ticket in tickets.items():
            conn.send((stream, i, ticket.result()))
        if i < 2:
            plan = [make.plan_row(f"train-{i}/0", [tickets["segments"].result()])]
            conn.send(("plans", i, log.control.put("plan", plan, make.plan_header(i + 1))))
    w.close()
    conn.send(("all", dying.seen, None))


def visible(log: Log) -> dict[str, list[int]]:
    """Group numbers by stream; the tail and SQL must agree, and no outcome lacks its segment."""
    found: dict[str, list[int]] = {}
    commits = log.tail().poll()[1]
    for stream in STREAMS:
        name = "group_id" if stream == "prompts" else "rollout_id"
        in_sql = [r[0] for r in run_sql([log], f"select {name} from {stream} order by 1")[1]]
        tables = [c.table for c in commits if c.stream == stream]
        assert in_sql == sorted(v for t in tables for v in t.column(name).to_pylist())
        found[stream] = [int(v.removeprefix("train-").removesuffix("/0")) for v in in_sql]
    assert set(found["rollouts"]) <= set(found["segments"]) & set(found["rewards"])
    plans = run_sql([log], "select rollout_id from plans order by step")[1]
    found["plans"] = [int(r[0][6]) for r in plans]
    assert set(found["plans"]) <= set(found["rollouts"])
    report = doctor(log.path)
    assert report["ok"], report["problems"]
    return found


def finish(log: Log) -> None:
    """What a restart does: a new epoch, and what is missing is appended again."""
    there = visible(log)
    make.open_epoch(log)
    if not run_sql([log], "select 1 from policies where (epoch, version) = (1, 0)")[1]:
        log.control.put("policy", [make.policy(1, 0)])
    rows: dict[str, Any] = {
        "prompts": lambda i: make.prompt(i, n=1),
        "segments": lambda i: SEGMENTS[i],
        "rewards": lambda i: make.reward(f"train-{i}/0"),
        "rollouts": lambda i: make.rollout(f"train-{i}/0", digests=[SEGMENTS[i]["digest"]]),
    }
    with log.writer() as w:
        for stream, row in rows.items():
            for i in set(range(3)) - set(there[stream]):
                w.append(stream, row(i))


def check_deaths(tmp_path: Path, *, every: int, first: int, after: bool) -> int:
    n = first
    while n < CALLS_MAX:
        log = Log.create(tmp_path / f"log-{n}", run_id="run")
        child, receiver = children.start(run, str(log.path), n, after)
        acknowledged = list(children.reports(receiver))
        child.join(60)
        finished = bool(acknowledged) and acknowledged[-1][0] == "all"
        assert child.exitcode == (0 if finished else 9)
        found = visible(log)
        for stream, i, where in acknowledged:
            if stream in STREAMS:
                assert i in found[stream], f"call {n}: {stream} {i} was acknowledged and is lost"
                assert log.row(where)["at"] is not None
            elif stream == "plans":
                assert i in found["plans"], f"call {n}: plan {i} was acknowledged and is lost"
        finish(log)
        assert all(visible(log)[s] == [0, 1, 2] for s in STREAMS)
        if finished:
            assert acknowledged[-1][1] < n
            return n
        n += every
    raise AssertionError("more calls than expected")


@pytest.mark.parametrize("after", [False, True])
def test_a_process_dies_at_some_calls(tmp_path: Path, after: bool) -> None:
    check_deaths(tmp_path, every=50, first=20 if after else 7, after=after)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_a_process_dies_at_every_call(tmp_path: Path, after: bool, report: Any) -> None:
    last = check_deaths(tmp_path, every=1, first=1, after=after)
    assert last > 100
    report(deaths=last - 1, lost=0, partial=0)
