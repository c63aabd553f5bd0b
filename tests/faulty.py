"""An `os` that fails on purpose, for molt.store.files only; the rest of the process is spared."""

import os
from typing import Any

CALLS = ("write", "fsync", "link", "open", "close", "unlink", "mkdir")


class FaultyOs:
    """Fails `times` calls of `call` (a name, or None for all of CALLS) from number `first` on.

    `write_first` bytes of a failing write reach the file; a failing close or unlink has happened
    all the same, and with `lost_reply` so has a failing link.
    """

    def __init__(
        self,
        call: str | None,
        error: int,
        *,
        first: int = 1,
        times: int = 1,
        write_first: int = 0,
        lost_reply: bool = False,
    ) -> None:
        self.call, self.error, self.first, self.times = call, error, first, times
        self.write_first, self.lost_reply = write_first, lost_reply
        self.seen = 0
        self.fired: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._wrap(name, real) if name in CALLS else real

    def _wrap(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.call not in (None, name):
                return real(*args, **kwargs)
            self.seen += 1
            if not self.first <= self.seen < self.first + self.times:
                return real(*args, **kwargs)
            self.fired.append(name)
            if name == "write" and self.write_first:
                real(args[0], args[1][: self.write_first])
            elif name == "close" or (name == "link" and self.lost_reply):
                real(*args, **kwargs)
            raise OSError(self.error, f"{os.strerror(self.error)} (call {self.seen}: {name})")

        return call
