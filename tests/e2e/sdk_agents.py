"""Agents as users write them, with the official SDKs; the model behind them is random.

A forced call makes even a random model call a tool. `GIVEN` keeps what each agent was given, for
comparison with the log; agents run in threads of the test's own process.
"""

import asyncio
import json
import signal
import sys
from typing import Any

import anthropic
import openai

from molt.agents.chat import ChatAgent, Context, Result

GIVEN: dict[str, list[tuple[str, str]]] = {}
"""Rollout -> (reply id, its text) in the order in which they came."""
ERRORS: dict[str, BaseException] = {}

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
WEATHER = {"Oslo": "rain", "Rome": "sun"}
KILLED = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0)
asked = [{"role": "user", "content": "tell a long story"}]
for chunk in client.chat.completions.create(model="m", messages=asked, stream=True):
    print(chunk.choices[0].delta.content, flush=True)
"""


class OpenAITools(ChatAgent):
    """A forced call streamed, its result, a whole reply, a streamed one."""

    async def run(self, ctx: Context) -> Result:
        given = GIVEN.setdefault(ctx.rollout_id, [])
        asked: list[Any] = [{"role": "user", "content": "weather?"}]
        async with openai.AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:
            chat = client.chat.completions
            force: Any = {"tools": [TOOL], "tool_choice": "required"}
            async with chat.stream(model=ctx.model, messages=asked, **force) as stream:
                final = await stream.get_final_completion()
            message = final.choices[0].message
            assert message.tool_calls, message
            echo = message.model_dump(exclude_none=True)
            for call in echo["tool_calls"]:  # clients write JSON as they like
                call["function"].pop("parsed_arguments", None)
                call["function"]["arguments"] = json.dumps(
                    json.loads(call["function"]["arguments"]), indent=2
                )
            asked.append(echo)
            for call in message.tool_calls:
                city = json.loads(call.function.arguments)["city"]
                asked.append({"role": "tool", "tool_call_id": call.id, "content": WEATHER[city]})
            free: Any = {"tools": [TOOL], "tool_choice": "none"}
            reply = await chat.create(model=ctx.model, messages=asked, **free)
            given.append((reply.id, reply.choices[0].message.content or ""))
            asked += [reply.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]
            chunks = await chat.create(model=ctx.model, messages=asked, stream=True, **free)
            got = [c async for c in chunks]
            text = "".join(c.choices[0].delta.content or "" for c in got)
            assert len({c.id for c in got}) == 1
            given.append((got[0].id, text))
        return Result(rewards={"right": 1.0}, turns={reply.id: {"turn": 0.5}, 2: {"last": None}})


class AnthropicTools(ChatAgent):
    """The same on the other wire; the result comes with text in one message."""

    async def run(self, ctx: Context) -> Result:
        given = GIVEN.setdefault(ctx.rollout_id, [])
        asked: list[Any] = [{"role": "user", "content": "weather?"}]
        tools: Any = [{"name": "weather", "input_schema": CITY}]
        ask: Any = {"model": ctx.model, "max_tokens": 90, "tools": tools, "system": "be brief"}
        async with anthropic.AsyncAnthropic(base_url=ctx.base_url, api_key=ctx.api_key) as client:
            count = await client.messages.count_tokens(
                messages=asked, model=ctx.model, tools=tools, system="be brief"
            )
            any_tool: Any = {"type": "any"}
            async with client.messages.stream(
                messages=asked, tool_choice=any_tool, **ask
            ) as stream:
                message = await stream.get_final_message()
            usage = message.usage
            assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
            calls = [b for b in message.content if b.type == "tool_use"]
            assert calls and message.stop_reason == "tool_use", message
            asked.append({"role": "assistant", "content": message.content})
            results: list[Any] = [
                {"type": "tool_result", "tool_use_id": c.id, "content": WEATHER[c.input["city"]]}
                for c in calls
            ]
            asked.append({"role": "user", "content": [*results, {"type": "text", "text": "so?"}]})
            none: Any = {"type": "none"}
            reply = await client.messages.create(messages=asked, tool_choice=none, **ask)
            given.append((reply.id, "".join(b.text for b in reply.content if b.type == "text")))
            asked.append({"role": "assistant", "content": reply.content})
            asked.append({"role": "user", "content": "and?"})
            async with client.messages.stream(messages=asked, tool_choice=none, **ask) as stream:
                last = await stream.get_final_message()
            given.append((last.id, "".join(b.text for b in last.content if b.type == "text")))
        return Result(rewards={"right": 1.0}, turns={reply.id: {"turn": 0.5}, 2: {"last": None}})


class Impatient(ChatAgent):
    """Its SDK gives up early and tries again, as often as it takes."""

    async def run(self, ctx: Context) -> Result:
        client = openai.AsyncOpenAI(
            base_url=ctx.base_url, api_key=ctx.api_key, timeout=0.4, max_retries=40
        )
        async with client:
            asked: Any = [{"role": "user", "content": "tell a long story"}]
            reply = await client.chat.completions.create(model=ctx.model, messages=asked)
            text = reply.choices[0].message.content or ""
            GIVEN.setdefault(ctx.rollout_id, []).append((reply.id, text))
        return Result(rewards={"right": 1.0})


class Killed(ChatAgent):
    """A process of its own that dies by SIGKILL in the middle of a stream."""

    async def run(self, ctx: Context) -> Result:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", KILLED, ctx.base_url, ctx.api_key),
            stdout=asyncio.subprocess.PIPE,
        )
        assert child.stdout is not None
        await child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        await child.wait()
        return Result(status="aborted", reason=f"exit status {child.returncode}")


class Stranger(ChatAgent):
    """Tries its own token with a letter less, and another rollout's after that has ended."""

    tokens: list[str] = []

    async def run(self, ctx: Context) -> Result:
        for token in (ctx.api_key[:-1], *self.tokens):
            async with openai.AsyncOpenAI(base_url=ctx.base_url, api_key=token) as client:
                try:
                    await client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": "hi"}]
                    )
                except openai.AuthenticationError as error:
                    ERRORS[token] = error
        self.tokens.append(ctx.api_key)
        return Result()
