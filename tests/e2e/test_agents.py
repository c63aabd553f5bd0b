"""Sessions on a real engine and a real log: retries, siblings, pauses, lost engines."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import factories as make
import numpy as np
import pytest
from tiny import Rig, load, tiny_tied_llama
from transformers import AutoTokenizer

from molt.agents.types import ChatRequest, ParsedReply
from molt.rollout.engines import EngineSource
from molt.rollout.session import Desk, Session
from molt.rollout.types import Assignment, Completion
from molt.schemas.records import Sampling
from molt.store import Log

pytestmark = pytest.mark.e2e
WINDOW = 512
PARTIAL = 64


@dataclass
class Local:
    """The rig's engine, as a worker sees it."""

    rig: Rig
    engine_id: str = "engine-0"

    async def pieces(self, *args: Any) -> AsyncGenerator[Completion, None]:
        async for piece in self.rig.engine.pieces(self.rig.epoch, *args):
            yield piece


class Roots:
    """Every call is a root."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def place(self, request: ChatRequest) -> Any:
        text = self.tokenizer.apply_chat_template(
            request.messages, add_generation_prompt=True, tokenize=False
        )
        ids = np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        return SimpleNamespace(parent=None, keep=0, delta_ids=ids, prompt_ids=ids, reason=None)

    def accept(self, *args: Any) -> None:
        pass


class Text:
    def parse(self, ids: np.ndarray, text: str, request: ChatRequest) -> ParsedReply:
        return ParsedReply(content=text, reasoning=None, tool_calls=())

    def is_plain(self, request: ChatRequest) -> bool:
        return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_tied_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rig(folder: str) -> Iterator[Rig]:
    rig = Rig(folder, max_model_len=WINDOW)
    rig.start()
    try:
        rig.run(rig.refit(load(folder), 0))
        yield rig
    finally:
        rig.close()


@pytest.fixture
def desk(rig: Rig, folder: str, log: Log) -> Iterator[Desk]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    writer = log.writer(linger_s=60)
    yield Desk(
        writer=writer,
        engines=EngineSource([Local(rig)], wait_s=0.2),
        model="tiny",
        tokenizer=tokenizer,
        parser=Text(),
        new_capture=lambda: Roots(tokenizer),
        sampling=Sampling(max_tokens=40),
        window=WINDOW,
        partial_tokens=PARTIAL,
    )
    writer.close()


def assignment(i: int = 0, purpose: str = "train") -> Assignment:
    return Assignment(
        group_id=f"{purpose}-0",
        rollout_id=f"{purpose}-0/{i}",
        attempt=0,
        purpose=purpose,
        prompt={},
    )


def ask(text: str, **more: Any) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": text}], **more)


def rows(log: Log, stream: str) -> list[dict[str, Any]]:
    found = log.sql(f"select * from {stream}").to_arrow_table().to_pylist()
    return sorted(found, key=lambda r: (r["rollout_id"], r.get("segment") or 0))


def same(a: Any, b: Any) -> bool:
    return a.id == b.id and a.choices[0].token_ids.tobytes() == b.choices[0].token_ids.tobytes()


def test_m04_a_retry_gets_the_first_answer(rig: Rig, desk: Desk, log: Log) -> None:
    case = make.load_case("M04")
    assert len(case["given"]["requests"]) == 4

    async def play() -> tuple[list[Any], Session]:
        session = Session(desk, assignment(), 60)
        first = asyncio.create_task(session.chat(ask("hi")))
        await asyncio.sleep(0)
        second = asyncio.create_task(session.chat(ask("hi", retry=1)))
        replies = [await first, await second]
        replies.append(await session.chat(ask("hi", retry=2)))
        session.delivered(replies[0].id)
        replies.append(await session.chat(ask("hi")))
        await session.finish("ok")
        return replies, session

    replies, session = rig.run(play())
    assert case["expected"]["replies_1_to_3_identical"]
    assert same(replies[0], replies[1]) and same(replies[0], replies[2])
    assert case["expected"]["reply_4_sampled_anew"] and not same(replies[0], replies[3])
    segments = rows(log, "segments")
    assert len(segments) == case["expected"]["segments"]
    for reply in (replies[0], replies[3]):
        choice = reply.choices[0]
        row = segments[choice.segment]
        assert row["token_ids"][reply.n_prompt :] == choice.token_ids.tolist()
        assert row["logprobs"][reply.n_prompt :] == choice.logprobs.tolist()
    assert session.counts["retries"] == 2 and session.counts["requests"] == 2
