"""Registered readers: a long reader's low-water mark, which retention refuses to pass.

`readers/<name>.json` is renewed while the reader goes on and expires by itself when it died.
"""

import datetime
import json
import re
from collections.abc import Mapping
from pathlib import Path

from molt.schemas.errors import ConfigError, LogCorrupt
from molt.schemas.text import canonical_json
from molt.store.files import STORE, make_dirs, replace

READERS = "readers"
READER_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def register_reader(
    log: Path, name: str, next_seq: Mapping[str, int], *, ttl_s: float, now: datetime.datetime
) -> None:
    """Hold retention at `next_seq[writer]` (0 for writers not named) for `ttl_s` from `now`, UTC.

    A long reader renews this while it goes on, and unregisters at its end. Raises ConfigError for
    a name that cannot be a file's.
    """
    if not READER_NAME.fullmatch(name) or name.startswith("."):
        raise ConfigError(f"a reader's name is made of letters, digits and _.-, not '{name}'")
    make_dirs(log / READERS)
    expires = _utc(now) + datetime.timedelta(seconds=ttl_s)
    text = {"name": name, "next_seq": dict(next_seq), "expires": expires.isoformat()}
    replace(log / READERS / f"{name}.json", canonical_json(text).encode())


def unregister_reader(log: Path, name: str) -> None:
    """Let retention pass; a reader that is not registered is no error."""
    if STORE.list(log / READERS):
        STORE.delete([log / READERS / f"{name}.json"])


def readers(log: Path, now: datetime.datetime) -> dict[str, dict[str, int]]:
    """Registered readers that have not expired: name -> {writer: next_seq}.

    One that cannot be read is LogCorrupt: what it needs is unknown, so nothing may go.
    """
    found = {}
    for file in STORE.list(log / READERS):
        try:
            text = json.loads(STORE.read(log / READERS / file))
            expires = _utc(datetime.datetime.fromisoformat(text["expires"]))
            next_seq = {str(w): int(seq) for w, seq in text["next_seq"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LogCorrupt(
                f"{READERS}/{file} cannot be read ({error}), and so what it needs is unknown; "
                "delete it if its reader is gone"
            ) from None
        if expires > _utc(now):
            found[file.removesuffix(".json")] = next_seq
    return found


def _utc(time: datetime.datetime) -> datetime.datetime:
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
