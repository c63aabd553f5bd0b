"""Rollout tokens/s of a real model: bare vLLM, an `Env`, and an agent that speaks HTTP.

One engine in one Ray actor serves all three in turn, on the same prompts with the same sampling;
it runs half of the prompts at once, the others follow as these end, as in a run:

bare   `AsyncLLM.generate` inside the actor, final outputs only: no stream, no log, no HTTP
env    worker, session, stream of pieces from the actor, durable log
http   the same with a `ChatAgent` that asks the server, one connection per rollout (httpx, no SDK)

Bare vLLM runs before and after each of the others; each ratio is to the mean of these two. Prints a
table of medians; asserts no time.

    python tests/bench/tokens.py            # 15 minutes on two cores, SmolLM2-135M
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

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
ARMS = ["env", "http"]
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


class Played(NamedTuple):
    """Tokens per second; CPU seconds of the whole machine per 1,000 tokens; CPUs that the host
    gave to others meanwhile (steal)."""

    rate: float
    cpu: float
    stolen: float


def processes() -> dict[tuple[int, str], float]:
    """CPU seconds so far of every process that this one may read."""
    fields = ["pid", "name", "cmdline", "cpu_times"]
    return {
        (p.info["pid"], (p.info["cmdline"] or [p.info["name"]])[0][:40]): sum(
            p.info["cpu_times"][:2]
        )
        for p in psutil.process_iter(fields)
        if p.info["cpu_times"]
    }


def busiest(before: dict[tuple[int, str], float]) -> str:
    """CPU seconds since `before` of the processes that took most, for who wants to know why."""
    now = processes()
    spent = {k[1]: round(v - before.get(k, 0.0), 1) for k, v in now.items()}
    top = sorted(spent.items(), key=lambda item: -item[1])[:6]
    return ", ".join(f"{name} {seconds}" for name, seconds in top)


def assignments(first: int, n: int) -> list[Assignment]:
    """`n` groups of one rollout each, from ordinal `first` on."""
    names = (f"train-{first + i}" for i in range(n))
    return [
        Assignment(group_id=g, rollout_id=f"{g}/0", attempt=0, purpose="train", prompt={"i": i})
        for i, g in enumerate(names)
    ]


class Rig:
    """A cluster of one engine and two workers, which plays the same prompts in three ways."""

    def __init__(self, folder: str) -> None:
        import molt.cluster

        molt.cluster.Engine = BenchEngine  # type: ignore[misc]
        self.configs = [settings(folder, agent) for agent in ("Tells", "Asks")]
        self.model = resolve_model(self.configs[0].model)
        self.log = Log.create(folder, run_id="tokens")
        make.open_epoch(self.log)
        self.log.control.put("policy", [make.policy(1, 0)])
        self.cluster = Cluster(self.configs[0], Path(folder), 1, self.model)
        self.played = 0

    async def start(self) -> None:
        from transformers import AutoTokenizer

        self.cluster.start_ray()
        await self.cluster.start_engines()
        for i, config in enumerate(self.configs):
            self.cluster.config = config
            await self.cluster.start_worker(i)
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.prompts = [
            tokenizer.apply_chat_template(asked(i), add_generation_prompt=True, return_dict=False)
            for i in range(ROLLOUTS)
        ]

    async def play(self, arm: str) -> Played:
        each = processes()
        before, began = psutil.cpu_times(), time.perf_counter()
        if arm == "bare":
            call = self.cluster.call(self.cluster.engines[0], "bare", self.prompts, TOKENS)
            n, seconds = await call
        else:
            worker, self.played = self.cluster.workers[ARMS.index(arm)], self.played + 1
            first = self.played * ROLLOUTS
            await self.cluster.call(worker, "play", assignments(first, ROLLOUTS))
            seconds = time.perf_counter() - began
            n = sampled(self.log, first)
        after = psutil.cpu_times()
        spent = sum(after[:3]) - sum(before[:3])
        found = Played(n / seconds, 1000 * spent / n, (after.steal - before.steal) / seconds)
        print(arm, found, busiest(each), flush=True)
        return found


async def measure(rounds: int, folder: str) -> list[dict[str, tuple[Played, float]]]:
    """By round: what each way made, and its rate to the mean of bare vLLM just before and after.

    A machine whose speed drifts changes both sides of such a ratio.
    """
    rig = Rig(folder)
    try:
        await rig.start()
        for arm in ARMS:
            await rig.play(arm)  # warms up, not counted
        bare, out = await rig.play("bare"), []
        for _ in range(rounds):
            row = {}
            for arm in ARMS:
                found, before = await rig.play(arm), bare
                bare = await rig.play("bare")
                row[arm] = found, 2 * found.rate / (before.rate + bare.rate)
            out.append(row | {"bare": (bare, 1.0)})
        return out
    finally:
        await rig.cluster.close()


def sampled(log: Log, first: int) -> int:
    """Sampled tokens of the rollouts from ordinal `first` on that ended well."""
    query = f"""select sum(counts.sampled), count(*) from rollouts
    where split_part(group_id, '-', 2)::int between {first} and {first + ROLLOUTS - 1}
    and status in ('ok', 'truncated')"""
    (n, rollouts), *_ = log.sql(query).fetchall()
    assert rollouts == ROLLOUTS, (first, rollouts)
    return int(n)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--rounds", type=int, default=3)
    args = p.parse_args()
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        rounds = asyncio.run(measure(args.rounds, f"{folder}/log"))
    print("| path | tokens/s | ratio to bare, median (range) | CPU s per 1,000 tokens | stolen |")
    print("| --- | --- | --- | --- | --- |")
    for arm in rounds[0]:
        found = [r[arm][0] for r in rounds]
        rate, cpu, stolen = map(statistics.median, zip(*found, strict=True))
        ratios = sorted(r[arm][1] for r in rounds)
        spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(f"| {arm} | {rate:.0f} | {spread} | {cpu:.1f} | {stolen:.2f} |")


if __name__ == "__main__":
    main()
