"""What `steps.metrics` says, and what a run says when nothing finishes or nothing fits."""

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import factories as make
import numpy as np
import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from simulation import config

from molt import startup
from molt.metrics import Meter, OffsetTest, StepClock, at_path, plan_metrics, rollout_metrics
from molt.schemas.errors import ConfigError, MoltError, TrainerError
from molt.screen import Screen
from molt.sinks import Sinks, flat
from molt.store import Log, Writer
from molt.store.fold import COLUMNS, STREAMS, Fold
from molt.train import metrics
from molt.train.batch import make_batch


def outcome(n: int, status: str = "ok", regenerated: int = 0) -> dict[str, Any]:
    counts = {"sampled": n, "context": 0, "regenerated": regenerated}
    return make.rollout(status=status, counts=counts)


def test_lost_long_rollouts_show_in_the_deciles() -> None:
    short = [outcome(n) for n in range(10, 20)]
    long = [outcome(n, "truncated", regenerated=5) for n in range(100, 110)]
    fair = rollout_metrics([*short, *long], [])
    assert fair["lengths"]["trained"] == fair["lengths"]["issued"]
    assert fair["truncated"] == 0.5 and fair["regenerated_tokens"] == 50
    biased = rollout_metrics(short, long)
    assert biased["lengths"]["trained"][-1] < 20 < 100 <= biased["lengths"]["issued"][-1]
    assert biased["regenerated_tokens"] == 50, "those of dropped rollouts were sampled twice, too"
    assert rollout_metrics([], [])["lengths"]["mean"] is None


def test_plan_metrics_count_each_lag_and_what_was_solved() -> None:
    rows = [
        make.plan_row(f"train-{g}/{i}", [], reward=float(i), lag_max=g)
        for g in (0, 1)
        for i in (0, 1)
    ]
    rows.append(make.plan_row("train-2/0", [], reward=None, in_baseline=False, lag_max=None))
    found = plan_metrics(rows)
    assert found["lags"] == {"0": 2, "1": 2} and found["pass_at_1"] == 0.5
    assert found["rollouts_excluded"] == 1


def test_engines_sample_while_the_trainer_scores_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()
    spent = {"training": 6.0, "refit": 4.0}
    monkeypatch.setattr(meter.clock, "lap", lambda: spent)
    meter.refit = {"score_s": 1.5, "probe_s": 1.5}
    assert meter.take()["idle"] == {"trainer": 0.0, "engines": 0.25}


def test_engines_without_a_rollout_and_a_trainer_beside_an_evaluation_are_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("molt.metrics.time.perf_counter", lambda: now[0])
    meter = Meter()
    clock = meter.clock

    def spend(phase: str, seconds: float) -> None:
        clock.start(phase)
        now[0] += seconds

    spend("training", 1.0)
    assert meter.take()["idle"]["engines"] == 0.0, "nothing was told of plays"
    clock.start("start")
    clock.playing(1)
    clock.playing(1)
    spend("generation", 2.0)
    clock.playing(-1)
    spend("evaluation", 1.0)
    spend("training", 1.0)
    clock.playing(-1)
    now[0] += 3.0
    spend("refit", 1.0)
    clock.playing(1)
    now[0] += 1.0
    spend("training", 1.0)
    meter.refit = {"score_s": 0.5}
    assert meter.take()["idle"] == {"trainer": 0.3, "engines": 0.45}
    spend("refit", 1.0)
    clock.playing(-1)
    now[0] += 3.0
    meter.refit = {"score_s": 2.0}
    assert meter.take()["idle"]["engines"] == 0.75, "idle and paused at once counts once"


def test_three_steps_in_a_row_must_look_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in place, or shifted to the other side, begins the row anew; a short one says nothing.

    After a restart, which knows the recorded steps alone, the same step is refused.
    """
    monkeypatch.setattr(metrics, "gather", lambda local: local)
    logprobs = -np.random.default_rng(0).exponential(2, 300).astype(np.float32) - 0.6
    test, recorded = OffsetTest(), {}

    def measured(shift: int, n: int = 300) -> dict[str, Any]:
        batch = make_batch([make.sequence(n, logprobs=logprobs[:n])])
        rolled = torch.from_numpy(np.roll(batch.behaviour_N, shift))
        return {"offset": metrics.offset(batch, rolled)}

    def step(number: int, found: dict[str, Any]) -> None:
        test.check(number, found)
        test.add(number, found)
        recorded[number] = json.loads(json.dumps(found, allow_nan=False))

    for number, shift in enumerate((1, 1, 0, 1, -1, -1, 1, 1)):
        step(number, measured(shift))
    assert recorded[1]["offset"]["shift"] == 1 and recorded[5]["offset"]["shift"] == -1
    step(8, measured(1, n=20))
    step(9, {})  # recorded before there was such a measurement
    again = OffsetTest()
    for number, found in recorded.items():
        again.add(number, found)
    for known in (test, again):
        with pytest.raises(TrainerError, match=r"\+1 token away .* the steps 6, 7: .*--from 5"):
            known.check(10, measured(1))
        known.check(10, measured(0))


def test_the_meter_begins_anew_after_every_step() -> None:
    meter = Meter()
    meter.drop("no reward: agent: boom", [outcome(7)])
    meter.drop("no reward: deadline", [])
    meter.drop("lag", [])
    meter.commit_s += [0.25, 0.75]
    first, second = meter.take(), meter.take()
    assert first["drops"] == {"no reward": 2, "lag": 1} and second["drops"] == {}
    assert first["commit_s"] == {"mean": 0.5, "max": 0.75} and meter.dropped == []
    json.dumps([first, second], allow_nan=False)


def test_numbers_are_found_by_path_and_flattened_for_sinks() -> None:
    metrics = {"reward": 0.5, "lengths": {"mean": 7, "trained": [1, 2]}, "note": "x"}
    assert at_path(metrics, "lengths.mean") == 7.0 and at_path(metrics, "reward.x") is None
    assert dict(flat(metrics)) == {"reward": 0.5, "lengths/mean": 7.0}
    with pytest.raises(ConfigError, match="run.sinks has 'mlflow'; known"):
        Sinks(config('run.sinks=["mlflow"]'))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_sinks_write_offline_or_say_which_package_is_missing(tmp_path: Path, name: str) -> None:
    conf = config(f'run.sinks=["{name}"]', f"run.dir={tmp_path}")
    try:
        __import__(name)
    except ImportError:
        with pytest.raises(ConfigError, match=f"pip install {name}"):
            Sinks(conf)
        return
    sinks = Sinks(conf)
    sinks.write(1, {"reward": 0.5})
    sinks.close()
    assert any(path.is_file() for path in (tmp_path / name).rglob("*"))


def test_a_stuck_run_says_who_waits_for_whom(log: Log, w: Writer) -> None:
    w.append("prompts", make.prompt(0, n=2))
    w.append("segments", make.segment(rollout_id="train-0/1", finish_reason="partial"))
    make.append_rollout(w, "train-0/0")
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    fold.update()
    clock = StepClock()
    clock.check_stuck(False, 1e6, fold)
    with pytest.raises(MoltError, match=r"train-0 for 1/2 rollouts \(3 tokens\).*engine-\*.log"):
        clock.check_stuck(False, 0.0, fold)


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("free_gib", "disk_gib", "said"),
    [(99, 99, ""), (1, 99, "memory may run out: about"), (99, 1.5, "disk may run out: 2 kept")],
)
def test_short_memory_or_disk_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: float, disk_gib: float, said: str
) -> None:
    """100 M parameters: 1.1 GiB per checkpoint."""
    weights = torch.zeros(1, dtype=torch.bfloat16)
    save_file({"w": weights}, tmp_path / "model.safetensors")
    with open(tmp_path / "more.safetensors", "wb") as file:
        file.truncate(200_000_000)
    found = console_of(tmp_path, monkeypatch, free_gib, disk_gib)
    assert said in found if said else found == ""


def test_a_disk_without_room_for_one_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.zeros(1, dtype=torch.bfloat16)}, tmp_path / "a.safetensors")
    with open(tmp_path / "b.safetensors", "wb") as file:
        file.truncate(200_000_000)
    with pytest.raises(ConfigError, match=r"1.0 GiB free, one checkpoint needs 1.1"):
        console_of(tmp_path, monkeypatch, 99, 1.0)


def console_of(folder: Path, monkeypatch: pytest.MonkeyPatch, free: float, disk: float) -> str:
    memory: Any = type("M", (), {"available": free * 2**30})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(startup.shutil, "disk_usage", lambda _: Usage(0, 0, disk * 2**30))
    console = Console(record=True, width=200)
    startup.check_room(config(f"run.dir={folder}/run"), str(folder), Screen(console))
    return console.export_text()


def test_deciles_are_nine_numbers() -> None:
    found = rollout_metrics([outcome(n) for n in range(1, 101)], [])["lengths"]["trained"]
    assert len(found) == 9 and np.allclose(found, np.quantile(range(1, 101), np.arange(1, 10) / 10))
