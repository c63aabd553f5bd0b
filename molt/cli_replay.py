"""Commands that work from a recorded log: replay, why, audit and what follows from them."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from molt.schemas.errors import ConfigError

Command = Callable[..., argparse.ArgumentParser]


def replay_commands(command: Command) -> None:
    from molt.cli import add_format

    c = command(
        "replay",
        run_replay,
        "Execute recorded steps again, from the log alone, and compare bit for bit.",
        "molt replay runs/demo --step 7 --to 9",
    )
    c.add_argument("log")
    c.add_argument("--step", type=int, required=True, help="first step to compare")
    c.add_argument("--to", type=int, default=None, help="last step (default: the same)")
    add_format(c, ["table", "json"])

    c = command(
        "why",
        run_why,
        "Why a rollout was trained as it was, or never.",
        "molt why runs/demo train-3/0",
    )
    c.add_argument("log")
    c.add_argument("rollout", nargs="?")
    c.add_argument("--prompt", type=int, metavar="ORDINAL", help="all rollouts of train-ORDINAL")
    add_format(c, ["table", "json"])

    c = command(
        "audit",
        run_audit,
        "Check invariants I1 to I7 over the whole log; exit 1 on a violation.",
        "molt audit runs/demo --checkpoint 20",
    )
    c.add_argument("log")
    c.add_argument(
        "--checkpoint",
        type=int,
        metavar="STEP",
        help="load this checkpoint and recompute logprobs of segments that its weights sampled",
    )
    c.add_argument("--sample", type=int, default=64, help="segments to recompute (default 64)")
    add_format(c, ["table", "json"])


def run_replay(args: argparse.Namespace) -> int:
    from molt.cli import print_rows, stdout_to_stderr
    from molt.offline import open_trainer
    from molt.replay.replay import history, replay
    from molt.screen import Screen
    from molt.store import Log

    log, last = Log.open(args.log), args.to or args.step
    found = history(log)
    with Screen() as screen, stdout_to_stderr():
        with screen.phase("loading the model and the trainer"):
            trainer = open_trainer(log, found.epochs[-1])
        screen.doing("executing plans")
        steps = []
        for row in replay(log, trainer, found, args.step, last):
            steps.append(row)
            digest = row["state_digest"]
            same = "equal" if row["ok"] else "DIFFERENT"
            screen.say(f"step {row['step']}: state {digest['recomputed']} {same}")
        trainer.close()
    ok = all(row["ok"] for row in steps)
    if args.format == "json":
        print(json.dumps(steps[0] if args.to is None else {"ok": ok, "steps": steps}))
    else:
        print_rows(
            ["step", "what", "recorded", "recomputed", "equal"],
            [
                [row["step"], name, *row[name].values()]
                for row in steps
                for name in ("state_digest", "loss", "grad_norm")
            ],
            "table",
        )
    return 0 if ok else 1


def run_why(args: argparse.Namespace) -> int:
    from molt.replay.why import to_text, why, why_group
    from molt.store import Log

    if (args.rollout is None) == (args.prompt is None):
        raise ConfigError("name one rollout, or --prompt ORDINAL")
    log = Log.open(args.log)
    pages = [why(log, args.rollout)] if args.rollout else why_group(log, f"train-{args.prompt}")
    if args.format == "json":
        print(json.dumps(pages[0] if args.rollout else pages))
    else:
        print("\n\n".join(to_text(page) for page in pages))
    return 0


def run_audit(args: argparse.Namespace) -> int:
    import time

    from rich.console import Console
    from rich.progress import Progress

    from molt.replay.audit import audit
    from molt.store import Log
    from molt.train.advantages import advantages

    log, console = Log.open(args.log), Console(file=sys.stderr)
    started = time.perf_counter()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("auditing", total=None)

        def progress(phase: str, done: int, total: int) -> None:
            bar.update(task, description=phase, completed=done, total=total)

        report = audit(log, advantages=advantages, progress=progress)
    found = report.to_json()
    seconds = time.perf_counter() - started
    found["tokens_per_s"] = round(found["tokens"] / max(seconds, 1e-9))
    if args.format == "json":
        print(json.dumps(found))
    else:
        print_audit(found)
    return 0 if found["ok"] else 1


def print_audit(found: dict[str, Any]) -> None:
    for row in found["violations"]:
        place = "".join(
            f" {k} {row[k]}" for k in ("rollout", "segment", "token") if row[k] is not None
        )
        print(f"{row['invariant']}{place}: {row['why']}")
        if row["expected"] is not None or row["found"] is not None:
            print(f"   expected {row['expected']}, found {row['found']}")
    checked = ", ".join(f"{name} {n}" for name, n in found["checked"].items())
    print(f"checked: {checked}; {found['tokens']} tokens, {found['tokens_per_s']} tokens/s")
    if found["retired"] or found["invisible"]:
        print(f"not checked: {found['retired']} retired, {found['invisible']} invisible")
    print("ok" if found["ok"] else f"{found['n_violations']} violation(s)")
