"""From a writer's process to a reader's: latency and throughput beside a Ray queue; poll cost."""

import importlib.util
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import factories as make
import numpy as np
from peers import Molt, Raw
from report import Report, table
from rounds import ROUNDS
from workload import RAW_BYTES, Workload

from molt.schemas.columns import to_rows
from molt.store import Log
from molt.store.control import QUIET_S
from molt.store.reader import BUCKET

QUEUE_S_MAX = 60.0
ITEM_BYTES = 8192
"""Of one segment that travels."""
N_TOKENS = ITEM_BYTES // RAW_BYTES
CONTROL_RECORDS = (100, 10_000)
WRITERS = (1, 2, 4, 8)
SPAWN = multiprocessing.get_context("spawn")


def items(n: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50_000, N_TOKENS).astype(np.int32)
    ones = np.ones(N_TOKENS, np.uint8)
    logprobs = -rng.standard_exponential(N_TOKENS, dtype=np.float32)
    row = make.segment(ids=ids, logprobs=logprobs)
    row |= {"token_ids": ids, "sampled": ones, "train": ones, "logprobs": logprobs}
    for i in range(n):
        yield {**row, "rollout_id": f"train-{i}/0", "group_id": f"train-{i}"}


def produce(path: str, n: int, pause_s: float, options: dict[str, Any], conn: Any) -> None:
    """Appends n rows and reports when each was given to the log, and when it was durable."""
    rows = list(items(n))
    durable = [0.0] * n
    with Log.open(path).writer(**options) as w:
        conn.send("ready")
        conn.recv()
        given = []
        for i, row in enumerate(rows):
            given.append(time.monotonic())
            ticket = w.append("segments", row)
            ticket.add_done_callback(lambda _, i=i: durable.__setitem__(i, time.monotonic()))
            if pause_s:
                ticket.result()
                time.sleep(pause_s)
        w.flush()
    conn.send((given, durable))


def through_log(
    folder: Path, n: int, *, pause_s: float = 0.0, hints: bool = False, **options: Any
) -> tuple[list[float], list[float], list[float]]:
    """When each row was given, durable, delivered as numpy; seconds of one clock."""
    log = Log.create(folder)
    make.open_epoch(log)
    conn, other = SPAWN.Pipe()
    child = SPAWN.Process(target=produce, args=(str(folder), n, pause_s, options, other))
    child.start()
    conn.recv()
    tail = log.tail(streams={"segments"})
    delivered: list[float] = []
    conn.send("go")
    while len(delivered) < n:
        if hints:
            tail.wait(1.0)
        for commit in tail.poll()[1]:
            rows = to_rows(commit.table)
            delivered += [time.monotonic()] * len(rows)
        if not delivered and not child.is_alive():
            raise RuntimeError("the writer's process died; see its error above")
    given, durable = conn.recv()
    child.join()
    tail.close()
    shutil.rmtree(folder)
    return given, durable, delivered


HINTED = "append -> delivered, linger 0, hints on"


def latency(folder: Path, n: int) -> dict[str, tuple[float, float]]:
    """(p50, p99) in ms; "durable" is when the writer knew, which is after the name was there."""
    found = {}
    for hints in (True, False):
        given, durable, got = through_log(
            folder / "latency", n, pause_s=0.002, linger_s=0.0, hints=hints
        )
        what = f"linger 0, hints {'on' if hints else 'off'}"
        found[f"append -> delivered, {what}"] = percentiles(given, got)
        found[f"durable -> delivered, {what}"] = percentiles(durable, got)
    given, _, got = through_log(folder / "latency", 40, pause_s=0.001)
    found["append -> delivered, default linger (0.5 s), hints off"] = percentiles(given, got)
    assert HINTED in found
    return found


def percentiles(starts: list[float], ends: list[float]) -> tuple[float, float]:
    p50, p99 = np.percentile((np.array(ends) - np.array(starts)) * 1e3, [50, 99])
    return float(p50), float(p99)


def bench_flow(folder: Path, report: Report, *, n: int) -> None:
    """Latency with a row at a time, throughput with rows as fast as they go."""
    with_ray = importlib.util.find_spec("ray") is not None
    rates = []
    ray_rates: list[float] = []
    found = latency(folder, n // 4)
    latencies = [(f"molt, {what}", *v) for what, v in found.items()]
    with RayQueue(with_ray) as queue:
        if with_ray:
            latencies.append(("ray.util.queue.Queue, put -> got", *queue.latency(n // 4)))
        for i in range(3):
            given, _, delivered = through_log(folder / f"c{i}", n, hints=True)
            rates.append(n / (delivered[-1] - given[0]))
            if with_ray:
                ray_rates.append(queue.throughput(n // 4))
    report.add("From one process to another", table(["path", "p50 ms", "p99 ms"], latencies))
    p99 = found[HINTED][1]
    report.target("append, publish, delivered with hints, p99 ms", p99, 20, most=True)
    rows = [("molt (durable, verified, default linger, hints)", statistics.median(rates))]
    if with_ray:
        ratios = [a / b for a, b in zip(rates, ray_rates, strict=True)]
        rows.append(("ray.util.queue.Queue (in memory)", statistics.median(ray_rates)))
        rows.append(("ratio", statistics.median(ratios)))
        report.target("transport to Ray queue, segments/s", statistics.median(ratios), 10)
    report.add(f"Transport of segments of {ITEM_BYTES} bytes", table(["path", "segments/s"], rows))


class RayQueue:
    """A producer task and this process at the two ends of ray.util.queue.Queue."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted

    def __enter__(self) -> "RayQueue":
        if self.wanted:
            import ray
            from ray.util.queue import Queue

            paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                log_to_driver=False,
                runtime_env={"env_vars": paths},
            )
            self.queue = Queue()
            self.put = ray.remote(put_all)
            self.ray = ray
            self._run(50, 0.0)  # the worker is up
        return self

    def __exit__(self, *_: object) -> None:
        if self.wanted:
            self.ray.shutdown()

    def _run(self, n: int, pause_s: float) -> tuple[list[float], list[float]]:
        given = self.put.remote(self.queue, n, N_TOKENS, pause_s)
        got = []
        for _ in range(n):
            self.queue.get(timeout=QUEUE_S_MAX)
            got.append(time.monotonic())
        return self.ray.get(given), got

    def latency(self, n: int) -> tuple[float, float]:
        given, got = self._run(n, 0.004)
        return percentiles(given, got)

    def throughput(self, n: int) -> float:
        given, got = self._run(n, 0.0)
        return n / (got[-1] - given[0])


def put_all(queue: Any, n: int, n_tokens: int, pause_s: float) -> list[float]:
    """The producer's end, in a Ray worker; when each item was given."""
    item = {
        "ids": np.arange(n_tokens, dtype=np.int32),
        "logprobs": np.zeros(n_tokens, np.float32),
        "mask": np.ones(n_tokens, np.uint8),
        "versions": np.zeros(n_tokens, np.int32),
    }
    given = []
    for i in range(n):
        given.append(time.monotonic())
        queue.put({**item, "i": i})
        if pause_s:
            time.sleep(pause_s)
    return given


# -- poll cost -----------------------------------------------------------------------------------


def bench_poll(folder: Path, sizes: list[int], report: Report) -> None:
    """One poll of a reader at the end of a long log: nothing new, and one new commit."""
    rows, idle = [], {}
    for n in sizes:
        log = long_log(folder / f"poll-{n}", n)
        tail = log.tail(streams={"rewards"})
        start = time.perf_counter()
        tail.poll()
        catch_up = time.perf_counter() - start
        idle[n] = median_ms(tail.poll)
        with log.writer(linger_s=3600) as w:
            fresh = []
            for i in range(ROUNDS * 4):
                w.append("rewards", make.reward(revision=i))
                w.flush()
                start = time.perf_counter()
                found = tail.poll()[1]
                fresh.append((time.perf_counter() - start) * 1e3)
                assert len(found) == 1
        rows.append((f"{n:,}", idle[n], statistics.median(fresh), catch_up))
        shutil.rmtree(log.path)
    head = ["commits in the log", "idle poll, ms", "poll with 1 new commit, ms", "first poll, s"]
    ratio = idle[sizes[-1]] / idle[sizes[0]]
    report.add("Tail poll cost", table(head, rows), f"{sizes[-1]:,} to {sizes[0]:,}: {ratio:.2f}.")
    report.target(f"idle poll, {sizes[-1]:,} commits to {sizes[0]:,}", ratio, 1.5, most=True)


def bench_poll_control(folder: Path, report: Report) -> None:
    """The same reader beside a control log of many decisions."""
    rows, idle = [], {}
    for n in CONTROL_RECORDS:
        log = Log.create(folder / f"control-{n}")
        make.open_epoch(log)
        with mock.patch("os.fsync"):  # many records soon; only their number matters here
            for i in range(n):
                log.control.put("drop", [make.drop_row(f"train-{i}")], {})
        tail = log.tail(streams={"rewards"})
        start = time.perf_counter()
        tail.poll()
        catch_up = time.perf_counter() - start
        fresh = median_ms(tail.poll)
        time.sleep(QUIET_S + 0.1)
        tail.poll()
        idle[n] = median_ms(tail.poll)
        rows.append((f"{n:,}", idle[n], fresh, catch_up))
        shutil.rmtree(log.path)
    few, many = CONTROL_RECORDS
    ratio = idle[many] / idle[few]
    after = f"within {QUIET_S:g} s of a record, ms"
    head = ["control records", "idle poll, ms", after, "first poll, s"]
    report.add("Tail poll cost beside the control log", table(head, rows))
    what = f"idle poll, {many:,} control records to {few:,}"
    report.target(what, ratio, 1.5, most=True)


def median_ms(call: Callable[[], Any], n: int = 50) -> float:
    times = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def long_log(path: Path, n: int) -> Log:
    """One writer with n names of commits of another stream; all of them name one empty file."""
    log = Log.create(path)
    make.open_epoch(log)
    writer = path / "data" / "1-host-1-abcdef"
    source = path / "empty"
    for bucket in range(-(-n // BUCKET)):
        folder = writer / f"{bucket:06d}"
        folder.mkdir(parents=True)
        if bucket % 50 == 0:  # a file may have some 65,000 names
            source.unlink(missing_ok=True)
            source.touch()
        # The last bucket is half full whatever n is: listing it is what a poll costs.
        last = min(n, (bucket + 1) * BUCKET) if bucket + 1 < -(-n // BUCKET) else None
        end = bucket * BUCKET + BUCKET // 2 if last is None else last
        for seq in range(bucket * BUCKET, end):
            os.link(source, folder / f"{seq:010d}.segments.arrow")
    return log


# -- writers at once -----------------------------------------------------------------------------


def fill(kind: Any, folder: str, n: int, batch: int, conn: Any) -> None:
    workload = Workload(256)
    store = kind(Path(folder), workload)
    for k in range(workload.n):
        workload.row(k)
    conn.send("ready")
    conn.recv()
    for i in range(0, n, batch):
        store.append(i, i + batch)
    conn.send("done")
    conn.recv()


def bench_writers(folder: Path, report: Report, n: int = 512) -> None:
    """Processes that append at once, each to a log directory of its own writer."""
    rows = []
    for count in WRITERS:
        rate = {}
        for kind in (Raw, Molt):
            children = []
            for i in range(count):
                conn, other = SPAWN.Pipe()
                args = (kind, str(folder / f"{kind.__name__}-{count}-{i}"), n, 64, other)
                child = SPAWN.Process(target=fill, args=args)
                child.start()
                children.append((child, conn))
            for _, conn in children:
                conn.recv()
            start = time.perf_counter()
            for _, conn in children:
                conn.send("go")
            for _, conn in children:
                conn.recv()
            rate[kind] = n * count / (time.perf_counter() - start)
            for child, conn in children:
                conn.send("bye")
                child.join()
        rows.append((count, rate[Molt], rate[Raw], rate[Molt] / rate[Raw]))
    head = ["writer processes", "molt, segments/s", "raw, segments/s", "ratio"]
    report.add("Writers at once, 64 segments per commit", table(head, rows))
