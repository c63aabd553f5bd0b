"""What a rollout's client said last, so that what it says again is not read again.

Stands between the body of a request and the wires. A client sends the whole conversation with
every call; here its messages stay bytes until they are known to be new. One that has the same bytes
as in the request before, as have all before it, means what it meant. A rollout remembers one
request: its body, and the messages that the capture holds anyway.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from molt.agents.types import Messages

Understand = Callable[[str, Any, Messages], Messages]
"""(where it stands, a message as it came, what those before it mean) -> what it means."""

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MESSAGES = msgspec.json.Decoder(list[msgspec.Raw])


def decode(body: bytes) -> Any:
    """The JSON of a request; of an object's list of "messages" each is left as a `msgspec.Raw`.

    msgspec.DecodeError, UnicodeDecodeError or RecursionError for what is none; for a message that
    is none they come from `Heard.read`.
    """
    try:
        return {
            key: (_MESSAGES if key == "messages" else msgspec.json).decode(value)
            for key, value in _FIELDS.decode(body).items()
        }
    except msgspec.ValidationError:  # no object, or messages that are no list
        return msgspec.json.decode(body)


class Heard:
    """The messages of one request: as they came, and what each means."""

    def __init__(self) -> None:
        self._understand: Understand | None = None
        self._opening: Messages = []
        self._came: Sequence[Any] = ()
        self._means: Messages = []
        self._ends: list[int] = []
        """Where what each message means ends in `_means`."""

    def read(
        self, came: Sequence[Any], understand: Understand, opening: Sequence[dict[str, Any]] = ()
    ) -> Messages:
        """What the next request says: `opening`, then its messages, those repeated as before."""
        n = 0
        if understand is self._understand and self._opening == [*opening]:
            n = [*map(operator.eq, self._came, came), False].index(False)
        ends = self._ends[:n]
        means = self._means[: ends[-1]] if n else [*opening]
        for i, message in enumerate(came[n:], n):
            value = msgspec.json.decode(message) if isinstance(message, msgspec.Raw) else message
            means += understand(f"messages[{i}]", value, means)
            ends.append(len(means))
        self._understand, self._opening = understand, [*opening]
        self._came, self._means, self._ends = came, means, ends
        return means
