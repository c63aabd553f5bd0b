"""One rollout attempt while it is played: every call of the model goes through `Session.chat`.

Stands between agents (Env, ChatAgent, HTTP) and engine plus log. A call is placed in the rollout
(capture), sampled, appended and only then accepted; what an agent sends again because it lost the
answer gets the first one. Trained ids are the ids that the engine returned and nothing else (I1);
versions are the engine's own spans (I2); an outcome is durable after all that it names (I6).
"""

import asyncio
import operator
import reprlib
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from molt.agents.heard import Heard
from molt.agents.types import ChatReply, ChatRequest, Messages
from molt.rollout.engines import EngineSource, RayEngine
from molt.rollout.growing import Growing, make_segment
from molt.rollout.resume import Recorded, Row, n_sampled, recorded_pieces
from molt.rollout.routing import RoutingRuns, routing_rows
from molt.rollout.types import Assignment, Completion, ended
from molt.schemas.check import ROOT_DIGEST, chain_digest, routing_sum
from molt.schemas.errors import (
    EngineError,
    Fenced,
    RequestRefused,
    SegmentRejected,
    WindowFull,
)
from molt.schemas.records import RewardRow, RolloutRow, Sampling
from molt.schemas.text import canonical_json
from molt.store import Ticket, Writer
from molt.store.branches import tips

if TYPE_CHECKING:
    from molt.agents.capture import Capture, Placement
    from molt.agents.parse import ReplyParser

OnPiece = Callable[[int, np.ndarray, str], None]
"""(choice index, new token ids int32, finish reason or "") for whoever streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What the sessions of one worker share."""

    writer: Writer
    engines: EngineSource
    model: str
    """Its name, for whoever asks."""
    tokenizer: Any
    parser: "ReplyParser"
    new_capture: "Callable[[], Capture]"
    sampling: Sampling
    """The run's own."""
    window: int
    """Tokens of prompt and completion together."""
    partial_tokens: int
    """Sampled tokens after which a segment is appended, finished or not."""
    n_experts: int = 0
    """Of the model, if the engines capture routing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What the session keeps of an appended segment."""

    parent: int | None
    keep: int
    n_tokens: int
    n_sampled: int
    digest: bytes
    role: str
    routed_to: int
    """Positions of the chain before this one have their experts in the log, as far as known."""


@dataclass(slots=True, kw_only=True)
class _Call:
    """One request and its answer, which may be asked for more than once."""

    key: str | None
    reply_id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    n_prompt: int = 0
    task: "asyncio.Task[ChatReply]" = field(init=False)
    pieces: list[tuple[int, np.ndarray, str]] = field(default_factory=list)
    listeners: list[OnPiece] = field(default_factory=list)
    waiting: int = 0
    delivered: bool = False

    def emit(self, index: int, token_ids: np.ndarray, finish_reason: str) -> None:
        self.pieces.append((index, token_ids, finish_reason))
        for listener in self.listeners:
            listener(index, token_ids, finish_reason)

    @property
    def failed(self) -> bool:
        done = self.task.done()
        return done and (self.task.cancelled() or self.task.exception() is not None)

    async def answer(self, on_piece: OnPiece | None) -> ChatReply:
        """Wait for the reply; giving up waiting does not end the call."""
        if on_piece is not None:
            for piece in self.pieces:
                on_piece(*piece)
            self.listeners.append(on_piece)
        self.waiting += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self.waiting -= 1
            if on_piece is not None:
                self.listeners.remove(on_piece)


class Session:
    """One rollout attempt. Not thread-safe: use it on the loop that it was made on."""

    def __init__(
        self, desk: Desk, a: Assignment, deadline_s: float, source: Sequence[Row] = ()
    ) -> None:
        """source: segments of an earlier attempt; what of them is not used again is regenerated.

        A branch has one temperature: those sampled at another one than the run's are never used.
        """
        self.desk, self.a = desk, a
        self.model, self.tokenizer = desk.model, desk.tokenizer
        self.recorded = Recorded(())
        """Replies of an earlier attempt that are used again."""
        self.token = secrets.token_urlsafe(24)
        """Bearer secret of this attempt."""
        self.heard = Heard()
        """Its last request over HTTP."""
        self.started = time.perf_counter()
        self.deadline = asyncio.get_running_loop().time() + deadline_s
        """Of the loop's clock; moves by the time spent waiting for a lost engine."""
        self.timeout: asyncio.Timeout | None = None
        """Whoever enforces the deadline leaves its timer here, so that it can be moved."""
        self.sampling = desk.sampling
        if a.purpose == "eval":
            self.sampling = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        self.links: dict[int, Link] = {}
        self.counts: Counter[str] = Counter(regenerated=n_sampled(source))
        self.finish_reason = ""
        """Of the agent's last reply."""
        self.full: WindowFull | None = None
        """Its last request, if that did not fit the window."""
        self.fatal: EngineError | Fenced | None = None
        """What is not the rollout's fault, whatever the agent made of it: there is no outcome."""
        self._captures: dict[str, Capture] = {}
        self._calls: dict[str, list[_Call]] = {}
        self._digested: tuple[Messages, list[bytes]] = ([], [])
        """The messages of the last request, and the digest of each."""
        self._replies: dict[str, tuple[_Call, int]] = {}
        """By id: the call, and the last segment of its first choice; in order of completion."""
        self._tickets: list[Ticket] = []
        self._routing_sum = 0
        self._ended = False

    # -- calls of the model --------------------------------------------------------------------

    async def chat(
        self,
        request: ChatRequest,
        *,
        on_piece: OnPiece | None = None,
        on_call: Callable[[Any], None] | None = None,
    ) -> ChatReply:
        """Answer one request; the reply's tokens are in the writer then.

        Who streams is handed the call (`on_call`): its `reply_id`, and its `n_prompt` from the
        first piece on.

        The same body gets the same reply, appended once, when it comes as a retry: with a retry
        count, with an idempotency key that was seen, or after an answer that was never delivered
        (see `delivered`); also while the first still runs. Otherwise it is sampled anew.

        Raises WindowFull when the prompt leaves no room, RequestRefused for what cannot be served,
        EngineError when no engine came back in time, Fenced.
        """
        if self._ended:
            raise RequestRefused(f"{self.a.rollout_id} attempt {self.a.attempt} has ended")
        body = self._body(request)
        known = [c for c in self._calls.setdefault(body, []) if not c.failed]
        call = _retried(request, known)
        if call is None:
            call = _Call(key=request.key)
            call.task = asyncio.create_task(self._answer(call, request))
            self._calls[body] = [*known, call]
        else:
            self.counts["retries"] += 1
        if on_call is not None:
            on_call(call)
        return await call.answer(on_piece)

    def delivered(self, reply_id: str) -> None:
        """The agent has got this reply: the same body without a retry mark is a new call."""
        self._replies[reply_id][0].delivered = True

    def count(self, request: ChatRequest) -> int:
        """Tokens of the prompt with which this request would be sampled."""
        return len(self._capture(request.role).place(request).prompt_ids)

    def plain(self, request: ChatRequest) -> bool:
        """Whether all text of a reply is content, so that it may be shown as it grows."""
        return not self.desk.parser.takes_out(request) and self._grammar(request) is None

    def segment_of(self, which: int | str) -> int:
        """Last segment of a reply of the agent's policy, by its number or id; SegmentRejected."""
        replies = {k: v for k, v in self._replies.items() if self._counts(self.links[v[1]])}
        found = list(replies.values())[which:][:1] if isinstance(which, int) else []
        if isinstance(which, str) and which in replies:
            found = [replies[which]]
        if not found:
            raise SegmentRejected(
                f"{self.a.rollout_id}: a reward for reply {which!r} of {len(replies)}: {[*replies]}"
            )
        return found[0][1]

    def _body(self, request: ChatRequest) -> str:
        """Equal for equal requests; messages that the one before had are not looked at again."""
        messages, digests = self._digested
        n = [*map(operator.is_, messages, request.messages), False].index(False)
        try:
            digests = digests[:n] + [_digest(m) for m in request.messages[n:]]
            rest = _digest(replace(request, messages=[], key=None, retry=0))
        except UnicodeEncodeError as error:
            raise RequestRefused(f"the messages hold what is no text: {error}") from error
        self._digested = [*request.messages], digests
        return xxhash.xxh3_128_hexdigest(b"".join([*digests, rest]))

    async def _answer(self, call: _Call, request: ChatRequest) -> ChatReply:
        capture = self._capture(request.role)
        placement = capture.place(request)
        call.n_prompt = len(placement.prompt_ids)
        if call.n_prompt >= self.desk.window:
            self.full = WindowFull(
                f"{self.a.rollout_id}: a prompt of {call.n_prompt} tokens in a window "
                f"of {self.desk.window}; shorten it or raise engine.max_model_len"
            )
            raise self.full
        tasks = [
            asyncio.create_task(self._choice(call, request, placement, index))
            for index in range(request.n)
        ]
        try:
            replies = await asyncio.gather(*tasks)
        except BaseException as error:
            for task in tasks:
                task.cancel()
            if isinstance(error, EngineError | Fenced) and not isinstance(error, RequestRefused):
                self.fatal = error
            raise
        # From here to the end nothing is awaited: a call is accepted whole or not at all.
        for one in replies:
            capture.accept(placement, one.rows, one.reply, one.finish_reason)
        self.counts["calls"] += 1
        if request.role == "agent":
            self.finish_reason, self.full = replies[0].finish_reason, None
        reply = ChatReply(
            id=call.reply_id,
            choices=tuple(one.choice(index) for index, one in enumerate(replies)),
            n_prompt=call.n_prompt,
            n_cached=replies[0].n_cached,
        )
        self._replies[reply.id] = (call, reply.choices[0].segment)
        return reply

    def _grammar(self, request: ChatRequest) -> Any:
        """What the request forces on the engine; tokens sampled under it are never trained."""
        if request.tool_choice not in ("auto", "none") and not self.desk.parser.tools:
            raise RequestRefused(f"tool_choice {request.tool_choice!r} needs agent.tool_parser")
        return self.desk.parser.grammar(request)

    def _capture(self, role: str) -> "Capture":
        """Conversations of side models are kept apart: the fold knows the agent's chains alone."""
        if role not in self._captures:
            self._captures[role] = self.desk.new_capture()
        return self._captures[role]

    async def _choice(
        self, call: _Call, request: ChatRequest, placement: "Placement", index: int
    ) -> Growing:
        """Sample one reply and append its segments as it grows."""
        grammar = self._grammar(request)
        growing = Growing(self, request, placement, grammar is not None)
        every = 1 if call.listeners else self.desk.partial_tokens
        async for piece, engine_id in self._pieces(placement.prompt_ids, growing, every, grammar):
            growing.add(piece, engine_id)
            if not growing.finish_reason:
                call.emit(index, piece.token_ids, "")
        call.emit(index, piece.token_ids, growing.finish_reason)
        return growing

    async def _pieces(
        self,
        prompt_ids: np.ndarray,
        growing: Growing,
        every: int,
        grammar: Any,
    ) -> AsyncIterator[tuple[Completion, str]]:
        """Recorded pieces, then the engine's; when one is lost another goes on behind them."""
        reply = self.recorded.pop(prompt_ids)
        if any(r["sampling"]["temperature"] != growing.sampling.temperature for r in reply):
            reply = []
        for recorded, row in recorded_pieces(reply):
            growing.source = row
            self.counts["regenerated"] -= len(recorded.token_ids)
            yield recorded, row["engine_id"]
        growing.source = None
        while not growing.finish_reason:
            left = growing.sampling.max_tokens - len(growing.token_ids)
            if left < 1:  # recorded under a higher limit
                yield ended("length"), ""
                return
            engine, sampling = await self._engine(), replace(growing.sampling, max_tokens=left)
            self.counts["requests"] += 1
            request_id = f"{self.a.rollout_id}.{self.a.attempt}.{self.counts['requests'] - 1}"
            so_far = prompt_ids
            if growing.token_ids:
                so_far = np.concatenate([prompt_ids, np.array(growing.token_ids, np.int32)])
            try:
                with self.desk.engines.busy(engine):
                    async for piece in engine.pieces(
                        request_id, so_far, sampling, every, grammar, growing.routed_to
                    ):
                        yield piece, engine.engine_id
            except (RequestRefused, Fenced):
                raise
            except EngineError as error:
                self.counts["engines_lost"] += 1
                self.desk.engines.lost(engine, error)

    async def _engine(self) -> RayEngine:
        """An engine; the time spent waiting for one does not count against the deadline."""
        clock = asyncio.get_running_loop().time
        began, deadline = clock(), self.deadline
        self._set_timer(None)
        try:
            return await self.desk.engines.get(self.a.rollout_id)
        finally:
            self.deadline = max(self.deadline, deadline + clock() - began)
            self._set_timer(self.deadline)

    def _set_timer(self, when: float | None) -> None:
        if self.timeout is not None and not self.timeout.expired():
            self.timeout.reschedule(when)

    def append(self, **columns: Any) -> int:
        """Append a segment of this attempt; returns its number."""
        number, parent = len(self.links), columns["parent"]
        routed_to: int = columns.pop("routed_to")
        segment = make_segment(
            self.a,
            number,
            ROOT_DIGEST if parent is None else self.links[parent].digest,
            **columns,
        )
        self._tickets.append(self.desk.writer.append("segments", segment))
        if self.a.purpose == "train" and segment.role == "agent":
            self._append_routing(number, columns["done"].routing)
        self.links[number] = Link(
            parent=segment.parent,
            keep=segment.keep,
            n_tokens=len(segment.token_ids),
            n_sampled=int(segment.sampled.sum()),
            digest=segment.digest,
            role=segment.role,
            routed_to=routed_to,
        )
        return number

    def _append_routing(self, segment: int, runs: RoutingRuns) -> None:
        rows = routing_rows(
            runs,
            rollout_id=self.a.rollout_id,
            attempt=self.a.attempt,
            segment=segment,
            n_experts=self.desk.n_experts,
        )
        self._routing_sum += routing_sum((r.segment, r.start, r.row_xxh3) for r in rows)
        self._tickets += [self.desk.writer.append("routing", row) for row in rows]

    # -- rewards and the end -------------------------------------------------------------------

    def reward(
        self,
        name: str,
        value: float | None,
        *,
        segment: int | None = None,
        source: str,
    ) -> None:
        """Append a reward of the rollout or of a turn (`segment`).

        None = cannot be scored. Raises SegmentRejected for NaN and for what is no number.
        """
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if value is not None and not (number and abs(value) <= sys.float_info.max):
            found = reprlib.repr(value)
            raise SegmentRejected(f"agent reward '{name}' is {found}, not a finite number or None")
        row = RewardRow(
            rollout_id=self.a.rollout_id,
            attempt=self.a.attempt,
            segment=segment,
            token=None,
            name=name,
            value=None if value is None else float(value),
            revision=0,
            source=source,
        )
        self._tickets.append(self.desk.writer.append("rewards", row))

    async def finish(
        self, status: str, reason: str | None = None, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Write the outcome; returns when it and all that it names are durable."""
        await self.close()
        for ticket in self._tickets:  # an outcome must not name rows that were lost
            if ticket.done():
                ticket.result()
        counted = {k: v for k, v in self.links.items() if self._counts(v)}
        sampled = sum(s.n_sampled for s in counted.values())
        n_all = sum(s.n_tokens for s in counted.values())
        regenerated = self.counts.pop("regenerated", 0)
        told = {**(metrics or {}), **self.counts, "forks": self.forks}
        if self.desk.n_experts:
            told["routing_sum"] = f"{self._routing_sum % (1 << 64):016x}"
        row = RolloutRow(
            group_id=self.a.group_id,
            rollout_id=self.a.rollout_id,
            attempt=self.a.attempt,
            status=status,
            reason=reason,
            n_segments=len(counted),
            chain_digest=chain_digest([counted[t].digest for t in tips(counted)]),
            counts={
                "sampled": sampled,
                "context": n_all - sampled,
                "regenerated": regenerated,
            },
            seconds=time.perf_counter() - self.started,
            metrics=canonical_json(told),
        )
        await asyncio.wrap_future(self.desk.writer.append("rollouts", row))

    async def close(self) -> None:
        """End calls that still run, without an outcome; the session answers no more."""
        self._ended = True
        self.desk.engines.forget(self.a.rollout_id)
        running = [c.task for calls in self._calls.values() for c in calls if not c.task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    @property
    def forks(self) -> Counter[str]:
        """Replies that did not simply extend the rollout, by reason."""
        return sum((c.forks for c in self._captures.values()), Counter())

    def _counts(self, link: Link) -> bool:
        """Segments of side models are recorded and are no part of the rollout's chains."""
        return link.role == "agent" or self.a.purpose == "judge"


def _digest(value: Any) -> bytes:
    return xxhash.xxh3_128_digest(msgspec.json.encode(value, order="deterministic"))


def _retried(request: ChatRequest, known: Sequence[_Call]) -> _Call | None:
    """The call that this request repeats; None if it is meant as a new one.

    A call whose caller still waits is not lost: the same body then comes from somebody else.
    """
    for call in known:
        if request.key is not None and call.key == request.key:
            return call
    if request.retry and known:
        return known[-1]
    return next((c for c in known if not c.waiting and not c.delivered), None)
