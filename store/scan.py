"""Commits as DuckDB sees them: a dataset that decodes verified commits while a query runs (I6).

Between the snapshot (which rows count) and the views of sql.py. One commit, or one row group of a
cold file, is decoded at a time, only the columns that the query names, so memory does not grow with
the log.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from molt.schemas.columns import flat, one_chunk
from molt.schemas.upgrade import UPGRADES
from molt.store.reader import CommitFile, read_together, together
from molt.store.snapshot import ABANDONED, Snapshot

RowMap = tuple[pa.Table, npt.NDArray[np.int64] | None]
"""View rows without their address, and the commit row that each comes from (None: one by one)."""
EXTRAS = frozenset({"writer", "seq", "row", "run_id", "abandoned"})


class CommitDataset(ds.Dataset):  # type: ignore[misc]
    """Commits of one stream as rows of a view, decoded anew in each scan.

    DuckDB calls `scanner` with the columns and the filter of the query.
    """

    def __init__(
        self,
        snapshots: Sequence[Snapshot],
        stream: str,
        schema: pa.Schema,
        rows: Callable[[pa.Table, list[str]], RowMap],
        needs: Callable[[list[str]], list[str]],
    ) -> None:
        self._schema, self._rows, self._needs = schema, rows, needs
        self._parts = [part for s in snapshots for part in _parts(s, stream)]
        self._whole = any(name == stream for name, _ in UPGRADES)

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def scanner(
        self, columns: list[str] | None = None, filter: pc.Expression | None = None, **_: Any
    ) -> "CommitScan":
        text = str(filter) if filter is not None else ""
        wanted = [n for n in self._schema.names if columns is None or n in columns or n in text]
        schema = pa.schema([self._schema.field(n) for n in wanted])
        names = wanted if columns is None else columns
        return CommitScan(self._tables(wanted, schema), schema, names, filter)

    def _tables(self, wanted: list[str], schema: pa.Schema) -> Iterator[pa.Table]:
        columns = None if self._whole else self._needs(wanted)
        for part in self._parts:
            if not len(part.shown):
                continue
            table = read_together(part.files, columns)
            if len(part.shown) < table.num_rows:
                table = table.take(part.shown)
            out, index = self._rows(table, wanted)
            missing = EXTRAS.intersection(wanted).difference(out.column_names)
            if missing:
                extras = part.address()
                for name in missing:
                    own = extras[name]
                    out = out.append_column(name, own if index is None else own.take(index))
            yield _in_schema(out, schema)


class CommitScan:
    """One scan, as DuckDB asks for it. Arrow's own scanner reads ahead in threads of its own, which
    go on after a LIMIT is satisfied and take the process down when it ends; here a batch is made in
    the thread that asks for it, and none is made that nobody asks for.
    """

    def __init__(
        self,
        tables: Iterator[pa.Table],
        schema: pa.Schema,
        names: list[str],
        filter: pc.Expression | None,
    ) -> None:
        self._tables, self._filter = tables, filter
        self.projected_schema = pa.schema([schema.field(n) for n in names])

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._filtered())

    def _filtered(self) -> Iterator[pa.RecordBatch]:
        for table in self._tables:
            if self._filter is not None:
                table = table.filter(self._filter)
            yield from table.select(self.projected_schema.names).to_batches()


@dataclass(frozen=True, slots=True)
class Part:
    """Commits that are decoded together, and which of their rows count."""

    snapshot: Snapshot
    files: list[CommitFile]
    states: list[npt.NDArray[np.uint8]]
    """Of each file, of each row."""
    shown: npt.NDArray[np.int64]
    """Rows of the view, over all files."""

    def address(self) -> dict[str, pa.Array]:
        """The columns of EXTRAS, for the rows shown."""
        counts = [len(state) for state in self.states]
        commit = np.repeat(np.arange(len(self.files)), counts)[self.shown]
        first = np.concatenate([[0], np.cumsum(counts)])
        state = np.concatenate(self.states)
        return {
            "writer": pa.array([f.writer for f in self.files]).take(pa.array(commit)),
            "seq": pa.array(np.array([f.seq for f in self.files], np.int64)[commit]),
            "row": pa.array(self.shown - first[commit], pa.int32()),
            "run_id": pa.repeat(pa.scalar(self.snapshot.log.run_id), len(self.shown)),
            "abandoned": pa.array(state[self.shown] == ABANDONED),
        }


def _parts(snapshot: Snapshot, stream: str) -> Iterator[Part]:
    found = snapshot.states(stream)
    at = 0
    for run in together([file for file, _ in found]):
        states = [state for _, state in found[at : at + len(run)]]
        shown = np.flatnonzero(snapshot.shown(np.concatenate(states)))
        yield Part(snapshot, run, states, shown)
        at += len(run)


def _in_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    names = set(table.column_names)

    def column(f: pa.Field) -> Any:
        if f.name not in names:
            return pa.nulls(table.num_rows, f.type)
        found = table.column(f.name)
        return found if found.type == f.type else found.cast(f.type)

    return pa.Table.from_arrays([column(f) for f in schema], schema=schema)


def plain_rows(table: pa.Table, wanted: list[str]) -> RowMap:
    return table, None


def segment_rows(table: pa.Table, wanted: list[str]) -> RowMap:
    """Segment rows with NULL logprobs where nothing was sampled, and two counts."""
    if "logprobs" in wanted:
        lists, logprobs = flat(table, "logprobs")
        where = pa.array(flat(table, "sampled")[1] == 1)
        values = pc.if_else(where, pa.array(logprobs), pa.scalar(None, pa.float32()))
        column = pa.LargeListArray.from_arrays(pa.array(lists), values)
        table = table.set_column(table.column_names.index("logprobs"), "logprobs", column)
    if "n_tokens" in wanted or "n_sampled" in wanted:
        offsets, sampled = flat(table, "sampled")
        total = np.concatenate([[0], np.cumsum(sampled, dtype=np.int64)])
        table = table.append_column("n_tokens", pa.array(np.diff(offsets)))
        table = table.append_column("n_sampled", pa.array(np.diff(total[offsets])))
    return table, None


def segment_needs(wanted: list[str]) -> list[str]:
    derived = {"logprobs", "n_tokens", "n_sampled"} & set(wanted)
    return ["rollout_id", *wanted, *(["sampled"] if derived else [])]


def token_rows(table: pa.Table, wanted: list[str]) -> RowMap:
    """One row per token, each with the version that sampled it."""
    offsets, sampled = flat(table, "sampled")
    out, index = {"sampled": pa.array(sampled)}, None
    if not TOKEN_COLUMNS.issuperset(wanted):  # eight bytes per token: only if it is needed
        index = np.repeat(np.arange(table.num_rows), np.diff(offsets))
    if index is not None and "pos" in wanted:
        out["pos"] = pa.array(np.arange(len(index)) - offsets[index])
    for name in {"rollout_id", "attempt", "segment"} & set(wanted):
        out[name] = one_chunk(table, name).take(pa.array(index))
    for name, column in (("token_id", "token_ids"), ("train", "train")):
        if name in wanted:
            out[name] = pa.array(flat(table, column)[1])
    unsampled = sampled == 0
    if "logprob" in wanted:
        out["logprob"] = pa.array(flat(table, "logprobs")[1], mask=unsampled)
    if "version" in wanted or "version_epoch" in wanted:
        runs = one_chunk(table, "version_runs").flatten()
        times = runs.field("n").to_numpy()
        for name, key in (("version_epoch", "epoch"), ("version", "version")):
            values = np.zeros(len(sampled), np.int64)
            values[~unsampled] = np.repeat(runs.field(key).to_numpy(), times)
            out[name] = pa.array(values, mask=unsampled)
    return pa.table(out), index


TOKEN_COLUMNS = {"token_id", "sampled", "train", "logprob", "version", "version_epoch"}
_TOKEN_SOURCE = {
    "token_id": "token_ids",
    "logprob": "logprobs",
    "version": "version_runs",
    "version_epoch": "version_runs",
}


def token_needs(wanted: list[str]) -> list[str]:
    return ["sampled", *(_TOKEN_SOURCE.get(name, name) for name in wanted)]
