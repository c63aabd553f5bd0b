"""Adapters on the real libraries, where they are installed; TRL's form needs none."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from doubles import ScriptedSession, says

from molt.agents.adapters.gymnasium import Gymnasium
from molt.agents.adapters.reasoning_gym import ReasoningGym
from molt.agents.adapters.trl import Rewards
from molt.agents.adapters.verifiers import Verifiers
from molt.agents.chat import Context, Result
from molt.agents.env import Reply
from molt.agents.server import serve


def reply(text: str) -> Reply:
    return Reply(text=text, finish_reason="stop", n_tokens=len(text))


class Legs(ReasoningGym):
    datasets = {"leg_counting": {"max_animals": 3}, "basic_arithmetic": {}}
    size = 4


def test_reasoning_gym_asks_and_verifies() -> None:
    pytest.importorskip("reasoning_gym")
    prompts = list(Legs.prompts(7))
    assert len(prompts) == 8 and len({str(p) for p in prompts}) == 8
    for prompt in prompts:
        env, again = Legs(), Legs()
        messages = env.reset(prompt)
        assert messages == again.reset(prompt), "a prompt is the same question every time"
        assert [m["role"] for m in messages] == ["system", "user"] and messages[1]["content"]
        right = env.entry["answer"]
        assert env.step(reply(f"I think <answer>{right}</answer>")).rewards == {"reward": 1.0}
        assert env.step(reply("<answer>no idea</answer>")).rewards["reward"] < 0.1
        assert env.step(reply(f"{right}")).rewards["reward"] < 0.1, "the form counts too"
    assert list(Legs.prompts(8)) != prompts


class Lake(Gymnasium):
    id, options = "FrozenLake-v1", {"is_slippery": False}
    rules = "Reply with 0 (left), 1 (down), 2 (right) or 3 (up)."
    invalid_reward = -0.5
    turns_max = 8


def test_a_gymnasium_game_from_start_to_goal() -> None:
    pytest.importorskip("gymnasium")
    env = Lake()
    messages = env.reset({"seed": 3})
    assert [m["role"] for m in messages] == ["system", "user"] and messages[1]["content"] == "0"
    lost = env.step(reply("which way?"))
    assert lost.rewards == {"reward": -0.5} and not lost.done
    assert "Discrete(4)" in lost.messages[0]["content"]
    assert env.step(reply("7")).rewards == {"reward": -0.5}
    turns = [env.step(reply(f"I go {a}")) for a in (1, 1, 2, 2, 1, 2)]
    assert [t.messages[0]["content"] for t in turns[:-1]] == ["4", "8", "9", "10", "14"]
    assert turns[-1].done and turns[-1].rewards == {"reward": 1.0} and not turns[-1].messages


def test_a_gymnasium_game_has_a_last_turn() -> None:
    pytest.importorskip("gymnasium")
    env = Lake()
    env.reset({"seed": 3})
    turns = [env.step(reply("0")) for _ in range(8)]
    assert [t.done for t in turns] == [False] * 7 + [True]


def exact(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float | None]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [None if s == "?" else float(t == s) for t, s in zip(texts, solution, strict=True)]


async def polite(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    assert len(prompts) == len(completions) == 1
    return [0.5]


class Task(Rewards):
    functions = (exact, polite)


@pytest.mark.parametrize("asked", ["2 + 2", [{"role": "user", "content": "2 + 2"}]])
def test_trl_functions_are_called_as_trl_calls_them(asked: Any) -> None:
    env = Task()
    assert env.reset({"prompt": asked, "solution": "4"}) == [{"role": "user", "content": "2 + 2"}]
    assert asyncio.run(env.step(reply("4"))).rewards == {"exact": 1.0, "polite": 0.5}
    assert asyncio.run(env.step(reply("5"))).rewards == {"exact": 0.0, "polite": 0.5}
    env.reset({"prompt": asked, "solution": "?"})
    assert asyncio.run(env.step(reply("4"))).rewards == {"exact": None, "polite": 0.5}


def test_trls_own_functions() -> None:
    rewards = pytest.importorskip("trl.rewards")

    class Format(Rewards):
        functions = (rewards.think_format_reward,)

    env = Format()
    env.reset({"prompt": [{"role": "user", "content": "hi"}]})
    for text, value in (("<think>a</think>b", 1.0), ("b", 0.0)):
        turn = asyncio.run(env.step(reply(text)))
        assert turn.rewards == {"think_format_reward": value}


ADDING = """
import verifiers.v1 as vf


class AddData(vf.TaskData):
    total: int


class AddTask(vf.Task[AddData, vf.State]):
    @vf.reward(weight=2.0)
    async def right(self, task: AddData, trace: vf.Trace) -> float:
        return float(str(task.total) in trace.last_reply)


class Adding(vf.Taskset[AddTask]):
    def load(self):
        for x in range(3):
            yield AddTask(AddData(prompt=f"{x} + 1 = ?", total=x + 1))


__all__ = ["Adding"]
"""


class Adds(Verifiers):
    config = {"taskset": {"id": "adding-for-molt"}}


def test_a_verifiers_environment_plays_through_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own harness, a process of its own, asks our server; its weighted rewards come back."""
    pytest.importorskip("verifiers.v1")
    if shutil.which("uv") is None:
        pytest.skip("verifiers' harnesses need uv")
    (tmp_path / "adding_for_molt.py").write_text(ADDING)
    monkeypatch.syspath_prepend(str(tmp_path))
    prompts = list(Adds.prompts(0))
    assert sorted(p["task"] for p in prompts) == [0, 1, 2]

    async def play(session: ScriptedSession, task: int) -> Result:
        running = await serve({session.token: session})
        context = Context(
            base_url=running.base_url,
            api_key=session.token,
            model="policy",
            prompt={"task": task},
            label=None,
            sampling=session.sampling,
            deadline_s=60.0,
            rollout_id="train-0/0",
            attempt=0,
            purpose="train",
        )
        try:
            return await Adds().run(context)
        finally:
            await running.close()

    session = ScriptedSession(says("it is 2"))
    assert asyncio.run(play(session, 1)) == Result(rewards={"right": 2.0})
    (request,) = session.requests
    assert request.messages[-1] == {"role": "user", "content": "1 + 1 = ?"}
    wrong = asyncio.run(play(ScriptedSession(says("no idea")), 2))
    assert wrong == Result(rewards={"right": 0.0})
    broken = asyncio.run(play(ScriptedSession(ValueError("bug")), 0))
    assert broken.status == "failed" and (broken.reason or "").startswith("verifiers: ")
