"""SQL refuses what is damaged or missing, reaches nothing else, and answers in JSON (I6)."""

import json
from pathlib import Path

import duckdb
import factories as make
import numpy as np
import pytest

from molt.schemas.errors import ConfigError, LogCorrupt, LogGap
from molt.store import Log
from molt.store.reader import writer_files, writer_names
from molt.store.snapshot import entries_of
from molt.store.sql import run_sql


def rows(log: Log, query: str, epoch=None) -> list[tuple]:
    return [tuple(r) for r in run_sql([log], query, epoch)[1]]


def test_a_query_reads_only_the_views_it_names(tiny: Log) -> None:
    for path in make.data_commits(tiny.path, "segments"):
        make.flip(path, 200)
    assert len(rows(tiny, "select step from steps")) == 2
    for view in ("segments", "tokens", "branches", "rewards", "groups"):
        with pytest.raises(LogCorrupt, match=r"\.segments: checksum"):
            rows(tiny, f"select count(*) from {view}")


def test_one_flipped_byte_anywhere_is_refused_by_name(tiny: Log) -> None:
    assert rows(tiny, "select count(*) from segments") == [(7,)]
    rng = np.random.default_rng(0)
    for path in make.data_commits(tiny.path, "segments")[:3]:
        kept = path.read_bytes()
        for at in rng.integers(0, len(kept), 5).tolist():
            make.flip(path, at, 1 << int(rng.integers(8)))
            with pytest.raises(LogCorrupt, match=rf"/{int(path.name.split('.')[0])}\.segments"):
                rows(tiny, "select count(*) from segments")
            path.write_bytes(kept)
    record = tiny.path / "train" / f"{2:010d}.arrow"
    make.flip(record, 300)
    with pytest.raises(LogCorrupt, match="control/2"):
        rows(tiny, "select 1 from plans")


def test_a_lost_commit_or_writer_is_a_gap_not_a_smaller_answer(tiny: Log) -> None:
    paths = [p for p in make.data_commits(tiny.path, "rewards") if p.parts[-3].startswith("1-")]
    kept = paths[0].read_bytes()
    paths[0].unlink()
    with pytest.raises(LogGap, match="is missing"):
        rows(tiny, "select count(*) from rewards")
    paths[0].write_bytes(kept)
    folder = paths[0].parents[1]
    folder.rename(tiny.path / "elsewhere")
    with pytest.raises(LogGap, match="commit 0 is missing"):
        rows(tiny, "select count(*) from rewards")


def test_each_file_is_verified_once_while_it_does_not_change(tiny: Log) -> None:
    file = writer_files(tiny.path, writer_names(tiny.path)[0])[1]
    first = entries_of(file)
    assert entries_of(file) is first
    make.flip(file.path, 100)
    with pytest.raises(LogCorrupt):
        entries_of(file)


@pytest.mark.parametrize(
    "query",
    [
        "select * from read_csv('/etc/passwd')",
        "attach '/tmp/other.db'",
        "copy (select 1) to '/tmp/out.csv'",
        "set enable_external_access = true",
        "install httpfs",
    ],
)
def test_a_query_reaches_nothing_outside_the_log(tiny: Log, query: str) -> None:
    with pytest.raises(ConfigError, match="the query failed"):
        run_sql([tiny], query)


def test_a_wrong_query_says_which_views_there_are(tiny: Log) -> None:
    for query in ("selct 1", "select * from tiny", "select mood from steps"):
        with pytest.raises(ConfigError, match=r"Views: branches, checkpoints.*tokens"):
            run_sql([tiny], query)


def test_results_are_json(tiny: Log) -> None:
    query = """select digest, "at", [1, null], 1.5, 'nan'::double, {'a': 'b'::blob}, 2::hugeint,
        date '2026-01-01', null, interval 1 day from segments limit 1"""
    row = json.loads(json.dumps(run_sql([tiny], query)[1], allow_nan=False))[0]
    assert len(row[0]) == 64 and row[1].startswith("20")
    assert row[2:] == [[1, None], 1.5, "nan", {"a": "62"}, 2, "2026-01-01", None, "1 day, 0:00:00"]


def test_log_sql_gives_a_relation_that_outlives_its_connection(tiny: Log) -> None:
    relation = tiny.sql("select count(*) from segments", epoch="all")
    assert isinstance(relation, duckdb.DuckDBPyRelation) and relation.fetchall() == [(8,)]


def test_a_log_without_any_record_shows_its_rows(tmp_path: Path) -> None:
    log = Log.create(tmp_path / "bare")
    with log.writer() as w:
        make.append_rollout(w, "train-0/0", version=3)
    assert rows(log, "select count(*) from tokens") == [(5,)]
    assert rows(log, "select * from plans") == []
