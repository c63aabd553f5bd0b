"""What the driver does while it waits: for rollouts, for rewards, for a trainer, for an engine."""

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import factories as make
import pytest
import simulation as scripted
from simulation import Simulation, config

from molt.config import Config
from molt.planning import Drop
from molt.rollout.types import Assignment
from molt.schemas.errors import Fenced, MoltError
from molt.startup import is_complete
from molt.store import Log


def begun(path: Path, conf: Config, **options: Any) -> Simulation:
    """A simulation that waits as the product does, not in jumps from one end to the next."""
    found = Simulation(path, conf, **options)
    del found.run._news
    return found


async def driven(found: Simulation, work: Awaitable[Any]) -> Any:
    found.publish()
    found.run.issuer.adopt()
    try:
        return await asyncio.wait_for(work, 30)
    finally:
        await found.run.issuer.close()


def test_an_old_driver_that_waits_is_fenced_by_a_new_epoch(tmp_path: Path) -> None:
    found = begun(tmp_path / "log", config("run.steps=50", "run.stuck_s=20", "agent.deadline_s=9"))

    async def taken_over() -> None:
        waiting = asyncio.create_task(found.run.plan())
        await asyncio.sleep(0.1)
        make.open_epoch(Log.open(tmp_path / "log"))
        await waiting

    with pytest.raises(Fenced, match="epoch 1 lost this log: epoch 2 has begun"):
        asyncio.run(driven(found, taken_over()))
    asked = found.run.log.sql("select count(*), count(distinct group_id) from prompts").fetchall()
    assert asked[0][0] == asked[0][1], "nothing was issued twice"


@pytest.mark.parametrize("what", ["training", "refit"])
def test_a_call_that_never_answers_is_explained(tmp_path: Path, what: str) -> None:
    found = begun(tmp_path / "log", config("run.steps=5", "run.stuck_s=1", "agent.deadline_s=0.5"))
    run = found.run

    async def hangs() -> None:
        run._phase(what, what)
        await run.meanwhile(asyncio.Event().wait(), "a trainer rank")

    began = time.monotonic()
    with pytest.raises(MoltError, match=rf"{what} did not end in 1 s.*waits for a trainer rank"):
        asyncio.run(driven(found, hangs()))
    assert time.monotonic() - began < 20


def test_what_is_filtered_settles_and_is_asked_for_again_while_a_step_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("molt.issuing.NEWS_S", 0.01)
    found = Simulation(tmp_path / "log", config("run.steps=50", "algo.drop_equal=true"), equal=0.7)
    run, players, told = found.run, found.players, asyncio.Event()
    first_issue: list[int] = []

    async def call(worker: Any, method: str, play: list[Assignment]) -> None:
        for a in play:
            players.lengths[a.rollout_id] = 5
            players._finish(a, players.version)
        players.writer.flush()
        if len(first_issue) == 0:
            await told.wait()

    monkeypatch.setattr(players, "call", call)

    async def train() -> str:
        first_issue.append(run.fold.next_ordinal["train"])
        told.set()
        while not run.meter.drops or run.fold.next_ordinal["train"] == first_issue[0]:
            await asyncio.sleep(0.01)
        return "trained"

    async def drive() -> Any:
        run.issuer.fill()
        run.catch_up()
        return await run.meanwhile(train(), "a trainer rank")

    assert asyncio.run(driven(found, drive())) == "trained"


@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_a_rollout_that_nobody_scores_is_dropped_for_its_lag(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group in four: its slot is free again, and the run goes on."""
    conf = config(
        "run.steps=100", "data.rollouts_per_group=1", "algo.max_lag=1", f"algo.lag={policy}"
    )
    found = Simulation(tmp_path / "log", conf)
    players, finish = found.players, found.players._finish

    def unscored(a: Assignment, version: int) -> None:
        if int(a.group_id.rpartition("-")[2]) % 4:
            finish(a, version)
            return
        row = make.segment(
            rollout_id=a.rollout_id, attempt=a.attempt, epoch=players.epoch, version=version
        )
        end = make.rollout(
            a.rollout_id, attempt=a.attempt, status="pending", digests=[row["digest"]]
        )
        players.writer.append("segments", row)
        players.writer.append("rollouts", end)

    monkeypatch.setattr(players, "_finish", unscored)
    asyncio.run(found.steps(12))
    drops = found.run.log.sql("select group_id, reason from drops").fetchall()
    assert len(drops) > 5 and {reason for _, reason in drops} == {"lag"}
    assert all(int(g.rpartition("-")[2]) % 4 == 0 for g, _ in drops), "only what nobody scored"


def test_rewards_that_come_one_by_one_are_progress(tmp_path: Path) -> None:
    """Played in a moment, scored by somebody slow: longer in all than `run.stuck_s`."""
    stuck = ("run.stuck_s=2", "agent.deadline_s=1")
    conf = config("run.steps=9", "data.rollouts_per_group=1", "algo.max_lag=0", *stuck)
    found = begun(tmp_path / "log", conf)
    players = found.players

    async def call(worker: Any, method: str, play: list[Assignment]) -> None:
        for a in play:
            row = make.segment(rollout_id=a.rollout_id)
            end = make.rollout(a.rollout_id, status="pending", digests=[row["digest"]])
            players.writer.append("segments", row)
            players.writer.append("rollouts", end)
        players.writer.flush()

    players.call = call  # type: ignore[method-assign]

    async def score() -> Any:
        plan = asyncio.create_task(found.run.plan())
        for k in range(4):
            await asyncio.sleep(0.8)
            players.writer.append("rewards", make.reward(f"train-{k}/0", float(k)))
            players.writer.flush()
        return await plan

    plan = asyncio.run(driven(found, score()))
    assert plan is not None and len(plan.rows) == 4


def test_one_group_that_is_ready_does_not_hide_that_all_others_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = scripted.uniform
    equal = {"equaltrain-0": 1.0}
    monkeypatch.setattr(
        scripted, "uniform", lambda n: equal.get(n, 0.0) if n.startswith("equal") else real(n)
    )
    found = Simulation(tmp_path / "log", config("run.steps=5", "algo.drop_equal=true"), equal=0.5)
    with pytest.raises(MoltError, match="64 groups in a row were dropped"):
        asyncio.run(found.steps(1))


def test_what_a_filter_takes_while_enough_groups_are_ready_stops_nothing(tmp_path: Path) -> None:
    """Only who waits for a plan in vain may say that nothing can be trained."""
    found = begun(tmp_path / "log", config("run.steps=50"))
    run = found.run

    async def drops() -> str:
        for k in range(100):
            drop = Drop(group_id=f"train-{k + 1000}", rollout_id=None, reason="equal rewards: 0")
            run.drop(drop)
        return await run.meanwhile(asyncio.sleep(0.1, "trained"), "a trainer rank")

    assert asyncio.run(driven(found, drops())) == "trained"
    with pytest.raises(MoltError, match="100 groups in a row were dropped"):
        run._check_drops()
    assert run.meter.take()["drops"] == {"equal rewards": 100}


def test_nothing_new_is_asked_for_once_the_run_is_to_stop(tmp_path: Path) -> None:
    found = begun(tmp_path / "log", config("run.steps=50"))
    run = found.run

    async def stopping() -> int:
        run.issuer.fill()
        run.catch_up()
        first = run.fold.next_ordinal["train"]
        run.stopping = True
        await asyncio.sleep(0)
        found.players.death.set()  # every play ends
        await run.meanwhile(asyncio.sleep(0.3), "a trainer rank")
        return run.fold.next_ordinal["train"] - first

    assert asyncio.run(driven(found, stopping())) == 0


def test_a_dead_worker_stops_no_step_and_is_replaced_after_it(tmp_path: Path) -> None:
    found = begun(tmp_path / "log", config("run.steps=50", "run.stuck_s=2", "agent.deadline_s=1"))
    run = found.run

    async def dies() -> list[str]:
        run.issuer.fill()
        await asyncio.sleep(0)
        found.players.kill()
        assert await run.meanwhile(asyncio.sleep(0.5, "trained"), "a trainer rank") == "trained"
        assert found.players.restarts == []
        await run.issuer.news()
        return found.players.restarts

    assert asyncio.run(driven(found, dies())) == ["worker-0"]


def test_a_run_whose_last_step_has_no_checkpoint_is_not_complete(tmp_path: Path) -> None:
    conf = config("run.steps=2", f"run.dir={tmp_path / 'log'}", 'data.eval=""')
    found = Simulation(tmp_path / "log", conf)
    asyncio.run(found.steps(2))
    assert not is_complete(conf)
    row = {"epoch": 1, "step": 2, "path": "checkpoints/1-2", "bytes": 0, "files": []}
    found.run.put("checkpoint", [{**row, "state_digest": "a" * 16}])
    assert is_complete(conf)
