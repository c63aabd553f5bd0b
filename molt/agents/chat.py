"""The other kind of agent: any program that talks to a model over HTTP, with its own SDK.

`run` gets a base URL that speaks OpenAI and Anthropic and plays one rollout against it. What it
says and gets is recorded on the other side (invariant I1); it returns rewards and nothing else.
"""

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from molt.schemas.records import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What an agent needs to play one rollout."""

    base_url: str
    """Ends in "/v1"; for `openai.OpenAI(base_url=...)` and `anthropic.Anthropic(base_url=...)`."""
    api_key: str
    """Of this rollout alone."""
    model: str
    prompt: dict[str, Any]
    """The data's own dict."""
    label: Any
    """`prompt["label"]`, if there is one."""
    sampling: Sampling
    """In force whatever the agent asks for: it belongs to the run."""
    deadline_s: float
    """After this time the rollout ends, and with it every call."""
    rollout_id: str
    attempt: int
    purpose: str
    """"train" or "eval"."""


STATUSES = ("ok", "truncated", "failed", "aborted", "pending")
Rewards = Mapping[str, float | None]
"""Name -> value; None = cannot be scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a rollout went."""

    rewards: Rewards = field(default_factory=dict)
    """Of the whole rollout."""
    turns: Mapping[int | str, Rewards] = field(default_factory=dict)
    """Of single replies: by number (0 = the first one that was completed), or by the reply's id."""
    status: str = "ok"
    """"ok", "truncated", "failed", "aborted", or "pending": a reward comes later."""
    reason: str | None = None
    """Why it is not "ok"."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Whatever JSON should stand beside the outcome."""


class ChatAgent(abc.ABC):
    """Subclass this for an agent that brings its own client. One instance plays one rollout.

    Example::

        class Asks(ChatAgent):
            async def run(self, ctx: Context) -> Result:
                client = openai.AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
                asked = [{"role": "user", "content": ctx.prompt["question"]}]
                reply = await client.chat.completions.create(model=ctx.model, messages=asked)
                return Result(rewards={"right": float(reply.choices[0].message.content == "4")})
    """

    @abc.abstractmethod
    async def run(self, ctx: Context) -> Result:
        """Play one rollout. An exception fails this rollout and no other."""
