"""A mixture of experts that fits any machine: a random Qwen3-MoE, its tokenizer, and a task.

`model = "random:qwen3-moe"` (or `"random:qwen3-moe:<seed>"`) makes it once in the cache folder:
4 layers with 8 experts each, 2 per token, hidden size 128, 1.2 M parameters, one token per byte.
It knows nothing; what it learns here is to answer in letters.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from molt.agents.env import Env, Messages, Reply, Turn

VOCAB_SIZE = 320
"""256 bytes, three special tokens, padded to a multiple of 64."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """One token per byte of UTF-8, ChatML, eos = `<|im_end|>`; a `PreTrainedTokenizerFast`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
    )


def save_qwen3_moe(folder: str | Path, seed: int = 0, **changes: Any) -> str:
    """Save a random Qwen3-MoE (float32) with its tokenizer; returns the folder as text.

    The weights are larger than a real initialisation's, so that distributions are far from uniform
    and a stale or mixed-up weight shows. `changes` go into the model's configuration.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = byte_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,  # vLLM on CPU needs 32 or more
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.0,
        "max_position_embeddings": 1024,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    config = Qwen3MoeConfig(**(sizes | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def train_prompts(seed: int) -> Iterator[dict[str, Any]]:
    """Sixty-four short requests in an order given by the seed."""
    for k in range(64):
        yield {"k": (k * 7 + seed) % 64}


class Letters(Env):
    """Reward: the share of letters in the reply."""

    def reset(self, prompt: dict[str, Any]) -> Messages:
        return [{"role": "user", "content": f"say {prompt['k']}"}]

    def step(self, reply: Reply) -> Turn:
        share = sum(c.isalpha() for c in reply.text) / max(len(reply.text), 1)
        return Turn(rewards={"letters": share})
