"""Prompts: files, Hugging Face folders or Python, and the order in which they are asked (I5).

Nothing is stored about a position: what comes next is a pure function of the data, the seed and the
folded log, so a restart asks for the same prompts. What was issued stands in the log itself.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from molt.agents.env import resolve
from molt.config import DataConfig
from molt.schemas.errors import ConfigError
from molt.schemas.text import canonical_json
from molt.store.control import Record

Prompt = dict[str, Any]
MIX_BLOCK = 1024
PASS_MAX = 1_000_000
"""Prompts in one pass of a function; an endless one would fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a sampler may look at."""

    seed: int
    first: int
    """Ordinal of the next prompt."""
    n: int
    """Prompts wanted."""
    rewards: Mapping[int, float | None]
    """Settled groups: ordinal -> mean reward of the baseline; None if dropped without one."""


class Sampler(Protocol):
    """`data.sampler = "package.module:Class"`; made with `Class(data)`, `data` a `Prompts`."""

    def next(self, view: View) -> Sequence[Prompt]:
        """`view.n` prompts for the ordinals from `view.first` on; a pure function of `view`."""
        ...


@dataclass(slots=True)
class Source:
    """One data set: `order(number)` gives the prompts of pass `number`, all equally many."""

    name: str
    order: Callable[[int], list[Prompt]]
    size: int = 0
    _kept: dict[int, list[Prompt]] = field(default_factory=dict)

    def prompt(self, index: int) -> Prompt:
        """The prompt of this source's `index`-th draw."""
        number, place = divmod(index, self.size)
        if number not in self._kept:
            prompts = self.order(number)
            if len(prompts) != self.size:
                raise ConfigError(
                    f"data.train: {self.name} gave {len(prompts)} prompts in pass {number} and "
                    f"{self.size} in pass 0; every pass must give equally many"
                )
            self._kept = {number: prompts}
        return self._kept[number][place]


class Prompts:
    """Training prompts, source after source and pass after pass, and the held-out ones."""

    def __init__(self, config: DataConfig, seed: int) -> None:
        self.seed = seed
        mix = config.train if isinstance(config.train, dict) else {config.train: 1.0}
        self.sources = [open_source("data.train", name, seed) for name in mix]
        self._shares = np.array([float(w) for w in mix.values()])
        if not len(mix) or not (self._shares > 0).all():
            raise ConfigError(f"data.train = {config.train}: every weight must be above 0")
        self._shares /= self._shares.sum()
        self.size = sum(source.size for source in self.sources)
        self._drawn: list[tuple[np.ndarray, np.ndarray]] = []
        self.heldout: list[Prompt] = []
        if config.eval:
            held_out = open_source("data.eval", config.eval, None)
            self.heldout = held_out.order(0)
        self._sampler: Sampler | None = None
        if config.sampler:
            self._sampler = resolve(config.sampler, "data.sampler")(self)

    @property
    def wants_rewards(self) -> bool:
        """True if the next prompts depend on the rewards of settled ones."""
        return self._sampler is not None

    def train(self, ordinal: int) -> Prompt:
        """The prompt of a training ordinal in the default order."""
        source, index = self._place(ordinal)
        return self.sources[source].prompt(index)

    def next(self, view: View) -> Sequence[Prompt]:
        """The prompts of the next ordinals; ConfigError if a user's sampler gives too few."""
        if self._sampler is None:
            return [self.train(k) for k in range(view.first, view.first + view.n)]
        found = list(self._sampler.next(view))
        if len(found) != view.n:
            raise ConfigError(f"data.sampler gave {len(found)} prompts, {view.n} were asked for")
        return [_checked("data.sampler", prompt) for prompt in found]

    def _place(self, ordinal: int) -> tuple[int, int]:
        """(source, how many draws that source had before) of an ordinal."""
        if len(self.sources) == 1:
            return 0, ordinal
        block, place = divmod(ordinal, MIX_BLOCK)
        while len(self._drawn) <= block:
            n = len(self._drawn)
            drawn = np.random.default_rng([self.seed, n]).choice(
                len(self._shares), MIX_BLOCK, p=self._shares
            )
            before = self._drawn[-1][1] if n else np.zeros(len(self._shares), np.int64)
            self._drawn.append((drawn, before + np.bincount(drawn, minlength=len(self._shares))))
        drawn, after = self._drawn[block]
        source = int(drawn[place])
        return source, int(after[source] - np.count_nonzero(drawn[place:] == source))


def open_source(what: str, name: str, seed: int | None) -> Source:
    """A .jsonl or .parquet file, a folder of `datasets.Dataset.save_to_disk`, or "module:name".

    A Python name is an iterable of dicts, or a function `(seed) -> iterable` that orders each pass
    itself (`() -> iterable` for data.eval). Everything else is shuffled anew for every pass; with
    seed None nothing is. ConfigError says what is wrong.
    """
    attribute = name.partition(":")[2]
    if ":" in name:
        found = resolve(name, what, must_call=False)
        if callable(found):

            def ask(number: int) -> list[Prompt]:
                args = () if seed is None else (seed * 1_000_003 + number,)
                return _called(what, found, *args)

            return Source(name=attribute, order=ask, size=len(ask(0)))
        if not isinstance(found, Iterable):
            raise ConfigError(f"{what} = '{name}': {found!r} is neither a function nor an iterable")
        rows: Iterable[tuple[str, Any]] = _numbered(found)
    else:
        rows = _file(what, Path(name).expanduser())
    return _shuffled(f"{what} = '{name}'", attribute or Path(name).stem, rows, seed)


def _shuffled(what: str, name: str, rows: Iterable[tuple[str, Any]], seed: int | None) -> Source:
    """Of rows with their places: "line 7"."""
    prompts = [_checked(f"{what}, {place}", row) for place, row in rows]
    if not prompts:
        raise ConfigError(f"{what} gave no prompts")

    def order(number: int) -> list[Prompt]:
        if seed is None:
            return prompts
        places = np.random.default_rng([seed, number]).permutation(len(prompts))
        return [prompts[i] for i in places]

    return Source(name=name, order=order, size=len(prompts))


def _called(what: str, function: Callable[..., Any], *args: int) -> list[Prompt]:
    try:
        prompts = list(islice(function(*args), PASS_MAX + 1))
    except Exception as error:
        call = f"{function.__name__}({', '.join(['seed'] * len(args))})"
        raise ConfigError(f"{what}: {call} raised {type(error).__name__}: {error}") from error
    if not prompts:
        raise ConfigError(f"{what} gave no prompts")
    if len(prompts) > PASS_MAX:
        raise ConfigError(
            f"{what} gave more than {PASS_MAX} prompts for one pass; end it, it is called again "
            "with another seed for the next pass"
        )
    return [_checked(f"{what}, {place}", prompt) for place, prompt in _numbered(prompts)]


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"row {k}", row) for k, row in enumerate(rows, 1))


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with open(path, encoding="utf-8") as lines:
        for k, line in enumerate(lines, 1):
            try:
                if line.strip():
                    yield f"line {k}", json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {k}: {error}") from None


def _file(what: str, path: Path) -> Iterable[tuple[str, Any]]:
    if not path.exists():
        raise ConfigError(
            f"{what} = '{path}': no such file or folder, and no 'package.module:name'"
        )
    try:
        if path.is_dir():
            import datasets

            found: Any = datasets.load_from_disk(str(path))
            if isinstance(found, dict):
                raise ConfigError(f"{what} = '{path}': choose one of {sorted(found)} below it")
            return _numbered(found)
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            return _numbered(pq.read_table(path).to_pylist())
        return list(_lines(path))
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{what} = '{path}' cannot be read: {error}") from error


def _checked(what: str, prompt: Any) -> Prompt:
    if not isinstance(prompt, dict):
        raise ConfigError(f"{what} must give dicts, got {type(prompt).__name__}")
    try:
        canonical_json(prompt)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: a prompt is not JSON: {error}") from None
    return prompt


def settled_rewards(record: Record) -> dict[int, float | None]:
    """Ordinal -> mean reward of the train groups that a control record settles."""
    groups: dict[str, list[float]] = {}
    if record.kind == "plan":
        for row in record.rows:
            values = groups.setdefault(row["group_id"], [])
            if row["in_baseline"]:
                values.append(row["reward"])
    elif record.kind == "drop":
        for row in record.rows:
            kind, _, value = row["reason"].partition("equal rewards: ")
            groups[row["group_id"]] = [float(value)] if value and not kind else []
    return {
        int(group_id.removeprefix("train-")): sum(v) / len(v) if v else None
        for group_id, v in groups.items()
        if group_id.startswith("train-")
    }
