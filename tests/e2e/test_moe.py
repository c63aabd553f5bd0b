"""Experts from real vLLM into the real trainer: captured, recorded, read, replayed, proven."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import factories as make
import numpy as np
import pytest
from launch import CONFIG
from moe import agree, known
from moe_pair import PROBES, SHAPE, Pair, make_pair, make_rig
from players import Local, assignment, chain

from molt.config import load as load_config
from molt.planning import plan_group, plan_header
from molt.recipes.moe import save_qwen3_moe
from molt.replay.assemble import assemble
from molt.rollout.routing import routing_rows
from molt.rollout.types import Completion
from molt.rollout.worker import RolloutWorker
from molt.store import Log
from molt.store.control import read_record
from molt.store.fold import COLUMNS, STREAMS, Fold
from molt.train.packing import Recorded
from molt.train.recorded import RoutingReader

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen3_moe(tmp_path_factory.mktemp("moe") / "model")


@pytest.fixture(scope="module")
def pair(folder: str) -> Iterator[Pair]:
    pair = make_pair(folder)
    try:
        pair.publish()
        yield pair
    finally:
        pair.rig.close()
        pair.trainer.close()


def test_identical_and_changed_weights_arrive(pair: Pair) -> None:
    """Same digest of the same bytes, and the engine computes with them: experts and routers too."""
    before = pair.rig.run(pair.rig.engine.score(1, PROBES))
    sent, received = pair.publish()
    assert sent["digest"] == received["digest"] == pair.trainer.weights_digest()
    after = pair.rig.run(pair.rig.engine.score(1, PROBES))
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert pair.gap() < 1e-4
    for seed in (1, 2):
        pair.trainer.perturb(0.05, seed)
        pair.publish()
        assert pair.gap() < 1e-4
        moved = pair.rig.run(pair.rig.engine.score(1, PROBES))
        assert max(np.abs(a - b).max() for a, b in zip(moved, before, strict=True)) > 0.1
    pair.trainer.restore()
    pair.publish()
    assert pair.gap() < 1e-4


def test_every_position_but_the_last_has_its_experts(pair: Pair) -> None:
    """Sixteen requests of which ten fit the cache: chunks, preemption, hits of a shared prefix."""
    rng = np.random.default_rng(0)
    common = rng.integers(3, 250, 130).tolist()
    prompts = [common[: 130 - i % 3 * 20] + rng.integers(3, 250, 40).tolist() for i in range(16)]
    found = pair.generate(prompts, 230)
    for done, prompt in zip(found, prompts, strict=True):
        ids = prompt + done.token_ids.tolist()
        ((start, experts),) = done.routing
        assert (start, len(experts)) == (0, len(ids) - 1)
        assert agree(pair.trainer, ids, known(experts)).all()
    (again,) = pair.generate([prompts[0]], 3, routing_start=150)
    ((start, experts),) = again.routing
    ids = prompts[0] + again.token_ids.tolist()
    assert start == 150
    whole = np.concatenate([found[0].routing[0][1][:150], experts])
    assert agree(pair.trainer, ids, known(whole)).all()


def test_a_refit_in_mid_sequence_keeps_the_rows_that_were_sampled_from(pair: Pair) -> None:
    """All KV is recomputed under the new weights; rows before the swap stay those of the old."""

    async def scenario() -> list[Completion]:
        tasks = [asyncio.create_task(pair.one(i, p, 150)) for i, p in enumerate(PROBES)]
        while pair.rig.engine.tokens_in_flight() < 6 * 95 and not any(t.done() for t in tasks):
            await asyncio.sleep(0)
        await pair.rig.engine.pause(1)
        await pair.send()
        await pair.rig.engine.resume(1)
        return await asyncio.gather(*tasks)

    pair.trainer.perturb(0.1, seed=5)
    parts = []
    for prompt, completion in zip(PROBES, pair.rig.run(scenario()), strict=True):
        ids = prompt + completion.token_ids.tolist()
        ((start, experts),) = completion.routing
        assert (start, len(experts)) == (0, len(ids) - 1)
        cut, two = len(prompt) + completion.version_runs[0][2] - 1, len(completion.version_runs) > 1
        is_new = (np.arange(len(ids) - 1) >= cut) & two
        parts += [(ids, *(Recorded(experts_TLK=experts, known_T=k) for k in (~is_new, is_new)))]
    assert all(agree(pair.trainer, ids, new).all() for ids, _, new in parts)
    pair.trainer.restore()
    assert all(agree(pair.trainer, ids, old).all() for ids, old, _ in parts)
    assert sum((~agree(pair.trainer, ids, new)).sum() for ids, _, new in parts) > 20
    pair.publish()


def record(pair: Pair, log: Log, n: int) -> None:
    """Two groups of three rollouts of `n` tokens, as a worker would append them."""
    log.control.put("policy", [make.policy(1, pair.version)])
    prompts = [PROBES[k] for k in (0, 1) for _ in range(3)]
    done = pair.generate(prompts, n)
    with log.writer(routing=SHAPE.metadata()) as w:
        for k in range(2):
            w.append("prompts", make.prompt(k, n=3))
        for i, (prompt, completion) in enumerate(zip(prompts, done, strict=True)):
            rollout_id = f"train-{i // 3}/{i % 3}"
            sampled = [0] * len(prompt) + [1] * len(completion.token_ids)
            logprobs = [0.0] * len(prompt) + completion.logprobs.tolist()
            row = make.segment(
                rollout_id=rollout_id,
                ids=prompt + completion.token_ids.tolist(),
                sampled=sampled,
                logprobs=logprobs,
                version=pair.version,
            )
            w.append("segments", row)
            for routing in routing_rows(
                completion.routing, rollout_id=rollout_id, attempt=0, segment=0, n_experts=8
            ):
                w.append("routing", routing)
            w.append("rewards", make.reward(rollout_id, float(i % 3)))
            w.append("rollouts", make.rollout(rollout_id, digests=[row["digest"]]))


def plan_of(log: Log, config: Any, step: int) -> Any:
    """The plan of all closed groups, written and read back."""
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    fold.update()
    rows = [r for g in make.closed_groups(fold) for r in plan_group(fold, g, step, config)]
    return read_record(log.path, log.control.put("plan", rows, plan_header(config, step)))


def test_float32_trains_with_the_very_experts_that_sampled(
    pair: Pair, log: Log, tmp_path: Path
) -> None:
    """Through the log: every known row replayed equals the live choice, and the gap is rounding."""
    (tmp_path / "config.toml").write_text(CONFIG.format(model="m", log=log.path))
    record(pair, log, 60)
    plan = plan_of(log, load_config(tmp_path / "config.toml"), pair.version + 1)
    sequences = assemble(log, plan)
    reader = RoutingReader(log, **pair.trainer.routing.shape)
    recorded = reader.of_plan(plan, sequences)
    n_inputs = sum(int(np.flatnonzero(s.mask)[-1]) for s in sequences)
    assert all(r.known_T.all() for r in recorded)
    assert n_inputs == sum(len(r.known_T) for r in recorded)
    result = pair.trainer.execute(1, sequences, recorded)
    found = result.metrics["routing"]
    assert found["coverage"] == 1.0 and found["mismatch"] < 1e-3  # three of 3,456 may tie
    assert result.metrics["mismatch"]["all"]["max"] < 1e-4
    pair.publish()
    assert pair.gap() < 1e-4


def test_turns_and_pieces_go_on_where_the_last_row_ended(
    pair: Pair, log: Log, tmp_path: Path, folder: str
) -> None:
    """Three turns in segments of seven tokens, with pauses: each position has one row."""
    log.control.put("policy", [make.policy(1, pair.version)])
    (tmp_path / "config.toml").write_text(CONFIG.format(model=folder, log=log.path))
    changes = ["agent.env=players:Talks", "agent.partial_tokens=7", "engine.max_model_len=448"]
    config = load_config(tmp_path / "config.toml", [*changes, "sampling.max_tokens=40"])
    engines = [Local(pair.rig)]
    worker = RolloutWorker(str(log.path), 1, config, folder, engines, routing=SHAPE)

    async def play() -> None:
        playing = asyncio.create_task(worker.play([assignment(i) for i in range(4)]))
        while not playing.done():
            await asyncio.wait([playing], timeout=0.05)
            await pair.rig.engine.pause(1)
            await pair.rig.engine.resume(1)
        await playing
        await worker.close()

    pair.rig.run(play())
    n_pieces = 0
    for i in range(4):
        who = f"where rollout_id = 'train-0/{i}' order by segment"
        rows = log.sql(f"select * from segments {who}").to_arrow_table().to_pylist()
        found = log.sql(f"select * from routing {who}").to_arrow_table().to_pylist()
        routed: dict[int, np.ndarray] = {}
        for row in found:
            experts = np.frombuffer(row["experts"], np.uint8).reshape(row["n"], 4, 2)
            positions = range(row["start"], row["start"] + row["n"])
            assert not routed.keys() & set(positions)
            routed |= dict(zip(positions, experts, strict=True))
        ids = chain(rows, len(rows) - 1)["token_ids"]
        assert sorted(routed) == list(range(len(ids) - 1))
        experts = np.stack([routed[p] for p in sorted(routed)])
        assert agree(pair.trainer, ids, known(experts)).all()
        n_pieces += sum(row["finish_reason"] == "partial" for row in rows)
    assert n_pieces > 8


def test_stale_experts_show_in_the_probe(
    folder: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own behaviour on CPU: the digests agree, and the experts compute something else."""
    monkeypatch.setenv("MOLT_FAULT", "stale_experts")
    stale = Pair(make_rig(folder), pair.trainer)
    try:
        pair.trainer.perturb(0.05, seed=1)
        sent, received = stale.publish()
        assert sent["digest"] == received["digest"]
        assert stale.gap() > 1e-2
    finally:
        pair.trainer.restore()
        stale.rig.close()
