"""Every system call that makes the log durable: fsync, link, unlink and exclusive names.

`publish` is put-if-absent: dot-file, write, fsync, link() to the final name (never rename, which
overwrites), unlink, fsync of the directory. After it returns, the name holds exactly these bytes
across kill -9 and power loss. Nothing else in the project writes below the log's data folders.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from molt.schemas.errors import MoltError

Bytes = bytes | bytearray | memoryview


class NameTaken(MoltError, FileExistsError):
    """The final name exists with other content."""


class PublishUnknown(MoltError, OSError):
    """Failure at or after the link: the file may or may not be there; its directory is dead."""


class Backend(Protocol):
    """All that commits need of their storage; keys are paths below the log.

    Nothing assumes rename, append, or that a listing shows what was put a moment ago. On an object
    store `put` is one conditional PUT.
    """

    def put(self, key: Path, data: Bytes) -> None:
        """Durable put-if-absent. OSError: nothing visible, may be retried. NameTaken: another
        content has the name. PublishUnknown: the outcome is not known."""

    def list(self, folder: Path | str, start: str = "") -> list[str]:
        """Fresh sorted names from `start` on, without dot-files. No folder is an empty one, and so
        is a stranger's file that has its name (`molt doctor` tells of it)."""

    def read(self, key: Path, start: int = 0, n: int = -1) -> bytes:
        """`n` bytes (-1: all the rest) from `start` on; a negative start counts from the end."""

    def identity(self, key: Path) -> tuple[int, int, int]:
        """(id, size in bytes, mtime in ns): equal = the same file, not changed in place, or the
        same folder with no name added; a store without folders may always give another one."""

    def delete(self, keys: Iterable[Path]) -> None:
        """What is gone already is no error."""


def make_dirs(path: Path, *, mode: int = 0o700) -> None:
    """Create `path`; every new directory is fsynced into its parent, outermost first."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, mode)
        fsync_dir(folder.parent)


def fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(final: Path, data: Bytes) -> None:
    """Put `data` under `final` if the name is free.

    Raises OSError before the link (nothing visible, may be retried), NameTaken if another file
    has the name, PublishUnknown for a failure at or after the link. A lost reply (the link
    succeeded but reported an error) counts as success: the content decides.
    """
    temp = final.parent / f".{final.name}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        _write_durable(temp, data)
        _link(temp, final, data)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temp)
    try:
        fsync_dir(final.parent)
    except OSError as error:
        raise PublishUnknown(error.errno, f"fsync of {final.parent} failed: {error}") from error


def replace(final: Path, data: bytes) -> None:
    """Put `data` under `final`, whatever was there; only for `readers/`, never for log data."""
    temp = final.parent / f".{final.name}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        _write_durable(temp, data)
        os.rename(temp, final)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temp)
    fsync_dir(final.parent)


def _write_durable(path: Path, data: Bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        view = memoryview(data)
        while view:
            n = os.write(fd, view)
            if n <= 0:
                raise OSError(errno.EIO, f"wrote {n} bytes of {len(view)} to {path}")
            view = view[n:]
        os.fsync(fd)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    os.close(fd)


def _link(temp: Path, final: Path, data: Bytes) -> None:
    try:
        os.link(temp, final)
        return
    except OSError as error:
        cause = error
    try:
        if os.stat(temp).st_nlink == 2:
            return
        found = final.read_bytes()
    except FileNotFoundError:
        if cause.errno == errno.EEXIST:
            raise PublishUnknown(errno.EIO, f"{final} exists and cannot be read") from cause
        raise PublishUnknown(cause.errno, f"link to {final} failed: {cause}") from cause
    except OSError as error:
        raise PublishUnknown(error.errno, f"link to {final}: outcome unknown: {error}") from cause
    if found == bytes(data):
        return
    raise NameTaken(errno.EEXIST, f"{final} exists with other content")


class Posix:
    """Any file system with link() and fsync(); see this module's docstring."""

    def put(self, key: Path, data: Bytes) -> None:
        make_dirs(key.parent)
        publish(key, data)

    def list(self, folder: Path | str, start: str = "") -> list[str]:
        try:
            with os.scandir(folder) as found:
                return sorted(e.name for e in found if e.name[0] != "." and e.name >= start)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, key: Path, start: int = 0, n: int = -1) -> bytes:
        with open(key, "rb", buffering=0) as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(0, size + start) if start < 0 else start)
            return f.readall() if n < 0 else f.read(n)

    def identity(self, key: Path) -> tuple[int, int, int]:
        stat = os.stat(key)
        return stat.st_ino, stat.st_size, stat.st_mtime_ns

    def delete(self, keys: Iterable[Path]) -> None:
        folders = set()
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(key)
            folders.add(key.parent)
        for folder in sorted(folders):
            fsync_dir(folder)


STORE: Backend = Posix()
names = STORE.list
