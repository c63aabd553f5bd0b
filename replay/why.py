"""Why a rollout was trained as it was, or never: from prompt and rewards to its share of a step.

Everything comes from the log; the planned rows are read by their addresses, the rest by SQL over
abandoned futures too.
"""

import difflib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from molt.replay.assemble import segments_of, sequences_of
from molt.replay.replay import history
from molt.replay.sources import Sources
from molt.schemas.columns import Row
from molt.schemas.errors import ConfigError, Retired
from molt.store.control import Record, read_record
from molt.store.log import Log
from molt.store.sql import connect

ROWS = {
    "prompts": "select * from prompts where group_id = $group order by attempt",
    "segments": "select *, list_sum(train)::int as n_train, list_avg(logprobs) as logprob_mean "
    "from segments where rollout_id = $rollout order by attempt, abandoned, segment",
    "rollouts": "select * from rollouts where rollout_id = $rollout "
    "order by attempt, status <> 'pending'",
    "rewards": "select * from rewards where rollout_id = $rollout "
    "order by attempt, segment, token, name, revision",
    "plans": "select * from plans where rollout_id = $rollout order by step",
    "drops": "select * from drops "
    "where group_id = $group and coalesce(rollout_id, $rollout) = $rollout",
}

PLAYED = ("segments", "rollouts", "rewards")


def rollout_rows(log: Log, rollout_id: str) -> dict[str, list[Row]]:
    """All rows of a rollout by view, abandoned ones included.

    ConfigError names close matches if the log does not know the rollout.
    """
    con = connect([log], "all", query=" ".join(ROWS))
    group_id = rollout_id.rpartition("/")[0]
    known = {"group": group_id, "rollout": rollout_id}
    found: dict[str, list[Row]] = {}
    for view, query in ROWS.items():
        params = {k: v for k, v in known.items() if f"${k}" in query}
        found[view] = con.sql(query, params=params).to_arrow_table().to_pylist()
    issued = any(rollout_id == f"{group_id}/{i}" for p in found["prompts"] for i in range(p["n"]))
    if not issued and not attempts(found):
        names = [n for (n,) in con.execute("select distinct rollout_id from segments").fetchall()]
        near = difflib.get_close_matches(rollout_id, names, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else f"the log has {len(names)} rollouts"
        raise ConfigError(
            f"there is no rollout '{rollout_id}' in {log.path}; {hint} "
            '(molt sql LOG "select rollout_id from rollouts" lists them)'
        )
    con.close()
    return found


def attempts(rows: dict[str, list[Row]]) -> list[int]:
    """Numbers of the attempts that `rollout_rows` found."""
    return sorted({r["attempt"] for view in PLAYED for r in rows[view]})


def why_group(log: Log, group_id: str) -> list[Row]:
    """`why` of every rollout of a group; ConfigError if the group was never issued."""
    query = "select max(n) from prompts where group_id = ?"
    (n,) = connect([log], "all", query).execute(query, [group_id]).fetchone() or (None,)
    if n is None:
        raise ConfigError(f"{group_id} was never issued in {log.path}")
    return [why(log, f"{group_id}/{i}") for i in range(n)]


def why(log: Log, rollout_id: str) -> Row:
    """One page of facts about a rollout: {"rollout", "verdict", "prompt", "issued", "attempts",
    "group", "plan"}. `plan` is None if no plan lists it. ConfigError for an unknown rollout.
    """
    rows, found = rollout_rows(log, rollout_id), history(log)
    steps = [p["step"] for p in rows["plans"] if not p["abandoned"]]
    plan = read_record(log.path, found.plans[steps[-1]]) if steps else None
    page = {
        "rollout": rollout_id,
        "verdict": "",
        "prompt": rows["prompts"][0]["prompt"] if rows["prompts"] else None,
        "issued": [_pick(p, "attempt reason dataset n") for p in rows["prompts"]],
        "attempts": [_attempt(rows, number) for number in attempts(rows)],
        "drops": [d["reason"] for d in rows["drops"] if not d["abandoned"]],
        "group": _group(plan, rollout_id) if plan else [],
        "plan": _plan(log, plan, rollout_id, found.steps.get(steps[-1])) if plan else None,
    }
    page["verdict"] = _verdict(page, [p["step"] for p in rows["plans"] if p["abandoned"]])
    return page


def _pick(row: Row, names: str) -> Row:
    return {name: row[name] for name in names.split()}


def _attempt(rows: dict[str, list[Row]], number: int) -> Row:
    segments, outcomes, rewards = (
        [r for r in rows[view] if r["attempt"] == number] for view in PLAYED
    )
    names = "status reason seconds n_segments"
    return {
        "attempt": number,
        **(_pick(outcomes[-1], names) if outcomes else dict.fromkeys(names.split())),
        "abandoned": any(s["abandoned"] for s in segments),
        "conflict": is_conflict(segments, outcomes, rewards),
        "turns": [_turn(s) for s in segments],
        "rewards": [_pick(r, "name segment token value revision source") for r in rewards],
    }


def is_conflict(segments: Sequence[Row], outcomes: Sequence[Row], rewards: Sequence[Row]) -> bool:
    """Whether these rows of an attempt have other content under one key."""
    told = {(("segment", s["segment"]), s["digest"]) for s in segments}
    told |= {
        (("pending", r["status"] == "pending"), (r["status"], r["chain_digest"])) for r in outcomes
    }
    names = ("segment", "token", "name", "revision")
    told |= {(tuple(r[k] for k in names), r["value"]) for r in rewards}
    return len(told) > len({name for name, _ in told})


def _turn(row: Row) -> Row:
    names = "segment parent keep n_tokens n_sampled finish_reason engine_id train_reason"
    return {
        **_pick(row, f"{names} n_train logprob_mean"),
        "versions": [f"{r['epoch']}.{r['version']} x {r['n']}" for r in row["version_runs"]],
    }


def _group(plan: Record, rollout_id: str) -> list[Row]:
    group_id = rollout_id.rpartition("/")[0]
    own = [r for r in plan.rows if r["group_id"] == group_id]
    return [_pick(r, "rollout_id reward in_baseline advantage decision") for r in own]


def _plan(log: Log, plan: Record, rollout_id: str, done: Row | None) -> Row:
    """What the step did with the rollout; token counts are None where the rows are retired."""
    row = next(r for r in plan.rows if r["rollout_id"] == rollout_id)
    found = {
        **_pick(row, "attempt reward in_baseline advantage decision lag_max"),
        "record": plan.n,
        **plan.header,
        **(_pick(done, "loss grad_norm n_tokens") if done else {"n_tokens": None}),
        "executed": done is not None,
    }
    source = Sources(log, plan.epoch)
    try:
        trained = {r["rollout_id"]: _trained(source, plan, r) for r in plan.rows}
    except Retired:
        return {**found, "lags": None, "trained": None}
    n = trained[rollout_id].total()
    weights = {
        r["rollout_id"]: abs(r["advantage"]) * trained[r["rollout_id"]].total() for r in plan.rows
    }
    total = sum(weights.values())
    return {
        **found,
        "lags": {str(lag): count for lag, count in sorted(trained[rollout_id].items())},
        "trained": n,
        "share_tokens": n / done["n_tokens"] if done and done["n_tokens"] else None,
        "share_weight": weights[rollout_id] / total if total else None,
    }


def _trained(source: Sources, plan: Record, row: Row) -> Counter[int]:
    """Trained tokens of a planned rollout by lag."""
    counts: Counter[int] = Counter()
    if row["decision"] == "baseline_only":
        return counts
    header = plan.header
    for s in sequences_of(row, segments_of(source, row), header["step"], header["max_lag"]):
        counts.update(s.lag[s.mask].tolist())
    return counts


def _verdict(page: Row, abandoned_steps: Sequence[int]) -> str:
    plan = page["plan"]
    purpose = page["rollout"].partition("-")[0]
    if plan is not None:
        return _planned(page, plan)
    if purpose != "train":
        return f"never trained: its purpose is {purpose}"
    if page["drops"]:
        return f"never trained: its group was dropped, reason '{page['drops'][0]}'"
    gone = f"; step {abandoned_steps[-1]} of an abandoned epoch did" if abandoned_steps else ""
    tried = page["attempts"]
    if not tried:
        return "not played yet: issued, no row of it is visible" + gone
    last = tried[-1]
    if last["conflict"]:
        return "never trained: two writers tell it differently (conflict)"
    if last["abandoned"]:
        return "not trained in this lineage: weights of an abandoned epoch sampled it" + gone
    if last["status"] is None:
        told = f"attempt {last['attempt']} has {len(last['turns'])} segment(s) and no outcome"
        return f"not trained yet: {told}{gone}"
    if last["status"] == "pending":
        return "not trained yet: its outcome waits for a first reward" + gone
    return "not trained yet: finished, and no plan lists its group so far" + gone


def _planned(page: Row, plan: Row) -> str:
    where = f"step {plan['step']}"
    tried = next((a for a in page["attempts"] if a["attempt"] == plan["attempt"]), None)
    others = [a["attempt"] for a in page["attempts"] if a["attempt"] != plan["attempt"]]
    note = f"; attempt(s) {others} are superseded" if others else ""
    if plan["decision"] == "baseline_only":
        if page["drops"]:
            cause = f"it was dropped ({page['drops'][0]})"
        elif tried is not None and tried["conflict"]:
            cause = "two writers tell it differently (conflict)"
        elif tried is not None and tried["status"] in ("failed", "aborted"):
            cause = f"it {tried['status']} ({tried['reason']})"
        elif plan["reward"] is None:
            cause = "it has no reward"
        else:
            turns = tried["turns"] if tried else []
            reason = next((t["train_reason"] for t in turns if t["train_reason"]), None)
            cause = "it has no token to train" + (f" ({reason})" if reason else "")
        counted = "counted in the baseline" if plan["in_baseline"] else "not in the baseline either"
        return f"never trained: {where} took its group, but {cause}; {counted}{note}"
    if not plan["executed"]:
        return f"planned for {where}, which is not recorded yet{note}"
    if plan["advantage"] == 0.0:
        return f"trained in {where} with advantage 0: its group's rewards do not differ{note}"
    share = plan.get("share_tokens")
    part = f": {plan['trained']} tokens, {share:.1%} of the step's" if share is not None else ""
    return f"trained in {where}{part}{note}"


def to_text(page: Row) -> str:
    """The page for the terminal."""
    out = [page["rollout"], f"  verdict   {page['verdict']}", f"  prompt    {page['prompt']}"]
    out += [
        f"  issued    attempt {p['attempt']} ({p['reason']}), {p['n']} rollouts"
        for p in page["issued"]
    ]
    for a in page["attempts"]:
        out += _attempt_text(a)
    out += [f"  dropped   {reason}" for reason in page["drops"]]
    plan = page["plan"]
    if plan is not None:
        rewards = ", ".join(_number(r["reward"]) for r in page["group"])
        out.append(f"  group     rewards {rewards}")
        out.append(
            f"  plan      step {plan['step']}, record {plan['record']}, {plan['algorithm']}: "
            f"reward {_number(plan['reward'])}, advantage {plan['advantage']:+.4g}, "
            f"{plan['decision']}"
        )
        if plan.get("lags"):
            lags = ", ".join(f"{n} tokens at lag {lag}" for lag, n in plan["lags"].items())
            out.append(f"  lag       {lags} (limit {plan['max_lag']})")
        if plan.get("share_tokens") is not None:
            weight = plan["share_weight"]
            more = f"; {weight:.1%} of |advantage| x tokens" if weight is not None else ""
            out.append(
                f"  share     {plan['trained']} of {plan['n_tokens']} tokens "
                f"({plan['share_tokens']:.1%}){more}"
            )
    return "\n".join(out)


def _attempt_text(a: Row) -> list[str]:
    status = a["status"] or "no outcome"
    marks = "".join(f", {name}" for name in ("abandoned", "conflict") if a[name])
    took = f" after {a['seconds']:.2f} s" if a["seconds"] is not None else ""
    reason = f" ({a['reason']})" if a["reason"] else ""
    out = [f"  attempt {a['attempt']} {status}{reason}{took}{marks}"]
    for t in a["turns"]:
        link = f", keeps {t['keep']} of segment {t['parent']}" if t["parent"] is not None else ""
        mean = f", mean log p {t['logprob_mean']:.3f}" if t["logprob_mean"] is not None else ""
        out.append(
            f"    turn {t['segment']}: {t['n_tokens'] - t['n_sampled']} context + {t['n_sampled']} "
            f"sampled, {t['finish_reason']}, versions {', '.join(t['versions']) or 'none'}"
            f"{mean}{link}"
        )
    for r in a["rewards"]:
        place = "".join(f" {k} {r[k]}" for k in ("segment", "token") if r[k] is not None)
        out.append(f"    reward {r['name']}{place} = {_number(r['value'])} (rev. {r['revision']})")
    return out


def _number(value: Any) -> str:
    return "none" if value is None else json.dumps(round(value, 4))
