"""Fair timing: everything that is compared takes turns, and medians of the rounds are compared."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

ROUNDS = 5


@dataclass(frozen=True)
class Rate:
    """Units per second in each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def ratio(self, peer: "Rate") -> float:
        """Median over rounds of this rate to that of a peer in the same round."""
        pairs = zip(self.rounds, peer.rounds, strict=True)
        return statistics.median(a / b for a, b in pairs)


def interleaved(
    work: Mapping[str, Callable[[int], float]], rounds: int = ROUNDS
) -> dict[str, Rate]:
    """`work[name](round)` does one round's work and returns its units (bytes, rows, 1)."""
    gc.collect()
    gc.freeze()  # what the benchmark itself holds is no store's to look through
    found: dict[str, list[float]] = {name: [] for name in work}
    for i in range(rounds):
        for name, call in work.items():
            start = time.perf_counter()
            units = call(i)
            found[name].append(units / (time.perf_counter() - start))
    return {name: Rate(tuple(values)) for name, values in found.items()}
