"""Commands that work from a recorded log: replay, why, audit and what follows from them."""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from molt import offline, offline_runs
from molt.command import (
    LOG,
    LOGS,
    argument,
    command,
    formats,
    print_json,
    print_rows,
    progress,
    repeatable,
    stdout_to_stderr,
)
from molt.replay import audit_model
from molt.replay.audit import audit
from molt.replay.diff import diff
from molt.replay.dump import dump, per_rollout, token_table
from molt.replay.export import DEFAULT, export
from molt.replay.replay import history, replay
from molt.replay.why import to_text, why, why_group
from molt.schemas.columns import Row
from molt.schemas.errors import ConfigError
from molt.screen import Screen
from molt.store import Log
from molt.store.control import read_record
from molt.train.advantages import advantages

COMPARED = ("state_digest", "loss", "grad_norm")


@command(
    "fork",
    "molt fork runs/demo --step 10 --set algo.loss=cispo --dir runs/demo-cispo",
    argument("log", help="the parent"),
    argument("--step", type=int, required=True, help="fork from the state after this step"),
    argument("--to", type=int, help="last step (default: the parent's last)"),
    argument("--dir", required=True, help="the fork's own log; an existing one is resumed"),
    repeatable("--set", "A.B=C", "algo.*, as in replay --set"),
)
def run_fork(args: argparse.Namespace) -> int:
    """Train the same recorded rollouts from any step on with another algorithm.

    Restores the parent's state after --step (checkpoint + redo, with the parent's settings), then
    executes the parent's later plans, in order, with the changed algo.* settings: same rollouts,
    same rewards, advantages and losses computed anew. Nothing is generated, so from the second step
    on the rollouts are those of the parent's weights, not of the fork's; the recorded logprobs
    correct for it. The fork's log holds plans, steps and checkpoints of its own; rows stay in the
    parent, which must stay where it is relative to the fork. `molt diff`, `molt sql PARENT FORK`
    compare both.
    """
    with Screen() as screen, stdout_to_stderr():
        offline_runs.fork(Log.open(args.log), args.step, args.to, args.dir, args.set, screen)
    return 0


@command(
    "retrain",
    "molt retrain runs/demo --where \"status = 'ok'\" --passes 2 --dir runs/again",
    LOGS,
    argument("--where", default="true", help="SQL condition (default: all scored rollouts)"),
    argument("--passes", type=int, default=1, help="times that each rollout is trained"),
    argument("--dir", required=True, help="the run's own log; an existing one is resumed"),
    argument("--weights", metavar="FOLDER", help="save the final weights as a checkpoint"),
    repeatable("--set", "A.B=C", "the first log's settings otherwise, e.g. train.lr=1e-5"),
)
def run_retrain(args: argparse.Namespace) -> int:
    """Train offline on rollouts that SQL chooses from one or several logs.

    Starts from the model of the first log's configuration (--set model=... for another). Rollouts
    of other weights are off-policy: the recorded logprobs give the importance weights
    (algo.is_cap), and no lag is told. A group's baseline is over all its scored rollouts, chosen or
    not. Rows stay where they are; each plan row names them by log and address, with the digest of
    the rollout's chain.
    --where may name status, reason, reward, n_segments, n_sampled, n_tokens, version_min,
    version_max, step, advantage, purpose, ordinal, dataset, group_id, rollout_id, run_id. Needs
    neither vLLM nor Ray.
    """
    logs = [Log.open(path) for path in args.log]
    with Screen() as screen, stdout_to_stderr():
        offline_runs.retrain(
            logs, args.where, args.passes, args.dir, args.set, screen, args.weights
        )
    return 0


@command(
    "replay",
    "molt replay runs/demo --step 7 --to 9",
    LOG,
    argument("--step", type=int, required=True, help="first step to compare"),
    argument("--to", type=int, help="last step (default: the same)"),
    argument("--dump", metavar="DIR", help="write the exact batch and a table of its tokens"),
    repeatable(
        "--set",
        "A.B=C",
        "also: what the step would have done with another algorithm: algo.loss=cispo",
    ),
    formats("table", "json"),
)
def run_replay(args: argparse.Namespace) -> int:
    """Execute recorded steps again, from the log alone, and compare bit for bit."""
    if args.to not in (None, args.step) and (args.set or args.dump):
        raise ConfigError("--set and --dump are for one step: leave --to out")
    with Screen() as screen, stdout_to_stderr():
        steps = list(replayed(args, screen))
    ok = all(row["ok"] for row in steps)
    if args.format == "json":
        print_json(steps[0] if args.to is None else {"ok": ok, "steps": steps})
    else:
        print_rows(
            ["step", "what", "recorded", "recomputed", "equal"],
            [[row["step"], name, *row[name].values()] for row in steps for name in COMPARED],
        )
        for row in steps:
            print_replayed(row)
    return 0 if ok else 1


def replayed(args: argparse.Namespace, screen: Any) -> Iterator[Row]:
    """One row per step: the comparison, what was read, and with --set the other algorithm."""
    log, last = Log.open(args.log), args.to or args.step
    found = history(log)
    found.check(args.step, last, recorded=True)
    epoch = found.epoch_of(args.step)
    other = offline.other_loss(epoch, args.set) if args.set else None
    with screen.phase("loading the model and the trainer"):
        trainer = offline.open_trainer(log, epoch)
    executor, both = offline.AsRecorded(trainer, found), []

    def traced(number: int) -> Any:
        config = executor.config_of(number)
        both.append(offline.otherwise(trainer, read_record(log.path, number), config, other))
        return both[-1].outcome

    screen.doing("executing plans")
    differs = offline.platform_difference(epoch, executor.config_of(found.plans[args.step]))
    execute = traced if args.set or args.dump else None
    read = 0
    for row in replay(log, executor, found, args.step, last, differs, execute):
        row |= {"bytes_read": trainer.bytes_read - read, "commits_read": trainer.commits_read}
        read = trainer.bytes_read
        if both:
            row |= described(both.pop(), args)
        same = "equal" if row["state_digest"]["equal"] else "close" if row["ok"] else "DIFFERENT"
        screen.say(f"step {row['step']}: state {row['state_digest']['recomputed']} {same}")
        yield row
    trainer.close()


def described(both: offline.Otherwise, args: argparse.Namespace) -> Row:
    """What --set and --dump add to a step's row."""
    found: Row = {}
    tokens = token_table(both.sequences, both.columns)
    if both.other is not None:
        found["other"] = {
            "set": args.set,
            **{name: getattr(both.other, name) for name in ("loss", "grad_norm", "state_digest")},
            "rollouts": per_rollout(tokens),
        }
    if args.dump:
        paths = dump(Path(args.dump), args.step, both.sequences, tokens)
        found["files"] = [str(path) for path in paths]
    return found


def print_replayed(row: Row) -> None:
    if "reason" in row:
        print(f"step {row['step']}: bits cannot agree, {row['reason']}; sketch {row['sketch']}")
    print(f"read {row['bytes_read']} bytes of {row['commits_read']} commits")
    if "other" in row:
        other = row["other"]
        told = f"loss {other['loss']}, grad norm {other['grad_norm']}"
        print(f"with {' '.join(other['set'])}: {told}")
        names = ("advantage", "weight", "move")
        print_rows(
            ["rollout", "tokens", *names, *(f"other {name}" for name in names)],
            [
                [r["rollout_id"], r["tokens"]]
                + [f"{r[side][name]:+.4g}" for side in ("recorded", "changed") for name in names]
                for r in other["rollouts"]
            ],
        )
    for path in row.get("files", []):
        print(path)


@command(
    "why",
    "molt why runs/demo train-3/0",
    LOG,
    argument("rollout", nargs="?"),
    argument("--prompt", type=int, metavar="ORDINAL", help="all rollouts of train-ORDINAL"),
    formats("table", "json"),
)
def run_why(args: argparse.Namespace) -> int:
    """Why a rollout was trained as it was, or never."""
    if (args.rollout is None) == (args.prompt is None):
        raise ConfigError("name one rollout, or --prompt ORDINAL")
    log = Log.open(args.log)
    pages = [why(log, args.rollout)] if args.rollout else why_group(log, f"train-{args.prompt}")
    if args.format == "json":
        print_json(pages[0] if args.rollout else pages)
    else:
        print("\n\n".join(to_text(page) for page in pages))
    return 0


@command(
    "diff",
    "molt diff runs/demo runs/demo-cispo",
    argument("log_a"),
    argument("log_b"),
    formats("table", "json"),
)
def run_diff(args: argparse.Namespace) -> int:
    """Where two runs part: first differing prompt, plan, token, logprob, digest; exit 1 if any."""
    found = diff(Log.open(args.log_a), Log.open(args.log_b))
    if args.format == "json":
        print_json(found)
    else:
        names = ("what", "step", "rollout", "segment", "token", "a", "b")
        print_rows(names, [[part[n] for n in names] for part in found["parts"]])
        print(f"{found['steps']} steps compared: {'equal' if found['equal'] else 'they part'}")
    return 0 if found["equal"] else 1


@command(
    "export",
    "molt export runs/demo --dir out --format parquet --view segments --view rewards",
    LOGS,
    argument("--dir", required=True, help="folder; nothing in it is overwritten"),
    argument(
        "--view",
        action="append",
        default=[],
        help=f"a view, or a stream of your own (repeatable; default: {' '.join(DEFAULT)})",
    ),
    argument("--sql", help="a query instead of views"),
    formats("parquet", "jsonl", "datasets"),
)
def run_export(args: argparse.Namespace) -> int:
    """Views, or the answer to a query, as Parquet, JSONL or a Hugging Face dataset."""
    logs = [Log.open(path) for path in args.log]
    written = export(logs, Path(args.dir), args.format, args.view or DEFAULT, args.sql)
    for name, n in written.items():
        print(f"{name}: {n} rows")
    return 0


@command(
    "audit",
    "molt audit runs/demo --checkpoint 20",
    LOG,
    argument(
        "--checkpoint",
        type=int,
        metavar="STEP",
        help="compute logprobs again that this checkpoint's weights sampled (0: the model's own)",
    ),
    argument("--sample", type=int, default=64, help="segments to recompute (default 64)"),
    formats("table", "json"),
)
def run_audit(args: argparse.Namespace) -> int:
    """Check invariants I1 to I7 over the whole log; exit 1 on a violation."""
    log, started = Log.open(args.log), time.perf_counter()
    with progress("auditing") as advance:
        report = audit(log, advantages=advantages, progress=advance)
        seconds = max(time.perf_counter() - started, 1e-9)
        again = recomputed(log, report, args) if args.checkpoint is not None else None
    found = {**report.to_json(), "recomputed": again}
    found["tokens_per_s"] = round(found["tokens"] / seconds)
    if args.format == "json":
        print_json(found)
    else:
        print_audit(found)
    return 0 if found["ok"] else 1


def recomputed(log: Any, report: Any, args: argparse.Namespace) -> Row:
    """Logprobs of one version computed again by its own weights."""
    found = history(log)
    with stdout_to_stderr():
        trainer = offline.open_trainer(log, found.epochs[-1])
        config = json.loads(found.epochs[-1]["config"])
        if args.checkpoint in found.checkpoints:
            offline.as_saved(trainer, found, found.checkpoints[args.checkpoint])
        again = audit_model.recompute(
            log, report, trainer, found, config, args.checkpoint, args.sample
        )
        trainer.close()
    return again


def print_audit(found: Row) -> None:
    for row in found["violations"]:
        names = ("rollout", "segment", "token")
        place = "".join(f" {k} {row[k]}" for k in names if row[k] is not None)
        print(f"{row['invariant']}{place}: {row['why']}")
        if row["expected"] is not None or row["found"] is not None:
            print(f"   expected {row['expected']}, found {row['found']}")
    checked = ", ".join(f"{name} {n}" for name, n in found["checked"].items())
    print(f"checked: {checked}; {found['tokens']} tokens, {found['tokens_per_s']} tokens/s")
    if found["recomputed"]:
        again = found["recomputed"]
        print(
            f"version {again['step']}: {again['tokens']} tokens of {again['segments']} segments "
            f"computed again, gap mean {again['gap_mean']:.2g}, max {again['gap_max']:.2g}"
        )
    if found["retired"] or found["invisible"]:
        print(f"not checked: {found['retired']} retired, {found['invisible']} invisible")
    print("ok" if found["ok"] else f"{found['n_violations']} violation(s)")
