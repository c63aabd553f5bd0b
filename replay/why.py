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
from molt.replay.sources import Sources
from molt.schemas.columns import Row
from molt.schemas.errors import ConfigError, Retired
from molt.store.control import Record, lineage_of
from molt.store.log import Log
from molt.store.sql import connect

VIEWS = "prompts segments rollouts rewards drops plans"


def why_group(log: Log, group_id: str) -> list[Row]:
    """`why` of every rollout of a group; ConfigError if the group was never issued."""
    con = connect([log], "all", query="prompts")
    query = "select max(n) from prompts where group_id = ?"
    (n,) = con.execute(query, [group_id]).fetchone() or (None,)
    con.close()
    if n is None:
        raise ConfigError(f"{group_id} was never issued in {log.path}")
    return [why(log, f"{group_id}/{i}") for i in range(n)]


def why(log: Log, rollout_id: str) -> Row:
    """One page of facts about a rollout: {"rollout", "verdict", "prompt", "issued", "attempts",
    "group", "plan"}. `plan` is None if no plan lists it. ConfigError for an unknown rollout.
    """
    rows = _rows(log, rollout_id)
    records = log.records()
    lineage = lineage_of(records)
    planned = [r for r in records if r.kind == "plan" and _row_of(r, rollout_id)]
    held = [r for r in planned if lineage.holds(r.n)]
    steps = {
        r.rows[0]["step"]: r.rows[0] for r in records if r.kind == "step" and lineage.holds(r.n)
    }
    plan = _plan(log, held[-1], rollout_id, steps) if held else None
    page = {
        "rollout": rollout_id,
        "verdict": "",
        "prompt": rows["prompts"][0]["prompt"] if rows["prompts"] else None,
        "issued": [_pick(p, "attempt reason dataset n") for p in rows["prompts"]],
        "attempts": [_attempt(rows, number) for number in _attempts(rows)],
        "drops": [d["reason"] for d in rows["drops"] if not d["abandoned"]],
        "group": _group(held[-1], rollout_id) if held else [],
        "plan": plan,
    }
    page["verdict"] = _verdict(page, [r.header["step"] for r in planned if r not in held])
    return page


def _rows(log: Log, rollout_id: str) -> dict[str, list[Row]]:
    con = connect([log], "all", query=VIEWS)
    group_id = rollout_id.rpartition("/")[0]
    order = {
        "segments": "attempt, abandoned, segment",
        "rollouts": "attempt, status <> 'pending'",
        "rewards": "attempt, segment, token, name, revision",
    }
    found: dict[str, list[Row]] = {}
    for view, by in order.items():
        query = f"select * from {view} where rollout_id = ? order by {by}"
        found[view] = con.sql(query, params=[rollout_id]).to_arrow_table().to_pylist()
    query = "select * from prompts where group_id = ? order by attempt"
    found["prompts"] = con.sql(query, params=[group_id]).to_arrow_table().to_pylist()
    query = "select * from drops where group_id = ? and coalesce(rollout_id, $2) = $2"
    query = query.replace("?", "$1")
    found["drops"] = con.sql(query, params=[group_id, rollout_id]).to_arrow_table().to_pylist()
    issued = any(rollout_id == f"{group_id}/{i}" for p in found["prompts"] for i in range(p["n"]))
    if not issued and not found["segments"] and not found["rollouts"]:
        names = con.execute("select distinct rollout_id from rollouts").fetchall()
        near = difflib.get_close_matches(rollout_id, [n[0] for n in names], n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"there is no rollout '{rollout_id}' in {log.path}{hint}")
    con.close()
    return found


def _pick(row: Row, names: str) -> Row:
    return {name: row[name] for name in names.split()}


def _attempts(rows: dict[str, list[Row]]) -> list[int]:
    found = (*rows["segments"], *rows["rollouts"], *rows["rewards"])
    return sorted({r["attempt"] for r in found})


def _attempt(rows: dict[str, list[Row]], number: int) -> Row:
    own = {k: [r for r in v if r.get("attempt") == number] for k, v in rows.items()}
    outcome = own["rollouts"][-1] if own["rollouts"] else None
    names = "status reason seconds n_segments"
    told = {(s["segment"], s["digest"]) for s in own["segments"]}
    digests = {r["chain_digest"] for r in own["rollouts"] if r["status"] != "pending"}
    return {
        "attempt": number,
        **(_pick(outcome, names) if outcome else dict.fromkeys(names.split())),
        "abandoned": any(s["abandoned"] for s in own["segments"]),
        "conflict": len(digests) > 1 or len(told) > len({segment for segment, _ in told}),
        "turns": [_turn(s) for s in own["segments"]],
        "rewards": [_pick(r, "name segment token value revision source") for r in own["rewards"]],
    }


def _turn(row: Row) -> Row:
    logprobs = [x for x in row["logprobs"] if x is not None]
    return {
        **_pick(row, "segment parent keep n_tokens n_sampled finish_reason engine_id train_reason"),
        "n_train": sum(row["train"]),
        "logprob_mean": sum(logprobs) / len(logprobs) if logprobs else None,
        "versions": [f"{r['epoch']}.{r['version']} x {r['n']}" for r in row["version_runs"]],
    }


def _row_of(record: Record, rollout_id: str) -> Row | None:
    return next((r for r in record.rows if r["rollout_id"] == rollout_id), None)


def _group(plan: Record, rollout_id: str) -> list[Row]:
    group_id = rollout_id.rpartition("/")[0]
    own = [r for r in plan.rows if r["group_id"] == group_id]
    return [_pick(r, "rollout_id reward in_baseline advantage decision") for r in own]


def _plan(log: Log, plan: Record, rollout_id: str, steps: dict[int, Row]) -> Row:
    """What the step did with the rollout; token counts are None where the rows are retired."""
    row, step = _row_of(plan, rollout_id), plan.header["step"]
    assert row is not None
    names = "attempt reward in_baseline advantage decision lag_max"
    found = {**_pick(row, names), "record": plan.n, **plan.header}
    done = steps.get(step)
    found |= _pick(done, "loss grad_norm n_tokens") if done else {"n_tokens": None}
    try:
        trained = _trained(Sources(log, plan.epoch), plan, row)
        weights = {
            r["rollout_id"]: abs(r["advantage"]) * sum(_trained(s, plan, r).values())
            for s in [Sources(log, plan.epoch)]
            for r in plan.rows
        }
    except Retired:
        return {**found, "executed": done is not None, "lags": None, "trained": None}
    total, n = sum(weights.values()), sum(trained.values())
    return {
        **found,
        "executed": done is not None,
        "lags": {str(lag): count for lag, count in sorted(trained.items())},
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
    attempts = page["attempts"]
    if not attempts:
        return "not played yet: issued, no row of it is visible" + gone
    last = attempts[-1]
    if last["conflict"]:
        return "never trained: two writers tell it differently (conflict)"
    if last["abandoned"]:
        return "not trained in this lineage: weights of an abandoned epoch sampled it" + gone
    if last["status"] is None:
        n = len(last["turns"])
        return (
            f"not trained yet: attempt {last['attempt']} has {n} segment(s) and no outcome" + gone
        )
    if last["status"] == "pending":
        return "not trained yet: its outcome waits for a first reward" + gone
    return "not trained yet: finished, and no plan lists its group so far" + gone


def _planned(page: Row, plan: Row) -> str:
    where = f"step {plan['step']}"
    tried = next((a for a in page["attempts"] if a["attempt"] == plan["attempt"]), None)
    others = [a["attempt"] for a in page["attempts"] if a["attempt"] != plan["attempt"]]
    note = f"; attempt(s) {others} are superseded" if others else ""
    if plan["decision"] == "baseline_only":
        if tried is not None and tried["status"] in ("failed", "aborted"):
            cause = f"it {tried['status']} ({tried['reason']})"
        elif plan["reward"] is None:
            cause = "it has no reward"
        else:
            reasons = [t["train_reason"] for t in (tried or {"turns": []})["turns"]]
            cause = "it has no token to train" + _because([r for r in reasons if r])
        counted = "counted in the baseline" if plan["in_baseline"] else "not in the baseline either"
        return f"never trained: {where} took its group, but {cause}; {counted}{note}"
    if not plan["executed"]:
        return f"planned for {where}, which is not recorded yet{note}"
    if plan["advantage"] == 0.0:
        return f"trained in {where} with advantage 0: its group's rewards do not differ{note}"
    share = plan.get("share_tokens")
    part = f": {plan['trained']} tokens, {share:.1%} of the step's" if share is not None else ""
    return f"trained in {where}{part}{note}"


def _because(reasons: Sequence[str]) -> str:
    return f" ({reasons[0]})" if reasons else ""


def to_text(page: Row) -> str:
    """The page for the terminal."""
    out = [page["rollout"], f"  verdict   {page['verdict']}", f"  prompt    {page['prompt']}"]
    for p in page["issued"]:
        out.append(f"  issued    attempt {p['attempt']} ({p['reason']}), {p['n']} rollouts")
    for a in page["attempts"]:
        out += _attempt_text(a)
    for name, value in (("dropped", d) for d in page["drops"]):
        out.append(f"  {name}   {value}")
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
