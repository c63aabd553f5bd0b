"""Damage, and a log that changes meanwhile, do not end an audit; what is sound is not accused."""

import shutil
from typing import Any

import factories as make
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
