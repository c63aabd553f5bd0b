"""One rank's share of a plan as flat arrays over its trained tokens, checked before any forward.

Suffix: N trained tokens of the rank, sequence by sequence. Invariant: exactly the tokens of the
sequences' masks, once each, with the engine's own logprobs and lags.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from molt.schemas.errors import TrainerError
from molt.train.packing import Recorded, Wanted

if TYPE_CHECKING:
    from molt.replay.assemble import TrainSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Aligned [N] arrays; sequences without a trained token are left out."""

    wanted: list[Wanted]
    rollout_ids: list[str]
    """of each sequence of `wanted`"""
    sequence_N: np.ndarray
    """int64, index into `wanted`"""
    behaviour_N: np.ndarray
    """float32, engine's logprob"""
    advantage_N: np.ndarray
    """float32"""
    lag_N: np.ndarray
    """int64"""
    kept_kv_N: np.ndarray
    """bool, sampled over KV of older weights: `behaviour_N` is of no one version"""

    def take(self, sequences: Sequence[int]) -> tuple[list[Wanted], np.ndarray]:
        """The given sequences and the flat places [n] of their tokens in this batch."""
        places = [np.flatnonzero(self.sequence_N == index) for index in sequences]
        flat = np.concatenate(places) if places else np.zeros(0, np.int64)
        return [self.wanted[index] for index in sequences], flat


def make_batch(
    sequences: Sequence["TrainSequence"], recorded: Sequence[Recorded] | None = None
) -> Batch:
    """Check and flatten; raises TrainerError naming the rollout that cannot be trained on.

    `recorded`: the expert choices of each sequence, if they are to be replayed or compared.
    """
    routings: Sequence[Recorded | None] = recorded or [None] * len(sequences)
    pairs = zip(map(_checked, sequences), routings, strict=True)
    both = [(sequence, routing) for sequence, routing in pairs if sequence.mask.any()]
    kept = [sequence for sequence, _ in both]
    counts = [int(sequence.mask.sum()) for sequence in kept]
    return Batch(
        wanted=[
            Wanted(
                token_ids=sequence.token_ids,
                targets=np.flatnonzero(sequence.mask),
                temperature=sequence.temperature,
                recorded=routing,
            )
            for sequence, routing in both
        ],
        rollout_ids=[sequence.rollout_id for sequence in kept],
        sequence_N=np.repeat(np.arange(len(kept)), counts),
        behaviour_N=_concat([s.logprobs[s.mask] for s in kept], np.float32),
        advantage_N=np.repeat(np.array([s.advantage for s in kept], np.float32), counts),
        lag_N=_concat([s.lag[s.mask] for s in kept], np.int64),
        kept_kv_N=_concat([_over_kept_kv(s)[s.mask] for s in kept], bool),
    )


def mini_batches(batch: Batch, parts: int, rng: np.random.Generator) -> list[list[int]]:
    """Split the sequences into `parts`; all branches of a rollout stay together.

    One part keeps the order of the batch; several are shuffled by `rng`.
    """
    if parts == 1:
        return [list(range(len(batch.wanted)))]
    rollouts = list(dict.fromkeys(batch.rollout_ids))
    part_of = {rollouts[int(at)]: n % parts for n, at in enumerate(rng.permutation(len(rollouts)))}
    split: list[list[int]] = [[] for _ in range(parts)]
    for index, rollout in enumerate(batch.rollout_ids):
        split[part_of[rollout]].append(index)
    return split


def _checked(sequence: "TrainSequence") -> "TrainSequence":
    where = f"rollout {sequence.rollout_id} attempt {sequence.attempt} tip {sequence.tip}"
    n = len(sequence.token_ids)
    lengths = (len(sequence.mask), len(sequence.logprobs), len(sequence.lag))
    if lengths != (n, n, n):
        raise TrainerError(f"{where}: {n} tokens, but (mask, logprobs, lag) have {lengths}")
    if n and sequence.mask[0]:
        raise TrainerError(f"{where}: token 0 is marked trained, but nothing predicts it")
    bad = np.flatnonzero(~np.isfinite(sequence.logprobs) & sequence.mask)
    if len(bad):
        value = sequence.logprobs[bad[0]]
        raise TrainerError(f"{where}: logprob of token {bad[0]} is {value}; audit the log")
    if not np.isfinite(sequence.advantage) or not sequence.temperature > 0.0:
        raise TrainerError(
            f"{where}: advantage {sequence.advantage}, temperature {sequence.temperature}; "
            "the first must be finite, the second positive"
        )
    return sequence


def _over_kept_kv(sequence: "TrainSequence") -> np.ndarray:
    found = np.zeros(len(sequence.token_ids), bool)
    for start, end in sequence.kept_kv:
        found[start:end] = True
    return found


def _concat(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
