"""Users' code at arm's length: what hangs, raises or answers nonsense fails its rollout alone.

Every call goes to a daemon thread of its own, so that one that never returns keeps nobody waiting.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import reprlib
import threading
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

from molt.agents.chat import STATUSES, ChatAgent, Context, Result
from molt.agents.env import Messages, Turn


class RolloutFailed(Exception):
    """Ends one rollout with a reason."""


async def agent_call(what: str, call: Any, *args: Any) -> Any:
    """Run the user's code off the event loop; whatever it raises is the rollout's reason."""
    try:
        if inspect.iscoroutinefunction(call):
            return await call(*args)
        return await in_thread(call, *args)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise RolloutFailed(f"agent {what}: {type(error).__name__}: {_text(error)}") from error


async def in_thread(call: Any, *args: Any) -> Any:
    """A call in a daemon thread of its own: one that hangs keeps nobody waiting, nor the exit."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            result = call(*args)
        except BaseException as error:
            outcome = functools.partial(future.set_exception, error)
        else:
            outcome = functools.partial(future.set_result, result)
        with contextlib.suppress(InvalidStateError):  # the deadline has cancelled it meanwhile
            outcome()

    threading.Thread(target=run, name="molt-agent", daemon=True).start()
    return await asyncio.wrap_future(future)


async def run_agent(agent_class: type[ChatAgent], context: Context) -> Result:
    """Play a ChatAgent in a thread with a loop of its own: one that blocks blocks nobody else.

    When the caller is cancelled, the agent's task is too.
    """
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def main() -> Any:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        return await agent_class().run(context)

    try:
        return checked_result(await agent_call("run", lambda: asyncio.run(main())))
    finally:
        for loop, task in running:
            with contextlib.suppress(RuntimeError):  # its loop is closed: it has ended
                loop.call_soon_threadsafe(task.cancel)


def checked_messages(messages: Any, what: str = "reset") -> Messages:
    """What the agent returned, if it can be rendered and recorded; RolloutFailed if not."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        found = reprlib.repr(messages)
        raise RolloutFailed(f"agent {what} returned {found}, not a list of message dicts")
    if not messages:
        raise RolloutFailed(f"agent {what} returned no messages")
    _check_json("messages", messages)
    return messages


def checked_turn(turn: Any) -> Turn:
    """What `step` returned, if it is a Turn with named rewards; RolloutFailed if not."""
    if not isinstance(turn, Turn):
        raise RolloutFailed(f"agent step returned {reprlib.repr(turn)}, not a Turn")
    _check_named("rewards", turn.rewards)
    return turn


def checked_result(result: Any) -> Result:
    """What `run` returned, if it is a Result that can be recorded; RolloutFailed if not."""
    if not isinstance(result, Result):
        raise RolloutFailed(f"agent run returned {reprlib.repr(result)}, not a Result")
    _check_named("turns", result.turns, int | str)
    for rewards in (result.rewards, *result.turns.values()):
        _check_named("rewards", rewards)
    if not isinstance(result.status, str) or result.status not in STATUSES:
        names = ", ".join(STATUSES)
        raise RolloutFailed(f"agent status is {reprlib.repr(result.status)}, none of {names}")
    if not isinstance(result.reason, str | None):
        raise RolloutFailed(f"agent reason is {reprlib.repr(result.reason)}, not a text")
    _check_named("metrics", result.metrics)
    _check_json("metrics", result.metrics)
    return result


def _check_named(what: str, values: Any, names: Any = str) -> None:
    if not isinstance(values, Mapping) or not all(isinstance(k, names) for k in values):
        raise RolloutFailed(f"agent {what} are {reprlib.repr(values)}, not a dict of name -> value")


def _check_json(what: str, value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise RolloutFailed(f"agent {what} are not JSON: {error}") from None


def _text(error: BaseException) -> str:
    """Also of an error that cannot be printed."""
    try:
        return str(error)
    except Exception:
        return "(it cannot be printed)"
