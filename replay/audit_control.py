"""The audit's first pass: what the control log says of itself (I2, I4, I7), in its own order.

Of each record a few scalars are kept. A lineage is then walked like a driver would have written it:
plans in the order of steps, each group settled once per pass, steps after their plans, policies
after their steps, equal weights under equal names.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from molt.replay.audit_report import Report
from molt.replay.redo import plan_counts
from molt.replay.sources import log_of
from molt.schemas.columns import Row
from molt.schemas.errors import MoltError
from molt.store.control import Lineage, Record, control_numbers, lineage_of, read_record
from molt.store.log import Log

GroupKey = tuple[int, str]
"""(log, group_id): groups of other logs have names of their own."""


@dataclass(slots=True)
class Fact:
    """A control record without its bulk."""

    n: int
    kind: str
    epoch: int
    step: int
    """Of a plan, step or checkpoint; a policy's version."""
    row: Row = field(default_factory=dict)
    groups: dict[GroupKey, int] = field(default_factory=dict)
    """Settled by this record -> number of its rollouts planned (0: dropped)."""
    dropped: set[str] = field(default_factory=set)
    """Of a drop: rollouts that it takes out of their groups. Of a plan: those of its members that
    an earlier record, of whatever lineage, had taken out."""


@dataclass(slots=True)
class Facts:
    """The control log, condensed."""

    records: list[Fact] = field(default_factory=list)
    epochs: list[Record] = field(default_factory=list)
    policies: dict[tuple[int, int], int] = field(default_factory=dict)
    """(epoch, version) -> number of its record."""
    settled: dict[GroupKey, int] = field(default_factory=dict)
    """In the newest lineage: rollouts planned, 0 = dropped."""
    dropped: set[str] = field(default_factory=set)
    """In the newest lineage: rollouts that were taken out of their groups."""
    configs: dict[int, Row] = field(default_factory=dict)
    """By epoch."""


def setting(config: Row, key: str, default: Any = None) -> Any:
    """`setting(config, "algo.max_lag")`; the default where a section or key is not there."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return default if value is None else value


def parsed(report: Report, what: str, text: str, rollout: str | None = None) -> Row:
    """The JSON object in a text column; any other text is a violation of I6, and read as {}."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    why = f"{what}: {text[:40]!r} is no JSON object"
    report.violation("I6", why, rollout=rollout)
    return {}


def read_facts(log: Log, report: Report) -> Facts:
    """All control records, one in memory at a time; holes and damage are violations of I6."""
    facts, expected = Facts(), 0
    dropped: set[str] = set()
    numbers = control_numbers(log.path)
    for n in numbers:
        for missing in range(expected, n):
            report.violation("I6", f"control record {missing} is missing", expected=missing)
        expected = n + 1
        try:
            record = read_record(log.path, n)
        except (MoltError, OSError) as error:
            report.violation("I6", str(error))
            continue
        report.checked["I6"] += 1
        facts.records.append(_fact(record, dropped))
        if record.kind == "epoch":
            facts.epochs.append(record)
            what = f"config of epoch {record.epoch} (record {n})"
            facts.configs[record.epoch] = parsed(report, what, record.rows[0]["config"])
        elif record.kind == "policy":
            facts.policies[record.epoch, facts.records[-1].step] = n
        report.progress(n + 1, len(numbers), "control log")
    return facts


def _fact(record: Record, dropped: set[str]) -> Fact:
    """`dropped`: rollouts that were taken out of their groups so far; a drop adds its own."""
    row = record.rows[0] if record.rows else {}
    known = {**row, **record.header}
    step = known.get("step", known.get("version")) or 0
    fact = Fact(n=record.n, kind=record.kind, epoch=record.epoch, step=step)
    if record.kind == "plan":
        fact.groups = dict(Counter((log_of(r), r["group_id"]) for r in record.rows))
        members = (r for r in record.rows if r["in_baseline"] or r["decision"] != "baseline_only")
        fact.dropped = {r["rollout_id"] for r in members if not log_of(r)} & dropped
        fact.row = {
            "data_pass": record.header["data_pass"],
            "counts": plan_counts(record.rows),
        }
    elif record.kind == "drop":
        fact.groups = {(0, r["group_id"]): 0 for r in record.rows if r["rollout_id"] is None}
        fact.dropped = {r["rollout_id"] for r in record.rows if r["rollout_id"] is not None}
        dropped |= fact.dropped
    else:
        fact.row = {k: v for k, v in row.items() if k not in ("sketch", "config", "files")}
    return fact


def leaves(epochs: Sequence[Record]) -> Iterator[int]:
    """The newest epoch, and each one that a later epoch did not continue from its end."""
    for record in epochs:
        ends = [lineage_of(epochs, r.epoch).spans for r in epochs if r.n > record.n]
        full = lineage_of(epochs, record.epoch).spans[record.epoch]
        if all(spans.get(record.epoch) != full for spans in ends):
            yield record.epoch


def check_lineage(report: Report, facts: Facts, lineage: Lineage) -> None:
    """Walk one lineage in record order; `facts.settled` is that of the newest one afterwards."""
    walk = _Walk(report, facts)
    for fact in facts.records:
        if lineage.holds(fact.n):
            getattr(walk, fact.kind, lambda _: None)(fact)
    if lineage.epoch == lineage.newest_epoch:
        facts.settled = {group: count for (_, group), (_, count) in walk.settled.items()}
        facts.dropped = set(walk.dropped)


class _Walk:
    """State of one lineage, record by record. A method per record kind."""

    def __init__(self, report: Report, facts: Facts) -> None:
        self.report, self.facts = report, facts
        self.settled: dict[tuple[int, GroupKey], tuple[int, int]] = {}
        self.dropped: dict[str, int] = {}
        """Rollout -> record."""
        self.plans: dict[int, Fact] = {}
        self.steps: dict[int, Fact] = {}
        self.weights: dict[int, Fact] = {}
        self.first_probe: float | None = None
        self.start = 0
        """A fork begins with a checkpoint of the step that it forks from."""

    def plan(self, fact: Fact) -> None:
        expected = max(self.plans, default=self.start) + 1
        self.report.differ("I4", f"plan record {fact.n}: its step", expected, fact.step)
        self.plans[fact.step] = fact
        for who in sorted(fact.dropped & self.dropped.keys()):
            why = (
                f"record {self.dropped[who]} dropped it, and the plan of step {fact.step} counts it"
            )
            self.report.violation("I4", why, rollout=who, expected=self.dropped[who], found=fact.n)
        self._settle(fact, fact.row["data_pass"])

    def drop(self, fact: Fact) -> None:
        self.dropped |= dict.fromkeys(fact.dropped, fact.n)
        self._settle(fact, 0)

    def _settle(self, fact: Fact, data_pass: int) -> None:
        for group, count in fact.groups.items():
            first = self.settled.get((data_pass, group))
            self.report.checked["I4"] += count
            if first is not None:
                self.report.violation(
                    "I4",
                    f"group {group[1]} is settled twice in pass {data_pass}: by record {first[0]} "
                    f"and by record {fact.n} ({fact.kind} of step {fact.step})",
                    rollout=f"{group[1]}/0",
                    expected=first[0],
                    found=fact.n,
                )
                continue
            self.settled[data_pass, group] = (fact.n, count)

    def step(self, fact: Fact) -> None:
        plan = self.plans.get(fact.step)
        if fact.step in self.steps:
            why = f"step {fact.step} is recorded twice, by records {self.steps[fact.step].n} and"
            self.report.violation("I4", f"{why} {fact.n}", found=fact.n)
        if plan is None:
            self.report.violation("I4", f"step {fact.step} (record {fact.n}) has no plan")
        else:
            counts = parsed(self.report, f"counts of step {fact.step}", fact.row["counts"])
            for name, found in plan.row["counts"].items():
                what = f"step {fact.step}: {name} of its plan (record {plan.n})"
                self.report.differ("I4", what, counts.get(name, found), found)
        self.steps[fact.step] = fact
        metrics = parsed(self.report, f"metrics of step {fact.step}", fact.row["metrics"])
        gap = setting(metrics, "mismatch.0")
        # Of an offline run "lag 0" is the parent's: other weights than those that are trained here.
        if gap is not None and gap["n"] and not self._offline(fact.epoch):
            self._limit(f"step {fact.step}: mean gap of its lag-0 tokens", fact, gap["mean"])

    def policy(self, fact: Fact) -> None:
        self.report.checked["I7"] += 1
        if fact.step and fact.step not in self.steps:
            self.report.violation(
                "I7",
                f"policy {fact.epoch}.{fact.step} (record {fact.n}) has no step {fact.step} before "
                "it: its weights are of no recorded training",
                expected=max(self.steps, default=0),
                found=fact.step,
            )
        known = self.weights.setdefault(fact.step, fact)
        if self._same_platform(known.epoch, fact.epoch):
            what = f"weights of version {fact.step} in epochs {known.epoch} and {fact.epoch}"
            digests = known.row["weights_digest"], fact.row["weights_digest"]
            self.report.differ("I7", what, *digests)
        gap = fact.row["probe"]["mean_gap"]
        self._limit(f"policy {fact.epoch}.{fact.step}: mean gap of the probe", fact, gap)
        self.first_probe = gap if self.first_probe is None else self.first_probe

    def checkpoint(self, fact: Fact) -> None:
        if fact.step in self.steps:
            recorded = self.steps[fact.step].row["state_digest"]
            what = f"checkpoint of step {fact.step} (record {fact.n}): its state"
            self.report.differ("I7", what, recorded, fact.row["state_digest"])
        elif not self.plans:
            self.start = fact.step
        else:
            self.report.violation("I7", f"checkpoint record {fact.n} is of step {fact.step}")

    def _offline(self, epoch: int) -> bool:
        return any(r.epoch == epoch and r.rows[0]["sources"] for r in self.facts.epochs)

    def _same_platform(self, a: int, b: int) -> bool:
        rows = {r.epoch: r.rows[0] for r in self.facts.epochs}
        names = ("packages", "world_size", "threads")
        return a == b or all(rows[a][name] == rows[b][name] for name in names)

    def _limit(self, what: str, fact: Fact, gap: float) -> None:
        """I3 by the run's own limits: its floor for the dtype, or a multiple of its first probe."""
        config = self.facts.configs[fact.epoch]
        limits = setting(config, "limits", {})
        dtype = setting(config, "engine.dtype", "float32")
        floor = limits.get("bf16_gap_floor" if dtype == "bfloat16" else "float32_gap_floor")
        if floor is None:
            return
        self.report.checked["I3"] += 1
        limit = max(floor, limits.get("baseline_factor", 0.0) * (self.first_probe or 0.0))
        if not gap <= limit:
            self.report.violation("I3", what, expected=limit, found=gap)
