"""Exports open in other tools with the rows that SQL shows; nothing is overwritten."""

import importlib.util
import json
from pathlib import Path

import duckdb
import factories as make
import pandas
import pytest

from molt import cli
from molt.replay.export import DEFAULT, export
from molt.schemas.errors import ConfigError
from molt.store import Log


def test_parquet_opens_in_duckdb_pandas_and_polars(tiny: Log, tmp_path: Path) -> None:
    written = export([tiny], tmp_path, "parquet")
    assert set(written) == set(DEFAULT) and written["segments"] == 7
    file = tmp_path / "segments.parquet"
    expected = tiny.sql("select rollout_id, token_ids from segments order by all").fetchall()
    query = f"select rollout_id, token_ids from '{file}' order by all"
    assert duckdb.sql(query).fetchall() == expected
    frame = pandas.read_parquet(file)
    assert sorted(frame.rollout_id) == [r for r, _ in expected]
    assert list(frame.token_ids.iloc[0]) == dict(expected)[frame.rollout_id.iloc[0]]
    if importlib.util.find_spec("polars"):
        import polars

        assert polars.read_parquet(file).height == len(expected)


def test_jsonl_is_one_row_per_line(tiny: Log, tmp_path: Path) -> None:
    query = "select rollout_id, attempt, reward, lag_max from plans order by step, rollout_id"
    assert export([tiny], tmp_path, "jsonl", query=query) == {"query": 4}
    lines = [json.loads(line) for line in (tmp_path / "query.jsonl").read_text().splitlines()]
    assert lines[0] == {"rollout_id": "train-0/0", "attempt": 0, "reward": 1.0, "lag_max": 0}
    export([tiny], tmp_path, "jsonl", ["segments"])
    first = json.loads((tmp_path / "segments.jsonl").read_text().splitlines()[0])
    assert len(first["digest"]) == 64 and first["token_ids"] == [5, 6, 7, 8, 9]


def test_a_dataset_loads_from_disk(tiny: Log, tmp_path: Path) -> None:
    from datasets import load_from_disk

    assert export([tiny], tmp_path, "datasets", ["segments", "rewards"])["segments"] == 7
    found = load_from_disk(str(tmp_path / "segments"))
    assert len(found) == 7 and found[0]["token_ids"] == [5, 6, 7, 8, 9]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_several_logs_and_refusals(
    tiny: Log, log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with log.writer(linger_s=60) as w:
        make.append_rollout(w, "train-0/0")
    target = str(tmp_path / "out")
    command = ["export", str(tiny.path), str(log.path), "--dir", target, "--view", "rewards"]
    assert cli.main(command) == 0
    assert "rewards: 7 rows" in capsys.readouterr().out
    assert cli.main(command) == 2
    assert "exists" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="nonsense"):
        export([tiny], tmp_path, "parquet", ["nonsense"])
