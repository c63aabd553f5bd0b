"""A running server and the SDKs in front of it, in one event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import httpx
import openai
from doubles import ScriptedSession

from molt.agents.server import Running, serve

Use = Callable[[Any], Awaitable[Any]]
USER = [{"role": "user", "content": "hi"}]


@contextlib.asynccontextmanager
async def running(*sessions: ScriptedSession, **limits: Any) -> AsyncIterator[Running]:
    server = await serve({s.token: s for s in sessions}, **limits)
    try:
        yield server
    finally:
        await server.close()


def _with(
    sdk: Any, session: ScriptedSession, use: Use, api_key: str, retries: int, limits: Any
) -> Any:
    async def main() -> Any:
        async with running(session, **limits) as server:
            client = sdk(base_url=server.base_url, api_key=api_key, max_retries=retries)
            async with client:
                return await use(client)

    return asyncio.run(main())


def with_openai(
    session: ScriptedSession, use: Use, api_key: str = "secret", retries: int = 0, **limits: Any
) -> Any:
    return _with(openai.AsyncOpenAI, session, use, api_key, retries, limits)


def with_anthropic(
    session: ScriptedSession, use: Use, api_key: str = "secret", retries: int = 0, **limits: Any
) -> Any:
    return _with(anthropic.AsyncAnthropic, session, use, api_key, retries, limits)


def ask(client: openai.AsyncOpenAI, **more: Any) -> Awaitable[Any]:
    return client.chat.completions.create(model="gpt-x", messages=USER, **more)


def ask_anthropic(client: anthropic.AsyncAnthropic, **more: Any) -> Awaitable[Any]:
    return client.messages.create(model="claude-x", max_tokens=50, messages=USER, **more)


def raw(session: ScriptedSession, use: Callable[[httpx.AsyncClient], Any], **limits: Any) -> Any:
    """Without an SDK: what a broken client sends."""

    async def main() -> Any:
        async with running(session, **limits) as server:
            url = server.base_url.removesuffix("/v1")
            headers = {"authorization": "Bearer secret"}
            async with httpx.AsyncClient(base_url=url, headers=headers) as client:
                return await use(client)

    return asyncio.run(main())
