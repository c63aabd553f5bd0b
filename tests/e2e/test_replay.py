"""Offline runs on a recorded log: retrained without vLLM and Ray, killed, resumed, forked,
replayed, and its logprobs computed again. The model is tiny, the trainer the real one.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import factories as make
import pytest
from recorded import recorded_log
from safetensors.numpy import load_file

from molt import cli
from molt.replay.audit import audit
from molt.replay.replay import history
from molt.store import Log
from molt.train.advantages import advantages

pytestmark = pytest.mark.e2e
HERE = Path(__file__).parent

ALONE = """
import sys

class Absent:
    '''vLLM and Ray are not installed, whoever asks.'''

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "ray"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
try:
    import ray
except ModuleNotFoundError:
    pass
else:
    sys.exit("ray is still there")
"""
MAIN = "\nfrom molt import cli\nsys.exit(cli.main(sys.argv[1:]))\n"
KILL_BEFORE_RECORD = """
import os, signal
from molt import offline_runs

recorded = offline_runs.OfflineRun.record

def record(self, plan, outcome):
    if plan.header["step"] == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    recorded(self, plan, outcome)

offline_runs.OfflineRun.record = record
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return recorded_log(tmp_path_factory.mktemp("source"))


def retrain(source: Log, target: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    arguments = ["retrain", str(source.path), "--dir", str(target), "--passes", "2"]
    arguments += ["--where", "n_sampled = 14 and rollout_id <> 'train-0/0'"]
    code = "".join((ALONE, *lines, MAIN))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=HERE
    )


@pytest.fixture(scope="module")
def undisturbed(source: Log, tmp_path_factory: pytest.TempPathFactory) -> Log:
    target = tmp_path_factory.mktemp("retrained") / "log"
    done = retrain(source, target)
    assert done.returncode == 0, done.stderr[-3000:]
    return Log.open(target)


def digests(log: Log) -> dict[int, str]:
    return {step: row["state_digest"] for step, row in history(log).steps.items()}


def test_retraining_needs_neither_vllm_nor_ray(source: Log, undisturbed: Log) -> None:
    """Six groups, two per step, twice: six steps, all rows in the source, none copied."""
    assert len(set(digests(undisturbed).values())) == 6
    assert make.data_commits(undisturbed.path) == []
    plans = [r for r in undisturbed.records() if r.kind == "plan"]
    assert [p.header["data_pass"] for p in plans] == [0, 0, 0, 1, 1, 1]
    rows = [row for p in plans for row in p.rows]
    assert len(rows) == 2 * 18
    left_out = [r for r in rows if r["decision"] == "baseline_only"]
    assert [r["rollout_id"] for r in left_out] == ["train-0/0"] * 2
    assert all(r["in_baseline"] and r["lag_max"] is None for r in rows)
    epoch = history(undisturbed).epochs[-1]
    assert [s["run_id"] for s in epoch["sources"]] == ["source-0"]
    tokens = {s["n_tokens"] for s in history(undisturbed).steps.values()}
    assert tokens == {6 * 14, 5 * 14}
    found = audit(undisturbed, advantages=advantages).to_json()
    assert found["ok"], found["violations"]
    assert found["checked"]["I1"] == 2 * 18 * 2


def test_killed_and_resumed_it_ends_with_the_same_digest(
    source: Log, undisturbed: Log, tmp_path: Path
) -> None:
    """kill -9 after step 4 was executed and before it was recorded."""
    target = tmp_path / "log"
    first = retrain(source, target, KILL_BEFORE_RECORD)
    assert first.returncode == -9, first.stderr[-3000:]
    assert sorted(digests(Log.open(target))) == [1, 2, 3]
    second = retrain(source, target)
    assert second.returncode == 0, second.stderr[-3000:]
    log = Log.open(target)
    assert digests(log) == digests(undisturbed)
    assert len(history(log).epochs) == 2
    found = audit(log, advantages=advantages).to_json()
    assert found["ok"], found["violations"]


def test_resumed_with_another_choice_it_refuses(
    source: Log, undisturbed: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(undisturbed.path, tmp_path / "again")
    shutil.copytree(source.path, tmp_path / "source")
    arguments = ["retrain", str(tmp_path / "source"), "--dir", str(tmp_path / "again")]
    assert cli.main([*arguments, "--passes", "2", "--where", "reward > 0.1"]) == 2
    assert "the rollouts that --where chooses" in capsys.readouterr().err
    assert cli.main([*arguments, "--where", "nonsense > 1"]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert cli.main([*arguments, "--where", "reward > 99"]) == 2
    assert "no rollout fits" in capsys.readouterr().err


def replay(log: Log, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["replay", str(log.path), *arguments, "--format", "json"]) == 0
    return answer(capsys)


def answer(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON document; in the test's own process libraries may print before it."""
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_replay_reads_only_the_commits_of_its_step(
    undisturbed: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 5 needs the checkpoint of step 4 and its own rows: all other commits are gone."""
    log = undisturbed
    home = (log.path / history(log).epochs[-1]["sources"][0]["path"]).resolve()
    (plan,) = [r for r in log.records() if r.kind == "plan" and r.header["step"] == 5]
    needed = {
        (ref["writer"], ref["seq"])
        for row in plan.rows
        if row["decision"] == "train"
        for b in row["branches"]
        for ref in b["refs"]
    }
    hidden = []
    for path in make.data_commits(home):
        if (path.parents[1].name, int(path.name.split(".")[0])) not in needed:
            hidden.append((path, path.with_name(f".{path.name}.away")))
            path.rename(hidden[-1][1])
    try:
        found = replay(log, capsys, "--step", "5")
    finally:
        for path, away in hidden:
            away.rename(path)
    assert found["ok"] and found["state_digest"]["equal"]
    assert len(hidden) > 12 and found["commits_read"] == len(needed)
    assert 0 < found["bytes_read"] < 40_000


def test_another_algorithm_on_the_same_batch(
    undisturbed: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ("--set", "algo.loss=cispo", "--set", "algo.advantage=rloo")
    found = replay(undisturbed, capsys, "--step", "2", *sets, "--dump", str(tmp_path))
    assert found["ok"] and found["state_digest"]["equal"], "the recorded step itself is unchanged"
    other = found["other"]
    assert other["state_digest"] != found["state_digest"]["recorded"]
    for row in other["rollouts"]:
        # Of three rollouts: leaving oneself out of the mean multiplies by 3 / 2.
        assert row["changed"]["advantage"] == pytest.approx(1.5 * row["recorded"]["advantage"])
        assert row["changed"]["weight"] * row["recorded"]["weight"] > 0
    tokens = duckdb.sql(f"select * from '{tmp_path}/step-2.parquet'").to_arrow_table().to_pylist()
    batch = load_file(tmp_path / "step-2.safetensors")
    trained = [t for t in tokens if t["trained"]]
    assert len(trained) == sum(r["tokens"] for r in other["rollouts"]) == batch["mask"].sum()
    assert [t["token_id"] for t in tokens] == batch["token_ids"].tolist()
    assert all((t["before"] is None) == (not t["trained"]) for t in tokens)
    for t in trained:
        ratio = min(2.718281828 ** (t["before"] - t["logprob"]), 2.0)
        assert t["weight"] == pytest.approx(-ratio * t["advantage"], rel=1e-3, abs=1e-6)
    moved = [t["after"] - t["before"] for t in trained]
    assert max(map(abs, moved)) > 0
    assert any(abs(t["after"] - t["other_after"]) > 1e-4 for t in trained)
    assert cli.main(["replay", str(undisturbed.path), "--step", "2", "--set", "train.lr=1"]) == 2
    assert "algo.*" in capsys.readouterr().err


def test_a_fork_with_the_same_algorithm_is_its_parent_and_with_another_is_not(
    undisturbed: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fork = ["fork", str(undisturbed.path), "--step", "3"]
    assert cli.main([*fork, "--dir", str(tmp_path / "same")]) == 0
    same = digests(Log.open(tmp_path / "same"))
    assert same == {s: d for s, d in digests(undisturbed).items() if s > 3}
    sets = ["--set", "algo.loss=cispo", "--to", "5"]
    assert cli.main([*fork, *sets, "--dir", str(tmp_path / "other")]) == 0
    other = Log.open(tmp_path / "other")
    assert sorted(digests(other)) == [4, 5] and digests(other)[4] != same[4]
    rows = [row for r in other.records() if r.kind == "plan" for row in r.rows]
    assert {ref["log"] for row in rows for b in row["branches"] for ref in b["refs"]} == {2}
    assert audit(other, advantages=advantages).to_json()["ok"]
    assert replay(other, capsys, "--step", "5")["ok"]
    assert (
        cli.main(["fork", str(undisturbed.path), "--step", "6", "--dir", str(tmp_path / "x")]) == 2
    )


def test_logprobs_are_computed_again_by_the_weights_that_sampled_them(
    source: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["audit", str(source.path), "--checkpoint", "0", "--format", "json"]
    status, found = cli.main(command), answer(capsys)
    assert status == 0, found["violations"]
    assert found["recomputed"]["segments"] == 36 and found["recomputed"]["tokens"] == 36 * 7
    assert found["recomputed"]["gap_max"] < 1e-4

    shifted = recorded_log(tmp_path, shift=1)
    assert audit(shifted).to_json()["ok"], "from birth: every digest agrees"
    assert cli.main(["audit", str(shifted.path), "--checkpoint", "0", "--format", "json"]) == 1
    found = answer(capsys)
    assert any("are shifted by +1" in v["why"] for v in found["violations"])
    named = next(v for v in found["violations"] if v["rollout"])
    assert named["invariant"] == "I3" and named["token"] >= 2
    assert abs(named["expected"] - named["found"]) > 1e-3
