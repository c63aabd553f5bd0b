"""Random rollouts: branches reproduce what the engine saw, and each sampled token is owned once.

An agent is drawn that answers tools, asks on, edits, drops, re-sends, compacts, starts sub-agents
and sends several requests at once; replies think, call tools, are cut, come in pieces and are
spelled in ids that no tokenizer would give.
"""

import contextlib
import json
from typing import Any

import chats
import numpy as np
import pytest
from chats import Player, call, reply, tool, user
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from molt.agents.capture import Capture, Placement
from molt.agents.turns import find_turn, in_call_order
from molt.agents.types import ChatRequest, Messages, ParsedReply

TEXT = st.text(alphabet="ab \n<|im_end|>é", max_size=6) | st.sampled_from(["<|im_end|>", "weather"])
ARGUMENTS = st.sampled_from(['{"a": 1}', '{"a":1,"b":[2]}', '{"b": [2], "a": 1.0}', "[1", ""])
MOVES = (
    *("ask", "tool", "edit", "drop", "again", "compact", "sub_agent", "fan_out", "several"),
    "forget",
)
RENDERERS = [chats.renderer(chats.PLAIN), chats.renderer(chats.THINKING)]


@st.composite
def answers(draw: Any) -> ParsedReply:
    calls = draw(st.lists(ARGUMENTS, max_size=2))
    return reply(
        draw(st.none() | TEXT) or None,
        draw(st.none() | TEXT) or None,
        tuple(call(f"call{draw(st.integers(0, 999))}", a) for a in calls),
    )


class Agent:
    """Holds several conversations of one rollout, as (messages) that end with a reply."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.play(Player(draw(st.sampled_from(RENDERERS))))
        self.open: list[Messages] = []
        self.answers: list[ParsedReply] = []
        self.n_extended = 0

    def play(self, player: Player) -> None:
        """Beside a capture that searches all turns for every request."""
        self.player, self.searching = player, Capture(player.renderer)
        self.searched: dict[int, Placement] = {}

    def sample(self, placement: Placement, messages: Messages) -> None:
        """Answer a placed request with ids that need not be the tokenizer's."""
        draw, p = self.draw, self.player
        again = st.sampled_from(self.answers) if self.answers else st.nothing()
        answer = draw(answers() | again)
        self.answers.append(answer)
        ids = p.renderer.encode(chats.spelled(answer))
        if draw(st.booleans()):
            ids = [i for piece in ids for i in p.renderer.encode(p.text([piece]))][::-1]
        finish = draw(st.sampled_from(["stop", "length"]))
        ids += p.renderer.encode(p.stop) if finish == "stop" else []
        cut = draw(st.integers(0, len(ids)))
        pieces = []
        for context, sampled in ((placement.delta_ids, ids[:cut]), ([], ids[cut:])):
            own = [*context, *sampled]
            if own or not pieces:
                p.rows[len(p.rows)] = (own, [0] * len(context) + [1] * len(sampled))
                pieces.append((len(p.rows) - 1, np.array(own, np.int32)))
        p.capture.accept(placement, pieces, answer, finish)
        self.searching.accept(self.searched[id(placement.prompt)], pieces, answer, finish)
        p.seen.append((placement.prompt_ids.tolist() + ids, pieces[-1][0]))
        self.open.append([*messages, answer.message()])

    def place(self, messages: Messages, **more: Any) -> Placement:
        request = ChatRequest(messages=messages, **more)
        capture = self.player.capture
        placement = capture.place(request)
        told = capture._roots, capture._last[1]
        assert find_turn(*told, capture._newest) == find_turn(*told)
        self.searching._newest, self.searching._chain = None, (None, np.zeros(0, np.int32))
        searched = self.searching.place(request)
        for name in ("parent", "keep", "delta_ids", "reason", "n_known"):
            assert getattr(placement, name) == getattr(searched, name)
        assert np.array_equal(placement.prompt_ids, searched.prompt_ids)
        self.searched[id(placement.prompt)] = searched
        assert placement.prompt_ids[placement.keep :].tolist() == placement.delta_ids
        if placement.n_known == 0:  # nothing spliced: exactly what a server without a memory sees
            r = self.player.renderer
            assert placement.prompt_ids.tolist() == r.encode(
                r.render(in_call_order(messages), generate=True)
            )
        return placement

    def turn(self, messages: Messages) -> Placement:
        placement = self.place(messages)
        self.sample(placement, messages)
        return placement

    def move(self) -> None:
        draw = self.draw
        known = draw(st.sampled_from(self.open))
        match draw(st.sampled_from(MOVES)):
            case "ask":
                self.turn([*known, user(draw(TEXT))])
            case "tool":
                ids = [c["id"] for c in known[-1].get("tool_calls", [])]
                results = [tool(i, draw(TEXT)) for i in draw(st.permutations(ids or ["none"]))]
                self.turn([*known, *results])
            case "edit":
                at = draw(st.integers(0, len(known) - 1))
                edited = known[at] | {"content": draw(TEXT)}
                self.turn([*known[:at], edited, *known[at + 1 :], user("?")])
            case "drop":
                at = draw(st.integers(0, len(known) - 1))
                self.turn([*known[:at], *known[at + 1 :], user("?")])
            case "again":
                self.turn(known[:-1])
            case "forget":
                kept = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in known]
                self.turn([*kept, user(draw(TEXT))])
                self.turn([*self.open[-1], user("And?")])
            case "compact":
                self.turn([*known[:1], user("So far: " + draw(TEXT))])
            case "sub_agent":
                self.turn([user(draw(TEXT))])
            case "fan_out":
                requests = [[*known, user(draw(TEXT))] for _ in range(2)]
                placed = [self.place(messages) for messages in requests]
                for placement, messages in zip(placed[::-1], requests[::-1], strict=True):
                    self.sample(placement, messages)
            case "several":
                messages = [*known, user("Pick.")]
                placement = self.place(messages, n=2)
                for _ in range(2):
                    self.sample(placement, messages)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_branches_reproduce_what_the_engine_saw(data: st.DataObject) -> None:
    agent = Agent(data.draw)
    agent.turn([{"role": "system", "content": "s"}, user(data.draw(TEXT))])
    for _ in range(data.draw(st.integers(1, 8))):
        agent.move()
    agent.player.check()


def sent_back(draw: Any, message: dict[str, Any]) -> dict[str, Any]:
    """A reply as some SDK might write it again: the same, as parsed."""
    out = json.loads(json.dumps(message))
    if draw(st.booleans()):
        out |= {"refusal": None, "annotations": [], "audio": None}
    if not out["content"]:
        out["content"] = draw(st.sampled_from([None, "", []]))
    elif draw(st.booleans()):
        out["content"] = [{"type": "text", "text": out["content"]}]
    for c in out.get("tool_calls", ()):
        with contextlib.suppress(ValueError):  # what is not JSON stays as it is
            value = json.loads(c["function"]["arguments"])
            pairs = draw(st.permutations(list(value.items())))
            c["function"]["arguments"] = json.dumps(
                dict(pairs), indent=draw(st.none() | st.just(2))
            )
    return out


@pytest.mark.parametrize("kind", ["user turns", "tool loop"])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_an_honest_agent_has_one_branch(kind: str, data: st.DataObject) -> None:
    """Whatever is sampled and however its SDK writes it again, an agent that goes on goes on."""
    draw, agent = data.draw, Agent(data.draw)
    agent.play(Player(RENDERERS[kind == "tool loop"]))  # this one keeps thoughts in a loop
    agent.turn([user(draw(TEXT))])
    for _ in range(draw(st.integers(1, 8))):
        *known, last = agent.open[-1]
        known.append(sent_back(draw, last))
        ids = [c["id"] for c in last.get("tool_calls", ())] or ["none"]
        new = [user(draw(TEXT))]
        if kind == "tool loop":
            new = [tool(i, draw(TEXT)) for i in draw(st.permutations(ids))]
        placement = agent.turn([*known, *new])
        assert placement.reason is None
        assert placement.prompt_ids[: placement.keep].tolist() == agent.player.seen[-2][0]
    assert agent.player.branches == 1 and not agent.player.capture.forks
    agent.player.check()
