"""Users' code at arm's length: what hangs, raises or answers nonsense fails its rollout alone.

Every call goes to a daemon thread of its own, so that one that never returns keeps nobody waiting.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import threading
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

from molt.agents.chat import ChatAgent, Context, Result
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
        raise RolloutFailed(f"agent {what}: {type(error).__name__}: {error}") from error


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
        raise RolloutFailed(f"agent {what} returned {messages!r:.200}, not a list of message dicts")
    if not messages:
        raise RolloutFailed(f"agent {what} returned no messages")
    try:
        json.dumps(messages, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RolloutFailed(f"agent messages are not JSON: {error}") from None
    return messages


def checked_turn(turn: Any) -> Turn:
    """What `step` returned, if it is a Turn with named rewards; RolloutFailed if not."""
    if not isinstance(turn, Turn):
        raise RolloutFailed(f"agent step returned {turn!r:.200}, not a Turn")
    _check_named(turn.rewards)
    return turn


def checked_result(result: Any) -> Result:
    """What `run` returned, if it is a Result that can be recorded; RolloutFailed if not."""
    if not isinstance(result, Result):
        raise RolloutFailed(f"agent run returned {result!r:.200}, not a Result")
    for rewards in (result.rewards, *result.turns.values()):
        _check_named(rewards)
    try:
        json.dumps(result.metrics, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RolloutFailed(f"agent metrics are not JSON: {error}") from None
    return result


def _check_named(rewards: Any) -> None:
    if not isinstance(rewards, Mapping) or not all(isinstance(k, str) for k in rewards):
        raise RolloutFailed(f"agent rewards are {rewards!r:.200}, not a dict of name -> value")
