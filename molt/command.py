"""How a subcommand of `molt` is declared, and what all of them print with.

A command is a function of the parsed arguments that returns the exit status; its docstring is its
help, so that `molt COMMAND --help` teaches: what it does, an example, every argument.
"""

import argparse
import contextlib
import errno
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

WIDE = 10_000
"""Columns of a table: nothing is folded; the terminal wraps long lines."""

Run = Callable[[argparse.Namespace], int]
Argument = tuple[tuple[str, ...], dict[str, Any]]
"""What `add_argument` takes."""

COMMANDS: dict[str, tuple[Run, str, Sequence[Argument]]] = {}
"""name -> (function, example, arguments)."""

SUMMARIES = {"agent": ("The HTTP side of agents.", "molt agent fields")}
"""Groups of commands: summary and example."""


def command(name: str, example: str, *arguments: Argument) -> Callable[[Run], Run]:
    """Declare a function as `molt NAME`; "a b" is command b of group a."""

    def declare(run: Run) -> Run:
        COMMANDS[name] = (run, example, arguments)
        return run

    return declare


def argument(*names: str, **options: Any) -> Argument:
    return names, options


def flag(name: str, text: str) -> Argument:
    return argument(name, action="store_true", help=text)


def repeatable(name: str, metavar: str, text: str) -> Argument:
    return argument(name, action="append", default=[], metavar=metavar, help=text)


def formats(*choices: str) -> Argument:
    """`--format`; the first choice is the default."""
    return argument("--format", choices=choices, default=choices[0])


LOG = argument("log")
LOGS = argument("log", nargs="+")


def parser() -> argparse.ArgumentParser:
    """The parser of all commands that are declared by now."""
    p = argparse.ArgumentParser(
        prog="molt", description="Agentic RL training on an event-sourced trajectory log."
    )
    groups = {"": p.add_subparsers(dest="command", required=True, metavar="COMMAND")}
    for name, (run, example, arguments) in sorted(COMMANDS.items()):
        group, _, own = name.rpartition(" ")
        if group not in groups:
            c = _add(groups[""], group, *SUMMARIES[group])
            groups[group] = c.add_subparsers(dest="action", required=True, metavar="ACTION")
        c = _add(groups[group], own, inspect.getdoc(run) or "", example)
        c.set_defaults(run=run)
        for names, options in arguments:
            c.add_argument(*names, **options)
    return p


def _add(commands: Any, name: str, text: str, example: str) -> argparse.ArgumentParser:
    c: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text.partition("\n")[0],
        description=text,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return c


def fail(status: int, error: BaseException) -> int:
    """Say an error on stderr; returns `status`."""
    hint = ""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        hint = " (the disk is full: free some space, then start the same command again)"
    print(f"molt: {type(error).__name__}: {error}{hint}", file=sys.stderr)
    return status


def print_json(document: Any) -> None:
    print(json.dumps(document))


def print_rows(names: Sequence[str], rows: Sequence[Any], style: str = "table") -> None:
    """Rows on stdout as "table", "csv" or "json" (one list of objects)."""
    if style == "json":
        print_json([dict(zip(names, row, strict=True)) for row in rows])
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
def progress(text: str) -> Iterator[Callable[..., None]]:
    """A bar on stderr if that is a terminal; yields `advance(done, total, phase=text)`."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=None)

        def advance(done: int, total: int, phase: str = text) -> None:
            bar.update(task, description=phase, completed=done, total=total)

        yield advance


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
