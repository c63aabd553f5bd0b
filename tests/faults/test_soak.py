"""Everything at once on one log: writers, tailing readers, a driver, compaction, SQL snapshots.

All in processes of their own. Afterwards every acknowledged row was delivered once to each reader,
in its writer's order, and no snapshot held an effect without its cause.
"""

import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import children
import factories as make
import pytest

from molt.schemas.records import Ref
from molt.store import Log
from molt.store.compact import compact
from molt.store.doctor import doctor
from molt.store.sql import connect, run_sql

STREAMS = ("segments", "rewards", "rollouts")
CHECKS = {
    "an outcome without its segment": """
        select count(*) from rollouts o
        where not exists (from segments s where s.rollout_id = o.rollout_id)""",
    "an outcome without its reward": """
        select count(*) from rollouts o
        where not exists (from rewards w where w.rollout_id = o.rollout_id)""",
    "a plan without its outcome": """
        select count(*) from plans p
        where not exists (from rollouts o where o.rollout_id = p.rollout_id)""",
    "a row shown twice": """
        select count(*) - count(distinct (writer, seq, row)) from segments""",
}


@dataclass(frozen=True)
class Size:
    writers: int
    readers: int
    seconds: float
    """How long the writers go on."""


def write(conn: Connection, path: str, number: int, seconds: float) -> None:
    """Whole rollouts until the time is up; sends (stream, address) of each acknowledged row."""
    rng = random.Random(number)
    end = time.monotonic() + seconds
    places: list[tuple[str, str, int, int]] = []
    with Log.open(path).writer(linger_s=0.01) as w:
        i = 0
        while time.monotonic() < end or i < 3:
            name = f"train-{number * 1_000_000 + i}/0"
            row = make.segment(rollout_id=name, ids=range(rng.randint(1, 800)))
            tickets = [
                ("segments", w.append("segments", row)),
                ("rewards", w.append("rewards", make.reward(name, rng.random()))),
                ("rollouts", w.append("rollouts", make.rollout(name, digests=[row["digest"]]))),
            ]
            for stream, ticket in tickets:
                ref = ticket.result()
                places.append((stream, ref.writer, ref.seq, ref.row))
            i += 1
    conn.send(places)


def read(conn: Connection, path: str, stop: Any) -> None:
    """Tails until told to stop and then once more; sends (stream, writer, seq, rows)."""
    tail = Log.open(path).tail(streams=STREAMS)
    found: list[tuple[str, str, int, int]] = []
    while True:
        last = stop.is_set()
        for commit in tail.poll()[1]:
            found.append((commit.stream, commit.writer, commit.seq, commit.table.num_rows))
        if last:
            conn.send(found)
            return


def pack(conn: Connection, path: str, stop: Any) -> None:
    """Compacts what is full and settled, again and again."""
    moved = 0
    while not stop.is_set():
        moved += compact(Log.open(path), file_bytes=1 << 20)["commits"]
    conn.send(moved)


def snapshot(conn: Connection, path: str, stop: Any) -> None:
    """Sends (number of snapshots, what each of them saw that it must not see)."""
    log = Log.open(path)
    wrong: Counter[str] = Counter()
    n = 0
    while n == 0 or not stop.is_set():
        with connect([log], query=" ".join(CHECKS.values())) as con:
            for what, query in CHECKS.items():
                wrong[what] += con.execute(query).fetchall()[0][0]
        n += 1
    conn.send((n, dict(wrong)))


def drive(conn: Connection, path: str, stop: Any) -> None:
    """Plans every group whose outcome the fold has seen: its rows must be there for everyone."""
    log = Log.open(path)
    make.open_epoch(log)
    log.control.put("policy", [make.policy(1, 0)])
    conn.send("ready")
    tail = log.tail(streams={"segments", "rollouts"})
    segments: dict[str, Ref] = {}
    step = 0
    while True:
        last = stop.is_set()
        done = []
        for commit in tail.poll()[1]:
            for i, name in enumerate(commit.table.column("rollout_id").to_pylist()):
                if commit.stream == "segments":
                    segments[name] = Ref(writer=commit.writer, seq=commit.seq, row=i)
                else:
                    done.append(name)
        if done:
            step += 1
            rows = [make.plan_row(name, [segments[name]]) for name in done]
            log.control.put("plan", rows, make.plan_header(step))
        elif last:
            conn.send(step)
            return


def run(folder: Path, size: Size) -> dict[str, int]:
    log = Log.create(folder / "log", run_id="run")
    written, stop = children.CONTEXT.Event(), children.CONTEXT.Event()
    driver, decisions = children.start(drive, str(log.path), written)
    assert decisions.recv() == "ready"
    readers = [children.start(read, str(log.path), stop) for _ in range(size.readers)]
    packer, moved = children.start(pack, str(log.path), stop)
    asker, snapshots = children.start(snapshot, str(log.path), stop)
    writers = [children.start(write, str(log.path), i, size.seconds) for i in range(size.writers)]
    places = [place for _, receiver in writers for place in receiver.recv()]
    written.set()
    steps = decisions.recv()
    stop.set()
    for _, receiver in readers:
        check_delivery(places, receiver.recv())
    n_moved = moved.recv()
    n_snapshots, wrong = snapshots.recv()
    assert not any(wrong.values()), wrong
    for child in (driver, packer, asker, *(c for c, _ in readers), *(c for c, _ in writers)):
        child.join(60)
        assert child.exitcode == 0
    check_end(log, places)
    return {
        "acknowledged_rows": len(places),
        "readers": size.readers,
        "plans": steps,
        "compacted_commits": n_moved,
        "snapshots": n_snapshots,
        "lost": 0,
        "delivered_twice": 0,
        "effects_without_cause": 0,
    }


def check_delivery(
    places: Iterable[tuple[str, str, int, int]], found: list[tuple[str, str, int, int]]
) -> None:
    """Each acknowledged row in one delivered commit; each writer's commits in order."""
    rows = {(stream, writer, seq): n for stream, writer, seq, n in found}
    assert len(rows) == len(found), "a commit was delivered twice"
    by_writer = defaultdict(list)
    for _, writer, seq, _ in found:
        by_writer[writer].append(seq)
    assert all(seqs == sorted(seqs) for seqs in by_writer.values())
    acknowledged: Counter[tuple[str, str, int]] = Counter()
    for stream, writer, seq, row in places:
        assert row < rows[stream, writer, seq], f"{writer}/{seq} row {row} was not delivered"
        acknowledged[stream, writer, seq] += 1
    assert dict(acknowledged) == rows


def check_end(log: Log, places: list[Any]) -> None:
    counts = Counter(stream for stream, *_ in places)
    for stream in STREAMS:
        assert run_sql([log], f"select count(*) from {stream}")[1] == [[counts[stream]]]
    assert run_sql([log], "select count(distinct rollout_id) from plans")[1] == [
        [counts["rollouts"]]
    ]
    report = doctor(log.path)
    assert report["ok"], report["problems"]


def test_a_short_soak(tmp_path: Path) -> None:
    counts = run(tmp_path, Size(writers=2, readers=1, seconds=0.5))
    assert counts["acknowledged_rows"] >= 18 and counts["snapshots"] >= 1


@pytest.mark.slow
def test_soak(tmp_path: Path, report: Any) -> None:
    counts = run(tmp_path, Size(writers=8, readers=2, seconds=60))
    assert counts["compacted_commits"] > 1000 and counts["snapshots"] > 3
    report(writers=8, **counts)
