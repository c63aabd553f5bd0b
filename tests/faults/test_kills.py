"""kill -9 at random moments: what was acknowledged is there, nothing is there in part (I6).

Each child is a whole run: it opens an epoch, appends from three threads over several streams with
group commit, and puts plans and drops. It reports a row only after its ticket resolved.
"""

import contextlib
import os
import random
import select
import signal
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import children
import factories as make
import pyarrow as pa
import pytest

from molt.schemas.errors import WriterClosed
from molt.store import Appender, Log
from molt.store.doctor import doctor
from molt.store.sql import run_sql

NOTES = {"x_notes": pa.schema([("rollout_id", pa.string()), ("note", pa.large_string())])}
KILLS_PER_LOG = 25
ALIVE_S_MAX = 0.35


def play_run(conn: Connection, path: str, seed: int, shared: bool) -> None:
    """Appends until it is killed; sends (stream, id, address) of what is durable.

    With `shared` through an appender process, whose id it sends first.
    """
    log = Log.open(path)
    epoch = make.open_epoch(log).epoch
    options: dict[str, Any] = {"linger_s": 0.004, "user_schemas": NOTES}
    if shared:
        other = Appender(log.path, epoch, **options)
        options["appender"] = other.address
        conn.send(other.pid)
    w = log.writer(epoch, flush_rows=16, flush_bytes=1 << 16, **options)
    lock = threading.Lock()
    ready: list[tuple[str, list[Any]]] = []

    def acknowledged(stream: str, name: str) -> Any:
        def send(ticket: Any) -> None:
            if ticket.exception() is None:
                with lock:
                    conn.send((stream, name, ticket.result()))

        return send

    def append(stream: str, row: Any) -> Any:
        ticket = w.append(stream, row)
        ticket.add_done_callback(acknowledged(stream, row["rollout_id"]))
        return ticket

    def play(thread: int) -> None:
        rng = random.Random(f"{seed}-{thread}")
        for i in range(10**6):
            name = f"train-{seed * 1000 + thread * 100_000_000 + i}/0"
            first = make.segment(rollout_id=name, ids=range(rng.randint(1, 6000)))
            digests = [first["digest"]]
            segments = [append("segments", first)]
            if rng.random() < 0.5:
                n = len(first["token_ids"])
                linked = {"segment": 1, "parent": 0, "keep": n, "parent_digest": digests[0]}
                second = make.segment(rollout_id=name, ids=range(rng.randint(1, 50)), **linked)
                digests = [second["digest"]]
                segments.append(append("segments", second))
            append("x_notes", {"rollout_id": name, "note": "n" * rng.randint(0, 100)})
            append("rewards", make.reward(name, rng.random()))
            outcome = append("rollouts", make.rollout(name, digests=digests))
            refs = [s.result() for s in segments]
            outcome.result()
            with lock:
                ready.append((name, refs))

    def play_on(thread: int) -> None:
        with contextlib.suppress(WriterClosed, OSError):  # its appender was killed
            play(thread)

    threads = [threading.Thread(target=play_on, args=(i,), daemon=True) for i in range(3)]
    for thread in threads:
        thread.start()
    decide(conn, log, lock, ready, seed)


def decide(conn: Connection, log: Log, lock: Any, ready: list[Any], seed: int) -> None:
    """One plan after the other over all that is ready; its size is in its seed."""
    step = seed * 1000
    while True:
        with lock:
            batch, ready[:] = ready[:], []
        step += 1
        rows = [make.plan_row(name, refs) for name, refs in batch]
        rows = rows or [make.plan_row(f"train-0/{i}", [], branches=[]) for i in range(40)]
        log.control.put("plan", rows, make.plan_header(step, seed=len(rows)))
        with lock:
            conn.send(("plans", step, len(rows)))
        log.control.put("drop", [make.drop_row(f"train-{step}")], {})
        with lock:
            conn.send(("drops", f"train-{step}", None))


@dataclass
class Counts:
    kills: int = 0
    acknowledged: int = 0
    plans: int = 0
    rows: list[tuple[str, Any, Any]] = field(default_factory=list)


def kill_one(log: Log, rng: random.Random, seed: int, counts: Counts, shared: bool) -> None:
    child, receiver = children.start(play_run, str(log.path), seed, shared)
    other = receiver.recv() if shared else None
    # Half of them die around the first rows, the others in the middle of their work.
    early = seed % 2
    if not early:
        receiver.poll(60)  # something is acknowledged, however busy the machine is
    child.join(rng.uniform(0, ALIVE_S_MAX / (4 if early else 1)))
    if other is not None and rng.random() < 0.7:  # else it is told of the end of its parent
        os.kill(other, signal.SIGKILL)
        child.join(rng.uniform(0, 0.05))
    child.kill()
    if other is not None:
        ended(other)
    counts.rows.extend(children.reports(receiver))
    child.join(60)
    assert child.exitcode == -9, "the child ended by itself; it was to be killed"
    counts.kills += 1


def ended(pid: int) -> None:
    """Returns when a process that is no child of ours is gone: an appender publishes to its end."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], 60)[0], f"appender {pid} outlives its parent"
    finally:
        os.close(fd)


def check(log: Log, counts: Counts) -> None:
    """A fresh reader and SQL hold every acknowledged row; what is more is whole and in order."""
    commits = {(c.writer, c.seq): c for c in log.tail().poll()[1]}
    names: dict[str, set[str]] = {}
    for commit in commits.values():
        found = commit.table.column("rollout_id").to_pylist()
        names.setdefault(commit.stream, set()).update(found)
    streams = ("segments", "rewards", "rollouts", "x_notes")
    in_sql = {s: _sql(log, f"select distinct rollout_id from {s}") for s in streams if s in names}
    assert in_sql == names
    plans = {r[0]: r[1:] for r in _rows(log, "select step, count(*) from plans group by 1")}
    dropped = _sql(log, "select group_id from drops")
    headers = {r.header["step"]: r.header["seed"] for r in log.records() if r.kind == "plan"}
    for step, n_rows in headers.items():
        assert plans[step] == [n_rows], f"plan {step} is there in part"
    for stream, name, where in counts.rows:
        if stream == "plans":
            assert plans[name] == [where], f"plan {name} was acknowledged"
        elif stream == "drops":
            assert name in dropped, f"drop {name} was acknowledged"
        else:
            commit = commits[where.writer, where.seq]
            assert commit.stream == stream
            assert commit.table.column("rollout_id")[where.row].as_py() == name
    if "rollouts" in names:
        assert names["rollouts"] <= names["segments"] & names["rewards"] & names["x_notes"]
    planned = _sql(log, "select rollout_id from plans where n_branches > 0")
    assert planned <= names.get("rollouts", set())


def _rows(log: Log, query: str) -> list[list[Any]]:
    return run_sql([log], query)[1]


def _sql(log: Log, query: str) -> set[Any]:
    return {r[0] for r in _rows(log, query)}


def kill_many(folder: Path, kills: int, seed: int, *, shared: bool = False) -> Counts:
    rng = random.Random(seed)
    total = Counts()
    for number in range(-(-kills // KILLS_PER_LOG)):
        log = Log.create(folder / f"log-{number}", run_id="run")
        make.open_epoch(log)
        log.control.put("policy", [make.policy(1, 0)])
        counts = Counts()
        for i in range(min(KILLS_PER_LOG, kills - number * KILLS_PER_LOG)):
            kill_one(log, rng, seed + number * KILLS_PER_LOG + i + 1, counts, shared)
            check(log, counts)
        report = doctor(log.path)
        assert report["ok"], report["problems"]
        total.kills += counts.kills
        total.acknowledged += len(counts.rows)
        total.plans += sum(stream == "plans" for stream, *_ in counts.rows)
    return total


def test_a_few_kills(tmp_path: Path) -> None:
    assert kill_many(tmp_path, kills=4, seed=1).acknowledged


def test_a_few_kills_of_a_shared_appender(tmp_path: Path) -> None:
    assert kill_many(tmp_path, kills=2, seed=1, shared=True).acknowledged


@pytest.mark.slow
def test_random_kills_of_a_shared_appender(tmp_path: Path, report: Any) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    counts = kill_many(tmp_path, kills=40, seed=seed, shared=True)
    assert counts.acknowledged > 100
    report(
        kills=counts.kills,
        acknowledged_rows_and_records=counts.acknowledged,
        lost=0,
        partial=0,
        seed=seed,
    )


@pytest.mark.slow
def test_random_kills(tmp_path: Path, report: Any) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    counts = kill_many(tmp_path, kills=250, seed=seed)
    assert counts.plans > 50 and counts.acknowledged > 1_000
    report(
        kills=counts.kills,
        acknowledged_rows_and_records=counts.acknowledged,
        of_these_plans=counts.plans,
        lost=0,
        partial=0,
        seed=seed,
    )
