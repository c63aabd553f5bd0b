"""Recovery: which past a driver takes up, and how the state after it comes back.

`--from` and `--drop` choose an earlier cut of the lineage; what lies behind it stays in the log for
audits and is invisible. Then: newest sound checkpoint T, the plans after T again in order, each
under the settings of the epoch that trained it, compared with its record (invariant I4: a step
whose record exists writes nothing).
"""

import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from molt import checkpoints
from molt.config import Config, recorded_config
from molt.planning import Drop
from molt.replay.redo import redo
from molt.replay.replay import History, history
from molt.schemas.columns import Row, to_rows
from molt.schemas.errors import ConfigError, Fenced, LogCorrupt, MoltError, RecoveryError
from molt.schemas.records import Ref
from molt.store import Log
from molt.store.control import Record, lineage_of, read_record
from molt.store.fold import COLUMNS, MARKER, STREAMS, Fold
from molt.store.reader import WRITER_NAME, CommitFile, all_files
from molt.train.settings import trainer_settings

if TYPE_CHECKING:
    from molt.loop import Run

DROPPED = "--drop"
ROLLOUT = re.compile(r"((?:train|eval)-[0-9]+)/([0-9]+)")
SAME = "rollouts.rollout_id = plans.rollout_id and rollouts.attempt = plans.attempt"
BUILT_IN = (
    *("dtype", "world_size", "tp_size", "ep_size", "cp_size", "threads"),
    *("activation_checkpointing", "cpu_offload", "reshard_after_forward"),
)
"""Settings that a running trainer cannot change: steps made with others are compared by sketch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the command line asks of a start."""

    accept_changes: bool = False
    from_step: int | None = None
    """Go on from this step; later ones are abandoned."""
    drop: tuple[str, ...] = ()
    """Rollouts whose groups are settled without a step, or "writer/seq" of unreadable commits."""

    @property
    def is_plain(self) -> bool:
        """True if the whole past counts."""
        return self.from_step is None and not self.drop


def cut(records: Sequence[Record], start: Start) -> tuple[int | None, int | None]:
    """(parent epoch, last record that still counts); (None, None) = everything counts.

    ConfigError for a step that is not recorded.
    """
    lineage = lineage_of(records)
    mine = [r for r in records if lineage.holds(r.n)]
    ends = []
    if start.from_step is not None:
        known = {0, *(r.rows[0]["step"] for r in mine if r.kind == "step")}
        if start.from_step not in known:
            raise ConfigError(
                f"--from {start.from_step}: this lineage has the steps 0 to {max(known)}"
            )
    for plan in (r for r in mine if r.kind == "plan"):
        later = start.from_step is not None and plan.header["step"] > start.from_step
        if later or any(row["rollout_id"] in start.drop for row in plan.rows):
            ends.append(plan.n - 1)
    if not ends:
        return None, None
    last = min(ends)
    spans = lineage.spans.items()
    parent = next(e for e, (a, b) in spans if a <= last and (b is None or last <= b))
    return parent, last


def open_fold(log: Log, start: Start, say: Callable[[str], None]) -> Fold:
    """The folded log. An unreadable commit is RecoveryError with what may be done about it.

    With `--drop` (now, or in this lineage before) it is passed over instead, and said: attempts
    that miss rows of it are never finished, so their prompts are issued again.
    """
    damaged: list[tuple[CommitFile, LogCorrupt]] = []

    def unreadable(file: CommitFile, error: LogCorrupt) -> None:
        if file.stream == "prompts":
            raise error
        damaged.append((file, error))

    fold = Fold(log.tail(streams=STREAMS, columns=COLUMNS, on_corrupt=unreadable))
    fold.update()
    records = [r for r in log.records() if fold.tail.lineage.holds(r.n)]
    before = any(DROPPED in row["reason"] for r in records if r.kind == "drop" for row in r.rows)
    for file, error in damaged:
        name = f"{file.writer}/{file.seq}"
        victims = _needed(log, records, file)
        if not (start.drop or before):
            what = [*victims] or [name]
            raise RecoveryError(
                f"{error}. Redo needs rows of it for {', '.join(victims) or 'no rollout'}. Restore "
                f"the file from a copy, or go on without: {' '.join(f'--drop {w}' for w in what)}"
            )
        say(f"commit {name} ({file.stream}) is unreadable and passed over")
    fold.tail.on_corrupt = None
    return fold


def _needed(log: Log, records: Sequence[Record], file: CommitFile) -> list[str]:
    """Rollouts for which redo needs rows of a commit: planned after the last checkpoint."""
    saved = [r.rows[0] for r in records if r.kind == "checkpoint"]
    whole = [r["step"] for r in saved if (log.path / r["path"] / MARKER).exists()]
    found = {
        row["rollout_id"]: None
        for plan in records
        if plan.kind == "plan" and plan.header["step"] > max(whole, default=0)
        for row in plan.rows
        for ref in (ref for branch in row["branches"] for ref in branch["refs"])
        if (ref["log"], ref["writer"], ref["seq"]) == (0, file.writer, file.seq)
    }
    return list(found)


def issued(log: Log) -> dict[str, int]:
    """group_id -> number of its rollouts, of every prompt that was ever issued."""
    tail = log.tail(streams={"prompts"}, columns={"prompts": ["group_id", "n"]}, skip_retired=True)
    return {row["group_id"]: row["n"] for c in tail.poll()[1] for row in to_rows(c.table)}


def check_drops(log: Log, asked: Collection[str]) -> None:
    """ConfigError for a name of `--drop` that is no rollout and no commit of this log."""
    groups = issued(log) if asked else {}
    for name in asked:
        writer, _, number = name.rpartition("/")
        if rollout := ROLLOUT.fullmatch(name):
            group_id, i = rollout[1], int(rollout[2])
            if group_id not in groups:
                raise ConfigError(f"--drop {name}: this log has no group {group_id}")
            if i >= groups[group_id]:
                raise ConfigError(
                    f"--drop {name}: {group_id} has the rollouts 0 to {groups[group_id] - 1}"
                )
        elif not (WRITER_NAME.fullmatch(writer) and number.isdecimal()):
            raise ConfigError(
                f"--drop '{name}': expected a rollout (train-3/0), or the writer/number of an "
                "unreadable commit as the error or `molt doctor` names it"
            )
        elif not any(f.seq == int(number) for f in all_files(log.path, writer)):
            raise ConfigError(f"--drop {name}: this log has no such commit")


def asked_drops(fold: Fold, asked: Collection[str]) -> list[Drop]:
    """The drops of `--drop`; groups that are settled already need none. ConfigError if unknown."""
    drops: dict[str, Drop] = {}
    for name in asked:
        rollout = ROLLOUT.fullmatch(name)
        if rollout is None or fold.is_settled(group_id := rollout[1]):
            continue
        if group_id not in fold.groups:
            raise ConfigError(f"--drop {name}: this log has no group {group_id}")
        reason = f"{DROPPED} {name}"
        drops.setdefault(group_id, Drop(group_id=group_id, rollout_id=None, reason=reason))
    return list(drops.values())


async def recover(run: "Run") -> None:
    """Bring the trainer to the state after the last planned step of the lineage."""
    found = history(run.log)
    epochs = {row["epoch"]: row for row in found.epochs}
    mine = _built(epochs[run.epoch])

    def same_bits(row: Row) -> bool:
        same = _built(epochs[row["epoch"]]) == mine
        return same and run.cluster.trainer_device == "cpu"

    async def configure(config: Config) -> None:
        settings = trainer_settings(config, run.cluster.model_folder)
        await run.cluster.on_trainers("configure", settings)

    async def as_saved(row: Row) -> None:
        """`algo.kl_target` decides what a state consists of."""
        await aim(recorded_config(epochs[row["epoch"]]).algo.kl_target)

    async def aim(kl_target: float | None) -> None:
        await configure(replace(run.config, algo=replace(run.config.algo, kl_target=kl_target)))

    for step, row in sorted(found.steps.items()):
        run.offset_test.add(step, json.loads(row["metrics"]))
    run.step, run.state_digest = await checkpoints.load(run, found, same_bits, as_saved)
    plans = {s: n for s, n in found.plans.items() if s > run.step}
    if plans:
        if not run.step:
            await aim(None)  # a coefficient that adapts begins where its own epoch began
        await _redo(run, found, epochs, plans, configure, same_bits)
    if run.step:
        if not run.metrics and run.step in found.steps:  # a fork's first step is its parent's
            run.metrics = json.loads(found.steps[run.step]["metrics"])
        await configure(run.config)
        run.state_digest = await run.cluster.on_trainers("state_digest")


async def _redo(
    run: "Run",
    found: History,
    epochs: Mapping[int, Row],
    plans: Mapping[int, int],
    configure: Callable[[Config], Awaitable[None]],
    same_bits: Callable[[Row], bool],
) -> None:
    """Execute `plans` (step -> record) again, each under the settings of its epoch."""
    run.screen.say(f"redo of {len(plans)} step(s) after step {run.step}, from the log")
    run.meter.clock.start("redo")
    before = await run.cluster.on_trainers("sketch") if run.config.train.sketch else None

    async def execute(number: int) -> Any:
        plan = read_record(run.log.path, number)
        await configure(recorded_config(epochs[plan.epoch]))
        try:
            return await run.meanwhile(run.cluster.execute(number), "a trainer rank")
        except Fenced:
            raise
        except MoltError as error:
            raise _explained(run.log, plan, error) from error

    async for step, outcome, gap in redo(
        execute,
        plans,
        found.steps,
        run.step,
        same_bits=same_bits,
        before=before,
        limit=run.config.limits.redo_gap,
    ):
        if step not in found.steps:
            run.meter.trained = _outcomes(run.log, step)
            run.record_step(step, run.log.records(plans[step])[0].rows, outcome)
        run.step, run.state_digest = step, outcome.state_digest
        how = f"sketch within {gap:.1e}" if gap is not None else f"state {outcome.state_digest}"
        run.screen.say(f"step {step} redone: {how} as recorded")
    run.meter.redone = len(plans)
    run.meter.clock.start("start")


def _outcomes(log: Log, step: int) -> list[Row]:
    """Of a plan whose step was never recorded: the fold has forgotten its settled groups."""
    query = f"select status, counts from rollouts semi join plans on {SAME} and plans.step = {step}"
    try:
        rows = log.sql(query).fetchall()
    except LogCorrupt:
        return []  # of a rollout that is passed over; the plan's own rows are read apart
    return [{"status": status, "counts": counts} for status, counts in rows]


def _built(epoch: Row) -> tuple[Any, ...]:
    """What two epochs must have in common for their steps to agree bit for bit."""
    train = json.loads(epoch["config"]).get("train", {})
    return epoch["packages"], *(train.get(name) for name in BUILT_IN)


def _explained(log: Log, plan: Record, error: MoltError) -> MoltError:
    """`error`, or which rollouts of the plan cannot be read and how to go on without them."""
    victims = []
    for row in plan.rows:
        try:
            log.rows(Ref(**ref) for branch in row["branches"] for ref in branch["refs"])
        except (MoltError, OSError):
            victims.append(row["rollout_id"])
    if not victims:
        return error
    return RecoveryError(
        f"the plan of step {plan.header['step']} names rows that cannot be read, of "
        f"{', '.join(victims)}: {error}. Restore them, or go on without: "
        f"{' '.join(f'--drop {v}' for v in victims)}"
    )
