"""SQL over the compacted log beside native DuckDB tables of the same columns, both warm."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import factories as make
from peers import Molt, Raw
from report import Report, table
from rounds import interleaved
from store_bench import BATCH
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


def bench_sql(folder: Path, workload: Workload, report: Report) -> dict[str, float]:
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
    rows, ratios = [], {}
    for name, (own, other) in pairs.items():
        check(con.execute(own).fetchall(), peer.execute(other).fetchall())
        rates = interleaved({"molt": asks(con, own), "native": asks(peer, other)})
        times = {k: 1e3 / r.median for k, r in rates.items()}
        ratios[name] = rates["native"].ratio(rates["molt"])
        rows.append((name, times["molt"], times["native"], ratios[name]))
    head = ["query", "molt, compacted, ms", "native DuckDB, ms", "ratio"]
    note = f"First connection and query of a process, every byte verified: {first_s:.2f} s."
    report.add(f"SQL, {workload.n} segments, connected and warm", table(head, rows), note)
    con.close()
    peer.close()
    return ratios


def check(own: list[Any], other: list[Any]) -> None:
    for a, b in zip(own, other, strict=True):
        if any(abs((x or 0) - (y or 0)) > 1e-6 for x, y in zip(a, b, strict=True)):
            raise AssertionError(f"the same query gives {a} and {b}")


def asks(con: duckdb.DuckDBPyConnection, query: str) -> Callable[[int], float]:
    def run(number: int) -> float:
        con.execute(query).fetchall()
        return 1.0

    return run


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
