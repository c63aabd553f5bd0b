"""The backend: what the log asks of its storage, and that it asks nothing behind its back."""

import re
from pathlib import Path

import factories as make
import pytest

import molt.store
from molt.store import Log
from molt.store.files import STORE, NameTaken, Posix
from molt.store.sql import run_sql


def test_the_posix_backend_keeps_its_contract(tmp_path: Path) -> None:
    key = tmp_path / "a" / "b" / "7"
    STORE.put(key, b"0123456789")
    STORE.put(key, b"0123456789")  # a retry of the same content is a success
    with pytest.raises(NameTaken):
        STORE.put(key, b"other")
    assert [STORE.read(key), STORE.read(key, 3, 4), STORE.read(key, -2), STORE.read(key, -99)] == [
        b"0123456789",
        b"3456",
        b"89",
        b"0123456789",
    ]
    for name in ("10", "08", ".hidden"):
        (key.parent / name).touch()
    assert STORE.list(key.parent) == ["08", "10", "7"]
    assert STORE.list(key.parent, "10") == ["10", "7"]
    assert STORE.list(tmp_path / "nowhere") == []
    assert STORE.identity(key)[1] == 10
    STORE.delete([key, key])
    with pytest.raises(FileNotFoundError):
        STORE.read(key)


def test_only_the_backend_touches_commits() -> None:
    """Modules beside files.py neither open, link, remove nor stat files of the log."""
    calls = re.compile(
        r"(?<![\w.])(?<!def )open\(|\bos\.(?!getpid)\w+\(|\.(read|write)_(bytes|text)\("
    )
    own = {"files.py", "hints.py", "appender.py", "advice.py"}  # two handle sockets, one advises
    folder = Path(molt.store.__file__).parent
    found = [
        f"{path.name}: {line.strip()}"
        for path in folder.glob("*.py")
        if path.name not in own
        for line in path.read_text().splitlines()
        if calls.search(line)
    ]
    assert found == []


def test_a_log_lives_on_any_backend(tmp_path: Path, monkeypatch) -> None:
    """Another backend put in its place sees every commit and serves every read."""
    seen: dict[str, int] = {}

    class Counting(Posix):
        def put(self, key, data):
            seen["put"] = seen.get("put", 0) + 1
            super().put(key, data)

        def read(self, key, start=0, n=-1):
            seen["read"] = seen.get("read", 0) + 1
            return super().read(key, start, n)

    for name in ("control", "reader", "writer", "log", "cold", "compact", "snapshot", "ranges"):
        monkeypatch.setattr(f"molt.store.{name}.STORE", Counting())
    log = Log.create(tmp_path / "log")
    make.open_epoch(log)
    log.control.put("policy", [make.policy(1, 0)])
    with log.writer() as w:
        make.append_rollout(w, "train-0/0")
    files = [p for p in log.path.rglob("*.arrow")]
    assert seen["put"] == len(files) + 1  # format.json
    seen.clear()
    assert run_sql([log], "select count(*) from rollouts")[1] == [[1]]
    assert seen["read"] > 0 and "put" not in seen
