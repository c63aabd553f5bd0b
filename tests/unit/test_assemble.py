"""Plan rows to training sequences: owned tokens, lag rules, damaged or foreign rows."""

from typing import Any

import factories as make
import numpy as np
import pytest

from molt.replay.assemble import assemble
from molt.schemas.errors import LogCorrupt, SegmentRejected
from molt.store import Log, Writer
from molt.store.branches import token_lags
from molt.train.batch import make_batch


def plan_of(log: Log, rows: list[dict[str, Any]], step: int = 1, **header: Any) -> Any:
    n = log.control.put("plan", rows, make.plan_header(step, **header))
    return log.records(n)[0]


def append(w: Writer, *rows: dict[str, Any]) -> list[Any]:
    tickets = [w.append("segments", row) for row in rows]
    w.flush()
    return [t.result() for t in tickets]


def test_one_turn_comes_back_exactly(log: Log, w: Writer) -> None:
    row = make.segment(ids=[5, 6, 7, 8], sampled=[0, 0, 1, 1], logprobs=[None, None, -0.5, -1.5])
    refs = append(w, row)
    (s,) = assemble(log, plan_of(log, [make.plan_row("train-0/0", refs, advantage=0.25)]))
    assert s.token_ids.tolist() == [5, 6, 7, 8]
    assert s.mask.tolist() == [False, False, True, True]
    assert s.logprobs.tolist() == [0.0, 0.0, -0.5, -1.5]
    assert (s.advantage, s.temperature, s.tip) == (0.25, 1.0, 0)


def test_what_was_sampled_over_kept_kv_is_marked_up_to_the_batch(log: Log, w: Writer) -> None:
    root = make.segment(ids=[1, 2, 3, 4], sampled=[0, 0, 1, 1], finish_reason="partial")
    child = make.segment(
        segment=1, parent=0, keep=4, parent_digest=root["digest"], ids=[9, 8], kv="kept"
    )
    refs = append(w, root, child)
    row = make.plan_row("train-0/0", refs)
    row["branches"] = [{"tip": 1, "refs": [make.as_ref(r) for r in refs]}]
    (s,) = assemble(log, plan_of(log, [row]))
    assert s.kept_kv == ((4, 6),)
    assert make_batch([s]).kept_kv_N.tolist() == [False, False, True, True]


def test_a_fork_owns_each_sampled_token_once(log: Log, w: Writer) -> None:
    root = make.segment(ids=[1, 2, 3, 4, 5], sampled=[0, 0, 1, 1, 1])
    child = make.segment(
        segment=1, parent=0, keep=4, parent_digest=root["digest"], ids=[9, 8], sampled=[0, 1]
    )
    refs = append(w, root, child)
    row = make.plan_row("train-0/0", refs)
    row["branches"] = [
        {"tip": 0, "refs": [make.as_ref(refs[0])]},
        {"tip": 1, "refs": [make.as_ref(r) for r in refs]},
    ]
    first, second = assemble(log, plan_of(log, [row]))
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert first.mask.tolist() == [False, False, True, True, True]
    assert second.token_ids.tolist() == [1, 2, 3, 4, 9, 8]
    assert second.mask.tolist() == [False] * 5 + [True]
    assert first.mask.sum() + second.mask.sum() == 4  # every sampled token once


def test_p24_a_resumed_rollout_grows_in_all_columns(log: Log, w: Writer) -> None:
    case = make.load_case("P24")
    first, resume, expected = case["given"]["first"], case["given"]["resume"], case["expected"]
    root = make.segment(ids=first["ids"], sampled=first["mask"], version=first["version"])
    child = make.segment(
        segment=1,
        parent=0,
        keep=3,
        parent_digest=root["digest"],
        ids=resume["ids"],
        sampled=resume["mask"],
        version=resume["version"],
    )
    refs = append(w, root, child)
    row = make.plan_row("train-0/0", refs, tip=1, decision="mask", lag_max=1)
    (s,) = assemble(log, plan_of(log, [row], step=6, max_lag=0))
    assert s.token_ids.tolist() == expected["ids"]
    assert s.mask.astype(int).tolist() == expected["mask_in_batch"]
    assert log.row(refs[0])["sampled"].tolist() == expected["mask_in_log"][:3]


def test_p22_lag_of_a_sequence_with_a_refit_inside() -> None:
    case = make.load_case("P22")
    (v0, n0), (v1, n1) = case["expected"]["version_runs"]
    row = make.segment(ids=list(range(case["given"]["tokens"])), runs=[(1, v0, n0), (1, v1, n1)])
    lag = token_lags({**row, "sampled": np.array(row["sampled"])}, step=v1 + 1)
    assert (lag == 0).sum() == case["expected"]["tokens_trainable_if_max_lag_0_at_v5"]
    assert lag[:n0].tolist() == [1] * n0


def test_baseline_only_rows_give_no_sequence(log: Log, w: Writer) -> None:
    refs = append(w, make.segment())
    row = make.plan_row("train-0/0", refs, decision="baseline_only")
    assert assemble(log, plan_of(log, [row])) == []


def test_a_plan_that_names_another_rollouts_row_is_refused(log: Log, w: Writer) -> None:
    refs = append(w, make.segment(rollout_id="train-1/0"))
    with pytest.raises(LogCorrupt, match="train-0/0 holds train-1/0"):
        assemble(log, plan_of(log, [make.plan_row("train-0/0", refs)]))


def test_p19_kinds_of_logprobs_are_not_mixed(log: Log, w: Writer) -> None:
    a = append(w, make.segment(rollout_id="train-0/0"))
    b = append(w, make.segment(rollout_id="train-0/1", logprobs_kind="raw"))
    rows = [make.plan_row("train-0/0", a), make.plan_row("train-0/1", b)]
    with pytest.raises(LogCorrupt, match="train-0/0 .*processed.*train-0/1 .*raw"):
        assemble(log, plan_of(log, rows))


def test_a_child_with_a_wrong_digest_is_refused_after_the_read(log: Log) -> None:
    root = make.segment()
    child = make.segment(segment=1, parent=0, keep=3, parent_digest=b"x" * 32, ids=[4])
    with log.writer() as a, log.writer() as b:  # another process does not know the parent
        refs = [*append(a, root), *append(b, child)]
    with pytest.raises(SegmentRejected, match="digest"):
        assemble(log, plan_of(log, [make.plan_row("train-0/0", refs, tip=1)]))
