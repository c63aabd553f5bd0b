"""The whole control flow of a training run, from the first record to the last.

Around a step the order of durable records is: plan -> train -> step -> [checkpoint] -> refit ->
policy -> resume. Whatever is in flight when the driver dies is found again by folding the log:
steps that were planned are executed again (redo), prompts that were issued and not settled are
issued again (invariants I4 and I5).

    prompts -> engines <- agents -> segments, rewards, rollouts -> log
                  ^                                                 | fold
                  +---- refit <- step <- trainer <- plan <----------+
"""

import asyncio
import datetime
import functools
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from molt import checkpoints, recovery, startup
from molt.cluster import Cluster
from molt.config import Config
from molt.data import Prompts
from molt.issuing import Issuer, heldout
from molt.metrics import Meter, OffsetTest, at_path, plan_metrics
from molt.model import resolve_model
from molt.planning import (
    Drop,
    finished,
    oldest_version,
    plan_group,
    plan_header,
    progress,
    too_old,
    waiting_for_rewards,
)
from molt.publish import Published, Publisher
from molt.recovery import Start
from molt.replay.lag import holds_back
from molt.replay.redo import step_row
from molt.schemas.columns import Row
from molt.schemas.errors import EngineError, Fenced, MoltError
from molt.schemas.records import PlanRow, Version
from molt.screen import Screen
from molt.sinks import Sinks
from molt.store import Log
from molt.store.control import Record, read_record
from molt.store.fold import Group
from molt.store.retention import Upkeep

T = TypeVar("T")


async def train(config: Config, screen: Screen, start: Start | None = None) -> Log:
    """Start or resume the run of `config.run.dir` and train until `run.steps` or a signal."""
    start = start or Start()
    if start.is_plain and startup.is_complete(config):
        screen.say(f"{config.run.dir} has all its {config.run.steps} steps; nothing to do. Another")
        screen.say("run: --set run.dir=... ; a longer one: --set run.steps=...")
        return Log.open(config.run.dir)
    prompts = Prompts(config.data, config.run.seed)
    with screen.phase(f"model {config.model}"):
        model_folder = resolve_model(config.model)
    startup.check_room(config, model_folder, screen)
    log, epoch = startup.open_log(config, model_folder, start, screen)
    cluster = Cluster(config, log.path, epoch, model_folder, screen.say)
    run = Run(config, screen, log, epoch, cluster, prompts)
    try:
        await run.start(start)
        await run.evaluate_if_due()
        while run.step < config.run.steps and (plan := await run.plan()) is not None:
            await run.train(plan)
            await run.publish_if_due()
            await run.evaluate_if_due()
        await run.checkpoint()
    finally:
        await run.close()
    return log


class Run:
    """One epoch of a run: what the driver holds between two records."""

    def __init__(
        self,
        config: Config,
        screen: Screen,
        log: Log,
        epoch: int,
        cluster: Cluster,
        prompts: Prompts,
    ) -> None:
        self.config, self.screen, self.log, self.epoch = config, screen, log, epoch
        self.cluster, self.prompts = cluster, prompts
        self.writer = log.writer(epoch, linger_s=config.log.linger_s)
        self.step = 0
        """Last step whose record is durable."""
        self.state_digest: str | None = None
        """Of the trainer's state after `step`; None for the model's own weights."""
        self.version = 0
        """Version that the engines sample with."""
        self.started = self.stopping = False
        self.meter, self.sinks = Meter(), Sinks(config)
        self.offset_test = OffsetTest()
        self.metrics: dict[str, Any] = {}
        """Of the last step."""
        self.issuer = Issuer(self, prompts)
        self._ready: set[str] = set()
        """Groups that could be planned when `choose` last looked."""
        self._dropped_in_a_row: list[str] = []
        """Their reasons."""
        retire: Any = config.log.retire
        self.upkeep = Upkeep(Log.open(log.path), routing=retire)

    # -- start and stop ------------------------------------------------------------------------

    async def start(self, start: Start) -> None:
        """Processes, recovery, proof that the engines run our weights, and unsettled prompts."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        self.fold = recovery.open_fold(self.log, start, self.screen.say)
        for drop in recovery.asked_drops(self.fold, start.drop):
            self.drop(drop)
        await startup.start_processes(self.cluster, self.screen)
        self.publisher = Publisher(
            self.cluster.trainers,
            self.cluster.engines_by_name(),
            self.epoch,
            self.config.engine.dtype,
            self.config.limits,
            self.cluster.call,
            self.cluster.lost,
        )
        await recovery.recover(self)
        await startup.prove_engines(self, self.screen)
        with self.screen.phase("publishing the first weights, starting rollout workers"):
            await self.publish()
            await self.cluster.start_workers()
        self.started = True
        self.issuer.adopt()

    def _stop(self) -> None:
        if self.stopping or not self.started:
            raise KeyboardInterrupt  # there is no step to finish
        self.stopping = True
        self.screen.say("stopping after this step; press Ctrl-C again to stop at once")

    async def close(self) -> None:
        """End everything; the log stays readable and the same command goes on."""
        await self.issuer.close()
        with self.screen.phase("closing"):
            try:
                await self.cluster.close()
                await self._tidy(self.upkeep.close)
            finally:
                self.sinks.close()
                self.writer.close()

    # -- one step ------------------------------------------------------------------------------

    async def plan(self) -> Record | None:
        """Wait for enough closed groups and write their plan; None to stop."""
        step = self.step + 1
        self._phase("generation", f"step {step}: waiting for rollouts")
        while not self.stopping:
            await self.refit_restarted()
            self.issuer.fill()
            chosen = self.choose(step)
            if chosen is not None:
                return self.put_plan(step, chosen)
            self._check_drops()
            await self._news()
        return None

    def choose(self, step: int) -> list[PlanRow] | None:
        """The rows of this step's groups, oldest tokens first; None while it must wait.

        It waits for enough groups, and under `algo.lag = "wait"` for unfinished ones that one more
        version would push over the limit, but not for rewards alone. Groups that cannot be trained
        are dropped at once.
        """
        config, ready, slow = self.config, [], False
        known, self._ready = self._ready, set()
        backlog = {group.group_id for group, _ in self.issuer.backlog}
        for group in self.fold.open_groups("train"):
            if self.fold.is_closed(group):
                planned = plan_group(self.fold, group, step, config)
                if isinstance(planned, Drop):
                    self.drop(planned, group)
                    continue
                if group.group_id not in known:
                    self._dropped_in_a_row.clear()
                self._ready.add(group.group_id)
                ready.append((self._oldest(group), group.ordinal, planned))
            elif attempts := waiting_for_rewards(self.fold, group):
                if too_old(attempts, step, config.algo):
                    self.drop(Drop(group_id=group.group_id, rollout_id=None, reason="lag"), group)
            elif config.algo.lag == "wait" and group.group_id not in backlog:
                slow |= holds_back(
                    step - self._oldest(group),
                    config.algo.max_lag,
                    progress(self.fold, group, config.sampling.max_tokens),
                )
        if slow or len(ready) < config.data.groups_per_step:
            return None
        ready.sort(key=lambda item: item[:2])
        return [row for *_, rows in ready[: config.data.groups_per_step] for row in rows]

    def _oldest(self, group: Group) -> int:
        issued = self.issuer.issued_at.get(group.group_id, self.version)
        return min(issued, oldest_version(self.fold, group, issued))

    def put_plan(self, step: int, rows: Sequence[PlanRow]) -> Record:
        """Make the plan durable: from here on its groups are settled and the step will happen."""
        groups = {row.group_id: self.fold.groups[row.group_id] for row in rows}
        self.meter.trained = [o for group in groups.values() for o in self._outcomes(group)]
        plan = self._settle("plan", rows, plan_header(self.config, step))
        self.issuer.fill()
        return plan

    def drop(self, drop: Drop, group: Group | None = None) -> None:
        """Settle a group without a step."""
        self.meter.drop(drop.reason, self._outcomes(group) if group is not None else [])
        self._settle("drop", [drop], {})
        self.screen.say(f"{drop.group_id} dropped: {drop.reason}")
        self._dropped_in_a_row.append(drop.reason)

    def _check_drops(self) -> None:
        """A run that only drops is stopped with the reason."""
        reasons = self._dropped_in_a_row
        limit = max(self.config.run.drops_in_a_row_max, 10 * self.config.data.groups_per_step)
        if len(reasons) >= limit:
            raise MoltError(
                f"{len(reasons)} groups in a row were dropped, the last one with '{reasons[-1]}'; "
                f'nothing can be trained. `molt sql {self.log.path} "select reason, count(*) from '
                'rollouts group by 1"` shows all reasons'
            )

    def _settle(self, kind: str, rows: Sequence[Any], header: Mapping[str, Any]) -> Record:
        record = self.put(kind, rows, header)
        self.issuer.settle(record)
        return record

    def _outcomes(self, group: Group) -> list[Row]:
        return [a.outcome for a in finished(self.fold, group) if a.outcome is not None]

    async def train(self, plan: Record) -> None:
        """Execute a durable plan, record the step, and checkpoint when it is due."""
        step = self.step + 1
        self._phase("training", f"step {step}: training, rollouts go on")
        outcome = await self.meanwhile(self.cluster.execute(plan.n), "a trainer rank")
        self.meter.recomputed = await self.publisher.recomputed()
        self.record_step(step, plan.rows, outcome)
        self.step, self.state_digest = step, outcome.state_digest
        if step == self.config.run.steps or step % self.config.checkpoint.every == 0:
            await self.checkpoint()

    async def checkpoint(self) -> None:
        """Save the state after the last step, unless that is done or there is none."""
        if not self.step or any(row["step"] == self.step for row in self.fold.checkpoints):
            return
        self._phase("checkpoint", f"step {self.step}: checkpoint")
        best = self.config.checkpoint.best
        metric = at_path(self.metrics, best) if best else None
        await self.meanwhile(checkpoints.save(self, metric), "a trainer rank, or the disk")
        await self._tidy(functools.partial(self.upkeep.poke, datetime.datetime.now(datetime.UTC)))

    async def _tidy(self, call: Callable[[], None]) -> None:
        """Compaction and retention in the background: what goes wrong there stops nothing here."""
        try:
            await asyncio.to_thread(call)
        except (MoltError, OSError) as error:
            self.screen.say(f"upkeep of the log: {error}")

    def record_step(self, step: int, rows: Sequence[dict[str, Any]], outcome: Any) -> None:
        """Make a step durable, with all its metrics."""
        self.offset_test.check(step, outcome.metrics)
        driver = self.meter.take()
        seconds = {**driver["seconds"], "trainer": outcome.metrics["seconds"]}
        metrics = {**plan_metrics(rows), **driver, **outcome.metrics, "seconds": seconds}
        row = step_row(self.epoch, step, rows, outcome, metrics)
        self.put("step", [row])
        self.offset_test.add(step, metrics)
        self.metrics = metrics
        self.sinks.write(step, metrics)
        self.screen.step(step, self.config.run.steps, metrics)

    def put(
        self, kind: str, rows: Sequence[Any], header: Mapping[str, Any] | None = None
    ) -> Record:
        """One durable control record, folded at once; as every reader of the log sees it."""
        started = time.perf_counter()
        number = self.log.control.put(kind, rows, header)
        self.meter.commit_s.append(time.perf_counter() - started)
        folded = {record.n: record for record in self.catch_up()}
        return folded.get(number) or read_record(self.log.path, number)  # a listing may be late

    def catch_up(self) -> list[Record]:
        """Fold what is new in the log; Fenced if a newer epoch has begun: the run is another's."""
        records = self.fold.update()
        newest = self.fold.tail.lineage.newest_epoch
        if newest > self.epoch:
            raise Fenced(
                f"epoch {self.epoch} lost this log: epoch {newest} has begun. Another driver has "
                "taken over; this one stops and changes nothing"
            )
        return records

    # -- weights -------------------------------------------------------------------------------

    async def publish_if_due(self) -> None:
        """Refit every `algo.refit_every` steps, and after the last one."""
        due = self.step - self.version >= self.config.algo.refit_every
        if due or self.step == self.config.run.steps:
            await self.publish()

    async def publish(self) -> None:
        """Refit the engines to the weights of the last step, record them, and go on sampling.

        Engines that were started again take part, before their first token; if the last one dies
        on the way, its successor is waited for.
        """
        self._phase("refit", f"step {self.step}: refitting the engines, probe")
        fresh: dict[str, Any] = {}
        while True:
            fresh |= self.cluster.restarted()
            self.publisher.engines |= fresh
            try:
                refit = self.publisher.refit(self.step)
                published = await self.meanwhile(refit, "an engine, or a trainer rank")
                self.meter.refit = self.publisher.parts
                if Version(epoch=self.epoch, version=self.step) not in self.fold.policies:
                    self.record_policy(published)
                await self.publisher.resume()
                break
            except EngineError:
                if self.publisher.engines or not await self.cluster.restart_done():
                    raise
        await self.cluster.announce(fresh)

    async def refit_restarted(self) -> None:
        """Give engines that are up again the present weights."""
        if self.cluster.has_restarted():
            self.screen.say("an engine is up again: refitting")
            await self.publish()
            self._phase("generation", f"step {self.step + 1}: waiting for rollouts")

    def record_policy(self, published: Published) -> None:
        self.meter.recompute_tokens += published.recompute_tokens
        row = {"epoch": self.epoch, "kv": self.config.engine.kv, **asdict(published)}
        self.put("policy", [row])
        self.version = published.version

    # -- evaluation and waiting ----------------------------------------------------------------

    async def evaluate_if_due(self) -> None:
        """Greedy answers to all held-out prompts with the current weights; once per step."""
        every, last = self.config.run.eval_every, self.config.run.steps
        due = self.step in (0, last) or (every and self.step % every == 0)
        if not due or not self.prompts.heldout or self.stopping:
            return
        if self.version != self.step:
            await self.publish()
        dataset = heldout(self.step)
        self.catch_up()
        known = [g for g in self.fold.open_groups("eval") if g.dataset == dataset]
        first = self.fold.next_ordinal.get("eval", 0)
        fresh = self.prompts.heldout[len(known) :]
        with self.screen.phase(f"evaluating {len(self.prompts.heldout)} held-out prompts, greedy"):
            self._phase("evaluation", f"step {self.step}: evaluation")
            self.issuer.issue("eval", dataset, list(enumerate(fresh, first)), 1)
            while not self.stopping:
                await self.refit_restarted()
                self.catch_up()
                asked = [g for g in self.fold.open_groups("eval") if g.dataset == dataset]
                if all(self.fold.is_closed(g) for g in asked):
                    for group in asked:
                        self.fold.forget(group.group_id)
                    break
                await self._news()

    async def _news(self) -> None:
        """Wait for rollouts; a run in which nothing finishes is stopped and says who waits."""
        news = await self.issuer.news()
        self.meter.clock.check_stuck(news, self.config.run.stuck_s, self.fold)

    async def meanwhile(self, work: Awaitable[T], who: str) -> T:
        """The result of `work`, for which `who` is waited no longer than `run.stuck_s`.

        Rollouts go on until then: groups that cannot be trained are dropped, others asked for.
        """
        task, began = asyncio.ensure_future(work), time.monotonic()
        try:
            while not task.done():
                ended = await self.issuer.news(task)
                self.catch_up()
                if ended and not self.stopping:
                    self.choose(self.fold.last_planned + 1)
                    self.issuer.fill()
                if not task.done():
                    self.meter.clock.check_hung(who, began, self.config.run.stuck_s)
            return task.result()
        finally:
            task.cancel()

    def _phase(self, name: str, text: str) -> None:
        self.meter.clock.start(name)
        self.screen.doing(text)
