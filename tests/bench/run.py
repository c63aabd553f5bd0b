"""Benchmarks beside their peers: parts of the log in this process, and every script of this folder.

`python tests/bench/run.py` takes some minutes, `--all` much longer (more peers, 200k segments, a
log of 10M commits). Nothing here asserts a time: ratios between rows of one run are what counts,
absolute figures change with the machine. Data that comes back must be what was written.
`--only append,server` runs these parts; a script is a part by its name.
"""

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import flow_bench
import peers
import pyarrow as pa
import sql_bench
import store_bench
from report import Report
from rounds import ROUNDS
from workload import RAW_BYTES, Workload

HERE = Path(__file__).parent
N_SEGMENTS, N_SEGMENTS_ALL = 4_000, 20_000
SWEEP = [1_000]
SWEEP_ALL = [1_000, 10_000, 50_000, 200_000]
POLL = [1_000, 100_000, 1_000_000]
POLL_ALL = [*POLL, 10_000_000]


@dataclass(frozen=True)
class Run:
    """What the parts share."""

    folder: Path
    workload: Workload
    kinds: list[type[peers.Peer]]
    all: bool
    report: Report


def append(run: Run) -> None:
    for batch in (1, store_bench.BATCH):
        store_bench.bench_append(run.folder, run.workload, run.kinds, batch, run.report)


def poll(run: Run) -> None:
    flow_bench.bench_poll(run.folder, POLL_ALL if run.all else POLL, run.report)
    flow_bench.bench_poll_control(run.folder, run.report)


def sql(run: Run) -> None:
    sql_bench.bench_sql(run.folder, run.workload, run.report)
    if run.all:
        sql_bench.bench_sql_peers(run.folder, run.workload, run.kinds, run.report)


PARTS: dict[str, Callable[[Run], None]] = {
    "append": append,
    "syncs": lambda run: store_bench.bench_syncs(run.folder, run.kinds, run.report),
    "read": lambda run: store_bench.bench_read(run.folder, run.workload, run.kinds, run.report),
    "sql": sql,
    "flow": lambda run: flow_bench.bench_flow(run.folder, run.report, n=8_000),
    "poll": poll,
    "writers": lambda run: flow_bench.bench_writers(run.folder, run.report),
    "sweep": lambda run: sql_bench.bench_sweep(
        run.folder, SWEEP_ALL if run.all else SWEEP, run.report
    ),
}
MAIN = 'if __name__ == "__main__":'
SCRIPTS = [p.stem for p in sorted(HERE.glob("*.py")) if p.stem != "run" and MAIN in p.read_text()]
"""Benches of their own, which print what they found: `python tests/bench/<name>.py`."""

HEAD = """# Benchmarks

Written by `{command}`, {date} UTC: {system}, {cpus} cores, load {load:.1f} at the start,
{minutes:.0f} minutes.
{n:,} segments of {mean:.0f} tokens on average; a token has {raw} raw bytes (id, logprob, mask,
version). Rates are medians of {rounds} rounds in which all rows of a table take turns, ratios are
medians of the ratios within a round. Every store starts from the same numpy arrays, and what it
reads is compared with what was written.
"""


def main() -> None:
    names = [*PARTS, *SCRIPTS]
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--all", action="store_true", help="more peers, sizes and commits")
    p.add_argument("--only", default="", help=f"comma-separated parts of {', '.join(names)}")
    p.add_argument("--dir", default="runs/bench", help="folder on the disk to measure")
    p.add_argument("--out", type=Path, help="write the markdown here too")
    p.add_argument("--commits", nargs=2, metavar=("PEER", "N"), help="for strace: N commits")
    args = p.parse_args()
    if args.commits:
        store_bench.commits(args.commits[0], int(args.commits[1]), Path(args.dir))
        return
    wanted = args.only.split(",") if args.only else names
    if unknown := set(wanted) - set(names):
        p.error(f"no such part: {', '.join(sorted(unknown))}")
    pa.set_cpu_count(2)
    text = measured(args, [name for name in names if name in wanted])
    print(text)
    if args.out:
        args.out.write_text(text)


def measured(args: argparse.Namespace, names: list[str]) -> str:
    start, load = time.monotonic(), os.getloadavg()[0]
    os.makedirs(args.dir, exist_ok=True)
    report = Report()
    extra = peers.EXTRA if args.all else []
    kinds = [*peers.STANDARD, *(k for k in extra if not k.missing())]
    workload = Workload(N_SEGMENTS_ALL if args.all else N_SEGMENTS)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        run = Run(Path(folder), workload, kinds, args.all, report)
        for name in names:
            if name in PARTS:
                PARTS[name](run)
            else:
                script(name, report)
    if absent := [k.title for k in extra if k.missing()]:
        report.add("Not installed, not measured", ", ".join(absent) + "\n")
    options = [*(["--all"] if args.all else []), *(["--only", args.only] if args.only else [])]
    head = HEAD.format(
        command=" ".join(["tests/bench/run.py", *options]),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        system=f"{platform.system()} {platform.machine()}",
        cpus=os.cpu_count(),
        load=load,
        minutes=(time.monotonic() - start) / 60,
        n=workload.n,
        mean=workload.n_tokens / workload.n,
        raw=RAW_BYTES,
        rounds=ROUNDS,
    )
    return report.markdown(head)


def script(name: str, report: Report) -> None:
    """In a process of its own; what it prints is its part, and a failure is said in its place."""
    command = [sys.executable, HERE / f"{name}.py"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    text = done.stdout.strip()
    body = text.replace("\n#", "\n##") if text.startswith("#") else f"```\n{text}\n```"
    failed = f"\n\nEnded with exit status {done.returncode}." if done.returncode else ""
    report.add(f"{name}.py", f"{body.removeprefix('# ')}{failed}\n")


if __name__ == "__main__":
    main()
