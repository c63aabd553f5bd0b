"""A tiny trainer with experts, its own choices as recordings, and plans for it."""

import socket
from pathlib import Path
from typing import Any

import numpy as np
import torch

from molt.replay.assemble import TrainSequence
from molt.train.packing import Recorded, Wanted, pack
from molt.train.trainer import Trainer, TrainerSettings

LAYERS, TOP_K, EXPERTS = 4, 2, 8


def settings(model: str | Path, **changes: Any) -> TrainerSettings:
    values: dict[str, Any] = {"model": str(model), "lr": 1e-4, "seed": 7, "threads": 1}
    values |= {"microbatch_tokens": 96, "routing": "replay"}
    return TrainerSettings(**(values | changes))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def started(options: TrainerSettings, rank: int = 0, ranks: int = 1, port: int = 0) -> Trainer:
    trainer = Trainer(options, rank, ranks, f"tcp://127.0.0.1:{port or free_port()}")
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
def choices(trainer: Trainer, ids: list[int]) -> np.ndarray:
    """The experts that the trainer itself takes for all but the last token: [T - 1, L, K]."""
    targets = np.array([len(ids) - 1])
    (row,) = pack([Wanted(token_ids=np.array(ids), targets=targets, temperature=1.0)], max_tokens=1)
    trainer.model.logprobs(row)
    trainer.model.reshard()
    assert trainer.routing is not None
    found = [router.recorded_indices for router in trainer.routing.routers]
    return torch.stack(found, 1).numpy().astype(np.uint8)


def plan(trainer: Trainer, seed: int, **shape: int) -> tuple[list[TrainSequence], list[Recorded]]:
    """A plan whose logprobs and experts are the trainer's own at this moment."""
    sequences, recorded = [], []
    for rollout, (ids, start) in token_lists(seed, **shape).items():
        sequences.append(sequence(rollout, ids, start, trainer.score([ids])[0]))
        recorded.append(known(choices(trainer, ids)))
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
