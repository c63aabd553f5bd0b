"""SDK, server, session, capture and log together; only what is sampled is given.

The reported cases that an agent meets (M01 to M04), driven over both wires.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anthropic
import factories as make
import httpx
import openai
import pytest
from engines import TOKENIZER, Says

from molt.agents.capture import Capture
from molt.agents.chat import Context, Result
from molt.agents.parse import ReplyParser
from molt.agents.render import Renderer
from molt.agents.server import Running, serve
from molt.recipes import python_tool
from molt.rollout.engines import EngineSource
from molt.rollout.resume import Recorded
from molt.rollout.session import Desk, Session
from molt.rollout.types import Assignment
from molt.schemas.records import Sampling
from molt.store import Log
from molt.store.branches import branches

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
ANTHROPIC_TOOL: Any = {"name": "get_weather", "input_schema": CITY}
USER: Any = {"role": "user", "content": "weather in A and B?"}


Use = Callable[[Session, Says, Running], Awaitable[Any]]


def play(
    log: Log,
    use: Use,
    *texts: str,
    tools: str | None = None,
    temperature: float = 1.0,
    attempt: int = 0,
    recorded: Sequence[Any] = (),
) -> tuple[Any, Session, Says]:
    """One rollout of an agent; returns what it made, the finished session and the engine."""
    if tools is not None:
        pytest.importorskip("vllm")

    async def main() -> tuple[Any, Session, Says]:
        renderer, engine = Renderer(TOKENIZER), Says(*texts)
        desk = Desk(
            writer=log.writer(linger_s=0.01),
            engines=EngineSource([engine], wait_s=5),
            model="policy",
            tokenizer=TOKENIZER,
            parser=ReplyParser(TOKENIZER, tools, None),
            new_capture=lambda: Capture(renderer),
            sampling=Sampling(max_tokens=400, temperature=temperature),
            window=4096,
            partial_tokens=1000,
        )
        a = Assignment(
            group_id="train-0", rollout_id="train-0/0", attempt=attempt, purpose="train", prompt={}
        )
        session = Session(desk, a, 60, recorded)
        session.recorded = Recorded(recorded)
        running = await serve({session.token: session})
        try:
            made = await use(session, engine, running)
        finally:
            await running.close()
            await session.finish("ok")
            await asyncio.to_thread(desk.writer.close)
        return made, session, engine

    return asyncio.run(main())


def of_openai(session: Session, running: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=running.base_url, api_key=session.token, max_retries=0)


def of_anthropic(session: Session, running: Running) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=running.base_url, api_key=session.token, max_retries=0)


def rows(log: Log) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        log.sql("select * from segments order by segment").to_arrow_table().to_pylist()
    )
    return found


def sampled_text(row: dict[str, Any]) -> str:
    ids = [t for t, s in zip(row["token_ids"], row["sampled"], strict=True) if s]
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


def called(*cities: str) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{c}"}}}}\n</tool_call>'
        for c in cities
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", ["openai", "anthropic"])
def test_m01_m03_two_calls_and_their_results_are_one_branch(
    log: Log, wire: str, stream: bool
) -> None:
    """Calls come back parsed, the SDK writes their JSON anew, and nothing forks."""
    m01, m03 = make.load_case("M01"), make.load_case("M03")
    call = m03["given"]["reply_text"]
    expected = m03["expected"]
    results = m01["given"]["appended"]

    async def by_openai(session: Session, engine: Says, running: Running) -> Any:
        async with of_openai(session, running) as client:
            ask: Any = {"model": "m", "tools": [TOOL]}
            if stream:
                async with client.chat.completions.stream(messages=[USER], **ask) as events:
                    first = await events.get_final_completion()
            else:
                first = await client.chat.completions.create(messages=[USER], **ask)
            choice = first.choices[0]
            assert choice.finish_reason == expected["finish_reason"]
            calls = choice.message.tool_calls or []
            found = [(c.function.name, json.loads(c.function.arguments)) for c in calls]
            echo = choice.message.model_dump(exclude_none=True)
            for c in echo["tool_calls"]:
                c["function"].pop("parsed_arguments", None)
                c["function"]["arguments"] = json.dumps(
                    json.loads(c["function"]["arguments"]), indent=1
                )
            tool = [{**r, "tool_call_id": c.id} for r, c in zip(results, calls, strict=True)]
            second = await client.chat.completions.create(messages=[USER, echo, *tool], **ask)
            return found, second.choices[0].message.content

    async def by_anthropic(session: Session, engine: Says, running: Running) -> Any:
        async with of_anthropic(session, running) as client:
            ask: Any = {"model": "m", "max_tokens": 300, "tools": [ANTHROPIC_TOOL]}
            if stream:
                async with client.messages.stream(messages=[USER], **ask) as events:
                    first = await events.get_final_message()
            else:
                first = await client.messages.create(messages=[USER], **ask)
            assert first.stop_reason == "tool_use"
            calls = [b for b in first.content if b.type == "tool_use"]
            found = [(c.name, c.input) for c in calls]
            tool: Any = [
                {"type": "tool_result", "tool_use_id": c.id, "content": r["content"]}
                for c, r in zip(calls, results, strict=True)
            ]
            talk: Any = [
                USER,
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": tool[::-1]},
            ]
            second = await client.messages.create(messages=talk, **ask)
            return found, second.content[0].text  # type: ignore[union-attr]

    use: Use = by_openai if wire == "openai" else by_anthropic
    texts = (f"Let me look.\n{call}\n{called('Rome')}", "Rain and sun.")
    (found, answer), session, engine = play(log, use, *texts, tools="hermes")
    want = expected["tool_calls"][0]
    assert found == [(want["name"], want["arguments"]), ("get_weather", {"city": "Rome"})]
    assert answer == "Rain and sun."
    order = [engine.prompts[1].index(t) for t in m01["expected"]["prompt_contains_in_order"]]
    assert order == sorted(order)
    assert engine.prompts[1].startswith(engine.prompts[0] + texts[0]), "spliced, not written anew"
    found_rows = rows(log)
    assert len(found_rows) == m01["expected"]["segments"]
    assert len(branches(session.links)) == m01["expected"]["branches"]
    assert len(branches(session.links)) == expected["branches_after_echo_and_tool_result"]
    assert [sampled_text(r) for r in found_rows] == list(texts)


def test_m02_an_edited_reply_is_context_on_a_branch_of_its_own(log: Log) -> None:
    case = make.load_case("M02")
    given, expected = case["given"], case["expected"]

    async def use(session: Session, engine: Says, running: Running) -> None:
        async with of_openai(session, running) as client:
            await client.chat.completions.create(model="m", messages=[USER])
            edited: Any = {"role": "assistant", "content": given["echoed_reply"]}
            more: Any = {"role": "user", "content": "and?"}
            await client.chat.completions.create(model="m", messages=[USER, edited, more])

    _, session, engine = play(log, use, given["sampled_reply"], "so")
    assert len(branches(session.links)) == expected["branches"]
    assert given["echoed_reply"] in engine.prompts[1]
    texts = [sampled_text(r) for r in rows(log)]
    assert texts == [given["sampled_reply"], "so"]
    edited = sum(given["echoed_reply"] in t for t in texts)
    assert edited == expected["sampled_tokens_of_edited_text"]
    assert expected["original_reply_still_trainable_once"] and sum(rows(log)[0]["train"]) > 0


@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
def test_m04_retries_by_the_sdks_header(log: Log, path: str) -> None:
    case = make.load_case("M04")

    async def use(session: Session, engine: Says, running: Running) -> list[bytes]:
        engine.gate.clear()
        head = {"x-api-key": session.token}
        body = {"model": "m", "max_tokens": 50, "messages": [USER]}
        async with httpx.AsyncClient(base_url=running.base_url, headers=head) as client:

            def post(retry: int) -> Any:
                count = {"x-stainless-retry-count": str(retry)}
                return asyncio.create_task(client.post(path, json=body, headers=count))

            first = post(0)
            while not engine.prompts:
                await asyncio.sleep(0)
            second = post(1)
            while not session.counts["retries"]:
                await asyncio.sleep(0)
            engine.gate.set()
            answers = [await first, await second, await post(2), await post(0)]
        return [a.json()["id"] for a in answers]

    ids, session, _ = play(log, use, "first", "second")
    assert (len(set(ids[:3])) == 1) is case["expected"]["replies_1_to_3_identical"]
    assert (ids[3] != ids[0]) is case["expected"]["reply_4_sampled_anew"]
    assert len(rows(log)) == case["expected"]["segments"]


def test_an_answer_that_never_arrived_is_given_to_who_asks_again(log: Log) -> None:
    """Without any mark of a retry: the first caller went away before its answer."""

    async def use(session: Session, engine: Says, running: Running) -> str:
        engine.gate.clear()
        async with of_openai(session, running) as client:
            gone = asyncio.create_task(
                client.chat.completions.create(model="m", messages=[USER], stream=False)
            )
            while not engine.prompts:
                await asyncio.sleep(0)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            (calls,) = session._calls.values()
            while calls[0].waiting:
                await asyncio.sleep(0)
            engine.gate.set()
            reply = await client.chat.completions.create(model="m", messages=[USER])
            return reply.choices[0].message.content or ""

    text, _, engine = play(log, use, "only once")
    assert text == "only once" and len(engine.prompts) == len(rows(log)) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_sampled_recorded_and_not_said(log: Log, stream: bool) -> None:
    async def use(session: Session, engine: Says, running: Running) -> Any:
        async with of_anthropic(session, running) as a, of_openai(session, running) as o:
            ask: Any = {"model": "m", "messages": [USER]}
            if stream:
                async with a.messages.stream(
                    max_tokens=99, stop_sequences=["<STOP>"], **ask
                ) as events:
                    one = await events.get_final_message()
                chunks = await o.chat.completions.create(stop="<STOP>", stream=True, **ask)
                two = "".join([c.choices[0].delta.content or "" async for c in chunks])
            else:
                one = await a.messages.create(max_tokens=99, stop_sequences=["<STOP>"], **ask)
                made = await o.chat.completions.create(stop="<STOP>", **ask)
                two = made.choices[0].message.content
            return (one.stop_reason, one.stop_sequence, one.content[0].text), two

    (one, two), _, _ = play(log, use, "one<STOP>", "two<STOP> ")
    assert one == ("stop_sequence", "<STOP>", "one") and two == "two"
    assert [sampled_text(r) for r in rows(log)] == ["one<STOP>", "two<STOP> "]


@pytest.mark.parametrize(("temperature", "asked"), [(1.0, 1), (0.7, 2)])
def test_recorded_replies_of_another_temperature_are_not_used(
    log: Log, temperature: float, asked: int
) -> None:
    """A branch has one temperature, so the attempt begins anew when the run's has changed."""
    second: list[Any] = [{"role": "assistant", "content": "one"}, {"role": "user", "content": "B?"}]

    async def use(turns: int, session: Session, running: Running) -> None:
        client = of_openai(session, running)
        for messages in ([USER], [USER, *second])[:turns]:
            await client.chat.completions.create(model="policy", messages=messages)

    play(log, lambda s, _, running: use(1, s, running), "one")
    (first,) = rows(log)
    _, _, engine = play(
        log,
        lambda s, _, running: use(2, s, running),
        *["one", "two"][-asked:],
        temperature=temperature,
        attempt=1,
        recorded=log.rows([make.ref(first["writer"], first["seq"], first["row"])]),
    )
    again = [r for r in rows(log) if r["attempt"] == 1]
    assert [r["sampling"]["temperature"] for r in again] == [temperature] * 2
    assert [r["source_attempt"] for r in again] == [0 if asked == 1 else None, None]
    ((counts,),) = log.sql("select counts from rollouts where attempt = 1").fetchall()
    assert counts["regenerated"] == (0 if asked == 1 else sum(first["sampled"]))


def test_usage_counts_what_the_engine_saw(log: Log) -> None:
    async def use(session: Session, engine: Says, running: Running) -> None:
        async with of_anthropic(session, running) as a, of_openai(session, running) as o:
            ask: Any = {"model": "m", "messages": [USER]}
            counted = await a.messages.count_tokens(**ask)
            one = await a.messages.create(max_tokens=50, **ask)
            made = await o.chat.completions.create(**ask)
            n = len(TOKENIZER.encode(engine.prompts[0]))
            assert counted.input_tokens == one.usage.input_tokens == n
            assert made.usage is not None and made.usage.prompt_tokens == n
            assert one.usage.output_tokens == len(TOKENIZER.encode("hello")) + 1
            assert made.usage.completion_tokens == len(TOKENIZER.encode("goodbye")) + 1

    play(log, use, "hello", "goodbye")
    assert len(rows(log)) == 2, "counting samples nothing"


def test_a_judges_call_is_recorded_with_its_role_and_not_trained(log: Log) -> None:
    async def use(session: Session, engine: Says, running: Running) -> None:
        async with of_openai(session, running) as client:
            ask: Any = {"messages": [USER]}
            await client.chat.completions.create(model="m", **ask)
            await client.chat.completions.create(
                model="m", extra_headers={"x-molt-role": "judge"}, **ask
            )
            await client.chat.completions.create(
                model="m", extra_body={"molt_role": "user_sim"}, **ask
            )
            await client.chat.completions.create(model="policy:frozen", **ask)

    play(log, use, "a", "b", "c", "d")
    found = rows(log)
    assert [r["role"] for r in found] == ["agent", "judge", "user_sim", "frozen"]
    assert [bool(sum(r["train"])) for r in found] == [True, False, False, False]


CODE = "print(sum(int(d) for d in str(60 ** 12)))"


@pytest.mark.parametrize(
    ("first", "tools"),
    [
        (f"Let me compute.\n```python\n{CODE}\n```", None),
        (
            "<tool_call>\n"
            + json.dumps({"name": "python", "arguments": {"code": CODE}})
            + "\n</tool_call>",
            "hermes",
        ),
    ],
)
def test_the_python_tool_recipe_runs_what_the_model_writes(
    log: Log, first: str, tools: str | None
) -> None:
    """A block of code or a call of the tool; the output is the model's next context."""

    async def use(session: Session, engine: Says, running: Running) -> Result:
        prompt = next(iter(python_tool.heldout_prompts()))
        assert prompt == {"question": "What is the sum of the digits of 60 ** 12?", "label": 45}
        context = Context(
            base_url=running.base_url,
            api_key=session.token,
            model=session.model,
            prompt=prompt,
            label=prompt["label"],
            sampling=session.sampling,
            deadline_s=60,
            rollout_id="train-0/0",
            attempt=0,
            purpose="train",
        )
        return await python_tool.PythonTool().run(context)

    result, session, engine = play(log, use, first, "<answer>45</answer>", tools=tools)
    assert result == Result(rewards={"reward": 1.0}, metrics={"runs": {"ok": 1, "failed": 0}})
    new = engine.prompts[1].removeprefix(engine.prompts[0] + first)
    assert "45" in new and len(branches(session.links)) == 1
    assert [sampled_text(r) for r in rows(log)] == [first, "<answer>45</answer>"]


def test_the_python_tool_recipe_asks_what_it_can_check() -> None:
    held_out = [p["question"] for p in python_tool.heldout_prompts()]
    first, second = (list(python_tool.train_prompts(seed)) for seed in range(2))
    trained = first + second
    assert len(held_out) == python_tool.HELD_OUT
    assert not set(held_out) & {p["question"] for p in trained}
    assert list(python_tool.train_prompts(0)) == first != second
    for prompt in trained[:50]:
        if "*" in prompt["question"] and "sum" not in prompt["question"]:
            text = prompt["question"].removeprefix("What is ").rstrip("?")
            text = text.replace("the remainder of ", "").replace(" divided by ", " % ")
            assert eval(text) == prompt["label"], prompt
