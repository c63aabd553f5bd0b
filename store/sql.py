"""SQL over the log: DuckDB views of the streams and the control records (invariant I6).

A stream is handed to DuckDB as a dataset that decodes one verified commit at a time, only the
columns that a query needs; nothing is copied to disk and no index is kept. Views that a query does
not name are not read. Every view ends with `run_id`; streams also have `writer, seq, row` (row
addresses), and with epoch="all" a boolean `abandoned`.
"""

import datetime
import decimal
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import duckdb
import pyarrow as pa

from molt.schemas.columns import normalise, to_table
from molt.schemas.control import CONTROL
from molt.schemas.errors import ConfigError, LogCorrupt, Retired, SchemaMismatch
from molt.schemas.records import Ref
from molt.schemas.streams import STREAMS, fields
from molt.store.branches import branches, token_lags
from molt.store.cold import ADDRESS
from molt.store.control import Record
from molt.store.log import Log
from molt.store.scan import (
    CommitDataset,
    plain_rows,
    segment_needs,
    segment_rows,
    token_needs,
    token_rows,
)
from molt.store.snapshot import Epoch, Snapshot, stream_schema

Rows = Iterator[dict[str, Any]]

CONTROL_VIEWS = {
    "epochs": ("epoch", "epoch parent_epoch cut at config"),
    "plans": (
        "plan",
        "step data_pass group_id rollout_id attempt n_branches reward in_baseline advantage "
        "lag_max decision epoch at",
    ),
    "drops": ("drop", "group_id rollout_id reason epoch at"),
    "steps": (
        "step",
        "step epoch updates loss grad_norm n_tokens state_digest metrics counts at",
    ),
    "policies": (
        "policy",
        "epoch version weights_digest seconds kv recompute_tokens probe_gap at",
    ),
    "checkpoints": ("checkpoint", "epoch step path bytes at"),
}
"""view -> (record kind, columns)."""

DERIVED = {
    f.name: f
    for f in fields("epoch int32, step int64, data_pass int32, n_branches int32, probe_gap float64")
}
"""Columns of control views that come from the header or are computed."""

BRANCHES = fields(
    "rollout_id string, attempt int32, branch int32, tip int32, n_tokens int64, n_owned int64, "
    "n_context int64"
)
LAG = fields("step int64, rollout_id string, lag int64, n_tokens int64")
TOKENS = fields(
    "rollout_id string, attempt int32, segment int32, pos int64, token_id int32, sampled uint8, "
    "train uint8, logprob float32, version_epoch int32, version int64"
)
SEGMENT_EXTRAS = fields("n_tokens int64?, n_sampled int64?")
(RUN_ID,) = fields("run_id string?")
(ABANDONED_FIELD,) = fields("abandoned bool?")

GROUPS = """
create temp view groups as
with issued as (
    select run_id, group_id, min(ordinal) as ordinal, min(purpose) as purpose, max(n) as n
    from prompts group by all
), done as (
    select o.run_id, o.group_id, count(distinct o.rollout_id) as n_done
    from rollouts o
    where o.status <> 'pending' or exists (
        from rewards w
        where (w.run_id, w.rollout_id, w.attempt) = (o.run_id, o.rollout_id, o.attempt))
    group by all
), planned as (select run_id, group_id, min(step) as step from plans group by all
), dropped as (
    select run_id, group_id, min(reason) as reason from drops where rollout_id is null group by all
)
select group_id, ordinal, purpose, n, coalesce(n_done, 0) as n_done,
       step is not null or reason is not null as settled, step, reason, run_id
from issued
left join done using (run_id, group_id)
left join planned using (run_id, group_id)
left join dropped using (run_id, group_id)
"""
LAG_DECISION = """
create macro lag_decision(lag, max_lag, policy) as case
    when lag is null or lag <= max_lag or policy = 'keep' then 'train'
    when policy = 'mask' then 'mask'
    when policy = 'wait' and lag <= 2 * max_lag then 'train'
    else 'drop' end
"""
"""The rule of molt.replay.lag, for queries: wait | keep | mask | drop -> train | mask | drop."""

GROUPS_NEEDS = {"prompts", "rollouts", "rewards", "plans", "drops"}

WORDS = re.compile(r"\w+")


def connect(
    logs: Sequence[Log], epoch: Epoch = None, query: str | None = None
) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection with the views of one or several logs, as they are now.

    `epoch` None shows the newest epoch's lineage, a number that epoch's, "all" abandoned futures
    too. `query` limits what is read to the views that it names. Raises LogCorrupt or LogGap with
    the name of the damaged or missing commit. A user's own stream that DuckDB cannot show is
    SchemaMismatch if `query` names it, and left out otherwise.
    """
    snapshots = [Snapshot(log, epoch) for log in logs]
    views, users = _views(snapshots), _user_streams(snapshots)
    words = set(WORDS.findall(query.lower())) if query is not None else set()
    named = (words & (set(views) | {"groups"})) or {*views, "groups"}
    if "groups" in named:
        named |= GROUPS_NEEDS
    con = duckdb.connect()
    con.execute(LAG_DECISION)
    for name in sorted(named - {"groups"}):
        try:
            _register(con, name, views[name]())
        except SchemaMismatch:
            if name in words or name not in users:
                raise
    if "groups" in named:
        con.execute(GROUPS)
    con.execute("SET python_enable_replacements = false")
    con.execute("SET enable_external_access = false")
    con.execute("SET lock_configuration = true")
    return con


def _register(con: duckdb.DuckDBPyConnection, name: str, view: Any) -> None:
    try:
        con.register(name, view)
    except duckdb.Error as error:
        odd = [f"'{f.name}' ({f.type})" for f in view.schema if not _shows(con, f)]
        columns = ", ".join(odd) or "one of its columns"
        raise SchemaMismatch(f"{name}: DuckDB has no type for {columns}: {error}") from None


def _shows(con: duckdb.DuckDBPyConnection, field: pa.Field) -> bool:
    try:
        con.register("one_column", pa.schema([field]).empty_table())
        con.unregister("one_column")
    except duckdb.Error:
        return False
    return True


def run_sql(
    logs: Sequence[Log], query: str, epoch: Epoch = None
) -> tuple[list[str], list[list[Any]]]:
    """Column names and JSON-able rows of one query; ConfigError with DuckDB's words if it fails."""
    con = connect(logs, epoch, query)
    try:
        con.execute(query)
        names = unique([column[0] for column in con.description or []])
        return names, [[json_able(v) for v in row] for row in con.fetchall()] if names else []
    except duckdb.Error as error:
        known = ", ".join(sorted([*_views([Snapshot(log) for log in logs]), "groups"]))
        raise ConfigError(
            f"the query failed: {error}\nViews: {known}\n"
            'The column at is a keyword of DuckDB; write "at"'
        ) from None
    finally:
        con.close()


def unique(names: Sequence[str]) -> list[str]:
    """Column names of which none is there twice.

    >>> unique(["seq", "at", "seq", "seq"])
    ['seq', 'at', 'seq_1', 'seq_2']
    """
    out: list[str] = []
    for name in names:
        more = (f"{name}_{i}" for i in itertools.count(1))
        out.append(name if name not in out else next(n for n in more if n not in (*out, *names)))
    return out


def json_able(value: Any) -> Any:
    """A DuckDB value for json.dumps: bytes as hex, times as ISO text, NaN as text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): json_able(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_able(v) for v in value]
    return value if value is None or isinstance(value, str | int) else str(value)


def _views(snapshots: Sequence[Snapshot]) -> dict[str, Callable[[], Any]]:
    """view -> what makes it, so that only named views are read."""
    last = [RUN_ID, ABANDONED_FIELD] if any(s.everything for s in snapshots) else [RUN_ID]
    views: dict[str, Callable[[], Any]] = {}
    for name in [*STREAMS, *sorted(_user_streams(snapshots))]:
        views[name] = partial(_stream, snapshots, name, last)
    for name in CONTROL_VIEWS:
        views[name] = partial(_control, snapshots, name, last)
    views["tokens"] = lambda: CommitDataset(
        snapshots, "segments", _with(TOKENS, last), token_rows, token_needs
    )
    views["branches"] = lambda: _memory(_with(BRANCHES, last), map(_branch_rows, snapshots))
    views["lag"] = lambda: _memory(_with(LAG, last), map(_lag_rows, snapshots))
    return views


def _user_streams(snapshots: Sequence[Snapshot]) -> set[str]:
    return {name for s in snapshots for name in s.files if name not in STREAMS}


def _with(own: Iterable[pa.Field], more: Iterable[pa.Field]) -> pa.Schema:
    return pa.schema([*(f.with_nullable(True) for f in own), *more])


def _stream(snapshots: Sequence[Snapshot], name: str, last: list[pa.Field]) -> CommitDataset:
    schema = STREAMS[name] if name in STREAMS else stream_schema(list(snapshots), name)
    if name == "segments":
        full = _with(schema, [*SEGMENT_EXTRAS, *ADDRESS, *last])
        return CommitDataset(snapshots, name, full, segment_rows, segment_needs)
    first = schema.names[0]
    full = _with(schema, [f for f in (*ADDRESS, *last) if f.name not in schema.names])
    return CommitDataset(snapshots, name, full, plain_rows, lambda wanted: [first, *wanted])


def _memory(schema: pa.Schema, rows: Iterator[Rows]) -> pa.Table:
    return to_table(schema, [normalise("view", schema, r) for part in rows for r in part])


def _control(snapshots: Sequence[Snapshot], view: str, last: list[pa.Field]) -> pa.Table:
    kind, columns = CONTROL_VIEWS[view]
    stored = CONTROL[kind]
    own = [stored.field(c) if c in stored.names else DERIVED[c] for c in columns.split()]
    schema = _with(own, last)
    return _memory(schema, (_control_rows(s, kind, schema) for s in snapshots))


def _control_rows(snapshot: Snapshot, kind: str, schema: pa.Schema) -> Rows:
    for record, lost in _records(snapshot, kind):
        for row in record.rows:
            full = {**record.header, **row, **_tail(snapshot, lost)}
            if kind == "plan":
                full["n_branches"] = len(row["branches"])
            elif kind == "policy":
                full["probe_gap"] = row["probe"]["mean_gap"]
            yield {name: full[name] for name in schema.names}


def _records(snapshot: Snapshot, kind: str) -> Iterator[tuple[Record, bool]]:
    for record in snapshot.records:
        lost = not snapshot.lineage.holds(record.n)
        if record.kind == kind and (snapshot.everything or not lost):
            yield record, lost


def _tail(snapshot: Snapshot, lost: bool) -> dict[str, Any]:
    run = {"run_id": snapshot.log.run_id}
    return {**run, "abandoned": lost} if snapshot.everything else run


def _branch_rows(snapshot: Snapshot) -> Rows:
    for (rollout_id, attempt), lost, family in snapshot.links():
        for number, branch in enumerate(branches(family)):
            owned = sum(family[p.segment].n_sampled(p.owned_from, p.end) for p in branch.pieces)
            yield {
                "rollout_id": rollout_id,
                "attempt": attempt,
                "branch": number,
                "tip": branch.tip,
                "n_tokens": branch.n_tokens,
                "n_owned": owned,
                "n_context": branch.n_tokens - owned,
                **_tail(snapshot, lost),
            }


def _lag_rows(snapshot: Snapshot) -> Rows:
    """Planned tokens by lag, from the rows that each plan names: never from its own counts.

    With `decision` mask those above `max_lag` are here too, and not trained.

    Rollouts whose rows are retired are left out, as in the view of segments.
    """
    for record, lost in _records(snapshot, "plan"):
        for row in record.rows:
            counts: Counter[int] = Counter()
            try:
                rows = _planned_segments(snapshot, record, row)
            except Retired:
                continue
            links = {i: SimpleNamespace(n_tokens=len(r["token_ids"]), **r) for i, r in rows.items()}
            for branch in branches(links, {b["tip"] for b in row["branches"]}):
                for piece in branch.pieces:
                    segment, own = rows[piece.segment], slice(piece.owned_from, piece.end)
                    lags = token_lags(segment, record.header["step"])[own]
                    counts.update(lags[segment["train"][own] == 1].tolist())
            for lag, n in sorted(counts.items()):
                yield {
                    "step": record.header["step"],
                    "rollout_id": row["rollout_id"],
                    "lag": lag,
                    "n_tokens": n,
                    **_tail(snapshot, lost),
                }


def _planned_segments(
    snapshot: Snapshot, record: Record, row: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    if row["decision"] == "baseline_only":
        return {}
    refs = {Ref(**ref) for branch in row["branches"] for ref in branch["refs"]}
    found = [_log_of(snapshot, record, ref).row(ref) for ref in sorted(refs)]
    return {r["segment"]: r for r in found if "token_ids" in r}


def _log_of(snapshot: Snapshot, record: Record, ref: Ref) -> Log:
    """The log that a plan's address points into: this one, or a source of its epoch."""
    if ref.log == 0:
        return snapshot.log
    epochs = [r for r in snapshot.records if r.kind == "epoch" and r.epoch == record.epoch]
    paths = {s["log"]: s["path"] for r in epochs for s in r.rows[0]["sources"]}
    if ref.log not in paths:
        raise LogCorrupt(f"plan {record.n} names log {ref.log}, which its epoch does not list")
    return Log.open(snapshot.log.path / paths[ref.log])
