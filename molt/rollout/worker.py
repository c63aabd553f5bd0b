"""The rollout worker: plays agents against the engines and appends what happened.

Its rows are durable before it reports a rollout as done (I6). Every call of the model goes through
the rollout's `Session`, whichever kind of agent makes it. A rollout that fails is a row with its
reason; a dead engine is not the rollout's fault: it waits for another one, and if none comes it
leaves no outcome, so the prompt is issued again.
"""

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from molt.agents.capture import Capture
from molt.agents.chat import ChatAgent, Context
from molt.agents.env import Env, Reply, resolve
from molt.agents.guard import (
    RolloutFailed,
    agent_call,
    checked_messages,
    checked_turn,
    run_agent,
)
from molt.agents.parse import ReplyParser, choose_parsers
from molt.agents.render import Renderer
from molt.agents.types import ChatRequest
from molt.config import Config
from molt.process import redirect_output
from molt.rollout.engines import EngineSource, RayEngine
from molt.rollout.growing import make_segment
from molt.rollout.resume import Recorded
from molt.rollout.routing import RoutingShape
from molt.rollout.session import Desk, Session
from molt.rollout.types import Assignment, Completion, join
from molt.schemas.check import ROOT_DIGEST
from molt.schemas.errors import (
    ConfigError,
    RequestRefused,
    SegmentRejected,
    TemplateError,
    WindowFull,
)
from molt.schemas.records import Sampling, Segment
from molt.store import Log

Outcome = tuple[str, str | None, Mapping[str, Any]]
"""Status, reason and metrics of a rollout."""


class RolloutWorker:
    """Plays rollouts concurrently; one writer, all engines (Ray actors or plain objects)."""

    def __init__(
        self,
        log_path: str,
        epoch: int,
        config: Config,
        tokenizer_folder: str,
        engines: Sequence[RayEngine],
        output: str | None = None,
        routing: RoutingShape | None = None,
        appender: Path | None = None,
    ) -> None:
        """routing: of the experts that the engines capture; None if they capture none. appender:
        address of the process that commits for the workers of this host; None = this one does."""
        if output is not None:
            redirect_output(output)
        from transformers import AutoTokenizer

        self.config = config
        self.agent = resolve(config.agent.env, "agent.env")
        self.log = Log.open(log_path)
        self.writer = self.log.writer(
            epoch,
            appender=appender,
            linger_s=config.log.linger_s,
            routing=routing.metadata() if routing else None,
        )
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        renderer = Renderer(tokenizer)
        parsers = choose_parsers(
            renderer.template_text(), config.agent.tool_parser, config.agent.reasoning_parser
        )
        self.desk = Desk(
            writer=self.writer,
            engines=EngineSource(engines, config.agent.engine_wait_s),
            model=config.run.name or "policy",
            tokenizer=tokenizer,
            parser=ReplyParser(tokenizer, *parsers),
            new_capture=lambda: Capture(renderer),
            sampling=config.sampling,
            window=config.engine.max_model_len,
            partial_tokens=config.agent.partial_tokens,
            n_experts=routing.n_experts if routing else 0,
        )
        self.sessions: dict[str, Session] = {}
        """Rollouts that are being played, by bearer token: what the server looks them up in."""
        self._serving: asyncio.Task[Any] | None = None

    async def play(self, assignments: Sequence[Assignment]) -> None:
        """Play rollouts to their end; returns when all outcomes are durable."""
        await asyncio.gather(*(self._play_one(a) for a in assignments))

    async def replace_engine(self, engine: RayEngine) -> None:
        """Use this handle from now on, for an engine that is new or was started again."""
        self.desk.engines.replace(engine)

    def ready(self) -> bool:
        """True once the worker can play."""
        return True

    async def close(self) -> None:
        """Stop listening and end this worker's log directory cleanly."""
        if self._serving is not None:
            await (await self._serving).close()
        await asyncio.to_thread(self.writer.close)

    # -- one rollout ---------------------------------------------------------------------------

    async def _play_one(self, a: Assignment) -> None:
        rows = self.log.rows(a.source)
        session = Session(self.desk, a, self.config.agent.deadline_s, rows)
        if getattr(self.agent, "resumable", False):
            session.recorded = Recorded(rows)
        self.sessions[session.token] = session
        try:
            status, reason, metrics = await self._outcome(session)
        finally:
            del self.sessions[session.token]
            await session.close()
        try:
            await session.finish(status, reason, metrics)
        except SegmentRejected as error:
            await session.finish("failed", f"rejected: {error}")

    async def _outcome(self, session: Session) -> Outcome:
        """Play; what is wrong with the rollout becomes its reason, anything else is raised."""
        play = self._play_env
        if inspect.isclass(self.agent) and issubclass(self.agent, ChatAgent):
            play = self._play_chat
        try:
            async with asyncio.timeout_at(session.deadline) as session.timeout:
                status, reason, metrics = await play(session)
            session.timeout = None
        except WindowFull as error:
            return ("truncated" if session.links else "failed"), f"window: {error}", {}
        except RequestRefused as error:
            return "failed", f"request: {error}", {}
        except TimeoutError:
            return "truncated", f"deadline: {self.config.agent.deadline_s:g} s", {}
        except (SegmentRejected, TemplateError) as error:
            return "failed", f"rejected: {error}", {}
        except RolloutFailed as error:
            if session.fatal is not None:
                raise session.fatal from error
            if session.full is not None and session.links:
                return "truncated", f"window: {session.full}", {}
            return "failed", str(error), {}
        if session.fatal is not None:
            raise session.fatal
        if status == "ok" and session.finish_reason == "length":
            status, reason = "truncated", "length"
        return status, reason, metrics

    async def _play_env(self, session: Session) -> Outcome:
        agent = self.config.agent
        env: Env = await agent_call("agent.env", self.agent)
        messages = checked_messages(await agent_call("reset", env.reset, session.a.prompt))
        for _ in range(agent.max_turns):
            reply = await session.chat(ChatRequest(messages=messages))
            session.delivered(reply.id)
            choice = reply.choices[0]
            said = Reply(
                text=choice.text,
                finish_reason=choice.finish_reason,
                n_tokens=len(choice.token_ids),
            )
            turn = checked_turn(await agent_call("step", env.step, said))
            of = None if turn.done else choice.segment
            for name, value in turn.rewards.items():
                session.reward(name, value, segment=of, source=agent.env)
            if turn.done:
                return ("pending" if turn.pending else "ok"), None, {}
            told = checked_messages(turn.messages, "step")
            messages = [*messages, choice.reply.message(), *told]
        return "truncated", f"max_turns: {agent.max_turns}", {}

    async def _play_chat(self, session: Session) -> Outcome:
        a, agent = session.a, self.config.agent
        context = Context(
            base_url=await self._base_url(),
            api_key=session.token,
            model=self.desk.model,
            prompt=a.prompt,
            label=a.prompt.get("label"),
            sampling=session.sampling,
            deadline_s=agent.deadline_s,
            rollout_id=a.rollout_id,
            attempt=a.attempt,
            purpose=a.purpose,
        )
        result = await run_agent(cast(type[ChatAgent], self.agent), context)
        for name, value in result.rewards.items():
            session.reward(name, value, source=agent.env)
        for which, rewards in result.turns.items():
            for name, value in rewards.items():
                session.reward(name, value, segment=session.segment_of(which), source=agent.env)
        return result.status, result.reason, result.metrics

    async def _base_url(self) -> str:
        """Of the server, which is started when the first ChatAgent needs it."""
        if self._serving is None:
            from molt.agents.server import serve

            self._serving = asyncio.create_task(serve(self.sessions))
        return str((await self._serving).base_url)


async def encode_prompt(config: Config, tokenizer: Any, prompt: dict[str, Any]) -> list[int]:
    """The ids with which a rollout of `prompt` opens; ConfigError if the agent fails on it.

    What a ChatAgent will say is not known before it runs: the prompt's JSON stands for it.
    """
    agent = resolve(config.agent.env, "agent.env")
    messages = [{"role": "user", "content": json.dumps(prompt)}]
    try:
        async with asyncio.timeout(config.agent.deadline_s):
            if not (inspect.isclass(agent) and issubclass(agent, ChatAgent)):
                env = await agent_call("agent.env", agent)
                messages = checked_messages(await agent_call("reset", env.reset, prompt))
            renderer = Renderer(tokenizer)
            return renderer.encode(renderer.render(messages, generate=True))
    except TimeoutError:
        raise ConfigError(
            f"{config.agent.env} did not open prompt {prompt} in {config.agent.deadline_s:g} s"
        ) from None
    except (RolloutFailed, TemplateError) as error:
        raise ConfigError(f"{config.agent.env} cannot open prompt {prompt}: {error}") from error


def judge_segment(k: int, context: list[int], pieces: Sequence[Completion]) -> Segment:
    """The probe's record: `context`, then what the engine sampled after it, never trained."""
    whole = join(pieces)
    a = Assignment(
        group_id=f"judge-{k}", rollout_id=f"judge-{k}/0", attempt=0, purpose="judge", prompt={}
    )
    return make_segment(
        a,
        0,
        ROOT_DIGEST,
        parent=None,
        keep=0,
        context=context,
        done=whole,
        train_reason="purpose judge",
        sampling=Sampling(max_tokens=len(whole.token_ids)),
        messages=[],
        role="frozen",
        engine_id="engine-0",
    )
