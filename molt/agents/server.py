"""The HTTP server that agents talk to: unmodified OpenAI and Anthropic SDKs in, sessions behind.

On the data path between an agent's process and `Session.chat`; it holds no tokens and no state of
a rollout, so that what is recorded (I1) never depends on HTTP. One bearer token per rollout says
whose call it is. A client that goes away does not stop its generation: the session records the
reply, and the SDK's retry, or the same request again, gets it.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import uvicorn
from fastapi import FastAPI
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from tokenizers.decoders import DecodeStream

from molt.agents import wire_anthropic, wire_openai
from molt.agents.heard import decode
from molt.agents.types import ChatReply, ChatRequest
from molt.schemas.errors import (
    ConfigError,
    EngineError,
    Fenced,
    RequestRefused,
    TemplateError,
    WindowFull,
)

if TYPE_CHECKING:
    from molt.rollout.session import Session

BODY_BYTES_MAX = 32 << 20
CONCURRENCY_MAX = 1024
PING_S = 15.0
"""A stream without news says this often that it lives."""
RETRY_AFTER_S = 1
KEEP_ALIVE_S = 3600
"""Longer than any tool runs between two turns: a connection closed under a request is an error."""

Pieces = asyncio.Queue[tuple[int, np.ndarray] | None]
"""(choice, new token ids) of one streamed call; None when it has ended."""
logger = logging.getLogger("molt.agents")


class HttpError(Exception):
    """An answer that is an error, before it has the form of a wire."""

    def __init__(self, status: int, why: str, code: str | None = None, **headers: str) -> None:
        super().__init__(why)
        self.status, self.code, self.headers, self.param = status, code, headers, None


def as_http(error: BaseException) -> HttpError:
    """Status and code of what went wrong; a bug of ours is logged with its traceback."""
    final = {"x-should-retry": "false"}
    match error:
        case HttpError():
            return error
        case WindowFull():
            return HttpError(400, str(error), "context_length_exceeded")
        case RequestRefused() | TemplateError():
            found = HttpError(400, str(error))
            found.param = getattr(error, "param", None)
            return found
        case TimeoutError():
            return HttpError(504, f"the rollout's deadline has passed: {error}", "timeout", **final)
        case asyncio.CancelledError():
            return HttpError(503, "the rollout has ended", "rollout_ended", **final)
        case Fenced():
            return HttpError(503, str(error), "fenced", **final)
        case EngineError():
            return HttpError(500, str(error), "engine_error")
    logger.error("request failed", exc_info=error)
    return HttpError(500, f"{type(error).__name__}: {error}", "internal_error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that listens; `close()` when the last rollout is over."""

    base_url: str
    """Ends in /v1; both SDKs take it as it is."""
    port: int
    server: uvicorn.Server
    task: "asyncio.Task[None]"
    end: Callable[[], None]

    async def close(self) -> None:
        """End what still runs and free the port; may be called twice."""
        self.end()
        self.server.should_exit = True
        await self.task


async def serve(
    sessions: "Mapping[str, Session]",
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    public: bool = False,
    body_bytes_max: int = BODY_BYTES_MAX,
    concurrency_max: int = CONCURRENCY_MAX,
) -> Running:
    """Serve rollouts in the caller's event loop; `sessions` is looked at anew for every request.

    `port` 0: the system chooses. ConfigError as `listen`.
    """
    agents = Agents(sessions, body_bytes_max, concurrency_max)
    return listen(build(agents), host, port, public=public, end=agents.end)


def listen(app: FastAPI, host: str, port: int, *, public: bool, end: Callable[[], None]) -> Running:
    """Run `app` in the caller's event loop; `end` is called before it closes.

    ConfigError for a host that others can reach unless `public`, or one that cannot be bound.
    """
    if not public and not _is_loopback(host):
        raise ConfigError(
            f"host {host} can be reached from other machines; agents' servers listen on loopback "
            "unless you say public=True (--public)"
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    # asyncio does this for sockets it made itself; without it each answer waits 40 ms for an ACK.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = _Quiet(config)
    task = asyncio.create_task(server.serve(sockets=[listening]), name="molt-agents-server")
    port = listening.getsockname()[1]
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{port}/v1"
    return Running(base_url=url, port=port, server=server, task=task, end=end)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Quiet(uvicorn.Server):
    """uvicorn, without taking the process's signals: the worker ends its server itself."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def build(agents: "Agents") -> FastAPI:
    """The routes; each path also where the other SDK's base URL would put it."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    for path in ("/v1/chat/completions", "/chat/completions"):
        app.add_route(path, partial(agents.chat, wire_openai), methods=["POST"])
    for path in ("/v1/messages", "/v1/v1/messages"):
        app.add_route(path, partial(agents.chat, wire_anthropic), methods=["POST"])
        app.add_route(f"{path}/count_tokens", agents.count_tokens, methods=["POST"])
    for path in ("/v1/models", "/models", "/v1/v1/models"):
        app.add_route(path, agents.models, methods=["GET"])

    async def not_found(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        why = f"{error.detail}: {request.method} {request.url.path}"
        return refusal(wire_of(request), HttpError(error.status_code, why))

    app.add_exception_handler(HTTPException, not_found)
    return app


def wire_of(request: Request) -> ModuleType:
    """Whose form an answer has where the path does not tell."""
    return wire_anthropic if "anthropic-version" in request.headers else wire_openai


def refusal(wire: ModuleType, error: BaseException) -> Response:
    """An error in the wire's own form."""
    found = as_http(error)
    body = wire.error(found.status, str(found), found.param, found.code)
    return answer(body, found.status, found.headers)


def answer(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    content = msgspec.json.encode(body)
    return Response(content, status, headers, media_type="application/json")


class Agents:
    """The endpoints, and what they have in common."""

    def __init__(
        self, sessions: "Mapping[str, Session]", body_bytes_max: int, concurrency_max: int
    ) -> None:
        self.sessions = sessions
        self.body_bytes_max, self.concurrency_max = body_bytes_max, concurrency_max
        self.chats: set[asyncio.Task[ChatReply]] = set()

    def end(self) -> None:
        """Cancel the calls in flight; their clients get an error."""
        for task in self.chats:
            task.cancel()

    async def count_tokens(self, request: Request) -> Response:
        try:
            session, call = await self._parsed(wire_anthropic, request, counting=True)
            return answer({"input_tokens": session.count(call.request)})
        except Exception as error:
            return refusal(wire_anthropic, error)

    async def models(self, request: Request) -> Response:
        wire = wire_of(request)
        try:
            name = self.session(request).model
        except HttpError as error:
            return refusal(wire, error)
        if wire is wire_openai:
            row = {"id": name, "object": "model", "created": 0, "owned_by": "molt"}
            return answer({"object": "list", "data": [row]})
        row = {"id": name, "type": "model", "display_name": name}
        row["created_at"] = "1970-01-01T00:00:00Z"
        return answer({"data": [row], "has_more": False, "first_id": name, "last_id": name})

    def session(self, request: Request) -> "Session":
        """The rollout of this token; all are compared, each in constant time.

        A client may send two: some of Anthropic's add a token of the user's own environment.
        """
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = [t.encode() for t in (request.headers.get("x-api-key"), bearer) if t]
        found = [
            session
            for session in tuple(self.sessions.values())
            for token in given
            if hmac.compare_digest(session.token.encode(), token)
        ]
        if not found:
            why = "no rollout has this token, or it has ended" if given else "no token was sent"
            raise HttpError(401, f"{why}; use ctx.api_key", "invalid_api_key")
        return found[0]

    async def _parsed(
        self, wire: ModuleType, request: Request, **how: bool
    ) -> "tuple[Session, wire_openai.Call]":
        session = self.session(request)
        body = await read_body(request, self.body_bytes_max)
        with refused_json():
            return session, wire.parse(decode(body), request.headers, session.heard, **how)

    async def chat(self, wire: ModuleType, request: Request) -> Response:
        """One call of the model."""
        try:
            session, call = await self._parsed(wire, request)
            if call.stream:
                return await self._stream(wire, request, session, call)
            task = self._start(wire, session, call)
            gone = asyncio.create_task(_disconnect(request))
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                task.cancel()  # nobody waits here any more; the session's own call goes on
                return Response(status_code=499)
            gone.cancel()
            reply = task.result()
            content = wire.whole(call, reply, int(time.time()), session.tokenizer.decode)
            response = answer(content)
            response.background = BackgroundTask(_deliver, session, reply.id)
            return response
        except (Exception, asyncio.CancelledError) as error:
            return refusal(wire, error)

    def _start(
        self, wire: ModuleType, session: "Session", call: wire_openai.Call, **on: Any
    ) -> "asyncio.Task[ChatReply]":
        """The call as a task of its own, so that it can be counted and given up."""
        if len(self.chats) >= self.concurrency_max:
            status = 529 if wire is wire_anthropic else 429
            why = f"{self.concurrency_max} calls are in flight; try again"
            wait = {"retry-after": str(RETRY_AFTER_S)}
            raise HttpError(status, why, "rate_limit_exceeded", **wait)
        task = asyncio.create_task(session.chat(call.request, **on))
        self.chats.add(task)
        task.add_done_callback(self.chats.discard)
        task.add_done_callback(lambda t: t.cancelled() or t.exception())  # its client may be gone
        return task

    async def _stream(
        self, wire: ModuleType, request: Request, session: "Session", call: wire_openai.Call
    ) -> Response:
        """Wait for the first piece, so that a refused request is an error and not a stream."""
        pieces: Pieces = asyncio.Queue()
        started: list[Any] = []
        task = self._start(
            wire,
            session,
            call,
            on_piece=lambda index, new, finish: pieces.put_nowait((index, new)),
            on_call=started.append,
        )
        task.add_done_callback(lambda t: pieces.put_nowait(None))
        first = await pieces.get()
        if first is None:
            task.result()
        stream = wire.Stream(call, started[0], int(time.time()), session.tokenizer.decode)
        events = _events(stream, request, session, call, task, pieces, first)
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )


async def _events(
    stream: Any,
    request: Request,
    session: "Session",
    call: wire_openai.Call,
    task: "asyncio.Task[ChatReply]",
    pieces: Pieces,
    item: tuple[int, np.ndarray] | None,
) -> AsyncIterator[bytes]:
    texts = Texts(session, call.request)
    try:
        yield stream.start()
        while item is not None:
            index, ids = item
            if delta := texts.push(index, ids):
                yield stream.text(index, delta)
            try:
                item = await asyncio.wait_for(pieces.get(), PING_S)
            except TimeoutError:
                yield stream.ping()
                item = (0, ids[:0])
        if task.cancelled():
            raise HttpError(503, "the rollout has ended", "rollout_ended")
        reply = task.result()
        texts.check(reply)
    except Exception as error:
        found = as_http(error)
        yield stream.broken(found.status, str(found), found.param, found.code)
        return
    finally:
        task.cancel()  # if the client has gone: the session's own call goes on
    there = not await request.is_disconnected()
    yield b"".join(stream.finish(reply, texts.sent))
    if there:
        session.delivered(reply.id)


class Texts:
    """Pieces of tokens into pieces of content, of which nothing is ever taken back.

    Streams only where every token's text is content. With tools, a grammar or reasoning, what is
    content is known when the reply is whole: then it is sent in one piece at the end.
    """

    def __init__(self, session: "Session", request: ChatRequest) -> None:
        fast = getattr(session.tokenizer, "backend_tokenizer", None)
        self.tokenizer = fast if session.plain(request) else None
        self.stops = (*request.stop, *session.sampling.stop)
        self.decoders: dict[int, DecodeStream] = {}
        self.texts: dict[int, str] = {}
        self.sent: dict[int, int] = {}

    def push(self, index: int, ids: np.ndarray) -> str:
        """The content that became certain with these tokens."""
        if self.tokenizer is None or not len(ids):
            return ""
        decoder = self.decoders.setdefault(index, DecodeStream(skip_special_tokens=True))
        new = (decoder.step(self.tokenizer, token) for token in ids.tolist())
        text = self.texts[index] = self.texts.get(index, "") + "".join(t for t in new if t)
        sent = self.sent.get(index, 0)
        hits = [at for s in self.stops if (at := text.find(s, sent)) >= 0]
        held = max((len(s) - 1 for s in self.stops), default=0)  # may yet become a stop string
        self.sent[index] = max(sent, min(hits, default=len(text) - held))
        return text[sent : self.sent[index]]

    def check(self, reply: ChatReply) -> None:
        """What was streamed must begin the reply as recorded."""
        for choice in reply.choices:
            sent = self.texts.get(choice.index, "")[: self.sent.get(choice.index, 0)]
            if not (choice.reply.content or "").startswith(sent):
                raise EngineError(f"{reply.id}: streamed {sent!r:.80}, which is not in the reply")


async def _disconnect(request: Request) -> None:
    """Returns when the client has gone away; its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _deliver(session: "Session", reply_id: str) -> None:
    session.delivered(reply_id)


async def read_body(request: Request, bytes_max: int) -> bytes:
    """The body of a request; 413 before more than `bytes_max` is held."""
    length = request.headers.get("content-length", "0")
    parts, size = [], 0
    if not length.isdecimal() or int(length) <= bytes_max:
        async for part in request.stream():
            size += len(part)
            if size > bytes_max:
                break
            parts.append(part)
    else:
        size = int(length)
    if size > bytes_max:
        raise HttpError(413, f"a body of more than {bytes_max} bytes", "request_too_large")
    return b"".join(parts)


@contextlib.contextmanager
def refused_json() -> Iterator[None]:
    """400 for bytes that are not JSON."""
    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}", "invalid_json") from None
