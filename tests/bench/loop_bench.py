"""The loop over the log beside an in-memory queue, refits beside a bare broadcast, many workers.

`python tests/bench/loop_bench.py` takes about 20 minutes, `--only step,refit,run,fold,scale` a part
of them. Nothing here asserts a time: what is compared takes turns in one run.

The in-memory queue exists only here. It is `multiprocessing.Queue`: rows travel as pickled numpy
arrays from the process that makes them to the driver, nothing is durable, nothing is checked.
"""

import argparse
import asyncio
import datetime
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import factories as make
import fleet
import numpy as np
import refit
from fleet import a_run, publish, settle
from report import Report, table
from simulation import config

from molt.config import Config
from molt.process import rendezvous
from molt.replay.assemble import TrainSequence, assemble
from molt.replay.sources import Sources
from molt.rollout.routing import RoutingShape, routing_rows
from molt.schemas.check import ROOT_DIGEST, segment_digest
from molt.store import Log
from molt.store.control import read_record
from molt.train.actor import TrainerActor, share
from molt.train.advantages import advantages
from molt.train.recorded import RoutingReader
from molt.train.settings import trainer_settings
from molt.train.trainer import StepResult

SPAWN = multiprocessing.get_context("spawn")
PARTS = ("step", "refit", "run", "fold", "scale")
SHAPE = RoutingShape(layers=tuple(range(48)), top_k=8, n_experts=128)
ROUNDS = 3
WARM_UP = 2
"""Steps before the clock runs."""

HEAD = """# Benchmarks of the loop

Written by `tests/bench/loop_bench.py{asked}`, {date} UTC: {system}, {cpus} cores, load {load:.1f}
at the start, {minutes:.0f} minutes.
"""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is generated, and what a step takes."""

    tokens_per_s: float
    tokens: int
    """of a rollout"""
    groups: int
    """of a step"""
    steps: int
    routed: bool = False
    compute_s: float = 0.0
    """of a step's forward and backward; 0 = the tiny model is really trained"""
    ranks: int = 1
    """Trainer ranks; the bench is the first of them."""
    members: int = 8

    @property
    def step_tokens(self) -> int:
        return self.tokens * self.groups * self.members


REAL = Load(tokens_per_s=350, tokens=32, groups=2, steps=12)
FAST = Load(
    tokens_per_s=100_000, tokens=1000, groups=32, steps=8, routed=True, compute_s=2.6, ranks=8
)


# -- the process that generates ------------------------------------------------------------------


@dataclass(frozen=True)
class Rollout:
    name: str
    version: int


class Rows:
    """Rollouts of a fixed length: a few arrays, made before the clock runs, under many names."""

    def __init__(self, load: Load) -> None:
        rng, n = np.random.default_rng(0), load.tokens
        self.pool = []
        for _ in range(16):
            ids = rng.integers(10, 300, n).astype(np.int32)
            logprobs = -rng.uniform(4, 12, n).astype(np.float32)
            experts = rng.random((n - 1, 48, 128), np.float32).argpartition(8, -1)[..., :8]
            self.pool.append((ids, logprobs, experts.astype(np.uint8) if load.routed else None))
        self.mask = (np.arange(n) > 0).astype(np.uint8)
        self.base = make.segment(ids=[1, 2])

    def arrays(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        return self.pool[i % len(self.pool)]

    def segment(self, i: int, rollout: Rollout) -> dict[str, Any]:
        ids, logprobs, _ = self.arrays(i)
        run = {"epoch": 1, "version": rollout.version, "n": len(ids) - 1}
        row = {
            **self.base,
            "group_id": rollout.name.rpartition("/")[0],
            "rollout_id": rollout.name,
            "token_ids": ids,
            "sampled": self.mask,
            "train": self.mask,
            "logprobs": np.where(self.mask, logprobs, np.float32(0)),
            "version_runs": [run],
        }
        return {**row, "digest": segment_digest(row, ROOT_DIGEST)}


def generate(path: str | None, load: Load, conn: Any, queue: Any) -> None:
    """Plays what it is asked for at `load.tokens_per_s`; into the log, or into the queue."""
    rows = Rows(load)
    writer = None
    if path is not None:
        writer = Log.open(path).writer(1, routing=SHAPE.metadata() if load.routed else None)
    waiting: deque[Rollout] = deque()
    conn.send("ready")
    ready, n = time.monotonic(), 0
    while True:
        while conn.poll(0 if waiting else None):
            asked = conn.recv()
            if asked is None:
                if writer is not None:
                    writer.close()
                return
            if not waiting:
                ready = max(ready, time.monotonic())
            waiting += asked
        rollout = waiting.popleft()
        ready += load.tokens / load.tokens_per_s
        time.sleep(max(0.0, ready - time.monotonic()))
        reward = float(n % 5)
        if writer is None:
            queue.put((rollout, reward, *rows.arrays(n)))
        else:
            append(writer, rows, n, rollout, reward, conn)
        n += 1


def append(writer: Any, rows: Rows, n: int, rollout: Rollout, reward: float, conn: Any) -> None:
    segment, experts = rows.segment(n, rollout), rows.arrays(n)[2]
    writer.append("segments", segment)
    if experts is not None:
        names = {"rollout_id": rollout.name, "attempt": 0, "segment": 0}
        for row in routing_rows(((0, experts),), n_experts=SHAPE.n_experts, **names):
            writer.append("routing", row)
    writer.append("rewards", make.reward(rollout.name, reward))
    ticket = writer.append("rollouts", make.rollout(rollout.name, digests=[segment["digest"]]))
    ticket.add_done_callback(lambda _: conn.send(rollout.name))


# -- two trainers --------------------------------------------------------------------------------


class Tiny:
    """Really trains the tiny model."""

    def __init__(self, conf: Config, folder: Path) -> None:
        from tiny import tiny_tied_llama

        model = tiny_tied_llama(folder / "model")
        self.actor = TrainerActor(
            trainer_settings(conf, model),
            *(0, 1, rendezvous(), None, str(Log.create(folder / "none").path)),
        )
        self.actor.start()

    def open(self, log: Log) -> None:
        self.actor.open_log(str(log.path))

    def execute_plan(self, number: int) -> StepResult:
        return self.actor.execute_plan(number)

    def execute(self, step: int, sequences: list[TrainSequence], _: Any) -> None:
        self.actor.execute(step, sequences)


class Timed:
    """Reads and checks what the first of many ranks reads; forward and backward are a pause."""

    def __init__(self, load: Load) -> None:
        self.load = load

    def open(self, log: Log) -> None:
        self.log, self.source = log, Sources(log, 1)
        self.routing = RoutingReader(self.source, layers=48, top_k=8, n_experts=128)

    def execute_plan(self, number: int) -> StepResult:
        plan = share(read_record(self.log.path, number), 0, self.load.ranks)
        sequences = assemble(self.source, plan)
        recorded = self.routing.of_plan(plan, sequences)
        self.execute(plan.header["step"], sequences, [r.experts_TLK for r in recorded])
        return StepResult(
            **{"updates": 1, "loss": 0.0, "grad_norm": 0.0, "n_tokens": self.load.step_tokens},
            **{"state_digest": "0" * 16, "sketch": None, "seconds": self.load.compute_s},
            metrics={"seconds": {}, "tokens": self.load.step_tokens},
        )

    def execute(self, step: int, sequences: list[TrainSequence], experts: list[Any]) -> None:
        wanted = len(sequences) * (self.load.tokens - 1)
        assert sum(map(len, experts)) == wanted, "routing of every token that is fed"
        time.sleep(self.load.compute_s)


# -- the loop over the log, and over a queue -----------------------------------------------------


class Remote:
    """The cluster of one generating process: a group was played when all of it is durable."""

    def __init__(self, conn: Any, trainer: Any, members: int) -> None:
        self.conn, self.trainer, self.members, self.workers = conn, trainer, members, [self]
        self.version = 0
        self._open: dict[str, list[Any]] = {}
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                group_id = self.conn.recv().rpartition("/")[0]
                left = self._open[group_id]
                left[1] -= 1
                if not left[1]:
                    self._loop.call_soon_threadsafe(settle, left[0])
        except (EOFError, OSError, RuntimeError):
            return

    async def call(self, _: Any, method: str, play: list[Any]) -> None:
        done = self._loop.create_future()
        self._open[play[0].group_id] = [done, len(play)]
        self.conn.send([Rollout(a.rollout_id, self.version) for a in play])
        await done

    def has_restarted(self) -> bool:
        return False

    async def execute(self, plan: int) -> Any:
        return await asyncio.to_thread(self.trainer.execute_plan, plan)


def through_log(path: Path, conf: Config, load: Load, trainer: Any) -> list[float]:
    """When each step was done."""
    log = Log.create(path)
    make.open_epoch(log)
    trainer.open(log)

    async def drive(conn: Any) -> list[float]:
        run, ends = a_run(conf, log, Remote(conn, trainer, load.members)), []
        publish(run)
        for _ in range(load.steps):
            plan = await run.plan()
            assert plan is not None
            await run.train(plan)
            publish(run)
            ends.append(time.monotonic())
        await run.issuer.close()
        run.writer.close()
        return ends

    return with_generator(str(path), load, lambda conn, _: asyncio.run(drive(conn)))


def through_memory(conf: Config, load: Load, trainer: Any) -> list[float]:
    """The same decisions over rows that are held in memory."""

    def drive(conn: Any, queue: Any) -> list[float]:
        issued, ends = 0, []
        groups: dict[str, list[Any]] = {}
        for step in range(1, load.steps + 1):
            issued = ask(conn, load, issued, (step + conf.algo.max_lag) * load.groups, step - 1)
            while sum(len(g) == load.members for g in groups.values()) < load.groups:
                item = queue.get(timeout=120)
                groups.setdefault(item[0].name.rpartition("/")[0], []).append(item)
            closed = [k for k, g in groups.items() if len(g) == load.members][: load.groups]
            sequences, experts = [], []
            for i, group_id in enumerate(closed):
                for sequence, routing in sequences_of(group_id, groups.pop(group_id), step):
                    if i % load.ranks == 0:
                        sequences.append(sequence)
                        experts.append(routing)
            trainer.execute(step, sequences, experts)
            ends.append(time.monotonic())
        return ends

    return with_generator(None, load, drive)


def ask(conn: Any, load: Load, issued: int, until: int, version: int) -> int:
    for k in range(issued, until):
        conn.send([Rollout(f"train-{k}/{i}", version) for i in range(load.members)])
    return max(issued, until)


def sequences_of(group_id: str, items: list[Any], step: int) -> list[tuple[TrainSequence, Any]]:
    values = advantages([i[1] for i in items], [True] * len(items), "grpo", std_normalize=False)
    out = []
    for (rollout, _, ids, logprobs, experts), advantage in zip(items, values, strict=True):
        mask = np.arange(len(ids)) > 0
        sequence = TrainSequence(
            group_id=group_id,
            rollout_id=rollout.name,
            attempt=0,
            tip=0,
            token_ids=ids,
            mask=mask,
            logprobs=np.where(mask, logprobs, np.float32(0)),
            lag=np.where(mask, step - 1 - rollout.version, 0),
            advantage=advantage,
            temperature=1.0,
        )
        out.append((sequence, experts))
    return out


def with_generator(
    path: str | None, load: Load, drive: Callable[[Any, Any], list[float]]
) -> list[float]:
    conn, other = SPAWN.Pipe()
    queue = SPAWN.Queue()
    child = SPAWN.Process(target=generate, args=(path, load, other, queue))
    child.start()
    conn.recv()
    try:
        return drive(conn, queue)
    finally:
        conn.send(None)
        child.join(20)
        child.kill()


def bench_step(folder: Path, report: Report) -> None:
    rows = []
    for name, load in (("350 tokens/s, tiny model trained", REAL), ("100k tokens/s", FAST)):
        conf = config(
            *(f"data.groups_per_step={load.groups}", f"data.rollouts_per_group={load.members}"),
            *("run.steps=100000", "checkpoint.every=100000", "algo.max_lag=1", "train.threads=1"),
        )
        trainer: Any = Timed(load) if load.compute_s else Tiny(conf, folder)
        ratios, times = [], {"log": [], "queue": []}
        for i in range(ROUNDS):
            with tempfile.TemporaryDirectory(dir=folder) as inner:
                log = per_step(through_log(Path(inner) / "log", conf, load, trainer))
            queue = per_step(through_memory(conf, load, trainer))
            ratios.append(log / queue)
            times["log"].append(log)
            times["queue"].append(queue)
            print(f"{name}, round {i}: {log:.3f} s, {queue:.3f} s", file=sys.stderr, flush=True)
        ratio = statistics.median(ratios)
        log, queue = (statistics.median(times[k]) for k in ("log", "queue"))
        reached = load.step_tokens / log
        rows.append((name, load.step_tokens, log, queue, f"{ratio - 1:+.2%}", reached))
        report.target(f"step time, log to queue, {name}", ratio, 1.01, most=True)
    head = ["", "tokens per step", "log, s", "queue, s", "the log is slower by", "tokens/s, log"]
    report.add(
        "Step time with the log and with an in-memory queue",
        table(head, rows),
        f"Medians of {ROUNDS} rounds in turns, {WARM_UP} first steps left out. At 100k tokens/s a "
        f"step's forward and backward are a pause of {FAST.compute_s} s; the bench reads, verifies "
        f"and assembles the share of one of {FAST.ranks} ranks, 48 x 8 experts per token included.",
    )


def per_step(ends: list[float]) -> float:
    return (ends[-1] - ends[WARM_UP - 1]) / (len(ends) - WARM_UP)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--only", default="", help=f"comma-separated parts of {', '.join(PARTS)}")
    p.add_argument("--dir", default="runs/bench", help="folder on the disk to measure")
    p.add_argument("--model", default="", help="of the real run; default: the demo's")
    p.add_argument("--out", type=Path, help="write the markdown here too")
    args = p.parse_args()
    start, load = time.monotonic(), os.getloadavg()[0]
    os.makedirs(args.dir, exist_ok=True)
    report = Report()
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        steps = {
            "step": lambda: bench_step(Path(name), report),
            "refit": lambda: refit.bench_refit(Path(name), args.model, report),
            "run": lambda: refit.bench_run(Path(name), args.model, report),
            "fold": lambda: fleet.bench_fold(Path(name), report),
            "scale": lambda: fleet.bench_scale(Path(name), report),
        }
        for part in args.only.split(",") if args.only else PARTS:
            steps[part]()
    text = report.markdown(
        HEAD.format(
            asked=f" --only {args.only}" if args.only else "",
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
            system=f"{platform.system()} {platform.machine()}",
            cpus=os.cpu_count(),
            load=load,
            minutes=(time.monotonic() - start) / 60,
        )
    )
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
