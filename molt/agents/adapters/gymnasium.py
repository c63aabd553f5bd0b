"""A Gymnasium environment played in text: observations are messages, replies are actions.

from molt.agents.adapters.gymnasium import Gymnasium

class Lake(Gymnasium):
    id, options = "FrozenLake-v1", {"is_slippery": False}
    rules = "Reach the goal. Reply with 0 (left), 1 (down), 2 (right) or 3 (up)."
"""

import re
from typing import Any, ClassVar

from molt.agents.env import Env, Messages, Reply, Turn


class Gymnasium(Env):
    """Subclass it; override `say` and `act` where the defaults do not fit the spaces."""

    id: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    """For `gymnasium.make`."""
    rules: ClassVar[str] = ""
    """The system message."""
    invalid_reward: ClassVar[float] = 0.0
    """Of a reply that is no action; the environment does not move then."""
    turns_max: ClassVar[int] = 32

    def reset(self, prompt: dict[str, Any]) -> Messages:
        """`prompt["seed"]` decides the episode."""
        import gymnasium

        self.game = gymnasium.make(self.id, **self.options)
        observation, _ = self.game.reset(seed=prompt.get("seed"))
        self.turns = 0
        system = [{"role": "system", "content": self.rules}] if self.rules else []
        return [*system, {"role": "user", "content": self.say(observation)}]

    def step(self, reply: Reply) -> Turn:
        self.turns += 1
        action = self.act(reply.text)
        if action is None or not self.game.action_space.contains(action):
            reward, text, done = self.invalid_reward, f"No action: {self.game.action_space}", False
        else:
            observation, given, terminated, truncated, _ = self.game.step(action)
            reward, text, done = float(given), self.say(observation), terminated or truncated
        done = bool(done) or self.turns >= self.turns_max
        if done:
            self.game.close()
        after = [] if done else [{"role": "user", "content": text}]
        return Turn(rewards={"reward": reward}, done=done, messages=after)

    def say(self, observation: Any) -> str:
        """An observation as text."""
        return str(observation)

    def act(self, text: str) -> Any:
        """A reply as an action, or None: the last number for Discrete, else the text itself."""
        if hasattr(self.game.action_space, "n"):
            numbers = re.findall(r"-?\d+", text)
            return int(numbers[-1]) if numbers else None
        return text.strip()
