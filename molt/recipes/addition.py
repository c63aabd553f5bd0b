"""The demo's task: add two numbers and put the sum into `<answer>` tags.

Pairs are held out *unordered*: if 3 + 8 is held out, 8 + 3 is never trained either. Reward 1.0 for
the right sum, 0.2 for the form alone, 0 otherwise; a reply that was cut off gets 0.
"""

import random
import re
from collections.abc import Iterator
from typing import Any

from molt.agents.env import Env, Messages, Reply, Turn

LOW, HIGH = 1, 19
HELD_OUT_PAIRS = 60
"""Unordered pairs that are never trained, of 190."""

SYSTEM = "Add the numbers. Reply with <answer>...</answer>."
ANSWER = re.compile(r"<answer>\s*(-?\d+)\s*</answer>")


def split() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(train, held out): prompts {"x", "y"} in both orders of each unordered pair."""
    pairs = [(x, y) for x in range(LOW, HIGH + 1) for y in range(x, HIGH + 1)]
    random.Random(0).shuffle(pairs)

    def both_orders(some: list[tuple[int, int]]) -> list[dict[str, Any]]:
        ordered = sorted({(x, y) for x, y in some} | {(y, x) for x, y in some})
        return [{"x": x, "y": y} for x, y in ordered]

    return both_orders(pairs[HELD_OUT_PAIRS:]), both_orders(pairs[:HELD_OUT_PAIRS])


def train_prompts(seed: int) -> Iterator[dict[str, Any]]:
    """All training prompts in an order that `seed` decides."""
    prompts = split()[0]
    random.Random(seed).shuffle(prompts)
    yield from prompts


def heldout_prompts() -> Iterator[dict[str, Any]]:
    """All held-out prompts, always in the same order."""
    yield from split()[1]


class Addition(Env):
    """One turn: the question, one worked example before it, and the reply's reward."""

    def reset(self, prompt: dict[str, Any]) -> Messages:
        self.sum = prompt["x"] + prompt["y"]
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "2 + 3"},
            {"role": "assistant", "content": "<answer>5</answer>"},
            {"role": "user", "content": f"{prompt['x']} + {prompt['y']}"},
        ]

    def step(self, reply: Reply) -> Turn:
        return Turn(rewards={"reward": score(reply.text, self.sum, reply.finish_reason)})


def score(text: str, expected: int, finish_reason: str) -> float:
    """1.0 for `<answer>N</answer>` with the right N, 0.2 for the form, else 0.

    >>> score("<answer>12</answer>", 12, "stop"), score("<answer>7</answer>", 12, "stop")
    (1.0, 0.2)
    >>> score("<answer>12</answer>", 12, "length")
    0.0
    """
    if finish_reason != "stop":
        return 0.0
    exact = ANSWER.fullmatch(text.strip())
    if exact is None:
        return 0.0
    return 1.0 if int(exact[1]) == expected else 0.2
