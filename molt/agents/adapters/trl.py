"""Reward functions as TRL's GRPOTrainer takes them, for prompts that are rows of a data set.

    from trl.rewards import think_format_reward
    from molt.agents.adapters.trl import Rewards

    class Task(Rewards):
        functions = (think_format_reward, my_own)

A prompt is a row: "prompt" (a text or messages) and the columns that the functions take by name. A
function sees one rollout at a time, so one that compares the completions of a batch does not fit;
token ids are the engine's record and are not handed out.
"""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from molt.agents.env import Env, Messages, Reply, Turn


class Rewards(Env):
    """Subclass it and name the functions; each is a reward under its own name."""

    functions: ClassVar[tuple[Callable[..., Any], ...]] = ()

    def reset(self, prompt: dict[str, Any]) -> Messages:
        self.row = prompt
        asked = prompt["prompt"]
        return [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)

    async def step(self, reply: Reply) -> Turn:  # type: ignore[override]
        chat = [{"role": "assistant", "content": reply.text}]
        completion = reply.text if isinstance(self.row["prompt"], str) else chat
        columns = {k: [v] for k, v in self.row.items() if k != "prompt"}
        rewards: dict[str, float | None] = {}
        for function in self.functions:
            found = function(prompts=[self.row["prompt"]], completions=[completion], **columns)
            (value,) = await found if inspect.isawaitable(found) else found
            rewards[function.__name__] = None if value is None else float(value)
        return Turn(rewards=rewards)
