"""Prompts by ordinal: a pure function of the data, the seed and the ordinal (invariant I5).

Nothing is stored about a position: ordinal k of a run is the same prompt after any restart.
"""

import json
from collections.abc import Callable
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
            self.heldout = _prompts("data.eval", resolve(config.eval, "data.eval"))
        self.size = len(self._pass(0))

    def train(self, ordinal: int) -> dict[str, Any]:
        """The prompt of a training ordinal; order `ordinal // size` of the data."""
        return self._pass(ordinal // self.size)[ordinal % self.size]

    def _pass(self, number: int) -> list[dict[str, Any]]:
        if number not in self._passes:
            found = _prompts("data.train", self._train, self.seed * 1_000_003 + number)
            self._passes = {number: found}
        return self._passes[number]


def _prompts(what: str, function: Callable[..., Any], *args: int) -> list[dict[str, Any]]:
    """What a user's function yields; ConfigError for one that raises or yields no JSON dicts."""
    try:
        prompts = list(function(*args))
    except Exception as error:
        call = f"{function.__name__}({', '.join(['seed'] * len(args))})"
        raise ConfigError(f"{what}: {call} raised {type(error).__name__}: {error}") from error
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
