"""Redo on the real trainer: equal bits at equal settings, equal sketches at others (gloo)."""

import asyncio
import multiprocessing
import resource
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import factories as make
import numpy as np
import pytest
from test_trainer import plan, sequence, settings, started
from tiny import tiny_tied_llama

from molt.process import rendezvous
from molt.replay.redo import distance, redo, same_weights, sketch_rows
from molt.schemas.errors import RecoveryError, TrainerError
from molt.train.trainer import StepResult, Trainer

pytestmark = pytest.mark.e2e

CONTROLLED: dict[str, Any] = {
    "update_passes": 2,
    "mini_batches": 2,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "kl_coef": 0.05,
    "kl_target": 0.01,
    "kl_horizon": 100.0,
}
"""Several updates per step and an adaptive KL coefficient."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("redo")
    tiny_tied_llama(path / "model")
    return path


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        yield pool


def two_ranks(rank: int, folder: Path, meeting: str) -> list[StepResult]:
    """Steps 1 to 4 on two ranks with a checkpoint after the first."""
    trainer = started(settings(folder), rank, 2, meeting)
    results = []
    for step in (1, 2, 3, 4):
        results.append(trainer.execute(step, plan(step)[rank::2]))
        if step == 1:
            trainer.save(str(folder / "two-1"))
    trainer.close()
    return results


def controlled(folder: Path, first: int) -> list[str]:
    """State digests of 20 steps; from `first` on, after the checkpoint before it."""
    trainer = started(settings(folder, **CONTROLLED))
    if first > 1:
        trainer.load(str(folder / "controlled"))
    digests = []
    for step in range(first, 21):
        digests.append(trainer.execute(step, plan(step)).state_digest)
        if first == 1 and step == 10:
            trainer.save(str(folder / "controlled"))
    trainer.close()
    return digests


def record(step: int, result: StepResult) -> dict[str, Any]:
    return make.step_row(
        1, step, state_digest=result.state_digest, sketch=sketch_rows(result.sketch)
    )


def run_redo(trainer: Trainer, rows: Mapping[int, Any], plans: Mapping[int, Any]) -> list[float]:
    """The gaps of steps 2 to 4 on this trainer; `plans` maps step -> seed of the plan."""
    before = trainer.sketch()

    async def execute(number: int) -> StepResult:
        return trainer.execute(number // 100, plan(number % 100))

    async def collect() -> list[float]:
        numbered = {step: 100 * step + seed for step, seed in plans.items()}
        options: dict[str, Any] = {"same_bits": lambda _: False, "before": before, "limit": 0.05}
        return [gap async for _, _, gap in redo(execute, numbered, rows, 1, **options)]  # type: ignore[misc]

    return asyncio.run(collect())


def test_a_run_of_two_ranks_goes_on_with_one(folder: Path, processes: ProcessPoolExecutor) -> None:
    """The checkpoint of two ranks loads on one, its sketch is the recorded one, redo is near."""
    meeting = rendezvous()
    both = [processes.submit(two_ranks, rank, folder, meeting) for rank in (0, 1)]
    results = both[0].result(timeout=120)
    assert [r.sketch for r in results] == [r.sketch for r in both[1].result(timeout=120)]
    rows = {step: record(step, r) for step, r in enumerate(results, 1)}
    trainer = started(settings(folder))
    try:
        assert trainer.load(str(folder / "two-1")) == 1
        assert results[0].sketch is not None
        assert same_weights(trainer.sketch(), results[0].sketch)
        assert trainer.state_digest() != results[0].state_digest, "bits depend on the sharding"
        gaps = run_redo(trainer, rows, {2: 2, 3: 3, 4: 4})
        print("relative distance after each step:", gaps)
        assert len(gaps) == 3 and max(gaps) < 0.01
        trainer.load(str(folder / "two-1"))
        with pytest.raises(RecoveryError, match="redo of step 3 at other settings"):
            run_redo(trainer, rows, {2: 2, 3: 7, 4: 4})
        rows[2]["sketch"] = None
        trainer.load(str(folder / "two-1"))
        with pytest.raises(RecoveryError, match="train.sketch is or was off"):
            run_redo(trainer, rows, {2: 2})
    finally:
        trainer.close()


def test_the_norms_of_a_sketch_are_norms_and_a_projection_sees_a_change(folder: Path) -> None:
    trainer = started(settings(folder))
    try:
        before = trainer.sketch()
        for name, parameter in trainer.parameters.items():
            norm = parameter.detach().full_tensor().double().norm()
            assert before[name][0] == pytest.approx(float(norm), rel=1e-9)
            ratio = np.square(before[name][1:]).mean() / norm**2
            assert 0.02 < ratio < 8, "E[projection^2] = norm^2"
        trainer.perturb(1e-3, seed=1)
        moved = distance(trainer.sketch(), before)
        size = np.sqrt(sum(v[0] ** 2 for v in before.values()))
        assert 0.2 < moved / (1e-3 * size * np.sqrt(8)) < 5
    finally:
        trainer.close()


def test_twenty_steps_with_adaptive_kl_are_equal_in_fresh_processes(
    folder: Path, processes: ProcessPoolExecutor
) -> None:
    """Whole, and resumed from step 10: the coefficient is part of the state."""
    whole = processes.submit(controlled, folder, 1).result(timeout=180)
    again = processes.submit(controlled, folder, 11).result(timeout=180)
    assert len(set(whole)) == 20
    assert whole[10:] == again


def test_the_kl_coefficient_follows_its_target(folder: Path) -> None:
    trainer = started(settings(folder, **CONTROLLED))
    try:
        first, second, third = (trainer.execute(s, plan(s)).metrics for s in (1, 2, 3))
        assert first["kl"] == 0.0 and first["kl_coef"] == 0.05, "the reference is the start"
        assert second["kl_coef"] == pytest.approx(0.05 * (1 - 0.2 * 12 / 100))
        assert second["kl"] > 0.012
        assert third["kl_coef"] > second["kl_coef"]
        assert 0.0 < third["clip_low_frac"] < 1.0 and 0.0 < third["clip_high_frac"] < 1.0
        with pytest.raises(TrainerError, match="algo.kl_coef"):
            plain = started_settings_without_reference(folder)
            plain.configure(settings(folder, **CONTROLLED))
    finally:
        trainer.close()


def test_a_checkpoint_that_cannot_be_written_says_so(folder: Path) -> None:
    """A limit on file sizes fails writes as a full disk does; training goes on afterwards."""
    trainer = started(settings(folder))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(TrainerError, match="cannot be written: .*; free some space"):
            trainer.save(str(folder / "full"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert trainer.execute(1, plan(1)).updates == 1
        trainer.save(str(folder / "roomy"))
        assert trainer.load(str(folder / "roomy")) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        trainer.close()


def started_settings_without_reference(folder: Path) -> Trainer:
    """A trainer that was never started has no reference either."""
    return Trainer(settings(folder), 0, 1, "tcp://127.0.0.1:1")


@pytest.mark.parametrize("updates", [1, 2])
def test_shifted_logprobs_are_measured(folder: Path, updates: int) -> None:
    """I3 (d): the engine's logprobs one token early or late, and in place."""
    trainer = started(settings(folder, mini_batches=updates, lr=0.0))
    try:
        rng = np.random.default_rng(0)
        ids = [rng.integers(10, 300, 40).tolist() for _ in range(4)]
        true = [np.concatenate([[0.0], s]).astype(np.float32) for s in trainer.score(ids)]
        for step, shift in enumerate((-1, 1, 0), 1):
            rows = [sequence(0, k, ids[k], 4, logprobs=np.roll(true[k], shift)) for k in range(4)]
            outcome = trainer.execute(step, rows)
            found = outcome.metrics["offset"]
            assert outcome.updates == updates and found["shift"] == -shift
            assert found["gap"] < 1e-5 if shift == 0 else found["gap_shifted"] < 0.3 * found["gap"]
    finally:
        trainer.close()
