"""Whether a client sent back what it was given: messages compared as parsed.

Serves the capture, which asks here how much of a request it knows. A client may re-space and
re-order the JSON of tool arguments, send null for "" and text parts for a string; anything else
is a change. Reasoning is compared apart, since it matters only where the template shows it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from molt.agents.render import plain_content
from molt.agents.types import Messages

if TYPE_CHECKING:
    from molt.agents.capture import Turn

_REPLY_KEYS = frozenset({"role", "content", "tool_calls"})
"""All that a reply of ours consists of, reasoning apart; what a client adds to it is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How much of a request is known."""

    turn: "Turn | None"
    """The deepest turn whose messages and reply the request repeats."""
    thoughts: dict[int, dict[str, Any]]
    """Messages that no turn sampled and whose reasoning is another than before, by position."""
    strange: "dict[Turn, str]"
    """Turns of the path whose reply came back with other reasoning -> what that would be."""
    why: str
    """Where the request leaves all known conversations: the reason if it has to fork."""


def find_turn(roots: "Sequence[Turn]", messages: Messages) -> Found:
    """The longest match over all turns; of equal ones the latest."""
    best: Turn | None = None
    why = (0, 0, "new_conversation")
    stack = [(turn, 0) for turn in roots]
    while stack:
        turn, at = stack.pop()
        end = at + sum(1 for _ in _repeated(turn.messages, messages[at:]))
        why = max(why, _departure(turn, at, end, messages))
        if end - at < len(turn.messages) or end == len(messages):
            continue
        if messages[end] == turn.echo or same(turn.reply, messages[end]):
            turn.echo = messages[end]
            if best is None or end + 1 > best.n_messages:
                best = turn
            stack += [(child, end + 1) for child in turn.children]
    thoughts: dict[int, dict[str, Any]] = {}
    strange: dict[Turn, str] = {}
    at = 0
    for turn in best.path() if best else ():
        for known in turn.messages:
            if _reasoning(known) != _reasoning(messages[at]):
                given = {"reasoning_content": _reasoning(messages[at]) or None, "reasoning": None}
                thoughts[at] = {**known, **given}
            at += 1
        given_back = _reasoning(messages[at])
        if given_back != _reasoning(turn.reply):
            strange[turn] = "edited_reply" if given_back else "reasoning_left_out"
        at += 1
    return Found(turn=best, thoughts=thoughts, strange=strange, why=why[2])


def _departure(turn: "Turn", at: int, end: int, messages: Messages) -> tuple[int, int, str]:
    """(messages in common, rank, reason) of a request that does not go on after `turn`."""
    if end - at < len(turn.messages):
        system_only = at == 0 and all(m["role"] in ("system", "developer") for m in messages[:end])
        if end == at or system_only:
            return end, 0, "branched" if at else "new_conversation"
        return end, 1, "rewritten_history"
    if end == len(messages):
        return end, 3, "resampled"
    return end, 2, "edited_reply" if messages[end]["role"] == "assistant" else "rewritten_history"


def _repeated(known: Messages, given: Messages) -> Iterator[None]:
    for a, b in zip(known, given, strict=False):
        if not same(a, b):
            return
        yield


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """True if two messages mean the same, reasoning apart."""
    return a == b or _canonical(a) == _canonical(b)


def _canonical(message: dict[str, Any]) -> dict[str, Any]:
    out = {
        k: v
        for k, v in message.items()
        if k not in ("content", "tool_calls", "reasoning_content", "reasoning") and v
    }
    if message.get("role") == "assistant":
        out = {k: v for k, v in out.items() if k in _REPLY_KEYS}
    out["content"] = plain_content(message.get("content")) or ""
    out["tool_calls"] = [
        (c.get("id"), c["function"]["name"], json_value(c["function"].get("arguments")))
        for c in message.get("tool_calls") or ()
    ]
    return out


def json_value(arguments: Any) -> str:
    """Equal for equal JSON values, however spaced or ordered; text that is not JSON as it is."""
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


def in_call_order(messages: Messages) -> Messages:
    """Adjacent tool results sorted into the order of their calls, as the model is to see them."""
    out: Messages = []
    order: dict[Any, int] = {}
    block = 0
    for message in messages:
        if message.get("role") == "tool":
            out.append(message)
            ids = [m.get("tool_call_id") for m in out[block:]]
            if len(ids) > 1 and all(i in order for i in ids):
                out[block:] = sorted(out[block:], key=lambda m: order[m["tool_call_id"]])
            continue
        calls = message.get("tool_calls") or ()
        order = {call.get("id"): i for i, call in enumerate(calls)}
        out.append(message)
        block = len(out)
    return out
