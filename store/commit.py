"""One commit = one Arrow IPC file with its own checksum inside (invariant I6: visible = whole).

The xxh3-64 of the whole file, taken with 16 ASCII zeros in the digits' place, is patched into the
footer metadata. A reader finds the digits from the end before it parses anything, so a damaged
file is never given to Arrow; the file stays readable by every Arrow tool.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import xxhash

from molt.schemas.errors import LogCorrupt
from molt.schemas.streams import UNCOMPRESSED
from molt.schemas.text import canonical_json
from molt.schemas.upgrade import check_version, to_current
from molt.store.ranges import KEY as RANGES_KEY
from molt.store.ranges import ranges_text

MARK = b"molt.xxh3="
DIGITS = 16
ZEROS = b"0" * DIGITS
COMPRESS_BYTES_MIN = 64 << 10
"""Below this zstd costs more time (a context per buffer) than it saves; compaction packs later."""

ZSTD_FRAME = b"\x28\xb5\x2f\xfd"
HEAD_BYTES = 16 << 10
"""How a compressed buffer begins, and where the first one is; chance hits only cost time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A verified commit: its place in the log and its rows."""

    writer: str
    """Name of the writer's directory; "control" for a control record."""
    seq: int
    stream: str
    header: dict[str, Any]
    table: pa.Table

    @property
    def where(self) -> str:
        return f"{self.writer}/{self.seq}.{self.stream}"


def encode(
    table: pa.Table,
    *,
    stream: str,
    writer: str,
    seq: int,
    schema_text: str,
    header: Mapping[str, Any] | None = None,
    extra: Mapping[str, str] | None = None,
    nonce: str = "",
) -> memoryview:
    """The bytes of a commit. `extra` goes into the Arrow schema's metadata (routing shape).

    `nonce` tells two authors of equal records apart: whose bytes hold a name, won it.
    """
    # The mark must be found once only: inside JSON an escaped "=" means the same.
    head = canonical_json(dict(header or {})).replace("molt.xxh3=", "molt.xxh3\\u003d")
    meta = {
        "molt.stream": stream,
        "molt.writer": writer,
        "molt.seq": str(seq),
        "molt.rows": str(table.num_rows),
        "molt.schema": schema_text,
        "molt.header": head,
        "molt.nonce": nonce,
        "molt.check": (MARK + ZEROS).decode(),
    }
    small = table.get_total_buffer_size() < COMPRESS_BYTES_MIN
    codec = None if small or stream in UNCOMPRESSED else pa.Codec("zstd", 1)
    schema = table.schema.with_metadata(dict(extra)) if extra else table.schema
    raw = _file(table, schema, codec, meta)
    if stream == "routing" and table.num_rows:
        # The footer lies behind the rows, so a longer one does not move them.
        meta[RANGES_KEY] = ranges_text(raw, f"{writer}/{seq}.{stream}")
        raw = _file(table, schema, codec, meta)
    footer = len(raw) - 10 - int.from_bytes(raw[-10:-6], "little")
    at = footer + bytes(raw[footer:]).rfind(MARK) + len(MARK)
    assert raw[at : at + DIGITS] == ZEROS, "the checksum's place is not where it was written"
    raw[at : at + DIGITS] = xxhash.xxh3_64_hexdigest(raw).encode()
    return raw


def _file(
    table: pa.Table, schema: pa.Schema, codec: pa.Codec | None, meta: Mapping[str, str]
) -> memoryview:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec, use_threads=True)
    with pa.ipc.new_file(sink, schema, options=options, metadata=meta) as out:
        out.write_table(table.combine_chunks())
    return memoryview(sink.getvalue()).cast("B")


def checksum_error(raw: bytes | memoryview) -> str | None:
    """What is wrong with the bytes of a commit; None if the checksum holds."""
    at = (raw if isinstance(raw, bytes) else bytes(raw)).rfind(MARK) + len(MARK)
    if at < len(MARK) or at + DIGITS > len(raw):
        return "no checksum in its footer (cut, zeroed or not a commit)"
    view = memoryview(raw)
    found = bytes(view[at : at + DIGITS])
    h = xxhash.xxh3_64(view[:at])
    h.update(ZEROS)
    h.update(view[at + DIGITS :])
    computed = h.hexdigest().encode()
    if found != computed:
        return f"checksum {found.decode('ascii', 'replace')} recorded, {computed.decode()} computed"
    return None


def decode(
    raw: bytes | memoryview,
    *,
    stream: str | None,
    writer: str,
    seq: int,
    columns: list[str] | None = None,
) -> Commit:
    """A commit from its bytes: checksum -> open -> names -> row count -> validate -> upgrade.

    `stream` None takes the kind from the file itself (control records); `columns` decodes only
    those columns. Raises LogCorrupt (SchemaMismatch for a newer format); no error of Arrow's own
    escapes.
    """
    where = f"{writer}/{seq}.{stream or 'control'}"
    wrong = checksum_error(raw)
    if wrong:
        raise LogCorrupt(f"{where}: {wrong}; nothing of it was read. Run `molt doctor` on the log")
    try:
        meta, table = _parse(raw, columns)
        own = (meta["molt.stream"], meta["molt.writer"], int(meta["molt.seq"]))
        rows = int(meta["molt.rows"])
        header = json.loads(meta["molt.header"])
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise LogCorrupt(f"{where}: checksum holds but the file does not parse: {error}") from None
    stream = stream or own[0]
    if own != (stream, writer, seq):
        raise LogCorrupt(f"{where}: the file says it is {own[1]}/{own[2]}.{own[0]}")
    if table.num_rows != rows:
        raise LogCorrupt(f"{where}: {table.num_rows} rows instead of {rows}")
    if stream != "end":
        try:
            if columns is None:
                table = to_current(table, stream, meta["molt.schema"], where)
            else:
                check_version(stream, meta["molt.schema"], where)
        except (pa.ArrowException, KeyError) as error:
            raise LogCorrupt(f"{where}: not in the schema that it names: {error}") from None
    return Commit(writer=writer, seq=seq, stream=stream, header=header, table=table)


def is_compressed(head: bytes) -> bool:
    """From the first HEAD_BYTES of a commit; a guess that only decides how it is read."""
    return ZSTD_FRAME in head


def _parse(raw: bytes | memoryview, columns: list[str] | None) -> tuple[dict[str, str], pa.Table]:
    source = pa.py_buffer(raw)
    reader = pa.ipc.open_file(source)
    meta = {k.decode(): v.decode() for k, v in (reader.metadata or {}).items()}
    table: Any = None
    if columns is None or not is_compressed(bytes(source[:HEAD_BYTES])):
        table = reader.read_all()
    if columns is not None:
        names = reader.schema.names
        picked = [c for c in names if c in columns]
        table = table.select(picked) if table is not None else None
        # Of an uncompressed file all columns together cost nothing, some are copied by Arrow; but
        # as views they keep the whole of it in memory.
        if table is None or 2 * table.nbytes < len(raw):
            indexes = [names.index(c) for c in picked]
            options = pa.ipc.IpcReadOptions(included_fields=indexes, use_threads=False)
            table = pa.ipc.open_file(source, options=options).read_all()
    table.validate(full=True)
    return meta, table
