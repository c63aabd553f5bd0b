"""Messages to text and text to ids: the tokenizer's own chat template, nothing of ours.

Stands between an agent's messages and the capture, which decides how much of the result is new.
Messages are given to the template in the form vLLM's server gives them: absent content as "",
tool arguments as objects, text parts as one string; where a template wants otherwise (DeepSeek),
a trial at start finds out. A control token written inside a message ("<|im_end|>") is encoded as
that control token, as every server does: recorded as it is, never repaired.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from molt.agents.types import Messages
from molt.schemas.errors import TemplateError

_TRIAL = {"function": {"name": "molt_trial", "arguments": {"k": "molt_value"}}}


class Renderer:
    """A tokenizer of transformers and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self._special = tokenizer, dict(tokenizer.special_tokens_map)
        added = tokenizer.added_tokens_decoder.items()
        self._added = {int(i): str(token.content) for i, token in added}
        self._empty, self._object = self._form()

    def template_text(self, tools: Any = None) -> str:
        """The Jinja text for a request with these tools; TemplateError if there is none."""
        try:
            return str(self.tokenizer.get_chat_template(tools=tools or None))
        except ValueError as error:
            raise TemplateError(f"the tokenizer has no chat template: {error}") from None

    def render(
        self,
        messages: Messages,
        tools: Sequence[dict[str, Any]] = (),
        template: Mapping[str, Any] | None = None,
        *,
        generate: bool,
    ) -> str:
        """The text of a conversation; with `generate`, up to where the reply begins.

        `template` are keyword arguments of the template. TemplateError has the template's words.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        text = self.template_text(tools)
        try:
            (rendered,), _ = render_jinja_template(
                conversations=[[self._prepare(m) for m in messages]],
                tools=list(tools) or None,
                chat_template=text,
                add_generation_prompt=generate,
                **{**self._special, **(template or {})},
            )
        except Exception as error:  # a template may raise whatever Python raises
            why = f"{type(error).__name__}: {error}"
            raise TemplateError(f"the chat template cannot render these messages: {why}") from error
        return str(rendered)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` alone; no special token is added. TemplateError if it is not Unicode."""
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))
        except (TypeError, UnicodeError) as error:  # half of a surrogate pair
            raise TemplateError(f"a message holds text that is not Unicode: {error}") from error

    def control(self, token_id: int) -> str | None:
        """The text of a token that no merge of text can produce; None of any other token."""
        return self._added.get(token_id)

    def _prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message as the template takes it; the same object where nothing is to change."""
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(content, str) and content and not calls and message["role"] != "assistant":
            return message
        out = {k: v for k, v in message.items() if v is not None}
        out["content"] = plain_content(content) or (self._empty if calls else "")
        out.pop("tool_calls", None)
        if calls:
            out["tool_calls"] = [self._call(c) for c in calls]
        thought = out.get("reasoning_content") or out.get("reasoning")
        if thought:  # vLLM gives templates both names
            out["reasoning_content"] = out["reasoning"] = thought
        return out

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        given = function.get("arguments")
        value = as_object(given)
        if not self._object:
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            return {**call, "function": {**function, "arguments": text}}
        # No object: vLLM's server shows templates an empty one, as most can show nothing else.
        return {**call, "function": {**function, "arguments": {} if value is None else value}}

    def _form(self) -> tuple[str | None, bool]:
        """(absent content, arguments as objects): the first form that shows a call's arguments."""
        forms: list[tuple[str | None, bool]] = [
            ("", True),
            ("", False),
            (None, True),
            (None, False),
        ]
        for self._empty, self._object in forms:
            call = {"id": "call_0", "type": "function", **_TRIAL}
            asked = {"role": "user", "content": "q"}
            reply = {"role": "assistant", "content": None, "tool_calls": [call]}
            try:
                shown = self.render([asked, reply], generate=False)
            except TemplateError:
                continue
            if "molt_trial" in shown and "molt_value" in shown:
                return self._empty, self._object
        return forms[0]


def plain_content(content: Any) -> Any:
    """Text parts as one string, joined as vLLM joins them; anything else as it is."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        return "\n".join(part.get("text", "") for part in content)
    return content


def as_object(arguments: Any) -> dict[str, Any] | None:
    """Tool arguments as a JSON object; None if they are not one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else None
