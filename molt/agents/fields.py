"""What becomes of each field of a request: four lists per wire, and the check that applies them.

Sampling belongs to the run, so that the trainer knows the distribution of every token (I1, I2). A
field is therefore honoured, overridden by the run (said once per process), accepted without effect
(said once), or refused by name because it would change tokens in a way the record cannot carry.
A field in no list is refused too, with the closest name. `molt agent fields` prints the lists.
"""

import difflib
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from molt.schemas.errors import RequestRefused

HONOURED = "honoured"
OVERRIDDEN = "overridden by the run"
WITHOUT_EFFECT = "accepted without effect"
REFUSED = "refused"

logger = logging.getLogger("molt.agents")
_said: set[str] = set()


@dataclass(frozen=True, slots=True)
class Field:
    """The fate of one request field."""

    fate: str
    note: str = ""
    neutral: tuple[Any, ...] = ()
    """Values of a refused field that ask for nothing and so pass; None always does."""


class FieldRefused(RequestRefused):
    """A request that cannot be served as written; `param` names the field."""

    def __init__(self, param: str | None, why: str) -> None:
        super().__init__(param, why)
        self.param = param

    def __str__(self) -> str:
        return str(self.args[1])


def _all(fate: str, names: str, note: str = "") -> dict[str, Field]:
    return {name: Field(fate, note) for name in names.split()}


_SEED = "sampling is not repeatable per request; vLLM on CPU dies of a seed with a split prefill"
_OVERRIDDEN = {
    **_all(OVERRIDDEN, "temperature top_p top_k", "the [sampling] section decides"),
    "model": Field(OVERRIDDEN, "the policy answers to every name; a suffix ':judge' sets the role"),
}
_ROLE = {"molt_role": Field(HONOURED, "agent, judge, user_sim or frozen; also header x-molt-role")}

OPENAI: dict[str, Field] = {
    **_all(HONOURED, "messages tools tool_choice parallel_tool_calls n stop stream stream_options"),
    **_all(HONOURED, "max_tokens max_completion_tokens", "never more than the run's"),
    "response_format": Field(HONOURED, "tokens sampled under a grammar are not trained"),
    "logprobs": Field(HONOURED, "of the sampled tokens"),
    **_all(HONOURED, "reasoning_effort chat_template_kwargs", "given to the chat template"),
    **_ROLE,
    **_OVERRIDDEN,
    "min_p": Field(OVERRIDDEN, "the [sampling] section decides"),
    "seed": Field(OVERRIDDEN, _SEED),
    **_all(
        WITHOUT_EFFECT,
        "metadata store user service_tier safety_identifier prompt_cache_key prompt_cache_options "
        "prompt_cache_retention verbosity priority request_id cache_control",
    ),
    "top_logprobs": Field(REFUSED, "only the sampled token's log-probability is kept", (0,)),
    "logit_bias": Field(REFUSED, "the trainer cannot reproduce it", ({},)),
    **{
        name: Field(REFUSED, "the trainer cannot reproduce it", neutral)
        for name, neutral in {
            "frequency_penalty": (0,),
            "presence_penalty": (0,),
            "repetition_penalty": (1,),
            "length_penalty": (1,),
            "min_tokens": (0,),
            "ignore_eos": (False,),
            "bad_words": ([],),
            "allowed_token_ids": ([],),
            "stop_token_ids": ([],),
            "use_beam_search": (False,),
            "best_of": (1,),
            "truncate_prompt_tokens": (),
            "structured_outputs": (),
        }.items()
    },
    "add_generation_prompt": Field(REFUSED, "a reply always opens a turn", (True,)),
    "continue_final_message": Field(REFUSED, "a reply always opens a turn", (False,)),
    "chat_template": Field(REFUSED, "the tokenizer's own template is used"),
    "echo": Field(REFUSED, "replies hold sampled tokens only", (False,)),
    "functions": Field(REFUSED, "use tools"),
    "function_call": Field(REFUSED, "use tool_choice"),
    "modalities": Field(REFUSED, "text only", (["text"],)),
    **_all(REFUSED, "audio prediction web_search_options moderation", "no such service here"),
}

ANTHROPIC: dict[str, Field] = {
    **_all(HONOURED, "messages system tools tool_choice stop_sequences stream"),
    "max_tokens": Field(HONOURED, "never more than the run's"),
    "thinking": Field(HONOURED, "type enabled or disabled goes to the template; budgets do not"),
    "output_config": Field(HONOURED, "effort goes to the template; format is a grammar"),
    **_ROLE,
    **_OVERRIDDEN,
    **_all(
        WITHOUT_EFFECT,
        "metadata service_tier cache_control inference_geo speed diagnostics user_profile_id "
        "workspace_id context_management betas",
    ),
    **_all(REFUSED, "container mcp_servers", "no such service here"),
}


def check_fields(wire: str, table: Mapping[str, Field], body: Any) -> None:
    """Refuse what must be refused, say once what is ignored; raises FieldRefused."""
    if not isinstance(body, dict):
        raise FieldRefused(None, f"the body is {type(body).__name__}, expected a JSON object")
    for name, value in body.items():
        field = table.get(name)
        if field is None:
            close = difflib.get_close_matches(name, table, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else "; see `molt agent fields`"
            raise FieldRefused(name, f"unknown field '{name}'{hint}")
        if value is None or field.fate == HONOURED or name == "model":
            continue
        if field.fate != REFUSED:
            say_once(f"{wire} field '{name}': {field.fate}{f' ({field.note})' * bool(field.note)}")
        elif value not in field.neutral:
            raise FieldRefused(name, f"'{name}' is refused: {field.note}; leave it out")


def say_once(text: str) -> None:
    """One warning per text and process."""
    if text not in _said:
        _said.add(text)
        logger.warning(text)


def rows() -> Iterator[tuple[str, str, str, str]]:
    """(wire, fate, field, note), for `molt agent fields` and the documentation."""
    for wire, table in (("openai", OPENAI), ("anthropic", ANTHROPIC)):
        for fate in (HONOURED, OVERRIDDEN, WITHOUT_EFFECT, REFUSED):
            for name, field in table.items():
                if field.fate == fate:
                    passes = "".join(f" (passes: {v!r})" for v in field.neutral)
                    yield wire, fate, name, field.note + passes


def want(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any) -> Any:
    """A field of the right type, or `default` where it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(k.__name__ for k in kinds)
        raise FieldRefused(name, f"'{name}' is {value!r:.80}, expected {names}")
    return value


def count(body: Mapping[str, Any], name: str, default: int | None, most: int) -> int | None:
    """A whole number from 1 to `most`."""
    value: int | None = want(body, name, int, default)
    if value is not None and not 1 <= value <= most:
        raise FieldRefused(name, f"'{name}' is {value}, expected 1 to {most}")
    return value


def number(body: Mapping[str, Any], name: str, default: float | None) -> float | None:
    """A number that float64 holds."""
    value = want(body, name, (int, float), default)
    if value is not None and not abs(value) <= sys.float_info.max:
        raise FieldRefused(name, f"'{name}' is {value!r:.80}, which is no number that can be kept")
    return None if value is None else float(value)


def strings(name: str, value: Any) -> tuple[str, ...]:
    """One text or a list of texts, none of them empty."""
    found = (value,) if isinstance(value, str) else value or ()
    if not isinstance(found, list | tuple) or not all(isinstance(s, str) and s for s in found):
        raise FieldRefused(name, f"'{name}' is {value!r:.80}, expected non-empty texts")
    return tuple(found)


ROLES = {
    "agent": "agent",
    "judge": "judge",
    "user": "user_sim",
    "user_sim": "user_sim",
    "user-simulator": "user_sim",
    "frozen": "frozen",
    "side": "frozen",
}
"""Every way to name a role, and the role."""


def role_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """Whose call it is: header x-molt-role, then molt_role, then "judge" or "<model>:judge"."""
    named = headers.get("x-molt-role") or body.get("molt_role")
    if named is None:
        return ROLES.get(str(body.get("model", "")).rpartition(":")[2], "agent")
    if not isinstance(named, str) or named not in ROLES:
        raise FieldRefused("molt_role", f"role {named!r} is none of {', '.join(ROLES)}")
    return ROLES[named]


def retry_of(headers: Mapping[str, str]) -> int:
    """The retry count as both SDKs send it."""
    text = headers.get("x-stainless-retry-count", "0")
    if not text.isdecimal():
        raise FieldRefused(None, f"header x-stainless-retry-count is {text!r}, expected a number")
    return int(text)
