"""What `molt doctor` says beside damage: disk use, the mount, and the one repair that is safe."""

import contextlib
import os
from pathlib import Path

from molt.schemas.errors import LogCorrupt, MoltError
from molt.store.control import lineage_of, read_records
from molt.store.files import STORE
from molt.store.reader import END, hot_files, writer_names

AGES_DAYS = {"day": 1.0, "week": 7.0, "month": 30.0, "older": float("inf")}
MOUNTS = {
    "nfs": "a network file system: names may become visible late. Use log.linger_s = 5, one "
    "appender per host, and mount with `sync` on the server's side",
    "cifs": "SMB has no exclusive link(): a second driver is not kept out. Use another disk",
    "fuse": "a user-space file system: check that it keeps fsync() and link(), or use a local disk",
    "overlay": "a container's own layer: it goes away with the container. Mount a volume here",
    "tmpfs": "memory, not a disk: nothing survives a reboot. Use a real disk",
}
"""Start of a file system's type -> what to know about a log on it."""


def disk_use(log: Path, now: float) -> dict[str, dict[str, int]]:
    """Bytes by stream (and control, checkpoints, blobs) and by age of the file: day, week ..."""
    found: dict[str, dict[str, int]] = {}
    for path in (p for p in sorted(log.rglob("*")) if p.is_file()):
        top, *rest = path.relative_to(log).parts
        kind = {"train": "control", "cold": rest[0] if rest else ""}.get(top, top)
        if top == "data":
            kind = (path.name.lstrip(".").split(".") + ["other"])[1]
        with contextlib.suppress(FileNotFoundError):  # compaction may run at the same time
            stat = path.stat()
            age = next(a for a, days in AGES_DAYS.items() if now - stat.st_mtime < days * 86_400)
            found.setdefault(kind, dict.fromkeys(AGES_DAYS, 0))[age] += stat.st_size
    return found


def mount_of(log: Path, mountinfo: str = "/proc/self/mountinfo") -> dict[str, str | None]:
    """{"type", "at", "advice"} of the file system that holds the log; advice None = nothing."""
    best, kind = "", "unknown"
    for line in Path(mountinfo).read_text().splitlines():
        left, _, right = line.partition(" - ")
        at = left.split()[4].encode().decode("unicode_escape")
        inside = log == Path(at) or Path(at) in log.parents
        if inside and len(at) >= len(best):
            best, kind = at, right.split()[0]
    advice = next((text for start, text in MOUNTS.items() if kind.startswith(start)), None)
    return {"type": kind, "at": best, "advice": advice}


def sweep(log: Path) -> list[str]:
    """Remove what interrupted publishes left in the folders of closed writers; the names of it.

    Only there it is proven that nobody still works on such a dot-file: the writer published its
    `end`, or a newer epoch has closed it, and then all that it may still link is invisible. Where
    damage hides that, nothing is removed.
    """
    try:
        lineage = lineage_of(read_records(log))
    except (MoltError, OSError):
        return []
    gone = []
    for writer in writer_names(log):
        try:
            files = hot_files(log, writer)
        except LogCorrupt:
            continue
        ended = bool(files) and files[-1].stream == END
        if ended or lineage.last_seq(writer) is not None:
            gone += sorted((log / "data" / writer).glob("*/.*.arrow.*"))
    STORE.delete(gone)
    return [os.fspath(path.relative_to(log)) for path in gone]
