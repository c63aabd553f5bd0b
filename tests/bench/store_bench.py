"""Durable append, bytes on disk, reading: the log beside its peers on one workload."""

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import factories as make
import numpy as np
import peers
import pyarrow.parquet as pq
from peers import (
    Molt,
    MoltAhead,
    MoltGrouped,
    MoltGroupedUncompressed,
    MoltRows,
    MoltUncompressed,
    Peer,
    Raw,
)
from report import Report, table
from rounds import ROUNDS, Rate, interleaved
from workload import RAW_BYTES, Packed, Workload

from molt.schemas.check import check_row
from molt.schemas.columns import to_table
from molt.schemas.streams import STREAMS, schema_id
from molt.store.commit import encode
from molt.store.compact import compact
from molt.store.files import publish

BATCH = 64
COMMITS = {1: 60, BATCH: 8}
"""Commits per round, by segments in each."""
COMMITS_SLOW = {1: 5, BATCH: 1}
PROTOCOL = "molt: rows checked before, encode + publish"


def bench_append(
    folder: Path, workload: Workload, kinds: Sequence[type[Peer]], batch: int, report: Report
) -> None:
    ways = [MoltAhead, MoltRows] if batch > 1 else []
    kinds = [k for kind in kinds for k in (kind, *(ways if kind is Molt else []))]
    stores = {k.title: k(folder / f"{k.__name__}-{batch}", workload) for k in kinds}
    work = {name: appends(store, batch) for name, store in stores.items()}
    work[PROTOCOL] = protocol(folder / f"protocol-{batch}", workload, batch)
    rates = interleaved(work)
    for store in stores.values():
        store.close()
    raw = rates[Raw.title]
    mean = workload.n_tokens * RAW_BYTES / workload.n
    rows = [
        (name, r.median / 1e6, r.median / mean, r.ratio(raw), rates[Molt.title].ratio(r))
        for name, r in rates.items()
    ]
    head = ["store", "MB/s", "segments/s", "ratio to raw", "molt is x times"]
    title = f"Durable append, {batch} segment{'s' if batch > 1 else ''} per commit"
    report.add(title, table(head, rows))
    targets(rates, batch, report)
    for store in stores.values():
        peers.remove(store)
    shutil.rmtree(folder / f"protocol-{batch}")


def targets(rates: dict[str, Rate], batch: int, report: Report) -> None:
    """Of the whole writer, and of the protocol alone, which the figures of the design are."""
    raw = rates[Raw.title]
    what = f"append, {batch} per commit"
    rows = {name: name for name in (Molt.title, MoltAhead.title) if name in rates}
    for name, own in ((k, rates[v]) for k, v in {**rows, "protocol": PROTOCOL}.items()):
        report.target(f"{what}, {name} to raw", own.ratio(raw), 0.18 if batch == 1 else 0.40)
        if batch == 1:
            continue
        for title, limit in ((peers.Jsonl.title, 20), (peers.JsonlOrjson.title, 3)):
            report.target(f"{what}, {name} to {title}", own.ratio(rates[title]), limit)


def appends(store: Peer, batch: int) -> Callable[[int], float]:
    n = (COMMITS_SLOW if isinstance(store, peers.SLOW) else COMMITS)[batch]
    for i in range(0, ROUNDS * n * batch, batch):
        if isinstance(store, Molt):
            store.workload.table(i, i + batch)  # made once, outside the clock

    def run(number: int) -> float:
        for k in range(n):
            i = number * n * batch + k * batch
            store.append(i, i + batch)
        store.settle()
        return float(store.workload.raw_bytes(number * n * batch, (number + 1) * n * batch))

    return run


def protocol(folder: Path, workload: Workload, batch: int) -> Callable[[int], float]:
    """Without the writer's own work: what encoding, checksum and publishing alone cost."""
    folder.mkdir()
    n = COMMITS[batch]
    schema = STREAMS["segments"]
    name = schema_id("segments", schema, "1.0")
    single = [
        check_row("segments", schema, {**workload.row(k), "at": make.NOW})
        for k in range(n if batch == 1 else 0)
    ]

    def part(k: int) -> Any:
        """What the writer has at this point: a row, or a table that was made before."""
        return to_table(schema, [single[k]]) if single else workload.table(k, k + batch)

    def run(number: int) -> float:
        for k in range(n):
            seq = number * n + k
            rows = part(k * batch)
            raw = encode(rows, stream="segments", writer="w", seq=seq, schema_text=name)
            publish(folder / f"{seq:010d}.arrow", raw)
        return float(workload.raw_bytes(0, n * batch))

    return run


def filled(kind: type[Peer], folder: Path, workload: Workload) -> Any:
    store = kind(folder, workload)
    for i in range(0, workload.n, BATCH):
        store.append(i, min(i + BATCH, workload.n))
    store.close()
    return store


def bench_read(
    folder: Path, workload: Workload, kinds: Sequence[type[Peer]], report: Report
) -> None:
    """All tokens, in order, verified where the store can, into packed numpy; and bytes on disk."""
    first = [Raw, MoltGrouped, MoltGroupedUncompressed, Molt, MoltUncompressed]
    kinds = [*first, *(k for k in kinds if k not in first)]
    stores = {k.title: filled(k, folder / f"read-{k.__name__}", workload) for k in kinds}
    out = Packed(workload.n_tokens)

    def reads(store: Peer) -> Callable[[int], float]:
        def run(number: int) -> float:
            out.n = 0
            store.read(out)
            return float(out.n * RAW_BYTES)

        return run

    for store in stores.values():
        reads(store)(0)
        out.check(workload)
    sources = {k: v.copy() for k, v in workload.flat.items()}

    def memcpy(number: int) -> float:
        for name, values in sources.items():
            np.copyto(out.flat[name], values)
        return float(workload.n_tokens * RAW_BYTES)

    work = {"memcpy": memcpy, **{name: reads(store) for name, store in stores.items()}}
    rates = interleaved(work)
    hot = {name: store.disk_bytes() / workload.n_tokens for name, store in stores.items()}
    compact(stores[Molt.title].log, everything=True)
    cold = stores[Molt.title].disk_bytes() / workload.n_tokens
    rates |= interleaved({"molt, compacted": reads(stores[Molt.title])})
    hot["molt, compacted"] = cold
    rows = [
        (name, r.median / 1e9, r.ratio(rates["memcpy"]), hot.get(name, "-"))
        for name, r in rates.items()
    ]
    head = ["store", "GB/s", "ratio to memcpy", "bytes per token on disk"]
    report.add(f"Reading {workload.n} segments into packed numpy", table(head, rows))
    for size, zstd, plain in (
        ("its own commits", MoltGrouped, MoltGroupedUncompressed),
        (f"{BATCH} per commit", Molt, MoltUncompressed),
    ):
        for name, kind, limit in (("zstd", zstd, 1.2), ("uncompressed", plain, 3.0)):
            what = f"verified read, {size}, {name}, GB/s"
            report.target(what, rates[kind.title].median / 1e9, limit)
    report.target("bytes per token, hot", hot[Molt.title], 4.6, most=True)
    report.target("bytes per token, compacted", cold, 4.6, most=True)
    report.add("Bytes per token by column (compacted)", by_column(stores[Molt.title]))
    for store in stores.values():
        peers.remove(store)


def by_column(store: Molt) -> str:
    sizes: dict[str, int] = defaultdict(int)
    for path in sorted((store.folder / "log" / "cold" / "segments").glob("*.parquet")):
        meta = pq.read_metadata(path)
        for g in range(meta.num_row_groups):
            for c in range(meta.num_columns):
                chunk = meta.row_group(g).column(c)
                sizes[chunk.path_in_schema.split(".")[0]] += chunk.total_compressed_size
    n = store.workload.n_tokens
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    rows = [(name, size / n) for name, size in largest if size / n >= 0.001]
    rows.append(("all others", sum(s for _, s in largest if s / n < 0.001) / n))
    return table(["column", "bytes per token"], rows)


def bench_syncs(folder: Path, kinds: Sequence[type[Peer]], report: Report) -> None:
    """fsync and fdatasync calls per commit, as strace sees them."""
    if shutil.which("strace") is None:
        report.add("Who fsyncs", "strace is not installed: not counted\n")
        return
    rows = []
    for kind in kinds:
        few, many = (syncs(folder / f"{kind.__name__}-{n}", kind, n) for n in (2, 12))
        rows.append((kind.title, (many - few) / 10))
    report.add("Calls of fsync and fdatasync per commit (strace)", table(["store", "calls"], rows))


def syncs(folder: Path, kind: type[Peer], n: int) -> int:
    folder.mkdir()
    run, trace = Path(__file__).with_name("run.py"), folder / "trace"
    child = [sys.executable, run, "--commits", kind.__name__, str(n), "--dir", folder / "store"]
    calls = "trace=fsync,fdatasync,msync,sync_file_range"
    subprocess.run(["strace", "-f", "-qq", "-e", calls, "-o", trace, *child], check=True)
    return len(re.findall(r"(?:fsync|fdatasync|msync|sync_file_range)\(", trace.read_text()))


def commits(name: str, n: int, folder: Path) -> None:
    """What runs under strace: n commits of one segment."""
    kind = getattr(peers, name)
    store = kind(folder, Workload(16))
    for i in range(n):
        store.append(i, i + 1)
