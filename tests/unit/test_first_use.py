"""What somebody met who used the log by README alone: odd text, names twice, missing folders."""

import errno
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import factories as make
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from molt import cli
from molt.replay import export as export_module
from molt.replay.audit import audit
from molt.replay.export import export
from molt.schemas.errors import ConfigError, LogGap, SegmentRejected
from molt.store import Log, Writer, files
from molt.store.compact import compact
from molt.store.doctor import doctor
from molt.store.sql import run_sql

README = (Path(cli.__file__).parents[1] / "README.md").read_text()
ODD = "ValueError: \ud800 \ufdd0"


def test_tail_does_not_end_well_before_a_gap(
    tiny: Log, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("molt.follow.POLL_S", 0.01)
    assert cli.main(["tail", str(tiny.path)]) == 0
    whole = capsys.readouterr().out
    commit = min(tiny.path.glob("data/2-*/*/*.arrow"))
    commit.unlink()
    assert cli.main(["tail", str(tiny.path)]) == 1
    told = capsys.readouterr()
    assert f"{commit.parents[1].name}: commit 0 missing" in told.err
    assert 0 < len(told.out.splitlines()) < len(whole.splitlines())
    (tiny.path / "train" / "0000000000.arrow").unlink()
    assert cli.main(["tail", str(tiny.path)]) == 1
    assert "control record 0, " in capsys.readouterr().err


def test_cold_rows_of_a_writer_without_a_folder(tiny: Log) -> None:
    compact(tiny, everything=True)
    before = run_sql([tiny], "select count(*) from rollouts")
    shutil.rmtree(tiny.path / "data")
    with pytest.raises(LogGap, match="without its empty folders"):
        run_sql([tiny], "select count(*) from rollouts")
    found = doctor(tiny.path)
    lost = [p["file"] for p in found["problems"] if "lie in cold files" in p["why"]]
    assert not found["ok"] and lost
    for folder in lost:
        (tiny.path / folder).mkdir(parents=True, exist_ok=True)
    assert run_sql([tiny], "select count(*) from rollouts") == before
    assert doctor(tiny.path)["ok"]


def test_there_is_no_epoch_0(tiny: Log) -> None:
    with pytest.raises(ConfigError, match=r"no epoch 0 in this log; known: \[1, 2\]"):
        run_sql([tiny], "select 1 from rollouts", 0)


JOINED = "select r.seq, w.seq, w.seq from rollouts r join rewards w using (rollout_id) limit 1"


def test_no_column_is_lost_because_another_has_its_name(
    tiny: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sql", str(tiny.path), JOINED, "--format", "json"]) == 0
    assert [*json.loads(capsys.readouterr().out)[0]] == ["seq", "seq_1", "seq_2"]
    for style in ("parquet", "jsonl"):
        export([tiny], tmp_path, style, query=JOINED)
    assert pq.read_table(tmp_path / "query.parquet").column_names == ["seq", "seq_1", "seq_2"]
    assert len(json.loads((tmp_path / "query.jsonl").read_text())) == 3


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (pa.float32(), float("inf"), 1e300),
        (pa.float32(), 3e38, np.float64(-1e39)),
        (pa.large_list(pa.float32()), [float("inf"), 1.0], [1.0, 1e300]),
        (pa.large_list(pa.float32()), np.array([1e30]), np.array([1e300])),
        (pa.float16(), 6e4, 7e4),
    ],
)
def test_a_number_too_large_for_its_column_is_no_infinity(
    log: Log, kind: pa.DataType, good: object, bad: object
) -> None:
    with log.writer(user_schemas={"x_own": pa.schema([("v", kind)])}, linger_s=60) as w:
        ticket = w.append("x_own", {"v": good})
        with pytest.raises(SegmentRejected, match="out of range"):
            w.append("x_own", {"v": bad})
        w.flush()
        assert np.allclose(log.row(ticket.result())["v"], good)


def test_columns_of_one_name_are_refused_when_the_writer_opens(log: Log) -> None:
    schema = pa.schema([("v", pa.int64()), ("v", pa.int32())])
    with pytest.raises(SegmentRejected, match=r"x_own has several columns \['v'\]"):
        log.writer(user_schemas={"x_own": schema})


def test_a_map_may_be_a_dict(log: Log) -> None:
    schema = pa.schema([("v", pa.map_(pa.string(), pa.string()))])
    with log.writer(user_schemas={"x_own": schema}, linger_s=60) as w:
        ticket = w.append("x_own", {"v": {ODD: ODD}})
        w.flush()
        assert log.row(ticket.result())["v"] == [(ODD, ODD)]


def test_text_that_no_terminal_can_show(log: Log, w: Writer) -> None:
    w.append("prompts", make.prompt(dataset=ODD, n=1))
    row = make.segment()
    w.append("segments", row)
    w.append("rewards", make.reward() | {"name": ODD})
    told = make.rollout(status="failed", digests=[row["digest"]])
    w.append("rollouts", told | {"reason": ODD})
    w.flush()
    assert audit(log).n_violations == 0
    command = [sys.executable, "-m", "molt.cli", "tail", str(log.path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert r"ValueError: \ud800" in done.stdout and "rollouts" in done.stdout


def test_an_export_that_fails_leaves_nothing_and_may_be_repeated(
    tiny: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = export_module._jsonl

    def full(reader: pa.RecordBatchReader, target: Path) -> int:
        if target.name == "rewards.jsonl":
            target.write_text("half")
            raise OSError(errno.ENOSPC, "no space left on device")
        return real(reader, target)

    monkeypatch.setitem(export_module.WRITERS, "jsonl", full)
    with pytest.raises(OSError, match="no space"):
        export([tiny], tmp_path / "out", "jsonl", ["segments", "rewards"])
    assert [*(tmp_path / "out").iterdir()] == []
    monkeypatch.undo()
    export([tiny], tmp_path / "out", "jsonl", ["segments", "rewards"])
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["rewards.jsonl", "segments.jsonl"]


def test_a_view_without_rows_becomes_a_dataset(log: Log, tmp_path: Path) -> None:
    from datasets import load_from_disk

    assert export([log], tmp_path, "datasets", ["drops"]) == {"drops": 0}
    found = load_from_disk(str(tmp_path / "drops"))
    assert len(found) == 0 and "reason" in found.column_names
    assert {p.name for p in tmp_path.iterdir()} == {"drops", "log"}


def test_show_tells_a_conflict(log: Log, w: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    make.append_rollout(w, "train-0/0")
    with log.writer(linger_s=60) as other:
        other.append("rewards", make.reward("train-0/0", 0.25))
    w.flush()
    assert cli.main(["show", str(log.path), "train-0/0"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "[conflict: two writers tell it differently]" in shown and "abandoned" not in shown


def test_a_full_disk_is_told_with_the_file(
    log: Log, w: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    ticket = w.append("segments", make.segment())
    monkeypatch.setattr(files.os, "write", full)
    with pytest.raises(OSError, match=rf"No space.*{w.name}"):
        w.flush()
    monkeypatch.undo()
    assert ticket.exception() is not None
    w.append("segments", make.segment())
    w.flush()


def test_what_is_no_log(tiny: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for arguments, why in (
        (["doctor", str(tmp_path / "file")], "is not a molt log"),
        (["sql", str(tmp_path / "file"), "select 1"], "is not a molt log"),
        (["runs", str(tmp_path / "none")], "is not a folder"),
    ):
        assert cli.main(arguments) == 1
        assert why in capsys.readouterr().err
    shutil.rmtree(tiny.path / "train")
    assert cli.main(["tail", str(tiny.path)]) == 0
    with pytest.raises(SystemExit):
        cli.main(["sql", str(tiny.path), "select 1", "--epoch", "x"])
    assert "invalid epoch value: 'x'" in capsys.readouterr().err


def test_doctor_says_what_it_does_not_verify(tiny: Log, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(tiny.path)]) == 0
    n = doctor(tiny.path)["invisible"]
    assert n and f"not verified: {n} commits behind" in capsys.readouterr().out


def test_the_python_of_the_readme_runs(
    tiny: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "Log.open" in c]
    (tmp_path / "runs").mkdir()
    tiny.path.rename(tmp_path / "runs" / "demo")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    address, rows, places = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"2-.*/0#0", address) and rows == "[('guesses', 1.0)]"
    assert "0.x_notes" in places and ".rollouts" in places
