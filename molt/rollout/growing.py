"""A reply while it is sampled: its pieces become segments of the log, each the child of the last.

Stands between the engine's pieces and the writer. The context of a reply and the tokens sampled
after it are one segment; where it is cut (a pause, N tokens, the loss of an engine) the next one
goes on behind it. Masks come from who made a token, never from scanning ids (I1); versions are the
engine's own (I2).
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from molt.agents.types import ChatRequest, Choice
from molt.rollout.resume import Row, recorded_sampling
from molt.rollout.types import Assignment, Completion, join
from molt.schemas.check import segment_digest
from molt.schemas.records import Sampling, Segment, VersionRun, to_row

if TYPE_CHECKING:
    from molt.agents.capture import Placement
    from molt.rollout.session import Session


class Growing:
    """A reply while it is sampled: its pieces become segments, each the child of the last."""

    def __init__(
        self, session: "Session", request: ChatRequest, placement: "Placement", forced: bool
    ) -> None:
        self.session, self.request = session, request
        run = session.sampling
        self.sampling = replace(
            run,
            max_tokens=min(run.max_tokens, request.max_tokens or run.max_tokens),
            stop=tuple(dict.fromkeys((*run.stop, *request.stop))),
        )
        self.train_reason = untrained(session.a.purpose, request.role, self.sampling, forced)
        self.rows: list[tuple[int, np.ndarray]] = []
        """(number, own token ids) of each segment so far."""
        self.token_ids: list[int] = []
        self.finish_reason, self.n_cached = "", 0
        self._parent, self._keep = placement.parent, placement.keep
        parent = session.links.get(-1 if self._parent is None else self._parent)
        self.routed_to = min(self._keep, parent.routed_to) if parent else 0
        """First position of the chain whose experts are wanted: those before it are recorded."""
        self._context = np.asarray(placement.delta_ids, np.int32)
        self._messages: list[Any] = request.messages[placement.n_known :]
        self._logprobs: list[np.ndarray] = []
        self._waiting: list[Completion] = []
        self._n_waiting = 0
        self._version: tuple[int, int] | None = None
        self.source: Row | None = None
        """The recorded segment that the next piece is a copy of."""

    def add(self, piece: Completion, engine_id: str) -> None:
        """One more piece; appended when the engine paused, at the end, and after N tokens."""
        if not self._logprobs:
            self.n_cached = piece.n_cached
        self._waiting.append(piece)
        self.token_ids += piece.token_ids.tolist()
        self._logprobs.append(piece.logprobs)
        for start, experts_NLK in piece.routing:
            self.routed_to = start + len(experts_NLK)
        self._n_waiting += len(piece.token_ids)
        cut = piece.finish_reason == "partial" and self._n_waiting > 0
        if piece.finish_reason not in ("", "partial"):
            self._end(engine_id)
        elif cut or self._n_waiting >= self.session.desk.partial_tokens:
            self._append(join(self._waiting), "partial", engine_id)

    def _end(self, engine_id: str) -> None:
        whole = join(self._waiting)
        desk = self.session.desk
        self.text = desk.tokenizer.decode(self.token_ids, skip_special_tokens=True)
        ids = np.array(self.token_ids, np.int32)
        self.finish_reason = whole.finish_reason
        said = self.text
        if self.finish_reason == "stop" and whole.stop_token is None:
            # A stop string ended it: sampled and recorded, and not part of what is said.
            said = min((said.partition(s)[0] for s in self.sampling.stop), key=len, default=said)
        self.reply = desk.parser.parse(ids, said, self.request)
        if self.finish_reason == "stop" and self.reply.tool_calls:
            self.finish_reason = "tool_calls"
        self._messages.append(self.reply.message())
        if len(whole.token_ids) or not self.rows:
            self._append(whole, self.finish_reason, engine_id)

    def _append(self, done: Completion, finish_reason: str, engine_id: str) -> None:
        versions = [run[:2] for run in done.version_runs]
        swapped = len({v for v in (self._version, *versions) if v is not None}) > 1
        self._version = versions[-1] if versions else self._version
        kv = "kept" if done.kept_kv else "recomputed" if swapped else None
        old = self.source
        number = self.session.append(
            parent=self._parent,
            keep=self._keep,
            context=self._context,
            done=replace(done, finish_reason=finish_reason),
            train_reason=old["train_reason"] if old else self.train_reason,
            sampling=recorded_sampling(old) if old else self.sampling,
            kv=(old["kv"] if old else None) or kv,
            role=self.request.role,
            engine_id=engine_id,
            source_attempt=old["attempt"] if old else None,
            messages=self._messages,
            routed_to=self.routed_to,
        )
        own = np.concatenate([self._context, done.token_ids])
        self.rows.append((number, own))
        self._parent, self._keep = number, self._keep + len(own)
        self._context, self._messages = np.zeros(0, np.int32), []
        self._waiting, self._n_waiting = [], 0

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


def untrained(purpose: str, role: str, sampling: Sampling, forced: bool) -> str | None:
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
