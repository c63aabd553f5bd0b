"""The audit's third pass: every visible commit of the data log, in its writer's order (I1, I2, I5,
I6), and what the control log says of its groups (I4).

An attempt is remembered from its first segment to its outcome, a group until it is known to be
settled; of everything else 24 bytes per row stay, to find rows that two writers tell differently,
and 8 per attempt, to know what is written again.
"""

import contextlib
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from molt.replay.audit_control import Facts, parsed
from molt.replay.audit_plans import check_versions, refused
from molt.replay.audit_report import Report
from molt.replay.audit_rows import Remembered, hashed, segment_key
from molt.schemas.check import (
    CHECKS,
    Parent,
    chain_digest,
    check_enums,
    check_routing_shape,
    check_segment,
    parent_of,
    routing_sum,
)
from molt.schemas.columns import Row, row_name, to_rows
from molt.schemas.errors import LogCorrupt, MoltError, Retired, SegmentRejected
from molt.store.branches import tips
from molt.store.cold import FOLDER, ColdFile, cold_file
from molt.store.cold import NAME as COLD_NAME
from molt.store.commit import Commit
from molt.store.control import Lineage
from molt.store.files import names
from molt.store.fold import Ordinals
from molt.store.log import Log
from molt.store.reader import (
    BUCKET,
    BUCKET_NAME,
    END,
    CommitFile,
    bucket_files,
    cold_commits,
    parse_name,
    read_ahead,
    read_commit,
    writer_epoch,
    writer_names,
)

Who = tuple[str, int]
ROLLOUT_NAME = re.compile(r"((.+)-([0-9]+))/[0-9]+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Seen:
    """A segment of an attempt whose outcome has not been met."""

    parent: int | None
    keep: int
    n_tokens: int
    n_sampled: int
    digest: bytes
    counts: bool
    """False for a side model's: recorded, and no part of what the outcome names."""

    @property
    def n_chain(self) -> int:
        return self.keep + self.n_tokens

    def as_parent(self) -> Parent:
        return Parent(digest=self.digest, n_chain=self.n_chain, n_own=self.n_tokens)


@dataclass(slots=True)
class Attempt:
    segments: dict[int, Seen] = field(default_factory=dict)
    outcome: Row | None = None
    in_lineage: bool = True
    routing: set[int] = field(default_factory=set)
    """Of each of its routing rows what the outcome's sum should count."""
    routing_sum: str | None = None
    """As the outcome names it."""
    later: list[tuple[CommitFile, int]] = field(default_factory=list)
    """Rows whose parent had not been read yet: another writer has it."""

    def is_whole(self) -> bool:
        """True if all segments that the outcome names were read, and their parents before them."""
        n = sum(s.counts for s in self.segments.values())
        return self.outcome is not None and n >= self.outcome["n_segments"] and not self.later


@dataclass(slots=True)
class OpenGroup:
    """An issued group that no plan and no drop of the newest lineage settles."""

    n: int
    epoch: int
    """Of the newest writer that issued it."""
    finished: set[str] = field(default_factory=set)


class DataPass:
    """Reads the data log once. Cross-writer questions are answered at the end."""

    def __init__(self, log: Log, report: Report, facts: Facts, lineage: Lineage) -> None:
        self.log, self.report, self.facts, self.lineage = log, report, facts, lineage
        self.attempts: dict[Who, Attempt] = {}
        self.groups: dict[str, OpenGroup] = {}
        self.issued: dict[str, Ordinals] = {}
        self.played: dict[str, Ordinals] = {}
        self.rows = Remembered(log.path, report)
        self.closed = array("Q")
        """Hashes of the attempts that were compared with their outcomes."""
        self.shapes: list[Row] = []
        """Of the routing rows so far; a run has one."""
        self.any_retired = False
        self._cold: dict[Path, ColdFile | None] = {}
        self._gone: set[Path] = set()
        """Listed cold files that could not be opened."""
        """Every cold file seen; None = its footer is damaged."""
        self._done = 0
        self._total = sum(len(names(bucket)) for bucket in (log.path / "data").glob("*/*"))
        """Hot commits, for a progress bar."""
        self._policies = {v for v, n in facts.policies.items() if lineage.holds(n)}

    def run(self) -> None:
        writers = self.rows.writers = sorted({*writer_names(self.log.path), *self.lineage.closed})
        for index, writer in enumerate(writers):
            self._writer(index, writer)
        self._unfinished()
        self.rows.conflicts()
        self._ordinals()

    # -- commits -------------------------------------------------------------------------------

    def _writer(self, index: int, writer: str) -> None:
        limit = self.lineage.last_seq(writer)
        expected = 0
        for file, read in read_ahead(self._files(writer)):
            if limit is not None and file.seq > limit:
                self.report.invisible += 1
                continue
            self._missing(writer, expected, file.seq)
            expected = file.seq + 1
            if file.retired:
                self._retired()
            elif file.stream != END:
                self._commit(index, file, read)
        self._missing(writer, expected, (limit if limit is not None else -1) + 1)

    def _retired(self) -> None:
        self.report.retired += 1
        self.any_retired = True

    def _missing(self, writer: str, first: int, end: int) -> None:
        for seq in range(first, end):
            self.report.violation("I6", f"commit {seq} of writer {writer} is missing", found=seq)

    def _files(self, writer: str) -> Iterator[CommitFile]:
        """A writer's commits by number, one bucket at a time; cold ones cover hot ones.

        Of each bucket cold is listed after hot, so what compaction moves meanwhile is in one.
        """
        folder = self.log.path / "data" / writer
        buckets = [int(name) for name in names(folder) if BUCKET_NAME.fullmatch(name)]
        last = [f.seqs_of(writer)[-1] // BUCKET for f in self._cold_files() if writer in f.covers]
        for bucket in range(max([*buckets, *last], default=-1) + 1):
            hot = self._hot_files(writer, bucket)
            first, end = bucket * BUCKET, (bucket + 1) * BUCKET
            cold = cold_commits(self._cold_files(), writer, first, end)
            covered = {f.seq for f in cold}
            rest = [f for f in hot if f.seq not in covered]
            yield from sorted([*rest, *cold], key=lambda f: f.seq)

    def _hot_files(self, writer: str, bucket: int) -> list[CommitFile]:
        try:
            return bucket_files(self.log.path, writer, bucket)
        except LogCorrupt as error:  # two have one number: both are read, and tell what they are
            self.report.violation("I6", str(error))
        folder = self.log.path / "data" / writer / f"{bucket:06d}"
        return [f for name in names(folder) if (f := parse_name(folder, writer, name))]

    def _cold_files(self) -> list[ColdFile]:
        """All cold files by now whose footer is whole; damage is told once."""
        folder = self.log.path / FOLDER
        for path in (
            folder / stream / n for stream in names(folder) for n in names(folder / stream)
        ):
            if path in self._cold or not COLD_NAME.fullmatch(path.name):
                continue
            try:
                self._cold[path] = cold_file(path)
            except FileNotFoundError as error:
                if path not in self._gone:  # retired since: another file has its tombstone
                    self._gone.add(path)
                    return self._cold_files()
                self._cold[path] = None
                self.report.violation("I6", str(error))
            except (MoltError, OSError) as error:
                self._cold[path] = None
                self.report.violation("I6", str(error))
        return [file for file in self._cold.values() if file is not None]

    def _commit(self, index: int, file: CommitFile, read: Callable[[], Commit]) -> None:
        self._done += 1
        self.report.progress(self._done, max(self._total, self._done), "data log")
        try:
            commit = read()
        except Retired:
            self._retired()
            return
        except (MoltError, OSError) as error:
            self.report.violation("I6", str(error))
            return
        self.report.checked["I6"] += 1
        for i, row in enumerate(to_rows(commit.table)):
            try:
                check_enums(file.stream, row)
                self._row(file, commit, i, row)
            except SegmentRejected as error:
                refused(self.report, error, str(row.get("rollout_id") or row.get("group_id")))
            self.rows.add(index, file, row)

    def _row(self, file: CommitFile, commit: Commit, i: int, row: Row) -> None:
        if file.stream == "segments":
            self._segment(file, i, row)
        elif file.stream in CHECKS:
            CHECKS[file.stream](row)
            if file.stream == "routing":
                self._routing(commit, row)
            elif file.stream == "prompts":
                self._prompt(file, row)
            elif file.stream == "rollouts" and row["status"] != "pending":
                attempt = self.attempts.setdefault((row["rollout_id"], row["attempt"]), Attempt())
                attempt.outcome = row
                what = f"{row['rollout_id']} attempt {row['attempt']}: its metrics"
                metrics = parsed(self.report, what, row["metrics"], row["rollout_id"])
                attempt.routing_sum = metrics.get("routing_sum")
                self._close((row["rollout_id"], row["attempt"]))

    # -- rollouts ------------------------------------------------------------------------------

    def _segment(self, file: CommitFile, i: int, row: Row) -> None:
        who = (row["rollout_id"], row["attempt"])
        attempt = self.attempts.setdefault(who, Attempt())
        n_own, n_sampled = len(row["token_ids"]), int(np.count_nonzero(row["sampled"]))
        self.report.checked["I1"] += 1
        self.report.checked["I2"] += n_sampled
        self.report.tokens += n_own
        if row["parent"] is not None and row["parent"] not in attempt.segments:
            attempt.later.append((file, i))
        else:
            self._verify(attempt, row)
        self._check_versions(attempt, row)
        counts = row["role"] == "agent" or row["group_id"].startswith("judge-")
        seen = Seen(row["parent"], row["keep"], n_own, n_sampled, row["digest"], counts)
        attempt.segments.setdefault(row["segment"], seen)
        self._close(who)

    def _verify(self, attempt: Attempt, row: Row) -> None:
        parent = attempt.segments.get(row["parent"])
        check_segment(row, parent.as_parent() if parent else None)

    def _check_versions(self, attempt: Attempt, row: Row) -> None:
        """I2: whatever sampled an agent's token was published, in whatever lineage."""
        if row["role"] != "agent" or row["policy"] != "main":
            return
        runs = {(run["epoch"], run["version"]) for run in row["version_runs"]}
        attempt.in_lineage &= runs <= self._policies
        check_versions(self.report, row, self._is_published, "which no policy record names")

    def _is_published(self, version: tuple[int, int]) -> bool:
        """True if a policy record names the version, also one that came after the first pass."""
        if version not in self.facts.policies:
            last = max((f.n for f in self.facts.records), default=-1)
            with contextlib.suppress(MoltError, OSError):  # damage is told by the first pass
                for record in self.log.records(last + 1):
                    if record.kind == "policy":
                        row = record.rows[0]
                        self.facts.policies[row["epoch"], row["version"]] = record.n
        return version in self.facts.policies

    def _routing(self, commit: Commit, row: Row) -> None:
        metadata = commit.table.schema.metadata or {}
        shape = {k.decode(): v.decode() for k, v in metadata.items()}
        who = (row["rollout_id"], row["attempt"])
        attempt = self.attempts.setdefault(who, Attempt())
        attempt.routing.add(routing_sum([(row["segment"], row["start"], row["row_xxh3"])]))
        seen = attempt.segments.get(row["segment"])
        check_routing_shape(row, shape, seen.n_chain if seen else None)
        if shape not in self.shapes:
            self.shapes.append(shape)
            if len(self.shapes) > 1:
                why = "its shape of routing is not that of the run"
                named = {"rollout": who[0], "segment": row["segment"]}
                self.report.violation("I3", why, expected=self.shapes[0], found=shape, **named)
        self._close(who)

    def _close(self, who: Who) -> None:
        """Compare an outcome with its segments, once all that it names were read."""
        attempt = self.attempts[who]
        if attempt.outcome is None or not attempt.is_whole():
            return
        if attempt.routing_sum not in (None, total(attempt.routing)) and not self.any_retired:
            return  # another writer may have the rest
        del self.attempts[who]
        self._outcome(who, attempt, attempt.outcome)

    def _outcome(self, who: Who, attempt: Attempt, outcome: Row) -> None:
        self.closed.append(hashed(f"{who[0]}/{who[1]}"))
        segments = {k: s for k, s in attempt.segments.items() if s.counts}
        named = {"rollout": who[0]}
        n = len(segments)
        self.report.differ("I6", f"{who[0]}: segments", outcome["n_segments"], n, **named)
        if all(s.parent is None or s.parent in segments for s in segments.values()):
            own = chain_digest([segments[t].digest for t in tips(segments)])
            what = f"{who[0]} attempt {who[1]}: digest of its segments"
            self.report.differ("I1", what, outcome["chain_digest"], own, **named)
        n_sampled = sum(s.n_sampled for s in segments.values())
        what = f"{who[0]} attempt {who[1]}: sampled tokens"
        self.report.differ("I1", what, outcome["counts"]["sampled"], n_sampled, **named)
        if attempt.routing_sum is not None and not self.any_retired:
            what = f"{who[0]} attempt {who[1]}: routing of its segments"
            self.report.differ("I3", what, attempt.routing_sum, total(attempt.routing), **named)
        self._played(who[0], outcome["group_id"])
        if attempt.in_lineage and (0, outcome["group_id"]) not in self.facts.settled:
            group = self.groups.setdefault(outcome["group_id"], OpenGroup(0, 0))
            group.finished.add(who[0])

    def _unfinished(self) -> None:
        """What came from another writer than its parent or outcome, and attempts cut off."""
        closed = np.array(self.closed, np.uint64)
        for who, attempt in self.attempts.items():
            for file, i in attempt.later:
                try:
                    self._late(who, attempt, to_rows(read_commit(file).table)[i])
                except SegmentRejected as error:
                    refused(self.report, error, who[0])
                except Retired:
                    self._retired()
                except (MoltError, OSError) as error:
                    self.report.violation("I6", str(error), rollout=who[0])
            if np.uint64(hashed(f"{who[0]}/{who[1]}")) in closed:
                self._written_again(who, attempt)
            elif attempt.outcome is not None and (attempt.is_whole() or not self.any_retired):
                self._outcome(who, attempt, attempt.outcome)
        self.attempts.clear()

    def _late(self, who: Who, attempt: Attempt, row: Row) -> None:
        """A segment that was read before its parent, or when its attempt had been closed."""
        if row["parent"] in attempt.segments:
            self._verify(attempt, row)
            return
        parent = self.rows.find(segment_key(*who, row["parent"]))
        if parent is not None:
            check_segment(row, parent_of(parent))
        elif not self.any_retired:
            why = f"{row_name('segments', row)}: its parent {row['parent']} is missing"
            self.report.violation("I6", why, rollout=who[0], segment=row["segment"])

    def _written_again(self, who: Who, attempt: Attempt) -> None:
        """Rows of an attempt that was closed: equal ones count once, others differ (I4)."""
        for number, seen in attempt.segments.items():
            once = self.rows.count(segment_key(*who, number)) == 1
            if seen.counts and once and not self.any_retired:
                why = f"{who[0]} attempt {who[1]}: segment {number} is none that its outcome names"
                self.report.violation("I6", why, rollout=who[0], segment=number)

    # -- prompts -------------------------------------------------------------------------------

    def _prompt(self, file: CommitFile, row: Row) -> None:
        group_id, epoch = row["group_id"], writer_epoch(file.writer)
        self.report.checked["I5"] += 1
        self.issued.setdefault(row["purpose"], Ordinals()).add(row["ordinal"])
        planned = self.facts.settled.get((0, group_id))
        if planned is None:
            group = self.groups.setdefault(group_id, OpenGroup(0, 0))
            group.n, group.epoch = max(group.n, row["n"]), max(group.epoch, epoch)
        elif planned and epoch in self.lineage.spans:
            what = f"{group_id}: rollouts in its plan"
            self.report.differ("I4", what, row["n"], planned, rollout=f"{group_id}/0")

    def _played(self, rollout_id: str, group_id: str) -> None:
        """I5: a rollout names the ordinal that it answers."""
        name = ROLLOUT_NAME.fullmatch(rollout_id)
        if name is None or name[1] != group_id:
            why = (
                f"rollout '{rollout_id}' of group '{group_id}' is not <purpose>-<ordinal>/<number>"
            )
            self.report.violation("I5", why, rollout=rollout_id)
        else:
            self.played.setdefault(name[2], Ordinals()).add(int(name[3]))

    def _ordinals(self) -> None:
        """I5: every ordinal was issued; what an earlier epoch left open was issued again."""
        if not self.issued and not self.played:
            return  # an offline run: its prompts are in the logs that it names
        for log, group_id in self.facts.settled:
            if log == 0:
                self._played(f"{group_id}/0", group_id)
        for purpose in sorted(self.issued.keys() | self.played.keys()):
            issued = self.issued.get(purpose, Ordinals())
            played = self.played.get(purpose, Ordinals())
            end = max([issued.low, played.low, *(k + 1 for k in issued.above | played.above)])
            for k in range(issued.low, end):
                if k not in issued:
                    why = f"{purpose} ordinal {k} was never issued, later ones were"
                    self.report.violation("I5", why, rollout=f"{purpose}-{k}/0", expected=k)
        trained = [f.epoch for f in self.facts.records if f.kind == "plan"]
        newest = max((e for e in trained if e in self.lineage.spans), default=0)
        for group_id, group in self.groups.items():
            dropped = {r for r in self.facts.dropped if r.rpartition("/")[0] == group_id}
            left = group.n - len(group.finished | dropped)
            if group_id.startswith("train-") and group.epoch < newest and left > 0:
                self.report.violation(
                    "I5",
                    f"{group_id} was issued in epoch {group.epoch}, {left} of its {group.n} "
                    f"rollouts never finished, and epoch {newest} trained without issuing it again",
                    rollout=f"{group_id}/0",
                    expected=newest,
                    found=group.epoch,
                )


def total(routing: Iterable[int]) -> str:
    """The sum of routing rows as an outcome names it."""
    return f"{sum(routing) % (1 << 64):016x}"
