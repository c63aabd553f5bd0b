"""The trainer's end of a refit: streams named weights to every engine worker, hashing as it sends.

Stands between the FSDP2 actor and the engines (`molt.rollout.weight_transfer` is the other end).
Keeps invariant I7: the digest returned here is that of the bytes that went onto the wire.

Free of vLLM on purpose: the trainer's process does not load an inference engine.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from molt.digests import combine, tensor_digest
from molt.process import timed
from molt.schemas.errors import ConfigError, EngineError

_c10d: Any = dist  # its classes are re-exported in a way type checkers do not follow

TRANSFER_TIMEOUT = timedelta(seconds=300)
"""How long one side waits for the other: to join the group, and within one broadcast."""

AHEAD_BYTES = 64 << 20
"""Of the tensors that are under way at once: so many arrive while the engine loads those before."""


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
        """Broadcast every tensor in order; returns bytes and digest of what was sent, and seconds:
        `send_s` from first to last, of which `gather_s` and `hash_s` in these two.

        A tensor is hashed, and the next one gathered, while others are on the wire. Raises
        EngineError when a receiver is gone; the group is then of no more use.
        """
        if self._group is None:
            raise EngineError("weight transfer: send() before connect()")
        total, digests, seconds = 0, [], dict.fromkeys(("gather_s", "hash_s", "send_s"), 0.0)
        with timed(seconds, "send_s"):
            for name, tensor in stream(self._group, _gathered(named, seconds)):
                with timed(seconds, "hash_s"):
                    digests.append(tensor_digest(name, tensor))
                total += tensor.nbytes
        return {"bytes": total, "digest": combine(digests), **seconds}

    def close(self) -> None:
        """Leave the group and give the port back; may be called twice."""
        self._group = None
        self._store = None


def _gathered(
    named: Iterable[tuple[str, torch.Tensor]], seconds: dict[str, float]
) -> Iterator[tuple[str, torch.Tensor]]:
    rest = iter(named)
    while True:
        with timed(seconds, "gather_s"):
            name, tensor = next(rest, ("", None))
            if tensor is not None:
                tensor = tensor.detach().contiguous()
        if tensor is None:
            return
        yield name, tensor


def stream(
    group: Any, named: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Send (rank 0) or receive contiguous tensors in order; yields each when it is complete.

    Up to `AHEAD_BYTES`, and at least one more tensor, are under way while the caller looks at the
    one it was given. Raises EngineError, naming the tensor, when the other end is gone.
    """
    under_way: deque[tuple[str, torch.Tensor, Any]] = deque()
    n_bytes = 0
    for name, tensor in named:
        under_way.append((name, tensor, _begin(group, tensor)))
        n_bytes += tensor.nbytes
        while n_bytes > AHEAD_BYTES and len(under_way) > 1:
            n_bytes -= under_way[0][1].nbytes
            yield _end(*under_way.popleft())
    while under_way:
        yield _end(*under_way.popleft())


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    """Send (rank 0) or receive one contiguous tensor and wait until it is complete."""
    _begin(group, tensor).wait()


class _Enqueued:
    """Everything that was enqueued on the current CUDA stream so far."""

    def __init__(self) -> None:
        self._event = torch.cuda.current_stream().record_event()

    def wait(self) -> None:
        self._event.synchronize()


def _begin(group: Any, tensor: torch.Tensor) -> Any:
    """Start a broadcast; `wait()` on what is returned ends it."""
    if isinstance(group, _c10d.ProcessGroupGloo):
        return group.broadcast(tensor, 0)
    group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
    return _Enqueued()


def _end(name: str, tensor: torch.Tensor, work: Any) -> tuple[str, torch.Tensor]:
    try:
        work.wait()
    except RuntimeError as error:
        raise EngineError(
            f"weight transfer broke off at tensor {name!r}: {error}; see the engine's log"
        ) from error
    return name, tensor
