"""Where two runs part: the first difference of each kind, in the order in which a run is made.

Prompts are compared by ordinal, plans by step, tokens by segment. Rows whose chains have one digest
are not read.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from molt.replay.assemble import segments_of
from molt.replay.replay import History, history
from molt.replay.sources import Sources
from molt.schemas.columns import Row
from molt.schemas.errors import Retired
from molt.schemas.text import difference
from molt.store.control import Record, read_record
from molt.store.log import Log
from molt.store.sql import connect


def diff(a: Log, b: Log) -> Row:
    """{"equal", "steps", "parts": [{"what", "step", "rollout", "segment", "token", "a", "b"}]}.

    `parts` has at most one entry per kind of difference, the earliest; `steps` were compared. Rows
    that are retired in either log are passed over.
    """
    found: dict[str, Row] = {}
    ha, hb = history(a), history(b)
    n = 0
    for part in (*_settings(ha, hb), *_prompts(a, b)):
        found.setdefault(part["what"], part)
    for step in sorted(ha.plans.keys() & hb.plans.keys()):
        n += 1
        for part in _step(a, b, ha, hb, step):
            found.setdefault(part["what"], part)
    ends = {"a": max(ha.plans, default=0), "b": max(hb.plans, default=0)}
    if ends["a"] != ends["b"]:
        found["length"] = part_of("length", **ends)
    return {"equal": not found, "steps": n, "parts": list(found.values())}


def part_of(what: str, a: Any, b: Any, **place: Any) -> Row:
    named = {k: place.get(k) for k in ("step", "rollout", "segment", "token")}
    return {"what": what, **named, "a": a, "b": b}


def _settings(ha: History, hb: History) -> Iterator[Row]:
    if not ha.epochs or not hb.epochs:
        return
    ea, eb = ha.epochs[-1], hb.epochs[-1]
    changed = difference(*(json.loads(e["config"]) for e in (ea, eb)))
    if changed:
        yield part_of("config", *({k: v[i] for k, v in changed.items()} for i in (0, 1)))
    for name in ("model", "tokenizer", "template"):
        if ea["digests"][name] != eb["digests"][name]:
            yield part_of(name, ea["digests"][name], eb["digests"][name])


def _prompts(a: Log, b: Log) -> Iterator[Row]:
    """The first ordinal that asks something else."""
    query = (
        "select group_id, any_value(prompt), any_value(n) from prompts group by group_id, ordinal "
        "order by ordinal"
    )
    asked = []
    for log in (a, b):
        con = connect([log], query=query)
        asked.append({row[0]: row[1:] for row in con.execute(query).fetchall()})
        con.close()
    for group, prompt in asked[0].items():
        other = asked[1].get(group, prompt)
        if other != prompt:
            yield part_of("prompt", prompt, other, rollout=f"{group}/0")
            return


def _step(a: Log, b: Log, ha: History, hb: History, step: int) -> Iterator[Row]:
    pa, pb = read_record(a.path, ha.plans[step]), read_record(b.path, hb.plans[step])
    ra, rb = ({r["rollout_id"]: r for r in p.rows} for p in (pa, pb))
    for who in [*ra, *(r for r in rb if r not in ra)]:
        if who not in ra or who not in rb:
            yield part_of("plan", who in ra, who in rb, step=step, rollout=who)
            break
    for who in (w for w in ra if w in rb):
        for name in ("attempt", "reward", "advantage", "decision"):
            if ra[who][name] != rb[who][name]:
                yield part_of(name, ra[who][name], rb[who][name], step=step, rollout=who)
        yield from _tokens(a, b, pa, pb, ra[who], rb[who])
    sa, sb = ha.steps.get(step), hb.steps.get(step)
    if sa is not None and sb is not None:
        for name in ("n_tokens", "loss", "grad_norm", "state_digest"):
            if sa[name] != sb[name]:
                yield part_of(name, sa[name], sb[name], step=step)


def _tokens(a: Log, b: Log, pa: Record, pb: Record, ra: Row, rb: Row) -> Iterator[Row]:
    """The first differing token, logprob and version of a rollout that both steps trained."""
    if ra["chain_digest"] is not None and ra["chain_digest"] == rb["chain_digest"]:
        return
    try:
        sa = segments_of(Sources(a, pa.epoch), ra)
        sb = segments_of(Sources(b, pb.epoch), rb)
    except Retired:
        return
    place = {"step": pa.header["step"], "rollout": ra["rollout_id"]}
    if sa.keys() != sb.keys():
        yield part_of("segments", len(sa), len(sb), **place)
    for number in sorted(sa.keys() & sb.keys()):
        x, y = sa[number].row, sb[number].row
        for what, column in (("token", "token_ids"), ("mask", "train"), ("logprob", "logprobs")):
            at = _first(x[column], y[column])
            if at is not None:
                values = [c[at].item() if at < len(c) else None for c in (x[column], y[column])]
                yield part_of(what, *values, segment=number, token=at, **place)
                if what == "token":
                    return  # behind another token everything else is another story
        if x["version_runs"] != y["version_runs"]:
            yield part_of("version", x["version_runs"], y["version_runs"], segment=number, **place)


def _first(x: Any, y: Any) -> int | None:
    n = min(len(x), len(y))
    differing = np.flatnonzero(x[:n] != y[:n])
    if len(differing):
        return int(differing[0])
    return n if len(x) != len(y) else None
