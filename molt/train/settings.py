"""What a trainer is told and what it answers; imports no torch, so that drivers can read it.

`[train]` and `[algo]` of the configuration are the first two classes, as they stand.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from molt.config import Config

ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""For the actor's process: idle OpenMP threads must not spin while the engine computes."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The FSDP2 actor."""

    dtype: str = "float32"
    """Compute dtype, the engine's: float32, or bfloat16 over float32 masters."""
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Limit of the global gradient norm."""
    microbatch_tokens: int = 1024
    """Packed tokens per forward."""
    share_prefixes: bool = True
    """Compute common prefixes once; off for models without 4-D attention masks."""
    world_size: int = 1
    tp_size: int = 1
    ep_size: int = 1
    cp_size: int = 1
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    reshard_after_forward: bool = False
    """Free gathered layers between forward and backward: less memory, more gathers."""
    threads: int = 2
    sketch: bool = True
    """Record norms and projections of every tensor, so that redo can compare other settings."""
    routing: str = "off"
    """For models with experts: "replay" trains with the experts that the engine took, "freeze"
    leaves the routers out of training and refit, "off" records nothing."""
    routing_sample_every: int = 8
    """Steps between comparisons of the logprob gap with and without replay."""


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """How rewards become an update."""

    advantage: str = "grpo"
    std_normalize: bool = False
    drop_equal: bool = False
    """Drop groups whose rewards are all equal instead of training them with advantage 0."""
    loss: str = "grpo"
    """A name in algo.LOSSES."""
    is_cap: float | None = 2.0
    """Upper bound of the importance weight between trainer and engine (truncated IS)."""
    clip_low: float | None = None
    clip_high: float | None = None
    """PPO's bounds of the ratio: from 1 - clip_low to 1 + clip_high; None switches one off."""
    kl_coef: float = 0.0
    """Towards the weights of `model`; keeps a second copy of them in memory."""
    kl_target: float | None = None
    """Adapt `kl_coef` so that the mean k3 of a step comes here; None leaves it fixed."""
    kl_horizon: float = 10_000.0
    """Rollouts over which the adaptive coefficient follows; Ziegler et al. 2019, section 2.2."""
    max_lag: int = 1
    """Policy versions between sampling and training; 0 = strictly on-policy."""
    lag: str = "wait"
    """What happens above max_lag: wait | keep | mask | drop (molt.replay.lag)."""
    refit_every: int = 1
    """Steps between two refits; needs max_lag >= refit_every - 1."""
    update_passes: int = 1
    mini_batches: int = 1
    """Optimizer updates per step = update_passes x mini_batches."""


@dataclass(frozen=True, kw_only=True)
class TrainerSettings(TrainConfig, AlgoConfig):
    """Everything that decides what a step computes; equal settings give equal bits."""

    model: str
    """Folder or hub id."""
    seed: int
    routing_mismatch: float = 0.3
    routing_coverage: float = 0.9
    """Of `[limits]`: what is refused of recorded experts before an update is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What goes into the `step` record; the same on every rank."""

    updates: int
    """0 when the plan had no trained token"""
    loss: float
    """mean over the trained tokens of all ranks and updates"""
    grad_norm: float
    """before clipping, of the last update"""
    n_tokens: int
    """trained tokens of all ranks, one pass"""
    state_digest: str
    """16 hex digits"""
    sketch: dict[str, list[float]] | None
    """Per parameter its L2 norm and 8 projections; None where it is switched off."""
    metrics: dict[str, Any]
    seconds: float


def trainer_settings(config: "Config", model_folder: str) -> TrainerSettings:
    """What a run's configuration means for its trainer; the same online, in redo and in replay."""
    chosen = asdict(config.train) | asdict(config.algo)
    return TrainerSettings(
        **chosen,
        model=model_folder,
        seed=config.run.seed,
        routing_mismatch=config.limits.routing_mismatch,
        routing_coverage=config.limits.routing_coverage,
    )
