"""Checkpoints on the driver's side: the newest sound one is loaded, new ones are written whole."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from molt.replay import folders
from molt.replay.redo import same_weights, sketch_of
from molt.replay.replay import History
from molt.schemas.columns import Row
from molt.schemas.errors import Fenced, RecoveryError, TrainerError
from molt.store.control import control_numbers

if TYPE_CHECKING:
    from molt.loop import Run


async def load(
    run: "Run",
    found: History,
    same_bits: Callable[[Row], bool],
    configure: Callable[[Row], Awaitable[None]],
) -> tuple[int, str | None]:
    """Load the newest sound checkpoint of the lineage: (step, state_digest of the state now).

    (0, None) = the model's own weights. One that cannot be read, or whose state is not the recorded
    one, is passed over with a word: the plans after an older one are simply executed again. A
    checkpoint of another world size has other digests: its weights are compared by their sketch.
    `configure(row)` gives the trainer's state the parts that the checkpoint's has.
    """
    complete = found.complete(run.log.path)
    for row in reversed(complete):
        try:
            with run.screen.phase(f"loading the checkpoint of step {row['step']}"):
                await configure(row)
                await run.cluster.on_trainers("load", str(run.log.path / row["path"]))
                digest = await run.cluster.on_trainers("state_digest")
        except TrainerError as error:
            run.screen.say(f"{row['path']} cannot be read: {error}")
            continue
        if same_bits(row):
            sound = digest == row["state_digest"]
        else:
            recorded = sketch_of(found.steps[row["step"]])
            sound = recorded is not None and same_weights(
                await run.cluster.on_trainers("sketch"), recorded
            )
        if sound:
            return row["step"], digest
        run.screen.say(
            f"{row['path']} is damaged: its state is {digest}, recorded {row['state_digest']}"
        )
    if complete:
        raise RecoveryError(
            f"none of the {len(complete)} checkpoints in {run.log.path / 'checkpoints'} can be "
            "used. Restore one from a copy, or remove their folders: the run then starts from the "
            "model's own weights and executes all plans again"
        )
    return 0, None


async def save(run: "Run", metric: float | None) -> None:
    """Write the checkpoint of `run.step`: files fsynced by every rank, marker, record, pruning.

    `metric` decides which one is the best. On an error (a full disk) nothing of it stays. Raises
    Fenced if another driver has taken over meanwhile: it sweeps away what is not complete.
    """
    log, control = run.log.path, run.log.control
    try:
        with folders.new_folder(log, run.epoch, run.step) as path:
            files = await run.cluster.on_trainers("save", str(log / path))
            control.put("checkpoint", [folders.seal(log, path, files, run.state_digest, metric)])
    except (OSError, TrainerError) as error:
        if control_numbers(log, control.next_n):
            raise Fenced(
                f"epoch {run.epoch} lost this log in the middle of a checkpoint. Another driver "
                "has taken over; this one stops and changes nothing"
            ) from error
        raise
    run.fold.update()
    folders.prune(log, run.fold.checkpoints, run.config.checkpoint.keep)
