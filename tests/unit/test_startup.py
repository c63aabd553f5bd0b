"""The first act of a driver: what it refuses before the epoch record, and what it says."""

import io
from pathlib import Path

import factories as make
import pytest
from rich.console import Console
from simulation import config

from molt import startup
from molt.recovery import Start
from molt.schemas.errors import ConfigError
from molt.screen import Screen
from molt.store import Log

FILES = ("config.json", "tokenizer_config.json", "chat_template.jinja")


class Starts:
    """Starts of one run, with a model whose files may change in their place."""

    def __init__(self, path: Path) -> None:
        self.model, self.path = path / "model", path / "log"
        self.model.mkdir()
        for name in FILES:
            (self.model / name).write_text("first")

    def open(self, *overrides: str, accept: bool = False, drop: tuple[str, ...] = ()) -> str:
        """What is said at a start."""
        text = io.StringIO()
        conf = config(f"run.dir={self.path}", f"model={self.model}", *overrides)
        screen = Screen(Console(file=text, width=300))
        start = Start(accept_changes=accept, drop=drop)
        startup.open_log(conf, str(self.model), start, screen)
        return text.getvalue()

    @property
    def log(self) -> Log:
        return Log.open(self.path)

    @property
    def n_epochs(self) -> int:
        return sum(r.kind == "epoch" for r in self.log.records())


@pytest.fixture
def starts(tmp_path: Path) -> Starts:
    return Starts(tmp_path)


def begin(starts: Starts, what: str) -> None:
    log = starts.log
    log.control.epoch, log.control.next_n = 1, 1
    if what == "policy":
        log.control.put("policy", [make.policy(1, 0)])
    elif what == "plan":
        log.control.put("plan", [], make.plan_header(1))
    else:
        writer = log.writer(1)
        writer.append("prompts", make.prompt(0, n=1))
        writer.close()


@pytest.mark.parametrize("what", ["policy", "plan", "prompts"])
def test_settings_and_model_are_compared_as_soon_as_anything_depends_on_them(
    starts: Starts, what: str
) -> None:
    starts.open()
    assert "changed" not in starts.open("sampling.temperature=0.7"), "nothing was made with it"
    starts.path.rename(starts.path.with_name("before"))
    starts.open()
    begin(starts, what)
    for override in ("sampling.temperature=0.5", "reward.weights={score=-1.0}"):
        with pytest.raises(ConfigError, match=f"{override.split('=')[0]}.*--accept-changes"):
            starts.open(override)
    assert starts.n_epochs == 1, "refused before the epoch record"
    assert "run.steps = 25 -> 30" in starts.open("run.steps=30")
    said = starts.open("sampling.temperature=0.5", accept=True)
    assert "configuration changed: sampling.temperature = 1.0 -> 0.5" in said


@pytest.mark.parametrize(
    ("file", "part"), [*zip(FILES, ("model", "tokenizer", "template"), strict=True)]
)
def test_other_files_of_model_tokenizer_or_template_are_refused(
    starts: Starts, file: str, part: str
) -> None:
    starts.open()
    begin(starts, "policy")
    (starts.model / file).write_text("second")
    with pytest.raises(ConfigError, match=f"other settings: files of the {part}. Go on with"):
        starts.open()
    assert f"configuration changed: files of the {part} = " in starts.open(accept=True)
    assert "changed" not in starts.open()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train-3", "expected a rollout"),
        ("train-x/0", "expected a rollout"),
        ("trian-3/0", "expected a rollout"),
        ("judge-0/0", "expected a rollout"),
        ("", "expected a rollout"),
        ("train-4/0", "has no group train-4"),
        ("train-3/2", "train-3 has the rollouts 0 to 1"),
        ("1-host-1-abc/0", "no such commit"),
    ],
)
def test_a_wrong_name_of_a_drop_is_refused_before_anything_is_written(
    starts: Starts, name: str, message: str
) -> None:
    starts.open()
    writer = starts.log.writer(1)
    writer.append("prompts", make.prompt(3, n=2))
    writer.close()
    with pytest.raises(ConfigError, match=message):
        starts.open(drop=("train-3/1", name))
    assert starts.n_epochs == 1
    starts.open(drop=("train-3/1", f"{writer.name}/0"))
    assert starts.n_epochs == 2
