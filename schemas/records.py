"""Frozen records: one type per stage of a rollout's life. Fields mirror the columns of a stream.

`to_row(record)` gives the mapping that `Writer.append` takes; `at` is added by the writer.
Source of every word: the table of words in README.md.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from molt.schemas.errors import ConfigError

Int32s = npt.NDArray[np.int32]
Uint8s = npt.NDArray[np.uint8]
Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Version:
    """The weights after step `version` of `epoch`; `(1, 0)` are the weights a run starts from."""

    epoch: int
    version: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.version}"

    @classmethod
    def parse(cls, label: str) -> "Version":
        """From vLLM's weight label, "<epoch>.<version>"; ValueError on any other text."""
        epoch, _, version = label.partition(".")
        return cls(epoch=int(epoch), version=int(version))


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRun:
    """`n` sampled tokens in a row that one policy version sampled."""

    epoch: int
    version: int
    n: int


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Ref:
    """A row address. `log` 0 is the log that holds the record; others index `epoch.sources`."""

    log: int = 0
    writer: str
    seq: int
    row: int

    def __str__(self) -> str:
        return f"{self.writer}/{self.seq}#{self.row}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling parameters in force for one engine call."""

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means off."""
    min_p: float = 0.0
    max_tokens: int = 16
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that vLLM would change without saying so."""
        if self.temperature != 0 and not self.temperature >= 0.01:
            raise ConfigError(f"temperature {self.temperature}: use 0 (greedy) or at least 0.01")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens {self.max_tokens}: at least one token must be sampled")

    def untrainable_reason(self) -> str | None:
        """Why the trainer cannot reproduce this distribution; None if it can."""
        if self.temperature == 0:
            return "greedy"
        cut = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        names = [name for name, active in cut.items() if active]
        return ", ".join(names) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One issue of a prompt: `n` rollouts of group `<purpose>-<ordinal>`."""

    ordinal: int
    group_id: str
    purpose: str
    dataset: str
    prompt: str
    """JSON text, handed to the environment as it was."""
    n: int
    attempt: int
    reason: str
    rollouts: Sequence[dict[str, Any]] = ()
    """Of a reissue: the {"rollout_id", "attempt"} to run; empty = all n at `attempt`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The appended unit: new context tokens, then the tokens sampled after them in one call."""

    group_id: str
    rollout_id: str
    attempt: int
    segment: int
    """0, 1, 2 ... within the attempt."""
    parent: int | None
    """The segment that contains the last kept token; None at a root."""
    keep: int
    """Tokens kept of the parent's chain."""
    token_ids: Int32s
    """[T]"""
    sampled: Uint8s
    """[T] 1 where the policy sampled the token."""
    train: Uint8s
    """[T] 1 where the token may be trained; never where it was not sampled."""
    train_reason: str | None
    """Why a sampled token may not be trained; None if all may."""
    logprobs: Float32s
    """[T] log p of the token under the weights that sampled it; 0.0 where not sampled."""
    version_runs: Sequence[VersionRun]
    """Over the sampled tokens, in order."""
    finish_reason: str
    stop_token: int | None
    sampling: Sampling
    logprobs_kind: str = "processed"
    kv: str | None = None
    """"recomputed" or "kept" when the weights changed inside this segment."""
    policy: str = "main"
    role: str = "agent"
    engine_id: str
    source_attempt: int | None = None
    messages: str = "[]"
    """The wire-level delta, JSON."""
    media: Sequence[dict[str, Any]] = ()
    digest: bytes
    """`segment_digest` of this row's own columns and the parent's digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """The outcome of one attempt. A bad rollout is data, not a crash."""

    group_id: str
    rollout_id: str
    attempt: int
    status: str
    reason: str | None
    n_segments: int
    chain_digest: bytes
    counts: dict[str, int]
    """{"sampled", "context", "regenerated"} tokens."""
    seconds: float
    metrics: str = "{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRow:
    """One reward of a rollout, a turn (`segment`) or a token; the highest revision wins."""

    rollout_id: str
    attempt: int
    segment: int | None = None
    token: int | None = None
    name: str
    value: float | None
    """None = unscorable; NaN is refused."""
    revision: int = 0
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRow:
    """Expert choices for `n` positions from `start` on, absolute in the chain of the segment."""

    rollout_id: str
    attempt: int
    segment: int
    start: int
    n: int
    experts: bytes
    """C order [n, layers, top_k], dtype of the run."""
    row_xxh3: Sequence[int]
    """xxh3-64 of each position's bytes, so that a range can be verified alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBranch:
    """One training sequence of a rollout: the chain that ends in segment `tip`."""

    tip: int
    refs: tuple[Ref, ...]
    """Rows of the chain, root first, then the routing rows used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """What a step does with one rollout."""

    group_id: str
    rollout_id: str
    attempt: int
    branches: tuple[PlanBranch, ...]
    reward: float | None
    reward_refs: tuple[Ref, ...]
    in_baseline: bool
    advantage: float
    lag_max: int | None
    """Largest lag of a sampled token at this step; None without sampled tokens."""
    decision: str
    """"train", "mask" (tokens above max_lag are masked) or "baseline_only"."""
    chain_digest: bytes | None
    """That of the rollout's segments as they were planned; None only in records before 1.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHeader:
    """What holds for all rows of a plan."""

    epoch: int
    step: int
    data_pass: int
    seed: int
    algorithm: str
    update_passes: int
    mini_batches: int
    max_lag: int


def to_row(record: Any) -> dict[str, Any]:
    """A record (or any dataclass) as a mapping of its fields, nested records included."""
    return {name: _plain(getattr(record, name)) for name in _field_names(type(record))}


_FIELD_NAMES: dict[type, tuple[str, ...]] = {}


def _field_names(kind: type) -> tuple[str, ...]:
    """Of a dataclass; nothing of any other type."""
    if kind not in _FIELD_NAMES:
        fields = dataclasses.fields(kind) if is_dataclass(kind) else ()
        _FIELD_NAMES[kind] = tuple(f.name for f in fields)
    return _FIELD_NAMES[kind]


def _plain(value: Any) -> Any:
    if _field_names(type(value)):
        return to_row(value)
    if isinstance(value, list | tuple) and value and _field_names(type(value[0])):
        return [_plain(item) for item in value]
    return value
