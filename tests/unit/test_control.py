"""The control log: one sequence, exclusive numbers, and who belongs to which lineage (I4, I5)."""

import errno
from concurrent.futures import ThreadPoolExecutor

import factories as make
import pytest
from faulty import FaultyOs

from molt.schemas.control import CONTROL, HEADERS
from molt.schemas.errors import ConfigError, Fenced, LogCorrupt, LogGap, SegmentRejected
from molt.store import Log
from molt.store.control import lineage_of, read_records
from molt.store.files import STORE
from molt.store.sql import run_sql


def kinds(log: Log) -> list[tuple[int, str, int]]:
    return [(r.n, r.kind, r.epoch) for r in log.records()]


def test_records_are_numbered_from_zero_without_a_hole(log: Log) -> None:
    log.control.put("drop", [make.drop_row("train-0"), make.drop_row("train-1")], {})
    assert kinds(log) == [(0, "epoch", 1), (1, "policy", 1), (2, "drop", 1)]
    assert [r["group_id"] for r in log.records()[2].rows] == ["train-0", "train-1"]
    assert log.records(2)[0].header == {"epoch": 1}


def test_every_kind_of_record_comes_back(tiny: Log) -> None:
    assert {r.kind for r in tiny.records()} == set(CONTROL)
    for record in tiny.records():
        assert set(record.header) == HEADERS.get(record.kind, frozenset())


def test_a_driver_that_lost_the_log_is_fenced_and_changes_nothing(log: Log) -> None:
    other = Log.open(log.path)
    make.open_epoch(other)
    before = kinds(log)
    with pytest.raises(Fenced, match="'epoch' of epoch 2"):
        log.control.put("policy", [make.policy(1, 1)])
    assert kinds(log) == before
    assert other.control.put("policy", [make.policy(2, 1)]) == 3
    with pytest.raises(Fenced):
        log.control.put("policy", [make.policy(1, 1)])


def test_two_drivers_that_start_at_once_get_different_epochs(log: Log) -> None:
    with ThreadPoolExecutor(4) as pool:
        epochs = list(pool.map(lambda _: make.open_epoch(Log.open(log.path)).epoch, range(4)))
    assert sorted(epochs) == [2, 3, 4, 5]
    assert [r.epoch for r in log.records() if r.kind == "epoch"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("kind", "rows", "header", "why"),
    [
        ("vote", [{}], None, "unknown control record 'vote'"),
        ("drop", [make.drop_row("train-0")], None, "header of 'drop'"),
        ("policy", [make.policy(1, 0)], {"x": 1}, "header of 'policy'"),
        ("policy", [make.policy(1, 0, mood="calm")], None, "unknown field 'mood'"),
        ("policy", [make.policy(1, 0, kv="lost")], None, "kv 'lost' is none of"),
        ("plan", [make.plan_row("a-0/0", [], decision="maybe")], make.plan_header(1), "decision"),
    ],
)
def test_a_bad_record_is_refused_and_takes_no_number(
    log: Log, kind: str, rows: list, header: dict | None, why: str
) -> None:
    with pytest.raises(SegmentRejected, match=why):
        log.control.put(kind, rows, header)
    assert log.control.put("policy", [make.policy(1, 1)]) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"x"])
def test_a_header_that_is_not_json_is_refused(log: Log, value: object) -> None:
    with pytest.raises(SegmentRejected, match="header of 'plan'"):
        log.control.put("plan", [], make.plan_header(1, max_lag=value))
    assert log.control.put("policy", [make.policy(1, 1)]) == 2


def test_a_put_of_unknown_outcome_can_be_repeated(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second fsync is that of the folder, behind the link: the record is there, or not."""
    for n, lost in ((2, {"call": "fsync", "first": 2}), (3, {"call": "write"})):
        with monkeypatch.context() as patch:
            patch.setattr("molt.store.files.os", FaultyOs(error=errno.EIO, **lost))
            with pytest.raises(OSError):
                log.control.put("policy", [make.policy(1, n)])
        if len(log.records()) > n:
            with pytest.raises(Fenced, match="a 'policy' that this driver could not confirm"):
                log.control.put("drop", [make.drop_row("train-0")], {})
        assert log.control.put("policy", [make.policy(1, n)]) == n
    assert log.control.put("policy", [make.policy(1, 4)]) == 4
    assert kinds(log)[1:] == [(n, "policy", 1) for n in range(1, 5)]
    other = Log.open(log.path)
    with monkeypatch.context() as patch:
        patch.setattr("molt.store.files.os", FaultyOs("write", errno.EIO))
        with pytest.raises(OSError):
            log.control.put("policy", [make.policy(1, 5)])
    make.open_epoch(other)
    with pytest.raises(Fenced, match="'epoch' of epoch 2"):
        log.control.put("policy", [make.policy(1, 5)])


def test_a_missing_record_is_a_gap_and_a_damaged_one_is_named(log: Log) -> None:
    log.control.put("policy", [make.policy(1, 1)])
    path = log.path / "train" / f"{1:010d}.arrow"
    make.flip(path, 100)
    with pytest.raises(LogCorrupt, match="control/1"):
        log.records()
    path.unlink()
    with pytest.raises(LogGap, match="record 1 is missing, 2 is there"):
        log.records()


def test_a_new_epoch_closes_the_writers_of_older_ones(log: Log) -> None:
    w = log.writer(linger_s=60)
    w.append("rewards", make.reward())
    w.flush()
    record = make.open_epoch(Log.open(log.path))
    assert record.rows[0]["closed"] == [{"writer": w.name, "last_seq": 0}]
    w.append("rewards", make.reward(revision=1))
    w.close()
    line = lineage_of(log.records())
    assert line.last_seq(w.name) == 0
    assert line.last_seq("1-host-1-abc") == -1, "a writer of epoch 1 that nobody saw"
    assert line.last_seq("2-host-1-abc") is None
    assert make.open_epoch(Log.open(log.path)).rows[0]["closed"] == []


def test_a_cut_is_inclusive_and_hides_the_abandoned_future(tiny: Log) -> None:
    records = tiny.records()
    cut = next(r for r in records if r.epoch == 2).rows[0]["cut"]
    line = lineage_of(records)
    assert records[cut].kind == "policy" and line.holds(cut) and not line.holds(cut + 1)
    held = [(r.kind, r.epoch) for r in records if line.holds(r.n)]
    assert held == [
        ("epoch", 1),
        ("policy", 1),
        ("plan", 1),
        ("drop", 1),
        ("step", 1),
        ("policy", 1),
        ("epoch", 2),
        ("policy", 2),
        ("plan", 2),
        ("step", 2),
        ("policy", 2),
        ("checkpoint", 2),
    ]


def test_the_lineage_of_an_older_epoch_ends_where_the_newer_one_begins(tiny: Log) -> None:
    records = tiny.records()
    line = lineage_of(records, epoch=1)
    assert [r.n for r in records if line.holds(r.n)] == [r.n for r in records if r.epoch == 1]


def test_a_fork_of_a_fork_takes_the_shorter_cut(log: Log) -> None:
    for version in (1, 2, 3):
        log.control.put("policy", [make.policy(1, version)])
    second = Log.open(log.path)
    make.open_epoch(second, cut=3)
    second.control.put("policy", [make.policy(2, 2)])
    third = Log.open(log.path)
    make.open_epoch(third, parent_epoch=2, cut=6)
    line = lineage_of(third.records())
    assert [r.n for r in third.records() if line.holds(r.n)] == [0, 1, 2, 3, 5, 6, 7]


def test_an_unknown_epoch_is_named(log: Log) -> None:
    with pytest.raises(ConfigError, match=r"no epoch 7 in this log; known: \[1\]"):
        lineage_of(log.records(), epoch=7)


def test_a_log_of_another_format_is_refused(log: Log) -> None:
    (log.path / "format.json").write_text('{"format": "2.0", "run_id": "r"}')
    with pytest.raises(ValueError, match=r"log format 2\.0, this program reads 1\.0"):
        Log.open(log.path)
    (log.path / "format.json").write_text("{")
    with pytest.raises(LogCorrupt, match="damaged"):
        Log.open(log.path)
    (log.path / "format.json").unlink()
    with pytest.raises(FileNotFoundError, match="not a molt log"):
        Log.open(log.path)


def test_creating_a_log_twice_opens_the_first(log: Log) -> None:
    assert Log.create(log.path, run_id="other").run_id == "run"
    assert len(read_records(log.path)) == 2
    assert oct(log.path.stat().st_mode & 0o777) == "0o700"


def test_an_epoch_does_not_give_up_what_lies_behind_a_gap(tiny: Log) -> None:
    """A start must not close a writer at a hole: what lies behind would be invisible for ever."""
    with tiny.writer(2) as w:
        for k in range(3):
            w.append("rewards", make.reward(f"train-9/{k}"))
            w.flush()
        name = w.name
    (tiny.path / "data" / name / "000000" / "0000000001.rewards.arrow").unlink()
    before = len(tiny.records())
    with pytest.raises(LogGap, match="commit 1 is missing, 2 is there"):
        make.open_epoch(tiny)
    assert len(tiny.records()) == before
    with pytest.raises(LogGap, match="commit 1 is missing"):
        tiny.sql("select count(*) from rewards").fetchall()


def test_what_one_epoch_hid_the_next_one_does_not_show(log: Log) -> None:
    """A worker of epoch 1 opens its directory after epoch 2 began: hidden then, and for ever."""
    make.open_epoch(log)
    with log.writer(1) as late:
        late.append("rewards", make.reward())
    assert log.tail().poll()[1] == []
    make.open_epoch(log)
    assert log.tail().poll()[1] == []
    assert run_sql([log], "select count(*) from rewards")[1] == [[0]]


def test_a_cut_before_its_parents_own_beginning_holds_for_all_ancestors(log: Log) -> None:
    for version in (1, 2, 3):
        log.control.put("policy", [make.policy(1, version)])
    second = Log.open(log.path)
    make.open_epoch(second)
    third = Log.open(log.path)
    make.open_epoch(third, cut=3)
    line = lineage_of(third.records())
    assert [r.n for r in third.records() if line.holds(r.n)] == [0, 1, 2, 3, 6]
    assert sorted(line.spans) == [1, 3]


@pytest.mark.parametrize("wrong", [{"cut": 2}, {"cut": -1}, {"parent_epoch": 7}])
def test_an_epoch_goes_on_from_what_is_there(log: Log, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="no epoch 7 in this log|one of the 2 records"):
        make.open_epoch(log, **wrong)
    assert len(log.records()) == 2


def test_a_record_is_read_again_before_damage_is_believed(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = [-50, None]
    real = STORE.read
    monkeypatch.setattr(STORE, "read", lambda key: real(key)[: cut.pop(0) if cut else None])
    assert [r.kind for r in log.records()] == ["epoch", "policy"] and not cut
