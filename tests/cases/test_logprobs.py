"""Area `logprobs`: P19, P20."""

import factories as make
import numpy as np
import pytest

from molt.replay.assemble import assemble
from molt.schemas.errors import LogCorrupt, SegmentRejected
from molt.store import Log, Writer
from molt.store.sql import run_sql


def log_softmax(logits: list[float], temperature: float) -> np.ndarray:
    x = np.array(logits) / temperature
    return x - np.log(np.exp(x).sum())


def test_p19_kind_and_temperature_are_recorded_and_bits_survive(log: Log, w: Writer) -> None:
    case = make.load_case("P19")
    given, expected = case["given"], case["expected"]
    raw = log_softmax(given["logits"], 1.0)[given["sampled"]]
    processed = log_softmax(given["logits"], given["temperature"])[given["sampled"]]
    assert raw == pytest.approx(expected["raw"], abs=1e-9)
    assert processed == pytest.approx(expected["processed"], abs=1e-9)
    assert raw / given["temperature"] == pytest.approx(expected["raw_divided_by_T_is_wrong"])
    sampling = {**make.SAMPLING, "temperature": given["temperature"], "top_p": 0.9, "top_k": 5}
    for i, (kind, value) in enumerate((("raw", raw), ("processed", processed))):
        row = make.segment(
            rollout_id=f"train-0/{i}",
            ids=[0],
            logprobs=[float(value)],
            logprobs_kind=kind,
            sampling=sampling,
        )
        ticket = w.append("segments", row)
        w.flush()
        back = log.row(ticket.result())
        assert back["logprobs"].tobytes() == np.float32(value).tobytes()
        assert (back["logprobs_kind"], back["sampling"]["temperature"]) == (kind, 0.5)
    bits = np.float32(given["float32_bits"])
    stored = run_sql([log], "select logprobs[1] from segments where logprobs_kind = 'raw'")[1][0][0]
    assert np.float32(stored).tobytes() == bits.tobytes()
    query = "select sampling.top_p, sampling.top_k from segments limit 1"
    assert run_sql([log], query)[1] == [[0.9, 5]]


def test_p19_a_batch_of_two_kinds_is_refused_by_name(log: Log, w: Writer) -> None:
    rows = []
    for i, kind in enumerate(("raw", "processed")):
        who = f"train-0/{i}"
        ticket = w.append("segments", make.segment(rollout_id=who, logprobs_kind=kind))
        w.flush()
        rows.append(make.plan_row(who, [ticket.result()]))
    log.control.put("plan", rows, make.plan_header(1))
    with pytest.raises(LogCorrupt, match=r"train-0/0 .* is raw.*train-0/1 .* is processed"):
        assemble(log, log.records()[-1])


def test_p20_a_sampled_token_has_a_finite_logprob(log: Log, w: Writer) -> None:
    case = make.load_case("P20")
    given = case["given"]
    results = []
    for i, variant in enumerate(given["logprob_variants"]):
        logprobs = [float(v) if isinstance(v, str) else v for v in variant]
        row = make.segment(
            rollout_id=f"train-0/{i}", ids=given["ids"], sampled=given["mask"], logprobs=logprobs
        )
        try:
            w.append("segments", row)
            results.append("accepted")
        except SegmentRejected as error:
            assert f"train-0/{i} attempt 0 segment 0" in str(error)
            results.append(f"rejected at {1 if 'index 1' in str(error) else '?'}")
    w.flush()
    assert results == case["expected"]["results"]
    assert run_sql([log], "select count(*) from segments")[1] == [[case["expected"]["rows_after"]]]
