"""Refits of several engines when some of them fail: who is left out, and who goes on.

The other ends are scripted; the transfer itself, with real engines, is in tests/e2e.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation import Simulation, config

from molt.config import LimitsConfig
from molt.publish import Probe, Publisher
from molt.schemas.errors import EngineError, ModelIdentityError

PROBE = Probe(sequences=[[1, 2, 3, 4]], n_context=[2])


class Trainer:
    """Rank 0: a group holds as many engines as it was opened for."""

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.version = 0
        self.closed = asyncio.Event()

    def open_sender(self, backend: str, n: int) -> tuple[str, int]:
        self.groups.append(n)
        self.closed = asyncio.Event()
        return "host", len(self.groups)

    def connect_sender(self) -> None: ...

    def close_sender(self) -> None:
        self.closed.set()

    def manifest(self) -> list[Any]:
        return []

    def send_weights(self) -> dict[str, Any]:
        return {"digest": f"{self.version:016x}", "bytes": 8, "seconds": 0.0}

    def logprobs(self, wanted: Any) -> list[np.ndarray]:
        """Of the two tokens behind the context; an engine scores the context too."""
        assert [(ids, list(at)) for ids, at, _ in wanted] == [([1, 2, 3, 4], [2, 3])]
        return [np.full(2, -1.0, np.float32)]


class Engine:
    """Fails for ever from the first call of `dies_in` on; `spoiled` times it receives other bytes.

    While another one is dead, `receive_weights` waits until the group is closed, as gloo does.
    """

    def __init__(
        self, trainer: Trainer, dies_in: str = "", spoiled: int = 0, gaps: Any = (0.0, 0.0)
    ) -> None:
        self.trainer, self.dies_in, self.spoiled = trainer, dies_in, spoiled
        self.scores = np.array([-9.0, *(gap - 1.0 for gap in gaps)], np.float32)
        self.dead = False
        self.peers: list[Engine] = []
        self.group = 0
        self.tokens_after: list[str] = []

    async def call(self, method: str, *args: Any) -> Any:
        if method == self.dies_in:
            self.dead = True
        if self.dead:
            raise EngineError("a vLLM process died")
        self.tokens_after.append(method)
        if method == "init_transfer":
            self.group = args[2]
        if method == "receive_weights":
            await asyncio.sleep(0)
            if any(peer.dead and peer.group == self.group for peer in self.peers):
                await self.trainer.closed.wait()
                raise EngineError("connection closed by peer")
            assert self.group == len(self.trainer.groups), "an old group"
            self.spoiled -= 1
            digest = "f" * 16 if self.spoiled >= 0 else f"{self.trainer.version:016x}"
            return {"digest": digest}
        if method == "recomputed":
            return 7, 0.25
        return {"pause": 5, "score": [self.scores]}.get(method)


def rig(*engines: dict[str, Any]) -> tuple[Publisher, list[Engine], list[str]]:
    trainer, lost = Trainer(), []
    made = [Engine(trainer, **options) for options in engines]
    for engine in made:
        engine.peers = [other for other in made if other is not engine]

    async def call(actor: Any, method: str, *args: Any) -> Any:
        if isinstance(actor, Engine):
            return await actor.call(method, *args)
        return getattr(actor, method)(*args)

    names = {f"engine-{i}": engine for i, engine in enumerate(made)}
    publisher = Publisher(
        [trainer], names, 1, "float32", LimitsConfig(), call, lambda name, _: lost.append(name)
    )
    publisher.probe = PROBE
    return publisher, made, lost


@pytest.mark.parametrize("where", ["pause", "init_transfer", "receive_weights", "score"])
def test_an_engine_that_fails_anywhere_is_left_out_and_the_others_are_refitted(where: str) -> None:
    publisher, (first, second, third), lost = rig({}, {"dies_in": where}, {})

    async def run() -> Any:
        async with asyncio.timeout(5):
            published = await publisher.refit(1)
            assert "resume" not in first.tokens_after, "paused until the policy is durable"
            await publisher.resume()
            return published

    published = asyncio.run(run())
    assert published.engines == ("engine-0", "engine-2") and lost == ["engine-1"]
    assert first.tokens_after[-1] == third.tokens_after[-1] == "resume"
    assert "resume" not in second.tokens_after
    assert publisher.trainers[0].groups[-1] == 2, "a group of those that live"


def test_an_engine_that_dies_at_the_resume_is_reported(where: str = "resume") -> None:
    publisher, _, lost = rig({}, {"dies_in": where})

    async def run() -> None:
        await publisher.refit(1)
        await publisher.resume()

    asyncio.run(run())
    assert lost == ["engine-1"] and list(publisher.engines) == ["engine-0"]


@pytest.mark.parametrize("where", ["pause", "score", "resume"])
def test_the_successor_of_the_only_engine_is_waited_for(tmp_path: Path, where: str) -> None:
    """Whether it died before the policy was recorded or after: there is one record of it."""
    run = Simulation(tmp_path / "log", config("run.steps=4")).run
    run.publisher, _, lost = rig({"dies_in": where})
    successor, announced = Engine(run.publisher.trainers[0]), []

    class Cluster:
        is_up = False

        def restarted(self) -> dict[str, Engine]:
            return {"engine-0": successor} if self.is_up else {}

        async def restart_done(self) -> bool:
            self.is_up = lost == ["engine-0"]
            return self.is_up

        async def announce(self, engines: Any) -> None:
            announced.append(engines)

    run.cluster = Cluster()  # type: ignore[assignment]
    asyncio.run(run.publish())
    assert [r.kind for r in run.log.records()].count("policy") == 1
    assert successor.tokens_after[-1] == "resume" and announced == [{"engine-0": successor}]
    assert list(run.publisher.engines.values()) == [successor]


def test_an_engine_that_is_dead_when_it_is_asked_what_it_recomputed_is_left_to_the_pause() -> None:
    publisher, _, lost = rig({}, {"dies_in": "recomputed"}, {})
    assert asyncio.run(publisher.recomputed()) == {"tokens": 14, "seconds": 0.25}
    assert lost == []


def test_one_that_was_started_again_joins_in_a_new_group() -> None:
    publisher, (_, second), _ = rig({}, {"dies_in": "pause"})

    async def run() -> Any:
        await publisher.refit(1)
        second.dead, second.dies_in = False, ""
        publisher.engines["engine-1"] = second
        return await publisher.refit(2)

    assert asyncio.run(run()).engines == ("engine-0", "engine-1")
    assert publisher.trainers[0].groups == [1, 2]


@pytest.mark.parametrize("gaps", [(0.0, 1.5e-3), (np.nan, 0.0)])
@pytest.mark.parametrize("bad", [0, 1])
def test_every_engine_must_agree_with_the_trainer(bad: int, gaps: Any) -> None:
    """The other engine has the larger mean gap, but no gap over the limit of 1e-3."""
    options: list[dict[str, Any]] = [{"gaps": (9e-4, 9e-4)}, {"gaps": (9e-4, 9e-4)}]
    publisher, _, _ = rig(*options)
    found = asyncio.run(publisher.refit(1))
    assert found.probe.max_gap == pytest.approx(9e-4, rel=1e-3)
    options[bad] = {"gaps": gaps}
    publisher, engines, _ = rig(*options)
    with pytest.raises(ModelIdentityError, match="engine and trainer disagree"):
        asyncio.run(publisher.refit(1))
    assert all("resume" not in e.tokens_after for e in engines)


def test_without_any_engine_left_the_refit_says_so() -> None:
    publisher, _, lost = rig({"dies_in": "pause"})
    with pytest.raises(EngineError, match="no engine is left: a vLLM process died"):
        asyncio.run(publisher.refit(1))
    assert lost == ["engine-0"]


@pytest.mark.parametrize(("spoiled", "published"), [(2, True), (3, False)])
def test_other_bytes_are_sent_again_twice(spoiled: int, published: bool) -> None:
    publisher, engines, lost = rig({}, {"spoiled": spoiled})
    if published:
        assert asyncio.run(publisher.refit(1)).engines == ("engine-0", "engine-1")
    else:
        with pytest.raises(ModelIdentityError, match="in 3 attempts.*stays paused"):
            asyncio.run(publisher.refit(1))
        assert all("resume" not in e.tokens_after for e in engines)
    assert lost == []
