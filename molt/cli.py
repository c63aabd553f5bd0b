"""The `molt` command: its entry, and the commands that read and keep a log."""

import argparse
import io
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from rich.console import Console

from molt import cli_replay, cli_train, follow  # noqa: F401  (they declare their commands)
from molt.command import (
    LOG,
    argument,
    command,
    fail,
    flag,
    formats,
    parser,
    print_json,
    print_rows,
    progress,
)
from molt.schemas.errors import ConfigError, MoltError
from molt.show import show_decoded
from molt.store import Log
from molt.store.compact import compact
from molt.store.doctor import doctor
from molt.store.retention import retire
from molt.store.sql import run_sql as query


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 well, 1 damage or failed check, 2 wrong use."""
    args = parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # text of a log may be what no terminal can show
            stream.reconfigure(errors="backslashreplace")
    sys.path.insert(0, os.getcwd())  # users' agents and data functions live beside their config
    try:
        check_foreign_package()
        status: int = args.run(args)
        return status
    except ConfigError as error:
        return fail(2, error)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of our output has left
        return 0
    except (MoltError, OSError) as error:
        return fail(1, error)
    except KeyboardInterrupt:
        print("molt: stopped; the log is whole, the same command resumes", file=sys.stderr)
        return 130


def check_foreign_package() -> None:
    """Refuse to run when child processes could import another package called `molt`."""
    own = Path(__file__).resolve().parent
    for entry in sys.path:
        other = Path(entry or ".").resolve() / "molt"
        if (other / "__init__.py").exists() and other.resolve() != own:
            raise ConfigError(
                f"another package called 'molt' is on the path: {other}. This one is {own}. Remove "
                "that folder from PYTHONPATH, start from another directory, or uninstall it"
            )


def epoch(text: str) -> int | Literal["all"]:
    return "all" if text == "all" else int(text)


@command(
    "sql",
    'molt sql runs/demo "select step, avg(reward) from plans group by step order by step"',
    argument("log", nargs="+", help="one or more logs, then the query"),
    argument("query"),
    argument(
        "--epoch",
        type=epoch,
        help="lineage of this epoch; 'all' shows abandoned rows",
    ),
    formats("table", "json", "csv"),
)
def run_sql(args: argparse.Namespace) -> int:
    """SQL (DuckDB) over one or several logs."""
    names, rows = query([Log.open(path) for path in args.log], args.query, args.epoch)
    print_rows(names, rows, args.format)
    return 0


@command(
    "tail",
    "molt tail runs/demo --follow",
    LOG,
    argument("--follow", "-f", action="store_true", help="go on as the log grows"),
)
def run_tail(args: argparse.Namespace) -> int:
    """One line per event of a log: control records, issued prompts, outcomes, rewards."""
    for line in follow.events(Log.open(args.log), follow=args.follow):
        print(line, flush=True)
    return 0


@command("runs", "molt runs runs", argument("folder"), formats("table", "json", "csv"))
def run_runs(args: argparse.Namespace) -> int:
    """The logs in a folder."""
    found = list(follow.runs(Path(args.folder)))
    print_rows([*found[0]] if found else ["log"], [[*row.values()] for row in found], args.format)
    return 0


@command(
    "show",
    "molt show runs/demo train-3/0",
    LOG,
    argument("rollout"),
    argument("--tokenizer", help="folder; default: the run's own model"),
)
def run_show(args: argparse.Namespace) -> int:
    """One rollout, its tokens coloured by logprob."""
    show_decoded(Log.open(args.log), args.rollout, Console(highlight=False), args.tokenizer)
    return 0


@command(
    "doctor",
    "molt doctor runs/demo --format json",
    LOG,
    flag("--repair", "remove what interrupted, closed writers left behind"),
    formats("table", "json"),
)
def run_doctor(args: argparse.Namespace) -> int:
    """Verify every commit; exit 1 on damage."""
    with progress("verifying") as advance:
        found = doctor(Path(args.log), advance, repair=args.repair)
    if args.format == "json":
        print_json(found)
        return 0 if found["ok"] else 1
    print(f"{found['commits']} commits, {found['rows']} rows, {found['bytes']} bytes")
    use = [[k, *v.values(), sum(v.values())] for k, v in found["disk"].items()]
    print_rows(["bytes of", "day", "week", "month", "older", "all"], use)
    for title in ("repaired", "leftovers"):
        for name in found[title]:
            print(f"{title}: {name}")
    if found["mount"]["advice"]:
        print(f"{found['mount']['at']} is {found['mount']['type']}: {found['mount']['advice']}")
    if found["invisible"]:
        print(f"not verified: {found['invisible']} commits behind their writer's end (never shown)")
    for problem in found["problems"]:
        print(f"DAMAGED {problem['file']}: {problem['why']}")
    print("ok" if found["ok"] else f"{len(found['problems'])} problem(s)")
    return 0 if found["ok"] else 1


@command(
    "compact",
    "molt compact runs/demo --all",
    LOG,
    flag("--all", "every commit of closed writers too"),
    flag("--retire", "print what no kept checkpoint and no reader needs"),
    argument("--routing-keep", choices=["checkpoint", "all", "none"], default="checkpoint"),
    flag("--yes", "with --retire: delete it"),
    formats("table", "json"),
)
def run_compact(args: argparse.Namespace) -> int:
    """Move settled commits into cold Parquet files; --retire lets old tokens go."""
    log = Log.open(args.log)
    if args.retire:
        found = retire(log, now=datetime.now(UTC), routing=args.routing_keep, dry_run=not args.yes)
    else:
        with progress("compacting") as advance:
            found = compact(log, everything=args.all, progress=advance)
    if args.format == "json":
        print_json(found)
    else:
        print_rows(["what", "value"], [*found.items()])
        if args.retire and not args.yes:
            print("nothing was deleted; repeat with --yes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
