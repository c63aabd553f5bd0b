"""Area `sql`: P43."""

import factories as make
import pyarrow as pa

from molt.schemas.errors import SegmentRejected
from molt.store import Log, Writer
from molt.store.sql import run_sql


def test_p43_nan_cannot_poison_an_average(log: Log, w: Writer) -> None:
    results = []
    for i, value in enumerate(make.load_case("P43")["given"]["rewards"]):
        try:
            w.append("rewards", make.reward(f"train-0/{i}", float(value)))
            results.append("stored")
        except SegmentRejected:
            results.append("refused")
    w.append("rewards", make.reward("train-0/3", None))
    w.flush()
    assert results == ["stored", "stored", "refused"]
    query = "select avg(value), max(value), count(*), count(value) from rewards"
    assert run_sql([log], query)[1] == [[0.5, 1.0, 3, 2]]


def test_p43_a_null_list_and_an_empty_list_stay_different(log: Log) -> None:
    case = make.load_case("P43")
    schema = pa.schema(
        [pa.field("i", pa.int64(), nullable=False), pa.field("xs", pa.large_list(pa.float32()))]
    )
    with log.writer(user_schemas={"x_lists": schema}) as w:
        tickets = [
            w.append("x_lists", {"i": i, "xs": xs}) for i, xs in enumerate(case["given"]["lists"])
        ]
    found = run_sql([log], "select len(xs), typeof(xs) from x_lists order by i")[1]
    assert [r[0] for r in found] == case["expected"]["len_column"]
    assert found[0][1] == case["given"]["measured_duckdb_2_0_1"]["large_list_type"]
    back = [log.row(t.result())["xs"] for t in tickets]
    assert back[0] is None and list(back[1]) == [] and list(back[2]) == [1.0]
    full = run_sql([log], "select i from (select * from x_lists offset 0) where len(xs) = 0")[1]
    assert run_sql([log], "select i from x_lists where len(xs) = 0")[1] == full == [[1]]
