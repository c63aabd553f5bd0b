"""The engine actor on real vLLM: sampling, versions, windows, fencing, orphans."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from tiny import Rig, byte_tokenizer, load, next_logprobs, reference_logprobs, tiny_tied_llama

from molt.rollout.engine import Engine, EngineSettings, Sampling
from molt.schemas.errors import ConfigError, EngineError, Fenced, RequestRefused

pytestmark = pytest.mark.e2e
PROMPT = list(range(3, 56))
WINDOW = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose folder asks for sampling habits that must not take effect."""
    path = Path(tiny_tied_llama(tmp_path_factory.mktemp("model")))
    habits = {"temperature": 0.2, "top_k": 2, "top_p": 0.3, "repetition_penalty": 1.9}
    (path / "generation_config.json").write_text(json.dumps({"do_sample": True, **habits}))
    return str(path)


@pytest.fixture(scope="module")
def rig(folder: str) -> Iterator[Rig]:
    """A started engine that runs the weights of its own folder as version (1, 0)."""
    rig = Rig(folder, max_model_len=WINDOW)
    info = rig.start()
    try:
        assert info["max_model_len"] == WINDOW and info["vocab_size"] == 320
        assert all(psutil.pid_exists(pid) for pid in info["child_pids"])
        with pytest.raises(EngineError, match="no weights were published by epoch 1"):
            rig.run(rig.engine.generate(1, "early", PROMPT, Sampling()))
        rig.run(rig.refit(load(folder), 0))
        yield rig
    finally:
        rig.close()
    assert not any(psutil.pid_exists(pid) for pid in info["child_pids"])


async def _many(rig: Rig, n: int, sampling: Sampling) -> list:
    calls = (rig.engine.generate(rig.epoch, f"r{i}", PROMPT, sampling) for i in range(n))
    return await asyncio.gather(*calls)


def test_logprobs_are_those_of_the_run_and_not_of_the_model_folder(rig: Rig, folder: str) -> None:
    """A group shares its prompt's KV, and the folder's top_k, penalty, ... leave no trace."""
    model = load(folder)
    completions = rig.run(_many(rig, 24, Sampling(max_tokens=16)))
    for completion in completions:
        ids, n = completion.token_ids.tolist(), len(completion.token_ids)
        assert completion.token_ids.dtype == np.int32 and completion.logprobs.dtype == np.float32
        assert completion.version_runs == ((1, 0, n),)
        reference = reference_logprobs(model, PROMPT + ids)[-n:]
        np.testing.assert_allclose(completion.logprobs, reference, atol=1e-4)
        if completion.finish_reason == "length":
            assert n == 16 and completion.stop_token is None
        else:
            assert completion.finish_reason == "stop" and completion.stop_token == ids[-1]
    assert len({c.token_ids[0] for c in completions}) > 4  # top_k = 2 would allow two


def test_logprobs_are_of_the_distribution_sampled_from(rig: Rig, folder: str) -> None:
    """Temperature and top_k reshape it; greedy tokens carry the plain log-softmax."""
    model = load(folder)
    (warm,) = rig.run(_many(rig, 1, Sampling(temperature=0.5, max_tokens=1)))
    (greedy,) = rig.run(_many(rig, 1, Sampling(temperature=0.0, max_tokens=12)))
    (one,) = rig.run(_many(rig, 1, Sampling(top_k=1, max_tokens=12)))
    all_V = next_logprobs(model, PROMPT)
    hot_V = 2 * all_V - np.log(np.exp(2 * all_V).sum())
    assert warm.logprobs[0] == pytest.approx(hot_V[warm.token_ids[0]], abs=1e-4)
    ids = greedy.token_ids.tolist()
    assert ids[0] == all_V.argmax() and np.isfinite(greedy.logprobs).all()
    reference = reference_logprobs(model, PROMPT + ids)[-len(ids) :]
    np.testing.assert_allclose(greedy.logprobs, reference, atol=1e-4)
    assert one.token_ids.tolist() == ids and (one.logprobs == 0).all()


def test_stop_string_keeps_the_sampled_tokens(rig: Rig) -> None:
    """A completion ends with the tokens that made up the string; there is no stop token."""
    (greedy,) = rig.run(_many(rig, 1, Sampling(temperature=0.0, max_tokens=12)))
    tokenizer = byte_tokenizer()
    texts = [tokenizer.decode([t]) for t in greedy.token_ids.tolist()]
    at = next(i for i, text in enumerate(texts) if text.isascii() and text.strip())
    stop = Sampling(temperature=0.0, max_tokens=12, stop=(texts[at],))
    (stopped,) = rig.run(_many(rig, 1, stop))
    assert stopped.finish_reason == "stop" and stopped.stop_token is None
    n = len(stopped.token_ids)
    assert n <= at + 1 and stopped.token_ids.tolist() == greedy.token_ids.tolist()[:n]


def test_a_prompt_that_fills_the_window_is_refused_with_both_numbers(rig: Rig) -> None:
    """One token of room is enough; none is an error, not a crash."""
    call = rig.engine.generate(1, "long", [5] * WINDOW, Sampling())
    with pytest.raises(RequestRefused, match=f"{WINDOW} tokens in a window of {WINDOW}"):
        rig.run(call)
    last = rig.run(rig.engine.generate(1, "fits", [5] * (WINDOW - 1), Sampling(max_tokens=9)))
    assert len(last.token_ids) == 1
    with pytest.raises(RequestRefused, match="cannot score"):
        rig.run(rig.engine.score(1, [[5] * WINDOW]))
    with pytest.raises(RequestRefused, match="a prompt of 0 tokens"):
        rig.run(rig.engine.generate(1, "empty", [], Sampling()))
    with pytest.raises(RequestRefused, match="request bad: .*vocab"):
        rig.run(rig.engine.generate(1, "bad", [10**6], Sampling()))
    assert len(rig.run(rig.engine.score(1, [PROMPT]))[0]) == len(PROMPT) - 1


def test_receive_weights_needs_a_paused_engine(rig: Rig) -> None:
    """Running requests would mix the KV of two models."""
    with pytest.raises(EngineError, match="needs a paused engine"):
        rig.run(rig.engine.receive_weights(1, [], 1))


def test_sampling_refuses_what_vllm_would_change() -> None:
    """vLLM raises a tiny temperature to 0.01 and only logs it."""
    for bad in ({"temperature": 0.001}, {"temperature": -1.0}, {"max_tokens": 0}):
        with pytest.raises(ConfigError, match="temperature|max_tokens"):
            Sampling(**bad)


def test_a_newer_epoch_takes_the_engine_over(rig: Rig, folder: str) -> None:
    """Older calls are refused, running ones end, and the new driver publishes first."""

    async def takeover() -> None:
        long = asyncio.create_task(
            rig.engine.generate(rig.epoch, "old", PROMPT, Sampling(max_tokens=WINDOW))
        )
        await rig.engine.generate(rig.epoch, "short", PROMPT, Sampling(max_tokens=2))
        rig.epoch += 1
        assert await rig.engine.pause(rig.epoch) == 0  # the old epoch's request is gone
        with pytest.raises(Fenced, match="epoch 2, not to epoch 1"):
            await long
        with pytest.raises(Fenced):
            await rig.engine.resume(1)
        with pytest.raises(EngineError, match="no weights were published by epoch 2"):
            await rig.engine.generate(2, "early", PROMPT, Sampling())
        await rig.refit(load(folder), 7)

    rig.run(takeover())
    (completion,) = rig.run(_many(rig, 1, Sampling(max_tokens=3)))
    assert completion.version_runs == ((2, 7, len(completion.token_ids)),)


@pytest.mark.parametrize(
    ("model", "message"), [("absent", "no such folder"), ("empty", "no config.json")]
)
def test_missing_model(tmp_path: Path, model: str, message: str) -> None:
    """Found before anything is started, with the folder's name."""
    (tmp_path / "empty").mkdir()
    engine = Engine("e0", EngineSettings(model=str(tmp_path / model)), 1, None)
    with pytest.raises(ConfigError, match=message):
        asyncio.run(engine.start())


DRIVER = """
import asyncio, json, sys
from molt.rollout.engine import Engine, EngineSettings

async def main():
    settings = EngineSettings(model=sys.argv[1], kv_cache_gib=0.125)
    info = await Engine("e0", settings, 1, sys.argv[2]).start()
    with open(sys.argv[3], "w") as pipe:
        pipe.write(json.dumps(info["child_pids"]) + "\\n")
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_no_orphans_after_kill_9(folder: str, tmp_path: Path) -> None:
    """vLLM's processes notice that the one which started them is gone; output went to the log."""
    script, log, pipe = tmp_path / "driver.py", tmp_path / "log" / "engine.log", tmp_path / "pipe"
    script.write_text(DRIVER)
    os.mkfifo(pipe)
    driver = subprocess.Popen([sys.executable, str(script), folder, str(log), str(pipe)])
    children: list[psutil.Process] = []
    try:
        children = [psutil.Process(pid) for pid in json.loads(pipe.read_text())]
        assert len(children) >= 2 and "EngineCore" in log.read_text()
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
    finally:
        driver.kill()
        driver.wait()
        for child in children:
            if child.is_running():
                child.kill()
