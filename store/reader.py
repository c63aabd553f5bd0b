"""Verified reads: where commits lie, and how their bytes become rows (invariant I6).

Nothing here repairs or skips: a commit is delivered whole or `LogCorrupt` says which one is not.
"""

import os
import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molt.schemas.columns import to_rows
from molt.schemas.errors import LogCorrupt, LogGap
from molt.schemas.records import Ref
from molt.store.commit import Commit, decode
from molt.store.files import names

BUCKET = 1024
"""Commits of one writer per directory."""
CONTROL_DIR = "train"
END = "end"
COMMIT_NAME = re.compile(r"([0-9]{10})\.([^.]+)\.arrow")
WRITER_NAME = re.compile(r"[0-9]+-.+")
BUCKET_NAME = re.compile(r"[0-9]{6}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFile:
    """A commit's place, from its path alone."""

    path: Path
    writer: str
    seq: int
    stream: str


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
    return [name for name in names(log / "data") if WRITER_NAME.fullmatch(name)]


def writer_epoch(writer: str) -> int:
    return int(writer.split("-", 1)[0])


def bucket_files(log: Path, writer: str, bucket: int) -> list[CommitFile]:
    """The commits of one bucket by number; two files with one number are LogCorrupt."""
    folder = log / "data" / writer / f"{bucket:06d}"
    found = [f for name in names(folder) if (f := parse_name(folder, writer, name))]
    found.sort(key=lambda f: f.seq)
    for a, b in zip(found, found[1:], strict=False):
        if a.seq == b.seq:
            raise LogCorrupt(f"{writer}: two commits with number {a.seq}: {a.stream}, {b.stream}")
    return found


def writer_files(log: Path, writer: str, last_seq: int | None = None) -> list[CommitFile]:
    """All commits of a writer up to `last_seq` (None: all), dense from 0.

    LogGap if a number is missing with a later one present, also at a second look (late visibility):
    what lies behind a gap must neither be shown nor be given up silently.
    """
    for last in (False, True):
        files = [
            f
            for bucket in names(log / "data" / writer)
            if bucket.isdecimal()
            for f in bucket_files(log, writer, int(bucket))
            if last_seq is None or f.seq <= last_seq
        ]
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


def read_bytes(path: Path) -> bytes:
    with open(path, "rb") as f:
        return f.read()


def read_commit(file: CommitFile, columns: list[str] | None = None) -> Commit:
    """A verified commit; read once more before damage is believed (late visibility)."""
    for last in (False, True):
        try:
            return decode(
                read_bytes(file.path),
                stream=file.stream,
                writer=file.writer,
                seq=file.seq,
                columns=columns,
            )
        except LogCorrupt:
            if last:
                raise
    raise AssertionError("unreachable")


class RowReader:
    """Rows by address, each commit read once while it stays in a budgeted cache.

    Example: `RowReader(log.path).row(Ref(writer=w, seq=0, row=2))["token_ids"]`.
    """

    def __init__(self, log: Path, cache_bytes_max: int = 256 << 20) -> None:
        self.log = log
        self.cache_bytes_max = cache_bytes_max
        self.bytes_read = 0
        self._cache: OrderedDict[tuple[str, int], tuple[list[dict[str, Any]], int]] = OrderedDict()
        self._cached_bytes = 0

    def row(self, ref: Ref) -> dict[str, Any]:
        rows = self.rows_of(ref.writer, ref.seq)
        if not 0 <= ref.row < len(rows):
            raise LogCorrupt(f"{ref}: the commit has {len(rows)} rows")
        return rows[ref.row]

    def rows(self, refs: Iterable[Ref]) -> list[dict[str, Any]]:
        return [self.row(ref) for ref in refs]

    def rows_of(self, writer: str, seq: int) -> list[dict[str, Any]]:
        key = (writer, seq)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key][0]
        file = find_commit(self.log, writer, seq)
        commit = read_commit(file)
        size = os.stat(file.path).st_size
        rows = to_rows(commit.table)
        self.bytes_read += size
        self._cache[key] = (rows, commit.table.nbytes)
        self._cached_bytes += commit.table.nbytes
        while self._cached_bytes > self.cache_bytes_max and len(self._cache) > 1:
            _, (_, dropped) = self._cache.popitem(last=False)
            self._cached_bytes -= dropped
        return rows


def find_commit(log: Path, writer: str, seq: int) -> CommitFile:
    """The file of a row address (the stream is in its name); LogCorrupt if it is gone."""
    for file in bucket_files(log, writer, seq // BUCKET):
        if file.seq == seq:
            return file
    raise LogCorrupt(
        f"{writer}/{seq}: this commit is not in the log. If it was retired, replay from a later "
        "checkpoint; otherwise restore it from a copy"
    )
