"""The turns of a rollout, and how much of a request they hold: messages compared as parsed.

Serves the capture. A client may re-space and re-order the JSON of tool arguments, send null for ""
and text parts for a string; anything else is a change. Reasoning is compared apart, since it
matters only where the template shows it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from molt.agents.render import plain_content
from molt.agents.types import Messages

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a placed request adds to the rollout."""

    after: "Turn | None"
    """The turn whose reply is the last one that the prompt splices."""
    messages: Messages
    """What follows that reply (all messages at a root), tool results in call order."""
    n_messages: int
    """All messages of the request."""
    tools: tuple[dict[str, Any], ...]
    template: dict[str, Any]
    text: str
    """Rendered text from the end of `after`'s text to where the reply begins."""
    ids: Int32s
    """Tokens beyond `after`'s chain."""
    n_checked: int
    """Turns of the path up to the last one whose whole prompt was rendered."""


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """A prompt with its answer."""

    prompt: Prompt
    reply: dict[str, Any]
    echo: dict[str, Any]
    """The reply as a client last sent it back, so that the next comparison is a plain one."""
    ids: Int32s
    """Those of the prompt, then the sampled ones."""
    n_chain: int
    n_turns: int
    """Of the path to this one, which is counted."""
    root: Prompt
    """The first one of the path."""
    last_token: int | None
    """The last sampled one."""
    thinks: bool
    """A reply of the path, or a message that a prompt added, holds reasoning."""
    open_thought: bool
    """The reply was cut while it reasoned."""
    segment: int
    """Its last segment."""
    media: Sequence[tuple[int, int]]
    """(start, n) of runs in the chain that no fork may divide."""
    shown: dict[bool, tuple[dict[str, Any], list[str]]]
    """The placeholder of the reply and the marks in it, without and with its tool calls."""
    children: "list[Turn]" = field(default_factory=list)

    @property
    def n_messages(self) -> int:
        """Messages of the conversation up to and with this reply."""
        return self.prompt.n_messages + 1

    def path(self, first: "Turn | None" = None) -> "list[Turn]":
        """From the root, or from `first`, to this turn."""
        out, turn = [self], self.prompt.after
        while turn is not None and out[-1] is not first:
            out.append(turn)
            turn = turn.prompt.after
        return out[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How much of a request is known."""

    turn: Turn | None
    """The deepest turn whose messages and reply the request repeats."""
    thoughts: dict[int, dict[str, Any]]
    """Messages that no turn sampled and whose reasoning is another than before, by position."""
    strange: dict[Turn, str]
    """Turns of the path whose reply came back with other reasoning -> what that would be."""
    why: str
    """Where the request leaves all known conversations: the reason if it has to fork."""
    alone: bool
    """Nothing known goes on as long as the request does, and all reasoning is as it was."""


def find_turn(roots: Sequence[Turn], messages: Messages, newest: Turn | None = None) -> Found:
    """The longest match over all turns; of equal ones that with most thoughts, then the latest.

    `newest`: the turn that answered a request which was `alone`, if none came since and these
    messages begin with those: what is not below it ended before, and is not looked at again.
    """
    first = newest.prompt.n_messages - len(newest.prompt.messages) if newest else 0
    best: Turn | None = None
    rank = (0, 0)
    left: list[tuple[int, int, bool]] = []
    stack = [(turn, first, 0) for turn in ([newest] if newest else roots)]
    while stack:
        turn, at, n_strange = stack.pop()
        end = at + len(turn.prompt.messages)
        all_known = messages[at:end] == turn.prompt.messages
        if not all_known:
            end = at
            for known, given in zip(turn.prompt.messages, messages[at:], strict=False):
                if not same(known, given):
                    break
                end += 1
            all_known = end - at == len(turn.prompt.messages)
        left.append((end, at, all_known))
        if not all_known or end == len(messages):
            continue
        echo = messages[end]
        if echo != turn.echo:
            if not same(turn.reply, echo) or (_reasoning(echo) and not _reasoning(turn.reply)):
                continue
            turn.echo = echo
        n_strange += echo != turn.reply and _reasoning(echo) != _reasoning(turn.reply)
        if (end + 1, -n_strange) > rank:
            best, rank = turn, (end + 1, -n_strange)
        stack += [(child, end + 1, n_strange) for child in turn.children]
    if newest and best is None:
        return find_turn(roots, messages)
    thoughts: dict[int, dict[str, Any]] = {}
    strange: dict[Turn, str] = {}
    at = first
    for turn in best.path(newest) if best else ():
        for message in turn.prompt.messages:
            if messages[at] != message and (now := _reasoning(messages[at])) != _reasoning(message):
                thoughts[at] = {**message, "reasoning_content": now or None, "reasoning": None}
            at += 1
        echo = messages[at]
        if echo != turn.reply and (now := _reasoning(echo)) != _reasoning(turn.reply):
            strange[turn] = "edited_reply" if now else "reasoning_left_out"
        at += 1
    furthest = max(left, default=(0, 0, False))[0]
    whys = (_departure(at, end, all_, messages) for end, at, all_ in left if end == furthest)
    _, why = max(whys, default=(0, "new_conversation"))
    alone = furthest < len(messages) and not thoughts and not strange
    return Found(turn=best, thoughts=thoughts, strange=strange, why=why, alone=alone)


def _departure(at: int, end: int, all_known: bool, messages: Messages) -> tuple[int, str]:
    """(rank, reason) of a request that leaves a turn's conversation after `end` messages.

    The turn's own messages begin at `at`; `all_known`: the request repeats every one of them.
    """
    if all_known and end == len(messages):
        return 3, "resampled"
    if all_known:
        edited = messages[end]["role"] == "assistant"
        return 2, "edited_reply" if edited else "rewritten_history"
    if all(m["role"] in ("system", "developer") for m in messages[:end]):
        return 0, "new_conversation"
    return 1, "branched" if end == at else "rewritten_history"


def well_formed(message: Any) -> bool:
    """True for what can be compared: a dict with a role, calls with a function each, ids texts."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(
        isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls
    ):
        return False
    ids = (message.get("tool_call_id"), *(c.get("id") for c in calls))
    return all(i is None or isinstance(i, str) for i in ids)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """True if two messages mean the same, reasoning apart."""
    return a == b or _canonical(a) == _canonical(b)


def _canonical(message: dict[str, Any]) -> dict[str, Any]:
    """What counts of a message; of an assistant's only what a reply of ours consists of."""
    out = {"role": message["role"], "content": plain_content(message.get("content")) or ""}
    if message["role"] != "assistant":
        out.update((k, v) for k, v in message.items() if v and k != "content")
    out["tool_calls"] = [
        (c.get("id"), c["function"].get("name"), json_value(c["function"].get("arguments")))
        for c in message.get("tool_calls") or ()
    ]
    return out


def json_value(arguments: Any) -> str:
    """Equal for equal JSON values, however spaced or ordered; what is not JSON as it is."""
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        # JavaScript has one kind of number: 1.0 comes back as 1.
        return json.dumps(json.loads(text, parse_float=_number), sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return repr(arguments)


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _reasoning(message: dict[str, Any]) -> str:
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


def think(messages: Messages) -> bool:
    """True if one of them holds reasoning, taken out of the text or not."""
    return any(_reasoning(m) or "</think>" in str(m.get("content")) for m in messages)


def in_call_order(messages: Messages) -> Messages:
    """Adjacent tool results sorted into the order of their calls, as the model is to see them."""
    out: Messages = []
    order: dict[Any, int] = {}
    for message in messages:
        out.append(message)
        if message["role"] != "tool":
            order = {call.get("id"): i for i, call in enumerate(message.get("tool_calls") or ())}
            block = len(out)
        elif all(m.get("tool_call_id") in order for m in out[block:]):
            out[block:] = sorted(out[block:], key=lambda m: order[m["tool_call_id"]])
    return out
