"""A real engine that returns its experts, and a real trainer beside it."""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
from moe import settings, started
from tiny import Rig

from molt.rollout.routing import RoutingShape
from molt.rollout.types import Completion
from molt.schemas.records import Sampling
from molt.train.trainer import Trainer

SHAPE = RoutingShape(layers=(0, 1, 2, 3), top_k=2, n_experts=8)
PROBES = [list(range(60 + i, 145 + i)) for i in range(6)]


@dataclass
class Pair:
    """One trainer, one engine; `publish` makes their weights equal."""

    rig: Rig
    trainer: Trainer
    version: int = -1

    def publish(self) -> tuple[dict[str, Any], dict[str, Any]]:
        self.rig.run(self.rig.engine.pause(1))
        found = self.rig.run(self.send())
        self.rig.run(self.rig.engine.resume(1))
        return found

    async def send(self) -> tuple[dict[str, Any], dict[str, Any]]:
        self.version += 1
        return await self.rig.publish(_Named(dict(self.trainer.export())), self.version)

    def gap(self) -> float:
        scores = self.rig.run(self.rig.engine.score(1, PROBES))
        own = self.trainer.score(PROBES)
        return max(float(np.abs(a - b).max()) for a, b in zip(scores, own, strict=True))

    def generate(self, prompts: list[list[int]], n: int, **more: Any) -> list[Completion]:
        async def all_of_them() -> list[Completion]:
            return await asyncio.gather(*(self.one(i, ids, n, **more) for i, ids in prompts))

        prompts = list(enumerate(prompts))
        return self.rig.run(all_of_them())

    async def one(self, i: int, ids: list[int], n: int, **more: Any) -> Completion:
        return await self.rig.engine.generate(1, f"r{i}", ids, Sampling(max_tokens=n), **more)


@dataclass
class _Named:
    tensors: dict[str, Any]

    def named_parameters(self) -> Any:
        return self.tensors.items()


def make_pair(folder: str, dtype: str = "float32") -> Pair:
    """Both started; nothing is published yet."""
    rig = make_rig(folder, dtype)
    return Pair(rig, started(settings(folder, dtype=dtype)))


def make_rig(folder: str, dtype: str = "float32") -> Rig:
    """16 MiB of KV cache: four thousand tokens in float32."""
    rig = Rig(folder, routing=True, dtype=dtype, max_model_len=448, kv_cache_gib=1 / 64)
    assert rig.start()["routing"] == SHAPE
    return rig
