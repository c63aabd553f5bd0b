"""Rows by address over several logs: `refs.log` 0 is the log of the plan, others its epoch's list.

A plan of an offline run names rows that other logs hold; nothing is copied. Each source is opened
once and must be the run that the epoch record names.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from molt.schemas.columns import Row
from molt.schemas.errors import LogCorrupt
from molt.schemas.records import Ref
from molt.store.control import read_records
from molt.store.log import Log
from molt.store.reader import RowReader

CACHE_BYTES = 64 << 20


class Sources:
    """The rows that the plans of one epoch may name. `cache_bytes_max` is per log."""

    def __init__(self, log: Log, epoch: int, cache_bytes_max: int = CACHE_BYTES) -> None:
        self._home, self._epoch, self._cache_bytes = log, epoch, cache_bytes_max
        self._listed: dict[int, Row] | None = None
        self._logs: dict[int, Log] = {0: log}
        self._readers: dict[int, RowReader] = {}
        self.commits: set[tuple[int, str, int]] = set()
        """Commits that rows were taken from."""

    def log(self, index: int) -> Log:
        """The log behind an address; LogCorrupt if it is not listed, or is another run by now."""
        if index not in self._logs:
            listed = self._sources().get(index)
            if listed is None:
                raise LogCorrupt(
                    f"an address names log {index}, which epoch {self._epoch} does not list"
                )
            found = Log.open(self._home.path / listed["path"])
            if found.run_id != listed["run_id"]:
                raise LogCorrupt(
                    f"{found.path} is run {found.run_id}; the plans were made from "
                    f"{listed['run_id']}. Put that log back, or plan again from this one"
                )
            self._logs[index] = found
        return self._logs[index]

    def _sources(self) -> dict[int, Row]:
        if self._listed is None:
            epochs = (r for r in read_records(self._home.path) if r.kind == "epoch")
            rows = [r.rows[0] for r in epochs if r.epoch == self._epoch]
            self._listed = {s["log"]: s for row in rows for s in row["sources"]}
        return self._listed

    def row(self, ref: Ref) -> dict[str, Any]:
        return self.rows([ref])[0]

    def rows(self, refs: Sequence[Ref]) -> list[dict[str, Any]]:
        """The rows in the order of `refs`; their commits are read ahead."""
        self.commits.update((ref.log, ref.writer, ref.seq) for ref in refs)
        found = {
            index: iter(self._reader(index).rows([r for r in refs if r.log == index]))
            for index in {ref.log for ref in refs}
        }
        return [next(found[ref.log]) for ref in refs]

    def stream(self, ref: Ref) -> str:
        """The stream of a row's commit; nothing of it is read."""
        return self._reader(ref.log).place(ref.writer, ref.seq).stream

    def routing_place(self, ref: Ref) -> tuple[int, int, int] | None:
        return self._reader(ref.log).routing_place(ref)

    def experts(self, ref: Ref, first: int, end: int) -> npt.NDArray[np.uint8]:
        return self._reader(ref.log).experts(ref, first, end)

    def _reader(self, index: int) -> RowReader:
        if index not in self._readers:
            self._readers[index] = RowReader(self.log(index).path, self._cache_bytes)
        return self._readers[index]

    @property
    def bytes_read(self) -> int:
        """Decoded bytes of the commits that were read so far."""
        return sum(r.bytes_read for r in self._readers.values())


def log_of(plan_row: Row) -> int:
    """Which log a planned rollout is from."""
    for branch in plan_row["branches"]:
        for ref in branch["refs"]:
            return int(ref["log"])
    return next((int(ref["log"]) for ref in plan_row["reward_refs"]), 0)
