"""Packed rows: every target sees exactly its own sequence, common prefixes are laid out once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.train.packing import Row, Wanted, idle_row, pack, predictors


def wanted(ids: list[int], targets: list[int] | None = None, temperature: float = 1.0) -> Wanted:
    chosen = np.array(range(1, len(ids)) if targets is None else targets)
    return Wanted(token_ids=np.array(ids, np.int32), targets=chosen, temperature=temperature)


def context_of(row: Row, target: int) -> list[int]:
    """The ids that the predictor of a target attends to, in order of their position ids."""
    predictor = row.keep_R[row.logits_N[target]]
    n = len(row.input_ids_T)
    mask_TT = np.tri(n, dtype=bool) if row.mask_TT is None else row.mask_TT
    seen = np.flatnonzero(mask_TT[predictor])
    order = np.argsort(row.position_ids_T[seen])
    assert list(row.position_ids_T[seen][order]) == list(range(len(seen)))
    return row.input_ids_T[seen][order].tolist()


def check_rows(items: list[Wanted], rows: list[Row]) -> None:
    """Each target of the batch stands in one row, with its sequence's ids before it as context."""
    expected = [(item, int(at)) for item in items for at in item.targets]
    slots = np.concatenate([row.slot_N for row in rows])
    assert sorted(slots) == list(range(len(expected)))
    for row in rows:
        assert len(np.unique(row.keep_R)) <= len(row.keep_R) <= len(row.input_ids_T) * 3
        for target, slot in enumerate(row.slot_N):
            item, at = expected[slot]
            assert context_of(row, target) == item.token_ids[:at].tolist()
            assert row.target_ids_N[target] == item.token_ids[at]
            assert row.temperature_R[row.logits_N[target]] == np.float32(item.temperature)


def test_the_example_of_the_module() -> None:
    sequences = ([7, 8, 1, 2, 0], [7, 8, 1, 3, 0], [7, 9, 0])
    (row,) = pack([wanted(ids) for ids in sequences], max_tokens=100)
    assert row.input_ids_T.tolist() == [7, 8, 1, 2, 3, 9]
    assert row.position_ids_T.tolist() == [0, 1, 2, 3, 3, 1]


def test_the_first_token_of_a_suffix_is_predicted_by_the_last_prefix_token() -> None:
    items = [wanted([5, 6, 1, 2], [2, 3]), wanted([5, 6, 3, 4], [2, 3])]
    (row,) = pack(items, max_tokens=100)
    first = [row.keep_R[row.logits_N[list(row.slot_N).index(slot)]] for slot in (0, 2)]
    assert first == [1, 1]
    assert row.input_ids_T.tolist() == [5, 6, 1, 3]
    assert row.mask_TT is not None
    assert predictors(np.array([1, 4])).tolist() == [0, 3]


def test_what_predicts_nothing_is_not_computed() -> None:
    (row,) = pack([wanted([1, 2, 3, 4, 5, 6], [2])], max_tokens=100)
    assert row.input_ids_T.tolist() == [1, 2]
    assert row.mask_TT is None
    assert row.keep_R.tolist() == [1]


def test_rows_keep_to_the_limit_and_a_long_sequence_stands_alone() -> None:
    items = [wanted(list(range(start, start + 6))) for start in (0, 100, 200)]
    items.append(wanted(list(range(300, 340))))
    rows = pack(items, max_tokens=12)
    assert [len(row.input_ids_T) for row in rows] == [10, 5, 39]
    check_rows(items, rows)


def test_without_sharing_each_sequence_is_one_causal_row() -> None:
    items = [wanted([1, 2, 3, 4]), wanted([1, 2, 3, 5])]
    rows = pack(items, max_tokens=100, share=False)
    assert [row.mask_TT for row in rows] == [None, None]
    check_rows(items, rows)


def test_an_idle_row_has_one_token_and_no_target() -> None:
    row = idle_row()
    assert (len(row.input_ids_T), len(row.keep_R), len(row.slot_N)) == (1, 1, 0)
    assert pack([], max_tokens=8) == []


@st.composite
def batches(draw: st.DrawFn) -> list[Wanted]:
    """Up to 6 sequences over 3 ids, so that prefixes, duplicates and nesting are common."""
    items = []
    for _ in range(draw(st.integers(1, 6))):
        ids = draw(st.lists(st.integers(0, 2), min_size=2, max_size=9))
        targets = draw(st.sets(st.integers(1, len(ids) - 1), min_size=1))
        items.append(wanted(ids, sorted(targets), draw(st.sampled_from([1.0, 0.7]))))
    return items


@given(batches(), st.sampled_from([1, 7, 100]), st.booleans())
def test_any_batch_is_laid_out_exactly(items: list[Wanted], limit: int, share: bool) -> None:
    check_rows(items, pack(items, max_tokens=limit, share=share))


@given(batches())
def test_the_layout_does_not_depend_on_the_order(items: list[Wanted]) -> None:
    forward = pack(items, max_tokens=7)
    backward = pack(items[::-1], max_tokens=7)
    for one, other in zip(forward, backward, strict=True):
        assert one.input_ids_T.tolist() == other.input_ids_T.tolist()
        assert one.position_ids_T.tolist() == other.position_ids_T.tolist()


@pytest.mark.parametrize("n", [1, 8])
def test_common_tokens_are_counted_once(n: int) -> None:
    prompt = list(range(100, 150))
    items = [wanted([*prompt, i, 9], [50, 51]) for i in range(n)]
    (row,) = pack(items, max_tokens=1000)
    assert len(row.input_ids_T) == 50 + n
