"""Refits that keep the KV of sequences in flight, on real vLLM: who goes on with it, who not."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from launch import Train, molt, sql
from tiny import Rig, load, perturb, reference_logprobs, tiny_tied_llama

from molt.rollout.engine import Completion, Sampling

pytestmark = pytest.mark.e2e
PROMPT = list(range(3, 56))
BLOCKS = 64
BLOCK_BYTES = 2 * 2 * 4 * 32 * 4 * 32
"""Keys and values, layers, heads, head size, bytes, tokens of a block."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_tied_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rig(folder: str) -> Iterator[Rig]:
    """An engine with little room for KV."""
    rig = Rig(folder, kv="kept", kv_cache_gib=BLOCKS * BLOCK_BYTES / 2**30, max_model_len=512)
    rig.start()
    try:
        yield rig
    finally:
        rig.close()


async def pieces(rig: Rig, name: str, n: int) -> list[Completion]:
    stream = rig.engine.pieces(1, name, PROMPT, Sampling(max_tokens=n))
    return [piece async for piece in stream]


async def refit_under(
    rig: Rig, old: object, new: object, version: int, n: int, in_flight: int, probe: int = 85
) -> list[list[Completion]]:
    """`n` requests, whose weights change when so many tokens are in flight: those that it cut.

    Probes of `probe` tokens are scored in the pause, and must be those of the new weights.
    """
    probes = [[3 + (i + k) % 200 for k in range(probe)] for i in range(4)]
    await rig.refit(old, version)
    tasks = [asyncio.create_task(pieces(rig, f"{version}-{i}", 150)) for i in range(n)]
    while rig.engine.tokens_in_flight() < in_flight:
        await asyncio.sleep(0.01)
    assert await rig.engine.pause(1) == 0, "nothing was dropped"
    await rig.publish(new, version + 1)
    async with asyncio.timeout(60):
        scores = await rig.engine.score(1, probes)
    for ids, score in zip(probes, scores, strict=True):
        np.testing.assert_allclose(score, reference_logprobs(new, ids), atol=1e-4)
    await rig.engine.resume(1)
    cut = [found for found in await asyncio.gather(*tasks) if found[0].finish_reason == "partial"]
    assert len(cut) > 1 and all(len(found) == 2 for found in cut)
    return cut


def test_a_sequence_goes_on_over_its_old_kv_and_says_so(rig: Rig, folder: str) -> None:
    """Spans name the new weights from the swap on; the logprobs there are of neither version."""
    old, new = load(folder), load(folder)
    perturb(new, seed=6, scale=0.2)
    found = rig.run(refit_under(rig, old, new, 10, 6, 6 * 93))
    assert rig.run(rig.engine.recomputed(1)) == (0, 0.0)
    edges = []
    for first, second in found:
        assert not first.kept_kv and second.kept_kv
        assert second.finish_reason in ("stop", "length")
        assert {run[1] for run in first.version_runs} == {10}
        assert {run[1] for run in second.version_runs} == {11}
        ids = [*PROMPT, *first.token_ids.tolist(), *second.token_ids.tolist()]
        cut = len(PROMPT) + len(first.token_ids)
        by_old, by_new = reference_logprobs(old, ids), reference_logprobs(new, ids)
        start = len(PROMPT) - 1
        np.testing.assert_allclose(first.logprobs, by_old[start : cut - 1], atol=1e-4)
        edges.append(abs(second.logprobs - by_new[cut - 1 :]).mean())
    assert min(edges) > 1e-3, edges


def test_what_is_asked_later_is_computed_anew(rig: Rig, folder: str) -> None:
    """The next turns of a kept sequence: neither its old blocks nor those it filled after the swap
    are found, also when a first one has cached the blocks between.
    """
    old, new = load(folder), load(folder)
    perturb(old, seed=7, scale=0.2)

    async def scenario() -> list[tuple[list[int], Completion]]:
        found = await refit_under(rig, old, new, 20, 6, 6 * 93)
        chains = [PROMPT + [int(i) for p in reply for i in p.token_ids] for reply in found]
        return [
            (ids, await rig.engine.generate(1, f"turn-{k}-{i}", ids, Sampling(max_tokens=8)))
            for k in range(3)
            for i, ids in enumerate(chains[:3])
        ]

    for ids, turn in rig.run(scenario()):
        assert not turn.kept_kv and {run[1] for run in turn.version_runs} == {21}
        reference = reference_logprobs(new, ids + turn.token_ids.tolist())
        np.testing.assert_allclose(turn.logprobs, reference[len(ids) - 1 :], atol=1e-4)


def test_a_probe_that_finds_no_room_takes_it_from_a_frozen_sequence(rig: Rig, folder: str) -> None:
    """The sequences fill all blocks; those that lose theirs are computed again."""
    old, new = load(folder), load(folder)
    perturb(new, seed=8, scale=0.2)
    found = rig.run(refit_under(rig, old, new, 30, 24, 2500, probe=480))
    tokens, seconds = rig.run(rig.engine.recomputed(1))
    assert tokens > 0 and seconds > 0
    for reply in found:
        assert sum(len(p.token_ids) for p in reply) == 150 or reply[-1].finish_reason == "stop"


def test_a_run_records_what_was_kept_and_its_audit_knows(tmp_path: Path, folder: str) -> None:
    """A whole asynchronous run: policies, segments, metrics, and no violation."""
    run = Train(
        tmp_path,
        folder,
        *("engine.kv=kept", "engine.max_model_len=256", "sampling.max_tokens=100"),
        *("run.steps=4", "data.eval=", "checkpoint.every=4"),
    )
    try:
        assert run.wait() == 0, run.text()[-3000:]
    finally:
        run.end(grace_s=0)
    policies = sql(run.log, "select distinct kv, recompute_tokens from policies")
    assert policies == [{"kv": "kept", "recompute_tokens": 0}]
    kinds = {row["kv"] for row in sql(run.log, "select distinct kv from segments")}
    assert kinds == {None, "kept"}
    first = """select count(*) as n from segments s join segments p on
        (p.rollout_id, p.attempt, p.segment) = (s.rollout_id, s.attempt, s.parent)
        where s.kv = 'kept' and p.finish_reason = 'partial'"""
    assert sql(run.log, first)[0]["n"] > 0
    gaps = sql(run.log, "select (metrics->>'$.mismatch.kept.n')::int as n from steps")
    assert any(row["n"] for row in gaps)
    assert molt("audit", str(run.log)).returncode == 0
