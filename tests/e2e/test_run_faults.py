"""Whole runs in which something dies: ranks, engines, workers, drivers, also at random moments.

What must hold afterwards is asked by plain SQL, written apart from the product's own audit.
"""

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch import Train, molt, sql
from test_run import MISSING, ROLLOUT_TWICE, TWICE, UNSETTLED
from tiny import tiny_tied_llama

from molt.store import Log
from molt.store.control import read_records

pytestmark = pytest.mark.e2e


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
    opened = Log.open(log)
    for question in (TWICE, MISSING, ROLLOUT_TWICE):
        assert opened.sql(question).fetchall() == []


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
@pytest.mark.timeout(1500)
def test_two_engines_one_dies_a_worker_dies_and_the_run_goes_on(
    tmp_path: Path, model: str, started: list[Train]
) -> None:
    """A failed engine is fenced, restarted, refitted before its first token; the other goes on."""
    # Enough steps for an engine to be up again before the last one.
    sizes = ("engine.count=2", "agent.workers=2", "run.steps=160", "data.eval=")
    run = Train(tmp_path, model, *sizes)
    started.append(run)
    run.wait_for("step", 2)
    run.one("EngineCore").kill()
    run.wait_for("step", 4)
    run.one("RolloutWorker").kill()
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
@pytest.mark.timeout(1500)
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


VICTIMS = {
    "driver": (),
    "trainer": ("ray::TrainerActor",),
    "engine": ("EngineCore", "ray::Engine"),
    "worker": ("ray::RolloutWorker",),
}
"""What a victim's processes are called; the driver is the command itself."""
KILLS = int(os.environ.get("MOLT_KILLS", "5"))
DONE = """
select rollout_id, attempt from rollouts
where group_id like 'train-%' and status in ('ok', 'truncated')
"""
NOT_TRAINED = f"""
select rollout_id, attempt from ({DONE}) anti join plans using (rollout_id, attempt)
where split_part(rollout_id, '/', 1) not in (select group_id from drops)
"""
STEPS = "select step, state_digest from steps order by step"
REDONE = re.compile(r"step (\d+) redone: state (\w+) as recorded")


class Kills:
    """One log; its run loses the same kind of process again and again, at random moments."""

    def __init__(self, folder: Path, model: str, started: list[Train], victim: str) -> None:
        self.folder, self.model, self.started, self.victim = folder, model, started, victim
        self.rng = random.Random(f"{victim} {os.environ.get('MOLT_SEED', '0')}")
        self.acknowledged: set[tuple[str, int]] = set()
        """Rollouts that could be read right after a kill."""
        self.digests: dict[int, str] = {}
        """step -> state_digest, likewise."""
        self.run: Train | None = None
        self.ends_the_run = victim in ("driver", "trainer")

    def start(self, steps: int) -> Train:
        options = ("data.eval=", "checkpoint.every=3", "run.restarts_max=1000")
        sizes = ("sampling.max_tokens=48", "agent.partial_tokens=8")
        self.run = Train(self.folder, self.model, *options, *sizes, f"run.steps={steps}")
        self.started.append(self.run)
        return self.run

    def count(self, kind: str) -> int:
        log = self.folder / "log"
        return sum(r.kind == kind for r in read_records(log)) if log.exists() else 0

    def kill(self) -> None:
        """After a few more steps, or somewhere in the start; what is in the log then, is kept."""
        run, pause_s = self.run, self.rng.uniform(0.0, 2.0)
        kind, more = "step", self.rng.randint(1, 4)
        if self.ends_the_run and self.rng.random() < 0.25:
            kind, more, pause_s = "epoch", 1, self.rng.uniform(0.0, 25.0)
        before = self.count(kind)
        if run is None or self.ends_the_run:
            run = self.start(100_000)
        run.wait_for(kind, before + more)
        run.pause(pause_s)
        assert run.process.poll() is None, run.text()[-3000:]
        self.strike(run)
        print(f"{self.victim} killed {pause_s:.2f} s after {kind} {before + more}")
        log = Log.open(run.log)
        self.acknowledged |= set(log.sql(DONE).fetchall())
        self.digests |= dict(log.sql(STEPS).fetchall())
        check_exactly_once(run.log)

    def strike(self, run: Train) -> None:
        if self.victim == "driver":
            run.signal(signal.SIGKILL)
        else:
            deadline = time.monotonic() + 120
            while not (found := run.processes(self.rng.choice(VICTIMS[self.victim]))):
                assert time.monotonic() < deadline and run.process.poll() is None
                time.sleep(0.05)
            found[0].kill()
        if self.ends_the_run:
            assert run.wait() != 0
            assert not run.end(grace_s=30), "processes outlived the run"


@pytest.mark.slow
@pytest.mark.timeout(900 + 200 * KILLS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_at_random_moments(
    tmp_path: Path, model: str, started: list[Train], victim: str, report: Callable[..., None]
) -> None:
    """kill -9 of one process, `MOLT_KILLS` times in one log; then three more steps to its end.

    After the death of a driver or trainer the same command resumes; an engine or worker is started
    again under the living driver.
    """
    series = Kills(tmp_path, model, started, victim)
    for _ in range(KILLS):
        series.kill()
    run = series.run
    assert run is not None
    if run.process.poll() is None:
        run.signal(signal.SIGTERM)
        assert run.wait() == 0, run.text()[-3000:]
    last = Log.open(run.log).sql("select max(step) from steps").fetchall()[0][0] + 3
    run = series.start(last)
    assert run.wait(limit_s=400) == 0, run.text()[-3000:]

    log = Log.open(run.log)
    after = set(log.sql(DONE).fetchall())
    lost = (series.acknowledged - after) | set(log.sql(NOT_TRAINED).fetchall())
    assert not lost, "acknowledged, and not trained"
    check_exactly_once(run.log)
    assert log.sql(UNSETTLED).fetchall() == []
    digests = dict(log.sql(STEPS).fetchall())
    assert list(digests) == [*range(1, last + 1)] and series.digests.items() <= digests.items()
    redone = [(int(s), d) for s, d in REDONE.findall(run.text())]
    assert all(digests[s] == d for s, d in redone)
    replayed = molt("replay", str(run.log), "--step", "1", "--to", str(last), "--format", "json")
    assert replayed.returncode == 0, replayed.stdout[-2000:] + replayed.stderr[-2000:]
    equal = [s["state_digest"]["equal"] for s in json.loads(replayed.stdout)["steps"]]
    assert len(equal) == last and all(equal)
    ((again,),) = log.sql("select sum(counts.regenerated) from rollouts").fetchall()
    report(
        kills=KILLS,
        acknowledged_rollouts=len(series.acknowledged),
        lost=0,
        trained_twice=0,
        prompts_skipped=0,
        steps=last,
        steps_redone=len(redone),
        digests_compared=len(redone) + len(equal),
        tokens_regenerated_per_kill=f"{again / KILLS:.1f}",
    )
