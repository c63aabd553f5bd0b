"""Cold storage: commits moved into Parquet, still found by (writer, seq, row) and verified (I6).

`cold/<stream>/<n>.parquet` holds whole commits of one stream, in the order of (writer, seq).
`molt.covers` lists exactly which: runs [writer, first_seq, last_seq]. The footer carries a checksum
of itself and one of each row group; with Parquet's page checksums on, no byte is unverified. A file
with `molt.retired` has no rows: it says that the commits it covers are gone on purpose.
"""

import contextlib
import functools
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from molt.schemas.errors import LogCorrupt
from molt.schemas.streams import UNCOMPRESSED, fields
from molt.schemas.upgrade import check_version, to_current
from molt.store.commit import DIGITS, MARK, ZEROS, Commit, checksum_error
from molt.store.files import STORE

FOLDER = "cold"
NAME = re.compile(r"([0-9]{10})\.parquet")
GROUP_MARK = b"molt.groups="
GROUP_BYTES = 8 << 20
"""Raw bytes of a row group: what reading one commit decodes at most, beside a larger commit."""
ADDRESS = fields("writer string?, seq int64?, row int32?")
SPLIT = ("logprobs", "values", "value", "seconds", "token_ids")
"""Number columns that are stored byte-stream-split: their bytes differ in kind by place."""
WORDS = ("rollout_id", "group_id", "writer", "dataset", "purpose", "reason", "name", "source")
"""Text columns that repeat themselves, stored with a dictionary."""

Ints = npt.NDArray[np.int64]
Place = tuple[str, int]
"""(writer, seq)."""
State = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColdFile:
    """What the verified footer of a cold file says."""

    path: Path
    stream: str
    schema_text: str
    retired: bool
    state: State
    """(inode, size, mtime_ns) when the footer was verified."""
    names: tuple[str, ...]
    """The stream's own columns."""
    covers: dict[str, tuple[int, int]]
    """writer -> its commits' range in `seqs`."""
    seqs: Ints
    """[commits], ascending within a writer."""
    starts: Ints
    """[commits + 1] first row of each commit."""
    groups: Ints
    """[row groups + 1] first row of each row group."""
    meta: Any
    """pyarrow's FileMetaData."""
    bounds: tuple[int, ...]
    """[hashes + 1] first byte of each hashed range; the last one is the footer's."""
    hashes: tuple[str, ...]

    @property
    def n(self) -> int:
        return int(self.path.stem)

    def seqs_of(self, writer: str, first: int = 0, end: int | None = None) -> list[int]:
        """The writer's commits in [first, end) that this file covers."""
        a, b = self.covers.get(writer, (0, 0))
        own = self.seqs[a:b]
        last = len(own) if end is None else int(np.searchsorted(own, end))
        found: list[int] = own[int(np.searchsorted(own, first)) : last].tolist()
        return found

    def places(self) -> list[Place]:
        return [(w, seq) for w in self.covers for seq in self.seqs_of(w)]

    def index(self, writer: str, seq: int) -> int | None:
        first, end = self.covers.get(writer, (0, 0))
        at = first + int(np.searchsorted(self.seqs[first:end], seq))
        return at if at < end and self.seqs[at] == seq else None

    def group_of(self, i: int) -> int:
        """The row group that holds commit number `i` of this file."""
        return int(np.searchsorted(self.groups, self.starts[i], side="right")) - 1


def encode_cold(
    stream: str, schema_text: str, places: Sequence[Place], tables: Sequence[pa.Table] | None
) -> bytearray:
    """The bytes of a cold file. `places` are ascending; `tables` None marks them as retired."""
    schema = tables[0].schema if tables else pa.schema([])
    address = [f for f in ADDRESS if f.name not in schema.names]
    full = pa.schema([*schema, *address], schema.metadata)
    sink = io.BytesIO()
    out = pq.ParquetWriter(
        sink,
        full,
        compression="none" if stream in UNCOMPRESSED else "zstd",
        use_dictionary=[n for n in WORDS if n in full.names],
        use_byte_stream_split=_split_columns(full),
        use_compliant_nested_type=False,
        write_page_checksum=True,
    )
    n_groups = 0
    for batch in _row_groups(places, tables or []):
        table = pa.concat_tables([_addressed(p, t, address) for p, t in batch]).cast(full)
        out.write_table(table, row_group_size=table.num_rows)
        n_groups += 1
    meta = {
        "molt.stream": stream,
        "molt.schema": schema_text,
        "molt.columns": json.dumps(schema.names),
        "molt.covers": json.dumps(_runs(places)),
        "molt.counts": json.dumps([t.num_rows for t in tables or []]),
        "molt.retired": json.dumps(tables is None),
        "molt.hashes": (GROUP_MARK + ZEROS * max(1, n_groups)).decode(),
        "molt.check": (MARK + ZEROS).decode(),
    }
    out.add_key_value_metadata(meta)
    out.close()
    return _sealed(bytearray(sink.getbuffer()), n_groups)


def _split_columns(schema: pa.Schema) -> list[str]:
    paths = []
    for name in SPLIT:
        type_ = schema.field(name).type if name in schema.names else pa.null()
        if pa.types.is_large_list(type_):
            item = type_.value_field
            name, type_ = f"{name}.list.{item.name}", item.type
        if pa.types.is_float32(type_) or pa.types.is_float64(type_) or pa.types.is_int32(type_):
            paths.append(name)
    return paths


def _row_groups(
    places: Sequence[Place], tables: Sequence[pa.Table]
) -> list[list[tuple[Place, pa.Table]]]:
    """Commits by row group; none is cut in two, empty ones need no group."""
    batches: list[list[tuple[Place, pa.Table]]] = []
    size = GROUP_BYTES
    for place, table in zip(places, tables, strict=bool(tables)):
        if table.num_rows:
            if size >= GROUP_BYTES:
                batches.append([])
                size = 0
            batches[-1].append((place, table))
            size += table.nbytes
    return batches


def _addressed(place: Place, table: pa.Table, address: Sequence[pa.Field]) -> pa.Table:
    n = table.num_rows
    values = {
        "writer": pa.repeat(place[0], n),
        "seq": pa.repeat(pa.scalar(place[1], pa.int64()), n),
        "row": pa.array(np.arange(n, dtype=np.int32)),
    }
    for f in address:
        table = table.append_column(f, values[f.name])
    return table


def _runs(places: Sequence[Place]) -> list[tuple[str, int, int]]:
    runs: list[tuple[str, int, int]] = []
    for writer, seq in places:
        if runs and runs[-1][0] == writer and runs[-1][2] == seq - 1:
            runs[-1] = (writer, runs[-1][1], seq)
        else:
            runs.append((writer, seq, seq))
    return runs


def _sealed(raw: bytearray, n_groups: int) -> bytearray:
    footer = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
    bounds = _bounds(pq.read_metadata(pa.py_buffer(raw)), footer)
    at = raw.rfind(GROUP_MARK) + len(GROUP_MARK)
    assert at > footer and len(bounds) == max(1, n_groups) + 1
    digits = "".join(
        xxhash.xxh3_64_hexdigest(memoryview(raw)[a:b])
        for a, b in zip(bounds, bounds[1:], strict=False)
    )
    raw[at : at + len(digits)] = digits.encode()
    at = raw.rfind(MARK) + len(MARK)
    assert at > footer and raw[at : at + DIGITS] == ZEROS
    raw[at : at + DIGITS] = xxhash.xxh3_64_hexdigest(memoryview(raw)[footer:]).encode()
    return raw


def _bounds(meta: Any, footer: int) -> tuple[int, ...]:
    """First byte of each hashed range: the row groups, from the magic to the footer."""
    starts = []
    for i in range(meta.num_row_groups):
        columns = [meta.row_group(i).column(c) for c in range(meta.num_columns)]
        starts.append(min(c.dictionary_page_offset or c.data_page_offset for c in columns))
    return (0, *starts[1:], footer)


_KNOWN: dict[Path, ColdFile] = {}
"""Footers that were verified. A log's cold file never changes and its number is never used again,
but another log may be made at the same path."""
_FOLDERS: dict[Path, State] = {}
"""Their folders as they were when each file was last looked at: not each listing asks for all."""


def cold_files(log: Path) -> list[ColdFile]:
    """A fresh listing of the cold files, by stream and number. LogCorrupt names a damaged one."""
    found = []
    for stream in STORE.list(log / FOLDER):
        folder = log / FOLDER / stream
        state = STORE.identity(folder)
        same = _FOLDERS.get(folder) == state
        for path in [folder / n for n in STORE.list(folder) if NAME.fullmatch(n)]:
            if same and path in _KNOWN:
                found.append(_KNOWN[path])
            else:  # if it retired since the listing, its tombstone has a higher number
                with contextlib.suppress(FileNotFoundError):
                    found.append(cold_file(path))
        _FOLDERS[folder] = state
    return found


def cold_file(path: Path) -> ColdFile:
    """The footer of a cold file, verified again if the file is not the one that was known."""
    known = _KNOWN.get(path)
    if known is None or known.state != STORE.identity(path):
        known = _KNOWN[path] = load(path)
    return known


def load(path: Path) -> ColdFile:
    """Read and verify a cold file's footer. LogCorrupt if it is not as it was written."""
    state = STORE.identity(path)
    magic, tail = STORE.read(path, 0, 4), STORE.read(path, -8)
    start = state[1] - 8 - int.from_bytes(tail[:4], "little")
    if start < 4 or tail[4:] != b"PAR1":
        raise _corrupt(path, "no Parquet footer (cut, zeroed or not a cold file)")
    footer = STORE.read(path, start)
    wrong = checksum_error(footer) if magic == b"PAR1" else "it does not begin as Parquet"
    if wrong:
        raise _corrupt(path, wrong)
    try:
        return _parsed(path, state, pq.read_metadata(pa.py_buffer(b"PAR1" + footer)), start)
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        raise _corrupt(path, f"checksum holds but the footer does not parse: {error}") from None


def _corrupt(path: Path, why: object) -> LogCorrupt:
    where = "/".join(path.parts[-3:])
    return LogCorrupt(f"{where}: {why}; nothing of it was read. Run `molt doctor` on the log")


def _parsed(path: Path, state: State, meta: Any, footer: int) -> ColdFile:
    text = {k.decode(): v.decode() for k, v in meta.metadata.items()}
    covers: dict[str, tuple[int, int]] = {}
    seqs: list[int] = []
    for writer, first, last in json.loads(text["molt.covers"]):
        begin = covers.get(writer, (len(seqs), 0))[0]
        seqs.extend(range(first, last + 1))
        covers[writer] = (begin, len(seqs))
    counts = json.loads(text["molt.counts"]) or [0] * len(seqs)
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
    digits = text["molt.hashes"].removeprefix(GROUP_MARK.decode())
    file = ColdFile(
        path=path,
        stream=text["molt.stream"],
        schema_text=text["molt.schema"],
        retired=json.loads(text["molt.retired"]),
        state=state,
        names=tuple(json.loads(text["molt.columns"])),
        covers=covers,
        seqs=np.array(seqs, np.int64),
        starts=starts,
        groups=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]),
        meta=meta,
        bounds=_bounds(meta, footer),
        hashes=tuple(digits[i : i + DIGITS] for i in range(0, len(digits), DIGITS)),
    )
    if file.stream != path.parent.name or len(file.starts) != len(seqs) + 1:
        raise ValueError(f"it says it is {file.stream} with {len(counts)} of {len(seqs)} commits")
    if starts[-1] != meta.num_rows:
        raise ValueError(f"{meta.num_rows} rows instead of {starts[-1]}")
    return file


def read_cold(
    path: Path, writer: str, seq: int, columns: list[str] | None = None, n: int = 1
) -> Commit:
    """One commit out of a cold file, with the rows of the n - 1 behind it in the same row group.

    LogCorrupt for damage, FileNotFoundError if the file is gone.
    """
    file = cold_file(path)
    i = file.index(writer, seq)
    if i is None:
        raise _corrupt(path, f"it does not hold commit {writer}/{seq}")
    wanted = [c for c in file.names if columns is None or c in columns]
    first, end = int(file.starts[i]), int(file.starts[i + n])
    group = file.group_of(i)
    if first == end:
        table = schema_of(file).empty_table().select(wanted)
    else:
        whole = _row_group(path, file.state, group, tuple(wanted))
        table = whole.slice(first - int(file.groups[group]), end - first)
    where = f"{writer}/{seq}.{file.stream}"
    if columns is None:
        table = to_current(table, file.stream, file.schema_text, where)
    else:
        check_version(file.stream, file.schema_text, where)
    return Commit(writer=writer, seq=seq, stream=file.stream, header={}, table=table)


def check_address(file: ColdFile) -> None:
    """LogCorrupt unless each row's own `writer, seq, row` say what `molt.covers` says of it."""
    own = [f.name for f in ADDRESS if f.name not in file.names]
    counts = np.diff(file.starts)
    expected = {
        "writer": np.repeat(np.array([w for w, _ in file.places()], object), counts),
        "seq": np.repeat(file.seqs, counts),
        "row": np.arange(file.starts[-1]) - np.repeat(file.starts[:-1], counts),
    }
    for group in range(file.meta.num_row_groups):
        a, b = file.groups[group : group + 2]
        table = _read_group(file, group, tuple(own))
        for name in own:
            if table.column(name).to_pylist() != expected[name][a:b].tolist():
                raise _corrupt(file.path, f"row group {group}: {name} is not that of molt.covers")


def schema_of(file: ColdFile) -> pa.Schema:
    """The stream's own schema, as its hot commits have it."""
    schema = file.meta.schema.to_arrow_schema()
    return pa.schema([schema.field(n) for n in file.names], _own_metadata(schema))


def _own_metadata(schema: pa.Schema) -> dict[bytes, bytes] | None:
    found = {k: v for k, v in (schema.metadata or {}).items() if k not in _OWN_KEYS}
    return found or None


_OWN_KEYS = {
    b"molt." + k
    for k in (b"stream", b"schema", b"columns", b"covers", b"counts", b"retired", b"hashes")
} | {b"molt.check"}


@functools.lru_cache(maxsize=8)
def _row_group(path: Path, state: State, group: int, columns: tuple[str, ...]) -> pa.Table:
    return _read_group(cold_file(path), group, columns)


def _read_group(file: ColdFile, group: int, columns: tuple[str, ...]) -> pa.Table:
    """These columns of one row group, all of its bytes verified first."""
    a, b = file.bounds[group : group + 2]
    try:
        raw = STORE.read(file.path, a, b - a)
        if xxhash.xxh3_64_hexdigest(raw) != file.hashes[group]:
            raise _corrupt(file.path, f"row group {group}: checksum other than recorded")
        # Parquet addresses the whole file; of this stand-in only the group's pages are touched.
        whole = np.empty(file.state[1], np.uint8)
        whole[a:b] = np.frombuffer(raw, np.uint8)
        source = pa.BufferReader(pa.py_buffer(whole))
        parquet = pq.ParquetFile(source, metadata=file.meta, page_checksum_verification=True)
        table = parquet.read_row_group(group, columns=list(columns), use_threads=False)
        table = table.select(list(columns)).combine_chunks()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, LogCorrupt | FileNotFoundError):
            raise
        raise _corrupt(file.path, f"row group {group} does not parse: {error}") from None
    return table.replace_schema_metadata(_own_metadata(table.schema))
