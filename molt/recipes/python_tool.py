"""Math questions with a Python tool: an agent of several turns, written with the `openai` SDK.

The model may call the tool `python`, if its chat template knows tools, or write a ```python block,
which every model can; either way the code runs in the sandbox and the model sees what it printed.
Reward 1.0 for the right number in `<answer>` tags, 0.2 for the form, else 0.
"""

import random
import re
from collections.abc import Iterator
from math import comb
from typing import Any

import openai

from molt.agents.chat import ChatAgent, Context, Result
from molt.agents.parse import tool_outcome
from molt.agents.sandbox import Limits, run_python
from molt.recipes.addition import score

SYSTEM = (
    "Solve the problem. To compute something, write a ```python block that prints it, and you "
    "will be told the output. When you know the result, reply with <answer>N</answer> alone."
)
EXAMPLE = [
    {"role": "user", "content": "What is 12 * 13 + 5?"},
    {"role": "assistant", "content": "```python\nprint(12 * 13 + 5)\n```"},
    {"role": "user", "content": "Output:\n161"},
    {"role": "assistant", "content": "<answer>161</answer>"},
]
PYTHON: Any = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs Python and returns what it printed.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        },
    },
}
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
LIMITS = Limits(seconds=5.0, output_bytes=2000)
PER_PASS = 2000
HELD_OUT = 32
"""Questions that are never trained."""


def question(seed: int) -> dict[str, Any]:
    """A question and its answer; the same for the same seed."""
    rng = random.Random(seed)
    a, b, c = (rng.randint(11, 99) for _ in range(3))
    n, k = rng.randint(8, 16), rng.randint(2, 5)
    text, answer = rng.choice(
        [
            (f"What is {a} * {b} + {c}?", a * b + c),
            (f"What is {a} * {b} - {c} * {k}?", a * b - c * k),
            (f"What is the remainder of {a} ** {k} divided by {c}?", a**k % c),
            (f"What is the sum of the digits of {a} ** {n}?", sum(map(int, str(a**n)))),
            (f"In how many ways can {k} of {n} people be chosen?", comb(n, k)),
            (f"What is the sum of the squares from 1 to {a}?", a * (a + 1) * (2 * a + 1) // 6),
        ]
    )
    return {"question": text, "label": answer}


def train_prompts(seed: int) -> Iterator[dict[str, Any]]:
    """PER_PASS questions, others in every pass, none of which `heldout_prompts` asks."""
    held_out = {prompt["question"] for prompt in heldout_prompts()}
    for k in range(PER_PASS):
        prompt = question(HELD_OUT + seed * PER_PASS + k)
        if prompt["question"] not in held_out:
            yield prompt


def heldout_prompts() -> Iterator[dict[str, Any]]:
    """Always the same ones."""
    yield from (question(k) for k in range(HELD_OUT))


class PythonTool(ChatAgent):
    """Asks, runs the code that comes back, and asks again, up to `turns_max` times."""

    turns_max = 4

    async def run(self, ctx: Context) -> Result:
        asked = {"role": "user", "content": ctx.prompt["question"]}
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, *EXAMPLE, asked]
        runs = {"ok": 0, "failed": 0}
        async with openai.AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:
            for _ in range(self.turns_max):
                reply = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=[PYTHON]
                )
                choice = reply.choices[0]
                messages.append(choice.message.model_dump(exclude_none=True))
                results = await use_tools(choice.message, runs)
                if not results or choice.finish_reason == "length":
                    break
                messages += results
        value = score(choice.message.content or "", ctx.label, choice.finish_reason)
        return Result(rewards={"reward": value}, metrics={"runs": runs})


async def use_tools(message: Any, runs: dict[str, int]) -> list[dict[str, Any]]:
    """What the model is told next: a result per call, or the output of its last code block."""
    out = []
    for call in message.tool_calls or ():
        given = tool_outcome(call.function.arguments)
        code = given.get("code", "") if isinstance(given, dict) else f"raise SystemExit({given!r})"
        text = await run(str(code), runs)
        out.append({"role": "tool", "tool_call_id": call.id, "content": text})
    blocks = BLOCK.findall(message.content or "")
    if blocks and not out:
        out.append({"role": "user", "content": f"Output:\n{await run(blocks[-1], runs)}"})
    return out


async def run(code: str, runs: dict[str, int]) -> str:
    """What the code printed, and why it ended if it did not end well."""
    ran = await run_python(code, LIMITS)
    runs["ok" if ran.ended == "ok" else "failed"] += 1
    end = {"ok": "", "error": ""}.get(ran.ended, f"\n[ended: {ran.ended}]")
    return (ran.output.strip() or "(no output)") + end
