"""Damage, and a log that changes meanwhile, do not end an audit; what is sound is not accused."""

import json
import shutil
from pathlib import Path
from typing import Any

import factories as make
import forge
import pytest

from molt.replay import audit_data
from molt.replay.audit import audit
from molt.store import Log
from molt.store.compact import compact


def whys(log: Log, invariant: str = "I6") -> list[str]:
    found = audit(log).to_json()
    assert found["ok"] == (not found["violations"])
    return [v["why"] for v in found["violations"] if v["invariant"] == invariant]


@pytest.mark.parametrize("before", ["names", "bucket_files", "cold_commits", "read_ahead"])
def test_a_compaction_beside_the_audit_is_no_damage(
    honest: Log, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """It strikes just before one of the listings, or while commits are read."""
    whole, moved = audit(honest).to_json(), []
    real = getattr(audit_data, before)

    def strike(*args: Any) -> Any:
        moved.append(compact(honest, everything=True)["commits"])
        return real(*args)

    monkeypatch.setattr(audit_data, before, strike)
    assert audit(honest).to_json() == whole
    assert sum(moved) == whole["checked"]["I6"] - len(honest.records())


def test_strangers_files_are_no_part_of_the_log(honest: Log) -> None:
    whole = audit(honest).to_json()
    writer = make.data_commits(honest.path)[0].parents[1]
    (honest.path / "cold").mkdir()
    for place in (writer / "notes.txt", writer / "000001", "data/1-notes", "cold/README"):
        (honest.path / place).write_text("hello")
        assert audit(honest).to_json() == whole


def test_two_commits_with_one_number(honest: Log) -> None:
    path = make.data_commits(honest.path, "segments")[0]
    shutil.copy(path, str(path).replace(".segments.", ".rewards."))
    found = whys(honest)
    assert any("two commits with number 1" in why for why in found)
    assert any("1.rewards: the file says it is" in why for why in found)


def test_a_damaged_cold_footer(honest: Log) -> None:
    compact(honest, everything=True)
    path = honest.path / "cold/segments/0000000000.parquet"
    make.flip(path, -60)
    found = whys(honest)
    assert any(why.startswith("cold/segments/0000000000.parquet: checksum") for why in found)
    assert any(why.startswith("commit 1 of writer") for why in found)


@pytest.mark.parametrize("text", ["", "[]", "null", "3", "not json", "[" * 100_000])
def test_text_that_is_no_json_object(honest: Log, text: str) -> None:
    """In a config, a step and an outcome; everything else is audited all the same."""
    whole = audit(honest).to_json()["checked"]
    forge.rewrite(forge.control(honest, "step", 2)[0], lambda r: {**r, "metrics": text})
    forge.rewrite(forge.control(honest, "step", 3)[0], lambda r: {**r, "counts": text})
    forge.rewrite_all(
        honest,
        "rollouts",
        lambda r: {**r, "metrics": text} if r["rollout_id"] == "train-2/1" else r,
    )
    assert [why for why in whys(honest) if "is no JSON object" not in why] == []
    names = [why.partition(": ")[0] for why in whys(honest)]
    assert names == ["metrics of step 2", "counts of step 3"]
    (outcome,) = whys(honest, "I1")
    assert outcome.startswith("rollouts row of train-2/1 attempt 0: metrics is not ")
    assert audit(honest).to_json()["checked"]["I6"] == whole["I6"]
    forge.rewrite(forge.control(honest, "epoch")[0], lambda r: {**r, "config": text})
    assert whys(honest)[0].startswith("config of epoch 1 (record 0): ")


@pytest.mark.parametrize("name", ["r7", "train-0", "train-x/0", "train-0/x", "-1/0", "other-0/1"])
def test_an_outcome_whose_name_holds_no_ordinal(log: Log, name: str) -> None:
    with log.writer(linger_s=60) as w:
        w.append("rollouts", make.rollout("train-0/0"))
    forge.rewrite_all(log, "rollouts", lambda row: {**row, "rollout_id": name})
    assert any("is not <purpose>-<ordinal>/<number>" in why for why in whys(log, "I5"))


def test_a_planned_group_whose_name_holds_no_ordinal(log: Log) -> None:
    log.control.put("plan", [make.plan_row("r7/0", [])], make.plan_header(1))
    with log.writer(linger_s=60) as w:
        w.append("prompts", make.prompt(0))
    assert any("of group 'r7' is not" in why for why in whys(log, "I5"))


def test_the_newest_policy_is_damaged(honest: Log) -> None:
    """Tokens of its version lead the third pass to the control log again."""
    log = Log.open(honest.path)
    make.open_epoch(log, config=json.dumps(forge.CONFIG))
    n = log.control.put("policy", [make.policy(2, 3)])
    with log.writer(linger_s=60) as w:
        w.append("segments", make.segment(rollout_id="train-9/0", epoch=2, version=3))
    make.flip(log.path / f"train/{n:010d}.arrow", 200)
    assert any(why.startswith(f"control/{n}.control: checksum") for why in whys(log))
    assert any("2.3, which no policy record names" in why for why in whys(log, "I2"))


def test_the_control_log_of_a_source_is_damaged(honest: Log, tmp_path: Path) -> None:
    """An offline run: its plan names rows of the honest log, whose policies cannot be told."""
    own = Log.create(tmp_path / "own")
    sources = [{"log": 1, "run_id": "honest", "path": str(honest.path)}]
    make.open_epoch(own, config=json.dumps(forge.CONFIG), sources=sources)
    plan = next(r for r in honest.records() if r.kind == "plan")
    rows = json.loads(json.dumps(plan.rows, default=str).replace('"log": 0', '"log": 1'))
    digests = [{"chain_digest": r["chain_digest"], "lag_max": None} for r in plan.rows]
    own.control.put(
        "plan",
        [{**r, **d, "at": make.NOW} for r, d in zip(rows, digests, strict=True)],
        make.plan_header(1),
    )
    assert audit(own).to_json()["ok"]
    make.flip(forge.control(honest, "policy", 3)[0], 200)
    assert [why.partition(":")[0] for why in whys(own)] == ["control/10.control"]


def test_a_cold_file_that_is_listed_and_not_there(honest: Log) -> None:
    compact(honest, everything=True)
    (honest.path / "cold/segments/0000000007.parquet").symlink_to("moved-away.parquet")
    assert any("0000000007.parquet" in why for why in whys(honest))
