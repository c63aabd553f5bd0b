"""Rollouts for programs of any kind: they open one over HTTP, play it, and say how it went.

    molt agent serve my.toml            # trains; whoever knocks plays
    curl -XPOST -H "authorization: Bearer $MOLT_DESK_TOKEN" 127.0.0.1:8700/rollouts

The answer has prompt, base_url and api_key: what is said there is recorded as for any `ChatAgent`
(I1). Then POST /rollouts/<id>/rewards and /finish with that api_key. A program that dies leaves its
rollout to the run's deadline. For the worker all of it is one more ChatAgent, `External`.
"""

import asyncio
import hmac
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from molt.agents import fields, wire_openai
from molt.agents.chat import STATUSES, ChatAgent, Context, Result
from molt.agents.server import HttpError, answer, listen, read_body, refusal, refused_json
from molt.schemas.errors import ConfigError

BODY_BYTES_MAX = 1 << 20
WAIT_S_MAX = 60.0
PORT = 8700


@dataclass(slots=True, kw_only=True)
class Offer:
    """A rollout that waits for a program, or is played by one."""

    context: Context
    result: "Future[Result]" = field(default_factory=Future)
    rewards: dict[str, float | None] = field(default_factory=dict)
    turns: dict[int | str, dict[str, float | None]] = field(default_factory=dict)


class Reception:
    """The desk of one worker process: rollouts come from its agents, programs take them."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.taken: dict[str, Offer] = {}
        self._waiting: deque[Offer] = deque()
        self._news = asyncio.Event()

    def add(self, offer: Offer) -> None:
        """From any thread."""
        self.loop.call_soon_threadsafe(self._add, offer)

    def _add(self, offer: Offer) -> None:
        self._waiting.append(offer)
        self._news.set()

    def drop(self, offer: Offer) -> None:
        """From any thread: the rollout has ended, whoever plays it."""
        self.loop.call_soon_threadsafe(self._drop, offer)

    def _drop(self, offer: Offer) -> None:
        self.taken.pop(offer.context.rollout_id, None)
        if offer in self._waiting:
            self._waiting.remove(offer)

    async def open(self, wait_s: float) -> Offer | None:
        """The next rollout; None if there is none for `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                while not self._waiting:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return None
        offer = self._waiting.popleft()
        self.taken[offer.context.rollout_id] = offer
        return offer

    def find(self, rollout_id: str) -> Offer | None:
        """A rollout that is being played; None when it has ended."""
        return self.taken.get(rollout_id)


def routes(desk: Reception, token: str) -> FastAPI:
    """The HTTP side; `token` opens rollouts, a rollout's own api_key rewards and finishes it."""

    async def opened(request: Request) -> Response:
        _authorize(request, token)
        body = await _body(request)
        wait_s = fields.number(body, "wait_s", 0.0) or 0.0
        offer = await desk.open(min(max(wait_s, 0.0), WAIT_S_MAX))
        return Response(status_code=204) if offer is None else answer(asdict(offer.context))

    async def rewarded(request: Request) -> Response:
        offer = _offer(desk, request)
        _reward(offer, await _body(request))
        return answer({})

    async def finished(request: Request) -> Response:
        offer = _offer(desk, request)
        body = await _body(request)
        for name, value in fields.want(body, "rewards", dict, {}).items():
            _reward(offer, {"name": name, "value": value})
        _finish(offer, body)
        return answer({})

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_route("/rollouts", partial(_answered, opened), methods=["POST"])
    for name, handler in (("rewards", rewarded), ("finish", finished)):
        path = f"/rollouts/{{rollout:path}}/{name}"
        app.add_route(path, partial(_answered, handler), methods=["POST"])
    return app


async def _answered(
    handler: Callable[[Request], Awaitable[Response]], request: Request
) -> Response:
    try:
        return await handler(request)
    except Exception as error:
        return refusal(wire_openai, error)


def _authorize(request: Request, token: str) -> None:
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), token.encode()):
        raise HttpError(401, "a wrong token, or none", "invalid_api_key")


def _offer(desk: Reception, request: Request) -> Offer:
    """The rollout of the path, for whoever has its key; 404 also when it has ended."""
    rollout_id = request.path_params["rollout"]
    offer = desk.find(rollout_id)
    if offer is None or offer.result.done():
        raise HttpError(404, f"{rollout_id} is not being played; its deadline may have passed")
    _authorize(request, offer.context.api_key)
    return offer


async def _body(request: Request) -> dict[str, Any]:
    data = await read_body(request, BODY_BYTES_MAX)
    with refused_json():
        body = msgspec.json.decode(data or b"{}")
    if not isinstance(body, dict):
        raise HttpError(400, f"the body is {type(body).__name__}, expected a JSON object")
    return body


def _reward(offer: Offer, body: dict[str, Any]) -> None:
    """{"name", "value", "reply"}: of the rollout, or of one reply by its id or number."""
    name = fields.want(body, "name", str, None)
    if name is None or "value" not in body:
        raise HttpError(400, "a reward needs 'name' and 'value' (a number, or null: unscorable)")
    value = fields.number(body, "value", None)
    reply = fields.want(body, "reply", (int, str), None)
    of = offer.rewards if reply is None else offer.turns.setdefault(reply, {})
    of[name] = value


def _finish(offer: Offer, body: dict[str, Any]) -> None:
    status = fields.want(body, "status", str, "ok")
    if status not in STATUSES:
        raise HttpError(400, f"status '{status}' is none of {', '.join(STATUSES)}")
    result = Result(
        rewards=offer.rewards,
        turns=offer.turns,
        status=status,
        reason=fields.want(body, "reason", str, None),
        metrics=fields.want(body, "metrics", dict, {}),
    )
    if offer.result.set_running_or_notify_cancel():
        offer.result.set_result(result)


class External(ChatAgent):
    """Waits until a program has played the rollout. `molt agent serve` sets it as agent.env."""

    async def run(self, ctx: Context) -> Result:
        reception, offer = await asyncio.to_thread(_reception), Offer(context=ctx)
        reception.add(offer)
        try:
            return await asyncio.wrap_future(offer.result)
        finally:
            reception.drop(offer)


_lock = threading.Lock()
_running: "Future[Reception] | None" = None


def _reception() -> Reception:
    """This process's desk; the first rollout opens it, on a thread and loop of its own."""
    global _running
    with _lock:
        if _running is None:
            _running = Future()
            threading.Thread(
                target=_listen, args=(_running,), name="molt-desk", daemon=True
            ).start()
    return _running.result()


def _listen(started: "Future[Reception]") -> None:
    async def main() -> None:
        try:
            reception, token = Reception(), os.environ.get("MOLT_DESK_TOKEN", "")
            if not token:
                raise ConfigError("MOLT_DESK_TOKEN is not set; start with `molt agent serve`")
            host = os.environ.get("MOLT_DESK_HOST", "127.0.0.1")
            port = int(os.environ.get("MOLT_DESK_PORT", PORT))
            public = os.environ.get("MOLT_DESK_PUBLIC") == "1"
            running = listen(routes(reception, token), host, port, public=public, end=lambda: None)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(reception)
        await running.task

    asyncio.run(main())
