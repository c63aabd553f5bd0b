"""The stream of a refit over a real gloo group: both ends live in this process, in threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from molt.digests import weights_digest
from molt.rollout.sender import AHEAD_BYTES, WeightSender, join_gloo, open_store, stream
from molt.schemas.errors import EngineError


def weights() -> list[tuple[str, torch.Tensor]]:
    """Small ones, empty ones, one of another dtype, and one larger than what goes ahead."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (0, 4), (), (64, 33), (AHEAD_BYTES // 4 + 1,), (5,), (2, 3, 4)]
    named = [(f"w{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)]
    others = {"t": torch.arange(24.0).view(6, 4).T, "n": torch.arange(9), "b": torch.ones(7).half()}
    return [*named, *others.items()]


def exchange(sender: WeightSender, receive: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What `send` of `weights()` gives and what `receive(group)` makes of it at the other end."""
    host, port = sender.address

    def other_end() -> Any:
        return receive(join_gloo(open_store(host, port, 2, is_master=False), host, 1, 2))

    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(other_end)
        sender.connect()
        return sender.send(weights()), received.result()


def room() -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.zeros(t.shape, dtype=t.dtype)) for name, t in weights()]


def test_every_tensor_arrives_in_its_order_with_the_digest_that_was_sent() -> None:
    sent, received = exchange(WeightSender("gloo", 2), lambda group: list(stream(group, room())))
    assert [name for name, _ in received] == [name for name, _ in weights()]
    for (_, expected), (_, found) in zip(weights(), received, strict=True):
        assert torch.equal(expected, found) and expected.dtype == found.dtype
    assert sent["digest"] == weights_digest(weights()) == weights_digest(received)
    assert sent["bytes"] == sum(tensor.nbytes for _, tensor in weights())
    assert 0 < sent["gather_s"] + sent["hash_s"] <= sent["send_s"]


def test_a_tensor_is_handed_out_while_the_next_ones_are_under_way() -> None:
    """The receiver makes room ahead of what it has been given, but not for the whole model."""
    made = []

    def receive(group: Any) -> list[int]:
        def making() -> Any:
            for name, tensor in room():
                made.append(name)
                yield name, tensor

        return [len(made) for _ in stream(group, making())]

    _, ahead = exchange(WeightSender("gloo", 2), receive)
    assert ahead[0] == 5, "small ones wait until the large one is under way"
    assert all(n > i for i, n in enumerate(ahead))


def test_a_receiver_that_is_gone_is_named_with_its_tensor() -> None:
    left = threading.Event()

    def leave(group: Any) -> None:
        next(iter(stream(group, room()[:1])))
        left.set()

    with pytest.raises(EngineError, match="broke off at tensor 'w"):
        exchange(WeightSender("gloo", 2), leave)
    assert left.is_set()
