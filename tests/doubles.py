"""A rollout that answers from a list: for tests of the wires, where what is sampled is given."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from molt.agents.heard import Heard
from molt.agents.types import ChatReply, ChatRequest, Choice, ParsedReply, ToolCall
from molt.schemas.records import Sampling


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, eos = `<|im_end|>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


TOKENIZER = byte_tokenizer()


def says(
    content: str | None = None, *calls: ToolCall, reasoning: str | None = None, finish: str = ""
) -> ChatReply:
    """A reply of one choice."""
    return ChatReply(
        id="chatcmpl-7",
        choices=(choice(0, content, *calls, reasoning=reasoning, finish=finish),),
        n_prompt=11,
        n_cached=4,
    )


def choice(
    index: int,
    content: str | None,
    *calls: ToolCall,
    reasoning: str | None = None,
    finish: str = "",
) -> Choice:
    text = (reasoning or "") + (content or "") + "".join(c.arguments for c in calls)
    ids = np.array([*TOKENIZER.encode(text), TOKENIZER.eos_token_id], np.int32)
    return Choice(
        index=index,
        reply=ParsedReply(content=content, reasoning=reasoning, tool_calls=calls),
        text=text,
        finish_reason=finish or ("tool_calls" if calls else "stop"),
        token_ids=ids,
        logprobs=np.linspace(-1.0, 0.0, len(ids)).astype(np.float32),
        segment=0,
    )


def call(name: str, arguments: str, id: str = "call_1") -> ToolCall:
    return ToolCall(id=id, name=name, arguments=arguments)


class ScriptedSession:
    """Answers with the next reply of a list, or raises the next error of it."""

    def __init__(self, *script: ChatReply | BaseException, token: str = "secret") -> None:
        self.script, self.token, self.model = list(script), token, "policy"
        self.tokenizer, self.sampling = TOKENIZER, Sampling(max_tokens=64)
        self.heard = Heard()
        self.requests: list[ChatRequest] = []
        self.deliveries: list[str] = []
        self.waiting = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def chat(
        self, request: ChatRequest, *, on_piece: Any = None, on_call: Any = None
    ) -> ChatReply:
        self.requests.append(request)
        if on_call:
            on_call(SimpleNamespace(reply_id="chatcmpl-7", n_prompt=11))
        self.call = asyncio.create_task(self._answer(on_piece))
        self.waiting += 1
        try:
            return await asyncio.shield(self.call)
        finally:
            self.waiting -= 1

    async def _answer(self, on_piece: Any) -> ChatReply:
        found = self.script.pop(0)
        if isinstance(found, BaseException):
            raise found
        for c in found.choices if on_piece else ():
            for piece in np.array_split(c.token_ids, 5):
                on_piece(c.index, piece, "")
        await self.gate.wait()
        return found

    def delivered(self, reply_id: str) -> None:
        self.deliveries.append(reply_id)

    def count(self, request: ChatRequest) -> int:
        return sum(len(m["content"] or "") for m in request.messages)

    def plain(self, request: ChatRequest) -> bool:
        return not request.tools
