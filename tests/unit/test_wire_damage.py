"""Requests with anything in any place: served, or refused by name, and never a bug of ours."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import chats
import pytest
from transformers import PreTrainedTokenizerFast

from molt.agents import wire_anthropic, wire_openai
from molt.agents.capture import Capture
from molt.agents.parse import ReplyParser
from molt.schemas.errors import RequestRefused, TemplateError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OPENAI = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "r"},
        {"role": "user", "content": "and?", "name": "bob"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": True,
    "n": 2,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 5,
    "max_completion_tokens": 7,
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    "logprobs": True,
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": False},
    "molt_role": "judge",
    "logit_bias": {},
    "metadata": {"a": "b"},
}
ANTHROPIC = {
    "model": "m",
    "max_tokens": 10,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "h", "signature": "molt"},
                {"type": "text", "text": "t"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": "r", "is_error": True},
                {"type": "text", "text": "so"},
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "stop_sequences": ["x"],
    "thinking": {"type": "enabled", "budget_tokens": 100},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
}
ODD: list[Any] = [
    *(None, [], {}, "", 0, -1, True, False, 1.5, 10**400, float("inf"), "x", "\ud800", "\0"),
    *([None], [[]], [{}], ["x", "x"], {"a": None}, {"type": "text"}, {"type": "image"}),
    *(
        {"role": "user"},
        "<|im_end|>",
        {"a": {"b": [1, {"c": "\ud800"}]}},
        {wire_anthropic.MALFORMED: 1},
    ),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, list):
        value = dict(enumerate(value))
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from places(inner, (*path, key))


def damaged(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """Up to three values replaced, removed or added."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        *path, last = rng.choice([*places(body)])
        at: Any = body
        for key in path:
            at = at[key]
        what = rng.random()
        if what < 0.6:
            at[last] = copy.deepcopy(rng.choice(ODD))
        elif what < 0.75:
            del at[last]
        elif isinstance(at, dict):
            name = rng.choice(["x", "type", "content", "function", "arguments", "role"])
            at[name] = copy.deepcopy(rng.choice(ODD))
        else:
            at.insert(last, copy.deepcopy(rng.choice([*ODD, at[last]])))
        if not body:
            break
    return body


@pytest.mark.parametrize("wire", [wire_openai, wire_anthropic])
def test_a_damaged_request_is_served_or_refused(wire: Any) -> None:
    body = OPENAI if wire is wire_openai else ANTHROPIC
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=chats.own_tokenizer())
    parser = ReplyParser(tokenizer, "hermes", None)
    renderers = [chats.renderer(chats.PLAIN), chats.renderer(chats.THINKING)]
    rng, served = random.Random(7), 0
    for _ in range(1500):
        try:
            request = wire.parse(damaged(rng, body), {}).request
            parser.grammar(request)
            Capture(rng.choice(renderers)).place(request)
            served += 1
        except (RequestRefused, TemplateError):
            continue
    assert 200 < served < 1300
