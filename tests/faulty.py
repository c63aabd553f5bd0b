"""An `os` that fails, or dies, on purpose; for molt.store.files only, so all else is spared."""

import os
from typing import Any

CALLS = ("write", "fsync", "link", "open", "close", "unlink", "mkdir", "rename")


class FaultyOs:
    """Fails `times` calls of `call` (a name, or None for all of CALLS) from number `first` on.

    `write_first` bytes of a failing write reach the file; a failing close or unlink has happened
    all the same, and with `lost_reply` so has a failing link or rename.
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
            elif name == "close" or (name in ("link", "rename") and self.lost_reply):
                real(*args, **kwargs)
            raise OSError(self.error, f"{os.strerror(self.error)} (call {self.seen}: {name})")

        return call


class ShortWrites:
    """Every write takes at most `n` bytes and says so, as POSIX allows; nothing fails."""

    def __init__(self, n: int) -> None:
        self.n, self.writes = n, 0

    def __getattr__(self, name: str) -> Any:
        return self._write if name == "write" else getattr(os, name)

    def _write(self, fd: int, data: memoryview) -> int:
        self.writes += 1
        return os.write(fd, data[: self.n])


class Death(BaseException):
    """Nothing that runs afterwards in this process reaches the disk."""


class DyingOs:
    """The process dies before, or after, its N-th call; half of a dying write may be written.

    With `really` it ends then and there, as by kill -9; otherwise each call from there on is
    Death, for actions that run in the thread of the test.
    """

    def __init__(self, n: int, *, after: bool, really: bool = False) -> None:
        self.n, self.after, self.really, self.seen = n, after, really, 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            if self.seen == self.n:
                if self.after:
                    real(*args, **kwargs)
                elif name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
            if self.seen >= self.n:
                if self.really:
                    os._exit(9)
                raise Death
            return real(*args, **kwargs)

        return call
