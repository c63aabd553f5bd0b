"""The loop's decisions over many steps: real log files, scripted players, no models."""

import asyncio
from pathlib import Path

import factories as make
import numpy as np
import pytest
from simulation import Simulation, config, lengths, simulate

from molt.recovery import Start, cut
from molt.schemas.errors import ConfigError, MoltError, RecoveryError
from molt.store import Log

TWICE = """
select group_id, count(*) as n from (
    select distinct group_id, step from plans union all select group_id, -1 from drops
) group by group_id having n > 1
"""
TRAINED = """
select len(token_ids) from segments join plans using (rollout_id, attempt)
where decision in ('train', 'mask')
"""


@pytest.mark.parametrize("max_lag", [0, 1])
def test_filters_that_take_most_groups_do_not_deadlock(tmp_path: Path, max_lag: int) -> None:
    """70 % of the groups are filtered; drops settle at once, so the bound is never used up."""
    conf = config(f"algo.max_lag={max_lag}", "algo.drop_equal=true", "run.steps=6")
    found = simulate(tmp_path / "log", conf, 6, equal=0.7)
    log = found.run.log
    ((dropped, planned),) = log.sql(
        "select (select count(*) from drops), (select count(distinct group_id) from plans)"
    ).fetchall()
    assert planned == 6 * 4 and dropped > 1.5 * planned
    assert found.unsettled_max <= (max_lag + 1) * 4
    assert log.sql(TWICE).fetchall() == []
    assert {r for (r,) in log.sql("select distinct lag_max from plans").fetchall()} <= {0, 1}


def test_a_run_that_only_drops_says_so(tmp_path: Path) -> None:
    with pytest.raises(MoltError, match="64 groups in a row were dropped.*equal rewards"):
        simulate(tmp_path / "log", config("algo.drop_equal=true"), 1, equal=1.0)


@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_waiting_trains_the_lengths_that_were_issued(tmp_path: Path, policy: str) -> None:
    """10 % of the rollouts are ten times longer: `wait` trains them all, `drop` loses them."""
    conf = config("algo.max_lag=1", f"algo.lag={policy}", "run.steps=1000")
    found = simulate(tmp_path / "log", conf, 25, slow=0.1)
    log, fold = found.run.log, found.run.fold
    settled = fold.settled["train"].low
    assert settled > 12
    issued = [n for r, n in found.players.lengths.items() if _ordinal(r) < settled]
    within = f"cast(split_part(plans.group_id, '-', 2) as int) < {settled}"
    trained = lengths(log, f"{TRAINED} and {within}")
    ((n_drops,),) = log.sql("select count(*) from drops where reason = 'lag'").fetchall()
    if policy == "wait":
        assert n_drops == 0
        assert sorted(trained) == sorted(issued)
        ((worst,),) = log.sql("select max(lag_max) from plans").fetchall()
        assert 1 <= worst <= 2
    else:
        assert n_drops > 0
        assert np.mean(trained) < 0.8 * np.mean(issued), "the filter is biased, and seen to be"


def _ordinal(rollout_id: str) -> int:
    return int(rollout_id.split("/")[0].split("-")[1])


def test_refits_every_third_step_stay_within_the_limit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="refit_every is 3 and algo.max_lag 1"):
        config("algo.refit_every=3", "algo.max_lag=1")
    conf = config("algo.refit_every=3", "algo.max_lag=2", "algo.lag=drop", "run.steps=12")
    log = simulate(tmp_path / "log", conf, 12).run.log
    versions = {v for (v,) in log.sql("select version from policies").fetchall()}
    assert versions == {0, 3, 6, 9, 12}
    assert log.sql("select count(*) from drops").fetchall() == [(0,)]
    assert {x for (x,) in log.sql("select distinct lag_max from plans").fetchall()} == {0, 1, 2}


def test_from_an_earlier_step_the_future_is_invisible_and_nothing_is_skipped(
    tmp_path: Path,
) -> None:
    """Six steps, then again from step 2: abandoned groups are issued and trained again."""
    conf, path = config("run.steps=8"), tmp_path / "log"
    first = simulate(path, conf, 6).run.log
    ((old,),) = first.sql("select count(distinct group_id) from plans where step > 2").fetchall()
    parent, last = cut(first.records(), Start(from_step=2))
    assert parent == 1
    second = simulate(path, conf, 4, epoch={"parent_epoch": parent, "cut": last}).run
    log = second.log
    steps = log.sql("select step, epoch from steps order by step").fetchall()
    assert steps == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2)]
    everything = log.sql("select count(*) from steps", epoch="all").fetchall()
    assert everything == [(6 + 4,)] and old == 16
    assert log.sql(TWICE).fetchall() == []
    versions = log.sql("select distinct unnest(version_runs) as run from segments").fetchall()
    shown = {(r[0]["epoch"], r[0]["version"]) for r in versions}
    assert not shown & {(1, v) for v in range(3, 7)}
    assert second.fold.settled["train"].low >= 20, "old groups first"
    with pytest.raises(ConfigError, match="--from 9: this lineage has the steps 0 to 6"):
        cut(log.records(), Start(from_step=9))


EVALUATED = """
select cast(split_part(dataset, '@', 2) as int) as step, count(distinct group_id),
    min(version_runs[1].version), max(version_runs[1].version)
from (select distinct group_id, dataset from prompts where purpose = 'eval')
join segments using (group_id) group by 1 order by 1
"""


def test_held_out_prompts_are_asked_at_intervals_with_the_weights_of_their_step(
    tmp_path: Path,
) -> None:
    """Also from an earlier step on: what abandoned weights answered is asked again, of others."""
    conf, path = config("run.eval_every=2", "run.steps=5"), tmp_path / "log"
    first = simulate(path, conf, 5, evaluates=True).run
    n = len(first.prompts.heldout)
    assert n > 0 and first.fold.open_groups("eval") == [], "evaluations pile up"
    assert first.log.sql(EVALUATED).fetchall() == [(s, n, s, s) for s in (0, 2, 4, 5)]
    parent, last = cut(first.log.records(), Start(from_step=3))
    lineage = {"parent_epoch": parent, "cut": last}
    second = simulate(path, conf, 2, evaluates=True, epoch=lineage).run
    assert second.log.sql(EVALUATED).fetchall() == [(s, n, s, s) for s in (0, 2, 4, 5)]
    asked = "select reason, count(*) from prompts where purpose = 'eval' group by 1"
    assert second.log.sql(asked).fetchall() == [("new", 6 * n)]


def test_an_evaluation_that_was_broken_off_is_ended(tmp_path: Path) -> None:
    """The driver died when seven prompts were asked and some of them answered."""
    conf, path = config("run.steps=5"), tmp_path / "log"
    first = Simulation(path, conf, evaluates=True)
    n, first.run.prompts.heldout = len(first.run.prompts.heldout), first.run.prompts.heldout[:7]

    async def die() -> None:
        await asyncio.sleep(0)
        first.players.advance(10.0)
        raise KeyboardInterrupt

    async def broken_off() -> None:
        first.publish()
        first.run._news = die  # type: ignore[method-assign]
        await first.evaluate()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(broken_off())
    log = first.run.log
    ended = "select count(*) from rollouts where group_id like 'eval-%'"
    ((n_ended,),) = log.sql(ended).fetchall()
    assert 0 < n_ended < 7 < n
    simulate(path, conf, 1, evaluates=True)
    asked = "select reason, count(*) from prompts where purpose = 'eval' group by 1 order by 1"
    assert log.sql(asked).fetchall() == [("new", n), ("reissue", 7 - n_ended)]
    assert log.sql(ended).fetchall() == [(n,)]


def test_rollouts_that_end_while_a_step_is_trained_are_folded_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer goes on until the driver has seen what was appended meanwhile."""
    monkeypatch.setattr("molt.issuing.NEWS_S", 0.01)
    simulation = Simulation(tmp_path / "log", config("run.steps=100"))
    run, players = simulation.run, simulation.players

    def seen() -> int:
        return sum(run.fold.is_closed(g) for g in run.fold.open_groups("train"))

    async def train() -> str:
        before = seen()
        players.advance(60.0)
        while seen() == before:
            await asyncio.sleep(0.01)
        return "trained"

    async def drive() -> str:
        simulation.publish()
        run.issuer.fill()
        await asyncio.sleep(0)
        trained = await asyncio.wait_for(run.meanwhile(train(), "the trainer"), 20)
        await run.issuer.close()
        return trained

    assert asyncio.run(drive()) == "trained"


def test_a_dead_worker_is_replaced_and_what_it_was_playing_is_issued_again(tmp_path: Path) -> None:
    """Within one epoch: the finished rollouts stay, the others get attempt 1."""
    found = Simulation(tmp_path / "log", config("run.steps=4"))
    run = found.run

    async def live() -> None:
        found.publish()
        run.issuer.adopt()
        run.issuer.fill()
        await asyncio.sleep(0)
        found.players.advance(9.0)
        found.players.kill()
        await run.issuer.news()
        await asyncio.sleep(0)
        await found.one()
        await found.one()
        await run.issuer.close()

    asyncio.run(live())
    log = run.log
    assert found.players.restarts == ["worker-0"]
    attempts = "select attempt, count(*) from rollouts group by 1 order by 1"
    (first, n_first), (second, n_second) = log.sql(attempts).fetchall()
    assert (first, second) == (0, 1) and n_first > 0 and n_second > 0
    twice = "select rollout_id from rollouts group by 1 having count(*) > 1"
    assert log.sql(twice).fetchall() == [], "what was finished is not played again"
    again = log.sql("select count(*) from prompts where reason = 'reissue'").fetchall()
    groups = log.sql("select count(*) from prompts where reason = 'new'").fetchall()
    assert 0 < again[0][0] <= groups[0][0]
    assert log.sql(TWICE).fetchall() == []
    assert log.sql("select count(distinct group_id) from plans").fetchall() == [(8,)]


def test_an_unreadable_row_stops_and_drop_goes_on_without_its_group(tmp_path: Path) -> None:
    conf, path = config("run.steps=8"), tmp_path / "log"
    log = simulate(path, conf, 3).run.log
    victim = log.sql(
        "select rollout_id, writer, seq from plans join segments "
        "using (rollout_id, attempt) where step = 2 order by 1 limit 1"
    ).fetchall()[0]
    rollout, writer, seq = victim
    file = path / "data" / writer / f"{seq // 1024:06d}" / f"{seq:010d}.segments.arrow"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(RecoveryError, match=f"--drop {rollout}"):
        simulate(path, conf, 1)
    start = Start(drop=(rollout,))
    parent, last = cut(Log.open(path).records(), start)
    assert (parent, last) != (None, None)
    again = simulate(path, conf, 3, start=start, epoch={"parent_epoch": parent, "cut": last}).run
    group = rollout.split("/")[0]
    records = [r for r in again.log.records() if again.fold.tail.lineage.holds(r.n)]
    drops = [row for r in records if r.kind == "drop" for row in r.rows]
    assert [(d["group_id"], d["reason"]) for d in drops] == [(group, f"--drop {rollout}")]
    planned = {row["group_id"]: r for r in records if r.kind == "plan" for row in r.rows}
    assert group not in planned and again.step == 4
    later = simulate(path, conf, 1).run  # the word is remembered
    assert later.step == 5


def test_rows_that_no_redo_needs_are_passed_over_by_the_name_of_their_commit(
    tmp_path: Path,
) -> None:
    """A checkpoint behind the plan: nothing is cut, no group is dropped."""
    conf, path = config("run.steps=8"), tmp_path / "log"
    run = simulate(path, conf, 2).run
    log = run.log
    folder = path / "checkpoints" / "1-2"
    folder.mkdir()
    (folder / "COMPLETE").write_text("{}")
    row = {"epoch": 1, "step": 2, "path": "checkpoints/1-2", "bytes": 0, "files": []}
    log.control.put("checkpoint", [{**row, "state_digest": "0" * 16}])
    ((writer, seq),) = log.sql("select writer, min(seq) from segments group by 1").fetchall()
    make.flip(path / "data" / writer / "000000" / f"{seq:010d}.segments.arrow", 999)
    with pytest.raises(RecoveryError, match=f"for no rollout.*--drop {writer}/{seq}"):
        simulate(path, conf, 1)
    start = Start(drop=(f"{writer}/{seq}",))
    assert cut(log.records(), start) == (None, None)
    later = simulate(path, conf, 1, start=start).run
    steps = later.log.sql("select distinct step from plans order by step").fetchall()
    assert later.step == 3 and steps == [(1,), (2,), (3,)]


def test_a_poisonous_rollout_that_no_plan_holds_is_dropped_too(tmp_path: Path) -> None:
    conf, path = config("run.steps=8"), tmp_path / "log"
    first = simulate(path, conf, 2).run
    open_now = first.fold.open_groups("train")[0].group_id
    start = Start(drop=(f"{open_now}/0",))
    assert cut(first.log.records(), start) == (None, None)
    second = simulate(path, conf, 1, start=start).run
    reasons = second.log.sql("select reason from drops").fetchall()
    assert reasons == [(f"--drop {open_now}/0",)]
    assert second.fold.is_settled(open_now)
    with pytest.raises(ConfigError, match="has no group train-999"):
        simulate(path, conf, 1, start=Start(drop=("train-999/0",)))
