"""Agents with clients of their own against the worker's server: unmodified SDKs, real vLLM."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import factories as make
import httpx
import openai
import pytest
from launch import CONFIG
from players import Local, assignment
from tiny import Rig, load, tiny_tied_llama

from molt.agents.chat import ChatAgent, Context, Result
from molt.config import load as load_config
from molt.planning import plan_group
from molt.relabel import relabel
from molt.replay.audit import audit
from molt.rollout.types import Assignment
from molt.rollout.worker import RolloutWorker
from molt.store import Log
from molt.store.branches import branches
from molt.store.fold import COLUMNS, STREAMS, Fold

pytestmark = pytest.mark.e2e
RELEASE = threading.Event()


class Plays(ChatAgent):
    """One of many programs, by the prompt's "kind"."""

    async def run(self, ctx: Context) -> Result:
        assert ctx.label == 7 and ctx.sampling.max_tokens == 24
        return await getattr(self, ctx.prompt["kind"])(ctx)

    async def plain(self, ctx: Context) -> Result:
        """httpx alone, two turns, a reward for each by number."""
        head = {"authorization": f"Bearer {ctx.api_key}"}
        messages = [{"role": "user", "content": "hi"}]
        async with httpx.AsyncClient(base_url=ctx.base_url, headers=head, timeout=60) as client:
            for k in range(2):
                body = {"model": ctx.model, "messages": messages, "temperature": 0.1}
                answer = await client.post("/chat/completions", json=body)
                answer.raise_for_status()
                said = answer.json()["choices"][0]["message"]
                messages += [said, {"role": "user", "content": f"and {k}"}]
        rewards = {0: {"turn": 0.25}, 1: {"turn": 0.5}}
        return Result(rewards={"end": 1.0}, turns=rewards, metrics={"mine": 3})

    async def blocks(self, ctx: Context) -> Result:
        """The synchronous OpenAI client inside `async def`: it blocks its own thread alone."""
        client = openai.OpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        ids = []
        for k in range(2):
            reply = client.chat.completions.create(model=ctx.model, messages=messages)
            ids.append(reply.id)
            said = reply.choices[0].message.model_dump(exclude_none=True)
            messages += [said, {"role": "user", "content": f"more {k}"}]
        return Result(rewards={"end": 0.0}, turns={ids[1]: {"turn": -1.0}})

    async def parallel(self, ctx: Context) -> Result:
        """Four calls of one conversation at once, then a turn after each of two."""
        client = openai.AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
        asked: list[Any] = [{"role": "user", "content": "hi"}]

        async def say(messages: list[Any]) -> Any:
            made = await client.chat.completions.create(model=ctx.model, messages=messages)
            return made.choices[0].message.model_dump(exclude_none=True)

        said = await asyncio.gather(*(say(asked) for _ in range(4)))
        after = {"role": "user", "content": "go on"}
        await asyncio.gather(*(say([*asked, s, after]) for s in said[:2]))
        return Result(status="pending")

    async def streams(self, ctx: Context) -> Result:
        """Anthropic's SDK, streaming, and a judge on the side."""
        client = anthropic.AsyncAnthropic(
            base_url=ctx.base_url.removesuffix("/v1"), api_key=ctx.api_key
        )
        text, messages = "", [{"role": "user", "content": "hi"}]
        async with client.messages.stream(
            model=ctx.model, max_tokens=24, messages=messages
        ) as stream:
            async for part in stream.text_stream:
                text += part
            final = await stream.get_final_message()
        assert "".join(b.text for b in final.content if b.type == "text") == text
        await client.messages.create(
            model=f"{ctx.model}:judge",
            max_tokens=8,
            messages=[{"role": "user", "content": "good?"}],
        )
        return Result(rewards={"end": float(len(text) > 0)})

    async def killed(self, ctx: Context) -> Result:
        """Dies in mid-turn."""
        client = openai.AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
        asked: list[Any] = [{"role": "user", "content": "hi"}]
        async for _ in await client.chat.completions.create(
            model=ctx.model, messages=asked, stream=True
        ):
            raise RuntimeError("out of memory")
        raise AssertionError("nothing was streamed")

    async def hangs(self, ctx: Context) -> Result:
        """Answers never; its deadline ends it, in whatever thread it sits."""
        openai.OpenAI(base_url=ctx.base_url, api_key=ctx.api_key).models.list()
        RELEASE.wait()
        return Result()

    async def full(self, ctx: Context) -> Result:
        """Goes on until the window is full, and does not know what to do then."""
        client = openai.AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        while True:
            made = await client.chat.completions.create(model=ctx.model, messages=messages)
            said = made.choices[0].message.model_dump(exclude_none=True)
            messages += [said, {"role": "user", "content": "more " * 20}]

    async def nonsense(self, ctx: Context) -> Any:
        return {"reward": 1.0}


KINDS = ("plain", "blocks", "parallel", "streams", "killed", "hangs", "full", "nonsense")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tiny_tied_llama(tmp_path_factory.mktemp("model"))
    rig = Rig(folder, max_model_len=512)
    rig.start()
    try:
        rig.run(rig.refit(load(folder), 0))
        yield rig
    finally:
        RELEASE.set()
        rig.close()


def test_agents_of_all_kinds_at_once(rig: Rig, log: Log, tmp_path: Path) -> None:
    folder = rig.engine._settings.model
    (tmp_path / "config.toml").write_text(CONFIG.format(model=folder, log=log.path))
    settings = ["sampling.max_tokens=24", "engine.max_model_len=512", "agent.deadline_s=20"]
    settings += [f"agent.env={__name__}:Plays", "reward.sum_turns=true"]
    config = load_config(tmp_path / "config.toml", settings)
    with log.writer() as w:
        w.append("prompts", make.prompt(0, n=len(KINDS)))
    work = [
        Assignment(
            group_id="train-0",
            rollout_id=assignment(i).rollout_id,
            attempt=0,
            purpose="train",
            prompt={"kind": kind, "label": 7},
        )
        for i, kind in enumerate(KINDS)
    ]

    async def play() -> None:
        worker = RolloutWorker(str(log.path), 1, config, folder, [Local(rig)])
        await worker.play(work)
        assert worker.sessions == {} and rig.engine.tokens_in_flight() == 0
        await worker.close()

    rig.run(play())
    query = "select rollout_id, status, reason, metrics from rollouts"
    found = {KINDS[int(r[0][-1])]: r[1:] for r in log.sql(query).fetchall()}
    for kind in ("plain", "blocks", "streams"):
        assert found[kind][0] in ("ok", "truncated") and found[kind][1] in (None, "length"), found
    assert found["parallel"][0] == "pending"
    assert found["killed"][0] == "failed" and "out of memory" in found["killed"][1]
    assert found["hangs"][:2] == ("truncated", "deadline: 20 s")
    assert found["full"][0] == "truncated" and "window of 512" in found["full"][1]
    assert found["nonsense"][0] == "failed" and "not a Result" in found["nonsense"][1]
    assert json.loads(found["plain"][2])["mine"] == 3
    check_log(log, config)


def check_log(log: Log, config: Any) -> None:
    """What the fold makes of it, before and after the late reward."""
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    fold.update()
    assert make.closed_groups(fold) == []  # one is pending
    late = f"train-0/{KINDS.index('parallel')}"
    relabel(log, late, 0, "end", 0.5, 0, "human")
    relabel(log, late, 0, "end", 0.75, 1, "human")
    fold.update()
    (group,) = make.closed_groups(fold)
    attempts = {k: fold.finished(group, f"train-0/{i}") for i, k in enumerate(KINDS)}
    assert all(a is not None and a.is_whole() for a in attempts.values())
    n_branches = {k: len(branches(a.segments)) for k, a in attempts.items() if a}
    assert n_branches["plain"] == n_branches["blocks"] == n_branches["streams"] == 1
    assert n_branches["full"] == 1 and n_branches["parallel"] == 4
    rewards = {k: {x: v[1] for x, v in a.rewards.items()} for k, a in attempts.items() if a}
    first, second = (
        s for s, i in attempts["plain"].segments.items() if i.finish_reason != "partial"
    )
    assert rewards["plain"] == {
        (first, None, "turn"): 0.25,
        (second, None, "turn"): 0.5,
        (None, None, "end"): 1.0,
    }
    assert sorted(rewards["blocks"].values()) == [-1.0, 0.0]
    assert rewards["parallel"] == {(None, None, "end"): 0.75}
    rows = {r.rollout_id: r for r in plan_group(fold, group, 1, config)}
    assert rows["train-0/0"].reward == 1.75 and rows[late].reward == 0.75
    assert {r.in_baseline for r in rows.values() if r.reward is None} == {False}
    judged = "select sum(list_sum(train)) from segments where role = 'judge'"
    assert log.sql(judged).fetchall() == [(0,)]
    found = audit(log).violations
    assert found == [], found
