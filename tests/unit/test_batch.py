"""Tables of segments: checked by column, stored and refused exactly as their rows are."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import factories as make
import numpy as np
import pyarrow as pa
import pytest

from molt.schemas.batch import clean_segments
from molt.schemas.columns import flat
from molt.schemas.errors import MoltError, SchemaMismatch, SegmentRejected
from molt.schemas.streams import STREAMS
from molt.schemas.text import escape_text
from molt.store import Log, Ticket, Writer
from molt.store.doctor import doctor

SCHEMA = STREAMS["segments"]
Row = dict[str, Any]


def table_of(*rows: Row) -> pa.Table:
    return make.as_table("segments", rows)


def chain(name: str = "train-0/0") -> list[Row]:
    """A root, a child that keeps all of it and a child that keeps less."""
    root = make.segment(rollout_id=name, ids=range(10, 22), sampled=[0] * 6 + [1] * 6)
    first = {"rollout_id": name, "parent": 0, "parent_digest": root["digest"]}
    child = make.segment(**first, segment=1, keep=12, ids=(1, 2, 3), sampled=(0, 1, 1), version=3)
    runs = [(1, 3, 1), (2, 4, 1)]
    fork = make.segment(**first, segment=2, keep=7, ids=(4, 5), runs=runs, logprobs=(0.0, -9.5))
    return [root, child, fork]


def clean(table: pa.Table) -> bool:
    return clean_segments(table, lambda *_: None) is not None


def outcome(found: Ticket | MoltError) -> Any:
    return found.result().row if isinstance(found, Ticket) else (type(found), str(found))


def appended(w: Writer, rows: list[Row]) -> list[Any]:
    """What `append` says of each row."""
    found: list[Ticket | MoltError] = []
    for row in rows:
        try:
            found.append(w.append("segments", make.as_stored(row)))
        except MoltError as error:
            found.append(error)
    w.flush()
    return [outcome(f) for f in found]


def test_a_table_is_stored_as_its_rows_are(tmp_path: Path) -> None:
    rows = [row for k in range(40) for row in chain(f"train-{k}/0")]
    logs = [Log.create(tmp_path / name) for name in ("rows", "table")]
    for log in logs:
        make.open_epoch(log)
    with logs[0].writer() as w:
        said = appended(w, rows)
    table = table_of(*rows)
    assert clean(table)
    with logs[1].writer() as w:
        found = w.append_table("segments", table)
        w.flush()
        assert [outcome(f) for f in found] == said == [*range(120)]
    one, two = (stored(log) for log in logs)
    assert len(one) == 120 and one == two


def stored(log: Log) -> list[Row]:
    """All segments in order, but for the time at which they were appended."""
    (path,) = make.data_commits(log.path, "segments")
    rows = pa.ipc.open_file(path).read_all().drop_columns("at").to_pylist()
    return list(rows)


CHANGES: dict[str, Callable[[Row], Any]] = {
    "no tokens": lambda r: r.update(
        dict.fromkeys(("token_ids", "sampled", "train", "logprobs"), [])
    ),
    "negative id": lambda r: r["token_ids"].__setitem__(1, -1),
    "another id": lambda r: r["token_ids"].__setitem__(0, 7),
    "mask of 2": lambda r: (r["sampled"].__setitem__(1, 2), r["train"].__setitem__(1, 2)),
    "trained, not sampled": lambda r: (r["sampled"].__setitem__(-1, 0), r["logprobs"].pop()),
    "short mask": lambda r: r["train"].pop(),
    "long ids": lambda r: r["token_ids"].append(5),
    "nan": lambda r: r["logprobs"].__setitem__(-1, float("nan")),
    "minus infinity": lambda r: r["logprobs"].__setitem__(-1, float("-inf")),
    "infinity": lambda r: r["logprobs"].__setitem__(-1, float("inf")),
    "positive": lambda r: r["logprobs"].__setitem__(-1, 0.001),
    "run too long": lambda r: r["version_runs"][0].update(n=9),
    "run of none": lambda r: r["version_runs"].append({"epoch": 1, "version": 0, "n": 0}),
    "epoch 0": lambda r: r["version_runs"][0].update(epoch=0),
    "version -1": lambda r: r["version_runs"][0].update(version=-1),
    "no runs": lambda r: r["version_runs"].clear(),
    "keep at a root": lambda r: r.update(parent=None, keep=1),
    "parent after it": lambda r: r.update(parent=2),
    "parent below 0": lambda r: r.update(parent=-1),
    "keeps nothing": lambda r: r.update(keep=0),
    "keeps too much": lambda r: r.update(keep=99),
    "digest": lambda r: r.update(digest=b"x" * 32),
    "word": lambda r: r.update(finish_reason="tired"),
    "kv": lambda r: r.update(kv="lost"),
    "media": lambda r: r.update(media=[make.media(start=90)]),
    "masked": lambda r: r.update(train=[0] * len(r["train"]), train_reason="test"),
    "masked without a reason": lambda r: r.update(train=[0] * len(r["train"])),
    "attempt": lambda r: r.update(attempt=-1),
    "source attempt": lambda r: r.update(source_attempt=-1),
    "segment below 0": lambda r: r.update(segment=-1, parent=None, keep=0),
    "odd name": lambda r: r.update(rollout_id="r7", group_id="r"),
    "another group": lambda r: r.update(group_id="train-1"),
    "no temperature": lambda r: r.update(sampling={**r["sampling"], "temperature": None}),
    "image": lambda r: r.update(media=[make.media(start=0)]),
    "image cut": lambda r: r.update(media=[make.media(start=6, n_tokens=5)]),
    "unknown parent": lambda r: r.update(rollout_id="train-9/0"),
    "the same segment": lambda r: r.update(segment=0, parent=None, keep=0),
    "nothing": lambda r: None,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_table_is_refused_as_its_rows_are(tmp_path: Path, name: str, position: int) -> None:
    rows = chain()
    CHANGES[name](rows[position])
    outcomes = []
    for way in ("rows", "table"):
        log = Log.create(tmp_path / way)
        make.open_epoch(log)
        with log.writer() as w:
            if way == "rows":
                outcomes.append(appended(w, rows))
            else:
                found = w.append_table("segments", table_of(*rows))
                w.flush()
                outcomes.append([outcome(f) for f in found])
    assert outcomes[0] == outcomes[1]
    if clean(table_of(*rows)):
        assert not any(isinstance(said, tuple) for said in outcomes[0])


@pytest.mark.parametrize("column", ["group_id", "keep", "token_ids", "sampling", "digest"])
def test_a_missing_value_is_refused(w: Writer, column: str) -> None:
    fields = [f.with_nullable(True) for f in SCHEMA]
    holes = pa.Table.from_pylist([{**chain()[0], column: None}], schema=pa.schema(fields))
    table = pa.Table.from_arrays([c.chunk(0) for c in holes.columns], schema=SCHEMA)
    (found,) = w.append_table("segments", table)
    assert isinstance(found, SegmentRejected) and column in str(found)


def test_items_that_are_missing_are_never_clean() -> None:
    row = chain()[0]
    sampling = {**row["sampling"], "stop": ["a", None]}
    for change in ({"token_ids": [None, *row["token_ids"][1:]]}, {"sampling": sampling}):
        assert not clean(table_of({**row, **change}))
    for name in ("epoch", "version", "n"):
        assert not clean(
            table_of({**row, "version_runs": [{**row["version_runs"][0], name: None}]})
        )


def test_the_callers_buffers_are_his_own_again(log: Log, w: Writer) -> None:
    table = table_of(*chain())
    ids = np.array(flat(table, "token_ids")[1])
    offsets = flat(table, "token_ids")[0]
    mine = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(ids))
    assert mine.values.buffers()[1].address == ids.ctypes.data
    at = SCHEMA.get_field_index("token_ids")
    table = table.set_column(at, SCHEMA.field(at), mine)
    before = ids.copy()
    tickets = w.append_table("segments", table)
    ids[:] = 0
    w.flush()
    stored = np.concatenate([log.row(t.result())["token_ids"] for t in tickets])  # type: ignore[union-attr]
    assert stored.tolist() == before.tolist()


def test_a_table_may_be_repeated_and_conflicts_are_refused_alone(w: Writer) -> None:
    rows = chain()
    first = w.append_table("segments", table_of(*rows))
    w.flush()
    again = w.append_table("segments", table_of(*rows))
    assert [outcome(t) for t in again] == [outcome(t) for t in first] == [0, 1, 2]
    other = make.segment(ids=(9, 9))
    found = w.append_table("segments", table_of(other, make.segment(rollout_id="train-5/0")))
    w.flush()
    assert isinstance(found[0], SegmentRejected) and "conflicting content" in str(found[0])
    assert outcome(found[1]) == 0


CONTENTS = {
    "finish_reason": "length",
    "messages": '[{"role": "user"}]',
    "stop_token": 7,
    "policy": "other",
    "role": "judge",
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("first", ["row", "table"])
@pytest.mark.parametrize("second", ["row", "table"])
def test_other_content_of_equal_tokens_is_a_conflict(
    w: Writer, name: str, first: str, second: str
) -> None:
    def append(way: str, row: Row) -> Any:
        if way == "row":
            return appended(w, [row])[0]
        table = table_of({**row, "messages": escape_text(row["messages"])})
        found = w.append_table("segments", table)
        w.flush()
        return outcome(found[0])

    row = make.segment(messages='["\u00e9\ud800"]')
    assert append(first, row) == append(second, row) == 0
    kind, text = append(second, {**row, name: CONTENTS[name]})
    assert kind is SegmentRejected and "conflicting content" in text


def test_a_child_is_checked_against_a_parent_of_an_earlier_table(w: Writer) -> None:
    root, child, fork = chain()
    w.append_table("segments", table_of(root))
    good, bad = w.append_table("segments", table_of(child, {**fork, "keep": 13}))
    w.flush()
    assert isinstance(good, Ticket) and isinstance(bad, SegmentRejected)
    assert "does not end inside parent 0" in str(bad)


def test_a_child_that_cuts_an_image_of_an_earlier_table_is_refused(w: Writer) -> None:
    root, child, fork = chain()
    root["media"] = [make.media(start=5, n_tokens=3)]
    w.append_table("segments", table_of(root))
    good, bad = w.append_table("segments", table_of(child, fork))
    w.flush()
    assert isinstance(good, Ticket) and isinstance(bad, SegmentRejected)
    assert "keep 7 ends inside a media run, tokens 6 to 8" in str(bad)


def test_a_large_table_is_several_commits_between_single_rows(log: Log) -> None:
    rows = [make.segment(rollout_id=f"train-{k}/0") for k in range(12)]
    with log.writer(linger_s=3600, flush_rows=5) as w:
        tickets = [w.append("segments", rows[0])]
        tickets += w.append_table("segments", table_of(*rows[1:11]))  # type: ignore[arg-type]
        tickets.append(w.append("segments", rows[11]))
        w.flush()
        places = [t.result() for t in tickets]
    assert [log.row(p)["rollout_id"] for p in places] == [r["rollout_id"] for r in rows]
    assert places == sorted(places) and {p.row for p in places} <= {*range(5)}


def test_after_a_failed_commit_the_same_table_can_be_appended(
    log: Log, w: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    table = table_of(*chain())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        lost = w.append_table("segments", table)
        with pytest.raises(OSError, match="No space"):
            w.flush()
    for ticket in lost:
        assert isinstance(ticket, Ticket) and isinstance(ticket.exception(), OSError)
    again = w.append_table("segments", table)
    w.flush()
    assert [outcome(t) for t in again] == [0, 1, 2]
    assert len(stored(log)) == 3


@pytest.mark.parametrize("stream", ["segments", "rewards", "x_own"])
def test_a_time_beyond_the_calendar_is_the_fault_of_its_row(log: Log, stream: str) -> None:
    if stream == "x_own":
        table = pa.table({"v": pa.array([1, 2, 3], pa.int64())})
    else:
        row = make.segment if stream == "segments" else make.reward
        table = make.as_table(stream, [row(rollout_id=f"train-{i}/0") for i in range(3)])
        table = table.drop_columns("at")
    times = pa.array([0, 2**62, 1], pa.int64()).cast(pa.timestamp("us"))
    with log.writer(user_schemas={"x_own": pa.schema([("v", pa.int64())])}, linger_s=60) as w:
        schema = w.schema(stream)
        columns = {n: times if n == "at" else table.column(n) for n in schema.names}
        found = w.append_table(stream, pa.table(columns, schema=schema))
        w.flush()
    good = [f.result() for f in found if isinstance(f, Ticket)]
    assert [isinstance(f, Ticket) for f in found] == [True, False, True]
    assert "row 1 of a table" in str(found[1]) and len([log.row(ref) for ref in good]) == 2
    assert doctor(log.path)["ok"]


def test_other_streams_and_other_columns(log: Log, w: Writer) -> None:
    rows = [make.reward(revision=i) for i in range(3)]
    rows[1]["value"] = float("nan")
    found = w.append_table("rewards", make.as_table("rewards", rows))
    w.flush()
    assert [isinstance(f, Ticket) for f in found] == [True, False, True]
    with pytest.raises(SchemaMismatch, match="another schema"):
        w.append_table("rewards", pa.table({"a": [1]}))
