"""Tasks of `reasoning-gym` (one turn, the library's own verifier) as an `Env`.

# my_module.py; data.train = "my_module:prompts", agent.env = "my_module:Task"
from molt.agents.adapters.reasoning_gym import ReasoningGym

class Task(ReasoningGym):
    datasets = {"basic_arithmetic": {"min_terms": 2}, "leg_counting": {}}

prompts = Task.prompts
"""

from collections.abc import Iterator
from typing import Any, ClassVar

from molt.agents.env import Env, Messages, Reply, Turn


class ReasoningGym(Env):
    """Subclass it and name the datasets with their configurations."""

    datasets: ClassVar[dict[str, dict[str, Any]]] = {}
    size: ClassVar[int] = 500
    """Prompts per dataset and pass."""
    system: ClassVar[str] = "default"
    """A key of the library's SYSTEM_PROMPTS."""

    @classmethod
    def prompts(cls, seed: int) -> Iterator[dict[str, Any]]:
        """Questions of all datasets in turn; another seed gives other questions."""
        for index in range(cls.size):
            for name in cls.datasets:
                yield {"dataset": name, "seed": seed, "index": index}

    def reset(self, prompt: dict[str, Any]) -> Messages:
        from reasoning_gym import create_dataset
        from reasoning_gym.utils import SYSTEM_PROMPTS

        name = prompt["dataset"]
        made = {**self.datasets[name], "seed": prompt["seed"], "size": self.size}
        self.dataset = create_dataset(name, **made)
        self.entry = self.dataset[prompt["index"]]
        return [
            {"role": "system", "content": SYSTEM_PROMPTS[self.system]},
            {"role": "user", "content": self.entry["question"]},
        ]

    def step(self, reply: Reply) -> Turn:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(reply.text)
        return Turn(rewards={"reward": float(self.dataset.score_answer(answer, self.entry))})
