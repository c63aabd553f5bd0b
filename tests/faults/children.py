"""Child processes for the fault tests: forked from a clean server, so that a start costs little."""

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "molt.store.sql", "molt.store.compact"])

REPORT_BYTES_MAX = 4096
"""A pipe takes so many bytes whole or not at all, also from a process that is killed."""


def start(target: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """Run `target(connection, *args)` in a child; what it sends is read from the connection."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    child = CONTEXT.Process(target=target, args=(sender, *args), daemon=True)
    child.start()
    sender.close()
    return child, receiver


def reports(receiver: Connection) -> Iterator[Any]:
    """What a child has sent, until its end of the pipe is closed."""
    while True:
        try:
            yield receiver.recv()
        except EOFError:
            return
