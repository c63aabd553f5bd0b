"""Routing replay: the training forward takes the experts that the engine took (invariant I3).

Engine and trainer choose experts on their own, and where two router logits nearly tie, rounding
decides; one flipped choice changes every later layer, and the importance ratios with it. So the
recorded choices are put into AutoModel's routers: the *selection* is replayed, its weights are
computed from the live router, so its gradient flows. Unknown tokens keep the live choice.

The same forward yields the check: where live and recorded choices differ. A few do (rounding, and
new weights); the wrong layer, the wrong token or another run's routing make nearly all differ.

Letters: T tokens of a row, L layers with experts, K choices per token.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from nemo_automodel.components.moe.router_replay import RouterReplay
from torch import nn

from molt.schemas.check import repeated_rows
from molt.schemas.errors import ConfigError, TrainerError
from molt.train.batch import Batch
from molt.train.packing import Row

LAYER_TOKENS, SEQUENCE_TOKENS = 32, 8
"""Tokens of a layer or of a sequence below which its share says nothing."""


class Router(RouterReplay):
    """One layer's router: keeps what it chose, and puts the recorded choice in its place."""

    def __init__(self, name: str, gate: Any) -> None:
        """Not in AutoModel's list of all routers of a process: models stay apart."""
        self.mode = None
        self.name, self.top_k, self.n_experts = name, int(gate.topk), int(gate.n_experts)
        self.recorded_indices: torch.Tensor | None = None
        self.target_indices: torch.Tensor | None = None
        self.known_T: torch.Tensor | None = None

    def apply(self, indices: torch.Tensor) -> torch.Tensor:
        """Live choices int64 [T, K] -> the choices to compute with; the same in a recomputation."""
        self.recorded_indices = indices.detach()
        if self.target_indices is None or self.known_T is None:
            return indices
        if self.target_indices.shape != indices.shape:
            raise TrainerError(
                f"router {self.name}: recorded choices {tuple(self.target_indices.shape)} for a "
                f"forward of {tuple(indices.shape)}"
            )
        return torch.where(self.known_T[:, None], self.target_indices, indices)


@dataclass(slots=True)
class Difference:
    """The first place of a sequence where the trainer would choose otherwise."""

    share: float
    text: str


class RoutingTally:
    """What one step sees of live and recorded choices on this rank."""

    def __init__(self, n_layers: int) -> None:
        self.compared = np.zeros(n_layers, np.int64)
        self.differing = np.zeros(n_layers, np.int64)
        self.n_tokens = self.n_known = self.longest_run = 0
        self.first_in_layer: dict[int, str] = {}
        self.worst_sequence = Difference(0.0, "")
        self.live: tuple[np.ndarray, torch.Tensor] | None = None
        """(places in the batch, logprobs) of tokens computed without replay"""
        self.worst_share = 0.0
        """Of all ranks, after `add_up`; the counts above are then of all ranks too."""

    def add_up(self) -> None:
        """Counts of all ranks together. Collective; once per step."""
        local = [self.n_tokens, self.n_known, *self.compared, *self.differing]
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (local, self.longest_run, self.worst_sequence.share))
        counts = np.sum([counts for counts, _, _ in parts], 0)
        self.n_tokens, self.n_known = (int(n) for n in counts[:2])
        self.compared, self.differing = counts[2:].reshape(2, -1)
        self.longest_run = max(longest for _, longest, _ in parts)
        self.worst_share = max(share for _, _, share in parts)

    def shares(self) -> np.ndarray:
        """Differing of the compared tokens, per layer: float64 [L]."""
        found: np.ndarray = self.differing / np.maximum(self.compared, 1)
        return found


class RoutingReplay:
    """The routers of one model under `train.routing` = "replay" or "freeze"."""

    def __init__(
        self, module: nn.Module, mode: str, *, mismatch_max: float, coverage_min: float
    ) -> None:
        """Takes hold of every router; ConfigError for a model without experts."""
        self.mode, self.mismatch_max, self.coverage_min = mode, mismatch_max, coverage_min
        self.routers: list[Router] = []
        for name, gate in gates(module):
            gate.router_replay = Router(name, gate)
            self.routers.append(gate.router_replay)
        if not self.routers:
            raise ConfigError(f"train.routing = {mode!r} needs a model with experts; set 'off'")
        self.begin_step()

    def begin_step(self) -> None:
        """Count from nothing."""
        self.tally = RoutingTally(len(self.routers))

    @property
    def shape(self) -> dict[str, int]:
        """What `RoutingReader` needs to know of the model."""
        first = self.routers[0]
        return {"layers": len(self.routers), "top_k": first.top_k, "n_experts": first.n_experts}

    @contextlib.contextmanager
    def row(self, row: Row) -> Iterator[None]:
        """Replay the choices of `row` in forward *and* backward (which may compute it again)."""
        if self.mode == "replay" and row.recorded is not None:
            self._set(row)
        try:
            yield
        finally:
            for router in self.routers:
                router.target_indices = router.known_T = router.recorded_indices = None

    def _set(self, row: Row) -> None:
        assert row.recorded is not None
        experts_TLK = torch.from_numpy(row.recorded.experts_TLK.astype(np.int64))
        known_T = torch.from_numpy(row.recorded.known_T)
        if torch.cuda.is_available():
            experts_TLK, known_T = experts_TLK.cuda(), known_T.cuda()
        for layer, router in enumerate(self.routers):
            router.target_indices, router.known_T = experts_TLK[:, layer], known_T

    def observe(self, row: Row, rollouts: list[str]) -> None:
        """Compare the live choices of the forward that just ran with the recorded ones."""
        if row.recorded is None:
            return
        tally, known_T, n_T = self.tally, row.recorded.known_T, len(row.input_ids_T)
        live_TLK = torch.stack([_chosen(r) for r in self.routers], 1).cpu().numpy()
        told_TLK = row.recorded.experts_TLK
        differs_TL = (np.sort(live_TLK, -1) != np.sort(told_TLK, -1)).any(-1) & known_T[:, None]
        tally.n_tokens, tally.n_known = tally.n_tokens + n_T, tally.n_known + int(known_T.sum())
        tally.compared += int(known_T.sum())
        tally.differing += differs_TL.sum(0)
        tally.longest_run = max(tally.longest_run, repeated_rows(told_TLK[known_T]))
        if not differs_TL.any():
            return

        def describe(token: int, layer: int) -> str:
            return (
                f"{rollouts[row.sequence_T[token]]}, token {row.position_ids_T[token]}, layer "
                f"{self.routers[layer].name}: recorded experts {told_TLK[token, layer].tolist()}, "
                f"the trainer chooses {live_TLK[token, layer].tolist()}"
            )

        for layer in np.flatnonzero(differs_TL.any(0)).tolist():
            first = int(differs_TL[:, layer].argmax())
            tally.first_in_layer.setdefault(layer, describe(first, layer))
        is_trained_T = np.zeros(n_T, bool)
        is_trained_T[row.keep_R] = True
        for sequence in np.unique(row.sequence_T).tolist():
            mine_T = (row.sequence_T == sequence) & known_T
            for part_T in (mine_T, mine_T & is_trained_T):  # a long prompt hides a wrong reply
                share = float(differs_TL[part_T].sum()) / max(differs_TL[part_T].size, 1)
                if part_T.sum() >= SEQUENCE_TOKENS and share > tally.worst_sequence.share:
                    token, layer = np.argwhere(differs_TL & part_T[:, None])[0].tolist()
                    tally.worst_sequence = Difference(share, describe(token, layer))

    def check(self, step: int) -> None:
        """TrainerError, on every rank, if a layer or a sequence differs too often. Collective."""
        tally = self.tally
        tally.add_up()
        shares_L = np.where(tally.compared >= LAYER_TOKENS, tally.shares(), 0.0)
        layer = int(shares_L.argmax())
        if max(tally.worst_share, shares_L[layer]) <= self.mismatch_max:
            return
        found, place = float(shares_L[layer]), tally.first_in_layer.get(layer)
        what = f"of the tokens in layer {self.routers[layer].name}"
        if tally.worst_share >= found:
            found, what = (
                tally.worst_share,
                "of the token-layers of one sequence or of its trained part",
            )
            place = tally.worst_sequence.text if tally.worst_sequence.share == found else None
        raise TrainerError(
            f"step {step}: recorded and live experts differ in {found:.0%} {what}, limit "
            f"{self.mismatch_max:.0%} (limits.routing_mismatch). {place or 'See the other ranks'}. "
            "The recorded routing is not that of these tokens, layers or weights: look for rows "
            "that are shifted, layers in another order, another run's routing; no update was made"
        )

    def check_coverage(self, batch: Batch) -> None:
        """TrainerError for a sequence of which too little was recorded, before any forward."""
        for rollout, wanted in zip(batch.rollout_ids, batch.wanted, strict=True):
            known_T = np.zeros(int(wanted.targets[-1]), bool)
            if wanted.recorded is not None:
                known_T = wanted.recorded.known_T
            if known_T.mean() < self.coverage_min:
                raise TrainerError(
                    f"rollout {rollout}: experts are recorded for {int(known_T.sum())} of "
                    f"{len(known_T)} tokens, the first unknown one is {int((~known_T).argmax())}; "
                    f"limit {self.coverage_min:.0%} (limits.routing_coverage). Routing was lost "
                    "between the engine and the log; set train.routing = 'off' to train without it"
                )

    def metrics(self, batch: Batch, prepared_N: torch.Tensor) -> dict[str, Any]:
        """Of a step that was checked: coverage, mismatch, and the gaps if sampled. Collective."""
        tally = self.tally
        shares_L = tally.shares()
        found = {
            "coverage": tally.n_known / max(tally.n_tokens, 1),
            "mismatch": float(tally.differing.sum() / max(tally.compared.sum(), 1)),
            "mismatch_max": float(shares_L.max()),
            "mismatch_max_layer": self.routers[int(shares_L.argmax())].name,
            "longest_run": tally.longest_run,
        }
        if tally.live is not None:
            places, live_N = tally.live
            told_N = batch.behaviour_N[places].astype(np.float64)
            both = (prepared_N[torch.from_numpy(places)].numpy(), live_N.numpy())
            sums = torch.tensor([len(places), *(np.abs(own_N - told_N).sum() for own_N in both)])
            dist.all_reduce(sums)
            n, replayed, live = sums.tolist()
            found |= {"gap_replayed": replayed / n, "gap_live": live / n}
        return found


def gates(module: nn.Module) -> list[tuple[str, Any]]:
    """The routers of an AutoModel in the order of its layers, by clean name."""
    found = [(n, m) for n, m in module.named_modules() if hasattr(m, "router_replay")]
    return [(n.replace("_checkpoint_wrapped_module.", ""), m) for n, m in found]


def _chosen(router: Router) -> torch.Tensor:
    assert router.recorded_indices is not None, f"router {router.name} did not run"
    return router.recorded_indices
