"""Tasks for end-to-end runs: one that behaves, one whose prompts break in every way."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

from molt.agents.env import Env, Messages, Reply, Turn


def plain_prompts(seed: int) -> Iterator[dict[str, Any]]:
    for k in range(64):
        yield {"k": (k * 7 + seed) % 64, "kind": "plain"}


def broken_prompts(seed: int) -> Iterator[dict[str, Any]]:
    """Every second prompt breaks, each in its own way."""
    kinds = {1: "raise", 3: "nan", 5: "long", 7: "none", 9: "exit", 11: "hang"}
    for k in range(60):
        kind = kinds.get(k % 12, "plain")
        yield {"k": k, "kind": kind}


def heldout() -> Iterator[dict[str, Any]]:
    for k in range(4):
        yield {"k": 100 + k, "kind": "plain"}


class Letters(Env):
    """Reward: the share of letters in the reply; a random model gives varied groups."""

    def reset(self, prompt: dict[str, Any]) -> Messages:
        self.kind = prompt["kind"]
        if self.kind == "raise":
            raise RuntimeError("boom")
        if self.kind == "exit":
            sys.exit("no more")
        text = "word " * 60 if self.kind == "long" else f"say {prompt['k']}"
        return [{"role": "user", "content": text}]

    def step(self, reply: Reply) -> Turn:
        if self.kind == "nan":
            return Turn(rewards={"letters": float("nan")})
        if self.kind == "none":
            return None  # type: ignore[return-value]
        if self.kind == "hang":
            threading.Event().wait()
        share = sum(c.isalpha() for c in reply.text) / max(len(reply.text), 1)
        return Turn(rewards={"letters": share})
