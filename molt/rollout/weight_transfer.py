"""The engine workers' end of a refit, as a vLLM plugin (invariants I3 and I7).

vLLM calls `register()` in each of its processes through the entry-point group
`vllm.general_plugins`. It adds the weight-transfer backends "gloo" and "molt_nccl", which differ
from vLLM's own in three ways: they run on CPU, they hash what they receive while it streams past,
and they leave no stale copy of a weight behind. On CPU vLLM 0.32 keeps packed copies of weights for
its matrix kernels and forgets two of them on a reload, silently: the tied lm_head's (the layer gets
no tensor of its own, so it is not processed again) and those of the experts of an MoE layer.

Setting the environment variable MOLT_FAULT=stale_tied_head or stale_experts disables one of the two
repairs; it exists for the tests that the start-up self-test notices such an engine.
"""

import functools
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from molt.digests import combine, tensor_digest
from molt.process import timed
from molt.rollout.routing import RoutingCapture
from molt.rollout.sender import join_gloo, join_nccl, open_store, stream

LOAD_BYTES = 64 << 20
"""Received tensors are loaded when they are this many."""
_ORPHAN_POLL_S = 0.5
_YIELD_S = 2e-4
_ORPHAN_WATCH = "molt-orphan-watch"


Batch = list[tuple[str, torch.Tensor]]


@dataclass
class TransferInit(WeightTransferInitInfo):
    """Where the sender's rendezvous is, and this engine's place in the group."""

    host: str
    port: int
    world_size: int
    rank_offset: int


@dataclass
class TransferUpdate(WeightTransferUpdateInfo):
    """The tensors of one refit, in the order in which the sender broadcasts them."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class HashingEngine(WeightTransferEngine[TransferInit, TransferUpdate]):
    """Receives whole checkpoint tensors by broadcast from rank 0, hashes and loads them."""

    init_info_cls = TransferInit
    update_info_cls = TransferUpdate
    received: dict[str, Any] | None = None
    """Digest and bytes of the last complete update, None before it and after a broken one; and its
    seconds: `transfer_s` until the last tensor was here and hashed, without `load_s`, the work of
    vLLM's loaders, in which others arrive."""
    _group: Any = None
    _join: Any  # join_gloo or join_nccl

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        """Join the sender's group; a second call replaces a group that broke."""
        self.shutdown()
        host, world_size = init_info.host, init_info.world_size
        store = open_store(host, init_info.port, world_size, is_master=False)
        rank = init_info.rank_offset + self.parallel_config.rank
        self._group = self._join(store, host, rank, world_size)

    def start_weight_update(self) -> None:
        """Put the layers back into the shape that checkpoint tensors load into."""
        self.received, self._seconds = None, {"transfer_s": 0.0, "load_s": 0.0}
        self._moe_kernels = []
        for module in self.model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
                self._moe_kernels.append((method, method.moe_kernel))
                if self.device.type == "cpu" and _fault() != "stale_experts":
                    method.moe_kernel = None  # its absence makes vLLM pack the experts again
        with timed(self._seconds, "load_s"):
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one manifest of tensors; vLLM's own method asks for an accelerator."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            # Closes the half-done reload, so that the next attempt starts from whole layers.
            self.finish_weight_update()
            self.received = None
            raise

    def receive_weights(self, update_info: TransferUpdate) -> None:
        """Broadcast, hash and load; memory stays within one layer, `LOAD_BYTES` and `AHEAD_BYTES`.

        Loading goes in batches, since vLLM walks its table of all experts once per call; the next
        tensors arrive meanwhile.
        """
        if self._group is None:
            raise RuntimeError("weight transfer: the group was not formed (init_transfer)")
        model: Any = self.model
        digests: list[int] = []
        batches, total = self._batches(update_info, digests), 0
        while batch := self._next(batches):
            total += sum(tensor.nbytes for _, tensor in batch)
            with timed(self._seconds, "load_s"):
                model.load_weights(batch)
        self.received = {"digest": combine(digests), "bytes": total}

    def _next(self, batches: Iterator[Batch]) -> Batch:
        with timed(self._seconds, "transfer_s"):
            return next(batches, [])

    def _batches(self, info: TransferUpdate, digests: list[int]) -> Iterator[Batch]:
        """`LOAD_BYTES` and more at a time; a tensor is hashed while the next ones arrive."""
        batch: Batch = []
        n_bytes = 0
        for name, tensor in stream(self._group, self._room(info)):
            digests.append(tensor_digest(name, tensor))
            batch.append((name, tensor))
            n_bytes += tensor.nbytes
            if n_bytes >= LOAD_BYTES:
                yield batch
                batch, n_bytes = [], 0
        yield batch

    def _room(self, info: TransferUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            yield name, torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)

    def finish_weight_update(self) -> None:
        """Pack what vLLM packs, then what it forgets."""
        with timed(self._seconds, "load_s"):
            self._finish()
        if self.received is not None:
            self.received |= self._seconds

    def _finish(self) -> None:
        finalize: Any = finalize_layerwise_reload  # untyped
        finalize(self.model, self.model_config)
        for method, kernel in self._moe_kernels:
            if method.moe_kernel is None:  # no expert of this layer was in the update
                method.moe_kernel = kernel
        if self.device.type == "cpu" and _fault() != "stale_tied_head":
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


class GlooEngine(HashingEngine):
    """Over gloo, on CPU."""

    _join = staticmethod(join_gloo)


class NcclEngine(HashingEngine):
    """Over NCCL, from GPU to GPU; never run on this project's machines."""

    _join = staticmethod(join_nccl)


class WorkerExtension(RoutingCapture):
    """Mixed into every vLLM worker; its methods are reached through `collective_rpc`."""

    weight_transfer_engine: HashingEngine

    def molt_received(self) -> dict[str, Any] | None:
        """`HashingEngine.received` of this worker."""
        return self.weight_transfer_engine.received


def _fault() -> str | None:
    return os.environ.get("MOLT_FAULT")


def register() -> None:
    """Entry point `vllm.general_plugins: molt`; runs in every process of vLLM, perhaps twice."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, engine in (("gloo", GlooEngine), ("molt_nccl", NcclEngine)):
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, engine)
    if current_platform.is_cpu():
        _wait_without_spinning()
    parent = multiprocessing.parent_process()
    if os.environ.get("MOLT_ENGINE") != "1" or parent is None:
        return
    if _ORPHAN_WATCH not in {thread.name for thread in threading.enumerate()}:
        threading.Thread(
            target=_exit_with, args=(parent.pid,), name=_ORPHAN_WATCH, daemon=True
        ).start()


def _wait_without_spinning() -> None:
    """Let vLLM's processes sleep a moment where they yield while they wait for each other.

    They wait so whenever one of them works, with a core each: on two cores it is taken from the
    forward, the refit and the trainer.
    """
    shm_broadcast.sched_yield = functools.partial(time.sleep, _YIELD_S)


def _exit_with(parent_pid: int | None) -> None:
    """End this process when its parent is gone; vLLM's processes outlive a killed parent."""
    while os.getppid() == parent_pid:
        time.sleep(_ORPHAN_POLL_S)
    os._exit(1)
