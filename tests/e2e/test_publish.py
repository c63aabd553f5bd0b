"""Publishing (I7): bytes changed on the way are noticed, retried, and then stop the run."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tiny import Rig, load, perturb, reference_logprobs, tiny_tied_llama

from molt.config import LimitsConfig
from molt.digests import weights_digest
from molt.publish import Probe, Publisher, gap
from molt.schemas.errors import ModelIdentityError

pytestmark = pytest.mark.e2e
PROBES = [list(range(60 + i, 145 + i)) for i in range(8)]


class Sender:
    """The trainer's side of the protocol on a plain model; can spoil one weight on the wire."""

    def __init__(self, rig: Rig, model: Any) -> None:
        self.rig, self.model = rig, model
        self.spoil, self.sent = False, 0

    def manifest(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(n, "float32", tuple(p.shape)) for n, p in self.model.named_parameters()]

    def logprobs(self, wanted: list[tuple[list[int], range, float]]) -> list[np.ndarray]:
        return [reference_logprobs(self.model, ids)[np.array(at) - 1] for ids, at, _ in wanted]

    def send_weights(self) -> dict[str, Any]:
        """Says what it meant to send, as a sender does whose wire is broken."""
        self.sent += 1
        named = [(n, p.detach().clone()) for n, p in self.model.named_parameters()]
        digest = weights_digest(named)
        if self.spoil:
            named[3][1].view(-1)[0] += 0.5
        assert self.rig.sender is not None
        return {**self.rig.sender.send(named), "digest": digest}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tiny_tied_llama(tmp_path_factory.mktemp("model")))
    rig.start()
    try:
        yield rig
    finally:
        rig.close()


async def call(actor: Any, method: str, *args: Any) -> Any:
    """Local stand-in for a remote call: async methods are awaited, others run in a thread."""
    bound = getattr(actor, method)
    return (
        await bound(*args)
        if asyncio.iscoroutinefunction(bound)
        else await asyncio.to_thread(bound, *args)
    )


def test_spoiled_bytes_are_retried_and_then_stop_with_the_engine_paused(rig: Rig) -> None:
    sender = Sender(rig, load(rig.engine._settings.model))
    publisher = Publisher([sender], {"engine-0": rig.engine}, 1, "float32", LimitsConfig(), call)
    publisher.probe = Probe(sequences=PROBES, n_context=[53] * 8)
    publisher._connected = [rig.engine]
    publisher._manifest = sender.manifest()
    first = rig.run(publisher.refit(0))
    rig.run(publisher.resume())
    assert first.probe.max_gap < 1e-4 and sender.sent == 1
    perturb(sender.model, seed=1)
    sender.spoil = True
    with pytest.raises(ModelIdentityError, match="stays paused"):
        rig.run(publisher.refit(1))
    assert sender.sent == 1 + 3 and rig.engine._paused
    sender.spoil = False
    second = rig.run(publisher.refit(1))
    rig.run(publisher.resume())
    assert second.weights_digest != first.weights_digest and second.version == 1


def test_a_gap_is_that_of_all_tokens_of_all_sequences() -> None:
    engine = [np.array([-1.0], np.float32), np.array([-2.0], np.float32)]
    trainer = [np.array([-1.5], np.float32), np.array([-2.0], np.float32)]
    found = gap(engine, trainer)
    assert (found.mean_gap, found.max_gap) == (0.25, 0.5)
    assert found.k3 == pytest.approx((np.exp(-0.5) - 1 + 0.5) / 2)
