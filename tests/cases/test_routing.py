"""Area `routing`: P26, P28."""

import factories as make
import numpy as np
import pytest

from molt.rollout.routing import RoutingShape, completion_routing, routing_rows
from molt.schemas.check import routing_columns
from molt.schemas.errors import SegmentRejected
from molt.schemas.records import to_row
from molt.schemas.streams import expert_dtype, routing_metadata
from molt.store import Log
from molt.store.sql import run_sql
from molt.train.packing import Recorded
from molt.train.recorded import RoutingReader


def known_positions(log: Log) -> dict[int, int]:
    """Position in the chain -> segment whose routing row knows it (the newest wins)."""
    rows = run_sql([log], "select start, n, segment from routing order by segment, start")[1]
    return {p: segment for start, n, segment in rows for p in range(start, start + n)}


def test_p26_the_last_sampled_token_has_no_row_until_the_next_turn(log: Log) -> None:
    case = make.load_case("P26")
    given, expected = case["given"], case["expected"]
    layers, top_k = given["layers"], given["top_k"]
    shape = routing_metadata(layers=layers, top_k=top_k, n_experts=8)
    turn1, turn2 = given["turn1_tokens"], given["turn2_tokens"]

    def routing(segment: int, start: int, n: int) -> dict:
        return make.routing(segment=segment, start=start, n=n, width=layers * top_k)

    with log.writer(linger_s=60, routing=shape) as w:
        root = make.segment(ids=list(range(turn1)))
        w.append("segments", root)
        w.append("routing", routing(0, 0, given["turn1_rows"]))
        w.flush()
        known = known_positions(log)
        assert [p for p in range(turn1) if p not in known] == expected["after_turn1"]["missing"]
        child = make.segment(
            segment=1,
            parent=0,
            keep=turn1,
            parent_digest=root["digest"],
            ids=list(range(turn2 - turn1)),
        )
        w.append("segments", child)
        start = given["turn1_rows"]  # the prefix cache held the first rows
        w.append("routing", routing(1, start, given["turn2_rows"] - start))
        w.flush()
        known = known_positions(log)
        assert [p for p in range(turn2) if p not in known] == expected["after_turn2"]["missing"]
        assert f"turn {known[4] + 1}" == expected["after_turn2"]["row4_source"]
        claimed = routing(1, 0, 6) | {"n": turn2}
        with pytest.raises(SegmentRejected, match="6 hashes for 9 positions"):
            w.append("routing", claimed)
        with pytest.raises(SegmentRejected, match="in a chain of 9 tokens"):
            w.append("routing", routing(1, 5, 5))


def test_p26_a_cut_applies_to_routing_and_ids_alike(log: Log) -> None:
    """A child that keeps 7 of 9 tokens: `keep` is the one place where both are cut."""
    case = make.load_case("P26")
    n, cut = case["given"]["turn2_tokens"], case["given"]["truncate_to"]
    with log.writer(linger_s=60, routing=routing_metadata(layers=2, top_k=2, n_experts=8)) as w:
        root = make.segment(ids=list(range(n)))
        w.append("segments", root)
        w.append("routing", make.routing(start=0, n=n - 1))
        child = {"segment": 1, "parent": 0, "keep": cut, "parent_digest": root["digest"]}
        w.append("segments", make.segment(ids=[7], **child))
    query = """select s.keep, count(*) filter (pos < s.keep), least(r.n, s.keep)
        from segments s join tokens t using (rollout_id, attempt) join routing r using (rollout_id)
        where s.segment = 1 and t.segment = 0 group by s.keep, r.n"""
    after = case["expected"]["after_truncate"]
    assert run_sql([log], query)[1] == [[cut, after["ids"], after["rows"]]]


def test_p28_expert_ids_never_wrap(log: Log) -> None:
    case = make.load_case("P28")
    given, expected = case["given"], case["expected"]
    assert [expert_dtype(n) for n in given["num_experts"]] == expected["dtype"]
    for i, (n_experts, largest) in enumerate(
        zip(given["num_experts"], given["id"][:3], strict=True)
    ):
        ids = np.array([[[0, largest]], [[largest, 1]]])
        shape = routing_metadata(layers=1, top_k=2, n_experts=n_experts)
        with log.writer(linger_s=60, routing=shape) as w:
            row = {"rollout_id": f"train-0/{i}", "attempt": 0, "segment": 0, "start": 0}
            ticket = w.append("routing", row | routing_columns(ids, n_experts))
            w.flush()
            back = np.frombuffer(log.row(ticket.result())["experts"], shape["molt.dtype"])
            assert back.reshape(ids.shape).tolist() == ids.tolist()
    over = given["id"][3]
    with pytest.raises(SegmentRejected, match="expert ids 0 to 300 in a run of 256 experts"):
        routing_columns(np.array([[[0, over]]]), 256)
    assert np.uint8(over % 256) == expected["id_300_wrapped_would_be"]


def test_p28_an_id_above_the_declared_count_is_refused_at_append(log: Log) -> None:
    with log.writer(linger_s=60, routing=routing_metadata(layers=1, top_k=2, n_experts=4)) as w:
        row = {"rollout_id": "train-0/0", "attempt": 0, "segment": 0, "start": 0}
        with pytest.raises(SegmentRejected, match="expert 7 in a run of 4 experts"):
            w.append("routing", row | routing_columns(np.array([[[0, 7]]]), 8))


def test_p26_and_the_trainer_sees_what_each_turn_knew(log: Log) -> None:
    """The same five and four tokens through capture and reader: only the last one is unknown."""
    case = make.load_case("P26")
    given, expected = case["given"], case["expected"]
    turn1, turn2, cut = given["turn1_tokens"], given["turn2_tokens"], given["truncate_to"]
    shape = RoutingShape(layers=tuple(range(given["layers"])), top_k=given["top_k"], n_experts=8)
    rng = np.random.default_rng(0)
    rows = rng.random((turn2 - 1, given["layers"], 8)).argsort(-1)[..., : given["top_k"]]
    first = given["turn1_rows"]
    returned = {0: (0, rows[:first]), 1: (first, rows[first : given["turn2_rows"]])}
    refs = []
    with log.writer(linger_s=60, routing=shape.metadata()) as w:
        for segment, (start, found) in returned.items():
            runs = completion_routing(found.astype(np.int16), start, shape)
            who = {"rollout_id": "train-0/0", "attempt": 0, "segment": segment, "n_experts": 8}
            tickets = [w.append("routing", row) for row in routing_rows(runs, **who)]
            w.flush()
            refs += [to_row(t.result()) for t in tickets]
    reader = RoutingReader(log, layers=given["layers"], top_k=given["top_k"], n_experts=8)

    def read(n: int, chain: tuple[tuple[int, int], ...], refs: list) -> Recorded:
        """All positions before a target that stands behind the last token."""
        found = make.sequence(n + 1, mask=np.arange(n + 1) == n, chain=chain, tip=chain[-1][0])
        return reader.of(found, refs)

    def missing(found: Recorded) -> list[int]:
        return np.flatnonzero(~found.known_T).tolist()

    after1 = read(turn1, ((0, turn1),), refs[:1])
    assert len(after1.known_T) == expected["after_turn1"]["rows"]
    assert missing(after1) == expected["after_turn1"]["missing"]
    after2 = read(turn2, ((0, turn1), (1, turn2)), refs)
    assert len(after2.known_T) == expected["after_turn2"]["rows"]
    assert missing(after2) == expected["after_turn2"]["missing"]
    assert (after2.experts_TLK[:-1] == rows).all()
    truncated = read(cut, ((0, turn1), (1, cut)), refs)
    assert len(truncated.known_T) == expected["after_truncate"]["rows"] and not missing(truncated)


def test_p28_capture_and_reader_keep_every_id(log: Log) -> None:
    case = make.load_case("P28")
    given = case["given"]
    for i, (n_experts, largest) in enumerate(
        zip(given["num_experts"], given["id"][:3], strict=True)
    ):
        shape = RoutingShape(layers=(0,), top_k=2, n_experts=n_experts)
        runs = completion_routing(np.array([[[0, largest]], [[largest, 1]]], np.int16), 0, shape)
        who = {"rollout_id": f"train-0/{i}", "attempt": 0, "segment": 0, "n_experts": n_experts}
        with log.writer(linger_s=60, routing=shape.metadata()) as w:
            (ticket,) = [w.append("routing", row) for row in routing_rows(runs, **who)]
        reader = RoutingReader(log, layers=1, top_k=2, n_experts=n_experts)
        own = make.sequence(3, rollout_id=f"train-0/{i}", mask=np.arange(3) == 2)
        found = reader.of(own, [to_row(ticket.result())])
        assert found.experts_TLK.dtype == case["expected"]["dtype"][i]
        assert found.experts_TLK.tolist() == [[[0, largest]], [[largest, 1]]]
    over = ((0, np.array([[[0, given["id"][3]]]])),)
    with pytest.raises(SegmentRejected, match="expert ids 0 to 300 in a run of 256 experts"):
        routing_rows(over, rollout_id="train-0/0", attempt=0, segment=0, n_experts=256)
