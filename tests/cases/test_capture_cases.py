"""Area `tokens`, at the agent boundary: M01, M02, P02, P07."""

import re
from typing import Any

import chats
import factories as make
import numpy as np
import pytest
from chats import PLAIN, THINKING, Player, call, reply, tool, user

from molt.agents.types import ChatRequest, ToolCall
from molt.store.branches import branches

OWN = pytest.param("own", id="own")
QWEN3 = pytest.param("trl_qwen3.jinja", id="qwen3")


def player(name: str, own: str = PLAIN) -> Player:
    if name == "own":
        return Player(chats.renderer(own))
    tokenizer = chats.recorded_tokenizer("qwen3")
    return Player(chats.recorded_renderer(tokenizer, chats.recorded_template(name)[0]))


@pytest.mark.parametrize("name", [OWN, QWEN3])
def test_m01_all_new_messages_are_in_the_delta(name: str) -> None:
    case = make.load_case("M01")
    p, asked = player(name), user("weather in A and B?")
    calls = reply(None, None, (call("c1"), call("c2")))
    p.ask([asked], calls)
    placed = p.ask([asked, calls.message(), *case["given"]["appended"]], reply("Fine."))
    first, second = case["expected"]["prompt_contains_in_order"]
    delta = p.text(placed.delta_ids)
    assert 0 < delta.index(first) < delta.index(second)
    assert len(p.rows) == case["expected"]["segments"]
    assert p.branches == case["expected"]["branches"]
    p.check()


@pytest.mark.parametrize("name", [OWN, QWEN3])
def test_m02_an_edited_reply_is_context(name: str) -> None:
    case = make.load_case("M02")
    given, expected = case["given"], case["expected"]
    p, asked = player(name), user("Call?")
    p.ask([asked], reply(given["sampled_reply"]))
    echo = reply(given["echoed_reply"]).message()
    placed = p.ask([asked, echo, user("Go on.")], reply("Done."))
    assert placed.reason == "edited_reply"
    assert given["echoed_reply"] in p.text(placed.prompt_ids)
    assert given["sampled_reply"] not in p.text(placed.prompt_ids)
    assert p.branches == expected["branches"]
    own, sampled = p.rows[1]
    assert p.text(own[: sampled.index(1)]).startswith(given["echoed_reply"])
    assert sum(sampled[: len(placed.delta_ids)]) == expected["sampled_tokens_of_edited_text"]
    p.check()  # among others: the original's sampled tokens are owned by one branch
    assert expected["original_reply_still_trainable_once"]


def two_turns(p: Player, thoughtful: str, second: dict[str, Any]) -> Any:
    """The case's first turn as sampled, then `second`; the placement of that."""
    answer = reply("4", "four") if second["role"] == "user" else reply(None, "four", (call("c1"),))
    p.ask([user("2+2?")], answer, text=thoughtful.removesuffix("<|im_end|>"))
    return p.ask([user("2+2?"), answer.message(), second], reply("6", "six"))


def test_p02_the_prompt_that_drops_thoughts_forks_where_ids_differ() -> None:
    case = make.load_case("P02")
    first, expected = case["given"]["turn1"], case["expected"]
    p = player("trl_qwen3.jinja")
    placed = two_turns(p, first["completion_text"], user("Now 3+3?"))
    assert p.rows[0][0] == first["prompt_ids"] + p.rows[0][0][12:]
    assert sum(p.rows[0][1]) == first["completion_len"]
    assert len(placed.prompt_ids) == case["given"]["turn2_prompt_len"]
    assert placed.keep == expected["first_mismatch_index"]
    assert placed.reason == "template_rewrites_history"
    assert p.branches == expected["branches"]
    p.check()


def test_p02_a_tool_turn_keeps_thoughts_and_does_not_fork() -> None:
    case = make.load_case("P02")
    assert "NO fork" in case["expected"]["tool_turn_variant"]
    p = player("trl_qwen3.jinja")
    text = "<think>\nfour\n</think>\n\n<tool_call>{}</tool_call>"
    placed = two_turns(p, text, tool("c1", "4"))
    assert (placed.reason, p.branches) == (None, 1)
    p.check()


@pytest.mark.parametrize("name", [OWN, QWEN3])
def test_p02_one_compaction_is_three_branches(name: str) -> None:
    case = make.load_case("P02")
    assert case["expected"]["compaction_variant"].endswith("= 3 branches")
    p, first = player(name, THINKING), reply("Done one.", "one")
    summary = reply("One is done.", "so far")
    p.ask([user("Do it.")], first)
    p.ask([user("Do it."), first.message(), user("Summarize.")], summary)
    p.ask([user("Do it. So far: One is done.")], reply("Done all.", "rest"))
    assert p.branches == 3
    assert p.capture.forks == {"template_rewrites_history": 1, "new_conversation": 1}
    p.check()


def test_p02_twin_on_our_own_template() -> None:
    p = player("own", THINKING)
    placed = two_turns(p, "<think>\nfour\n</think>\n\n4", user("Now 3+3?"))
    assert placed.keep == len(p.rows[0][0]) - sum(p.rows[0][1])
    assert (placed.reason, p.branches) == ("template_rewrites_history", 2)
    p.check()


def test_p02_the_real_recording() -> None:
    """The agent kept the calls of the first reply and moved its thoughts behind the results."""
    case = make.load_case("P02")["expected"]["real_recording"]
    messages = chats.recording("vllm_round_trip_test_data.json")[
        "expected_output_return_token_id_information"
    ]["messages"]
    one, two = (m for m in messages if "prompt_token_ids" in m)
    p = player("trl_qwen3_training.jinja")
    text = p.text(one["prompt_token_ids"])
    system, rest = text.removeprefix("<|im_start|>system\n").split("\n\n# Tools\n\n", 1)
    tools = tuple(chats.json_lines(rest.split("<tools>\n")[1].split("\n</tools>")[0]))
    asked = re.search(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", rest, re.DOTALL)
    assert asked is not None
    opening = [{"role": "system", "content": system}, user(asked.group(1))]

    placed = p.capture.place(ChatRequest(messages=opening, tools=tools))
    assert placed.prompt_ids.tolist() == one["prompt_token_ids"]
    thought = one["content"].removeprefix("<think>").removesuffix("</think>")
    calls = [ToolCall(id=c["id"], **c["function"]) for c in one["tool_calls"]]
    answer = reply(None, thought, tuple(calls))
    own = [np.array(placed.delta_ids + one["generation_token_ids"], np.int32)]
    p.capture.accept(placed, [(0, own[0])], answer, "stop")

    without = answer.message() | {"reasoning_content": None}
    results = [tool(m["tool_call_id"], m["content"]) for m in messages if m["role"] == "tool"]
    moved = reply("", thought).message()
    request = ChatRequest(messages=[*opening, without, *results, moved], tools=tools)
    placed = p.capture.place(request)
    assert placed.prompt_ids.tolist() == two["prompt_token_ids"]
    assert (placed.keep, placed.reason) == (case["first_mismatch_index"], "reasoning_left_out")
    own.append(np.array(placed.delta_ids + two["generation_token_ids"], np.int32))
    p.capture.accept(placed, [(1, own[1])], reply(two["content"]), "stop")

    found = branches(p.capture.links)
    assert len(found) == case["branches"]
    n_context = [len(one["prompt_token_ids"]), len(placed.delta_ids)]
    owned = [
        sum(max(0, q.end - max(q.owned_from, n_context[q.segment])) for q in branch.pieces)
        for branch in found
    ]
    assert owned == case["trainable_tokens"]


@pytest.mark.parametrize("name", [OWN, QWEN3])
def test_p07_the_delta_is_the_next_prompt_minus_what_was_there(name: str) -> None:
    """A tool result rendered on its own would lose its wrapper, or vanish."""
    p = player(name)
    asked, answer = user("Rain?"), reply(None, None, (call("c1"),))
    p.ask([asked], answer)
    before = len(p.seen[0][0])
    placed = p.ask([asked, answer.message(), tool("c1", "RAIN")], reply("Yes."))
    assert placed.keep == before
    assert placed.prompt_ids[:before].tolist() == p.seen[0][0]
    assert placed.prompt_ids[before:].tolist() == placed.delta_ids
    wrapped = "<|im_start|>tool\nRAIN<|im_end|>"
    if name != "own":
        wrapped = "<|im_start|>user\n<tool_response>\nRAIN\n</tool_response><|im_end|>"
    assert wrapped in p.text(placed.delta_ids)
    p.check()
