"""Commits: what is damaged is never given to Arrow, and no error of Arrow's own escapes."""

import io
from pathlib import Path

import factories as make
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molt.schemas.check import check_row
from molt.schemas.columns import to_rows, to_table
from molt.schemas.errors import LogCorrupt, SchemaMismatch
from molt.schemas.streams import STREAMS, routing_metadata, schema_id
from molt.store.commit import DIGITS, MARK, decode, encode

SEGMENTS = STREAMS["segments"]
ID = schema_id("segments", SEGMENTS, "1.0")


def table(n: int = 3) -> pa.Table:
    rows = [make.segment(rollout_id=f"train-0/{i}") | {"at": make.NOW} for i in range(n)]
    return to_table(SEGMENTS, [check_row("segments", SEGMENTS, row) for row in rows])


def commit(rows: pa.Table | None = None, schema_text: str = ID, **more: object) -> bytes:
    rows = table() if rows is None else rows
    place = {"stream": "segments", "writer": "w", "seq": 7, **more}
    return bytes(encode(rows, schema_text=schema_text, **place))  # type: ignore[arg-type]


RAW = commit()
NEWER = commit(schema_text=ID.replace(" 1.0 ", " 2.0 "))


def read(raw: bytes, stream: str = "segments", writer: str = "w", seq: int = 7):
    return decode(raw, stream=stream, writer=writer, seq=seq)


def test_a_commit_reads_back_and_names_itself() -> None:
    found = read(RAW)
    assert found.table.equals(table()) and found.where == "w/7.segments"
    assert [r["rollout_id"] for r in to_rows(found.table)] == [f"train-0/{i}" for i in range(3)]


def test_a_commit_is_a_plain_arrow_file() -> None:
    assert pa.ipc.open_file(io.BytesIO(RAW)).read_all().equals(table())


def test_only_asked_columns_are_decoded() -> None:
    found = decode(RAW, stream="segments", writer="w", seq=7, columns=["segment", "none"])
    assert found.table.column_names == ["segment"] and found.table.num_rows == 3


@given(st.integers(0, len(RAW) - 1), st.integers(1, 255))
@settings(max_examples=400)
def test_any_changed_byte_is_found(at: int, mask: int) -> None:
    raw = bytearray(RAW)
    raw[at] ^= mask
    with pytest.raises(LogCorrupt, match=r"w/7\.segments"):
        read(bytes(raw))


@given(st.data())
@settings(max_examples=200)
def test_any_zeroed_range_is_found(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(RAW) - 1))
    end = data.draw(st.integers(start + 1, len(RAW)))
    raw = RAW[:start] + bytes(end - start) + RAW[end:]
    if raw == RAW:
        assert read(raw).table.num_rows == 3
    else:
        with pytest.raises(LogCorrupt):
            read(raw)


def test_a_file_under_another_name_is_refused() -> None:
    for place in ({"seq": 8}, {"writer": "v"}, {"stream": "rollouts"}):
        with pytest.raises(LogCorrupt, match="the file says it is w/7.segments"):
            read(RAW, **place)  # type: ignore[arg-type]


def test_the_mark_inside_the_data_does_not_mislead_the_reader() -> None:
    """A header and a text column that spell the checksum's mark, the latter uncompressed."""
    mark = (MARK + b"0" * DIGITS).decode()
    raw = commit(header={"note": mark})
    assert read(raw).header == {"note": mark}
    users = pa.table({"text": [mark]}, schema=pa.schema([pa.field("text", pa.string())]))
    assert read(commit(users, "x_t 1.0 0", stream="x_t"), stream="x_t").table.equals(users)


def test_a_signed_file_that_does_not_parse_is_corrupt_not_a_crash() -> None:
    import xxhash

    for body in (b"", b"ARROW1\0\0" + b"x" * 64, RAW[: len(RAW) // 2]):
        raw = body + MARK + b"0" * DIGITS
        raw = body + MARK + xxhash.xxh3_64_hexdigest(raw).encode()
        with pytest.raises(LogCorrupt, match="does not parse"):
            read(raw)


def test_a_newer_major_is_refused_and_a_newer_minor_is_read() -> None:
    with pytest.raises(SchemaMismatch, match=r"schema 2\.0, this program reads up to 1\.0"):
        read(NEWER)
    with pytest.raises(SchemaMismatch, match=r"schema 2\.0, this program reads up to 1\.0"):
        decode(NEWER, stream="segments", writer="w", seq=7, columns=["segment"])
    wider = table().append_column("mood", pa.array(["calm"] * 3))
    found = read(commit(wider, f"segments 1.1 {'0' * 16}"))
    assert found.table.equals(table())


def test_a_column_that_no_upgrade_brings_back_is_named() -> None:
    narrow = table().drop_columns(["digest"])
    with pytest.raises(SchemaMismatch, match="no column 'digest'"):
        read(commit(narrow, f"segments 1.0 {'0' * 16}"))
    assert (
        read(commit(table().drop_columns(["kv"]), f"segments 0.9 {'0' * 16}"))
        .table.column("kv")
        .to_pylist()
        == [None] * 3
    )


def test_a_column_of_another_type_is_corrupt() -> None:
    wrong = table().set_column(3, "segment", pa.array(["one"] * 3))
    with pytest.raises(LogCorrupt, match="not in the schema that it names"):
        read(commit(wrong, f"segments 1.0 {'0' * 16}"))


def test_routing_is_not_compressed_and_keeps_its_shape() -> None:
    schema = STREAMS["routing"]
    row = make.routing() | {"experts": bytes(4096), "n": 2, "at": make.NOW}
    shape = routing_metadata(layers=4, top_k=2, n_experts=300)
    raw = encode(
        pa.Table.from_pylist([row], schema=schema),
        stream="routing",
        writer="w",
        seq=7,
        schema_text=schema_id("routing", schema, "1.0"),
        extra=shape,
    )
    assert len(raw) > 4096
    found = read(bytes(raw), stream="routing").table.schema.metadata
    assert {k.decode(): v.decode() for k, v in found.items()} == shape
    assert shape["molt.dtype"] == "uint16"


def test_a_long_footer_hides_no_checksum(tmp_path: Path) -> None:
    raw = commit(header={"config": "x" * (3 << 20)})
    assert len(read(raw).header["config"]) == 3 << 20
