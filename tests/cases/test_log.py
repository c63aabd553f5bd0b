"""Area `log`: P30, P32, P34, P38, P39, P40, P42."""

import errno
import json
from pathlib import Path

import factories as make
import numpy as np
import pyarrow as pa
import pytest
from faulty import FaultyOs

from molt.schemas.errors import LogCorrupt, SchemaMismatch, SegmentRejected
from molt.schemas.streams import ROW_TOKENS_MAX, STREAMS, USER_NAME, schema_id
from molt.store import Log, Writer
from molt.store.commit import decode, encode
from molt.store.reader import commit_path, writer_files
from molt.store.sql import run_sql


def one_commit(log: Log, w: Writer) -> tuple[Path, bytes]:
    tickets = [w.append("segments", make.segment(rollout_id=f"train-0/{i}")) for i in range(3)]
    w.flush()
    path = commit_path(log.path, w.name, tickets[0].result().seq, "segments")
    return path, path.read_bytes()


def test_p30_any_cut_of_a_commit_is_found(log: Log, w: Writer) -> None:
    """Including those where plain Arrow reads a clean end, and those where it raises OSError."""
    path, raw = one_commit(log, w)
    for n in range(len(raw)):
        with pytest.raises(LogCorrupt):
            decode(raw[:n], stream="segments", writer=w.name, seq=0)
    path.write_bytes(raw[:-100])
    for read in (
        lambda: log.tail().poll(),
        lambda: log.row(make.ref(w.name, 0, 0)),
        lambda: run_sql([log], "select count(*) from segments"),
    ):
        with pytest.raises(LogCorrupt, match=rf"{w.name}/0\.segments"):
            read()


def test_p30_any_flipped_bit_and_zeroed_block_is_found(log: Log, w: Writer) -> None:
    _, raw = one_commit(log, w)
    changed = [raw[:i] + bytes([raw[i] ^ 1 << i % 8]) + raw[i + 1 :] for i in range(len(raw))]
    changed += [raw[:i] + bytes(512) + raw[i + 512 :] for i in range(0, len(raw) - 512, 512)]
    changed += [raw + raw, raw + b"\0", b"\0" + raw]
    for other in changed:
        if other != raw:
            with pytest.raises(LogCorrupt):
                decode(other, stream="segments", writer=w.name, seq=0)
    assert decode(raw, stream="segments", writer=w.name, seq=0).table.num_rows == 3


@pytest.mark.parametrize("call", ["write", "fsync", "close"])
def test_p32_a_full_disk_fails_the_append_and_nothing_else(
    log: Log, w: Writer, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make.load_case("P32")
    given, expected = case["given"], case["expected"]
    for i in range(given["ok_appends"]):
        w.append("segments", make.segment(rollout_id=f"train-0/{i}"))
        w.flush()
    faulty = FaultyOs(call, errno.ENOSPC, times=10**6, write_first=given["fail_at_byte"])
    with monkeypatch.context() as patch:
        patch.setattr("molt.store.files.os", faulty)
        ticket = w.append("segments", make.segment(rollout_id="train-0/9"))
        with pytest.raises(OSError) as error:
            w.flush()
        assert error.value.errno == errno.ENOSPC
        with pytest.raises(OSError):
            ticket.result()
    assert faulty.fired
    names = [f.path.name for f in writer_files(log.path, w.name)]
    assert len(names) == expected["visible_segments"]
    count = "select count(*) from segments"
    assert run_sql([log], count)[1] == [[expected["visible_segments"]]]
    w.append("segments", make.segment(rollout_id="train-0/9"))
    w.flush()
    assert run_sql([log], count)[1] == [[expected["retry_after_space"]]]


def test_p34_a_repeated_append_counts_once(log: Log, w: Writer) -> None:
    case = make.load_case("P34")
    (name, attempt, segment), contents = case["given"]["key"], case["given"]["appends"]
    rollout_id = f"train-0/{name.removeprefix('r')}"
    results, first = [], None
    for ids in contents:
        row = make.segment(rollout_id=rollout_id, attempt=attempt, segment=segment, ids=ids)
        try:
            ticket = w.append("segments", row)
            results.append("duplicate ignored" if ticket is first else "stored")
            first = first or ticket
        except SegmentRejected as error:
            assert "conflicting content" in str(error)
            results.append("refused: conflicting content")
    w.flush()
    assert results == case["expected"]["results"]
    assert run_sql([log], "select count(*) from segments")[1] == [[case["expected"]["rows"]]]


def test_p38_offsets_are_64_bit() -> None:
    case = make.load_case("P38")
    n = 2**31 - 1
    small = pa.ListArray.from_arrays(pa.array([0, n], pa.int32()), pa.nulls(n))
    with pytest.raises(pa.ArrowInvalid, match="offset overflow"):
        pa.concat_arrays([small, small])
    large = pa.LargeListArray.from_arrays(pa.array([0, n], pa.int64()), pa.nulls(n))
    length = len(pa.concat_arrays([large, large]).values)
    assert case["expected"]["large_list"] == f"child length {length}"


def test_p38_a_row_above_the_limit_is_refused_with_its_size(w: Writer) -> None:
    limit = make.load_case("P38")["given"]["row_limit_tokens"]
    assert limit == ROW_TOKENS_MAX
    row = make.segment(rollout_id="train-3/1", ids=[1], digest=bytes(32))
    ids = np.zeros(limit + 1, np.int32)
    with pytest.raises(SegmentRejected, match=f"train-3/1.*{limit + 1} items"):
        w.append("segments", row | {"token_ids": ids})


def test_p38_reading_many_commits_keeps_no_map_and_no_file_open(log: Log) -> None:
    """70,000 maps would exceed the kernel's limit; the reader keeps none, whatever the number."""
    with log.writer(linger_s=60) as w:
        for i in range(200):
            w.append("rewards", make.reward(revision=i))
            w.flush()
    tail = log.tail()
    commits = tail.poll()[1]
    query = "select count(*) from rewards"
    assert len(commits) == 200 and run_sql([log], query)[1] == [[200]]
    maps = Path("/proc/self/maps").read_text()
    open_files = [str(p.resolve()) for p in Path("/proc/self/fd").iterdir()]
    assert ".arrow" not in maps and not [f for f in open_files if f.endswith(".arrow")]


def test_p39_types_are_declared_not_inferred(log: Log, w: Writer) -> None:
    case = make.load_case("P39")
    inferred = {
        text: str(pa.array(json.loads(text.replace("None", "null"))).type)
        for text in case["given"]["inferred"]
    }
    assert {k: v.replace("item: ", "") for k, v in inferred.items()} == case["given"]["inferred"]
    row = make.segment() | {"surprise": case["given"]["row"]["surprise"]}
    with pytest.raises(SegmentRejected, match="unknown field 'surprise'"):
        w.append("segments", row)
    type_ = str(STREAMS["segments"].field("token_ids").type).replace("item: ", "")
    assert type_ == case["expected"]["empty_ids_type"]


def test_p39_files_of_two_versions_are_read_together(log: Log) -> None:
    v1, v2 = (f["columns"] for f in make.load_case("P39")["given"]["files"])
    types = {"ids": pa.large_list(pa.int32()), "versions": pa.large_list(pa.int64())}
    for columns in (v1, v2):
        schema = pa.schema([pa.field(c, types[c]) for c in columns])
        with log.writer(user_schemas={"x_t": schema}) as w:
            w.append("x_t", {c: [1] for c in columns})
    found = run_sql([log], "select ids, versions from x_t order by versions nulls first")[1]
    assert found == [[[1], None], [[1], [1]]] and USER_NAME.fullmatch("x_t")


def test_p39_a_newer_major_is_refused_naming_both(log: Log, w: Writer) -> None:
    path, raw = one_commit(log, w)
    table = decode(raw, stream="segments", writer=w.name, seq=0).table
    text = schema_id("segments", table.schema, "3.0")
    newer = encode(table, stream="segments", writer=w.name, seq=0, schema_text=text)
    path.write_bytes(newer)
    for read in (lambda: log.tail().poll(), lambda: run_sql([log], "select 1 from segments")):
        with pytest.raises(SchemaMismatch, match=r"schema 3\.0, this program reads up to 1\.0"):
            read()


def test_p40_text_that_is_not_clean_utf8(log: Log, w: Writer) -> None:
    case = make.load_case("P40")
    texts = [json.loads(f'"{text}"') for text in case["given"]["texts"]]
    tickets = [
        w.append("rollouts", make.rollout(f"train-0/{i}", status="failed", reason=text))
        for i, text in enumerate(texts)
    ]
    w.flush()
    assert len(tickets) == case["expected"]["rows_stored"]
    assert [log.row(t.result())["reason"] for t in tickets] == texts
    lengths = run_sql([log], "select length(reason) from rollouts order by rollout_id")[1]
    assert lengths[1] == [case["expected"]["length_in_sql_of_row_2"]]


@pytest.mark.parametrize("kind", [list, np.array])
def test_p42_what_was_appended_is_the_logs_own(log: Log, w: Writer, kind) -> None:
    case = make.load_case("P42")
    ids = kind(case["given"]["ids"])
    row = make.segment(ids=case["given"]["ids"]) | {"token_ids": ids}
    ticket = w.append("segments", row)
    ids[0] = 99
    row["messages"], row["sampling"]["top_k"] = "[1]", 7
    row["version_runs"].append({"epoch": 9, "version": 9, "n": 9})
    w.flush()
    row["sampling"]["top_k"] = 0
    back = log.row(ticket.result())
    assert back["token_ids"].tolist() == case["expected"]["stored"]
    assert (back["messages"], back["sampling"]["top_k"]) == ("[]", 0)
    assert len(back["version_runs"]) == 1
