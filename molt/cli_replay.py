"""Commands that work from a recorded log: replay, why, audit and what follows from them."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
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
    c.add_argument("--dump", metavar="DIR", help="write the exact batch and a table of its tokens")
    add_sets(c, "also: what the step would have done with another algorithm: algo.loss=cispo")
    add_format(c, ["table", "json"])

    offline_commands(command)

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
        "diff",
        run_diff,
        "Where two runs part: first differing prompt, plan, token, logprob, digest; exit 1 if any.",
        "molt diff runs/demo runs/demo-cispo",
    )
    c.add_argument("log_a")
    c.add_argument("log_b")
    add_format(c, ["table", "json"])

    c = command(
        "export",
        run_export,
        "Views, or the answer to a query, as Parquet, JSONL or a Hugging Face dataset.",
        "molt export runs/demo --dir out --format parquet --view segments --view rewards",
    )
    c.add_argument("log", nargs="+")
    c.add_argument("--dir", required=True, help="folder; nothing in it is overwritten")
    c.add_argument("--view", action="append", default=[], help="a view (repeatable)")
    c.add_argument("--sql", default=None, help="a query instead of views")
    add_format(c, ["parquet", "jsonl", "datasets"])

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
        help="compute logprobs again that this checkpoint's weights sampled (0: the model's own)",
    )
    c.add_argument("--sample", type=int, default=64, help="segments to recompute (default 64)")
    add_format(c, ["table", "json"])


def offline_commands(command: Command) -> None:
    c = command(
        "fork",
        run_fork,
        FORK,
        "molt fork runs/demo --step 10 --set algo.loss=cispo --dir runs/demo-cispo",
    )
    c.add_argument("log", help="the parent")
    c.add_argument("--step", type=int, required=True, help="fork from the state after this step")
    c.add_argument("--to", type=int, default=None, help="last step (default: the parent's last)")
    c.add_argument("--dir", required=True, help="the fork's own log; an existing one is resumed")
    add_sets(c, "algo.*, as in replay --set")

    c = command(
        "retrain",
        run_retrain,
        RETRAIN,
        "molt retrain runs/demo --where \"status = 'ok'\" --passes 2 --dir runs/again",
    )
    c.add_argument("log", nargs="+")
    c.add_argument("--where", default="true", help="SQL condition (default: all scored rollouts)")
    c.add_argument("--passes", type=int, default=1, help="times that each rollout is trained")
    c.add_argument("--dir", required=True, help="the run's own log; an existing one is resumed")
    c.add_argument("--weights", metavar="FOLDER", help="save the final weights as a checkpoint")
    add_sets(c, "the first log's settings otherwise, e.g. train.lr=1e-5")


FORK = """Train the same recorded rollouts from any step on with another algorithm.

Restores the parent's state after --step (checkpoint + redo, with the parent's settings), then
executes the parent's later plans, in order, with the changed algo.* settings: same rollouts, same
rewards, advantages and losses computed anew. Nothing is generated, so from the second step on the
rollouts are those of the parent's weights, not of the fork's; the recorded logprobs correct for it.
The fork's log holds plans, steps and checkpoints of its own; rows stay in the parent, which must
stay where it is relative to the fork. `molt diff`, `molt sql PARENT FORK` compare both."""

RETRAIN = """Train offline on rollouts that SQL chooses from one or several logs.

Starts from the model of the first log's configuration (--set model=... for another). Rollouts of
other weights are off-policy: the recorded logprobs give the importance weights (algo.is_cap), and
no lag is told. A group's baseline is over all its scored rollouts, chosen or not. Rows stay where
they are; each plan row names them by log and address, with the digest of the rollout's chain.
--where may name status, reason, reward, n_segments, n_sampled, n_tokens, version_min, version_max,
step, advantage, purpose, ordinal, dataset, group_id, rollout_id, run_id. Needs neither vLLM nor
Ray."""


def add_sets(c: argparse.ArgumentParser, text: str) -> None:
    c.add_argument("--set", action="append", default=[], metavar="A.B=C", help=text)


def run_fork(args: argparse.Namespace) -> int:
    from molt.cli import stdout_to_stderr
    from molt.offline_runs import fork
    from molt.screen import Screen
    from molt.store import Log

    with Screen() as screen, stdout_to_stderr():
        fork(Log.open(args.log), args.step, args.to, args.dir, args.set, screen)
    return 0


def run_retrain(args: argparse.Namespace) -> int:
    from molt.cli import stdout_to_stderr
    from molt.offline_runs import retrain
    from molt.screen import Screen
    from molt.store import Log

    logs = [Log.open(path) for path in args.log]
    with Screen() as screen, stdout_to_stderr():
        retrain(logs, args.where, args.passes, args.dir, args.set, screen, args.weights)
    return 0


def run_replay(args: argparse.Namespace) -> int:
    from molt.cli import print_rows, stdout_to_stderr
    from molt.replay.replay import history
    from molt.screen import Screen
    from molt.store import Log

    log, last = Log.open(args.log), args.to or args.step
    if last != args.step and (args.set or args.dump):
        raise ConfigError("--set and --dump are for one step: leave --to out")
    found = history(log)
    with Screen() as screen, stdout_to_stderr():
        steps = list(replayed(args, log, found, last, screen))
    ok = all(row["ok"] for row in steps)
    if args.format == "json":
        print(json.dumps(steps[0] if args.to is None else {"ok": ok, "steps": steps}))
        return 0 if ok else 1
    print_rows(
        ["step", "what", "recorded", "recomputed", "equal"],
        [
            [row["step"], name, *row[name].values()]
            for row in steps
            for name in ("state_digest", "loss", "grad_norm")
        ],
        "table",
    )
    for row in steps:
        print_otherwise(row)
    return 0 if ok else 1


def replayed(
    args: argparse.Namespace, log: Any, found: Any, last: int, screen: Any
) -> Iterator[dict[str, Any]]:
    """One row per step: the comparison, what was read, and with --set the other algorithm."""
    from molt.offline import AsRecorded, open_trainer, other_loss, otherwise, platform_difference
    from molt.replay.replay import replay
    from molt.store.control import read_record

    epochs = {e["epoch"]: e for e in found.epochs}
    if args.step not in found.steps:
        known = f"{min(found.steps)} to {max(found.steps)}" if found.steps else "none"
        raise ConfigError(f"step {args.step} is not recorded; recorded: {known}")
    epoch = epochs[found.steps[args.step]["epoch"]]
    other = other_loss(epoch, args.set) if args.set else None
    with screen.phase("loading the model and the trainer"):
        trainer = open_trainer(log, epoch)
    executor, both = AsRecorded(trainer, found), []

    def traced(number: int) -> Any:
        config = executor.config_of(number)
        both.append(otherwise(trainer, read_record(log.path, number), config, other))
        return both[-1].recorded["outcome"]

    screen.doing("executing plans")
    differs = platform_difference(epoch, executor.config_of(found.plans[args.step]))
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


def described(both: Any, args: argparse.Namespace) -> dict[str, Any]:
    """What --set and --dump add to a step's row."""
    from pathlib import Path

    from molt.replay.dump import dump, per_rollout

    found: dict[str, Any] = {}
    columns = {"before": both.before}
    for name, values in (("", both.recorded), ("other_", both.changed)):
        if values is not None:
            keys = ("advantage", "weight", "after")
            columns |= {f"{name}{key}": values[key] for key in keys}
    if both.changed is not None:
        outcome = both.changed["outcome"]
        found["other"] = {
            "set": args.set,
            **{name: getattr(outcome, name) for name in ("loss", "grad_norm", "state_digest")},
            "rollouts": per_rollout(both.sequences, both.before, both.recorded, both.changed),
        }
    if args.dump:
        paths = dump(Path(args.dump), args.step, both.sequences, columns)
        found["files"] = [str(path) for path in paths]
    return found


def print_otherwise(row: dict[str, Any]) -> None:
    from molt.cli import print_rows

    if "reason" in row:
        print(f"step {row['step']}: bits cannot agree, {row['reason']}; sketch {row['sketch']}")
    print(f"read {row['bytes_read']} bytes of {row['commits_read']} commits")
    if "other" in row:
        other = row["other"]
        print(
            f"with {' '.join(other['set'])}: loss {other['loss']}, grad norm {other['grad_norm']}"
        )
        names = ("advantage", "weight", "move")
        print_rows(
            ["rollout", "tokens", *names, *(f"other {name}" for name in names)],
            [
                [r["rollout_id"], r["tokens"]]
                + [f"{r[side][name]:+.4g}" for side in ("recorded", "changed") for name in names]
                for r in other["rollouts"]
            ],
            "table",
        )
    for path in row.get("files", []):
        print(path)


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


def run_diff(args: argparse.Namespace) -> int:
    from molt.cli import print_rows
    from molt.replay.diff import diff
    from molt.store import Log

    found = diff(Log.open(args.log_a), Log.open(args.log_b))
    if args.format == "json":
        print(json.dumps(found))
    else:
        names = ("what", "step", "rollout", "segment", "token", "a", "b")
        print_rows(list(names), [[part[n] for n in names] for part in found["parts"]], "table")
        print(f"{found['steps']} steps compared: {'equal' if found['equal'] else 'they part'}")
    return 0 if found["equal"] else 1


def run_export(args: argparse.Namespace) -> int:
    from pathlib import Path

    from molt.replay.export import DEFAULT, export
    from molt.store import Log

    logs = [Log.open(path) for path in args.log]
    written = export(logs, Path(args.dir), args.format, args.view or DEFAULT, args.sql)
    for name, n in written.items():
        print(f"{name}: {n} rows")
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
        seconds = max(time.perf_counter() - started, 1e-9)
        again = recomputed(log, report, args) if args.checkpoint is not None else None
    found = {**report.to_json(), "recomputed": again}
    found["tokens_per_s"] = round(found["tokens"] / seconds)
    if args.format == "json":
        print(json.dumps(found))
    else:
        print_audit(found)
    return 0 if found["ok"] else 1


def recomputed(log: Any, report: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Logprobs of one version computed again by its own weights."""
    from molt.cli import stdout_to_stderr
    from molt.offline import open_trainer
    from molt.replay.audit_model import recompute
    from molt.replay.replay import history

    found = history(log)
    with stdout_to_stderr():
        trainer = open_trainer(log, found.epochs[-1])
        config = json.loads(found.epochs[-1]["config"])
        again = recompute(log, report, trainer, found, config, args.checkpoint, args.sample)
        trainer.close()
    return again


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
    if found["recomputed"]:
        again = found["recomputed"]
        print(
            f"version {again['step']}: {again['tokens']} tokens of {again['segments']} segments "
            f"computed again, gap mean {again['gap_mean']:.2g}, max {again['gap_max']:.2g}"
        )
    if found["retired"] or found["invisible"]:
        print(f"not checked: {found['retired']} retired, {found['invisible']} invisible")
    print("ok" if found["ok"] else f"{found['n_violations']} violation(s)")
