"""Agents on a real engine without Ray, and the comparison of what they got with what is logged."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tiny import Rig, reference_logprobs

from molt.agents.env import Env, Messages, Reply, Turn
from molt.agents.types import ChatReply, ChatRequest
from molt.rollout.session import Session
from molt.rollout.types import Assignment, Completion
from molt.store import Log


@dataclass
class Local:
    """A rig's engine, as a worker sees it."""

    rig: Rig
    engine_id: str = "engine-0"

    async def pieces(self, *args: Any) -> AsyncGenerator[Completion, None]:
        async for piece in self.rig.engine.pieces(self.rig.epoch, *args):
            yield piece


class Talks(Env):
    """Three turns, rewards in each; the last one is of the whole rollout."""

    resumable = True

    def reset(self, prompt: dict[str, Any]) -> Messages:
        self.turn, self.kind = 0, prompt.get("kind", "")
        return [{"role": "system", "content": "talk"}, {"role": "user", "content": "begin"}]

    def step(self, reply: Reply) -> Turn:
        self.turn += 1
        if self.turn == 3 and self.kind != "endless":
            return Turn(rewards={"end": 1.0})
        more = "long " * 100 if self.kind == "long" else f"turn {self.turn}"
        rewards = {"step": len(reply.text) / 100}
        return Turn(rewards=rewards, done=False, messages=[{"role": "user", "content": more}])


def assignment(i: int = 0, attempt: int = 0) -> Assignment:
    return Assignment(
        group_id="train-0", rollout_id=f"train-0/{i}", attempt=attempt, purpose="train", prompt={}
    )


def ask(*texts: str, **more: Any) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": t} for t in texts], **more)


def segments(log: Log, session: Session) -> list[dict[str, Any]]:
    """Rows of one attempt, by number."""
    session.desk.writer.flush()
    who = f"rollout_id = '{session.a.rollout_id}' and attempt = {session.a.attempt}"
    query = f"select * from segments where {who} order by segment"
    return log.sql(query).to_arrow_table().to_pylist()


def chain(rows: list[dict[str, Any]], tip: int) -> dict[str, list[Any]]:
    """ids, logprobs, sampled and version of every token of a branch."""
    row = rows[tip]
    names = ("token_ids", "sampled", "logprobs")
    before = chain(rows, row["parent"]) if row["parent"] is not None else None
    out = {n: (before[n][: row["keep"]] if before else []) + list(row[n]) for n in names}
    mine = iter([r["version"] for r in row["version_runs"] for _ in range(r["n"])])
    own = [next(mine) if s else None for s in row["sampled"]]
    out["version"] = (before["version"][: row["keep"]] if before else []) + own
    return out


def check_reply(rows: list[dict[str, Any]], reply: ChatReply, models: dict[int, Any]) -> None:
    """The agent's tokens are the log's, and their logprobs those of the weights they name."""
    for choice in reply.choices:
        found = chain(rows, choice.segment)
        n, ids = len(choice.token_ids), found["token_ids"]
        assert ids[reply.n_prompt :] == choice.token_ids.tolist()
        assert found["sampled"][-n:] == [1] * n
        assert found["logprobs"][-n:] == choice.logprobs.tolist()
        for version, model in models.items():
            at = [i for i in range(len(ids) - n, len(ids)) if found["version"][i] == version]
            reference = reference_logprobs(model, ids)
            np.testing.assert_allclose(
                [found["logprobs"][i] for i in at], [reference[i - 1] for i in at], atol=2e-4
            )


def same(a: ChatReply, b: ChatReply) -> bool:
    return a.id == b.id and a.choices[0].token_ids.tobytes() == b.choices[0].token_ids.tobytes()


async def in_flight(rig: Rig, n: int) -> None:
    while rig.engine.tokens_in_flight() < n:
        await asyncio.sleep(0)
