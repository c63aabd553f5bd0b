"""Whole runs in which something dies: ranks, engines, workers, drivers, also at random moments.

What must hold afterwards is asked by plain SQL, written apart from the product's own audit.
"""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launch import Train, molt, sql
from test_run import MISSING, ROLLOUT_TWICE, TWICE, UNSETTLED
from tiny import tiny_tied_llama

from molt.store import Log

pytestmark = pytest.mark.e2e

DONE = "select rollout_id, attempt from rollouts where group_id like 'train-%'"
DIGESTS = "select step, state_digest as d from steps"


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


def check_exactly_once(log: Path) -> None:
    assert sql(log, TWICE) == [] and sql(log, MISSING) == [] and sql(log, ROLLOUT_TWICE) == []


def test_two_ranks_go_on_as_one_from_an_earlier_step(
    tmp_path: Path, model: str, started: list[Train]
) -> None:
    """Three steps on two ranks; then one rank, from step 1 on, without one group."""
    first = Train(tmp_path, model, "data.eval=", "run.steps=3", "train.world_size=2")
    started.append(first)
    assert first.wait() == 0, first.text()[-3000:]
    log = first.log
    poison = sql(log, "select rollout_id as r from plans where step = 3 order by 1 limit 1")[0]["r"]
    flags = ("--from", "1", "--drop", poison)
    second = Train(tmp_path, model, "data.eval=", "run.steps=4", "checkpoint.every=9", flags=flags)
    started.append(second)
    assert second.wait() == 0, second.text()[-3000:]
    text = second.text()
    assert "train.world_size = 2 -> 1" in text and "are abandoned" in text
    steps = sql(log, "select step, epoch from steps order by step")
    assert [(r["step"], r["epoch"]) for r in steps] == [(1, 1), (2, 2), (3, 2), (4, 2)]
    assert "step 1 redone: sketch within" in text
    check_exactly_once(log)
    drops = sql(log, "select group_id, reason from drops where reason like '--drop%'")
    assert drops == [{"group_id": poison.split("/")[0], "reason": f"--drop {poison}"}]
    assert sql(log, f"select * from plans where group_id = '{drops[0]['group_id']}'") == []


@pytest.mark.slow
def test_two_engines_one_dies_a_worker_dies_and_the_run_goes_on(
    tmp_path: Path, model: str, started: list[Train]
) -> None:
    """A failed engine is fenced, restarted, refitted before its first token; the other goes on."""
    # Enough steps for an engine to be up again before the last one.
    sizes = ("engine.count=2", "agent.workers=2", "run.steps=160", "data.eval=")
    run = Train(tmp_path, model, *sizes)
    started.append(run)
    run.wait_for("step", 2, limit_s=400)
    run.processes("EngineCore")[0].kill()
    run.wait_for("step", 4, limit_s=400)
    run.processes("RolloutWorker")[0].kill()
    assert run.wait(limit_s=500) == 0, run.text()[-3000:]
    text = run.text()
    assert "engine-0 died; starting" in text or "engine-1 died; starting" in text, text[-3000:]
    assert "worker-0 died; starting" in text or "worker-1 died; starting" in text, text[-3000:]
    log = run.log
    assert [r["epoch"] for r in sql(log, "select epoch from epochs")] == [1], "one start"
    check_exactly_once(log)
    policies = [r.rows[0] for r in Log.open(log).records() if r.kind == "policy"]
    sizes_seen = [len(p["engines"]) for p in policies]
    assert min(sizes_seen) == 1, "the other engine went on alone"
    last = sorted(policies[-1]["engines"])
    assert last == ["engine-0", "engine-1"], "both have the last version"
    assert len({p["version"] for p in policies}) == len(policies)
    late = f"version_runs[1].version >= {policies[-1]['version'] - 3}"
    used = sql(log, f"select distinct engine_id as e from segments where {late}")
    assert {u["e"] for u in used} == {"engine-0", "engine-1"}, "the new one samples again"
    assert sql(log, "select max(probe_gap) as gap from policies")[0]["gap"] < 1e-4


@pytest.mark.slow
def test_a_driver_that_was_frozen_is_fenced(
    tmp_path: Path, model: str, started: list[Train]
) -> None:
    """SIGSTOP, another driver takes over, SIGCONT: the old one ends and nothing of it counts."""
    old = Train(tmp_path, model, "run.steps=60", "data.eval=")
    started.append(old)
    old.wait_for("step", 2)
    old.signal(signal.SIGSTOP)
    old.remember()
    n_old = len(sql(old.log, "select step from steps"))
    (tmp_path / "second").mkdir()
    new = Train(tmp_path / "second", model, f"run.dir={old.log}", "run.steps=60", "data.eval=")
    started.append(new)
    new.log = old.log
    new.wait_for("step", n_old + 2)
    old.signal(signal.SIGCONT)
    assert old.wait(limit_s=120) == 1, old.text()[-2000:]
    assert "Fenced" in old.text() and "Another driver has taken over" in old.text()
    new.signal(signal.SIGTERM)
    assert new.wait() == 0, new.text()[-3000:]
    log = old.log
    records = Log.open(log).records()
    takeover = next(r for r in records if r.kind == "epoch" and r.epoch == 2)
    assert all(r.epoch == 2 for r in records if r.n > takeover.n)
    closed = {c["writer"]: c["last_seq"] for c in takeover.rows[0]["closed"]}
    shown = sql(log, "select writer, max(seq) as seq from rollouts group by 1")
    assert all(r["seq"] <= closed[r["writer"]] for r in shown if r["writer"].startswith("1-"))
    assert any(r["writer"].startswith("2-") for r in shown)
    check_exactly_once(log)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", range(int(os.environ.get("MOLT_KILLS", "3"))))
@pytest.mark.parametrize("victim", ["driver", "TrainerActor", "EngineCore", "RolloutWorker"])
def test_killed_at_a_random_moment(
    tmp_path: Path, model: str, started: list[Train], victim: str, seed: int
) -> None:
    """kill -9 of one process; what was acknowledged before is there at the end, once.

    A driver or trainer that dies ends the start, and the same command resumes; an engine or worker
    is started again within it. `MOLT_KILLS` sets the number of moments.
    """
    rng = random.Random(f"{victim}-{seed}")
    options = ("run.steps=12", "data.eval=", "checkpoint.every=3")
    run = Train(tmp_path, model, *options)
    started.append(run)
    run.wait_for("step", rng.randint(1, 6))
    pause = rng.uniform(0.0, 2.0)
    psutil.wait_procs([psutil.Process(run.process.pid)], timeout=pause)
    log = run.log
    before = {(r["rollout_id"], r["attempt"]) for r in sql(log, DONE)}
    digests = {r["step"]: r["d"] for r in sql(log, DIGESTS)}
    print(f"{victim}, seed {seed}: killed {pause:.2f} s after step {max(digests)}")
    if victim == "driver":
        run.signal(signal.SIGKILL)
    else:
        run.processes(victim)[0].kill()
    status = run.wait(limit_s=400)
    if victim in ("driver", "TrainerActor"):
        assert status != 0, "the run was over before the kill"
        run = Train(tmp_path, model, *options)
        started.append(run)
        status = run.wait(limit_s=400)
    assert status == 0, run.text()[-3000:]
    after = {(r["rollout_id"], r["attempt"]) for r in sql(log, DONE)}
    assert before <= after, "acknowledged and lost"
    assert digests.items() <= {r["step"]: r["d"] for r in sql(log, DIGESTS)}.items()
    check_exactly_once(log)
    assert sql(log, UNSETTLED) == []
    replayed = molt("replay", str(log), "--step", "1", "--to", "12", "--format", "json")
    assert replayed.returncode == 0, replayed.stdout[-2000:] + replayed.stderr[-2000:]
