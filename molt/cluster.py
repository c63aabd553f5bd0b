"""The processes of a run: Ray, the engines, the trainer ranks, the rollout workers.

An engine or worker that dies is started again; a trainer rank that dies ends the run, whose state
is in the log. Their output goes to files below `<log>/logs`. `close` ends all of them, also after
a failure; if the driver itself is killed, Ray and vLLM's processes notice and end by themselves.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from molt.config import Config
from molt.process import find, reap, rendezvous
from molt.rollout.engine import Engine
from molt.rollout.types import EngineSettings
from molt.rollout.worker import RayEngine, RolloutWorker
from molt.schemas.errors import EngineError, MoltError, TrainerError, WorkerDied
from molt.store.appender import Appender
from molt.train.settings import ENVIRONMENT, trainer_settings

REQUESTS_AT_ONCE = 4096
OBJECT_STORE_BYTES = 128 << 20


class Cluster:
    """Actors of one epoch. Start them one by one, then `call` their methods."""

    def __init__(
        self,
        config: Config,
        log_path: Path,
        epoch: int,
        model_folder: str,
        say: Callable[[str], None] = print,
    ) -> None:
        self.config, self.log_path, self.epoch = config, log_path, epoch
        self.model_folder, self.say = model_folder, say
        self.engines: list[Any] = [None] * config.engine.count
        self.trainers: list[Any] = []
        self.workers: list[Any] = [None] * config.agent.workers
        self._known: dict[Any, tuple[str, type[MoltError]]] = {}
        """Every actor there ever was: its name, and the error that its death is."""
        self.pids: list[int] = []
        self.trainer_device = "cpu"
        self.n_restarts = 0
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._restarts: dict[int, asyncio.Task[tuple[str, Any]]] = {}
        self.routing: Any = None
        self.appender: Appender | None = None

    def start_ray(self) -> None:
        """A private local Ray; it dies with this process."""
        os.environ.update(
            RAY_DISABLE_FAILURE_SIGNAL_HANDLER="1",  # it aborts 3 s after a SIGTERM
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

    async def start_engines(self) -> dict[str, Any]:
        """All engines; returns what the first one says of itself."""
        infos = await asyncio.gather(*(self._start_engine(i) for i in range(len(self.engines))))
        return infos[0]

    async def _start_engine(self, i: int) -> dict[str, Any]:
        import ray

        settings = EngineSettings(
            **asdict(self.config.engine),
            model=self.model_folder,
            seed=self.config.run.seed,
            routing=self.config.train.routing != "off",
        )
        name = f"engine-{i}"
        engine = (
            ray.remote(Engine)
            .options(num_cpus=0, max_concurrency=REQUESTS_AT_ONCE)
            .remote(name, settings, self.epoch, self._output(name))
        )
        self.engines[i] = engine
        self._known[engine] = (f"engine-{i}", EngineError)
        info: dict[str, Any] = await self.call(engine, "start")
        self.pids += info["child_pids"]
        self.routing = info["routing"]
        self._watches[i] = asyncio.create_task(self._watch(i, engine))
        return info

    async def _watch(self, i: int, engine: Any) -> None:
        """Ends with the engine: then it is fenced and started again."""
        with contextlib.suppress(MoltError):
            await self.call(engine, "died")
        self.lost(f"engine-{i}", engine)

    def lost(self, name: str, engine: Any) -> None:
        """Fence an engine and start it again in the background; the others go on."""
        i = int(name.removeprefix("engine-"))
        if self.engines[i] is not engine or i in self._restarts:
            return
        self.check_restarts(name)
        self._restarts[i] = asyncio.create_task(self._restart(i, engine))

    async def _restart(self, i: int, engine: Any) -> tuple[str, Any]:
        import ray

        name = f"engine-{i}"
        self._watches[i].cancel()
        while True:
            with contextlib.suppress(Exception):  # a dead process cannot end its children any more
                async with asyncio.timeout(20):
                    await engine.shutdown.remote()
            ray.kill(engine)
            try:
                await self._start_engine(i)
                return name, self.engines[i]
            except EngineError:
                engine = self.engines[i]
                self.check_restarts(name)

    def engines_by_name(self) -> dict[str, Any]:
        return {f"engine-{i}": engine for i, engine in enumerate(self.engines)}

    def has_restarted(self) -> bool:
        """True if `restarted` would hand out an engine."""
        return any(task.done() for task in self._restarts.values())

    def restarted(self) -> dict[str, Any]:
        """Engines that are up again and wait for weights; each is handed out once."""
        done = [i for i, task in self._restarts.items() if task.done()]
        return dict(self._restarts.pop(i).result() for i in done)

    async def restart_done(self) -> bool:
        """Wait for the restart that ends first; False if there is none."""
        if self._restarts:
            await asyncio.wait(self._restarts.values(), return_when=asyncio.FIRST_COMPLETED)
        return bool(self._restarts)

    def check_restarts(self, name: str) -> None:
        """Count a restart and say it; EngineError beyond `run.restarts_max`."""
        self.n_restarts += 1
        if self.n_restarts > self.config.run.restarts_max:
            raise EngineError(
                f"{name} died and run.restarts_max = {self.config.run.restarts_max} is used up; "
                f"its last words are in {self._output(name)}. The log is whole: start the same "
                "command to resume"
            )
        self.say(f"{name} died; starting it again ({self._output(name)})")

    async def announce(self, engines: Mapping[str, Any]) -> None:
        """Tell the workers of engines that were started again."""
        calls = [
            self.call(worker, "replace_engine", RayEngine(name, engine, self.epoch))
            for name, engine in engines.items()
            for worker in self.workers
        ]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            # A worker that died meanwhile is replaced, and its successor knows all engines.
            if isinstance(answer, BaseException) and not isinstance(answer, WorkerDied):
                raise answer

    async def start_trainer(self) -> dict[str, Any]:
        import ray

        from molt.train.actor import TrainerActor

        world = self.config.train.world_size
        settings = trainer_settings(self.config, self.model_folder)
        meeting = rendezvous()
        for rank in range(world):
            output = self._output(f"trainer-{rank}")
            actor = ray.remote(TrainerActor).options(
                num_cpus=0, max_concurrency=1, runtime_env={"env_vars": ENVIRONMENT}
            )
            self.trainers.append(
                actor.remote(settings, rank, world, meeting, output, str(self.log_path))
            )
        self._known |= {t: (f"trainer-{k}", TrainerError) for k, t in enumerate(self.trainers)}
        infos = await asyncio.gather(*(self.call(t, "start") for t in self.trainers))
        info: dict[str, Any] = infos[0]
        self.trainer_device = info["device"]
        return info

    async def start_workers(self) -> None:
        if self.config.log.appender:
            routing = self.routing.metadata() if self.routing else None
            self.appender = await asyncio.to_thread(
                Appender, self.log_path, self.epoch, linger_s=0.0, routing=routing
            )
        await asyncio.gather(*(self.start_worker(i) for i in range(len(self.workers))))

    async def start_worker(self, i: int) -> None:
        """Start worker `i`, or put a new one in the place of a dead one."""
        while True:
            actor = self._new_worker(i)
            self.workers[i], self._known[actor] = actor, (f"worker-{i}", WorkerDied)
            try:
                await self.call(actor, "ready")
                return
            except WorkerDied:
                self.check_restarts(f"worker-{i}")

    def _new_worker(self, i: int) -> Any:
        import ray

        engines = [RayEngine(f"engine-{k}", e, self.epoch) for k, e in enumerate(self.engines)]
        actor = ray.remote(RolloutWorker).options(num_cpus=0, max_concurrency=REQUESTS_AT_ONCE)
        return actor.remote(
            str(self.log_path),
            self.epoch,
            self.config,
            self.model_folder,
            engines,
            self._output(f"worker-{i}"),
            self.routing,
            self.appender.address if self.appender else None,
        )

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
            if error.actor_init_failed:
                why = str(error).strip().splitlines()[-1]
                raise MoltError(f"{self._known[actor][0]} cannot be made: {why}") from None
            raise self._dead(actor, method) from error

    async def on_trainers(self, method: str, *args: Any) -> Any:
        """The same call on every rank; returns rank 0's answer."""
        return (await asyncio.gather(*(self.call(t, method, *args) for t in self.trainers)))[0]

    async def execute(self, plan: int) -> Any:
        """Execute the plan of a control record; a `StepResult`."""
        return await self.on_trainers("execute_plan", plan)

    def _dead(self, actor: Any, method: str) -> MoltError:
        """Also of an actor that another one has replaced since."""
        if actor not in self._known:
            return MoltError(f"an actor died during '{method}'")
        who, error = self._known[actor]
        return error(
            f"the {who} process died during '{method}'; its last words are in "
            f"{self._output(who)}. The log is whole: start the same command to resume"
        )

    def _output(self, name: str) -> str:
        return str(self.log_path / "logs" / f"{name}.log")

    async def close(self) -> None:
        """End workers (clean `end` commits), engines and Ray; never raises, never hangs."""
        import ray

        for task in (*self._watches.values(), *self._restarts.values()):
            task.cancel()
        if not ray.is_initialized():
            return
        for actors, method in ((self.workers, "close"), (self.engines, "shutdown")):
            for actor in filter(None, actors):
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(20):
                        await getattr(actor, method).remote()
        if self.appender is not None:
            with contextlib.suppress(Exception):
                await asyncio.to_thread(self.appender.close)
        ray.shutdown()
        await asyncio.to_thread(reap, find(self.pids))
