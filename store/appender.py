"""One appender process per host for many workers: their rows share commits and fsyncs (I6).

A worker's `RemoteWriter` is a `Writer` whose commits are made elsewhere: it checks and copies rows,
groups them, and sends Arrow IPC over a Unix socket; its tickets resolve when the appender's commit
is durable. Rows that arrive while a commit is being written go into the next one together. Frames
are JSON and Arrow, never code, and every row is checked again on arrival.

    u32 length | u32 length of the JSON | JSON {"stream"} | Arrow IPC stream     worker -> appender
    u32 length | u32 length of the JSON | JSON {"refs"} or {"error", "text"}     appender -> worker
"""

import contextlib
import json
import os
import secrets
import select
import socket
import socketserver
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from molt.schemas import errors
from molt.schemas.errors import MoltError, WriterClosed
from molt.schemas.records import Ref
from molt.store.files import make_dirs
from molt.store.hints import FOLDER, HOST, short_path
from molt.store.pending import Ticket
from molt.store.reader import END
from molt.store.writer import Writer

FRAME_BYTES_MAX = 1 << 30
COMMAND = "import sys; from molt.store.appender import main; main(sys.argv[1])"


class Appender:
    """Starts the appender process of one log on this host; `address` is what workers connect to.

    Options are those of `Writer`. It ends with `close`, and also when this process dies: it then
    publishes what it holds and its `end` commit. Example::

        with Appender(log.path, epoch=1) as appender:
            w = log.writer(1, appender=appender.address)     # in any process of this host
    """

    def __init__(self, log: Path, epoch: int, **options: Any) -> None:
        name = f"{HOST}-appender-{os.getpid()}-{secrets.token_hex(4)}"
        self.address = log / FOLDER / name
        make_dirs(self.address.parent)
        schemas = options.pop("user_schemas", None) or {}
        text = {n: s.serialize().to_pybytes().hex() for n, s in schemas.items()}
        setup = {"log": str(log), "epoch": epoch, "address": str(self.address), "schemas": text}
        setup["owner"] = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, json.dumps({**setup, **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the driver, which finishes its step
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            status = self._process.wait()
            raise WriterClosed(f"the appender of {log} did not start, exit status {status}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Flush, publish the `end` commit, stop. WriterClosed if it could not or had died."""
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            if not pipe.closed:
                pipe.write(b"end")  # a process that was forked meanwhile holds the pipe open
            pipe.close()
        status = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        if status:
            raise WriterClosed(f"appender {self.address.name} ended with exit status {status}")

    def __enter__(self) -> "Appender":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RemoteWriter(Writer):
    """The same interface as Writer; commits are made by the appender at `address`.

    When the appender dies, every row that it has not acknowledged fails with WriterClosed, and so
    does every later append: such a row may or may not be in the log, and may be appended again.
    """

    def __init__(self, log: Path, epoch: int, address: Path, **options: Any) -> None:
        self.address = address
        super().__init__(log, epoch, **options)

    def _open_directory(self) -> None:
        self.name = self.address.name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(self.address) as name:
                self._socket.connect(name)
        except OSError as error:
            self._socket.close()
            raise WriterClosed(f"no appender answers at {self.address}: {error}") from None

    def _publish_commit(self, stream: str, table: pa.Table) -> list[Ref | Exception]:
        if stream == END:
            self._socket.close()
            return []
        half = table.num_rows // 2
        if half and table.nbytes > FRAME_BYTES_MAX // 4:
            first = self._publish_commit(stream, table.slice(0, half))
            return first + self._publish_commit(stream, table.slice(half))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table)
        try:
            _send(self._socket, {"stream": stream}, sink.getvalue())
            answer, _ = _receive(self._socket)
        except (OSError, EOFError, ValueError) as error:
            self._socket.close()
            self._broken = WriterClosed(
                f"appender {self.name} died before it acknowledged {table.num_rows} row(s) of "
                f"{stream} ({error or 'connection closed'}). They may or may not be in the log; "
                "start another appender and append them again"
            )
            raise self._broken from None
        if "error" in answer:
            raise _error(answer)
        return [
            _error(r) if isinstance(r, dict) else Ref(writer=r[0], seq=r[1], row=r[2])
            for r in answer["refs"]
        ]


def _error(answer: Mapping[str, Any]) -> Exception:
    kind = getattr(errors, str(answer["error"]), OSError)
    if isinstance(kind, type) and issubclass(kind, MoltError):
        return kind(answer["text"])
    return OSError(answer.get("errno"), answer["text"])


def _send(to: socket.socket, head: Mapping[str, Any], body: Any = b"") -> None:
    text = json.dumps(head).encode()
    to.sendall(struct.pack("<II", 4 + len(text) + len(body), len(text)) + text)
    if len(body):
        to.sendall(body)


def _receive(source: socket.socket) -> tuple[dict[str, Any], memoryview]:
    """A whole frame: (head, body). EOFError if the other side has gone, ValueError if it is odd."""
    length, n_head = struct.unpack("<II", _exactly(source, 8))
    if not n_head <= length - 4 < FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {length} bytes with a head of {n_head}")
    raw = memoryview(_exactly(source, length - 4))
    return json.loads(bytes(raw[:n_head])), raw[n_head:]


def _exactly(source: socket.socket, n: int) -> bytearray:
    raw = bytearray(n)
    view = memoryview(raw)
    while view:
        got = source.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return raw


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128
    writer: Writer


class _Handler(socketserver.BaseRequestHandler):
    """One worker's connection. A worker that dies in mid-frame has sent nothing."""

    server: _Server

    def handle(self) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            while True:
                head, body = _receive(self.request)
                _send(self.request, self._append(head, body))

    def _append(self, head: Mapping[str, Any], body: memoryview) -> dict[str, Any]:
        """What became of each row: its address or its own error; one bad row harms no other."""
        writer, stream = self.server.writer, head["stream"]
        try:
            with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
                pending = writer.append_table(stream, reader.read_all())
        except REPORTED as error:
            return _told(error)
        with contextlib.suppress(Exception):  # it is in the tickets of whom it concerns
            writer.flush()
        found = [_tried(p.result) if isinstance(p, Ticket) else p for p in pending]
        refs = [(r.writer, r.seq, r.row) if isinstance(r, Ref) else _told(r) for r in found]
        return {"refs": refs}


WATCH_S = 1.0
"""How often an appender looks whether its owner is alive."""
REPORTED = (MoltError, OSError, pa.ArrowException)


def _tried(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except REPORTED as error:
        return error


def _told(error: Exception) -> dict[str, Any]:
    number = error.errno if isinstance(error, OSError) else None
    return {"error": type(error).__name__, "errno": number, "text": str(error)}


def main(text: str) -> None:
    """The appender process: serve until it is told to end, or its owner is gone."""
    setup = json.loads(text)
    owner = setup.pop("owner")
    address, log = Path(setup.pop("address")), Path(setup.pop("log"))
    schemas = {
        name: pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(schema)))
        for name, schema in setup.pop("schemas").items()
    }
    with Writer(log, setup.pop("epoch"), user_schemas=schemas, **setup) as writer:
        with short_path(address) as name, _Server(name, _Handler) as server:
            server.writer = writer
            threading.Thread(target=server.serve_forever, daemon=True).start()
            print("ready", flush=True)
            while os.getppid() == owner and not select.select([sys.stdin], [], [], WATCH_S)[0]:
                pass
            server.shutdown()
        address.unlink(missing_ok=True)
