"""What a trainer is told and what it answers; imports no torch, so that drivers can read it."""

from dataclasses import dataclass, fields
from typing import Any

from molt.config import Config

ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""For the actor's process: idle OpenMP threads must not spin while the engine computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Everything that decides what a step computes; equal settings give equal bits."""

    model: str
    """folder or hub id"""
    dtype: str = "float32"
    """compute dtype, the engine's: float32, or bfloat16 over float32 masters"""
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """limit of the global gradient norm"""
    microbatch_tokens: int = 1024
    """packed tokens per forward"""
    share_prefixes: bool = True
    """compute common prefixes once; off for models without 4-D attention masks"""
    algorithm: str = "grpo"
    """a name in algo.LOSSES"""
    is_cap: float | None = 2.0
    clip_low: float | None = None
    clip_high: float | None = None
    kl_coef: float = 0.0
    """towards the weights of `model`; keeps a second copy of them in memory"""
    update_passes: int = 1
    mini_batches: int = 1
    """optimizer updates per step = update_passes x mini_batches"""
    seed: int
    threads: int = 2
    tp_size: int = 1
    ep_size: int = 1
    cp_size: int = 1
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    reshard_after_forward: bool = False
    routing: str = "off"
    """"off"; "replay": train with the engine's experts; "freeze": leave the routers as they are"""
    routing_mismatch: float = 0.3
    """limit of the share of recorded experts, per layer and per sequence, that the trainer would
    not choose at the start of a step"""
    routing_coverage: float = 0.9
    """limit of the share of a sequence's tokens whose experts must be known"""
    routing_sample_every: int = 8
    """every so many steps some tokens are also computed without replay, for comparison"""


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
    metrics: dict[str, Any]
    seconds: float


def trainer_settings(config: Config, model_folder: str) -> TrainerSettings:
    """What a run's configuration means for its trainer; the same online, in redo and in replay."""
    names = {f.name for f in fields(TrainerSettings)}
    train = {f.name: getattr(config.train, f.name) for f in fields(config.train)}
    algo = {f.name: getattr(config.algo, f.name) for f in fields(config.algo)}
    chosen = {name: value for name, value in (train | algo).items() if name in names}
    return TrainerSettings(
        **chosen,
        model=model_folder,
        algorithm=config.algo.loss,
        seed=config.run.seed,
        routing_mismatch=config.limits.routing_mismatch,
        routing_coverage=config.limits.routing_coverage,
    )
