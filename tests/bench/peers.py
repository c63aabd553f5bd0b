"""The log and its peers behind one small interface: append segments [i, j), read all in order.

Every peer starts from the same numpy arrays and keeps its own habits of durability; how often each
really calls fsync is counted in run.py, not believed.
"""

import importlib.util
import json
import os
import pickle
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import duckdb
import factories as make
import msgspec
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from workload import FIELDS, Flat, Packed, Workload

import molt.store.cold
import molt.store.commit
from molt.schemas.columns import flat, one_chunk
from molt.store import Log
from molt.store.reader import all_files, read_ahead, writer_names

COLUMNS = ["token_ids", "sampled", "logprobs", "version_runs"]
"""What a trainer's packer needs of a segment."""


class Peer:
    """One store in a folder of its own."""

    title: ClassVar[str]
    needs: ClassVar[str | None] = None
    """A module that may be missing."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        self.folder, self.workload = folder, workload
        folder.mkdir(parents=True)
        self.open()

    def open(self) -> None: ...

    def append(self, i: int, j: int) -> None:
        raise NotImplementedError

    def settle(self) -> None:
        """Until all that was appended is durable, for stores whose `append` does not wait."""

    def close(self) -> None: ...

    def segments(self) -> Iterator[Flat]:
        raise NotImplementedError

    def read(self, out: Packed) -> None:
        for fields in self.segments():
            out.put(fields)

    def source(self, con: duckdb.DuckDBPyConnection) -> str | None:
        """What stands behind FROM in DuckDB, with the columns of FIELDS; None if nothing can."""
        return None

    def disk_bytes(self) -> int:
        return sum(p.stat().st_size for p in self.folder.rglob("*") if p.is_file())

    @classmethod
    def missing(cls) -> bool:
        return cls.needs is not None and importlib.util.find_spec(cls.needs) is None


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Raw(Peer):
    """The ceiling: the same bytes, unencoded, appended to one file and fsynced."""

    title = "raw write + fsync"

    def open(self) -> None:
        self.fd = os.open(self.folder / "raw", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.lengths: list[int] = []

    def append(self, i: int, j: int) -> None:
        write_all(self.fd, b"".join(self.workload.raw(k) for k in range(i, j)))
        os.fsync(self.fd)
        self.lengths += [len(self.workload.arrays(k)["ids"]) for k in range(i, j)]

    def close(self) -> None:
        os.close(self.fd)

    def segments(self) -> Iterator[Flat]:
        data, at = np.memmap(self.folder / "raw", np.uint8, "r"), 0
        for n in self.lengths:
            fields = {}
            for name, dtype in FIELDS.items():
                end = at + n * dtype.itemsize
                fields[name], at = data[at:end].view(dtype), end
            yield fields


class Molt(Peer):
    """Checks, digest, encoding, checksum, publish: `Writer.append_table`, `append` if it is one."""

    title = "molt"
    grouped = False
    """Whether the writer is left to make its own commits: of 256 rows, under a steady load."""
    options: ClassVar[dict[str, Any]] = {"linger_s": 3600}

    def open(self) -> None:
        self.log = Log.create(self.folder / "log")
        make.open_epoch(self.log)
        for version in range(self.workload.n_versions):
            self.log.control.put("policy", [make.policy(1, version)])
        self.writer = self.log.writer(**self.options)

    def append(self, i: int, j: int) -> None:
        self.queue(i, j)
        if not self.grouped:
            self.writer.flush()

    def queue(self, i: int, j: int) -> Sequence[Any]:
        if j - i == 1:
            return [self.writer.append("segments", self.workload.row(i))]
        return self.writer.append_table("segments", self.workload.table(i, j))

    def close(self) -> None:
        self.writer.close()

    def read(self, out: Packed) -> None:
        molt.store.cold._row_group.cache_clear()  # a log that fits into it is not the usual one
        files = [f for w in writer_names(self.log.path) for f in all_files(self.log.path, w)]
        segments = [f for f in files if f.stream == "segments"]
        for _, read in read_ahead(segments, lambda _: COLUMNS):
            out.put(packed(read().table))

    def disk_bytes(self) -> int:
        folders = (self.folder / "log" / "data", self.folder / "log" / "cold")
        return sum(p.stat().st_size for d in folders for p in d.rglob("*") if p.is_file())


class MoltRows(Molt):
    title = "molt, row by row"

    def queue(self, i: int, j: int) -> Sequence[Any]:
        return [self.writer.append("segments", self.workload.row(k)) for k in range(i, j)]


class MoltAhead(Molt):
    """The next rows are appended while a commit is published: one is in flight at a time."""

    title = "molt, the next rows while a commit is published"
    options: ClassVar[dict[str, Any]] = {"linger_s": 0}

    def open(self) -> None:
        super().open()
        self.before: Sequence[Any] = []

    def append(self, i: int, j: int) -> None:
        tickets = self.queue(i, j)
        self.settle()
        self.before = tickets

    def settle(self) -> None:
        for ticket in self.before:
            ticket.result()


class MoltUncompressed(Molt):
    title = "molt, uncompressed"

    def open(self) -> None:
        self.limit = molt.store.commit.COMPRESS_BYTES_MIN
        molt.store.commit.COMPRESS_BYTES_MIN = 1 << 60
        super().open()

    def close(self) -> None:
        super().close()
        molt.store.commit.COMPRESS_BYTES_MIN = self.limit


class MoltGrouped(Molt):
    title = "molt, the writer's own commits"
    grouped = True


class MoltGroupedUncompressed(MoltUncompressed, MoltGrouped):
    title = "molt, the writer's own commits, uncompressed"


def packed(table: pa.Table) -> Flat:
    """A segments table as flat columns; versions are per token, 0 where not sampled."""
    ids, logprobs, mask = (flat(table, name)[1] for name in ("token_ids", "logprobs", "sampled"))
    runs = one_chunk(table, "version_runs").flatten()
    versions = np.zeros(len(mask), np.int32)
    versions[mask.view(np.bool_)] = np.repeat(
        runs.field("version").to_numpy(), runs.field("n").to_numpy()
    )
    return {"ids": ids, "logprobs": logprobs, "mask": mask, "versions": versions}


class Jsonl(Peer):
    """JSON lines, one zstd frame (level 3) per append, fsynced."""

    title = "JSONL + zstd (json)"

    def open(self) -> None:
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        self.fd = os.open(self.folder / "log.jsonl.zst", flags)
        self.zstd = zstandard.ZstdCompressor(level=3, write_checksum=True)

    def encode(self, row: dict[str, Any]) -> bytes:
        plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()}
        return json.dumps(plain).encode()

    def decode(self, line: bytes) -> Any:
        return json.loads(line)

    def append(self, i: int, j: int) -> None:
        lines = b"".join(self.encode(self.workload.plain(k)) + b"\n" for k in range(i, j))
        write_all(self.fd, self.zstd.compress(lines))
        os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)

    def segments(self) -> Iterator[Flat]:
        with open(self.folder / "log.jsonl.zst", "rb") as f:
            text = zstandard.ZstdDecompressor().stream_reader(f, read_across_frames=True).read()
        for line in text.splitlines():
            row = self.decode(line)
            yield {name: np.array(row[name], dtype) for name, dtype in FIELDS.items()}

    def source(self, con: duckdb.DuckDBPyConnection) -> str:
        options = (
            "format = 'newline_delimited', compression = 'zstd', maximum_object_size = 1000000000"
        )
        columns = "columns = {logprobs: 'FLOAT[]', mask: 'UTINYINT[]'}"
        return f"read_json('{self.folder / 'log.jsonl.zst'}', {options}, {columns})"


class JsonlOrjson(Jsonl):
    title = "JSONL + zstd (orjson)"

    def encode(self, row: dict[str, Any]) -> bytes:
        return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)

    def decode(self, line: bytes) -> Any:
        return orjson.loads(line)


class Sample(msgspec.Struct, array_like=True, gc=False):
    """Lists of Python numbers, as they travel from prime-rl's orchestrator to its trainer."""

    ids: list[int]
    logprobs: list[float]
    mask: list[int]
    versions: list[int]


class Msgpack(Peer):
    """msgspec's msgpack, one new file per batch, plain write: prime-rl's file transport."""

    title = "msgpack (as prime-rl)"

    def open(self) -> None:
        self.n = 0
        self.encoder, self.decoder = (
            msgspec.msgpack.Encoder(),
            msgspec.msgpack.Decoder(list[Sample]),
        )

    def append(self, i: int, j: int) -> None:
        rows = (self.workload.arrays(k) for k in range(i, j))
        samples = [Sample(**{k: v.tolist() for k, v in row.items()}) for row in rows]
        step = self.folder / f"step_{self.n}"
        step.mkdir()
        (step / "rollouts.bin").write_bytes(self.encoder.encode(samples))
        self.n += 1

    def segments(self) -> Iterator[Flat]:
        for step in range(self.n):
            data = (self.folder / f"step_{step}" / "rollouts.bin").read_bytes()
            for sample in self.decoder.decode(data):
                yield {k: np.array(getattr(sample, k), dtype) for k, dtype in FIELDS.items()}


class Sqlite(Peer):
    """One blob per segment, WAL, synchronous = FULL."""

    title = "SQLite (WAL, full)"

    def open(self) -> None:
        self.con = sqlite3.connect(self.folder / "log.db", isolation_level=None)
        self.con.execute("pragma journal_mode = wal")
        self.con.execute("pragma synchronous = full")
        self.con.execute("create table s (i integer primary key, id text, n int, data blob)")

    def append(self, i: int, j: int) -> None:
        w = self.workload
        self.con.execute("begin")
        rows = [(None, w.name(k), len(w.arrays(k)["ids"]), w.raw(k)) for k in range(i, j)]
        self.con.executemany("insert into s values (?, ?, ?, ?)", rows)
        self.con.execute("commit")

    def segments(self) -> Iterator[Flat]:
        for n, data in self.con.execute("select n, data from s order by i"):
            at = 0
            fields = {}
            for name, dtype in FIELDS.items():
                fields[name] = np.frombuffer(data, dtype, n, at)
                at += n * dtype.itemsize
            yield fields

    def close(self) -> None:
        self.con.execute("pragma wal_checkpoint(truncate)")


class DuckDb(Peer):
    """A native table with list columns; each append is one transaction."""

    title = "DuckDB (native)"

    def open(self) -> None:
        self.con = duckdb.connect(str(self.folder / "log.duckdb"))
        self.con.execute("set threads = 2")
        self.con.execute(
            "create table s (id text, version0 int, ids int[], logprobs float[],"
            " mask utinyint[], versions int[])"
        )

    def append(self, i: int, j: int) -> None:
        self.con.register("batch", arrow_batch(self.workload, i, j))
        self.con.execute("insert into s select * from batch")

    def read(self, out: Packed) -> None:
        names = ", ".join(FIELDS)
        reader = self.con.sql(f"select {names} from s order by rowid").to_arrow_reader(2048)
        for batch in reader:
            out.put({n: batch.column(n).flatten().to_numpy(zero_copy_only=False) for n in FIELDS})

    def close(self) -> None:
        self.con.unregister("batch")
        self.con.execute("checkpoint")


def arrow_batch(workload: Workload, i: int, j: int) -> pa.Table:
    rows = [workload.plain(k) for k in range(i, j)]
    offsets = pa.array(np.cumsum([0, *(len(r["ids"]) for r in rows)]).astype(np.int32))
    lists = {
        name: pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([r[name] for r in rows])))
        for name in FIELDS
    }
    scalars = {name: [r[name] for r in rows] for name in ("id", "version0")}
    return pa.table({**scalars, **lists})


class Pickle(Peer):
    """One pickle per append, written and closed."""

    title = "pickle"

    def open(self) -> None:
        self.n = 0

    def append(self, i: int, j: int) -> None:
        rows = [self.workload.plain(k) for k in range(i, j)]
        (self.folder / f"{self.n}.pkl").write_bytes(pickle.dumps(rows, protocol=5))
        self.n += 1

    def segments(self) -> Iterator[Flat]:
        for k in range(self.n):
            for row in pickle.loads((self.folder / f"{k}.pkl").read_bytes()):
                yield {name: row[name] for name in FIELDS}


class Lance(Peer):
    title, needs = "Lance", "lance"

    def append(self, i: int, j: int) -> None:
        import lance

        path = self.folder / "t.lance"
        mode = "append" if path.exists() else "create"
        lance.write_dataset(arrow_batch(self.workload, i, j), str(path), mode=mode)

    def dataset(self) -> Any:
        import lance

        return lance.dataset(str(self.folder / "t.lance"))

    def source(self, con: duckdb.DuckDBPyConnection) -> str:
        con.register("lance", self.dataset())
        return "lance"

    def read(self, out: Packed) -> None:
        for batch in self.dataset().to_batches(columns=list(FIELDS), batch_size=256):
            out.put({n: batch.column(n).flatten().to_numpy(zero_copy_only=False) for n in FIELDS})


class Delta(Peer):
    title, needs = "Delta", "deltalake"

    def append(self, i: int, j: int) -> None:
        import deltalake

        batch = arrow_batch(self.workload, i, j).append_column("i", pa.array(range(i, j)))
        deltalake.write_deltalake(str(self.folder / "t"), batch, mode="append")

    def files(self) -> list[str]:
        import deltalake

        actions = deltalake.DeltaTable(str(self.folder / "t")).get_add_actions(flatten=True)
        names = pa.table(actions).sort_by("min.i").column("path").to_pylist()
        return [str(self.folder / "t" / name) for name in names]

    def source(self, con: duckdb.DuckDBPyConnection) -> str:
        return f"read_parquet({self.files()})"

    def read(self, out: Packed) -> None:
        for path in self.files():
            table = pq.read_table(path, columns=list(FIELDS), use_threads=False)
            columns = {n: one_chunk(table, n).flatten() for n in FIELDS}
            out.put({n: c.to_numpy(zero_copy_only=False) for n, c in columns.items()})


STANDARD: list[type[Peer]] = [Raw, Molt, Jsonl, JsonlOrjson, Msgpack, Sqlite, DuckDb]
EXTRA: list[type[Peer]] = [Pickle, Lance, Delta]
SLOW = (Lance, Delta)
"""A commit of these takes tens of milliseconds: fewer of them are made."""


def remove(peer: Peer) -> None:
    shutil.rmtree(peer.folder)
