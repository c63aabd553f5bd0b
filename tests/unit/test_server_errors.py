"""Errors, tokens, limits and ends of the server, as SDKs and broken clients see them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from clients import ask, ask_anthropic, raw, running, with_anthropic, with_openai
from doubles import ScriptedSession, says

from molt.agents.server import serve
from molt.schemas.errors import ConfigError, EngineError, Fenced, TemplateError, WindowFull

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


@pytest.mark.parametrize(("key", "bearer"), [("secret", "other"), ("other", "secret")])
def test_a_second_token_does_not_stand_in_the_way(key: str, bearer: str) -> None:
    """Some versions of Anthropic's SDK add a token of the user's environment."""

    async def use(client: httpx.AsyncClient) -> Any:
        head = {"x-api-key": key, "authorization": f"Bearer {bearer}"}
        return (await client.get("/v1/models", headers=head)).status_code

    assert raw(ScriptedSession(), use) == 200


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
