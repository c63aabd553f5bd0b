"""Reads by address: only the rows that were asked for, packed columns, ranges of routing."""

import contextlib

import factories as make
import numpy as np
import pytest

from molt.schemas.columns import flat
from molt.schemas.errors import LogCorrupt, SchemaMismatch
from molt.schemas.streams import routing_metadata
from molt.store import Log
from molt.store.compact import compact
from molt.store.files import STORE
from molt.store.reader import commit_path

SHAPE = routing_metadata(layers=2, top_k=2, n_experts=8)


def write_routing(log: Log, n_rows: int = 3, n: int = 50):
    with log.writer(linger_s=60, routing=SHAPE) as w:
        rows = [make.routing(f"train-0/{i}", start=10 * i, n=n) for i in range(n_rows)]
        tickets = [w.append("routing", row) for row in rows]
        w.flush()
        return rows, [t.result() for t in tickets]


def test_columns_of_many_rows_are_packed_without_python_rows(log: Log) -> None:
    with log.writer(linger_s=60) as w:
        tickets = []
        for i in range(6):
            row = make.segment(rollout_id=f"train-{i}/0", ids=range(10 * i, 10 * i + i + 1))
            tickets.append(w.append("segments", row))
            if i % 2:
                w.flush()
        refs = [t.result() for t in tickets]
    table = log.table([refs[5], refs[0], refs[3], refs[2]], ["rollout_id", "token_ids"])
    offsets, ids = flat(table, "token_ids")
    assert table.column("rollout_id").to_pylist() == [f"train-{i}/0" for i in (0, 2, 3, 5)]
    assert offsets.tolist() == [0, 1, 4, 8, 14]
    assert ids.dtype == np.int32
    assert ids.tolist() == [0, 20, 21, 22, 30, 31, 32, 33, 50, 51, 52, 53, 54, 55]


def test_no_rows_are_an_empty_table_and_rows_of_two_streams_none(log: Log) -> None:
    table = log.table([], ["token_ids", "x"])
    assert table.column_names == ["token_ids", "x"] and flat(table, "token_ids")[1].size == 0
    with log.writer(linger_s=60) as w:
        tickets = [w.append("prompts", make.prompt()), w.append("rewards", make.reward())]
        w.flush()
        refs = [t.result() for t in tickets]
    with pytest.raises(SchemaMismatch, match="rows of prompts, rewards do not make one table"):
        log.table(refs, ["group_id", "rollout_id"])
    with pytest.raises(SchemaMismatch, match="a row of 'prompts', not of 'routing'"):
        log.experts(refs[0], 0, 1)


def test_rows_come_in_the_order_of_their_addresses_and_a_missing_one_is_named(log: Log) -> None:
    with log.writer(linger_s=60) as w:
        tickets = [w.append("rewards", make.reward(revision=i)) for i in range(4)]
        w.flush()
        refs = [t.result() for t in tickets]
    assert [r["revision"] for r in log.rows([refs[3], refs[0], refs[3]])] == [3, 0, 3]
    with pytest.raises(LogCorrupt, match="has 4 rows"):
        log.rows([refs[0], make.ref(refs[0].writer, 0, 4)])


def test_a_range_of_routing_reads_little_more_than_its_rows(log: Log) -> None:
    rows, refs = write_routing(log, n_rows=64, n=4000)
    found = log.experts(refs[7], 70 + 100, 70 + 200)
    assert found.shape == (100, 4)
    assert found.tobytes() == rows[7]["experts"][100 * 4 : 200 * 4]
    size = commit_path(log.path, refs[7].writer, refs[7].seq, "routing").stat().st_size
    assert log._rows.bytes_read < 20_000 < size / 50
    with pytest.raises(LookupError, match="positions 60 to 79 asked for, it holds 70 to 4069"):
        log.experts(refs[7], 60, 80)


def test_damage_inside_a_range_is_found_and_outside_of_it_does_not_matter(log: Log) -> None:
    rows, refs = write_routing(log)
    path = commit_path(log.path, refs[0].writer, refs[0].seq, "routing")
    at = path.read_bytes().index(rows[0]["experts"]) + 20 * 4
    make.flip(path, at)
    with pytest.raises(LogCorrupt, match="row 0: position 20 has another hash"):
        log.experts(refs[0], 15, 25)
    assert log.experts(refs[0], 0, 20).tobytes() == rows[0]["experts"][:80]


def test_every_flip_of_the_index_and_every_cut_is_an_error_and_never_other_rows(log: Log) -> None:
    rows, refs = write_routing(log, n_rows=1, n=20)
    path = commit_path(log.path, refs[0].writer, refs[0].seq, "routing")
    whole, good = path.read_bytes(), rows[0]["experts"][5 * 4 : 9 * 4]
    start = whole.index(b"molt.at=")
    for at in range(start, start + 120):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        check_range(log, refs[0], good)
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        check_range(log, refs[0], good)


def check_range(log: Log, ref, good: bytes) -> None:
    log._rows._cache.clear()
    with contextlib.suppress(LogCorrupt):
        assert log.experts(ref, 5, 9).tobytes() == good


def test_cold_and_older_commits_give_the_same_ranges(log: Log, monkeypatch) -> None:
    rows, refs = write_routing(log)
    want = log.experts(refs[1], 15, 40).tobytes()
    assert compact(log, everything=True)["commits"]
    assert Log.open(log.path).experts(refs[1], 15, 40).tobytes() == want
    monkeypatch.setattr("molt.store.commit.ranges_text", lambda raw, where: "")
    rows, refs = write_routing(log)
    assert log.experts(refs[1], 15, 40).tobytes() == want


def test_a_remembered_place_that_compaction_has_emptied_is_found_again(log: Log) -> None:
    rows, refs = write_routing(log)
    other = log.writer(linger_s=60)
    reward = other.append("rewards", make.reward()).result
    other.close()
    want = log.experts(refs[1], 15, 40).tobytes()
    assert log.routing_place(refs[2]) == (0, 20, 50) and log.stream(reward()) == "rewards"
    assert compact(log, everything=True)["commits"]
    assert log.experts(refs[1], 15, 40).tobytes() == want
    assert log.routing_place(refs[2]) == (0, 20, 50)
    assert log.row(reward())["value"] == make.reward()["value"]


def test_a_bucket_is_listed_once_for_all_its_commits(log: Log, monkeypatch) -> None:
    with log.writer(linger_s=60) as w:
        refs = []
        for i in range(5):
            refs.append(w.append("rewards", make.reward(revision=i)))
            w.flush()
    listed = []
    monkeypatch.setattr("molt.store.reader.STORE.list", _counting(listed))
    assert [log.row(r.result())["revision"] for r in refs] == [0, 1, 2, 3, 4]
    assert len(listed) == 1
    with pytest.raises(LogCorrupt, match="this commit is not in the log"):
        log.row(make.ref(refs[0].result().writer, 77, 0))


def _counting(listed: list):
    real = STORE.list

    def counted(*args):
        listed.append(args)
        return real(*args)

    return counted
