"""What retention took is called retired, by the doctor and the audit; what is lost is damage."""

import json

import factories as make
import pytest

from molt.replay.audit import audit
from molt.replay.audit_model import _samples
from molt.store import Log
from molt.store.doctor import doctor
from molt.store.retention import retire

ROOT = make.segment()
CHILD = make.segment(segment=1, parent=0, keep=3, parent_digest=ROOT["digest"], ids=[4, 5])


@pytest.fixture
def half(log: Log) -> Log:
    """train-0/0 is trained and checkpointed; train-1 is open, and its row keeps a commit.

    That commit holds the child of train-0/0, too; its root lies below the floor.
    """
    with log.writer(linger_s=60) as w:
        for k in (0, 1):
            w.append("prompts", make.prompt(k, n=1))
        tickets = [w.append("segments", ROOT)]
        w.flush()
        tickets.append(w.append("segments", CHILD))
        w.append("segments", make.segment(rollout_id="train-1/0", finish_reason="partial"))
        w.append("rewards", make.reward())
        counts = {"sampled": 5, "context": 0, "regenerated": 0}
        w.append("rollouts", make.rollout(digests=[CHILD["digest"]], n_segments=2, counts=counts))
    row = make.plan_row("train-0/0", [t.result() for t in tickets], tip=1)
    log.control.put("plan", [row], make.plan_header(1))
    log.control.put("step", [make.step_row(1, 1, n_tokens=4)])
    state = {"epoch": 1, "step": 1, "state_digest": f"{1:016x}"}
    folder = log.path / "checkpoints/1-1"
    folder.mkdir()
    (folder / "COMPLETE").write_text(json.dumps(state))
    log.control.put("checkpoint", [{**state, "path": "checkpoints/1-1", "bytes": 0, "files": []}])
    return log


def verdicts(log: Log) -> list[str]:
    problems = [p["why"] for p in doctor(log.path)["problems"]]
    return problems + [v["why"] for v in audit(log).to_json()["violations"]]


def test_a_segment_whose_parent_was_retired(half: Log) -> None:
    assert verdicts(half) == [] and len(_samples(half, 0, 8)) == 3
    assert retire(half, now=make.NOW, dry_run=False)["commits"] == {"segments": 1}
    assert verdicts(half) == []
    assert doctor(half.path)["retired"] == 1 and audit(half).retired == 2
    assert [(s.rollout, s.segment) for s in _samples(half, 0, 8)] == [("train-1/0", 0)]


def test_a_missing_parent_of_an_open_group_is_damage_all_the_same(half: Log) -> None:
    lost = make.segment(rollout_id="train-1/0", segment=2, parent=1, keep=3, ids=[6])
    with half.writer(linger_s=60) as w:
        w.append("segments", lost)
    retire(half, now=make.NOW, dry_run=False)
    (problem,) = doctor(half.path)["problems"]
    assert "train-1/0 attempt 0 segment 2: its parent 1 is not in the log" in problem["why"]


@pytest.mark.parametrize("after", range(1, 12))
def test_retention_beside_the_doctor_and_the_audit(half: Log, after: int) -> None:
    """It strikes between any two files."""
    seen: list[int] = []

    def progress(*done: object) -> None:
        seen.append(1)
        if len(seen) == after:
            assert retire(half, now=make.NOW, dry_run=False)["files"] == 1

    report = audit(half, progress=progress).to_json() if after % 2 else doctor(half.path, progress)
    assert report["ok"] and len(seen) >= after, report
