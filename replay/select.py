"""Which recorded rollouts an offline run trains on: SQL over the sources, as rows of a plan (I1).

A group is taken whole: rollouts that the condition leaves out stay in its baseline, so an advantage
means what it meant online; a group of which rows are retired, or that the lag rule drops, is left
out by name. Nothing is copied: rows are named by log, writer, seq and row.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import duckdb

from molt.replay.lag import decide
from molt.schemas.check import chain_digest
from molt.schemas.columns import Row
from molt.schemas.errors import ConfigError
from molt.store.branches import branches, tips
from molt.store.log import Log
from molt.store.sql import connect

VIEWS = "prompts segments routing rollouts rewards plans drops"

REWARD_MAX = 1e38
"""A rollout's scalar above it cannot be scored: the trainer computes in float32."""

CANDIDATES = """
create temp table candidates as
with newest as (
    select *, {ref} as ref from rewards where {rollout_level}
    qualify row_number() over (partition by rollout_id, attempt, segment, token, name
                               order by revision desc) = 1
), scored as (
    select rollout_id, attempt, list(ref order by name, segment, token) as reward_refs,
           case when bool_and(value is not null) and abs(sum(value * ({weights}))) <= {reward_max}
                then sum(value * ({weights})) end as reward
    from newest where value is not null or ({weights}) <> 0 group by all
), sampled as (
    select rollout_id, attempt, sum(n_sampled) as n_sampled, sum(n_tokens) as n_tokens,
           min(list_min(list_transform(version_runs, lambda r: r.version))) as version_min,
           max(list_max(list_transform(version_runs, lambda r: r.version))) as version_max,
           list({{'segment': segment, 'parent': parent, 'keep': keep, 'n_tokens': n_tokens,
                  'digest': digest, 'trains': list_max(train), 'ref': {ref}}}) as segments
    from segments where role = 'agent' group by all
), routed as (
    select rollout_id, attempt, list({ref} order by writer, seq, row) as routing
    from routing group by all
), trained as (
    select rollout_id, attempt, max(step) as step, max(advantage) as advantage
    from plans where decision <> 'baseline_only' group by all
), ended as (
    select * from rollouts
    where status <> 'pending'
        or (rollout_id, attempt) in (select (rollout_id, attempt) from rewards)
    qualify row_number() over (partition by rollout_id, attempt order by status = 'pending') = 1
), issued as (
    select group_id, min(ordinal) as ordinal, min(purpose) as purpose, min(dataset) as dataset
    from prompts group by all
)
select r.group_id, r.rollout_id, r.attempt, r.status, r.reason, r.n_segments, r.seconds,
       purpose, ordinal, dataset, reward, n_sampled, n_tokens, version_min,
       version_max, trained.step, advantage, r.run_id, r.chain_digest, segments,
       coalesce(routing, []) as routing, reward_refs
from (select * from ended anti join drops using (group_id, rollout_id)) r
left join issued using (group_id)
left join scored using (rollout_id, attempt)
left join sampled using (rollout_id, attempt)
left join routed using (rollout_id, attempt)
left join trained using (rollout_id, attempt)
qualify row_number() over (partition by r.rollout_id
                           order by trained.step is null, r.attempt) = 1
"""
CHOSEN = """
with chosen as (select *, ({where}) is true as ok from candidates)
select * from chosen where reward is not null and status not in ('failed', 'aborted')
and group_id in (select group_id from chosen where ok) order by ordinal, rollout_id
"""


@dataclass(frozen=True, slots=True)
class Selection:
    """Groups of plan rows (advantage 0 so far), and a digest of all that was chosen."""

    groups: list[list[Row]]
    n_rollouts: int
    digest: str
    left_out: list[str]
    """Groups that fit, and why they were not taken: "train-7 (retired)", "train-8 (lag)"."""


def select(
    logs: Sequence[Log],
    where: str,
    reward: Mapping[str, Any],
    max_lag: int = 0,
    lag: str = "keep",
) -> Selection:
    """The groups of `logs` with a rollout that `where` holds for; log i is address i + 1.

    `where` may name status, reason, reward, n_segments, n_sampled, n_tokens, version_min,
    version_max, step (that trained it), advantage, purpose, ordinal, dataset, group_id, rollout_id,
    run_id. `reward` is the configuration's section, `max_lag` and `lag` its lag rule. The weights
    trained here are no successors of those that sampled, so the rule is asked of the step that
    trained a rollout in its own log; what that has not trained has no lag. What is to be masked is
    not trained at all. ConfigError for a wrong condition, or if nothing fits.
    """
    groups: list[list[Row]] = []
    left_out: list[str] = []
    for index, log in enumerate(logs, 1):
        rows = _candidates(log, index, where, reward)
        found, lost = _groups(rows, lambda of: decide(of, max_lag, lag))
        groups += found
        left_out += lost
    h, n = hashlib.blake2b(digest_size=16), 0
    for row in (row for group in groups for row in group):
        trains = row["decision"] == "train"
        n += trains
        h.update(f"{row['rollout_id']}/{row['attempt']}/{trains}/{row['reward']}".encode())
        h.update(row["chain_digest"] or b"")
    if not n:
        gone = f"; left out: {', '.join(left_out[:9])}" if left_out else ""
        raise ConfigError(
            f"no rollout fits --where {where!r}{gone}; `molt sql` shows what there is"
        )
    return Selection(groups, n, h.hexdigest(), left_out)


def _candidates(log: Log, index: int, where: str, reward: Mapping[str, Any]) -> list[Row]:
    weights = reward.get("weights") or {}
    cases = " ".join(f"when {_text(name)} then {float(w)!r}" for name, w in weights.items())
    query = CANDIDATES.format(
        reward_max=REWARD_MAX,
        weights=f"case name {cases} else 1.0 end" if cases else "1.0",
        rollout_level="true" if reward.get("sum_turns") else "segment is null and token is null",
        ref=f"{{'log': {index}, 'writer': writer, 'seq': seq, 'row': \"row\"}}",
    )
    con = connect([log], query=VIEWS)
    try:
        con.execute(query)
        rows: list[Row] = con.sql(CHOSEN.format(where=where)).to_arrow_table().to_pylist()
    except duckdb.Error as error:
        raise ConfigError(f"--where {where!r}: {error}") from None
    con.close()
    return rows


def _groups(
    rows: Sequence[Row], rule: Callable[[int | None], str]
) -> tuple[list[list[Row]], list[str]]:
    """Groups of plan rows, and the names of those that are left out; `rule` of a rollout's lag."""
    groups: dict[str, list[Row]] = defaultdict(list)
    lost: dict[str, str] = {}
    masked: dict[str, str] = {}
    for row in rows:
        segments = {s["segment"]: SimpleNamespace(**s) for s in row["segments"] or []}
        oldest, step = row["version_min"], row["step"]
        decision = rule(step - 1 - oldest if None not in (oldest, step) else None)
        if len(segments) < row["n_segments"]:
            lost[row["group_id"]] = "retired"
        elif decision == "drop":
            lost.setdefault(row["group_id"], "lag")
        elif _is_whole(row, segments):
            if decision == "mask":
                row["ok"] = False
                masked[row["group_id"]] = "lag"
            groups[row["group_id"]].append(_plan_row(row, segments))
    trained = {n for n, g in groups.items() if any(r["decision"] == "train" for r in g)}
    lost |= {name: why for name, why in masked.items() if name not in trained | lost.keys()}
    left_out = [f"{name} ({why})" for name, why in lost.items()]
    return [g for name, g in groups.items() if name in trained - lost.keys()], left_out


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _is_whole(row: Row, segments: dict[int, Any]) -> bool:
    """True if the segments are those of the outcome; online such a rollout is excluded, too."""
    if any(s.parent is not None and s.parent not in segments for s in segments.values()):
        return False
    own = chain_digest([segments[t].digest for t in tips(segments)])
    return bool(own == row["chain_digest"])


def _plan_row(row: Row, segments: dict[int, Any]) -> Row:
    same = ("group_id", "rollout_id", "attempt", "reward", "reward_refs", "chain_digest")
    trains = row["ok"] and any(s.trains for s in segments.values())
    return {
        **{name: row[name] for name in same},
        "branches": [
            {
                "tip": branch.tip,
                "refs": [*(segments[p.segment].ref for p in branch.pieces), *row["routing"]],
            }
            for branch in branches(segments)
        ],
        "in_baseline": True,
        "advantage": 0.0,
        "lag_max": None,
        "decision": "train" if trains else "baseline_only",
    }
