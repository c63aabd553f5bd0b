"""Rows that are there twice: equal ones count once, however writers and retries placed them, and
different ones are violations, as the fold and SQL exclude their rollout.
"""

import errno
import json
from pathlib import Path
from typing import Any

import factories as make
import forge
import numpy as np
import pytest

from molt.replay.audit import audit
from molt.schemas.check import routing_columns, routing_sum
from molt.store import Log, Writer
from molt.store import files as store_files

Row = dict[str, Any]
SAMPLED = {"sampled": 5, "context": 0, "regenerated": 0}


def violations(log: Log) -> list[tuple[str, str | None, str]]:
    found = audit(log).to_json()["violations"]
    return [(v["invariant"], v["rollout"], v["why"]) for v in found]


@pytest.fixture
def pair(log: Log) -> list[Writer]:
    """Two writers, in the order in which they are read."""
    options = {"linger_s": 60, "routing": forge.SHAPE}
    return sorted((log.writer(1, **options) for _ in range(2)), key=lambda w: w.name)


ROOT = make.segment()
CHILD = make.segment(segment=1, parent=0, keep=3, parent_digest=ROOT["digest"], ids=[4, 5])
EXPERTS = make.routing() | routing_columns(np.array([[[0, 1], [2, 3]], [[1, 2], [3, 4]]]), 8)
SUM = f"{routing_sum([(0, 0, EXPERTS['row_xxh3'])]):016x}"
OUTCOME = make.rollout(
    digests=[CHILD["digest"]],
    n_segments=2,
    counts=SAMPLED,
    metrics=json.dumps({"routing_sum": SUM}),
)
ROWS = [
    ("prompts", make.prompt(0, n=1)),
    ("segments", ROOT),
    ("segments", CHILD),
    ("routing", EXPERTS),
    ("rewards", make.reward()),
    ("scores", make.score()),
    ("rollouts", OUTCOME),
]


@pytest.mark.parametrize("whole", [0, 1])
@pytest.mark.parametrize("i", range(len(ROWS)))
def test_a_row_written_again_by_another_writer(pair: list[Writer], whole: int, i: int) -> None:
    """Before its attempt is read and after it was closed."""
    for stream, row in ROWS:
        pair[whole].append(stream, row)
    pair[1 - whole].append(*ROWS[i])
    for w in pair:
        w.close()
    assert violations(Log.open(w.log)) == []


@pytest.mark.parametrize("cut", range(1, len(ROWS)))
def test_an_attempt_told_by_two_writers(pair: list[Writer], cut: int) -> None:
    """Each has a part of it; the first one read has the end."""
    for stream, row in ROWS[:cut]:
        pair[1].append(stream, row)
    for stream, row in ROWS[cut:]:
        pair[0].append(stream, row)
    for w in pair:
        w.close()
    assert violations(Log.open(w.log)) == []


def test_a_routing_row_twice_by_one_writer(log: Log) -> None:
    with log.writer(linger_s=60, routing=forge.SHAPE) as w:
        for stream, row in [*ROWS[:4], ROWS[3], *ROWS[4:]]:
            w.append(stream, row)
            w.flush()
    assert violations(log) == []


def test_an_outcome_in_two_directories(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory's fsync fails behind the link: the writer goes on in another one."""
    w = log.writer(linger_s=60, routing=forge.SHAPE)
    for stream, row in ROWS[:-1]:
        w.append(stream, row)
    w.flush()
    real, failed = store_files.fsync_dir, []

    def fsync_dir(path: Path) -> None:
        if path.name == "000000" and not failed:
            failed.append(path)
            raise OSError(errno.EIO, "io")
        real(path)

    monkeypatch.setattr(store_files, "fsync_dir", fsync_dir)
    w.append(*ROWS[-1])
    w.close()
    assert len(make.data_commits(log.path, "rollouts")) == 2
    assert violations(log) == []


@pytest.mark.parametrize(
    ("stream", "row"),
    [
        ("segments", make.segment(ids=[7, 8, 9])),
        ("rollouts", {**OUTCOME, "chain_digest": b"x" * 32}),
        ("rollouts", {**OUTCOME, "status": "failed", "reason": "lost"}),
        ("rewards", make.reward(value=0.0)),
        ("rewards", make.reward(value=None)),
        ("scores", make.score(values=[-9.0])),
        ("prompts", make.prompt(0, n=1, prompt='"other"')),
        ("prompts", make.prompt(0, n=2)),
    ],
)
def test_another_row_of_the_same_name(pair: list[Writer], stream: str, row: Row) -> None:
    for own in ROWS:
        pair[0].append(*own)
    pair[1].append(stream, row)
    for w in pair:
        w.close()
    found = violations(Log.open(w.log))
    assert ("I4", "train-0/0", "two rows of one name differ") in found


def test_rows_of_other_names_are_no_conflict(pair: list[Writer]) -> None:
    for own in ROWS:
        pair[0].append(*own)
    rewards = [make.reward(value=0.0, revision=1), make.reward(value=0.0, name="length")]
    rewards += [make.reward(value=0.0, segment=0), make.reward(value=0.0, segment=0, token=1)]
    for row in rewards:
        pair[1].append("rewards", row)
    for more in ({"kind": "value"}, {"version": 1}, {"segment": 1}, {"model": "other"}):
        pair[1].append("scores", make.score(values=[-9.0], **more))
    again = [{"rollout_id": "train-0/0", "attempt": 1}]
    reissue = make.prompt(0, n=1, attempt=1, reason="reissue", rollouts=again)
    pair[1].append("prompts", reissue)
    for w in pair:
        w.close()
    assert violations(Log.open(w.log)) == []


def test_a_segment_behind_an_outcome_that_does_not_name_it(pair: list[Writer]) -> None:
    for own in ROWS:
        pair[0].append(*own)
    late = make.segment(segment=2, parent=0, keep=3, parent_digest=ROOT["digest"], ids=[6])
    pair[1].append("segments", late)
    for w in pair:
        w.close()
    ((invariant, rollout, why),) = violations(Log.open(w.log))
    assert (invariant, rollout) == ("I6", "train-0/0")
    assert "segment 2 is none that its outcome names" in why


def test_a_row_written_again_is_verified_too(pair: list[Writer]) -> None:
    """It claims the digest of the row before it, and has other tokens."""
    for own in ROWS:
        pair[0].append(*own)
    pair[1].append("segments", CHILD)
    for w in pair:
        w.close()
    log = Log.open(w.log)
    path = max(make.data_commits(log.path, "segments"), key=lambda p: p.parts[-3])
    forge.rewrite(path, lambda row: {**row, "token_ids": row["token_ids"] + 1})
    ((invariant, rollout, why),) = violations(log)
    assert (invariant, rollout) == ("I1", "train-0/0") and "digest" in why
