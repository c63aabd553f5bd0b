"""The doctor finds every kind of damage and names the file; what is no damage stays quiet."""

import json
import shutil
from pathlib import Path

import factories as make
import numpy as np
import pyarrow as pa
import pytest

from molt.replay.audit import audit
from molt.schemas.check import routing_columns
from molt.schemas.columns import normalise, to_table
from molt.schemas.errors import SchemaMismatch
from molt.schemas.streams import STREAMS, routing_metadata, schema_id
from molt.store import Log
from molt.store.commit import encode
from molt.store.compact import compact
from molt.store.doctor import doctor
from molt.store.reader import commit_path


def problems(path: Path) -> list[tuple[str, str]]:
    report = doctor(path)
    assert report["ok"] == (not report["problems"])
    return [(p["file"], p["why"]) for p in report["problems"]]


def relative(log: Log, path: Path) -> str:
    return str(path.relative_to(log.path))


def commits_of_epoch_1(log: Log, stream: str = "*") -> list[Path]:
    return [p for p in make.data_commits(log.path, stream) if p.parts[-3].startswith("1-")]


def test_a_whole_log_is_ok_and_counted(tiny: Log) -> None:
    seen: list[tuple[int, int]] = []
    report = doctor(tiny.path, lambda done, total: seen.append((done, total)))
    assert report["ok"] and report["problems"] == []
    files = [*make.data_commits(tiny.path), *(tiny.path / "train").glob("*.arrow")]
    assert report["commits"] + report["invisible"] == len(files)
    assert report["invisible"] == 4, "train-5's three commits and the end"
    assert report["bytes"] == sum(f.stat().st_size for f in files)
    assert report["by_stream"]["segments"]["rows"] == 8
    assert sum(s["rows"] for s in report["by_stream"].values()) == report["rows"]
    assert seen == sorted(seen) and seen[-1] == (report["bytes"], report["bytes"])


def test_one_flipped_byte_anywhere_is_named(tiny: Log) -> None:
    rng = np.random.default_rng(1)
    files = [*make.data_commits(tiny.path), *(tiny.path / "train").glob("*.arrow")]
    shown = [f for f in files if doctor_reads(tiny, f)]
    for path in rng.choice(np.array(shown, dtype=object), 12, replace=False):
        kept = path.read_bytes()
        make.flip(path, int(rng.integers(len(kept))), 1 << int(rng.integers(8)))
        found = problems(tiny.path)
        assert relative(tiny, path) in {file for file, _ in found}
        path.write_bytes(kept)
    assert problems(tiny.path) == []


def doctor_reads(log: Log, path: Path) -> bool:
    """False for the four commits of the fenced worker: they are behind its end."""
    return path.parent.name == "train" or path not in commits_of_epoch_1(log)[-4:]


def test_all_damage_is_listed_not_the_first_alone(tiny: Log) -> None:
    paths = (
        make.data_commits(tiny.path, "rewards")[:2] + make.data_commits(tiny.path, "rollouts")[:1]
    )
    for path in paths:
        make.flip(path, 64)
    assert [file for file, _ in problems(tiny.path)] == sorted(relative(tiny, p) for p in paths)


def test_a_missing_commit_is_found_in_the_middle_and_at_a_closed_end(tiny: Log) -> None:
    middle = commits_of_epoch_1(tiny)[3]
    middle.unlink()
    assert [why for _, why in problems(tiny.path)][0].startswith("commit 3 of 1-")
    shutil.rmtree(middle.parents[1])
    found = problems(tiny.path)
    assert found[0][1].startswith("commit 0 of") and "missing" in found[0][1]


def test_a_missing_or_misnamed_record_is_found(tiny: Log) -> None:
    train = tiny.path / "train"
    (train / f"{4:010d}.arrow").rename(train / "x.arrow")
    found = dict(problems(tiny.path))
    assert found["train/0000000004.arrow"] == "control record 4 is missing"
    assert found["train/x.arrow"] == "not the name of a control record"


def test_a_renumbered_file_is_found_though_its_checksum_holds(tiny: Log) -> None:
    first, second = commits_of_epoch_1(tiny, "rewards")[:2]
    first.write_bytes(second.read_bytes())
    assert "the file says it is" in dict(problems(tiny.path))[relative(tiny, first)]


def test_two_files_with_one_number_are_found(tiny: Log) -> None:
    path = commits_of_epoch_1(tiny, "rewards")[0]
    twin = path.with_name(path.name.replace("rewards", "scores"))
    twin.write_bytes(path.read_bytes())
    whys = [why for file, why in problems(tiny.path) if file == relative(tiny, twin)]
    assert any("have number" in why for why in whys)


def test_leftovers_of_a_crash_are_told_but_are_no_damage(tiny: Log) -> None:
    path = commits_of_epoch_1(tiny)[0]
    dot = path.with_name(f".{path.name}.7.abcd")
    dot.write_bytes(b"half")
    report = doctor(tiny.path)
    assert report["ok"] and report["leftovers"] == [relative(tiny, dot)]


def test_strangers_in_the_data_are_found(tiny: Log) -> None:
    folder = commits_of_epoch_1(tiny)[0].parent
    (folder / "notes.txt").write_text("hello")
    (folder.parent / "notes").mkdir()
    (tiny.path / "data" / "tmp").mkdir()
    whys = [why for _, why in problems(tiny.path)]
    assert sorted(whys) == [
        "not a commit of this bucket",
        "not the name of a bucket",
        "not the name of a writer's directory",
    ]


def test_a_file_in_the_place_of_a_folder_is_told_and_nothing_else_meets_it(tiny: Log) -> None:
    counted = tiny.sql("select count(*) from segments").fetchall()
    writer = commits_of_epoch_1(tiny)[0].parents[1]
    (tiny.path / "cold").mkdir()
    for place in (tiny.path / "data/1-notes", writer / "000001", tiny.path / "cold/README"):
        place.write_text("hello")
        assert problems(tiny.path) == [(relative(tiny, place), "not a folder")]
        assert tiny.sql("select count(*) from segments").fetchall() == counted
        assert tiny.tail().poll()[1]
        place.unlink()


def many_commits(log: Log) -> None:
    """Two writers with three commits each."""
    for k in range(2):
        with log.writer(linger_s=60) as w:
            for i in range(3):
                w.append("rewards", make.reward(f"train-{i}/{k}"))
                w.flush()


@pytest.mark.parametrize("after", range(2, 10))
def test_a_compaction_beside_the_doctor_is_no_damage(log: Log, after: int) -> None:
    many_commits(log)
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == after:
            assert compact(log, everything=True)["commits"] == 6

    report = doctor(log.path, progress)
    assert report["ok"], report["problems"]
    assert report["by_stream"]["rewards"]["rows"] == 6 and len(seen) >= after


def forge(log: Log, stream: str, row: dict, seq: int = 0, extra: dict | None = None) -> Path:
    """A commit with a right checksum whose row no writer would have accepted."""
    schema, writer = STREAMS[stream], "1-forger-1-000000"
    table = to_table(schema, [normalise(stream, schema, {**row, "at": make.NOW})])
    raw = encode(
        table,
        stream=stream,
        writer=writer,
        seq=seq,
        schema_text=schema_id(stream, schema, "1.0"),
        extra=extra,
    )
    path = commit_path(log.path, writer, seq, stream)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


ZEROED = {"logprobs": [-0.25] * 3}


@pytest.mark.parametrize(
    ("stream", "row", "why"),
    [
        ("segments", make.segment(digest=b"x" * 32), "digest"),
        ("segments", make.segment(logprobs=[0.5, 0.5, 0.5]), "logprob 0.5 at index 0"),
        ("segments", make.segment(runs=[(1, 0, 1)]), "cover 1 tokens"),
        ("segments", make.segment(segment=1, parent=0, keep=1), "parent 0 is not in the log"),
        ("rewards", make.reward(value=float("inf")), "is inf"),
        ("prompts", make.prompt(0, purpose="play"), "purpose 'play'"),
        ("routing", make.routing(), "routing_metadata"),
    ],
)
def test_a_row_that_no_writer_accepts_is_found(log: Log, stream: str, row: dict, why: str) -> None:
    path = forge(log, stream, row)
    found = problems(log.path)
    assert [file for file, _ in found] == [relative(log, path)]
    assert why in found[0][1] and "row 0" in found[0][1]


def test_a_routing_row_behind_its_chain_is_found(log: Log) -> None:
    forge(log, "segments", make.segment(ids=[1, 2, 3]))
    shape = routing_metadata(layers=2, top_k=2, n_experts=8)
    forge(log, "routing", make.routing(start=2, n=2), seq=1, extra=shape)
    assert "in a chain of 3 tokens" in problems(log.path)[0][1]


@pytest.mark.parametrize("more", [{"layers": 1}, {"top_k": 1}, {"n_experts": 300}])
def test_a_run_has_one_shape_of_routing(log: Log, more: dict) -> None:
    """Each commit is whole by itself, and the doctor and the audit name the second one."""
    for k, shape in enumerate(({"layers": 2, "top_k": 2, "n_experts": 8}, more)):
        shape = {"layers": 2, "top_k": 2, "n_experts": 8} | shape
        experts_NLK = np.tile(np.arange(shape["top_k"]), (2, shape["layers"], 1))
        row = make.routing(f"train-{k}/0") | routing_columns(experts_NLK, shape["n_experts"])
        forge(log, "routing", row, seq=k, extra=routing_metadata(**shape))
        if k == 0:
            assert problems(log.path) == [] and audit(log).to_json()["ok"]
    ((file, why),) = problems(log.path)
    assert file.endswith("0000000001.routing.arrow") and "shape of routing" in why
    (violation,) = audit(log).to_json()["violations"]
    assert (violation["invariant"], violation["rollout"]) == ("I3", "train-1/0")


def test_a_child_is_checked_against_a_parent_that_another_writer_has(log: Log) -> None:
    root = make.segment(ids=[1, 2, 3])
    child = {"segment": 1, "parent": 0, "keep": 3, "ids": [4, 5]}
    with log.writer(linger_s=60) as w:
        w.name = f"0{w.name}"  # sorts before the other writer
        w.append("segments", make.segment(parent_digest=root["digest"], **child))
    with log.writer(linger_s=60) as w:
        w.append("segments", root)
    assert problems(log.path) == []
    forge(log, "segments", make.segment(parent_digest=b"?" * 32, **child))
    assert "digest" in problems(log.path)[0][1]


def test_checkpoints_are_complete_or_retired(tiny: Log) -> None:
    folder = tiny.path / "checkpoints" / "2-2"
    (folder / "state.bin").write_bytes(b"short")
    assert problems(tiny.path) == [("checkpoints/2-2/state.bin", "5 bytes instead of 7")]
    (folder / "COMPLETE").unlink()
    assert "COMPLETE" in problems(tiny.path)[0][1]
    shutil.rmtree(folder)
    newest = tiny.path / "checkpoints" / "2-3"
    newest.mkdir()
    marker = {"epoch": 2, "step": 3, "state_digest": "c" * 16}
    (newest / "COMPLETE").write_text(json.dumps(marker))
    row = {**marker, "path": "checkpoints/2-3", "bytes": 0, "files": []}
    tiny.control.next_n, tiny.control.epoch = len(tiny.records()), 2
    tiny.control.put("checkpoint", [row])
    report = doctor(tiny.path)
    assert report["ok"] and report["retired_checkpoints"] == 1


def test_a_damaged_or_newer_format_is_told(tiny: Log) -> None:
    (tiny.path / "format.json").write_text("{")
    assert problems(tiny.path)[0][0] == "format.json"
    (tiny.path / "format.json").write_text('{"format": "9.0", "run_id": "x"}')
    with pytest.raises(SchemaMismatch, match=r"9\.0"):
        doctor(tiny.path)
    with pytest.raises(FileNotFoundError, match="not a molt log"):
        doctor(tiny.path / "nowhere")


def test_no_error_of_arrow_escapes(log: Log) -> None:
    """Right checksums around bodies that Arrow cannot read, or reads as something else."""
    schema = STREAMS["rewards"]
    good = to_table(schema, [normalise("rewards", schema, {**make.reward(), "at": make.NOW})])
    wrong = good.set_column(1, "attempt", pa.array(["zero"]))
    raw = encode(
        wrong,
        stream="rewards",
        writer="1-forger-1-000000",
        seq=0,
        schema_text=f"rewards 1.0 {'0' * 16}",
    )
    path = commit_path(log.path, "1-forger-1-000000", 0, "rewards")
    path.parent.mkdir(parents=True)
    path.write_bytes(raw)
    assert "not in the schema that it names" in problems(log.path)[0][1]


def test_a_plan_whose_rows_are_gone_is_damage(tiny: Log) -> None:
    writer = min((tiny.path / "data").iterdir())
    shutil.rmtree(writer)
    found = [why for _, why in problems(tiny.path)]
    assert any("step 1 trained train-0/0 from it" in why for why in found), found


def test_a_lost_control_log_is_damage(tiny: Log) -> None:
    for record in (tiny.path / "train").iterdir():
        record.unlink()
    assert any("no record of that epoch" in why for _, why in problems(tiny.path))


def test_the_newest_checkpoint_must_be_there_and_its_marker_whole(tiny: Log) -> None:
    folder = tiny.path / "checkpoints" / "2-2"
    (folder / "COMPLETE").write_bytes(b"")
    assert "sound COMPLETE marker" in problems(tiny.path)[0][1]
    shutil.rmtree(folder)
    assert "newest checkpoint is gone" in problems(tiny.path)[0][1]
