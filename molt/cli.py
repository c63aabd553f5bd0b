"""The `molt` command. Each subcommand's `--help` shows an example."""

import argparse
import asyncio
import contextlib
import errno
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from molt.agents.commands import agent_commands, serve_config
from molt.cli_replay import replay_commands
from molt.schemas.errors import ConfigError, MoltError

WIDE = 10_000
"""Columns of a table: nothing is folded; the terminal wraps long lines."""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 well, 1 damage or failed check, 2 wrong use."""
    args = parser().parse_args(argv)
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


def fail(status: int, error: BaseException) -> int:
    hint = ""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        hint = " (the disk is full: free some space, then start the same command again)"
    print(f"molt: {type(error).__name__}: {error}{hint}", file=sys.stderr)
    return status


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


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="molt", description="Agentic RL training on an event-sourced trajectory log."
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = functools.partial(add_command, commands)
    training_commands(command)
    replay_commands(command)
    reading_commands(command)
    upkeep_commands(command)
    agent_commands(command, add_command, run_fields, run_serve, add_run_options)
    return p


def add_command(
    commands: Any, name: str, run: Callable[[Any], int], text: str, example: str
) -> argparse.ArgumentParser:
    c: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    c.set_defaults(run=run)
    return c


def add_run_options(c: argparse.ArgumentParser) -> None:
    """What every command that trains online takes."""
    c.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="override a key (repeatable)"
    )
    c.add_argument(
        "--accept-changes",
        action="store_true",
        help="resume although settings that change the learning are different",
    )
    c.add_argument(
        "--from",
        dest="from_step",
        type=int,
        metavar="STEP",
        help="go on from an earlier step; later ones stay in the log, abandoned",
    )
    c.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="ROLLOUT",
        help="settle this rollout's group without a step, going back before its plan (repeatable)",
    )


def training_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    c = command(
        "train",
        run_train,
        "Train online; starts a run, or resumes what is in run.dir.",
        "molt train molt/recipes/demo.toml --set train.lr=1e-5 --set run.dir=runs/slow",
    )
    c.add_argument("config", help="TOML file; `molt/recipes/demo.toml` shows every common key")
    add_run_options(c)

    c = command(
        "report",
        run_report,
        "What a run learned: table, reward.png, verdict.",
        "molt report runs/demo --check",
    )
    c.add_argument("log")
    c.add_argument("--check", action="store_true", help="exit 1 unless the run learned")
    add_format(c, ["table", "json"])


def reading_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    c = command(
        "sql",
        run_sql,
        "SQL (DuckDB) over one or several logs.",
        'molt sql runs/demo "select step, avg(reward) from plans group by step order by step"',
    )
    c.add_argument("log", nargs="+", help="one or more logs, then the query")
    c.add_argument("query")
    c.add_argument(
        "--epoch",
        type=epoch_number,
        default=None,
        help="lineage of this epoch; 'all' shows abandoned rows",
    )
    add_format(c, ["table", "json", "csv"])

    c = command("tail", run_tail, "One line per event of a log.", "molt tail runs/demo --follow")
    c.add_argument("log")
    c.add_argument("--follow", "-f", action="store_true", help="go on as the log grows")

    c = command("runs", run_runs, "The logs in a folder.", "molt runs runs")
    c.add_argument("folder")
    add_format(c, ["table", "json", "csv"])

    c = command(
        "show",
        run_show,
        "One rollout, its tokens coloured by logprob.",
        "molt show runs/demo train-3/0",
    )
    c.add_argument("log")
    c.add_argument("rollout")
    c.add_argument("--tokenizer", default=None, help="folder; default: the run's own model")


def upkeep_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    c = command(
        "doctor",
        run_doctor,
        "Verify every commit; exit 1 on damage.",
        "molt doctor runs/demo --format json",
    )
    c.add_argument("log")
    c.add_argument(
        "--repair", action="store_true", help="remove what interrupted, closed writers left behind"
    )
    add_format(c, ["table", "json"])

    c = command(
        "compact",
        run_compact,
        "Move settled commits into cold Parquet files; --retire lets old tokens go.",
        "molt compact runs/demo --all",
    )
    c.add_argument("log")
    c.add_argument("--all", action="store_true", help="every commit of closed writers too")
    c.add_argument(
        "--retire", action="store_true", help="print what no kept checkpoint and no reader needs"
    )
    c.add_argument("--routing-keep", choices=["checkpoint", "all", "none"], default="checkpoint")
    c.add_argument("--yes", action="store_true", help="with --retire: delete it")
    add_format(c, ["table", "json"])


def epoch_number(text: str) -> int | str:
    return text if text == "all" else int(text)


def add_format(command: argparse.ArgumentParser, choices: list[str]) -> None:
    command.add_argument("--format", choices=choices, default=choices[0])


def run_train(args: argparse.Namespace) -> int:
    from molt.config import load

    return train(load(args.config, args.set), args)


def run_serve(args: argparse.Namespace) -> int:
    return train(serve_config(args), args)


def run_fields(args: argparse.Namespace) -> int:
    from molt.agents.fields import rows

    print_rows(["wire", "fate", "field", "note"], list(rows()), args.format)
    return 0


def train(config: Any, args: argparse.Namespace) -> int:
    from molt.recovery import Start
    from molt.screen import Screen

    start = Start(
        accept_changes=args.accept_changes, from_step=args.from_step, drop=tuple(args.drop)
    )
    with Screen() as screen:
        screen.say(f"molt train {args.config} -> {config.run.dir}")
        from molt import loop

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


def print_report(log: Any, console: Any) -> Any:
    """Table, verdict and reward.png; a picture that cannot be written is only a word."""
    from molt.report import draw, print_table, report

    found = report(log)
    print_table(log, found, console)
    picture = log.path / "reward.png"
    try:
        draw(log, picture)
        console.print(f"picture: {picture}", markup=False)
    except OSError as error:
        console.print(f"no picture: {error}", markup=False)
    return found


def show_one(path: Path, console: Any) -> None:
    """The best rollout of the newest step, and three commands to go on with."""
    from molt.store import Log

    log = Log.open(path)
    found = log.sql(
        "select rollout_id from plans where step = (select max(step) from steps) "
        "order by reward desc, rollout_id limit 1"
    ).fetchall()
    if found:
        show_rollout(log, found[0][0], None, console)
    relative = os.path.relpath(path)
    me = os.path.relpath(sys.argv[0]) if os.sep in sys.argv[0] else "molt"
    console.print("\nTry next:", markup=False)
    for line in (
        f'{me} sql {relative} "select step, avg(reward) from plans group by 1 order by 1"',
        f"{me} show {relative} {found[0][0] if found else 'train-0/0'}",
        f"{me} doctor {relative}",
    ):
        console.print(f"  {line}", markup=False)


def run_report(args: argparse.Namespace) -> int:
    from rich.console import Console

    from molt.report import report, to_json
    from molt.store import Log

    log = Log.open(args.log)
    if args.format == "json":
        found = report(log)
        print(json.dumps(to_json(found)))
    else:
        found = print_report(log, Console(highlight=False))
    return 0 if found.learned or not args.check else 1


def run_sql(args: argparse.Namespace) -> int:
    from molt.store import Log
    from molt.store.sql import run_sql as run

    names, rows = run([Log.open(path) for path in args.log], args.query, args.epoch)
    print_rows(names, rows, args.format)
    return 0


def print_rows(names: list[str], rows: list[Any], style: str) -> None:
    if style == "json":
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows]))
    elif style == "csv":
        import csv

        out = csv.writer(sys.stdout)
        out.writerow(names)
        out.writerows(rows)
    else:
        from rich import box
        from rich.console import Console
        from rich.table import Column, Table

        table = Table(*(Column(name, overflow="fold") for name in names), box=box.MARKDOWN)
        for row in rows:
            table.add_row(*("" if v is None else str(v) for v in row))
        console = Console(highlight=False, markup=False)
        console.width = WIDE
        console.print(table)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Libraries print on file descriptor 1 (gloo does); stdout is for the answer alone."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def run_tail(args: argparse.Namespace) -> int:
    from molt.follow import events
    from molt.store import Log

    for line in events(Log.open(args.log), follow=args.follow):
        print(line, flush=True)
    return 0


def run_runs(args: argparse.Namespace) -> int:
    from molt.follow import runs

    found = list(runs(Path(args.folder)))
    names = list(found[0]) if found else ["log"]
    print_rows(names, [list(row.values()) for row in found], args.format)
    return 0


def run_doctor(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from molt.store.doctor import doctor

    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("verifying", total=None)
        found = doctor(
            Path(args.log),
            lambda done, total: progress.update(task, completed=done, total=total),
            repair=args.repair,
        )
    if args.format == "json":
        print(json.dumps(found))
    else:
        print(f"{found['commits']} commits, {found['rows']} rows, {found['bytes']} bytes")
        use = {k: [k, *v.values(), sum(v.values())] for k, v in found["disk"].items()}
        print_rows(["bytes of", "day", "week", "month", "older", "all"], [*use.values()], "table")
        for title in ("repaired", "leftovers"):
            for name in found[title]:
                print(f"{title}: {name}")
        if found["mount"]["advice"]:
            print(f"{found['mount']['at']} is {found['mount']['type']}: {found['mount']['advice']}")
        for problem in found["problems"]:
            print(f"DAMAGED {problem['file']}: {problem['why']}")
        print("ok" if found["ok"] else f"{len(found['problems'])} problem(s)")
    return 0 if found["ok"] else 1


def run_compact(args: argparse.Namespace) -> int:
    from datetime import UTC, datetime

    from rich.console import Console
    from rich.progress import Progress

    from molt.store import Log
    from molt.store.compact import compact
    from molt.store.retention import retire

    log, console = Log.open(args.log), Console(file=sys.stderr)
    if args.retire:
        found = retire(log, now=datetime.now(UTC), routing=args.routing_keep, dry_run=not args.yes)
    else:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("compacting", total=None)
            found = compact(
                log,
                everything=args.all,
                progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
    if args.format == "json":
        print(json.dumps(found))
    else:
        print_rows(["what", "value"], [[k, str(v)] for k, v in found.items()], "table")
        if args.retire and not args.yes:
            print("nothing was deleted; repeat with --yes")
    return 0


def run_show(args: argparse.Namespace) -> int:
    from rich.console import Console

    from molt.store import Log

    show_rollout(Log.open(args.log), args.rollout, args.tokenizer, Console(highlight=False))
    return 0


def show_rollout(log: Any, rollout: str, tokenizer: str | None, console: Any) -> None:
    """Print one rollout, decoded with the run's own tokenizer where it is on this machine."""
    from molt.model import local_tokenizer
    from molt.show import show

    epochs = [r for r in log.records() if r.kind == "epoch"]
    model = tokenizer or (json.loads(epochs[-1].rows[0]["config"]).get("model") if epochs else None)
    found = local_tokenizer(model) if model else None
    if found is None:
        print(f"molt: no tokenizer for {model}; showing ids (--tokenizer FOLDER)", file=sys.stderr)
    show(log, rollout, console, found)


if __name__ == "__main__":
    sys.exit(main())
