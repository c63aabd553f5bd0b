"""The lag rule: one function, one SQL macro, equal answers."""

import itertools

import pytest

from molt.replay.lag import POLICIES, decide, holds_back
from molt.store import Log

CASES = list(itertools.product([None, 0, 1, 2, 3, 4, 5], [0, 1, 2], POLICIES))


def test_the_sql_macro_is_the_same_rule(log: Log) -> None:
    values = ", ".join(
        f"({'null' if lag is None else lag}::bigint, {limit}, '{policy}')"
        for lag, limit, policy in CASES
    )
    query = f"""
        select lag_decision(lag, max_lag, policy)
        from (values {values}) as t(lag, max_lag, policy)
    """
    found = [row[0] for row in log.sql(query).fetchall()]
    assert found == [decide(*case) for case in CASES]
    assert set(found) == {"train", "mask", "drop"}


@pytest.mark.parametrize(
    ("lag_next", "max_lag", "progress", "held"),
    [
        (1, 1, 0.99, False),  # at the limit, not over it
        (2, 1, 0.99, True),
        (2, 1, 0.8, False),  # not nearly there: passed over once
        (3, 1, 0.0, True),  # would be dropped: waited for whatever its length
        (1, 0, 0.0, True),  # strictly on-policy waits for everybody
        (4, 2, 0.5, False),
        (5, 2, 0.5, True),
    ],
)
def test_who_is_waited_for(lag_next: int, max_lag: int, progress: float, held: bool) -> None:
    assert holds_back(lag_next, max_lag, progress) is held
    if held:
        assert decide(lag_next - 1, max_lag, "wait") == "train", "nothing is held and then dropped"
