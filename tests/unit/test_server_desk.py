"""Rollouts that programs open, reward and finish over HTTP; the worker's side is `External`."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import factories as make
import httpx
import pytest
from engines import TOKENIZER, Says

from molt import cli
from molt.agents import serve as desk_module
from molt.agents.chat import Context, Result
from molt.agents.serve import External, Reception, routes
from molt.agents.server import listen
from molt.cli_train import serve_config
from molt.config import load
from molt.rollout.types import Assignment
from molt.rollout.worker import RolloutWorker
from molt.schemas.records import Sampling
from molt.store import Log

TOKEN = "desk-secret"


def context(i: int, **more: Any) -> Context:
    values = {
        "base_url": "http://127.0.0.1:1/v1",
        "api_key": f"key-{i}",
        "model": "policy",
        "prompt": {"q": i},
        "label": None,
        "sampling": Sampling(),
        "deadline_s": 60.0,
        "rollout_id": f"train-{i}/0",
        "attempt": 0,
        "purpose": "train",
    }
    return Context(**{**values, **more})


@contextlib.asynccontextmanager
async def desk(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """A desk in this loop, which `External` finds, and a program's client."""
    reception = Reception()
    monkeypatch.setattr(desk_module, "_reception", lambda: reception)
    running = listen(routes(reception, TOKEN), "127.0.0.1", 0, public=False, end=lambda: None)
    url = f"http://127.0.0.1:{running.port}"
    try:
        async with httpx.AsyncClient(base_url=url, headers=bearer(TOKEN)) as client:
            yield client
    finally:
        await running.close()


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_a_program_plays_a_rollout_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> Result:
        async with desk(monkeypatch) as client:
            waiting = asyncio.create_task(client.post("/rollouts", json={"wait_s": 30}))
            agent = asyncio.create_task(External().run(context(3)))
            got = (await waiting).json()
            assert (got["rollout_id"], got["prompt"], got["api_key"]) == (
                "train-3/0",
                {"q": 3},
                "key-3",
            )
            assert got["sampling"]["temperature"] == 1.0 and got["base_url"].endswith("/v1")
            path, own = f"/rollouts/{got['rollout_id']}", bearer(got["api_key"])
            for reward in (
                {"name": "style", "value": 0.5},
                {"name": "style", "value": None},
                {"name": "turn", "value": 1, "reply": "chatcmpl-1"},
                {"name": "turn", "value": 2, "reply": 0},
            ):
                assert (await client.post(f"{path}/rewards", json=reward, headers=own)).is_success
            end = {"status": "truncated", "reason": "tired", "rewards": {"right": 1}}
            assert (await client.post(f"{path}/finish", json=end, headers=own)).is_success
            again = await client.post(f"{path}/finish", json=end, headers=own)
            assert again.status_code == 404
            return await agent

    assert asyncio.run(main()) == Result(
        rewards={"style": None, "right": 1.0},
        turns={"chatcmpl-1": {"turn": 1.0}, 0: {"turn": 2.0}},
        status="truncated",
        reason="tired",
    )


def test_rollouts_are_handed_out_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[Any]:
        async with desk(monkeypatch) as client:
            agents = [asyncio.create_task(External().run(context(i))) for i in range(3)]
            while sum(not a.done() for a in agents) and len(agents) < 3:
                await asyncio.sleep(0)
            asked = [await client.post("/rollouts", json={"wait_s": 5}) for _ in range(3)]
            none = await client.post("/rollouts")
            for agent in agents:
                agent.cancel()
            await asyncio.gather(*agents, return_exceptions=True)
            return [*(r.json()["rollout_id"] for r in asked), none.status_code]

    assert sorted(map(str, asyncio.run(main()))) == ["204", "train-0/0", "train-1/0", "train-2/0"]


def test_after_the_deadline_the_program_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker cancels the agent; an offer that nobody took is not handed out any more."""

    async def main() -> None:
        async with desk(monkeypatch) as client:
            agent = asyncio.create_task(External().run(context(0)))
            got = (await client.post("/rollouts", json={"wait_s": 5})).json()
            untaken = asyncio.create_task(External().run(context(1)))
            await asyncio.wait({untaken}, timeout=0.05)
            for task in (agent, untaken):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            late = await client.post("/rollouts/train-0/0/finish", headers=bearer(got["api_key"]))
            assert late.status_code == 404 and "deadline" in late.json()["error"]["message"]
            assert (await client.post("/rollouts")).status_code == 204

    asyncio.run(main())


def test_tokens_open_their_own_doors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with desk(monkeypatch) as client:
            agents = [asyncio.create_task(External().run(context(i))) for i in range(2)]
            for key in ("x", "wrong", "key-0"):
                assert (await client.post("/rollouts", headers=bearer(key))).status_code == 401
            for _ in agents:
                assert (await client.post("/rollouts", json={"wait_s": 5})).status_code == 200
            for key in (TOKEN, "key-1", "wrong"):
                for action in ("rewards", "finish"):
                    path = f"/rollouts/train-0/0/{action}"
                    assert (await client.post(path, headers=bearer(key))).status_code == 401
            assert not any(agent.done() for agent in agents)
            for agent in agents:
                agent.cancel()
            await asyncio.gather(*agents, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("action", "body", "why"),
    [
        ("finish", {"status": "great"}, "'great' is none of ok, truncated"),
        ("finish", {"rewards": {"right": "yes"}}, "'value' is 'yes', expected int or float"),
        ("finish", [1], "expected a JSON object"),
        ("rewards", {"value": 1}, "needs 'name' and 'value'"),
        ("rewards", {"name": "r"}, "needs 'name' and 'value'"),
        ("rewards", {"name": "r", "value": True}, "'value' is True"),
    ],
)
def test_nonsense_is_refused_and_the_rollout_goes_on(
    monkeypatch: pytest.MonkeyPatch, action: str, body: Any, why: str
) -> None:
    async def main() -> None:
        async with desk(monkeypatch) as client:
            agent = asyncio.create_task(External().run(context(0)))
            await client.post("/rollouts", json={"wait_s": 5})
            own = bearer("key-0")
            found = await client.post(f"/rollouts/train-0/0/{action}", json=body, headers=own)
            assert found.status_code == 400 and why in found.json()["error"]["message"]
            assert (await client.post("/rollouts/train-0/0/finish", headers=own)).is_success
            assert (await agent).status == "ok"

    asyncio.run(main())


def test_the_desk_of_a_process_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its own thread: agents of many rollouts find the same one."""
    monkeypatch.setattr(desk_module, "_running", None)
    monkeypatch.setenv("MOLT_DESK_TOKEN", TOKEN)
    monkeypatch.setenv("MOLT_DESK_PORT", "0")

    async def main() -> None:
        first, second = await asyncio.gather(
            *(asyncio.to_thread(desk_module._reception) for _ in range(2))
        )
        assert first is second and first.loop is not asyncio.get_running_loop()
        agent = asyncio.create_task(External().run(context(5)))
        future = asyncio.run_coroutine_threadsafe(first.open(5), first.loop)
        offer = await asyncio.wrap_future(future)
        assert offer is not None and offer.context.rollout_id == "train-5/0"
        offer.result.set_result(Result(metrics={"n": 1}))
        assert (await agent).metrics == {"n": 1}

    asyncio.run(main())


def test_without_a_token_the_desk_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "_running", None)
    monkeypatch.delenv("MOLT_DESK_TOKEN", raising=False)
    with pytest.raises(ValueError, match="molt agent serve"):
        desk_module._reception()


def test_a_worker_whose_agents_are_programs_elsewhere(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker, desk, server, session and log; a program that knows HTTP alone, and one that dies."""
    TOKENIZER.save_pretrained(tmp_path)
    file = Path(cli.__file__).parent / "recipes" / "demo.toml"
    overrides = ["agent.env=molt.agents.serve:External", "agent.tool_parser=none"]
    config = load(file, [*overrides, "agent.deadline_s=3", "log.linger_s=0.01"])

    async def main() -> None:
        async with desk(monkeypatch) as client:
            worker = RolloutWorker(str(log.path), 1, config, str(tmp_path), [Says("A", "BB")])
            work = [
                Assignment(
                    group_id="train-0",
                    rollout_id=f"train-0/{i}",
                    attempt=0,
                    purpose="train",
                    prompt={"q": i},
                )
                for i in range(2)
            ]
            playing = asyncio.create_task(worker.play(work))
            got = [(await client.post("/rollouts", json={"wait_s": 30})).json() for _ in range(2)]
            for one in got:
                own = bearer(one["api_key"])
                asked = {"model": "x", "messages": [{"role": "user", "content": "say"}]}
                url = f"{one['base_url']}/chat/completions"
                reply = (await client.post(url, json=asked, headers=own)).json()
                path, text = f"/rollouts/{one['rollout_id']}", reply["choices"][0]["message"]
                body = {"name": "n", "value": len(text["content"]), "reply": reply["id"]}
                assert (await client.post(f"{path}/rewards", json=body, headers=own)).is_success
            body = {"rewards": {"end": 1}}
            assert (await client.post(f"{path}/finish", json=body, headers=own)).is_success
            await playing
            await worker.close()

    asyncio.run(main())
    outcomes = log.sql("select status, reason from rollouts order by 1").fetchall()
    assert outcomes == [("ok", None), ("truncated", "deadline: 3 s")]
    rewards = log.sql("select name, segment, value from rewards order by 1, 3").fetchall()
    assert [r for r in rewards if r[0] == "end"] == [("end", None, 1.0)]
    assert ("n", 0, rewards[-1][2]) == rewards[-1]


def test_fields_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["agent", "fields", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    fates = {(r["wire"], r["field"]): r["fate"] for r in rows}
    assert fates["openai", "temperature"] == "overridden by the run"
    assert fates["anthropic", "metadata"] == "accepted without effect"
    assert fates["openai", "logit_bias"] == "refused"


def test_serve_takes_a_file_or_a_log(
    tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its agents are elsewhere whatever the file says, and the worker is told where to listen."""
    for name in ("TOKEN", "HOST", "PORT", "PUBLIC"):
        monkeypatch.setenv(f"MOLT_DESK_{name}", "x")  # so that it is put back afterwards
    monkeypatch.delenv("MOLT_DESK_TOKEN")
    file = Path(cli.__file__).parent / "recipes" / "demo.toml"
    arguments = ["agent", "serve", str(file), "--port", "9", "--set", "run.steps=3"]
    from_file = serve_config(cli.parser().parse_args(arguments))
    assert from_file.agent.env == "molt.agents.serve:External" and from_file.run.steps == 3
    said = capsys.readouterr().err
    assert "http://127.0.0.1:9/rollouts" in said and os.environ["MOLT_DESK_TOKEN"] in said
    assert (os.environ["MOLT_DESK_PORT"], os.environ["MOLT_DESK_PUBLIC"]) == ("9", "0")
    make.open_epoch(log, config=json.dumps(asdict(from_file)))
    arguments = ["agent", "serve", str(log.path), "--set", "run.steps=5"]
    from_log = serve_config(cli.parser().parse_args(arguments))
    assert from_log.run.dir == str(log.path) and from_log.run.steps == 5
    assert replace(from_log, run=from_file.run) == from_file
