"""Users' code is kept at arm's length: what hangs, raises or answers nonsense fails alone."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from molt.agents.env import Env, Messages, Reply, Turn
from molt.agents.guard import (
    RolloutFailed,
    checked_messages,
    checked_turn,
    in_thread,
)
from molt.config import load
from molt.rollout.worker import encode_prompt
from molt.schemas.errors import ConfigError

DEMO = Path(__file__).parents[2] / "molt" / "recipes" / "demo.toml"
RELEASE = threading.Event()


class Hangs(Env):
    """Opens no prompt until the test lets it."""

    def reset(self, prompt: dict[str, Any]) -> Messages:
        RELEASE.wait()
        return [{"role": "user", "content": "late"}]

    def step(self, reply: Reply) -> Turn:
        return Turn()


@pytest.fixture(autouse=True)
def let_go() -> Any:
    """No thread of a test outlives it."""
    RELEASE.clear()
    yield
    RELEASE.set()


def test_hung_calls_do_not_starve_the_others() -> None:
    """More of them than any default thread pool holds."""

    async def run() -> int:
        hung = [asyncio.create_task(in_thread(RELEASE.wait)) for _ in range(64)]
        async with asyncio.timeout(20):
            answer: int = await in_thread(lambda: 7)
        assert not any(task.done() for task in hung)
        RELEASE.set()
        await asyncio.gather(*hung)
        return answer

    assert asyncio.run(run()) == 7


def test_a_reset_that_hangs_meets_its_deadline_before_the_run_begins() -> None:
    config = load(DEMO, [f"agent.env={__name__}:Hangs", "agent.deadline_s=0.2"])
    with pytest.raises(ConfigError, match=r"did not open prompt .* in 0\.2 s"):
        asyncio.run(encode_prompt(config, None, {"x": 1}))


@pytest.mark.parametrize("messages", [None, "hi", [], ["hi"], [{"content": object()}]])
def test_messages_that_cannot_be_recorded(messages: Any) -> None:
    with pytest.raises(RolloutFailed, match="agent"):
        checked_messages(messages)


@pytest.mark.parametrize("turn", [None, 1.0, Turn(rewards=[1.0]), Turn(rewards={1: 1.0})])  # type: ignore[arg-type, dict-item]
def test_turns_that_are_none(turn: Any) -> None:
    with pytest.raises(RolloutFailed, match="agent"):
        checked_turn(turn)
