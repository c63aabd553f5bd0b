"""Area `versions`: P22, P24."""

import factories as make

from molt.replay.assemble import assemble
from molt.store import Log, Writer
from molt.store.sql import run_sql


def test_p22_a_weight_update_inside_a_sequence(log: Log, w: Writer) -> None:
    case = make.load_case("P22")
    given, expected = case["given"], case["expected"]
    n, at = given["tokens"], given["refit_at"]
    before, after = given["versions"]["before"], given["versions"]["after"]
    for version in range(1, after + 1):
        log.control.put("policy", [make.policy(1, version)])
    runs = [(1, before, at), (1, after, n - at)]
    swapped = make.segment(ids=list(range(n)), runs=runs, kv="recomputed")
    plain = make.segment(rollout_id="train-0/1", ids=list(range(n)), version=after)
    tickets = [w.append("segments", row) for row in (swapped, plain)]
    w.flush()
    stored = [
        [[r["version"], r["n"]] for r in log.row(t.result())["version_runs"]] for t in tickets
    ]
    assert stored == [expected["version_runs"], expected["sequence_with_no_refit"]]
    query = "select min(version), max(version) from tokens where rollout_id = 'train-0/0'"
    assert run_sql([log], query)[1] == [[expected["min"], expected["max"]]]
    header = make.plan_header(after + 1, max_lag=0)
    row = make.plan_row("train-0/0", [tickets[0].result()], decision="mask", lag_max=1)
    log.control.put("plan", [row], header)
    (sequence,) = assemble(log, log.records()[-1])
    trainable = expected["tokens_trainable_if_max_lag_0_at_v5"]
    assert int(sequence.mask.sum()) == trainable
    assert run_sql([log], "select lag, n_tokens from lag order by lag")[1] == [
        [0, trainable],
        [1, n - trainable],
    ]


def test_p24_a_resume_is_another_append(log: Log, w: Writer) -> None:
    case = make.load_case("P24")
    first, resume, expected = case["given"]["first"], case["given"]["resume"], case["expected"]
    for version in range(1, resume["version"] + 1):
        log.control.put("policy", [make.policy(1, version)])
    # The given mask says which tokens may be trained; the case's runs cover all three of them.
    root = make.segment(
        ids=first["ids"], train=first["mask"], version=first["version"], finish_reason="partial"
    )
    a = w.append("segments", root)
    w.flush()
    before = {p: p.read_bytes() for p in make.data_commits(log.path)}
    child = make.segment(
        segment=1,
        parent=0,
        keep=len(first["ids"]),
        parent_digest=root["digest"],
        ids=resume["ids"],
        sampled=resume["mask"],
        version=resume["version"],
    )
    b = w.append("segments", child)
    w.flush()
    rewritten = any(p.read_bytes() != raw for p, raw in before.items())
    assert rewritten is expected["log_rewritten"]
    query = "select token_id, train, version from tokens order by segment, pos"
    tokens = run_sql([log], query)[1]
    assert [t[0] for t in tokens] == expected["ids"]
    assert [t[1] for t in tokens] == expected["mask_in_log"]
    runs = [log.row(t.result())["version_runs"] for t in (a, b)]
    assert [[r["version"], r["n"]] for rs in runs for r in rs] == expected["version_runs"]
    refs = [a.result(), b.result()]
    row = make.plan_row("train-0/0", refs, tip=1, decision="mask", lag_max=1)
    header = make.plan_header(resume["version"] + 1, max_lag=0)
    log.control.put("plan", [row], header)
    (sequence,) = assemble(log, log.records()[-1])
    assert sequence.token_ids.tolist() == expected["ids"]
    assert sequence.mask.astype(int).tolist() == expected["mask_in_batch"]
