"""What an agent asks and gets: one form for `Env`, the OpenAI wire and the Anthropic wire.

Both wires are translated into these records and back, so everything behind them (capture, engine,
log) exists once. Messages are in OpenAI's chat form: "role", "content", "tool_calls",
"tool_call_id", "reasoning_content". Free of vLLM, torch and HTTP.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool that the policy asked for."""

    id: str
    """Stable: the agent's result names it, and the echo is compared with it."""
    name: str
    arguments: str
    """JSON text as it was sampled; may be malformed (that is data, not an error)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One call of the model, as the agent meant it."""

    messages: Messages
    """The whole conversation so far, new messages last; never changed afterwards."""
    tools: tuple[dict[str, Any], ...] = ()
    """OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}."""
    tool_choice: str | dict[str, Any] = "auto"
    """"auto", "none", "required", or {"type": "function", "function": {"name": ...}}."""
    parallel_tool_calls: bool = True
    n: int = 1
    max_tokens: int | None = None
    """None = the run's; never more than the run's."""
    stop: tuple[str, ...] = ()
    """In addition to the run's."""
    response_format: dict[str, Any] | None = None
    """OpenAI's form; tokens sampled under a grammar are recorded and not trained."""
    template: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the chat template."""
    role: str = "agent"
    """"agent", "judge", "user_sim" or "frozen": only "agent" is trained."""
    key: str | None = None
    """Idempotency key of the wire, if it sent one."""
    retry: int = 0
    """The wire's own retry count: 0 = first try or a new call on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """What sampled tokens say: a view of the record, never a source of ids."""

    content: str | None
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]

    def message(self) -> dict[str, Any]:
        """The assistant message, in the form in which an agent echoes it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.name, "arguments": c.arguments},
                }
                for c in self.tool_calls
            ]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One sampled reply."""

    index: int
    reply: ParsedReply
    text: str
    """The sampled tokens as text, without special tokens."""
    finish_reason: str
    """"stop", "length", "tool_calls" or "abort"."""
    token_ids: np.ndarray
    """int32 [n]"""
    logprobs: np.ndarray
    """float32 [n]"""
    segment: int
    """The last segment of this reply in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """The answer to a `ChatRequest`; its tokens are in the log's writer already."""

    id: str
    """"chatcmpl-..." of the first delivery; a retry gets the same one."""
    choices: tuple[Choice, ...]
    n_prompt: int
    """Tokens of the prompt as the engine saw it, spliced ids included."""
    n_cached: int = 0
    """Of these, tokens whose KV the engine had."""
