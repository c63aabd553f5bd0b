"""The audit's last witness: the weights. Logprobs that a version recorded, computed again (I3, I7).

Ids, masks and logprobs may agree with every digest and still be wrong from birth (shifted by one,
of another model). Only the weights that sampled them can tell.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from molt.replay.audit_control import setting
from molt.replay.replay import History
from molt.schemas.columns import Row
from molt.schemas.errors import ConfigError
from molt.schemas.records import Ref
from molt.store.branches import chain
from molt.store.log import Log
from molt.store.sql import connect

if TYPE_CHECKING:
    from molt.replay.audit import Report

UNSURE = -0.5
"""The offset test looks at tokens below this: near 0 all neighbours agree."""

CHOSEN = """
select rollout_id, attempt, segment from segments
where role = 'agent' and policy = 'main' and kv is distinct from 'kept' and list_sum(train) > 0
  and sampling.temperature > 0
  and len(list_filter(version_runs, lambda r: r.version = {version})) > 0
order by hash(rollout_id || {version}), segment limit {limit}
"""
FAMILY = """
select rollout_id, attempt, segment, parent, keep, n_tokens, writer, seq, row from segments
where role = 'agent' and rollout_id = ? and attempt = ?
"""


class Scorer(Protocol):
    """A trainer, as far as it can tell of its weights."""

    def load(self, folder: str) -> int: ...
    def state_digest(self) -> str: ...
    def weights_digest(self) -> str: ...
    def logprobs(self, wanted: Sequence[tuple[Any, Any, float]]) -> list[Any]: ...


class _Link:
    def __init__(self, row: Row) -> None:
        self.parent, self.keep, self.n_tokens = row["parent"], row["keep"], row["n_tokens"]
        self.ref = Ref(writer=row["writer"], seq=row["seq"], row=row["row"])


def recompute(
    log: Log, report: "Report", scorer: Scorer, found: History, config: Row, step: int, sample: int
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
    rows, wanted = _wanted(log, step, sample)
    scored = scorer.logprobs(wanted) if wanted else []
    pairs = []
    for (who, segment, row, at), again in zip(rows, scored, strict=True):
        recorded = row["logprobs"][at]
        pairs.append((recorded, again))
        report.checked["I3"] += 1
        _judge(report, who, segment, at, recorded, again, config)
    _offset(report, step, pairs)
    gaps = np.abs(np.concatenate([b - a for a, b in pairs])) if pairs else np.zeros(1)
    n = sum(len(a) for a, _ in pairs)
    means = {"gap_mean": float(gaps.mean()), "gap_max": float(gaps.max())}
    return {"step": step, "segments": len(pairs), "tokens": n, **means}


def _load(log: Log, report: "Report", scorer: Scorer, found: History, step: int) -> None:
    rows = {row["step"]: row for row in found.complete(log.path)}
    if step not in rows:
        raise ConfigError(f"there is no complete checkpoint of step {step}; kept: {sorted(rows)}")
    row = rows[step]
    scorer.load(str(log.path / row["path"]))
    what = f"state of checkpoint {row['path']}"
    report.differ("I7", what, row["state_digest"], scorer.state_digest())


Chosen = tuple[str, int, Row, npt.NDArray[np.int64]]


def _wanted(log: Log, step: int, sample: int) -> tuple[list[Chosen], list[tuple[Any, Any, float]]]:
    """The chosen segments with their own tokens' indices, and what to score for each."""
    con = connect([log], query="segments")
    rows: list[Chosen] = []
    wanted = []
    query = CHOSEN.format(version=int(step), limit=int(sample))
    for who, attempt, segment in con.execute(query).fetchall():
        family = con.sql(FAMILY, params=[who, attempt]).to_arrow_table().to_pylist()
        links = {r["segment"]: _Link(r) for r in family}
        pieces = [(log.row(links[k].ref), end) for k, end in chain(links, segment)]
        row = pieces[-1][0]
        versions = np.full(len(row["sampled"]), -1, np.int64)
        runs = [np.full(r["n"], r["version"], np.int64) for r in row["version_runs"]]
        versions[row["sampled"] == 1] = np.concatenate(runs)
        at = np.flatnonzero((versions == step) & (row["train"] == 1))
        ids = np.concatenate([r["token_ids"][:end] for r, end in pieces])
        before = len(ids) - len(row["token_ids"])
        at = at[at + before > 0]
        if len(at):
            rows.append((who, segment, row, at))
            wanted.append((ids, at + before, row["sampling"]["temperature"]))
    con.close()
    return rows, wanted


def _judge(
    report: "Report", who: str, segment: int, at: Any, recorded: Any, again: Any, config: Row
) -> None:
    """float32: no token above the limit; bfloat16: no segment's mean above it."""
    gaps = np.abs(again - recorded)
    worst = int(gaps.argmax())
    if setting(config, "engine.dtype", "float32") == "bfloat16":
        size, limit = float(gaps.mean()), setting(config, "limits.bf16_gap_mean", 0.1)
    else:
        size, limit = float(gaps[worst]), setting(config, "limits.float32_gap_max", 1e-3)
    if not size <= limit:
        report.violation(
            "I3",
            f"recorded logprobs are not those of its weights: gap {size:.3g}, limit {limit:g}",
            rollout=who,
            segment=segment,
            token=int(at[worst]),
            expected=float(again[worst]),
            found=float(recorded[worst]),
        )


def _offset(report: "Report", step: int, pairs: Sequence[tuple[Any, Any]]) -> None:
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
