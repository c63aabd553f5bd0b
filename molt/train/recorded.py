"""Recorded expert choices of a rank's sequences, read from the log by range (I3, I6).

Stands between the plan's addresses and packing. Only the rank that trains a sequence reads its
rows, and of a hot commit only the positions that are needed: it is mapped, not read, and every
position is verified by its own hash. Positions that nobody recorded stay unknown.

Letters: T tokens of a sequence, L layers with experts, K choices per token.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from molt.replay.assemble import TrainSequence
from molt.schemas.check import repeated_expert
from molt.schemas.errors import LogCorrupt
from molt.schemas.records import Ref
from molt.schemas.streams import STREAMS, routing_metadata
from molt.store import Log
from molt.store.control import Record
from molt.store.reader import CommitFile, find_commit, read_commit
from molt.train.packing import Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    where: str
    segment: int
    start: int
    experts_NLK: np.ndarray
    hashes_N: np.ndarray


class RoutingReader:
    """Reads routing rows by address; `bytes_read` counts expert ids and their hashes.

    `layers`, `top_k` and `n_experts` are the model's; rows of another shape are LogCorrupt.
    """

    def __init__(self, log: Log, *, layers: int, top_k: int, n_experts: int) -> None:
        self._log = log
        self._shape = routing_metadata(layers=layers, top_k=top_k, n_experts=n_experts)
        self._tables: dict[tuple[str, int], pa.Table | None] = {}
        self.bytes_read = 0

    def of_plan(self, plan: Record, sequences: Sequence[TrainSequence]) -> list[Recorded]:
        """What the plan's routing rows say of each of `sequences`, in their order.

        Raises LogCorrupt for a row that is not what the plan implies, or whose hash is wrong.
        """
        refs = {
            (row["rollout_id"], row["attempt"], branch["tip"]): branch["refs"]
            for row in plan.rows
            for branch in row["branches"]
        }
        found = [self.of(s, refs[s.rollout_id, s.attempt, s.tip]) for s in sequences]
        self._tables.clear()
        return found

    def of(self, sequence: TrainSequence, refs: Iterable[Mapping[str, Any]]) -> Recorded:
        """Each position from the segment that computed it first, in the order of the chain.

        A later segment recomputes what was sampled before it, perhaps under newer weights; the
        choices behind the recorded logprobs are the first ones. The last token of a segment has
        its row in the next one.
        """
        trained = np.flatnonzero(sequence.mask)
        n_inputs = int(trained[-1]) if len(trained) else 0
        ends = dict(sequence.chain)
        rows = [r for ref in refs if (r := self._row(sequence, Ref(**ref))) is not None]
        order = {segment: i for i, segment in enumerate(ends)}
        rows = sorted((r for r in rows if r.segment in ends), key=lambda r: order[r.segment])
        shape = (n_inputs, int(self._shape["molt.layers"]), int(self._shape["molt.top_k"]))
        experts_TLK = np.zeros(shape, self._shape["molt.dtype"])
        known_T = np.zeros(n_inputs, bool)
        for row in rows:
            end = min(row.start + len(row.experts_NLK), ends[row.segment], n_inputs)
            fresh = np.flatnonzero(~known_T[row.start : end])
            experts_TLK[row.start + fresh] = self._verified(row, fresh)
            known_T[row.start + fresh] = True
        recorded = Recorded(experts_TLK=experts_TLK, known_T=known_T)
        check_ids(recorded, int(self._shape["molt.experts"]), _name(sequence))
        return recorded

    def _verified(self, row: _Row, wanted: np.ndarray) -> np.ndarray:
        experts_NLK = row.experts_NLK[wanted]
        for i, bytes_ in zip(wanted.tolist(), experts_NLK, strict=True):
            if xxhash.xxh3_64_intdigest(bytes_.tobytes()) != row.hashes_N[i]:
                raise LogCorrupt(
                    f"{row.where}: the experts of position {row.start + i} do not have their "
                    "recorded hash; run `molt doctor`"
                )
        self.bytes_read += experts_NLK.nbytes + 8 * len(wanted)
        return experts_NLK

    def _row(self, sequence: TrainSequence, ref: Ref) -> _Row | None:
        """The row at `ref`, not verified yet; None if that is no routing row."""
        table = self._table(ref)
        if table is None:
            return None
        if not 0 <= ref.row < table.num_rows:
            raise LogCorrupt(f"{ref}: the commit has {table.num_rows} rows")
        row = {name: table[name][ref.row] for name in table.column_names}
        owner = (row["rollout_id"].as_py(), row["attempt"].as_py())
        segment, start, n = (row[name].as_py() for name in ("segment", "start", "n"))
        where = f"routing of {owner[0]} attempt {owner[1]} segment {segment}"
        if owner != (sequence.rollout_id, sequence.attempt):
            raise LogCorrupt(f"the plan's row of {sequence.rollout_id} names the {where}")
        meta = table.schema.metadata or {}
        if meta != {k.encode(): v.encode() for k, v in self._shape.items()}:
            raise LogCorrupt(f"{where} was recorded as {meta}, this model has {self._shape}")
        shape = (n, int(self._shape["molt.layers"]), int(self._shape["molt.top_k"]))
        dtype, buffer = np.dtype(self._shape["molt.dtype"]), row["experts"].as_buffer()
        hashes_N = row["row_xxh3"].values.to_numpy()
        if start < 0 or len(hashes_N) != n or buffer.size != np.prod(shape) * dtype.itemsize:
            raise LogCorrupt(
                f"{where}: {buffer.size} bytes and {len(hashes_N)} hashes from position {start} on "
                f"for {shape} experts"
            )
        experts_NLK = np.frombuffer(buffer, dtype.newbyteorder("<")).reshape(shape)
        if start + n > len(sequence.token_ids) and segment == sequence.tip:
            raise LogCorrupt(
                f"{where}: positions {start} to {start + n - 1} in a chain of "
                f"{len(sequence.token_ids)} tokens"
            )
        return _Row(
            where=where, segment=segment, start=start, experts_NLK=experts_NLK, hashes_N=hashes_N
        )

    def _table(self, ref: Ref) -> pa.Table | None:
        key = (ref.writer, ref.seq)
        if key not in self._tables:
            file = find_commit(self._log.path, ref.writer, ref.seq)
            self._tables[key] = _map(file) if file.stream == "routing" else None
        return self._tables[key]


def _map(file: CommitFile) -> pa.Table:
    """A commit without its payload: small columns are validated, experts by their row hashes.

    The commit's own checksum would need all of its bytes. Cold commits are read whole.
    """
    if file.cold or file.retired:
        return read_commit(file).table
    try:
        table = pa.ipc.open_file(pa.memory_map(str(file.path))).read_all()
        table.validate(full=True)
        known = table.schema.equals(STREAMS["routing"])
    except FileNotFoundError:
        known = False  # compaction has moved it meanwhile
    except (pa.ArrowException, OSError, ValueError) as error:
        raise LogCorrupt(f"{file.writer}/{file.seq}.routing: {error}; run `molt doctor`") from error
    return table if known else read_commit(file).table


def _name(sequence: TrainSequence) -> str:
    return f"{sequence.rollout_id} attempt {sequence.attempt} tip {sequence.tip}"


def check_ids(recorded: Recorded, n_experts: int, where: str) -> None:
    """LogCorrupt for an expert that the model does not have, or one that serves a token twice."""
    known_NLK = recorded.experts_TLK[recorded.known_T]
    positions = np.flatnonzero(recorded.known_T)
    over = np.argwhere(known_NLK >= n_experts)
    if len(over):
        n, layer, k = over[0]
        raise LogCorrupt(
            f"{where}: token {positions[n]}, MoE layer {layer}: recorded expert "
            f"{known_NLK[n, layer, k]} of a model with {n_experts}"
        )
    twice = repeated_expert(known_NLK)
    if twice is not None:
        n, layer = twice
        raise LogCorrupt(
            f"{where}: token {positions[n]}, MoE layer {layer}: recorded experts "
            f"{known_NLK[n, layer].tolist()} are not distinct"
        )
