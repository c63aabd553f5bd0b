"""What goes into the engine and comes out of it: plain records that cross process borders.

Free of vLLM and torch, so that the driver and the rollout workers can import them cheaply.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from molt.rollout.routing import RoutingRuns, merge_runs
from molt.schemas.records import Ref


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """`[engine]` of the configuration."""

    count: int = 1
    """Engines; every one holds a whole copy of the model."""
    dtype: str = "float32"
    """Of weights and KV cache; must be the trainer's (a mixture hides small updates)."""
    max_model_len: int = 512
    """Tokens of prompt and completion together."""
    max_num_seqs: int = 64
    kv_cache_gib: float = 1.0
    kv: str = "recomputed"
    """At a refit, of sequences in flight: "recomputed" under the new weights, or "kept": no prefill
    on resume, but the rest of the sequence is sampled over KV of older weights. What was sampled so
    is marked, is not held against the limits of lag-0 tokens, and later turns compute anew."""
    weight_transfer: str = "gloo"
    """"gloo" on CPU, "nccl" on GPUs."""
    threads: int = 2


@dataclass(frozen=True, kw_only=True)
class EngineSettings(EngineConfig):
    """What one engine is told."""

    model: str
    """Folder of a Hugging Face checkpoint, or a hub id that is already in the cache."""
    seed: int = 0
    """Of the process; single requests are not reproducible (see `Sampling`)."""
    routing: bool = False
    """Return the experts that served each token; the model must have experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What one call of the engine sampled, or a piece of it."""

    token_ids: np.ndarray
    """int32 [n], every sampled token, the stop token included."""
    logprobs: np.ndarray
    """float32 [n], log p of each under the distribution it was drawn from: after temperature,
    top_p, top_k, min_p. Greedy tokens carry the plain log-softmax (temperature 1)."""
    version_runs: tuple[tuple[int, int, int], ...]
    """(epoch, version, number of tokens); the numbers add up to n."""
    finish_reason: str
    """"stop", "length" or "abort". A piece that is not the last: "partial" where the engine was
    paused, "" anywhere else."""
    stop_token: int | None
    """The token that ended it; None if a string, the length or an abort did."""
    routing: RoutingRuns = ()
    """Experts of the chain's positions from `routing_start` on, as far as they are known: not of
    the last sampled token, which was not forwarded. Empty unless the engine captures routing."""
    n_cached: int = 0
    """Prompt tokens whose KV the engine had."""
    kept_kv: bool = False
    """True if tokens here were sampled over KV of older weights than their version's."""


def join(pieces: Sequence[Completion]) -> Completion:
    """Consecutive pieces of one call as one."""
    if len(pieces) == 1:
        return pieces[0]
    runs: list[tuple[int, int, int]] = []
    for epoch, version, n in (run for p in pieces for run in p.version_runs):
        if runs and runs[-1][:2] == (epoch, version):
            n += runs.pop()[2]
        runs.append((epoch, version, n))
    return Completion(
        token_ids=np.concatenate([p.token_ids for p in pieces]),
        logprobs=np.concatenate([p.logprobs for p in pieces]),
        version_runs=tuple(runs),
        finish_reason=pieces[-1].finish_reason,
        stop_token=pieces[-1].stop_token,
        n_cached=pieces[0].n_cached,
        kept_kv=any(p.kept_kv for p in pieces),
        routing=merge_runs([run for p in pieces for run in p.routing]),
    )


def ended(finish_reason: str) -> Completion:
    """A last piece without tokens."""
    return Completion(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        version_runs=(),
        finish_reason=finish_reason,
        stop_token=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One rollout to play."""

    group_id: str
    rollout_id: str
    attempt: int
    purpose: str
    prompt: dict[str, Any]
    source: tuple[Ref, ...] = ()
    """Segments of an earlier attempt of this lineage, in order: a resumable agent goes on from
    them, any other starts again and counts their sampled tokens as regenerated."""
