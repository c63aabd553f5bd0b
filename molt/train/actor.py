"""The trainer as an actor: one per rank, it reads its own rows of a plan and sends weights.

The driver hands over the number of a plan record; every rank reads it, takes its share of the
sequences, reads their rows by address and verifies them (I1, I6) before the first forward.
"""

from dataclasses import replace
from typing import Any

from molt.replay.assemble import TrainSequence, assemble
from molt.replay.sources import Sources
from molt.rollout.sender import WeightSender
from molt.schemas.errors import MoltError
from molt.store import Log
from molt.store.control import Record, read_record
from molt.train.recorded import RoutingReader
from molt.train.trainer import StepResult, Trainer, TrainerSettings


class TrainerActor(Trainer):
    """`Trainer` with a log to read from and a sender to publish through (rank 0)."""

    def __init__(
        self,
        settings: TrainerSettings,
        rank: int,
        world_size: int,
        init_method: str,
        output: str | None,
        log_path: str,
    ) -> None:
        super().__init__(settings, rank, world_size, init_method, output)
        self.sender: WeightSender | None = None
        self._share = (0, 1)
        self.open_log(log_path)

    def open_log(self, path: str) -> None:
        """Read plans, and the rows that they name, from this log from now on."""
        self.log = Log.open(path)
        self._sources: dict[int, Sources] = {}

    def sources(self, epoch: int) -> Sources:
        """The rows that plans of `epoch` may name."""
        if epoch not in self._sources:
            self._sources = {epoch: Sources(self.log, epoch)}
        return self._sources[epoch]

    def start(self) -> dict[str, Any]:
        info = super().start()
        self._share = (info["dp_rank"], info["dp_size"])
        return info

    def execute_plan(self, number: int) -> StepResult:
        """Execute the plan of control record `number`: one step."""
        plan = share(read_record(self.log.path, number), *self._share)
        sequences: list[TrainSequence] | Exception
        recorded = None
        try:
            source = self.sources(plan.epoch)
            sequences = assemble(source, plan)
            if self.routing is not None:
                recorded = RoutingReader(source, **self.routing.shape).of_plan(plan, sequences)
        except (MoltError, OSError) as error:
            sequences = error  # all ranks must learn of it before any of them starts the forward
        return self.execute(plan.header["step"], sequences, recorded)

    def open_sender(self, backend: str, n_receivers: int) -> tuple[str, int]:
        """Rank 0: choose a port; the engines join at the returned address."""
        self.close_sender()
        self.sender = WeightSender(backend, 1 + n_receivers)
        return self.sender.address

    def close_sender(self) -> None:
        """Leave the group: whoever still waits in it gets an error."""
        if self.sender is not None:
            self.sender.close()

    def connect_sender(self) -> None:
        """Blocks until all receivers have joined."""
        assert self.sender is not None
        self.sender.connect()

    def send_weights(self) -> dict[str, Any]:
        """Broadcast the exported tensors in the order of `manifest`; digest, bytes, seconds."""
        assert self.sender is not None
        return self.sender.send(self.export())

    def gather_weights(self) -> None:
        """Ranks above 0: take part in gathering each full tensor that rank 0 sends."""
        for _ in self.export():
            pass

    def close(self) -> None:
        self.close_sender()
        super().close()


def share(plan: Record, rank: int, n: int) -> Record:
    """What data-parallel rank `rank` of `n` trains: whole groups, so shared prompts stay together.

    Ranks that only differ in tensor or context parallelism get the same rows. No rank reads the
    token data of another.
    """
    trained = {row["group_id"] for row in plan.rows if row["decision"] != "baseline_only"}
    mine = set(sorted(trained, key=lambda g: (len(g), g))[rank::n])
    return replace(plan, rows=[row for row in plan.rows if row["group_id"] in mine])
