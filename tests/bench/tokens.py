"""Rollout tokens/s of a real model: bare vLLM, an `Env`, and an agent that speaks HTTP.

One engine in one Ray actor serves all three in turn, on the same prompts with the same sampling;
it runs half of the prompts at once, the others follow as these end, as in a run:

bare   `AsyncLLM.generate` inside the actor, final outputs only: no stream, no log, no HTTP
env    worker, session, stream of pieces from the actor, durable log
http   the same with a `ChatAgent` that asks the server, one connection per rollout (httpx, no SDK)

Prints a table of medians and of medians of the ratios within a round; asserts no time.

    python tests/bench/tokens.py            # 7 minutes on two cores, SmolLM2-135M
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from molt.agents.chat import ChatAgent, Context, Result
from molt.agents.env import Env, Messages, Reply, Turn
from molt.cluster import Cluster
from molt.config import load
from molt.model import resolve_model
from molt.rollout.engine import Engine
from molt.rollout.types import Assignment
from molt.store import Log

sys.path.insert(0, str(Path(__file__).parents[1]))
import factories as make

ROLLOUTS, TOKENS = 128, 64
ROOT = Path(__file__).parents[2]


def asked(i: int) -> Messages:
    text = f"Tell a very long story about the number {i}, with many people and places in it."
    return [{"role": "user", "content": text}]


class Tells(Env):
    """One turn, no work of its own."""

    def reset(self, prompt: dict[str, Any]) -> Messages:
        return asked(prompt["i"])

    def step(self, reply: Reply) -> Turn:
        return Turn(rewards={"said": float(reply.n_tokens)})


class Asks(ChatAgent):
    """The same over HTTP; as little client as possible, so that the server is what is measured."""

    async def run(self, ctx: Context) -> Result:
        import httpx

        body = {"model": ctx.model, "messages": asked(ctx.prompt["i"])}
        head = {"authorization": f"Bearer {ctx.api_key}"}
        async with httpx.AsyncClient(verify=False, timeout=600) as client:
            answer = await client.post(f"{ctx.base_url}/chat/completions", json=body, headers=head)
        assert answer.status_code == 200, answer.text
        return Result(rewards={"said": 1.0})


class BenchEngine(Engine):
    """Serves what it loaded from disk, and what bare vLLM makes of the same prompts."""

    async def start(self) -> dict[str, Any]:
        info = await super().start()
        await self._llm.update_weight_version("1.0")
        self._published = True
        return info

    async def bare(self, prompts: list[list[int]], max_tokens: int) -> tuple[int, float]:
        """(tokens sampled, seconds)"""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=1.0,
            max_tokens=max_tokens,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        async def one(i: int, ids: list[int]) -> int:
            name = f"bare-{time.time_ns()}-{i}"
            async for output in self._llm.generate({"prompt_token_ids": ids}, params, name):
                n = len(output.outputs[0].token_ids)
            return n

        began = time.perf_counter()
        counts = await asyncio.gather(*(one(i, ids) for i, ids in enumerate(prompts)))
        return sum(counts), time.perf_counter() - began


def settings(folder: str, agent: str) -> Any:
    return load(
        ROOT / "molt/recipes/demo.toml",
        [
            f"run.dir={folder}",
            f"agent.env=tokens:{agent}",
            f"sampling.max_tokens={TOKENS}",
            "agent.tool_parser=none",
            f"engine.max_num_seqs={ROLLOUTS // 2}",
            "agent.workers=2",
        ],
    )


def assignments(purpose: str, n: int) -> list[Assignment]:
    """`n` groups of one rollout each."""
    names = (f"{purpose}-{i}" for i in range(n))
    return [
        Assignment(group_id=g, rollout_id=f"{g}/0", attempt=0, purpose="train", prompt={"i": i})
        for i, g in enumerate(names)
    ]


async def measure(rounds: int, folder: str) -> list[dict[str, float]]:
    """Tokens per second of each arm, by round; the first round warms up and is not counted."""
    from transformers import AutoTokenizer

    import molt.cluster

    molt.cluster.Engine = BenchEngine  # type: ignore[misc]
    configs = [settings(folder, agent) for agent in ("Tells", "Asks")]
    model = resolve_model(configs[0].model)
    log = Log.create(folder, run_id="tokens")
    make.open_epoch(log)
    log.control.put("policy", [make.policy(1, 0)])
    cluster = Cluster(configs[0], Path(folder), 1, model)
    cluster.start_ray()
    try:
        await cluster.start_engines()
        for i, config in enumerate(configs):
            cluster.config = config
            await cluster.start_worker(i)
        tokenizer = AutoTokenizer.from_pretrained(model)
        prompts = [
            tokenizer.apply_chat_template(asked(i), add_generation_prompt=True, return_dict=False)
            for i in range(ROLLOUTS)
        ]
        found = []
        for k in range(rounds + 1):
            arms = ["bare", "env", "http"]
            order = arms[k % 3 :] + arms[: k % 3]
            rates: dict[str, float] = {}
            for arm in order:
                if arm == "bare":
                    n, seconds = await cluster.call(cluster.engines[0], "bare", prompts, TOKENS)
                else:
                    worker = cluster.workers[["env", "http"].index(arm)]
                    began = time.perf_counter()
                    await cluster.call(worker, "play", assignments(f"{arm}{k}", ROLLOUTS))
                    seconds = time.perf_counter() - began
                    n = sampled(log, f"{arm}{k}")
                rates[arm] = n / seconds
            print(k, {a: round(r, 1) for a, r in rates.items()}, flush=True)
            found.append(rates)
        return found[1:]
    finally:
        await cluster.close()


def sampled(log: Log, purpose: str) -> int:
    """Sampled tokens of the rollouts that ended well."""
    query = f"""select sum(counts.sampled), count(*) from rollouts
    where group_id like '{purpose}-%' and status in ('ok', 'truncated')"""
    (n, rollouts), *_ = log.sql(query).fetchall()
    assert rollouts == ROLLOUTS, (purpose, rollouts)
    return int(n)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--rounds", type=int, default=3)
    args = p.parse_args()
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        rounds = asyncio.run(measure(args.rounds, f"{folder}/log"))
    print("| path | tokens/s | ratio to bare |\n| --- | --- | --- |")
    for arm in rounds[0]:
        ratio = statistics.median(r[arm] / r["bare"] for r in rounds)
        print(f"| {arm} | {statistics.median(r[arm] for r in rounds):.0f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
