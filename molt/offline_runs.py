"""`molt fork` and `molt retrain`: an offline run from its command line to its last step.

The run's own log begins with an epoch record that lists the logs it reads; `molt.replay.retrain`
says what is planned, the trainer of any run executes it. It has checkpoints of its own and recovers
like any run: checkpoint, then redo of the plans behind it, which must give the recorded digests
(I4, I6). Neither Ray nor vLLM is imported.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from molt.config import Config, changes, epoch_fields, recorded_config
from molt.metrics import OffsetTest, plan_metrics
from molt.model import folder_digests, resolve_model
from molt.offline import (
    AsRecorded,
    group_advantages,
    one_rank,
    open_trainer,
    other_loss,
    save_weights,
)
from molt.planning import algorithm_header
from molt.replay import folders
from molt.replay.redo import check_digest, step_row
from molt.replay.replay import History, history, restore
from molt.replay.retrain import Planner, forked_plans, n_steps, passes_over
from molt.replay.select import select
from molt.schemas.columns import Row
from molt.schemas.errors import ConfigError
from molt.schemas.text import canonical_json
from molt.screen import Screen
from molt.store import Log
from molt.store.control import Record, read_record

FREE = ("run.steps", "run.dir", "checkpoint.")
"""Settings that an offline run may change when it is resumed."""


def fork(
    parent: Log, step: int, last: int | None, folder: str, sets: Sequence[str], screen: Screen
) -> Log:
    """Execute the parent's plans after `step` again with other `algo.*`, in a log of its own."""
    found = history(parent)
    last = last or max(found.steps, default=0)
    if last <= step:
        raise ConfigError(f"step {last} is not after step {step}: there is nothing to execute")
    found.check(step + 1, last, recorded=False)
    changed = other_loss(found.epochs[-1], sets)
    run = dataclasses.replace(changed.run, dir=folder, steps=last)
    config = dataclasses.replace(changed, run=run)

    def start(trainer: Any) -> int:
        """The parent's state after `step`, by its own settings; then ours."""
        own = trainer.log.path
        trainer.open_log(str(parent.path))
        with screen.phase(f"the state of {parent.run_id} after step {step}"):
            restore(parent, AsRecorded(trainer, found), found, step)
        trainer.open_log(str(own))
        trainer.configure(one_rank(config, trainer.settings.model))
        return step

    plan = forked_plans(
        parent, found, algorithm_header(config), lambda rows: group_advantages(rows, config)
    )
    # The parent's own sources stay behind it, with the numbers that its plans know plus one.
    sources = [(parent, s) for e in found.epochs[-1:] for s in e["sources"]]
    listed = [(parent.run_id, parent.path)]
    listed += [(s["run_id"], (log.path / s["path"]).resolve()) for log, s in sources]
    return _execute(config, listed, plan, last, screen, start)


def retrain(
    logs: Sequence[Log],
    where: str,
    passes: int,
    folder: str,
    sets: Sequence[str],
    screen: Screen,
    weights: str | None = None,
) -> Log:
    """Train on the rollouts of `logs` that `where` holds for, `passes` times, from the model on."""
    epochs = [history(log).epochs for log in logs]
    if not all(epochs):
        raise ConfigError("a log without an epoch record has no configuration to begin with")
    config = recorded_config(epochs[0][-1], sets)
    pairs = zip(logs, epochs, strict=True)
    tokenizers = {log.run_id: e[-1]["digests"]["tokenizer"] for log, e in pairs}
    tokenizers[config.model] = folder_digests(resolve_model(config.model))["tokenizer"]
    if len(set(tokenizers.values())) > 1:
        raise ConfigError(f"ids of different tokenizers cannot be mixed: {tokenizers}")
    with screen.phase("choosing rollouts"):
        reward, algo = dataclasses.asdict(config.reward), config.algo
        found = select(logs, where, reward, algo.max_lag, algo.lag)
    if found.left_out:
        names = ", ".join(found.left_out[:9])
        screen.say(f"{len(found.left_out)} groups left out: {names}")
    steps = n_steps(found.groups, config.data.groups_per_step, passes)
    screen.say(f"{found.n_rollouts} rollouts of {len(found.groups)} groups, {steps} steps")
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, dir=folder, steps=steps, name=f"sel-{found.digest}"),
        data=dataclasses.replace(config.data, train=f"sql:{where}"),
    )
    header = {**algorithm_header(config), "max_lag": config.algo.max_lag}
    plan = passes_over(
        found.groups,
        config.data.groups_per_step,
        header,
        lambda rows: group_advantages(rows, config),
    )
    listed = [(log.run_id, log.path) for log in logs]
    return _execute(config, listed, plan, steps, screen, lambda _: 0, weights)


def _execute(
    config: Config,
    listed: Sequence[tuple[str, Path]],
    plan: Planner,
    last: int,
    screen: Screen,
    start: Callable[[Any], int],
    weights: str | None = None,
) -> Log:
    """Open or resume the run's log, recover, and go on to step `last`."""
    home = Path(config.run.dir).absolute()
    if any(home == path.resolve() for _, path in listed):
        raise ConfigError(f"--dir {config.run.dir} is one of the logs that are read")
    sources = [(run_id, os.path.relpath(path, home)) for run_id, path in listed]
    digests = folder_digests(resolve_model(config.model))
    fields = epoch_fields(config, digests, world_size=1, sources=sources)
    log = Log.create(home)
    before = [r.rows[0] for r in log.records() if r.kind == "epoch"]
    if before:
        _same(before[-1], fields, config)
    epoch = log.control.open_epoch(**fields).rows[0]
    with screen.phase("loading the model and the trainer"):
        trainer = open_trainer(log, epoch, config)

    run = OfflineRun(log, trainer, plan, config, last, screen)
    run.run(run.recover(lambda: start(trainer)))
    if weights is not None:
        save_weights(trainer, weights)
        screen.say(f"weights: {weights}")
    trainer.close()
    return log


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """One epoch of an offline run: `log` is its own, opened by an epoch record already."""

    log: Log
    trainer: Any
    plan: Planner
    config: Config
    last: int
    """Step."""
    screen: Screen
    offset_test: OffsetTest = field(default_factory=OffsetTest)

    def recover(self, start: Callable[[], int]) -> int:
        """The last step that was planned, its state in the trainer; steps are recorded again only
        where their record is missing. `start` makes the state of a new run and returns its step.
        """
        found = history(self.log)
        planned = max(found.plans, default=0)
        if not found.checkpoints:
            begun = start()
            if begun:
                self.checkpoint(begun, self.trainer.state_digest())
            found = history(self.log)
            planned = max(planned, begun)
        for step, row in sorted(found.steps.items()):
            self.offset_test.add(step, json.loads(row["metrics"]))
        restore(self.log, self.trainer, found, planned, lambda s, o: self._redone(found, s, o))
        return planned

    def _redone(self, found: History, step: int, outcome: Any) -> None:
        if step not in found.steps:
            self.record(read_record(self.log.path, found.plans[step]), outcome)
        else:
            check_digest(step, outcome.state_digest, found.steps[step]["state_digest"])

    def run(self, after: int) -> None:
        """Plan, execute and record the steps after `after`, in order."""
        for step in range(after + 1, self.last + 1):
            header, rows = self.plan(step)
            number = self.log.control.put("plan", rows, header)
            outcome = self.trainer.execute_plan(number)
            self.record(read_record(self.log.path, number), outcome)
            if step == self.last or step % self.config.checkpoint.every == 0:
                self.checkpoint(step, outcome.state_digest)

    def record(self, plan: Record, outcome: Any) -> None:
        """Write the step record of an executed plan."""
        step, metrics = plan.header["step"], {**plan_metrics(plan.rows), **outcome.metrics}
        self.offset_test.check(step, metrics)
        row = step_row(self.log.control.epoch, step, plan.rows, outcome, metrics)
        self.log.control.put("step", [row])
        self.offset_test.add(step, metrics)
        told = f"loss {row['loss']:.5f}  state {row['state_digest']}"
        self.screen.say(f"step {step}/{self.last}  {told}")

    def checkpoint(self, step: int, state_digest: str) -> None:
        """Files, marker, record; all but the newest ones go."""
        log = self.log.path
        with folders.new_folder(log, self.log.control.epoch, step) as path:
            files = self.trainer.save(str(log / path))
            self.log.control.put("checkpoint", [folders.seal(log, path, files, state_digest)])
        kept = [*history(self.log).checkpoints.values()]
        folders.prune(log, kept, self.config.checkpoint.keep)


def _same(old: Row, new: Row, config: Config) -> None:
    """A run is resumed with what it was begun with: settings, sources, chosen rollouts, model."""
    names = [k for k in changes(old, config) if not k.startswith(FREE)]
    for key in ("sources", "digests"):
        names += [key] if canonical_json(old[key]) != canonical_json(new[key]) else []
    if "run.name" in names:
        names[names.index("run.name")] = "the rollouts that --where chooses (the logs have grown?)"
    if names:
        raise ConfigError(
            f"this run was begun with other settings: {', '.join(names)}. Repeat its own command, "
            "or choose another --dir"
        )
