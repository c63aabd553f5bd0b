"""Rows that wait for their commit: what they are known by, and what their authors hear of them."""

import errno
from collections.abc import Iterable, Iterator, Sized
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from molt.schemas.batch import segment_content
from molt.schemas.columns import Row, to_table
from molt.schemas.errors import WriterClosed
from molt.schemas.records import Ref

Key = tuple[Any, ...]


class Ticket(Future[Ref]):
    """Resolves to the row's address once its commit is durable.

    `ticket.result()` blocks; it raises what the publish raised, and then nothing of the row is
    visible and the same append may be repeated.
    """

    told = False
    """Whether somebody has asked for its error."""

    def cancel(self) -> bool:
        """False: a row that was appended is published, whoever waits for it."""
        return False

    def result(self, timeout: float | None = None) -> Ref:
        try:
            return super().result(timeout)
        except BaseException:
            self.told = self.done()
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.told = error is not None
        return error


@dataclass(slots=True, eq=False)
class Pending:
    """Rows of one stream that were appended together."""

    stream: str
    rows: list[Row] | pa.Table
    tickets: list[Ticket]
    keys: list[Key | None]


def not_written(who: str, error: Exception) -> Exception:
    """What a row is told when a commit before its own failed."""
    if isinstance(error, WriterClosed):
        return error
    number = getattr(error, "errno", None) or errno.EIO
    return OSError(number, f"{who}: not written, an earlier commit failed: {error}")


def tickets_of(pending: Iterable[Pending]) -> list[Ticket]:
    return [ticket for p in pending for ticket in p.tickets]


def commits_of(pending: Iterable[Pending], rows_max: int) -> Iterator[list[Pending]]:
    """In order, as many together as a commit may hold rows."""
    batch: list[Pending] = []
    n = 0
    for p in pending:
        if batch and n + len(p.tickets) > rows_max:
            yield batch
            batch, n = [], 0
        batch.append(p)
        n += len(p.tickets)
    if batch:
        yield batch


def as_table(schema: pa.Schema, pending: Iterable[Pending]) -> pa.Table:
    """All rows in order; single ones that follow each other are packed together."""
    parts = []
    for single, run in groupby(pending, lambda p: isinstance(p.rows, list)):
        if single:
            parts.append(to_table(schema, [row for p in run for row in p.rows]))
        else:
            parts += [p.rows for p in run]
    return parts[0] if len(parts) == 1 else pa.concat_tables(parts)


_KEYS = {
    "prompts": ("group_id", "attempt"),
    "segments": ("rollout_id", "attempt", "segment"),
    "routing": ("rollout_id", "attempt", "segment", "start"),
    "rollouts": ("rollout_id", "attempt"),
    "rewards": ("rollout_id", "attempt", "segment", "token", "name", "revision"),
    "scores": ("rollout_id", "attempt", "segment", "kind", "model", "epoch", "version"),
}
_UNTOLD = frozenset({"at", "seconds", "experts"})
"""Columns that no content's digest covers: times, and what has its own hashes in the row."""


def key_of(stream: str, row: Row) -> tuple[Key | None, bytes]:
    """The row's identity in its stream and a digest of its content without its times."""
    if stream not in _KEYS:
        return None, b""
    key: Key = (stream, *(row[name] for name in _KEYS[stream]))
    if stream == "segments":
        return key, segment_content(row)
    if stream == "rollouts":
        key += (row["status"] == "pending",)  # the final outcome may follow it
    elif stream == "prompts":  # each issue is of other rollouts
        key += tuple((r["rollout_id"], r["attempt"]) for r in row["rollouts"])
    values = [value for name, value in row.items() if name not in _UNTOLD]
    lists = [value.data for value in values if isinstance(value, np.ndarray)]
    told = [value for value in values if not isinstance(value, np.ndarray)]
    return key, xxhash.xxh3_128_digest(b"".join((repr(told).encode(), *lists)))


_LONG = {
    "prompts": {"prompt": 1},
    "segments": {"token_ids": 6, "logprobs": 4, "messages": 1},
    "routing": {"experts": 1},
    "rewards": {},
    "rollouts": {"metrics": 1},
    "scores": {"values": 4},
}
"""Columns that may be long, and bytes of each item, the masks with the ids."""


def size_of(stream: str, row: Row) -> int:
    """About the raw bytes of a row."""
    if stream not in _LONG:
        return 512 + sum(4 * len(v) for v in row.values() if isinstance(v, Sized))
    size = 512
    for name, width in _LONG[stream].items():
        size += width * len(row[name])
    return size
