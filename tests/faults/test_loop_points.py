"""Death of the driver between every pair of writes around a step: recovery on the real trainer.

The trainer, the log, the checkpoints and the driver's loop are the product's own; rollouts come
from scripted players, so a death and the start after it take seconds. What must hold afterwards is
asked by plain SQL and by executing every plan once more from the first weights.
"""

import asyncio
import datetime
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulation import Simulation, config

from molt import recovery
from molt.config import Config
from molt.offline import AsRecorded
from molt.process import rendezvous
from molt.publish import Gap, Published
from molt.replay import folders
from molt.replay.replay import history, replay
from molt.schemas.text import canonical_json
from molt.store import Log, control
from molt.store.compact import compact
from molt.store.control import lineage_of
from molt.store.files import Posix
from molt.store.retention import retire

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from tiny import tiny_tied_llama

from molt.train.actor import TrainerActor
from molt.train.settings import trainer_settings
from molt.train.trainer import copied

pytestmark = pytest.mark.e2e

STEPS = 4
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
TWICE = """
select rollout_id, count(*) as n from plans group by rollout_id having n > 1 union all
select group_id, count(*) as n from (
    select distinct group_id, step from plans union all select group_id, -1 from drops
) group by group_id having n > 1
"""
MISSING = """
select k from (
    select unnest(range((select max(ordinal) + 1 from prompts where purpose = 'train'))) as k
) where k not in (select ordinal from prompts where purpose = 'train')
"""
SKIPPED = f"""
select ordinal from groups where purpose = 'train' and not settled
and ordinal < (select max(ordinal) from groups where settled) - 8 * {STEPS}
"""


class Death(BaseException):
    """The driver is gone: nothing is closed, nothing is flushed."""


class Deadly:
    """Counts the driver's durable writes and dies before the n-th."""

    def __init__(self, at: int | None) -> None:
        self.at, self.seen = at, []  # type: ignore[var-annotated]

    def wrap(self, publish: Any) -> Any:
        def deadly(path: Path, data: bytes) -> None:
            if len(self.seen) == self.at:
                raise Death(path.name)
            publish(path, data)
            kind = (
                "marker"
                if path.name == "COMPLETE"
                else control.read_record(path.parents[1], int(path.stem)).kind
            )
            self.seen.append(kind)

        return deadly


class DeadlyStore(Posix):
    """The backend of the control log."""

    def __init__(self, deadly: Deadly) -> None:
        self.put = deadly.wrap(super().put)  # type: ignore[method-assign]


class Driver(Simulation):
    """The simulation with a real trainer: recovery, training, checkpoints, redo."""

    def __init__(self, path: Path, conf: Config, trainer: TrainerActor) -> None:
        super().__init__(path, conf, train_s=5.0, epoch={"config": canonical_json(asdict(conf))})
        self.trainer = trainer
        trainer.open_log(str(path))
        players: Any = self.players
        players.trainer_device, players.model_folder = "cpu", trainer.settings.model

        async def on_trainers(method: str, *args: Any) -> Any:
            return getattr(trainer, method)(*args)

        async def execute(plan: int) -> Any:
            return trainer.execute_plan(plan)

        async def recomputed() -> dict[str, float]:
            return {"tokens": 0, "seconds": 0.0}

        players.on_trainers, players.execute = on_trainers, execute
        self.run.publisher = SimpleNamespace(recomputed=recomputed)

    async def go(self, steps: int) -> None:
        run = self.run
        await recovery.recover(run)
        self.publish()
        run.issuer.adopt()
        while run.step < steps:
            await asyncio.sleep(0)
            plan = await run.plan()
            assert plan is not None
            await run.train(plan)
            self.players.advance(self.train_s)
            self.publish()
        await run.issuer.close()

    def publish(self) -> None:
        """The policy record of what the engines would now hold."""
        gap = Gap(mean_gap=0.0, p999_gap=0.0, max_gap=0.0, k3=0.0)
        run = self.run
        run.record_policy(
            Published(
                version=run.step,
                weights_digest=self.trainer.weights_digest(),
                bytes=1,
                seconds=0.0,
                recompute_tokens=0,
                engines=("engine-0",),
                probe=gap,
            )
        )
        self.players.version = run.step


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_tied_llama(path / "model")
    return path


@pytest.fixture(scope="module")
def trainer(model: Path) -> Iterator[TrainerActor]:
    Log.create(model / "none")
    options = trainer_settings(conf_of(model), str(model / "model"))
    trainer = TrainerActor(options, 0, 1, rendezvous(), None, str(model / "none"))
    trainer.start()
    trainer.save(str(model / "start"))
    yield trainer
    trainer.close()


def conf_of(model: Path, *overrides: str) -> Config:
    return config(
        f"model={model / 'model'}",
        *(f"run.steps={STEPS}", "checkpoint.every=2", "train.lr=1e-3", "train.threads=1"),
        *("algo.update_passes=2", "data.groups_per_step=2", "data.rollouts_per_group=2"),
        *overrides,
    )


def drive(
    path: Path, model: Path, trainer: TrainerActor, steps: int, deadly: Deadly | None = None
) -> None:
    """A fresh driver and a fresh trainer's state, until `steps` or its death."""
    conf = conf_of(model)
    trainer.load(str(model / "start"))
    with pytest.MonkeyPatch.context() as patch:
        if deadly is not None:
            patch.setattr(control, "STORE", DeadlyStore(deadly))
            patch.setattr(folders, "publish", deadly.wrap(folders.publish))
        driver = Driver(path, conf, trainer)
        asyncio.run(driver.go(steps))


def check(log: Log, model: Path, trainer: TrainerActor) -> None:
    """Nothing twice, nothing skipped, and every recorded step is what its plan makes."""
    steps = log.sql("select step, state_digest from steps order by step").fetchall()
    assert [s for s, _ in steps] == list(range(1, STEPS + 1))
    metrics = [json.loads(m) for (m,) in log.sql("select metrics from steps").fetchall()]
    assert all(m["lengths"]["trained"] and m["regenerated_tokens"] == 0 for m in metrics)
    assert log.sql(TWICE).fetchall() == []
    assert log.sql(MISSING).fetchall() == []
    assert log.sql(SKIPPED).fetchall() == []
    trainer.load(str(model / "start"))
    trainer.open_log(str(log.path))
    records = log.records()
    lineage = lineage_of(records)
    plans = [r for r in records if r.kind == "plan" and lineage.holds(r.n)]
    assert [r.header["step"] for r in plans] == list(range(1, STEPS + 1))
    assert [trainer.execute_plan(r.n).state_digest for r in plans] == [d for _, d in steps]


WRITES = [
    *("epoch", "policy"),
    *("plan", "step", "policy"),
    *("plan", "step", "marker", "checkpoint", "policy"),
    *("plan", "step", "policy"),
    *("plan", "step", "marker", "checkpoint", "policy"),
]
"""The driver's own durable writes of four steps with a checkpoint after every second."""


def test_these_are_the_writes(tmp_path: Path, model: Path, trainer: TrainerActor) -> None:
    deadly = Deadly(None)
    drive(tmp_path / "log", model, trainer, STEPS, deadly)
    assert deadly.seen == WRITES
    check(Log.open(tmp_path / "log"), model, trainer)


@pytest.mark.parametrize("at", range(len(WRITES)), ids=[f"{i}-{w}" for i, w in enumerate(WRITES)])
def test_death_before_each_write(
    tmp_path: Path, model: Path, trainer: TrainerActor, at: int
) -> None:
    path, deadly = tmp_path / "log", Deadly(at)
    with pytest.raises(Death):
        drive(path, model, trainer, STEPS, deadly)
    assert deadly.seen == WRITES[:at]
    drive(path, model, trainer, STEPS)
    check(Log.open(path), model, trainer)


def test_death_at_every_start(tmp_path: Path, model: Path, trainer: TrainerActor) -> None:
    """Three starts that die in different places of the recovery itself, then one that does not."""
    path = tmp_path / "log"
    for at in (len(WRITES) - 5, 2, 3):
        with pytest.raises(Death):
            drive(path, model, trainer, STEPS, Deadly(at))
    drive(path, model, trainer, STEPS)
    check(Log.open(path), model, trainer)


def test_a_checkpoint_that_dies_half_written_is_passed_over(
    tmp_path: Path, model: Path, trainer: TrainerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"

    def half(folder: str) -> Any:
        (Path(folder) / "__0_0.distcp").write_bytes(b"half")
        raise Death

    with monkeypatch.context() as patch, pytest.raises(Death):
        patch.setattr(trainer, "save", half)
        patch.setattr(folders, "_remove", lambda folder: None)  # the dead clean up nothing
        drive(path, model, trainer, STEPS)
    assert [f.name for f in (path / "checkpoints").iterdir()] == ["1-2"]
    drive(path, model, trainer, STEPS)
    check(Log.open(path), model, trainer)


def test_retention_after_every_step_leaves_what_redo_needs(
    tmp_path: Path, model: Path, trainer: TrainerActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compaction and retention after each policy record, a death, and the redo of two steps."""
    path, retired = tmp_path / "log", []
    publish = Driver.publish

    def publish_and_retire(driver: Driver) -> None:
        publish(driver)
        compact(driver.run.log, everything=True)
        found = retire(driver.run.log, now=NOW, dry_run=False)
        retired.append(sum(found["commits"].values()))

    monkeypatch.setattr(Driver, "publish", publish_and_retire)
    with pytest.raises(Death):
        drive(path, model, trainer, STEPS, Deadly(WRITES.index("checkpoint") + 6))
    assert sum(retired) > 0, "nothing was retired"
    drive(path, model, trainer, STEPS)
    steps = Log.open(path).sql("select step from steps order by step").fetchall()
    assert steps == [(k,) for k in range(1, STEPS + 1)]


ADAPTIVE = ("algo.kl_target=1e-4", "algo.kl_horizon=20")


@pytest.mark.parametrize(
    ("old", "new"), [((), ADAPTIVE), (ADAPTIVE, ()), (ADAPTIVE, ADAPTIVE)], ids=("on", "off", "as")
)
def test_an_adaptive_kl_coefficient_is_switched_on_or_off_at_a_resume(
    tmp_path: Path,
    model: Path,
    trainer: TrainerActor,
    monkeypatch: pytest.MonkeyPatch,
    old: tuple[str, ...],
    new: tuple[str, ...],
) -> None:
    """At a checkpoint, with a step to redo before it, and over both epochs from the beginning."""
    first, second = (
        conf_of(model, "algo.kl_coef=0.1", *old),
        conf_of(model, "algo.kl_coef=0.2", *new),
    )
    plain = trainer.settings
    monkeypatch.setattr(trainer, "settings", plain)

    def fresh(conf: Config) -> None:
        """In a new process: settings, coefficient and weights are those of its configuration."""
        trainer.settings = plain
        trainer.load(str(model / "start"))
        monkeypatch.setattr(trainer, "_reference", copied(trainer.parameters))
        trainer.settings = trainer_settings(conf, str(model / "model"))
        trainer._kl_coef.fill_(conf.algo.kl_coef)

    def start(path: Path, conf: Config, steps: int) -> Driver:
        fresh(conf)
        driver = Driver(path, conf, trainer)
        asyncio.run(driver.go(steps))
        assert driver.run.state_digest == trainer.state_digest()
        return driver

    for before in (2, 3):
        path = tmp_path / f"log-{before}"
        start(path, first, before)
        start(path, second, STEPS)
        fresh(second)
        replayed(Log.open(path), trainer, 3)
        assert start(path, second, STEPS).run.meter.redone == 0
        for marker in path.glob("checkpoints/*/COMPLETE"):
            marker.unlink()
        assert start(path, second, STEPS).run.meter.redone == STEPS
        fresh(second)
        replayed(Log.open(path), trainer, 1)


def replayed(log: Log, trainer: TrainerActor, first: int) -> None:
    """`molt replay`, by a trainer that was opened with the newest settings."""
    found = history(log)
    compared = list(replay(log, AsRecorded(trainer, found), found, first, STEPS))
    assert [row["ok"] for row in compared] == [True] * (STEPS - first + 1), compared


def test_the_check_sees_a_step_that_is_not_its_plan(
    tmp_path: Path, model: Path, trainer: TrainerActor
) -> None:
    path = tmp_path / "log"
    drive(path, model, trainer, STEPS)
    trainer.load(str(model / "start"))
    trainer.perturb(1e-6, seed=1)
    trainer._saved = {}
    first = next(r.n for r in Log.open(path).records() if r.kind == "plan")
    digest = trainer.execute_plan(first).state_digest
    ((recorded,),) = Log.open(path).sql("select state_digest from steps where step=1").fetchall()
    assert digest != recorded
