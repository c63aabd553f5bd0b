"""Numbers of one step: what it accumulates, and how far trainer and engine disagree, by lag (I3).

Suffix: N trained tokens (of this rank in `Tally`, of all ranks elsewhere).
"""

import resource
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from molt.train.algo import LossInputs, ratio_bounds
from molt.train.batch import Batch
from molt.train.settings import AlgoConfig


class Tally:
    """What one step accumulates on this rank."""

    def __init__(self, batch: Batch) -> None:
        self.prepared_N = torch.zeros(len(batch.sequence_N))
        """log pi under the weights at the start of the step"""
        self.reference_N: torch.Tensor | None = None
        self.is_single = True
        """one update only: it sees the prepared logprobs itself"""
        self.loss = 0.0
        self.kl = 0.0
        """mean k3 towards the reference weights, at the start of the step"""
        self.clipped = np.zeros(3)
        """tokens seen by all updates, ratios below 1 - clip_low, ratios above 1 + clip_high"""
        self.grad_norm = 0.0
        self.updates = 0
        self.packed_tokens = 0
        names = ("prepare", "forward", "backward", "optimizer", "digest")
        self.seconds = dict.fromkeys(names, 0.0)

    def count_clipped(self, inputs: LossInputs, algo: AlgoConfig) -> None:
        """Add one row's tokens to `clipped`."""
        ratio_N = (inputs.new_N.detach() - inputs.old_N).exp()
        low, high = ratio_bounds(algo)
        below, above = int((ratio_N < low).sum()), int((ratio_N > high).sum())
        self.clipped += [len(ratio_N), below, above]


def clip_fractions(tally: Tally) -> dict[str, float]:
    """Shares of token ratios outside PPO's bounds, over all updates. Collective."""
    n, below, above = gather(tally.clipped[None]).sum(0).tolist()
    return {"clip_low_frac": below / max(n, 1), "clip_high_frac": above / max(n, 1)}


OFFSET_TOKENS_MIN = 64
OFFSET_GAP_MIN = 0.05


def offset(batch: Batch, prepared_N: torch.Tensor) -> dict[str, Any]:
    """Whether logprobs look as if they belonged to the token before or after (I3). Collective.

    Compares the engine's logprob of token i with the trainer's of tokens i - 1, i, i + 1 of the
    same sequence, where the engine's is below -0.5. "shift" is the place that halves the mean gap
    (-1 or 1), 0 if none does, None for too few "tokens"; "gap" is in place, "gap_shifted" the
    lower one beside it.
    """
    new_N, old_N = prepared_N.numpy().astype(np.float64), batch.behaviour_N.astype(np.float64)
    inner_N = np.zeros(len(old_N), bool)
    if len(old_N) > 2:
        same_N = batch.sequence_N[1:] == batch.sequence_N[:-1]
        inner_N[1:-1] = same_N[1:] & same_N[:-1] & (old_N[1:-1] < -0.5)
    at = np.flatnonzero(inner_N)
    mine = [[np.abs(old_N[at] - new_N[at + k]).sum() for k in (-1, 0, 1)] + [len(at)]]
    *sums, n = gather(np.array(mine)).sum(0).tolist()
    before, here, after = (total / max(n, 1) for total in sums)
    best = min(before, after)
    is_shifted = here > OFFSET_GAP_MIN and 2 * best < here
    shift = (-1 if before < after else 1) if is_shifted else 0
    known = n >= OFFSET_TOKENS_MIN
    return {
        "shift": shift if known else None,
        "tokens": int(n),
        "gap": here if known else None,
        "gap_shifted": best if known else None,
    }


def gap_summary(gap_N: np.ndarray) -> dict[str, float]:
    """Mean, p99.9 and maximum of |gap|, and k3 of gap = log pi_trainer - log pi_engine."""
    if not len(gap_N):
        return {"n": 0, "mean": 0.0, "p999": 0.0, "max": 0.0, "k3": 0.0}
    size_N = np.abs(gap_N)
    return {
        "n": len(gap_N),
        "mean": float(size_N.mean()),
        "p999": float(np.quantile(size_N, 0.999)),
        "max": float(size_N.max()),
        "k3": float(np.mean(np.expm1(gap_N) - gap_N)),
    }


def mismatch(
    gap_N: np.ndarray, lag_N: np.ndarray, kept_kv_N: np.ndarray
) -> dict[str, dict[str, float]]:
    """`gap_summary` over all tokens ("all") and for each lag ("0", "1", ...).

    Tokens sampled over KV of older weights count apart ("kept"): at lag 0 too they have a gap.
    """
    summaries = {"all": gap_summary(gap_N)}
    if kept_kv_N.any():
        summaries["kept"] = gap_summary(gap_N[kept_kv_N])
    gap_N, lag_N = gap_N[~kept_kv_N], lag_N[~kept_kv_N]
    for lag in np.unique(lag_N):
        summaries[str(int(lag))] = gap_summary(gap_N[lag_N == lag])
    return summaries


def policy_gaps(batch: Batch, prepared_N: torch.Tensor, is_cap: float | None) -> dict[str, Any]:
    """Mismatch by lag, mean importance ratio and the share of ratios over the cap. Collective."""
    gap_N = gather(prepared_N.numpy().astype(np.float64) - batch.behaviour_N)
    ratio_N, n = np.exp(gap_N), max(len(gap_N), 1)
    return {
        "mismatch": mismatch(gap_N, gather(batch.lag_N), gather(batch.kept_kv_N)),
        "ratio_mean": float(ratio_N.sum()) / n,
        "is_clip_frac": 0.0 if is_cap is None else int((ratio_N > is_cap).sum()) / n,
    }


def gather(local: np.ndarray) -> np.ndarray:
    """Concatenation over the ranks, in rank order. Collective."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    return np.concatenate(parts)


def rss_peak_bytes() -> int:
    """Peak resident memory of this process (Linux reports KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
