"""Reading ahead changes when a commit is read, not what is delivered, its order or its errors."""

import threading
from pathlib import Path

import factories as make
import numpy as np
import pyarrow as pa
import pytest

from molt.schemas.errors import LogCorrupt
from molt.schemas.records import Ref
from molt.store import Log, reader
from molt.store.commit import decode
from molt.store.reader import CommitFile, read_ahead, read_commit, writer_files

N = 6


@pytest.fixture
def commits(log: Log) -> list[CommitFile]:
    """N commits, each large enough to be read by another thread."""
    rng = np.random.default_rng(0)
    with log.writer(linger_s=60) as w:
        for i in range(N):
            ids = rng.integers(0, 1 << 30, 40_000).astype(np.int32)
            w.append("segments", make.segment(rollout_id=f"train-{i}/0", ids=ids))
            w.flush()
    files = writer_files(log.path, w.name)[:N]
    assert all(f.path.stat().st_size >= reader.AHEAD_BYTES_MIN for f in files)
    return files


def test_what_is_only_copied_is_read_where_it_is_used(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("molt.store.commit.COMPRESS_BYTES_MIN", 1 << 60)
    with log.writer(linger_s=60) as w:
        for i in range(2):
            w.append("segments", make.segment(rollout_id=f"train-{i}/0", ids=range(40_000)))
            w.flush()
    for _, read in read_ahead(writer_files(log.path, w.name)[:2]):
        assert read().table.num_rows == 1 and threads() == []


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("molt-read")]


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_commits_come_in_order_and_no_thread_stays(commits: list[CommitFile]) -> None:
    found = [(file, read()) for file, read in read_ahead(commits)]
    assert [file for file, _ in found] == commits
    assert all(c.table.equals(read_commit(f).table) for f, c in found)
    assert threads() == []
    ahead = read_ahead(commits)
    next(ahead)
    assert threads() != []
    ahead.close()
    assert threads() == []


def test_damage_is_told_at_its_own_commit(commits: list[CommitFile]) -> None:
    damage(commits[2].path)
    commits[4].path.unlink()
    seen = []
    for file, read in read_ahead(commits):
        try:
            seen.append(read().seq)
        except (LogCorrupt, FileNotFoundError) as error:
            seen.append(type(error))
            assert file.seq in (2, 4)
    assert seen == [0, 1, LogCorrupt, 3, FileNotFoundError, 5]


@pytest.mark.parametrize("limit", ["commits", "bytes"])
def test_reading_ahead_ends_at_its_bound(
    commits: list[CommitFile], monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    if limit == "commits":
        monkeypatch.setattr(reader, "AHEAD_COMMITS", 2)
    else:
        sizes = sorted(f.path.stat().st_size for f in commits)
        monkeypatch.setattr(reader, "AHEAD_BYTES_MAX", sizes[0] + sizes[1] + 1000)
        assert sizes[-1] < sizes[0] + 500
    for i, (_, read) in enumerate(read_ahead(counted(commits, asked := []))):
        assert len(asked) <= i + 3  # this one, two ahead
        read()
    assert len(asked) == N


def counted(files: list[CommitFile], asked: list[int]):
    for file in files:
        asked.append(file.seq)
        yield file


def test_a_tail_stops_and_goes_on_where_it_was(log: Log, commits: list[CommitFile]) -> None:
    damage(commits[3].path)
    told: list[int] = []
    tail = log.tail(commits_max=2, on_corrupt=lambda file, error: told.append(file.seq))
    polls = [[c.seq for c in tail.poll()[1]] for _ in range(4)]
    assert polls == [[0, 1], [2, 4], [5], []]
    assert told == [3] and threads() == []


def test_rows_of_many_commits_are_read_ahead_and_cached(
    log: Log, commits: list[CommitFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = [Ref(writer=f.writer, seq=f.seq, row=0) for f in commits]
    wanted = [f"train-{i}/0" for i in (5, 1, 3)]
    assert [r["rollout_id"] for r in log.rows([refs[5], refs[1], refs[3]])] == wanted
    n = log._rows.bytes_read
    assert [r["rollout_id"] for r in log.rows([refs[5], refs[1], refs[3]])] == wanted
    assert log._rows.bytes_read == n
    small = reader.RowReader(log.path, cache_bytes_max=1)  # each commit pushes the last one out
    assert [r["rollout_id"] for r in small.rows(refs)] == [f"train-{i}/0" for i in range(N)]
    damage(commits[3].path)
    with pytest.raises(LogCorrupt, match=r"/3\.segments"):
        reader.RowReader(log.path).table(refs, ["token_ids"])
    assert threads() == []


@pytest.mark.parametrize("n_tokens", [100, 40_000])  # uncompressed, compressed
def test_picked_columns_are_those_of_the_whole_commit(log: Log, n_tokens: int) -> None:
    with log.writer(linger_s=60) as w:
        w.append("segments", make.segment(ids=range(n_tokens)))
    file = writer_files(log.path, w.name)[0]
    raw = file.path.read_bytes()
    whole = read_commit(file).table
    for columns in (["token_ids", "logprobs", "sampled", "train"], ["digest"], ["at", "at"]):
        picked = decode(raw, stream="segments", writer=w.name, seq=0, columns=columns).table
        assert picked.column_names == [c for c in whole.column_names if c in columns]
        assert picked.equals(whole.select(picked.column_names))
    digest = decode(raw, stream="segments", writer=w.name, seq=0, columns=["digest"]).table
    place, start = digest.column(0).chunk(0).buffers()[1].address, pa.py_buffer(raw).address
    assert not start <= place < start + len(raw), "one small column keeps the whole file in memory"
