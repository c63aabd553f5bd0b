"""`molt doctor`: every byte of a log verified, one commit in memory at a time (invariant I6).

The checks of a row are those that ran before its write, its parent included; what is kept of a row
is the digest and length of its segment. Damage is reported and never repaired.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from molt.schemas.check import (
    Parent,
    check_enums,
    check_routing_shape,
    check_row,
    parent_of,
    segment_digest,
)
from molt.schemas.columns import normalise, to_rows
from molt.schemas.control import CONTROL, HEADERS
from molt.schemas.errors import LogCorrupt, MoltError, Retired, SegmentRejected
from molt.store.advice import disk_use, mount_of, sweep
from molt.store.cold import FOLDER, ColdFile, check_address, load
from molt.store.cold import NAME as COLD_NAME
from molt.store.commit import Commit
from molt.store.control import NAME, Lineage, Record, lineage_of, read_control_commit, to_record
from molt.store.files import STORE
from molt.store.log import Log
from molt.store.reader import (
    BUCKET,
    BUCKET_NAME,
    CONTROL_DIR,
    END,
    WRITER_NAME,
    CommitFile,
    cold_commits,
    parse_name,
    read_commit,
    writer_epoch,
)

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class _Report:
    log: Path
    progress: Progress
    total: int
    commits: int = 0
    rows: int = 0
    bytes: int = 0
    invisible: int = 0
    retired: int = 0
    retired_checkpoints: int = 0
    by_stream: dict[str, dict[str, int]] = field(default_factory=dict)
    leftovers: set[str] = field(default_factory=set)
    problems: list[dict[str, str]] = field(default_factory=list)
    told: set[tuple[str, str]] = field(default_factory=set)

    def problem(self, path: Path, why: object) -> None:
        found = (str(path.relative_to(self.log)), str(why))
        if found not in self.told:  # a cold row group holds many commits
            self.told.add(found)
            self.problems.append({"file": found[0], "why": found[1]})

    def count(self, stream: str, rows: int, size: int, commits: int = 1) -> None:
        self.commits, self.rows = self.commits + commits, self.rows + rows
        one = self.by_stream.setdefault(stream, {"commits": 0, "rows": 0, "bytes": 0})
        for name, n in (("commits", commits), ("rows", rows), ("bytes", size)):
            one[name] += n

    def listing(self, folder: Path) -> list[str]:
        """Names in a folder; dot-files are what an interrupted publish left behind."""
        if folder.is_dir():
            hidden = (p for p in folder.iterdir() if p.name.startswith("."))
            self.leftovers.update(str(p.relative_to(self.log)) for p in hidden)
        elif folder.exists():
            self.problem(folder, "not a folder")
        return STORE.list(folder)

    def read(self, size: int) -> None:
        self.bytes += size
        self.progress(self.bytes, max(self.total, self.bytes))


def doctor(
    path: str | Path, progress: Progress | None = None, *, repair: bool = False
) -> dict[str, Any]:
    """Verify the log at `path`; `progress(done_bytes, total_bytes)` is called after each file.

    `repair` first removes leftovers of closed writers (`advice.sweep`); damage is never repaired.

    Returns {"ok", "commits", "rows", "bytes", "problems": [{"file", "why"}], "by_stream",
    "invisible", "leftovers", "retired", "retired_checkpoints", "repaired", "disk", "mount"}.
    `invisible` counts commits behind their writer's end: rows of a fenced worker, no damage;
    `retired` those that retention removed; `leftovers` are files of interrupted publishes and
    compactions. Raises FileNotFoundError if there is no log, SchemaMismatch for a newer format.
    """
    log = Path(path).absolute()
    report = _Report(log, progress or (lambda done, total: None), _total_bytes(log))
    try:
        Log.open(log)
    except LogCorrupt as error:
        report.problem(log / "format.json", error)
    repaired = sweep(log) if repair else []
    records = _control(report)
    data = _Data(report, lineage_of(records) if records else Lineage(epoch=0))
    settled = (r for r in records if r.kind in ("plan", "drop"))
    data.settled = {row["group_id"] for record in settled for row in record.rows}
    data.run()
    _plan_refs(report, records, data.n_rows)
    _checkpoints(report, records)
    return {
        "ok": not report.problems,
        "commits": report.commits,
        "rows": report.rows,
        "bytes": report.bytes,
        "problems": report.problems,
        "by_stream": report.by_stream,
        "invisible": report.invisible,
        "leftovers": sorted(report.leftovers),
        "repaired": repaired,
        "disk": disk_use(log, time.time()),
        "mount": mount_of(log),
        "retired": report.retired,
        "retired_checkpoints": report.retired_checkpoints,
    }


def _total_bytes(log: Path) -> int:
    folders = ((CONTROL_DIR, "*.arrow"), ("data", "*.arrow"), (FOLDER, "*.parquet"))
    return sum(_size(p) for f, pattern in folders for p in (log / f).rglob(pattern))


def _size(path: Path) -> int:
    """0 for a file that compaction or retention has removed since it was listed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _control(report: _Report) -> list[Record]:
    """The readable control records; damage and missing numbers are reported."""
    folder, records, expected = report.log / CONTROL_DIR, [], 0
    for name in report.listing(folder):
        path, m = folder / name, NAME.fullmatch(name)
        if m is None:
            report.problem(path, "not the name of a control record")
            continue
        for n in range(expected, int(m[1])):
            report.problem(folder / f"{n:010d}.arrow", f"control record {n} is missing")
        expected = int(m[1]) + 1
        try:
            commit = read_control_commit(report.log, int(m[1]))
            records.append(_checked_record(commit))
            report.count(commit.stream, commit.table.num_rows, _size(path))
        except (MoltError, OSError) as error:
            report.problem(path, error)
        report.read(_size(path))
    return records


def _checked_record(commit: Commit) -> Record:
    kind = commit.stream
    if kind not in CONTROL:
        raise LogCorrupt(f"{commit.where}: '{kind}' is no control record")
    if set(commit.header) != HEADERS.get(kind, frozenset()):
        raise LogCorrupt(f"{commit.where}: header {sorted(commit.header)}")
    if not commit.header and commit.table.num_rows != 1:
        raise LogCorrupt(f"{commit.where}: {commit.table.num_rows} rows instead of 1")
    for row in to_rows(commit.table):
        check_enums(kind, normalise(kind, CONTROL[kind], row))
    return to_record(commit)


Key = tuple[str, int, int]
"""(rollout_id, attempt, segment)."""


@dataclass(slots=True)
class _Data:
    """The pass over the data log. Rows whose parent another writer has are checked at the end."""

    report: _Report
    lineage: Lineage
    parents: dict[Key, list[tuple[str, Parent]]] = field(default_factory=dict)
    later: dict[CommitFile, list[int]] = field(default_factory=dict)
    n_rows: dict[tuple[str, int], int] = field(default_factory=dict)
    """(writer, seq) -> rows of each commit that was read whole."""
    settled: set[str] = field(default_factory=set)
    """Groups of which retention may have removed segments."""
    any_retired: bool = False
    """True if it has removed some."""
    routing_shape: dict[str, str] | None = None
    """As the first commit of the stream has it; a run has one."""
    cold: list[ColdFile] = field(default_factory=list)
    seen_cold: set[Path] = field(default_factory=set)

    def run(self) -> None:
        data = self.report.log / "data"
        self._cold_files()
        epochs = [writer_epoch(w) for w in STORE.list(data) if WRITER_NAME.fullmatch(w)]
        if max(epochs, default=0) > self.lineage.newest_epoch:
            self.report.problem(
                self.report.log / CONTROL_DIR,
                f"writers of epoch {max(epochs)} are there, but no record of that epoch",
            )
        moved = {writer for file in self.cold for writer in file.covers}
        known = {*self.report.listing(data), *self.lineage.closed}
        for writer in sorted(moved - known):
            self.report.problem(data / writer, "missing, though its rows lie in cold files")
        for writer in sorted(moved | known):
            if WRITER_NAME.fullmatch(writer):
                self._writer(writer)
            else:
                self.report.problem(data / writer, "not the name of a writer's directory")
        for file, indexes in self.later.items():
            try:
                commit = read_commit(file)
            except Retired:
                continue
            except (MoltError, OSError) as error:
                self.report.problem(file.path, error)
                continue
            rows = to_rows(commit.table)
            for i in indexes:
                self._row(file, commit, i, rows[i], last=True)

    def _writer(self, writer: str) -> None:
        limit = self.lineage.last_seq(writer)
        expected, ended = 0, False
        for file in self._files(writer):
            if limit is not None and file.seq > limit:
                self.report.invisible += 1
                if not file.cold:
                    self.report.read(_size(file.path))
                continue
            if file.seq < expected:
                self.report.problem(file.path, f"two commits of {writer} have number {file.seq}")
            elif ended:
                self.report.problem(file.path, f"behind the `end` commit of {writer}")
            for n in range(expected, file.seq):
                self.report.problem(file.path.parent, f"commit {n} of {writer} is missing")
            expected, ended = max(expected, file.seq + 1), ended or file.stream == END
            self._commit(file)
        for n in range(expected, (limit if limit is not None else -1) + 1):
            folder = self.report.log / "data" / writer / f"{n // BUCKET:06d}"
            self.report.problem(folder, f"commit {n} of {writer} is missing")

    def _cold_files(self) -> None:
        """Take in new cold files with a whole footer; their rows follow in their writers' order."""
        folder = self.report.log / FOLDER
        for stream in self.report.listing(folder):
            for name in self.report.listing(folder / stream):
                path = folder / stream / name
                if path in self.seen_cold:
                    continue
                self.seen_cold.add(path)
                if not COLD_NAME.fullmatch(name):
                    self.report.problem(path, "not the name of a cold file")
                    continue
                try:
                    file = load(path)
                    self.cold.append(file)
                    self.report.count(stream, 0, _size(path), commits=0)
                    check_address(file)
                except (
                    FileNotFoundError
                ):  # retired since the listing; another one has its tombstone
                    self._cold_files()
                    return
                except (MoltError, OSError) as error:
                    self.report.problem(path, error)
                self.report.read(_size(path))

    def _files(self, writer: str) -> list[CommitFile]:
        """Hot commits and those that cold files cover; a hot file that cold covers is left over.

        Cold is listed after hot: what compaction moves between the two is then seen twice.
        """
        hot = list(self._hot_files(writer))
        self._cold_files()
        cold = {f.seq: f for f in cold_commits(self.cold, writer)}
        for file in (f for f in hot if f.seq in cold):
            self.report.leftovers.add(str(file.path.relative_to(self.report.log)))
            self.report.read(_size(file.path))
        rest = [f for f in hot if f.seq not in cold]
        return sorted([*rest, *cold.values()], key=lambda f: f.seq)

    def _hot_files(self, writer: str) -> Iterator[CommitFile]:
        folder = self.report.log / "data" / writer
        for bucket in self.report.listing(folder):
            if not BUCKET_NAME.fullmatch(bucket):
                self.report.problem(folder / bucket, "not the name of a bucket")
                continue
            for name in self.report.listing(folder / bucket):
                file = parse_name(folder / bucket, writer, name)
                if file is None or file.seq // BUCKET != int(bucket):
                    self.report.problem(folder / bucket / name, "not a commit of this bucket")
                else:
                    yield file

    def _commit(self, file: CommitFile) -> None:
        if file.retired:
            self._retired(file)
            return
        size = 0 if file.cold else _size(file.path)
        try:
            commit = read_commit(file)
            for i, row in enumerate(to_rows(commit.table)):
                self._row(file, commit, i, row)
            self.report.count(file.stream, commit.table.num_rows, size)
            self.n_rows[file.writer, file.seq] = commit.table.num_rows
        except Retired:
            self._retired(file)
        except (MoltError, OSError) as error:
            self.report.problem(file.path, error)
        self.report.read(size)

    def _retired(self, file: CommitFile) -> None:
        self.report.retired += 1
        self.any_retired |= file.stream == "segments"
        self.n_rows[file.writer, file.seq] = sys.maxsize  # what a plan names was there

    def _row(
        self, file: CommitFile, commit: Commit, i: int, row: dict[str, Any], last: bool = False
    ) -> None:
        schema = commit.table.schema
        try:
            if file.stream == "segments":
                self._segment(file, schema, i, row, last)
                return
            check_row(file.stream, schema, row)
            if file.stream == "routing":
                found = self.parents.get((row["rollout_id"], row["attempt"], row["segment"]), [])
                n_chain = max((p.n_chain for _, p in found), default=None)
                check_routing_shape(row, _text(schema.metadata), n_chain)
                self._shape(file, _text(schema.metadata))
        except SegmentRejected as error:
            self.report.problem(file.path, f"row {i}: {error}")

    def _shape(self, file: CommitFile, shape: dict[str, str]) -> None:
        self.routing_shape = self.routing_shape or shape
        if shape != self.routing_shape:
            why = f"its shape of routing is {shape}, that of the run {self.routing_shape}"
            self.report.problem(file.path, why)

    def _segment(
        self, file: CommitFile, schema: pa.Schema, i: int, row: dict[str, Any], last: bool
    ) -> None:
        who = (row["rollout_id"], row["attempt"])
        number = row["segment"]
        own = parent_of(row)
        if not last:
            self.parents.setdefault((*who, number), []).append((file.writer, own))
        if row["parent"] is None:
            check_row("segments", schema, row)
            return
        found = self.parents.get((*who, row["parent"]), [])
        same = [p for writer, p in found if writer == file.writer] or [p for _, p in found]
        if not same and not last:
            self.later.setdefault(file, []).append(i)
        elif not same and self.any_retired and row["group_id"] in self.settled:
            check_row("segments", schema, row)
        elif not same:
            raise SegmentRejected(
                f"segments row of {who[0]} attempt {who[1]} segment {number}: its parent "
                f"{row['parent']} is not in the log"
            )
        else:
            digests = {p.digest: p for p in same}
            fits = [p for p in digests.values() if _fits(row, p)]
            check_row("segments", schema, row, (fits or same)[0])


def _fits(row: Mapping[str, Any], parent: Parent) -> bool:
    return bool(segment_digest(row, parent.digest) == row["digest"])


def marker_fits(path: Path, row: Mapping[str, Any]) -> bool:
    """True if a checkpoint's marker is that of its record."""
    try:
        found = json.loads(STORE.read(path))
    except (OSError, ValueError):
        return False
    names = ("epoch", "step", "state_digest")
    return isinstance(found, dict) and all(found.get(n) == row[n] for n in names)


def _text(metadata: Mapping[bytes, bytes] | None) -> dict[str, str]:
    return {k.decode(): v.decode() for k, v in (metadata or {}).items()}


def _plan_refs(
    report: _Report, records: list[Record], n_rows: Mapping[tuple[str, int], int]
) -> None:
    """Every row of this log that a plan names is there (one problem per plan and commit)."""
    for record in (r for r in records if r.kind == "plan"):
        missing: dict[tuple[str, int], str] = {}
        for row in record.rows:
            refs = [*row["reward_refs"], *(ref for b in row["branches"] for ref in b["refs"])]
            for ref in refs:
                place = (ref["writer"], ref["seq"])
                if ref["log"] == 0 and ref["row"] >= n_rows.get(place, 0):
                    missing.setdefault(place, row["rollout_id"])
        for (writer, seq), rollout in missing.items():
            folder = report.log / "data" / writer / f"{seq // BUCKET:06d}"
            step = record.header["step"]
            why = f"commit {seq} is not whole or not there; step {step} trained {rollout} from it"
            report.problem(folder, why)


def _checkpoints(report: _Report, records: list[Record]) -> None:
    """A recorded checkpoint is complete or retired; half of one is damage, and so is no newest."""
    rows = [r.rows[0] for r in records if r.kind == "checkpoint"]
    for row in rows:
        folder = report.log / row["path"]
        if not folder.is_dir():
            report.retired_checkpoints += 1
            if row is rows[-1]:
                report.problem(folder, "the newest checkpoint is gone; a resume redoes more")
        elif not marker_fits(folder / "COMPLETE", row):
            report.problem(folder, "a recorded checkpoint without a sound COMPLETE marker")
        else:
            for file in row["files"]:
                path = folder / file["name"]
                size = path.stat().st_size if path.is_file() else None
                if size != file["bytes"]:
                    report.problem(path, f"{size} bytes instead of {file['bytes']}")
