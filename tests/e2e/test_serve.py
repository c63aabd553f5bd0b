"""Training with agents that are programs elsewhere and know HTTP alone."""

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from launch import Train, molt, sql
from tiny import tiny_tied_llama

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
TOKEN = "desk-token"


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def play(client: httpx.Client, got: dict[str, Any]) -> None:
    """One question, by hand: no SDK, no molt."""
    own, path = bearer(got["api_key"]), f"/rollouts/{got['rollout_id']}"
    asked = {"model": "x", "messages": [{"role": "user", "content": f"say {got['prompt']['k']}"}]}
    reply = client.post(f"{got['base_url']}/chat/completions", json=asked, headers=own).json()
    text = reply["choices"][0]["message"]["content"] or ""
    value = sum(c.isalpha() for c in text) / max(len(text), 1)
    client.post(f"{path}/rewards", json={"name": "letters", "value": value}, headers=own)
    client.post(f"{path}/finish", json={"metrics": {"by": "curl"}}, headers=own)


def test_a_run_whose_rollouts_are_played_over_http(tmp_path: Path) -> None:
    with socket.socket() as probe:  # the desk's port is told to agents elsewhere before it opens
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = Train(
        tmp_path,
        tiny_tied_llama(tmp_path / "model"),
        "agent.env=molt.agents.serve:External",
        "run.steps=2",
        'data.eval=""',
        MOLT_DESK_TOKEN=TOKEN,
        MOLT_DESK_PORT=str(port),
    )
    try:
        run.wait_for("policy", 1)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=90) as client:
            while run.process.poll() is None:
                try:
                    found = client.post("/rollouts", json={"wait_s": 5}, headers=bearer(TOKEN))
                except httpx.TransportError:  # not open yet, or closed for good
                    continue
                if found.status_code == 200:
                    play(client, found.json())
        assert run.wait() == 0, run.text()[-3000:]
    finally:
        run.end()
    assert sql(run.log, "select count(*) as n from steps") == [{"n": 2}]
    played = "select count(*) as n from rollouts where metrics like '%curl%'"
    assert sql(run.log, f"{played} and status in ('ok', 'truncated')")[0]["n"] >= 12
    assert sql(run.log, "select count(*) as n from rewards where name = 'letters'")[0]["n"] >= 12
    assert molt("doctor", str(run.log)).returncode == 0
