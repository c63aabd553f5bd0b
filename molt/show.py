"""`molt show`: one rollout in the terminal, as the log holds it. Nothing is written.

Text is decoded token by token for the eye only: no path leads from it back to ids (invariant I1).
"""

import difflib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from molt.schemas.errors import ConfigError
from molt.store import Log
from molt.store.sql import connect

LOGPROB_WORST = -5.0
"""Tokens at or below this are fully red."""

Row = dict[str, Any]


class Tokenizer(Protocol):
    """What is needed of a `tokenizers` or transformers tokenizer."""

    def decode(self, ids: Sequence[int], /) -> str: ...


def show(log: Log, rollout_id: str, console: Console, tokenizer: Tokenizer | None = None) -> None:
    """Print every attempt of a rollout: what became of it, then its segments' tokens.

    Without a tokenizer token ids are printed. Works for unfinished and abandoned attempts.
    ConfigError names close matches if the log does not know the rollout.
    """
    found = _Found(log, rollout_id)
    console.print(Text.assemble((rollout_id, "bold"), f" of run {log.run_id}"))
    for row in found.prompts:
        console.print(
            f"group {row['group_id']}, {row['n']} rollouts, attempt {row['attempt']} "
            f"({row['reason']})\nprompt {row['prompt']}",
            markup=False,
            highlight=False,
        )
    for attempt in found.attempts():
        _attempt(found, attempt, console, tokenizer)
    console.print(_legend())


class _Found:
    """All rows of one rollout, abandoned ones included."""

    def __init__(self, log: Log, rollout_id: str) -> None:
        names = "prompts segments rollouts rewards plans drops"
        con = connect([log], "all", query=names)
        group_id = rollout_id.rpartition("/")[0]

        def rows(view: str, order: str) -> list[Row]:
            key, value = ("group_id", group_id) if view == "prompts" else ("rollout_id", rollout_id)
            query = f"select * from {view} where {key} = ? order by {order}"
            table = con.sql(query, params=[value]).to_arrow_table()
            return list(table.to_pylist())

        self.segments = rows("segments", "attempt, abandoned, segment")
        self.outcomes = rows("rollouts", "attempt, status <> 'pending'")
        self.rewards = rows("rewards", "attempt, name, segment, token, revision")
        self.plans = rows("plans", "step")
        self.prompts = rows("prompts", "attempt")
        drops = "select * from drops where group_id = ? and coalesce(rollout_id, ?) = ?"
        params = [group_id, rollout_id, rollout_id]
        self.drops: list[Row] = con.sql(drops, params=params).to_arrow_table().to_pylist()
        issued = any(rollout_id == f"{group_id}/{i}" for p in self.prompts for i in range(p["n"]))
        if not (self.segments or self.outcomes or self.rewards or issued):
            known = con.execute("select distinct rollout_id from segments").fetchall()
            raise ConfigError(_unknown(log, rollout_id, [r[0] for r in known]))
        con.close()

    def attempts(self) -> list[int]:
        return sorted({r["attempt"] for r in (*self.segments, *self.outcomes, *self.rewards)})


def _unknown(log: Log, rollout_id: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(rollout_id, known, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"the log has {len(known)} rollouts"
    return (
        f"there is no rollout '{rollout_id}' in {log.path}; {hint} "
        '(molt sql LOG "select rollout_id from rollouts" lists them)'
    )


def _attempt(found: _Found, attempt: int, console: Console, tokenizer: Tokenizer | None) -> None:
    segments = [s for s in found.segments if s["attempt"] == attempt]
    lines = Text.assemble(("attempt ", "bold"), (str(attempt), "bold"), ": ")
    lines.append("; ".join(_fate(found, attempt)))
    if segments and segments[0]["abandoned"]:
        lines.append(" [abandoned: not in the newest epoch's lineage]", "yellow")
    console.print(lines)
    version: tuple[int, int] | None = None
    for row in segments:
        link = f", keeps {row['keep']} of segment {row['parent']}" if row["keep"] else ""
        console.print(
            Text(
                f"segment {row['segment']}: {row['n_tokens']} tokens, {row['n_sampled']} sampled, "
                f"{row['finish_reason']}, {row['engine_id']}{link}",
                "dim italic",
            )
        )
        text, version = _tokens(row, tokenizer, version)
        console.print(text)


def _fate(found: _Found, attempt: int) -> list[str]:
    """Status, rewards and what the control log did with the attempt."""
    outcomes = [r for r in found.outcomes if r["attempt"] == attempt]
    out = ["unfinished"] if not outcomes else []
    for r in outcomes[-1:]:
        out.append(f"{r['status']} after {r['seconds']:.2f} s" + _because(r["reason"]))
    for r in found.rewards:
        if r["attempt"] == attempt:
            place = "".join(f" {k} {r[k]}" for k in ("segment", "token") if r[k] is not None)
            value = "unscorable" if r["value"] is None else f"{r['value']:g}"
            out.append(f"reward {r['name']}{place} {value}")
    plans = [p for p in found.plans if p["attempt"] == attempt]
    for p in plans:
        lag = "no sampled token" if p["lag_max"] is None else f"lag <= {p['lag_max']}"
        gone = ", abandoned" if p["abandoned"] else ""
        out.append(
            f"step {p['step']} ({p['decision']}{gone}): advantage {p['advantage']:+.3f}, {lag}"
        )
    if not plans and found.plans:
        out.append("superseded by another attempt")
    out += [f"dropped: {d['reason']}" for d in found.drops]
    return out if found.plans or found.drops else [*out, "not planned yet"]


def _because(reason: str | None) -> str:
    return f" ({reason})" if reason else ""


def _tokens(
    row: Row, tokenizer: Tokenizer | None, version: tuple[int, int] | None
) -> tuple[Text, tuple[int, int] | None]:
    """The row's tokens, and the version of the last sampled one so far."""
    decode: Callable[[int], str] = (
        (lambda i: f"{i} ") if tokenizer is None else (lambda i: tokenizer.decode([i]) or f"<{i}>")
    )
    versions = [
        (run["epoch"], run["version"]) for run in row["version_runs"] for _ in range(run["n"])
    ]
    text, sampled_so_far = Text(), 0
    for i, token in enumerate(row["token_ids"]):
        if not row["sampled"][i]:
            text.append(decode(token), "dim")
            continue
        if versions[sampled_so_far] != version:
            version = versions[sampled_so_far]
            text.append(f"[v{version[0]}.{version[1]}]", "bold reverse blue")
        sampled_so_far += 1
        style = _style(row["logprobs"][i])
        text.append(decode(token), style if row["train"][i] else f"{style} strike")
    return text, version


def _style(logprob: float) -> str:
    """Green at log p = 0, yellow half way, red from LOGPROB_WORST on."""
    badness = min(1.0, max(0.0, logprob / LOGPROB_WORST))
    red, green = min(1.0, 2 * badness), min(1.0, 2 - 2 * badness)
    return f"rgb({int(55 + 200 * red)},{int(55 + 200 * green)},55)"


def _legend() -> Text:
    parts: list[Any] = [("context ", "dim")]
    for logprob in (0.0, LOGPROB_WORST / 2, LOGPROB_WORST):
        parts.append((f"log p {logprob:g} ", _style(logprob)))
    parts += [("not trained", "strike"), " ", ("[vE.N]", "bold reverse blue"), " new weights"]
    return Text.assemble(*parts)
