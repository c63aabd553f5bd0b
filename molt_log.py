"""Entry of the `molt` command: says so when another package called `molt` is in the way."""

import sys
from importlib.util import find_spec


def main() -> int:
    """Run `molt.cli.main`; exit 2 with both places named if `molt` is not this project's."""
    spec = find_spec("molt")
    if spec is None or find_spec("molt.schemas") is None or find_spec("molt.cli") is None:
        print(
            f"molt: the package 'molt' found at {spec.origin if spec else 'no place'} is not "
            f"molt-log's. Remove it from PYTHONPATH ({sys.path[:3]} ...) or uninstall it, then "
            "`pip install molt-log` again",
            file=sys.stderr,
        )
        return 2
    from molt.cli import main as cli_main

    return cli_main()
