"""The command line: help, exit codes, JSON on stdout, foreign packages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import factories as make
import pytest

from molt import cli
from molt.command import COMMANDS
from molt.schemas.errors import ConfigError
from molt.store import Log


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "molt.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
    )


def test_all_commands_are_there() -> None:
    assert {name.split()[0] for name in COMMANDS} == {
        *("train", "report", "replay", "why", "audit", "sql", "tail", "runs", "doctor"),
        *("compact", "show", "fork", "retrain", "diff", "export", "agent"),
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches_by_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*command.split(), "--help"])
    assert f"molt {command} " in capsys.readouterr().out.split("example:")[1]


def test_sql_prints_one_json_document(tiny: Log, capsys: pytest.CaptureFixture[str]) -> None:
    query = "select step, n_tokens, loss from steps order by step"
    assert cli.main(["sql", str(tiny.path), query, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0] == {"step": 1, "n_tokens": 6, "loss": 0.5}
    assert cli.main(["sql", str(tiny.path), query, "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "step,n_tokens,loss"


def test_two_logs_at_once(tiny: Log, log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    query = "select run_id, count(*) as n from policies group by 1 order by 1"
    assert cli.main(["sql", str(tiny.path), str(log.path), query, "--format", "json"]) == 0
    assert [r["run_id"] for r in json.loads(capsys.readouterr().out)] == ["run", "tiny"]


def test_a_wrong_query_and_a_missing_log(tiny: Log, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sql", str(tiny.path), "select nonsense from steps"]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert cli.main(["sql", "no/such/log", "select 1"]) == 1
    assert "no/such/log" in capsys.readouterr().err


def test_doctor_names_the_damaged_commit(tiny: Log, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", str(tiny.path), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    victim = make.data_commits(tiny.path, "rewards")[0]
    make.flip(victim, 100)
    assert cli.main(["doctor", str(tiny.path), "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and victim.name in found["problems"][0]["file"]


def test_tail_tells_the_story_in_order(tiny: Log, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tail", str(tiny.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    kinds = [line.split()[2] for line in lines if line.split()[1].isdigit()]
    assert kinds[:3] == ["epoch", "policy", "plan"]
    assert any("train-1: lag" in line for line in lines)
    assert any("train-0/1 score = 0.0" in line for line in lines)


def test_runs_lists_logs_and_names_damaged_ones(
    tiny: Log, log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    make.flip(log.path / "train" / "0000000001.arrow", 200)
    assert cli.main(["runs", str(tiny.path.parent), "--format", "json"]) == 0
    found = {Path(r["log"]).name: r for r in json.loads(capsys.readouterr().out)}
    assert (found["tiny"]["steps"], found["tiny"]["epochs"]) == (2, 2)
    assert "checksum" in found["log"]["problem"]


def test_show_names_close_matches(tiny: Log, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(tiny.path), "train-0/0"]) == 0
    assert "train-0/0" in capsys.readouterr().out
    assert cli.main(["show", str(tiny.path), "train-0/7"]) == 2
    assert "train-0/" in capsys.readouterr().err


def test_a_log_of_another_format_is_refused(tiny: Log, capsys: pytest.CaptureFixture[str]) -> None:
    meta = json.loads((tiny.path / "format.json").read_text())
    (tiny.path / "format.json").write_text(json.dumps({**meta, "format": "2.0"}))
    assert cli.main(["sql", str(tiny.path), "select 1"]) == 1
    error = capsys.readouterr().err
    assert "2.0" in error and "1.0" in error


def test_a_foreign_package_beside_ours_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "molt").mkdir()
    (tmp_path / "molt" / "__init__.py").touch()
    cli.check_foreign_package()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="another package called 'molt'"):
        cli.check_foreign_package()


def test_a_foreign_package_in_front_of_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "molt").mkdir()
    (tmp_path / "molt" / "__init__.py").touch()
    found = subprocess.run(
        [sys.executable, "-c", "import sys, molt_log; sys.exit(molt_log.main())"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
    )
    assert found.returncode == 2 and str(tmp_path) in found.stderr


def test_a_wrong_key_is_exit_2() -> None:
    demo = Path(__file__).parents[2] / "molt" / "recipes" / "demo.toml"
    found = run("train", str(demo), "--set", "train.learning=1")
    assert found.returncode == 2 and "train.learning" in found.stderr


def test_a_limit_that_stops_a_scan_early_ends_well(log: Log) -> None:
    """Readers that go on in threads of their own would take the process down at its end."""
    with log.writer(linger_s=60) as w:
        w.append("prompts", make.prompt(0, n=200))
        for k in range(200):
            make.append_rollout(w, f"train-0/{k}")
    query = "select group_id from segments limit 1"
    for _ in range(3):
        found = run("sql", str(log.path), query, "--format=csv")
        assert found.returncode == 0, found.stderr
        assert found.stdout.split() == ["group_id", "train-0"]
