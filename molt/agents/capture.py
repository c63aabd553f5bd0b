"""Which tokens of a request are new: recorded ids are spliced, only the rest is tokenized.

Stands between an agent's request and the engine, one `Capture` per rollout; pure: no IO, no
engine, no log. Keeps invariant I1 across turns: the ids of a reply come from its record and never
from its text, whatever a client did to the text on its way back.

A turn extends an earlier one when (1) the request repeats that turn's messages and its reply, *as
parsed* (JSON arguments as values, absent content as ""), and (2) the template, shown that reply as
a placeholder it can neither read nor rewrite, leaves all earlier text as it was. The placeholder
also shows where the reply ends, so what is new begins there. Where (1) or (2) fails, the turn
starts over from the deepest turn for which both hold; the ids it then has in common with another
turn, edited replies included, are kept as context: it forks at the last common token.
"""

import datetime
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from molt.agents.matching import Found, find_turn, in_call_order, same
from molt.agents.render import Renderer
from molt.agents.types import ChatRequest, Messages, ParsedReply
from molt.schemas.errors import SegmentRejected, TemplateError

Int32s = npt.NDArray[np.int32]


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """One answered request."""

    after: "Turn | None"
    """The turn whose reply is the last one that this turn's prompt splices."""
    messages: Messages
    """What follows that reply (all messages at a root), tool results in call order."""
    n_messages: int
    """Messages up to and with this turn's reply."""
    reply: dict[str, Any]
    echo: dict[str, Any]
    """The reply as a client last sent it back, so that the next comparison is a plain one."""
    request: ChatRequest
    text: str
    """Rendered text from the end of `after`'s text to where the reply begins."""
    ids: Int32s
    """Tokens beyond `after`'s chain: those of `messages`, then the sampled ones."""
    n_chain: int
    last_token: int | None
    """The last sampled token."""
    segment: int
    """Its last segment."""
    media: Sequence[tuple[int, int]]
    """(start, n) of runs in the chain that `keep` may not divide."""
    shown: dict[bool, tuple[dict[str, Any], list[str]]]
    """The placeholder of the reply and the marks in it, without and with its tool calls."""
    children: "list[Turn]" = field(default_factory=list)

    def path(self) -> "list[Turn]":
        """From the root to this turn."""
        out, turn = [], self
        while turn is not None:
            out.append(turn)
            turn = turn.after  # type: ignore[assignment]
        return out[::-1]


@dataclass(slots=True, kw_only=True)
class Draft:
    """What a placed request becomes once the engine has answered it."""

    after: Turn | None
    messages: Messages
    request: ChatRequest
    text: str
    ids: Int32s
    n_answers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a request stands in its rollout, and what the engine is to be given."""

    parent: int | None
    """The segment that contains the last kept token; None at a root."""
    keep: int
    """Tokens kept of the parent's chain."""
    delta_ids: list[int]
    """New context; empty when the same prompt is sampled again."""
    prompt_ids: list[int]
    """The whole prompt as the engine must see it: the kept tokens, then `delta_ids`."""
    reason: str | None
    """None at the first root and where all of the parent's chain is kept; else why it forks."""
    n_known: int
    """Leading messages of the request that the spliced turns hold; the wire delta follows them."""
    draft: Draft
    """For `accept`."""


@dataclass(frozen=True, slots=True)
class Link:
    """A segment as `molt.store.branches` sees it."""

    parent: int | None
    keep: int
    n_tokens: int


class Capture:
    """The turns of one rollout. Not thread-safe; `place` changes nothing, `accept` does."""

    def __init__(self, renderer: Renderer, now: datetime.datetime | None = None) -> None:
        self.renderer = renderer
        self.links: dict[int, Link] = {}
        """Accepted segments."""
        self.forks: Counter[str] = Counter()
        """Accepted answers that did not simply extend the rollout, by reason."""
        self._roots: list[Turn] = []
        self._mark = f"molt{secrets.token_hex(8)}"  # no client can guess it and forge an end
        self._n_marks = 0
        self._with_calls = False
        # A template that prints the date prints the same one in every turn of a rollout.
        self._clock = (now or datetime.datetime.now()).strftime

    def place(self, request: ChatRequest) -> Placement:
        """Where `request` continues; TemplateError if its messages cannot be rendered."""
        messages = in_call_order(request.messages)
        found = find_turn(self._roots, messages)
        after, rewritten = found.turn, None
        while True:
            text = self._render(after, messages, found, request)
            holds, why = self._holds(after, text, found)
            if holds is after:
                break
            rewritten = rewritten or why or _changed(after, request)
            after = holds
        chain = [] if after is None else np.concatenate([t.ids for t in after.path()]).tolist()
        ids = self._encode_new(after, text)
        keep, parent, extends = self._keep(after, messages, np.array(ids, np.int32))
        n_known = after.n_messages if after else 0
        prompt_ids = chain + ids
        return Placement(
            parent=parent,
            keep=keep,
            delta_ids=prompt_ids[keep:],
            prompt_ids=prompt_ids,
            reason=None if extends else rewritten or found.why,
            n_known=n_known,
            draft=Draft(
                after=after,
                messages=messages[n_known:],
                request=request,
                text=text[_text_end(after) :],
                ids=np.array(ids, np.int32),
            ),
        )

    def accept(
        self,
        placement: Placement,
        pieces: Sequence[tuple[int, Int32s]],
        reply: ParsedReply,
        finish_reason: str,
        media: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Record an answer to a placed request; with n > 1 several follow one placement.

        `pieces` are (segment, its own token ids) as appended: the first is the delta context and
        the tokens sampled after it, each further one continues the piece before it. `media` are
        the (start, n) of media runs in the chain. SegmentRejected if the delta is another one.
        """
        draft, delta = placement.draft, placement.delta_ids
        if not pieces or pieces[0][1][: len(delta)].tolist() != delta:
            raise SegmentRejected(
                f"segment {pieces[0][0] if pieces else None} does not begin with the {len(delta)} "
                "context tokens that `place` gave it; append those, then the sampled tokens"
            )
        reason = "sibling" if draft.n_answers else placement.reason
        if reason is None and self._taken(placement):
            reason = "concurrent"
        if reason is not None:
            self.forks[reason] += 1
        draft.n_answers += 1
        parent, keep = placement.parent, placement.keep
        for segment, own in pieces:
            self.links[segment] = Link(parent, keep, len(own))
            parent, keep = segment, keep + len(own)
        sampled = np.concatenate([own for _, own in pieces])[len(delta) :].astype(np.int32)
        message = reply.message()
        turn = Turn(
            after=draft.after,
            messages=draft.messages,
            n_messages=len(draft.request.messages) + 1,
            reply=message,
            echo=message,
            request=draft.request,
            text=draft.text,
            ids=np.concatenate([draft.ids, sampled]),
            n_chain=keep,
            last_token=int(sampled[-1]) if len(sampled) else None,
            segment=pieces[-1][0],
            media=media,
            shown=self._placeholders(reply, finish_reason),
        )
        self._peers(draft.after).append(turn)

    def _peers(self, after: Turn | None) -> list[Turn]:
        return self._roots if after is None else after.children

    def _taken(self, placement: Placement) -> bool:
        """True if what was placed as an extension has been extended by another in the meantime."""
        return any(
            link.parent == placement.parent and link.keep >= placement.keep
            for link in self.links.values()
        )

    def _render(
        self, after: Turn | None, messages: Messages, found: Found, request: ChatRequest
    ) -> str:
        """The prompt's text, the replies of `after`'s path being placeholders."""
        template = {"strftime_now": self._clock, **request.template}

        def attempt(with_calls: bool) -> str:
            view: Messages = []
            for turn in after.path() if after else ():
                view += turn.messages
                view.append(turn.shown[with_calls][0])
            for i, message in found.thoughts.items():
                if i < len(view):
                    view[i] = message
            view += messages[len(view) :]
            return self.renderer.render(view, request.tools, template, generate=True)

        try:
            return attempt(self._with_calls)
        except TemplateError:
            if self._with_calls or after is None:
                raise
        text = attempt(True)  # this template takes tool results only after tool calls
        self._with_calls = True
        return text

    def _holds(self, after: Turn | None, text: str, found: Found) -> tuple[Turn | None, str | None]:
        """The deepest turn of the path whose text and reply stand in `text` as they were; why."""
        if after is None:
            return None, None
        start, path = 0, after.path()
        for turn, following in zip(path, [*path[1:], None], strict=True):
            if not text.startswith(turn.text, start):
                return turn.after, None
            start += len(turn.text)
            if turn in found.strange:
                thought = turn.shown[self._with_calls][0]["reasoning_content"]
                if thought in (following.text if following else text[start:]):
                    return turn.after, found.strange[turn]
        marks = turn.shown[self._with_calls][1]
        hidden = [mark for mark in marks if text.find(mark, start) < 0]
        if len(hidden) == len(marks) or any(self._would_show(turn, m) for m in hidden):
            return turn.after, None
        return after, None

    def _would_show(self, turn: Turn, mark: str) -> bool:
        """True if the template shows this part of a reply that is the last message."""
        last = [{"role": "user", "content": "-"}, turn.shown[self._with_calls][0]]
        try:
            return mark in self.renderer.render(last, (), turn.request.template, generate=False)
        except TemplateError:
            return True

    def _encode_new(self, after: Turn | None, text: str) -> list[int]:
        """Ids of what follows the reply of `after`, without the end token that it has sampled."""
        if after is None:
            return self.renderer.encode(text)
        message, marks = after.shown[self._with_calls]
        end = max(text.rfind(mark) + len(mark) for mark in marks if mark in text)
        rest, last = text[end:], after.last_token
        stop = None if last is None else self.renderer.control(last)
        if stop is None:
            return self.renderer.encode(rest)
        # The template's own words for the end of a call may stand between mark and stop token.
        gap = rest.find(stop) if message.get("tool_calls") else len(rest) - len(rest.lstrip())
        if gap < 0 or not rest.startswith(stop, gap):
            return self.renderer.encode(rest)
        ids = self.renderer.encode(rest[gap:])
        return ids[1:] if ids[:1] == [last] else self.renderer.encode(rest[gap + len(stop) :])

    def _keep(
        self, after: Turn | None, messages: Messages, ids: Int32s
    ) -> tuple[int, int | None, bool]:
        """(keep, parent, True if all of the parent's chain is kept or there is none yet)."""
        keep, shared = after.n_chain if after else 0, after
        peers = self._peers(after)
        stack = [(t, keep) for t in peers if after or same(t.messages[0], messages[0])]
        start = keep
        while stack:
            turn, at = stack.pop()
            n = _common(turn.ids, ids[at - start :])
            if n and at + n >= keep:
                keep, shared = at + n, turn
            if n == len(turn.ids):
                stack += [(child, at + n) for child in turn.children]
        if shared is None:
            return 0, None, not peers
        if shared is after:
            return keep, shared.segment, not peers
        extends = keep == shared.n_chain
        for first, n in (run for t in shared.path() for run in t.media):
            if first < keep < first + n:
                keep, extends = first, False
        if keep == 0:
            return 0, None, False
        parent = shared.segment
        while self.links[parent].keep >= keep:
            parent = self.links[parent].parent  # type: ignore[assignment]
        return keep, parent, extends

    def _placeholders(
        self, reply: ParsedReply, finish_reason: str
    ) -> dict[bool, tuple[dict[str, Any], list[str]]]:
        """The reply with every text in it replaced by a mark that occurs nowhere else."""
        marks: list[str] = []

        def mark() -> str:
            self._n_marks += 1
            marks.append(f"{self._mark}x{self._n_marks}x")
            return marks[-1]

        message: dict[str, Any] = {"role": "assistant"}
        if reply.reasoning:
            message["reasoning_content"] = mark()
        # Thoughts that no parser took out stay recognizable for a template that takes them out.
        parts = re.split(r"(</?think>)", reply.content or "")
        content = "".join(mark() if p.strip() and "think>" not in p else p.strip() for p in parts)
        in_thought = finish_reason != "stop" and reply.reasoning and not reply.tool_calls
        plain = {**message, "content": content or ("" if in_thought else mark())}
        n_plain = len(marks)
        if not reply.tool_calls:
            return dict.fromkeys((False, True), (plain, marks))
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": {"molt": mark()}},
            }
            for call in reply.tool_calls
        ]
        full = {**message, "content": content, "tool_calls": calls}
        shown = [m for m in marks if content or m != plain["content"]]
        return {False: (plain, marks[:n_plain]), True: (full, shown)}


def _text_end(after: Turn | None) -> int:
    return sum(len(turn.text) for turn in after.path()) if after else 0


def _changed(after: Turn | None, request: ChatRequest) -> str:
    """Why the same messages no longer render as they did."""
    assert after is not None
    if tuple(after.request.tools) != tuple(request.tools):
        return "tools_changed"
    return (
        "template_changed"
        if after.request.template != request.template
        else ("template_rewrites_history")
    )


def _common(a: Int32s, b: Int32s) -> int:
    """How many leading ids are equal."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
