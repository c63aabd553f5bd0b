"""The driver's loop over real log files with scripted players in place of models: discrete events.

Time passes only in `Players.advance` and `train`; lengths and rewards come from a hash of the
rollout's name, so a simulation is the same every time.
"""

import asyncio
import heapq
import io
from pathlib import Path
from typing import Any

import factories as make
import numpy as np
import xxhash
from rich.console import Console

from molt.config import Config, load
from molt.data import Prompts
from molt.issuing import Issuer
from molt.loop import Run
from molt.recovery import Start, asked_drops, open_fold
from molt.rollout.types import Assignment
from molt.schemas.errors import WorkerDied
from molt.screen import Screen
from molt.store import Log

DEMO = Path(__file__).parents[1] / "molt" / "recipes" / "demo.toml"


def config(*overrides: str) -> Config:
    return load(DEMO, ["data.groups_per_step=4", "data.rollouts_per_group=4", *overrides])


def uniform(name: str) -> float:
    return xxhash.xxh3_64_intdigest(name.encode()) / 2**64


class Players:
    """Workers and engines: a rollout of n tokens takes n seconds, all of them at once."""

    def __init__(self, log: Log, epoch: int, slow: float, equal: float) -> None:
        self.workers, self.slow, self.equal = [self], slow, equal
        self.writer = log.writer(epoch, linger_s=60)
        self.now = 0.0
        self.version = 0
        self.epoch = epoch
        self.queue: list[tuple[float, str, Assignment, int]] = []
        self.lengths: dict[str, int] = {}
        self.death = asyncio.Event()
        self.restarts: list[str] = []

    async def call(self, worker: Any, method: str, play: list[Assignment]) -> None:
        for a in play:
            length = 4 + int(12 * uniform(a.rollout_id))
            if uniform("slow" + a.rollout_id) < self.slow:
                length *= 10
            self.lengths[a.rollout_id] = length
            heapq.heappush(self.queue, (self.now + length, a.rollout_id, a, self.version))
        await self.death.wait()
        raise WorkerDied("the worker-0 process died during 'play'")

    def kill(self) -> None:
        """The one worker dies with all that it was playing."""
        self.death.set()
        self.queue.clear()

    def check_restarts(self, name: str) -> None:
        self.restarts.append(name)

    async def start_worker(self, i: int) -> None:
        self.death = asyncio.Event()

    def has_restarted(self) -> bool:
        return False

    def advance(self, seconds: float | None = None) -> bool:
        """To the next end of a rollout, or by `seconds`; True if something ended."""
        if seconds is None:
            seconds = max(self.queue[0][0] - self.now, 0.0) if self.queue else 1.0
        self.now += seconds
        ended = 0
        while self.queue and self.queue[0][0] <= self.now:
            _, _, a, version = heapq.heappop(self.queue)
            self._finish(a, version)
            ended += 1
        self.writer.flush()
        return ended > 0

    def _finish(self, a: Assignment, version: int) -> None:
        row = make.segment(
            rollout_id=a.rollout_id,
            attempt=a.attempt,
            ids=[1] * self.lengths[a.rollout_id],
            epoch=self.epoch,
            version=version,
        )
        is_equal = uniform("equal" + a.group_id) < self.equal
        value = 0.5 if is_equal else uniform("reward" + a.rollout_id)
        self.writer.append("segments", row)
        self.writer.append("rewards", make.reward(a.rollout_id, value, a.attempt))
        self.writer.append(
            "rollouts", make.rollout(a.rollout_id, attempt=a.attempt, digests=[row["digest"]])
        )


class Simulation:
    """A `Run` whose trainer takes `train_s` seconds and whose engines are `Players`."""

    def __init__(
        self,
        path: Path,
        conf: Config,
        *,
        slow: float = 0.0,
        equal: float = 0.0,
        train_s: float = 10.0,
        start: Start | None = None,
        epoch: dict[str, Any] | None = None,
        evaluates: bool = False,
    ) -> None:
        log = Log.create(path)
        number = make.open_epoch(log, **(epoch or {})).epoch
        self.players, self.train_s = Players(log, number, slow, equal), train_s
        screen = Screen(Console(file=io.StringIO()))
        prompts = Prompts(conf.data, conf.run.seed)
        self.run = Run(conf, screen, log, number, self.players, prompts)  # type: ignore[arg-type]
        self.run.issuer = Issuer(self.run, prompts)
        self.run.fold = open_fold(log, start or Start(), screen.say)
        for drop in asked_drops(self.run.fold, (start or Start()).drop):
            self.run.drop(drop)
        self.run.step = self.run.fold.last_step
        self.unsettled_max, self.evaluates = 0, evaluates
        self.waits = 0

        async def news() -> None:
            self.waits += 1
            assert self.waits < 20_000, "nothing is planned any more"
            await asyncio.sleep(0)  # plays that were only just dispatched reach the queue
            self.players.advance()

        self.run._news = news  # type: ignore[method-assign]

    async def steps(self, n: int) -> None:
        self.publish()
        self.run.issuer.adopt()
        await asyncio.sleep(0)
        await self.evaluate()
        for _ in range(n):
            await self.one()
            await self.evaluate()
        await self.run.issuer.close()

    async def evaluate(self) -> None:
        if self.evaluates:
            await self.run.evaluate_if_due()

    async def one(self) -> None:
        """Plan, train, record, publish when due."""
        run = self.run
        plan = await run.plan()
        assert plan is not None
        step = run.step + 1
        await asyncio.sleep(0)
        self.unsettled_max = max(self.unsettled_max, len(run.fold.open_groups("train")))
        self.players.advance(self.train_s)
        run.put("step", [make.step_row(run.epoch, step)])
        run.step = step
        if step - run.version >= run.config.algo.refit_every:
            self.publish()

    def publish(self) -> None:
        run = self.run
        run.put("policy", [make.policy(run.epoch, run.step)])
        run.version = self.players.version = run.step


def simulate(path: Path, conf: Config, n: int, **options: Any) -> Simulation:
    found = Simulation(path, conf, **options)
    asyncio.run(found.steps(n))
    found.players.writer.close()
    found.run.writer.close()
    return found


def lengths(log: Log, query: str) -> np.ndarray:
    return np.array([n for (n,) in log.sql(query).fetchall()])


__all__ = ["Simulation", "config", "lengths", "simulate"]
