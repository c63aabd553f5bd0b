"""The rollout worker: plays agents against the engine and appends what happened.

Its rows are durable before it reports a rollout as done (I6). Trained ids are the ids that the
engine returned and nothing else (I1); versions are the engine's own spans (I2). A rollout that
fails is a row with its reason; a dead engine is not the rollout's fault: it leaves no outcome, so
the prompt is issued again.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from molt.agents.env import Env, Messages, Reply, Turn, resolve
from molt.config import Config
from molt.process import redirect_output
from molt.rollout.types import Assignment, Completion
from molt.schemas.check import chain_digest, segment_digest
from molt.schemas.errors import ConfigError, EngineError, Fenced, RequestRefused, SegmentRejected
from molt.schemas.records import (
    RewardRow,
    RolloutRow,
    Sampling,
    Segment,
    VersionRun,
    to_row,
)
from molt.schemas.text import canonical_json
from molt.store import Log, Ticket


class Generator(Protocol):
    """An engine as the worker sees it."""

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: Sampling
    ) -> Completion: ...


@dataclass(frozen=True, slots=True)
class RayEngine:
    """A Ray engine actor behind the `Generator` protocol."""

    engine_id: str
    actor: Any
    epoch: int

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: Sampling
    ) -> Completion:
        done = await self.actor.generate.remote(self.epoch, request_id, prompt_ids, sampling)
        assert isinstance(done, Completion)
        return done


class RolloutFailed(Exception):
    """Ends one rollout with a reason."""


class RolloutWorker:
    """Plays rollouts concurrently; one writer, one engine (Ray actor or plain object)."""

    def __init__(
        self,
        log_path: str,
        epoch: int,
        config: Config,
        tokenizer_folder: str,
        engine: RayEngine,
        output: str | None = None,
    ) -> None:
        if output is not None:
            redirect_output(output)
        from transformers import AutoTokenizer

        self.config, self.engine = config, engine
        self.env_class = resolve(config.agent.env, "agent.env")
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        self.writer = Log.open(log_path).writer(epoch, linger_s=config.log.linger_s)

    async def play(self, assignments: Sequence[Assignment]) -> None:
        """Play rollouts to their end; returns when all outcomes are durable."""
        await asyncio.gather(*(self._play_one(a) for a in assignments))

    def ready(self) -> bool:
        """True once the worker can play."""
        return True

    def close(self) -> None:
        """End this worker's log directory cleanly."""
        self.writer.close()

    async def _play_one(self, a: Assignment) -> None:
        started = time.perf_counter()
        rollout = _Rollout(a, self._sampling(a.purpose))
        status, reason = "ok", None
        try:
            async with asyncio.timeout(self.config.agent.deadline_s):
                await self._turns(rollout)
            if rollout.segments and rollout.segments[-1].finish_reason == "length":
                status = "truncated"
        except (Fenced, EngineError) as error:
            if not isinstance(error, RequestRefused):
                raise
            status, reason = "failed", f"request: {error}"
        except TimeoutError:
            status, reason = "failed", f"deadline: {self.config.agent.deadline_s:g} s"
        except SegmentRejected as error:
            status, reason = "failed", f"rejected: {error}"
        except RolloutFailed as error:
            status, reason = "failed", str(error)
        rollout.raise_if_not_written()
        outcome = rollout.outcome(status, reason, time.perf_counter() - started)
        await asyncio.wrap_future(self.writer.append("rollouts", outcome))

    def _sampling(self, purpose: str) -> Sampling:
        """Evaluation is greedy; everything else is the run's own."""
        s = self.config.sampling
        if purpose != "eval":
            return s
        return replace(s, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)

    async def _turns(self, rollout: "_Rollout") -> None:
        env: Env = await _agent_call("agent.env", self.env_class)
        messages = checked_messages(await _agent_call("reset", env.reset, rollout.a.prompt))
        prompt_ids = render(self.tokenizer, messages)
        done = await self.engine.generate(rollout.request_id, prompt_ids, rollout.sampling)
        text = self.tokenizer.decode(done.token_ids, skip_special_tokens=True)
        wire = [*messages, {"role": "assistant", "content": text}]
        segment = rollout.segment(prompt_ids, done, wire, self.engine.engine_id)
        rollout.tickets.append(self.writer.append("segments", segment))
        rollout.segments.append(segment)
        reply = Reply(text=text, finish_reason=done.finish_reason, n_tokens=len(done.token_ids))
        turn = checked_turn(await _agent_call("step", env.step, reply))
        for name, value in turn.rewards.items():
            reward = rollout.reward(name, value, self.config.agent.env)
            rollout.tickets.append(self.writer.append("rewards", reward))
        if not turn.done:
            raise RolloutFailed("the environment wants a second turn; this release plays one")


def render(tokenizer: Any, messages: Messages) -> list[int]:
    """The prompt's ids: the template is applied once, and never to a sampled reply."""
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception as error:
        raise RolloutFailed(f"chat template: {type(error).__name__}: {error}") from error
    return ids


async def encode_prompt(config: Config, tokenizer: Any, prompt: dict[str, Any]) -> list[int]:
    """The ids with which a rollout of `prompt` opens; ConfigError if the agent fails on it."""
    env_class = resolve(config.agent.env, "agent.env")
    try:
        async with asyncio.timeout(config.agent.deadline_s):
            env = await _agent_call("agent.env", env_class)
            messages = checked_messages(await _agent_call("reset", env.reset, prompt))
            return render(tokenizer, messages)
    except TimeoutError:
        raise ConfigError(
            f"{config.agent.env} did not open prompt {prompt} in {config.agent.deadline_s:g} s"
        ) from None
    except RolloutFailed as error:
        raise ConfigError(f"{config.agent.env} cannot open prompt {prompt}: {error}") from error


def judge_segment(k: int, context: list[int], pieces: Sequence[Completion]) -> Segment:
    """The probe's record: `context`, then what the engine sampled after it, never trained."""
    whole = Completion(
        token_ids=np.concatenate([p.token_ids for p in pieces]),
        logprobs=np.concatenate([p.logprobs for p in pieces]),
        version_runs=tuple(run for p in pieces for run in p.version_runs),
        finish_reason=pieces[-1].finish_reason,
        stop_token=pieces[-1].stop_token,
    )
    sampling = Sampling(max_tokens=len(whole.token_ids))
    a = Assignment(
        group_id=f"judge-{k}", rollout_id=f"judge-{k}/0", attempt=0, purpose="judge", prompt={}
    )
    return replace(_Rollout(a, sampling).segment(context, whole, [], "engine-0"), role="frozen")


async def _agent_call(what: str, call: Any, *args: Any) -> Any:
    """Run the user's code off the event loop; whatever it raises is the rollout's reason."""
    try:
        if inspect.iscoroutinefunction(call):
            return await call(*args)
        return await in_thread(call, *args)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise RolloutFailed(f"agent {what}: {type(error).__name__}: {error}") from error


async def in_thread(call: Any, *args: Any) -> Any:
    """A call in a daemon thread of its own: one that hangs keeps nobody waiting, nor the exit."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            result = call(*args)
        except BaseException as error:
            outcome = functools.partial(future.set_exception, error)
        else:
            outcome = functools.partial(future.set_result, result)
        with contextlib.suppress(InvalidStateError):  # the deadline has cancelled it meanwhile
            outcome()

    threading.Thread(target=run, name="molt-agent", daemon=True).start()
    return await asyncio.wrap_future(future)


def checked_messages(messages: Any) -> Messages:
    """What `reset` returned, if it can be rendered and recorded; RolloutFailed if not."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise RolloutFailed(f"agent reset returned {messages!r:.200}, not a list of message dicts")
    if not messages:
        raise RolloutFailed("agent reset returned no messages")
    try:
        json.dumps(messages, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RolloutFailed(f"agent messages are not JSON: {error}") from None
    return messages


def checked_turn(turn: Any) -> Turn:
    """What `step` returned, if it is a Turn with named rewards; RolloutFailed if not."""
    if not isinstance(turn, Turn):
        raise RolloutFailed(f"agent step returned {turn!r:.200}, not a Turn")
    if not isinstance(turn.rewards, dict) or not all(isinstance(k, str) for k in turn.rewards):
        raise RolloutFailed(f"agent rewards are {turn.rewards!r:.200}, not a dict of name -> value")
    return turn


class _Rollout:
    """The record of one rollout while it is played."""

    def __init__(self, a: Assignment, sampling: Sampling) -> None:
        self.a, self.sampling = a, sampling
        self.segments: list[Segment] = []
        self.tickets: list[Ticket] = []

    @property
    def request_id(self) -> str:
        return f"{self.a.rollout_id}.{self.a.attempt}.{len(self.segments)}"

    def segment(
        self, prompt_ids: list[int], done: Completion, wire: Messages, engine_id: str
    ) -> Segment:
        """The segment of the first turn: all of the prompt is new context."""
        n_context, n_sampled = len(prompt_ids), len(done.token_ids)
        sampled = np.repeat(np.array([0, 1], np.uint8), [n_context, n_sampled])
        reason = self._train_reason()
        segment = Segment(
            group_id=self.a.group_id,
            rollout_id=self.a.rollout_id,
            attempt=self.a.attempt,
            segment=len(self.segments),
            parent=None,
            keep=0,
            token_ids=np.concatenate([np.array(prompt_ids, np.int32), done.token_ids]),
            sampled=sampled,
            train=np.zeros_like(sampled) if reason else sampled,
            train_reason=reason,
            logprobs=np.concatenate([np.zeros(n_context, np.float32), done.logprobs]),
            version_runs=[VersionRun(epoch=e, version=v, n=n) for e, v, n in done.version_runs],
            finish_reason=done.finish_reason,
            stop_token=done.stop_token,
            sampling=self.sampling,
            kv="recomputed" if len(done.version_runs) > 1 else None,
            engine_id=engine_id,
            messages=json.dumps(wire),
            digest=b"",
        )
        return replace(segment, digest=segment_digest(to_row(segment)))

    def raise_if_not_written(self) -> None:
        """An outcome must not name rows that were lost: a full disk stops the run instead."""
        for ticket in self.tickets:
            if ticket.done():
                ticket.result()

    def _train_reason(self) -> str | None:
        if self.a.purpose != "train":
            return f"purpose {self.a.purpose}"
        return self.sampling.untrainable_reason()

    def reward(self, name: str, value: float | None, source: str) -> RewardRow:
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if value is not None and not number:
            raise RolloutFailed(f"agent reward '{name}' is {value!r}, not a number or None")
        return RewardRow(
            rollout_id=self.a.rollout_id,
            attempt=self.a.attempt,
            name=name,
            value=None if value is None else float(value),
            source=source,
        )

    def outcome(self, status: str, reason: str | None, seconds: float) -> RolloutRow:
        n_sampled = sum(int(s.sampled.sum()) for s in self.segments)
        n_all = sum(len(s.token_ids) for s in self.segments)
        return RolloutRow(
            group_id=self.a.group_id,
            rollout_id=self.a.rollout_id,
            attempt=self.a.attempt,
            status=status,
            reason=reason,
            n_segments=len(self.segments),
            chain_digest=chain_digest([s.digest for s in self.segments]),
            counts={"sampled": n_sampled, "context": n_all - n_sampled, "regenerated": 0},
            seconds=seconds,
            metrics=canonical_json({}),
        )
