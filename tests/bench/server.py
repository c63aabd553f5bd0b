"""What the server adds to a turn: HTTP, wire, session, capture, log; a stub stands for the engine.

The stub sleeps and returns tokens, so that the server is what is measured; everything else is real:
sockets, both processes, template, tokenizer, the log's writer. Overhead = what the client waited
minus what the stub took; the server's own part of it begins when a request's body is there and
ends when the answer is handed to the socket. Prints tables; asserts no time.

    python tests/bench/server.py                   # a minute on two cores
    python tests/bench/server.py --wire anthropic
    python tests/bench/server.py --profile         # where the server's time goes
"""

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import pstats
import random
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

ROLLOUTS, TURNS = 64, 12
DELTA_WORDS, REPLY_TOKENS = 60, 64
LONG_TURNS, LONG_REPLY = 200, 80


class StubEngine:
    """Sleeps as long as it is told and samples letters; keeps how long each call took."""

    engine_id = "stub"

    def __init__(self, delay_s: tuple[float, float], n: int) -> None:
        self.delay_s, self.n, self.random = delay_s, n, random.Random(0)
        self.took: dict[str, float] = {}

    async def pieces(
        self,
        request_id: str,
        prompt_ids: Any,
        sampling: Any,
        every: int = 0,
        grammar: Any = None,
        routing_start: int = 0,
    ) -> AsyncGenerator[Any, None]:
        from molt.rollout.types import Completion

        started = time.perf_counter()
        if self.delay_s[1]:
            await asyncio.sleep(self.random.uniform(*self.delay_s))
        ids = np.array([self.random.randrange(64, 90) for _ in range(self.n)], np.int32)
        done = Completion(
            token_ids=ids,
            logprobs=np.full(self.n, -1.0, np.float32),
            version_runs=((1, 0, self.n),),
            finish_reason="stop",
            stop_token=int(ids[-1]),
        )
        self.took[request_id] = time.perf_counter() - started
        yield done


class Clock:
    """ASGI middleware: seconds from a request's whole body to its answer, in order of answers."""

    def __init__(self, app: Any, seconds: list[float]) -> None:
        self.app, self.seconds = app, seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        began = 0.0

        async def received() -> Any:
            nonlocal began
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                began = time.perf_counter()
            return message

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.body":
                self.seconds.append(time.perf_counter() - began)
            await send(message)

        await self.app(scope, received, sent)


def serve_forever(
    folder: str, pipe: Any, delay_s: tuple[float, float], n: int, profile: bool
) -> None:
    """The server's process: sessions with real captures and a real log."""
    asyncio.run(_serve(folder, pipe, delay_s, n, profile))


async def _serve(
    folder: str, pipe: Any, delay_s: tuple[float, float], n: int, profile: bool
) -> None:
    import chats
    import factories as make
    from transformers import PreTrainedTokenizerFast

    from molt.agents.capture import Capture
    from molt.agents.parse import ReplyParser
    from molt.agents.render import Renderer
    from molt.agents.server import BODY_BYTES_MAX, CONCURRENCY_MAX, Agents, build, listen
    from molt.rollout.engines import EngineSource
    from molt.rollout.session import Desk, Session
    from molt.rollout.types import Assignment
    from molt.schemas.records import Sampling
    from molt.store import Log

    log = Log.create(Path(folder), run_id="bench")
    make.open_epoch(log)
    log.control.put("policy", [make.policy(1, 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=chats.own_tokenizer(), eos_token="<|im_end|>", chat_template=chats.PLAIN
    )
    engine, renderer = StubEngine(delay_s, n), Renderer(tokenizer)
    desk = Desk(
        writer=log.writer(1, linger_s=0.5),
        engines=EngineSource([engine], wait_s=1),
        model="bench",
        tokenizer=tokenizer,
        parser=ReplyParser(tokenizer, None, None),
        new_capture=lambda: Capture(renderer),
        sampling=Sampling(max_tokens=4096),
        window=1 << 20,
        partial_tokens=1 << 20,
    )
    sessions = []
    for i in range(ROLLOUTS):
        a = Assignment(
            group_id=f"train-{i}", rollout_id=f"train-{i}/0", attempt=0, purpose="train", prompt={}
        )
        sessions.append(Session(desk, a, 3600))
    agents = Agents({s.token: s for s in sessions}, BODY_BYTES_MAX, CONCURRENCY_MAX)
    app, own = build(agents), list[float]()
    app.add_middleware(Clock, seconds=own)
    running = listen(app, "127.0.0.1", 0, public=False, end=agents.end)
    pipe.send((running.port, [s.token for s in sessions]))
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    began = time.process_time()
    await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    cpu_s = time.process_time() - began
    profiler.disable()
    forks = sum(sum(s.forks.values()) for s in sessions)
    for session in sessions:
        await session.finish("ok")
    await running.close()
    desk.writer.close()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    pipe.send((engine.took, forks, cpu_s, own))


class Client:
    """One agent on one connection: as little client as possible."""

    def __init__(self, port: int, token: str, wire: str) -> None:
        self.port, self.token, self.wire = port, token, wire
        self.messages: list[dict[str, Any]] = []
        path = "messages" if wire == "anthropic" else "chat/completions"
        self.head = f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n"

    async def turn(self, words: str) -> tuple[float, int, int]:
        """(seconds, bytes sent, prompt tokens) of one turn; the next one echoes the reply."""
        if not self.messages:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.messages.append({"role": "user", "content": words})
        asked = {"model": "m", "max_tokens": 4096, "messages": self.messages}
        body = msgspec.json.encode(asked)
        started = time.perf_counter()
        self.writer.write(f"{self.head}content-length: {len(body)}\r\n\r\n".encode() + body)
        head = await self.reader.readuntil(b"\r\n\r\n")
        n = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        reply = msgspec.json.decode(await self.reader.readexactly(n))
        seconds = time.perf_counter() - started
        if self.wire == "anthropic":
            said, n_prompt = reply["content"], reply["usage"]["input_tokens"]
        else:
            said = reply["choices"][0]["message"]["content"]
            n_prompt = reply["usage"]["prompt_tokens"]
        self.messages.append({"role": "assistant", "content": said})
        return seconds, len(body), n_prompt


def percentiles(values: list[float]) -> str:
    return " | ".join(f"{1e3 * v:6.2f}" for v in np.percentile(values, [50, 90, 99, 100]))


async def concurrent(port: int, tokens: list[str], wire: str) -> dict[str, float]:
    """Seconds by request id, ROLLOUTS at a time."""
    rng = random.Random(1)
    out: dict[str, float] = {}

    async def play(i: int, token: str) -> None:
        client = Client(port, token, wire)
        await asyncio.sleep(rng.random())
        for k in range(TURNS):
            words = " ".join(
                rng.choice(["user", "weather", "tool", "x7"]) for _ in range(DELTA_WORDS)
            )
            out[f"train-{i}/0.0.{k}"] = (await client.turn(words))[0]

    await asyncio.gather(*(play(i, t) for i, t in enumerate(tokens)))
    return out


async def long(port: int, tokens: list[str], wire: str) -> list[tuple[float, int, int]]:
    """What `Client.turn` gives, for each turn of one rollout that becomes long."""
    client, rng = Client(port, tokens[0], wire), random.Random(2)
    words = ["user", "weather", "tool", "x7"]
    return [
        await client.turn(" ".join(rng.choice(words) for _ in range(DELTA_WORDS)))
        for _ in range(LONG_TURNS)
    ]


def with_server(
    play: Any, delay_s: tuple[float, float], n: int, args: argparse.Namespace
) -> tuple[Any, Any, int, float, list[float]]:
    """What `play` returns; the stub's seconds by request id, forks, the server's CPU seconds, and
    what its `Clock` saw."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe()
        arguments = (f"{folder}/log", theirs, delay_s, n, args.profile)
        process = context.Process(target=serve_forever, args=arguments)
        process.start()
        try:
            port, tokens = ours.recv()
            found = asyncio.run(play(port, tokens, args.wire))
            ours.send("enough")
            told = ours.recv()
            process.join()
        finally:
            process.kill()
    return found, *told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--wire", choices=("openai", "anthropic"), default="openai")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    seconds, took, forks, cpu_s, _ = with_server(concurrent, (0.3, 0.9), REPLY_TOKENS, args)
    assert seconds.keys() == took.keys(), "every turn was sampled once"
    overhead = [seconds[k] - took[k] for k in seconds]
    print(f"{ROLLOUTS} rollouts at once, {TURNS} turns each, {len(overhead)} turns, {forks} forks")
    print("overhead per turn, ms |    p50 |    p90 |    p99 |    max")
    print(f"                      | {percentiles(overhead)}")
    print(f"CPU of the server per turn, ms: {1e3 * cpu_s / len(overhead):.2f} (whatever else runs)")

    turns, took, forks, cpu_s, own = with_server(long, (0.0, 0.0), LONG_REPLY, args)
    stub = [took[f"train-0/0.0.{k}"] for k in range(LONG_TURNS)]
    cost = [turn[0] - s for turn, s in zip(turns, stub, strict=True)]
    own = [seconds - s for seconds, s in zip(own, stub, strict=True)]
    print(f"\none rollout, {LONG_TURNS} turns, no other load, {forks} forks")
    print("turns     | prompt tokens | request, kB | overhead per turn, ms (median) | server's own")
    for lo, hi in ((0, 10), (10, 25), (25, 50), (50, 100), (100, 150), (150, 200)):
        _, size, tokens = turns[hi - 1]
        middle, inside = (1e3 * float(np.median(part[lo:hi])) for part in (cost, own))
        columns = f"{tokens:13} | {size / 1e3:11.1f} | {middle:30.2f} | {inside:12.2f}"
        print(f"{lo + 1:3}..{hi:<4} | {columns}")
    print(f"CPU of the server per turn, ms: {1e3 * cpu_s / LONG_TURNS:.2f}")
    if args.json:
        print(json.dumps({"overhead": overhead, "long": cost, "own": own}))


if __name__ == "__main__":
    main()
