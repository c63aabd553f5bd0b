"""`molt agent`: what becomes of request fields, and rollouts for programs of any kind."""

import argparse
import json
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from molt.config import Config

AGENT = "molt.agents.serve:External"


def agent_commands(
    command: Callable[..., argparse.ArgumentParser],
    add_command: Callable[..., argparse.ArgumentParser],
    run_fields: Callable[[argparse.Namespace], int],
    run_serve: Callable[[argparse.Namespace], int],
    add_run_options: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Add `molt agent fields` and `molt agent serve`."""
    c = command("agent", lambda args: 2, "The HTTP side of agents.", "molt agent fields")
    actions = c.add_subparsers(dest="action", required=True, metavar="ACTION")
    f = add_command(
        actions,
        "fields",
        run_fields,
        "Which request fields are honoured, overridden, ignored or refused.",
        "molt agent fields --format json",
    )
    f.add_argument("--format", choices=["table", "json", "csv"], default="table")
    s = add_command(
        actions,
        "serve",
        run_serve,
        "Train with rollouts that programs of any kind open, play and finish over HTTP.",
        "molt agent serve molt/recipes/demo.toml --port 8700",
    )
    s.add_argument("config", help="TOML file, or a log: its newest configuration goes on")
    add_run_options(s)
    s.add_argument("--host", default="127.0.0.1")
    s.add_argument("--port", type=int, default=8700)
    s.add_argument("--public", action="store_true", help="allow a host that others can reach")


def serve_config(args: argparse.Namespace) -> "Config":
    """The configuration of `molt agent serve`, whose agents are programs elsewhere.

    The desk's address and token go to the worker in the environment (MOLT_DESK_...); the token is
    taken from there too, so that programs can be started with it beforehand.
    """
    from molt.config import Config, build, load, override_key, validate

    token = os.environ.setdefault("MOLT_DESK_TOKEN", secrets.token_urlsafe(24))
    os.environ.update(
        MOLT_DESK_HOST=args.host, MOLT_DESK_PORT=str(args.port), MOLT_DESK_PUBLIC=str(+args.public)
    )
    print(f"rollouts: http://{args.host}:{args.port}/rollouts", file=sys.stderr)
    print(f"token: {token} (MOLT_DESK_TOKEN)", file=sys.stderr)
    overrides = [f"agent.env={AGENT}", "agent.workers=1", *args.set]
    if not Path(args.config).is_dir():
        return load(args.config, overrides)
    from molt.store import Log

    epochs = [r for r in Log.open(args.config).records() if r.kind == "epoch"]
    tree = json.loads(epochs[-1].rows[0]["config"])
    for text in (f"run.dir={args.config}", *overrides):
        override_key(tree, text)
    config: Config = build(Config, tree, "")
    validate(config)
    return config
