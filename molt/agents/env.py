"""The environment interface, Gymnasium style: `reset` asks, `step` judges.

One instance plays one rollout. Environments never see token ids: what is trained comes from the
engine's own record (invariant I1), text is a view of it.
"""

import abc
import importlib
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

from molt.agents.types import Messages
from molt.schemas.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the policy answered in one turn."""

    text: str
    """The sampled tokens as text, without special tokens."""
    finish_reason: str
    """"stop", "length", "tool_calls" or "abort"."""
    n_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the environment says to a reply."""

    rewards: dict[str, float | None] = field(default_factory=dict)
    """Name -> value; None = cannot be scored; NaN fails the rollout. With `done` they are rewards
    of the whole rollout, before of this turn; `reward.sum_turns` adds the latter to the former."""
    done: bool = True
    messages: Messages = field(default_factory=list)
    """What comes next if the rollout is not done: tool results as text, the user's next words."""
    pending: bool = False
    """With `done`: the rollout closes when its first reward arrives, see `molt.relabel`."""


class Env(abc.ABC):
    """Subclass this for an agent. Both methods may also be `async`."""

    resumable = False
    """True if a new instance that is asked and told the same says the same: after the loss of its
    worker the rollout then goes on from the recorded replies instead of from the prompt."""

    @abc.abstractmethod
    def reset(self, prompt: dict[str, Any]) -> Messages | Awaitable[Messages]:
        """The chat messages that open the rollout; `prompt` is the data's own dict."""

    @abc.abstractmethod
    def step(self, reply: Reply) -> Turn | Awaitable[Turn]:
        """Judge a reply. An exception fails this rollout and no other."""


def resolve(name: str, what: str, *, must_call: bool = True) -> Any:
    """The object behind "package.module:attribute"; ConfigError says what is missing."""
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"{what} = '{name}': expected 'package.module:name'")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{what} = '{name}': {error}; is it on PYTHONPATH?") from None
    except AttributeError:
        raise ConfigError(f"{what} = '{name}': {module_name} has no '{attribute}'") from None
    if must_call and not callable(found):
        raise ConfigError(f"{what} = '{name}': {found!r} cannot be called")
    return found
