"""NeMo AutoModel on a machine without CUDA (where the actor builds its model; no data passes here).

AutoModel 0.7 hard-codes `torch.device("cuda", ...)` while it builds and shards a model. Inside
`automodel_on_cpu()` such a request yields the CPU device; with CUDA present nothing is changed.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_REAL_DEVICE = torch.device


class _DeviceType(type):
    """Stands in for `torch.device`: same instances, but "cuda" becomes "cpu"."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _REAL_DEVICE)

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        first = args[0] if args else kwargs.get("device", kwargs.get("type", "cpu"))
        kind = first.type if isinstance(first, _REAL_DEVICE) else str(first)
        return _REAL_DEVICE("cpu") if kind.startswith("cuda") else _REAL_DEVICE(*args, **kwargs)


class _Device(metaclass=_DeviceType):
    pass


@contextlib.contextmanager
def automodel_on_cpu() -> Iterator[None]:
    """Let AutoModel build a model on CPU; wrap only its construction, never a training step."""
    if torch.cuda.is_available():
        yield
        return
    current_device = torch.cuda.current_device
    torch.device = _Device  # type: ignore[misc,assignment]
    torch.cuda.current_device = lambda: _REAL_DEVICE("cpu")  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        torch.device = _REAL_DEVICE  # type: ignore[misc]
        torch.cuda.current_device = current_device
