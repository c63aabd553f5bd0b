"""An engine that samples what it is told, for tests of everything around it."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import chats
import numpy as np
from transformers import PreTrainedTokenizerFast

from molt.rollout.types import Completion
from molt.schemas.records import Sampling

TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=chats.own_tokenizer(), eos_token="<|im_end|>", chat_template=chats.PLAIN
)


class Says:
    """An engine that samples what it is told, in pieces, and keeps the prompts."""

    engine_id = "engine-0"

    def __init__(self, *texts: str) -> None:
        self.texts, self.prompts = list(texts), list[str]()
        self.gate = asyncio.Event()
        self.gate.set()

    async def pieces(
        self, request_id: str, prompt_ids: np.ndarray, sampling: Sampling, *more: Any
    ) -> AsyncGenerator[Completion, None]:
        self.prompts.append(TOKENIZER.decode(prompt_ids))
        text = self.texts.pop(0)
        await self.gate.wait()
        stop = any(s in text for s in sampling.stop)
        ids = np.array(
            [*TOKENIZER.encode(text), *([] if stop else [TOKENIZER.eos_token_id])], np.int32
        )
        parts = np.array_split(ids, 3)
        for part in parts:
            last = part is parts[-1]
            yield Completion(
                token_ids=part,
                logprobs=np.full(len(part), -0.5, np.float32),
                version_runs=((1, 0, len(part)),) if len(part) else (),
                finish_reason="stop" if last else "",
                stop_token=None if stop or not last else int(ids[-1]),
            )
