"""Groups to plans: backpressure, membership, lag, reasons for drops."""

from pathlib import Path
from typing import Any

import factories as make
import pytest

from molt.config import Config, load
from molt.planning import Drop, groups_to_issue, oldest_version, plan_group
from molt.store import Log, Writer
from molt.store.fold import COLUMNS, STREAMS, Fold

DEMO = Path(__file__).parents[2] / "molt" / "recipes" / "demo.toml"


def config(*overrides: str) -> Config:
    return load(DEMO, list(overrides))


def planned(log: Log, step: int = 1, conf: Config | None = None) -> Any:
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    fold.update()
    (group,) = make.closed_groups(fold)
    return plan_group(fold, group, step, conf or config())


@pytest.mark.parametrize(
    ("max_lag", "planned_steps", "version", "unsettled", "expected"),
    [
        (0, 0, 0, 0, 8),  # strictly on-policy: one batch, then nothing until the refit
        (0, 0, 0, 8, 0),
        (0, 1, 0, 0, 0),  # step 1 is training, version 0 still samples
        (0, 1, 1, 0, 8),
        (1, 0, 0, 0, 16),
        (1, 1, 0, 8, 0),  # while step 1 trains, one batch more may be in flight
        (1, 1, 0, 0, 8),
        (1, 1, 1, 8, 8),
        (1, 24, 24, 0, 8),  # the last step needs no more than one batch
        (1, 25, 25, 0, 0),
    ],
)
def test_backpressure(
    max_lag: int, planned_steps: int, version: int, unsettled: int, expected: int
) -> None:
    n = groups_to_issue(
        planned=planned_steps,
        version=version,
        unsettled=unsettled,
        config=config(f"algo.max_lag={max_lag}"),
    )
    assert n == expected


def test_a_group_becomes_one_row_per_rollout(log: Log, w: Writer) -> None:
    w.append("prompts", make.prompt(0, n=2))
    refs = [make.append_rollout(w, f"train-0/{i}", value=float(i)) for i in range(2)]
    rows = planned(log)
    assert [r.advantage for r in rows] == [-0.5, 0.5]
    assert [r.branches[0].refs[0] for r in rows] == [r[0] for r in refs]
    assert all(r.in_baseline and r.lag_max == 0 and r.decision == "train" for r in rows)
    assert all(len(r.reward_refs) == 1 for r in rows)


def test_failed_and_unscorable_rollouts_are_not_in_the_baseline(log: Log, w: Writer) -> None:
    w.append("prompts", make.prompt(0, n=4))
    make.append_rollout(w, "train-0/0", value=1.0)
    make.append_rollout(w, "train-0/1", value=0.0)
    make.append_rollout(w, "train-0/2", value=None)
    w.append("rollouts", make.rollout("train-0/3", status="failed", reason="agent: boom"))
    w.flush()
    rows = planned(log)
    assert [r.in_baseline for r in rows] == [True, True, False, False]
    assert [r.advantage for r in rows] == [0.5, -0.5, 0.0, 0.0]
    assert [r.decision for r in rows] == ["train", "train", "baseline_only", "baseline_only"]
    assert rows[3].branches == ()


def test_p14_a_rollout_without_sampled_tokens_counts_in_its_group(log: Log, w: Writer) -> None:
    case = make.load_case("P14")
    given, expected = case["given"], case["expected"]
    w.append("prompts", make.prompt(0, n=2))
    for i, completion in enumerate(given["completions"]):
        ids = given["prompt"] + completion
        row = make.segment(
            rollout_id=f"train-0/{i}", ids=ids, sampled=[0, 0] + [1] * len(completion)
        )
        w.append("segments", row)
        w.append("rewards", make.reward(f"train-0/{i}", given["rewards"][i] + i))
        w.append("rollouts", make.rollout(f"train-0/{i}", digests=[row["digest"]]))
    w.flush()
    rows = planned(log)
    assert sum(r.decision == "train" for r in rows) == expected["training_rows"]
    assert sum(r.in_baseline for r in rows) == expected["rows_in_group_stats"]
    assert log.sql("select count(*) from rollouts").fetchall() == [(expected["events_in_log"],)]


def test_p18_branches_do_not_weigh_in_the_baseline(log: Log, w: Writer) -> None:
    case = make.load_case("P18")
    rollouts, expected = case["given"]["rollouts"], case["expected"]
    w.append("prompts", make.prompt(0, n=len(rollouts)))
    for i, r in enumerate(rollouts):
        rows = [
            make.segment(rollout_id=f"train-0/{i}", segment=k, ids=[k, i, 7], sampled=[0, 1, 1])
            for k in range(r["rows"])
        ]  # several roots: each is a branch of its own
        for row in rows:
            w.append("segments", row)
        w.append("rewards", make.reward(f"train-0/{i}", r["reward"]))
        w.append("rollouts", make.rollout(f"train-0/{i}", digests=[x["digest"] for x in rows]))
    w.flush()
    rows = planned(log)
    per_row = [row.advantage for row in rows for _ in row.branches]
    assert per_row == expected["row_advantages"]
    assert rows[0].reward - rows[0].advantage == expected["baseline"]


def test_p15_equal_groups_are_dropped_with_a_reason_when_asked(log: Log, w: Writer) -> None:
    group = make.load_case("P15")["given"]["groups"][1]
    w.append("prompts", make.prompt(0, n=len(group)))
    for i, value in enumerate(group):
        make.append_rollout(w, f"train-0/{i}", value=value)
    assert [r.advantage for r in planned(log)] == [0.0, 0.0, 0.0]
    dropped = planned(log, conf=config("algo.drop_equal=true"))
    assert dropped == Drop(group_id="train-0", rollout_id=None, reason="equal rewards: 0.3")


def test_a_group_without_any_reward_is_dropped_with_its_commonest_reason(
    log: Log, w: Writer
) -> None:
    w.append("prompts", make.prompt(0, n=1))
    w.append("rollouts", make.rollout("train-0/0", status="failed", reason="agent: boom"))
    w.flush()
    assert planned(log).reason == "no reward: agent: boom"


def test_a_group_over_the_lag_limit_is_dropped(log: Log, w: Writer) -> None:
    w.append("prompts", make.prompt(0, n=1))
    make.append_rollout(w, "train-0/0")
    assert planned(log, step=2)[0].lag_max == 1
    assert planned(log, step=3)[0].lag_max == 2, "wait tolerates twice the limit"
    assert planned(log, step=4).reason == "lag"
    assert planned(log, step=3, conf=config("algo.lag=drop")).reason == "lag"
    assert planned(log, step=3, conf=config("algo.lag=mask"))[0].decision == "mask"
    assert planned(log, step=9, conf=config("algo.lag=keep"))[0].decision == "train"


def test_reward_weights_and_turn_rewards(log: Log, w: Writer) -> None:
    w.append("prompts", make.prompt(0, n=1))
    w.append("rewards", make.reward(value=1.0, name="format"))
    w.append("rewards", make.reward(value=3.0, name="turn", segment=0))
    make.append_rollout(w, "train-0/0", value=2.0)
    conf = config("reward.weights={format=0.5}")
    assert planned(log, conf=conf)[0].reward == 2.5
    conf = config("reward.weights={format=0.5}", "reward.sum_turns=true")
    assert planned(log, conf=conf)[0].reward == 5.5


def test_a_rollout_whose_chain_digest_is_wrong_is_excluded(log: Log, w: Writer) -> None:
    w.append("prompts", make.prompt(0, n=2))
    make.append_rollout(w, "train-0/0")
    row = make.segment(rollout_id="train-0/1")
    w.append("segments", row)
    w.append("rewards", make.reward("train-0/1"))
    w.append("rollouts", make.rollout("train-0/1", digests=[b"y" * 32]))
    w.flush()
    assert [r.in_baseline for r in planned(log)] == [True, False]


def test_a_pending_rollout_closes_its_group_with_its_first_reward(log: Log, w: Writer) -> None:
    """Then it is in the baseline; an aborted one never is, whatever its rewards say."""
    w.append("prompts", make.prompt(0, n=3))
    make.append_rollout(w, "train-0/0", value=0.0)
    row = make.segment(rollout_id="train-0/1")
    w.append("segments", row)
    digests = [row["digest"]]
    w.append("rollouts", make.rollout("train-0/1", status="pending", digests=digests))
    w.append("rewards", make.reward("train-0/2", 9.0))
    w.append("rollouts", make.rollout("train-0/2", status="aborted", reason="stopped"))
    w.flush()
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    fold.update()
    assert make.closed_groups(fold) == []
    w.append("rewards", make.reward("train-0/1", 1.0))
    w.flush()
    rows = planned(log)
    assert [r.in_baseline for r in rows] == [True, True, False]
    assert [r.advantage for r in rows] == [-0.5, 0.5, 0.0]
    assert rows[2].decision == "baseline_only"


def test_masked_rollouts_stay_in_the_baseline(log: Log, w: Writer) -> None:
    w.append("prompts", make.prompt(0, n=2))
    make.append_rollout(w, "train-0/0", value=0.0)
    make.append_rollout(w, "train-0/1", value=1.0)
    rows = planned(log, step=4, conf=config("algo.lag=mask"))
    assert [(r.decision, r.advantage, r.lag_max) for r in rows] == [
        ("mask", -0.5, 3),
        ("mask", 0.5, 3),
    ]


@pytest.mark.parametrize("what", ["segments", "rewards", "parent"])
def test_a_contradicted_rollout_is_excluded_and_the_run_goes_on(log: Log, what: str) -> None:
    """Before its outcome, or without the parent of what the outcome names."""
    with log.writer(linger_s=60) as a, log.writer(linger_s=60) as b:
        a.append("prompts", make.prompt(0, n=3))
        for i in range(2):
            make.append_rollout(a, f"train-0/{i}", value=float(i))
        child = make.segment(rollout_id="train-0/2", segment=1, parent=0, keep=3)
        if what == "segments":
            a.append("segments", make.segment(rollout_id="train-0/2"))
            b.append("segments", make.segment(rollout_id="train-0/2", ids=[7, 8, 9]))
            b.append("segments", {**child, "segment": 3, "parent": 2})
        elif what == "rewards":
            a.append("rewards", make.reward("train-0/2", 1.0))
            b.append("rewards", make.reward("train-0/2", 0.0))
        else:
            a.append("segments", child)
            a.append("rewards", make.reward("train-0/2", 1.0))
            a.append("rollouts", make.rollout("train-0/2", digests=[child["digest"]]))
    rows = planned(log)
    assert [(r.in_baseline, r.decision) for r in rows] == [
        (True, "train"),
        (True, "train"),
        (False, "baseline_only"),
    ]
    assert [r.advantage for r in rows] == [-0.5, 0.5, 0.0]
    log.control.put("plan", rows, make.plan_header(1))


def test_a_group_of_conflicts_is_dropped_with_that_reason(log: Log) -> None:
    with log.writer(linger_s=60) as a, log.writer(linger_s=60) as b:
        a.append("prompts", make.prompt(0, n=1))
        for w, ids in ((a, [1, 2]), (b, [1, 3])):
            w.append("segments", make.segment(ids=ids))
    assert planned(log).reason == "no reward: conflict"


def test_a_dropped_rollout_is_in_the_plan_and_not_in_the_baseline(log: Log, w: Writer) -> None:
    """Nothing of it counts, its lag neither."""
    w.append("prompts", make.prompt(0, n=4))
    for i, value in ((0, 1.0), (1, 0.0), (2, 9.0)):
        log.control.put("policy", [make.policy(1, 5)])
        make.append_rollout(w, f"train-0/{i}", value=value, version=0 if i == 2 else 5)
    rows = [make.drop_row("train-0", "bad tool", f"train-0/{i}") for i in (2, 3)]
    log.control.put("drop", rows, {})
    found = planned(log, step=6)
    assert [r.in_baseline for r in found] == [True, True, False, False]
    assert [r.advantage for r in found] == [0.5, -0.5, 0.0, 0.0]
    assert [r.decision for r in found] == ["train", "train", "baseline_only", "baseline_only"]
    assert [(r.branches, r.lag_max) for r in found[2:]] == [((), None)] * 2
    more = [make.drop_row("train-0", "bad tool", f"train-0/{i}") for i in (0, 1)]
    log.control.put("drop", more, {})
    assert planned(log, step=6).reason == "no reward: dropped: bad tool"


def test_the_oldest_version_is_that_of_copied_tokens_too(log: Log, w: Writer) -> None:
    """Of a finished rollout its own attempt's, else the newest one's that is in the lineage."""
    for version in (2, 3, 4):
        log.control.put("policy", [make.policy(1, version)])
    w.append("prompts", make.prompt(0, n=3))
    for i, attempt, version in ((0, 0, 2), (0, 1, 3), (1, 0, 0), (2, 0, 3), (2, 1, 9)):
        row = make.segment(rollout_id=f"train-0/{i}", attempt=attempt, version=version)
        w.append("segments", row)
    make.append_rollout(w, "train-0/1", attempt=1, version=4)
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    fold.update()
    assert oldest_version(fold, fold.groups["train-0"], 7) == 3
    w.append("segments", make.segment(rollout_id="train-0/0", attempt=2, version=0))
    w.flush()
    fold.update()
    assert oldest_version(fold, fold.groups["train-0"], 7) == 0
    digests = [make.segment()["digest"]]
    w.append("rollouts", make.rollout(attempt=2, status="pending", digests=digests))
    w.flush()
    fold.update()
    assert oldest_version(fold, fold.groups["train-0"], 7) == 3, "0 waits for its reward alone"


@pytest.mark.parametrize("values", [[1.7e308, 1.7e308], [1e39], [-1e39], [1e38, 1e38]])
def test_a_reward_too_large_for_the_trainer_cannot_be_scored(
    log: Log, w: Writer, values: list[float]
) -> None:
    w.append("prompts", make.prompt(0, n=3))
    for i, value in enumerate([1.0, 0.0, *values[:1]]):
        if i == 2 and len(values) > 1:
            w.append("rewards", make.reward("train-0/2", values[1], name="second"))
        make.append_rollout(w, f"train-0/{i}", value=value)
    assert [r.advantage for r in planned(log)] == [0.5, -0.5, 0.0]
    assert planned(log)[2].reward is None


def test_a_part_of_weight_0_need_not_be_scored(log: Log, w: Writer) -> None:
    w.append("prompts", make.prompt(0, n=1))
    w.append("rewards", make.reward(value=None, name="judge"))
    make.append_rollout(w, "train-0/0", value=2.0)
    (row,) = planned(log, conf=config("reward.weights={judge=0.0}"))
    assert row.reward == 2.0 and len(row.reward_refs) == 1
    dropped = planned(log)
    assert dropped.reason == "no reward: a part is missing, null or above 1e+38"
