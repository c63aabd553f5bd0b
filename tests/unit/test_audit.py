"""The audit finds every seeded violation. Each is made by rewriting valid commits so that every
checksum is right; where the doctor must not see it either, the test says so.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import factories as make
import forge
import pytest

from molt.replay.audit import audit
from molt.store import Log
from molt.store.compact import compact
from molt.store.retention import retire
from molt.train.advantages import advantages

Row = dict[str, Any]


def violations(log: Log) -> list[Row]:
    found = audit(log, advantages=advantages).to_json()
    assert found["ok"] == (not found["violations"])
    return list(found["violations"])


def says(found: list[Row], invariant: str, rollout: str | None, words: str = "") -> Row:
    """The one violation of this kind; all of them are shown if it is not there."""
    for row in found:
        if (row["invariant"], row["rollout"]) == (invariant, rollout) and words in row["why"]:
            return row
    raise AssertionError(json.dumps(found, indent=1))


def test_an_honest_log_passes_and_is_counted(honest: Log) -> None:
    seen: list[tuple[int, int, str]] = []
    found = audit(honest, advantages=advantages, progress=lambda *a: seen.append(a)).to_json()
    assert found["ok"] and found["violations"] == []
    assert found["checked"] == {
        "I1": 24,
        "I2": 84,
        "I3": 5,
        "I4": 12,
        "I5": 6,
        "I6": 1 + 4 + 3 + 3 + len(make.data_commits(honest.path)) - 1,
        "I7": 4,
    }
    assert found["tokens"] == 144 and {phase for _, _, phase in seen} == {
        "control log",
        "plans",
        "data log",
    }


# -- what was changed after it was trained -----------------------------------------------------


def change_id(row: Row) -> Row:
    row["token_ids"][4] += 1
    return row


def change_logprob(row: Row) -> Row:
    row["logprobs"][4] -= 0.5
    return row


def change_mask(row: Row) -> Row:
    row["sampled"][2] = row["train"][2] = 1
    row["version_runs"][0]["n"] += 1
    row["logprobs"][2] = -1.0
    return row


def change_train(row: Row) -> Row:
    row["train"][3], row["train_reason"] = 0, "forged"
    return row


def change_version(row: Row) -> Row:
    row["version_runs"] = [{"epoch": 1, "version": 1, "n": 2}, {"epoch": 1, "version": 0, "n": 2}]
    return row


def shift_logprobs(row: Row) -> Row:
    row["logprobs"][3:7] = [-0.1, *row["logprobs"][3:6]]
    return row


CHANGES = [change_id, change_logprob, change_mask, change_train, change_version, shift_logprobs]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_segment_with_all_digests_mended_is_not_what_was_planned(
    honest: Log, change: Callable[[Row], Row]
) -> None:
    """The whole data log agrees with the forgery; the control log remembers the chain."""
    forge.rewrite_segment(honest, "train-1/0", 0, change)
    assert forge.is_sound(honest)
    found = violations(honest)
    row = says(found, "I1", "train-1/0", "as they were planned")
    assert row["expected"] != row["found"] and len(row["expected"]) == 64
    assert {r["rollout"] for r in found} <= {"train-1/0", None}
    if change in (change_mask, change_train):
        step = says(found, "I4", None, "trained tokens of its plan")
        assert step["expected"] == 28 and step["found"] == 28 + (1 if change is change_mask else -1)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_segment_alone_contradicts_its_outcome(
    honest: Log, change: Callable[[Row], Row]
) -> None:
    """Only the row and its own digest were rewritten: its child and its outcome tell of it."""

    def one(row: Row) -> Row:
        if (row["rollout_id"], row["segment"]) != ("train-1/0", 0):
            return row
        row = {**row, **{k: row[k].copy() for k in ("token_ids", "sampled", "train", "logprobs")}}
        row = change(row)
        return {**row, "digest": make.segment_digest(row)}

    forge.rewrite_all(honest, "segments", one)
    says(violations(honest), "I1", "train-1/0", "digest")


def test_a_version_that_was_never_published(honest: Log) -> None:
    def change(row: Row) -> Row:
        row["version_runs"] = [
            {"epoch": 1, "version": 0, "n": 1},
            {"epoch": 1, "version": 77, "n": 3},
        ]
        return row

    forge.rewrite_segment(honest, "train-4/1", 0, change)
    assert forge.is_sound(honest)
    row = says(violations(honest), "I2", "train-4/1", "no policy record names")
    assert (row["segment"], row["token"], row["found"]) == (0, 4, "1.77")


def test_a_version_that_was_published_only_later(honest: Log) -> None:
    """Step 1 cannot have trained on tokens of version 2."""

    def change(row: Row) -> Row:
        row["version_runs"] = [{"epoch": 1, "version": 2, "n": 4}]
        return row

    forge.rewrite_segment(honest, "train-0/0", 0, change)
    row = says(violations(honest), "I2", "train-0/0", "before the plan of step 1")
    assert (row["segment"], row["token"], row["expected"]) == (0, 3, "at most 1.0")


def test_a_changed_reward(honest: Log) -> None:
    def change(row: Row) -> Row:
        return {**row, "value": 9.0} if row["rollout_id"] == "train-2/1" else row

    forge.rewrite_all(honest, "rewards", change)
    assert forge.is_sound(honest)
    row = says(violations(honest), "I1", "train-2/1", "reward at step 2")
    assert (row["expected"], row["found"]) == (0.0, 18.0)


# -- the control log ---------------------------------------------------------------------------


def test_duplicated_training(honest: Log) -> None:
    """Step 3 trains a group of step 1 again instead of its own, and all counts agree."""
    again = [r for r in honest.records() if r.kind == "plan"][0].rows[:2]
    path = forge.control(honest, "plan", 3)[0]
    rows = [*again, *forge.to_rows(forge.read(path).table)[2:]]
    rows = [{**r, "lag_max": 2, "decision": "mask"} if r in rows[:2] else r for r in rows]
    forge.reseal(path, [{**r, "at": make.NOW} for r in rows], forge.read(path), max_lag=2)
    forge.retell_step(honest, 3)
    assert forge.is_sound(honest)
    found = violations(honest)
    row = says(found, "I4", "train-0/0", "settled twice in pass 0")
    first, third = (forge.control(honest, "plan", step)[0] for step in (1, 3))
    assert (row["expected"], row["found"]) == (int(first.stem), int(third.stem))


def test_a_rollout_twice_in_one_plan(honest: Log) -> None:
    path = forge.control(honest, "plan", 2)[0]
    rows = forge.to_rows(forge.read(path).table)
    forge.reseal(path, [rows[0], rows[0], *rows[2:]], forge.read(path))
    forge.retell_step(honest, 2)
    says(violations(honest), "I4", "train-2/0", "lists it twice")


@pytest.mark.parametrize("counts", [False, True])
def test_a_dropped_rollout_that_counts_all_the_same(honest: Log, counts: bool) -> None:
    """Its row in the plan says that it does not."""
    make.open_epoch(honest, config=json.dumps(forge.CONFIG))
    with honest.writer(linger_s=60, routing=forge.SHAPE) as w:
        for k in (6, 7):
            w.append("prompts", make.prompt(k, n=2))
        rows = [forge.play_group(w, k, 3, 4, 0) for k in (6, 7)]
    honest.control.put("drop", [make.drop_row("train-6", "bad tool", "train-6/1")], {})
    if not counts:
        none = {"reward": None, "in_baseline": False, "advantage": 0.0}
        rows[0][1] |= {**none, "decision": "baseline_only"}
        rows[0][0] |= {"advantage": 0.0}
    n = honest.control.put("plan", [*rows[0], *rows[1]], make.plan_header(4))
    if counts:
        forge.put_step(honest, n, True)
    found = [(v["invariant"], v["rollout"], v["found"]) for v in audit(honest).violations]
    assert found == ([("I4", "train-6/1", n)] if counts else [])


def test_a_rollout_left_out_of_its_groups_plan(honest: Log) -> None:
    path = forge.control(honest, "plan", 2)[0]
    forge.rewrite(path, lambda r: None if r["rollout_id"] == "train-3/1" else r)
    forge.retell_step(honest, 2, n_tokens=21)
    assert forge.is_sound(honest)
    row = says(violations(honest), "I4", "train-3/0", "rollouts in its plan")
    assert (row["expected"], row["found"]) == (2, 1)


def test_a_skipped_ordinal_that_was_removed(honest: Log) -> None:
    forge.rewrite_all(honest, "prompts", lambda r: None if r["ordinal"] == 2 else r)
    assert forge.is_sound(honest)
    row = says(violations(honest), "I5", "train-2/0", "never issued")
    assert row["expected"] == 2


def test_a_skipped_ordinal_that_never_was(tmp_path: Path) -> None:
    log = forge.honest_log(tmp_path / "log", skip=3)
    assert forge.is_sound(log)
    assert [r["rollout"] for r in violations(log)] == ["train-3/0"]


def test_an_unfinished_prompt_that_a_new_epoch_forgot(honest: Log) -> None:
    with honest.writer(linger_s=60) as w:
        w.append("prompts", make.prompt(6, n=2))
    assert violations(honest) == [], "in flight is no violation"
    log = Log.open(honest.path)
    make.open_epoch(log, config=json.dumps(forge.CONFIG))
    log.control.put("policy", [make.policy(2, 3, weights_digest=f"{1:08x}{3:08x}")])
    with log.writer(linger_s=60, routing=forge.SHAPE) as w:
        w.append("prompts", make.prompt(7, n=2))
        rows = forge.play_group(w, 7, 3, 4, 0)
    log.control.put("plan", rows, make.plan_header(4))
    row = says(violations(log), "I5", "train-6/0", "without issuing it again")
    assert (row["expected"], row["found"]) == (2, 1)


def test_a_plan_that_does_not_match_its_step(honest: Log) -> None:
    """Another advantage in the plan than what was executed."""

    def change(row: Row) -> Row:
        return {**row, "advantage": 5.0} if row["rollout_id"] == "train-3/0" else row

    forge.rewrite(forge.control(honest, "plan", 2)[0], change)
    assert forge.is_sound(honest)
    found = violations(honest)
    says(found, "I4", None, "step 2: plan of its plan")
    row = says(found, "I1", "train-3/0", "advantage at step 2")
    assert (row["expected"], row["found"]) == (5.0, -1.0)


def test_a_step_that_trained_other_tokens_than_its_plan(honest: Log) -> None:
    forge.rewrite(forge.control(honest, "step", 2)[0], lambda r: {**r, "n_tokens": 27})
    row = says(violations(honest), "I4", None, "step 2: trained tokens")
    assert (row["expected"], row["found"]) == (27, 28)


def test_a_step_without_plan(honest: Log) -> None:
    forge.remove_record(honest, forge.control(honest, "plan", 3)[0])
    assert forge.is_sound(honest)
    says(violations(honest), "I4", None, "step 3 (record 8) has no plan")


def test_a_policy_without_step(honest: Log) -> None:
    forge.remove_record(honest, forge.control(honest, "step", 3)[0])
    assert forge.is_sound(honest)
    row = says(violations(honest), "I7", None, "policy 1.3")
    assert (row["expected"], row["found"]) == (2, 3)


def test_weights_that_change_their_digest_without_a_step(honest: Log) -> None:
    log = Log.open(honest.path)
    make.open_epoch(log, config=json.dumps(forge.CONFIG))
    log.control.put("policy", [make.policy(2, 3, weights_digest="0" * 16)])
    says(violations(log), "I7", None, "weights of version 3 in epochs 1 and 2")


def test_engine_and_trainer_disagreed(honest: Log) -> None:
    """Logprobs shifted before anything was sealed: the step's own measurement tells."""
    gap = {"n": 28, "mean": 0.9, "p999": 2.0, "max": 2.0, "k3": 0.5}
    text = json.dumps({"mismatch": {"all": gap, "0": gap}})
    forge.rewrite(forge.control(honest, "step", 1)[0], lambda r: {**r, "metrics": text})
    row = says(violations(honest), "I3", None, "step 1: mean gap")
    assert (row["expected"], row["found"]) == (1e-4, 0.9)


# -- rows that are not theirs, or not there ----------------------------------------------------


def test_foreign_routing(honest: Log) -> None:
    def change(row: Row) -> Row:
        return {**row, "rollout_id": "train-0/1"} if row["rollout_id"] == "train-0/0" else row

    forge.rewrite_all(honest, "routing", change)
    assert forge.is_sound(honest)
    row = says(violations(honest), "I3", "train-0/0", "owner of planned routing")
    assert (row["segment"], row["found"]) == (1, ("train-0/1", 0))


def test_exchanged_routing(honest: Log) -> None:
    """Two rollouts of one shape: each has the other's experts, and every row is whole."""
    query = "select rollout_id, experts, row_xxh3 from routing where rollout_id like 'train-0/%'"
    (a, *one), (b, *two) = sorted(honest.sql(query).fetchall())
    other = {a: two, b: one}

    def change(row: Row) -> Row:
        experts, hashes = other.get(row["rollout_id"], (row["experts"], row["row_xxh3"]))
        return {**row, "experts": experts, "row_xxh3": hashes}

    forge.rewrite_all(honest, "routing", change)
    assert forge.is_sound(honest)
    for who in other:
        says(violations(honest), "I3", who, "routing of its segments")


def test_routing_that_is_not_there(honest: Log) -> None:
    """The plan names no routing row of one rollout, or one that stops in the middle."""

    def forget(row: Row) -> Row:
        (branch,) = row["branches"]
        cut = {**branch, "refs": branch["refs"][:-1]}
        return {**row, "branches": [cut]} if row["rollout_id"] == "train-0/0" else row

    def shorten(row: Row) -> Row:
        half = {"n": 6, "experts": row["experts"][: len(row["experts"]) // 2]}
        half["row_xxh3"] = row["row_xxh3"][:6]
        return {**row, **half} if row["rollout_id"] == "train-1/0" else row

    forge.rewrite(forge.control(honest, "plan", 1)[0], forget)
    forge.rewrite_all(honest, "routing", shorten)
    found = violations(honest)
    row = says(found, "I3", "train-0/0", "experts are recorded for 0 of 11 tokens")
    assert (row["segment"], row["token"], row["expected"]) == (1, 0, 0.9)
    row = says(found, "I3", "train-1/0", "experts are recorded for 6 of 11 tokens")
    assert (row["token"], row["found"]) == (6, pytest.approx(6 / 11))


def test_routing_beyond_its_chain(honest: Log) -> None:
    def change(row: Row) -> Row:
        return {**row, "start": 3} if row["rollout_id"] == "train-0/0" else row

    forge.rewrite_all(honest, "routing", change)
    row = says(violations(honest), "I3", "train-0/0", "beyond the end")
    assert (row["token"], row["expected"], row["found"]) == (12, 12, 15)


@pytest.mark.parametrize("stream", ["segments", "rewards", "rollouts", "routing", "prompts"])
def test_a_missing_commit(honest: Log, stream: str) -> None:
    victim = make.data_commits(honest.path, stream)[1]
    victim.unlink()
    seq = int(victim.name.split(".")[0])
    found = violations(honest)
    says(found, "I6", None, f"commit {seq} of writer")


def test_the_last_commits_of_a_closed_writer_are_missing(honest: Log) -> None:
    log = Log.open(honest.path)
    make.open_epoch(log, config=json.dumps(forge.CONFIG))
    last = sorted(make.data_commits(log.path))[-1]
    assert last.name.endswith(".end.arrow")
    last.unlink()
    seq = int(last.name.split(".")[0])
    says(violations(log), "I6", None, f"commit {seq} of writer")


def test_a_missing_control_record(honest: Log) -> None:
    forge.control(honest, "step", 1)[0].unlink()
    says(violations(honest), "I6", None, "control record 3 is missing")


def test_a_plan_that_names_a_segment_without_its_parent(honest: Log) -> None:
    def change(row: Row) -> Row:
        (branch,) = row["branches"]
        return {**row, "branches": [{**branch, "refs": branch["refs"][1:]}]}

    forge.rewrite(forge.control(honest, "plan", 1)[0], change)
    says(violations(honest), "I6", "train-0/0", "segment 1 without its parent 0")


def test_a_damaged_epoch_record_is_named(honest: Log) -> None:
    """Without it no lineage can be told; the audit still ends with a report."""
    make.flip(forge.control(honest, "epoch")[0], 200)
    says(violations(honest), "I6", None, "checksum")


def test_two_writers_that_tell_a_rollout_differently(honest: Log) -> None:
    with honest.writer(1, linger_s=60) as w:
        make.append_rollout(w, "train-5/1")
    row = says(violations(honest), "I4", "train-5/1", "two rows of one name differ")
    assert row["expected"] != row["found"]


def test_a_damaged_commit_does_not_end_the_audit(honest: Log) -> None:
    make.flip(make.data_commits(honest.path, "segments")[0], 200)
    forge.rewrite_all(honest, "rewards", lambda r: {**r, "value": (r["value"] or 0) + 1})
    found = violations(honest)
    assert any(r["invariant"] == "I6" for r in found)
    says(found, "I1", "train-2/1", "reward at step 2")


def test_abandoned_futures_are_audited_too(honest: Log) -> None:
    """Epoch 2 forks before step 3; the abandoned step 3 still has to have a plan."""
    cut = next(r.n for r in honest.records() if r.kind == "policy" and r.rows[0]["version"] == 2)
    log = Log.open(honest.path)
    make.open_epoch(log, config=json.dumps(forge.CONFIG), parent_epoch=1, cut=cut)
    assert violations(log) == []
    forge.remove_record(log, forge.control(log, "plan", 3)[0])
    says(violations(log), "I4", None, "step 3 (record 8) has no plan")


def test_what_was_retired_is_said_not_accused(honest: Log) -> None:
    log = Log.open(honest.path)
    folder = log.path / "checkpoints/1-3"
    folder.mkdir()
    state = {"epoch": 1, "step": 3, "state_digest": f"{3:016x}"}
    (folder / "COMPLETE").write_text(json.dumps({**state, "files": []}))
    make.open_epoch(log, config=json.dumps(forge.CONFIG))
    log.control.put("checkpoint", [{**state, "path": "checkpoints/1-3", "bytes": 0, "files": []}])
    compact(log, everything=True)
    assert violations(log) == [], "compaction changes nothing"
    retire(log, now=make.NOW, routing="none", dry_run=False)
    found = audit(log, advantages=advantages).to_json()
    assert found["ok"], found["violations"]
    assert found["retired"] > 0
