"""Where prompts come from and in which order: always a pure function of data, seed and log."""

import json
from pathlib import Path
from typing import Any

import factories as make
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from molt.config import DataConfig
from molt.data import Prompts, View, settled_rewards
from molt.schemas.errors import ConfigError
from molt.store import Log

ROWS = [{"q": f"question {k}", "a": k} for k in range(40)]
ITEMS = ROWS


def jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return str(path)


def parquet(path: Path) -> str:
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return str(path)


def saved(path: Path) -> str:
    datasets = pytest.importorskip("datasets", reason="comes with nemo-automodel")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    return str(path)


def one_pass(prompts: Prompts, number: int = 0) -> list[dict[str, Any]]:
    return [prompts.train(number * prompts.size + k) for k in range(prompts.size)]


def test_every_kind_of_source_gives_the_same_prompts_in_the_same_order(tmp_path: Path) -> None:
    names = [
        jsonl(tmp_path / "a.jsonl"),
        parquet(tmp_path / "a.parquet"),
        saved(tmp_path / "folder"),
        "test_data:ITEMS",
    ]
    passes = [one_pass(Prompts(DataConfig(train=name, eval=name), 3)) for name in names]
    assert all(found == passes[0] for found in passes)
    assert passes[0] != ROWS and sorted(passes[0], key=lambda r: r["a"]) == ROWS


def test_a_pass_shuffles_anew_and_a_restart_repeats_it(tmp_path: Path) -> None:
    data = DataConfig(train=jsonl(tmp_path / "a.jsonl"), eval=str(tmp_path / "a.jsonl"))
    one, again = Prompts(data, 3), Prompts(data, 3)
    second = one_pass(again, 1)
    assert one_pass(one, 1) == second != one_pass(one, 0)
    assert one_pass(Prompts(data, 4)) != one_pass(one)
    assert one.heldout == ROWS, "held-out prompts keep their order"


def test_mixture_weights_are_kept_and_every_source_is_used_up_in_turn(tmp_path: Path) -> None:
    left = jsonl(tmp_path / "left.jsonl", [{"left": k} for k in range(7)])
    right = jsonl(tmp_path / "right.jsonl", [{"right": k} for k in range(7)])
    data = DataConfig(train={left: 3.0, right: 1.0})
    found = [Prompts(data, 0).train(k) for k in range(4000)]
    n_left = sum("left" in prompt for prompt in found)
    assert 0.72 < n_left / 4000 < 0.78
    firsts = [prompt["left"] for prompt in found if "left" in prompt][:7]
    assert sorted(firsts) == list(range(7)), "a whole pass before anything comes twice"
    late = Prompts(data, 0)
    assert [late.train(k) for k in (3999, 1025, 1023, 0)] == [
        found[k] for k in (3999, 1025, 1023, 0)
    ]


class Hardest:
    """Asks for what was solved least; a prompt that was not asked yet counts as 0.5."""

    def __init__(self, data: Prompts) -> None:
        self.rows = ROWS[:4]

    def next(self, view: View) -> list[dict[str, Any]]:
        rate = {k: 0.5 for k in range(4)}
        rate |= {k % 4: r for k, r in view.rewards.items() if r is not None}
        return [self.rows[min(rate, key=lambda k: (rate[k], k))]] * view.n


def test_a_sampler_sees_the_settled_groups_and_nothing_else(log: Log) -> None:
    prompts = Prompts(DataConfig(train="test_data:ITEMS", sampler="test_data:Hardest"), 0)
    assert prompts.wants_rewards
    rows = [
        make.plan_row("train-0/0", [], reward=1.0),
        make.plan_row("train-0/1", [], reward=0.5),
        make.plan_row("train-1/0", [], reward=0.25),
        make.plan_row("train-1/1", [], reward=9.0, in_baseline=False),
    ]
    log.control.put("plan", rows, make.plan_header(1))
    drops = [make.drop_row("train-2", "equal rewards: 0.125"), make.drop_row("train-3", "lag")]
    log.control.put("drop", [*drops, make.drop_row("eval-0", "x")], {})
    rewards: dict[int, float | None] = {}
    for record in log.records():
        rewards |= settled_rewards(record)
    assert rewards == {0: 0.75, 1: 0.25, 2: 0.125, 3: None}
    view = View(seed=0, first=4, n=2, rewards=rewards)
    assert prompts.next(view) == [ROWS[2]] * 2
    with pytest.raises(ConfigError, match="gave 0 prompts, 3 were asked for"):
        Prompts(DataConfig(train="test_data:ITEMS", sampler="test_data:Lazy"), 0).next(
            View(seed=0, first=0, n=3, rewards={})
        )


class Lazy:
    def __init__(self, data: Prompts) -> None: ...

    def next(self, view: View) -> list[dict[str, Any]]:
        return []


NOT_PROMPTS = [1, 2]
NUMBER = 7


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("missing.jsonl", "no such file"),
        ("test_data:NOT_PROMPTS", "must give dicts, got int"),
        ("test_data:NUMBER", "neither a function nor an iterable"),
        ("test_data:NOWHERE", "has no 'NOWHERE'"),
        ({}, "every weight"),
        ({"test_data:ITEMS": 0.0}, "every weight"),
    ],
)
def test_mistakes_are_named(train: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Prompts(DataConfig(train=train), 0)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    for name in ("bad.jsonl", "bad.parquet"):
        (tmp_path / name).write_text('{"q": 1}\n{"q": \n')
        with pytest.raises(ConfigError, match=rf"{name}' cannot be read"):
            Prompts(DataConfig(train=str(tmp_path / name)), 0)
    with pytest.raises(ConfigError, match=r"line 2: Expecting value"):
        Prompts(DataConfig(train=str(tmp_path / "bad.jsonl")), 0)


def not_a_number() -> Any:
    return [{"q": 1.0}, {"q": [float("nan")]}]


def test_a_prompt_that_is_no_json_is_refused_at_once_with_its_place(tmp_path: Path) -> None:
    """The log holds no NaN and no infinity; a file's own line counts, blank ones too."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": 1}\n\n{"q": -Infinity}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl', line 3: a prompt is not JSON"):
        Prompts(DataConfig(train=str(path)), 0)
    pq.write_table(pa.table({"q": [1.0, float("nan")]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet', row 2: a prompt is not JSON"):
        Prompts(DataConfig(train=str(tmp_path / "a.parquet")), 0)
    with pytest.raises(ConfigError, match="data.eval, row 2: a prompt is not JSON"):
        Prompts(DataConfig(train="test_data:ITEMS", eval="test_data:not_a_number"), 0)


def shrinking(seed: int) -> Any:
    return ROWS[: 5 if seed == 0 else 3]


def growing(seed: int) -> Any:
    return ROWS[: 3 if seed == 0 else 5]


@pytest.mark.parametrize(("name", "first", "second"), [("shrinking", 5, 3), ("growing", 3, 5)])
def test_passes_of_other_lengths_are_refused(name: str, first: int, second: int) -> None:
    prompts = Prompts(DataConfig(train=f"test_data:{name}"), 0)
    assert len([prompts.train(k) for k in range(first)]) == first
    message = rf"{name} gave {second} prompts in pass 1 and {first} in pass 0"
    with pytest.raises(ConfigError, match=message):
        prompts.train(first)


def endless(seed: int) -> Any:
    while True:
        yield {"seed": seed}


def test_an_endless_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molt.data.PASS_MAX", 100)
    with pytest.raises(ConfigError, match="more than 100 prompts for one pass"):
        Prompts(DataConfig(train="test_data:endless"), 0)
