"""Compaction and retention die, or fail, at every file-system call: no row is lost or doubled."""

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import factories as make
import pytest
from faulty import Death, DyingOs, FaultyOs

from molt.schemas.errors import Retired
from molt.store import Log
from molt.store.compact import compact
from molt.store.doctor import doctor
from molt.store.readers import readers, register_reader
from molt.store.retention import retire
from molt.store.sql import run_sql

CALLS_MAX = 120
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
LATER = make.NOW.replace(tzinfo=UTC) + timedelta(days=1)


def small(path: Path) -> Log:
    """Three rollouts, two of them settled at a checkpoint; the writer is closed."""
    log = Log.create(path, run_id="run")
    make.open_epoch(log)
    log.control.put("policy", [make.policy(1, 0)])
    with log.writer(linger_s=60) as w:
        for i in range(3):
            w.append("segments", make.segment(rollout_id=f"train-{i}/0"))
            w.append("rewards", make.reward(f"train-{i}/0"))
            w.flush()
    log.control.put("drop", [make.drop_row("train-0"), make.drop_row("train-1")], {})
    (path / "checkpoints" / "1-1").mkdir()
    marker = {"epoch": 1, "step": 1, "state_digest": "a"}
    (path / "checkpoints" / "1-1" / "COMPLETE").write_text(json.dumps(marker))
    row = {**marker, "path": "checkpoints/1-1", "bytes": 0, "files": []}
    log.control.put("checkpoint", [row])
    return log


def seen(log: Log, streams: set[str] | None = None) -> list[tuple]:
    """Every visible commit; tail, doctor and SQL must agree on how many rows there are."""
    tail = log.tail(streams=streams, skip_retired=True)
    found = [(c.seq, c.stream, str(c.table.to_pylist())) for c in tail.poll()[1]]
    assert [seq for seq, *_ in found] == sorted({seq for seq, *_ in found})
    shown = streams or {"segments", "rewards"}
    query = " union all ".join(f"select seq from {stream}" for stream in shown)
    assert sorted(r[0] for r in run_sql([log], query)[1]) == [seq for seq, *_ in found]
    report = doctor(log.path)
    assert report["ok"], report["problems"]
    return found


def points(
    source: Log, act: Callable[[Log], Any], monkeypatch: pytest.MonkeyPatch, after: bool
) -> Iterator[Log]:
    """A copy of the log after each death; ends when the action outlives its last call."""
    for n in range(1, CALLS_MAX):
        log = copy(source, n)
        dying = DyingOs(n, after=after)
        with monkeypatch.context() as patch:
            patch.setattr("molt.store.files.os", dying)
            try:
                act(log)
                finished = True
            except Death:
                finished = False
        yield log
        if finished:
            assert n > 12 and dying.seen < n
            return
    raise AssertionError("more calls than expected")


def copy(log: Log, n: int) -> Log:
    shutil.copytree(log.path, log.path.with_name(f"log-{n}"))
    return Log.open(log.path.with_name(f"log-{n}"))


@pytest.mark.parametrize("after", [False, True])
def test_compaction_dies_at_its_nth_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    source = small(tmp_path / "log")
    expected = seen(source)
    for log in points(source, lambda log: compact(log, everything=True), monkeypatch, after):
        assert seen(log) == expected
        compact(log, everything=True)
        assert seen(log) == expected
        assert [p.name.split(".")[1] for p in make.data_commits(log.path)] == ["end"]


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_retention_dies_at_its_nth_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool, compacted: bool
) -> None:
    def act(log: Log) -> None:
        retire(log, now=LATER, dry_run=False)

    source = small(tmp_path / "log")
    if compacted:
        compact(source, everything=True, file_bytes=1)
    for log in points(source, act, monkeypatch, after):
        assert len(seen(log, {"rewards"})) == 3
        act(log)
        left = seen(log)
        assert [(seq, stream) for seq, stream, _ in left] == [
            (1, "rewards"),
            (3, "rewards"),
            (4, "segments"),
            (5, "rewards"),
        ]
        with pytest.raises(Retired, match="first available is 4"):
            log.tail().poll()
        files = [*make.data_commits(log.path, "segments"), *(log.path / "cold").glob("segments/*")]
        assert sum(b"train-0/0" in f.read_bytes() for f in files if f.name[0] != ".") == 0


def failures(
    source: Log, act: Callable[[Log], Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Log]:
    """A copy of the log after each failing call; what is raised is the call's own error."""
    for n in range(1, CALLS_MAX):
        log = copy(source, n)
        code = ERRORS[n % len(ERRORS)]
        faulty = FaultyOs(None, code, first=n, lost_reply=n % 2 == 0, write_first=n % 3)
        with monkeypatch.context() as patch:
            patch.setattr("molt.store.files.os", faulty)
            try:
                act(log)
                told = False
            except OSError as error:
                assert error.errno == code
                told = True
        # Success may follow a failed link whose file is there, and a dot-file that stayed.
        assert told or set(faulty.fired) <= {"link", "unlink"}
        yield log
        if not faulty.fired:
            assert n > 8
            return
    raise AssertionError("more calls than expected")


def test_compaction_is_told_of_a_failing_call_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small(tmp_path / "log")
    expected = seen(source)
    for log in failures(source, lambda log: compact(log, everything=True), monkeypatch):
        assert seen(log) == expected
        compact(log, everything=True)
        assert seen(log) == expected


@pytest.mark.parametrize("compacted", [False, True])
def test_retention_is_told_of_a_failing_call_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compacted: bool
) -> None:
    def act(log: Log) -> None:
        retire(log, now=LATER, dry_run=False)

    source = small(tmp_path / "log")
    if compacted:
        compact(source, everything=True, file_bytes=1)
    for log in failures(source, act, monkeypatch):
        assert len(seen(log, {"rewards"})) == 3
        act(log)
        assert [seq for seq, stream, _ in seen(log) if stream == "segments"] == [4]


def test_a_reader_that_could_not_register_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(log: Log) -> None:
        register_reader(log.path, "audit", {}, ttl_s=60, now=LATER)

    source = small(tmp_path / "log")
    before = {"a": 1}
    register_reader(source.path, "audit", before, ttl_s=60, now=LATER)
    for log in failures(source, act, monkeypatch):
        assert readers(log.path, LATER)["audit"] in (
            before,
            {},
        )  # the old one whole, or the new one
        act(log)
        assert readers(log.path, LATER)["audit"] == {}
