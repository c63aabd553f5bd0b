"""Fixtures of all tests: a fresh log, and one complete tiny log that is built once."""

import shutil
from collections.abc import Iterator
from pathlib import Path

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
