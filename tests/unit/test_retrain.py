"""What an offline run plans: whole groups that SQL chose, once per pass, in a seeded order."""

import datetime
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import factories as make
import numpy as np
import pytest

import molt.recipes
from molt.config import RewardConfig, load
from molt.offline import group_advantages
from molt.planning import finished, reward_of
from molt.replay.lag import POLICIES, decide
from molt.replay.replay import compare
from molt.replay.retrain import n_steps, passes_over
from molt.replay.select import select
from molt.replay.sources import Sources
from molt.schemas.errors import ConfigError, LogCorrupt
from molt.schemas.records import Ref
from molt.store import Log
from molt.store.fold import COLUMNS, STREAMS, Fold
from molt.store.retention import retire

REWARD = {"weights": {"score": 2.0}}


def chosen(log: Log, where: str, **reward: Any) -> dict[str, str]:
    """rollout -> decision."""
    rows = [r for g in select([log], where, reward or REWARD).groups for r in g]
    return {r["rollout_id"]: r["decision"] for r in rows}


def test_a_group_is_taken_whole(honest: Log) -> None:
    """train-2 has rewards 4.0 and 0.0: the one that is left out stays in the baseline."""
    assert chosen(honest, "reward = 4.0 and ordinal = 2") == {
        "train-2/0": "train",
        "train-2/1": "baseline_only",
    }
    assert len(chosen(honest, "true")) == 12
    assert set(chosen(honest, "step = 3")) == {f"train-{k}/{i}" for k in (4, 5) for i in (0, 1)}


def test_rows_are_addressed_and_digested_as_online(honest: Log) -> None:
    online = {r["rollout_id"]: r for p in honest.records() if p.kind == "plan" for r in p.rows}
    found = select([honest], "true", REWARD)
    for row in (row for group in found.groups for row in group):
        other = online[row["rollout_id"]]
        assert row["reward"] == other["reward"]
        assert row["chain_digest"] == other["chain_digest"]
        for side in (row, other):
            for ref in [*side["reward_refs"], *side["branches"][0]["refs"]]:
                ref.pop("log")
        assert row["branches"] == other["branches"]
        assert row["reward_refs"] == other["reward_refs"]


def test_the_newest_revision_and_the_turns_count(log: Log) -> None:
    with log.writer(linger_s=60) as w:
        w.append("prompts", make.prompt(0, n=4))
        for i in range(4):
            make.append_rollout(w, f"train-0/{i}", value=1.0)
        w.append("rewards", make.reward("train-0/0", 5.0, revision=1))
        w.append("rewards", make.reward("train-0/1", 0.5, segment=0, name="turn"))
        w.append("rewards", make.reward("train-0/2", None, name="judge"))
        w.append("rewards", make.reward("train-0/3", None, name="judge"))
        w.append("rewards", make.reward("train-0/3", 0.5, name="judge", revision=1))
    rewards = {r["rollout_id"]: r["reward"] for r in select([log], "true", {}).groups[0]}
    assert rewards == {"train-0/0": 5.0, "train-0/1": 1.0, "train-0/3": 1.5}, "2 has no score"
    (group,) = select([log], "true", {"sum_turns": True, "weights": {"turn": 10.0}}).groups
    assert [r["reward"] for r in group] == [5.0, 6.0, 1.5]
    assert len(group[1]["reward_refs"]) == 2


def test_the_digest_tells_every_choice_apart(honest: Log, tiny: Log) -> None:
    found = [
        select(logs, where, REWARD).digest
        for logs in ([honest], [honest, tiny], [tiny, honest])
        for where in ("true", "reward > 0")
    ]
    assert len(set(found)) == 6
    assert select([honest], "true", REWARD).digest == found[0]
    indices = {
        ref["log"]
        for g in select([honest, tiny], "true", REWARD).groups
        for row in g
        for b in row["branches"]
        for ref in b["refs"]
    }
    assert indices == {1, 2}


def test_a_rollout_that_contradicts_its_outcome_is_left_out(log: Log) -> None:
    with log.writer(linger_s=60) as w:
        w.append("prompts", make.prompt(0, n=3))
        for i in range(2):
            make.append_rollout(w, f"train-0/{i}", value=float(i))
        row = make.segment(rollout_id="train-0/2")
        w.append("segments", row)
        w.append("rewards", make.reward("train-0/2", 1.0))
        w.append("rollouts", make.rollout("train-0/2", digests=[bytes(32)]))
    assert set(chosen(log, "true")) == {"train-0/0", "train-0/1"}


def test_groups_whose_rows_are_retired_are_left_out_by_name(log: Log) -> None:
    """Half a group would have another baseline."""
    writers = [log.writer(linger_s=60) for _ in range(2)]
    for k in range(3):
        writers[0].append("prompts", make.prompt(k, n=2 if k < 2 else 1))
        writers[0].flush()
    writers[1].append("segments", make.segment(rollout_id="train-2/0", finish_reason="partial"))
    rows = []
    for k in range(2):
        for i, w in enumerate(writers if k == 0 else writers[1:] * 2):
            who = f"train-{k}/{i}"
            rows.append(make.plan_row(who, make.append_rollout(w, who, value=float(i))))
    log.control.put("plan", rows, make.plan_header(1))
    folder = log.path / "checkpoints" / "1-1"
    folder.mkdir()
    marker = {"epoch": 1, "step": 1, "state_digest": "a"}
    (folder / "COMPLETE").write_text(json.dumps(marker))
    more = {"path": "checkpoints/1-1", "bytes": 0, "files": []}
    log.control.put("checkpoint", [{**marker, **more}])
    assert (len(select([log], "true", {}).groups), select([log], "true", {}).left_out) == (2, [])
    retire(log, now=datetime.datetime.now(datetime.UTC), dry_run=False)
    found = select([log], "true", {})
    assert [[r["rollout_id"] for r in g] for g in found.groups] == [["train-1/0", "train-1/1"]]
    assert found.left_out == ["train-0 (retired)"]
    with pytest.raises(ConfigError, match=r"left out: train-0 \(retired\)"):
        select([log], "ordinal = 0", {})


def test_a_pending_outcome_counts_once_it_is_scored(log: Log) -> None:
    """Until there is a final one; another attempt's goes before one that was never scored."""
    with log.writer(linger_s=60) as w:
        w.append("prompts", make.prompt(0, n=4))
        for i in range(4):
            row = make.segment(rollout_id=f"train-0/{i}")
            w.append("segments", row)
            w.append(
                "rollouts",
                make.rollout(
                    f"train-0/{i}", status="pending", n_segments=1, digests=[row["digest"]]
                ),
            )
            if i < 2:
                w.append("rewards", make.reward(f"train-0/{i}", float(i)))
        w.append("rollouts", make.rollout("train-0/1", status="failed", reason="late"))
        make.append_rollout(w, "train-0/3", attempt=1)
    (group,) = select([log], "true", {}).groups
    assert [(r["rollout_id"], r["attempt"]) for r in group] == [("train-0/0", 0), ("train-0/3", 1)]


def test_a_dropped_rollout_is_left_out_and_its_group_is_not(log: Log) -> None:
    with log.writer(linger_s=60) as w:
        w.append("prompts", make.prompt(0, n=3))
        for i in range(3):
            make.append_rollout(w, f"train-0/{i}", value=float(i))
    rows = [make.drop_row("train-0", "bad tool", "train-0/1"), make.drop_row("train-0")]
    log.control.put("drop", rows, {})
    assert set(chosen(log, "true", weights={})) == {"train-0/0", "train-0/2"}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_the_lag_rule_is_that_of_the_loop(log: Log, max_lag: int, policy: str) -> None:
    """Groups trained in step 3 on versions 2, 1 and 0, and one that no step trained."""
    rows = []
    with log.writer(linger_s=60) as w:
        for k in range(4):
            w.append("prompts", make.prompt(k, n=2))
            for i in range(2):
                if k and not i:
                    log.control.put("policy", [make.policy(1, k)])
                version = 2 - k if k < 3 and i else min(2, k)
                refs = make.append_rollout(w, f"train-{k}/{i}", value=float(i), version=version)
                lag = 2 - version
                if k < 3:
                    rows.append(make.plan_row(f"train-{k}/{i}", refs, lag_max=lag))
    log.control.put("plan", rows, make.plan_header(3))
    rule = {f"train-3/{i}": "train" for i in range(2)}
    rule |= {r["rollout_id"]: decide(r["lag_max"], max_lag, policy) for r in rows}
    of = {k: [rule[f"train-{k}/{i}"] for i in range(2)] for k in range(4)}
    out = [k for k, found in of.items() if "drop" in found or "train" not in found]
    found = select([log], "true", {}, max_lag, policy)
    assert found.left_out == [f"train-{k} (lag)" for k in out]
    assert {r["rollout_id"]: r["decision"] == "train" for g in found.groups for r in g} == {
        who: decision == "train" for who, decision in rule.items() if int(who[6]) not in out
    }


def test_what_can_be_scored_is_the_same_as_online(log: Log) -> None:
    """A part of weight 0 need not be scored; a scalar above the limit is none."""
    parts = [[("score", 1.0), ("judge", None)], [("judge", None)], [("score", 1e39)]]
    parts += [[("score", 1.7e308), ("more", 1.7e308)], [("score", 1.7e308), ("more", -1.7e308)]]
    weights = {"judge": 0.0}
    with log.writer(linger_s=60) as w:
        w.append("prompts", make.prompt(0, n=len(parts)))
        for i, named in enumerate(parts):
            row = make.segment(rollout_id=f"train-0/{i}")
            w.append("segments", row)
            for name, value in named:
                w.append("rewards", make.reward(f"train-0/{i}", value, name=name))
            w.append("rollouts", make.rollout(f"train-0/{i}", digests=[row["digest"]]))
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    fold.update()
    conf = RewardConfig(weights=weights)
    online = [reward_of(a, conf) for a in finished(fold, fold.groups["train-0"])]
    assert [reward for reward, _ in online] == [1.0, None, None, None, 0.0]
    (group,) = select([log], "true", {"weights": weights}).groups
    found = {int(r["rollout_id"][-1]): r for r in group}
    assert {i: r["reward"] for i, r in found.items()} == {0: 1.0, 4: 0.0}
    assert [len(found[i]["reward_refs"]) for i in (0, 4)] == [len(online[i][1]) for i in (0, 4)]


def test_wrong_conditions_are_the_users(honest: Log) -> None:
    for where in ("nonsense = 1", "reward >", "reward > 99"):
        with pytest.raises(ConfigError, match="where"):
            select([honest], where, REWARD)


def test_each_group_once_per_pass_in_a_seeded_order() -> None:
    groups = [[{"group_id": f"train-{k}"}] for k in range(7)]
    plan = passes_over(groups, 3, {"seed": 5}, lambda rows: rows)
    assert n_steps(groups, 3, 2) == 6
    taken = [[r["group_id"] for r in plan(step)[1]] for step in range(1, 7)]
    assert [len(t) for t in taken] == [3, 3, 1, 3, 3, 1]
    first, second = sum(taken[:3], []), sum(taken[3:], [])
    assert sorted(first) == sorted(second) == [f"train-{k}" for k in range(7)]
    assert first != second, "another order in every pass"
    assert plan(4)[0] == {"seed": 5, "step": 4, "data_pass": 1}
    assert [r["group_id"] for r in plan(2)[1]] == taken[1], "a function of the step"
    other = passes_over(groups, 3, {"seed": 6}, lambda rows: rows)
    assert [r["group_id"] for r in other(1)[1]] != taken[0]


def test_groups_of_two_logs_with_one_name_have_two_baselines(honest: Log) -> None:
    """Both logs have a train-2, with rewards 4.0 and 0.0 and here twice as much."""
    config = load(Path(molt.recipes.__file__).parent / "demo.toml")
    rows = []
    for found in (select([honest], "ordinal = 2", REWARD), select([honest] * 2, "true", REWARD)):
        rows += [r for g in found.groups for r in g if r["group_id"] == "train-2"]
    (a, b), (c, d) = rows[:2], [{**r, "reward": 2 * r["reward"]} for r in rows[4:]]
    found = group_advantages([a, c, b, d], config)
    assert [r["advantage"] for r in found] == [2.0, 4.0, -2.0, -4.0]


def test_addresses_into_other_logs(honest: Log, tmp_path: Path) -> None:
    log = Log.create(tmp_path / "own")
    path = os.path.relpath(honest.path, log.path)
    listed = [{"log": 1, "run_id": "honest", "path": path}]
    make.open_epoch(log, sources=listed)
    plan = next(r for r in honest.records() if r.kind == "plan")
    ref = {**plan.rows[0]["branches"][0]["refs"][0], "log": 1}
    source = Sources(log, 1)
    assert source.row(Ref(**ref))["rollout_id"] == "train-0/0"
    assert source.stream(Ref(**ref)) == "segments"
    assert source.bytes_read > 0 and len(source.commits) == 1
    with pytest.raises(LogCorrupt, match="log 2, which epoch 1 does not list"):
        source.row(Ref(**{**ref, "log": 2}))
    make.open_epoch(log, sources=[{**listed[0], "run_id": "another"}])
    with pytest.raises(LogCorrupt, match="is run honest; the plans were made from another"):
        Sources(log, 2).row(Ref(**ref))


def outcome(**more: Any) -> Any:
    named = {"state_digest": "a" * 16, "loss": 0.5, "grad_norm": 1.5, "sketch": None, **more}
    return SimpleNamespace(**named)


def sketched(step: int, *values: float, **more: Any) -> dict[str, Any]:
    rows = [{"name": "w", "values": [float(np.linalg.norm(values)), *values]}]
    return make.step_row(1, step, state_digest="a" * 16, sketch=rows, **more)


def test_bits_are_compared_unless_there_is_a_reason() -> None:
    recorded = sketched(2, 3.0, 4.0)
    assert compare(recorded, outcome())["ok"]
    other = outcome(state_digest="b" * 16, sketch={"w": [5.0, 3.001, 4.0]})
    assert not compare(recorded, other)["ok"]
    before = sketched(1, 2.0, 4.0)
    row = compare(recorded, other, "2 ranks were 1", before)
    assert row["ok"] and not row["state_digest"]["equal"]
    assert row["reason"] == "2 ranks were 1"
    assert row["sketch"]["gap"] == pytest.approx(0.001)
    far = outcome(state_digest="b" * 16, sketch={"w": [5.0, 3.2, 4.0]})
    assert not compare(recorded, far, "2 ranks were 1", before)["ok"]
    blind = compare(recorded, outcome(state_digest="b" * 16), "2 ranks were 1", before)
    assert blind["ok"] and "no sketches" in blind["reason"]
    lost = outcome(state_digest="b" * 16, loss=0.6)
    assert not compare(recorded, lost, "2 ranks were 1", before)["ok"]
