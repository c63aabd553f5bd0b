"""The whole control flow of a training run, from the first record to the last.

Around a step the order of durable records is: plan -> train -> step -> [checkpoint] -> refit ->
policy -> resume. Whatever is in flight when the driver dies is found again by folding the log:
steps that were planned are executed again (redo), prompts that were issued and not settled are
issued again (invariants I4 and I5).

    prompts -> engine <- agents -> segments, rewards, rollouts -> log
                 ^                                                 | fold
                 +---- refit <- step <- trainer <- plan <----------+
"""

import asyncio
import json
import signal
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from molt import checkpoints, startup
from molt.cluster import Cluster
from molt.config import Config
from molt.data import Prompts
from molt.metrics import StepClock, plan_metrics
from molt.planning import Drop, groups_to_issue, oldest_version, plan_group, plan_header
from molt.publish import Published, Publisher
from molt.replay.redo import plan_digest, redo
from molt.rollout.worker import Assignment
from molt.schemas.errors import MoltError
from molt.schemas.records import PlanRow, PromptRow
from molt.schemas.text import canonical_json
from molt.screen import Screen
from molt.store import Log
from molt.store.fold import COLUMNS as FOLD_COLUMNS
from molt.store.fold import STREAMS as FOLD_STREAMS
from molt.store.fold import Fold, Group, unsettled


async def train(config: Config, screen: Screen, *, accept_changes: bool = False) -> Log:
    """Start or resume the run of `config.run.dir` and train until `run.steps` or a signal."""
    if startup.is_complete(config):
        screen.say(f"{config.run.dir} has all its {config.run.steps} steps; nothing to do. Another")
        screen.say("run: --set run.dir=... ; a longer one: --set run.steps=...")
        return Log.open(config.run.dir)
    prompts = Prompts(config.data, config.run.seed)
    model_folder = startup.prepare_model(config, screen)
    log, epoch = startup.open_log(config, model_folder, accept_changes, screen)
    cluster = Cluster(config, log.path, epoch, model_folder)
    run = Run(config, screen, log, epoch, cluster, prompts)
    try:
        await run.start()
        if run.step == 0:
            await run.evaluate()
        while run.step < config.run.steps:
            plan = await run.plan()
            if plan is None:
                await run.checkpoint()
                break
            await run.train(plan)
            await run.publish()
        if run.step == config.run.steps:
            await run.evaluate()
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
        self.fold = Fold(log.tail(streams=FOLD_STREAMS, columns=FOLD_COLUMNS))
        self.step = 0
        """Last step whose record is durable."""
        self.version = 0
        """Version that the engines sample with."""
        self.started = self.stopping = False
        self.clock = StepClock()
        self._playing: set[asyncio.Task[None]] = set()
        self._issued_at: dict[str, int] = {}
        self._drops_in_a_row: list[Drop] = []

    # -- start and stop ------------------------------------------------------------------------

    async def start(self) -> None:
        """Processes, recovery, proof that the engine runs our weights, and unsettled prompts."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        self.fold.update()
        await startup.start_processes(self.cluster, self.screen)
        self.publisher = Publisher(
            self.cluster.trainers,
            self.cluster.engines,
            self.epoch,
            self.config.engine.dtype,
            self.config.limits,
            self.cluster.call,
        )
        await self.recover()
        await startup.prove_engine(self, self.screen)
        with self.screen.phase("publishing the first weights, starting rollout workers"):
            self.record_policy(await self.publisher.refit(self.step))
            await self.publisher.resume()
            await self.cluster.start_workers()
        self.started = True
        self.issue_again("eval")
        self.issue_again("train")

    async def recover(self) -> None:
        """Checkpoint + redo: the state after the last planned step, bit for bit."""
        found = await checkpoints.load(self)
        after = 0
        if found is not None:
            after = self.step = found["step"]
        plans = {s: n for s, n in self.fold.plans.items() if s > after}
        if plans:
            self.screen.say(f"redo of {len(plans)} step(s) after step {after}, from the log")
        async for step, outcome in redo(self.cluster.execute, plans, self.fold.digests, after):
            if step not in self.fold.digests:
                self.record_step(step, self.log.records(plans[step])[0].rows, outcome)
            self.step = step
            self.screen.say(f"step {step} redone: state {outcome.state_digest} as recorded")

    def _stop(self) -> None:
        if self.stopping or not self.started:
            raise KeyboardInterrupt  # there is no step to finish
        self.stopping = True
        self.screen.say("stopping after this step; press Ctrl-C again to stop at once")

    async def close(self) -> None:
        """End everything; the log stays readable and the same command goes on."""
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
        with self.screen.phase("closing"):
            try:
                await self.cluster.close()
            finally:
                self.writer.close()

    # -- prompts -------------------------------------------------------------------------------

    def issue(self) -> None:
        """Issue as many new prompts as the lag limit allows; durable before they are dispatched."""
        self.fold.update()
        n = groups_to_issue(
            planned=self.fold.last_planned,
            version=self.version,
            unsettled=len(self.fold.open_groups("train")),
            config=self.config,
        )
        first = self.fold.next_ordinal.get("train", 0)
        prompts = [(k, self.prompts.train(k)) for k in range(first, first + n)]
        self._issue("train", "train", prompts, self.config.data.rollouts_per_group)

    def _issue(
        self, purpose: str, dataset: str, prompts: Sequence[tuple[int, dict[str, Any]]], n: int
    ) -> None:
        rows = [
            PromptRow(
                ordinal=k,
                group_id=f"{purpose}-{k}",
                purpose=purpose,
                dataset=dataset,
                prompt=canonical_json(prompt),
                n=n,
                attempt=0,
                reason="new",
            )
            for k, prompt in prompts
        ]
        self._append_and_dispatch(
            rows, [[(f"{r.group_id}/{i}", 0) for i in range(n)] for r in rows]
        )

    def issue_again(self, purpose: str) -> None:
        """Issue what earlier epochs left unfinished: new attempts of the missing rollouts (I5)."""
        rows, missing = [], []
        for group, again in unsettled(self.fold, purpose):
            prompt = self.log.row(group.prompt_ref)["prompt"]
            rows.append(
                PromptRow(
                    ordinal=group.ordinal,
                    group_id=group.group_id,
                    purpose=purpose,
                    dataset=group.dataset,
                    prompt=prompt,
                    n=group.n,
                    attempt=max(attempt for _, attempt in again),
                    reason="reissue",
                    rollouts=[{"rollout_id": r, "attempt": a} for r, a in again],
                )
            )
            missing.append(again)
        if rows:
            self.screen.say(f"issuing {len(rows)} unfinished {purpose} prompt(s) again")
        self._append_and_dispatch(rows, missing)

    def _append_and_dispatch(
        self, rows: Sequence[PromptRow], rollouts: Sequence[list[tuple[str, int]]]
    ) -> None:
        tickets = [self.writer.append("prompts", row) for row in rows]
        self.writer.flush()
        for ticket in tickets:
            ticket.result()
        for row, pairs in zip(rows, rollouts, strict=True):
            self._issued_at[row.group_id] = self.version
            worker = self.cluster.workers[row.ordinal % len(self.cluster.workers)]
            play = [
                Assignment(
                    group_id=row.group_id,
                    rollout_id=rollout_id,
                    attempt=attempt,
                    purpose=row.purpose,
                    prompt=json.loads(row.prompt),
                )
                for rollout_id, attempt in pairs
            ]
            task = asyncio.create_task(self.cluster.call(worker, "play", play))
            self._playing.add(task)

    async def _news(self) -> None:
        """Wait until a group was played to its end; an error of a worker is raised here."""
        done: set[asyncio.Task[None]] = set()
        if self._playing:
            done, self._playing = await asyncio.wait(
                self._playing, timeout=0.5, return_when=asyncio.FIRST_COMPLETED
            )
        for task in done:
            task.result()
        self.clock.check_stuck(bool(done), self.config.run.stuck_s, self.fold)

    # -- one step ------------------------------------------------------------------------------

    async def plan(self) -> int | None:
        """Wait for enough closed groups and write their plan; its record number, None to stop."""
        step = self.step + 1
        self._phase("generation", f"step {step}: waiting for rollouts")
        while not self.stopping:
            self.issue()
            chosen = self.choose(step)
            if chosen is not None:
                header = asdict(plan_header(self.config, step, self.epoch))
                number = self.log.control.put("plan", chosen, header)
                self._drops_in_a_row.clear()
                self.issue()
                return number
            await self._news()
        return None

    def choose(self, step: int) -> list[PlanRow] | None:
        """The rows of this step's groups, or None while they are not all there.

        Oldest first, and never without a group that would be over the lag limit one step later.
        """
        ready: dict[str, list[PlanRow]] = {}
        for group in self.fold.closed_groups("train"):
            planned = plan_group(self.fold, group, step, self.config)
            if isinstance(planned, Drop):
                self.drop(planned)
            else:
                ready[group.group_id] = planned
        waiting = self.fold.open_groups("train")
        due = [g for g in waiting if self._lag_if_postponed(g, step) > self.config.algo.max_lag]
        if len(ready) < self.config.data.groups_per_step or any(
            g.group_id not in ready for g in due
        ):
            return None
        order = [g.group_id for g in due] + [g for g in ready if g not in {d.group_id for d in due}]
        return [row for g in order[: self.config.data.groups_per_step] for row in ready[g]]

    def _lag_if_postponed(self, group: Group, step: int) -> int:
        issued = self._issued_at.get(group.group_id, self.version)
        return step - min(issued, oldest_version(self.fold, group, issued))

    def drop(self, drop: Drop) -> None:
        """Settle a group without a step; a run that only drops is stopped with the reason."""
        self.log.control.put("drop", [drop], {})
        self.fold.update()
        self.screen.say(f"{drop.group_id} dropped: {drop.reason}")
        self._drops_in_a_row.append(drop)
        if len(self._drops_in_a_row) >= self.config.run.drops_in_a_row_max:
            raise MoltError(
                f"{len(self._drops_in_a_row)} groups in a row were dropped, the last one with "
                f"'{drop.reason}'; nothing can be trained. `molt sql {self.log.path} \"select "
                'reason, count(*) from rollouts group by 1"` shows all reasons'
            )

    async def train(self, plan: int) -> None:
        """Execute a durable plan, record the step, and checkpoint when it is due."""
        step = self.step + 1
        self._phase("training", f"step {step}: training, rollouts go on")
        outcome = await self.cluster.execute(plan)
        self.record_step(step, self.log.records(plan)[0].rows, outcome)
        self.step = step
        if step == self.config.run.steps or step % self.config.checkpoint.every == 0:
            await self.checkpoint()

    async def checkpoint(self) -> None:
        """Save the state after the last step, unless that is done or there is none."""
        if self.step and not any(row["step"] == self.step for row in self.fold.checkpoints):
            self._phase("checkpoint", f"step {self.step}: checkpoint")
            await checkpoints.save(self, self.fold.digests[self.step])

    def record_step(self, step: int, rows: Sequence[dict[str, Any]], outcome: Any) -> None:
        metrics = {**plan_metrics(rows), **outcome.metrics, "seconds": self.clock.lap()}
        groups = {r["group_id"] for r in rows}
        counts = {"rollouts": len(rows), "groups": len(groups), "plan": plan_digest(rows)}
        self.log.control.put(
            "step",
            [
                {
                    "epoch": self.epoch,
                    "step": step,
                    "updates": outcome.updates,
                    "loss": outcome.loss,
                    "grad_norm": outcome.grad_norm,
                    "n_tokens": outcome.n_tokens,
                    "counts": canonical_json(counts),
                    "metrics": canonical_json(metrics),
                    "state_digest": outcome.state_digest,
                }
            ],
        )
        self.fold.update()
        self.screen.step(
            step,
            self.config.run.steps,
            metrics,
            outcome.n_tokens / max(sum(metrics["seconds"].values()), 1e-9),
        )

    async def publish(self) -> None:
        """Refit the engines to the weights of the last step, record them, and go on sampling."""
        self._phase("refit", f"step {self.step}: refitting the engine, probe")
        self.record_policy(await self.publisher.refit(self.step))
        await self.publisher.resume()

    def record_policy(self, published: Published) -> None:
        row = {
            "epoch": self.epoch,
            "kv": "recomputed",
            "engines": [f"engine-{i}" for i in range(len(self.cluster.engines))],
            **asdict(published),
        }
        self.log.control.put("policy", [row])
        self.version = published.version
        self.fold.update()

    def _phase(self, name: str, text: str) -> None:
        self.clock.start(name)
        self.screen.doing(text)

    # -- evaluation ----------------------------------------------------------------------------

    async def evaluate(self) -> None:
        """Greedy answers to all held-out prompts with the current weights; once per step."""
        if not self.prompts.heldout:
            return
        dataset = f"heldout@{self.step}"
        self.fold.update()
        known = [g for g in self.fold.open_groups("eval") if g.dataset == dataset]
        first = self.fold.next_ordinal.get("eval", 0)
        fresh = self.prompts.heldout[len(known) :]
        with self.screen.phase(f"evaluating {len(self.prompts.heldout)} held-out prompts, greedy"):
            self._issue("eval", dataset, list(enumerate(fresh, first)), 1)
            while not self.stopping:
                self.fold.update()
                asked = [g for g in self.fold.open_groups("eval") if g.dataset == dataset]
                if all(self.fold.is_closed(g) for g in asked):
                    break
                await self._news()
