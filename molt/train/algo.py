"""Token losses: logprobs of one microbatch -> one loss per trained token (pure functions).

Stands between the forward and the backward pass. Suffix: N trained tokens. Normalisation is not
done here: the trainer divides by the trained tokens of all ranks, so neither microbatches nor ranks
nor branches change the loss.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from molt.train.settings import AlgoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Aligned [N] float32 tensors; only `new_N` carries a gradient."""

    new_N: torch.Tensor
    """log pi(a|s) under the weights being updated"""
    old_N: torch.Tensor
    """log pi(a|s) under the weights at the start of the step"""
    behaviour_N: torch.Tensor
    """log pi(a|s) recorded by the engine that sampled the token"""
    advantage_N: torch.Tensor
    reference_N: torch.Tensor | None = None
    """log pi(a|s) under the run's first weights; needed when kl_coef > 0"""


def importance_weight(log_ratio_N: torch.Tensor, cap: float | None) -> torch.Tensor:
    """min(exp(log_ratio), cap) without gradient: truncated importance sampling."""
    weight_N = log_ratio_N.detach().exp()
    return weight_N if cap is None else weight_N.clamp(max=cap)


def k3(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """exp(x) - x - 1 >= 0 with x = log(q/p), for samples of p: Schulman's k3 of KL(p|q)."""
    return log_ratio_N.expm1() - log_ratio_N


def ratio_bounds(algo: AlgoConfig) -> tuple[float, float]:
    """PPO's bounds of pi_new / pi_old."""
    low = 0.0 if algo.clip_low is None else 1.0 - algo.clip_low
    high = float("inf") if algo.clip_high is None else 1.0 + algo.clip_high
    return low, high


def grpo(batch: LossInputs, algo: AlgoConfig) -> torch.Tensor:
    """-w min(ratio A, clip(ratio) A) [N]; ratio = pi_new/pi_old, w = capped pi_old/pi_engine."""
    weight_N = importance_weight(batch.old_N - batch.behaviour_N, algo.is_cap)
    ratio_N = (batch.new_N - batch.old_N).exp()
    gain_N = torch.minimum(
        ratio_N * batch.advantage_N, ratio_N.clamp(*ratio_bounds(algo)) * batch.advantage_N
    )
    return _with_kl(-weight_N * gain_N, batch, algo)


def cispo(batch: LossInputs, algo: AlgoConfig) -> torch.Tensor:
    """-w A log pi_new, w = truncated pi_new/pi_engine; MiniMax-M1 (2025), section 3.1; [N]."""
    weight_N = importance_weight(batch.new_N - batch.behaviour_N, algo.is_cap)
    return _with_kl(-weight_N * batch.advantage_N * batch.new_N, batch, algo)


def _with_kl(loss_N: torch.Tensor, batch: LossInputs, algo: AlgoConfig) -> torch.Tensor:
    if algo.kl_coef == 0.0 or batch.reference_N is None:
        return loss_N
    return loss_N + algo.kl_coef * k3(batch.reference_N - batch.new_N)


LOSSES: dict[str, Callable[[LossInputs, AlgoConfig], torch.Tensor]] = {
    "grpo": grpo,
    "rloo": grpo,
    "cispo": cispo,
}
"""By algorithm name; the estimators of the same names are in advantages.py."""
