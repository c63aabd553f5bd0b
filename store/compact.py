"""Compaction: many small hot commits become few cold files; no row and no address changes (I6).

Runs beside writers and readers. Order: publish the cold file (its number is the compare-and-set
between compactors), read every commit of it back and compare it with the hot one, delete the hot
files. A death at any point leaves commits in both places; cold counts, the next run deletes them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from molt.schemas.errors import LogCorrupt, Retired
from molt.schemas.streams import USER_PREFIX, VERSIONS, schema_id
from molt.store.cold import FOLDER, ColdFile, Place, cold_files, encode_cold
from molt.store.control import Lineage, Record, lineage_of
from molt.store.files import STORE, NameTaken
from molt.store.log import Log
from molt.store.reader import (
    BUCKET,
    END,
    CommitFile,
    cold_commits,
    dense,
    hot_files,
    merged,
    read_commit,
    writer_names,
)

TOKEN_STREAMS = frozenset({"segments", "routing", "scores"})
"""Streams whose size is that of the tokens: they wait until their groups are settled."""
FILE_BYTES = 64 << 20
"""Raw bytes of a cold file; one is held in memory while it is written."""

Batch = list[tuple[CommitFile, pa.Table]]


@dataclass(slots=True)
class _Done:
    commits: int = 0
    rows: int = 0
    files: int = 0
    bytes_hot: int = 0
    bytes_cold: int = 0
    leftovers: int = 0
    kept_hot: list[dict[str, str]] = field(default_factory=list)


@dataclass(slots=True)
class WriterView:
    """One writer as a compactor sees it."""

    files: list[CommitFile]
    """Visible commits; hot ones that cold covers are shown as cold."""
    leftovers: list[CommitFile]
    """Those hot ones: an interrupted run did not come to delete them."""
    closed: bool

    def is_full(self, file: CommitFile) -> bool:
        return file.seq // BUCKET < len(self.files) // BUCKET


def compact(
    log: Log,
    *,
    everything: bool = False,
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Move hot commits into cold files; `progress(done, total)` counts commits.

    Takes full buckets: scalar streams at once, token-sized ones when all groups of the bucket are
    settled. `everything` takes all visible commits of closed writers too. `end` commits stay.
    Returns {"commits", "rows", "files", "bytes_hot", "bytes_cold", "leftovers", "kept_hot":
    [{"stream", "why"}]}: `leftovers` are hot files that an interrupted run had left, `kept_hot`
    users' streams that Parquet cannot hold. Raises LogCorrupt if a commit or its cold copy is
    damaged; its hot file is then still there.
    """
    done = _Done()
    chosen = _chosen(log, everything, done)
    total = sum(map(len, chosen.values()))
    for (stream, _), files in chosen.items():
        for batch in _batches(files, file_bytes):
            _move(log.path, stream, batch, done)
            if progress:
                progress(done.commits, total)
    return asdict(done)


def _chosen(log: Log, everything: bool, done: _Done) -> dict[tuple[str, bool], list[CommitFile]]:
    """What to move, by stream and by whether it may retire; leftovers are swept on the way."""
    records = log.records()
    lineage = lineage_of(records)
    settled = settled_groups(records, lineage)
    chosen: dict[tuple[str, bool], list[CommitFile]] = {}
    for name in writer_names(log.path):
        writer = view_writer(log.path, name, lineage)
        _sweep(log.path, writer.leftovers, done)
        whole = everything and writer.closed
        hot = [f for f in writer.files if not f.cold and f.stream != END]
        files = [f for f in hot if whole or writer.is_full(f)]
        groups = {f: groups_of(f) for f in files if f.stream in TOKEN_STREAMS}
        waiting = {
            f.seq // BUCKET
            for f, found in groups.items()
            if not whole and any(is_train(g) and g not in settled for g in found)
        }
        for f in files:
            if f not in groups or f.seq // BUCKET not in waiting:
                may_retire = all(map(is_train, groups.get(f, ())))
                chosen.setdefault((f.stream, may_retire), []).append(f)
    return chosen


def view_writer(log: Path, name: str, lineage: Lineage) -> WriterView:
    """The writer's visible commits, hot before cold."""
    hot = hot_files(log, name)
    files = dense(merged(hot, cold_commits(cold_files(log), name)))
    limit = lineage.last_seq(name)
    visible = files if limit is None else files[: limit + 1]
    covered = {f.seq for f in visible if f.cold}
    return WriterView(
        files=visible,
        leftovers=[f for f in hot if f.seq in covered],
        closed=limit is not None or (bool(visible) and visible[-1].stream == END),
    )


def settled_groups(
    records: Iterable[Record], lineage: Lineage, *, step: int | None = None, n: int | None = None
) -> set[str]:
    """Groups in a plan or a drop of this lineage; of plans up to `step`, of records up to `n`."""
    found: set[str] = set()
    for record in records:
        if not lineage.holds(record.n) or (n is not None and record.n > n):
            continue
        if record.kind == "plan" and (step is None or record.header["step"] <= step):
            found |= {r["group_id"] for r in record.rows}
        elif record.kind == "drop":
            found |= {r["group_id"] for r in record.rows if r["rollout_id"] is None}
    return found


def groups_of(file: CommitFile) -> set[str]:
    """The groups that a commit's rows belong to; none if it has been retired since the listing."""
    table = _read(file, ["rollout_id"])
    rollouts = table.column("rollout_id").unique().to_pylist() if table is not None else []
    return {r.rpartition("/")[0] for r in rollouts}


def _read(file: CommitFile, columns: list[str] | None = None) -> pa.Table | None:
    """None if retention, which may run at the same time, has removed the commit."""
    try:
        return read_commit(file, columns).table
    except Retired:
        return None


def is_train(group_id: str) -> bool:
    """Only these groups are settled by records; evaluation and judges are never waited for."""
    return group_id.startswith("train-")


def _batches(files: Sequence[CommitFile], file_bytes: int) -> Iterator[Batch]:
    """Commits of one stream in (writer, seq) order, cut by size and where the schema changes."""
    batch: Batch = []
    size = 0
    for file in sorted(files, key=lambda f: (f.writer, f.seq)):
        table = _read(file)
        if table is None:
            continue
        same = not batch or table.schema.equals(batch[-1][1].schema, check_metadata=True)
        if batch and (not same or size + table.nbytes > file_bytes):
            yield batch
            batch, size = [], 0
        batch.append((file, table))
        size += table.nbytes
    if batch:
        yield batch


def _move(log: Path, stream: str, batch: Batch, done: _Done) -> None:
    while True:
        path, covered = _free(log, stream)
        batch = [(f, t) for f, t in batch if (f.writer, f.seq) not in covered]
        if not batch:
            return
        try:
            raw = _encoded(stream, batch)
        except (pa.ArrowException, LogCorrupt) as error:
            if not stream.startswith(USER_PREFIX):
                raise
            done.kept_hot.append({"stream": stream, "why": str(error)})
            return
        try:
            STORE.put(path, raw)
            break
        except NameTaken:
            continue  # another compactor was faster, and may have moved some of these
    done.files += 1
    done.bytes_cold += len(raw)
    done.rows += sum(t.num_rows for _, t in batch)
    done.commits += len(batch)
    done.bytes_hot += _delete(log, [f for f, _ in batch])


def _free(log: Path, stream: str) -> tuple[Path, set[Place]]:
    """The next free cold name of a stream, and what the files below it cover."""
    files = [f for f in cold_files(log) if f.stream == stream]
    return next_path(log, stream, files), {place for f in files for place in f.places()}


def next_path(log: Path, stream: str, files: Iterable[ColdFile]) -> Path:
    """One above the highest number ever used: tombstones keep it from being used again."""
    n = max((f.n for f in files if f.stream == stream), default=-1) + 1
    return log / FOLDER / stream / f"{n:010d}.parquet"


def _encoded(stream: str, batch: Batch) -> bytearray:
    """The cold file, tried: Parquet must give back these very rows."""
    tables = [t for _, t in batch]
    schema = tables[0].schema
    # Commits were upgraded while they were read, so the version is this program's.
    text = schema_id(stream, schema.remove_metadata(), VERSIONS.get(stream, "1.0"))
    raw = encode_cold(stream, text, [(f.writer, f.seq) for f, _ in batch], tables)
    back = pq.ParquetFile(pa.BufferReader(raw), page_checksum_verification=True)
    if not _same(pa.concat_tables(tables), back.read(columns=schema.names).select(schema.names)):
        raise LogCorrupt(f"{stream}: Parquet does not give these rows back; they stay hot")
    return raw


def _same(a: pa.Table, b: pa.Table) -> bool:
    # NaN, which only users' streams may hold, equals itself in text alone.
    return a.schema.equals(b.schema) and (a.equals(b) or str(a.to_pylist()) == str(b.to_pylist()))


def _sweep(log: Path, leftovers: list[CommitFile], done: _Done) -> None:
    _delete(log, leftovers)
    done.leftovers += len(leftovers)


def _delete(log: Path, hot: list[CommitFile]) -> int:
    """Delete hot files once their cold copies are read back and found equal; returns their bytes.

    Commits whose cold file says they are retired have no copy, and need none.
    """
    size = 0
    for writer in {f.writer for f in hot}:
        own = {f.seq: f for f in hot if f.writer == writer}
        copies = cold_commits(cold_files(log), writer, min(own), max(own) + 1)
        for copy in (c for c in copies if c.seq in own and not c.retired):
            file = own[copy.seq]
            left, right = _read(file), _read(copy)
            if left is not None and right is not None and not _same(left, right):
                raise LogCorrupt(
                    f"{'/'.join(copy.path.parts[-3:])}: commit {file.writer}/{file.seq} differs "
                    "from its hot file, which is kept; delete this cold file and compact again"
                )
        known = {c.seq for c in copies}
        gone = [f for f in own.values() if f.seq in known]
        size += sum(f.path.stat().st_size for f in gone if f.path.exists())
        STORE.delete(f.path for f in gone)
    return size
