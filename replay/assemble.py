"""From plan rows to training sequences: ids, masks and lags, read by address and verified (I1).

No tokenizer and no text here: the trained ids are the rows' own. One sequence per trained branch;
`mask` already holds ownership, `train` and the lag rule, so the trainer only shifts it once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from molt.replay.sources import Sources
from molt.schemas.check import Parent, check_segment, parent_of
from molt.schemas.errors import LogCorrupt
from molt.schemas.records import Ref
from molt.store.branches import Branch, branches, token_lags
from molt.store.control import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSequence:
    """One branch of one rollout. All arrays have the branch's T tokens."""

    group_id: str
    rollout_id: str
    attempt: int
    tip: int
    token_ids: npt.NDArray[np.int32]
    """[T]"""
    mask: npt.NDArray[np.bool_]
    """[T] token i is trained here: sampled, owned, train = 1, within the lag limit."""
    logprobs: npt.NDArray[np.float32]
    """[T] the engine's log p of token i; 0.0 where not sampled."""
    lag: npt.NDArray[np.int64]
    """[T] (step - 1) - version of the token; 0 where not sampled, -1 where the weights that sampled
    it are no ancestors of the trained ones (rollouts of other runs)."""
    advantage: float
    """The rollout's scalar from the plan."""
    temperature: float
    chain: tuple[tuple[int, int], ...] = ()
    """(segment, position behind its last token in this sequence), root first."""
    kept_kv: tuple[tuple[int, int], ...] = ()
    """[start, end) of the segments that were sampled over KV of older weights than their own."""


@dataclass(slots=True)
class PlannedSegment:
    """A segment row with its place in the chain, as `branches` wants it."""

    parent: int | None
    keep: int
    n_tokens: int
    row: Mapping[str, Any]


def assemble(source: Sources, plan: Record) -> list[TrainSequence]:
    """All training sequences of a plan, in the plan's order.

    Raises LogCorrupt if a row's digest, owner or logprob kind is not what the plan implies.
    """
    step, max_lag = plan.header["step"], plan.header["max_lag"]
    out: list[TrainSequence] = []
    kinds: dict[str, str] = {}
    for row in plan.rows:
        if row["decision"] == "baseline_only":
            continue
        segments = segments_of(source, row)
        for segment in segments.values():
            kinds.setdefault(segment.row["logprobs_kind"], _name(segment.row))
        out += sequences_of(row, segments, step, max_lag)
    if len(kinds) > 1:
        raise LogCorrupt(
            f"step {step} mixes kinds of logprobs: "
            + ", ".join(f"{name} is {kind}" for kind, name in kinds.items())
        )
    return out


def sequences_of(
    plan_row: Mapping[str, Any], segments: Mapping[int, PlannedSegment], step: int, max_lag: int
) -> list[TrainSequence]:
    """The training sequences of one planned rollout, one per trained branch."""
    limit = max_lag if plan_row["decision"] == "mask" else None
    return [
        _sequence(plan_row, segments, branch, step, limit)
        for branch in branches(segments, {b["tip"] for b in plan_row["branches"]})
    ]


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['rollout_id']} attempt {row['attempt']} segment {row['segment']}"


def segments_of(source: Sources, plan_row: Mapping[str, Any]) -> dict[int, PlannedSegment]:
    """The rollout's segment rows by number, checked like at append, parents included."""
    refs = {tuple(ref.items()): ref for b in plan_row["branches"] for ref in b["refs"]}
    found = [Ref(**ref) for ref in refs.values()]
    rows = source.rows([ref for ref in found if source.stream(ref) == "segments"])
    rows.sort(key=lambda r: r["segment"])
    parents: dict[int, Parent] = {}
    for r in rows:
        if (r["rollout_id"], r["attempt"]) != (plan_row["rollout_id"], plan_row["attempt"]):
            raise LogCorrupt(f"the plan's row of {plan_row['rollout_id']} holds {_name(r)}")
        if r["parent"] is not None and r["parent"] not in parents:
            raise LogCorrupt(f"the plan names {_name(r)} without its parent {r['parent']}")
        check_segment(r, parents.get(r["parent"]))
        parents[r["segment"]] = parent_of(r)
    return {
        r["segment"]: PlannedSegment(
            parent=r["parent"], keep=r["keep"], n_tokens=len(r["token_ids"]), row=r
        )
        for r in rows
    }


def _sequence(
    plan_row: Mapping[str, Any],
    segments: Mapping[int, PlannedSegment],
    branch: Branch,
    step: int,
    limit: int | None,
) -> TrainSequence:
    ids, masks, logprobs, lags = [], [], [], []
    chain, kept_kv, n = [], [], 0
    for piece in branch.pieces:
        row = segments[piece.segment].row
        lag = token_lags(row, step)
        if plan_row["lag_max"] is None:
            lag[row["sampled"] == 1] = -1
        mask = row["train"].astype(bool)
        mask[: piece.owned_from] = False
        if limit is not None:
            mask &= lag <= limit
        ids.append(row["token_ids"][: piece.end])
        masks.append(mask[: piece.end])
        logprobs.append(row["logprobs"][: piece.end])
        lags.append(lag[: piece.end])
        if row["kv"] == "kept":
            kept_kv.append((n, n + piece.end))
        n += piece.end
        chain.append((piece.segment, n))
    mask = np.concatenate(masks)
    mask[0] = False  # the first token of a sequence has nothing before it to be predicted from
    return TrainSequence(
        group_id=plan_row["group_id"],
        rollout_id=plan_row["rollout_id"],
        attempt=plan_row["attempt"],
        tip=branch.tip,
        token_ids=np.concatenate(ids),
        mask=mask,
        logprobs=np.concatenate(logprobs),
        lag=np.concatenate(lags),
        advantage=plan_row["advantage"],
        temperature=_temperature(segments, branch),
        chain=tuple(chain),
        kept_kv=tuple(kept_kv),
    )


def _temperature(segments: Mapping[int, PlannedSegment], branch: Branch) -> float:
    found: Sequence[float] = sorted(
        {
            segments[p.segment].row["sampling"]["temperature"]
            for p in branch.pieces
            if segments[p.segment].row["train"].any()
        }
    )
    if len(found) > 1:
        raise LogCorrupt(
            f"{_name(segments[branch.tip].row)}: trained tokens of one branch were sampled at "
            f"temperatures {list(found)}"
        )
    return found[0] if found else 1.0
