"""Sessions on a real engine and a real log: retries, siblings, pauses, lost engines, resumption.

What an agent got, what the log holds and what the model computes are compared with each other.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import factories as make
import numpy as np
import pytest
from launch import CONFIG
from players import (
    Local,
    ask,
    assignment,
    chain,
    check_reply,
    in_flight,
    same,
    segments,
)
from tiny import Rig, load, perturb, tiny_tied_llama
from transformers import AutoTokenizer

from molt.agents.capture import Capture
from molt.agents.parse import ReplyParser
from molt.agents.render import Renderer
from molt.agents.types import ChatReply, ChatRequest
from molt.config import load as load_config
from molt.planning import plan_group, plan_header
from molt.replay.assemble import assemble
from molt.rollout.engines import EngineSource
from molt.rollout.resume import Recorded
from molt.rollout.session import Desk, Session
from molt.rollout.worker import RolloutWorker
from molt.schemas.errors import EngineError, RequestRefused, WindowFull
from molt.schemas.records import Sampling
from molt.store import Log
from molt.store.branches import branches
from molt.store.fold import COLUMNS, STREAMS, Fold

pytestmark = pytest.mark.e2e
WINDOW = 512
PARTIAL = 16
VERSION = [0]
"""Of the weights that the shared engine runs: (1, VERSION[0])."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_tied_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rig(folder: str) -> Iterator[Rig]:
    rig = Rig(folder, max_model_len=WINDOW)
    rig.start()
    try:
        rig.run(rig.refit(load(folder), 0))
        yield rig
    finally:
        rig.close()


@pytest.fixture
def desk(rig: Rig, folder: str, log: Log) -> Iterator[Desk]:
    for version in (1, 2):
        log.control.put("policy", [make.policy(1, version)])
    with log.writer() as w:
        w.append("prompts", make.prompt(0, n=1))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    renderer, writer = Renderer(tokenizer), log.writer(linger_s=60)
    yield Desk(
        writer=writer,
        engines=EngineSource([Local(rig)], wait_s=30),
        model="tiny",
        tokenizer=tokenizer,
        parser=ReplyParser(tokenizer, None, None),
        new_capture=lambda: Capture(renderer),
        sampling=Sampling(max_tokens=40),
        window=WINDOW,
        partial_tokens=PARTIAL,
    )
    writer.close()


def test_m04_a_retry_gets_the_first_answer(rig: Rig, desk: Desk, log: Log) -> None:
    case = make.load_case("M04")
    assert len(case["given"]["requests"]) == 4

    async def play() -> tuple[list[ChatReply], Session]:
        session = Session(desk, assignment(), 60)
        first = asyncio.create_task(session.chat(ask("hi")))
        await in_flight(rig, 1)
        second = asyncio.create_task(session.chat(ask("hi", retry=1)))
        replies = [await first, await second]
        replies.append(await session.chat(ask("hi", retry=2)))
        session.delivered(replies[0].id)
        replies.append(await session.chat(ask("hi")))
        await session.finish("ok")
        return replies, session

    replies, session = rig.run(play())
    identical = all(same(replies[0], other) for other in replies[1:3])
    assert identical is case["expected"]["replies_1_to_3_identical"]
    anew = not same(replies[0], replies[3])
    assert anew is case["expected"]["reply_4_sampled_anew"]
    rows = segments(log, session)
    ends = [r for r in rows if r["finish_reason"] != "partial"]
    assert len(ends) == case["expected"]["segments"]
    for reply in (replies[0], replies[3]):
        check_reply(rows, reply, {})
    assert session.counts["retries"] == 2 and session.counts["requests"] == 2


def test_who_gets_the_same_answer(rig: Rig, desk: Desk, log: Log) -> None:
    """An answer whose caller went away is kept for the next one; parallel callers get their own."""

    async def play() -> None:
        session = Session(desk, assignment(), 60)
        gone = asyncio.create_task(session.chat(ask("a")))
        await in_flight(rig, 1)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        first = await session.chat(ask("a"))
        assert session.counts["requests"] == 1 and session.counts["retries"] == 1
        never_delivered = await session.chat(ask("a"))
        assert same(first, never_delivered)
        session.delivered(first.id)

        many = await asyncio.gather(*(session.chat(ask("b")) for _ in range(4)))
        assert len({r.id for r in many}) == 4 and session.counts["requests"] == 5
        for reply in many:
            session.delivered(reply.id)
        keyed = await session.chat(ask("b", key="k"))
        session.delivered(keyed.id)
        assert same(keyed, await session.chat(ask("b", key="k")))
        assert not same(keyed, await session.chat(ask("b", key="other")))
        await session.finish("ok")
        with pytest.raises(RequestRefused, match="has ended"):
            await session.chat(ask("c"))
        check_reply(segments(log, session), first, {})

    rig.run(play())


def test_siblings_and_side_models(rig: Rig, desk: Desk, log: Log, folder: str) -> None:
    """n replies are n branches; a judge's call is recorded, not trained, and not in the outcome."""

    async def play() -> tuple[Session, list[ChatReply]]:
        session = Session(desk, assignment(), 60)
        several = await session.chat(ask("q", n=3))
        judged = await session.chat(ask("q", role="judge"))
        text = several.choices[1].reply.message()
        asked = ask("q").messages + [text, {"role": "user", "content": "more"}]
        after = await session.chat(ChatRequest(messages=asked))
        session.reward("end", 1.0, source="test")
        await session.finish("ok")
        return session, [several, judged, after]

    session, replies = rig.run(play())
    rows = segments(log, session)
    for reply in replies:
        check_reply(rows, reply, {VERSION[0]: load(folder)} if VERSION[0] == 0 else {})
    judge = [r for r in rows if r["role"] == "judge"]
    assert {r["train_reason"] for r in judge} == {"role judge"}
    assert not any(sum(r["train"]) for r in judge)
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    fold.update()
    attempt = fold.finished(fold.groups["train-0"], "train-0/0")
    assert attempt is not None and attempt.is_whole()
    assert len(attempt.segments) == len(rows) - len(judge)
    assert len(branches(attempt.segments)) == 3
    tip = replies[2].choices[0].segment
    assert (
        chain(rows, tip)["token_ids"][: replies[0].n_prompt + 5]
        == (chain(rows, replies[0].choices[1].segment)["token_ids"][: replies[0].n_prompt + 5])
    )
    n_sampled = sum(len(c.token_ids) for r in (replies[0], replies[2]) for c in r.choices)
    assert attempt.n_sampled == n_sampled
    assert session.forks["sibling"] == 2


def test_streamed_pieces_are_the_reply(rig: Rig, desk: Desk, log: Log) -> None:
    """Token by token to whoever listens, and in few segments to the log."""
    heard: list[tuple[int, np.ndarray, str]] = []
    late: list[tuple[int, np.ndarray, str]] = []

    async def play() -> tuple[ChatReply, Session]:
        session = Session(desk, assignment(), 60)
        listen = asyncio.create_task(
            session.chat(ask("s", n=2), on_piece=lambda *p: heard.append(p))
        )
        while len(heard) < 5:
            await asyncio.sleep(0)
        await session.chat(ask("s", n=2, retry=1), on_piece=lambda *p: late.append(p))
        return await listen, session

    reply, session = rig.run(play())
    assert len(heard) > 10
    for pieces in (heard, late):
        for choice in reply.choices:
            mine = [p for p in pieces if p[0] == choice.index]
            assert np.concatenate([p[1] for p in mine]).tolist() == choice.token_ids.tolist()
            assert [p[2] for p in mine[:-1]] == [""] * (len(mine) - 1)
            assert mine[-1][2] == choice.finish_reason
    rows = segments(log, session)
    check_reply(rows, reply, {})
    longest = max(len(c.token_ids) for c in reply.choices)
    assert len(rows) <= 2 * (longest // PARTIAL + 1)


def test_a_forced_grammar_is_recorded_and_not_trained(rig: Rig, desk: Desk, log: Log) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}

    async def play() -> tuple[ChatReply, Session]:
        session = Session(desk, assignment(), 60)
        reply = await session.chat(ask("json", response_format=form))
        with pytest.raises(RequestRefused, match="tool_parser"):
            await session.chat(ask("t", tools=({"type": "function"},), tool_choice="required"))
        with pytest.raises(RequestRefused, match="response_format"):
            await session.chat(ask("t", response_format={"type": "nonsense"}))
        with pytest.raises(WindowFull, match=f"window of {WINDOW}"):
            await session.chat(ask("x" * WINDOW))
        return reply, session

    reply, session = rig.run(play())
    rows = segments(log, session)
    check_reply(rows, reply, {})
    assert {r["train_reason"] for r in rows} == {"grammar"} and not any(
        sum(r["train"]) for r in rows
    )
    assert reply.choices[0].text.lstrip().startswith("{"), reply.choices[0].text


def test_a_pause_cuts_segments_and_versions_are_exact(
    rig: Rig, desk: Desk, log: Log, folder: str
) -> None:
    """Weights change under six replies: each token's logprob is that of the version it names."""
    old, new = load(folder), load(folder)
    perturb(new, seed=1)
    long = replace(desk, sampling=Sampling(max_tokens=200), partial_tokens=10_000)

    async def play() -> list[tuple[Session, ChatReply]]:
        sessions = [Session(long, assignment(i), 60) for i in range(6)]
        calls = [asyncio.create_task(s.chat(ask(f"say {i}"))) for i, s in enumerate(sessions)]
        await in_flight(rig, 6 * 30)
        await rig.refit(new, 1)
        VERSION[0] = 1
        replies = await asyncio.gather(*calls)
        for s in sessions:
            await s.finish("ok")
        return list(zip(sessions, replies, strict=True))

    played = rig.run(play())
    cut = 0
    for session, reply in played:
        rows = segments(log, session)
        check_reply(rows, reply, {0: old, 1: new})
        versions = [{r["version"] for r in row["version_runs"]} for row in rows]
        if versions != [{0}]:
            cut += len(rows) > 1
            assert rows[0]["finish_reason"] == "partial" or len(rows) == 1
            assert rows[-1]["kv"] == "recomputed" and versions[-1] >= {1}
            assert all(r["parent"] == i - 1 for i, r in enumerate(rows) if i)
    assert cut >= 3, [len(s.links) for s, _ in played]


def test_a_killed_engine_is_continued_from_the_recorded_ids(
    rig: Rig, desk: Desk, log: Log, folder: str
) -> None:
    """kill -9 of vLLM's core in mid-generation; another engine goes on behind what was recorded."""
    model = load(folder)
    rig.run(rig.refit(model, 2))
    VERSION[0] = 2
    doomed = Rig(folder, max_model_len=WINDOW)
    doomed.runner.close()
    doomed.runner = rig.runner
    pids = doomed.start()["child_pids"]
    source = EngineSource([Local(doomed)], wait_s=60)
    long = replace(desk, engines=source, sampling=Sampling(max_tokens=300))

    async def play() -> list[tuple[Session, ChatReply]]:
        await doomed.refit(model, 2)
        sessions = [Session(long, assignment(i), 60) for i in range(6)]
        calls = [asyncio.create_task(s.chat(ask(f"say {i}"))) for i, s in enumerate(sessions)]
        await in_flight(doomed, 6 * 40)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        while not sum(s.counts["engines_lost"] for s in sessions):
            await asyncio.sleep(0.01)
        source.replace(Local(rig))
        replies = await asyncio.gather(*calls)
        for s in sessions:
            await s.finish("ok")
        return list(zip(sessions, replies, strict=True))

    try:
        played = rig.run(play())
    finally:
        rig.run(doomed.engine.shutdown())
        doomed.sender.close()
    lost = [(s, r) for s, r in played if s.counts["engines_lost"]]
    assert lost, "no reply was cut by the kill"
    for session, reply in played:
        rows = segments(log, session)
        check_reply(rows, reply, {2: model})
        assert len(reply.choices[0].token_ids) <= 300
        assert session.counts["requests"] == 1 + session.counts["engines_lost"]
    for session, _ in lost:
        assert segments(log, session)[0]["finish_reason"] == "partial"


def test_no_engine_in_time(rig: Rig, desk: Desk) -> None:
    """The wait is bounded, does not count against the deadline, and the session remembers why."""

    async def play() -> None:
        source = EngineSource([], wait_s=0.2)
        session = Session(replace(desk, engines=source), assignment(), 0.1)
        async with asyncio.timeout_at(session.deadline) as session.timeout:
            with pytest.raises(EngineError, match=r"no engine for 0\.2 s"):
                await session.chat(ask("x"))
        assert isinstance(session.fatal, EngineError)
        await session.close()

    rig.run(play())


def test_another_attempt_goes_on_from_what_was_recorded(
    rig: Rig, desk: Desk, log: Log, folder: str
) -> None:
    """Two whole replies and a piece of a third: copied, continued, and nothing sampled twice."""
    talk = replace(desk, sampling=Sampling(max_tokens=150))

    async def turns(session: Session, n: int) -> list[ChatReply]:
        messages, replies = ask("begin").messages, []
        for k in range(n):
            replies.append(await session.chat(ChatRequest(messages=messages)))
            session.delivered(replies[-1].id)
            said = replies[-1].choices[0].reply.message()
            messages = [*messages, said, {"role": "user", "content": f"turn {k}"}]
        return replies

    async def play() -> tuple[Session, Session, list[ChatReply]]:
        for attempt in range(20):  # until the third reply is cut before its end
            first = Session(talk, assignment(attempt=attempt), 60)
            playing = asyncio.create_task(turns(first, 3))
            while not playing.done():
                whole = first.counts["calls"] == 2
                if whole and first.links[len(first.links) - 1].n_tokens == PARTIAL:
                    break
                await asyncio.sleep(0)
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            await first.close()
            desk.writer.flush()
            if playing.cancelled() and segments(log, first)[-1]["finish_reason"] == "partial":
                break
        fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
        fold.update()
        begun = fold.groups["train-0"].attempts["train-0/0"][first.a.attempt]
        rows = log.rows(info.ref for _, info in sorted(begun.segments.items()))
        second = Session(talk, assignment(attempt=first.a.attempt + 1), 60, rows)
        second.recorded = Recorded(rows)
        replies = await turns(second, 3)
        await second.finish("ok")
        return first, second, replies

    first, second, replies = rig.run(play())
    old, new = segments(log, first), segments(log, second)
    n_old = len(old)
    assert old[-1]["finish_reason"] == "partial" and len(new) > n_old
    assert [r["digest"] for r in new[:n_old]] == [r["digest"] for r in old]
    assert {r["source_attempt"] for r in new[:n_old]} == {first.a.attempt}
    assert {r["source_attempt"] for r in new[n_old:]} == {None}
    assert second.counts["requests"] == 1
    for reply in replies:
        check_reply(new, reply, {VERSION[0]: load(folder)} if VERSION[0] in (0, 2) else {})
    outcome = log.sql("select counts, n_segments from rollouts").fetchall()
    assert [(o[0]["regenerated"], o[1]) for o in outcome] == [(0, len(new))]


def test_a_worker_plays_envs_of_many_turns(rig: Rig, log: Log, folder: str, tmp_path: Any) -> None:
    """Rewards per turn, truncation by turns and by window, and a plan of the whole."""
    (tmp_path / "config.toml").write_text(CONFIG.format(model=folder, log=log.path))
    config = load_config(
        tmp_path / "config.toml",
        [
            "agent.env=players:Talks",
            "agent.max_turns=4",
            "agent.partial_tokens=8",
            "sampling.max_tokens=20",
            f"engine.max_model_len={WINDOW}",
            "reward.sum_turns=true",
        ],
    )
    for version in range(1, VERSION[0] + 1):
        log.control.put("policy", [make.policy(1, version)])
    kinds = {"train-0/0": "", "train-0/1": "", "train-0/2": "endless", "train-0/3": "long"}
    with log.writer() as w:
        w.append("prompts", make.prompt(0, n=len(kinds)))
    work = [replace(assignment(i), prompt={"kind": k}) for i, k in enumerate(kinds.values())]

    async def play() -> None:
        worker = RolloutWorker(str(log.path), 1, config, folder, [Local(rig)])
        await worker.play(work)
        await worker.close()
        assert worker.sessions == {}

    rig.run(play())
    query = "select rollout_id, status, reason from rollouts order by 1"
    outcomes = {r[0]: r[1:] for r in log.sql(query).fetchall()}
    assert outcomes["train-0/2"] == ("truncated", "max_turns: 4")
    assert outcomes["train-0/3"][0] == "truncated" and "window" in outcomes["train-0/3"][1]
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    fold.update()
    (group,) = make.closed_groups(fold)
    rows = plan_group(fold, group, VERSION[0] + 1, config)
    number = log.control.put("plan", rows, plan_header(config, VERSION[0] + 1))
    sequences = {s.rollout_id: s for s in assemble(log, log.records(number)[0])}
    for rollout_id in ("train-0/0", "train-0/1"):
        attempt = fold.finished(group, rollout_id)
        assert outcomes[rollout_id][0] in ("ok", "truncated") and attempt.is_whole()
        turns = [k for k, s in attempt.segments.items() if s.finish_reason != "partial"]
        assert len(turns) == 3 and len(branches(attempt.segments)) == 1
        keys = sorted(attempt.rewards, key=str)
        assert keys == sorted(
            [(turns[0], None, "step"), (turns[1], None, "step"), (None, None, "end")], key=str
        )
        values = [v for _, v, _ in attempt.rewards.values()]
        (row,) = [r for r in rows if r.rollout_id == rollout_id]
        assert row.reward == pytest.approx(sum(values))
        assert int(sequences[rollout_id].mask.sum()) == attempt.n_sampled


def test_another_worker_goes_on_with_a_resumable_env(
    rig: Rig, log: Log, folder: str, tmp_path: Any
) -> None:
    """The first one dies in mid-reply; the second repeats what is recorded and samples the rest."""
    (tmp_path / "config.toml").write_text(CONFIG.format(model=folder, log=log.path))
    settings = [
        "agent.partial_tokens=4",
        "sampling.max_tokens=60",
        f"engine.max_model_len={WINDOW}",
    ]
    config = load_config(tmp_path / "config.toml", ["agent.env=players:Talks", *settings])
    for version in (1, 2):
        log.control.put("policy", [make.policy(1, version)])
    with log.writer() as w:
        w.append("prompts", make.prompt(0, n=1))

    async def play() -> None:
        first = RolloutWorker(str(log.path), 1, config, folder, [Local(rig)])
        playing = asyncio.create_task(first.play([assignment()]))
        while not any(s.counts["calls"] and s._calls for s in first.sessions.values()):
            await asyncio.sleep(0)
        (session,) = first.sessions.values()
        n_recorded = len(session.links)
        while len(session.links) == n_recorded:
            await asyncio.sleep(0)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        first.writer.flush()
        fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
        fold.update()
        begun = fold.groups["train-0"].attempts["train-0/0"][0].segments
        source = tuple(info.ref for _, info in sorted(begun.items()))
        second = RolloutWorker(str(log.path), 1, config, folder, [Local(rig)])
        await second.play([replace(assignment(attempt=1), source=source)])
        await second.close()

    rig.run(play())
    query = "select attempt, status, n_segments, counts from rollouts"
    ((attempt, status, n_segments, counts),) = log.sql(query).fetchall()
    assert attempt == 1 and status in ("ok", "truncated") and counts["regenerated"] == 0
    query = "select attempt, digest, source_attempt from segments order by attempt, segment"
    rows = log.sql(query).fetchall()
    old = [digest for of, digest, _ in rows if of == 0]
    new = [(digest, source) for of, digest, source in rows if of == 1]
    assert len(new) == n_segments > len(old)
    assert new[: len(old)] == [(digest, 0) for digest in old]
    assert {source for _, source in new[len(old) :]} == {None}
    rewards = log.sql("select name, count(*) from rewards where attempt = 1 group by 1 order by 1")
    assert rewards.fetchall() == [("end", 1), ("step", 2)]
