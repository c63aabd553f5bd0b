"""Hints: a writer says "there is news" to tails on its host, which then look at once.

A hint is an empty datagram on a Unix socket; it names nothing and nothing depends on it. Lost,
doubled, late or forged ones only change when a tail polls, never what it finds.
"""

import contextlib
import os
import secrets
import select
import socket
from collections.abc import Iterator
from pathlib import Path

from molt.store.files import STORE, make_dirs

FOLDER = "sockets"
HOST = socket.gethostname().split(".")[0].replace("-", "_") or "host"


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name for `path` that fits a socket address (108 bytes), however deep the log lies."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


class Listener:
    """One reader's ear. `wait` returns early when a writer of this host published something."""

    def __init__(self, log: Path) -> None:
        self.path = log / FOLDER / f"{HOST}-tail-{os.getpid()}-{secrets.token_hex(4)}"
        make_dirs(self.path.parent)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        with short_path(self.path) as name:
            self._socket.bind(name)

    def wait(self, timeout_s: float) -> bool:
        """True if there was a hint; all that have arrived are one."""
        if not select.select([self._socket], [], [], max(0.0, timeout_s))[0]:
            return False
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(1)
        return True

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)


def announce(log: Path) -> None:
    """Wake the tails of this host. Never blocks, never fails; ears of dead readers are removed."""
    with contextlib.suppress(OSError):  # what it speaks of is durable already
        ears = [n for n in STORE.list(log / FOLDER) if n.startswith(f"{HOST}-tail-")]
        if not ears:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out:
            for ear in ears:
                with contextlib.suppress(OSError), short_path(log / FOLDER / ear) as name:
                    try:
                        out.sendto(b"", name)
                    except ConnectionRefusedError:
                        os.unlink(log / FOLDER / ear)
