"""Processes: where their chatter goes."""

import os
import sys
from pathlib import Path


def redirect_output(path: str) -> None:
    """Send file descriptors 1 and 2, which child processes inherit, to the end of a file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
