"""`Log`: the one object users hold. Opens a folder, and hands out writers, tails and SQL.

Example::

    log = Log.open("runs/demo")
    log.sql("select step, avg(reward) from plans group by step").fetchall()
"""

import contextlib
import datetime
import json
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molt.schemas.errors import LogCorrupt, SchemaMismatch
from molt.schemas.records import Ref
from molt.schemas.text import canonical_json
from molt.store.appender import RemoteWriter
from molt.store.control import ControlLog, Record, read_records
from molt.store.files import STORE, NameTaken, make_dirs
from molt.store.reader import CONTROL_DIR, RowReader
from molt.store.tail import Tail
from molt.store.writer import Writer

if TYPE_CHECKING:
    import duckdb
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

FORMAT = "1.0"


class Log:
    """A trajectory log on disk. Use `Log.create` or `Log.open`."""

    def __init__(self, path: Path, run_id: str) -> None:
        self.path = path
        self.run_id = run_id
        self.control = ControlLog(path)
        self._rows = RowReader(path)

    @classmethod
    def create(cls, path: str | Path, run_id: str | None = None) -> "Log":
        """Open the log at `path`, making it first if there is none (put-if-absent)."""
        path = Path(path).absolute()
        if (path / "format.json").exists():
            return cls.open(path)
        for name in ("", CONTROL_DIR, "data", "checkpoints"):
            make_dirs(path / name)
        text = canonical_json(
            {
                "format": FORMAT,
                "run_id": run_id or f"{path.name}-{secrets.token_hex(4)}",
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            }
        )
        # NameTaken: another process made it in the same moment, and its content counts.
        with contextlib.suppress(NameTaken):
            STORE.put(path / "format.json", text.encode())
        return cls.open(path)

    @classmethod
    def open(cls, path: str | Path) -> "Log":
        """The log at `path`; FileNotFoundError if there is none, SchemaMismatch if it is newer."""
        path = Path(path).absolute()
        try:
            meta = json.loads(STORE.read(path / "format.json"))
            found, run_id = str(meta["format"]), str(meta["run_id"])
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(
                f"{path} is not a molt log: it has no format.json. `molt train` makes one"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise LogCorrupt(f"{path}/format.json is damaged: {error}") from None
        if found.split(".")[0] != FORMAT.split(".")[0]:
            raise SchemaMismatch(
                f"{path} has log format {found}, this program reads {FORMAT}; "
                "install the molt-log release that wrote it, or start in another folder"
            )
        return cls(path, run_id)

    def writer(
        self, epoch: int | None = None, *, appender: Path | None = None, **options: Any
    ) -> Writer:
        """A new appender of `epoch` (default: the newest in the control log, 0 before any).

        With `appender`, the address of an `Appender`, rows go through that process.
        """
        if epoch is None:
            epoch = max((r.epoch for r in self.records() if r.kind == "epoch"), default=0)
        if appender is not None:
            return RemoteWriter(self.path, epoch, appender, **options)
        return Writer(self.path, epoch, **options)

    def tail(
        self,
        *,
        streams: Collection[str] | None = None,
        columns: Mapping[str, list[str]] | None = None,
        **options: Any,
    ) -> Tail:
        return Tail(self.path, streams=streams, columns=columns, **options)

    def records(self, start: int = 0) -> list[Record]:
        """Control records from number `start` on."""
        return read_records(self.path, start)

    def row(self, ref: Ref) -> dict[str, Any]:
        """One verified row by its address."""
        return self._rows.row(ref)

    def stream(self, ref: Ref) -> str:
        """The stream of a row's commit; nothing of it is read."""
        return self._rows.place(ref.writer, ref.seq).stream

    def rows(self, refs: Iterable[Ref]) -> list[dict[str, Any]]:
        return self._rows.rows(refs)

    def table(self, refs: Iterable[Ref], columns: Sequence[str]) -> "pa.Table":
        """Columns of many rows without a Python object per row; see RowReader.table."""
        return self._rows.table(refs, columns)

    def routing_place(self, ref: Ref) -> tuple[int, int, int] | None:
        """(segment, start, n) of a routing row; None if the row is of another stream."""
        return self._rows.routing_place(ref)

    def experts(self, ref: Ref, first: int, end: int) -> "npt.NDArray[np.uint8]":
        """[end - first, width] bytes of a routing row's positions; see RowReader.experts."""
        return self._rows.experts(ref, first, end)

    def sql(self, query: str, **options: Any) -> "duckdb.DuckDBPyRelation":
        """A DuckDB relation over the views; see molt.store.sql.connect for the options."""
        from molt.store.sql import connect

        return connect([self], query=query, **options).sql(query)
