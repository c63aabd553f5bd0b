"""SQL says what the Python reader says, and refuses where the reader refuses."""

from pathlib import Path
from types import SimpleNamespace

import factories as make
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from test_branches import trees

from molt.schemas.columns import to_rows
from molt.schemas.errors import LogCorrupt
from molt.schemas.streams import STREAMS, routing_metadata
from molt.store import Log
from molt.store.branches import branches
from molt.store.reader import read_commit, writer_files, writer_names
from molt.store.sql import connect, run_sql

VIEWS = {
    "epochs": "epoch parent_epoch cut at config",
    "plans": "step data_pass group_id rollout_id attempt n_branches reward in_baseline advantage "
    "lag_max decision",
    "drops": "group_id rollout_id reason",
    "steps": "step epoch updates loss grad_norm n_tokens state_digest metrics",
    "policies": "epoch version weights_digest seconds kv recompute_tokens probe_gap",
    "checkpoints": "epoch step path bytes",
    "branches": "rollout_id attempt branch tip n_tokens n_owned n_context",
    "tokens": "rollout_id attempt segment pos token_id sampled train logprob version_epoch version",
    "groups": "group_id ordinal purpose n n_done settled step reason",
    "lag": "step rollout_id lag n_tokens",
}


def rows(log: Log, query: str, epoch=None) -> list[tuple]:
    return [tuple(r) for r in run_sql([log], query, epoch)[1]]


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_begins_with_the_columns_of_the_contract(tiny: Log, view: str) -> None:
    names, found = run_sql([tiny], f"select * from {view}")
    expected = VIEWS[view].split()
    assert names[: len(expected)] == expected and names[-1] == "run_id"
    assert found


@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_has_its_own_columns_and_row_addresses(tiny: Log, stream: str) -> None:
    names, _ = run_sql([tiny], f"select * from {stream}", "all")
    own = STREAMS[stream].names
    assert names[: len(own)] == own
    assert names[-5:] == ["writer", "seq", "row", "run_id", "abandoned"]


def test_the_first_queries_of_the_readme(tiny: Log) -> None:
    assert rows(tiny, "select step, reward, lag_max from plans order by all") == [
        (1, 0.0, 0),
        (1, 1.0, 0),
        (2, 1.0, 0),
        (2, 1.0, 0),
    ]
    assert rows(tiny, "select epoch, version, weights_digest from policies") == [
        (1, 0, "0000000100000000"),
        (1, 1, "0000000100000001"),
        (2, 1, "0000000200000001"),
        (2, 2, "0000000200000002"),
    ]
    assert rows(tiny, "select metrics->>'$.reward_mean' from steps where step = 1") == [("0.5",)]
    assert tiny.sql("select count(*), count(distinct rollout_id) from segments").fetchall() == [
        (7, 7)
    ]


def test_groups_are_settled_by_a_plan_or_a_drop(tiny: Log) -> None:
    query = (
        "select group_id, n, n_done, settled, step, reason from groups order by purpose, ordinal"
    )
    assert rows(tiny, query) == [
        ("eval-0", 1, 1, False, None, None),
        ("train-0", 2, 2, True, 1, None),
        ("train-1", 1, 1, True, None, "lag"),
        ("train-2", 1, 0, False, None, None),
        ("train-3", 1, 1, True, 2, None),
        ("train-4", 1, 1, True, 2, None),
    ]


def test_a_pending_rollout_is_done_with_its_first_reward(log: Log, w) -> None:
    w.append("prompts", make.prompt(0, n=1))
    w.append("rollouts", make.rollout(status="pending"))
    w.flush()
    assert rows(log, "select n_done, settled from groups") == [(0, False)]
    w.append("rewards", make.reward())
    w.flush()
    assert rows(log, "select n_done from groups") == [(1,)]


def test_a_rollouts_drop_does_not_settle_its_group(log: Log, w) -> None:
    w.append("prompts", make.prompt(0))
    w.flush()
    log.control.put("drop", [make.drop_row("train-0", "conflict", "train-0/1")], {})
    assert rows(log, "select settled from groups") == [(False,)]


def test_an_abandoned_future_is_hidden_and_can_be_asked_for(tiny: Log) -> None:
    query = "select attempt from {} where rollout_id = 'train-4/0' order by all"
    for view in ("segments", "rollouts", "rewards", "branches"):
        assert rows(tiny, query.format(view)) == [(1,)], view
        assert rows(tiny, query.format(view), "all") == [(0,), (1,)], view
    abandoned = "select attempt from {} where abandoned"
    assert rows(tiny, abandoned.format("segments"), "all") == [(0,)]
    assert rows(tiny, "select distinct attempt from tokens where abandoned", "all") == [(0,)]
    steps = "select epoch, step from steps order by all"
    assert rows(tiny, steps) == [(1, 1), (2, 2)]
    assert rows(tiny, steps, "all") == [(1, 1), (1, 2), (2, 2)]
    assert rows(tiny, steps, 1) == [(1, 1), (1, 2)]
    assert rows(tiny, query.format("segments"), 1) == [(0,)]
    assert rows(tiny, "select count(*) from prompts where group_id = 'train-4'") == [(2,)]


def test_rows_behind_their_writers_end_are_invisible_for_ever(tiny: Log) -> None:
    for epoch in (None, 1, "all"):
        assert rows(tiny, "select 1 from segments where rollout_id = 'train-5/0'", epoch) == []


def test_logprobs_are_null_where_nothing_was_sampled(log: Log, w) -> None:
    w.append("segments", make.segment(ids=[7, 8, 9], sampled=[0, 1, 1], logprobs=[None, 0.0, -2.0]))
    w.flush()
    assert rows(log, "select logprobs, n_tokens, n_sampled from segments") == [
        ([None, 0.0, -2.0], 3, 2)
    ]
    assert rows(log, "select n_tokens from segments") == [(3,)]


def test_tokens_name_the_version_that_sampled_them(log: Log, w) -> None:
    w.append(
        "segments",
        make.segment(
            ids=[7, 8, 9, 10],
            sampled=[0, 1, 1, 1],
            train=[0, 1, 0, 1],
            logprobs=[None, -1.0, -2.0, -3.0],
            runs=[(1, 0, 1), (1, 1, 2)],
        ),
    )
    w.append("segments", make.segment(rollout_id="train-0/1", ids=[3], version=2))
    log.control.put("policy", [make.policy(1, 1)])
    log.control.put("policy", [make.policy(1, 2)])
    w.flush()
    names = "pos, token_id, sampled, train, logprob, version_epoch, version"
    assert rows(log, f"select {names} from tokens") == [
        (0, 7, 0, 0, None, None, None),
        (1, 8, 1, 1, -1.0, 1, 0),
        (2, 9, 1, 0, -2.0, 1, 1),
        (3, 10, 1, 1, -3.0, 1, 1),
        (0, 3, 1, 1, -0.25, 1, 2),
    ]


def test_sql_equals_the_reader_row_by_row(tiny: Log) -> None:
    found = {}
    for writer in writer_names(tiny.path):
        for file in writer_files(tiny.path, writer):
            if file.stream == "segments":
                for i, row in enumerate(to_rows(read_commit(file).table)):
                    found[writer, file.seq, i] = row
    query = "select writer, seq, row, token_ids, sampled, digest, parent from segments"
    listed = rows(tiny, query, "all")
    assert len(listed) == len(found) - 1  # train-5 is behind its writer's end
    for writer, seq, row, ids, sampled, digest, parent in listed:
        own = found[writer, seq, row]
        assert (ids, sampled) == (own["token_ids"].tolist(), own["sampled"].tolist())
        assert (digest, parent) == (own["digest"].hex(), own["parent"])


@pytest.mark.parametrize(
    "where",
    [
        "n_sampled = 3",
        "rollout_id = 'train-0/1'",
        "parent is null and segment = 0",
        "writer like '1-%' and seq > 3",
        "len(token_ids) = 5 and row = 0",
    ],
)
def test_a_filter_that_is_pushed_down_equals_a_full_scan(tiny: Log, where: str) -> None:
    full = connect([tiny])
    full.execute("create temp table copy as select * from segments")
    expected = full.execute(f"select rollout_id, attempt from copy where {where} order by all")
    wanted = expected.fetchall()
    assert wanted
    assert (
        rows(tiny, f"select rollout_id, attempt from segments where {where} order by all") == wanted
    )


def test_equal_rows_of_two_writers_count_once(log: Log) -> None:
    row = make.segment()
    for _ in range(2):
        with log.writer() as w:
            make.append_rollout(w, "train-0/0")
            w.append("prompts", make.prompt(0))
            w.append("segments", make.segment(rollout_id="train-0/1", **{"ids": row["token_ids"]}))
    for view, n in (("segments", 2), ("rollouts", 1), ("rewards", 1), ("prompts", 1)):
        for epoch in (None, "all"):
            assert rows(log, f"select count(*) from {view}", epoch) == [(n,)], view


def test_contradicting_writers_exclude_the_rollout(log: Log) -> None:
    for token in (3, 4):
        with log.writer() as w:
            w.append("segments", make.segment(ids=[1, 2, token]))
            w.append("rewards", make.reward())
            w.append("segments", make.segment(rollout_id="train-0/1"))
    for view in ("segments", "rewards", "branches", "tokens"):
        query = f"select count(*) from {view} where rollout_id = 'train-0/0'"
        assert rows(log, query) == [(0,)], view
    assert rows(log, "select count(*) from segments where rollout_id = 'train-0/1'") == [(1,)]
    assert rows(log, "select abandoned from segments where rollout_id = 'train-0/0'", "all") == [
        (True,),
        (True,),
    ]


def test_contradicting_outcomes_exclude_the_rollout(log: Log) -> None:
    for status in ("ok", "truncated"):
        with log.writer() as w:
            w.append("rollouts", make.rollout(status=status))
    assert rows(log, "select count(*) from rollouts") == [(0,)]


@given(tree=trees())
@settings(max_examples=25)
def test_branches_are_those_of_the_store(
    tmp_path_factory, tree: dict[int, SimpleNamespace]
) -> None:
    log = Log.create(tmp_path_factory.mktemp("log"))
    rng = np.random.default_rng(len(tree))
    digests, sampled = {}, {}
    with log.writer(linger_s=60) as w:
        for i, s in tree.items():
            sampled[i] = rng.integers(0, 2, s.n_tokens)
            row = make.segment(
                segment=i,
                parent=s.parent,
                keep=s.keep,
                parent_digest=digests.get(s.parent, bytes(32)),
                ids=list(range(s.n_tokens)),
                sampled=sampled[i].tolist(),
            )
            digests[i] = row["digest"]
            w.append("segments", row)
    expected = []
    for number, branch in enumerate(branches(tree)):
        owned = sum(int(sampled[p.segment][p.owned_from : p.end].sum()) for p in branch.pieces)
        counts = (branch.n_tokens, owned, branch.n_tokens - owned)
        expected.append(("train-0/0", 0, number, branch.tip, *counts))
    query = "select * exclude (run_id) from branches order by branch"
    assert rows(log, query) == expected
    total = sum(int(x.sum()) for x in sampled.values())
    assert rows(log, "select sum(n_owned) from branches") == [(total,)]


def test_lag_is_recomputed_from_the_planned_rows(log: Log, w) -> None:
    for version in range(1, 5):
        log.control.put("policy", [make.policy(1, version)])
    root = make.segment(ids=[1, 2, 3, 4], sampled=[0, 1, 1, 1], runs=[(1, 2, 1), (1, 3, 2)])
    left = make.segment(
        segment=1, parent=0, keep=4, parent_digest=root["digest"], ids=[5, 6], version=4
    )
    right = make.segment(
        segment=2,
        parent=0,
        keep=2,
        parent_digest=root["digest"],
        ids=[7, 8],
        train=[1, 0],
        version=4,
    )
    refs = [w.append("segments", row) for row in (root, left, right)]
    w.flush()
    a, b, c = (make.as_ref(t.result()) for t in refs)
    both = [{"tip": 1, "refs": [a, b]}, {"tip": 2, "refs": [a, c]}]
    only_right = [{"tip": 2, "refs": [a, c]}]
    for step, planned in ((5, both), (6, only_right)):
        row = make.plan_row("train-0/0", []) | {"branches": planned}
        log.control.put("plan", [row], make.plan_header(step))
    assert rows(log, "select step, lag, n_tokens from lag order by all") == [
        (5, 0, 3),
        (5, 1, 2),
        (5, 2, 1),
        (6, 1, 1),
        (6, 3, 1),
    ]


def test_a_plan_may_name_rows_of_another_log(tmp_path: Path, tiny: Log) -> None:
    source = rows(tiny, "select writer, seq, row from segments where rollout_id = 'train-0/0'")[0]
    log = Log.create(tmp_path / "offline", run_id="offline")
    make.open_epoch(log, sources=[{"log": 1, "run_id": "tiny", "path": str(tiny.path)}])
    ref = {"log": 1, "writer": source[0], "seq": source[1], "row": source[2]}
    row = make.plan_row("train-0/0", []) | {"branches": [{"tip": 0, "refs": [ref]}]}
    log.control.put("plan", [row], make.plan_header(3))
    assert rows(log, "select step, lag, n_tokens from lag") == [(3, 2, 3)]
    ref["log"] = 2
    row = make.plan_row("train-0/0", []) | {"branches": [{"tip": 0, "refs": [ref]}]}
    log.control.put("plan", [row], make.plan_header(4))
    with pytest.raises(LogCorrupt, match="names log 2"):
        rows(log, "select * from lag")


def test_several_logs_are_told_apart_by_run_id(tiny: Log, log: Log, w) -> None:
    make.append_rollout(w, "train-0/0")
    query = "select run_id, count(*) from segments group by all order by all"
    assert [tuple(r) for r in run_sql([tiny, log], query)[1]] == [("run", 1), ("tiny", 7)]
    query = "select count(*) from groups where run_id = 'tiny' and n_done = n"
    assert run_sql([tiny, log], query)[1] == [[5]]


def test_a_users_stream_is_a_view_and_newer_columns_read_as_null(log: Log) -> None:
    first = pa.schema([pa.field("mood", pa.string(), nullable=False)])
    for i in range(2):
        schema = first.append(pa.field("score", pa.float64())) if i else first
        row = {"mood": f"m{i}"} | ({"score": 0.5} if i else {})
        with log.writer(user_schemas={"x_mood": schema}) as w:
            w.append("x_mood", row)
    assert rows(log, "select mood, score from x_mood order by mood") == [("m0", None), ("m1", 0.5)]


def test_routing_is_a_view(log: Log) -> None:
    with log.writer(routing=routing_metadata(layers=2, top_k=2, n_experts=8)) as w:
        w.append("routing", make.routing(n=2))
        w.append("routing", make.routing(start=2, n=1))
    query = "select start, n, octet_length(experts), len(row_xxh3) from routing order by start"
    assert rows(log, query) == [(0, 2, 8, 2), (2, 1, 4, 1)]
