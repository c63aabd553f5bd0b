"""The trainer's end of a refit: streams named weights to every engine worker, hashing as it sends.

Stands between the FSDP2 actor and the engines (`molt.rollout.weight_transfer` is the other end).
Keeps invariant I7: the digest returned here is that of the bytes that went onto the wire.

Free of vLLM on purpose: the trainer's process does not load an inference engine.
"""

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from molt.digests import combine, tensor_digest
from molt.schemas.errors import ConfigError, EngineError

_c10d: Any = dist  # its classes are re-exported in a way type checkers do not follow

TRANSFER_TIMEOUT = timedelta(seconds=300)
"""How long one side waits for the other: to join the group, and within one broadcast."""


def open_store(host: str, port: int, world_size: int, *, is_master: bool) -> Any:
    """The rendezvous of a transfer group; the master with port 0 lets the OS choose one."""
    return _c10d.TCPStore(
        host, port, world_size, is_master, timeout=TRANSFER_TIMEOUT, wait_for_workers=False
    )


def join_gloo(store: Any, host: str, rank: int, world_size: int) -> Any:
    """Join the transfer group, apart from the process's default group; blocks until all have.

    On a loopback `host` the traffic stays on loopback, otherwise gloo takes the interface of the
    machine's host name.
    """
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = TRANSFER_TIMEOUT
    loopback = host in ("localhost", "127.0.0.1", "::1")
    options._devices = [
        _c10d.ProcessGroupGloo.create_device(hostname=host)
        if loopback
        else _c10d.ProcessGroupGloo.create_default_device()
    ]
    return _c10d.ProcessGroupGloo(_c10d.PrefixStore("molt", store), rank, world_size, options)


def join_nccl(store: Any, _host: str, rank: int, world_size: int) -> Any:
    """A PyNcclCommunicator on the current GPU over the same rendezvous store."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    group = StatelessProcessGroup(rank=rank, world_size=world_size, store=store)
    return PyNcclCommunicator(group, device=torch.cuda.current_device())


_JOIN = {"gloo": join_gloo, "nccl": join_nccl}


class WeightSender:
    """Rank 0 of a transfer group of one trainer and `world_size - 1` engine workers.

    Usage, with `engine` an `Engine` of one worker: `sender = WeightSender("gloo", 2)`, start
    `engine.init_transfer(epoch, *sender.address, 2, 1)` without waiting, `sender.connect()`, then
    for every refit start `engine.receive_weights(epoch, manifest, version)` without waiting and
    call `sender.send(named)` with tensors in the manifest's order.

    backend "nccl" (vLLM's PyNcclCommunicator, tensors on this process's current GPU) speaks to
    engines that were started with `weight_transfer="nccl"`; it was never run on this project's
    machines, which have no GPU.
    """

    def __init__(self, backend: str, world_size: int, host: str = "127.0.0.1") -> None:
        """Open the rendezvous on a port chosen by the OS; does not wait for anybody."""
        if backend not in _JOIN:
            raise ConfigError(f"weight transfer backend {backend!r}: use 'gloo' or 'nccl'")
        if world_size < 2:
            raise ConfigError(f"weight transfer needs a world size of 2 or more, got {world_size}")
        self._backend, self._world_size, self._host = backend, world_size, host
        self._group: Any = None
        self._store = open_store(host, 0, world_size, is_master=True)

    @property
    def address(self) -> tuple[str, int]:
        """`(host, port)` for `Engine.init_transfer`."""
        return self._host, self._store.port

    def connect(self) -> None:
        """Form the group as rank 0; blocks until every engine worker has joined.

        Raises EngineError when one of them does not within `TRANSFER_TIMEOUT`.
        """
        try:
            self._group = _JOIN[self._backend](self._store, self._host, 0, self._world_size)
        except RuntimeError as error:
            raise EngineError(
                f"weight transfer: not all {self._world_size - 1} engine workers joined at "
                f"{self._host}:{self._store.port}: {error}; see the engine's log"
            ) from error

    def send(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """Broadcast every tensor in order; returns bytes, seconds and digest of what was sent.

        Raises EngineError when a receiver is gone; the group is then of no more use.
        """
        if self._group is None:
            raise EngineError("weight transfer: send() before connect()")
        started, total, digests = time.perf_counter(), 0, []
        for name, tensor in named:
            payload = tensor.detach().contiguous()
            try:
                broadcast(self._group, payload)
            except RuntimeError as error:
                raise EngineError(
                    f"weight transfer broke off at tensor {name!r}: {error}; see the engine's log"
                ) from error
            digests.append(tensor_digest(name, payload))
            total += payload.nbytes
        seconds = time.perf_counter() - started
        return {"bytes": total, "seconds": seconds, "digest": combine(digests)}

    def close(self) -> None:
        """Leave the group and give the port back; may be called twice."""
        self._group = None
        self._store = None


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    """Send (rank 0) or receive one contiguous tensor and wait until it is complete."""
    if isinstance(group, _c10d.ProcessGroupGloo):
        group.broadcast(tensor, 0).wait()
    else:
        group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
        torch.cuda.current_stream().synchronize()
