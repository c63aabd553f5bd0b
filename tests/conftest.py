"""Fixtures of all tests: a fresh log, one complete tiny log, and the counts of the long tests.

With MOLT_RESULTS=<file> what a long test counted is added there, dated.
"""

import datetime
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import factories as make
import forge
import pytest
from hypothesis import settings

from molt.store import Log, Writer

# A shared machine has no steady clock: examples are limited by number, not by time.
settings.register_profile("molt", deadline=None, print_blob=True)
settings.load_profile("molt")


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """A log with epoch 1 and its first weights, version (1, 0)."""
    log = Log.create(tmp_path / "log", run_id="run")
    make.open_epoch(log)
    log.control.put("policy", [make.policy(1, 0)])
    return log


@pytest.fixture
def w(log: Log) -> Iterator[Writer]:
    """A writer of `log` whose linger never ends by itself: tests flush."""
    writer = log.writer(linger_s=60)
    yield writer
    writer.close()


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.build_log(tmp_path_factory.mktemp("tiny") / "log").path


@pytest.fixture
def tiny(tiny_path: Path, tmp_path: Path) -> Log:
    """A copy of the complete tiny log; the test may damage it."""
    shutil.copytree(tiny_path, tmp_path / "tiny")
    return Log.open(tmp_path / "tiny")


@pytest.fixture(scope="session")
def honest_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forge.honest_log(tmp_path_factory.mktemp("honest") / "log").path


@pytest.fixture
def honest(honest_path: Path, tmp_path: Path) -> Log:
    """A copy of a log in which everything is consistent; the test may falsify it."""
    shutil.copytree(honest_path, tmp_path / "honest")
    return Log.open(tmp_path / "honest")


RESULTS = pytest.StashKey[list[tuple[str, float, dict[str, Any]]]]()

HEAD = """# What the long fault tests counted

`make test-slow` writes the line of each test that passes; a test that failed has the date of its
last success.

| test | when (UTC), where | seconds | counts |
| --- | --- | --- | --- |
"""


SLOW_TIMEOUT_S = 3600
"""Of a long test that names none: on a busy machine the longest takes half of it."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


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
