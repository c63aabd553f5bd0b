"""One rollout attempt while it is played: every call of the model goes through `Session.chat`.

Stands between agents (Env, ChatAgent, HTTP) and engine plus log. A call is placed in the rollout
(capture), sampled, appended and only then accepted; what an agent sends again because it lost the
answer gets the first one. Trained ids are the ids that the engine returned and nothing else (I1);
versions are the engine's own spans (I2); an outcome is durable after all that it names (I6).
"""

import asyncio
import dataclasses
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from molt.agents.types import ChatReply, ChatRequest, Choice
from molt.rollout.engines import EngineSource, Generator
from molt.rollout.grammar import grammar_of
from molt.rollout.types import Assignment, Completion, join
from molt.schemas.check import ROOT_DIGEST, chain_digest, segment_digest
from molt.schemas.errors import (
    EngineError,
    Fenced,
    RequestRefused,
    SegmentRejected,
    WindowFull,
)
from molt.schemas.records import RewardRow, RolloutRow, Sampling, Segment, VersionRun, to_row
from molt.schemas.text import canonical_json
from molt.store import Ticket, Writer
from molt.store.branches import chain_length, tips

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What the session keeps of an appended segment."""

    parent: int | None
    keep: int
    n_tokens: int
    n_sampled: int
    digest: bytes
    role: str


@dataclass(slots=True, kw_only=True)
class _Call:
    """One request and its answer, which may be asked for more than once."""

    key: str | None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    """One choice: its segments as capture wants them, and how it ended."""

    pieces: list[tuple[int, np.ndarray]]
    """(segment number, own token ids)"""
    choice: Choice
    n_cached: int


class Session:
    """One rollout attempt. Not thread-safe: use it on the loop that it was made on."""

    def __init__(self, desk: Desk, a: Assignment, deadline_s: float) -> None:
        self.desk, self.a = desk, a
        self.token = secrets.token_urlsafe(24)
        """Bearer secret of this attempt."""
        self.started = time.perf_counter()
        self.deadline = asyncio.get_running_loop().time() + deadline_s
        """Of the loop's clock; moves by the time spent waiting for a lost engine."""
        self.timeout: asyncio.Timeout | None = None
        """Whoever enforces the deadline leaves its timer here, so that it can be moved."""
        self.sampling = desk.sampling
        if a.purpose == "eval":
            self.sampling = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        self.links: dict[int, Link] = {}
        self.counts: Counter[str] = Counter()
        self.forks: Counter[str] = Counter()
        self.finish_reason = ""
        """Of the agent's last reply."""
        self._captures: dict[str, Capture] = {}
        self._n_messages: dict[int, int] = {}
        """Of the conversation that ends with this segment's reply."""
        self._calls: dict[str, list[_Call]] = {}
        self._by_id: dict[str, tuple[_Call, int]] = {}
        self._tickets: list[Ticket] = []
        self._ended = False

    @property
    def model(self) -> str:
        return self.desk.model

    @property
    def tokenizer(self) -> Any:
        return self.desk.tokenizer

    # -- calls of the model --------------------------------------------------------------------

    async def chat(self, request: ChatRequest, *, on_piece: OnPiece | None = None) -> ChatReply:
        """Answer one request; the reply's tokens are in the writer then.

        The same body gets the same reply, appended once, when it comes as a retry: with a retry
        count, with an idempotency key that was seen, or after an answer that was never delivered
        (see `delivered`); also while the first still runs. Otherwise it is sampled anew.

        Raises WindowFull when the prompt leaves no room, RequestRefused for what cannot be served,
        EngineError when no engine came back in time, Fenced.
        """
        if self._ended:
            raise RequestRefused(f"{self.a.rollout_id} attempt {self.a.attempt} has ended")
        body = canonical_json(dataclasses.asdict(replace(request, key=None, retry=0)))
        known = [c for c in self._calls.setdefault(body, []) if not c.failed]
        call = _retried(request, known)
        if call is None:
            call = _Call(key=request.key)
            call.task = asyncio.create_task(self._answer(call, request))
            self._calls[body] = [*known, call]
        else:
            self.counts["retries"] += 1
        return await call.answer(on_piece)

    def delivered(self, reply_id: str) -> None:
        """The agent has got this reply: the same body without a retry mark is a new call."""
        self._by_id[reply_id][0].delivered = True

    def count(self, request: ChatRequest) -> int:
        """Tokens of the prompt with which this request would be sampled."""
        return len(self._capture(request.role).place(request).prompt_ids)

    def plain(self, request: ChatRequest) -> bool:
        """Whether all text of a reply is content, so that it may be shown as it grows."""
        return self.desk.parser.is_plain(request) and grammar_of(request) is None

    def segment_of(self, reply_id: str) -> int:
        """The last segment of the first choice of a reply; KeyError for an unknown id."""
        return self._by_id[reply_id][1]

    async def _answer(self, call: _Call, request: ChatRequest) -> ChatReply:
        capture = self._capture(request.role)
        placement = capture.place(request)
        if len(placement.prompt_ids) >= self.desk.window:
            raise WindowFull(
                f"{self.a.rollout_id}: a prompt of {len(placement.prompt_ids)} tokens in a window "
                f"of {self.desk.window}; shorten it or raise engine.max_model_len"
            )
        tasks = [
            asyncio.create_task(self._choice(call, request, placement, index))
            for index in range(request.n)
        ]
        try:
            sampled = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        # From here to the end nothing is awaited: a call is accepted whole or not at all.
        for one in sampled:
            capture.accept(placement, one.pieces, one.choice.reply, one.choice.finish_reason)
            self._n_messages[one.choice.segment] = len(request.messages) + 1
        self.counts["calls"] += 1
        if placement.reason is not None:
            self.forks[placement.reason] += 1
        if request.role == "agent":
            self.finish_reason = sampled[0].choice.finish_reason
        reply = ChatReply(
            id=f"chatcmpl-{secrets.token_hex(12)}",
            choices=tuple(one.choice for one in sampled),
            n_prompt=len(placement.prompt_ids),
            n_cached=sampled[0].n_cached,
        )
        self._by_id[reply.id] = (call, reply.choices[0].segment)
        return reply

    def _capture(self, role: str) -> "Capture":
        """Conversations of side models are kept apart: the fold knows the agent's chains alone."""
        if role not in self._captures:
            self._captures[role] = self.desk.new_capture()
        return self._captures[role]

    async def _choice(
        self, call: _Call, request: ChatRequest, placement: "Placement", index: int
    ) -> _Sampled:
        """Sample one reply and append its segments as it grows."""
        grammar = grammar_of(request)
        growing = _Growing(self, request, placement, grammar is not None)
        every = 1 if call.listeners else self.desk.partial_tokens
        async for piece, engine_id in self._pieces(placement.prompt_ids, growing, every, grammar):
            growing.add(piece, engine_id)
            if not growing.finish_reason:
                call.emit(index, piece.token_ids, "")
        choice = growing.choice(index)
        call.emit(index, piece.token_ids, choice.finish_reason)
        return _Sampled(pieces=growing.rows, choice=choice, n_cached=growing.n_cached)

    async def _pieces(
        self,
        prompt_ids: Sequence[int],
        growing: "_Growing",
        every: int,
        grammar: Mapping[str, Any] | None,
    ) -> AsyncIterator[tuple[Completion, str]]:
        """The engine's pieces; after the loss of an engine another one goes on behind them."""
        while not growing.finish_reason:
            engine = await self._engine()
            sampling = replace(
                growing.sampling, max_tokens=growing.sampling.max_tokens - len(growing.token_ids)
            )
            self.counts["requests"] += 1
            request_id = f"{self.a.rollout_id}.{self.a.attempt}.{self.counts['requests'] - 1}"
            so_far = [*map(int, prompt_ids), *growing.token_ids]
            try:
                with self.desk.engines.busy(engine):
                    async for piece in engine.pieces(request_id, so_far, sampling, every, grammar):
                        yield piece, engine.engine_id
            except (RequestRefused, Fenced):
                raise
            except EngineError as error:
                self.counts["engines_lost"] += 1
                self.desk.engines.lost(engine, error)

    async def _engine(self) -> Generator:
        """An engine; waiting for one does not count against the deadline."""
        clock = asyncio.get_running_loop().time
        began = clock()
        engine = await self.desk.engines.get(self.a.rollout_id)
        self.deadline += clock() - began
        if self.timeout is not None:
            self.timeout.reschedule(self.deadline)
        return engine

    def new_messages(self, request: ChatRequest, placement: "Placement") -> list[Any]:
        """The messages that the log has not got yet; after a fork or at a root, all of them."""
        parent = placement.parent
        if parent is None or placement.keep != chain_length(self.links, parent):
            return list(request.messages)
        return list(request.messages[self._n_messages.get(parent, 0) :])

    def append(self, **columns: Any) -> int:
        """Append a segment of this attempt; returns its number."""
        number, parent = len(self.links), columns["parent"]
        segment = make_segment(
            self.a,
            number,
            ROOT_DIGEST if parent is None else self.links[parent].digest,
            **columns,
        )
        self._tickets.append(self.desk.writer.append("segments", segment))
        self.links[number] = Link(
            parent=segment.parent,
            keep=segment.keep,
            n_tokens=len(segment.token_ids),
            n_sampled=int(segment.sampled.sum()),
            digest=segment.digest,
            role=segment.role,
        )
        return number

    # -- rewards and the end -------------------------------------------------------------------

    def reward(
        self,
        name: str,
        value: float | None,
        *,
        segment: int | None = None,
        token: int | None = None,
        revision: int = 0,
        source: str,
    ) -> None:
        """Append a reward of the rollout, of a turn (`segment`) or of a token.

        None = cannot be scored. Raises SegmentRejected for NaN and for what is no number.
        """
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if value is not None and not number:
            raise SegmentRejected(f"agent reward '{name}' is {value!r}, not a number or None")
        row = RewardRow(
            rollout_id=self.a.rollout_id,
            attempt=self.a.attempt,
            segment=segment,
            token=token,
            name=name,
            value=None if value is None else float(value),
            revision=revision,
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
        n_sampled = sum(s.n_sampled for s in counted.values())
        n_all = sum(s.n_tokens for s in counted.values())
        regenerated = self.counts.pop("regenerated", 0)
        row = RolloutRow(
            group_id=self.a.group_id,
            rollout_id=self.a.rollout_id,
            attempt=self.a.attempt,
            status=status,
            reason=reason,
            n_segments=len(counted),
            chain_digest=chain_digest([counted[t].digest for t in tips(counted)]),
            counts={
                "sampled": n_sampled,
                "context": n_all - n_sampled,
                "regenerated": regenerated,
            },
            seconds=time.perf_counter() - self.started,
            metrics=canonical_json(
                {**self.counts, "forks": dict(self.forks), **(metrics or {})},
            ),
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

    def _counts(self, link: Link) -> bool:
        """Segments of side models are recorded and are no part of the rollout's chains."""
        return link.role == "agent" or self.a.purpose == "judge"


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


class _Growing:
    """A reply while it is sampled: its pieces become segments, each the child of the last."""

    def __init__(
        self, session: Session, request: ChatRequest, placement: "Placement", forced: bool
    ) -> None:
        self.session, self.request, self.placement = session, request, placement
        run = session.sampling
        self.sampling = replace(
            run,
            max_tokens=min(run.max_tokens, request.max_tokens or run.max_tokens),
            stop=tuple(dict.fromkeys((*run.stop, *request.stop))),
        )
        self.train_reason = _train_reason(session.a.purpose, request.role, self.sampling, forced)
        self.rows: list[tuple[int, np.ndarray]] = []
        self.token_ids: list[int] = []
        self.finish_reason, self.n_cached = "", 0
        self._parent, self._keep = placement.parent, placement.keep
        self._context = np.asarray(placement.delta_ids, np.int32)
        self._messages = session.new_messages(request, placement)
        self._logprobs: list[np.ndarray] = []
        self._waiting: list[Completion] = []
        self._version: tuple[int, int] | None = None

    def add(self, piece: Completion, engine_id: str) -> None:
        """One more piece; appended when the engine paused, at the end, and after N tokens."""
        if not self._logprobs:
            self.n_cached = piece.n_cached
        self._waiting.append(piece)
        self.token_ids += piece.token_ids.tolist()
        self._logprobs.append(piece.logprobs)
        cut = piece.finish_reason == "partial"
        n_waiting = sum(len(p.token_ids) for p in self._waiting)
        if piece.finish_reason not in ("", "partial"):
            self._end(engine_id)
        elif n_waiting and (cut or n_waiting >= self.session.desk.partial_tokens):
            self._append(join(self._waiting), "partial", engine_id)

    def _end(self, engine_id: str) -> None:
        whole = join(self._waiting)
        desk = self.session.desk
        self.text = desk.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        ids = np.array(self.token_ids, np.int32)
        self.reply = desk.parser.parse(ids, self.text, self.request)
        self.finish_reason = whole.finish_reason
        if self.finish_reason == "stop" and self.reply.tool_calls:
            self.finish_reason = "tool_calls"
        self._messages.append(self.reply.message())
        if len(whole.token_ids) or not self.rows:
            self._append(whole, self.finish_reason, engine_id)

    def _append(self, done: Completion, finish_reason: str, engine_id: str) -> None:
        versions = [run[:2] for run in done.version_runs]
        swapped = len({v for v in (self._version, *versions) if v is not None}) > 1
        self._version = versions[-1] if versions else self._version
        number = self.session.append(
            parent=self._parent,
            keep=self._keep,
            context=self._context,
            done=replace(done, finish_reason=finish_reason),
            train_reason=self.train_reason,
            sampling=self.sampling,
            kv="recomputed" if swapped else None,
            role=self.request.role,
            engine_id=engine_id,
            messages=self._messages,
        )
        own = np.concatenate([self._context, done.token_ids])
        self.rows.append((number, own))
        self._parent, self._keep = number, self._keep + len(own)
        self._context, self._messages, self._waiting = np.zeros(0, np.int32), [], []

    def choice(self, index: int) -> Choice:
        return Choice(
            index=index,
            reply=self.reply,
            text=self.text,
            finish_reason=self.finish_reason,
            token_ids=np.array(self.token_ids, np.int32),
            logprobs=np.concatenate(self._logprobs),
            segment=self.rows[-1][0],
        )


def _train_reason(purpose: str, role: str, sampling: Sampling, forced: bool) -> str | None:
    """Why sampled tokens may not be trained; None if they may."""
    if purpose != "train":
        return f"purpose {purpose}"
    if role != "agent":
        return f"role {role}"
    return "grammar" if forced else sampling.untrainable_reason()


def make_segment(
    a: Assignment,
    number: int,
    parent_digest: bytes,
    *,
    parent: int | None,
    keep: int,
    context: Sequence[int] | np.ndarray,
    done: Completion,
    train_reason: str | None,
    sampling: Sampling,
    messages: Sequence[Any],
    **columns: Any,
) -> Segment:
    """The record of new context and what was sampled after it, with its digest."""
    n_context, n_sampled = len(context), len(done.token_ids)
    sampled = np.repeat(np.array([0, 1], np.uint8), [n_context, n_sampled])
    segment = Segment(
        group_id=a.group_id,
        rollout_id=a.rollout_id,
        attempt=a.attempt,
        segment=number,
        parent=parent,
        keep=keep,
        token_ids=np.concatenate([np.asarray(context, np.int32), done.token_ids]),
        sampled=sampled,
        train=np.zeros_like(sampled) if train_reason else sampled,
        train_reason=train_reason,
        logprobs=np.concatenate([np.zeros(n_context, np.float32), done.logprobs]),
        version_runs=[VersionRun(epoch=e, version=v, n=n) for e, v, n in done.version_runs],
        finish_reason=done.finish_reason,
        stop_token=done.stop_token,
        sampling=sampling,
        messages=json.dumps(messages),
        digest=b"",
        **columns,
    )
    return replace(segment, digest=segment_digest(to_row(segment), parent_digest))
