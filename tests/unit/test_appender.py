"""The appender process: shared commits, errors of the same type, deaths on either side."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading

import factories as make
import psutil
import pyarrow as pa
import pytest

from molt.schemas.errors import SchemaMismatch, SegmentRejected, WriterClosed
from molt.schemas.streams import routing_metadata
from molt.store import Appender, Log
from molt.store.appender import RemoteWriter
from molt.store.doctor import doctor
from molt.store.hints import short_path

WORKER = """
import sys
sys.path.insert(0, sys.argv[3])
import factories as make
from pathlib import Path
from molt.store import Log
k = int(sys.argv[4])
with Log.open(sys.argv[1]).writer(1, appender=Path(sys.argv[2]), linger_s=0.001) as w:
    for i in range(20):
        refs = make.append_rollout(w, f"train-{k}/{i}")
    print(refs[0].writer)
"""


@pytest.fixture
def appender(log: Log):
    with Appender(log.path, 1, linger_s=60) as found:
        yield found


def test_many_processes_share_one_writer_and_lose_nothing(log: Log, appender: Appender) -> None:
    args = [str(log.path), str(appender.address), os.path.dirname(make.__file__)]
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, *args, str(k)], stdout=subprocess.PIPE)
        for k in range(3)
    ]
    used = {w.communicate()[0].strip() for w in workers}
    assert [w.returncode for w in workers] == [0, 0, 0]
    assert len(used) == 1 and b"-" in next(iter(used))
    appender.close()
    expected = sorted(f"train-{k}/{i}" for k in range(3) for i in range(20))
    for view in ("segments", "rollouts", "rewards"):
        found = log.sql(f"select rollout_id from {view} order by 1").fetchall()
        assert [r for (r,) in found] == expected
    assert doctor(log.path)["ok"]
    assert log.tail().poll()[1][-1].stream == "rollouts"  # and behind it the clean end
    assert list(log.path.glob("data/*/*/*.end.arrow"))


def test_rows_of_many_workers_share_commits(log: Log, appender: Appender) -> None:
    """While one commit is being written, what arrives waits, and goes into one commit together."""
    writers = [log.writer(1, appender=appender.address, linger_s=60) for _ in range(8)]
    tickets = []
    for k, w in enumerate(writers):
        tickets += [w.append("rewards", make.reward(f"train-{k}/{i}")) for i in range(3)]
    os.kill(appender.pid, signal.SIGSTOP)  # as a slow disk would
    flushes = [threading.Thread(target=w.flush) for w in writers]
    for f in flushes:
        f.start()
    os.kill(appender.pid, signal.SIGCONT)
    for f in flushes:
        f.join()
    places = {(t.result().seq, t.result().row) for t in tickets}
    assert len(places) == 24
    assert max(row for _, row in places) >= 3, "no commit holds rows of two workers"
    for w in writers:
        w.close()


def test_errors_come_back_as_what_they_are(log: Log, appender: Appender) -> None:
    with log.writer(1, appender=appender.address, linger_s=60) as w:
        first = make.segment(rollout_id="train-0/0")
        ticket = w.append("segments", first)
        with pytest.raises(SegmentRejected, match="unknown field 'surprise'"):
            w.append("segments", {**first, "surprise": 1})
        w.flush()
        assert w.append("segments", first).result(0) == ticket.result()
        with log.writer(1, appender=appender.address, linger_s=60) as other:
            assert other.append("segments", first).done() is False
            other.flush()
            again = other.append("segments", first)
            assert again.result() == ticket.result()
        with log.writer(1, appender=appender.address, linger_s=60) as other:
            other.append("segments", make.segment(rollout_id="train-0/0", ids=[9, 9]))
            sound = other.append("segments", make.segment(rollout_id="train-2/0"))
            with pytest.raises(SegmentRejected, match="conflicting content"):
                other.flush()
            assert log.row(sound.result())["rollout_id"] == "train-2/0"  # its own row was well
            make.append_rollout(other, "train-1/0")
    assert len(log.sql("select * from segments").fetchall()) == 3


def test_rows_are_the_callers_no_more_once_they_are_appended(log: Log, appender: Appender) -> None:
    with log.writer(1, appender=appender.address, linger_s=60) as w:
        row = make.segment(messages="a\ud800b")
        row["token_ids"] = (ids := __import__("numpy").array([1, 2, 3], "int32"))
        ticket = w.append("segments", row)
        ids[:] = 0
        w.flush()
        back = log.row(ticket.result())
    assert back["token_ids"].tolist() == [1, 2, 3] and back["messages"] == "a\ud800b"


def test_a_dead_appender_fails_what_it_did_not_acknowledge(log: Log, appender: Appender) -> None:
    w = log.writer(1, appender=appender.address, linger_s=60)
    kept = w.append("rewards", make.reward())
    w.flush()
    lost = [w.append("rewards", make.reward(revision=i)) for i in (1, 2)]
    os.kill(appender.pid, signal.SIGKILL)
    with pytest.raises(WriterClosed, match=r"died before it acknowledged 2 row\(s\) of rewards"):
        w.flush()
    for ticket in lost:
        with pytest.raises(WriterClosed, match="may or may not be in the log"):
            ticket.result()
    with pytest.raises(WriterClosed, match="start another appender"):
        w.append("rewards", make.reward(revision=3))
    with pytest.raises(WriterClosed, match="exit status -9"):
        appender.close()
    appender.close = lambda: None  # type: ignore[method-assign]
    with pytest.raises(WriterClosed, match="no appender answers"):
        log.writer(1, appender=appender.address)
    assert log.row(kept.result())["revision"] == 0
    with Appender(log.path, 1) as second, log.writer(1, appender=second.address) as again:
        again.append("rewards", make.reward(revision=1))
    assert [r[0] for r in log.sql("select revision from rewards order by 1").fetchall()] == [0, 1]


def test_a_worker_that_dies_in_mid_send_harms_nobody(log: Log, appender: Appender) -> None:
    table = pa.table({"a": [1]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    head = json.dumps({"stream": "rewards"}).encode()
    whole = struct.pack("<II", 4 + len(head) + sink.tell(), len(head)) + head
    odd = [whole, b"", b"\xff" * 64, struct.pack("<II", 2**32 - 1, 5), b"\0" * 8, whole[:11]]
    for raw in [*odd, whole + sink.getvalue().to_pybytes()[:40]]:
        with socket.socket(socket.AF_UNIX) as s, short_path(appender.address) as name:
            s.connect(name)
            s.sendall(raw)
    with log.writer(1, appender=appender.address) as w:
        make.append_rollout(w, "train-0/0")
        with pytest.raises(SchemaMismatch, match="another schema"):
            RemoteWriter._publish_commit(w, "rewards", table)
    appender.close()
    assert log.sql("select count(*) from rollouts").fetchall() == [(1,)]
    assert doctor(log.path)["ok"]


def test_a_closed_epoch_hides_rows_but_the_appender_ends_when_its_parent_does(log: Log) -> None:
    code = (
        "import sys, os\nfrom pathlib import Path\nfrom molt.store import Appender\n"
        "a = Appender(Path(sys.argv[1]), 1)\nprint(a.pid, flush=True)\nos.kill(os.getpid(), 9)"
    )
    parent = subprocess.run(
        [sys.executable, "-c", code, str(log.path)], stdout=subprocess.PIPE, timeout=60
    )
    pid = int(parent.stdout)
    fd = os.pidfd_open(pid) if os.path.exists(f"/proc/{pid}") else None
    if fd is not None:
        import select

        assert select.select([fd], [], [], 30)[0], "the appender outlives its parent"
    assert list(log.path.glob("data/*/*/*.end.arrow"))


def test_routing_and_own_streams_go_through_the_appender(log: Log) -> None:
    shape = routing_metadata(layers=2, top_k=2, n_experts=8)
    own = {"x_notes": pa.schema([("text", pa.string())])}
    options = {"routing": shape, "user_schemas": own}
    with (
        Appender(log.path, 1, **options) as a,
        log.writer(1, appender=a.address, **options) as w,
    ):
        ticket = w.append("routing", make.routing(n=5))
        w.append("x_notes", {"text": "hello"})
        w.flush()
    assert log.experts(ticket.result(), 2, 4).shape == (2, 4)
    assert log.sql("select text from x_notes").fetchall() == [("hello",)]


FORKS = """
import os, sys, time
from molt.store import Appender, Log
appender = Appender(Log.open(sys.argv[1]).path, 1)
child = os.fork()
if not child:
    time.sleep(60)
    os._exit(0)
print(appender.pid, child, flush=True)
if sys.argv[2] == "close":
    appender.close()
else:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["close", "death"])
def test_it_ends_though_a_forked_process_holds_its_pipe(log: Log, end: str) -> None:
    command = [sys.executable, "-c", FORKS, str(log.path), end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        appender, child = map(psutil.Process, map(int, owner.stdout.readline().split()))
        try:
            assert owner.wait(30) == (0 if end == "close" else -signal.SIGKILL)
            assert appender not in psutil.wait_procs([appender], 30)[1]
            assert child.is_running()
        finally:
            child.kill()
    assert doctor(log.path)["ok"]
    assert [p.name.split(".")[1] for p in log.path.glob("data/*/*/*")] == ["end"]
