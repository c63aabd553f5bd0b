"""What dies while it is being started again is started once more, up to `run.restarts_max`."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from simulation import config

from molt.cluster import Cluster
from molt.schemas.errors import EngineError, WorkerDied


class Frail(Cluster):
    """A cluster whose processes die `deaths` times while they start; no process is made."""

    def __init__(self, deaths: int) -> None:
        self.said: list[str] = []
        conf = config("run.restarts_max=3")
        super().__init__(conf, Path("log"), 1, "model", self.said.append)
        self.deaths, self.made = deaths, 0

    def _die(self, error: type[Exception]) -> None:
        if self.made <= self.deaths:
            raise error("died while starting")

    def _new_worker(self, i: int) -> Any:
        self.made += 1
        return f"worker {self.made}"

    async def call(self, actor: Any, method: str, *args: Any) -> Any:
        if method == "ready":
            self._die(WorkerDied)

    async def _start_engine(self, i: int) -> dict[str, Any]:
        self.made += 1
        self.engines[i] = f"engine {self.made}"
        self._die(EngineError)
        return {}

    async def restart_engine(self) -> dict[str, Any]:
        self._watches[0] = asyncio.create_task(asyncio.sleep(60))
        self.lost("engine-0", self.engines[0])
        assert await self.restart_done()
        return self.restarted()


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.kill", lambda actor: None)


def test_a_worker_that_dies_while_it_starts_is_started_again() -> None:
    cluster = Frail(deaths=2)
    asyncio.run(cluster.start_worker(0))
    assert cluster.workers == ["worker 3"] and len(cluster.said) == 2
    with pytest.raises(EngineError, match="worker-0 died and run.restarts_max = 3 is used up"):
        asyncio.run(Frail(deaths=9).start_worker(0))


def test_an_engine_that_dies_while_it_starts_again_is_started_once_more() -> None:
    cluster = Frail(deaths=2)
    assert asyncio.run(cluster.restart_engine()) == {"engine-0": "engine 3"}
    assert len(cluster.said) == 3
    with pytest.raises(EngineError, match="engine-0 died and run.restarts_max = 3 is used up"):
        asyncio.run(Frail(deaths=9).restart_engine())
