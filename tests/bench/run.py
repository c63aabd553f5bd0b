"""Benchmarks of the log beside its peers, one process, one run; the table goes to stdout.

`python tests/bench/run.py` takes some minutes, `--all` much longer (more peers, 200k segments, a
log of 10M commits). Nothing here asserts a time: ratios between rows of one run are what counts,
absolute figures change with the machine. Data that comes back must be what was written.
"""

import argparse
import datetime
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import flow_bench
import peers
import pyarrow as pa
import sql_bench
import store_bench
from report import Report, table
from rounds import ROUNDS
from workload import RAW_BYTES, Workload

N_SEGMENTS = 4_000
N_SEGMENTS_ALL = 20_000
SWEEP = [1_000]
SWEEP_ALL = [1_000, 10_000, 50_000, 200_000]
SWEEP_WORKLOAD = 10_000
"""Larger logs repeat so many segments under other names."""
POLL = [1_000, 100_000, 1_000_000]
POLL_ALL = [*POLL, 10_000_000]
POLL_CONTROL = [100, 10_000]
WRITERS = [1, 2, 4, 8]
PARTS = ("append", "syncs", "read", "sql", "flow", "poll", "writers", "sweep")

HEAD = """# Benchmarks of the log

Written by `{command}`, {date} UTC: {system}, {cpus} cores, load {load:.1f} at the start,
{minutes:.0f} minutes.
{n:,} segments of {mean:.0f} tokens on average; a token has {raw} raw bytes (id, logprob, mask,
version). Rates are medians of {rounds} rounds in which all rows of a table take turns, ratios are
medians of the ratios within a round. Every store starts from the same numpy arrays, and what it
reads is compared with what was written.
"""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--all", action="store_true", help="more peers, sizes and commits")
    p.add_argument("--only", default="", help=f"comma-separated parts of {', '.join(PARTS)}")
    p.add_argument("--dir", default="runs/bench", help="folder on the disk to measure")
    p.add_argument("--out", type=Path, help="write the markdown here too")
    p.add_argument("--commits", nargs=2, metavar=("PEER", "N"), help="for strace: N commits")
    args = p.parse_args()
    if args.commits:
        store_bench.commits(args.commits[0], int(args.commits[1]), Path(args.dir))
        return
    pa.set_cpu_count(2)
    text = run(args)
    print(text)
    if args.out:
        args.out.write_text(text)


def run(args: argparse.Namespace) -> str:
    start, load = time.monotonic(), os.getloadavg()[0]
    os.makedirs(args.dir, exist_ok=True)
    report = Report()
    only = set(args.only.split(",")) if args.only else set(PARTS)
    n = N_SEGMENTS_ALL if args.all else N_SEGMENTS
    workload = Workload(n)
    extra = peers.EXTRA if args.all else []
    absent = [k.title for k in peers.EXTRA if k.missing()]
    kinds = [*peers.STANDARD, *(k for k in extra if not k.missing())]
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        folder = Path(name)
        steps = {
            "append": lambda: [
                store_bench.bench_append(folder, workload, kinds, batch, report)
                for batch in (1, store_bench.BATCH)
            ],
            "syncs": lambda: store_bench.bench_syncs(folder, kinds, report),
            "read": lambda: store_bench.bench_read(folder, workload, kinds, report),
            "sql": lambda: sql_targets(folder, workload, report),
            "flow": lambda: flow_bench.bench_flow(folder, report, n=8_000),
            "poll": lambda: [
                flow_bench.bench_poll(folder, POLL_ALL if args.all else POLL, report),
                flow_bench.bench_poll_control(folder, POLL_CONTROL, report),
            ],
            "writers": lambda: flow_bench.bench_writers(folder, WRITERS, report),
            "sweep": lambda: sweep(folder, SWEEP_ALL if args.all else SWEEP, report),
        }
        for part in (part for part in PARTS if part in only):
            steps[part]()
    if args.all and absent:
        report.add("Not installed, not measured", ", ".join(absent) + "\n")
    head = HEAD.format(
        command=" ".join(["tests/bench/run.py", *asked(args)]),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        system=f"{platform.system()} {platform.machine()}",
        cpus=os.cpu_count(),
        load=load,
        minutes=(time.monotonic() - start) / 60,
        n=n,
        mean=workload.n_tokens / n,
        raw=RAW_BYTES,
        rounds=ROUNDS,
    )
    return report.markdown(head)


def asked(args: argparse.Namespace) -> list[str]:
    """The options that decide what is measured."""
    return [*(["--all"] if args.all else []), *(["--only", args.only] if args.only else [])]


def sql_targets(folder: Path, workload: Workload, report: Report) -> None:
    for query, ratio in sql_bench.bench_sql(folder, workload, report).items():
        report.target(f"SQL, {query}, to native DuckDB", ratio, 1.5, most=True)


def sweep(folder: Path, sizes: list[int], report: Report) -> None:
    """Whole logs of growing size: what one more segment costs must not depend on those before."""
    rows = []
    workload = Workload(min(SWEEP_WORKLOAD, sizes[-1]))
    for k in range(workload.n):
        workload.row(k)
    for n in sizes:
        rows.append(sql_bench.whole_log(folder / f"sweep-{n}", workload, n))
    head = [
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
    report.add("Logs of growing size, 64 segments per commit", table(head, rows))


if __name__ == "__main__":
    main()
