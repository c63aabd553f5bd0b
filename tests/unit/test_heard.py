"""Requests read with the memory of the one before mean what they mean without it."""

import json
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.agents import wire_anthropic, wire_openai
from molt.agents.heard import Heard, decode
from molt.schemas.errors import RequestRefused

VALUES = st.sampled_from([1, True, 1.0, "1", None, {"a": 1}, {"a": 1.0}, {"a": True}, [], "é"])

TEXTS = st.sampled_from(["", "t", "é", [{"type": "text", "text": "t"}], None])
IDS = st.sampled_from(["c1", "c2"])


def openai_messages() -> Any:
    call = st.builds(
        lambda v: {"id": "c1", "type": "function", "function": {"name": "f", "arguments": v}},
        VALUES,
    )
    return st.one_of(
        st.builds(lambda v: {"role": "user", "content": "q", "name": v}, VALUES),
        st.builds(lambda v: {"role": "assistant", "content": None, "tool_calls": [v]}, call),
        st.builds(lambda v: {"role": "tool", "tool_call_id": "c1", "content": v}, TEXTS),
    )


def anthropic_messages() -> Any:
    inputs = st.builds(lambda v: {"a": v}, VALUES)
    use = st.builds(
        lambda i, v: {"type": "tool_use", "id": i, "name": "f", "input": v}, IDS, inputs
    )
    result = st.builds(lambda i: {"type": "tool_result", "tool_use_id": i, "content": "x"}, IDS)
    text = st.builds(lambda v: {"type": "text", "text": "t", "cache_control": v}, VALUES)
    return st.one_of(
        st.builds(lambda v: {"role": "user", "content": v}, st.lists(result | text, max_size=3)),
        st.builds(lambda v: {"role": "assistant", "content": v}, st.lists(use | text, max_size=3)),
    )


WIRES = {
    wire_openai: openai_messages(),
    wire_anthropic: anthropic_messages(),
}


def meaning(wire: ModuleType, body: Any, heard: Heard | None = None) -> Any:
    try:
        return wire.parse(body, {}, heard)
    except (RequestRefused, UnicodeError) as error:
        return type(error), str(error)


@st.composite
def conversations(draw: Any) -> list[tuple[ModuleType, bytes]]:
    """Requests, each made of the one before: longer, shorter, edited, spelled otherwise."""
    wire = draw(st.sampled_from([*WIRES]))
    said: list[Any] = []
    out = []
    for _ in range(draw(st.integers(1, 8))):
        if draw(st.integers(0, 9)) == 0:
            wire = draw(st.sampled_from([*WIRES]))
        if said and draw(st.integers(0, 3)) == 0:
            damaged = VALUES if draw(st.integers(0, 9)) == 0 else WIRES[wire]
            said[draw(st.integers(0, len(said) - 1))] = draw(damaged)
        if said and draw(st.integers(0, 5)) == 0:
            del said[draw(st.integers(0, len(said) - 1)) :]
        said += draw(st.lists(WIRES[wire], max_size=3))
        body: dict[str, Any] = {"max_tokens": 5, "messages": said, "model": "m"}
        if wire is wire_anthropic and draw(st.booleans()):
            body["system"] = draw(st.sampled_from(["s", "t"]))
        if draw(st.integers(0, 9)) == 0:
            body = {**body, "messages": draw(VALUES)}
        out.append((wire, json.dumps(body, indent=draw(st.none() | st.just(0))).encode()))
    return out


@given(conversations())
def test_with_the_memory_of_the_last_request_or_without(
    requests: list[tuple[ModuleType, bytes]],
) -> None:
    heard = Heard()
    for wire, data in requests:
        found = meaning(wire, decode(data), heard)
        assert repr(found) == repr(meaning(wire, msgspec.json.decode(data)))


def test_the_same_bytes_mean_something_else_on_the_other_wire() -> None:
    heard = Heard()
    asked = {"max_tokens": 5, "messages": [{"role": "user", "content": "q", "name": "n"}]}
    for wire in (wire_openai, wire_anthropic, wire_openai):
        found = meaning(wire, decode(json.dumps(asked).encode()), heard)
        assert found == meaning(wire, asked)


@given(st.recursive(VALUES, lambda v: st.dictionaries(st.sampled_from(["messages", "n"]), v)))
def test_any_body_is_decoded_as_it_is(body: Any) -> None:
    found = decode(json.dumps(body).encode())
    assert repr(json.loads(msgspec.json.encode(found))) == repr(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"messages": [{"role": "user", "content": "hi"},]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user" "content": ""}]}',
        b'{"messages": [{"role": "user", "content": "a\nb"}]}',
        b'{"messages": [nul]}',
        b'{"messages": [' + b"[" * 100_000,
        b'{"messages": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}",
        b'{"messages": [01]}',
        b'{"model": "\xff", "messages": []}',
        b"{} {}",
    ],
)
def test_what_is_not_json_is_refused_and_forgotten(body: bytes) -> None:
    heard, errors = Heard(), (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
    good = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    for _ in range(2):
        with pytest.raises(errors):
            msgspec.json.decode(body)
        with pytest.raises(errors):
            wire_openai.parse(decode(body), {}, heard)
        kept = wire_openai.parse(decode(good), {}, heard).request
        assert kept.messages == [{"role": "user", "content": "hi"}]


def test_only_what_is_new_is_read() -> None:
    """Also where a client moves its mark of what to cache from message to message."""
    heard, read = Heard(), list[str]()

    def understand(where: str, message: Any, before: Any) -> Any:
        read.append(where)
        return [message]

    last: list[Any] = []
    for n in range(1, 9):
        said = [{"role": "user", "content": str(i)} for i in range(2 * n)]
        said[-1]["cache_control"] = {"type": "ephemeral"}
        body = decode(json.dumps({"messages": said}).encode())
        read.clear()
        found = heard.read(body["messages"], understand)
        assert found == said
        assert read == [f"messages[{i}]" for i in range(max(0, 2 * n - 3), 2 * n)]
        same = [a is b for a, b in zip(last, found, strict=False)]
        assert same == [True] * (len(last) - 1) + [False] * bool(last)
        last = found
    with pytest.raises(RequestRefused):
        wire_openai.parse({"messages": [{}]}, {}, heard)
    read.clear()
    assert heard.read(body["messages"], understand) == last and not read
