"""The control log: one totally ordered sequence of decisions (invariants I4 and I5).

Creating `train/<n>.arrow` is the compare-and-set: whoever owns the name decided. A driver whose
next number was taken by a newer epoch is fenced. `Lineage` says which records count for an epoch:
its own, and its ancestors' up to each cut.
"""

import datetime
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from molt.schemas.check import check_enums
from molt.schemas.columns import Row, normalise, to_rows, to_table
from molt.schemas.control import CONTROL, CONTROL_VERSIONS, HEADERS
from molt.schemas.errors import ConfigError, Fenced, LogCorrupt, LogGap, SegmentRejected
from molt.schemas.records import to_row
from molt.schemas.streams import schema_id
from molt.schemas.text import canonical_json
from molt.store.commit import Commit, decode, encode
from molt.store.files import STORE, NameTaken
from molt.store.hints import announce
from molt.store.reader import (
    CONTROL_DIR,
    writer_epoch,
    writer_files,
    writer_names,
)

WRITER = "control"
NAME = re.compile(r"(\d{10})\.arrow")
QUIET_S, LISTED_S_MAX = 2.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One control record; `rows` has one row for kinds without rows."""

    n: int
    kind: str
    epoch: int
    header: dict[str, Any]
    rows: list[Row]


def to_record(commit: Commit) -> Record:
    rows = to_rows(commit.table)
    epoch = commit.header["epoch"] if "epoch" in commit.header else rows[0]["epoch"]
    return Record(
        n=commit.seq, kind=commit.stream, epoch=int(epoch), header=commit.header, rows=rows
    )


def control_numbers(log: Path, start: int = 0) -> list[int]:
    """Numbers of the records that are there, from `start` on, ascending."""
    names = STORE.list(log / CONTROL_DIR, f"{start:010d}")
    return [int(m[1]) for name in names if (m := NAME.fullmatch(name))]


class ControlListing:
    """Record numbers for a reader that asks often: `train/` is listed only if it has changed.

    A folder whose identity stays the same while it is listed, `QUIET_S` after that identity was
    first seen, has nothing new: a later name would give it another change time, whatever clock and
    resolution that has. Where a file system says so late or never, a listing follows in
    `LISTED_S_MAX`.
    """

    def __init__(self, log: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.log, self.clock = log, clock
        self._state: object = None
        self._since = 0.0
        self._nothing: tuple[int, float] | None = None
        """(start, time) of a listing that is to be believed and found nothing."""

    def numbers(self, start: int) -> list[int]:
        """As `control_numbers`."""
        try:
            now, state = self.clock(), STORE.identity(self.log / CONTROL_DIR)
        except FileNotFoundError:
            return []
        if state != self._state:
            self._state, self._since, self._nothing = state, now, None
        if self._nothing and self._nothing[0] == start and now - self._nothing[1] < LISTED_S_MAX:
            return []
        found = control_numbers(self.log, start)
        self._nothing = (start, now) if not found and now - self._since > QUIET_S else None
        return found


def read_record(log: Path, n: int) -> Record:
    return to_record(read_control_commit(log, n))


def read_control_commit(log: Path, n: int) -> Commit:
    """A verified record; read once more before damage is believed (late visibility)."""
    path = log / CONTROL_DIR / f"{n:010d}.arrow"
    try:
        return decode(STORE.read(path), stream=None, writer=WRITER, seq=n)
    except LogCorrupt:
        return decode(STORE.read(path), stream=None, writer=WRITER, seq=n)


def read_records(log: Path, start: int = 0) -> list[Record]:
    """All records from number `start` on. A hole is LogGap: something removed a decision."""
    numbers = control_numbers(log, start)
    for i, n in enumerate(numbers):
        if n != start + i:
            raise LogGap(f"control record {start + i} is missing, {n} is there; run `molt doctor`")
    return [read_record(log, n) for n in numbers]


class ControlLog:
    """The driver's end of the control log. `put` publishes one record or raises Fenced.

    Example: `log.control.put("drop", [{"group_id": ..., "rollout_id": None, "reason": "lag"}])`.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self.epoch = 0
        self.next_n = 0
        self._nonce = secrets.token_hex(8)
        self._tried_at: datetime.datetime | None = None
        """Time of the put of `next_n` whose outcome is not known."""

    def open_epoch(
        self,
        *,
        parent_epoch: int | None = None,
        cut: int | None = None,
        now: Any,
        **fields: Any,
    ) -> Record:
        """Take the log over: the first act of a driver.

        The record closes the writers of all older epochs at what is visible now. Parent and cut
        default to the newest epoch and its end. ConfigError for one that is not in the log.
        """
        while True:
            records = read_records(self.log)
            epochs = [r for r in records if r.kind == "epoch"]
            n = len(records)
            parent = parent_epoch if parent_epoch is not None else _last_epoch(epochs)
            if parent is not None and parent not in {r.epoch for r in epochs}:
                raise ConfigError(f"there is no epoch {parent} in this log to go on from")
            if cut is not None and not 0 <= cut < n:
                raise ConfigError(f"a cut is one of the {n} records of this log, not {cut}")
            row = {
                "epoch": (_last_epoch(epochs) or 0) + 1,
                "parent_epoch": parent,
                "cut": cut if cut is not None else (n - 1 if parent is not None else None),
                "closed": _to_close(self.log, epochs),
                "at": now,
                **fields,
            }
            try:
                self._publish(n, "epoch", [row], None)
            except NameTaken:
                continue
            self.epoch, self.next_n, self._tried_at = row["epoch"], n + 1, None
            return read_record(self.log, n)

    def put(self, kind: str, rows: Sequence[Any], header: Mapping[str, Any] | None = None) -> int:
        """Publish one record under the next number; returns the number.

        After an OSError, whose record may be there, the same put may be repeated.
        """
        # The same time makes the same bytes, and these are no other's: the nonce is in them.
        now = self._tried_at or datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
        plain = [dict(r) if isinstance(r, Mapping) else to_row(r) for r in rows]
        if header is not None:
            header = {"epoch": self.epoch, **header}
            try:
                canonical_json(header)
            except (TypeError, ValueError) as error:
                raise SegmentRejected(f"header of '{kind}' {header}: {error}") from None
        try:
            self._publish(self.next_n, kind, [{"at": now, **r} for r in plain], header)
        except NameTaken:
            other = read_record(self.log, self.next_n)
            if self._tried_at and other.epoch == self.epoch:
                raise Fenced(
                    f"control record {self.next_n} is a '{other.kind}' that this driver could not "
                    f"confirm; another '{kind}' cannot take its place. This driver stops; the next "
                    "start goes on from that record"
                ) from None
            raise Fenced(
                f"epoch {self.epoch} lost this log: control record {self.next_n} is a "
                f"'{other.kind}' of epoch {other.epoch}. Another driver has taken over; this one "
                "stops and changes nothing"
            ) from None
        except OSError:
            self._tried_at = now
            raise
        self._tried_at = None
        self.next_n += 1
        return self.next_n - 1

    def _publish(
        self, n: int, kind: str, rows: list[Row], header: Mapping[str, Any] | None
    ) -> None:
        if kind not in CONTROL:
            raise SegmentRejected(f"unknown control record '{kind}'; known: {sorted(CONTROL)}")
        expected = HEADERS.get(kind, frozenset())
        if set(header or {}) != expected:
            raise SegmentRejected(
                f"header of '{kind}' must be {sorted(expected)}, got {sorted(header or {})}"
            )
        checked = [normalise(kind, CONTROL[kind], row) for row in rows]
        for row in checked:
            check_enums(kind, row)
        raw = encode(
            to_table(CONTROL[kind], checked),
            stream=kind,
            writer=WRITER,
            seq=n,
            schema_text=schema_id(kind, CONTROL[kind], CONTROL_VERSIONS[kind]),
            header=header,
            nonce=self._nonce,
        )
        STORE.put(self.log / CONTROL_DIR / f"{n:010d}.arrow", raw)
        announce(self.log)


def _last_epoch(epochs: Sequence[Record]) -> int | None:
    return max((r.epoch for r in epochs), default=None)


def _to_close(log: Path, epochs: Sequence[Record]) -> list[Row]:
    """Every writer that no earlier epoch closed, with its last visible commit.

    Writers that ended cleanly are listed too: a directory that appears later, from a worker that
    did not know of the new epoch, is then recognised by not being listed, and the next epoch
    lists it as empty: what was hidden stays hidden.
    """
    known = {c["writer"] for r in epochs for c in r.rows[0]["closed"]}
    newest = _last_epoch(epochs) or 0
    return [
        {
            "writer": w,
            "last_seq": len(writer_files(log, w)) - 1 if writer_epoch(w) >= newest else -1,
        }
        for w in writer_names(log)
        if w not in known
    ]


@dataclass(slots=True)
class Lineage:
    """Which control records and writers count, seen from one epoch."""

    epoch: int
    spans: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    """epoch -> (first record number, last record number or None while open)."""
    closed: dict[str, int] = field(default_factory=dict)
    newest_epoch: int = 0

    def holds(self, n: int) -> bool:
        """True if record number `n` is in this lineage."""
        return any(a <= n and (b is None or n <= b) for a, b in self.spans.values())

    def last_seq(self, writer: str) -> int | None:
        """Last visible commit of a writer; -1 = none, None = still open."""
        if writer in self.closed:
            return self.closed[writer]
        return -1 if writer_epoch(writer) < self.newest_epoch else None


def lineage_of(records: Iterable[Record], epoch: int | None = None) -> Lineage:
    """The lineage of `epoch` (default: the newest). An unknown epoch is ConfigError."""
    epochs = [r for r in records if r.kind == "epoch"]
    newest = _last_epoch(epochs) or 0
    line = Lineage(epoch=epoch if epoch is not None else newest, newest_epoch=newest)
    by_epoch = {r.epoch: r for r in epochs}
    for r in epochs:
        line.closed.update({c["writer"]: c["last_seq"] for c in r.rows[0]["closed"]})
    current, limit = line.epoch, None
    while current and current in by_epoch:
        record = by_epoch[current]
        row = record.rows[0]
        end = min((r.n for r in epochs if r.n > record.n), default=None)
        last = end - 1 if end is not None else None
        if limit is not None:
            last = limit if last is None else min(last, limit)
        if last is None or record.n <= last:  # else it was cut off before its own beginning
            line.spans[current] = (record.n, last)
        cuts = [n for n in (limit, row["cut"]) if n is not None]
        limit, current = min(cuts, default=None), row["parent_epoch"]
    if line.epoch not in by_epoch and (line.epoch or epoch is not None):
        raise ConfigError(f"there is no epoch {line.epoch} in this log; known: {sorted(by_epoch)}")
    return line
