"""Starting `molt train` on the tiny model as a user would: a process of its own, with its files."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
CONFIG = """
model = "{model}"
[run]
dir = "{log}"
steps = 4
[data]
train = "tasks:plain_prompts"
eval = "tasks:heldout"
groups_per_step = 2
rollouts_per_group = 3
[agent]
env = "tasks:Letters"
[sampling]
max_tokens = 12
[engine]
max_model_len = 160
max_num_seqs = 16
kv_cache_gib = 0.1
[train]
lr = 1e-3
[checkpoint]
every = 2
"""


class Train:
    """One `molt train` process; `wait` for its end, or for a record in its log."""

    def __init__(
        self,
        folder: Path,
        model: str,
        *overrides: str,
        config: Path | None = None,
        flags: Sequence[str] = (),
        **env: str,
    ) -> None:
        self.log, self.output = folder / "log", folder / "output.txt"
        if config is None:
            config = folder / "config.toml"
            config.write_text(CONFIG.format(model=model, log=self.log))
        arguments = [f"--set={o}" for o in (f"run.dir={self.log}", *overrides)]
        with open(self.output, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "molt.cli", "train", str(config), *arguments, *flags],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=HERE,
                env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
            )
        self.family: list[psutil.Process] = []

    def wait(self, limit_s: float = 500) -> int:
        """The exit status; everything that was started is gone afterwards."""
        try:
            return self.process.wait(limit_s)
        finally:
            self.end()

    def wait_for(self, kind: str, count: int, limit_s: float = 500) -> None:
        """Until the control log holds `count` records of a kind (the file names are watched)."""
        from molt.store.control import read_records

        deadline = time.monotonic() + limit_s
        seen = 0
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.text()[-3000:]
            self.remember()
            files = list((self.log / "train").glob("*.arrow")) if self.log.exists() else []
            if len(files) != seen:
                seen = len(files)
                if sum(r.kind == kind for r in read_records(self.log)) >= count:
                    return
            self.pause(0.05)
        raise AssertionError(f"no {count} '{kind}' records in {limit_s} s: {self.text()[-3000:]}")

    def pause(self, seconds: float) -> None:
        """So long, or until the command ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def remember(self) -> None:
        """Processes of this run, so that they can be ended even after their parent is gone."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        self.family += [p for p in found if p not in self.family]

    def processes(self, title: str) -> list[psutil.Process]:
        """Living processes of this run whose name or command line holds `title`."""
        self.remember()
        found = []
        for process in self.family:
            with contextlib.suppress(psutil.Error):
                if title in f"{process.name()} {' '.join(process.cmdline())}":
                    found.append(process)
        return found

    def one(self, title: str, limit_s: float = 20) -> psutil.Process:
        """The first of `processes`, which a busy machine may be late to show."""
        deadline = time.monotonic() + limit_s
        while not (found := self.processes(title)):
            shown = ", ".join(map(str, self.family))
            assert time.monotonic() < deadline, f"no {title} among {shown}: {self.text()[-3000:]}"
            self.pause(0.1)
        return found[0]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, grace_s: float = 20) -> list[int]:
        """Kill what is left of this run; returns the pids that had to be killed."""
        self.remember()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        # Ray's own two agents look for their raylet once a minute only.
        late = [p for p in self.family if p.is_running() and p.name().endswith("Agent")]
        alive = wait_gone([p for p in self.family if p not in late], grace_s)
        for p in late:
            with contextlib.suppress(psutil.NoSuchProcess):
                p.kill()
        for p in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                p.kill()
        return [p.pid for p in alive]

    def text(self) -> str:
        return self.output.read_text(errors="replace")


def wait_gone(processes: Sequence[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Those that still live then (psutil's own wait fails if a pid vanishes meanwhile)."""
    deadline = time.monotonic() + limit_s
    while alive := [p for p in processes if lives(p)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return alive


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def molt(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Any other command, as a process."""
    return subprocess.run(
        [sys.executable, "-m", "molt.cli", *arguments], capture_output=True, text=True, cwd=HERE
    )


def sql(log: Path, query: str) -> list[dict[str, Any]]:
    done = molt("sql", str(log), query, "--format", "json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found
