"""A trainer rank outside Ray that shows what it does: traces of a step, state kept and put back.

Suffix: N trained tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from molt.replay.assemble import TrainSequence
from molt.train.actor import TrainerActor
from molt.train.algo import LOSSES, LossInputs
from molt.train.batch import Batch
from molt.train.metrics import Tally
from molt.train.settings import AlgoConfig
from molt.train.trainer import copied, put_back


class OfflineTrainer(TrainerActor):
    """The same steps as in a run; nothing of how they are computed is different."""

    _trace: tuple[Batch, torch.Tensor] | None = None

    def keep_state(self) -> dict[str, torch.Tensor]:
        """A copy of everything that a step changes."""
        return copied(self._state())

    def put_state(self, kept: dict[str, torch.Tensor]) -> None:
        """Bring back what `keep_state` copied."""
        put_back(self._state(), kept)

    def _train(self, step: int, batch: Batch, tally: Tally) -> None:
        super()._train(step, batch, tally)
        self._trace = (batch, tally.prepared_N.clone())

    def traced(self, step: int, sequences: Sequence[TrainSequence]) -> dict[str, Any]:
        """Execute a step: {"outcome", "before", "after", "weight", "advantage"} over its N tokens.

        `before` and `after` are log pi around the step, float32; `weight` is d loss / d log pi of
        each token at its start, before the division by N.
        """
        self._trace = None
        outcome = self.execute(step, sequences)
        if self._trace is None:  # no trained token
            none = np.zeros(0, np.float32)
            named = ("before", "after", "weight", "advantage")
            return {"outcome": outcome, **dict.fromkeys(named, none)}
        batch, before_N = self._trace
        after_N = self._forward(self._pack(batch.wanted), len(before_N))
        return {
            "outcome": outcome,
            "before": before_N.numpy(),
            "after": after_N.numpy(),
            "weight": loss_weights(batch, before_N, self.settings),
            "advantage": batch.advantage_N,
        }

    @property
    def bytes_read(self) -> int:
        """Decoded bytes of the commits that plans were assembled from."""
        return sum(s.bytes_read for s in self._sources.values())

    @property
    def commits_read(self) -> int:
        return sum(len(s.commits) for s in self._sources.values())


def loss_weights(batch: Batch, before_N: torch.Tensor, algo: AlgoConfig) -> np.ndarray:
    """d loss / d log pi [N] at the start of a step, the KL term apart; float32."""
    new_N = before_N.clone().requires_grad_()
    inputs = LossInputs(
        new_N=new_N,
        old_N=before_N,
        behaviour_N=torch.from_numpy(batch.behaviour_N),
        advantage_N=torch.from_numpy(batch.advantage_N),
    )
    LOSSES[algo.loss](inputs, algo).sum().backward()
    assert new_N.grad is not None
    return new_N.grad.numpy()
