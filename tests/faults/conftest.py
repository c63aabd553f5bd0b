"""The long tests say what they counted; with MOLT_RESULTS=<file> it is added there, dated."""

import datetime
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

RESULTS = pytest.StashKey[list[tuple[str, float, dict[str, Any]]]]()

HEAD = """# What the long fault tests counted

`make test-slow` writes the line of each test that passes; a test that failed has the date of its
last success.

| test | when (UTC), where | seconds | counts |
| --- | --- | --- | --- |
"""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = []


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """`report(kills=200, lost=0)`: the counts of this test, kept if it passes."""
    start = time.monotonic()
    found: dict[str, Any] = {}
    yield found.update
    rep = getattr(request.node, "rep_call", None)
    if rep is not None and rep.passed and found:
        seconds = time.monotonic() - start
        request.config.stash[RESULTS].append((request.node.name, seconds, found))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    rep = yield
    if rep.when == "call":
        item.rep_call = rep  # type: ignore[attr-defined]
    return rep


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = os.environ.get("MOLT_RESULTS")
    results = session.config.stash[RESULTS]
    if not path or not results:
        return
    lines = {}
    if Path(path).exists():
        old = [x for x in Path(path).read_text().splitlines() if x.startswith("| `")]
        lines = {x.split("`")[1]: x for x in old}
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
    where = f"{platform.system()}, {os.cpu_count()} cores"
    for name, seconds, counts in results:
        told = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in counts.items())
        lines[name] = f"| `{name}` | {when}, {where} | {seconds:.0f} | {told} |"
    Path(path).write_text(HEAD + "\n".join(lines[k] for k in sorted(lines)) + "\n")
