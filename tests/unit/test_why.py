"""`molt why`: from prompt and rewards to advantage, plan, lag and share, or the reason for none."""

import json
from pathlib import Path

import factories as make
import forge
import pytest

from molt import cli
from molt.replay.why import to_text, why, why_group
from molt.schemas.errors import ConfigError
from molt.store import Log


def verdict(log: Log, rollout_id: str) -> str:
    return str(why(log, rollout_id)["verdict"])


def test_a_trained_rollout_from_prompt_to_share(honest: Log) -> None:
    page = why(honest, "train-4/1")
    assert page["verdict"] == "trained in step 3: 7 tokens, 25.0% of the step's"
    plan = page["plan"]
    assert (plan["step"], plan["reward"], plan["advantage"]) == (3, 4.0, 1.0)
    assert plan["lags"] == {"1": 7} and plan["trained"] == 7
    # |advantage| x 7 tokens: 1 and 1 in train-4, 2 and 2 in train-5.
    assert plan["share_weight"] == pytest.approx(1 / 6)
    turns = page["attempts"][0]["turns"]
    assert [(t["n_tokens"], t["n_sampled"], t["versions"]) for t in turns] == [
        (7, 4, ["1.1 x 4"]),
        (5, 3, ["1.1 x 3"]),
    ]
    text = to_text(page)
    for part in (
        'prompt    {"x": 4, "y": 1}',
        "turn 1: 2 context + 3 sampled, stop, versions 1.1 x 3, mean log p -",
        "keeps 7 of segment 0",
        "reward score = 2.0 (rev. 0)",
        "group     rewards 2.0, 4.0",
        "plan      step 3, record 8, grpo: reward 4.0, advantage +1, train",
        "lag       7 tokens at lag 1 (limit 1)",
        "share     7 of 28 tokens (25.0%); 16.7% of |advantage| x tokens",
    ):
        assert part in text, text


def test_every_fate_has_its_words(tiny: Log) -> None:
    assert verdict(tiny, "train-1/0") == "never trained: its group was dropped, reason 'lag'"
    assert verdict(tiny, "eval-0/0") == "never trained: its purpose is eval"
    assert "attempt 0 has 1 segment(s) and no outcome" in verdict(tiny, "train-2/0")
    assert "trained in step 2" in verdict(tiny, "train-4/0")
    assert "attempt(s) [0] are superseded" in verdict(tiny, "train-4/0")


def test_failed_conflicting_waiting_and_equal(log: Log) -> None:
    with log.writer(linger_s=60) as w:
        for k in range(5):
            w.append("prompts", make.prompt(k, n=1))
        failed = make.append_rollout(w, "train-0/0")
        w.append("rollouts", make.rollout("train-1/0", status="pending"))
        equal = make.append_rollout(w, "train-2/0")
        make.append_rollout(w, "train-3/0")
    with log.writer(linger_s=60) as w:
        row = make.segment(rollout_id="train-3/0", ids=[1, 2, 3])
        w.append("segments", row)
        w.append("rollouts", make.rollout("train-3/0", digests=[row["digest"]]))
        w.append("rollouts", make.rollout("train-4/0", status="failed", reason="boom"))
    more = {"decision": "baseline_only", "reward": None, "in_baseline": False, "advantage": 0.0}
    rows = [
        make.plan_row("train-0/0", failed, **more),
        make.plan_row("train-2/0", equal, advantage=0.0),
        {**make.plan_row("train-4/0", [], **more), "branches": []},
    ]
    log.control.put("plan", rows, make.plan_header(1))
    assert verdict(log, "train-2/0") == "planned for step 1, which is not recorded yet"
    log.control.put("step", [make.step_row(1, 1, n_tokens=3)])
    assert "step 1 took its group, but it has no reward" in verdict(log, "train-0/0")
    assert "outcome waits for a first reward" in verdict(log, "train-1/0")
    assert "advantage 0: its group's rewards do not differ" in verdict(log, "train-2/0")
    assert "two writers tell it differently" in verdict(log, "train-3/0")
    assert "but it failed (boom)" in verdict(log, "train-4/0")


def test_excluded_rollouts_of_a_planned_group(log: Log) -> None:
    """Contradicted in their status or a reward alone, or dropped."""
    with log.writer(linger_s=60) as w:
        w.append("prompts", make.prompt(0, n=3))
        for i in range(3):
            make.append_rollout(w, f"train-0/{i}")
    with log.writer(linger_s=60) as w:
        ((digest,),) = log.sql("select distinct chain_digest from rollouts").fetchall()
        again = make.rollout("train-0/0", status="truncated", chain_digest=digest)
        w.append("rollouts", again)
        w.append("rewards", make.reward("train-0/1", 0.0))
    more = {"decision": "baseline_only", "reward": None, "in_baseline": False, "advantage": 0.0}
    rows = [{**make.plan_row(f"train-0/{i}", [], **more), "branches": []} for i in range(3)]
    log.control.put("drop", [make.drop_row("train-0", "bad tool", "train-0/2")], {})
    log.control.put("plan", rows, make.plan_header(1))
    for i, cause in enumerate([*["two writers tell it differently"] * 2, "was dropped (bad tool)"]):
        assert cause in verdict(log, f"train-0/{i}")


def test_an_unknown_rollout_names_its_neighbours(tiny: Log) -> None:
    with pytest.raises(ConfigError, match="did you mean train-0/"):
        why(tiny, "train-0/7")
    with pytest.raises(ConfigError, match="train-77 was never issued"):
        why_group(tiny, "train-77")


def test_the_command_prints_a_page_or_json(honest: Log, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["why", str(honest.path), "--prompt", "2"]) == 0
    text = capsys.readouterr().out
    assert text.count("verdict") == 2 and "train-2/1" in text
    assert cli.main(["why", str(honest.path), "train-2/1", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["step"] == 2
    assert cli.main(["why", str(honest.path)]) == 2


def test_the_audit_command_exits_1_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = forge.honest_log(tmp_path / "log")
    assert cli.main(["audit", str(log.path), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["tokens"] == 144 and found["tokens_per_s"] > 0
    forge.rewrite_all(log, "rewards", lambda r: {**r, "value": 7.0})
    assert cli.main(["audit", str(log.path)]) == 1
    text = capsys.readouterr().out
    assert "I1 rollout train-0/1: train-0/1: its reward at step 1" in text
    assert "expected 2.0, found 14.0" in text and "12 violation(s)" in text
