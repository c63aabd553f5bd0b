"""Many workers before one planner: no models, real log files, rows made by one other process.

What is measured is the driver's: how long after it is durable a group is seen, what share of a core
that takes, whether it grows with the age of the run, and what memory the fold needs.
"""

import asyncio
import heapq
import io
import multiprocessing
import os
import statistics
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import factories as make
import numpy as np
import psutil
from report import Report, table
from rich.console import Console
from simulation import config, uniform

from molt.config import Config
from molt.data import Prompts
from molt.loop import Run
from molt.recovery import Start, open_fold
from molt.schemas.check import ROOT_DIGEST, segment_digest
from molt.screen import Screen
from molt.store import Log
from molt.store.fold import COLUMNS, STREAMS, Fold

SPAWN = multiprocessing.get_context("spawn")
WORKERS, ENGINES = 1000, 100
MEMBERS = 8
GROUPS_PER_STEP = 64
MAX_LAG = 6
"""Seven steps' groups are in flight: 3,584 rollouts, 36 per engine."""
MEAN_S = 36.0
"""A rollout takes 0.5 to 1.5 times this."""
TOKENS = 1000
STEPS = 24
MIB = 2.0**20


def a_run(conf: Config, log: Log, cluster: Any, kind: type[Run] = Run) -> Run:
    """The product's loop, over players that are none of its own."""
    screen = Screen(Console(file=io.StringIO()))
    run = kind(conf, screen, log, 1, cluster, Prompts(conf.data, 0))
    run.fold = open_fold(log, Start(), screen.say)

    async def recomputed() -> dict[str, float]:
        return {"tokens": 0, "seconds": 0.0}

    run.publisher = SimpleNamespace(recomputed=recomputed)  # type: ignore[assignment]
    return run


def publish(run: Run) -> None:
    """As after a refit that takes no time."""
    run.put("policy", [make.policy(1, run.step)])
    run.version = run.cluster.version = run.step  # type: ignore[attr-defined]


def settle(future: Any) -> None:
    """A play has ended; the run may have stopped waiting for it."""
    if not future.done():
        future.set_result(None)


# -- the process that is all workers and engines -------------------------------------------------


def play(path: str, n_writers: int, conn: Any) -> None:
    """Every rollout ends at its own time and is appended by its worker's writer."""
    log = Log.open(path)
    writers = [log.writer(1) for _ in range(n_writers)]
    rng = np.random.default_rng(0)
    ids = rng.integers(10, 50_000, TOKENS).astype(np.int32)
    ones = np.ones(TOKENS, np.uint8)
    base = make.segment() | {"token_ids": ids, "sampled": ones, "train": ones}
    base["logprobs"] = -rng.standard_exponential(TOKENS, dtype=np.float32)
    queue: list[tuple[float, str, int]] = []
    left: dict[str, int] = {}
    digests: dict[int, bytes] = {}
    lock = threading.Lock()
    conn.send("ready")

    def durable(group_id: str) -> None:
        with lock:
            left[group_id] -= 1
            if not left[group_id]:
                conn.send((group_id, time.monotonic()))

    while True:
        pause = queue[0][0] - time.monotonic() if queue else None
        while conn.poll(None if pause is None else max(0.0, pause)):
            asked = conn.recv()
            if asked is None:
                conn.send(("cpu", time.process_time()))
                os._exit(0)  # a thousand clean ends are not what is measured
            group_id, names, version = asked
            left[group_id] = len(names)
            for name in names:
                seconds = MEAN_S * (0.5 + uniform(name))
                heapq.heappush(queue, (time.monotonic() + seconds, name, version))
            pause = queue[0][0] - time.monotonic()
        _, name, version = heapq.heappop(queue)
        group_id = name.rpartition("/")[0]
        run = {"epoch": 1, "version": version, "n": TOKENS}
        row = {**base, "group_id": group_id, "rollout_id": name, "version_runs": [run]}
        if version not in digests:
            digests[version] = segment_digest(row, ROOT_DIGEST)
        digest = digests[version]
        w = writers[int(group_id.rpartition("-")[2]) % n_writers]
        w.append("segments", {**row, "digest": digest})
        w.append("rewards", make.reward(name, uniform("reward" + name)))
        ticket = w.append("rollouts", make.rollout(name, digests=[digest]))
        ticket.add_done_callback(lambda _, group_id=group_id: durable(group_id))


# -- the planner ---------------------------------------------------------------------------------


class Fleet:
    """The cluster: groups go out by name, and are reported when they are durable."""

    def __init__(self, conn: Any) -> None:
        self.conn, self.version, self.workers = conn, 0, [self] * WORKERS
        self.durable: dict[str, float] = {}
        self.cpu_s = 0.0
        self._open: dict[str, Any] = {}
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            group_id, at = self.conn.recv()
            if group_id == "cpu":
                self.cpu_s = at
                return
            self.durable[group_id] = at
            self._loop.call_soon_threadsafe(settle, self._open.pop(group_id))

    async def call(self, _: Any, method: str, asked: list[Any]) -> None:
        done = self._loop.create_future()
        group_id = asked[0].group_id
        self._open[group_id] = done
        self.conn.send((group_id, [a.rollout_id for a in asked], self.version))
        await done

    def has_restarted(self) -> bool:
        return False

    def end(self) -> None:
        self.conn.send(None)
        self._thread.join(20)


class Watched(Run):
    """Says when a closed group was first seen, and what seeing costs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lags: list[float] = []
        self.spent: list[tuple[float, float]] = []
        """(seconds to fold, seconds to choose) of each round of the planner"""
        self._seen: set[str] = set()

    def choose(self, step: int) -> Any:
        started = time.perf_counter()
        self.fold.update()
        folded = time.perf_counter()
        now = time.monotonic()
        durable = self.cluster.durable
        for group in self.fold.open_groups("train"):
            if group.group_id not in self._seen and self.fold.is_closed(group):
                self._seen.add(group.group_id)
                if group.group_id in durable:
                    self.lags.append(now - durable[group.group_id])
        chosen_from = time.perf_counter()
        chosen = super().choose(step)
        self.spent.append((folded - started, time.perf_counter() - chosen_from))
        return chosen


def plan_steps(path: Path, n_writers: int) -> tuple[list[Any], Watched]:
    log = Log.create(path)
    make.open_epoch(log)
    conn, other = SPAWN.Pipe()
    child = SPAWN.Process(target=play, args=(str(path), n_writers, other))
    child.start()
    conn.recv()
    conf = config(
        *(f"data.groups_per_step={GROUPS_PER_STEP}", f"data.rollouts_per_group={MEMBERS}"),
        *("run.steps=100000", f"algo.max_lag={MAX_LAG}"),
    )

    async def drive() -> tuple[list[Any], Watched]:
        run = a_run(conf, log, Fleet(conn), Watched)
        assert isinstance(run, Watched)
        publish(run)
        marks = []
        for step in range(1, STEPS + 1):
            assert await run.plan() is not None
            run.put("step", [make.step_row(1, step)])
            run.step = step
            publish(run)
            marks.append((time.monotonic(), time.process_time(), len(run.spent)))
        await run.issuer.close()
        return marks, run

    try:
        marks, run = asyncio.run(drive())
        run.cluster.end()
        return marks, run
    finally:
        child.kill()
        child.join()


def bench_scale(folder: Path, report: Report) -> None:
    rows = []
    for n_writers, what in ((WORKERS, "one writer each"), (32, "a shared appender per host, 32")):
        path = folder / f"fleet-{n_writers}"
        marks, run = plan_steps(path, n_writers)
        first = next(i for i, m in enumerate(marks) if m[0] > marks[0][0] + 2 * MEAN_S)
        (t0, cpu0, n0), (t1, cpu1, n1) = marks[first], marks[-1]
        spent, half = run.spent[n0:n1], (n1 - n0) // 2
        early, late = (statistics.fmean(map(sum, part)) for part in (spent[:half], spent[half:]))
        rate = (len(marks) - 1 - first) * GROUPS_PER_STEP * MEMBERS / (t1 - t0)
        fold_s, choose_s = (statistics.fmean(c) for c in zip(*spent, strict=True))
        lags = np.quantile(run.lags, [0.5, 0.99]) * 1e3
        rows.append(
            (
                f"{WORKERS} workers, {what}",
                *(rate, 3 * rate, TOKENS * rate),
                *map(float, lags),
                (cpu1 - cpu0) / (t1 - t0),
                *(fold_s * 1e3, choose_s * 1e3, late / early),
                psutil.Process().memory_info().rss / MIB,
            )
        )
        run.writer.close()
    head = [
        *("", "rollouts/s", "rows/s", "tokens/s", "seen after, p50 ms", "p99 ms", "planner, cores"),
        *("fold, ms a round", "choose, ms a round", "late to early half", "RSS, MiB"),
    ]
    flight = (MAX_LAG + 1) * GROUPS_PER_STEP * MEMBERS
    report.add(
        f"{WORKERS} workers, {ENGINES} engines: the planner",
        table(head, rows),
        f"{flight} rollouts in flight, {flight / ENGINES:.0f} per engine, {MEAN_S:.0f} s each. All "
        "workers are one process with a writer each; every rollout is three durable rows.",
    )


# -- memory of the fold --------------------------------------------------------------------------


def fold_size(path: str, conn: Any) -> None:
    """What the fold's own objects take, and what it adds to a process at most; MiB."""
    import resource
    import tracemalloc

    log = Log.open(path)
    warm = log.tail(streams=STREAMS, columns=COLUMNS)
    warm.commits_max = 1
    warm.poll()
    before = psutil.Process().memory_info().rss
    tracemalloc.start()
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    fold.update()
    kept, _ = tracemalloc.get_traced_memory()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    n = sum(len(a) for g in fold.groups.values() for a in g.attempts.values())
    conn.send((n, kept / MIB, (peak - before) / MIB))


def bench_fold(folder: Path, report: Report, n: int = 4000) -> None:
    rows = []
    for tokens in (30, 300, 3000):
        log = Log.create(folder / f"fold-{tokens}")
        make.open_epoch(log)
        log.control.put("policy", [make.policy(1, 0)])
        ids = np.random.default_rng(0).integers(10, 50_000, tokens).astype(np.int32)
        ones = np.ones(tokens, np.uint8)
        base = make.segment(runs=[(1, 0, tokens)]) | {"token_ids": ids, "sampled": ones}
        base |= {"train": ones, "logprobs": np.full(tokens, -0.5, np.float32)}
        base["digest"] = segment_digest(base, ROOT_DIGEST)
        with log.writer(1, linger_s=60) as w:
            for k in range(n // MEMBERS):
                w.append("prompts", make.prompt(k, n=MEMBERS))
                names = {"group_id": f"train-{k}"}
                for i in range(MEMBERS):
                    row = {**base, **names, "rollout_id": f"train-{k}/{i}"}
                    w.append("segments", row)
        conn, other = SPAWN.Pipe()
        child = SPAWN.Process(target=fold_size, args=(str(log.path), other))
        child.start()
        seen, kept, peak = conn.recv()
        child.join()
        assert seen == n
        rows.append((f"{tokens * n:,}", n, kept, kept * MIB / n, peak))
    ratio = rows[-1][2] / rows[0][2]
    head = ["tokens in flight", "rollouts", "fold, MiB", "bytes per rollout", "peak, MiB"]
    report.add("Memory of the fold while tokens in flight grow", table(head, rows))
    report.target("memory of the fold, 100 x the tokens", ratio, 1.1, most=True)
