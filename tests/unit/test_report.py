"""The verdict "learned" can be failed: its two conditions are tested one by one."""

import numpy as np
import pytest

from molt.recipes.addition import score
from molt.report import bootstrap, judge


def accuracy(n_right: int, n: int = 113) -> np.ndarray:
    return np.arange(n) < n_right


RISING = [0.2] * 5 + [0.3] * 15 + [0.6] * 5
FLAT = [0.25] * 25


def test_a_run_that_learns() -> None:
    found = judge(RISING, accuracy(25), accuracy(70))
    assert found.learned and found.gain_low > 0


@pytest.mark.parametrize(
    ("rewards", "before", "after"),
    [
        (FLAT, 25, 70),  # the reward did not rise
        (RISING, 40, 40),  # nothing new on held-out prompts
        (RISING, 40, 42),  # not more than chance
        (RISING, 70, 25),
        ([0.2] * 5 + [0.34] * 5, 25, 70),  # rise below the threshold
        (RISING[:8], 25, 70),  # too few steps to say
    ],
)
def test_runs_that_do_not(rewards: list[float], before: int, after: int) -> None:
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(accuracy(after)) if after - before == 2 else accuracy(after)
    assert not judge(rewards, accuracy(before), shuffled).learned


def test_no_evaluation_is_no_learning() -> None:
    found = judge(RISING, np.zeros(0, bool), np.zeros(0, bool))
    assert not found.learned and found.gain is None


def test_bootstrap_interval_holds_the_mean_and_narrows_with_n() -> None:
    small = bootstrap(accuracy(10, 40), accuracy(20, 40))
    large = bootstrap(accuracy(100, 400), accuracy(200, 400))
    assert small[0] == large[0] == 0.25
    assert small[1] < small[0] < small[2]
    assert large[2] - large[1] < small[2] - small[1]


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("<answer>12</answer>", "stop", 1.0),
        (" <answer> 12 </answer>\n", "stop", 1.0),
        ("<answer>13</answer>", "stop", 0.2),
        ("The answer is <answer>12</answer>", "stop", 0.0),
        ("<answer>12</answer>", "length", 0.0),
        ("12", "stop", 0.0),
    ],
)
def test_the_demos_reward(text: str, reason: str, expected: float) -> None:
    assert score(text, 12, reason) == expected
