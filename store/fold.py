"""The fold: what the log says is finished, in flight and settled (invariants I2, I4, I5).

It holds scalars only, never tokens, and forgets a group once it is settled, so its memory does not
grow with the run. Everything here can be thrown away and rebuilt from the log.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from molt.schemas.check import chain_digest
from molt.schemas.columns import Row, to_rows
from molt.schemas.records import Ref, Version
from molt.store.branches import Branch, branches, tips
from molt.store.commit import Commit
from molt.store.control import Lineage, Record
from molt.store.files import STORE
from molt.store.tail import Tail

MARKER = "COMPLETE"
"""The last file of a checkpoint."""

COLUMNS = {
    "prompts": ["ordinal", "group_id", "purpose", "dataset", "n", "attempt", "reason", "rollouts"],
    "segments": [
        "group_id",
        "rollout_id",
        "attempt",
        "segment",
        "parent",
        "keep",
        "sampled",
        "train",
        "version_runs",
        "finish_reason",
        "role",
        "digest",
    ],
    "routing": ["rollout_id", "attempt"],
}
"""What the fold decodes; token ids and logprobs are only checksummed."""

COMMITS_AT_ONCE = 64
"""Commits in memory at a time, however much of a log is new."""
STREAMS = frozenset({"prompts", "segments", "rollouts", "rewards", "routing"})
GROUP_ID = re.compile(r"([^/]+)-(0|[1-9][0-9]{0,17})")
"""Purpose and ordinal. What bears another name belongs to no group, and is passed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """A segment without its tokens."""

    parent: int | None
    keep: int
    n_tokens: int
    n_sampled: int
    n_train: int
    runs: tuple[tuple[Version, int], ...]
    finish_reason: str
    digest: bytes
    ref: Ref


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One try at a rollout, as far as it is visible."""

    rollout_id: str
    attempt: int
    segments: dict[int, SegmentInfo] = field(default_factory=dict)
    outcome: Row | None = None
    rewards: dict[tuple[Any, ...], tuple[int, float | None, Ref]] = field(default_factory=dict)
    """(segment, token, name) -> (revision, value, address); the highest revision wins."""
    said: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """(segment, token, name, revision) -> value, (is pending,) -> (status, chain digest): another
    one is a conflict."""
    routing: list[Ref] = field(default_factory=list)
    conflict: bool = False
    dropped: str | None = None
    """Why a drop record took the rollout out of its group."""

    def versions(self) -> set[Version]:
        return {v for s in self.segments.values() for v, _ in s.runs}

    def has_parents(self) -> bool:
        """True if no segment lacks its parent; only then there are chains."""
        return all(s.parent is None or s.parent in self.segments for s in self.segments.values())

    def branches(self) -> list[Branch]:
        return branches(self.segments) if self.has_parents() else []

    @property
    def n_sampled(self) -> int:
        return sum(s.n_sampled for s in self.segments.values())

    @property
    def n_train(self) -> int:
        return sum(s.n_train for s in self.segments.values())

    def is_finished(self) -> bool:
        """Closed, with every segment that its outcome names; pending closes by a reward."""
        if self.conflict or self.dropped is not None:
            return True
        if self.outcome is None or len(self.segments) < self.outcome["n_segments"]:
            return False
        return self.outcome["status"] != "pending" or bool(self.rewards)

    def is_unscored(self) -> bool:
        """Played to its end, and its outcome only waits for a reward."""
        pending = self.outcome is not None and self.outcome["status"] == "pending"
        return pending and not self.is_finished() and self.is_whole()

    def is_whole(self) -> bool:
        """True if the outcome's chain digest is that of the segments."""
        if self.outcome is None or not self.has_parents():
            return False
        return bool(self.chain_digest() == self.outcome["chain_digest"])

    def chain_digest(self) -> bytes:
        """Digest of the segments that are visible; of none if they make no chains."""
        found = tips(self.segments) if self.has_parents() else []
        return chain_digest([self.segments[t].digest for t in found])


@dataclass(slots=True, kw_only=True)
class Group:
    """The rollouts of one prompt that is not settled yet."""

    group_id: str
    ordinal: int
    purpose: str
    dataset: str
    n: int
    prompt_ref: Ref
    issued: dict[str, int] = field(default_factory=dict)
    """rollout_id -> newest attempt that a prompts row asked for."""
    attempts: dict[str, dict[int, Attempt]] = field(default_factory=dict)

    def rollout_ids(self) -> list[str]:
        return [f"{self.group_id}/{i}" for i in range(self.n)]


@dataclass(slots=True)
class Ordinals:
    """A set of ordinals of one purpose: all below `low`, and `above`. Flat in the run's age."""

    low: int = 0
    above: set[int] = field(default_factory=set)

    def add(self, ordinal: int) -> None:
        self.above.add(ordinal)
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1

    def __contains__(self, ordinal: int) -> bool:
        return ordinal < self.low or ordinal in self.above


class Fold:
    """The state of a run, folded from its log. `update()` takes in what became visible.

    `settled[purpose].low` is the first ordinal that is not settled; `open_groups` are issued and
    not settled; `is_closed` ones have all outcomes in this lineage.
    """

    def __init__(self, tail: Tail) -> None:
        self._told: list[Record] = []
        self._first = tail.next_n
        """Control records to return, which an update that failed has taken in, and the first one
        that none has returned."""
        self._begin(tail)

    def _begin(self, tail: Tail) -> None:
        self.tail = tail
        self._seen = tail.lineage, tail.next_n - 1
        tail.commits_max = COMMITS_AT_ONCE
        tail.skip_retired = True  # what retires belongs to settled groups, and those are forgotten
        self.groups: dict[str, Group] = {}
        self.settled: dict[str, Ordinals] = {}
        self.next_ordinal: dict[str, int] = {}
        self.policies: set[Version] = set()
        self.checkpoints: list[Row] = []
        """Records of this lineage's complete checkpoints that are still there, oldest first."""
        self.first_probe: Row | None = None
        self.last_step = 0
        self.last_planned = 0
        self.dropped: dict[str, dict[str, str]] = {}
        """group_id -> rollout_id -> reason, of groups that are not settled."""
        self._orphans: dict[str, list[tuple[str, Row, Ref]]] = {}

    def update(self) -> list[Record]:
        """Fold in everything that is newly visible: control records first, then data rows.

        Returns the control records, those of abandoned lineages too. An epoch that takes records
        out of the lineage which were folded already makes it begin again.
        """
        self.tail.more = True
        while self.tail.more:
            before, end = self._seen
            records, commits = self.tail.poll()
            if self.tail.lineage is not before and not _goes_on(before, self.tail.lineage, end):
                self._begin(_again(self.tail))
                self._told, self.tail.more = [], True
                continue
            for record in records:
                if self.tail.lineage.holds(record.n):
                    self._control(record)
            for commit in commits:
                self._data(commit)
            self._seen = self.tail.lineage, self.tail.next_n - 1
            self._told += [record for record in records if record.n >= self._first]
        found, self._told, self._first = self._told, [], self.tail.next_n
        return found

    def is_settled(self, group_id: str) -> bool:
        name = GROUP_ID.fullmatch(group_id)
        return name is not None and int(name[2]) in self.settled.get(name[1], Ordinals())

    def open_groups(self, purpose: str) -> list[Group]:
        """Issued and not settled, by ordinal."""
        found = [g for g in self.groups.values() if g.purpose == purpose]
        return sorted(found, key=lambda g: g.ordinal)

    def is_closed(self, group: Group) -> bool:
        return all(self.finished(group, r) is not None for r in group.rollout_ids())

    def finished(self, group: Group, rollout_id: str) -> Attempt | None:
        """The lowest finished attempt of this lineage; None while there is none.

        Of a rollout that was dropped nothing counts: an attempt without rows stands for it.
        """
        attempts = group.attempts.get(rollout_id, {})
        reason = self.dropped.get(group.group_id, {}).get(rollout_id)
        if reason is not None:
            newest = max(_next_attempt(group, rollout_id) - 1, 0)
            return Attempt(rollout_id=rollout_id, attempt=newest, dropped=reason)
        for number in sorted(attempts):
            if attempts[number].is_finished() and self.in_lineage(attempts[number]):
                return attempts[number]
        return None

    def in_lineage(self, attempt: Attempt) -> bool:
        """I2: every version that sampled a token has its policy record in this lineage."""
        return attempt.versions() <= self.policies

    # -- control records -----------------------------------------------------------------------

    def _control(self, record: Record) -> None:
        row = record.rows[0] if record.rows else {}
        if record.kind == "policy":
            self.policies.add(Version(epoch=row["epoch"], version=row["version"]))
            self.first_probe = self.first_probe or row["probe"]
        elif record.kind == "step":
            self.last_step = max(self.last_step, row["step"])
        elif record.kind == "checkpoint":
            known = [*self.checkpoints, row]
            listing = (STORE.list(self.tail.log / r["path"]) for r in known)
            self.checkpoints = [
                r for r, names in zip(known, listing, strict=True) if MARKER in names
            ]
        elif record.kind == "plan":
            self.last_planned = max(self.last_planned, record.header["step"])
            self._settle({r["group_id"] for r in record.rows})
        elif record.kind == "drop":
            self._settle({r["group_id"] for r in record.rows if r["rollout_id"] is None})
            for r in record.rows:
                if r["rollout_id"] is not None and not self.is_settled(r["group_id"]):
                    of_group = self.dropped.setdefault(r["group_id"], {})
                    of_group.setdefault(r["rollout_id"], r["reason"])

    def _settle(self, group_ids: set[str]) -> None:
        for group_id in group_ids:
            if (name := GROUP_ID.fullmatch(group_id)) is not None:
                self.settled.setdefault(name[1], Ordinals()).add(int(name[2]))
            for known in (self.groups, self.dropped, self._orphans):
                known.pop(group_id, None)

    def forget(self, group_id: str) -> None:
        """Settle a group that no control record settles (evaluation)."""
        self._settle({group_id})

    # -- data rows -----------------------------------------------------------------------------

    def _data(self, commit: Commit) -> None:
        for i, row in enumerate(to_rows(commit.table)):
            ref = Ref(writer=commit.writer, seq=commit.seq, row=i)
            self._row(commit.stream, row, ref)

    def _row(self, stream: str, row: Row, ref: Ref) -> None:
        group_id = row["group_id"] if "group_id" in row else row["rollout_id"].rpartition("/")[0]
        if not _is_named(group_id, row):
            return
        if stream == "prompts":
            newest = max(self.next_ordinal.get(row["purpose"], 0), row["ordinal"] + 1)
            self.next_ordinal[row["purpose"]] = newest
        if self.is_settled(group_id):
            return
        if stream == "prompts":
            self._prompt(row, ref)
        elif group_id in self.groups:
            self._rollout_row(self.groups[group_id], stream, row, ref)
        else:
            # Another writer's row may be seen before the prompt that it answers.
            self._orphans.setdefault(group_id, []).append((stream, row, ref))

    def _prompt(self, row: Row, ref: Ref) -> None:
        group_id = row["group_id"]
        group = self.groups.get(group_id)
        if group is None:
            names = ("group_id", "ordinal", "purpose", "dataset", "n")
            group = Group(prompt_ref=ref, **{k: row[k] for k in names})
            self.groups[group_id] = group
        issued = row["rollouts"] or [
            {"rollout_id": r, "attempt": row["attempt"]} for r in group.rollout_ids()
        ]
        for item in issued:
            newest = max(group.issued.get(item["rollout_id"], 0), item["attempt"])
            group.issued[item["rollout_id"]] = newest
        for stream, orphan, orphan_ref in self._orphans.pop(group_id, []):
            self._rollout_row(group, stream, orphan, orphan_ref)

    def _rollout_row(self, group: Group, stream: str, row: Row, ref: Ref) -> None:
        attempts = group.attempts.setdefault(row["rollout_id"], {})
        attempt = attempts.setdefault(
            row["attempt"], Attempt(rollout_id=row["rollout_id"], attempt=row["attempt"])
        )
        if stream == "segments":
            if row["role"] == "agent" or group.purpose == "judge":
                self._segment(attempt, row, ref)
        elif stream == "routing":
            attempt.routing.append(ref)
        elif stream == "rewards":
            key = (row["segment"], row["token"], row["name"])
            first = attempt.said.setdefault((*key, row["revision"]), row["value"])
            attempt.conflict |= first != row["value"]
            found = attempt.rewards.get(key)
            if found is None or row["revision"] > found[0]:
                attempt.rewards[key] = (row["revision"], row["value"], ref)
        else:
            ended = (row["status"], row["chain_digest"])
            attempt.conflict |= (
                attempt.said.setdefault((row["status"] == "pending",), ended) != ended
            )
            if attempt.outcome is None or attempt.outcome["status"] == "pending":
                attempt.outcome = row

    def _segment(self, attempt: Attempt, row: Row, ref: Ref) -> None:
        known = attempt.segments.get(row["segment"])
        if known is not None:
            attempt.conflict |= known.digest != row["digest"]
            return
        attempt.segments[row["segment"]] = SegmentInfo(
            parent=row["parent"],
            keep=row["keep"],
            n_tokens=len(row["sampled"]),
            n_sampled=int(np.count_nonzero(row["sampled"])),
            n_train=int(np.count_nonzero(row["train"])),
            runs=tuple(
                (Version(epoch=r["epoch"], version=r["version"]), r["n"])
                for r in row["version_runs"]
            ),
            finish_reason=row["finish_reason"],
            digest=row["digest"],
            ref=ref,
        )


def _again(tail: Tail) -> Tail:
    """A tail like this one, at the log's beginning; this one is closed."""
    tail.close()
    return Tail(
        tail.log,
        streams=tail.streams,
        columns=tail.columns,
        on_corrupt=tail.on_corrupt,
        gap_s_max=tail.gap_s_max,
        register=tail.register,
        register_s=tail.register_s,
        clock=tail.clock,
    )


def _goes_on(before: Lineage, after: Lineage, end: int) -> bool:
    """True if `after` holds all that `before` held of the records up to number `end`."""
    last = (end if b is None else min(b, end) for _, b in before.spans.values())
    return all(map(after.holds, last))


def _is_named(group_id: str, row: Row) -> bool:
    """False for a row whose names are of no group, or contradict each other."""
    if "ordinal" in row:
        return bool(group_id == f"{row['purpose']}-{row['ordinal']}")
    own = row["rollout_id"].rpartition("/")[0]
    return bool(own == group_id) and GROUP_ID.fullmatch(group_id) is not None


def unsettled(fold: Fold, purpose: str) -> Iterator[tuple[Group, list[tuple[str, int]]]]:
    """What a new epoch must issue again: (group, [(rollout_id, next attempt)]).

    Rollouts of the lineage that are finished, or wait for a reward alone, are kept; every other
    rollout of an issued group gets a new attempt. Groups that lack nothing are not listed.
    """

    def is_played(group: Group, rollout_id: str) -> bool:
        attempts = group.attempts.get(rollout_id, {}).values()
        return any(a.is_unscored() and fold.in_lineage(a) for a in attempts)

    for group in fold.open_groups(purpose):
        again = [
            (r, _next_attempt(group, r))
            for r in group.rollout_ids()
            if fold.finished(group, r) is None and not is_played(group, r)
        ]
        if again:
            yield group, again


def _next_attempt(group: Group, rollout_id: str) -> int:
    seen = max(group.attempts.get(rollout_id, {}), default=-1)
    return max(seen, group.issued.get(rollout_id, -1)) + 1
