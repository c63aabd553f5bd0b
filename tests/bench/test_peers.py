"""The benchmarks compare stores that give back what was written, each in its own way."""

from pathlib import Path

import peers
import pytest
import report
import rounds
import sql_bench
import store_bench
from workload import Packed, Workload

WORKLOAD = Workload(20)


@pytest.mark.parametrize(
    "kind",
    [*peers.STANDARD, peers.MoltRows, peers.MoltAhead, peers.MoltGroupedUncompressed, *peers.EXTRA],
    ids=lambda kind: kind.__name__,
)
def test_a_peer_gives_back_what_was_appended(tmp_path: Path, kind: type[peers.Peer]) -> None:
    if kind.missing():
        pytest.skip(f"{kind.needs} is not installed")
    store = kind(tmp_path / "store", WORKLOAD)
    for i in range(0, 20, 4):
        store.append(i, i + 4)
    store.close()
    out = Packed(WORKLOAD.n_tokens)
    store.read(out)
    assert out.n == WORKLOAD.n_tokens
    out.check(WORKLOAD)
    assert store.disk_bytes() > WORKLOAD.n_tokens


def test_other_values_are_seen() -> None:
    out = Packed(WORKLOAD.n_tokens)
    out.put({k: v for k, v in WORKLOAD.flat.items()})
    out.flat["ids"][-1] += 1
    with pytest.raises(AssertionError, match="ids"):
        out.check(WORKLOAD)


def test_the_same_sql_gives_the_same_answers(tmp_path: Path) -> None:
    found = report.Report()
    sql_bench.bench_sql(tmp_path, WORKLOAD, found)
    assert len(found.targets) == 2 and "native DuckDB" in found.markdown("")
    kinds = [kind for kind in (peers.Raw, peers.JsonlOrjson, *peers.EXTRA) if not kind.missing()]
    sql_bench.bench_sql_peers(tmp_path, WORKLOAD, kinds, found)
    assert "| JSONL + zstd (orjson) |" in found.markdown("")
    row = sql_bench.whole_log(tmp_path / "sweep", WORKLOAD, 30)
    assert row[0] == "30"


def test_ratios_are_taken_within_rounds() -> None:
    fast, slow = rounds.Rate((10.0, 100.0, 40.0)), rounds.Rate((5.0, 50.0, 10.0))
    assert fast.ratio(slow) == 2.0 and fast.median == 40.0
    assert store_bench.COMMITS.keys() == store_bench.COMMITS_SLOW.keys()
