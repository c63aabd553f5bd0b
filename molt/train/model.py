"""The sharded model: build, run one packed row, export under checkpoint names.

NeMo AutoModel loads and parallelizes; at one rank, where it wraps nothing, torch's `fully_shard`
does, so parameters are DTensors and precision rules hold at every world size. Invariant kept here:
parameters are float32 masters; compute runs in the engine's dtype (I3).

Suffixes: T tokens of a row, R logit rows, V vocabulary, N targets.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from molt.cpu import automodel_on_cpu
from molt.schemas.errors import ConfigError, TrainerError
from molt.train.packing import Row
from molt.train.routing import gates
from molt.train.settings import TrainerSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WRAPPER = "_checkpoint_wrapped_module."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedModel:
    """A parallelized model with its meshes."""

    module: nn.Module
    device: torch.device
    dp_size: int
    """ranks that hold different data; gradients are averaged over them"""
    mesh: DeviceMesh | None
    moe_mesh: DeviceMesh | None
    settings: TrainerSettings

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained ones by clean name, tied ones once."""
        named = self.module.named_parameters()
        return {name.replace(_WRAPPER, ""): p for name, p in named if p.requires_grad}

    def begin_backward(self, *, is_last: bool) -> None:
        """Reduce gradients and free gathered parameters only on the last backward of an update."""
        for module in self._fsdp_modules():
            module.set_requires_gradient_sync(is_last, recurse=False)
            module.set_reshard_after_backward(is_last, recurse=False)

    def reshard(self) -> None:
        """Drop gathered parameters, so that the next forward sees the shards as they are now."""
        for module in self._fsdp_modules():
            module.reshard()

    def clip_gradients(self, limit: float) -> float:
        """Clip to a global L2 norm of `limit`; returns the norm before. Collective."""
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        if self.settings.tp_size == self.settings.ep_size == 1:
            norm = nn.utils.clip_grad_norm_(parameters, limit, foreach=True)
            return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        from nemo_automodel.components.distributed import tp_replicas
        from nemo_automodel.components.training import utils

        parts = [self.module]
        tp_replicas.synchronize_tp_replica_gradients(parts, self.mesh)
        return float(
            utils.scale_grads_and_clip_grad_norm(
                limit,
                parts,
                device_mesh=self.mesh,
                moe_mesh=self.moe_mesh,
                ep_axis_name="ep" if self.settings.ep_size > 1 else None,
                dp_group_size=self.dp_size,
                expert_tp_replication_factor=utils.get_expert_tp_replication_factor(
                    parts, self.mesh
                ),
                use_torch_clip_grad_norm=self.device.type == "cpu",
            )
        )

    def logprobs(self, row: Row) -> torch.Tensor:
        """log p of every target of `row`, float32 [N], with gradient when grad mode is on."""
        kwargs: dict[str, Any] = {"use_cache": False}
        accepted = inspect.signature(self.module.forward).parameters
        keep_R = torch.from_numpy(row.keep_R).to(self.device)
        if "logits_to_keep" in accepted:
            kwargs["logits_to_keep"] = keep_R
        if row.mask_TT is not None:
            kwargs["attention_mask"] = torch.from_numpy(row.mask_TT)[None, None].to(self.device)
        input_ids = torch.from_numpy(row.input_ids_T)[None].to(self.device)
        if "padding_mask" in accepted:
            kwargs["padding_mask"] = torch.zeros_like(input_ids, dtype=torch.bool)
        position_ids = torch.from_numpy(row.position_ids_T)[None].to(self.device)
        out = self.module(input_ids=input_ids, position_ids=position_ids, **kwargs)
        logits_RV = getattr(out, "logits", out)[0]
        if hasattr(logits_RV, "full_tensor"):
            logits_RV = logits_RV.full_tensor()
        if "logits_to_keep" not in accepted:
            logits_RV = logits_RV[keep_R]
        logits_RV = logits_RV.float()
        if (row.temperature_R != 1.0).any():
            temperature_R = torch.from_numpy(row.temperature_R).to(self.device)
            logits_RV = logits_RV / temperature_R[:, None]
        logits_N = torch.from_numpy(row.logits_N).to(self.device)
        target_ids_N = torch.from_numpy(row.target_ids_N).to(self.device)
        logprobs_N: torch.Tensor = logits_RV[logits_N, target_ids_N]
        logprobs_N = logprobs_N - logits_RV.logsumexp(-1)[logits_N]
        return logprobs_N

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, full tensor in the compute dtype), tied tensors once. Collective.

        One tensor of the model is gathered at a time, as few bytes as the engine gets; all experts
        of a layer's projection are one tensor, whichever ranks hold them.
        """
        for name, tensor in self._exported():
            full = self._to_engine_dtype(tensor)
            if isinstance(full, DTensor):
                full = full.full_tensor()
            yield from self._to_checkpoint_names(name, full)

    def manifest(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of what `export` yields, in its order, without moving data."""
        rows = []
        for name, tensor in self._exported():
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for hf_name, value in self._to_checkpoint_names(name, self._to_engine_dtype(empty)):
                rows.append((hf_name, str(value.dtype).removeprefix("torch."), tuple(value.shape)))
        return rows

    def _exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        state = self.module.state_dict(keep_vars=True)  # detaching sharded tensors takes long
        unique = self.parameters().keys() | {
            name.replace(_WRAPPER, "") for name, _ in self.module.named_buffers()
        }
        for name, tensor in state.items():
            clean = name.replace(_WRAPPER, "")
            if clean in unique:
                yield clean, _alone(tensor).detach()

    def _to_checkpoint_names(
        self, name: str, tensor: torch.Tensor
    ) -> list[tuple[str, torch.Tensor]]:
        adapter = getattr(self.module, "state_dict_adapter", None)
        if adapter is None:
            return [(name, tensor)]
        return list(adapter.convert_single_tensor_to_hf(name, tensor))

    def _to_engine_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(DTYPES[self.settings.dtype]) if tensor.is_floating_point() else tensor

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The only shard of a tensor as a plain one; one with several as it is."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.size() == 1:
        return tensor.to_local()
    return tensor


def join_ranks(init_method: str, rank: int, world_size: int) -> None:
    """Form the process group of all ranks: gloo, and NCCL where there are GPUs. Collective."""
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=30),
    )
    # Torch's cache of sharded operations outlives a process group, with this process's place in
    # it: after another trainer here, at another rank, tensors would be split the wrong way.
    _clear_sharding_prop_cache()


def build(settings: TrainerSettings, world_size: int) -> ShardedModel:
    """Load `settings.model` as float32 masters and shard it over all ranks. Collective.

    Raises ConfigError for a mesh that cannot work here, TrainerError if the model cannot be loaded.
    """
    _check(settings, world_size)
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[settings.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=on_cuda) if settings.cpu_offload else None
    with automodel_on_cpu():
        module, context = _load(settings, world_size, precision, offload)
    if not any(isinstance(part, FSDPModule) for part in module.modules()):
        _shard_alone(module, settings, device, precision, offload)
    if settings.tp_size > 1:
        _keep_embedding_gradient(module)
    if settings.routing == "freeze":
        for _, gate in gates(module):
            gate.requires_grad_(False)
    module.train()
    return ShardedModel(
        module=module,
        device=device,
        dp_size=world_size // (settings.tp_size * settings.cp_size),
        mesh=context.device_mesh,
        moe_mesh=context.moe_mesh,
        settings=settings,
    )


def _check(settings: TrainerSettings, world_size: int) -> None:
    if settings.dtype not in DTYPES:
        raise ConfigError(f"dtype {settings.dtype!r} is unknown; choose one of {sorted(DTYPES)}")
    if settings.cp_size > 1 and not torch.cuda.is_available():
        raise ConfigError(
            f"cp_size={settings.cp_size}: context parallelism needs Transformer Engine and CUDA; "
            "set cp_size=1 on this machine"
        )
    for name in ("tp_size", "ep_size", "cp_size"):
        if world_size % getattr(settings, name):
            raise ConfigError(
                f"{name}={getattr(settings, name)} does not divide the {world_size} trainer ranks"
            )


def _load(
    settings: TrainerSettings,
    world_size: int,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy | None,
) -> tuple[nn.Module, Any]:
    from nemo_automodel import NeMoAutoModelForCausalLM
    from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config
    from nemo_automodel.components.distributed.mesh import ParallelismSizes

    strategy = FSDP2Config(
        mp_policy=precision,
        offload_policy=offload,
        activation_checkpointing=settings.activation_checkpointing,
        reshard_after_forward=settings.reshard_after_forward,
    )
    setup = DistributedSetup.build(
        strategy=strategy,
        parallelism_sizes=ParallelismSizes(
            tp_size=settings.tp_size, cp_size=settings.cp_size, ep_size=settings.ep_size
        ),
        activation_checkpointing=settings.activation_checkpointing,
        world_size=world_size,
    )
    try:
        module = NeMoAutoModelForCausalLM.from_pretrained(
            settings.model,
            **_backend(settings.model),
            dtype="float32",
            attn_implementation="sdpa",
            use_liger_kernel=False,
            distributed_setup=setup,
        )
    except (OSError, ValueError) as error:
        raise TrainerError(
            f"model {settings.model!r} cannot be loaded: {error}; give a folder with config.json, "
            "a tokenizer and safetensors, or a hub id that this machine can reach"
        ) from error
    return module, setup.mesh_context


def _backend(model: str) -> dict[str, Any]:
    """On CPU, AutoModel's own MoE classes need to be told to use plain torch."""
    from nemo_automodel.components.models.common import BackendConfig
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    has_experts = any(getattr(config, name, 0) for name in names)
    if torch.cuda.is_available() or not has_experts:
        return {}
    plain = {"attn": "sdpa", "linear": "torch", "rms_norm": "torch", "experts": "torch"}
    return {"backend": BackendConfig(**plain, dispatcher="torch", rope_fusion=False)}


def _keep_embedding_gradient(module: nn.Module) -> None:
    """Wait for the vocab-parallel embedding before the first norm reads it.

    The embedding returns a pending collective; AutoModel's float32 RMSNorm of the first layer
    drops the gradient that flows through such a tensor, and the embedding then learns from the
    residual path alone, without any sign of it. A copy is an ordinary tensor.
    """
    embedding = module.get_input_embeddings()  # type: ignore[operator]
    embedding.register_forward_hook(lambda _module, _inputs, output: output.clone())


def _shard_alone(
    module: nn.Module,
    settings: TrainerSettings,
    device: torch.device,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy | None,
) -> None:
    """FSDP2 on a mesh of one rank: each layer, then the root."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    rules: dict[str, Any] = {"mesh": mesh, "mp_policy": precision}
    if offload is not None:
        rules["offload_policy"] = offload
    layers = module.get_submodule("model.layers")
    for name, layer in list(layers.named_children()):
        if settings.activation_checkpointing:
            from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

            layer = checkpoint_wrapper.checkpoint_wrapper(layer, preserve_rng_state=False)
            layers.register_module(name, layer)
        fully_shard(layer, reshard_after_forward=settings.reshard_after_forward, **rules)
    fully_shard(module, reshard_after_forward=settings.reshard_after_forward, **rules)
