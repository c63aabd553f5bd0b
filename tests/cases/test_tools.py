"""Area `tools`: M03, P10. Replies are read by vLLM's own parsers."""

import chats
import factories as make
import pytest
from chats import Player, call, reply, tool, user
from transformers import PreTrainedTokenizerFast

from molt.agents.parse import ReplyParser, tool_outcome
from molt.agents.types import ChatRequest

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def hermes() -> ReplyParser:
    pytest.importorskip("vllm")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=chats.own_tokenizer(), eos_token="<|im_end|>"
    )
    return ReplyParser(tokenizer, "hermes", None)


def test_m03_calls_come_back_parsed_and_their_echo_extends_the_branch(hermes: ReplyParser) -> None:
    case = make.load_case("M03")
    given, expected = case["given"], case["expected"]
    p = Player(chats.renderer())
    request = ChatRequest(messages=[user("Weather in Oslo?")], tools=(WEATHER,))
    placed = p.capture.place(request)
    ids = p.renderer.encode(given["reply_text"] + "<|im_end|>")
    answer = hermes.parse(ids, given["reply_text"], request)
    assert hermes.parse(ids, given["reply_text"], request) == answer  # ids of calls are stable
    assert answer.content is None
    assert [
        {"name": c.name, "arguments": tool_outcome(c.arguments)} for c in answer.tool_calls
    ] == expected["tool_calls"]
    p.answer(placed, answer, text=given["reply_text"])
    echo = answer.message()
    result = tool(echo["tool_calls"][0]["id"], "rain")
    p.ask([*request.messages, echo, result], reply("Rain."), tools=(WEATHER,))
    assert p.branches == expected["branches_after_echo_and_tool_result"]
    p.check()


def test_m03_two_calls_have_two_ids_and_content_is_kept(hermes: ReplyParser) -> None:
    text = "Both.\n" + 2 * make.load_case("M03")["given"]["reply_text"]
    request = ChatRequest(messages=[user("Weather?")], tools=(WEATHER,))
    ids = chats.renderer().encode(text)
    answer = hermes.parse(ids, text, request)
    assert len({c.id for c in answer.tool_calls}) == 2 and answer.content == "Both.\n"
    later = ChatRequest(messages=[*request.messages, answer.message(), user("Again?")])
    again = hermes.parse(ids, text, later)
    assert not {c.id for c in again.tool_calls} & {c.id for c in answer.tool_calls}


def test_p10_malformed_arguments_are_outcomes() -> None:
    case = make.load_case("P10")
    outcomes = [tool_outcome(a) for a in case["given"]["arguments"]]
    said = [o if isinstance(o, str) else "ok" for o in outcomes]
    assert said == case["expected"]["outcomes"]


def test_p10_a_malformed_call_loses_no_ids_and_the_rollout_goes_on(hermes: ReplyParser) -> None:
    case = make.load_case("P10")
    p, messages = Player(chats.renderer()), [user("Weather?")]
    n_sampled = 0
    for arguments in case["given"]["arguments"]:
        request = ChatRequest(messages=list(messages), tools=(WEATHER,))
        text = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
        ids = p.renderer.encode(text + "<|im_end|>")
        answer = hermes.parse(ids, text, request)
        assert answer.tool_calls or answer.content == text
        placed = p.capture.place(request)
        p.answer(placed, answer, text=text)
        n_sampled += len(ids)
        results = [tool(c.id, str(tool_outcome(c.arguments))) for c in answer.tool_calls]
        messages += [answer.message(), *(results or [user("That was no call.")])]
    assert case["expected"]["rollout_survives"] and len(p.seen) == 4
    assert (
        sum(sum(mask) for _, mask in p.rows.values()) - n_sampled == -case["expected"]["ids_lost"]
    )
    assert p.branches == 1 and hermes.n_failed == 0
    p.check()


def test_p10_results_out_of_order_reach_the_model_in_call_order() -> None:
    case = make.load_case("P10")
    parallel, expected = case["given"]["parallel"], case["expected"]
    p = Player(chats.renderer())
    calls = reply(None, None, tuple(call(i) for i in parallel["call_order"]))
    p.ask([user("Both?")], calls)
    results = [tool(i, f"RESULT_{i}") for i in parallel["completed"]]
    request = ChatRequest(messages=[user("Both?"), calls.message(), *results])
    placed = p.capture.place(request)
    wire = request.messages[placed.n_known :]  # what the log keeps of the delta
    assert [m["tool_call_id"] for m in wire] == expected["log_order"]
    delta = p.text(placed.delta_ids)
    order = sorted(expected["log_order"], key=lambda i: delta.index(f"RESULT_{i}"))
    assert order == expected["model_facing_order"]
    p.answer(placed, reply("Fine."))
    assert p.branches == 1
