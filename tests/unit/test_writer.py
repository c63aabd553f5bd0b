"""The writer: durable before it counts, in order, once."""

import datetime
import decimal
import json
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import factories as make
import numpy as np
import pyarrow as pa
import pytest

from molt.schemas.errors import SegmentRejected, WriterClosed
from molt.schemas.records import RewardRow
from molt.schemas.streams import FLUSH_ORDER, routing_metadata
from molt.store import Log, Writer
from molt.store.compact import compact
from molt.store.reader import BUCKET, commit_path, read_commit, writer_files


def files(log: Log, w: Writer) -> list[tuple[int, str]]:
    return [(f.seq, f.stream) for f in writer_files(log.path, w.name)]


def test_a_ticket_resolves_to_the_rows_address(log: Log, w: Writer) -> None:
    tickets = [w.append("segments", make.segment(rollout_id=f"train-0/{i}")) for i in range(3)]
    assert not any(t.done() for t in tickets) and files(log, w) == []
    w.flush()
    assert [t.result().row for t in tickets] == [0, 1, 2]
    assert [log.row(t.result())["rollout_id"] for t in tickets] == [
        f"train-0/{i}" for i in range(3)
    ]


def test_an_outcome_is_published_at_once_and_after_all_it_names(log: Log, w: Writer) -> None:
    row = make.segment()
    w.append("rewards", make.reward())
    w.append("segments", row)
    w.append("prompts", make.prompt())
    w.append("rollouts", make.rollout(digests=[row["digest"]])).result(timeout=30)
    found = [stream for _, stream in files(log, w)]
    assert found == ["prompts", "segments", "rewards", "rollouts"]
    assert found == [s for s in FLUSH_ORDER if s in found]


def test_a_full_batch_is_flushed_without_waiting(log: Log) -> None:
    with log.writer(linger_s=60, flush_rows=4) as w:
        tickets = [w.append("rewards", make.reward(revision=i)) for i in range(4)]
        assert tickets[-1].result(timeout=30).row == 3


def test_the_linger_flushes_what_is_left(log: Log) -> None:
    with log.writer(linger_s=0.0) as w:
        assert w.append("rewards", make.reward()).result(timeout=30).seq == 0


def test_commits_hold_no_more_rows_than_the_limit(log: Log) -> None:
    with log.writer(linger_s=60, flush_rows=2) as w, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: w.append("rewards", make.reward(revision=i)), range(20)))
        w.flush()
        tables = [read_commit(f).table for f in writer_files(log.path, w.name)]
    assert sum(t.num_rows for t in tables) == 20 and max(t.num_rows for t in tables) <= 2


def test_threads_share_a_writer_without_losing_a_row(log: Log) -> None:
    with log.writer(linger_s=0.001) as w, ThreadPoolExecutor(8) as pool:
        tickets = list(pool.map(lambda i: w.append("rewards", make.reward(revision=i)), range(200)))
        refs = {t.result(timeout=30) for t in tickets}
    assert len(refs) == 200
    assert sorted(log.row(r)["revision"] for r in refs) == list(range(200))
    assert files(log, w) == [(i, s) for i, (_, s) in enumerate(files(log, w))]


def test_sequence_numbers_go_on_in_the_next_bucket(log: Log, w: Writer) -> None:
    w._seq = BUCKET - 1
    refs = []
    for i in range(2):
        ticket = w.append("rewards", make.reward(revision=i))
        w.flush()
        refs.append(ticket.result())
    assert [r.seq for r in refs] == [BUCKET - 1, BUCKET]
    assert commit_path(log.path, w.name, BUCKET, "rewards").parent.name == "000001"
    assert log.row(refs[1])["revision"] == 1


def test_close_ends_the_sequence_and_refuses_more(log: Log) -> None:
    w = log.writer(linger_s=60)
    w.append("rewards", make.reward())
    w.close()
    w.close()
    assert files(log, w) == [(0, "rewards"), (1, "end")]
    for use in (lambda: w.append("rewards", make.reward()), w.flush):
        with pytest.raises(WriterClosed, match="is closed"):
            use()


def _use_after_fork(w: Writer, out: "multiprocessing.connection.Connection") -> None:  # type: ignore[name-defined]
    try:
        w.append("rewards", make.reward())
    except WriterClosed as error:
        out.send(str(error))
    else:
        out.send("accepted")
    os._exit(0)


def test_a_forked_child_may_not_use_its_parents_writer(w: Writer) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_use_after_fork, args=(w, there))
    child.start()
    assert here.poll(30) and "after fork()" in here.recv()
    child.join(30)
    assert child.exitcode == 0


def test_a_child_is_checked_against_its_parent(w: Writer) -> None:
    root = make.segment(ids=[1, 2, 3])
    w.append("segments", root)
    bad = make.segment(segment=1, parent=0, keep=4, parent_digest=root["digest"])
    with pytest.raises(SegmentRejected, match="does not end inside parent 0"):
        w.append("segments", bad)
    with pytest.raises(SegmentRejected, match="digest"):
        w.append("segments", make.segment(segment=1, parent=0, keep=3))
    good = make.segment(segment=1, parent=0, keep=3, parent_digest=root["digest"])
    assert w.append("segments", good) is not None


def test_routing_ends_with_its_chain(log: Log) -> None:
    with log.writer(linger_s=60, routing=routing_metadata(layers=2, top_k=2, n_experts=8)) as w:
        w.append("segments", make.segment(ids=[1, 2, 3]))
        w.append("routing", make.routing(start=1, n=2))
        with pytest.raises(SegmentRejected, match="in a chain of 3 tokens"):
            w.append("routing", make.routing(start=2, n=2))


def test_routing_needs_the_shape_of_the_run(w: Writer) -> None:
    with pytest.raises(SegmentRejected, match="routing_metadata"):
        w.append("routing", make.routing())


def test_records_and_mappings_are_the_same_row(log: Log, w: Writer) -> None:
    record = RewardRow(rollout_id="train-0/0", attempt=0, name="score", value=0.5, source="env")
    ticket = w.append("rewards", record)
    assert w.append("rewards", make.reward(value=0.5)) is ticket
    w.flush()
    assert w.append("rewards", record).result(0) == ticket.result()
    with pytest.raises(SegmentRejected, match="conflicting content"):
        w.append("rewards", make.reward(value=0.25))
    assert log.row(ticket.result())["value"] == 0.5


@pytest.mark.parametrize(
    ("stream", "row", "change"),
    [
        ("prompts", make.prompt(), {"prompt": '"other"'}),
        ("prompts", make.prompt(), {"n": 3}),
        ("routing", make.routing(), make.routing(n=3)),
        ("rollouts", make.rollout(), {"metrics": '{"a": 1}'}),
        ("rollouts", make.rollout(), {"n_segments": 1}),
        ("rewards", make.reward(), {"source": "judge"}),
        ("rewards", make.reward(value=-1.0), {"value": -2.0}),
        ("scores", make.score(), {"values": [-9.0]}),
    ],
)
def test_other_content_under_a_key_is_refused(
    log: Log, stream: str, row: dict, change: dict
) -> None:
    """`at` and `seconds` are no content; once it is durable the first row has its address."""
    same = row | {"at": make.NOW} | ({"seconds": 7.0} if stream == "rollouts" else {})
    shape = routing_metadata(layers=2, top_k=2, n_experts=8)
    with log.writer(linger_s=60, routing=shape) as w:
        ticket = w.append(stream, row)
        again = w.append(stream, same)
        w.flush()
        assert again.result() == ticket.result() == w.append(stream, same).result()
        with pytest.raises(SegmentRejected, match="conflicting content"):
            w.append(stream, row | change)
    assert log.sql(f"select count(*) from {stream}").fetchall() == [(1,)]


def test_each_issue_of_a_prompt_is_a_row(log: Log) -> None:
    def again(i: int) -> dict:
        names = [{"rollout_id": f"train-0/{i}", "attempt": 1}]
        return make.prompt(attempt=1, reason="reissue", rollouts=names)

    with log.writer(linger_s=60) as w:
        tickets = [w.append("prompts", row) for row in (make.prompt(), again(0), again(1))]
        assert w.append("prompts", again(1)) is tickets[2]
        assert w.append("scores", make.score()) is not w.append("scores", make.score(kind="value"))
    assert log.sql("select count(*) from prompts").fetchall() == [(3,)]


def test_a_users_own_stream_is_declared_when_the_writer_opens(log: Log) -> None:
    schema = pa.schema([pa.field("mood", pa.string(), nullable=False)])
    with log.writer(user_schemas={"x_mood": schema}) as w:
        ticket = w.append("x_mood", {"mood": "calm"})
        w.flush()
        with pytest.raises(SegmentRejected, match="unknown field"):
            w.append("x_mood", {"mood": "calm", "weather": "fine"})
        with pytest.raises(SegmentRejected, match="declare your own"):
            w.append("x_other", {"mood": "calm"})
    assert log.row(ticket.result())["mood"] == "calm"
    for name in ("mood", "x_", "x_Mood", "x_a.b", "x_a/b"):
        with pytest.raises(SegmentRejected, match="called x_"):
            log.writer(user_schemas={name: schema})


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (pa.date32(), datetime.date(2026, 1, 1), b"x"),
        (pa.timestamp("ns"), datetime.datetime(2026, 1, 1), datetime.datetime(9000, 1, 1)),
        (pa.decimal128(5, 2), decimal.Decimal("1.50"), decimal.Decimal("123456")),
        (pa.list_(pa.int32()), [1, 2], ["a"]),
        (pa.list_(pa.int32(), 2), [1, 2], [1]),
        (pa.struct([pa.field("a", pa.int64(), nullable=False)]), {"a": 1}, {"a": None}),
    ],
)
def test_a_bad_row_of_a_users_stream_is_refused_alone(
    log: Log, kind: pa.DataType, good: object, bad: object
) -> None:
    with log.writer(user_schemas={"x_own": pa.schema([("v", kind)])}, linger_s=60) as w:
        ticket = w.append("x_own", {"v": good})
        with pytest.raises(SegmentRejected, match="x_own row: "):
            w.append("x_own", {"v": bad})
        w.flush()
        assert log.row(ticket.result())["v"] == good


ODD = "a\ud800\ufdd0d800\x00"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.list_(pa.string()), [ODD, "b"]),
        (pa.large_list(pa.string()), [ODD]),
        (pa.list_(pa.string(), 2), [ODD, ""]),
        (pa.list_(pa.struct([("a", pa.string())])), [{"a": ODD}]),
        (pa.map_(pa.string(), pa.string()), [(ODD, ODD)]),
        (pa.dictionary(pa.int32(), pa.string()), ODD),
        (pa.list_(pa.dictionary(pa.int32(), pa.string())), [ODD]),
    ],
)
def test_every_text_of_a_users_stream_comes_back(
    log: Log, kind: pa.DataType, value: object
) -> None:
    with log.writer(user_schemas={"x_own": pa.schema([("v", kind)])}, linger_s=60) as w:
        ticket = w.append("x_own", {"v": value})
        w.flush()
        assert log.row(ticket.result())["v"] == value
    compact(log, everything=True)
    assert log.row(ticket.result())["v"] == value


@pytest.mark.parametrize(
    "change",
    [{"molt.layers": "x"}, {"molt.layers": 2}, {"molt.dtype": "uint16"}, {"molt.top_k": "0"}],
)
def test_routing_metadata_that_name_no_shape_are_refused(log: Log, change: dict) -> None:
    shape = routing_metadata(layers=2, top_k=2, n_experts=8)
    for bad in (shape | change, {"molt.layers": "2"}):
        with pytest.raises(SegmentRejected, match="routing_metadata"):
            log.writer(routing=bad)
    with log.writer(linger_s=60) as w, pytest.raises(SegmentRejected, match="'parent' must be"):
        w.append("segments", make.segment() | {"parent": "a"})


def test_a_bad_row_does_not_stop_the_others(log: Log, w: Writer) -> None:
    good = w.append("rewards", make.reward())
    with pytest.raises(SegmentRejected):
        w.append("rewards", make.reward(value=float("nan")))
    w.flush()
    assert log.row(good.result())["value"] == 1.0


def test_a_refused_row_leaves_no_key_behind(w: Writer) -> None:
    with pytest.raises(SegmentRejected):
        w.append("segments", make.segment(logprobs=[1.0, 1.0, 1.0]))
    w.append("segments", make.segment())
    w.flush()


def test_a_pending_outcome_may_be_followed_by_the_final_one(log: Log, w: Writer) -> None:
    row = make.segment()
    w.append("segments", row)
    first = w.append("rollouts", make.rollout(digests=[row["digest"]], status="pending"))
    last = w.append("rollouts", make.rollout(digests=[row["digest"]]))
    w.flush()
    assert (
        log.row(first.result())["status"] == "pending" and log.row(last.result())["status"] == "ok"
    )
    with pytest.raises(SegmentRejected, match="conflicting content"):
        w.append("rollouts", make.rollout(status="failed", reason="late", digests=[row["digest"]]))


def test_flush_waits_for_rows_that_another_thread_is_publishing(log: Log) -> None:
    """flush() may find the queue empty while the flusher holds the rows: they must be durable."""
    with log.writer(linger_s=60) as w:
        stop = threading.Event()
        seen = []

        def append() -> None:
            for i in range(50):
                ticket = w.append("rewards", make.reward(revision=i))
                w.flush()
                seen.append(ticket.done())
            stop.set()

        threads = [threading.Thread(target=append) for _ in range(1)]
        for t in threads:
            t.start()
        while not stop.is_set():
            w.flush()
        for t in threads:
            t.join()
    assert seen == [True] * 50


def test_rows_appended_while_a_commit_is_published_go_into_the_next(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full commit takes what is there, and holds nothing that came later."""
    started, go = threading.Event(), threading.Event()
    real = os.link

    def link(*args: object) -> None:
        started.set()
        assert go.wait(30)
        real(*args)  # type: ignore[arg-type]

    with log.writer(linger_s=3600, flush_rows=3) as w:
        with monkeypatch.context() as patch:
            patch.setattr("molt.store.files.os.link", link)
            first = [w.append("rewards", make.reward(revision=i)) for i in range(3)]
            assert started.wait(30)
            second = [w.append("rewards", make.reward(revision=i)) for i in range(3, 6)]
            third = w.append("rewards", make.reward(revision=6))
            assert not any(t.done() for t in (*first, *second, third))
            go.set()
            assert [t.result(30).seq for t in (*first, *second)] == [0, 0, 0, 1, 1, 1]
        assert not third.done()
        w.flush()
        assert third.result().seq == 2


def test_a_users_own_column_may_have_any_name_and_type(log: Log) -> None:
    fields = [("values", pa.float64()), ("prompt", pa.int32()), ("metrics", pa.bool_())]
    with log.writer(user_schemas={"x_own": pa.schema(fields)}) as w:
        ticket = w.append("x_own", {"values": 0.5, "prompt": 3, "metrics": None})
    assert log.row(ticket.result())["values"] == 0.5


def test_token_columns_keep_their_bits(log: Log, w: Writer) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 49152, 500).astype(np.int32)
    logprobs = -rng.exponential(1.0, 500).astype(np.float32)
    ticket = w.append("segments", make.segment(ids=ids, logprobs=logprobs, sampled=[1] * 500))
    w.flush()
    row = log.row(ticket.result())
    assert row["token_ids"].tobytes() == ids.tobytes()
    assert row["logprobs"].tobytes() == logprobs.tobytes()


def test_redact_sees_messages_before_they_are_stored_and_nothing_passes_it(log: Log) -> None:
    def redact(messages: list[dict]) -> list[dict]:
        return [{**m, "content": m["content"].replace("Ann", "\ud800NAME")} for m in messages]

    row = make.segment(messages=json.dumps([{"role": "user", "content": "I am Ann"}]))
    with log.writer(linger_s=60, redact=redact) as w:
        ticket = w.append("segments", row)
        with pytest.raises(
            SegmentRejected, match="train-1/0.*redact failed, so nothing was stored"
        ):
            w.append("segments", make.segment(rollout_id="train-1/0", messages='[{"role": "a"}]'))
        w.flush()
        back = log.row(ticket.result())
    assert json.loads(back["messages"])[0]["content"] == "I am \ud800NAME"
    assert back["token_ids"].tolist() == row["token_ids"]
    stored = b"".join(p.read_bytes() for p in make.data_commits(log.path))
    assert b"Ann" not in stored
