"""Area `mask`: P04, P11 (P12 is driven in test_algo and test_trainer, P14 in test_planning)."""

import factories as make
import numpy as np
import pytest

from molt.train.batch import make_batch
from molt.train.packing import Wanted, pack, predictors

pytest.importorskip("torch", reason="the trainer's batch needs the extra `cpu` or `gpu`")


def sequence(ids: list[int], mask: list[int]) -> object:
    from molt.replay.assemble import TrainSequence

    return TrainSequence(
        group_id="train-0",
        rollout_id="train-0/0",
        attempt=0,
        tip=0,
        token_ids=np.array(ids, np.int32),
        mask=np.array(mask, bool),
        logprobs=np.zeros(len(ids), np.float32),
        lag=np.zeros(len(ids), np.int64),
        advantage=1.0,
        temperature=1.0,
    )


def test_p11_one_shift_from_the_mask_axis_to_the_next_token_axis() -> None:
    case = make.load_case("P11")
    given, expected = case["given"], case["expected"]["next_token_axis"]
    ids = np.array(given["ids"], np.int32)
    targets = np.flatnonzero(given["mask_on_tokens"])
    (row,) = pack([Wanted(token_ids=ids, targets=targets, temperature=1.0)], max_tokens=64)
    assert row.input_ids_T.tolist() == expected["inputs"]
    trained = [expected["targets"][i] for i, m in enumerate(expected["mask"]) if m]
    assert row.target_ids_N.tolist() == trained
    assert row.keep_R[row.logits_N].tolist() == np.flatnonzero(expected["mask"]).tolist()
    assert predictors(targets).tolist() == np.flatnonzero(expected["mask"]).tolist()


def test_p11_counts_are_sums_and_never_spans() -> None:
    case = make.load_case("P11")
    mask = case["given"]["gapped_mask"]
    batch = make_batch([sequence(list(range(len(mask))), mask)])
    assert len(batch.sequence_N) == case["expected"]["gapped_trainable"]
    assert len(batch.sequence_N) != case["expected"]["gapped_span_would_be"]


def test_p04_a_real_eos_that_equals_the_pad_id_is_trained() -> None:
    case = make.load_case("P04")
    given = case["given"]
    pairs = zip(given["ragged"], given["loss_mask"], strict=True)
    batch = make_batch([sequence(ids, mask) for ids, mask in pairs])
    assert len(batch.sequence_N) == case["expected"]["trainable_tokens"]
    rows = pack(batch.wanted, max_tokens=64)
    targets = [int(t) for row in rows for t in row.target_ids_N]
    assert targets.count(given["pad_id"]) == 2, "both sampled EOS tokens are targets"
