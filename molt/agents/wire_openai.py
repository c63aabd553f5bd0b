"""POST /v1/chat/completions: into `ChatRequest` and back, streamed or whole.

On the data path between the agent's SDK and `Session.chat`. Text goes in one direction only: what
is trained are the ids that the session recorded (I1), this wire shows views of them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from molt.agents import fields
from molt.agents.fields import FieldRefused, say_once, want
from molt.agents.heard import Heard
from molt.agents.types import ChatReply, ChatRequest, Choice, Messages

N_MAX = 128
TOKENS_MAX = 1 << 31
MESSAGE_KEYS = ("content", "reasoning_content", "name", "tool_calls", "tool_call_id")
ROLES = ("system", "developer", "user", "assistant", "tool")

Decode = Callable[[int], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request with what only the wire needs to know."""

    request: ChatRequest
    model: str
    """The name that the agent used; the answer carries it again."""
    stream: bool
    usage_in_stream: bool = True
    logprobs: bool = False


def parse(body: dict[str, Any], headers: Mapping[str, str], heard: Heard | None = None) -> Call:
    """The body of a request; FieldRefused names the field that cannot be served.

    heard: the request before; then the messages may be as `heard.decode` leaves them.
    """
    fields.check_fields("openai", fields.OPENAI, body)
    tools = tuple(map(_tool, want(body, "tools", list, [])))
    limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    options = want(body, "stream_options", dict, {})
    template = dict(want(body, "chat_template_kwargs", dict, {}))
    if body.get("reasoning_effort") is not None:
        template["reasoning_effort"] = want(body, "reasoning_effort", str, None)
    request = ChatRequest(
        messages=messages(want(body, "messages", list, []), heard or Heard()),
        tools=tools,
        tool_choice=_tool_choice(body.get("tool_choice"), tools),
        parallel_tool_calls=want(body, "parallel_tool_calls", bool, True),
        n=fields.count(body, "n", 1, N_MAX) or 1,
        max_tokens=fields.count(body, limit, None, TOKENS_MAX),
        stop=fields.strings("stop", body.get("stop")),
        response_format=response_format(want(body, "response_format", dict, {})),
        template=template,
        role=fields.role_of(headers, body),
        key=headers.get("idempotency-key"),
        retry=fields.retry_of(headers),
    )
    return Call(
        request=request,
        model=want(body, "model", str, ""),
        stream=want(body, "stream", bool, False),
        usage_in_stream=bool(options.get("include_usage")),
        logprobs=want(body, "logprobs", bool, False),
    )


def messages(found: list[Any], heard: Heard) -> Messages:
    """The conversation with text contents; "developer" is the template's "system"."""
    if not found:
        raise FieldRefused("messages", "'messages' is empty; a conversation has at least one")
    return heard.read(found, _message)


def _message(where: str, message: Any, before: Messages) -> Messages:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else message
        raise FieldRefused(where, f"{where} has role {role!r:.60}, expected {', '.join(ROLES)}")
    role = "system" if message["role"] == "developer" else message["role"]
    out = {"role": role, "content": text_of(where, message.get("content"), role)}
    for key, value in message.items():
        if value is None or value == [] or key in ("role", "content"):
            continue
        if key == "reasoning":  # the other name of the same thing
            key = "reasoning_content"
        if key == "tool_calls":
            value = [_echoed_call(where, c) for c in want(message, key, list, [])]
        if key in MESSAGE_KEYS:
            out[key] = value
        elif value:
            say_once(f"openai message key '{key}': accepted without effect")
    if role == "tool" and not isinstance(out.get("tool_call_id"), str):
        raise FieldRefused(where, f"{where} is a tool's result without a 'tool_call_id'")
    return [out]


def text_of(where: str, content: Any, role: str) -> str | None:
    """Text, or text parts joined: by nothing in a reply, by newlines elsewhere (as vLLM does)."""
    if content is None or isinstance(content, str):
        return content
    parts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise FieldRefused(where, f"{where} has a part of type {kind!r}; only text is served")
        parts.append(part[kind])
    return ("" if role == "assistant" else "\n").join(parts)


def _echoed_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FieldRefused(where, f"{where} has a tool call without a function: {call!r:.80}")
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    named = {"name": function["name"], "arguments": arguments}
    return {"id": want(call, "id", str, None), "type": "function", "function": named}


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FieldRefused("tools", f"'tools' has {tool!r:.80}; only functions with a name work")
    return function_tool(
        function["name"], function.get("description"), function.get("parameters"), function
    )


def function_tool(name: str, text: Any, schema: Any, given: dict[str, Any]) -> dict[str, Any]:
    """One form for every agent's tool: the template prints it, so order and keys are tokens."""
    known = ("name", "description", "parameters", "input_schema", "type", "strict")
    for key in given.keys() - set(known):
        say_once(f"tool key '{key}': accepted without effect")
    out = {"name": name, "description": text or "", "parameters": schema or {"type": "object"}}
    if given.get("strict"):  # a forced call then obeys the schema
        out["strict"] = True
    return {"type": "function", "function": out}


def _tool_choice(choice: Any, tools: tuple[dict[str, Any], ...]) -> str | dict[str, Any]:
    if choice is None or choice in ("auto", "none"):
        return choice or "auto"
    if choice == "required" and tools:
        return "required"
    named = choice.get("function") if isinstance(choice, dict) else None
    return tool_named(named.get("name") if isinstance(named, dict) else choice, tools)


def tool_named(name: Any, tools: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """The choice of one tool, if there is such a tool."""
    known = [t["function"]["name"] for t in tools]
    if name not in known:
        raise FieldRefused("tool_choice", f"'tool_choice' is {name!r:.80}; the tools are {known}")
    return {"type": "function", "function": {"name": name}}


def response_format(found: dict[str, Any]) -> dict[str, Any] | None:
    """None for plain text; FieldRefused for what no grammar can be made of."""
    kind = found.get("type", "text")
    if kind == "text":
        return None
    schema = found.get("json_schema")
    if kind == "json_object" or (
        kind == "json_schema"
        and isinstance(schema, dict)
        and isinstance(schema.get("schema"), dict)
    ):
        return found
    raise FieldRefused("response_format", f"'response_format' {found!r:.100} cannot be served")


def usage(reply: ChatReply) -> dict[str, Any]:
    """Tokens as the engine saw and sampled them."""
    sampled = sum(len(c.token_ids) for c in reply.choices)
    return {
        "prompt_tokens": reply.n_prompt,
        "completion_tokens": sampled,
        "total_tokens": reply.n_prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": reply.n_cached},
    }


def whole(call: Call, reply: ChatReply, created: int, decode: Decode) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    return {
        "id": reply.id,
        "object": "chat.completion",
        "created": created,
        "model": call.model,
        "choices": [
            {
                "index": c.index,
                "message": {"refusal": None, **c.reply.message()},
                "finish_reason": finish_reason(c),
                "logprobs": logprobs(c, decode) if call.logprobs else None,
            }
            for c in reply.choices
        ],
        "usage": usage(reply),
    }


def finish_reason(choice: Choice) -> str:
    """An aborted reply is one that was cut off."""
    return "length" if choice.finish_reason == "abort" else choice.finish_reason


def logprobs(choice: Choice, decode: Decode) -> dict[str, Any]:
    """Of the sampled tokens alone; the record keeps no others."""
    content = []
    for token, logprob in zip(choice.token_ids.tolist(), choice.logprobs.tolist(), strict=True):
        text = decode(token)
        named = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        content.append({**named, "top_logprobs": []})
    return {"content": content, "refusal": None}


class Stream:
    """The chunks of one streamed answer, as bytes of server-sent events."""

    def __init__(self, call: Call, started: Any, created: int, decode: Decode) -> None:
        """started: what the session knows of the reply: `reply_id` and `n_prompt`."""
        self.call, self.decode = call, decode
        self.head = {
            "id": started.reply_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": call.model,
        }

    def start(self) -> bytes:
        opening = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(i, opening) for i in range(self.call.request.n))

    def text(self, index: int, delta: str) -> bytes:
        return self._chunk(index, {"content": delta})

    def finish(self, reply: ChatReply, sent: Mapping[int, int]) -> Iterator[bytes]:
        """Everything that was not streamed yet; `sent` = characters of content per choice."""
        for c in reply.choices:
            if c.reply.reasoning:
                yield self._chunk(c.index, {"reasoning_content": c.reply.reasoning})
            if rest := (c.reply.content or "")[sent.get(c.index, 0) :]:
                yield self.text(c.index, rest)
            for k, wire in enumerate(c.reply.message().get("tool_calls", ())):
                yield self._chunk(c.index, {"tool_calls": [{"index": k, **wire}]})
            shown = logprobs(c, self.decode) if self.call.logprobs else None
            yield self._chunk(c.index, {}, finish_reason(c), shown)
        if self.call.usage_in_stream:
            yield sse({**self.head, "choices": [], "usage": usage(reply)})
        yield b"data: [DONE]\n\n"

    @staticmethod
    def ping() -> bytes:
        return b": still sampling\n\n"

    @staticmethod
    def broken(*what: Any) -> bytes:
        """The error that ends it, from the arguments of `error`."""
        return sse(error(*what))

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None = None, shown: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": finish}
        extra = {"usage": None} if self.call.usage_in_stream else {}
        return sse({**self.head, "choices": [choice], **extra})


def sse(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


TYPES = {401: "authentication_error", 404: "not_found_error", 413: "invalid_request_error"}


def error(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    """OpenAI's error body."""
    kinds = {400: "invalid_request_error", 429: "rate_limit_error", 504: "timeout_error"}
    kind = {**kinds, **TYPES}.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
