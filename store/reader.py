"""Verified reads: where commits lie, and how their bytes become rows (invariant I6).

Nothing here repairs or skips: a commit is delivered whole or `LogCorrupt` says which one is not.
"""

import errno
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from molt.schemas.columns import to_rows
from molt.schemas.errors import LogCorrupt, LogGap, Retired, SchemaMismatch
from molt.schemas.records import Ref
from molt.schemas.streams import STREAMS
from molt.store.cold import ColdFile, cold_file, cold_files, read_cold, schema_of
from molt.store.commit import HEAD_BYTES, Commit, decode, is_compressed
from molt.store.files import STORE
from molt.store.ranges import check_positions, read_place, read_range

BUCKET = 1024
"""Commits of one writer per directory."""
PLACES_KEPT = 1 << 16
"""Addresses whose file a reader remembers."""
AHEAD_THREADS, AHEAD_COMMITS, AHEAD_BYTES_MAX = 2, 16, 8 << 20
"""How far reading goes ahead of its user, in files as they are on disk."""
AHEAD_BYTES_MIN = 64 << 10
"""Less is read sooner than handed to a thread."""
CONTROL_DIR = "train"
END = "end"
COMMIT_NAME = re.compile(r"([0-9]{10})\.([^.]+)\.arrow")
WRITER_NAME = re.compile(r"[0-9]+-.+")
BUCKET_NAME = re.compile(r"[0-9]{6}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFile:
    """A commit's place: its own hot file, or the cold file that covers it."""

    path: Path
    writer: str
    seq: int
    stream: str
    retired: bool = False
    """True if `path` only says that the commit is gone on purpose."""

    @property
    def cold(self) -> bool:
        return self.path.suffix == ".parquet"

    @property
    def log(self) -> Path:
        return self.path.parents[2 if self.cold else 3]


Columns = Callable[["CommitFile"], list[str] | None]
"""Which columns of a commit are decoded; None = all."""
Ahead = Generator[tuple["CommitFile", Callable[[], Commit]], None, None]


def commit_path(log: Path, writer: str, seq: int, stream: str) -> Path:
    return log / "data" / writer / f"{seq // BUCKET:06d}" / f"{seq:010d}.{stream}.arrow"


def parse_name(folder: Path, writer: str, name: str) -> CommitFile | None:
    """`0000000007.segments.arrow` -> its place; None for a name that is no commit's."""
    m = COMMIT_NAME.fullmatch(name)
    if m is None:
        return None
    return CommitFile(path=folder / name, writer=writer, seq=int(m[1]), stream=m[2])


def writer_names(log: Path) -> list[str]:
    """Writers' directories; other names in `data/` are no part of the log (doctor lists them)."""
    return [name for name in STORE.list(log / "data") if WRITER_NAME.fullmatch(name)]


def writer_epoch(writer: str) -> int:
    return int(writer.split("-", 1)[0])


def bucket_files(
    log: Path, writer: str, bucket: int, first: int = 0, end: int | None = None
) -> list[CommitFile]:
    """The commits of one bucket in [first, end) by number; two with one number are LogCorrupt."""
    place = f"{log}/data/{writer}/{bucket:06d}"
    names = STORE.list(place, f"{first:010d}")
    if not names:
        return []  # a thousand idle writers are polled for no more than the listing
    folder, stop = Path(place), f"{end:010d}" if end is not None else ":"
    found = [f for name in names if name < stop and (f := parse_name(folder, writer, name))]
    for a, b in zip(found, found[1:], strict=False):
        if a.seq == b.seq:
            raise LogCorrupt(f"{writer}: two commits with number {a.seq}: {a.stream}, {b.stream}")
    return found


def writer_files(log: Path, writer: str, last_seq: int | None = None) -> list[CommitFile]:
    """All commits of a writer up to `last_seq` (None: all), dense from 0, retired ones too.

    LogGap if a number is missing with a later one present, also at a second look (late visibility):
    what lies behind a gap must neither be shown nor be given up silently.
    """
    for last in (False, True):
        found = all_files(log, writer)
        files = [f for f in found if last_seq is None or f.seq <= last_seq]
        gap = next((i for i, f in enumerate(files) if f.seq != i), None)
        if gap is None:
            return files
        if last:
            raise LogGap(
                f"{writer}: commit {gap} is missing, {files[gap].seq} is there. Restore that file "
                "from a copy; to go on without what lies behind it, move this writer's later "
                "commits away"
            )
    raise AssertionError("unreachable")


def all_files(log: Path, writer: str) -> list[CommitFile]:
    """A writer's commits wherever they are, by number; hot is listed before cold."""
    hot = hot_files(log, writer)
    return merged(hot, cold_commits(cold_files(log), writer))


def hot_files(log: Path, writer: str) -> list[CommitFile]:
    """The commits in a writer's own directory, by number; visible or not."""
    return [
        f
        for bucket in STORE.list(log / "data" / writer)
        if BUCKET_NAME.fullmatch(bucket)
        for f in bucket_files(log, writer, int(bucket))
    ]


def dense(files: list[CommitFile]) -> list[CommitFile]:
    """Up to the first gap."""
    return files[: next((i for i, f in enumerate(files) if f.seq != i), len(files))]


def cold_commits(
    files: Iterable[ColdFile], writer: str, first: int = 0, end: int | None = None
) -> list[CommitFile]:
    """A writer's commits in [first, end) that cold files cover; tombstones win."""
    found = {}
    for file in sorted(files, key=lambda f: f.n):
        for seq in file.seqs_of(writer, first, end):
            found[seq] = CommitFile(
                path=file.path, writer=writer, seq=seq, stream=file.stream, retired=file.retired
            )
    return [found[seq] for seq in sorted(found)]


def merged(hot: Iterable[CommitFile], cold: Iterable[CommitFile]) -> list[CommitFile]:
    """Hot commits less those that cold covers, and the cold ones, by number."""
    by_seq = {f.seq: f for f in hot} | {f.seq: f for f in cold}
    return [by_seq[seq] for seq in sorted(by_seq)]


def located(file: CommitFile) -> CommitFile:
    """Where a commit is that has left its file: FileNotFoundError if nowhere, or Retired."""
    found = _in_cold(file.log, file.writer, file.seq)
    if found is None or found.path == file.path:
        raise FileNotFoundError(errno.ENOENT, "this commit is not in the log", str(file.path))
    return found


def _in_cold(log: Path, writer: str, seq: int) -> CommitFile | None:
    covering = [f for f in cold_files(log) if f.index(writer, seq) is not None]
    for file in cold_commits(covering, writer, seq, seq + 1):
        if file.retired:
            raise retired(log, file)
        return file
    return None


def retired(log: Path, file: CommitFile) -> Retired:
    """The error for a reader below the floor: names the first commit that it can still have."""
    later = (f.seq for f in all_files(log, file.writer) if _follows(f, file))
    first = next(later, None)
    where = f"{file.writer}/{file.seq}.{file.stream}: commit {file.seq} was retired, "
    return Retired(where + ("none is left" if first is None else f"first available is {first}"))


def _follows(f: CommitFile, file: CommitFile) -> bool:
    return f.seq > file.seq and f.stream == file.stream and not f.retired


def read_commit(file: CommitFile, columns: list[str] | None = None) -> Commit:
    """A verified commit; read once more before damage is believed (late visibility).

    A commit that compaction has moved since `file` was listed is read from where it is now.
    """
    if file.retired:
        raise retired(file.log, file)
    for last in (False, True):
        try:
            if file.cold:
                return read_cold(file.path, file.writer, file.seq, columns)
            return decode(
                STORE.read(file.path),
                stream=file.stream,
                writer=file.writer,
                seq=file.seq,
                columns=columns,
            )
        except LogCorrupt:
            if last:
                raise
        except FileNotFoundError:
            if last:
                raise
            file = located(file)
    raise AssertionError("unreachable")


def read_ahead(files: Iterable[CommitFile], columns: Columns = lambda file: None) -> Ahead:
    """Each file in order with the call that gives its commit, or raises what `read_commit` does.

    Large compressed hot commits that come next are read, verified and unpacked by two other threads
    meanwhile, at most AHEAD_COMMITS and AHEAD_BYTES_MAX of them. The threads end with the iterator.
    """
    rest = iter(files)
    first = list(islice(rest, 2))
    pool = ThreadPoolExecutor(AHEAD_THREADS, "molt-read") if len(first) == 2 else None
    waiting: deque[tuple[CommitFile, int, Callable[[], Commit]]] = deque()
    packed: dict[str, bool] = {}
    n_bytes = 0
    try:
        for file in chain(first, rest):
            size = _ahead_bytes(file, packed) if pool is not None else 0
            while waiting and (len(waiting) >= AHEAD_COMMITS or n_bytes + size > AHEAD_BYTES_MAX):
                before, n, result = waiting.popleft()
                n_bytes -= n
                yield before, result
            read = partial(read_commit, file, columns(file))
            result = pool.submit(read).result if pool is not None and size else read
            waiting.append((file, size, result))
            n_bytes += size
        while waiting:
            before, _, result = waiting.popleft()
            yield before, result
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _ahead_bytes(file: CommitFile, packed: dict[str, bool]) -> int:
    """Size of a commit that is worth a thread, otherwise 0; a damaged or lost one is no error.

    What is only copied is read sooner where it is used: another core's cache costs more. `packed`
    remembers that of a stream, whose large commits are alike.
    """
    if file.cold or file.retired:
        return 0
    try:
        size = STORE.identity(file.path)[1]
        if size >= AHEAD_BYTES_MIN and file.stream not in packed:
            packed[file.stream] = is_compressed(STORE.read(file.path, 0, HEAD_BYTES))
    except OSError:
        return 0
    return size if size >= AHEAD_BYTES_MIN and packed[file.stream] else 0


def together(files: Sequence[CommitFile]) -> Iterator[list[CommitFile]]:
    """The same commits in order, those that lie side by side in one cold row group together."""
    run: list[CommitFile] = []
    last: tuple[Path, int, int] | None = None
    for file in files:
        place = None
        if (
            file.cold
            and (i := (cold := cold_file(file.path)).index(file.writer, file.seq)) is not None
        ):
            place = (file.path, cold.group_of(i), i)
        if run and (place is None or last is None or place != (last[0], last[1], last[2] + 1)):
            yield run
            run = []
        run.append(file)
        last = place
    if run:
        yield run


def read_together(run: Sequence[CommitFile], columns: list[str] | None = None) -> pa.Table:
    """The rows of one list that `together` gave."""
    first = run[0]
    if len(run) == 1:
        return read_commit(first, columns).table
    try:
        return read_cold(first.path, first.writer, first.seq, columns, len(run)).table
    except FileNotFoundError:
        return pa.concat_tables([read_commit(f, columns).table for f in run])


def read_schema(file: CommitFile) -> pa.Schema:
    """The schema of a commit that was verified before, without metadata."""
    if not file.cold:
        try:
            with pa.ipc.open_file(pa.py_buffer(STORE.read(file.path))) as reader:
                return reader.schema.remove_metadata()
        except FileNotFoundError:
            file = located(file)
    return schema_of(cold_file(file.path)).remove_metadata()


_Key = tuple[str, int, tuple[str, ...] | None]
"""Writer, sequence number, columns."""


class RowReader:
    """Rows by address, each commit read and verified once while it stays in a cache of
    `cache_bytes_max` (decoded bytes); only the rows that are asked for become Python values.

    Example: `RowReader(log.path).row(Ref(writer=w, seq=0, row=2))["token_ids"]`. `bytes_read`
    counts what was decoded, and of row ranges what was read from disk.
    """

    def __init__(self, log: Path, cache_bytes_max: int = 256 << 20) -> None:
        self.log = log
        self.cache_bytes_max = cache_bytes_max
        self.bytes_read = 0
        self._cache: OrderedDict[_Key, pa.Table] = OrderedDict()
        self._cached_bytes = 0
        self._places: dict[tuple[str, int], CommitFile] = {}
        self._listed: dict[tuple[str, int], int] = {}
        """Of each bucket the number behind the last one that was seen in it."""

    def place(self, writer: str, seq: int, *, again: bool = False) -> CommitFile:
        """`find_commit`, remembered: what a bucket has is listed once for all its commits.

        What was remembered may have moved by now; `again` looks anew.
        """
        bucket = (writer, seq // BUCKET)
        if again or (writer, seq) not in self._places:
            if len(self._places) > PLACES_KEPT:
                self._places.clear()
                self._listed.clear()
            found = bucket_files(self.log, *bucket, seq if again else self._listed.get(bucket, 0))
            self._places.update(((writer, f.seq), f) for f in found)
            if found:
                self._listed[bucket] = found[-1].seq + 1
            if again or (writer, seq) not in self._places:
                self._places[writer, seq] = find_commit(self.log, writer, seq)
        return self._places[writer, seq]

    def row(self, ref: Ref) -> dict[str, Any]:
        return self.rows([ref])[0]

    def rows(self, refs: Iterable[Ref]) -> list[dict[str, Any]]:
        """The rows in the order of `refs`; number lists are views of the cached commit."""
        wanted = list(refs)
        found: dict[Ref, dict[str, Any]] = {}
        for own, table in self._tables(_by_commit(wanted), None):
            found.update(zip(own, to_rows(table), strict=True))
        return [found[ref] for ref in wanted]

    def table(self, refs: Iterable[Ref], columns: Sequence[str]) -> pa.Table:
        """These columns of the rows, one chunk per commit in (writer, seq) order, rows ascending.

        No row becomes a Python object: `schemas.columns.flat(table, "token_ids")` is (offsets,
        values) over all of them. SchemaMismatch for rows whose columns differ.
        """
        places = dict(sorted(_by_commit(sorted(set(refs))).items()))
        tables = [table for _, table in self._tables(places, tuple(columns))]
        if not tables:
            types = {f.name: f.type for schema in STREAMS.values() for f in schema}
            return pa.table({name: pa.array([], types.get(name)) for name in columns})
        try:
            return pa.concat_tables(tables)
        except pa.ArrowException as error:
            streams = ", ".join(sorted({self.place(*p).stream for p in places}))
            raise SchemaMismatch(f"rows of {streams} do not make one table: {error}") from None

    def _tables(
        self, places: dict[tuple[str, int], list[Ref]], columns: tuple[str, ...] | None
    ) -> Iterator[tuple[list[Ref], pa.Table]]:
        """The rows of each commit, those that are not cached read ahead."""
        wanted = list(columns) if columns is not None else None
        missing = dict.fromkeys(p for p in places if (*p, columns) not in self._cache)
        with closing(read_ahead((self.place(*p) for p in missing), lambda _: wanted)) as ahead:
            for place, refs in places.items():
                read: Callable[[], Commit] = partial(self._again, place, wanted)
                if place in missing:
                    _, read = next(ahead)
                yield refs, _taken(self._commit((*place, columns), read), refs)

    def _again(self, place: tuple[str, int], columns: list[str] | None) -> Commit:
        """Of what the other commits pushed out of the cache since."""
        return read_commit(self.place(*place), columns)

    def _commit(self, key: _Key, read: Callable[[], Commit]) -> pa.Table:
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        table = read().table
        self.bytes_read += table.nbytes
        self._cache[key] = table
        self._cached_bytes += table.nbytes
        while self._cached_bytes > self.cache_bytes_max and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return table

    def routing_place(self, ref: Ref) -> tuple[int, int, int] | None:
        """(segment, start, n) of a routing row, its experts unread; None for another stream's."""
        file = self.place(ref.writer, ref.seq)
        if file.stream != "routing":
            return None
        found = None
        if not file.cold:
            where = f"{file.writer}/{file.seq}.{file.stream}"
            with suppress(FileNotFoundError):  # it has left its file since
                found = read_place(file.path, where, ref.row)
        if found is None:
            row = self.row(ref)
            found = (row["segment"], row["start"], row["n"])
        return found

    def experts(self, ref: Ref, first: int, end: int) -> npt.NDArray[np.uint8]:
        """[end - first, width] bytes of a routing row: absolute positions `first` to `end` - 1.

        Of a hot commit only these positions are read, each verified by its own hash. Raises
        LogCorrupt for damage, LookupError for positions that the row does not hold, and
        SchemaMismatch for a row of another stream.
        """
        for last in (False, True):
            try:
                file = self.place(ref.writer, ref.seq, again=last)
                if file.stream != "routing":
                    raise SchemaMismatch(f"{ref} is a row of '{file.stream}', not of 'routing'")
                where = f"{file.writer}/{file.seq}.{file.stream}"
                found = None if file.cold else read_range(file.path, where, ref.row, first, end)
                break
            except (LogCorrupt, FileNotFoundError):  # seen too early, or just moved by compaction
                if last:
                    raise
        if found is not None:
            self.bytes_read += found[1]
            return found[0]
        row = self.row(ref)
        check_positions(ref, row["start"], row["n"], first, end)
        return np.frombuffer(row["experts"], np.uint8).reshape(row["n"], -1)[
            first - row["start"] : end - row["start"]
        ]


def _taken(table: pa.Table, refs: list[Ref]) -> pa.Table:
    for ref in refs:
        if not 0 <= ref.row < table.num_rows:
            raise LogCorrupt(f"{ref}: the commit has {table.num_rows} rows")
    index = [ref.row for ref in refs]
    if index == list(range(index[0], index[0] + len(index))):
        return table.slice(index[0], len(index))
    return table.take(pa.array(index))


def _by_commit(refs: Iterable[Ref]) -> dict[tuple[str, int], list[Ref]]:
    found: dict[tuple[str, int], list[Ref]] = {}
    for ref in refs:
        found.setdefault((ref.writer, ref.seq), []).append(ref)
    return found


def find_commit(log: Path, writer: str, seq: int) -> CommitFile:
    """The place of a row address, hot or cold; LogCorrupt if it is gone, Retired if on purpose."""
    for file in bucket_files(log, writer, seq // BUCKET, seq, seq + 1):
        return file
    found = _in_cold(log, writer, seq)
    if found is None:
        raise LogCorrupt(f"{writer}/{seq}: this commit is not in the log; restore it from a copy")
    return found
