"""A log as a run would have left it, without an engine: a tiny model's own samples and logprobs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import factories as make
import numpy as np
import torch
from tiny import load, tiny_tied_llama
from transformers import LlamaForCausalLM

from molt.config import build
from molt.model import folder_digests
from molt.store import Log, Writer

GROUPS, ROLLOUTS = 6, 3


def config_of(model: str, log: str, **algo: Any) -> dict[str, Any]:
    from molt.config import Config

    tree = {
        "model": model,
        "run": {"dir": log, "steps": 3},
        "data": {"train": "tasks:plain_prompts", "groups_per_step": 2, "rollouts_per_group": 3},
        "agent": {"env": "tasks:Letters"},
        "train": {"lr": 1e-3},
        "algo": {"mini_batches": 2, **algo},
        "checkpoint": {"every": 2, "keep": 2},
    }
    return asdict(build(Config, tree, ""))


def recorded_log(folder: Path, *, shift: int = 0, seed: int = 0) -> Log:
    """Six groups of three finished rollouts of two turns, sampled by version 1.0. No plans.

    In all but the first of a group the second turn rewrites the end of the first: two branches.

    `shift` displaces the logprobs of each segment before anything is sealed.
    """
    model_folder = tiny_tied_llama(folder / "model")
    model = load(model_folder)
    log = Log.create(folder / "log", run_id=f"source-{seed}")
    make.open_epoch(
        log,
        config=json.dumps(config_of(model_folder, str(log.path))),
        digests=folder_digests(model_folder),
        threads=2,
    )
    probe = {"mean_gap": 1e-6, "p999_gap": 1e-6, "max_gap": 1e-6, "k3": 0.0}
    weights = exported_digest(model)
    log.control.put("policy", [make.policy(1, 0, weights_digest=weights, probe=probe)])
    torch.manual_seed(seed)
    with log.writer(linger_s=60) as w:
        for k in range(GROUPS):
            w.append("prompts", make.prompt(k, n=ROLLOUTS))
            for i in range(ROLLOUTS):
                play(w, model, f"train-{k}/{i}", k + seed, shift)
    return log


def exported_digest(model: LlamaForCausalLM) -> str:
    from molt.digests import weights_digest

    named = {n: p for n, p in model.state_dict().items() if n != "lm_head.weight"}
    return weights_digest(named.items())


def play(w: Writer, model: LlamaForCausalLM, who: str, k: int, shift: int) -> None:
    prompt = [257, 117, 10 + k, 258, 257]
    first, logprobs = sample(model, prompt, 8)
    root = make.segment(
        rollout_id=who,
        ids=prompt + first,
        sampled=[0] * 5 + [1] * 8,
        logprobs=[None] * 5 + list(np.roll(logprobs, shift)),
    )
    keep = 13 if who.endswith("/0") else 9
    tool = [258, 30 + k]
    second, more = sample(model, (prompt + first)[:keep] + tool, 6)
    child = make.segment(
        rollout_id=who,
        segment=1,
        parent=0,
        keep=keep,
        parent_digest=root["digest"],
        ids=tool + second,
        sampled=[0] * 2 + [1] * 6,
        logprobs=[None] * 2 + list(np.roll(more, shift)),
    )
    w.append("segments", root)
    w.append("segments", child)
    w.append("rewards", make.reward(who, sum(t < 128 for t in first + second) / 14))
    counts = {"sampled": 14, "context": 7, "regenerated": 0}
    tips = [root["digest"], child["digest"]] if keep < 13 else [child["digest"]]
    w.append("rollouts", make.rollout(who, digests=tips, n_segments=2, counts=counts))
    w.flush()


def sample(model: LlamaForCausalLM, ids: list[int], n: int) -> tuple[list[int], list[float]]:
    out: list[int] = []
    logprobs: list[float] = []
    with torch.no_grad():
        for _ in range(n):
            row = model(torch.tensor([ids + out])).logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(row.exp(), 1))
            out.append(token)
            logprobs.append(float(row[token]))
    return out, logprobs
