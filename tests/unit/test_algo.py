"""Advantages and token losses, by hand and from the recorded cases P12, P15 and P18."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from molt.replay.assemble import TrainSequence
from molt.schemas.errors import ConfigError, TrainerError
from molt.train.advantages import ESTIMATORS, TOLERANCE, advantages, zero_variance
from molt.train.algo import LOSSES, LossInputs, cispo, grpo, k3
from molt.train.batch import make_batch, mini_batches
from molt.train.metrics import gap_summary, mismatch
from molt.train.settings import AlgoConfig

CASES = Path(__file__).parents[1] / "cases"


def case(name: str) -> dict:
    return json.loads((CASES / f"{name}.json").read_text())


def sequence(rollout: str = "train-0/0", **changes: object) -> TrainSequence:
    """Four tokens, the last two trained."""
    values: dict = {
        "group_id": rollout.split("/")[0],
        "rollout_id": rollout,
        "attempt": 0,
        "tip": 0,
        "token_ids": np.array([4, 5, 6, 7], np.int32),
        "mask": np.array([0, 0, 1, 1], bool),
        "logprobs": np.array([0, 0, -0.5, -1.0], np.float32),
        "lag": np.array([0, 0, 1, 1]),
        "advantage": 0.5,
        "temperature": 1.0,
    }
    return TrainSequence(**(values | changes))


def inputs(new: list[float], **changes: list[float]) -> LossInputs:
    """All logprobs equal to `new` unless given."""
    base = {"old_N": new, "behaviour_N": new, "advantage_N": [1.0] * len(new)} | changes
    tensors = {name: torch.tensor(value) for name, value in base.items()}
    return LossInputs(new_N=torch.tensor(new, requires_grad=True), **tensors)


def gradient(loss_N: torch.Tensor, batch: LossInputs) -> list[float]:
    return torch.autograd.grad(loss_N.sum(), batch.new_N)[0].tolist()


# -- rollout-level advantages ----------------------------------------------------------------------


def test_p15_zero_variance_is_decided_on_the_whole_group() -> None:
    p15 = case("P15")
    assert p15["given"]["tolerance"] == TOLERANCE
    groups, expected = p15["given"]["groups"], p15["expected"]
    assert [zero_variance(group) for group in groups] == expected["zero_variance"]
    for group, bound in zip(groups, expected["max_abs_advantage"], strict=True):
        for name in ESTIMATORS:
            for std in (False, True):
                values = advantages(group, [True] * len(group), name, std)
                largest = max(map(abs, values))
                assert largest > 0 if bound == "> 0" else largest == bound
                assert len(values) == len(group)
    mixed = advantages(groups[2], [True] * len(groups[2]))
    assert sum(a != 0.0 for a in mixed) == expected["kept_rollouts_of_the_mixed_group"]


def test_p18_statistics_are_over_rollouts_and_rows_share_the_advantage() -> None:
    p18 = case("P18")
    rollouts = p18["given"]["rollouts"]
    values = advantages([r["reward"] for r in rollouts], [True] * len(rollouts))
    rows = [a for a, r in zip(values, rollouts, strict=True) for _ in range(r["rows"])]
    assert rows == p18["expected"]["row_advantages"]
    assert rollouts[0]["reward"] - values[0] == p18["expected"]["baseline"]


def test_unscored_rollouts_and_those_outside_the_baseline() -> None:
    assert advantages([1.0, None, 0.0], [True, True, True]) == [0.5, 0.0, -0.5]
    assert advantages([1.0, 0.0, 5.0], [True, True, False]) == [0.5, -0.5, 4.5]
    assert advantages([1.0, 0.0, 5.0], [True, True, False], "rloo") == [1.0, -1.0, 4.5]
    assert advantages([1.0, 2.0], [False, False]) == [0.0, 0.0]
    assert advantages([None, None], [True, True]) == [0.0, 0.0]
    assert advantages([], []) == []


def test_rloo_leaves_the_rollout_itself_out() -> None:
    assert advantages([1.0, 0.0, 0.0, 1.0], [True] * 4, "rloo") == pytest.approx(
        [2 / 3, -2 / 3, -2 / 3, 2 / 3]
    )


def test_division_by_the_standard_deviation_is_an_option() -> None:
    values = advantages([1.0, 0.0], [True, True], std_normalize=True)
    assert values == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-4)


def test_bad_rewards_and_names_are_refused() -> None:
    with pytest.raises(TrainerError, match="group member 1"):
        advantages([1.0, float("nan")], [True, True])
    for name in ESTIMATORS:
        with pytest.raises(TrainerError, match=r"1\.7e\+308 are too large"):
            advantages([1.7e308, 1.6e308], [True, True], name)
    with pytest.raises(ConfigError, match="'ppo'"):
        advantages([1.0], [True], "ppo")
    assert set(ESTIMATORS) == set(LOSSES)


def test_the_estimators_need_no_torch() -> None:
    code = (
        "import sys, molt.train.advantages, molt.train.settings; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CASES.parents[1])


# -- token losses ----------------------------------------------------------------------------------


def test_one_on_policy_update_is_the_policy_gradient() -> None:
    batch = inputs([-1.0, -2.0], advantage_N=[1.0, -3.0])
    loss_N = grpo(batch, AlgoConfig())
    assert loss_N.tolist() == [-1.0, 3.0]
    assert gradient(loss_N, batch) == [-1.0, 3.0]


def test_the_importance_weight_is_truncated_and_has_no_gradient() -> None:
    batch = inputs([-1.0, -1.0], behaviour_N=[-1.5, -9.0])
    loss_N = grpo(batch, AlgoConfig(is_cap=2.0))
    assert loss_N.tolist() == pytest.approx([-math.exp(0.5), -2.0])
    assert gradient(loss_N, batch) == pytest.approx([-math.exp(0.5), -2.0])
    uncapped = grpo(batch, AlgoConfig(is_cap=None))
    assert uncapped.tolist() == pytest.approx([-math.exp(0.5), -math.exp(8.0)])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "has_gradient"),
    [
        (1.5, 1.0, -1.2, False),
        (1.5, -1.0, 1.5, True),
        (0.5, -1.0, 0.9, False),
        (0.5, 1.0, -0.5, True),
    ],
)
def test_ppo_clip(ratio: float, advantage: float, expected: float, has_gradient: bool) -> None:
    new = [math.log(ratio)]
    batch = inputs(new, old_N=[0.0], behaviour_N=[0.0], advantage_N=[advantage])
    loss_N = grpo(batch, AlgoConfig(clip_low=0.1, clip_high=0.2))
    assert loss_N.tolist() == pytest.approx([expected])
    assert (gradient(loss_N, batch)[0] != 0.0) == has_gradient


def test_cispo_keeps_the_gradient_of_every_token() -> None:
    batch = inputs([-1.0], behaviour_N=[-9.0], advantage_N=[-1.0])
    assert gradient(cispo(batch, AlgoConfig(is_cap=2.0)), batch) == [2.0]


def test_the_kl_penalty_pulls_towards_the_reference() -> None:
    batch = inputs([-1.0], advantage_N=[0.0], reference_N=[-2.0])
    loss_N = grpo(batch, AlgoConfig(kl_coef=0.5))
    assert loss_N.tolist() == pytest.approx([0.5 * (math.exp(-1.0) + 1.0 - 1.0)])
    assert gradient(loss_N, batch)[0] > 0.0
    assert k3(torch.zeros(3)).tolist() == [0.0] * 3


def test_p12_masked_tokens_are_not_in_the_batch() -> None:
    p12 = case("P12")
    rows = [np.array([0, *row], bool) for row in p12["given"]["mask"]]
    arrays = {name: np.zeros(3, dtype) for name, dtype in [("logprobs", np.float32), ("lag", int)]}
    ids = np.arange(3, dtype=np.int32)
    batch = make_batch([sequence(token_ids=ids, mask=mask, **arrays) for mask in rows])
    assert (len(batch.wanted), len(batch.sequence_N)) == (0, 0)


# -- the batch -------------------------------------------------------------------------------------


def test_a_batch_holds_each_trained_token_once() -> None:
    batch = make_batch([sequence("train-0/0"), sequence("train-0/1", advantage=-0.5)])
    assert batch.sequence_N.tolist() == [0, 0, 1, 1]
    assert batch.behaviour_N.tolist() == [-0.5, -1.0, -0.5, -1.0]
    assert batch.advantage_N.tolist() == [0.5, 0.5, -0.5, -0.5]
    assert batch.lag_N.tolist() == [1, 1, 1, 1]
    assert [w.targets.tolist() for w in batch.wanted] == [[2, 3], [2, 3]]
    assert batch.take([1])[1].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": np.array([0, 0, np.nan, 0], np.float32)}, "logprob of token 2 is nan"),
        ({"mask": np.array([1, 0, 0, 0], bool)}, "token 0 is marked trained"),
        ({"lag": np.zeros(3, int)}, "4 tokens, but"),
        ({"advantage": float("nan")}, "advantage nan"),
        ({"temperature": 0.0}, "temperature 0.0"),
    ],
)
def test_bad_sequences_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(TrainerError, match=f"rollout train-7/3 attempt 0 tip 0: .*{message}"):
        make_batch([sequence("train-7/3", **changes)])


def test_mini_batches_keep_rollouts_whole_and_lose_nothing() -> None:
    batch = make_batch([sequence(f"train-0/{i}") for i in (0, 0, 1, 2, 3, 3)])
    split = mini_batches(batch, 2, np.random.default_rng(0))
    assert sorted(i for part in split for i in part) == list(range(6))
    assert not {batch.rollout_ids[i] for i in split[0]} & {batch.rollout_ids[i] for i in split[1]}
    assert mini_batches(batch, 1, np.random.default_rng(0)) == [list(range(6))]


def test_mismatch_is_reported_by_lag() -> None:
    gap_N = np.array([0.0, 0.1, -0.3])
    summary = mismatch(gap_N, np.array([0, 1, 1]), np.zeros(3, bool))
    assert set(summary) == {"all", "0", "1"}
    assert summary["0"] == {"n": 1, "mean": 0.0, "p999": 0.0, "max": 0.0, "k3": 0.0}
    assert summary["1"]["mean"] == pytest.approx(0.2)
    expected = (math.exp(0.1) - 1.1 + math.exp(-0.3) - 0.7) / 2
    assert summary["1"]["k3"] == pytest.approx(expected)
    assert gap_summary(np.zeros(0))["n"] == 0
    apart = mismatch(gap_N, np.array([0, 1, 1]), np.array([False, False, True]))
    assert {name: found["n"] for name, found in apart.items()} == {
        **{"all": 3, "0": 1, "1": 1},
        "kept": 1,
    }
