"""`molt diff` names the first prompt, plan, token, logprob, reward and digest that differ."""

import json
import shutil
from pathlib import Path
from typing import Any

import forge
import pytest

from molt import cli
from molt.replay.diff import diff
from molt.store import Log

Row = dict[str, Any]


@pytest.fixture
def other(honest: Log, tmp_path: Path) -> Log:
    shutil.copytree(honest.path, tmp_path / "other")
    return Log.open(tmp_path / "other")


def parts(a: Log, b: Log) -> dict[str, Row]:
    return {part["what"]: part for part in diff(a, b)["parts"]}


def test_a_copy_is_equal(honest: Log, other: Log) -> None:
    assert diff(honest, other) == {"equal": True, "steps": 3, "parts": []}


def test_the_first_token_and_logprob(honest: Log, other: Log) -> None:
    def change(row: Row) -> Row:
        row["token_ids"][5] = 999
        row["logprobs"][5] = -9.0
        return row

    for who in ("train-4/0", "train-2/1"):
        forge.rewrite_segment(other, who, 0, change)
    for path in forge.control(other, "plan"):
        forge.rewrite(path, lambda r: {**r, "chain_digest": None})
    part = parts(honest, other)["token"]
    assert (part["step"], part["rollout"], part["segment"], part["token"]) == (2, "train-2/1", 0, 5)
    assert part["b"] == 999 and part["a"] < 200

    def restore(row: Row) -> Row:
        row["token_ids"][5] = part["a"]
        return row

    forge.rewrite_segment(other, "train-2/1", 0, restore)
    found = parts(honest, other)["logprob"]
    assert (found["rollout"], found["token"], found["b"]) == ("train-2/1", 5, -9.0)


def test_plans_rewards_prompts_and_digests(honest: Log, other: Log) -> None:
    def swap(row: Row) -> Row | None:
        if row["rollout_id"] == "train-5/0":
            return None
        return {**row, "advantage": 7.0} if row["rollout_id"] == "train-4/1" else row

    forge.rewrite(forge.control(other, "plan", 3)[0], swap)
    forge.rewrite(forge.control(other, "step", 2)[0], lambda r: {**r, "state_digest": "0" * 16})
    forge.rewrite_all(other, "prompts", lambda r: {**r, "prompt": "{}"} if r["ordinal"] else r)
    found = parts(honest, other)
    assert set(found) == {"plan", "advantage", "state_digest", "prompt"}
    assert (found["plan"]["rollout"], found["plan"]["a"], found["plan"]["b"]) == (
        "train-5/0",
        True,
        False,
    )
    assert (found["advantage"]["step"], found["advantage"]["b"]) == (3, 7.0)
    assert found["state_digest"]["step"] == 2 and found["prompt"]["rollout"] == "train-1/0"


def test_the_command_exits_like_diff(
    honest: Log, tiny: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["diff", str(honest.path), str(honest.path)]) == 0
    assert "3 steps compared: equal" in capsys.readouterr().out
    assert cli.main(["diff", str(honest.path), str(tiny.path), "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {p["what"] for p in found["parts"]} >= {"config", "plan", "length", "n_tokens"}
