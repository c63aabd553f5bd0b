"""The audit's second pass: each plan against the rows that it names (I1, I2, I4).

The control log says what was trained (digest of the chain, reward, advantage, lag, tokens of the
step); the rows say what happened. Neither is derived from the other here.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from molt.replay.assemble import PlannedSegment, TrainSequence, segments_of, sequences_of
from molt.replay.audit_control import Fact, Facts, setting
from molt.replay.audit_report import Report
from molt.replay.sources import Sources, log_of
from molt.schemas.check import chain_digest
from molt.schemas.columns import Row
from molt.schemas.errors import LogCorrupt, MoltError, Retired
from molt.schemas.records import Ref
from molt.store.branches import tips
from molt.store.control import Record, lineage_of, read_record
from molt.store.log import Log

Advantages = Callable[[Sequence[float | None], Sequence[bool], str, bool], list[float]]
"""(rewards of a group, in_baseline, estimator's name, std_normalize) -> one per rollout."""

CACHE_BYTES = 16 << 20
Version = tuple[int, int]
INDEX = re.compile(r"segment (\d+): .*?index (\d+)")


def refused(report: Report, error: Exception, rollout: str) -> None:
    """A row that breaks a rule of its own, named as its error names it."""
    place = INDEX.search(str(error))
    segment, token = (int(place[1]), int(place[2])) if place else (None, None)
    report.violation("I1", str(error), rollout=rollout, segment=segment, token=token)


def check_versions(
    report: Report,
    row: Mapping[str, Any],
    is_known: Callable[[Version], bool],
    why: str,
    expected: str | None = None,
) -> None:
    """I2: report the first token of every run of a segment whose weights are not known."""
    at = 0
    for run in row["version_runs"]:
        if not is_known((run["epoch"], run["version"])):
            name = f"{run['epoch']}.{run['version']}"
            report.violation(
                "I2",
                f"sampled by {name}, {why}",
                rollout=row["rollout_id"],
                segment=row["segment"],
                token=int(np.flatnonzero(row["sampled"])[at]),
                expected=expected,
                found=name,
            )
        at += run["n"]


class PlanPass:
    """Verifies the plans of a log, one in memory at a time."""

    def __init__(
        self, log: Log, report: Report, facts: Facts, advantages: Advantages | None
    ) -> None:
        self.log, self.report, self.facts, self.advantages = log, report, facts, advantages
        self._sources: dict[int, Sources] = {}
        self._foreign: dict[tuple[int, int], set[Version]] = {}
        self._damaged: set[str] = set()

    def run(self) -> None:
        plans = [f for f in self.facts.records if f.kind == "plan"]
        steps: dict[int, list[Fact]] = defaultdict(list)
        for fact in self.facts.records:
            if fact.kind == "step":
                steps[fact.step].append(fact)
        for i, fact in enumerate(plans):
            # If its driver died before the record, a later epoch executed and recorded it.
            executed = (f.row for f in steps[fact.step] if self._continues(f, fact))
            self.check(read_record(self.log.path, fact.n), next(executed, None))
            for source in self._sources.values():
                source.commits.clear()
            self.report.progress(i + 1, len(plans), "plans")

    def _continues(self, later: Fact, fact: Fact) -> bool:
        lineage = lineage_of(self.facts.epochs, later.epoch)
        return later.n > fact.n and lineage.holds(fact.n)

    def check(self, plan: Record, step: Row | None) -> None:
        if plan.epoch not in self._sources:
            self._sources = {plan.epoch: Sources(self.log, plan.epoch, CACHE_BYTES)}
        source = self._sources[plan.epoch]
        n_tokens: int | None = 0
        seen: set[tuple[int, str]] = set()
        groups: dict[tuple[int, str], list[Row]] = defaultdict(list)
        for row in plan.rows:
            index = log_of(row)
            if (index, row["rollout_id"]) in seen:
                why = f"the plan of step {plan.header['step']} lists it twice"
                self.report.violation("I4", why, rollout=row["rollout_id"])
            seen.add((index, row["rollout_id"]))
            groups[index, row["group_id"]].append(row)
            found = self._rollout(plan, row, source)
            n_tokens = n_tokens + found if found is not None and n_tokens is not None else None
        for rows in groups.values():
            self._group(plan, rows)
        if step is not None and n_tokens is not None:
            what = f"step {step['step']}: trained tokens of its plan (record {plan.n})"
            self.report.differ("I4", what, step["n_tokens"], n_tokens)

    def _rollout(self, plan: Record, row: Row, source: Sources) -> int | None:
        """Trained tokens of one planned rollout; None if that cannot be told."""
        try:
            self._reward(plan, row, source)
            segments = segments_of(source, row)
            self._routing(row, segments, source)
            if log_of(row):  # of this log the third pass counts them
                self.report.checked["I1"] += len(segments)
                self.report.tokens += sum(s.n_tokens for s in segments.values())
            self._identity(row, segments)
            self._versions(plan, row, segments, source)
            if row["decision"] == "baseline_only":
                return 0
            for tip in {branch["tip"] for branch in row["branches"]} - segments.keys():
                raise LogCorrupt(f"the plan names branch {tip} of {row['rollout_id']} without it")
            sequences = sequences_of(row, segments, plan.header["step"], plan.header["max_lag"])
            self._coverage(plan, row, sequences, source)
            return sum(int(s.mask.sum()) for s in sequences)
        except Retired:
            self.report.retired += 1
        except (MoltError, OSError) as error:
            self._refused(error, row["rollout_id"])
        return None

    def _refused(self, error: Exception, who: str) -> None:
        if not isinstance(error, OSError):
            refused(self.report, error, who)
        elif str(error) not in self._damaged:  # one commit holds the rows of many rollouts
            self._damaged.add(str(error))
            self.report.violation("I6", str(error), rollout=who)

    def _identity(self, row: Row, segments: Mapping[int, PlannedSegment]) -> None:
        """I1: the chains are the ones that were planned."""
        if row["chain_digest"] is None or not segments:
            return
        own = chain_digest([segments[t].row["digest"] for t in tips(segments)])
        what = f"{row['rollout_id']}: tokens, masks, logprobs and versions as they were planned"
        self.report.differ("I1", what, row["chain_digest"], own, rollout=row["rollout_id"])

    def _versions(
        self, plan: Record, row: Row, segments: Mapping[int, PlannedSegment], source: Sources
    ) -> None:
        """I2: each version was published before the plan, in its lineage; lag as recorded."""
        who, step = row["rollout_id"], plan.header["step"]
        known = self._policies(plan, row, source)
        newest = max(known, default=None)
        expected = f"at most {newest[0]}.{newest[1]}" if newest else None
        why = f"which was not published in this lineage before the plan of step {step}"
        for segment in segments.values():
            check_versions(
                self.report, segment.row, known.__contains__, f"{why} (record {plan.n})", expected
            )
        runs = (run for segment in segments.values() for run in segment.row["version_runs"])
        versions = [run["version"] for run in runs]
        if not segments or (row["lag_max"] is None and log_of(row)):
            return  # of other runs' versions no lag can be told
        lag = (step - 1) - min(versions) if versions else None
        self.report.differ("I2", f"{who}: its largest lag", row["lag_max"], lag, rollout=who)
        rule = setting(self.facts.configs[plan.epoch], "algo.lag")
        limit = plan.header["max_lag"] * {"keep": math.inf, "wait": 2}.get(rule, 1)
        if row["decision"] == "train" and lag is not None and lag > limit:
            why = f"trained at step {step} above the plan's max_lag"
            self.report.violation("I2", why, rollout=who, expected=limit, found=lag)

    def _policies(self, plan: Record, row: Row, source: Sources) -> set[Version]:
        index = log_of(row)
        if index:
            key = (plan.epoch, index)
            if key not in self._foreign:
                records = source.log(index).records()
                rows = [r.rows[0] for r in records if r.kind == "policy"]
                self._foreign[key] = {(r["epoch"], r["version"]) for r in rows}
            return self._foreign[key]
        lineage = lineage_of(self.facts.epochs, plan.epoch)
        return {v for v, n in self.facts.policies.items() if n < plan.n and lineage.holds(n)}

    def _reward(self, plan: Record, row: Row, source: Sources) -> None:
        """The planned reward is the weighted sum of the rows that it names."""
        config = self.facts.configs[plan.epoch]
        weights, total = setting(config, "reward.weights", {}), 0.0
        for ref in row["reward_refs"]:
            reward = source.row(Ref(**ref))
            named = {"rollout": row["rollout_id"], "segment": reward["segment"]}
            owner = (row["rollout_id"], row["attempt"])
            found = (reward["rollout_id"], reward["attempt"])
            self.report.differ("I1", "owner of a planned reward", owner, found, **named)
            value = math.nan if reward["value"] is None else reward["value"]
            total += weights.get(reward["name"], 1.0) * value
        if row["reward"] is not None and row["reward_refs"]:
            what = f"{row['rollout_id']}: its reward at step {plan.header['step']}"
            named = {"rollout": row["rollout_id"]}
            self.report.differ("I1", what, row["reward"], total, **named)

    def _group(self, plan: Record, rows: list[Row]) -> None:
        """The planned advantages are those of the planned rewards."""
        if self.advantages is None:
            return
        name = plan.header["algorithm"].partition("/")[0]
        scale = bool(setting(self.facts.configs[plan.epoch], "algo.std_normalize", False))
        member = [r["in_baseline"] for r in rows]
        values = self.advantages([r["reward"] for r in rows], member, name, scale)
        for row, value in zip(rows, values, strict=True):
            found = value if row["in_baseline"] else 0.0
            what = f"{row['rollout_id']}: its advantage at step {plan.header['step']}"
            named = {"rollout": row["rollout_id"]}
            self.report.differ("I1", what, float(row["advantage"]), float(found), **named)

    def _coverage(
        self, plan: Record, row: Row, sequences: Sequence[TrainSequence], source: Sources
    ) -> None:
        """I3: experts are recorded for as much of each trained sequence as the run demanded."""
        config = self.facts.configs[plan.epoch]
        if setting(config, "train.routing", "off") == "off":
            return
        limit = setting(config, "limits.routing_coverage", 0.9)
        refs = {branch["tip"]: branch["refs"] for branch in row["branches"]}
        for sequence in (s for s in sequences if s.mask.any()):
            known = np.zeros(int(np.flatnonzero(sequence.mask)[-1]), bool)
            for place in (source.routing_place(Ref(**ref)) for ref in refs[sequence.tip]):
                if place is not None:
                    known[place[1] : place[1] + place[2]] = True
            if known.mean() < limit:
                self.report.violation(
                    "I3",
                    f"experts are recorded for {known.sum()} of {len(known)} tokens",
                    rollout=row["rollout_id"],
                    segment=sequence.tip,
                    token=int(known.argmin()),
                    expected=limit,
                    found=float(known.mean()),
                )

    def _routing(self, row: Row, segments: Mapping[int, PlannedSegment], source: Sources) -> None:
        """Planned expert choices are of this attempt and within its chain."""
        refs = {Ref(**ref) for b in row["branches"] for ref in b["refs"]}
        for found in (source.row(r) for r in sorted(refs) if source.stream(r) == "routing"):
            named = {"rollout": row["rollout_id"], "segment": found["segment"]}
            owner, who = (
                (row["rollout_id"], row["attempt"]),
                (found["rollout_id"], found["attempt"]),
            )
            if self.report.differ("I3", "owner of planned routing", owner, who, **named):
                continue
            segment = segments.get(found["segment"])
            end = segment.keep + segment.n_tokens if segment else 0
            last = found["start"] + found["n"]
            if last > end:
                why = "planned routing reaches beyond the end of its chain"
                named["token"] = end
                self.report.violation("I3", why, expected=end, found=last, **named)
