"""Commands that train online, and the report of what was learned."""

import argparse
import asyncio
import dataclasses
import os
import secrets
import sys
from pathlib import Path

from rich.console import Console

from molt import loop
from molt.agents import fields
from molt.command import (
    LOG,
    argument,
    command,
    fail,
    flag,
    formats,
    print_json,
    print_rows,
    repeatable,
)
from molt.config import Config, load, recorded_config, validate
from molt.recovery import Start
from molt.report import Report, draw, print_table, report
from molt.schemas.errors import ConfigError, MoltError
from molt.screen import Screen
from molt.show import show_decoded
from molt.store import Log

RUN_OPTIONS = (
    repeatable("--set", "A.B=C", "override a key (repeatable)"),
    flag("--accept-changes", "resume although settings that change the learning are different"),
    argument(
        "--from",
        dest="from_step",
        type=int,
        metavar="STEP",
        help="go on from an earlier step; later ones stay in the log, abandoned",
    ),
    repeatable(
        "--drop",
        "ROLLOUT",
        "settle this rollout's group without a step, going back before its plan (repeatable)",
    ),
)


@command(
    "train",
    "molt train molt/recipes/demo.toml --set train.lr=1e-5 --set run.dir=runs/slow",
    argument("config", help="TOML file; `molt/recipes/demo.toml` shows every common key"),
    *RUN_OPTIONS,
)
def run_train(args: argparse.Namespace) -> int:
    """Train online; starts a run, or resumes what is in run.dir."""
    return train(load(args.config, args.set), args)


@command(
    "agent serve",
    "molt agent serve molt/recipes/demo.toml --port 8700",
    argument("config", help="TOML file, or a log: its newest configuration goes on"),
    *RUN_OPTIONS,
    argument("--host", default="127.0.0.1"),
    argument("--port", type=int, default=8700),
    flag("--public", "allow a host that others can reach"),
)
def run_serve(args: argparse.Namespace) -> int:
    """Train with rollouts that programs of any kind open, play and finish over HTTP."""
    return train(serve_config(args), args)


def serve_config(args: argparse.Namespace) -> Config:
    """The configuration of `molt agent serve`, whose agents are programs elsewhere.

    The desk's address and token go to the worker in the environment (MOLT_DESK_...); the token is
    taken from there too, so that programs can be started with it beforehand.
    """
    token = os.environ.setdefault("MOLT_DESK_TOKEN", secrets.token_urlsafe(24))
    os.environ.update(
        MOLT_DESK_HOST=args.host, MOLT_DESK_PORT=str(args.port), MOLT_DESK_PUBLIC=str(+args.public)
    )
    print(f"rollouts: http://{args.host}:{args.port}/rollouts", file=sys.stderr)
    print(f"token: {token} (MOLT_DESK_TOKEN)", file=sys.stderr)
    overrides = ["agent.env=molt.agents.serve:External", "agent.workers=1", *args.set]
    if not Path(args.config).is_dir():
        return load(args.config, overrides)
    epochs = [r for r in Log.open(args.config).records() if r.kind == "epoch"]
    config = recorded_config(epochs[-1].rows[0], [f"run.dir={args.config}", *overrides])
    validate(config)
    return config


@command("agent fields", "molt agent fields --format json", formats("table", "json", "csv"))
def run_fields(args: argparse.Namespace) -> int:
    """Which request fields are honoured, overridden, ignored or refused."""
    print_rows(["wire", "fate", "field", "note"], [*fields.rows()], args.format)
    return 0


def train(config: Config, args: argparse.Namespace) -> int:
    start = Start(
        accept_changes=args.accept_changes, from_step=args.from_step, drop=tuple(args.drop)
    )
    with Screen() as screen:
        screen.say(f"molt train {args.config} -> {config.run.dir}")

        try:
            log = asyncio.run(loop.train(config, screen, start))
        except ConfigError:
            raise
        except (MoltError, OSError) as error:
            screen.finish()
            status = fail(1, error)
            screen.say(f"what is in {config.run.dir} is whole: the same command resumes")
            return status
        screen.finish()
        print_report(log, screen.console)
    show_one(log.path, screen.console)
    return 0


@command(
    "report",
    "molt report runs/demo --check",
    LOG,
    flag("--check", "exit 1 unless the run learned"),
    formats("table", "json"),
)
def run_report(args: argparse.Namespace) -> int:
    """What a run learned: table, reward.png, verdict."""
    log = Log.open(args.log)
    if args.format == "json":
        found = report(log)
        print_json(dataclasses.asdict(found))
    else:
        found = print_report(log, Console(highlight=False))
    return 0 if found.learned or not args.check else 1


def print_report(log: Log, console: Console) -> Report:
    """Table, verdict and reward.png; a picture that cannot be written is only a word."""
    found = report(log)
    print_table(log, found, console)
    picture = log.path / "reward.png"
    try:
        draw(log, picture)
        console.print(f"picture: {picture}", markup=False)
    except OSError as error:
        console.print(f"no picture: {error}", markup=False)
    return found


def show_one(path: Path, console: Console) -> None:
    """The best rollout of the newest step, and three commands to go on with."""
    log = Log.open(path)
    found = log.sql(
        "select rollout_id from plans where step = (select max(step) from steps) "
        "order by reward desc, rollout_id limit 1"
    ).fetchall()
    if found:
        show_decoded(log, found[0][0], console)
    relative = os.path.relpath(path)
    me = os.path.relpath(sys.argv[0]) if os.sep in sys.argv[0] else "molt"
    console.print("\nTry next:", markup=False)
    for line in (
        f'{me} sql {relative} "select step, avg(reward) from plans group by 1 order by 1"',
        f"{me} show {relative} {found[0][0] if found else 'train-0/0'}",
        f"{me} doctor {relative}",
    ):
        console.print(f"  {line}", markup=False)
