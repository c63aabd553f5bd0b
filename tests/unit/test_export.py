"""Exports open in other tools with the rows that SQL shows; nothing is overwritten."""

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


def test_parquet_opens_in_duckdb_and_pandas(tiny: Log, tmp_path: Path) -> None:
    written = export([tiny], tmp_path, "parquet")
    assert set(written) == set(DEFAULT) and written["segments"] == 7
    file = tmp_path / "segments.parquet"
    expected = tiny.sql("select rollout_id, token_ids from segments order by all").fetchall()
    query = f"select rollout_id, token_ids from '{file}' order by all"
    assert duckdb.sql(query).fetchall() == expected
    frame = pandas.read_parquet(file)
    assert sorted(frame.rollout_id) == [r for r, _ in expected]
    assert list(frame.token_ids.iloc[0]) == dict(expected)[frame.rollout_id.iloc[0]]


def test_parquet_opens_in_polars(tiny: Log, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars", reason="polars is not installed")
    n = export([tiny], tmp_path, "parquet", ["segments"])["segments"]
    frame = polars.read_parquet(tmp_path / "segments.parquet")
    assert frame.height == n and frame["token_ids"].list.len().sum() == 5 * n - 2


def test_jsonl_is_one_row_per_line(tiny: Log, tmp_path: Path) -> None:
    query = "select rollout_id, attempt, reward, lag_max from plans order by step, rollout_id"
    assert export([tiny], tmp_path, "jsonl", query=query) == {"query": 4}
    lines = [json.loads(line) for line in (tmp_path / "query.jsonl").read_text().splitlines()]
    assert lines[0] == {"rollout_id": "train-0/0", "attempt": 0, "reward": 1.0, "lag_max": 0}
    export([tiny], tmp_path, "jsonl", ["segments"])
    first = json.loads((tmp_path / "segments.jsonl").read_text().splitlines()[0])
    assert len(first["digest"]) == 64 and first["token_ids"] == [5, 6, 7, 8, 9]


def test_jsonl_has_text_as_it_was_appended(log: Log, w, tmp_path: Path) -> None:
    texts = ["a\ud800", "\ufdd0", "\ufdd0d800", "\\ufdd0d800", "plain"]
    for i, text in enumerate(texts):
        prompt = json.dumps({"q": text}, ensure_ascii=False)
        w.append("prompts", make.prompt(i, n=1, dataset=text, prompt=prompt))
        w.append("segments", make.segment(sampling=make.SAMPLING | {"stop": [text]}, segment=i))
    w.flush()
    export([log], tmp_path, "jsonl", ["prompts", "segments"])
    prompts, segments = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("prompts", "segments")
    )
    assert [p["dataset"] for p in prompts] == texts
    assert [json.loads(p["prompt"])["q"] for p in prompts] == texts
    assert [s["sampling"]["stop"] for s in segments] == [[t] for t in texts]


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
