"""Random histories of a log beside a plain model: what was acknowledged, and what may be seen.

The model is a dictionary from row address to key. Readers, SQL and the doctor must agree with it
after any order of appends, failures, crashes, late files, compaction, retention and new epochs.
"""

import errno
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import factories as make
import pytest
from faulty import Death, DyingOs, FaultyOs
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import molt.store.compact
import molt.store.doctor
import molt.store.reader
import molt.store.tail
from molt.schemas.records import Ref
from molt.store import Log, Tail, Writer
from molt.store.compact import compact
from molt.store.doctor import doctor
from molt.store.reader import hot_files
from molt.store.retention import retire
from molt.store.sql import run_sql

BUCKET = 4
"""Small buckets: a short history fills some of them."""
SPLIT = [molt.store.compact, molt.store.doctor, molt.store.reader, molt.store.tail]
STREAMS = ("segments", "rewards", "rollouts")
LATER = make.NOW.replace(tzinfo=UTC) + timedelta(days=1)
REACHED: Counter[str] = Counter()
"""What the histories really went through."""
Place = tuple[str, int]
"""(writer, seq)."""
Key = tuple[str, int]
"""(stream, group number)."""


@contextmanager
def failing(fault: Any) -> Iterator[None]:
    with patch("molt.store.files.os", fault):
        yield


@dataclass
class Appender:
    w: Writer
    zombie: bool = False
    """A newer epoch does not know of it any more; it goes on all the same."""
    pending: list[tuple[Key, Any]] = field(default_factory=list)


@dataclass
class Reader:
    tail: Tail
    seen: dict[Place, list[Key]] = field(default_factory=dict)


def row_of(key: Key) -> Any:
    stream, i = key
    if stream == "segments":
        return make.segment(rollout_id=f"train-{i}/0", ids=range(1, 4 + i % 3))
    if stream == "rewards":
        return make.reward(f"train-{i}/0", float(i))
    return make.rollout(f"train-{i}/0", digests=[row_of(("segments", i))["digest"]])


class LogMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.patches = [patch.object(module, "BUCKET", BUCKET) for module in SPLIT]
        for p in self.patches:
            p.start()
        self.folder = Path(tempfile.mkdtemp())
        self.log = Log.create(self.folder / "log", run_id="run")
        make.open_epoch(self.log)
        self.log.control.put("policy", [make.policy(1, 0)])
        self.appenders: list[Appender] = []
        self.readers = [self.reader(), self.reader()]
        self.there: dict[Place, list[Key]] = {}
        """Commits that every reader may rely on: the model."""
        self.unsure: dict[Key, int] = {}
        """Rows whose append failed, or whose writer died: there or not, but not in part."""
        self.limits: dict[str, int] = {}
        """Last visible commit of closed writers."""
        self.retired: set[Place] = set()
        self.hidden: tuple[Place, Path, Path] | None = None
        self.n = self.step = 0
        self.settled: set[int] = set()
        self.checkpoint: set[int] | None = None

    def reader(self) -> Reader:
        return Reader(self.log.tail(streams=STREAMS, skip_retired=True, clock=lambda: 0.0))

    # -- the model -------------------------------------------------------------------------------

    def visible(self) -> dict[Place, list[Key]]:
        """What a new reader must be given now."""
        out = {}
        for (writer, seq), keys in self.there.items():
            late = self.hidden is not None and self.hidden[0][0] == writer
            if late and seq >= self.hidden[0][1]:
                continue
            if seq <= self.limits.get(writer, seq) and (writer, seq) not in self.retired:
                out[writer, seq] = keys
        return out

    def acknowledge(self, appender: Appender) -> None:
        places: dict[Place, list[Key]] = {}
        for key, ticket in appender.pending:
            ref: Ref = ticket.result(timeout=60)
            places.setdefault((ref.writer, ref.seq), []).append(key)
            assert places[ref.writer, ref.seq].index(key) == ref.row
        appender.pending = []
        for (writer, seq), keys in places.items():
            assert (writer, seq) not in self.there
            assert {stream for stream, _ in keys} == {keys[0][0]}, "one stream per commit"
            self.there[writer, seq] = keys
            if appender.zombie:
                self.limits.setdefault(writer, -1)

    def adopt(self) -> None:
        """Learn from the log which unsure rows are there; from now on they stay."""
        found = self.read_all()
        for place, keys in found.items():
            if place not in self.there:
                assert all(self.unsure.get(key, 0) for key in keys), f"{keys} from nowhere"
                self.there[place] = keys
        self.unsure = {}

    def read_all(self) -> dict[Place, list[Key]]:
        reader = self.reader()
        self.poll(reader)
        return reader.seen

    def poll(self, reader: Reader) -> None:
        last = {w: max(s for v, s in reader.seen if v == w) for w, _ in reader.seen}
        for c in reader.tail.poll()[1]:
            assert c.seq > last.get(c.writer, -1), "each commit once, in its writer's order"
            last[c.writer] = c.seq
            rollouts = c.table.column("rollout_id").to_pylist()
            keys = [(c.stream, int(r[6:-2])) for r in rollouts]
            reader.seen[c.writer, c.seq] = keys

    # -- writers ---------------------------------------------------------------------------------

    @precondition(lambda self: len(self.appenders) < 3)
    @rule()
    def open_writer(self) -> None:
        self.appenders.append(Appender(self.log.writer(linger_s=3600)))

    def pick(self, data: st.DataObject) -> Appender:
        return data.draw(st.sampled_from(self.appenders), label="writer")

    @rule(data=st.data(), n=st.integers(1, 4), durable=st.booleans())
    def append(self, data: st.DataObject, n: int, durable: bool) -> None:
        if not self.appenders:
            self.open_writer()
        appender = self.pick(data)
        self.fill(appender, n)
        if durable:
            appender.w.flush()
            self.acknowledge(appender)

    def fill(self, appender: Appender, n: int) -> None:
        """Pairs go in as tables, others row by row."""
        numbers = range(self.n + 1, self.n + 1 + n)
        self.n += n
        for stream in ("segments", "rewards"):
            keys = [(stream, i) for i in numbers]
            if n % 2:
                tickets = [appender.w.append(stream, row_of(key)) for key in keys]
            else:
                tickets = appender.w.append_table(stream, make.as_table(stream, map(row_of, keys)))
            appender.pending += zip(keys, tickets, strict=True)
        # Its thread, which rows have waken, waits for more now: whoever flushes publishes them.
        while appender.w._idle and appender.w._thread.is_alive():
            time.sleep(0.0005)

    @precondition(lambda self: self.appenders)
    @rule(data=st.data())
    def finish_rollouts(self, data: st.DataObject) -> None:
        """A rollouts row flushes at once, with all that was appended before it."""
        appender = self.pick(data)
        own = [i for (stream, i), _ in appender.pending if stream == "segments"]
        for i in own[:1]:
            key = ("rollouts", i)
            ticket = appender.w.append("rollouts", row_of(key))
            appender.pending.append((key, ticket))
            ticket.result(timeout=60)
            self.acknowledge(appender)

    @precondition(lambda self: self.appenders)
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        appender = self.pick(data)
        appender.w.flush()
        self.acknowledge(appender)

    @precondition(lambda self: self.appenders)
    @rule(data=st.data())
    def flush_with_a_lost_reply(self, data: st.DataObject) -> None:
        appender = self.pick(data)
        with failing(FaultyOs("link", errno.EIO, lost_reply=True)):
            appender.w.flush()
        self.acknowledge(appender)

    @precondition(lambda self: self.appenders and not self.hidden)
    @rule(data=st.data(), n=st.integers(1, 14), times=st.sampled_from([1, 100]))
    def flush_fails(self, data: st.DataObject, n: int, times: int) -> None:
        """What failed may be there or not; the same append succeeds afterwards."""
        appender = self.pick(data)
        self.fill(appender, 1)
        rows = [key for key, _ in appender.pending]
        self.unsure = {key: 2 for key in rows}
        with failing(FaultyOs(None, errno.EIO, first=n, times=times)):
            try:
                appender.w.flush()
            except OSError:
                REACHED["a flush failed"] += 1
        failed = [key for key, ticket in appender.pending if ticket.exception(0) is not None]
        appender.pending = [(k, t) for k, t in appender.pending if t.exception(0) is None]
        self.acknowledge(appender)
        if not appender.zombie:
            self.adopt()
        self.unsure = {}
        for key in failed:
            appender.pending.append((key, appender.w.append(key[0], row_of(key))))
        appender.w.flush()
        self.acknowledge(appender)

    @precondition(lambda self: self.appenders)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """Rows that were not flushed are gone, and that is all."""
        self.leave(self.pick(data))

    @precondition(lambda self: self.appenders and not self.hidden)
    @rule(data=st.data(), n=st.integers(1, 14), after=st.booleans())
    def crash_in_a_flush(self, data: st.DataObject, n: int, after: bool) -> None:
        appender = self.pick(data)
        self.fill(appender, 1)
        self.unsure = {key: 1 for key, _ in appender.pending}
        with failing(DyingOs(n, after=after)):
            try:
                appender.w.flush()
            except Death:
                REACHED["died in a flush"] += 1
        self.leave(appender)
        if not appender.zombie:
            self.adopt()
        self.unsure = {}

    def leave(self, appender: Appender) -> None:
        """Its thread ends without another publish, as that of a process that was killed."""
        with appender.w._lock:
            appender.w._pending = []
            appender.w._closed = True
            appender.w._lock.notify_all()
        appender.w._thread.join(60)
        self.appenders.remove(appender)

    @precondition(lambda self: self.appenders)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        appender = self.pick(data)
        appender.w.close()
        self.acknowledge(appender)
        self.appenders.remove(appender)

    # -- readers ---------------------------------------------------------------------------------

    @rule(i=st.integers(0, 1))
    def consume(self, i: int) -> None:
        reader = self.readers[i]
        self.poll(reader)
        self.agree(reader.seen)

    def agree(self, seen: dict[Place, list[Key]]) -> None:
        """A reader may have taken what is late, or retired, by now; it lacks nothing else."""
        visible = self.visible()
        assert {p: k for p, k in seen.items() if p in visible} == visible
        assert all(self.there[place] == keys for place, keys in seen.items())
        assert all(seq <= self.limits.get(writer, seq) for writer, seq in seen)

    @rule()
    def read_from_the_start(self) -> None:
        assert self.read_all() == self.visible()

    @precondition(lambda self: not self.hidden)
    @rule()
    def query(self) -> None:
        keys = {key for found in self.visible().values() for key in found}
        for stream in STREAMS:
            rows = run_sql([self.log], f"select rollout_id from {stream} order by 1")[1]
            assert [r[0] for r in rows] == sorted(f"train-{i}/0" for s, i in keys if s == stream)

    # -- what happens to files -------------------------------------------------------------------

    @precondition(lambda self: not self.hidden)
    @rule(i=st.integers(0, 999))
    def a_file_is_late(self, i: int) -> None:
        hot = {(f.writer, f.seq): f.path for w in self.writers() for f in self.hot(w)}
        places = [place for place in self.visible() if place in hot]  # writers' names are random
        if places:
            place = places[i % len(places)]
            self.hidden = (place, hot[place], self.folder / "late")
            shutil.move(hot[place], self.folder / "late")
            REACHED["a file was late"] += 1

    def writers(self) -> set[str]:
        return {writer for writer, _ in self.there}

    def hot(self, writer: str) -> list[Any]:
        return hot_files(self.log.path, writer)

    @precondition(lambda self: self.hidden)
    @rule()
    def the_late_file_is_there(self) -> None:
        assert self.hidden is not None
        shutil.move(self.hidden[2], self.hidden[1])
        self.hidden = None

    @rule(everything=st.booleans(), file_bytes=st.sampled_from([1, 1 << 20]))
    def compact(self, everything: bool, file_bytes: int) -> None:
        moved = compact(self.log, everything=everything, file_bytes=file_bytes)
        if moved["commits"]:
            REACHED["commits were compacted"] += 1

    @precondition(lambda self: self.n and not self.hidden)
    @rule(data=st.data(), with_checkpoint=st.booleans())
    def settle(self, data: st.DataObject, with_checkpoint: bool) -> None:
        self.drop(data.draw(st.integers(0, self.n), label="settled up to"))
        if with_checkpoint:
            self.put_checkpoint()

    def drop(self, last: int) -> None:
        groups = sorted(set(range(1, last + 1)) - self.settled)
        if groups:
            self.log.control.put("drop", [make.drop_row(f"train-{i}") for i in groups], {})
            self.settled.update(groups)

    def put_checkpoint(self) -> None:
        self.step += 1
        path = f"checkpoints/{self.log.control.epoch}-{self.step}"
        row = {"epoch": self.log.control.epoch, "step": self.step, "state_digest": "a"}
        (self.log.path / path).mkdir()
        (self.log.path / path / "COMPLETE").write_text(json.dumps(row))
        self.log.control.put("checkpoint", [{**row, "path": path, "bytes": 0, "files": []}])
        if self.checkpoint is None:
            self.checkpoint = set(self.settled)

    @precondition(lambda self: self.there and not self.hidden)
    @rule(some=st.booleans())
    def retire(self, some: bool) -> None:
        """Below each writer's floor all hot commits go; cold files go when all of them may."""
        if self.checkpoint is None:
            self.drop(self.n // 2 if some else self.n)
            self.put_checkpoint()
        before = self.visible()
        hot = {(f.writer, f.seq) for w in self.writers() for f in self.hot(w)}
        may_go = {p for w in self.writers() for p in self.below_floor(w, before)}
        retire(self.log, now=LATER, dry_run=False)
        gone = set(before) - set(self.read_all())
        assert may_go & hot <= gone <= may_go
        self.retired |= gone
        if gone:
            REACHED["commits retired"] += 1

    def below_floor(self, writer: str, visible: dict[Place, list[Key]]) -> Iterator[Place]:
        for place in sorted(p for p in visible if p[0] == writer):
            if visible[place][0][0] != "segments":
                continue
            if not {i for _, i in visible[place]} <= (self.checkpoint or set()):
                return
            yield place

    @precondition(lambda self: not self.hidden and self.there and self.log.control.epoch < 5)
    @rule()
    def new_epoch(self) -> None:
        """Closes every open writer at what is visible; those that go on are not seen again."""
        make.open_epoch(self.log)
        for writer in self.writers() | {a.w.name for a in self.appenders}:
            if writer not in self.limits:
                own = [seq for w, seq in self.there if w == writer]
                self.limits[writer] = max(own, default=-1)
        for appender in self.appenders:
            appender.zombie = True
            REACHED["a writer went on after its epoch"] += 1

    def teardown(self) -> None:
        if not hasattr(self, "log"):
            return
        try:
            if self.hidden:
                self.the_late_file_is_there()
            self.query()
            for i in (0, 1):
                self.consume(i)
            report = doctor(self.log.path)
            assert report["ok"], report["problems"]
        finally:
            for appender in [*self.appenders]:
                self.leave(appender)
            for p in self.patches:
                p.stop()
            shutil.rmtree(self.folder)


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        LogMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            # Shrinking real files takes longer than reading the steps that failed.
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
        ),
    )


def test_short_histories_agree_with_the_model() -> None:
    run(examples=12, steps=20)


@pytest.mark.slow
def test_histories_agree_with_the_model(report: Callable[..., None]) -> None:
    REACHED.clear()
    run(examples=400, steps=50)
    assert len(REACHED) == 6 and min(REACHED.values()) > 20, REACHED
    report(histories=400, rules_per_history="up to 50", disagreements=0, **REACHED)
