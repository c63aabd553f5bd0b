"""A tiny trainer with experts, its own choices as recordings, and plans for it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from molt.process import rendezvous
from molt.replay.assemble import TrainSequence
from molt.train.packing import Recorded, Wanted, pack
from molt.train.routing import gates
from molt.train.trainer import Trainer, TrainerSettings

LAYERS, TOP_K, EXPERTS = 4, 2, 8
TIE = 1e-4
"""Router logits this close may be ordered either way by two float32 programs; they spread by 1."""


def settings(model: str | Path, **changes: Any) -> TrainerSettings:
    values: dict[str, Any] = {"model": str(model), "lr": 1e-4, "seed": 7, "threads": 1}
    values |= {"microbatch_tokens": 96, "routing": "replay"}
    return TrainerSettings(**(values | changes))


def started(options: TrainerSettings, rank: int = 0, ranks: int = 1, meeting: str = "") -> Trainer:
    trainer = Trainer(options, rank, ranks, meeting or rendezvous())
    trainer.start()
    return trainer


def sequence(rollout_id: str, ids: list[int], start: int, logprobs: np.ndarray) -> TrainSequence:
    """Tokens from `start` on are trained; `logprobs` are those of tokens 1.. of the sequence."""
    mask = np.arange(len(ids)) >= start
    member = int(rollout_id.rpartition("/")[2])
    return TrainSequence(
        group_id=rollout_id.rpartition("/")[0],
        rollout_id=rollout_id,
        attempt=0,
        tip=0,
        token_ids=np.array(ids, np.int32),
        mask=mask,
        logprobs=np.where(mask, np.concatenate([[0.0], logprobs]), 0.0).astype(np.float32),
        lag=np.zeros(len(ids), np.int64),
        advantage=1.0 - 0.6 * member,
        temperature=1.0,
        chain=((0, len(ids)),),
    )


def token_lists(seed: int, groups: int = 3, members: int = 3) -> dict[str, tuple[list[int], int]]:
    """rollout -> (ids, first trained token): groups with a common prompt, replies that fork."""
    rng, out = np.random.default_rng(seed), {}
    for group in range(groups):
        prompt = rng.integers(10, 300, 14).tolist()
        for member in range(members):
            reply = rng.integers(4, 9, int(rng.integers(5, 12))).tolist()
            out[f"train-{group}/{member}"] = (prompt + reply, len(prompt))
    return out


@torch.no_grad()
def routed(
    trainer: Trainer, ids: list[int], told: Recorded | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The trainer's own experts [T - 1, L, K] for all but the last token, and its router logits
    float32 [T - 1, L, E]; both under the experts `told` of the earlier layers and tokens.
    """
    wanted = Wanted(
        token_ids=np.array(ids), targets=np.array([len(ids) - 1]), temperature=1.0, recorded=told
    )
    (row,) = pack([wanted], max_tokens=1)
    logits: list[torch.Tensor] = []

    def keep(gate: Any, inputs: Any, _output: Any) -> None:
        logits.append(torch.nn.functional.linear(inputs[0].flatten(0, -2), gate.weight))

    hooks = [gate.register_forward_hook(keep) for _, gate in gates(trainer.model.module)]
    assert trainer.routing is not None
    try:
        with trainer.routing.row(row):
            trainer.model.logprobs(row)
            experts = [router.recorded_indices for router in trainer.routing.routers]
    finally:
        for hook in hooks:
            hook.remove()
        trainer.model.reshard()
    own, logits_TLE = (torch.stack(part, 1).cpu() for part in (experts, logits))
    return own.numpy().astype(np.uint8), logits_TLE.float().numpy()


def agree(trainer: Trainer, ids: list[int], told: Recorded) -> np.ndarray:
    """Where `told` are the trainer's own experts, or tie with them within TIE.

    Bool [known tokens, L]. The told ones are replayed, so that one tie does not spread to later
    layers and tokens.
    """
    own, logits = routed(trainer, ids, told)
    taken, offered = (
        np.sort(np.take_along_axis(logits, experts.astype(np.int64), -1), -1)
        for experts in (told.experts_TLK, own)
    )
    agreed: np.ndarray = (np.abs(offered - taken) <= TIE).all(-1)
    return agreed[told.known_T]


def plan(trainer: Trainer, seed: int, **shape: int) -> tuple[list[TrainSequence], list[Recorded]]:
    """A plan whose logprobs and experts are the trainer's own at this moment."""
    sequences, recorded = [], []
    for rollout, (ids, start) in token_lists(seed, **shape).items():
        sequences.append(sequence(rollout, ids, start, trainer.score([ids])[0]))
        recorded.append(known(routed(trainer, ids)[0]))
    return sequences, recorded


def known(experts_TLK: np.ndarray) -> Recorded:
    return Recorded(experts_TLK=experts_TLK, known_T=np.ones(len(experts_TLK), bool))


def other_choices(recorded: list[Recorded], seed: int) -> list[Recorded]:
    """Experts drawn anew for every token: what no router would choose."""
    rng = np.random.default_rng(seed)
    drawn = []
    for r in recorded:
        experts = rng.random((*r.experts_TLK.shape[:2], EXPERTS)).argsort(-1)[..., :TOP_K]
        drawn.append(known(experts.astype(np.uint8)))
    return drawn
