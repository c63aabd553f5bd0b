"""Retention: which commits nobody can need again, and how they go (section "Retention", P37).

Only token-sized streams retire, and only commits whose groups were all settled at every checkpoint
that is kept: redo never asks for them, and the fold forgets settled groups. A tombstone (a cold
file without rows) is published first, then the bytes go, so a later reader is told "retired".
"""

import datetime
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from molt.schemas.errors import ConfigError, LogCorrupt
from molt.schemas.text import canonical_json
from molt.store.cold import ColdFile, Place, cold_files, encode_cold
from molt.store.compact import (
    TOKEN_STREAMS,
    groups_of,
    is_train,
    next_path,
    settled_groups,
    view_writer,
)
from molt.store.control import Record, lineage_of
from molt.store.doctor import marker_fits
from molt.store.files import STORE, NameTaken, make_dirs, replace
from molt.store.log import Log
from molt.store.reader import CommitFile, hot_files, writer_names

KeepRouting = Literal["checkpoint", "all", "none"]
MARKER = "COMPLETE"
READERS = "readers"
READER_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(slots=True)
class Retirement:
    """What a log can let go of. `files` are hot commits and whole cold files."""

    floors: dict[str, int] = field(default_factory=dict)
    """writer -> the first commit that must stay."""
    commits: dict[str, list[Place]] = field(default_factory=dict)
    """stream -> addresses that go."""
    files: list[Path] = field(default_factory=list)
    bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "floors": self.floors,
            "commits": {stream: len(places) for stream, places in self.commits.items()},
            "files": len(self.files),
            "bytes": self.bytes,
        }


def register_reader(
    log: Log, name: str, next_seq: Mapping[str, int], *, ttl_s: float, now: datetime.datetime
) -> None:
    """Hold retention at `next_seq[writer]` (0 for writers not named) for `ttl_s` from `now`, UTC.

    A long reader renews this while it goes on, and unregisters at its end. Raises ConfigError for
    a name that cannot be a file's.
    """
    if not READER_NAME.fullmatch(name) or name.startswith("."):
        raise ConfigError(f"a reader's name is made of letters, digits and _.-, not '{name}'")
    make_dirs(log.path / READERS)
    expires = now + datetime.timedelta(seconds=ttl_s)
    text = {"name": name, "next_seq": dict(next_seq), "expires": expires.isoformat()}
    replace(log.path / READERS / f"{name}.json", canonical_json(text).encode())


def unregister_reader(log: Log, name: str) -> None:
    """Let retention pass; a reader that is not registered is no error."""
    if STORE.list(log.path / READERS):
        STORE.delete([log.path / READERS / f"{name}.json"])


def readers(log: Log, now: datetime.datetime) -> dict[str, dict[str, int]]:
    """Registered readers that have not expired: name -> {writer: next_seq}.

    One that cannot be read is LogCorrupt: what it needs is unknown, so nothing may go.
    """
    found = {}
    for file in STORE.list(log.path / READERS):
        try:
            text = json.loads(STORE.read(log.path / READERS / file))
            expires = datetime.datetime.fromisoformat(text["expires"])
            next_seq = {str(w): int(seq) for w, seq in text["next_seq"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LogCorrupt(
                f"{READERS}/{file} cannot be read ({error}), and so what it needs is unknown; "
                "delete it if its reader is gone"
            ) from None
        if expires > now:
            found[file.removesuffix(".json")] = next_seq
    return found


def plan_retirement(
    log: Log, *, now: datetime.datetime, routing: KeepRouting = "checkpoint"
) -> Retirement:
    """What may go now. Nothing is changed.

    A writer's floor is its first commit with a row of a group that was not settled at every kept
    checkpoint, or the lowest position of a registered reader. `routing` "all" keeps that stream,
    "none" lets it go as soon as its groups are settled, whatever checkpoints would redo.
    """
    records = log.records()
    lineage = lineage_of(records)
    streams = set(TOKEN_STREAMS) if routing == "checkpoint" else TOKEN_STREAMS - {"routing"}
    rules = [(streams, settled_at_checkpoints(log, records))]
    if routing == "none":
        rules.append(({"routing"}, settled_groups(records, lineage)))
    cursors = list(readers(log, now).values())
    found = Retirement()
    gone: set[CommitFile] = set()
    for name in writer_names(log.path):
        files = view_writer(log.path, name, lineage).files
        limit = min((c.get(name, 0) for c in cursors), default=len(files))
        for streams, settled in rules:
            own = [f for f in files[:limit] if f.stream in streams and not f.retired]
            floor, loose = _walk(own, settled, limit)
            found.floors[name] = min(found.floors.get(name, floor), floor)
            gone.update(loose)
    _fill(found, gone, [f for f in cold_files(log.path) if not f.retired])
    return found


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

    Returns {"floors": {writer: seq}, "commits": {stream: n}, "files", "bytes", "dry_run"}. A death
    at any point leaves files behind their tombstone; the next call deletes them.
    """
    if not dry_run:
        STORE.delete(_left_behind(log.path))
    found = plan_retirement(log, now=now, routing=routing)
    if not dry_run:
        for stream, places in found.commits.items():
            _bury(log.path, stream, places)
        STORE.delete(found.files)
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
