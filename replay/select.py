"""Which recorded rollouts an offline run trains on: SQL over the sources, as rows of a plan (I1).

A group is taken whole: rollouts that the condition leaves out stay in its baseline, so an advantage
means what it meant online. Nothing is copied: rows are named by log, writer, seq and row.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import duckdb

from molt.schemas.check import chain_digest
from molt.schemas.columns import Row
from molt.schemas.errors import ConfigError
from molt.store.branches import branches, tips
from molt.store.log import Log
from molt.store.sql import connect

VIEWS = "prompts segments routing rollouts rewards plans"

CANDIDATES = """
create temp table candidates as
with value as (
    select rollout_id, attempt, segment, token, name, arg_max(value, revision) as value,
           bool_or(value is null) as unscorable
    from rewards group by all
), scored as (
    select rollout_id, attempt, sum(value * ({weights})) as reward,
           bool_or(unscorable) as unscorable
    from value where {rollout_level} group by all
), sampled as (
    select rollout_id, attempt, sum(n_sampled) as n_sampled, sum(n_tokens) as n_tokens,
           min(list_min(list_transform(version_runs, lambda r: r.version))) as version_min,
           max(list_max(list_transform(version_runs, lambda r: r.version))) as version_max
    from segments where role = 'agent' group by all
), trained as (
    select rollout_id, attempt, max(step) as step, max(advantage) as advantage
    from plans where decision <> 'baseline_only' group by all
), issued as (
    select group_id, min(ordinal) as ordinal, min(purpose) as purpose, min(dataset) as dataset
    from prompts group by all
)
select r.group_id, r.rollout_id, r.attempt, r.status, r.reason, r.n_segments, r.seconds,
       purpose, ordinal, dataset, case when unscorable then null else reward end as reward,
       n_sampled, n_tokens, version_min, version_max, trained.step, advantage, r.run_id,
       r.chain_digest
from (select * from rollouts where status <> 'pending') r
left join issued using (group_id)
left join scored using (rollout_id, attempt)
left join sampled using (rollout_id, attempt)
left join trained using (rollout_id, attempt)
qualify row_number() over (partition by r.rollout_id
                           order by trained.step is null, r.attempt) = 1
"""


@dataclass(frozen=True, slots=True)
class Selection:
    """Groups of plan rows (advantage 0 so far), and a digest of all that was chosen."""

    groups: list[list[Row]]
    n_rollouts: int
    digest: str


def select(logs: Sequence[Log], where: str, reward: Mapping[str, Any]) -> Selection:
    """The groups of `logs` with a rollout that `where` holds for; log i is address i + 1.

    `where` may name status, reason, reward, n_segments, n_sampled, n_tokens, version_min,
    version_max, step (that trained it), advantage, purpose, ordinal, dataset, group_id, rollout_id,
    run_id. `reward` is the configuration's section. ConfigError for a wrong condition, or if
    nothing fits.
    """
    groups: list[list[Row]] = []
    for index, log in enumerate(logs, 1):
        groups += _of_log(log, index, where, reward)
    h, n = hashlib.blake2b(digest_size=16), 0
    for row in (row for group in groups for row in group):
        trains = row["decision"] == "train"
        n += trains
        h.update(f"{row['rollout_id']}/{row['attempt']}/{trains}/{row['reward']}".encode())
        h.update(row["chain_digest"] or b"")
    if not n:
        raise ConfigError(f"no rollout fits --where {where!r}; `molt sql` shows what there is")
    return Selection(groups, n, h.hexdigest())


def _of_log(log: Log, index: int, where: str, reward: Mapping[str, Any]) -> list[list[Row]]:
    con = connect([log], query=VIEWS)
    weights = reward.get("weights") or {}
    cases = " ".join(f"when {_text(name)} then {float(w)!r}" for name, w in weights.items())
    query = CANDIDATES.format(
        weights=f"case name {cases} else 1.0 end" if cases else "1.0",
        rollout_level="true" if reward.get("sum_turns") else "segment is null and token is null",
    )
    try:
        con.execute(query)
        con.execute(
            f"create temp table chosen as select *, ({where}) is true as ok from candidates"
        )
        rows = _dicts(
            con,
            "select * from chosen where reward is not null and status not in ('failed', 'aborted') "
            "and group_id in (select group_id from chosen where ok) order by ordinal, rollout_id",
        )
    except duckdb.Error as error:
        raise ConfigError(f"--where {where!r}: {error}") from None
    chains = _chains(con)
    refs = _reward_refs(con, bool(reward.get("sum_turns")))
    con.close()
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        who = (row["rollout_id"], row["attempt"])
        segments, routing = chains.get(who, ({}, []))
        if _is_whole(row, segments):
            made = _plan_row(index, row, segments, routing, refs.get(who, []))
            groups[row["group_id"]].append(made)
    return [g for g in groups.values() if any(r["decision"] == "train" for r in g)]


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _dicts(con: duckdb.DuckDBPyConnection, query: str) -> list[Row]:
    rows: list[Row] = con.sql(query).to_arrow_table().to_pylist()
    return rows


Chains = dict[tuple[str, int], tuple[dict[int, Any], list[Row]]]


def _chains(con: duckdb.DuckDBPyConnection) -> Chains:
    """Segments and routing addresses of the candidates; scalars only."""
    found: Chains = {}
    chosen = "(rollout_id, attempt) in (select (rollout_id, attempt) from chosen)"
    names = "rollout_id, attempt, writer, seq, row"
    for row in _dicts(
        con,
        f"select {names}, segment, parent, keep, n_tokens, digest, list_sum(train) as n_train "
        f"from segments where role = 'agent' and {chosen}",
    ):
        segments, _ = found.setdefault((row["rollout_id"], row["attempt"]), ({}, []))
        segments.setdefault(row["segment"], SimpleNamespace(**row))
    for row in _dicts(con, f"select {names} from routing where {chosen}"):
        if (row["rollout_id"], row["attempt"]) in found:
            found[row["rollout_id"], row["attempt"]][1].append(row)
    return found


def _reward_refs(con: duckdb.DuckDBPyConnection, turns: bool) -> dict[tuple[str, int], list[Row]]:
    level = "true" if turns else "segment is null and token is null"
    rows = _dicts(
        con,
        f"select rollout_id, attempt, writer, seq, row from rewards where {level} "
        "qualify row_number() over (partition by rollout_id, attempt, segment, token, name "
        "order by revision desc) = 1 order by rollout_id, attempt, name, segment, token",
    )
    found: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        found[row["rollout_id"], row["attempt"]].append(row)
    return found


def _is_whole(row: Row, segments: dict[int, Any]) -> bool:
    """True if the segments are those of the outcome; online such a rollout is excluded, too."""
    if any(s.parent is not None and s.parent not in segments for s in segments.values()):
        return False
    own = chain_digest([segments[t].digest for t in tips(segments)])
    return bool(own == row["chain_digest"])


def _plan_row(
    index: int, row: Row, segments: dict[int, Any], routing: list[Row], rewards: list[Row]
) -> Row:
    trains = bool(row["ok"]) and any(s.n_train for s in segments.values())
    return {
        "group_id": row["group_id"],
        "rollout_id": row["rollout_id"],
        "attempt": row["attempt"],
        "branches": [
            {
                "tip": branch.tip,
                "refs": [
                    *(_ref(index, vars(segments[p.segment])) for p in branch.pieces),
                    *(_ref(index, r) for r in routing),
                ],
            }
            for branch in branches(segments)
        ],
        "reward": row["reward"],
        "reward_refs": [_ref(index, r) for r in rewards],
        "in_baseline": True,
        "advantage": 0.0,
        "lag_max": None,
        "decision": "train" if trains else "baseline_only",
        "chain_digest": row["chain_digest"],
    }


def _ref(index: int, row: Mapping[str, Any]) -> Row:
    return {"log": index, "writer": row["writer"], "seq": row["seq"], "row": row["row"]}
