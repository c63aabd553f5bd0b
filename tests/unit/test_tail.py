"""The tail: each visible commit once, in order, and never a partial one."""

import datetime

import factories as make
import pytest

from molt.schemas.errors import LogCorrupt, LogGap
from molt.store import Log, control
from molt.store.files import STORE
from molt.store.reader import BUCKET, commit_path, find_commit, parse_name, writer_names
from molt.store.readers import readers


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def put(w, revision: int):
    ticket = w.append("rewards", make.reward(revision=revision))
    w.flush()
    return ticket.result()


def revisions(commits) -> list[int]:
    return [r for c in commits for r in c.table.column("revision").to_pylist()]


def test_each_commit_is_delivered_once_and_in_order(log: Log) -> None:
    tail = log.tail()
    with log.writer(linger_s=60) as w:
        seen = []
        for i in range(5):
            put(w, i)
            seen += revisions(tail.poll()[1])
        assert seen == list(range(5))
    assert tail.poll() == ([], [])


def test_records_come_with_the_data_and_before_it(tiny: Log) -> None:
    records, commits = tiny.tail().poll()
    assert [r.n for r in records] == list(range(len(records)))
    assert {c.stream for c in commits} == {"prompts", "segments", "rewards", "rollouts"}


@pytest.mark.parametrize("changes", [True, False])
def test_an_unchanged_control_log_is_not_listed(
    log: Log, changes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a folder does not say that it changed, a record comes late but it comes."""
    if not changes:
        monkeypatch.setattr(type(STORE), "identity", lambda *_: (0, 0, 0))
    listed = []
    real = control.control_numbers
    monkeypatch.setattr(control, "control_numbers", lambda *a: listed.append(a) or real(*a))
    clock = Clock()
    tail = log.tail(clock=clock)
    for clock.now in (0.0, 1.0, 3.0, 4.0, 5.0):
        tail.poll()
    assert len(listed) == 3  # twice while it might still change unseen, and once to be believed
    n = log.control.put("drop", [make.drop_row("train-0")], {})
    late = 0.0 if changes else control.LISTED_S_MAX
    found = []
    for clock.now in (5.0, 5.0 + late):
        found += [(r.n, clock.now) for r in tail.poll()[0]]
    assert found == [(n, 5.0 + late)]


def test_only_asked_streams_and_columns_are_decoded(tiny: Log) -> None:
    tail = tiny.tail(streams={"segments"}, columns={"segments": ["rollout_id", "digest"]})
    commits = tail.poll()[1]
    assert {c.stream for c in commits} == {"segments"}
    assert all(sorted(c.table.column_names) == ["digest", "rollout_id"] for c in commits)


def test_the_tail_crosses_buckets(log: Log) -> None:
    tail = log.tail()
    with log.writer(linger_s=60) as w:
        put(w, 0)
        assert revisions(tail.poll()[1]) == [0]
        w._seq = tail._cursors[w.name].next_seq = BUCKET - 1
        put(w, 1)
        put(w, 2)
        assert revisions(tail.poll()[1]) == [1, 2]


def test_commits_behind_a_newer_epoch_stay_invisible(tiny: Log) -> None:
    rollouts = {
        r
        for c in tiny.tail(streams={"rollouts"}).poll()[1]
        for r in c.table.column("rollout_id").to_pylist()
    }
    assert "train-4/0" in rollouts and "train-5/0" not in rollouts


def test_a_worker_that_missed_the_epoch_is_not_heard(log: Log) -> None:
    tail = log.tail()
    tail.poll()
    make.open_epoch(Log.open(log.path))
    with log.writer(1) as late:
        put(late, 0)
    assert revisions(tail.poll()[1]) == []


def test_a_gap_waits_and_then_alarms(log: Log) -> None:
    clock = Clock()
    tail = log.tail(clock=clock, gap_s_max=10.0)
    with log.writer(linger_s=60) as w:
        refs = [put(w, i) for i in range(3)]
        hole = commit_path(log.path, w.name, refs[1].seq, "rewards")
        kept = hole.read_bytes()
        hole.unlink()
        assert revisions(tail.poll()[1]) == [0]
        clock.now = 9.0
        assert tail.poll() == ([], [])
        hole.write_bytes(kept)
        assert revisions(tail.poll()[1]) == [1, 2], "late visibility is no damage"
        hole = commit_path(log.path, w.name, put(w, 3).seq, "rewards")
        put(w, 4)
        hole.unlink()
        tail.poll()
        clock.now = 30.0
        with pytest.raises(LogGap, match="commit 3 has been missing for more than 10 s while 4"):
            tail.poll()


def test_a_damaged_commit_is_named_and_nothing_of_it_is_delivered(log: Log) -> None:
    with log.writer(linger_s=60) as w:
        ref = put(w, 0)
        make.flip(commit_path(log.path, w.name, ref.seq, "rewards"), 200)
        with pytest.raises(LogCorrupt, match=rf"{w.name}/0\.rewards"):
            log.tail().poll()


def test_two_commits_with_one_number_are_corrupt(log: Log) -> None:
    with log.writer(linger_s=60) as w:
        path = commit_path(log.path, w.name, put(w, 0).seq, "rewards")
        path.with_name(path.name.replace("rewards", "scores")).write_bytes(path.read_bytes())
        with pytest.raises(LogCorrupt, match="two commits with number 0: rewards, scores"):
            log.tail().poll()


def test_dot_files_and_strangers_are_no_commits(log: Log) -> None:
    with log.writer(linger_s=60) as w:
        path = commit_path(log.path, w.name, put(w, 0).seq, "rewards")
        path.with_name(f".{path.name}.1.abc").write_bytes(b"half of a com")
        for name in (
            "notes.txt",
            "7.rewards.arrow",
            "0000000001.arrow",
            "²000000001.rewards.arrow",
        ):
            (path.parent / name).write_bytes(b"")
            assert parse_name(path.parent, w.name, name) is None
        (log.path / "data" / "tmp").mkdir()
        assert revisions(log.tail().poll()[1]) == [0] and writer_names(log.path) == [w.name]


def test_rows_are_found_by_address_through_a_bounded_cache(log: Log) -> None:
    with log.writer(linger_s=60) as w:
        refs = [put(w, i) for i in range(4)]
    log._rows.cache_bytes_max = 1
    assert [log.row(r)["revision"] for r in (*refs, *refs)] == [0, 1, 2, 3] * 2
    assert len(log._rows._cache) == 1
    with pytest.raises(LogCorrupt, match="the commit has 1 rows"):
        log.row(refs[0].__class__(writer=w.name, seq=0, row=5))
    with pytest.raises(LogCorrupt, match="not in the log"):
        find_commit(log.path, w.name, 99)


def test_a_long_history_comes_in_pieces_each_commit_once(log: Log) -> None:
    for k in range(3):
        with log.writer(linger_s=60) as w:
            for i in range(4):
                put(w, 4 * k + i)
    tail, seen, sizes = log.tail(streams={"rewards"}, commits_max=5), [], []
    tail.more = True
    while tail.more:
        commits = tail.poll()[1]
        sizes.append(len(commits))
        seen += revisions(commits)
    assert sorted(seen) == list(range(12)) and sizes == [5, 5, 2]
    assert tail.poll()[1] == [] and not tail.more


@pytest.mark.parametrize("streams", [None, {"rewards"}])
@pytest.mark.parametrize("commits_max", [None, 3, 64])
def test_what_was_read_before_an_error_comes_with_the_next_poll(
    log: Log, streams, commits_max: int | None
) -> None:
    first, last = sorted((log.writer(linger_s=60) for _ in range(2)), key=lambda w: w.name)
    for i in range(3):
        put(first, i)
    bad = commit_path(log.path, last.name, put(last, 3).seq, "rewards")
    good = bad.read_bytes()
    make.flip(bad, 300)
    tail = log.tail(streams=streams, commits_max=commits_max)
    records, commits = ([], []) if commits_max != 3 else tail.poll()
    for _ in range(2):
        with pytest.raises(LogCorrupt):
            tail.poll()
    bad.write_bytes(good)
    for _ in range(2):
        more = tail.poll()
        records, commits = records + more[0], commits + more[1]
    assert [r.n for r in records] == [0, 1] and revisions(commits) == [0, 1, 2, 3]
    for w in (first, last):
        w.close()


def test_a_record_that_cannot_be_read_costs_no_other_one(log: Log) -> None:
    """The epoch in front of it counts all the same: it closes the writers of the older one."""
    w = log.writer(linger_s=60)
    put(w, 0)
    tail = log.tail()
    w2 = Log.open(log.path)
    make.open_epoch(w2)
    put(w, 1)
    n = w2.control.put("policy", [make.policy(2, 0)])
    path = log.path / "train" / f"{n:010d}.arrow"
    good = path.read_bytes()
    make.flip(path, 300)
    with pytest.raises(LogCorrupt, match=f"control/{n}"):
        tail.poll()
    path.write_bytes(good)
    records, commits = tail.poll()
    assert [r.n for r in records] == list(range(n + 1)) and revisions(commits) == [0]


def test_what_waits_for_delivery_is_hidden_by_a_newer_epoch_and_held_in_retention(log: Log) -> None:
    first, last = sorted((log.writer(linger_s=60) for _ in range(2)), key=lambda w: w.name)
    bad = commit_path(log.path, last.name, put(last, 9).seq, "rewards")
    good = bad.read_bytes()
    make.flip(bad, 300)
    clock = Clock()
    tail = log.tail(register="me", register_s=10.0, clock=clock)
    for i in range(2):
        put(first, i)
        for _ in range(2):
            clock.now += 2
            with pytest.raises(LogCorrupt):
                tail.poll()
        assert readers(log.path, datetime.datetime.now(datetime.UTC))["me"][first.name] == 0
    late = commit_path(log.path, first.name, 1, "rewards")
    kept = late.read_bytes()
    late.unlink()  # not visible yet to the driver that opens the epoch
    make.open_epoch(Log.open(log.path))
    late.write_bytes(kept)
    bad.write_bytes(good)
    assert revisions(tail.poll()[1]) == [0, 9]


def test_a_missing_record_waits_and_then_alarms(log: Log) -> None:
    for version in (1, 2):
        log.control.put("policy", [make.policy(1, version)])
    hole = log.path / "train" / f"{2:010d}.arrow"
    kept = hole.read_bytes()
    hole.unlink()
    clock = Clock()
    tail = log.tail(clock=clock, gap_s_max=10.0)
    assert [r.n for r in tail.poll()[0]] == [0, 1]
    clock.now = 9.0
    assert tail.poll() == ([], [])
    clock.now = 11.0
    with pytest.raises(
        LogGap, match="control record 2 has been missing for more than 10 s while 3"
    ):
        tail.poll()
    hole.write_bytes(kept)
    assert [r.n for r in tail.poll()[0]] == [2, 3]
