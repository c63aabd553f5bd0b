"""Whole runs on real parts with a tiny model: killed, stopped, broken prompts, dead engine.

What must hold afterwards is asked by plain SQL, written apart from the product's own checks.
"""

import datetime
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import factories as make
import pytest
from launch import Train, molt, sql
from tasks import broken_prompts
from tiny import tiny_tied_llama

from molt.config import load
from molt.model import folder_digests
from molt.schemas.text import canonical_json
from molt.store import Log

pytestmark = pytest.mark.e2e

TWICE = """
select group_id, count(*) as n from (
    select distinct group_id, step from plans union all
    select group_id, -1 from drops where rollout_id is null
) group by group_id having n > 1
"""
MISSING = """
select k from (
    select unnest(range((select max(ordinal) + 1 from prompts where purpose = 'train'))) as k
) where k not in (select ordinal from prompts where purpose = 'train')
"""
UNSETTLED = "select group_id from groups where purpose = 'train' and not settled"
SETTLED = "select count(*) as n from groups where purpose = 'train' and settled"
ROLLOUT_TWICE = "select rollout_id from plans group by rollout_id having count(*) > 1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_tied_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def started() -> Iterator[list[Train]]:
    """Runs of a test; whatever happens, their processes end with it."""
    runs: list[Train] = []
    yield runs
    for run in runs:
        run.end(grace_s=0)


def test_killed_with_broken_prompts_then_resumed(
    tmp_path: Path, model: str, started: list[Train]
) -> None:
    """kill -9 of the whole run after step 2; the second start ends it, nothing twice or missing."""
    broken = (
        *("data.train=tasks:broken_prompts", "run.steps=6", "checkpoint.best=reward"),
        *("checkpoint.every=4", "agent.deadline_s=10", "algo.kl_coef=0.01", "algo.kl_target=0.1"),
        *("algo.update_passes=2", "algo.mini_batches=2"),
        *("agent.workers=2", "log.appender=true"),
    )
    first = Train(tmp_path, model, *broken)
    started.append(first)
    first.wait_for("step", 2)
    first.signal(signal.SIGKILL)
    first.process.wait()
    assert not first.end(grace_s=30), "processes outlived the killed driver"
    second = Train(tmp_path, model, *broken)
    started.append(second)
    assert second.wait() == 0, second.text()[-3000:]

    log = second.log
    assert "redo of" in second.text()
    assert sql(log, TWICE) == [] and sql(log, MISSING) == [] and sql(log, UNSETTLED) == []
    assert [r["step"] for r in sql(log, "select step from steps order by step")] == [*range(1, 7)]
    assert sql(log, SETTLED) == [{"n": settled_undisturbed(6 * 2)}]
    reasons = {r["reason"] for r in sql(log, "select distinct reason from rollouts")}
    for part in ("boom", "is nan", "window of 160", "not a Turn", "SystemExit", "deadline"):
        assert any(part in str(r) for r in reasons), reasons
    policies = sql(log, "select epoch, version, weights_digest d from policies order by 1, 2")
    assert {p["epoch"] for p in policies} == {1, 2}
    by_version = {(p["epoch"], p["version"]): p["d"] for p in policies}
    one_epoch = [d for (e, _), d in by_version.items() if e == 2]
    assert len(set(one_epoch)) == len(one_epoch), "every step changed the weights"
    again = set(v for _, v in by_version if (1, v) in by_version and (2, v) in by_version)
    assert all(by_version[1, v] == by_version[2, v] for v in again)
    lags = {r["lag_max"] for r in sql(log, "select distinct lag_max from plans")}
    assert lags <= {0, 1, 2, None}, "wait tolerates twice max_lag"
    check_metrics(log)
    gaps = sql(log, "select max(probe_gap) as gap from policies")
    assert gaps[0]["gap"] < 1e-4
    replayed = molt("replay", str(log), "--step", "3", "--to", "6", "--format", "json")
    assert replayed.returncode == 0, replayed.stderr[-2000:]
    found = json.loads(replayed.stdout)
    assert found["ok"] and [s["step"] for s in found["steps"]] == [3, 4, 5, 6]
    assert all(s["state_digest"]["equal"] for s in found["steps"])
    check_damage_is_found(log)


def settled_undisturbed(planned: int) -> int:
    """Prompts up to the one that fills the last plan; those that break are dropped."""
    good = [k for k, prompt in enumerate(broken_prompts(0)) if prompt["kind"] == "plain"]
    return good[planned - 1] + 1


def check_metrics(log: Path) -> None:
    """Every figure that `steps.metrics` promises is there, and some that can be known are right."""
    rows = sql(log, "select step, updates, metrics from steps order by step")
    assert all(row["updates"] == 4 for row in rows), "two passes of two mini-batches"
    metrics = [json.loads(row["metrics"]) for row in rows]
    for found in metrics:
        assert {"reward", "pass_at_1", "lengths", "truncated", "drops", "kl_coef"} <= set(found)
        assert {"mismatch", "idle", "commit_s", "lags", "recompute_tokens"} <= set(found)
        assert {"regenerated_tokens", "redone", "reissued", "clip_high_frac"} <= set(found)
        assert found["lengths"]["trained"] and found["lengths"]["issued"]
        assert 0 <= found["clip_low_frac"] <= 1 and found["tokens_per_s"] > 0
        assert 0 <= found["idle"]["trainer"] <= 1 and found["seconds"]["trainer"]["forward"] > 0
    assert metrics[0]["kl"] == 0 < metrics[-1]["kl"]
    assert sum(found["redone"] for found in metrics) > 0
    assert any("no reward" in found["drops"] for found in metrics)


def check_damage_is_found(log: Path) -> None:
    """One flipped byte anywhere in a commit: doctor exits 1 with its name, and SQL refuses it."""
    assert molt("doctor", str(log)).returncode == 0
    victim = max((log / "data").glob("*/*/*.segments.arrow"), key=lambda p: p.stat().st_size)
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 3] ^= 1
    victim.write_bytes(raw)
    found = molt("doctor", str(log))
    assert found.returncode == 1 and victim.name in found.stdout
    asked = molt("sql", str(log), "select count(*) from segments")
    assert asked.returncode == 1 and "LogCorrupt" in asked.stderr


def test_on_policy_run_stops_on_sigterm_and_survives_its_engine(
    tmp_path: Path, model: str, started: list[Train]
) -> None:
    """max_lag 0; SIGTERM finishes the step; a killed engine is started again and refitted."""
    first = Train(tmp_path, model, "algo.max_lag=0", "run.steps=5")
    started.append(first)
    first.wait_for("step", 1)
    first.signal(signal.SIGTERM)
    assert first.wait() == 0, first.text()[-3000:]
    log = first.log
    n_first = len(sql(log, "select step from steps"))
    assert 1 <= n_first < 5 and "stopping after this step" in first.text()
    assert sql(log, "select max(step) as s from checkpoints")[0]["s"] == n_first

    second = Train(tmp_path, model, "algo.max_lag=0", "run.steps=8")
    started.append(second)
    second.wait_for("step", n_first + 1)
    second.one("EngineCore").kill()
    assert second.wait() == 0, second.text()[-3000:]
    assert "engine-0 died; starting it again" in second.text()
    assert sql(log, TWICE) == [] and sql(log, MISSING) == [] and sql(log, UNSETTLED) == []
    assert {r["lag_max"] for r in sql(log, "select distinct lag_max from plans")} == {0}
    evals = sql(log, "select dataset, count(*) as n from prompts where purpose='eval' group by 1")
    assert {e["dataset"] for e in evals} >= {"heldout@0", "heldout@8"}


def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, model: str, started: list[Train]
) -> None:
    """One bit of the newest checkpoint: an older one and more redo give the recorded state."""
    first = Train(tmp_path, model, "data.eval=")
    started.append(first)
    assert first.wait() == 0, first.text()[-3000:]
    victim = max((first.log / "checkpoints" / "1-4").glob("*.distcp"), key=os.path.getsize)
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 1
    victim.write_bytes(raw)
    second = Train(tmp_path, model, "data.eval=", "run.steps=5")
    started.append(second)
    assert second.wait() == 0, second.text()[-3000:]
    text = second.text()
    assert "checkpoints/1-4" in text and "loading the checkpoint of step 2" in text
    assert "step 4 redone" in text
    steps = sql(second.log, "select step from steps order by step")
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5]


def test_a_stale_tied_head_is_caught_before_the_first_step(
    tmp_path: Path, model: str, started: list[Train]
) -> None:
    """With the engine's fix switched off the start-up self-test refuses to train (I3)."""
    run = Train(tmp_path, model, MOLT_FAULT="stale_tied_head")
    started.append(run)
    assert run.wait() == 1
    assert "ModelIdentityError" in run.text() and "self-test" in run.text(), run.text()[-2000:]
    assert sql(run.log, "select * from plans") == []


def test_other_settings_need_a_word(tmp_path: Path, model: str, started: list[Train]) -> None:
    """A log made with other algorithm settings is not continued silently."""
    run = Train(tmp_path, model, "train.lr=5e-4")
    started.append(run)
    run.signal(signal.SIGKILL)
    run.process.wait()
    log = Log.create(run.log)
    log.control.open_epoch(
        now=datetime.datetime(2026, 1, 1),
        sources=[],
        config=canonical_json(asdict(load(tmp_path / "config.toml", ["train.lr=1e-4"]))),
        digests=folder_digests(model),
        packages="{}",
        world_size=1,
        threads=1,
    )
    log.control.put("plan", [], make.plan_header(1))
    again = Train(tmp_path, model, "train.lr=5e-4")
    started.append(again)
    assert again.wait() == 2
    assert "train.lr = 0.0001 -> 0.0005" in again.text()
    assert "--accept-changes" in again.text()
    assert os.listdir(run.log / "data") == []
