"""Retention: which commits nobody can need again, and how they go (section "Retention", P37).

Only token-sized streams retire, and only commits whose groups were all settled at every checkpoint
that is kept: redo never asks for them, and the fold forgets settled groups. A tombstone (a cold
file without rows) is published first, then the bytes go, so a later reader is told "retired".
"""

import datetime
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from molt.schemas.errors import Retired
from molt.store.cold import ColdFile, Place, cold_files, encode_cold
from molt.store.compact import (
    TOKEN_STREAMS,
    compact,
    groups_of,
    is_train,
    next_path,
    settled_groups,
    view_writer,
)
from molt.store.control import Record, lineage_of
from molt.store.doctor import marker_fits
from molt.store.files import STORE, NameTaken
from molt.store.fold import MARKER
from molt.store.log import Log
from molt.store.reader import CommitFile, hot_files, read_commit, writer_names
from molt.store.readers import readers

KeepRouting = Literal["checkpoint", "all", "none"]


@dataclass(slots=True)
class Retirement:
    """What a log can let go of. `files` are hot commits and whole cold files."""

    floors: dict[str, int] = field(default_factory=dict)
    """writer -> the first commit that must stay."""
    commits: dict[str, list[Place]] = field(default_factory=dict)
    """stream -> addresses that go."""
    blobs: list[Path] = field(default_factory=list)
    """Media that only rows which go have named."""
    files: list[Path] = field(default_factory=list)
    bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "floors": self.floors,
            "commits": {stream: len(places) for stream, places in self.commits.items()},
            "blobs": len(self.blobs),
            "files": len(self.files),
            "bytes": self.bytes,
        }


def plan_retirement(
    log: Log, *, now: datetime.datetime, routing: KeepRouting = "checkpoint"
) -> Retirement:
    """What may go now. Nothing is changed.

    A writer's floor is its first commit with a row of a group that was not settled at every kept
    checkpoint, or the lowest position of a registered reader. Segments that were sampled by other
    weights than these checkpoints come from stay below it too: without them nobody could tell that
    their rollouts do not count (I2). `routing` "all" keeps that stream,
    "none" lets it go as soon as its groups are settled, whatever checkpoints would redo.
    """
    records = log.records()
    lineage = lineage_of(records)
    streams = set(TOKEN_STREAMS) if routing == "checkpoint" else TOKEN_STREAMS - {"routing"}
    rules = [(streams, settled_at_checkpoints(log, records))]
    if routing == "none":
        rules.append(({"routing"}, settled_groups(records, lineage)))
    segments: set[CommitFile] = set()
    known = policies_at_checkpoints(log, records)
    cursors = list(readers(log.path, now).values())
    found = Retirement()
    gone: set[CommitFile] = set()
    for name in writer_names(log.path):
        files = view_writer(log.path, name, lineage).files
        segments.update(f for f in files if f.stream == "segments" and not f.retired)
        limit = min((c.get(name, 0) for c in cursors), default=len(files))
        for streams, settled in rules:
            own = [f for f in files[:limit] if f.stream in streams and not f.retired]
            floor, loose = _walk(own, settled, limit)
            found.floors[name] = min(found.floors.get(name, floor), floor)
            gone.update(f for f in loose if f.stream != "segments" or _versions(f) <= known)
    _fill(found, gone, [f for f in cold_files(log.path) if not f.retired])
    if STORE.list(log.path / "blobs"):
        going = {place for places in found.commits.values() for place in places}
        lost = {f for f in segments if (f.writer, f.seq) in going}
        named = _media(lost) - _media(segments - lost)
        found.blobs = [log.path / "blobs" / sha256 for sha256 in sorted(named)]
    return found


def _media(files: Iterable[CommitFile]) -> set[str]:
    """Digests of the blobs that rows of these commits name."""
    tables = (read_commit(f, ["media"]).table for f in files)
    return {m["sha256"] for t in tables for media in t.column("media").to_pylist() for m in media}


def settled_at_checkpoints(log: Log, records: list[Record]) -> set[str]:
    """Groups that redo from any kept checkpoint, of any lineage, does not need."""
    settled: set[str] | None = None
    for record in (r for r in records if r.kind == "checkpoint"):
        row = record.rows[0]
        folder = log.path / row["path"]
        if not folder.is_dir():
            continue
        if not marker_fits(folder / MARKER, row):
            return set()  # redo would have to begin earlier, at nobody knows which
        lineage = lineage_of(records, row["epoch"])
        own = settled_groups(records, lineage, step=row["step"], n=record.n)
        settled = own if settled is None else settled & own
    return settled or set()


def policies_at_checkpoints(log: Log, records: list[Record]) -> set[tuple[int, int]]:
    """(epoch, version) that count in the newest lineage and after going back to any checkpoint."""
    ends = [(lineage_of(records), len(records))]
    for record in (r for r in records if r.kind == "checkpoint"):
        if (log.path / record.rows[0]["path"]).is_dir():
            ends.append((lineage_of(records, record.rows[0]["epoch"]), record.n))
    policies = [r for r in records if r.kind == "policy"]
    return {
        (r.rows[0]["epoch"], r.rows[0]["version"])
        for r in policies
        if all(lineage.holds(r.n) and r.n <= n for lineage, n in ends)
    }


def _versions(file: CommitFile) -> set[tuple[int, int]]:
    """The policy versions that sampled tokens of a commit; none if it has been retired."""
    try:
        runs = read_commit(file, ["version_runs"]).table.column("version_runs")
    except Retired:
        return set()
    return {(r["epoch"], r["version"]) for own in runs.to_pylist() for r in own}


def _walk(files: list[CommitFile], settled: set[str], limit: int) -> tuple[int, list[CommitFile]]:
    """(first commit with an unsettled training group, commits below it without other groups)."""
    loose: list[CommitFile] = []
    for file in files:
        groups = groups_of(file)
        if any(is_train(g) and g not in settled for g in groups):
            return file.seq, loose
        if all(map(is_train, groups)):  # evaluation is settled by no record, and stays
            loose.append(file)
    return limit, loose


def _fill(found: Retirement, gone: set[CommitFile], cold: list[ColdFile]) -> None:
    """Hot commits go one by one, a cold file when all that it holds may go."""
    places = {(f.writer, f.seq) for f in gone if f.cold}
    for file in sorted((f for f in gone if not f.cold), key=lambda f: (f.writer, f.seq)):
        found.commits.setdefault(file.stream, []).append((file.writer, file.seq))
        found.files.append(file.path)
    for whole in (f for f in cold if places.issuperset(f.places()) and len(f.seqs)):
        found.commits.setdefault(whole.stream, []).extend(whole.places())
        found.files.append(whole.path)
    found.bytes = sum(path.stat().st_size for path in found.files)


def retire(
    log: Log, *, now: datetime.datetime, routing: KeepRouting = "checkpoint", dry_run: bool = True
) -> dict[str, Any]:
    """Retire what `plan_retirement` finds; with `dry_run` only say what that is.

    Returns {"floors": {writer: seq}, "commits": {stream: n}, "blobs", "files", "bytes", "dry_run"}.
    A death at any point leaves files behind their tombstone; the next call deletes them. It may
    also leave blobs that nothing names.
    """
    if not dry_run:
        STORE.delete(_left_behind(log.path))
    found = plan_retirement(log, now=now, routing=routing)
    if not dry_run:
        for stream, places in found.commits.items():
            _bury(log.path, stream, places)
        STORE.delete([*found.files, *found.blobs])
    return {**found.to_json(), "dry_run": dry_run}


def _bury(log: Path, stream: str, places: list[Place]) -> None:
    while True:
        path = next_path(log, stream, cold_files(log))
        try:
            STORE.put(path, encode_cold(stream, "", sorted(places), None))
            return
        except NameTaken:
            continue


def _left_behind(log: Path) -> Iterator[Path]:
    """Files whose tombstone was published before a death."""
    files = cold_files(log)
    buried = {(f.stream, p) for f in files if f.retired for p in f.places()}
    for file in files:
        if not file.retired and buried.issuperset((file.stream, p) for p in file.places()):
            yield file.path
    for writer in writer_names(log):
        for hot in hot_files(log, writer):
            if (hot.stream, (writer, hot.seq)) in buried:
                yield hot.path


class Upkeep:
    """Compaction, and with `routing` retention, that run by themselves beside a training loop.

    `poke` costs nothing while a run goes on; call it after each checkpoint. An error of the last
    run (damage that compaction met) is raised by the next `poke` or by `close`. Example::

        upkeep = Upkeep(log)
        ...
        upkeep.poke(datetime.now(UTC))       # after a checkpoint
    """

    def __init__(self, log: Log, *, routing: KeepRouting | None = None) -> None:
        self.log, self.routing = log, routing
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def poke(self, now: datetime.datetime) -> None:
        if self._thread is None or not self._thread.is_alive():
            self.close()
            self._thread = threading.Thread(target=self._run, args=(now,), name="molt-upkeep")
            self._thread.start()

    def close(self) -> None:
        """Wait for the run in progress; raises what it met."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, now: datetime.datetime) -> None:
        try:
            compact(self.log)
            if self.routing is not None:
                retire(self.log, now=now, routing=self.routing, dry_run=False)
        except Exception as error:
            self._error = error
