"""POST /v1/messages and /v1/messages/count_tokens: into `ChatRequest` and back.

On the data path between the agent's SDK and `Session.chat`, beside `wire_openai`. Messages become
OpenAI's form, so that one rollout may even use both wires. What this wire adds to a reply can be
taken out of its echo again: arguments that are no JSON object travel as {"molt_malformed": text}.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from molt.agents import fields, wire_openai
from molt.agents.fields import FieldRefused, say_once, want
from molt.agents.heard import Heard
from molt.agents.types import ChatReply, ChatRequest, Choice, Messages
from molt.agents.wire_openai import Call, Decode, text_of

MALFORMED = "molt_malformed"
SIGNATURE = "molt"
"""Of thinking blocks; the wire wants one."""


def parse(
    body: dict[str, Any],
    headers: Mapping[str, str],
    heard: Heard | None = None,
    *,
    counting: bool = False,
) -> Call:
    """As `wire_openai.parse`."""
    fields.check_fields("anthropic", fields.ANTHROPIC, body)
    tools = tuple(map(_tool, want(body, "tools", list, [])))
    max_tokens = fields.count(body, "max_tokens", None, wire_openai.TOKENS_MAX)
    if max_tokens is None and not counting:
        raise FieldRefused("max_tokens", "'max_tokens' is missing; this wire requires it")
    choice, parallel = _tool_choice(want(body, "tool_choice", dict, {}), tools)
    output = want(body, "output_config", dict, {})
    request = ChatRequest(
        messages=_messages(body, heard or Heard()),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        max_tokens=max_tokens,
        stop=fields.strings("stop_sequences", want(body, "stop_sequences", list, [])),
        response_format=_format(output.get("format")),
        template=_template(want(body, "thinking", dict, {}), output),
        role=fields.role_of(headers, body),
        key=headers.get("idempotency-key"),
        retry=fields.retry_of(headers),
    )
    return Call(
        request=request,
        model=want(body, "model", str, ""),
        stream=want(body, "stream", bool, False),
    )


def _messages(body: dict[str, Any], heard: Heard) -> Messages:
    found = want(body, "messages", list, [])
    if not found:
        raise FieldRefused("messages", "'messages' is empty; a conversation has at least one")
    system = text_of("system", body.get("system"), "system")
    opening = [{"role": "system", "content": system}] if system else []
    out = heard.read(found, _message, opening)
    if out[-1]["role"] == "assistant":
        raise FieldRefused("messages", "a last message of the assistant (prefill) is not supported")
    return out


def _message(where: str, message: Any, before: Messages) -> Messages:
    role = message.get("role") if isinstance(message, dict) else message
    if role not in ("user", "assistant", "system"):
        raise FieldRefused(where, f"{where} has role {role!r:.60}, expected user or assistant")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(b, dict) for b in blocks):
        raise FieldRefused(where, f"{where} has no content blocks: {content!r:.60}")
    return _assistant(where, blocks) if role == "assistant" else _user(where, role, blocks, before)


def _assistant(where: str, blocks: Messages) -> Messages:
    """One message: text, reasoning and calls apart."""
    thinking = [want(b, "thinking", str, "") for b in blocks if b.get("type") == "thinking"]
    calls = [_echoed_call(where, b) for b in blocks if b.get("type") == "tool_use"]
    apart = ("thinking", "redacted_thinking", "tool_use")
    texts = [b for b in blocks if b.get("type") not in apart]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text_of(where, texts, "assistant") if texts else None,
    }
    if thinking:
        message["reasoning_content"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _echoed_call(where: str, block: dict[str, Any]) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict) or not isinstance(block.get("name"), str):
        raise FieldRefused(where, f"{where} has a tool_use without name and input: {block!r:.80}")
    arguments = given.get(MALFORMED) if len(given) == 1 else None
    if not isinstance(arguments, str):
        arguments = json.dumps(given, ensure_ascii=False)
    named = {"name": block["name"], "arguments": arguments}
    return {"id": want(block, "id", str, None), "type": "function", "function": named}


def _user(where: str, role: str, blocks: Messages, before: Messages) -> Messages:
    """Results of tools in the order of their calls, then the text."""
    results = [_result(where, b) for b in blocks if b.get("type") == "tool_result"]
    calls = before[-1].get("tool_calls", []) if before else []
    order = {call["id"]: k for k, call in enumerate(calls)}
    results.sort(key=lambda m: order.get(m["tool_call_id"], len(order)))
    texts = [b for b in blocks if b.get("type") != "tool_result"]
    text = [{"role": role, "content": text_of(where, texts, role)}]
    return results + (text if texts or not results else [])


def _result(where: str, block: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(block.get("tool_use_id"), str):
        raise FieldRefused(where, f"{where} has a tool_result without a 'tool_use_id'")
    if block.get("is_error"):
        say_once("anthropic tool_result 'is_error': accepted without effect; the text is all")
    text = text_of(where, block.get("content"), "tool") or ""
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        raise FieldRefused("tools", f"'tools' has {tool!r:.80}; tools of the server do not exist")
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise FieldRefused("tools", f"'tools' has {tool!r:.80} without name and input_schema")
    return wire_openai.function_tool(
        tool["name"], tool.get("description"), tool["input_schema"], tool
    )


def _tool_choice(
    choice: dict[str, Any], tools: tuple[dict[str, Any], ...]
) -> tuple[str | dict[str, Any], bool]:
    """(OpenAI's tool_choice, whether parallel calls are allowed)."""
    parallel = not choice.get("disable_parallel_tool_use", False)
    kind = choice.get("type", "auto")
    if kind in ("auto", "none"):
        return kind, parallel
    if kind == "any" and tools:
        return "required", parallel
    return wire_openai.tool_named(choice.get("name") if kind == "tool" else kind, tools), parallel


def _format(found: Any) -> dict[str, Any] | None:
    if found is None:
        return None
    schema = found.get("schema") if isinstance(found, dict) else None
    if not isinstance(schema, dict) or found.get("type") != "json_schema":
        raise FieldRefused("output_config", f"'output_config' format {found!r:.80} is unknown")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def _template(thinking: dict[str, Any], output: dict[str, Any]) -> dict[str, Any]:
    template: dict[str, Any] = {}
    if thinking.get("type") in ("enabled", "disabled"):
        template["enable_thinking"] = thinking["type"] == "enabled"
    if thinking.get("budget_tokens") is not None:
        say_once("anthropic thinking 'budget_tokens': accepted without effect; see max_tokens")
    if output.get("effort") is not None:
        template["reasoning_effort"] = output["effort"]
    return template


def usage(reply: ChatReply) -> dict[str, Any]:
    """Tokens as the engine saw and sampled them; cached ones are counted apart on this wire."""
    return {
        "input_tokens": reply.n_prompt - reply.n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.n_cached,
        "output_tokens": sum(len(c.token_ids) for c in reply.choices),
    }


def whole(call: Call, reply: ChatReply, created: int, decode: Decode) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choice = reply.choices[0]
    reason, sequence = stop(call, choice)
    return {
        **_head(call, reply.id),
        "content": blocks_of(choice),
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage(reply),
    }


def blocks_of(choice: Choice) -> Messages:
    """Thinking, text, calls; never an empty text block, which the wire refuses in the echo."""
    reply, out = choice.reply, list[dict[str, Any]]()
    if reply.reasoning:
        out.append({"type": "thinking", "thinking": reply.reasoning, "signature": SIGNATURE})
    if reply.content:
        out.append({"type": "text", "text": reply.content})
    for call in reply.tool_calls:
        given = _input(call.arguments)
        out.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return out


def _input(arguments: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(arguments or "{}")  # strict: no NaN, no half of a character
    except (msgspec.DecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {MALFORMED: arguments}


def stop(call: Call, choice: Choice) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)."""
    if choice.finish_reason in ("length", "abort"):
        return "max_tokens", None
    if choice.finish_reason == "tool_calls" or choice.reply.tool_calls:
        return "tool_use", None
    hit = next((s for s in call.request.stop if s in choice.text), None)
    return ("stop_sequence", hit) if hit else ("end_turn", None)


def _head(call: Call, reply_id: str) -> dict[str, Any]:
    return {"id": reply_id, "type": "message", "role": "assistant", "model": call.model}


class Stream:
    """The events of one streamed answer."""

    def __init__(self, call: Call, started: Any, created: int, decode: Decode) -> None:
        """started: what the session knows of the reply: `reply_id` and `n_prompt`."""
        self.call, self.started = call, started
        self.index = -1  # of the open content block
        self.open = False

    def start(self) -> bytes:
        """All of the prompt counts as input here; message_delta tells what of it was cached."""
        message = {
            **_head(self.call, self.started.reply_id),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self.started.n_prompt, "output_tokens": 0},
        }
        return sse("message_start", message=message)

    def text(self, index: int, delta: str) -> bytes:
        head = b"" if self.open else self._begin({"type": "text", "text": ""})
        return head + self._delta({"type": "text_delta", "text": delta})

    def finish(self, reply: ChatReply, sent: Mapping[int, int]) -> Iterator[bytes]:
        """Everything that was not streamed yet; `sent` = characters of content."""
        choice = reply.choices[0]
        for block in blocks_of(choice):
            kind = block["type"]
            if kind == "text":
                if rest := block["text"][sent.get(0, 0) :]:
                    yield self.text(0, rest)
            elif kind == "thinking":
                yield self._begin({**block, "thinking": "", "signature": ""})
                yield self._delta({"type": "thinking_delta", "thinking": block["thinking"]})
                yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
            else:
                yield self._end() + self._begin({**block, "input": {}})
                given = json.dumps(block["input"], ensure_ascii=False)
                yield self._delta({"type": "input_json_delta", "partial_json": given})
            if kind != "text" or self.open:
                yield self._end()
        reason, sequence = stop(self.call, choice)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield sse("message_delta", delta=delta, usage=usage(reply))
        yield sse("message_stop")

    @staticmethod
    def ping() -> bytes:
        return sse("ping")

    @staticmethod
    def broken(*what: Any) -> bytes:
        """The error that ends it, from the arguments of `error`."""
        return sse("error", **error(*what))

    def _begin(self, block: dict[str, Any]) -> bytes:
        self.index, self.open = self.index + 1, True
        return sse("content_block_start", index=self.index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return sse("content_block_delta", index=self.index, delta=delta)

    def _end(self) -> bytes:
        if not self.open:
            return b""
        self.open = False
        return sse("content_block_stop", index=self.index)


def sse(event: str, **data: Any) -> bytes:
    body = msgspec.json.encode({**data, "type": event})
    return b"event: " + event.encode() + b"\ndata: " + body + b"\n\n"


TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    """Anthropic's error body."""
    kind = TYPES.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
