"""The processes of a run: Ray, the engine, the trainer ranks, the rollout worker.

Their output goes to files below `<log>/logs`. `close` ends all of them, also after a failure; if
the driver itself is killed, Ray and vLLM's processes notice and end by themselves.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from molt.config import Config
from molt.process import find, reap
from molt.rollout.engine import Engine
from molt.rollout.types import EngineSettings
from molt.rollout.worker import RayEngine, RolloutWorker
from molt.schemas.errors import EngineError, MoltError, TrainerError
from molt.train.settings import ENVIRONMENT, trainer_settings

REQUESTS_AT_ONCE = 4096
OBJECT_STORE_BYTES = 128 << 20


class Cluster:
    """Actors of one epoch. Start them one by one, then `call` their methods."""

    def __init__(self, config: Config, log_path: Path, epoch: int, model_folder: str) -> None:
        self.config, self.log_path, self.epoch = config, log_path, epoch
        self.model_folder = model_folder
        self.engines: list[Any] = []
        self.trainers: list[Any] = []
        self.workers: list[Any] = []
        self.pids: list[int] = []
        self.routing: Any = None

    def start_ray(self) -> None:
        """A private local Ray; it dies with this process."""
        os.environ.update(
            RAY_USAGE_STATS_ENABLED="0",
            RAY_DEDUP_LOGS="0",
            RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            TOKENIZERS_PARALLELISM="false",
        )
        import ray

        ray.init(
            address="local",
            num_cpus=max(8, os.cpu_count() or 1),  # a count of actors, not of cores: see threads
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            object_store_memory=OBJECT_STORE_BYTES,
        )

    async def start_engine(self) -> dict[str, Any]:
        import ray

        c = self.config.engine
        settings = EngineSettings(
            model=self.model_folder,
            dtype=c.dtype,
            max_model_len=c.max_model_len,
            max_num_seqs=c.max_num_seqs,
            kv_cache_gib=c.kv_cache_gib,
            seed=self.config.run.seed,
            weight_transfer=c.weight_transfer,
            omp_threads=c.threads,
            routing=self.config.train.routing != "off",
        )
        engine = (
            ray.remote(Engine)
            .options(num_cpus=0, max_concurrency=REQUESTS_AT_ONCE)
            .remote("engine-0", settings, self.epoch, self._output("engine-0"))
        )
        self.engines.append(engine)
        info: dict[str, Any] = await self.call(engine, "start")
        self.pids += info["child_pids"]
        self.routing = info["routing"]
        return info

    async def start_trainer(self) -> dict[str, Any]:
        import ray

        from molt.train.actor import TrainerActor

        world = self.config.train.world_size
        settings = trainer_settings(self.config, self.model_folder)
        address = f"tcp://127.0.0.1:{free_port()}"
        for rank in range(world):
            output = self._output(f"trainer-{rank}")
            actor = ray.remote(TrainerActor).options(
                num_cpus=0, max_concurrency=1, runtime_env={"env_vars": ENVIRONMENT}
            )
            self.trainers.append(
                actor.remote(settings, rank, world, address, output, str(self.log_path))
            )
        infos = await asyncio.gather(*(self.call(t, "start") for t in self.trainers))
        info: dict[str, Any] = infos[0]
        return info

    async def start_workers(self) -> None:
        import ray

        for i in range(self.config.agent.workers):
            engine = RayEngine("engine-0", self.engines[i % len(self.engines)], self.epoch)
            actor = ray.remote(RolloutWorker).options(num_cpus=0, max_concurrency=REQUESTS_AT_ONCE)
            self.workers.append(
                actor.remote(
                    str(self.log_path),
                    self.epoch,
                    self.config,
                    self.model_folder,
                    [engine],
                    self._output(f"worker-{i}"),
                    self.routing,
                )
            )
        await asyncio.gather(*(self.call(w, "ready") for w in self.workers))

    async def call(self, actor: Any, method: str, *args: Any) -> Any:
        """One remote call; an actor that died becomes an error that names it and its log."""
        import ray

        try:
            return await getattr(actor, method).remote(*args)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, MoltError | OSError) else None
            if cause is None:
                raise
            raise cause from None
        except ray.exceptions.RayActorError as error:
            raise self._dead(actor, method) from error

    async def on_trainers(self, method: str, *args: Any) -> Any:
        """The same call on every rank; returns rank 0's answer."""
        return (await asyncio.gather(*(self.call(t, method, *args) for t in self.trainers)))[0]

    async def execute(self, plan: int) -> Any:
        """Execute the plan of a control record; a `StepResult`."""
        return await self.on_trainers("execute_plan", plan)

    def _dead(self, actor: Any, method: str) -> MoltError:
        kinds: Sequence[tuple[str, list[Any], type[MoltError]]] = (
            ("engine", self.engines, EngineError),
            ("trainer", self.trainers, TrainerError),
            ("worker", self.workers, EngineError),
        )
        for name, actors, error in kinds:
            if actor in actors:
                who = f"{name}-{actors.index(actor)}"
                return error(
                    f"the {who} process died during '{method}'; its last words are in "
                    f"{self._output(who)}. The log is whole: start the same command to resume"
                )
        return MoltError(f"an actor died during '{method}'")

    def _output(self, name: str) -> str:
        return str(self.log_path / "logs" / f"{name}.log")

    async def close(self) -> None:
        """End workers (clean `end` commits), engines and Ray; never raises, never hangs."""
        import ray

        if not ray.is_initialized():
            return
        for actors, method in ((self.workers, "close"), (self.engines, "shutdown")):
            for actor in actors:
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(20):
                        await getattr(actor, method).remote()
        ray.shutdown()
        await asyncio.to_thread(reap, find(self.pids))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
