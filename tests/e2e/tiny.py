"""A tiny model made on the spot, and a real engine around it, for the end-to-end tests.

Letters of tensor shapes: B batch, T tokens, V vocabulary.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from molt.recipes.moe import VOCAB_SIZE, byte_tokenizer
from molt.rollout.engine import Engine, EngineSettings
from molt.rollout.sender import WeightSender

T = TypeVar("T")


def tiny_tied_llama(folder: str | Path, seed: int = 0) -> str:
    """Save a random Llama (2 layers, hidden 128, 4 KV heads, tied, float32) and its tokenizer.

    vLLM on CPU needs heads of at least 32. The weights are larger than a real initialisation's, so
    that distributions are far from uniform and a stale or mixed-up weight shows. Returns the
    folder as text.
    """
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def load(folder: str) -> LlamaForCausalLM:
    """The saved model in float32: the other side of every comparison with the engine."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_logprobs(model: LlamaForCausalLM, ids: list[int]) -> np.ndarray:
    """log p(ids[i] | ids[:i]) for i >= 1 by a plain forward: float32 [len - 1]."""
    with torch.no_grad():
        logprobs_BTV = model(torch.tensor([ids])).logits.log_softmax(-1)
    return logprobs_BTV[0, :-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def next_logprobs(model: LlamaForCausalLM, ids: list[int]) -> np.ndarray:
    """log p(token | ids) of every token of the vocabulary: float64 [V]."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1).numpy()


def perturb(model: LlamaForCausalLM, seed: int, scale: float = 0.05) -> None:
    """Multiply every weight by 1 + scale x noise, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + scale * torch.randn(weight.shape, generator=generator))


class Rig:
    """A running engine, the sender in front of it, and the loop both live on."""

    def __init__(self, folder: str, epoch: int = 1, **settings: Any) -> None:
        """Nothing runs before `start()`."""
        self.epoch, self.runner = epoch, asyncio.Runner()
        self.engine = Engine(
            "e0", EngineSettings(model=folder, **{"kv_cache_gib": 0.125, **settings}), epoch, None
        )
        self.sender: WeightSender | None = None

    def start(self) -> dict[str, Any]:
        """Start the engine and connect a sender; on failure nothing is left running."""
        try:
            info = self.run(self.engine.start())
            self.connect()
        except BaseException:
            self.close()
            raise
        return info

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run to completion; tasks made meanwhile stay alive between calls."""
        return self.runner.run(coroutine)

    def connect(self) -> None:
        """A fresh transfer group between a new sender and the engine."""

        async def both() -> None:
            joining = asyncio.create_task(
                self.engine.init_transfer(self.epoch, *sender.address, 2, 1)
            )
            await asyncio.to_thread(sender.connect)
            await joining

        self.sender = sender = WeightSender("gloo", 2)
        self.run(both())

    async def publish(self, model: Any, version: int) -> tuple[dict, dict]:
        """One refit of a paused engine; returns what was sent and what was received."""
        named = list(model.named_parameters())
        manifest = [(n, str(p.dtype).removeprefix("torch."), tuple(p.shape)) for n, p in named]
        return await self.send(named, manifest, version)

    async def send(self, named: Iterable[Any], manifest: Any, version: int) -> tuple[dict, dict]:
        """`publish` of tensors that are made as they are sent."""
        assert self.sender is not None
        receiving = asyncio.create_task(self.engine.receive_weights(self.epoch, manifest, version))
        sent = await asyncio.to_thread(self.sender.send, named)
        return sent, await receiving

    async def refit(self, model: LlamaForCausalLM, version: int) -> None:
        """Pause, publish, resume."""
        await self.engine.pause(self.epoch)
        await self.publish(model, version)
        await self.engine.resume(self.epoch)

    def close(self) -> None:
        """Stop everything; safe after a failure in the middle."""
        try:
            self.run(self.engine.shutdown())
        finally:
            if self.sender is not None:
                self.sender.close()
            self.runner.close()
