"""What sessions are made of: which engine, which earlier reply, which versions, late rewards."""

import asyncio
import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import factories as make
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.agents.chat import Result
from molt.agents.guard import RolloutFailed, checked_result
from molt.agents.types import ChatRequest
from molt.relabel import relabel
from molt.rollout.engines import SPILL, EngineSource
from molt.rollout.resume import Recorded, n_sampled, recorded_pieces
from molt.rollout.session import _retried
from molt.rollout.types import Completion, join
from molt.rollout.vllm_calls import version_runs
from molt.schemas.errors import EngineError, SegmentRejected
from molt.schemas.records import Ref
from molt.store import Log, Writer
from molt.store.fold import COLUMNS, STREAMS, Fold


def engine(name: str) -> Any:
    return SimpleNamespace(engine_id=name)


def test_rollouts_of_a_group_share_an_engine_and_spill_over() -> None:
    async def run() -> None:
        source = EngineSource([engine("a"), engine("b"), engine("c")], wait_s=0)
        homes = {g: (await source.get(f"train-{g}/0")).engine_id for g in range(64)}
        assert set(homes.values()) == {"a", "b", "c"}
        for g, home in homes.items():
            assert (await source.get(f"train-{g}/1")).engine_id == home
        home = await source.get("train-0/0")
        with contextlib.ExitStack() as many:
            for _ in range(SPILL + 1):
                many.enter_context(source.busy(home))
            other = await source.get("train-0/0")
            assert other is not home
        assert await source.get("train-0/0") is other, "it stays where its KV is now"

    asyncio.run(run())


def test_a_lost_engine_is_waited_for_and_never_asked_again() -> None:
    async def run() -> None:
        old, new = engine("a"), engine("a")
        source = EngineSource([old], wait_s=60)
        source.lost(old, EngineError("gone"))
        waiting = [asyncio.create_task(source.get(f"train-{i}/0")) for i in range(3)]
        await asyncio.sleep(0)
        source.replace(new)
        assert all(found is new for found in await asyncio.gather(*waiting))
        source.lost(old, EngineError("late news of the old one"))
        assert await source.get("train-9/0") is new
        source.lost(new, EngineError("gone too"))
        source.wait_s = 0.01
        with pytest.raises(EngineError, match=r"train-9/0: no engine .*gone too"):
            await source.get("train-9/0")

    asyncio.run(run())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.data())
def test_version_runs_of_pieces_add_up(lengths: list[int], data: Any) -> None:
    """However an output is cut, the runs of its pieces are those of the whole."""
    total = sum(lengths)
    starts = [(f"1.{i}", sum(lengths[:i])) for i in range(len(lengths))]
    of_token = [i for i, n in enumerate(lengths) for _ in range(n)]
    cuts = sorted(data.draw(st.sets(st.integers(0, total)))) + [total]
    found, first = [], 0
    for end in cuts:
        runs = version_runs(starts, first, end)
        assert sum(n for _, _, n in runs) == end - first and all(n > 0 for _, _, n in runs)
        found += [v for _, v, n in runs for _ in range(n)]
        first = end
    assert found == of_token


def piece(ids: list[int], version: int, finish: str) -> Completion:
    return Completion(
        token_ids=np.array(ids, np.int32),
        logprobs=np.array([-0.5] * len(ids), np.float32),
        version_runs=((1, version, len(ids)),) if ids else (),
        finish_reason=finish,
        stop_token=ids[-1] if finish == "stop" else None,
        n_cached=version,
    )


def test_joined_pieces() -> None:
    whole = join([piece([1, 2], 3, ""), piece([5], 3, "partial"), piece([6, 7], 4, "stop")])
    assert whole.token_ids.tolist() == [1, 2, 5, 6, 7] and whole.token_ids.dtype == np.int32
    assert whole.version_runs == ((1, 3, 3), (1, 4, 2))
    assert (whole.finish_reason, whole.stop_token, whole.n_cached) == ("stop", 7, 3)
    assert not whole.kept_kv
    assert join([piece([1], 3, ""), replace(piece([2], 4, "stop"), kept_kv=True)]).kept_kv


def call(key: str | None = None, waiting: int = 0, delivered: bool = False) -> Any:
    return SimpleNamespace(key=key, waiting=waiting, delivered=delivered)


@pytest.mark.parametrize(
    ("known", "more", "found"),
    [
        ([], {}, None),
        ([call(delivered=True)], {}, None),
        ([call(waiting=1)], {}, None),
        ([call()], {}, 0),
        ([call(delivered=True), call(waiting=1), call()], {}, 2),
        ([call(delivered=True)], {"retry": 1}, 0),
        ([call(delivered=True), call(waiting=1)], {"retry": 1}, 1),
        ([call("a", delivered=True), call("b", delivered=True)], {"key": "a"}, 0),
        ([call("a", delivered=True)], {"key": "b"}, None),
    ],
)
def test_which_call_a_request_repeats(known: list[Any], more: dict, found: int | None) -> None:
    repeated = _retried(ChatRequest(messages=[], **more), known)
    assert repeated is (None if found is None else known[found])


def attempt_with_a_piece(w: Writer) -> list[Ref]:
    """A whole reply, a second one in two parts, the last of which never came; a fork."""
    first = make.segment(ids=[1, 2, 3, 4], sampled=[0, 0, 1, 1])
    child = {"segment": 1, "parent": 0, "keep": 4, "parent_digest": first["digest"]}
    second = make.segment(ids=[5, 6], sampled=[0, 1], finish_reason="partial", **child)
    child = {"segment": 2, "parent": 1, "keep": 6, "parent_digest": second["digest"]}
    third = make.segment(ids=[7, 8], finish_reason="partial", **child)
    child = {"segment": 3, "parent": 0, "keep": 3, "parent_digest": first["digest"]}
    fork = make.segment(ids=[9, 9], sampled=[0, 1], **child)
    tickets = [w.append("segments", row) for row in (first, second, third, fork)]
    w.flush()
    return [ticket.result() for ticket in tickets]


def test_recorded_replies_are_found_by_their_prompt(log: Log, w: Writer) -> None:
    rows = log.rows(attempt_with_a_piece(w))
    assert [r["segment"] for r in rows] == [0, 1, 2, 3] and n_sampled(rows) == 6
    recorded = Recorded(rows)
    assert recorded.pop([1, 2, 3]) == [] and recorded.pop([1]) == []
    assert [r["segment"] for r in recorded.pop([1, 2])] == [0]
    assert recorded.pop([1, 2]) == [], "handed out once"
    assert [r["segment"] for r in recorded.pop(np.array([1, 2, 3, 9]))] == [3]
    (one, row), (two, _) = recorded_pieces(recorded.pop([1, 2, 3, 4, 5]))
    assert one.token_ids.tolist() == [6] and two.token_ids.tolist() == [7, 8]
    assert one.version_runs == ((1, 0, 1),) and one.finish_reason == "partial"
    assert row["segment"] == 1 and np.isclose(one.logprobs, [-0.25]).all()


def test_a_late_reward_closes_and_a_relabel_replaces(log: Log, w: Writer) -> None:
    w.append("prompts", make.prompt(0, n=1))
    row = make.segment()
    w.append("segments", row)
    w.append("rollouts", make.rollout(digests=[row["digest"]], status="pending"))
    w.flush()
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    fold.update()
    assert make.closed_groups(fold) == []
    with pytest.raises(SegmentRejected, match="is nan"):
        relabel(log, "train-0/0", 0, "reward", float("nan"), 0, "human")
    first = relabel(log, "train-0/0", 0, "reward", 0.25, 0, "human")
    fold.update()
    (group,) = make.closed_groups(fold)
    better = relabel(log, "train-0/0", 0, "reward", 1.0, 1, "human")
    relabel(log, "train-0/0", 0, "reward", 0.25, 0, "again")
    fold.update()
    attempt = fold.finished(group, "train-0/0")
    assert attempt is not None
    assert attempt.rewards == {(None, None, "reward"): (1, 1.0, better)}
    assert log.row(first)["value"] == 0.25, "nothing is overwritten"


def test_a_late_reward_outlives_a_new_epoch(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that starts in between cuts the first writer off: the row is appended again."""
    opened = log.writer
    epochs = []

    def writer(*args: Any, **more: Any) -> Writer:
        w = opened(*args, **more)
        epochs.append(w.epoch)
        if len(epochs) == 1:
            make.open_epoch(log)
        return w

    monkeypatch.setattr(log, "writer", writer)
    ref = relabel(log, "train-0/0", 0, "reward", 1.0, 0, "human")
    assert epochs == [1, 2] and ref.writer.startswith("2-")


@pytest.mark.parametrize(
    "result",
    [
        None,
        {"reward": 1},
        Result(rewards=[1.0]),
        Result(turns={0: 1.0}),
        Result(metrics={"x": {1}}),
    ],  # type: ignore[arg-type, dict-item]
)
def test_results_that_are_none(result: Any) -> None:
    with pytest.raises(RolloutFailed, match="agent"):
        checked_result(result)
