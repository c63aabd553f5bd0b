"""Retention lets nothing go that a checkpoint, a reader or an open group needs (P37)."""

import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import factories as make
import pytest

from molt import cli
from molt.schemas.errors import ConfigError, LogCorrupt, Retired
from molt.schemas.streams import routing_metadata
from molt.store import Log
from molt.store import compact as compact_module
from molt.store.compact import compact
from molt.store.doctor import doctor
from molt.store.fold import COLUMNS, STREAMS, Fold
from molt.store.readers import readers, register_reader, unregister_reader
from molt.store.retention import Upkeep, retire
from molt.store.snapshot import Snapshot
from molt.store.sql import run_sql

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SHAPE = routing_metadata(layers=2, top_k=2, n_experts=8)


def checkpoint(log: Log, step: int, *, epoch: int = 1) -> None:
    path = f"checkpoints/{epoch}-{step}"
    (log.path / path).mkdir()
    marker = {"epoch": epoch, "step": step, "state_digest": "a"}
    (log.path / path / "COMPLETE").write_text(json.dumps(marker))
    log.control.put("checkpoint", [{**marker, "path": path, "bytes": 0, "files": []}])


def drop(log: Log, *ordinals: int) -> None:
    log.control.put("drop", [make.drop_row(f"train-{i}") for i in ordinals], {})


def segments(log: Log, *groups: str, w=None, routed: bool = False) -> str:
    """One commit per group, of one writer; its name."""
    with log.writer(linger_s=60, routing=SHAPE) as w:
        for group in groups:
            w.append("segments", make.segment(rollout_id=f"{group}/0"))
            if routed:
                w.append("routing", make.routing(f"{group}/0"))
            w.flush()
    return w.name


def left(log: Log, stream: str = "segments") -> list[str]:
    rows = run_sql([log], f"select rollout_id from {stream} order by writer, seq")[1]
    return [r[0].rpartition("/")[0] for r in rows]


def test_p37_cleanup_leaves_what_readers_and_open_groups_need(log: Log) -> None:
    case = make.load_case("P37")
    given, expected = case["given"], case["expected"]
    with log.writer(linger_s=60) as w:
        w.append("prompts", make.prompt(0))  # seq 0, so that segment i has number i
        w.flush()
        refs = {}
        for i in given["segments"]:
            ticket = w.append("segments", make.segment(rollout_id=f"train-{i}/0"))
            w.flush()
            refs[i] = ticket.result()
            assert refs[i].seq == i
        drop(log, *set(given["segments"]) - set(given["unsealed"]))
        checkpoint(log, 1)
        for name, seq in given["cursors"].items():
            register_reader(log.path, name, {w.name: seq}, ttl_s=60, now=NOW)
        found = retire(log, now=NOW, dry_run=False)
        assert found["commits"] == {"segments": len(expected["deleted"])}
        assert [int(g.split("-")[1]) for g in left(log)] == expected["kept"]
        wanted = expected["reader_at_1"].removeprefix("error: segment 1")
        for read in (
            lambda: Log.open(log.path).row(refs[1]),
            lambda: log.tail(streams={"segments"}).poll(),
        ):
            with pytest.raises(Retired, match=f"commit 1{wanted}$"):
                read()
        # Without the readers the floor is the group that is not settled.
        for name in given["cursors"]:
            unregister_reader(log.path, name)
        retire(log, now=NOW, dry_run=False)
        assert left(log) == ["train-5"]


def test_nothing_retires_without_a_checkpoint_or_by_a_dry_run(log: Log) -> None:
    segments(log, "train-0", "train-1")
    drop(log, 0, 1)
    assert retire(log, now=NOW)["commits"] == {}
    checkpoint(log, 1)
    found = retire(log, now=NOW)
    assert found["dry_run"] and found["commits"] == {"segments": 2} and found["bytes"] > 1000
    assert left(log) == ["train-0", "train-1"] and not (log.path / "cold").exists()
    (log.path / "checkpoints" / "1-1" / "COMPLETE").write_text("{")
    assert retire(log, now=NOW)["commits"] == {}, "redo cannot begin at a damaged checkpoint"


def test_the_floor_is_that_of_the_oldest_kept_checkpoint(log: Log) -> None:
    writer = segments(log, "train-0", "train-1", "train-2")
    drop(log, 0)
    checkpoint(log, 1)
    make.open_epoch(log, parent_epoch=1, cut=1)  # goes on from before the drop
    log.control.put("plan", [make.plan_row("train-2/0", [])], make.plan_header(2))
    checkpoint(log, 1, epoch=2)
    assert retire(log, now=NOW)["commits"] == {}
    shutil.rmtree(log.path / "checkpoints" / "2-1")
    assert retire(log, now=NOW)["floors"] == {writer: 1}
    drop(log, 0, 1)
    checkpoint(log, 2, epoch=2)
    shutil.rmtree(log.path / "checkpoints" / "1-1")
    assert retire(log, now=NOW, dry_run=False)["floors"] == {writer: 4}
    assert left(log) == []


def test_a_plan_behind_the_checkpoint_keeps_its_rows(log: Log) -> None:
    """Step 2 may be planned before the checkpoint of step 1 is written; redo needs its rows."""
    segments(log, "train-0", "train-1")
    for step in (1, 2):
        row = make.plan_row(f"train-{step - 1}/0", [])
        log.control.put("plan", [row], make.plan_header(step))
    checkpoint(log, 1)
    retire(log, now=NOW, dry_run=False)
    assert left(log) == ["train-1"]


def test_evaluation_stays_and_does_not_hold_the_floor(log: Log) -> None:
    segments(log, "train-0", "eval-0", "train-1", "train-2")
    drop(log, 0, 1)
    checkpoint(log, 1)
    compact(log, everything=True)
    # The cold file of train-0, train-1 and train-2 goes as a whole or not at all.
    assert retire(log, now=NOW, dry_run=False)["commits"] == {}
    drop(log, 2)
    checkpoint(log, 2)
    shutil.rmtree(log.path / "checkpoints" / "1-1")
    assert retire(log, now=NOW, dry_run=False)["commits"] == {"segments": 3}
    assert left(log) == ["eval-0"]


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize(
    ("keep", "expected"),
    [("checkpoint", ["train-1", "train-2"]), ("all", ["train-0", "train-1", "train-2"])]
    + [("none", ["train-2"])],
)
def test_routing_has_its_own_rule(
    log: Log, keep: str, expected: list[str], compacted: bool
) -> None:
    segments(log, "train-0", "train-1", "train-2", routed=True)
    drop(log, 0)
    checkpoint(log, 1)
    drop(log, 1)
    if compacted:
        compact(log, everything=True, file_bytes=1)
    retire(log, now=NOW, routing=keep, dry_run=False)
    assert left(log, "routing") == expected
    assert left(log) == ["train-1", "train-2"]


def test_readers_expire_are_renewed_and_must_be_readable(log: Log) -> None:
    writer = segments(log, "train-0", "train-1")
    drop(log, 0, 1)
    checkpoint(log, 1)
    register_reader(log.path, "audit", {writer: 1}, ttl_s=10, now=NOW)
    register_reader(log.path, "audit", {writer: 0}, ttl_s=100, now=NOW)
    later = NOW + timedelta(seconds=50)
    assert retire(log, now=later)["commits"] == {}
    assert retire(log, now=later)["floors"] == {writer: 0}
    register_reader(log.path, "other", {"another-writer": 9}, ttl_s=100, now=NOW)
    unregister_reader(log.path, "audit")
    assert retire(log, now=later)["commits"] == {}, "writers that are not named are held at 0"
    assert retire(log, now=NOW + timedelta(seconds=101))["commits"] == {"segments": 2}
    naive = NOW.replace(tzinfo=None)
    register_reader(log.path, "naive", {}, ttl_s=100, now=naive)
    assert list(readers(log.path, later)) == list(readers(log.path, naive)) == ["naive", "other"]
    (log.path / "readers" / "bad.json").write_text("{")
    with pytest.raises(LogCorrupt, match=r"readers/bad\.json cannot be read"):
        retire(log, now=NOW)
    with pytest.raises(ConfigError, match="a reader's name"):
        register_reader(log.path, "../bad", {}, ttl_s=1, now=NOW)


def test_a_retired_log_goes_on(log: Log) -> None:
    """The fold of a resumed run, SQL, the doctor, compaction and a new epoch all pass over it."""
    with log.writer(linger_s=60) as w:
        for i in range(3):
            w.append("prompts", make.prompt(i, n=1))
            refs = make.append_rollout(w, f"train-{i}/0")
            if i == 0:
                row = make.plan_row("train-0/0", refs)
                log.control.put("plan", [row], make.plan_header(1))
    checkpoint(log, 1)
    retire(log, now=NOW, dry_run=False)
    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS))
    fold.update()
    assert [g.group_id for g in make.closed_groups(fold)] == ["train-1", "train-2"]
    record = make.open_epoch(log)
    assert record.rows[0]["closed"] == [{"writer": w.name, "last_seq": 12}]
    compact(log, everything=True)
    report = doctor(log.path)
    assert report["ok"] and report["retired"] == 1, report["problems"]
    assert run_sql([log], "select count(*) from rollouts")[1] == [[3]]
    assert run_sql([log], "select * from lag")[1] == []
    with pytest.raises(Retired, match="first available is"):
        Log.open(log.path).row(refs[0].__class__(writer=w.name, seq=first_segment(log), row=0))


def first_segment(log: Log) -> int:
    """Number of the commit that retired: the lowest that no view shows."""
    shown = {r[0] for v in STREAMS for r in run_sql([log], f"select seq from {v}")[1]}
    return next(i for i in range(len(shown) + 1) if i not in shown)


def test_a_name_is_never_used_twice(log: Log, tmp_path: Path) -> None:
    segments(log, "train-0")
    drop(log, 0)
    checkpoint(log, 1)
    compact(log, everything=True)
    retire(log, now=NOW, dry_run=False)
    folder = log.path / "cold" / "segments"
    assert [p.name for p in folder.iterdir()] == ["0000000001.parquet"]
    segments(log, "train-1")
    compact(log, everything=True)
    assert sorted(p.name for p in folder.iterdir()) == ["0000000001.parquet", "0000000002.parquet"]


def test_the_command(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    segments(log, "train-0", "train-1")
    drop(log, 0)
    checkpoint(log, 1)
    arguments = ["compact", str(log.path), "--retire"]
    assert cli.main(arguments) == 0
    assert "nothing was deleted" in capsys.readouterr().out
    assert left(log) == ["train-0", "train-1"]
    assert cli.main([*arguments, "--yes", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["commits"] == {"segments": 1}
    assert left(log) == ["train-1"]


def test_retention_beside_a_snapshot_and_a_compaction(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was listed and has retired since is left out, as what retired before."""
    segments(log, "train-0", "train-1")
    drop(log, 0)
    checkpoint(log, 1)
    snapshot, real = Snapshot(log), compact_module._batches

    def late(files: list, file_bytes: int):
        retire(log, now=NOW, dry_run=False)
        return real(files, file_bytes)

    monkeypatch.setattr(compact_module, "_batches", late)
    assert compact(log, everything=True)["commits"] == 1
    assert [f.seq for f, _ in snapshot.entries("segments")] == [1]
    assert left(log) == ["train-1"]


def test_a_registered_tail_is_waited_for_until_it_goes_on_or_expires(log: Log) -> None:
    segments(log, "train-0", "train-1", "train-2")
    drop(log, 0, 1, 2)
    checkpoint(log, 1)
    clock = [0.0]
    tail = log.tail(streams={"segments"}, register="slow", clock=lambda: clock[0])
    assert len(tail.poll()[1]) == 3  # delivered, but not yet known to be done with
    now = datetime.now(UTC)
    assert retire(log, now=now, dry_run=False)["commits"] == {}
    assert left(log) == ["train-0", "train-1", "train-2"]
    clock[0] = 400.0  # a tenth of an hour is over: this poll renews the mark
    tail.poll()
    assert retire(log, now=now, dry_run=False)["commits"] == {"segments": 3}
    late = log.tail(streams={"segments"}, register="late")
    with pytest.raises(Retired, match="commit 0 was retired, none is left"):
        late.poll()
    segments(log, "train-3")
    drop(log, 3)
    checkpoint(log, 2)
    shutil.rmtree(log.path / "checkpoints/1-1")
    assert retire(log, now=now, dry_run=False)["commits"] == {}  # `late` holds it
    late.close()
    tail.close()
    assert retire(log, now=now, dry_run=False)["commits"] == {"segments": 1}
    assert not list((log.path / "readers").iterdir())


def test_blobs_go_with_the_last_row_that_names_them(log: Log) -> None:
    def image(c: str) -> dict:
        (log.path / "blobs").mkdir(exist_ok=True)
        (log.path / "blobs" / (c * 64)).write_bytes(b"pixels")
        return make.media(sha256=c * 64)

    with log.writer(linger_s=60) as w:
        for ordinal, shown in enumerate(["ab", "bc", "c"]):
            media = [image(c) for c in shown]
            w.append("segments", make.segment(rollout_id=f"train-{ordinal}/0", media=media))
            w.flush()
    image("d")  # a row that names it may be on its way
    drop(log, 0)
    checkpoint(log, 1)
    assert retire(log, now=NOW)["blobs"] == 1
    retire(log, now=NOW, dry_run=False)
    assert sorted(p.name[0] for p in (log.path / "blobs").iterdir()) == ["b", "c", "d"]
    drop(log, 1, 2)
    checkpoint(log, 2)
    shutil.rmtree(log.path / "checkpoints/1-1")
    retire(log, now=NOW, dry_run=False)
    assert [p.name[0] for p in (log.path / "blobs").iterdir()] == ["d"]


def test_upkeep_runs_by_itself_and_says_what_went_wrong(log: Log, monkeypatch) -> None:
    monkeypatch.setattr("molt.store.compact.BUCKET", 2)
    monkeypatch.setattr("molt.store.reader.BUCKET", 2)
    segments(log, "train-0", "train-1", "train-2")
    drop(log, 0, 1)
    checkpoint(log, 1)
    upkeep = Upkeep(log, routing="checkpoint")
    upkeep.poke(NOW)
    upkeep.close()
    assert left(log) == ["train-2"]
    assert list(log.path.glob("cold/segments/*.parquet"))
    segments(log, "train-3", "train-4", "train-5")
    drop(log, 3, 4)
    make.flip(make.data_commits(log.path, "segments")[-2], 900)
    upkeep.poke(NOW)
    with pytest.raises(LogCorrupt, match="checksum"):
        upkeep.close()
    upkeep.close()


@pytest.mark.parametrize("cold", [False, True])
def test_what_was_abandoned_stays_so_when_tokens_retire(tmp_path: Path, cold: bool) -> None:
    """train-4/0 attempt 0 is of abandoned weights, which only its segments tell."""
    tiny = make.build_log(tmp_path / "log")
    questions = [
        f"select rollout_id, attempt, {more} from {view} order by all"
        for view, more in (("rollouts", "status"), ("rewards", "value"))
    ]
    if cold:
        compact(tiny, everything=True)
    drop(tiny, 2)
    shutil.rmtree(tiny.path / "checkpoints/2-2")
    checkpoint(tiny, 3, epoch=2)
    before = {e: [run_sql([tiny], q, e) for q in questions] for e in (None, 1, "all")}
    found = retire(tiny, now=NOW, dry_run=False)
    assert cold or found["commits"]["segments"] > 3
    assert {e: [run_sql([tiny], q, e) for q in questions] for e in (None, 1, "all")} == before
    abandoned = run_sql([tiny], "select rollout_id from segments where abandoned", "all")[1]
    assert ["train-4/0"] in abandoned
