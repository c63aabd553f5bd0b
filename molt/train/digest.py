"""State digest: one 64-bit number for everything a training step reads and writes.

Written into every `step` and `checkpoint` record; redo compares it bit for bit, so it covers
parameters, optimizer state and the step counter, each shard in place, without copies.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from molt.digests import tensor_digest

_WORD = 1 << 32


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a (possibly distributed) tensor that this rank owns; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_offset(tensor: torch.Tensor) -> tuple[int, ...]:
    """Where this rank's shard begins in the full tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    mesh, placements = tensor.device_mesh, tensor.placements
    return tuple(compute_local_shape_and_global_offset(tensor.shape, mesh, placements)[1])


def named_shards(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name prefixed by rank and shard offset, local shard) of every tensor.

    The name of a shard of `w` that starts at row 4 on rank 1 is `1/4,0/w`.
    """
    rank = dist.get_rank()
    for name, tensor in named:
        offset = ",".join(map(str, shard_offset(tensor)))
        yield f"{rank}/{offset}/{name}", local_shard(tensor)


def state_digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Sum mod 2^64 of the shards' digests over all ranks, 16 hex digits. Collective.

    Equal across fresh processes only at equal settings (ranks, threads, library versions).
    """
    partial = sum(tensor_digest(name, shard) for name, shard in named_shards(named))
    words = torch.tensor([partial % _WORD, partial // _WORD % _WORD], dtype=torch.int64)
    dist.all_reduce(words)
    low, high = words.tolist()
    return f"{(low + high * _WORD) % (1 << 64):016x}"
