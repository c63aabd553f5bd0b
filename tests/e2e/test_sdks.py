"""Agents with the official SDKs against a real engine and a real log, through worker and server."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import chats
import pytest
import sdk_agents
from launch import CONFIG
from players import Local, assignment
from tiny import Rig, load, tiny_tied_llama
from transformers import AutoTokenizer

from molt.config import load as load_config
from molt.rollout.worker import RolloutWorker
from molt.store import Log
from molt.store.branches import branches
from molt.store.doctor import doctor

pytestmark = pytest.mark.e2e
WINDOW = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose chat template knows tools, as the parser `hermes` reads them."""
    path = tiny_tied_llama(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = chats.PLAIN
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def rig(folder: str) -> Iterator[Rig]:
    rig = Rig(folder, max_model_len=WINDOW)
    rig.start()
    try:
        rig.run(rig.refit(load(folder), 0))
        yield rig
    finally:
        rig.close()


def play(rig: Rig, log: Log, folder: str, tmp_path: Path, agent: str, n: int = 1) -> None:
    """`n` rollouts of train-0 at once, by one worker."""
    (tmp_path / "config.toml").write_text(CONFIG.format(model=folder, log=log.path))
    config = load_config(
        tmp_path / "config.toml",
        [
            f"agent.env=sdk_agents:{agent}",
            "agent.deadline_s=60",
            "sampling.max_tokens=400",
            f"engine.max_model_len={WINDOW}",
        ],
    )

    async def main() -> None:
        worker = RolloutWorker(str(log.path), 1, config, folder, [Local(rig)])
        await worker.play([replace(assignment(i), prompt={"i": i}) for i in range(n)])
        await worker.close()

    sdk_agents.GIVEN.clear()
    rig.run(main())
    found = doctor(log.path)
    assert found["ok"], found


def rows(log: Log, query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = log.sql(query).to_arrow_table().to_pylist()
    return found


def segments(log: Log, rollout_id: str) -> dict[int, dict[str, Any]]:
    query = f"select * from segments where rollout_id = '{rollout_id}' order by segment"
    return {r["segment"]: r for r in rows(log, query)}


class Tip:
    """A segment as `branches` wants it."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.parent, self.keep, self.n_tokens = row["parent"], row["keep"], len(row["token_ids"])


def sampled(row: dict[str, Any]) -> list[int]:
    return [t for t, s in zip(row["token_ids"], row["sampled"], strict=True) if s]


@pytest.mark.parametrize("agent", ["OpenAITools", "AnthropicTools"])
def test_two_tool_agents_at_once_are_recorded_token_for_token(
    rig: Rig, log: Log, folder: str, tmp_path: Path, agent: str
) -> None:
    """Streamed and whole, a forced call, re-spaced JSON: one branch, every text as given."""
    play(rig, log, folder, tmp_path, agent, n=2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    outcomes = rows(log, "select * from rollouts order by rollout_id")
    assert len(outcomes) == 2
    for outcome in outcomes:
        ended = (outcome["status"], outcome["reason"])
        assert ended in (("ok", None), ("truncated", "length")), ended
        assert '"forks":{}' in outcome["metrics"].replace(" ", ""), outcome["metrics"]
        own = segments(log, outcome["rollout_id"])
        assert len(own) == 3 and len(branches({k: Tip(r) for k, r in own.items()})) == 1
        assert [r["train_reason"] for r in own.values()] == ["grammar", None, None]
        texts = [tokenizer.decode(sampled(own[k]), skip_special_tokens=True) for k in (1, 2)]
        given = sdk_agents.GIVEN[outcome["rollout_id"]]
        assert [text for _, text in given] == texts
        rewards = rows(
            log, f"select * from rewards where rollout_id = '{outcome['rollout_id']}' order by name"
        )
        assert [(r["name"], r["segment"], r["value"]) for r in rewards] == [
            ("last", 2, None),
            ("right", None, 1.0),
            ("turn", 1, 0.5),
        ]
        whole = "".join(tokenizer.decode(r["token_ids"]) for r in own.values())
        assert any(w in whole for w in sdk_agents.WEATHER.values())


def test_an_sdk_that_gives_up_and_retries_gets_one_reply(
    rig: Rig, log: Log, folder: str, tmp_path: Path
) -> None:
    play(rig, log, folder, tmp_path, "Impatient")
    (outcome,) = rows(log, "select status, metrics from rollouts")
    own = segments(log, "train-0/0")
    assert [r["finish_reason"] for r in own.values() if r["finish_reason"] != "partial"] in (
        ["length"],
        ["stop"],
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [t for r in own.values() for t in sampled(r)]
    ((_, text),) = sdk_agents.GIVEN["train-0/0"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert '"calls":1' in outcome["metrics"].replace(" ", "")


def test_an_agent_killed_in_mid_turn_leaves_a_whole_record(
    rig: Rig, log: Log, folder: str, tmp_path: Path
) -> None:
    play(rig, log, folder, tmp_path, "Killed", n=2)
    for outcome in rows(log, "select * from rollouts order by rollout_id"):
        assert (outcome["status"], outcome["reason"]) == ("aborted", "exit status -9")
        own = segments(log, outcome["rollout_id"])
        assert outcome["n_segments"] == len(own)
        assert outcome["counts"]["sampled"] == sum(len(sampled(r)) for r in own.values())


def test_no_token_but_its_own_opens_a_rollout(
    rig: Rig, log: Log, folder: str, tmp_path: Path
) -> None:
    sdk_agents.ERRORS.clear()
    sdk_agents.Stranger.tokens.clear()
    play(rig, log, folder, tmp_path, "Stranger")
    assert len(sdk_agents.ERRORS) == 1
    assert rows(log, "select count(*) as n from segments") == [{"n": 0}]
