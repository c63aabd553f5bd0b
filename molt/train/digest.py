"""What stands for a training state in the records: its digest, and its sketch.

The digest is one 64-bit number over everything a step reads and writes, shard by shard, without
copies; redo compares it bit for bit. Where bits cannot agree (another world size), the sketch can:
norm and random projections of every parameter, the same for every way of sharding it.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping

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


def state_digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Sum mod 2^64 of the shards' digests over all ranks, 16 hex digits. Collective.

    The name of a shard of `w` that starts at row 4 on rank 1 is `1/4,0/w`. Equal across fresh
    processes only at equal settings (ranks, threads, library versions).
    """
    rank, partial = dist.get_rank(), 0
    for name, tensor in named:
        offset = ",".join(map(str, shard_offset(tensor)))
        partial += tensor_digest(f"{rank}/{offset}/{name}", local_shard(tensor))
    words = torch.tensor([partial % _WORD, partial // _WORD % _WORD], dtype=torch.int64)
    dist.all_reduce(words)
    low, high = words.tolist()
    return f"{(low + high * _WORD) % (1 << 64):016x}"


PROJECTIONS = 8
_ROWS = 4096
"""Rows of a tensor that are held in float64 at once."""


def sketch(named: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    """Per tensor [L2 norm, 8 projections], float64, summed over all ranks. Collective.

    A projection is the sum of w[i, j, ...] u(i) v(j) ...; u, v, ... are standard normal vectors
    seeded by H(name), so E[projection^2] = norm^2, and no vector of the tensor's own size is made.
    Sums are taken in another order with other shards: compare with a tolerance.
    """
    names = list(named)
    sums = torch.stack([_shard_sums(name, named[name].detach()) for name in names])
    dist.all_reduce(sums)
    return {
        n: [math.sqrt(square), *rest]
        for n, (square, *rest) in zip(names, sums.tolist(), strict=True)
    }


def _shard_sums(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """[sum of squares, 8 projections] of this rank's part, divided by the ranks that hold it."""
    part, offset = local_shard(tensor).cpu(), shard_offset(tensor)
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
    generator = torch.Generator().manual_seed(seed)
    factors = [
        torch.randn(n, PROJECTIONS, generator=generator, dtype=torch.float64)[at : at + m]
        for n, at, m in zip(tensor.shape, offset, part.shape, strict=True)
    ] or [torch.ones(1, PROJECTIONS, dtype=torch.float64)]
    total = torch.zeros(1 + PROJECTIONS, dtype=torch.float64)
    flat = part.reshape(1) if part.dim() == 0 else part
    for rows, first in zip(flat.split(_ROWS), factors[0].split(_ROWS), strict=True):
        values = rows.double()
        total[0] += values.square().sum()
        inner = values[..., None] if len(factors) == 1 else values @ factors[-1]
        for factor in reversed(factors[1:-1]):
            inner = (inner * factor).sum(-2)
        total[1:] += (inner * first).sum(0)
    return total / _copies(tensor)


def _copies(tensor: torch.Tensor) -> int:
    """Ranks that hold the same part."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size()
    mesh = tensor.device_mesh
    held = [n for n, p in zip(mesh.shape, tensor.placements, strict=True) if p.is_replicate()]
    return math.prod(held) * dist.get_world_size() // mesh.size()
