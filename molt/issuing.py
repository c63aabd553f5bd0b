"""Prompts out and rollouts in: what is asked, who plays it, and what is asked again.

A prompts row is durable before its rollouts are dispatched, and a group is open until a plan or a
drop settles it, so whatever dies in between is found in the log and issued again (invariant I5).
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

from molt.data import Prompts, View, settled_rewards
from molt.planning import groups_to_issue
from molt.rollout.types import Assignment
from molt.schemas.errors import WorkerDied
from molt.schemas.records import PromptRow, Ref
from molt.schemas.text import canonical_json
from molt.store.control import Record
from molt.store.fold import Group, unsettled

if TYPE_CHECKING:
    from molt.loop import Run

NEWS_S = 0.5
"""How long rollouts are waited for before the log is looked at."""

Again = tuple[Group, list[tuple[str, int]]]
"""A group and the attempts of it to play: (rollout_id, attempt)."""


@dataclass(frozen=True, slots=True)
class Play:
    """One call of a worker."""

    group_id: str
    purpose: str
    worker: int
    actor: Any


def heldout(step: int) -> str:
    """Data set of the held-out prompts that the weights of `step` answer."""
    return f"heldout@{step}"


def new_group(purpose: str, dataset: str, k: int, prompt: dict[str, Any], n: int) -> PromptRow:
    """The first issue of the prompt of ordinal `k`, for `n` rollouts."""
    return PromptRow(
        ordinal=k,
        group_id=f"{purpose}-{k}",
        purpose=purpose,
        dataset=dataset,
        prompt=canonical_json(prompt),
        n=n,
        attempt=0,
        reason="new",
    )


class Issuer:
    """Keeps the engines busy within the lag limit."""

    def __init__(self, run: "Run", prompts: Prompts) -> None:
        self.run, self.prompts = run, prompts
        self.rewards: dict[int, float | None] = {}
        """Settled groups: ordinal -> mean reward, for samplers."""
        self.issued_at: dict[str, int] = {}
        """group_id -> version on the engines when its newest rollouts were dispatched."""
        self.backlog: deque[Again] = deque()
        """Unfinished groups of earlier epochs that are not dispatched yet."""
        self._playing: dict[asyncio.Task[None], Play] = {}

    def adopt(self) -> None:
        """Take over what earlier epochs left unfinished, and the rewards of what they settled.

        Held-out prompts that other weights were to answer are let go: these are not those weights.
        """
        fold, now = self.run.fold, heldout(self.run.step)
        if self.prompts.wants_rewards:
            for record in self.run.log.records():
                if fold.tail.lineage.holds(record.n):
                    self.rewards |= settled_rewards(record)
        self.backlog.extend(unsettled(fold, "train"))
        for group in fold.open_groups("eval"):
            if group.dataset != now:
                fold.forget(group.group_id)
        self.issue_again(list(unsettled(fold, "eval")), "eval")

    def settle(self, record: Record) -> None:
        """What a plan or drop settled needs no more care, and its rewards are known."""
        for row in record.rows:
            self.issued_at.pop(row["group_id"], None)
        if self.prompts.wants_rewards:
            self.rewards |= settled_rewards(record)

    def fill(self) -> None:
        """Dispatch as many groups as the lag limit allows: unfinished ones first, then new ones."""
        run = self.run
        run.catch_up()
        n = groups_to_issue(
            planned=run.fold.last_planned,
            version=run.version,
            unsettled=len(run.fold.open_groups("train")) - len(self.backlog),
            config=run.config,
        )
        again = [self.backlog.popleft() for _ in range(min(n, len(self.backlog)))]
        self.issue_again(again, "train")
        first = run.fold.next_ordinal.get("train", 0)
        if n > len(again):
            view = View(
                seed=run.config.run.seed, first=first, n=n - len(again), rewards=self.rewards
            )
            prompts = list(enumerate(self.prompts.next(view), first))
            self.issue("train", "train", prompts, run.config.data.rollouts_per_group)

    def issue(
        self, purpose: str, dataset: str, prompts: Sequence[tuple[int, dict[str, Any]]], n: int
    ) -> None:
        """New groups of `n` rollouts, by ordinal."""
        rows = [new_group(purpose, dataset, k, prompt, n) for k, prompt in prompts]
        self._dispatch(rows, [[(f"{r.group_id}/{i}", 0, ()) for i in range(n)] for r in rows])

    def issue_again(self, groups: Sequence[Again], purpose: str) -> None:
        """New attempts of the rollouts that groups lack."""
        if not groups:
            return
        self.run.screen.say(f"issuing {len(groups)} unfinished {purpose} prompt(s) again")
        self.run.meter.reissued += len(groups)
        rows = [
            PromptRow(
                ordinal=group.ordinal,
                group_id=group.group_id,
                purpose=purpose,
                dataset=group.dataset,
                prompt=self.run.log.row(group.prompt_ref)["prompt"],
                n=group.n,
                attempt=max(attempt for _, attempt in again),
                reason="reissue",
                rollouts=[{"rollout_id": r, "attempt": a} for r, a in again],
            )
            for group, again in groups
        ]
        begun = [[(r, a, self._begun(group, r)) for r, a in again] for group, again in groups]
        self._dispatch(rows, begun)

    def _begun(self, group: Group, rollout_id: str) -> tuple[Ref, ...]:
        """Segments of the newest earlier attempt in this lineage, as far as they are whole."""
        attempts = group.attempts.get(rollout_id, {})
        for number in sorted(attempts, reverse=True):
            attempt = attempts[number]
            if attempt.segments and not attempt.conflict and self.run.fold.in_lineage(attempt):
                whole = takewhile(attempt.segments.__contains__, count())
                return tuple(attempt.segments[i].ref for i in whole)
        return ()

    def _dispatch(
        self,
        rows: Sequence[PromptRow],
        rollouts: Sequence[list[tuple[str, int, tuple[Ref, ...]]]],
    ) -> None:
        if not rows:
            return
        run, started = self.run, time.perf_counter()
        tickets = [run.writer.append("prompts", row) for row in rows]
        run.writer.flush()
        for ticket in tickets:
            ticket.result()
        run.meter.commit_s.append(time.perf_counter() - started)
        for row, attempts in zip(rows, rollouts, strict=True):
            self.issued_at[row.group_id] = run.version
            n = row.ordinal % len(run.cluster.workers)
            play = [
                Assignment(
                    group_id=row.group_id,
                    rollout_id=rollout_id,
                    attempt=attempt,
                    purpose=row.purpose,
                    prompt=json.loads(row.prompt),
                    source=source,
                )
                for rollout_id, attempt, source in attempts
            ]
            worker = run.cluster.workers[n]
            task = asyncio.create_task(run.cluster.call(worker, "play", play))
            run.meter.clock.playing(1)
            task.add_done_callback(lambda _: run.meter.clock.playing(-1))
            self._playing[task] = Play(row.group_id, row.purpose, n, worker)

    async def news(self, *others: asyncio.Future[Any]) -> bool:
        """Wait until a group was played to its end, half a second at most; True if one was.

        What a worker raises is raised here, but its death: it is started again, and what it had not
        finished is issued again under new attempts. With `others`, which end the wait too, that is
        left to a later wait without, so that it does not stop their work.
        """
        playing = [t for t in self._playing if not (others and t.done())]
        waiting: set[asyncio.Future[Any]] = {*playing, *others}
        if not waiting:
            await asyncio.sleep(NEWS_S)
            return False
        done, _ = await asyncio.wait(waiting, timeout=NEWS_S, return_when=asyncio.FIRST_COMPLETED)
        played = [t for t in playing if t in done and not (others and t.exception())]
        for task in played:
            if (play := self._playing.pop(task, None)) is not None:
                try:
                    task.result()
                except WorkerDied:
                    await self._replace(play)
        return bool(played)

    async def _replace(self, dead: Play) -> None:
        """Another worker in the place of a dead one, for everything the dead one was playing."""
        run = self.run
        run.cluster.check_restarts(f"worker-{dead.worker}")
        lost = {t: p for t, p in self._playing.items() if p.actor is dead.actor}
        await asyncio.gather(*lost, return_exceptions=True)
        for task in lost:
            del self._playing[task]
        groups = {p.group_id for p in (dead, *lost.values())}
        await run.cluster.start_worker(dead.worker)
        run.catch_up()
        for purpose in ("train", "eval"):
            again = [g for g in unsettled(run.fold, purpose) if g[0].group_id in groups]
            self.issue_again(again, purpose)

    async def close(self) -> None:
        """Stop waiting for rollouts in flight."""
        for task in self._playing:
            task.cancel()
        await asyncio.gather(*self._playing, return_exceptions=True)
