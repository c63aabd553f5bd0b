"""The renderer: the tokenizer's own template, in the form that vLLM's server gives it."""

from typing import Any

import chats
import pytest
from chats import PLAIN, call, reply, tool, user
from transformers import PreTrainedTokenizerFast

from molt.agents.render import Renderer, as_object, plain_content
from molt.schemas.errors import TemplateError

ASKED = [user("Weather?"), reply(None, None, (call("c1"),)).message(), tool("c1", "rain")]


def fast_tokenizer(template: str | None = PLAIN) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=chats.own_tokenizer(), eos_token="<|im_end|>", chat_template=template
    )


def test_ids_are_those_of_the_bare_tokenizer() -> None:
    bare, fast = chats.own_tokenizer(), Renderer(fast_tokenizer())
    text = fast.render(ASKED, generate=True)
    assert fast.encode(text) == bare.encode(text, add_special_tokens=False).ids
    (end,) = fast.encode("<|im_end|>")
    assert fast.control(end) == "<|im_end|>"
    assert fast.control(fast.encode("a")[0]) is None


def test_it_is_what_transformers_renders() -> None:
    tokenizer = fast_tokenizer(chats.recorded_template("trl_qwen3.jinja")[0])
    messages = [{"role": "system", "content": "s"}, user("q"), user("r")]
    tools = [{"type": "function", "function": {"name": "f"}}]
    more = {"enable_thinking": False}
    theirs = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False, **more
    )
    assert Renderer(tokenizer).render(messages, tools, more, generate=True) == theirs


def test_nothing_is_added_to_the_text() -> None:
    r = chats.renderer()
    assert r.encode("") == []
    assert r.encode("ab") == r.encode("a") + r.encode("b")


def test_a_template_that_refuses_says_why() -> None:
    r = chats.renderer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match="roles must alternate"):
        r.render([user("q")], generate=True)
    with pytest.raises(TemplateError, match="TypeError"):
        chats.renderer("{{ messages[0].content + 1 }}").render([user("q")], generate=True)
    with pytest.raises(TemplateError, match="has no chat template"):
        Renderer(fast_tokenizer(None)).render([user("q")], generate=True)


@pytest.mark.parametrize(
    "message",
    [
        {"content": "no role"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]},
        {"role": "assistant", "content": None, "tool_calls": "none"},
        "no message",
    ],
)
def test_what_is_no_message_is_refused_by_name(message: Any) -> None:
    with pytest.raises(TemplateError, match="cannot render these messages"):
        chats.renderer().render([user("q"), message], generate=True)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(TemplateError, match="not Unicode"):
        chats.renderer().encode("half a pair: \ud800")


def test_a_template_cannot_reach_out() -> None:
    r = chats.renderer("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TemplateError, match="SecurityError"):
        r.render([user("q")], generate=True)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ m.function.arguments | tojson }}", '{"city": "Oslo"}'),
        ("{{ '<' + m.function.arguments + '>' }}", '<{"city": "Oslo"}>'),
        ("{% for k, v in m.function.arguments | items %}{{ k }}={{ v }}{% endfor %}", "city=Oslo"),
    ],
)
def test_arguments_have_the_form_that_the_template_takes(template: str, shown: str) -> None:
    loop = "{% for m in messages[1].tool_calls %}{{ m.function.name }}"
    r = chats.renderer(loop + template + "{% endfor %}")
    assert r.render(ASKED, generate=True).endswith(shown)


def test_content_is_none_only_where_calls_would_be_hidden_otherwise() -> None:
    hides = (
        "{{ messages[1].content if messages[1].content is not none else messages[1].tool_calls }}"
    )
    assert "get_weather" in chats.renderer(hides).render(ASKED, generate=False)
    joins = "{{ 'x' + messages[1].content }}{{ messages[1].tool_calls }}"
    assert chats.renderer(joins).render(ASKED, generate=False).startswith("x[{")


def test_reasoning_has_both_of_its_names() -> None:
    r = chats.renderer(
        "{% for m in messages %}{{ m.reasoning }}/{{ m.reasoning_content }}{% endfor %}"
    )
    assert r.render([reply("4", "hm").message()], generate=False) == "hm/hm"
    assert r.render([{"role": "assistant", "reasoning": "so"}], generate=False) == "so/so"


def test_malformed_arguments_can_be_shown_as_history() -> None:
    bad = [user("q"), reply("Hm.", None, (call("c1", '{"city'),)).message(), tool("c1", "error")]
    r = chats.renderer(chats.recorded_template("trl_qwen3_5_think.jinja")[0])
    assert "Hm." in r.render(bad, generate=True)


def test_parts_and_objects() -> None:
    assert plain_content([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "a\nb"
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    assert plain_content(image) is image and plain_content(None) is None
    assert as_object('{"a": 1}') == {"a": 1} == as_object({"a": 1})
    assert as_object("[1]") is as_object("{") is as_object(None) is None
    assert as_object("[" * 100_000) is None
