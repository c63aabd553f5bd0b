"""A writer tells of every row that is not durable, whoever published it; nothing stops it."""

import asyncio
import errno
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import factories as make
import pytest
from faulty import FaultyOs

from molt.schemas.errors import WriterClosed
from molt.store import Log, Writer
from molt.store.files import STORE


def full(monkeypatch: pytest.MonkeyPatch, times: int = 1) -> FaultyOs:
    """A disk that has no space for the next write."""
    faulty = FaultyOs("write", errno.ENOSPC, times=times)
    monkeypatch.setattr("molt.store.files.os", faulty)
    return faulty


def rewards(log: Log) -> list[int]:
    return [r for (r,) in log.sql("select revision from rewards order by 1").fetchall()]


@pytest.mark.parametrize("use", [Writer.flush, Writer.close])
def test_what_failed_beside_the_caller_is_told_once(
    log: Log, monkeypatch: pytest.MonkeyPatch, use: Callable[[Writer], None]
) -> None:
    w = log.writer(linger_s=0.0)
    full(monkeypatch)
    wait([w.append("rewards", make.reward())], 30)
    with pytest.raises(OSError, match="No space") as error:
        use(w)
    assert error.value.errno == errno.ENOSPC and rewards(log) == []
    ends = list(log.path.glob("data/*/*/*.end.arrow"))
    assert len(ends) == (use is Writer.close), "readers forget a writer that is closed"
    if use is Writer.flush:
        w.flush()
        w.append("rewards", make.reward())
        w.flush()
        w.close()
        assert rewards(log) == [0]


@pytest.mark.parametrize("use", [Writer.flush, Writer.close])
def test_what_was_appended_again_and_is_durable_has_not_failed(
    log: Log, monkeypatch: pytest.MonkeyPatch, use: Callable[[Writer], None]
) -> None:
    w = log.writer(linger_s=0.0)
    full(monkeypatch)
    wait([w.append("rewards", make.reward())], 30)
    wait([w.append("rewards", make.reward())], 30)
    use(w)
    assert rewards(log) == [0]
    w.close()


def test_flush_waits_for_rows_in_flight_and_tells_of_their_failure(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go = threading.Event(), threading.Event()

    def put(*_: Any) -> None:
        started.set()
        assert go.wait(30)
        raise OSError(errno.ENOSPC, "No space left on device")

    with log.writer(linger_s=60, flush_rows=1) as w:
        with monkeypatch.context() as patch:
            patch.setattr(STORE, "put", put)
            w.append("rewards", make.reward())
            assert started.wait(30)
            threading.Timer(0.05, go.set).start()
            with pytest.raises(OSError, match="No space") as error:
                w.flush()
        assert error.value.errno == errno.ENOSPC
        w.append("rewards", make.reward())
    assert rewards(log) == [0]


def test_a_failure_that_a_ticket_told_of_is_not_told_again(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    with log.writer(linger_s=0.0) as w:
        with monkeypatch.context() as patch:
            full(patch)
            with pytest.raises(OSError, match="No space"):
                w.append("rewards", make.reward()).result(30)
        w.append("rewards", make.reward())
        w.flush()
    assert rewards(log) == [0]


def test_rows_behind_a_failed_commit_have_its_number(
    log: Log, w: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward, segment = w.append("rewards", make.reward()), w.append("segments", make.segment())
    with monkeypatch.context() as patch:
        full(patch)
        with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device") as error:
            w.flush()
    assert error.value is segment.exception()
    behind = reward.exception()
    assert isinstance(behind, OSError) and behind.errno == errno.ENOSPC
    assert "rewards row of train-0/0 attempt 0: not written, an earlier commit" in str(behind)


def test_an_interrupted_flush_leaves_no_ticket_open(
    log: Log, w: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(*_: Any) -> None:
        raise KeyboardInterrupt

    tickets = [w.append("rewards", make.reward()), w.append("segments", make.segment())]
    with monkeypatch.context() as patch:
        patch.setattr(STORE, "put", put)
        with pytest.raises(KeyboardInterrupt):
            w.flush()
    assert all(ticket.done() for ticket in tickets)
    with pytest.raises(OSError, match="interrupted while rows were published"):
        w.flush()
    w.append("rewards", make.reward())
    w.flush()
    assert rewards(log) == [0]


def test_a_ticket_cannot_be_cancelled(log: Log) -> None:
    async def impatient(w: Writer) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(first), 0.0)

    with log.writer(linger_s=60) as w:
        first = w.append("rewards", make.reward())
        asyncio.run(impatient(w))
        assert not first.cancel() and not first.cancelled()
        assert w.append("rollouts", make.rollout()).result(30).row == 0
        assert first.result(30).row == 0 and w._thread.is_alive()
    assert rewards(log) == [0]


@pytest.mark.parametrize("use", [Writer.flush, Writer.close])
def test_a_forked_child_is_refused_though_a_thread_held_the_lock(
    w: Writer, use: Callable[[Writer], None]
) -> None:
    with w._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                threading.Thread(target=_used, args=(w, use)).start()
            finally:
                for thread in threading.enumerate():
                    if thread is not threading.current_thread():
                        thread.join()
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def _used(w: Writer, use: Callable[[Writer], None]) -> None:
    """Ends the process with 7 if the writer refuses; the lock is another thread's here."""
    try:
        use(w)
    except WriterClosed:
        os._exit(7)
    os._exit(8)
