"""Whole runs with experts: refits, lag, replay; killed, resumed, executed again from the log."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import Train, molt, sql

from molt.recipes.moe import save_qwen3_moe
from molt.store import Log

pytestmark = pytest.mark.e2e
RECIPE = Path(__file__).parents[2] / "molt" / "recipes" / "moe.toml"
SMALL = ("run.steps=5", "checkpoint.every=2", "data.groups_per_step=2", "sampling.max_tokens=12")


@pytest.fixture
def started() -> Iterator[list[Train]]:
    runs: list[Train] = []
    yield runs
    for run in runs:
        run.end(grace_s=0)


def test_killed_and_resumed_with_routing(tmp_path: Path, started: list[Train]) -> None:
    """kill -9 after step 3: redo takes the recorded experts from the log, and digests are equal."""
    model = f"model={save_qwen3_moe(tmp_path / 'model')}"
    first = Train(tmp_path, "", *SMALL, model, config=RECIPE)
    started.append(first)
    first.wait_for("step", 3)
    first.signal(signal.SIGKILL)
    first.process.wait()
    assert not first.end(grace_s=30)
    second = Train(tmp_path, "", *SMALL, model, config=RECIPE)
    started.append(second)
    assert second.wait() == 0, second.text()[-3000:]
    log = second.log
    assert "step 3 redone" in second.text()

    steps = sql(log, "select step, metrics from steps order by step")
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5]
    routing = [json.loads(s["metrics"])["routing"] for s in steps]
    assert all(r["coverage"] == 1.0 for r in routing)
    assert routing[0]["mismatch"] < 2e-3 and routing[0]["gap_live"] < 1e-2  # ties of logits
    # What differs is the lag's, not an error's; a step of fresh tokens alone has none.
    assert 0.0 < max(r["mismatch_max"] for r in routing) < 0.8
    lags = sql(log, "select distinct lag from lag order by lag")
    assert [r["lag"] for r in lags] == [0, 1]
    assert sql(log, "select max(probe_gap) as gap from policies")[0]["gap"] < 1e-4
    check_rows(log)
    replayed = molt("replay", str(log), "--step", "2", "--to", "5", "--format", "json")
    assert replayed.returncode == 0, replayed.stderr[-2000:]
    found = json.loads(replayed.stdout)
    assert found["ok"] and all(s["state_digest"]["equal"] for s in found["steps"])
    assert molt("doctor", str(log)).returncode == 0


def check_rows(log: Path) -> None:
    """Every position of a trained rollout but its last has one row; nobody else has any."""
    planned = "select distinct rollout_id, attempt from plans"
    query = f"""
        with p as ({planned}),
        t as (select rollout_id, attempt, sum(len(token_ids)) n from segments group by 1, 2),
        r as (select rollout_id, attempt, sum(n) n, min(start) a, max(start + n) z from routing
              group by 1, 2)
        select t.n::int as tokens, r.n::int as known, r.a::int as first, r.z::int as stop
        from p join t using (rollout_id, attempt) left join r using (rollout_id, attempt)"""
    rows = sql(log, query)
    assert len(rows) == 5 * 16
    for row in rows:
        n = row["tokens"] - 1
        assert (row["first"], row["stop"], row["known"]) == (0, n, n), row
    plans = [r for r in Log.open(log).records() if r.kind == "plan"]
    refs = [b["refs"] for p in plans for row in p.rows for b in row["branches"]]
    assert refs and all(len(found) >= 2 for found in refs)  # of segments and of their routing


@pytest.mark.slow
def test_stale_experts_are_caught_before_the_first_step(
    tmp_path: Path, started: list[Train]
) -> None:
    """With the engine's fix switched off the start-up self-test refuses to train (I3)."""
    model = f"model={save_qwen3_moe(tmp_path / 'model')}"
    run = Train(tmp_path, "", *SMALL, model, config=RECIPE, MOLT_FAULT="stale_experts")
    started.append(run)
    assert run.wait() == 1
    assert "ModelIdentityError" in run.text() and "self-test" in run.text(), run.text()[-2000:]
    assert sql(run.log, "select * from plans") == []


@pytest.mark.slow
def test_the_recipe_learns_and_frozen_routers_run(tmp_path: Path, started: list[Train]) -> None:
    """All of the recipe as shipped; then with the routers left out of training and refit."""
    (tmp_path / "frozen").mkdir()
    run = Train(tmp_path, "", config=RECIPE)
    started.append(run)
    assert run.wait(600) == 0, run.text()[-3000:]
    reward = "select step, avg(reward) as reward from plans group by step order by step"
    rewards = [r["reward"] for r in sql(run.log, reward)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1, rewards
    frozen = Train(tmp_path / "frozen", "", *SMALL, "train.routing=freeze", config=RECIPE)
    started.append(frozen)
    assert frozen.wait() == 0, frozen.text()[-3000:]
    steps = sql(frozen.log, "select metrics from steps order by step")
    assert json.loads(steps[0]["metrics"])["routing"]["mismatch"] < 1e-2  # live: a tie spreads
    assert sql(frozen.log, "select max(probe_gap) as gap from policies")[0]["gap"] < 1e-4
