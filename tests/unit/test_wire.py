"""Both wires into one request, and one reply into both wires."""

import json
from types import SimpleNamespace
from typing import Any

import doubles as make
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.agents import fields, wire_anthropic, wire_openai
from molt.agents.fields import FieldRefused
from molt.agents.types import ChatRequest

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
OPENAI_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": SCHEMA,
        "strict": True,
    },
}
ANTHROPIC_TOOL = {
    "name": "weather",
    "input_schema": SCHEMA,
    "description": "of a city",
    "strict": True,
    "cache_control": {"type": "ephemeral"},
}


def openai(headers: dict[str, str] | None = None, **body: Any) -> ChatRequest:
    return wire_openai.parse({"model": "m", "messages": USER, **body}, headers or {}).request


def anthropic(headers: dict[str, str] | None = None, **body: Any) -> ChatRequest:
    whole = {"model": "m", "max_tokens": 9, "messages": USER, **body}
    return wire_anthropic.parse(whole, headers or {}).request


def test_the_same_conversation_on_both_wires_is_the_same_request() -> None:
    """Parallel calls, two results in one message in the wrong order, text, thinking, system."""
    calls = [
        {
            "id": i,
            "type": "function",
            "function": {"name": "weather", "arguments": f'{{"city": "{c}"}}'},
        }
        for i, c in (("c1", "A"), ("c2", "B"))
    ]
    a = openai(
        max_tokens=9,
        tools=[OPENAI_TOOL],
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "A and"}, {"type": "text", "text": "B?"}],
            },
            {
                "role": "assistant",
                "content": "look",
                "reasoning": "hm",
                "tool_calls": calls,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
            },
            {"role": "tool", "tool_call_id": "c1", "content": "RESULT_A"},
            {
                "role": "tool",
                "tool_call_id": "c2",
                "content": [{"type": "text", "text": "RESULT_B"}],
            },
            {"role": "user", "content": "so?"},
        ],
    )
    b = anthropic(
        tools=[ANTHROPIC_TOOL],
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": "A and"}, {"type": "text", "text": "B?"}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "molt"},
                    {"type": "text", "text": "look"},
                    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "A"}},
                    {"type": "tool_use", "id": "c2", "name": "weather", "input": {"city": "B"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c2", "content": "RESULT_B"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "RESULT_A"}],
                    },
                    {"type": "text", "text": "so?"},
                ],
            },
        ],
    )
    assert a == b
    assert [m["role"] for m in a.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
    ]
    assert a.messages[1]["content"] == "A and\nB?" and a.messages[4]["content"] == "RESULT_B"
    assert a.tools[0]["function"] == {
        "name": "weather",
        "description": "of a city",
        "parameters": SCHEMA,
        "strict": True,
    }


@pytest.mark.parametrize(
    ("openai_form", "anthropic_form", "choice", "parallel"),
    [
        ({}, {}, "auto", True),
        ({"tool_choice": "none"}, {"tool_choice": {"type": "none"}}, "none", True),
        ({"tool_choice": "required"}, {"tool_choice": {"type": "any"}}, "required", True),
        (
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
            {"tool_choice": {"type": "tool", "name": "weather"}},
            {"type": "function", "function": {"name": "weather"}},
            True,
        ),
        (
            {"tool_choice": "auto", "parallel_tool_calls": False},
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "auto",
            False,
        ),
    ],
)
def test_tool_choice(openai_form: Any, anthropic_form: Any, choice: Any, parallel: bool) -> None:
    for request in (
        openai(tools=[OPENAI_TOOL], **openai_form),
        anthropic(tools=[ANTHROPIC_TOOL], **anthropic_form),
    ):
        assert (request.tool_choice, request.parallel_tool_calls) == (choice, parallel)


def test_structured_output_and_thinking_on_both_wires() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA}}
    a = openai(response_format=schema, reasoning_effort="low")
    form = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    b = anthropic(output_config=form)
    assert a.response_format == b.response_format == schema
    assert a.template == b.template == {"reasoning_effort": "low"}
    assert openai(response_format={"type": "text"}).response_format is None
    off = anthropic(thinking={"type": "disabled"}).template
    assert off == openai(chat_template_kwargs={"enable_thinking": False}).template
    assert off == {"enable_thinking": False}


def test_empty_parts_of_a_message_are_no_parts() -> None:
    empty = {"role": "assistant", "content": "x", "tool_calls": [], "refusal": None}
    assert openai(messages=[*USER, empty]).messages[1] == {"role": "assistant", "content": "x"}


def test_limits_stops_retries_and_keys() -> None:
    both = openai(max_tokens=5, max_completion_tokens=7, stop="a", n=3)
    assert (both.max_tokens, both.stop, both.n) == (7, ("a",), 3)
    retried = {"x-stainless-retry-count": "2", "idempotency-key": "k"}
    for request in (
        openai(retried, stop=["a", "b"]),
        anthropic(retried, stop_sequences=["a", "b"]),
    ):
        assert (request.retry, request.key, request.stop) == (2, "k", ("a", "b"))
    assert (both.retry, both.key) == (0, None)


@pytest.mark.parametrize("ask", [openai, anthropic])
def test_roles_by_header_body_and_model_name(ask: Any) -> None:
    assert ask().role == "agent" and ask(model="gpt-4o:2024").role == "agent"
    assert ask({"x-molt-role": "judge"}).role == "judge"
    assert ask(molt_role="user-simulator").role == "user_sim"
    assert ask(model="judge").role == "judge" and ask(model="policy:frozen").role == "frozen"
    with pytest.raises(FieldRefused, match="role 'boss' is none of agent, judge"):
        ask(molt_role="boss")


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (openai, {"temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'"),
    (openai, {"zzz": 1}, "unknown field 'zzz'; see `molt agent fields`"),
    (openai, {"logit_bias": {"5": 1}}, "'logit_bias' is refused"),
    (openai, {"presence_penalty": 0.1}, "'presence_penalty' is refused"),
    (openai, {"repetition_penalty": 1.1}, "'repetition_penalty' is refused"),
    (openai, {"logprobs": True, "top_logprobs": 2}, "'top_logprobs' is refused: only the sampled"),
    (openai, {"functions": []}, "use tools"),
    (openai, {"continue_final_message": True}, "a reply always opens a turn"),
    (openai, {"n": 0}, "'n' is 0, expected 1 to"),
    (openai, {"n": True}, "'n' is True, expected int"),
    (openai, {"max_tokens": "9"}, "'max_tokens' is '9', expected int"),
    (openai, {"stop": [""]}, "expected non-empty texts"),
    (openai, {"messages": []}, "'messages' is empty"),
    (openai, {"messages": [{"role": "robot"}]}, r"messages\[0\] has role 'robot'"),
    (openai, {"messages": ["x"]}, r"messages\[0\] has role 'x'"),
    (openai, {"messages": [{"role": "tool", "content": "x"}]}, "without a 'tool_call_id'"),
    (
        openai,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "part of type 'image_url'; only text",
    ),
    (openai, {"tools": [{"type": "custom"}]}, "only functions with a name"),
    (openai, {"tool_choice": "required"}, "'tool_choice' is 'required'; the tools are"),
    (openai, {"response_format": {"type": "xml"}}, "cannot be served"),
    (anthropic, {"messages": [*USER, {"role": "assistant", "content": "The"}]}, "prefill"),
    (anthropic, {"max_tokens": None}, "'max_tokens' is missing"),
    (anthropic, {"mcp_servers": [{}]}, "'mcp_servers' is refused"),
    (
        anthropic,
        {"tools": [{"type": "web_search_20260209", "name": "web_search"}]},
        "of the server",
    ),
    (anthropic, {"tool_choice": {"type": "tool", "name": "x"}}, "'tool_choice' is 'x'"),
    (
        anthropic,
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "part of type 'image'",
    ),
    (anthropic, {"messages": [{"role": "tool", "content": "x"}]}, "has role 'tool'"),
]


@pytest.mark.parametrize(("ask", "body", "why"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(ask: Any, body: Any, why: str) -> None:
    with pytest.raises(FieldRefused, match=why):
        ask(**body)


def test_neutral_values_of_refused_fields_pass() -> None:
    openai(logit_bias={}, presence_penalty=0.0, top_logprobs=0, echo=False, functions=None)


def test_what_is_ignored_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    fields._said.clear()
    for _ in range(3):
        openai(temperature=0.2, seed=4, metadata={"a": "b"}, top_p=None)
        anthropic(temperature=0.2, metadata={"user_id": "x"})
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 5 == len(set(said))
    assert any("openai field 'seed': overridden by the run (sampling is not" in s for s in said)
    assert any("anthropic field 'metadata': accepted without effect" in s for s in said)


def test_every_field_of_the_sdks_is_in_a_list() -> None:
    """A new SDK brings new fields: each needs a decision."""
    from anthropic.types import message_create_params as anthropic_params
    from openai.types.chat import completion_create_params as openai_params

    for params, table in (
        (openai_params.CompletionCreateParamsNonStreaming, fields.OPENAI),
        (openai_params.CompletionCreateParamsStreaming, fields.OPENAI),
        (anthropic_params.MessageCreateParamsNonStreaming, fields.ANTHROPIC),
    ):
        assert params.__annotations__.keys() - table.keys() == set()


def test_the_lists_can_be_printed() -> None:
    rows = list(fields.rows())
    assert len(rows) == len(fields.OPENAI) + len(fields.ANTHROPIC)
    assert ("openai", fields.REFUSED, "echo") in {row[:3] for row in rows}


def test_a_reply_on_the_openai_wire() -> None:
    ask = wire_openai.parse({"model": "gpt-4o", "messages": USER, "logprobs": True}, {})
    body = wire_openai.whole(ask, make.says("ok"), 5, make.TOKENIZER.decode)
    choice = body["choices"][0]
    assert (body["model"], choice["finish_reason"]) == ("gpt-4o", "stop")
    assert choice["message"] == {"role": "assistant", "content": "ok", "refusal": None}
    assert [t["token"] for t in choice["logprobs"]["content"]] == ["o", "k", "<|im_end|>"]
    assert choice["logprobs"]["content"][0]["bytes"] == [ord("o")]
    assert body["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 3,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


@pytest.mark.parametrize(
    ("reply", "stops", "expected"),
    [
        (make.says("ok"), [], ("end_turn", None)),
        (make.says("ok", finish="length"), [], ("max_tokens", None)),
        (make.says("ok", finish="abort"), [], ("max_tokens", None)),
        (make.says("a STOP"), ["X", "STOP"], ("stop_sequence", "STOP")),
        (make.says(None, make.call("f", "{}")), [], ("tool_use", None)),
    ],
)
def test_stop_reasons_of_the_anthropic_wire(reply: Any, stops: Any, expected: Any) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": USER, "stop_sequences": stops}
    found = wire_anthropic.whole(wire_anthropic.parse(body, {}), reply, 5, make.TOKENIZER.decode)
    assert (found["stop_reason"], found["stop_sequence"]) == expected
    assert found["usage"]["input_tokens"] == 7 and found["usage"]["cache_read_input_tokens"] == 4


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', '{"city": ', "[1]", ""])
def test_arguments_come_back_from_the_anthropic_echo(arguments: str) -> None:
    """Also those that are no JSON object: they are data, and comparable with what was sampled."""
    reply = make.says(None, make.call("weather", arguments)).choices[0]
    blocks = wire_anthropic.blocks_of(reply)
    json.dumps(blocks)
    echoed = [{"role": "assistant", "content": blocks}, *USER]
    back = anthropic(messages=[*USER, *echoed]).messages[1]
    text = back["tool_calls"][0]["function"]["arguments"]
    assert text == (arguments or "{}") and back["content"] is None


TEXTS = st.text(max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ODD = ['{"a": NaN}', '{"a": 1e400}', '{"a": "\\ud800"}', '{"a": 1e2}', '{"a":1,"a":2}', "[" * 5000]
ARGUMENTS = (
    st.dictionaries(TEXTS, VALUES, max_size=3).map(json.dumps)
    | TEXTS.filter(bool)
    | st.sampled_from(ODD)
)


@st.composite
def replies(draw: Any) -> Any:
    """A reply as parsers give it: empty parts are absent, arguments may be anything."""
    calls = [
        make.call(draw(st.text(min_size=1, max_size=5)), draw(ARGUMENTS), f"call_{k}")
        for k in range(draw(st.integers(0, 3)))
    ]
    text, thoughts = draw(TEXTS) or None, draw(TEXTS) or None
    return make.says(text, *calls, reasoning=thoughts)


def as_values(message: dict[str, Any]) -> dict[str, Any]:
    """As the capture compares: arguments as values, absent content as ""."""

    def value(text: str) -> Any:
        try:
            found = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return text
        return found if isinstance(found, dict) else text

    calls = [
        (c["id"], c["function"]["name"], value(c["function"]["arguments"]))
        for c in message.get("tool_calls", ())
    ]
    content, thoughts = message.get("content") or "", message.get("reasoning_content") or ""
    return {"content": content, "reasoning": thoughts, "calls": calls}


def events(raw: bytes) -> list[dict[str, Any]]:
    lines = [line for line in raw.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


STARTED = SimpleNamespace(reply_id="chatcmpl-7", n_prompt=11)


@given(replies())
def test_a_reply_that_is_echoed_is_the_reply(reply: Any) -> None:
    """Over either wire, streamed or whole: nothing is lost and nothing is added."""
    said = reply.choices[0].reply.message()
    user = {"role": "user", "content": "hi"}
    ask = wire_openai.parse({"model": "m", "messages": USER}, {})
    whole = wire_openai.whole(ask, reply, 5, make.TOKENIZER.decode)["choices"][0]["message"]
    assert as_values(openai(messages=[user, whole]).messages[1]) == as_values(said)
    stream = wire_openai.Stream(ask, STARTED, 5, make.TOKENIZER.decode)
    raw = stream.start() + b"".join(stream.finish(reply, {}))
    built: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    for event in events(raw):
        for delta in (c["delta"] for c in event["choices"]):
            for key in ("content", "reasoning_content"):
                built[key] += delta.get(key) or ""
            if "tool_calls" in delta:
                built.setdefault("tool_calls", []).extend(delta["tool_calls"])
    assert as_values(openai(messages=[user, built]).messages[1]) == as_values(said)

    body = {"model": "m", "max_tokens": 9, "messages": USER}
    ask = wire_anthropic.parse(body, {})
    blocks = wire_anthropic.whole(ask, reply, 5, make.TOKENIZER.decode)["content"]
    echo = {"role": "assistant", "content": blocks}
    if blocks:
        assert as_values(anthropic(messages=[user, echo, user]).messages[1]) == as_values(said)
    streamed = wire_anthropic.Stream(ask, STARTED, 5, make.TOKENIZER.decode)
    raw = streamed.start() + b"".join(streamed.finish(reply, {}))
    found: list[dict[str, Any]] = []
    for event in events(raw):
        if event["type"] == "content_block_start":
            assert event["index"] == len(found)
            found.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                found[-1]["input"] = json.loads(delta["partial_json"])
            else:
                key = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"])
                found[-1][key or "signature"] += delta[key or "signature"]
    assert found == blocks


@given(st.lists(st.integers(0, 20), max_size=4), st.text(min_size=1, max_size=20))
def test_what_is_sent_early_and_the_rest_are_the_whole(cuts: list[int], text: str) -> None:
    """Wherever the pieces end."""
    reply = make.says(text)
    for wire in (wire_openai, wire_anthropic):
        body = {"model": "m", "max_tokens": 9, "messages": USER}
        stream: Any = wire.Stream(wire.parse(body, {}), STARTED, 5, make.TOKENIZER.decode)
        ends = sorted({min(c, len(text)) for c in cuts} - {0})
        raw, sent = stream.start(), 0
        for end in ends:
            raw += stream.text(0, text[sent:end])
            sent = end
        raw += b"".join(stream.finish(reply, {0: sent}))
        got = ""
        for event in events(raw):
            for c in event.get("choices", ()):
                got += c["delta"].get("content") or ""
            got += event.get("delta", {}).get("text", "")
        assert got == text
        if wire is wire_anthropic:
            kinds = [e["type"] for e in events(raw)]
            assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
