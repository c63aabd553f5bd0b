"""The engines as a rollout worker sees them: which one serves a rollout, and what if it dies.

A rollout sticks to its group's engine, whose prefix cache holds the prompt; it moves when that one
is clearly busier than another, and when it is lost. A lost engine is never asked again: the driver
hands over a new handle, and whoever waits goes on with that.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from molt.rollout.types import Completion
from molt.schemas.errors import EngineError, MoltError
from molt.schemas.records import Sampling

SPILL = 8
"""Requests by which an engine must be ahead of the idlest one before a rollout leaves it."""


@dataclass(frozen=True, slots=True)
class RayEngine:
    """An engine actor; `pieces` as in `molt.rollout.engine.Engine`, for the epoch of the worker."""

    engine_id: str
    actor: Any
    epoch: int

    async def pieces(
        self,
        request_id: str,
        prompt_ids: np.ndarray,
        sampling: Sampling,
        every: int = 0,
        grammar: Any = None,
        routing_start: int = 0,
    ) -> AsyncGenerator[Completion, None]:
        """Raises what the engine raised; EngineError if its process is gone."""
        import ray

        stream = self.actor.pieces.options(num_returns="streaming").remote(
            self.epoch, request_id, prompt_ids, sampling, every, grammar, routing_start
        )
        ended = False
        try:
            async for ref in stream:
                piece: Completion = await ref
                ended = piece.finish_reason in ("stop", "length", "abort")
                yield piece
        except ray.exceptions.RayTaskError as error:
            ended = True
            if isinstance(error.cause, MoltError):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            ended = True
            raise EngineError(f"{self.engine_id} is gone during {request_id}: {error}") from error
        finally:
            if not ended:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.cancel(stream)


class EngineSource:
    """All engines of a run, by id."""

    def __init__(self, engines: Sequence[RayEngine], wait_s: float) -> None:
        """wait_s: how long `get` waits for the replacement of lost engines."""
        self.wait_s = wait_s
        self._engines = {e.engine_id: e for e in engines}
        self._lost: dict[str, str] = {}
        self._home: dict[str, str] = {}
        self._busy: Counter[str] = Counter()
        self._news = asyncio.Event()

    async def get(self, rollout_id: str) -> RayEngine:
        """The engine for a call of this rollout; EngineError when all are lost for `wait_s`."""
        try:
            async with asyncio.timeout(self.wait_s):
                while not (alive := sorted(self._engines.keys() - self._lost.keys())):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise EngineError(
                f"{rollout_id}: no engine for {self.wait_s:g} s; lost: {self._lost}. The log is "
                "whole: start the same command to resume"
            ) from None
        group_id = rollout_id.rpartition("/")[0]
        home = self._home.get(rollout_id)
        if home not in alive:
            home = alive[xxhash.xxh3_64_intdigest(group_id.encode()) % len(alive)]
        idlest = min(alive, key=lambda e: self._busy[e])
        if self._busy[home] > self._busy[idlest] + SPILL:
            home = idlest
        self._home[rollout_id] = home
        return self._engines[home]

    @contextlib.contextmanager
    def busy(self, engine: RayEngine) -> Any:
        """Counts a request while it runs."""
        self._busy[engine.engine_id] += 1
        try:
            yield
        finally:
            self._busy[engine.engine_id] -= 1

    def lost(self, engine: RayEngine, error: Exception) -> None:
        """Never ask this handle again; a newer one under the same id is not affected."""
        if self._engines.get(engine.engine_id) is engine:
            self._lost[engine.engine_id] = str(error)

    def replace(self, engine: RayEngine) -> None:
        """A new handle, under a new id or in place of the one with its id."""
        self._engines[engine.engine_id] = engine
        self._lost.pop(engine.engine_id, None)
        self._news.set()

    def forget(self, rollout_id: str) -> None:
        """The rollout has ended."""
        self._home.pop(rollout_id, None)
