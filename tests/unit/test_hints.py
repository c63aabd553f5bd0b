"""Hints: a tail wakes early; with hints lost, doubled or forged it finds the same commits."""

import errno
import socket
import subprocess
import sys
import threading

import factories as make
import pytest

from molt.store import Log
from molt.store.hints import FOLDER, Listener, announce, short_path


def test_a_waiting_tail_wakes_on_a_commit_and_on_a_record(log: Log) -> None:
    tail = log.tail()
    assert tail.wait(60)  # the first call only starts to listen
    tail.poll()
    with log.writer(linger_s=60) as w:
        for i in range(3):
            thread = threading.Thread(target=make.append_rollout, args=(w, f"train-0/{i}"))
            thread.start()
            assert tail.wait(60)
            thread.join()
    assert [c.stream for c in tail.poll()[1]] == ["segments", "rewards", "rollouts"] * 3
    tail.wait(0)  # the `end` commit
    log.control.put("policy", [make.policy(1, 0)])
    assert tail.wait(60) and len(tail.poll()[0]) == 1
    tail.close()
    assert not list((log.path / FOLDER).iterdir())


def test_nothing_depends_on_hints(log: Log, monkeypatch) -> None:
    tail = log.tail(streams={"rewards"})
    tail.wait(0)
    with log.writer(linger_s=60) as w:
        w.append("rewards", make.reward())
        monkeypatch.setattr("molt.store.writer.announce", lambda log: None)  # all are lost
        w.flush()
        assert not tail.wait(0)
        assert len(tail.poll()[1]) == 1
    for _ in range(2000):  # doubled, forged, more than a socket's queue holds
        announce(log.path)
    assert tail.wait(0) and not tail.wait(0)
    assert tail.poll() == ([], [])
    tail.close()


def test_a_dead_readers_ear_is_removed_and_a_foreign_one_left(log: Log) -> None:
    dead = Listener(log.path)
    dead._socket.close()
    other = log.path / FOLDER / "otherhost-tail-1-00"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s, short_path(other) as name:
        s.bind(name)
    announce(log.path)
    assert not dead.path.exists() and other.exists()


def test_hints_reach_other_processes_and_deep_folders(tmp_path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    Log.create(deep)
    ear = Listener(deep)
    code = "import sys; from pathlib import Path; from molt.store.hints import announce; "
    subprocess.run(
        [sys.executable, "-c", code + "announce(Path(sys.argv[1]))", str(deep)], check=True
    )
    assert ear.wait(60)
    ear.close()


@pytest.mark.parametrize("call", ["molt.store.hints.socket.socket", "molt.store.hints.STORE.list"])
def test_what_is_durable_is_not_lost_by_a_hint(log: Log, monkeypatch, call: str) -> None:
    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    tail = log.tail()
    tail.wait(0)
    with log.writer(linger_s=60) as w, monkeypatch.context() as patch:
        ticket = w.append("rewards", make.reward())
        patch.setattr(call, refuse)
        w.flush()
        assert log.control.put("policy", [make.policy(1, 1)]) == 2
        patch.undo()
        assert ticket.result().row == 0
    tail.close()
    assert [r.kind for r in log.records()] == ["epoch", "policy", "policy"]


def test_a_log_that_cannot_be_written_to_is_polled(log: Log, monkeypatch) -> None:
    def refuse(path):
        raise PermissionError(13, "read-only")

    slept = []
    monkeypatch.setattr("molt.store.tail.Listener", refuse)
    monkeypatch.setattr("molt.store.tail.time.sleep", slept.append)
    assert not log.tail().wait(0.5)
    assert slept == [0.5]
