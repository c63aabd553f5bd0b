"""I1 in a real run: every trained id, mask and logprob is what the engine returned, bit for bit."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import factories as make
import numpy as np
import pytest
from launch import CONFIG
from tiny import Rig, load, perturb, tiny_tied_llama

from molt.config import load as load_config
from molt.planning import plan_group, plan_header
from molt.replay.assemble import assemble
from molt.rollout.types import Completion, join
from molt.rollout.worker import Assignment, RolloutWorker
from molt.store import Log
from molt.store.fold import COLUMNS, STREAMS, Fold

pytestmark = pytest.mark.e2e


@dataclass
class Recording:
    """The real engine, and a copy of all that it returned."""

    rig: Rig
    engine_id: str = "engine-0"
    routing: None = None
    seen: dict[str, tuple[list[int], Completion]] = field(default_factory=dict)

    async def pieces(
        self, request_id: str, prompt_ids: np.ndarray, *rest: Any
    ) -> AsyncGenerator[Completion, None]:
        found = []
        async for piece in self.rig.engine.pieces(1, request_id, prompt_ids, *rest):
            found.append(piece)
            yield piece
        self.seen[request_id] = (prompt_ids.tolist(), join(found))


def test_what_is_trained_is_what_was_sampled(tmp_path: Path) -> None:
    folder = tiny_tied_llama(tmp_path / "model")
    (tmp_path / "config.toml").write_text(CONFIG.format(model=folder, log=tmp_path / "log"))
    config = load_config(tmp_path / "config.toml", ["sampling.max_tokens=100"])
    log = Log.create(tmp_path / "log")
    make.open_epoch(log)
    log.control.put("policy", [make.policy(1, 0)])
    rig = Rig(folder, max_model_len=160)
    rig.start()
    try:
        model = load(folder)
        rig.run(rig.refit(model, 0))
        recording = Recording(rig)
        worker = RolloutWorker(str(log.path), 1, config, folder, [recording])
        with log.writer() as w:
            for k in range(2):
                w.append("prompts", make.prompt(k, n=3))
        rig.run(play_across_a_refit(rig, worker, model))
        rig.run(worker.close())
    finally:
        rig.close()
    log.control.put("policy", [make.policy(1, 1)])
    compare(log, config, recording)


async def play_across_a_refit(rig: Rig, worker: RolloutWorker, model: Any) -> None:
    """Six rollouts in flight; the weights change while they are sampled."""
    work = [
        Assignment(
            group_id=f"train-{k}",
            rollout_id=f"train-{k}/{i}",
            attempt=0,
            purpose="train",
            prompt={"k": k, "kind": "plain"},
        )
        for k in range(2)
        for i in range(3)
    ]
    playing = asyncio.create_task(worker.play(work))
    while rig.engine.tokens_in_flight() == 0:  # until one of them has sampled a token
        await asyncio.sleep(0)
    await rig.engine.pause(1)
    perturb(model, seed=1)
    await rig.publish(model, 1)
    await rig.engine.resume(1)
    await playing


def compare(log: Log, config: Any, recording: Recording) -> None:
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    fold.update()
    groups = make.closed_groups(fold)
    rows = [row for g in groups for row in plan_group(fold, g, 2, config)]
    number = log.control.put("plan", rows, plan_header(config, 2))
    sequences = assemble(log, log.records(number)[0])
    assert len(sequences) == len(recording.seen) == 6
    for s in sequences:
        prompt, done = recording.seen[f"{s.rollout_id}.0.0"]
        assert s.token_ids.tolist() == prompt + done.token_ids.tolist()
        assert s.mask.tolist() == [False] * len(prompt) + [True] * len(done.token_ids)
        sampled = s.logprobs[len(prompt) :]
        assert sampled.tobytes() == done.logprobs.astype(np.float32).tobytes()
        versions = [v for _, v, n in done.version_runs for _ in range(n)]
        assert (1 - s.lag[len(prompt) :]).tolist() == versions
    assert any(len(done.version_runs) == 2 for _, done in recording.seen.values())
