"""Users' own streams in SQL: rows that were published twice, and columns that cannot be shown."""

import errno

import factories as make
import pyarrow as pa
import pytest

from molt.schemas.errors import SchemaMismatch
from molt.store import Log, files, snapshot
from molt.store.compact import compact
from molt.store.sql import connect, run_sql


def rows(log: Log, query: str) -> list[list]:
    return run_sql([log], query)[1]


def schema(**types: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, type_) for name, type_ in types.items()])


def published_again(log: Log, monkeypatch: pytest.MonkeyPatch, *values: object, later: bool = True):
    """A writer whose commit of these rows is there twice: its outcome was not known."""
    w = log.writer(linger_s=60, user_schemas={"x_a": schema(v=pa.float64())})
    if later:
        w.append("rewards", make.reward())
        w.flush()
    real = files.fsync_dir

    def fail_once(path) -> None:
        if path.name == "000000":
            monkeypatch.setattr(files, "fsync_dir", real)
            raise OSError(errno.EIO, "io")
        real(path)

    monkeypatch.setattr(files, "fsync_dir", fail_once)
    tickets = [w.append("x_a", {"v": v}) for v in values]
    w.flush()
    return w, [t.result() for t in tickets]


@pytest.mark.parametrize("cold", [False, True])
def test_a_commit_that_was_published_again_counts_once(log: Log, monkeypatch, cold: bool) -> None:
    w, refs = published_again(log, monkeypatch, 1.0, float("nan"))
    assert len(make.data_commits(log.path, "x_a")) == 2
    if cold:
        w.close()
        compact(log, everything=True)
    expected = [[r.writer, r.seq, r.row] for r in refs]
    assert rows(log, "select writer, seq, row from x_a order by row") == expected


def test_it_is_shown_if_both_are_all_that_their_writers_have(log: Log, monkeypatch) -> None:
    published_again(log, monkeypatch, 1.0, later=False)
    assert rows(log, "select count(*) from x_a") == [[1]]


def test_equal_rows_that_were_appended_twice_are_two(log: Log, monkeypatch) -> None:
    w, _ = published_again(log, monkeypatch, 1.0, 1.0)
    w.append("x_a", {"v": 1.0, "at": make.NOW})
    w.append("x_a", {"v": 1.0, "at": make.NOW})
    w.flush()
    with log.writer(linger_s=60, user_schemas={"x_a": schema(v=pa.float64())}) as other:
        for _ in range(2):
            other.append("x_a", {"v": 1.0})
            other.flush()
    assert rows(log, "select count(*) from x_a where v = 1") == [[6]]


def test_only_what_may_be_a_copy_is_read_for_it(log: Log, monkeypatch) -> None:
    read = []
    real = snapshot._equal
    monkeypatch.setattr(snapshot, "_equal", lambda *two: read.append(two) or real(*two))
    for _ in range(3):
        w = log.writer(linger_s=60, user_schemas={"x_a": schema(v=pa.float64())})
        w.append("x_a", {"v": 1.0})
        w.flush()
    assert rows(log, "select count(*) from x_a") == [[3]] and not read


def test_columns_that_contradict_each_other_are_named(log: Log) -> None:
    refs = []
    for v, type_ in ((1, pa.int64()), (1.5, pa.float64()), ("a", pa.string())):
        with log.writer(user_schemas={"x_a": schema(v=type_)}) as w:
            ticket = w.append("x_a", {"v": v})
        refs.append(ticket.result())
    expected = r"x_a: column 'v' is (int64|double|string) in \S+/0 and \w+ in \S+/0"
    with pytest.raises(SchemaMismatch, match=expected) as error:
        rows(log, "select count(*) from x_a")
    assert sum(r.writer in str(error.value) for r in refs) == 2
    assert rows(log, "select 1") == [[1]] and ["x_a"] not in rows(log, "show tables")
    assert connect([log]).sql("select count(*) from policies").fetchall() == [(1,)]


@pytest.mark.parametrize(
    ("type_", "value"), [(pa.float16(), 1.5), (pa.large_list(pa.float16()), [1.5])]
)
def test_a_type_that_duckdb_has_not_is_named(log: Log, type_: pa.DataType, value: object) -> None:
    with log.writer(user_schemas={"x_a": schema(n=pa.int64(), v=type_)}) as w:
        w.append("x_a", {"n": 1, "v": value})
    with pytest.raises(SchemaMismatch, match=r"x_a: DuckDB has no type for 'v' \(.*halffloat"):
        rows(log, "select n from x_a")
    assert rows(log, "select 1") == [[1]]
