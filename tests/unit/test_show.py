"""`molt show`: what became of a rollout, and its tokens."""

import io

import factories as make
import pytest
from rich.console import Console

from molt.schemas.errors import ConfigError
from molt.show import LOGPROB_WORST, _style, show
from molt.store import Log


class Letters:
    """A tokenizer whose tokens are letters; token 0 decodes to nothing."""

    def decode(self, ids, skip_special_tokens=True) -> str:
        assert not skip_special_tokens, "they are shown, too"
        return "".join(chr(ord("a") + i) for i in ids if i)


def text_of(log: Log, rollout_id: str, tokenizer=None, **console) -> str:
    out = io.StringIO()
    show(log, rollout_id, Console(file=out, width=200, **console), tokenizer)
    return out.getvalue()


def test_a_trained_rollout_shows_its_fate_and_its_tokens(tiny: Log) -> None:
    text = text_of(tiny, "train-0/0")
    for part in (
        "train-0/0 of run tiny",
        "group train-0, 2 rollouts, attempt 0 (new)",
        "ok after 0.50 s",
        "reward score 1",
        "step 1 (train): advantage +0.500, lag <= 0",
        "segment 0: 5 tokens, 3 sampled, stop, engine-0",
        "5 6 [v1.0]7 8 9",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("rollout_id", "part"),
    [
        ("train-1/0", "dropped: lag"),
        ("train-2/0", "unfinished; not planned yet"),
        ("train-4/0", "superseded by another attempt [abandoned"),
        ("train-4/0", "[v2.1]"),
    ],
)
def test_every_other_fate_is_told(tiny: Log, rollout_id: str, part: str) -> None:
    assert part in text_of(tiny, rollout_id)


def test_a_rollout_that_is_only_issued_is_no_error(tiny: Log) -> None:
    with tiny.writer(2) as w:
        w.append("prompts", make.prompt(9, n=2))
    assert "group train-9" in text_of(tiny, "train-9/1")


def test_an_unknown_rollout_names_close_ones(tiny: Log) -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*train-0/1"):
        text_of(tiny, "train-0/7")
    with pytest.raises(ConfigError, match="the log has"):
        text_of(tiny, "zzz")


def test_a_version_change_and_untrained_tokens_are_marked(log: Log, w) -> None:
    log.control.put("policy", [make.policy(1, 1)])
    w.append(
        "segments",
        make.segment(
            ids=[1, 2, 3, 4, 0],
            sampled=[0, 1, 1, 1, 1],
            train=[0, 1, 1, 0, 1],
            logprobs=[None, 0.0, -1.0, -9.0, -0.5],
            runs=[(1, 0, 2), (1, 1, 2)],
        ),
    )
    w.flush()
    assert "b[v1.0]cd[v1.1]e<0>" in text_of(log, "train-0/0", Letters())
    styled = text_of(log, "train-0/0", Letters(), force_terminal=True, color_system="truecolor")
    assert "\x1b[9;38;2;255;55;55me" in styled, "struck through and red"
    assert "\x1b[38;2;55;255;55mc" in styled, "green"


def test_colours_run_from_green_to_red() -> None:
    assert _style(0.0) == _style(1e-5) == "rgb(55,255,55)"
    assert _style(LOGPROB_WORST) == _style(-99.0) == "rgb(255,55,55)"
    assert _style(LOGPROB_WORST / 2) == "rgb(255,255,55)"


def test_prompts_with_markup_or_broken_text_are_printed_as_they_are(log: Log, w) -> None:
    w.append("prompts", make.prompt(0, prompt='"[bold]x[/nope] \ud800"'))
    w.append("segments", make.segment())
    w.flush()
    assert "[bold]x[/nope]" in text_of(log, "train-0/0")
