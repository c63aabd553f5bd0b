"""Every system call of a publish fails once: the caller is told, or the row is there (I6)."""

import errno
from typing import Any

import factories as make
import pytest
from faulty import FaultyOs, ShortWrites

from molt.schemas.errors import Fenced
from molt.store import Log
from molt.store.doctor import doctor
from molt.store.reader import writer_names
from molt.store.sql import run_sql

CALLS_MAX = 60
"""More than one append with its directories needs; the loop ends when nothing is left to fail."""


def revisions(log: Log) -> list[int]:
    """What every reader sees; SQL and the tail must agree."""
    in_sql = [r[0] for r in run_sql([log], "select revision from rewards order by 1")[1]]
    commits = log.tail(streams={"rewards"}).poll()[1]
    in_tail = sorted(r for c in commits for r in c.table.column("revision").to_pylist())
    assert in_sql == sorted(set(in_tail))
    return in_sql


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (errno.EIO, {}),
        (errno.EIO, {"lost_reply": True}),
        (errno.ENOSPC, {"write_first": 100}),
    ],
)
@pytest.mark.parametrize("call", [None, "write", "fsync", "link", "open", "close", "unlink"])
def test_the_nth_call_of_an_append_fails(
    log: Log, monkeypatch: pytest.MonkeyPatch, call: str | None, code: int, fault: dict[str, Any]
) -> None:
    expected = []
    for n in range(1, CALLS_MAX):
        faulty = FaultyOs(call, code, first=n, **fault)
        with log.writer(linger_s=60) as w:
            w.append("rewards", make.reward(revision=2 * n))
            w.flush()
            expected.append(2 * n)
            row = make.reward(revision=2 * n + 1)
            with monkeypatch.context() as patch:
                patch.setattr("molt.store.files.os", faulty)
                ticket = w.append("rewards", row)
                try:
                    w.flush()
                    told = None
                except OSError as error:
                    told = error
                    assert error.errno == code
            assert ticket.done() and (ticket.exception() is None) == (told is None)
            seen = revisions(log)
            # An error may still have left the row behind (its directory's fsync failed); a
            # success never lacks it, and earlier rows are always there.
            assert set(expected) <= set(seen) <= {*expected, 2 * n + 1}
            if told is None:
                assert 2 * n + 1 in seen
                assert log.row(ticket.result())["revision"] == 2 * n + 1
            again = w.append("rewards", row)
            w.flush()
            assert log.row(again.result())["revision"] == 2 * n + 1
            expected.append(2 * n + 1)
            assert revisions(log) == expected
        if not faulty.fired:
            break
    assert n > 1 and not faulty.fired, "the loop ended because no call was left to fail"
    report = doctor(log.path)
    assert report["ok"], report["problems"]


def test_short_writes_are_no_failure(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may write less than it was given, and say so; the rest follows."""
    short = ShortWrites(97)
    monkeypatch.setattr("molt.store.files.os", short)
    with log.writer(linger_s=60) as w:
        w.append("rewards", make.reward())
        w.append("segments", make.segment(ids=range(5000)))
        w.flush()
        log.control.put("policy", [make.policy(1, 1)])
    assert short.writes > 100
    assert revisions(log) == [0]
    assert run_sql([log], "select sum(n_tokens) from segments")[1] == [[5000]]
    report = doctor(log.path)
    assert report["ok"], report["problems"]


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (errno.EIO, {}),
        (errno.EIO, {"lost_reply": True}),
        (errno.ENOSPC, {"write_first": 100}),
    ],
)
def test_the_nth_call_of_a_control_put_fails(
    log: Log, monkeypatch: pytest.MonkeyPatch, code: int, fault: dict[str, Any]
) -> None:
    for n in range(1, CALLS_MAX):
        faulty = FaultyOs(None, code, first=n, **fault)
        before = len(log.records())
        with monkeypatch.context() as patch:
            patch.setattr("molt.store.files.os", faulty)
            try:
                number = log.control.put("policy", [make.policy(1, n)])
                told = None
            except OSError as error:
                told = error
        records = log.records()
        assert [r.n for r in records] == list(range(len(records)))
        if told is None:
            assert number == before == len(records) - 1
            assert records[-1].rows[0]["version"] == n
        else:
            # The record may be there though its fsync failed: the same one is the same record,
            # another one must not go on as if that number were free.
            if len(records) > before:
                with pytest.raises(Fenced):
                    log.control.put("policy", [make.policy(1, n + CALLS_MAX)])
            assert log.control.put("policy", [make.policy(1, n)]) == before
            assert len(log.records()) == before + 1
        if not faulty.fired:
            break
    assert n > 3 and not faulty.fired
    assert doctor(log.path)["ok"]


def test_a_failure_while_a_directory_is_made_is_told_and_can_be_repeated(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in ("mkdir", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr("molt.store.files.os", FaultyOs(call, errno.ENOSPC))
            with pytest.raises(OSError) as error:
                log.writer()
        assert error.value.errno == errno.ENOSPC
    with log.writer() as w:
        w.append("rewards", make.reward())
    assert revisions(log) == [0]


def test_a_failed_commit_takes_the_rows_behind_it_along(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outcome must not be visible without the segments that were appended before it."""
    with log.writer(linger_s=60) as w:
        segment = make.segment()
        with monkeypatch.context() as patch:
            patch.setattr("molt.store.files.os", FaultyOs("write", errno.ENOSPC))
            tickets = [
                w.append("segments", segment),
                w.append("rewards", make.reward()),
                w.append("rollouts", make.rollout(digests=[segment["digest"]])),
            ]
            for ticket in tickets:
                assert isinstance(ticket.exception(timeout=30), OSError)
        for view in ("segments", "rewards", "rollouts"):
            assert run_sql([log], f"select count(*) from {view}")[1] == [[0]]
        w.append("segments", segment)
        w.append("rollouts", make.rollout(digests=[segment["digest"]]))
        w.flush()
    assert run_sql([log], "select count(*) from rollouts")[1] == [[1]]


def test_after_an_unknown_outcome_the_writer_moves_to_a_new_directory(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    with log.writer(linger_s=60) as w:
        first = w.name
        w.append("rewards", make.reward(revision=0))
        w.flush()
        # The second fsync of a publish is that of the directory, behind the link.
        with monkeypatch.context() as patch:
            patch.setattr("molt.store.files.os", FaultyOs("fsync", errno.EIO, first=2))
            ticket = w.append("rewards", make.reward(revision=1))
            w.flush()
        assert w.name != first and ticket.result().writer == w.name
    assert set(writer_names(log.path)) == {first, w.name}
    assert run_sql([log], "select count(*) from rewards where revision = 1")[1] == [[1]]
