"""The audit's last witness: the weights. Logprobs that a version recorded, computed again (I3, I7).

Ids, masks and logprobs may agree with every digest and still be wrong from birth (shifted by one,
of another model). Only the weights that sampled them can tell.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from molt.replay.audit_control import setting
from molt.replay.audit_report import Report
from molt.replay.replay import History
from molt.schemas.columns import Row
from molt.schemas.errors import ConfigError
from molt.store.branches import chain
from molt.store.log import Log
from molt.store.sql import connect

UNSURE = -0.5
"""The offset test looks at tokens below this: near 0 all neighbours agree."""

ATTEMPTS = """
with chosen as (
    select rollout_id, attempt, segment from segments
    where role = 'agent' and policy = 'main' and kv is distinct from 'kept' and list_sum(train) > 0
      and sampling.temperature > 0
      and len(list_filter(version_runs, lambda r: r.version = {version})) > 0
    order by hash(rollout_id || {version}), segment limit {limit}
)
select rollout_id, attempt, segment, parent, keep, n_tokens, token_ids, sampled, train, logprobs,
       version_runs, sampling.temperature as temperature, c.rollout_id is not null as chosen
from segments left join chosen c using (rollout_id, attempt, segment)
where role = 'agent' and (rollout_id, attempt) in (select (rollout_id, attempt) from chosen)
order by rollout_id, attempt, segment
"""
"""The segments to compute again, and all that their chains may begin with."""


class Scorer(Protocol):
    """A trainer, as far as it can tell of its weights."""

    def load(self, folder: str) -> int: ...
    def state_digest(self) -> str: ...
    def weights_digest(self) -> str: ...
    def logprobs(self, wanted: Sequence[tuple[Any, Any, float]]) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens of one segment that one version sampled."""

    rollout: str
    segment: int
    at: npt.NDArray[np.int64]
    """Their indices in the segment."""
    logprobs: npt.NDArray[np.float32]
    """As recorded."""
    wanted: tuple[Any, Any, float]
    """Ids of the whole chain, the tokens' indices in it, temperature."""


def recompute(
    log: Log, report: Report, scorer: Scorer, found: History, config: Row, step: int, sample: int
) -> Row:
    """Compare up to `sample` segments that version `step` sampled with its weights' own logprobs.

    `step` 0 are the weights the run began with, any other needs its checkpoint. Returns {"step",
    "segments", "tokens", "gap_mean", "gap_max"}; violations go to `report`.
    """
    if step:
        _load(log, report, scorer, found, step)
    own = scorer.weights_digest()
    for record in (r.rows[0] for r in log.records() if r.kind == "policy"):
        if record["version"] == step and record["epoch"] in {e["epoch"] for e in found.epochs}:
            report.checked["I7"] += 1
            what = f"weights of policy {record['epoch']}.{step}"
            report.differ("I7", what, record["weights_digest"], own)
    samples = _samples(log, step, sample)
    pairs = []
    scored = scorer.logprobs([s.wanted for s in samples]) if samples else []
    for s, again in zip(samples, scored, strict=True):
        pairs.append((s.logprobs, again))
        report.checked["I3"] += 1
        _judge(report, s, again, config)
    _offset(report, step, pairs)
    gaps = np.abs(np.concatenate([b - a for a, b in pairs])) if pairs else np.zeros(1)
    n = sum(len(a) for a, _ in pairs)
    means = {"gap_mean": float(gaps.mean()), "gap_max": float(gaps.max())}
    return {"step": step, "segments": len(pairs), "tokens": n, **means}


def _load(log: Log, report: Report, scorer: Scorer, found: History, step: int) -> None:
    rows = {row["step"]: row for row in found.complete(log.path)}
    if step not in rows:
        raise ConfigError(f"there is no complete checkpoint of step {step}; kept: {sorted(rows)}")
    row = rows[step]
    scorer.load(str(log.path / row["path"]))
    what = f"state of checkpoint {row['path']}"
    report.differ("I7", what, row["state_digest"], scorer.state_digest())


def _samples(log: Log, step: int, limit: int) -> list[Sample]:
    """Up to `limit` segments with trainable tokens of version `step`, scattered over the log.

    Of those drawn some fall out whose chain begins below the floor of retention.
    """
    query = ATTEMPTS.format(version=int(step), limit=int(limit))
    con = connect([log], query=query)
    families: dict[tuple[str, int], dict[int, Any]] = defaultdict(dict)
    for row in con.sql(query).to_arrow_table().to_pylist():
        families[row["rollout_id"], row["attempt"]][row["segment"]] = SimpleNamespace(**row)
    con.close()
    found = []
    for family in families.values():
        for number in (k for k, s in family.items() if s.chosen and _is_whole(family, k)):
            own = family[number]
            versions = np.full(own.n_tokens, -1, np.int64)
            runs = own.version_runs
            versions[np.array(own.sampled) == 1] = np.repeat(
                [r["version"] for r in runs], [r["n"] for r in runs]
            )
            pieces = [family[k].token_ids[:end] for k, end in chain(family, number)]
            ids, before = np.concatenate(pieces), sum(map(len, pieces[:-1]))
            at = np.flatnonzero((versions == step) & (np.array(own.train) == 1))
            at = at[at + before > 0]
            if len(at):
                logprobs = np.array(own.logprobs, np.float32)[at]
                wanted = (ids, at + before, own.temperature)
                found.append(Sample(own.rollout_id, number, at, logprobs, wanted))
    return found


def _is_whole(family: Mapping[int, Any], number: int | None) -> bool:
    """False if retention has removed what the segment's chain begins with."""
    while number is not None and number in family:
        number = family[number].parent
    return number is None


def _judge(report: Report, sample: Sample, again: Any, config: Row) -> None:
    """float32: no token above the limit; bfloat16: no segment's mean above it."""
    gaps = np.abs(again - sample.logprobs)
    worst = int(gaps.argmax())
    if setting(config, "engine.dtype", "float32") == "bfloat16":
        size, limit = float(gaps.mean()), setting(config, "limits.bf16_gap_mean", 0.1)
    else:
        size, limit = float(gaps[worst]), setting(config, "limits.float32_gap_max", 1e-3)
    if not size <= limit:
        report.violation(
            "I3",
            f"recorded logprobs are not those of its weights: gap {size:.3g}, limit {limit:g}",
            rollout=sample.rollout,
            segment=sample.segment,
            token=int(sample.at[worst]),
            expected=float(again[worst]),
            found=float(sample.logprobs[worst]),
        )


def _offset(report: Report, step: int, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Recorded values that fit a neighbouring token clearly better are shifted."""
    means = {}
    for offset in (-1, 0, 1):
        gaps = []
        for recorded, again in pairs:
            n = len(recorded)
            index = np.arange(max(0, -offset), n - max(0, offset))
            index = index[again[index] < UNSURE]
            gaps.append(np.abs(recorded[index + offset] - again[index]))
        flat = np.concatenate(gaps) if gaps else np.zeros(0)
        means[offset] = float(flat.mean()) if len(flat) else float("inf")
    best = min(means, key=lambda o: means[o])
    if best and means[best] < means[0] / 2:
        report.violation(
            "I3",
            f"logprobs of version {step} are shifted by {best:+d}: mean gap {means[0]:.3g} in "
            f"place, {means[best]:.3g} there",
            expected=0,
            found=best,
        )
