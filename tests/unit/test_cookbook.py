"""Every query of replay/README.md runs, and answers with the columns that are printed there."""

import re
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

import molt.replay
from molt.replay.assemble import assemble
from molt.replay.dump import token_table
from molt.replay.sources import Sources
from molt.store import Log
from molt.store.sql import run_sql

README = (Path(molt.replay.__file__).parent / "README.md").read_text()
QUERIES = re.findall(r'^\$ molt sql \S+ "(.*?)"\n\| (.*?) \|\n', README, re.DOTALL | re.MULTILINE)
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_all_are_found() -> None:
    assert len(QUERIES) == README.count("$ molt sql ") >= 9
    assert len(SNIPPETS) == 1


@pytest.mark.parametrize("query, header", QUERIES, ids=[str(i) for i in range(len(QUERIES))])
def test_a_query_runs(honest: Log, query: str, header: str) -> None:
    names, rows = run_sql([honest], query)
    assert names == [name.strip() for name in header.split("|")]
    if "having count(*) > 1" not in query:  # the honest log asks nothing twice
        assert rows


def test_the_snippet_runs_on_a_dump(
    honest: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = next(r for r in honest.records() if r.kind == "plan")
    sequences = assemble(Sources(honest, 1), plan)
    before = np.concatenate([s.logprobs[s.mask] for s in sequences]) + np.float32(0.25)
    (tmp_path / "dump").mkdir()
    pq.write_table(token_table(sequences, {"before": before}), tmp_path / "dump/step-9.parquet")
    monkeypatch.chdir(tmp_path)
    exec(SNIPPETS[0], {})
    assert "0.25" in capsys.readouterr().out and duckdb.__version__
