"""Conversations for the capture: tokenizers, chat templates, and a player that checks what it did.

Own data first (a byte-level tokenizer with a few merges, two small ChatML templates), then the
recorded tokenizers and templates of ../shared/data where that folder is.
"""

import functools
import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from molt.agents.capture import Capture, Placement
from molt.agents.render import Renderer
from molt.agents.types import ChatRequest, Messages, ParsedReply, ToolCall
from molt.store.branches import branches, chain

DATA = Path(__file__).parents[2] / "shared" / "data"
CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>")

CALLS = """{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}"""
TOOLS = """{% if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}"""
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = (
    TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}"
    + OPEN
)
"""Never shows reasoning."""
THINKING = (
    TOOLS
    + "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    + "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    + "{% if m.reasoning_content and loop.index0 > ns.last %}"
    + "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}"
    + OPEN
)
"""Shows reasoning until the next message of a user, as Qwen3's does."""


@functools.cache
def own_tokenizer() -> Tokenizer:
    """Byte-level BPE: every text has ids, and some texts have several spellings."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["assistant user system tool weather result " * 4], trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in CONTROL])
    return tokenizer


@functools.cache
def recorded_tokenizer(name: str) -> Tokenizer:
    packed = DATA / "tokenizers" / f"{name}_tokenizer.json.gz"
    if not packed.is_file():
        pytest.skip("the recorded tokenizers (../shared/data/tokenizers) are not here")
    return Tokenizer.from_str(gzip.decompress(packed.read_bytes()).decode())


def recorded_template(name: str) -> tuple[str, dict[str, str]]:
    """(Jinja text, special tokens) of a file in ../shared/data/chat-templates."""
    path = DATA / "chat-templates" / name
    if not path.is_file():
        pytest.skip("the recorded templates (../shared/data/chat-templates) are not here")
    if path.suffix == ".jinja":
        return path.read_text(), {"bos_token": "<s>"}
    config = json.loads(path.read_text())
    tokens = {}
    for key in ("bos_token", "eos_token"):
        token = config.get(key)
        tokens[key] = token["content"] if isinstance(token, dict) else token or ""
    return config["chat_template"], tokens


def renderer(template: str = PLAIN, **special: str) -> Renderer:
    """Our own tokenizer with the control tokens that this template writes."""
    tokenizer = Tokenizer.from_str(own_tokenizer().to_str())
    written = re.findall(r"<\|[a-z_]+\|>|<｜[^｜]+｜>", template)
    names = dict.fromkeys([*written, *filter(None, special.values())])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    return recorded_renderer(tokenizer, template, special)


def recorded_renderer(
    tokenizer: Tokenizer, template: str, special: Mapping[str, str] | None = None
) -> Renderer:
    """A renderer for a tokenizer and a template that come apart from each other."""
    named = {k: v for k, v in (special or {}).items() if v}
    return Renderer(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **named)
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def reply(
    content: str | None = None, reasoning: str | None = None, calls: tuple[ToolCall, ...] = ()
) -> ParsedReply:
    return ParsedReply(content=content, reasoning=reasoning, tool_calls=calls)


def call(call_id: str, arguments: str = '{"city": "Oslo"}', name: str = "get_weather") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def spelled(answer: ParsedReply) -> str:
    """A reply as a policy might write it; never quite as a template would."""
    text = f"<think>\n{answer.reasoning}\n</think>\n\n" if answer.reasoning else ""
    text += answer.content or ""
    for c in answer.tool_calls:
        text += f'\n<tool_call>\n{{"name":"{c.name}",  "arguments":{c.arguments}}}\n</tool_call>'
    return text


class Player:
    """Plays one rollout: places, samples, accepts; keeps the rows as a log would."""

    def __init__(self, renderer: Renderer, stop: str = "<|im_end|>") -> None:
        self.capture, self.renderer, self.stop = Capture(renderer), renderer, stop
        self.rows: dict[int, tuple[list[int], list[int]]] = {}
        """Segment -> (own ids, sampled)."""
        self.seen: list[tuple[list[int], int]] = []
        """(prompt and sampled ids as the engine had them, last segment) of each answer."""

    def ask(self, messages: Messages, answer: ParsedReply, **more: Any) -> Placement:
        """One turn; `more` goes to `answer` below, the rest to the request."""
        own = {k: more.pop(k) for k in ("text", "finish", "n_pieces") if k in more}
        placement = self.capture.place(ChatRequest(messages=messages, **more))
        self.answer(placement, answer, **own)
        return placement

    def answer(
        self,
        placement: Placement,
        answer: ParsedReply,
        *,
        text: str | None = None,
        finish: str = "stop",
        n_pieces: int = 1,
    ) -> None:
        """Sample `text` in `n_pieces` segments; without a stop token where finish is "length"."""
        text = spelled(answer) if text is None else text
        sampled = self.renderer.encode(text + (self.stop if finish == "stop" else ""))
        cuts = [len(sampled) * i // n_pieces for i in range(n_pieces + 1)]
        pieces = []
        for a, b in zip(cuts, cuts[1:], strict=False):
            context = [] if pieces else placement.delta_ids
            ids = [*context, *sampled[a:b]]
            self.rows[len(self.rows)] = (ids, [0] * len(context) + [1] * (b - a))
            pieces.append((len(self.rows) - 1, np.array(ids, np.int32)))
        self.capture.accept(placement, pieces, answer, finish)
        self.seen.append((placement.prompt_ids.tolist() + sampled, pieces[-1][0]))

    @property
    def branches(self) -> int:
        return len(branches(self.capture.links))

    def text(self, ids: list[int]) -> str:
        return self.renderer.tokenizer.decode(ids, skip_special_tokens=False)

    def check(self) -> None:
        """Chains are what the engine saw; each sampled token is owned by exactly one branch."""
        links = self.capture.links
        assert sorted(links) == sorted(self.rows)
        for ids, segment in self.seen:
            parts = chain(links, segment)
            assert [i for s, end in parts for i in self.rows[s][0][:end]] == ids
        owned = [
            (piece.segment, position)
            for branch in branches(links)
            for piece in branch.pieces
            for position in range(piece.owned_from, piece.end)
            if self.rows[piece.segment][1][position]
        ]
        sampled = [(s, i) for s, (_, mask) in self.rows.items() for i, m in enumerate(mask) if m]
        assert sorted(owned) == sampled
        assert all(link.keep > 0 for link in links.values() if link.parent is not None)


def recording(name: str) -> Any:
    """A file of ../shared/data/nemo-gym; of JSONL a list."""
    path = DATA / "nemo-gym" / name
    if not path.is_file():
        pytest.skip("the recordings (../shared/data/nemo-gym) are not here")
    return json.loads(path.read_text()) if path.suffix == ".json" else json_lines(path.read_text())


def json_lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]
