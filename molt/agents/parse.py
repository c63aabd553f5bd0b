"""What sampled tokens say: vLLM's own parsers for reasoning and tool calls.

Stands between the engine's tokens and the agent. The reply is a view of the record: whatever the
parsers make of the text, malformed JSON included, the ids stay as they were sampled (I1) and the
rollout goes on. vLLM is imported by the first use of a parser.

Whole replies only: vLLM's incremental parsing of the same tokens ends in other white space and
other ids of calls, so an agent that streamed would send back another reply than was recorded.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from molt.agents.types import ChatRequest, ParsedReply, ToolCall
from molt.schemas.errors import ConfigError, RequestRefused

# What a chat template contains -> vLLM's parser for what its model writes; first match counts.
_TOOL_SIGNS = (
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>", '"name"'), "hermes"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v3"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|python_tag|>",), "llama3_json"),
)
_REASONING_SIGNS = (
    (("</think>", "<arg_key>"), "glm45"),
    (("</think>", "truncate_history_thinking"), "nemotron_v3"),
    (("</think>", "<|im_start|>"), "qwen3"),
    (("</think>",), "deepseek_r1"),
)


def choose_parsers(
    template: str, tool_parser: str = "", reasoning_parser: str = ""
) -> tuple[str | None, str | None]:
    """(tool parser, reasoning parser), guessed from the chat template's text where "" is given.

    "none" = no parser.

    >>> choose_parsers("... <tool_call>{\\"name\\": ...", "", "none")
    ('hermes', None)
    """

    def choose(given: str, signs: Any) -> str | None:
        if given:
            return None if given == "none" else given
        return next((name for marks, name in signs if all(m in template for m in marks)), None)

    return choose(tool_parser, _TOOL_SIGNS), choose(reasoning_parser, _REASONING_SIGNS)


class ReplyParser:
    """Sampled tokens to a reply. Names are vLLM's ("hermes", "qwen3", ...); None = leave it text.

    ConfigError if vLLM does not know a name or the tokenizer lacks what the parser needs.
    """

    def __init__(
        self, tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None
    ) -> None:
        self.tokenizer = tokenizer
        self.tools, self.reasoning = tool_parser is not None, reasoning_parser is not None
        self.n_failed = 0
        """Replies that a parser could not read at all; they are handed on as text."""
        self._parser: Any = None
        if not (self.tools or self.reasoning):
            return
        from vllm.parser.parser_manager import ParserManager

        try:
            self._parser = ParserManager.get_parser(
                tool_parser, reasoning_parser, enable_auto_tools=True, tokenizer=tokenizer
            )
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"tool parser {tool_parser!r}, reasoning parser {reasoning_parser!r}: {error}"
            ) from error

    def takes_out(self, request: ChatRequest) -> bool:
        """Whether a reply may hold more than content: calls of tools, or reasoning."""
        called = self.tools and bool(request.tools) and request.tool_choice != "none"
        return called or self.reasoning

    def parse(
        self, token_ids: Sequence[int] | np.ndarray, text: str, request: ChatRequest
    ) -> ParsedReply:
        """The reply that `token_ids` say; `text` is them decoded without special tokens.

        Never raises: what cannot be read is content. The ids of tool calls depend on the tokens
        and their place in the conversation alone, so parsing again gives the same.
        """
        reasoning: str | None = None
        content: str | None = text
        calls: Sequence[Any] = ()
        ids = [int(i) for i in token_ids]
        if self.takes_out(request):
            try:
                asked = _vllm_request(request)
                reasoning, content, found = self._new(asked, request).parse(
                    self._readable(ids, text), asked, True, ids
                )
                calls = (found or ())[: None if request.parallel_tool_calls else 1]
            except Exception:  # a parser may raise anything on what a policy samples
                self.n_failed += 1
                reasoning, content = None, text
        if text and not (reasoning or content or calls):
            content = text  # markup that was cut off: the agent is to see what there is
        seed = hashlib.blake2b(
            np.array([len(request.messages), *ids], np.int64).tobytes(), digest_size=8
        ).hexdigest()
        return ParsedReply(
            content=content or None,
            reasoning=reasoning,
            tool_calls=tuple(
                ToolCall(id=_call_id(c.id, seed, i), name=c.name, arguments=c.arguments or "")
                for i, c in enumerate(calls)
            ),
        )

    def grammar(self, request: ChatRequest) -> Any:
        """vLLM's `StructuredOutputsParams` that tool_choice or response_format asks for, or None.

        "auto" is left free even where vLLM's server would constrain it: tokens sampled under a
        grammar cannot be trained. RequestRefused, in vLLM's words, for a form or tool that it does
        not know.
        """
        if request.response_format is None and request.tool_choice in ("auto", "none"):
            return None
        from vllm.exceptions import VLLMValidationError

        try:
            asked = _vllm_request(request)
            if self._parser is not None and request.tool_choice not in ("auto", "none"):
                asked = self._new(asked, request).adjust_request(asked)
            return asked.extract_structured_outputs()
        except (VLLMValidationError, ValueError, TypeError, KeyError) as error:
            raise RequestRefused(f"response_format or tool_choice: {error}") from error

    def _new(self, asked: Any, request: ChatRequest) -> Any:
        return self._parser(self.tokenizer, asked.tools, chat_template_kwargs=request.template)

    def _readable(self, ids: list[int], text: str) -> str:
        """`text`, with special tokens where they stand between others: they may be markup."""
        added = self.tokenizer.added_tokens_decoder  # names more than `all_special_ids` does
        special = {i for i, token in added.items() if token.special}
        while ids and ids[-1] in special:
            ids = ids[:-1]
        if special.isdisjoint(ids):
            return text
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


def tool_outcome(arguments: str) -> dict[str, Any] | str:
    """The arguments of a call as an object, or the error that becomes the tool's result.

    >>> tool_outcome('{"city": "Oslo"}'), tool_outcome("[1]"), tool_outcome("{")
    ({'city': 'Oslo'}, 'error: not an object', 'error: not JSON')
    """
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return "error: not JSON"
    return value if isinstance(value, dict) else "error: not an object"


def _call_id(given: str | None, seed: str, index: int) -> str:
    """vLLM's id where its form means something to a template (Kimi, Mistral), else our own."""
    random = given is None or given.startswith(("chatcmpl-tool-", "call_"))
    return f"call_{seed}{index:02d}" if random else str(given)


def _vllm_request(request: ChatRequest) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    free = request.tool_choice == "auto" and not request.tools
    return ChatCompletionRequest(
        model="policy",
        messages=[{"role": "user", "content": "-"}],
        tools=list(request.tools) or None,
        tool_choice="none" if free else request.tool_choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=request.response_format,
        chat_template_kwargs=request.template,
    )
