"""`molt show`: one rollout in the terminal, as the log holds it. Nothing is written.

Text is decoded token by token for the eye only: no path leads from it back to ids (invariant I1).
"""

import json
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from molt.model import local_tokenizer
from molt.replay.why import attempts, is_conflict, rollout_rows
from molt.schemas.columns import Row
from molt.store import Log

LOGPROB_WORST = -5.0
"""Tokens at or below this are fully red."""


def show_decoded(log: Log, rollout_id: str, console: Console, spec: str | None = None) -> None:
    """`show` with the tokenizer of `spec` (default: the run's own), if it is on this machine."""
    epochs = [r for r in log.records() if r.kind == "epoch"]
    model = spec or (json.loads(epochs[-1].rows[0]["config"]).get("model") if epochs else None)
    found = local_tokenizer(model) if model else None
    if found is None:
        print(f"molt: no tokenizer for {model}; showing ids (--tokenizer FOLDER)", file=sys.stderr)
    show(log, rollout_id, console, found)


def show(log: Log, rollout_id: str, console: Console, tokenizer: Any = None) -> None:
    """Print every attempt of a rollout: what became of it, then its segments' tokens.

    Without a tokenizer (of `tokenizers` or transformers) token ids are printed. Works for
    unfinished and abandoned attempts. ConfigError names close matches if the log does not know
    the rollout.
    """
    rows = rollout_rows(log, rollout_id)
    console.print(Text.assemble((rollout_id, "bold"), f" of run {log.run_id}"))
    for row in rows["prompts"]:
        console.print(
            f"group {row['group_id']}, {row['n']} rollouts, attempt {row['attempt']} "
            f"({row['reason']})\nprompt {row['prompt']}",
            markup=False,
            highlight=False,
        )
    for attempt in attempts(rows):
        _attempt(rows, attempt, console, tokenizer)
    console.print(_legend())


def _attempt(rows: dict[str, list[Row]], attempt: int, console: Console, tokenizer: Any) -> None:
    segments, outcomes, rewards = (
        [r for r in rows[view] if r["attempt"] == attempt]
        for view in ("segments", "rollouts", "rewards")
    )
    lines = Text.assemble((f"attempt {attempt}", "bold"), ": ", "; ".join(_fate(rows, attempt)))
    if is_conflict(segments, outcomes, rewards):
        lines.append(" [conflict: two writers tell it differently]", "yellow")
    elif segments and segments[0]["abandoned"]:
        lines.append(" [abandoned: not in the newest epoch's lineage]", "yellow")
    console.print(lines)
    version: tuple[int, int] | None = None
    for row in segments:
        link = f", keeps {row['keep']} of segment {row['parent']}" if row["keep"] else ""
        told = (
            f"segment {row['segment']}: {row['n_tokens']} tokens, {row['n_sampled']} sampled, "
            f"{row['finish_reason']}, {row['engine_id']}{link}"
        )
        console.print(Text(told, "dim italic"))
        text, version = _tokens(row, tokenizer, version)
        console.print(text)


def _fate(rows: dict[str, list[Row]], attempt: int) -> list[str]:
    """Status, rewards and what the control log did with the attempt."""
    outcomes, rewards, plans = (
        [r for r in rows[view] if r["attempt"] == attempt]
        for view in ("rollouts", "rewards", "plans")
    )
    out = ["unfinished"] if not outcomes else []
    for r in outcomes[-1:]:
        reason = f" ({r['reason']})" if r["reason"] else ""
        out.append(f"{r['status']} after {r['seconds']:.2f} s{reason}")
    for r in rewards:
        place = "".join(f" {k} {r[k]}" for k in ("segment", "token") if r[k] is not None)
        value = "unscorable" if r["value"] is None else f"{r['value']:g}"
        out.append(f"reward {r['name']}{place} {value}")
    for p in plans:
        lag = "no sampled token" if p["lag_max"] is None else f"lag <= {p['lag_max']}"
        gone = ", abandoned" if p["abandoned"] else ""
        out.append(
            f"step {p['step']} ({p['decision']}{gone}): advantage {p['advantage']:+.3f}, {lag}"
        )
    if not plans and rows["plans"]:
        out.append("superseded by another attempt")
    out += [f"dropped: {d['reason']}" for d in rows["drops"]]
    return out if rows["plans"] or rows["drops"] else [*out, "not planned yet"]


def _tokens(
    row: Row, tokenizer: Any, version: tuple[int, int] | None
) -> tuple[Text, tuple[int, int] | None]:
    """The row's tokens, and the version of the last sampled one so far."""

    def decode(i: int) -> str:
        if tokenizer is None:
            return f"{i} "
        return str(tokenizer.decode([i], skip_special_tokens=False)) or f"<{i}>"

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
