"""Digests of named weights: the one rule of trainer, engine workers and tests (invariant I7).

A tensor's digest covers its name, dtype, shape and bytes; a model's digest is the sum of its
tensors' digests modulo 2^64. The sum does not depend on the order of the tensors, so a stream can
be hashed while it passes, and two sides that enumerate parameters differently still agree.
"""

from collections.abc import Iterable

import torch
import xxhash

_MODULUS = 1 << 64


def tensor_digest(name: str, tensor: torch.Tensor) -> int:
    """xxh3-64 over `name NUL dtype NUL shape NUL bytes` of one tensor, as an unsigned integer.

    The dtype is torch's name without its prefix ("float32"), the shape is text ("2,3", empty for a
    scalar), the bytes are those of the contiguous tensor. A tensor on another device is copied to
    the host; a contiguous one on the host is hashed in place.

    >>> f"{tensor_digest('w', torch.zeros(2, 3)):016x}"
    '915de214d9294d9a'
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = ",".join(map(str, tensor.shape))
    digest = xxhash.xxh3_64(f"{name}\0{dtype}\0{shape}\0".encode())
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(raw.numpy())
    return digest.intdigest()


def combine(digests: Iterable[int]) -> str:
    """Order-free sum of tensor digests modulo 2^64, as 16 hex digits."""
    return f"{sum(digests) % _MODULUS:016x}"


def weights_digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Digest of a whole model, 16 hex digits; equal for every order of the same tensors.

    >>> a, b = ("a", torch.ones(2)), ("b", torch.zeros(1))
    >>> weights_digest([a, b]) == weights_digest([b, a])
    True
    """
    return combine(tensor_digest(name, tensor) for name, tensor in named)
