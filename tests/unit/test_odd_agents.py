"""Agents that answer nonsense, through a whole worker: each fails its rollout, none the run."""

import asyncio
import datetime
from pathlib import Path
from typing import Any

import engines
import pytest

from molt.agents.chat import ChatAgent, Context, Result
from molt.agents.env import Env, Messages, Reply, Turn
from molt.config import load
from molt.rollout.types import Assignment
from molt.rollout.worker import RolloutWorker
from molt.store import Log

DEMO = Path(__file__).parents[2] / "molt" / "recipes" / "demo.toml"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def nested(depth: int = 5000) -> list[Any]:
    out: list[Any] = []
    for _ in range(depth):
        out = [out]
    return out


THINGS: list[Any] = [
    *(None, 7, 10**400, float("nan"), float("inf"), "text", b"bytes", {1, 2}, object(), int),
    *("\ud800", nested(), {1: 2}, {None: 1}, (1, 2), datetime.datetime(2026, 1, 1), Unprintable()),
    *([{"role": "user"}], [{"content": "x"}], [{"role": 7, "content": "x"}]),
    *([{"role": "user", "content": 10**30}], [{"role": "user", "content": "x", "n": 2**70}]),
    *([{"role": "user", "content": "x", "tool_calls": [{"function": {"name": {}}, "id": []}]}],),
]
RESULTS: list[Any] = [
    *({"rewards": {"r": thing}} for thing in THINGS),
    *({"rewards": thing} for thing in THINGS),
    *({"turns": thing} for thing in THINGS),
    *({"turns": {0: thing}} for thing in THINGS),
    *({"status": thing} for thing in THINGS),
    *({"reason": thing} for thing in THINGS),
    *({"status": "failed", "reason": thing} for thing in THINGS),
    *({"metrics": thing} for thing in THINGS),
    *({"metrics": {"m": thing}} for thing in THINGS),
]


class OddChat(ChatAgent):
    async def run(self, ctx: Context) -> Result:
        k = ctx.prompt["k"]
        return Result(**RESULTS[k]) if k < len(RESULTS) else THINGS[k - len(RESULTS)]


class OddEnv(Env):
    def reset(self, prompt: dict[str, Any]) -> Messages:
        self.where, self.thing = prompt["where"], THINGS[prompt["k"]]
        if self.where == "raise":
            raise Unprintable
        return self.thing if self.where == "reset" else [{"role": "user", "content": "hi"}]

    def step(self, reply: Reply) -> Turn:
        if self.where == "reward":
            return Turn(rewards={"r": self.thing})
        if self.where == "messages":
            return Turn(done=False, messages=self.thing)
        return self.thing if self.where == "step" else Turn(**{self.where: self.thing})


WHERE = ("raise", "reset", "reward", "rewards", "messages", "step", "done", "pending")


@pytest.mark.parametrize("agent", ["OddChat", "OddEnv"])
def test_every_nonsense_is_a_row(log: Log, tmp_path: Path, agent: str) -> None:
    engines.TOKENIZER.save_pretrained(tmp_path)
    changes = [f"agent.env={__name__}:{agent}", "agent.max_turns=2", "log.linger_s=0.01"]
    prompts: list[dict[str, Any]] = [{"k": k} for k in range(len(RESULTS) + len(THINGS))]
    if agent == "OddEnv":
        prompts = [{"k": k, "where": w} for w in WHERE for k in range(len(THINGS))]

    async def play() -> None:
        says = engines.Says(*["so"] * 2 * len(prompts))
        worker = RolloutWorker(str(log.path), 1, load(DEMO, changes), str(tmp_path), [says])
        groups = [f"train-{i}" for i in range(len(prompts))]
        await worker.play(
            [
                Assignment(
                    group_id=g, rollout_id=f"{g}/0", attempt=0, purpose="train", prompt=prompts[i]
                )
                for i, g in enumerate(groups)
            ]
        )
        await worker.close()

    asyncio.run(play())
    found = log.sql("select status, reason from rollouts").fetchall()
    assert len(found) == len(prompts)
    assert {status for status, _ in found} <= {"ok", "truncated", "failed", "aborted", "pending"}
    failed = [reason for status, reason in found if status == "failed"]
    assert all(failed) and len(failed) > len(prompts) / 2
