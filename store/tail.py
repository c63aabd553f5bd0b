"""Following the log: each visible commit once, in its writer's order.

A poll lists the control log first and then the data (effects before causes: every row that a plan
names is found). It never asks for a future name; it scans each open writer's current bucket afresh,
and what is not there among the cold files (hot before cold: compaction moves in that direction).
A missing number with later ones behind it, of a writer or of a record, is a gap: wait, then LogGap
after `gap_s_max`. A poll that raises loses nothing: the next one delivers what it had read.
"""

import datetime
import errno
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from molt.schemas.errors import LogCorrupt, LogGap, Retired
from molt.store.cold import ColdFile, cold_files
from molt.store.commit import Commit
from molt.store.control import ControlListing, Lineage, Record, lineage_of, read_record
from molt.store.hints import Listener
from molt.store.reader import (
    BUCKET,
    END,
    CommitFile,
    bucket_files,
    cold_commits,
    merged,
    read_ahead,
    writer_names,
)
from molt.store.readers import register_reader, unregister_reader

COLD_PAUSE = 5
"""With nothing hot, cold files are listed again after this many times what a listing took."""
TRANSIENT = {errno.ENOENT, errno.ESTALE}


@dataclass(slots=True)
class _Cursor:
    next_seq: int = 0
    gap_since: float | None = None
    done: bool = False


class Tail:
    """A reader's position in one log.

    `streams` limits what is read and delivered (None = all); `columns` decodes only those columns
    of a stream. A retired commit of these streams raises Retired, unless `skip_retired`; a damaged
    one LogCorrupt, unless `on_corrupt` takes the error: the commit is then passed over. A poll
    delivers at most `commits_max` commits, and `more` says that it stopped there. With
    `register`, a name, retention keeps what this tail has not asked to go beyond: each poll says
    that the commits of the one before are done with; it expires `register_s` after the last poll.
    Example: `for commit in log.tail(streams={"rollouts"}).poll()[1]: ...`.
    """

    def __init__(
        self,
        log: Path,
        *,
        streams: Collection[str] | None = None,
        columns: Mapping[str, list[str]] | None = None,
        skip_retired: bool = False,
        on_corrupt: Callable[[CommitFile, LogCorrupt], None] | None = None,
        gap_s_max: float = 60.0,
        commits_max: int | None = None,
        register: str | None = None,
        register_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log = log
        self.register, self.register_s = register, register_s
        self._renew_at = 0.0
        self.commits_max, self.more = commits_max, False
        """`more`: the last poll ended at `commits_max`, another one goes on at once."""
        self._next = ""
        """The writer at which it goes on: a thousand others are not listed again for each poll."""
        self.streams = None if streams is None else frozenset(streams)
        self.columns = dict(columns or {})
        self.skip_retired = skip_retired
        self.on_corrupt = on_corrupt
        self.gap_s_max, self.clock = gap_s_max, clock
        self.lineage: Lineage = lineage_of([])
        self.next_n = 0
        self._records: list[Record] = []
        self._commits: list[Commit] = []
        """Read and not delivered yet: more than that of one poll if the polls before it raised."""
        self._control = ControlListing(log, clock)
        self._control_gap = _Cursor()
        self._epochs: list[Record] = []
        self._cursors: dict[str, _Cursor] = {}
        self._cold: list[ColdFile] | None = None
        self._cold_after = 0.0
        self._ear: Listener | None = None

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a writer of this host has news or `timeout_s` is over; then poll as ever.

        True after a hint. The first call starts listening and returns at once. In a log that this
        process may not write to there are no hints.
        """
        try:
            if self._ear is None:
                self._ear = Listener(self.log)
                return True
        except OSError:
            time.sleep(timeout_s)
            return False
        return self._ear.wait(timeout_s)

    def close(self) -> None:
        """Stop listening and let retention pass; needed by tails that waited or registered."""
        if self.register is not None:
            unregister_reader(self.log, self.register)
        if self._ear is not None:
            self._ear.close()
            self._ear = None

    @property
    def missing(self) -> list[str]:
        """Records and commits that the last poll did not find, while later ones are there."""
        cursors = {f"{w}: commit {c.next_seq}": c for w, c in self._cursors.items()}
        cursors = {f"control record {self.next_n}": self._control_gap, **cursors}
        return [what for what, cursor in cursors.items() if cursor.gap_since is not None]

    def poll(self) -> tuple[list[Record], list[Commit]]:
        """What became visible since the last poll: control records, then data commits."""
        if self.register is not None and self.clock() >= self._renew_at:
            done = {w: c.next_seq for w, c in self._cursors.items()}
            done |= {c.writer: c.seq for c in reversed(self._commits)}
            now = datetime.datetime.now(datetime.UTC)
            register_reader(self.log, self.register, done, ttl_s=self.register_s, now=now)
            self._renew_at = self.clock() + self.register_s / 10
        self._poll_control()
        names = writer_names(self.log)
        if self._next in names:
            first = names.index(self._next)
            names = names[first:] + names[:first]
        self._cold, self.more, self._next = None, False, ""
        for writer in names:
            cursor = self._cursors.setdefault(writer, _Cursor())
            if not cursor.done:
                self._poll_writer(writer, cursor)
            if self.more:
                self._next = writer
                break
        records, commits = self._records, self._still_visible()
        self._records, self._commits = [], []
        return records, commits

    def _still_visible(self) -> list[Commit]:
        """Without what an epoch that opened since it was read did not list: hidden for ever."""
        commits = self._commits
        if not commits:
            return commits
        numbers = self._control.numbers(self.next_n)
        opened = [r for n in numbers if (r := read_record(self.log, n)).kind == "epoch"]
        lineage = lineage_of([*self._epochs, *opened]) if opened else self.lineage
        limits = {c.writer: lineage.last_seq(c.writer) for c in commits}
        return [c for c in commits if (last := limits[c.writer]) is None or c.seq <= last]

    def _poll_control(self) -> None:
        n_epochs = len(self._epochs)
        try:
            for n in self._control.numbers(self.next_n):
                if n != self.next_n:
                    self._gap(self._control_gap, f"control record {self.next_n}", n)
                    break
                record = read_record(self.log, n)
                if record.kind == "epoch":
                    self._epochs.append(record)
                self._records.append(record)
                self.next_n += 1
                self._control_gap.gap_since = None
        finally:
            if len(self._epochs) > n_epochs:
                self.lineage = lineage_of(self._epochs)

    def _poll_writer(self, writer: str, cursor: _Cursor) -> None:
        limit = self.lineage.last_seq(writer)
        while True:
            first = cursor.next_seq
            files = self._bucket(writer, first)
            if files and self._deliver(writer, cursor, files):
                return
            if limit is not None and cursor.next_seq > limit:
                cursor.done = True
                return
            if cursor.next_seq == first:
                return

    def _deliver(self, writer: str, cursor: _Cursor, files: list[CommitFile]) -> bool:
        """Read what follows the cursor. True: nothing behind is to be looked for in this poll."""
        limit, out = self.lineage.last_seq(writer), self._commits
        room = None if self.commits_max is None else max(0, self.commits_max - len(out))
        ready = islice(self._ready(files, cursor.next_seq, limit), room)
        with closing(read_ahead(ready, lambda f: self.columns.get(f.stream))) as ahead:
            for file in files:
                if self.commits_max is not None and len(out) >= self.commits_max:
                    self.more = True
                    return True
                if limit is not None and file.seq > limit:
                    cursor.done = True
                    return True
                if file.seq != cursor.next_seq:
                    self._gap(cursor, f"{writer}: commit {cursor.next_seq}", file.seq)
                    return True
                if file.stream == END:
                    cursor.done = True
                    return True
                if self._wants(file):
                    upcoming = next(ahead, None)
                    if upcoming is None:  # commits that were passed over left room for more
                        return False
                    try:
                        out.append(upcoming[1]())
                    except Retired:
                        if not self.skip_retired:
                            raise
                    except LogCorrupt as error:
                        if self.on_corrupt is None:
                            raise
                        self.on_corrupt(file, error)
                    except OSError as error:
                        if error.errno in TRANSIENT:
                            self._gap(cursor, f"{writer}: commit {cursor.next_seq}", file.seq)
                            return True
                        raise
                cursor.next_seq += 1
                cursor.gap_since = None
        return False

    def _ready(
        self, files: list[CommitFile], first: int, limit: int | None
    ) -> Iterator[CommitFile]:
        """Of these commits those that are visible and asked for."""
        for seq, file in enumerate(files, first):
            if file.seq != seq or file.stream == END or (limit is not None and seq > limit):
                return
            if self._wants(file):
                yield file

    def _wants(self, file: CommitFile) -> bool:
        asked = self.streams is None or file.stream in self.streams
        return asked and not (file.retired and self.skip_retired)

    def _bucket(self, writer: str, first: int) -> list[CommitFile]:
        """Commits of `first`'s bucket from there on; cold files are listed if there is no hot one.

        Hot commits without a gap may be less than all: the caller asks again behind the last.
        """
        bucket = first // BUCKET
        hot = bucket_files(self.log, writer, bucket, first)
        if hot and hot[-1].seq - first == len(hot) - 1:
            return hot
        if self._cold is None or hot:
            started = self.clock()
            if not hot and started < self._cold_after:
                return []
            self._cold = cold_files(self.log)
            # An idle poll must not cost more in an older log: look less often if that is slow.
            self._cold_after = self.clock() + COLD_PAUSE * (self.clock() - started)
        return merged(hot, cold_commits(self._cold, writer, first, (bucket + 1) * BUCKET))

    def _gap(self, cursor: _Cursor, what: str, seen: int) -> None:
        now = self.clock()
        if cursor.gap_since is None:
            cursor.gap_since = now
        elif now - cursor.gap_since > self.gap_s_max:
            raise LogGap(
                f"{what} has been missing for more than {self.gap_s_max:g} s while {seen} is "
                "there; run `molt doctor` on the log"
            )
