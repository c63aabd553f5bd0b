"""Entry of the `molt` command: says so when another package called `molt` is in the way."""

import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> int:
    """Run `molt.cli.main`; exit 2 with the place named if `molt` is not this project's."""
    found, cli = find_spec("molt"), find_spec("molt.cli")
    if found is None or cli is None or folder(found.origin) != folder(cli.origin):
        print(
            f"molt: the package 'molt' found at {found.origin if found else 'no place'} is not "
            "molt-log's. Remove it from PYTHONPATH or uninstall it, then `pip install molt-log`",
            file=sys.stderr,
        )
        return 2
    from molt.cli import main as cli_main

    return cli_main()


def folder(origin: str | None) -> Path | None:
    return Path(origin).resolve().parent if origin else None
