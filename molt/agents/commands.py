"""The configuration of `molt agent serve`: rollouts for programs of any kind."""

import argparse
import os
import secrets
import sys
from pathlib import Path

from molt.config import Config, load, recorded_config, validate

AGENT = "molt.agents.serve:External"


def serve_config(args: argparse.Namespace) -> Config:
    """The configuration of `molt agent serve`, whose agents are programs elsewhere.

    The desk's address and token go to the worker in the environment (MOLT_DESK_...); the token is
    taken from there too, so that programs can be started with it beforehand.
    """
    from molt.store import Log

    token = os.environ.setdefault("MOLT_DESK_TOKEN", secrets.token_urlsafe(24))
    os.environ.update(
        MOLT_DESK_HOST=args.host, MOLT_DESK_PORT=str(args.port), MOLT_DESK_PUBLIC=str(+args.public)
    )
    print(f"rollouts: http://{args.host}:{args.port}/rollouts", file=sys.stderr)
    print(f"token: {token} (MOLT_DESK_TOKEN)", file=sys.stderr)
    overrides = [f"agent.env={AGENT}", "agent.workers=1", *args.set]
    if not Path(args.config).is_dir():
        return load(args.config, overrides)
    epochs = [r for r in Log.open(args.config).records() if r.kind == "epoch"]
    config = recorded_config(epochs[-1].rows[0], [f"run.dir={args.config}", *overrides])
    validate(config)
    return config
