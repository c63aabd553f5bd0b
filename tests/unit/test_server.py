"""The server as the official SDKs see it; what is sampled is given."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import doubles as make
import httpx
import openai
import pytest
from doubles import ScriptedSession, says

from molt.agents.server import Running, serve
from molt.schemas.errors import ConfigError, EngineError, Fenced, TemplateError, WindowFull

USER = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
OPENAI_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
ANTHROPIC_TOOLS = [{"name": "weather", "input_schema": WEATHER}]
TWO_CALLS = (
    make.call("weather", '{"city": "Oslo"}', "c1"),
    make.call("weather", '{"city": "B\\u00e6rum"}', "c2"),
)


@contextlib.asynccontextmanager
async def running(*sessions: ScriptedSession, **limits: Any) -> AsyncIterator[Running]:
    server = await serve({s.token: s for s in sessions}, **limits)
    try:
        yield server
    finally:
        await server.close()


def with_openai(
    session: ScriptedSession,
    use: Callable[[openai.AsyncOpenAI], Awaitable[Any]],
    api_key: str = "secret",
    retries: int = 0,
    **limits: Any,
) -> Any:
    async def main() -> Any:
        async with running(session, **limits) as server:
            client = openai.AsyncOpenAI(
                base_url=server.base_url, api_key=api_key, max_retries=retries
            )
            async with client:
                return await use(client)

    return asyncio.run(main())


def with_anthropic(
    session: ScriptedSession,
    use: Callable[[anthropic.AsyncAnthropic], Awaitable[Any]],
    api_key: str = "secret",
    retries: int = 0,
    **limits: Any,
) -> Any:
    async def main() -> Any:
        async with running(session, **limits) as server:
            client = anthropic.AsyncAnthropic(
                base_url=server.base_url, api_key=api_key, max_retries=retries
            )
            async with client:
                return await use(client)

    return asyncio.run(main())


def ask(client: openai.AsyncOpenAI, **more: Any) -> Awaitable[Any]:
    return client.chat.completions.create(model="gpt-x", messages=USER, **more)


def ask_anthropic(client: anthropic.AsyncAnthropic, **more: Any) -> Awaitable[Any]:
    return client.messages.create(model="claude-x", max_tokens=50, messages=USER, **more)


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


TOO_LONG = WindowFull("a prompt of 9 tokens in a window of 8")
CASES: list[tuple[BaseException, Any, Any]] = [
    (TOO_LONG, (openai.BadRequestError, 400), (anthropic.BadRequestError, 400)),
    (
        TemplateError("roles must alternate"),
        (openai.BadRequestError, 400),
        (anthropic.BadRequestError, 400),
    ),
    (
        EngineError("died"),
        (openai.InternalServerError, 500),
        (anthropic.InternalServerError, 500),
    ),
    (TimeoutError("120 s"), (openai.InternalServerError, 504), (anthropic.APIStatusError, 504)),
    (Fenced("epoch 2"), (openai.InternalServerError, 503), (anthropic.APIStatusError, 503)),
    (KeyError("bug"), (openai.InternalServerError, 500), (anthropic.InternalServerError, 500)),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "on_openai", "on_anthropic"), CASES)
def test_errors_are_the_sdks_own(
    error: Any, on_openai: Any, on_anthropic: Any, stream: bool
) -> None:
    """Also of a streamed call: what fails before the first token has a status."""
    with pytest.raises(on_openai[0]) as first:
        with_openai(ScriptedSession(error), lambda c: ask(c, stream=stream))
    with pytest.raises(on_anthropic[0]) as second:
        with_anthropic(ScriptedSession(error), lambda c: ask_anthropic(c, stream=stream))
    assert (first.value.status_code, second.value.status_code) == (on_openai[1], on_anthropic[1])
    if error is TOO_LONG:
        assert first.value.code == "context_length_exceeded"
        assert first.value.type == second.value.type == "invalid_request_error"
        assert "9 tokens in a window of 8" in second.value.message


def test_refused_fields_are_named_in_the_error() -> None:
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'") as error:
        with_openai(ScriptedSession(), lambda c: ask(c, extra_body={"temprature": 1}))
    assert error.value.param == "temprature"
    with pytest.raises(anthropic.BadRequestError, match="'container' is refused"):
        with_anthropic(ScriptedSession(), lambda c: ask_anthropic(c, extra_body={"container": "x"}))


@pytest.mark.parametrize("final", [TimeoutError("late"), Fenced("newer epoch")])
def test_what_cannot_get_better_is_not_tried_again(final: Any) -> None:
    session = ScriptedSession(final, says("never"))
    with pytest.raises(openai.InternalServerError):
        with_openai(session, ask, retries=2)
    assert len(session.requests) == 1


def test_the_sdks_own_retry_says_so() -> None:
    """The session learns that it is a retry, and of what."""
    session = ScriptedSession(EngineError("died"), says("ok"))
    assert with_openai(session, ask, retries=2).choices[0].message.content == "ok"
    assert [r.retry for r in session.requests] == [0, 1]
    assert session.requests[0].messages == session.requests[1].messages
    session = ScriptedSession(EngineError("died"), says("ok"))
    assert with_anthropic(session, ask_anthropic, retries=2).content[0].text == "ok"
    assert [r.retry for r in session.requests] == [0, 1]


@pytest.mark.parametrize("api_key", ["wrong", "secre", "secret2"])
def test_a_wrong_token_is_refused(api_key: str) -> None:
    session = ScriptedSession(says("no"))
    with pytest.raises(openai.AuthenticationError, match="no rollout has this token"):
        with_openai(session, ask, api_key=api_key)
    with pytest.raises(anthropic.AuthenticationError, match="no rollout has this token"):
        with_anthropic(session, ask_anthropic, api_key=api_key)
    assert session.requests == []


def test_a_missing_token_and_one_that_is_no_text_are_refused() -> None:
    async def use(client: httpx.AsyncClient) -> Any:
        bare = [
            await client.post("/v1/messages", headers={"authorization": value})
            for value in (b"", b"Bearer", "Bearer sécret".encode())
        ]
        return [(r.status_code, r.json()["error"]["type"]) for r in bare]

    assert raw(ScriptedSession(), use) == [(401, "authentication_error")] * 3


def test_two_agents_each_reach_their_own_rollout() -> None:
    a, b = (
        ScriptedSession(says("for a"), token="a"),
        ScriptedSession(says("for b"), token="b"),
    )

    async def main() -> list[str]:
        async with running(a, b) as server:

            async def one(token: str) -> str:
                async with openai.AsyncOpenAI(base_url=server.base_url, api_key=token) as client:
                    return (await ask(client)).choices[0].message.content

            return await asyncio.gather(one("b"), one("a"))

    assert asyncio.run(main()) == ["for b", "for a"]


def raw(session: ScriptedSession, use: Callable[[httpx.AsyncClient], Any], **limits: Any) -> Any:
    """Without an SDK: what a broken client sends."""

    async def main() -> Any:
        async with running(session, **limits) as server:
            url = server.base_url.removesuffix("/v1")
            headers = {"authorization": "Bearer secret"}
            async with httpx.AsyncClient(base_url=url, headers=headers) as client:
                return await use(client)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("content", "status", "why"),
    [
        (b"{", 400, "not JSON"),
        (b'{"a": "\xff"}', 400, "not JSON"),
        (b'{"messages": NaN}', 400, "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"[]", 400, "expected a JSON object"),
        (b"x" * 2000, 413, "a body of more than 1000 bytes"),
    ],
)
def test_broken_bodies(content: bytes, status: int, why: str) -> None:
    limit = 1000 if status == 413 else 1 << 20

    async def use(client: httpx.AsyncClient) -> Any:
        return await client.post("/v1/chat/completions", content=content)

    found = raw(ScriptedSession(), use, body_bytes_max=limit)
    assert found.status_code == status and why in found.json()["error"]["message"]


def test_a_body_without_a_length_is_limited_too() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    async def use(client: httpx.AsyncClient) -> Any:
        return await client.post("/v1/messages", content=endless())

    found = raw(ScriptedSession(), use, body_bytes_max=1000)
    assert found.status_code == 413
    assert found.json()["error"]["type"] == "request_too_large"


def test_unknown_paths_have_the_form_of_the_wire() -> None:
    async def use(client: httpx.AsyncClient) -> Any:
        one = await client.get("/v1/nothing")
        two = await client.get("/v1/nothing", headers={"anthropic-version": "2023-06-01"})
        return one, two

    one, two = raw(ScriptedSession(), use)
    assert one.status_code == two.status_code == 404
    assert one.json()["error"]["type"] == two.json()["error"]["type"] == "not_found_error"
    assert two.json()["type"] == "error"


def test_overload_says_when_to_come_back() -> None:
    session = ScriptedSession(says("one"))
    session.gate.clear()

    async def main() -> None:
        async with running(session, concurrency_max=1) as server:
            a = openai.AsyncOpenAI(base_url=server.base_url, api_key="secret", max_retries=0)
            b = anthropic.AsyncAnthropic(base_url=server.base_url, api_key="secret", max_retries=0)
            async with a, b:
                running_call = asyncio.create_task(ask(a))
                while not session.requests:
                    await asyncio.sleep(0)
                with pytest.raises(openai.RateLimitError) as first:
                    await ask(a)
                with pytest.raises(anthropic.APIStatusError) as second:
                    await ask_anthropic(b)
                for error in (first, second):
                    assert error.value.response.headers["retry-after"] == "1"
                assert second.value.status_code == 529
                assert second.value.type == "overloaded_error"
                session.gate.set()
                assert (await running_call).choices[0].message.content == "one"

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_does_not_stop_its_generation(stream: bool) -> None:
    """The reply is whole and not delivered: the same request again may get it."""
    session = ScriptedSession(says("whole"))
    session.gate.clear()

    async def main() -> None:
        async with running(session) as server:
            client = openai.AsyncOpenAI(base_url=server.base_url, api_key="secret", max_retries=0)
            async with client:
                if stream:
                    chunks = await ask(client, stream=True)
                    await anext(aiter(chunks))
                    await chunks.close()
                else:
                    call = asyncio.create_task(ask(client))
                    while not session.requests:
                        await asyncio.sleep(0)
                    call.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await call
                while session.waiting:  # nobody waits for it any more
                    await asyncio.sleep(0)
                session.gate.set()
                assert (await session.call).id == "chatcmpl-7"

    asyncio.run(main())
    assert session.deliveries == []


@pytest.mark.parametrize("stream", [False, True])
def test_closing_ends_what_still_runs(stream: bool) -> None:
    session = ScriptedSession(says("never"))
    session.gate.clear()

    async def use(client: openai.AsyncOpenAI) -> None:
        found = await ask(client, stream=stream)
        async for _ in found if stream else ():
            pass

    async def main() -> None:
        server = await serve({"secret": session})
        client = openai.AsyncOpenAI(base_url=server.base_url, api_key="secret", max_retries=0)
        async with client:
            call = asyncio.create_task(use(client))
            while not session.requests:
                await asyncio.sleep(0)
            await server.close()
            with pytest.raises(openai.APIError, match="the rollout has ended"):
                await call
        await server.close()

    asyncio.run(main())


def test_a_host_that_others_reach_needs_saying_so() -> None:
    async def main() -> None:
        for host in ("0.0.0.0", "192.0.2.7", "::", "example.org"):
            with pytest.raises(ConfigError, match="public=True"):
                await serve({}, host)
        with pytest.raises(ConfigError, match="cannot listen on 127.0.0.1"):
            async with running() as server:
                await serve({}, port=server.port)
        async with running(host="0.0.0.0", public=True) as server:
            assert server.port > 0
        async with running(host="localhost") as server:
            assert server.base_url == f"http://localhost:{server.port}/v1"

    asyncio.run(main())
