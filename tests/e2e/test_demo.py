"""The demo itself, whole: it learns, its control does not, and killed it goes on.

Minutes each: `make test-slow`. The model comes from the wheel that `molt/recipes/demo.toml` names.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch import Train, molt, sql
from test_run import MISSING, SETTLED, TWICE, UNSETTLED

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

DEMO = Path(__file__).parents[2] / "molt" / "recipes" / "demo.toml"
PROMPTS = 25 * 8
"""What the recipe settles, disturbed or not: it drops none."""


def demo(folder: Path, *overrides: str) -> Path:
    """Run the recipe to its end; returns the log's folder."""
    log = folder / "log"
    sets = [f"--set={o}" for o in (f"run.dir={log}", *overrides)]
    done = subprocess.run(
        [sys.executable, "-m", "molt.cli", "train", str(DEMO), *sets],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return log


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns(tmp_path: Path, seed: int) -> None:
    log = demo(tmp_path, f"run.seed={seed}")
    found = molt("report", str(log), "--check", "--format", "json")
    print(seed, found.stdout)
    assert found.returncode == 0, found.stdout
    assert sql(log, SETTLED) == [{"n": PROMPTS}]


def test_the_control_does_not(tmp_path: Path) -> None:
    log = demo(tmp_path, "train.lr=0")
    found = molt("report", str(log), "--check", "--format", "json")
    print(found.stdout)
    assert found.returncode == 1 and json.loads(found.stdout)["learned"] is False
    digests = sql(log, "select count(distinct weights_digest) as n from policies")
    assert digests == [{"n": 1}], "nothing changed the weights"


def test_killed_in_the_middle_it_goes_on(tmp_path: Path) -> None:
    first = Train(tmp_path, "unused", config=DEMO)
    try:
        first.wait_for("step", 7, limit_s=600)
        first.signal(signal.SIGKILL)
        first.process.wait()
    finally:
        first.end()
    second = Train(tmp_path, "unused", config=DEMO)
    try:
        assert second.wait(limit_s=900) == 0, second.text()[-3000:]
    finally:
        second.end()
    log = second.log
    assert sql(log, TWICE) == [] and sql(log, MISSING) == [] and sql(log, UNSETTLED) == []
    assert sql(log, "select count(*) as n from steps") == [{"n": 25}]
    assert sql(log, SETTLED) == [{"n": PROMPTS}], "as many as undisturbed"
    assert molt("doctor", str(log)).returncode == 0
