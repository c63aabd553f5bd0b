"""The appender: rows of one process become commits, durable before they count (invariant I6).

One writer owns one directory, `data/<epoch>-<host>-<pid>-<rand>/`, with one dense sequence over all
its streams and one publish in flight. `append` checks and copies a row and returns a Ticket;
the ticket resolves when the row's commit is durable. Group commit: a flush happens at
`flush_bytes`, `flush_rows`, after `linger_s`, and at once for a `rollouts` row. It takes the rows
that were there when it became due, no later ones, and runs beside the caller's next appends.
"""

import contextlib
import datetime
import errno
import json
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from molt.schemas.batch import clean_segments, segment_contents
from molt.schemas.check import Parent, check_routing_shape, check_row, parent_of, routing_shape
from molt.schemas.columns import Row, owned, row_name, to_rows
from molt.schemas.errors import MoltError, SchemaMismatch, SegmentRejected, WriterClosed
from molt.schemas.records import Ref, to_row
from molt.schemas.streams import (
    AT,
    FLUSH_ORDER,
    STREAMS,
    USER_NAME,
    VERSIONS,
    schema_id,
)
from molt.schemas.text import canonical_json
from molt.store.commit import encode
from molt.store.files import STORE, NameTaken, PublishUnknown, make_dirs
from molt.store.hints import HOST, announce
from molt.store.pending import (
    Key,
    Pending,
    Ticket,
    as_table,
    commits_of,
    key_of,
    not_written,
    size_of,
    tickets_of,
)
from molt.store.reader import END, commit_path

KEYS_REMEMBERED = 200_000
"""Own keys a writer remembers for the check "same key, same content"."""


class Writer:
    """Appends rows to one log. Thread-safe; refuses use after fork(); `close` ends it cleanly.

    Example::

        w = log.writer()
        ticket = w.append("rewards", RewardRow(rollout_id="train-0/0", ...))
        w.flush()          # everything appended so far is durable

    `redact` is a function of yours over a segment's wire messages (decoded JSON); what it returns
    is stored in their place. Token ids are not touched: the trainer needs what was sampled.
    """

    def __init__(
        self,
        log: Path,
        epoch: int,
        *,
        linger_s: float = 0.5,
        flush_bytes: int = 4 << 20,
        flush_rows: int = 256,
        user_schemas: Mapping[str, pa.Schema] | None = None,
        routing: Mapping[str, str] | None = None,
        redact: Callable[[Any], Any] | None = None,
    ) -> None:
        self.log, self.epoch = log, epoch
        self.linger_s, self.flush_bytes, self.flush_rows = linger_s, flush_bytes, flush_rows
        self._schemas = dict(STREAMS)
        for name, schema in (user_schemas or {}).items():
            if not USER_NAME.fullmatch(name):
                raise SegmentRejected(f"a stream of your own is called x_[a-z0-9_]+, not '{name}'")
            twice = {n for n in schema.names if schema.names.count(n) > 1}
            if twice:
                raise SegmentRejected(f"the schema of {name} has several columns {sorted(twice)}")
            self._schemas[name] = schema.append(AT) if "at" not in schema.names else schema
        self._schema_texts: dict[str, str] = {}
        self._routing = dict(routing or {})
        if self._routing:
            try:
                routing_shape(self._routing)
            except (KeyError, ValueError) as error:
                raise SegmentRejected(
                    f"routing={self._routing}: {error!r}; see routing_metadata(...)"
                ) from None
        self._redact = redact
        self._pid = os.getpid()
        self._lock = threading.Condition()
        self._publish_lock = threading.Lock()
        self._pending: list[Pending] = []
        self._in_flight: list[Pending] = []
        self._failed: list[tuple[Ticket, Key | None]] = []
        """Of rows that failed since the last flush, the cause first; maybe nobody knows of it."""
        self._n_due = 0
        """As many of `_pending`, from the first on, are to be published now."""
        self._rows_behind = self._bytes_behind = 0
        """Rows behind those, and about their bytes."""
        self._idle = self._closed = False
        self._broken: WriterClosed | None = None
        """Why nothing can be appended any more, if so."""
        self._keys: OrderedDict[Key | None, tuple[bytes, Ticket | Ref]] = OrderedDict()
        """The content's digest, and the ticket until it is resolved: it is twenty times a Ref."""
        self._parents: dict[tuple[str, int], dict[int, Parent]] = {}
        self._open_directory()
        self._thread = threading.Thread(target=self._flush_loop, name="molt-writer", daemon=True)
        self._thread.start()

    def schema(self, stream: str) -> pa.Schema:
        """The columns of a stream; SegmentRejected if this writer does not know it."""
        if stream not in self._schemas:
            raise SegmentRejected(
                f"unknown stream '{stream}'; declare your own as x_<name> when opening the writer"
            )
        return self._schemas[stream]

    def _schema_text(self, stream: str) -> str:
        if stream not in self._schema_texts:  # hashing a schema costs more than a row
            schema = pa.schema([]) if stream == END else self._schemas[stream]
            version = VERSIONS.get(stream, "1.0")
            self._schema_texts[stream] = schema_id(stream, schema, version)
        return self._schema_texts[stream]

    # -- appending ---------------------------------------------------------------------------

    def append(self, stream: str, row: Any) -> Ticket:
        """Check, copy and queue one row (a mapping, or a record of molt.schemas.records).

        The same key with the same content returns the first ticket, or a new one of that row if
        it is durable already; other content under a key is SegmentRejected. `at` is filled in.
        """
        mapping = dict(row) if isinstance(row, Mapping) else to_row(row)
        schema = self.schema(stream)
        mapping.setdefault("at", datetime.datetime.now(datetime.UTC).replace(tzinfo=None))
        self._check_usable()
        if self._redact is not None and stream == "segments":
            mapping["messages"] = self._redacted(mapping)
        checked = check_row(stream, schema, mapping, self._parent_of(stream, mapping))
        if stream == "routing":
            check_routing_shape(checked, self._routing, self._chain_length(checked))
        key, digest = key_of(stream, checked)
        with self._lock:
            self._check_usable()
            if key is not None and key in self._keys:
                return self._same_key(stream, checked, key, digest)
            ticket = Ticket()
            self._remember(stream, checked, key, digest, ticket)
            self._queue(Pending(stream, [checked], [ticket], [key]), size_of(stream, checked))
            return ticket

    def append_table(self, stream: str, table: pa.Table) -> list[Ticket | MoltError]:
        """`append` for the rows of a table: a ticket for each, or the error that refused it.

        The table has the stream's own schema and text as it is stored (`schemas.text`). Segments
        are checked column by column, which costs less than single rows do.
        """
        schema = self.schema(stream)
        if not table.schema.equals(schema):
            raise SchemaMismatch(f"rows of '{stream}' have another schema than this log's")
        table.validate(full=True)
        self._check_usable()
        tickets: list[Ticket | MoltError] = []
        for first in range(0, table.num_rows, self.flush_rows):
            part = owned(table.slice(first, self.flush_rows))
            tickets += self._clean(stream, part) or self._one_by_one(stream, part)
        return tickets

    def _clean(self, stream: str, table: pa.Table) -> list[Ticket] | None:
        """Queued as they are; None if somebody has to look at each row."""
        if stream != "segments" or self._redact is not None:
            return None
        found = clean_segments(table, lambda *place: self._parents.get(place[:2], {}).get(place[2]))
        if found is None:
            return None
        keys: list[Key | None] = [(stream, *place) for place in found]
        if len(found) < table.num_rows:
            return None
        contents = segment_contents(table, (parent.digest for parent in found.values()))
        with self._lock:
            self._check_usable()
            if any(key in self._keys for key in keys):
                return None
            tickets = [Ticket() for _ in keys]
            for key, content, ticket in zip(keys, contents, tickets, strict=True):
                self._remember_key(key, content, ticket)
            for place, parent in found.items():
                self._parents.setdefault(place[:2], {})[place[2]] = parent
            self._queue(Pending(stream, table, tickets, keys), table.nbytes)
        return tickets

    def _one_by_one(self, stream: str, table: pa.Table) -> list[Ticket | MoltError]:
        tickets: list[Ticket | MoltError] = []
        for row in _each_row(stream, table):
            try:
                tickets.append(row if isinstance(row, MoltError) else self.append(stream, row))
            except MoltError as error:
                tickets.append(error)
        return tickets

    def _queue(self, pending: Pending, n_bytes: int) -> None:
        self._pending.append(pending)
        self._rows_behind += len(pending.tickets)
        self._bytes_behind += n_bytes
        full = self._rows_behind >= self.flush_rows or self._bytes_behind >= self.flush_bytes
        if full or pending.stream == "rollouts":
            self._all_due()
        elif self._idle:
            self._lock.notify_all()  # only then: each wake-up takes the interpreter's lock

    def flush(self) -> None:
        """Publish everything appended so far; returns when it is durable.

        Raises the first failure since the last flush, also that of a commit made beside the caller,
        unless its ticket has said so. Rows that failed may then be appended again.
        """
        self._check_usable()
        with self._lock:
            self._check_usable()
            tickets = tickets_of(self._in_flight + self._pending)
            self._all_due(wake=False)
        self._settle(tickets)

    def close(self) -> None:
        """Flush, publish the `end` commit (readers forget this writer) and stop."""
        if self._closed:
            return
        self._check_process()
        with self._lock:
            if self._closed:
                return
            self._check_usable()
            tickets = tickets_of(self._in_flight + self._pending)
            self._all_due(wake=False)
            self._closed = True
            self._lock.notify_all()
        self._thread.join()
        try:
            self._settle(tickets)
        except BaseException:
            with contextlib.suppress(Exception):
                self._publish_commit(END, pa.table({}))
            raise
        self._publish_commit(END, pa.table({}))

    def _settle(self, tickets: Iterable[Ticket]) -> None:
        """Publish what is due; raises if a row of `tickets` failed, or one that nobody knows of."""
        self._publish_pending()
        with self._lock:
            failed, self._failed = self._failed, []
        for ticket in (*(t for t, _ in failed if not t.told), *tickets):
            ticket.result()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _redacted(self, row: Mapping[str, Any]) -> str:
        assert self._redact is not None
        try:
            return canonical_json(self._redact(json.loads(row["messages"])))
        except Exception as error:  # whatever a user's function raises, the text must not pass
            raise SegmentRejected(
                f"{row_name('segments', row)}: redact failed, so nothing was stored: {error!r}"
            ) from error

    # -- keys and parents ----------------------------------------------------------------------

    def _check_process(self) -> None:
        """Before any lock is taken: at a fork() another thread may have held it."""
        if os.getpid() != self._pid:
            raise WriterClosed(
                f"writer {self.name} was opened by process {self._pid} and is used in "
                f"{os.getpid()} after fork(); open a writer of its own in each process"
            )

    def _check_usable(self) -> None:
        self._check_process()
        if self._broken is not None:
            raise self._broken
        if self._closed:
            raise WriterClosed(f"writer {self.name} is closed")

    def _parent_of(self, stream: str, row: Mapping[str, Any]) -> Parent | None:
        if stream != "segments" or row.get("parent") is None:
            return None
        try:
            return self._parents.get((row["rollout_id"], row["attempt"]), {}).get(row["parent"])
        except (KeyError, TypeError):  # it says itself what is missing or no number
            return None

    def _chain_length(self, row: Row) -> int | None:
        known = self._parents.get((row["rollout_id"], row["attempt"]), {}).get(row["segment"])
        return known.n_chain if known else None

    def _same_key(self, stream: str, row: Row, key: tuple[Any, ...], digest: bytes) -> Ticket:
        first, found = self._keys[key]
        if first == digest:
            if isinstance(found, Ticket):
                return found
            ticket = Ticket()
            ticket.set_result(found)
            return ticket
        raise SegmentRejected(
            f"{row_name(stream, row)}: conflicting content under a key that this writer has "
            "already appended; a retry must repeat the same content"
        )

    def _remember(
        self, stream: str, row: Row, key: tuple[Any, ...] | None, digest: bytes, ticket: Ticket
    ) -> None:
        if key is None:
            return
        self._remember_key(key, digest, ticket)
        who = (row.get("rollout_id"), row.get("attempt"))
        if stream == "segments":
            family = self._parents.setdefault(who, {})  # type: ignore[arg-type]
            family[row["segment"]] = parent_of(row)
        elif stream == "rollouts" and row["status"] != "pending":
            self._parents.pop(who, None)  # type: ignore[arg-type]

    def _remember_key(self, key: Key | None, digest: bytes, ticket: Ticket) -> None:
        if key is not None:
            self._keys[key] = (digest, ticket)
            if len(self._keys) > KEYS_REMEMBERED:
                self._keys.popitem(last=False)

    # -- publishing ----------------------------------------------------------------------------

    def _open_directory(self) -> None:
        self.name = f"{self.epoch}-{HOST}-{os.getpid()}-{secrets.token_hex(3)}"
        self._seq = 0
        make_dirs(self.log / "data" / self.name)

    def _all_due(self, *, wake: bool = True) -> None:
        if wake and (self._idle or not self._n_due):
            self._lock.notify_all()
        self._n_due, self._rows_behind, self._bytes_behind = len(self._pending), 0, 0

    def _flush_loop(self) -> None:
        while True:
            with self._lock:
                while not self._pending and not self._closed:
                    self._idle = True
                    self._lock.wait()
                self._idle = False
                if self._closed:
                    return
                ready = self._lock.wait_for(lambda: self._n_due or self._closed, self.linger_s)
                if not ready:
                    self._all_due(wake=False)
            self._publish_pending()

    def _publish_pending(self) -> None:
        with self._publish_lock:
            with self._lock:
                pending, self._pending = self._pending[: self._n_due], self._pending[self._n_due :]
                self._in_flight, self._n_due = pending, 0
            streams = {p.stream for p in pending}
            own = sorted(s for s in streams if s not in FLUSH_ORDER)
            for stream in (*FLUSH_ORDER[:4], *own, *FLUSH_ORDER[4:]):
                for batch in commits_of(
                    [p for p in pending if p.stream == stream], self.flush_rows
                ):
                    try:
                        refs = self._publish_commit(stream, as_table(self._schemas[stream], batch))
                    except BaseException as error:
                        self._fail(error, batch)
                        if isinstance(error, Exception):
                            return
                        raise
                    self._resolve(batch, refs)
            with self._lock:
                self._in_flight = []

    def _resolve(self, batch: list[Pending], refs: list[Ref | Exception]) -> None:
        tickets, keys = tickets_of(batch), [key for p in batch for key in p.keys]
        with self._lock:
            if self._failed:  # what was appended again and is durable now has not failed
                self._failed = [
                    (t, key) for t, key in self._failed if key is None or key not in keys
                ]
            self._failed += [
                (t, key)
                for t, key, ref in zip(tickets, keys, refs, strict=True)
                if isinstance(ref, Exception)
            ]
            for key, ref in zip(keys, refs, strict=True):
                if isinstance(ref, Exception):
                    self._keys.pop(key, None)
                elif key in self._keys:
                    self._keys[key] = (self._keys[key][0], ref)
        for ticket, ref in zip(tickets, refs, strict=True):
            if isinstance(ref, Exception):
                ticket.set_exception(ref)
            else:
                ticket.set_result(ref)

    def _fail(self, error: BaseException, batch: list[Pending]) -> None:
        """Order must hold: nothing that was appended behind a failed commit becomes visible."""
        if not isinstance(error, Exception):  # nobody else is to be interrupted
            error = OSError(errno.EINTR, f"interrupted while rows were published: {error!r}")
        with self._lock:
            rest = [p for p in self._in_flight if not p.tickets[0].done() and p not in batch]
            rest += self._pending
            self._in_flight, self._pending, self._n_due = [], [], 0
            self._rows_behind = self._bytes_behind = 0
            self._failed = [(t, key) for t, key in self._failed if not t.told]
            for p in batch + rest:
                self._failed += zip(p.tickets, p.keys, strict=True)
                for key in p.keys:
                    self._keys.pop(key, None)
        for ticket in tickets_of(batch):
            ticket.set_exception(error)
        for p in rest:
            rows = p.rows if isinstance(p.rows, list) else to_rows(p.rows)
            for ticket, row in zip(p.tickets, rows, strict=True):
                ticket.set_exception(not_written(row_name(p.stream, row), error))

    def _publish_commit(self, stream: str, table: pa.Table) -> list[Ref | Exception]:
        for last in (False, True):
            path = commit_path(self.log, self.name, self._seq, stream)
            raw = encode(
                table,
                stream=stream,
                writer=self.name,
                seq=self._seq,
                schema_text=self._schema_text(stream),
                extra=self._routing if stream == "routing" else None,
            )
            try:
                STORE.put(path, raw)
            except (PublishUnknown, NameTaken):
                # The outcome is unknown: this directory is dead, unacknowledged rows move on.
                self._open_directory()
                if last:
                    raise
                continue
            self._seq += 1
            announce(self.log)
            return [Ref(writer=self.name, seq=self._seq - 1, row=i) for i in range(table.num_rows)]
        raise AssertionError("unreachable")


def _each_row(stream: str, table: pa.Table) -> Iterator[Row | MoltError]:
    """The rows; for one that Python cannot hold (a time beyond its calendar) its own error."""
    try:
        rows = to_rows(table)
    except (OverflowError, ValueError):
        for i in range(table.num_rows):
            try:
                (row,) = to_rows(table.slice(i, 1))
                yield row
            except (OverflowError, ValueError) as error:
                yield SegmentRejected(f"row {i} of a table of '{stream}': {error}")
    else:
        yield from rows
