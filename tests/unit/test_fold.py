"""The fold: finished, in flight, settled, re-issued; each from a real log."""

import errno

import factories as make
import forge
import pytest

from molt.schemas.errors import LogCorrupt
from molt.schemas.records import Version
from molt.store import Log
from molt.store.fold import COLUMNS, STREAMS, Fold, Ordinals, unsettled
from molt.store.writer import Writer


def fold_of(log: Log) -> Fold:
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    fold.update()
    return fold


def test_the_tiny_log_folds_to_its_story(tiny: Log) -> None:
    fold = fold_of(tiny)
    assert fold.policies == {
        Version(epoch=e, version=v) for e, v in ((1, 0), (1, 1), (2, 1), (2, 2))
    }
    assert [g.group_id for g in fold.open_groups("train")] == ["train-2"]
    assert fold.last_step == 2 == fold.last_planned
    assert fold.settled["train"].low == 2
    assert fold.next_ordinal["train"] == 5
    assert [g.group_id for g in make.closed_groups(fold, "eval")] == ["eval-0"]
    assert [(g.group_id, again) for g, again in unsettled(fold, "train")] == [
        ("train-2", [("train-2/0", 1)])
    ]


def test_a_group_closes_with_its_last_outcome(log: Log, w: Writer) -> None:
    w.append("prompts", make.prompt(0, n=2))
    make.append_rollout(w, "train-0/0")
    fold = fold_of(log)
    assert make.closed_groups(fold) == []
    make.append_rollout(w, "train-0/1")
    fold.update()
    assert [g.group_id for g in make.closed_groups(fold)] == ["train-0"]


def test_rows_seen_before_their_prompt_are_kept(log: Log, w: Writer) -> None:
    make.append_rollout(w, "train-0/0")
    fold = fold_of(log)
    assert fold.groups == {}
    w.append("prompts", make.prompt(0, n=1))
    w.flush()
    fold.update()
    assert len(make.closed_groups(fold)) == 1


def test_a_rollout_of_a_version_without_policy_is_hidden_and_issued_again(
    log: Log, w: Writer
) -> None:
    w.append("prompts", make.prompt(0, n=1))
    make.append_rollout(w, "train-0/0", version=7)
    fold = fold_of(log)
    assert make.closed_groups(fold) == []
    assert [again for _, again in unsettled(fold, "train")] == [[("train-0/0", 1)]]
    log.control.put("policy", [make.policy(1, 7)])
    fold.update()
    assert len(make.closed_groups(fold)) == 1


def test_a_pending_outcome_closes_with_its_first_reward(log: Log, w: Writer) -> None:
    w.append("prompts", make.prompt(0, n=1))
    row = make.segment()
    w.append("segments", row)
    w.append("rollouts", make.rollout(status="pending", digests=[row["digest"]]))
    w.flush()
    fold = fold_of(log)
    assert make.closed_groups(fold) == []
    w.append("rewards", make.reward())
    w.flush()
    fold.update()
    assert len(make.closed_groups(fold)) == 1


def test_the_highest_revision_of_a_reward_wins(log: Log, w: Writer) -> None:
    w.append("prompts", make.prompt(0, n=1))
    w.append("rewards", make.reward(value=0.0, revision=1))
    w.append("rewards", make.reward(value=1.0, revision=0))
    w.flush()
    attempt = fold_of(log).groups["train-0"].attempts["train-0/0"][0]
    assert [value for _, value, _ in attempt.rewards.values()] == [0.0]


def test_other_content_under_one_key_is_a_conflict_and_equal_content_is_not(log: Log) -> None:
    with log.writer() as a, log.writer() as b:
        a.append("prompts", make.prompt(0, n=2))
        for w in (a, b):
            make.append_rollout(w, "train-0/0")
        make.append_rollout(a, "train-0/1")
        b.append("segments", make.segment(rollout_id="train-0/1", ids=[9, 9, 9]))
        b.flush()
    attempts = fold_of(log).groups["train-0"].attempts
    assert not attempts["train-0/0"][0].conflict
    assert attempts["train-0/1"][0].conflict


def test_settled_groups_are_forgotten(log: Log, w: Writer) -> None:
    for k in range(50):
        w.append("prompts", make.prompt(k, n=1))
        make.append_rollout(w, f"train-{k}/0")
        log.control.put("drop", [make.drop_row(f"train-{k}")], {})
    fold = fold_of(log)
    assert fold.groups == {} and fold._orphans == {}
    assert fold.settled["train"].low == 50 and fold.settled["train"].above == set()


def test_ordinals_keep_a_low_water_mark_and_exceptions() -> None:
    case = make.load_case("P35")
    log_order, given = case["given"]["log"], case["given"]
    ordinals = Ordinals()
    for name in given["trained"] + given["dropped_stale"]:
        ordinals.add(log_order.index(name))
    assert ordinals.low == case["expected"]["low_water_mark"]
    left = [name for i, name in enumerate(log_order) if i not in ordinals]
    assert left == case["expected"]["next_after_resume"]


def test_m05_prompts_in_flight_at_a_crash_are_issued_again(log: Log, w: Writer) -> None:
    case = make.load_case("M05")
    for k in case["given"]["issued"]:
        w.append("prompts", make.prompt(k, n=1))
    w.flush()
    rows = [make.drop_row(f"train-{k}") for k in case["given"]["settled"]]
    log.control.put("drop", rows, {})
    fold = fold_of(log)
    again = [group.ordinal for group, _ in unsettled(fold, "train")]
    assert again == case["expected"]["reissued"]
    assert fold.next_ordinal["train"] == case["expected"]["next_new_ordinal"]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_ordinals_in_any_order(order: list[int]) -> None:
    ordinals = Ordinals()
    for k in order:
        ordinals.add(k)
        assert k in ordinals
    assert ordinals.low == 4 and not ordinals.above and 4 not in ordinals


def test_settled_history_is_not_held(log: Log, w: Writer) -> None:
    """Of 200 steps only the checkpoints that are still there, and two numbers."""
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    for step in range(1, 201):
        log.control.put("plan", [], make.plan_header(step))
        log.control.put("step", [make.step_row(1, step)])
        if step % 10 == 0:
            path = f"checkpoints/1-{step}"
            (log.path / path).mkdir()
            (log.path / path / "COMPLETE").touch()
            row = {"epoch": 1, "step": step, "path": path, "bytes": 0, "files": []}
            log.control.put("checkpoint", [{**row, "state_digest": f"{step:016x}"}])
            fold.update()
            if step > 20:
                (log.path / f"checkpoints/1-{step - 20}/COMPLETE").unlink()
    again = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    again.update()
    for found, first in ((fold, 180), (again, 190)):
        assert [r["step"] for r in found.checkpoints] == list(range(first, 201, 10))
        assert not found.groups and len(found.settled) == 0
        assert (found.last_step, found.last_planned) == (200, 200)


def test_the_fold_and_sql_agree_on_what_two_writers_said_twice(log: Log) -> None:
    """Equal rows count once; segments, outcomes or rewards that differ are a conflict."""
    with log.writer(linger_s=60) as a, log.writer(linger_s=60) as b:
        a.append("prompts", make.prompt(0, n=5))
        a.flush()
        for i in range(5):
            for w in (a, b):
                other = w is b
                row = make.segment(
                    rollout_id=f"train-0/{i}", ids=[1, 2, 9 if other and i == 1 else 3]
                )
                w.append("segments", row)
                w.append("rewards", make.reward(f"train-0/{i}", 0.5 if other and i == 2 else 1.0))
                w.append("rewards", make.reward(f"train-0/{i}", 2.0, revision=1))
                status = "truncated" if other and i >= 3 else "ok"
                digest = make.segment(ids=[7 if other and i == 3 else 8])["digest"]
                tips = [digest] if i == 3 else [row["digest"]]
                w.append("rollouts", make.rollout(f"train-0/{i}", status=status, digests=tips))
                w.flush()
    fold = fold_of(log)
    attempts = {i: fold.groups["train-0"].attempts[f"train-0/{i}"][0] for i in range(5)}
    assert [attempts[i].conflict for i in range(5)] == [False, True, True, True, True]
    assert attempts[0].rewards[None, None, "score"][:2] == (1, 2.0)
    for stream, n in (("segments", 1), ("rollouts", 1), ("rewards", 2)):
        found = log.sql(f"select rollout_id from {stream}").fetchall()
        assert found == [("train-0/0",)] * n, stream


def test_a_fold_in_small_pieces_is_the_same(tiny: Log, monkeypatch) -> None:
    whole = fold_of(tiny)
    monkeypatch.setattr("molt.store.fold.COMMITS_AT_ONCE", 1)
    pieces = fold_of(tiny)
    assert pieces.groups == whole.groups and pieces.settled == whole.settled
    assert pieces.policies == whole.policies and pieces.last_step == whole.last_step


BAD = ["foo", "", "train-0", "x/0", "train/0", "train-x/0", "train-1.5/0", "train-00/0", "/0"]
BAD += ["train-0/0/1", "train-\u0660/0", "-1/0"]


@pytest.mark.parametrize(
    ("rollout_id", "group_id"),
    [(r, r.rpartition("/")[0]) for r in BAD] + [("train-0/0", "train-9")],
)
def test_rows_of_no_group_are_passed_over(
    log: Log, w: Writer, rollout_id: str, group_id: str
) -> None:
    """Whatever a durable row calls itself, the others are folded."""
    w.append("prompts", make.prompt(0, n=1))
    w.append("prompts", make.prompt(5, n=1))
    make.append_rollout(w, "train-0/0")
    make.append_rollout(w, "train-5/0")
    new = {"rollout_id": rollout_id, "group_id": group_id}

    def rename(row: make.Row) -> make.Row:
        own = row.get("rollout_id", row.get("group_id"))
        return (
            row | {k: v for k, v in new.items() if k in row} if own.startswith("train-5") else row
        )

    for stream in ("prompts", "segments", "rewards", "rollouts"):
        forge.rewrite_all(log, stream, rename)
    fold = fold_of(log)
    assert [g.group_id for g in make.closed_groups(fold)] == ["train-0"] == list(fold.groups)
    assert set(fold.groups["train-0"].attempts) == {"train-0/0"} and not fold._orphans
    assert fold.next_ordinal == {"train": 1} and not fold.is_settled(group_id)


def test_a_rollout_that_waits_for_its_reward_alone_is_not_issued_again(log: Log, w: Writer) -> None:
    w.append("prompts", make.prompt(0, n=4))
    for i in range(4):
        row = make.segment(rollout_id=f"train-0/{i}", version=7 if i == 3 else 0)
        if i != 1:
            w.append("segments", row)
        digests = [b"y" * 32 if i == 2 else row["digest"]]
        w.append("rollouts", make.rollout(f"train-0/{i}", status="pending", digests=digests))
    w.flush()
    fold = fold_of(log)
    again = [("train-0/1", 1), ("train-0/2", 1), ("train-0/3", 1)]
    assert [found for _, found in unsettled(fold, "train")] == [again], "rows lack, or do not count"
    w.append("rewards", make.reward("train-0/0"))
    w.flush()
    fold.update()
    assert fold.finished(fold.groups["train-0"], "train-0/0") is not None


@pytest.mark.parametrize("first", ["drop", "rows"])
def test_a_dropped_rollout_counts_as_finished_and_nothing_of_it_does(
    log: Log, w: Writer, first: str
) -> None:
    """Seen before or after the rows; one that was never played, too."""
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    rows = [make.drop_row("train-0", "hung", f"train-0/{i}") for i in (1, 2)]
    if first == "drop":
        log.control.put("drop", rows, {})
        fold.update()
    w.append("prompts", make.prompt(0, n=3))
    make.append_rollout(w, "train-0/0")
    make.append_rollout(w, "train-0/1", attempt=1, version=7)
    fold.update()
    if first == "rows":
        assert [a for _, a in unsettled(fold, "train")] == [[("train-0/1", 2), ("train-0/2", 1)]]
        log.control.put("drop", rows, {})
        fold.update()
    (group,) = make.closed_groups(fold)
    assert list(unsettled(fold, "train")) == []
    found = [fold.finished(group, r) for r in group.rollout_ids()]
    assert [(a.attempt, a.dropped, len(a.segments)) for a in found if a] == [
        (0, None, 1),
        (1, "hung", 0),
        (0, "hung", 0),
    ]
    log.control.put("drop", [make.drop_row("train-0")], {})
    log.control.put("drop", rows, {})
    fold.update()
    assert not fold.groups and not fold.dropped, "of settled groups nothing is held"


@pytest.mark.parametrize("fails", [False, True])
def test_a_fold_follows_an_epoch_that_goes_back(
    log: Log, w: Writer, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """What the new lineage has not is as if it had never been read."""
    for k in range(3):
        w.append("prompts", make.prompt(k, n=1))
    refs = [make.append_rollout(w, f"train-{k}/0") for k in range(3)]
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    rows = [make.plan_row(f"train-{k}/0", refs[k]) for k in range(3)]
    cut = log.control.put("plan", rows[:1], make.plan_header(1))
    log.control.put("plan", rows[1:2], make.plan_header(2))
    fold.update()
    make.open_epoch(log)
    assert [r.kind for r in fold.update()] == ["epoch"] and fold.last_planned == 2
    tail = fold.tail
    make.open_epoch(log, parent_epoch=1, cut=cut)
    with monkeypatch.context() as broken:
        if fails:  # after the control records were read

            def eio(*_: object) -> None:
                raise OSError(errno.EIO, "for once")

            broken.setattr("molt.store.tail.writer_names", eio)
            with pytest.raises(OSError, match="for once"):
                fold.update()
    assert [r.kind for r in fold.update()] == ["epoch"] and fold.tail is not tail
    again = fold_of(log)
    assert fold.groups == again.groups and list(again.groups) == ["train-1", "train-2"]
    assert fold.last_planned == 1 == again.last_planned and fold.settled == again.settled
    log.control.put("plan", rows[1:2], make.plan_header(2))
    assert [r.kind for r in fold.update()] == ["plan"] and list(fold.groups) == ["train-2"]


def test_an_update_that_failed_on_damage_is_made_up_for(log: Log, w: Writer) -> None:
    w.append("prompts", make.prompt(0, n=1))
    make.append_rollout(w, "train-0/0")
    w.append("prompts", make.prompt(1, n=1))
    w.flush()
    last = make.data_commits(log.path, "prompts")[-1]
    good = last.read_bytes()
    make.flip(last, 300)
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    with pytest.raises(LogCorrupt):
        fold.update()
    last.write_bytes(good)
    assert [r.kind for r in fold.update()] == ["epoch", "policy"]
    assert fold.groups.keys() == {"train-0", "train-1"} == fold_of(log).groups.keys()
    assert [g.group_id for g in make.closed_groups(fold)] == ["train-0"]
