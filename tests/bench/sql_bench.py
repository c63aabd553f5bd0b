"""SQL over the compacted log beside native DuckDB tables of the same columns, both warm."""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import factories as make
import numpy as np
from peers import Molt, Peer, Raw
from report import Report, table
from rounds import interleaved
from store_bench import BATCH, filled
from workload import RAW_BYTES, Workload

from molt.store import Log
from molt.store.compact import compact
from molt.store.sql import connect

BY_VERSION = """
select s.version, avg(w.value), count(*) from rewards w join (
    select rollout_id, attempt, version_runs[1].version as version from segments
) s using (rollout_id, attempt) group by 1 order by 1"""
TOKEN_MEAN = "select avg(logprob) from tokens where sampled = 1"
TOKEN_MEAN_NATIVE = """
select avg(l) from (select unnest(logprobs) as l, unnest(sampled) as m from segments) where m = 1"""
TOKEN_MEAN_PEER = """
select avg(l) from (select unnest(logprobs) as l, unnest(mask) as m from {source}) where m = 1"""

SWEEP_WORKLOAD = 10_000
"""Larger logs repeat so many segments under other names."""
SWEEP_HEAD = [
    "segments",
    "append, segments/s",
    "raw, segments/s",
    "ratio",
    "compact, s",
    "bytes per token",
    "first SQL, s",
    "token mean, ms",
    "native, ms",
    "fresh tail, s",
]


def build(folder: Path, workload: Workload, n: int) -> tuple[Log, float, float]:
    """A compacted log of n segments and their rewards; (log, append seconds, compact seconds)."""
    store = Molt(folder, workload)
    start = time.perf_counter()
    for i in range(0, n, BATCH):
        for k in range(i, min(i + BATCH, n)):
            store.writer.append("segments", workload.row(k))
            value = float(workload.rewards[k % workload.n])
            store.writer.append("rewards", make.reward(workload.name(k), value))
        store.writer.flush()
    store.close()
    appended = time.perf_counter()
    compact(store.log, everything=True)
    return store.log, appended - start, time.perf_counter() - appended


def native(folder: Path, log: Log) -> duckdb.DuckDBPyConnection:
    """The same columns in a database file of DuckDB's own, checkpointed."""
    source = connect([log], query="segments rewards")
    con = duckdb.connect(str(folder / "native.duckdb"))
    con.execute("set threads = 2")
    for name in ("segments", "rewards"):
        con.register("source", source.sql(f"select * from {name}").to_arrow_reader(1024))
        con.execute(f"create table {name} as select * from source")
        con.unregister("source")
    con.execute("checkpoint")
    return con


def bench_sql(folder: Path, workload: Workload, report: Report) -> None:
    log = build(folder / "sql", workload, workload.n)[0]
    peer = native(folder, log)
    start = time.perf_counter()
    con = connect([log])
    con.execute(TOKEN_MEAN).fetchall()
    first_s = time.perf_counter() - start
    pairs = {
        "reward by version": (BY_VERSION, BY_VERSION),
        "mean logprob of sampled tokens": (TOKEN_MEAN, TOKEN_MEAN_NATIVE),
    }
    rows = []
    for name, (own, other) in pairs.items():
        check(con.execute(own).fetchall(), peer.execute(other).fetchall())
        rates = interleaved({"molt": asks(con, own), "native": asks(peer, other)})
        times = {k: 1e3 / r.median for k, r in rates.items()}
        ratio = rates["native"].ratio(rates["molt"])
        rows.append((name, times["molt"], times["native"], ratio))
        report.target(f"SQL, {name}, to native DuckDB", ratio, 1.5, most=True)
    head = ["query", "molt, compacted, ms", "native DuckDB, ms", "ratio"]
    note = f"First connection and query of a process, every byte verified: {first_s:.2f} s."
    report.add(f"SQL, {workload.n} segments, connected and warm", table(head, rows), note)
    con.close()
    peer.close()


def bench_sql_peers(
    folder: Path, workload: Workload, kinds: Sequence[type[Peer]], report: Report
) -> None:
    """The token mean over what the other stores hold, by DuckDB, connected and warm."""
    sampled = workload.flat["logprobs"][workload.flat["mask"] == 1]
    work = {}
    for kind in kinds:
        store = filled(kind, folder / f"sql-{kind.__name__}", workload)
        con = duckdb.connect()
        con.execute("set threads = 2")
        source = store.source(con)
        if source is not None:
            query = TOKEN_MEAN_PEER.format(source=source)
            check(con.execute(query).fetchall(), [(sampled.mean(dtype=np.float64),)])
            work[kind.title] = asks(con, query)
    rows = [(name, 1e3 / rate.median) for name, rate in interleaved(work, 3).items()]
    title = f"Mean logprob of sampled tokens in other stores, {workload.n} segments"
    report.add(title, table(["store", "ms"], rows))


def check(own: list[Any], other: list[Any]) -> None:
    for a, b in zip(own, other, strict=True):
        if any(abs((x or 0) - (y or 0)) > 1e-6 for x, y in zip(a, b, strict=True)):
            raise AssertionError(f"the same query gives {a} and {b}")


def asks(con: duckdb.DuckDBPyConnection, query: str) -> Callable[[int], float]:
    def run(number: int) -> float:
        con.execute(query).fetchall()
        return 1.0

    return run


def bench_sweep(folder: Path, sizes: list[int], report: Report) -> None:
    """Whole logs of growing size: what one more segment costs must not depend on those before."""
    workload = Workload(min(SWEEP_WORKLOAD, sizes[-1]))
    for k in range(workload.n):
        workload.row(k)
    rows = [whole_log(folder / f"sweep-{n}", workload, n) for n in sizes]
    report.add("Logs of growing size, 64 segments per commit", table(SWEEP_HEAD, rows))


def whole_log(folder: Path, workload: Workload, n: int) -> tuple[object, ...]:
    """One row of the sweep: append, compact, SQL, and a reader from the start, at n segments."""
    raw = Raw(folder / "raw", workload)
    start = time.perf_counter()
    for i in range(0, n, BATCH):
        raw.append(i, min(i + BATCH, n))
    raw_s = time.perf_counter() - start
    raw.close()
    shutil.rmtree(folder / "raw")
    log, append_s, compact_s = build(folder / "log", workload, n)
    size = sum(p.stat().st_size for p in (log.path / "cold").rglob("*.parquet"))
    start = time.perf_counter()
    con = connect([log], query="tokens")
    con.execute(TOKEN_MEAN).fetchall()
    first_s = time.perf_counter() - start
    peer = native(folder, log)
    rates = interleaved({"own": asks(con, TOKEN_MEAN), "native": asks(peer, TOKEN_MEAN_NATIVE)}, 3)
    start = time.perf_counter()
    for _ in log.tail(streams={"rewards"}).poll()[1]:
        pass
    tail_s = time.perf_counter() - start
    con.close()
    peer.close()
    shutil.rmtree(folder)
    own_ms, native_ms = (1e3 / rates[k].median for k in ("own", "native"))
    tokens = workload.raw_bytes(0, n) // RAW_BYTES
    rate, raw_rate = n / append_s, n / raw_s
    sizes = (f"{n:,}", rate, raw_rate, rate / raw_rate, compact_s, size / tokens)
    return (*sizes, first_s, own_ms, native_ms, tail_s)
