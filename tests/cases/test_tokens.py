"""Area `tokens`: P01, P05, P06, P07."""

import gzip
from pathlib import Path

import factories as make
import numpy as np
import pytest

from molt.schemas.check import Parent
from molt.schemas.errors import SegmentRejected
from molt.store import Log, Writer
from molt.store.branches import branches
from molt.store.snapshot import Snapshot
from molt.store.sql import run_sql

TOKENIZERS = Path(__file__).parents[3] / "shared" / "data" / "tokenizers"


def qwen3():
    """The recorded tokenizer, which is too large for the repository."""
    packed = TOKENIZERS / "qwen3_tokenizer.json.gz"
    if not packed.is_file():
        pytest.skip("the recorded tokenizers (../shared/data/tokenizers) are not here")
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer.from_str(gzip.decompress(packed.read_bytes()).decode())


def stored_ids(log: Log, w: Writer, ids: list[int], **more) -> list[int]:
    ticket = w.append("segments", make.segment(ids=ids, **more))
    w.flush()
    return log.row(ticket.result())["token_ids"].tolist()


def test_p01_sampled_ids_are_the_record(log: Log, w: Writer) -> None:
    case = make.load_case("P01")
    for i, one in enumerate(case["given"]["sampled"]):
        assert stored_ids(log, w, one["ids"], rollout_id=f"train-0/{i}") == one["ids"]
    in_sql = run_sql([log], "select token_ids from segments order by rollout_id")[1]
    assert [r[0] for r in in_sql] == [one["ids"] for one in case["given"]["sampled"]]


def test_p01_text_would_have_changed_them() -> None:
    case, tokenizer = make.load_case("P01"), qwen3()
    drift = 0
    for one, other in zip(
        case["given"]["sampled"], case["expected"]["reencoded_would_be"], strict=True
    ):
        assert tokenizer.decode(one["ids"], skip_special_tokens=False) == one["text"]
        again = tokenizer.encode(one["text"], add_special_tokens=False).ids
        assert again == other
        drift += again != one["ids"]
    assert drift == case["expected"]["audit_drift_count"]


def test_p01_a_segment_may_end_inside_a_character(log: Log, w: Writer) -> None:
    ids = make.load_case("P01")["given"]["split_utf8"]["ids"]
    root = make.segment(ids=ids[:1], finish_reason="partial")
    w.append("segments", root)
    child = {"segment": 1, "parent": 0, "keep": 1, "parent_digest": root["digest"]}
    w.append("segments", make.segment(ids=ids[1:], **child))
    w.flush()
    query = "select token_id from tokens order by segment, pos"
    assert [r[0] for r in run_sql([log], query)[1]] == ids
    (_, _, family), *rest = Snapshot(log).links()
    assert rest == [] and [b.n_tokens for b in branches(family)] == [len(ids)]


def test_p05_an_eos_for_framing_is_not_sampled(log: Log, w: Writer) -> None:
    case = make.load_case("P05")
    given, expected = case["given"]["cases"], case["expected"]
    rows = []
    for i, one in enumerate(given):
        framing = one.get("framing_appended", [])
        sampled = [1] * len(one["ids"]) + [0] * len(framing)
        row = make.segment(
            rollout_id=f"train-0/{i}",
            ids=one["ids"] + framing,
            sampled=sampled,
            finish_reason=one["finish_reason"],
        )
        ticket = w.append("segments", row)
        w.flush()
        rows.append(log.row(ticket.result()))
    assert [len(r["token_ids"]) for r in rows] == expected["stored_lengths"]
    assert [int(r["train"].sum()) for r in rows] == expected["trainable"]
    assert [r["finish_reason"] == "length" for r in rows] == expected["truncated"]
    query = "select logprobs[-1] from segments where rollout_id = 'train-0/3'"
    assert run_sql([log], query)[1] == [[expected["logprob_of_framing_token"]]]
    for row in rows:
        again = np.float32(-0.25)  # what the same policy gives
        ratios = np.exp(again - row["logprobs"][row["train"] == 1])
        assert ratios.tolist() == [expected["importance_ratio_same_policy"]] * len(ratios)
    framing_trained = make.segment(ids=[10, 11, 151645], sampled=[1, 1, 0], train=[1, 1, 1])
    with pytest.raises(SegmentRejected, match="index 2, where the token was not sampled"):
        w.append("segments", framing_trained)


def test_p06_columns_of_unequal_length_are_refused(log: Log, w: Writer) -> None:
    case = make.load_case("P06")
    first, second = case["given"]["append"]
    w.append("segments", make.segment(ids=first["ids"], logprobs=first["logprobs"]))
    row = make.segment(rollout_id="train-0/1", ids=second["ids"], logprobs=second["logprobs"])
    why = case["expected"]["second"].removeprefix("rejected: ")
    with pytest.raises(SegmentRejected, match=why):
        w.append("segments", row)
    w.flush()
    assert run_sql([log], "select len(token_ids) from segments")[1] == [[4]]
    assert case["expected"]["rows_after"] == 1


def test_p07_the_delta_between_turns_is_contiguous(w: Writer) -> None:
    """`keep` + new context is the next prompt. A delta that is too short claims a longer `keep`."""
    given = make.load_case("P07")["given"]
    total, prompt = given["prev_total"], given["next_prompt_ids_len"]
    root = make.segment(ids=list(range(total)))
    w.append("segments", root)

    def turn(n_delta: int) -> dict:
        return make.segment(
            segment=1,
            parent=0,
            keep=prompt - n_delta,
            parent_digest=root["digest"],
            ids=list(range(n_delta + 1)),
            sampled=[0] * n_delta + [1],
        )

    with pytest.raises(SegmentRejected, match=f"keep 15 .* 1 to {total} of its chain"):
        w.append("segments", turn(given["claimed_delta_len"]))
    assert prompt - total == 8
    w.append("segments", turn(8))
    w.flush()
    # Text is no part of it: the same rules hold when the parent is only known by its lengths.
    assert Parent(digest=root["digest"], n_chain=total, n_own=total).n_chain == total
