"""Prompts by ordinal: a pure function of the data, the seed and the ordinal (invariant I5).

Nothing is stored about a position: ordinal k of a run is the same prompt after any restart.
"""

import json
from typing import Any

from molt.agents.env import resolve
from molt.config import DataConfig
from molt.schemas.errors import ConfigError


class Prompts:
    """Training prompts, pass after pass in a new order, and the held-out ones."""

    def __init__(self, config: DataConfig, seed: int) -> None:
        self.seed = seed
        self._train = resolve(config.train, "data.train")
        self._passes: dict[int, list[dict[str, Any]]] = {}
        self.heldout: list[dict[str, Any]] = []
        if config.eval:
            self.heldout = _checked(list(resolve(config.eval, "data.eval")()), "data.eval")
        self.size = len(self._pass(0))

    def train(self, ordinal: int) -> dict[str, Any]:
        """The prompt of a training ordinal; order `ordinal // size` of the data."""
        return self._pass(ordinal // self.size)[ordinal % self.size]

    def _pass(self, number: int) -> list[dict[str, Any]]:
        if number not in self._passes:
            found = _checked(list(self._train(self.seed * 1_000_003 + number)), "data.train")
            self._passes = {number: found}
        return self._passes[number]


def _checked(prompts: list[Any], what: str) -> list[dict[str, Any]]:
    if not prompts:
        raise ConfigError(f"{what} gave no prompts")
    for prompt in prompts:
        if not isinstance(prompt, dict):
            raise ConfigError(f"{what} must give dicts, got {type(prompt).__name__}")
        try:
            json.dumps(prompt)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{what}: a prompt is not JSON: {error}") from None
    return prompts
