"""One consistent snapshot of a log for SQL: verified files, and which of their rows count (I2, I6).

Lists effects before causes: the control log first, then the data, hot before cold; what retention
removed is left out. Every file is verified whole once
per process before a row of it is used; what is kept of it is one `Entry` of scalars per row.
A row counts unless it is above its writer's last commit, in an abandoned future, a duplicate of an
equal row by another writer, or of a rollout whose writers contradict each other ("conflict"). Rows
of a user's own stream have no key: of those only a commit that was published again counts once.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from molt.schemas.columns import to_rows
from molt.schemas.errors import LogGap, Retired, SchemaMismatch
from molt.store.cold import cold_files
from molt.store.control import lineage_of, read_records
from molt.store.files import STORE
from molt.store.log import Log
from molt.store.reader import (
    END,
    CommitFile,
    located,
    read_commit,
    read_schema,
    writer_epoch,
    writer_files,
    writer_names,
)

Epoch = int | Literal["all"] | None
Who = tuple[str, int]
"""(rollout_id, attempt)."""

SHOWN, ABANDONED, DUPLICATE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Link:
    """A segment's place in its rollout; what store/branches.py needs, and a little more."""

    segment: int
    parent: int | None
    keep: int
    n_tokens: int
    sampled_edges: npt.NDArray[np.int64]
    """Alternating starts and ends of the runs of sampled tokens."""
    versions: frozenset[tuple[int, int]]
    agent: bool

    def n_sampled(self, start: int, end: int) -> int:
        """Sampled tokens among the own tokens [start, end)."""
        return int(np.diff(self.sampled_edges.clip(start, max(start, end)))[::2].sum())


@dataclass(frozen=True, slots=True)
class Entry:
    """What decides about one row. Equal `key` and `content` = the same row, written twice.

    Without a key (users' own streams) `content` is the row's time.
    """

    who: Who | None
    key: tuple[Any, ...] | None
    content: Any = None
    link: Link | None = None


_ENTRIES: dict[tuple[Path, str, int], tuple[tuple[int, int, int], list[Entry]]] = {}
"""(log, writer, seq) -> ((inode, size, mtime_ns) of its file at verification, entries)."""


def entries_of(file: CommitFile) -> list[Entry]:
    """The entries of a commit, verified whole once per process. LogCorrupt if it is damaged."""
    key = (file.log, file.writer, file.seq)
    known = _ENTRIES.get(key)
    try:
        state = STORE.identity(file.path)
    except FileNotFoundError:
        if known is not None:
            return known[1]
        file = located(file)
        state = STORE.identity(file.path)
    if known is None or known[0] != state:
        table = read_commit(file).table
        names = [c for c in _INDEXED.get(file.stream, _USERS) if c in table.column_names]
        rows = to_rows(table.select(names)) if names else [{}] * table.num_rows
        known = _ENTRIES[key] = (state, [_entry(file, row) for row in rows])
    return known[1]


_WHO = ["rollout_id", "attempt"]
_USERS = [*_WHO, "at"]
_INDEXED = {
    "prompts": ["group_id", "attempt", "reason", "prompt", "n", "rollouts"],
    "segments": [
        *_WHO,
        "segment",
        "parent",
        "keep",
        "sampled",
        "version_runs",
        "role",
        "digest",
    ],
    "rollouts": [*_WHO, "status", "chain_digest"],
    "rewards": [*_WHO, "segment", "token", "name", "revision", "value"],
    "routing": [*_WHO, "segment", "start", "n", "row_xxh3"],
    "scores": [*_WHO, "segment", "kind", "model", "epoch", "version"],
}


def _entry(file: CommitFile, row: Mapping[str, Any]) -> Entry:
    who = (row["rollout_id"], row["attempt"]) if "rollout_id" in row and "attempt" in row else None
    if file.stream == "segments":
        return Entry(who, (who, row["segment"]), row["digest"], _link(row))
    if file.stream == "rollouts":
        return Entry(who, (who, row["status"] == "pending"), (row["status"], row["chain_digest"]))
    if file.stream == "rewards":
        *key, value = row.values()
        return Entry(who, tuple(key), value)
    if file.stream == "prompts":
        return Entry(None, (writer_epoch(file.writer), *map(repr, row.values())))
    if file.stream == "routing":
        return Entry(who, (*list(row.values())[:5], hash(row["row_xxh3"].tobytes())))
    if file.stream in _INDEXED:
        return Entry(who, tuple(row.values()))
    return Entry(who, None, row.get("at"))


def _link(row: Mapping[str, Any]) -> Link:
    padded = np.zeros(len(row["sampled"]) + 2, np.int8)
    padded[1:-1] = row["sampled"]
    return Link(
        segment=row["segment"],
        parent=row["parent"],
        keep=row["keep"],
        n_tokens=len(row["sampled"]),
        sampled_edges=np.flatnonzero(np.diff(padded)).astype(np.int64),
        versions=frozenset((r["epoch"], r["version"]) for r in row["version_runs"]),
        agent=row["role"] == "agent",
    )


class Snapshot:
    """The files and control records of one log as of now, seen from `epoch` (None: the newest).

    `epoch="all"` keeps abandoned futures and marks them. Raises LogCorrupt or LogGap.
    """

    def __init__(self, log: Log, epoch: Epoch = None) -> None:
        self.log, self.everything = log, epoch == "all"
        self.records = read_records(log.path)
        self.lineage = lineage_of(self.records, epoch if isinstance(epoch, int) else None)
        self.policies = frozenset(
            (r.rows[0]["epoch"], r.rows[0]["version"])
            for r in self.records
            if r.kind == "policy" and self.lineage.holds(r.n)
        )
        self.files: dict[str, list[CommitFile]] = {}
        self._ends: dict[str, list[CommitFile]] = {}
        """Of each process the last commits of its writers."""
        moved = {writer for file in cold_files(log.path) for writer in file.covers}
        writers = {*writer_names(log.path), *self.lineage.closed}
        if lost := sorted(moved - writers):
            raise LogGap(
                f"{log.path}/data/{lost[0]} is missing, though rows of that writer lie in cold "
                "files. If the log was copied without its empty folders, make it"
            )
        for writer in sorted(writers):
            visible = self._visible(writer)
            self._ends.setdefault(_process(writer), []).extend(visible[-1:])
            for file in visible:
                if file.retired:
                    continue
                self.files.setdefault(file.stream, []).append(file)
        self.files.pop(END, None)
        self._judged = False
        self._lost: dict[Who, dict[int, bool]] = {}
        self._conflicts: set[Who] = set()

    def _visible(self, writer: str) -> list[CommitFile]:
        limit = self.lineage.last_seq(writer)
        files = writer_files(self.log.path, writer, limit)
        if limit is not None and len(files) <= limit:
            raise LogGap(
                f"{writer}: commit {len(files)} is missing, though an epoch record says that "
                f"{limit} was visible; run `molt doctor` on the log"
            )
        return files

    def entries(self, stream: str) -> Iterator[tuple[CommitFile, list[Entry]]]:
        for file in self.files.get(stream, []):
            # Retired since the listing: left out, as what retired before it.
            with contextlib.suppress(Retired):
                yield file, entries_of(file)

    def states(self, stream: str) -> list[tuple[CommitFile, npt.NDArray[np.uint8]]]:
        """Each file of the stream with SHOWN, ABANDONED or DUPLICATE for each of its rows."""
        self._judge()
        seen: set[Any] = set()
        gone: set[str] = set()
        out = []
        for file, entries in self.entries(stream):
            epoch = writer_epoch(file.writer)
            state = np.zeros(len(entries), np.uint8)
            for i, entry in enumerate(entries):
                lost = self.is_abandoned(epoch, entry.who)
                state[i] = lost
                if entry.key:
                    mark = (lost, entry.key, entry.content)
                    state[i] = DUPLICATE if mark in seen else lost
                    seen.add(mark)
            if stream not in _INDEXED and self._went_on(file, entries, gone):
                state[:] = DUPLICATE
                gone.add(file.writer)
            out.append((file, state))
        return out

    def _went_on(self, end: CommitFile, entries: list[Entry], gone: set[str]) -> bool:
        """True if a writer gave up its directory after this commit, whose outcome it did not know,
        and published it again as the first one of another."""
        others = self._ends[_process(end.writer)]
        if len(others) == 1 or end not in others:
            return False
        writers = {f.writer for f in others} - {end.writer} - gone
        firsts = [f for f in self.files[end.stream] if f.seq == 0 and f.writer in writers]
        times = [e.content for e in entries]
        return any(times == [e.content for e in entries_of(f)] and _equal(f, end) for f in firsts)

    def shown(self, state: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        return state < DUPLICATE if self.everything else state == SHOWN

    def is_abandoned(self, epoch: int, who: Who | None) -> bool:
        """True if rows of this attempt, by a writer of `epoch`, do not count in the lineage."""
        if who is None:
            return False
        lost = self._lost.get(who)
        if who in self._conflicts:
            return True
        if lost is not None:
            return lost[epoch] if epoch in lost else all(lost.values())
        return bool(self.lineage.spans) and epoch > 0 and epoch not in self.lineage.spans

    def links(self) -> Iterator[tuple[Who, bool, dict[int, Link]]]:
        """(attempt, abandoned, its agent segments) of every attempt that is shown."""
        found: dict[tuple[Who, bool], dict[int, Link]] = {}
        for file, state in self.states("segments"):
            for entry, shown, lost in zip(
                entries_of(file), self.shown(state), state == ABANDONED, strict=True
            ):
                if shown and entry.link and entry.link.agent and entry.who:
                    family = found.setdefault((entry.who, bool(lost)), {})
                    family.setdefault(entry.link.segment, entry.link)
        for (who, gone), family in found.items():
            # Of a contradicted rollout a parent may be missing: it has no branches.
            if all(x.parent is None or x.parent in family for x in family.values()):
                yield who, gone, family

    def _judge(self) -> None:
        """Which attempts are out of the lineage, and which are contradicted."""
        if self._judged:
            return
        self._judged = True
        for file, entries in self.entries("segments"):
            epoch = writer_epoch(file.writer)
            for entry in entries:
                if entry.link and entry.link.agent and entry.who and self.lineage.spans:
                    lost = self._lost.setdefault(entry.who, {})
                    out = not entry.link.versions <= self.policies
                    lost[epoch] = lost.get(epoch, False) or out
        first: dict[Any, Any] = {}
        for stream in ("segments", "rollouts", "rewards"):
            for file, entries in self.entries(stream):
                epoch = writer_epoch(file.writer)
                for entry in entries:
                    if entry.who and not self.is_abandoned(epoch, entry.who):
                        key = (stream, entry.key)
                        if first.setdefault(key, entry.content) != entry.content:
                            self._conflicts.add(entry.who)


def _process(writer: str) -> str:
    return writer.rpartition("-")[0]


def _equal(a: CommitFile, b: CommitFile) -> bool:
    """True if two commits of a stream have the same rows; NaN is equal to NaN."""
    one, other = read_commit(a).table, read_commit(b).table
    return one.column_names == other.column_names and all(
        x.equals(y) or (x.type == y.type and repr(x.to_pylist()) == repr(y.to_pylist()))
        for x, y in zip(one.columns, other.columns, strict=True)
    )


def stream_schema(snapshots: list[Snapshot], stream: str) -> pa.Schema:
    """The schema of a user's own stream over all its files; older files lack newer columns.

    SchemaMismatch names the two files that give one column types that do not go together.
    """
    files = [f for s in snapshots for f in s.files.get(stream, [])]
    for file in files:
        entries_of(file)  # nothing unverified is given to Arrow
    schemas = [read_schema(f) for f in files]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive")
    except pa.ArrowException as error:
        raise SchemaMismatch(f"{stream}: {_first_conflict(files, schemas) or error}") from None


def _first_conflict(files: list[CommitFile], schemas: list[pa.Schema]) -> str | None:
    known: dict[str, tuple[pa.Field, CommitFile]] = {}
    for file, schema in zip(files, schemas, strict=True):
        for field in schema:
            other, first = known.setdefault(field.name, (field, file))
            pair = [pa.schema([other]), pa.schema([field])]
            try:
                pa.unify_schemas(pair, promote_options="permissive")
            except pa.ArrowException:
                return (
                    f"column '{field.name}' is {other.type} in {first.writer}/{first.seq} and "
                    f"{field.type} in {file.writer}/{file.seq}; use another name for one of the two"
                )
    return None
