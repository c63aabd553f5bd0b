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
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from molt.agents.render import Renderer
from molt.agents.turns import (
    Found,
    Int32s,
    Prompt,
    Turn,
    find_turn,
    in_call_order,
    same,
    think,
    well_formed,
)
from molt.agents.types import ChatRequest, Messages, ParsedReply
from molt.schemas.errors import SegmentRejected, TemplateError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a request stands in its rollout, and what the engine is to be given."""

    parent: int | None
    """The segment that contains the last kept token; None at a root."""
    keep: int
    """Tokens kept of the parent's chain."""
    delta_ids: list[int]
    """New context; empty when the same prompt is sampled again."""
    prompt_ids: Int32s
    """The whole prompt as the engine must see it: the kept tokens, then `delta_ids`."""
    reason: str | None
    """None at the first root and where all of the parent's chain is kept; else why it forks."""
    n_known: int
    """Leading messages of the request that the spliced turns hold; the wire delta follows them."""
    prompt: Prompt
    """For `accept`."""


@dataclass(frozen=True, slots=True)
class Link:
    """A segment as `molt.store.branches` sees it."""

    parent: int | None
    keep: int
    n_tokens: int


class _Fit(NamedTuple):
    """How far the template leaves a path as it was."""

    after: Turn | None
    text: str
    why: str | None
    n_checked: int


class Capture:
    """The turns of one rollout. Not thread-safe; `accept` records a turn, `place` none."""

    def __init__(self, renderer: Renderer, now: datetime.datetime | None = None) -> None:
        self.renderer = renderer
        self.links: dict[int, Link] = {}
        """Accepted segments."""
        self.forks: Counter[str] = Counter()
        """Accepted answers that did not simply extend the rollout, by reason."""
        self._roots: list[Turn] = []
        self._extended: dict[int | None, int] = {}
        """Segment -> the most of a chain ending in it that another segment continues."""
        self._chain: tuple[Turn | None, Int32s] = (None, np.zeros(0, np.int32))
        """The last turn and all ids up to its end."""
        self._alone: Prompt | None = None
        self._newest: Turn | None = None
        """Of `find_turn`; `_alone` is the prompt whose answer will be one."""
        self._last: tuple[Messages, Messages] = ([], [])
        """The messages of the last request as they came, and with tool results in call order."""
        self._mark = f"molt{secrets.token_hex(8)}"  # no client can guess it and forge an end
        self._n_marks = 0
        self._with_calls = False
        # A template that prints the date prints the same one in every turn of a rollout.
        self._clock = (now or datetime.datetime.now()).strftime

    def place(self, request: ChatRequest) -> Placement:
        """Where `request` continues; TemplateError if its messages cannot be rendered."""
        messages, n_same = self._ordered(request.messages)
        if self._newest and n_same < self._newest.prompt.n_messages:
            self._newest = None
        found = find_turn(self._roots, messages, self._newest)
        after, rewritten = found.turn, None
        while True:
            fits = self._fit(after, messages, found, request)
            if fits.after is after:
                break
            rewritten = rewritten or fits.why or _changed(after, request)
            after = fits.after
        ids = self._encode_new(after, fits.text) if after else self._encode_root(fits.text, found)
        new = np.array(ids, np.int32)
        keep, parent, extends = self._keep(after, messages, new)
        n_known = after.n_messages if after else 0
        prompt_ids = np.concatenate([self._chain_of(after), new])
        tools = tuple(request.tools)
        if after and after.prompt.tools == tools:
            tools = after.prompt.tools  # every request brings a copy; keep one
        prompt = Prompt(
            after=after,
            messages=messages[n_known:],
            n_messages=len(messages),
            tools=tools,
            template=request.template,
            text=fits.text,
            ids=new,
            n_checked=fits.n_checked,
        )
        self._alone = prompt if found.alone else None
        return Placement(
            parent=parent,
            keep=keep,
            delta_ids=prompt_ids[keep:].tolist(),
            prompt_ids=prompt_ids,
            reason=None if extends else rewritten or found.why,
            n_known=n_known,
            prompt=prompt,
        )

    def _chain_of(self, turn: Turn | None) -> Int32s:
        """All ids up to the end of a turn."""
        if turn is None:
            return np.zeros(0, np.int32)
        last, ids = self._chain
        return ids if turn is last else np.concatenate([t.ids for t in turn.path()])

    def _ordered(self, given: Messages) -> tuple[Messages, int]:
        """The messages with tool results in call order, and how many are the last request's.

        What that one had looked through is not looked through again. TemplateError if a message
        is none.
        """
        known, ordered = self._last
        n = len(known) if given[: len(known)] == known else 0
        wrong = [i for i, m in enumerate(given[n:], n) if not well_formed(m)]
        if wrong or not given:
            raise TemplateError(
                f"messages {wrong} of {len(given)}: each needs a role, its tool calls a "
                "function each, and a request at least one message"
            )
        while 0 < n < len(given) and given[n]["role"] == "tool":
            n -= 1  # results of one message are ordered together
        self._last = [*given], ordered[:n] + in_call_order(given[n:])
        return self._last[1], n

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
        prompt, delta = placement.prompt, placement.delta_ids
        if not pieces or pieces[0][1][: len(delta)].tolist() != delta:
            raise SegmentRejected(
                f"segment {pieces[0][0] if pieces else None} does not begin with the {len(delta)} "
                "context tokens that `place` gave it; append those, then the sampled tokens"
            )
        peers = self._peers(prompt.after)
        reason = placement.reason
        if any(turn.prompt is prompt for turn in peers):
            reason = "sibling"
        elif reason is None and self._taken(placement):
            reason = "concurrent"
        if reason is not None:
            self.forks[reason] += 1
        parent, keep = placement.parent, placement.keep
        for segment, own in pieces:
            self.links[segment] = Link(parent, keep, len(own))
            self._extended[parent] = max(keep, self._extended.get(parent, 0))
            parent, keep = segment, keep + len(own)
        sampled = np.concatenate([own for _, own in pieces])[len(delta) :].astype(np.int32)
        last = int(sampled[-1]) if len(sampled) else None
        ended = last is None or self.renderer.control(last) is not None
        cut = finish_reason in ("length", "abort") and not ended
        after, message = prompt.after, reply.message()
        turn = Turn(
            prompt=prompt,
            reply=message,
            echo=message,
            ids=np.concatenate([prompt.ids, sampled]),
            n_chain=keep,
            n_turns=after.n_turns + 1 if after else 1,
            root=after.root if after else prompt,
            last_token=last,
            thinks=bool(after and after.thinks) or think([*prompt.messages, message]),
            open_thought=cut and bool(reply.reasoning) and not (reply.content or reply.tool_calls),
            segment=pieces[-1][0],
            media=media,
            shown=self._placeholders(reply),
        )
        peers.append(turn)
        self._chain = turn, np.concatenate([placement.prompt_ids, sampled])
        self._newest = turn if prompt is self._alone else None
        self._alone = None

    def _peers(self, after: Turn | None) -> list[Turn]:
        return self._roots if after is None else after.children

    def _taken(self, placement: Placement) -> bool:
        """True if what was placed as an extension has been extended by another in the meantime."""
        return self._extended.get(placement.parent, -1) >= placement.keep

    def _fit(
        self, after: Turn | None, messages: Messages, found: Found, request: ChatRequest
    ) -> _Fit:
        """The text after `after`, or the deepest turn before it that the template lets stand."""
        new = messages[after.n_messages :] if after else messages
        if after and self._may_skip(after, new, found, request):
            text = self._render_ends(after, new, request)
            if text is not None and self._shows_reply(after, text):
                return _Fit(after, text, None, after.prompt.n_checked)
        path = after.path() if after else []
        try:
            text = self._render_all(path, new, found, request)
        except TemplateError:
            if after is None:
                raise
            return _Fit(None, "", None, 0)  # it may still take the messages as they are
        start = 0
        for i, turn in enumerate(path):
            if not text.startswith(turn.prompt.text, start):
                return _Fit(turn.prompt.after, "", None, 0)
            start += len(turn.prompt.text)
            if turn in found.strange:
                thought = turn.shown[self._with_calls][0]["reasoning_content"]
                if thought in (path[i + 1].prompt.text if turn is not after else text[start:]):
                    return _Fit(turn.prompt.after, "", found.strange[turn], 0)
        if after and not self._shows_reply(after, text[start:]):
            return _Fit(after.prompt.after, "", None, 0)
        return _Fit(after, text[start:], None, len(path) + 1)

    def _may_skip(self, last: Turn, new: Messages, found: Found, request: ChatRequest) -> bool:
        """True where rendering all of the history again would only confirm what is known.

        Under unchanged settings, where tools go on, or users go on and nobody has thought aloud
        (templates drop thoughts when a user speaks): the whole is rendered whenever it has doubled.
        """
        asked = [{m["role"] for m in p} for p in (new, last.prompt.messages)]
        return (
            4 < last.n_turns < 2 * last.prompt.n_checked
            and not found.thoughts
            and not found.strange
            and all(isinstance(m.get("content"), str) for m in new)
            and (asked == [{"tool"}] * 2 or (asked == [{"user"}] * 2 and not last.thinks))
            and last.prompt.tools == tuple(request.tools)
            and last.prompt.template == request.template
        )

    def _render_ends(self, last: Turn, new: Messages, request: ChatRequest) -> str | None:
        """The text after a path from its first and last turns; None if it depends on others.

        What a template does to the last turns, it has done to those before.
        """
        before = last.prompt.after
        assert before is not None and before.prompt.after is not None
        view = [*last.root.messages, before.prompt.after.shown[self._with_calls][0]]
        for turn in (before, last):
            view += [*turn.prompt.messages, turn.shown[self._with_calls][0]]
        try:
            text = self._render([*view, *new], request)
        except TemplateError:
            return None
        known = last.root.text + before.prompt.text + last.prompt.text
        return text.removeprefix(known) if text.startswith(known) else None

    def _render_all(
        self, path: list[Turn], new: Messages, found: Found, request: ChatRequest
    ) -> str:
        def view(with_calls: bool) -> Messages:
            out: Messages = []
            for turn in path:
                out += [*turn.prompt.messages, turn.shown[with_calls][0]]
            return [found.thoughts.get(i, m) for i, m in enumerate(out)] + new

        try:
            return self._render(view(self._with_calls), request)
        except TemplateError:
            if self._with_calls or not path:
                raise
        text = self._render(view(True), request)
        self._with_calls = True  # this template takes tool results only after tool calls
        return text

    def _render(self, view: Messages, request: ChatRequest) -> str:
        template = {"strftime_now": self._clock, **request.template}
        return self.renderer.render(view, request.tools, template, generate=True)

    def _shows_reply(self, turn: Turn, text: str) -> bool:
        """True unless `text`, which begins with the turn's reply, leaves some of it out.

        What the template never shows of a reply, not even of the last message, is not missed.
        """
        marks = turn.shown[self._with_calls][1]
        hidden = [mark for mark in marks if mark not in text]
        return len(hidden) < len(marks) and not any(self._would_show(turn, m) for m in hidden)

    def _would_show(self, turn: Turn, mark: str) -> bool:
        """True if the template shows this part of a reply that is the last message."""
        last = [{"role": "user", "content": "-"}, turn.shown[self._with_calls][0]]
        try:
            return mark in self.renderer.render(last, (), turn.prompt.template, generate=False)
        except TemplateError:
            return True

    def _encode_root(self, text: str, found: Found) -> list[int]:
        """Ids of a whole conversation; what it has in common with the one found is not encoded.

        Exact, because no merge of a tokenizer goes across a control token.
        """
        if found.turn is None:
            return self.renderer.encode(text)
        known = found.turn.root
        counted = zip(*(x.tolist() for x in np.unique(known.ids, return_counts=True)), strict=True)
        n, control = max(((n, i) for i, n in counted if self.renderer.control(i)), default=(0, 0))
        mark = self.renderer.control(control) or ""
        cut = text.rfind(mark, 0, _common_text(text, known.text)) if n else -1
        if cut < 0 or n != known.text.count(mark):
            return self.renderer.encode(text)
        keep = int(np.flatnonzero(known.ids == control)[text.count(mark, 0, cut)])
        return known.ids[:keep].tolist() + self.renderer.encode(text[cut:])

    def _encode_new(self, after: Turn, text: str) -> list[int]:
        """Ids of what follows the reply of `after`, without the end token that it has sampled.

        `text` begins with that reply.
        """
        message, marks = after.shown[self._with_calls]
        last = after.last_token
        if after.open_thought and marks[0] in text:
            # The template closes the thought; then comes its placeholder for what was never said.
            marks, text = marks[:1], text.replace(marks[1], "", 1)
        end = max(text.rfind(mark) + len(mark) for mark in marks if mark in text)
        rest = text[end:]
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
        stack = [(t, keep) for t in peers if after or same(t.prompt.messages[0], messages[0])]
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
                keep = first
        if keep == 0:
            return 0, None, False
        parent = shared.segment
        while self.links[parent].keep >= keep:
            parent = self.links[parent].parent  # type: ignore[assignment]
        return keep, parent, extends

    def _placeholders(self, reply: ParsedReply) -> dict[bool, tuple[dict[str, Any], list[str]]]:
        """The reply with every text in it replaced by a mark that occurs nowhere else."""
        marks: list[str] = []

        def mark() -> str:
            self._n_marks += 1
            marks.append(f"{self._mark}x{self._n_marks}x")
            return marks[-1]

        message: dict[str, Any] = {"role": "assistant"}
        if reply.reasoning:
            message["reasoning_content"] = mark()
        n_thoughts = len(marks)
        # Thoughts that no parser took out stay recognizable for a template that takes them out.
        parts = re.split(r"(</?think>)", reply.content or "")
        tags = ("<think>", "</think>")
        content = "".join(p if p in tags else mark() if p.strip() else "" for p in parts)
        n_said = len(marks)
        plain = {**message, "content": content if n_said > n_thoughts else content + mark()}
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
        return {False: (plain, marks[:n_plain]), True: (full, marks[:n_said] + marks[n_plain:])}


def _changed(after: Turn | None, request: ChatRequest) -> str:
    """Why the same messages no longer render as they did."""
    assert after is not None
    if after.prompt.tools != tuple(request.tools):
        return "tools_changed"
    same_template = after.prompt.template == request.template
    return "template_rewrites_history" if same_template else "template_changed"


def _common_text(a: str, b: str) -> int:
    """How many leading characters are equal."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def _common(a: Int32s, b: Int32s) -> int:
    """How many leading ids are equal."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
