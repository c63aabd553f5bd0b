"""Replies as the official SDKs get them; what is sampled is given."""

import json
from typing import Any

import anthropic
import doubles as make
import openai
import pytest
from clients import USER, ask, ask_anthropic, with_anthropic, with_openai
from doubles import ScriptedSession, says

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
OPENAI_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
ANTHROPIC_TOOLS = [{"name": "weather", "input_schema": WEATHER}]
TWO_CALLS = (
    make.call("weather", '{"city": "Oslo"}', "c1"),
    make.call("weather", '{"city": "B\\u00e6rum"}', "c2"),
)


def test_openai_whole_reply_with_parallel_calls() -> None:
    session = ScriptedSession(says("look", *TWO_CALLS, reasoning="hm"))
    reply = with_openai(session, lambda c: ask(c, tools=OPENAI_TOOLS, logprobs=True))
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls" and message.content == "look"
    assert [(c.id, json.loads(c.function.arguments)) for c in message.tool_calls] == [
        ("c1", {"city": "Oslo"}),
        ("c2", {"city": "Bærum"}),
    ]
    assert message.reasoning_content == "hm" and reply.model == "gpt-x"
    assert reply.usage.prompt_tokens == 11 and reply.usage.prompt_tokens_details.cached_tokens == 4
    n = len(reply.choices[0].logprobs.content)
    assert n == reply.usage.completion_tokens
    assert session.deliveries == ["chatcmpl-7"]


@pytest.mark.parametrize("tools", [None, OPENAI_TOOLS])
def test_openai_streamed_reply_is_the_whole_one(tools: Any) -> None:
    """Text in pieces where it can be; calls, reasoning, logprobs and usage at the end."""
    calls = TWO_CALLS if tools else ()
    session = ScriptedSession(says("smørrebrød, please", *calls, reasoning="hm" if tools else None))

    async def use(client: openai.AsyncOpenAI) -> Any:
        more = {"tools": tools} if tools else {}
        options = {"include_usage": True}
        stream = await ask(client, stream=True, stream_options=options, logprobs=True, **more)
        return [chunk async for chunk in stream]

    chunks = with_openai(session, use)
    assert {c.id for c in chunks} == {"chatcmpl-7"}
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant"
    texts = [d.content for d in deltas if d.content]
    assert "".join(texts) == "smørrebrød, please" and (len(texts) == 1) == bool(tools)
    found = [c for d in deltas for c in d.tool_calls or ()]
    assert [(c.index, c.id, c.function.arguments) for c in found] == [
        (k, c.id, c.arguments) for k, c in enumerate(calls)
    ]
    last = chunks[-2].choices[0]
    assert last.finish_reason == ("tool_calls" if tools else "stop")
    assert len(last.logprobs.content) == chunks[-1].usage.completion_tokens
    assert chunks[-1].choices == [] and all(c.usage is None for c in chunks[:-1])
    assert session.deliveries == ["chatcmpl-7"]


def test_openai_helper_accumulates_n_streamed_choices() -> None:
    reply = says("one")
    three = tuple(make.choice(i, text) for i, text in enumerate(("one", "two", "thrée")))
    session = ScriptedSession(
        type(reply)(id=reply.id, choices=three, n_prompt=11),
    )

    async def use(client: openai.AsyncOpenAI) -> Any:
        async with client.chat.completions.stream(model="m", messages=USER, n=3) as stream:
            return await stream.get_final_completion()

    final = with_openai(session, use)
    assert [c.message.content for c in final.choices] == ["one", "two", "thrée"]
    assert {c.finish_reason for c in final.choices} == {"stop"}


def test_a_stop_string_never_shows_in_a_stream() -> None:
    """It may begin in any piece: as many characters are held back as it is long."""
    reply = says("before")
    sampled = make.choice(0, "before<STOP>")
    cut = type(sampled)(
        **{f: getattr(sampled, f) for f in sampled.__dataclass_fields__ if f != "reply"},
        reply=reply.choices[0].reply,
    )
    session = ScriptedSession(type(reply)(id="chatcmpl-8", choices=(cut,), n_prompt=1))

    async def use(client: openai.AsyncOpenAI) -> Any:
        stream = await ask(client, stream=True, stop="<STOP>")
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    assert with_openai(session, use) == "before"


def test_a_stream_that_contradicts_the_record_ends_with_an_error() -> None:
    reply = says("text")
    other = make.choice(0, "other")
    wrong = type(other)(
        **{f: getattr(other, f) for f in other.__dataclass_fields__ if f != "reply"},
        reply=reply.choices[0].reply,
    )
    session = ScriptedSession(type(reply)(id="chatcmpl-9", choices=(wrong,), n_prompt=1))

    async def use(client: openai.AsyncOpenAI) -> Any:
        return [c async for c in await ask(client, stream=True)]

    with pytest.raises(openai.APIError, match="streamed 'other', which is not in the reply"):
        with_openai(session, use)
    assert session.deliveries == []


def test_anthropic_whole_reply_with_parallel_calls_and_thinking() -> None:
    session = ScriptedSession(says("look", *TWO_CALLS, reasoning="hm"))
    reply = with_anthropic(session, lambda c: ask_anthropic(c, tools=ANTHROPIC_TOOLS))
    assert [b.type for b in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [b.input for b in reply.content[2:]] == [{"city": "Oslo"}, {"city": "Bærum"}]
    assert (reply.stop_reason, reply.role, reply.model) == ("tool_use", "assistant", "claude-x")
    assert reply.usage.input_tokens == 7 and reply.usage.cache_read_input_tokens == 4
    assert session.deliveries == ["chatcmpl-7"]


@pytest.mark.parametrize("tools", [None, ANTHROPIC_TOOLS])
def test_anthropic_stream_has_the_events_of_the_wire(tools: Any) -> None:
    calls = TWO_CALLS if tools else ()
    session = ScriptedSession(says("smørrebrød", *calls, reasoning="hm" if tools else None))

    async def use(client: anthropic.AsyncAnthropic) -> Any:
        more = {"tools": tools} if tools else {}
        kinds = []
        async with client.messages.stream(
            model="m", max_tokens=50, messages=USER, **more
        ) as stream:
            async for event in stream:
                kinds.append(event.type)
                if event.type == "message_start":
                    assert event.message.usage.input_tokens == 11
            return kinds, await stream.get_final_message()

    kinds, final = with_anthropic(session, use)
    raw = [k for k in kinds if k.startswith(("message", "content"))]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    if tools:
        thinking = [block[0], block[1], block[1], block[2]]
        assert raw == ["message_start", *thinking, *block * 3, "message_delta", "message_stop"]
        assert [b.input for b in final.content[2:]] == [{"city": "Oslo"}, {"city": "Bærum"}]
        assert (final.content[0].thinking, final.content[0].signature) == ("hm", "molt")
    else:
        assert raw[:2] == ["message_start", block[0]] and raw.count(block[1]) > 1
        assert raw[-3:] == [block[2], "message_delta", "message_stop"]
    text = next(b.text for b in final.content if b.type == "text")
    assert text == "smørrebrød" and final.id == "chatcmpl-7"
    assert final.stop_reason == ("tool_use" if tools else "end_turn")
    assert (final.usage.input_tokens, final.usage.cache_read_input_tokens) == (7, 4)
    assert session.deliveries == ["chatcmpl-7"]


def test_count_tokens_and_models() -> None:
    session = ScriptedSession()

    async def use(client: anthropic.AsyncAnthropic) -> Any:
        counted = await client.messages.count_tokens(model="m", messages=USER, system="abc")
        return counted.input_tokens, [m.id async for m in client.models.list()]

    assert with_anthropic(session, use) == (5, ["policy"])

    async def names(client: openai.AsyncOpenAI) -> Any:
        return [m.id async for m in client.models.list()]

    assert with_openai(session, names) == ["policy"]
