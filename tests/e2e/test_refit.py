"""Refits of a tied model in float32 on real vLLM: what the engine computes is what was sent."""

import asyncio
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from tiny import Rig, load, perturb, reference_logprobs, tiny_tied_llama

from molt.digests import weights_digest
from molt.rollout.engine import Sampling
from molt.schemas.errors import EngineError

pytestmark = pytest.mark.e2e
PROMPT = list(range(3, 56))
PROBES = [list(range(60 + i, 145 + i)) for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model both sides start from."""
    return tiny_tied_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rig(folder: str) -> Iterator[Rig]:
    """One started engine for the whole file."""
    rig = Rig(folder)
    rig.start()
    try:
        yield rig
    finally:
        rig.close()


def _gap(scores: list[np.ndarray], model: object) -> float:
    pairs = zip(scores, PROBES, strict=True)
    return max(np.abs(score - reference_logprobs(model, ids)).max() for score, ids in pairs)


async def _probe(rig: Rig) -> list[np.ndarray]:
    return await rig.engine.score(rig.epoch, PROBES)


def test_identical_weights_give_identical_bits(rig: Rig, folder: str) -> None:
    """Sending what is there already changes nothing, and both digests name those bytes."""
    model = load(folder)
    before = rig.run(_probe(rig))
    rig.run(rig.engine.pause(1))
    sent, received = rig.run(rig.publish(model, 0))
    after = rig.run(_probe(rig))
    rig.run(rig.engine.resume(1))
    assert all((a == b).all() and a.dtype == np.float32 for a, b in zip(before, after, strict=True))
    assert sent["digest"] == received["digest"] == weights_digest(model.named_parameters())
    assert sent["bytes"] == received["bytes"] == sum(p.nbytes for p in model.parameters())


def test_changed_weights_equal_the_trainers_forward(rig: Rig, folder: str) -> None:
    """Two publications in one pause, as in the start-up self-test: neither leaves KV behind."""
    model = load(folder)
    rig.run(rig.engine.pause(1))
    original = rig.run(_probe(rig))
    for version in (1, 2):
        perturb(model, seed=version)
        rig.run(rig.publish(model, version))
        scores = rig.run(_probe(rig))
        assert _gap(scores, model) < 1e-4
        assert max(np.abs(a - b).max() for a, b in zip(scores, original, strict=True)) > 0.1
    rig.run(rig.engine.resume(1))
    for ids in PROBES:  # whole blocks of a probe are cached by now: under which weights?
        out = rig.run(rig.engine.generate(1, "after", ids, Sampling(max_tokens=4)))
        reference = reference_logprobs(model, ids + out.token_ids.tolist())
        np.testing.assert_allclose(out.logprobs, reference[-len(out.logprobs) :], atol=1e-4)


def test_spans_switch_at_the_right_token_in_mid_sequence(rig: Rig, folder: str) -> None:
    """While paused only the probe runs: no sequence has a token of the version in between."""
    old, new = load(folder), load(folder)
    between = load(folder)
    perturb(between, seed=5)
    perturb(new, seed=6, scale=0.2)

    async def scenario() -> list:
        await rig.refit(old, 10)
        tasks = [
            asyncio.create_task(rig.engine.generate(1, f"g{i}", PROMPT, Sampling(max_tokens=300)))
            for i in range(12)
        ]
        await rig.engine.generate(1, "clock", PROMPT, Sampling(temperature=0.0, max_tokens=20))
        dropped = await rig.engine.pause(1)
        running = [task for task in tasks if not task.done()]
        assert len(running) * (len(PROMPT) + 15) < dropped < len(tasks) * 353
        late = asyncio.create_task(rig.engine.generate(1, "late", PROMPT, Sampling(max_tokens=4)))
        await rig.publish(between, 11)
        assert _gap(await _probe(rig), between) < 1e-4
        await rig.publish(new, 12)
        assert _gap(await _probe(rig), new) < 1e-4
        assert running and not any(task.done() for task in [*running, late])
        await rig.engine.resume(1)
        assert (await late).version_runs[0][:2] == (1, 12)
        await asyncio.gather(*tasks)
        tokens, seconds = await rig.engine.recomputed(1)
        # The begun sequences share no more than the prompt; of each the last token had no KV yet.
        assert dropped - len(tasks) * (len(PROMPT) + 2) <= tokens <= dropped and seconds > 0
        assert await rig.engine.recomputed(1) == (0, 0.0)
        return await asyncio.gather(*running)

    completions = rig.run(scenario())
    for completion in completions:
        ids, (before, after) = completion.token_ids.tolist(), completion.version_runs
        assert before[:2] == (1, 10) and after[:2] == (1, 12) and before[2] > 0 < after[2]
        assert before[2] + after[2] == len(ids)
        start, cut = len(PROMPT) - 1, before[2]
        by_old = reference_logprobs(old, PROMPT + ids)[start:]
        by_new = reference_logprobs(new, PROMPT + ids)[start:]
        np.testing.assert_allclose(completion.logprobs[:cut], by_old[:cut], atol=1e-4)
        np.testing.assert_allclose(completion.logprobs[cut:], by_new[cut:], atol=1e-4)
    # The comparison can tell the two apart at the very tokens where the span switches.
    cuts = [(c, c.version_runs[0][2]) for c in completions]
    edges = [
        abs(
            reference_logprobs(old, PROMPT + c.token_ids.tolist())[len(PROMPT) - 1 + n]
            - c.logprobs[n]
        )
        for c, n in cuts
    ]
    assert np.median(edges) > 0.01


def test_a_broken_transfer_is_refused_and_can_be_repeated(rig: Rig, folder: str) -> None:
    """The sender dies after three tensors: no resume, then a new group and the whole model."""
    model = load(folder)
    perturb(model, seed=9)
    named = list(model.named_parameters())
    manifest = [(name, "float32", tuple(p.shape)) for name, p in named]

    async def broken() -> None:
        receiving = asyncio.create_task(rig.engine.receive_weights(1, manifest, 20))
        await asyncio.to_thread(rig.sender.send, named[:3])
        rig.sender.close()
        with pytest.raises(EngineError, match="receive_weights of version 20"):
            await receiving
        with pytest.raises(EngineError, match="send again"):
            await rig.engine.resume(1)

    rig.run(rig.engine.pause(1))
    rig.run(broken())
    rig.connect()
    rig.run(rig.publish(model, 21))
    assert _gap(rig.run(_probe(rig)), model) < 1e-4
    rig.run(rig.engine.resume(1))
    out = rig.run(rig.engine.generate(1, "ok", PROMPT, Sampling(max_tokens=4)))
    assert out.version_runs == ((1, 21, len(out.token_ids)),)


def test_stale_tied_head_shows_in_the_probe_and_a_dead_engine_says_so(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own behaviour on CPU: digests agree, spans agree, the logits are the old ones."""
    monkeypatch.setenv("MOLT_FAULT", "stale_tied_head")
    rig, model = Rig(folder), load(folder)
    info = rig.start()
    try:
        perturb(model, seed=1)
        rig.run(rig.engine.pause(1))
        sent, received = rig.run(rig.publish(model, 0))
        assert sent["digest"] == received["digest"]
        assert _gap(rig.run(_probe(rig)), model) > 0.1
        rig.run(rig.engine.resume(1))
        for pid in info["child_pids"]:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="e0.* died during request last"):
            rig.run(rig.engine.generate(1, "last", PROMPT, Sampling()))
    finally:
        rig.close()
