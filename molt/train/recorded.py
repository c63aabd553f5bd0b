"""Recorded expert choices of a rank's sequences, read from the log by range (I3, I6).

Stands between the plan's addresses and packing. Only the rank that trains a sequence reads its
rows, and of a hot commit only the positions that are fed to the model, each verified by its own
hash. Positions that nobody recorded stay unknown.

Letters: T tokens of a sequence, L layers with experts, K choices per token.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from molt.replay.assemble import TrainSequence
from molt.replay.sources import Sources
from molt.schemas.check import repeated_expert
from molt.schemas.errors import LogCorrupt
from molt.schemas.records import Ref
from molt.schemas.streams import expert_dtype
from molt.store.control import Record
from molt.train.packing import Recorded


class RoutingReader:
    """Reads routing rows by address. `layers`, `top_k` and `n_experts` are the model's."""

    def __init__(self, source: Sources, *, layers: int, top_k: int, n_experts: int) -> None:
        self._source, self._n_experts = source, n_experts
        self._shape = (layers, top_k)
        self._dtype = np.dtype(expert_dtype(n_experts)).newbyteorder("<")

    def of_plan(self, plan: Record, sequences: Sequence[TrainSequence]) -> list[Recorded]:
        """What the plan's routing rows say of each of `sequences`, in their order.

        Raises LogCorrupt for rows of another shape, damaged ones, and experts that cannot be.
        """
        refs = {
            (row["rollout_id"], row["attempt"], branch["tip"]): branch["refs"]
            for row in plan.rows
            for branch in row["branches"]
        }
        return [self.of(s, refs[s.rollout_id, s.attempt, s.tip]) for s in sequences]

    def of(self, sequence: TrainSequence, refs: Iterable[Mapping[str, Any]]) -> Recorded:
        """Each position from the segment that computed it first, in the order of the chain.

        A later segment recomputes what was sampled before it, perhaps under newer weights; the
        choices behind the recorded logprobs are the first ones. The last token of a segment has
        its row in the next one.
        """
        trained = np.flatnonzero(sequence.mask)
        n_inputs = int(trained[-1]) if len(trained) else 0
        experts_TLK = np.zeros((n_inputs, *self._shape), self._dtype)
        known_T = np.zeros(n_inputs, bool)
        ends = dict(sequence.chain)
        order = {segment: i for i, segment in enumerate(ends)}
        places = [(self._source.routing_place(ref), ref) for ref in (Ref(**r) for r in refs)]
        rows = [(*place, ref) for place, ref in places if place is not None and place[0] in ends]
        for segment, start, n, ref in sorted(rows, key=lambda row: (order[row[0]], row[1])):
            if segment == sequence.tip and start + n > len(sequence.token_ids):
                raise LogCorrupt(
                    f"{_name(sequence)}: routing of positions {start} to {start + n - 1} in a "
                    f"chain of {len(sequence.token_ids)} tokens"
                )
            end = min(start + n, ends[segment], n_inputs)
            fresh = np.flatnonzero(~known_T[start:end]) + start
            if not len(fresh):
                continue
            first, last = int(fresh[0]), int(fresh[-1]) + 1
            rows_NLK = self._read(sequence, ref, first, last)
            if len(fresh) == len(rows_NLK):
                experts_TLK[first:last] = rows_NLK
            else:
                experts_TLK[fresh] = rows_NLK[fresh - first]
            known_T[fresh] = True
        recorded = Recorded(experts_TLK=experts_TLK, known_T=known_T)
        self._check_ids(recorded, _name(sequence))
        return recorded

    def _read(self, sequence: TrainSequence, ref: Ref, first: int, end: int) -> np.ndarray:
        found = self._source.experts(ref, first, end)
        width = int(np.prod(self._shape)) * self._dtype.itemsize
        if found.shape[1] != width:
            raise LogCorrupt(
                f"{_name(sequence)}: {found.shape[1]} bytes of experts per token were recorded, "
                f"this model has {self._shape[0]} MoE layers with {self._shape[1]} of "
                f"{self._n_experts} experts: {width} bytes"
            )
        return np.ascontiguousarray(found).view(self._dtype).reshape(-1, *self._shape)

    def _check_ids(self, recorded: Recorded, where: str) -> None:
        """The same as at append: the range, and distinct experts."""
        positions = np.flatnonzero(recorded.known_T)
        known_NLK = recorded.experts_TLK
        if len(positions) < len(known_NLK):
            known_NLK = known_NLK[positions]
        twice = repeated_expert(known_NLK)
        if known_NLK.size and known_NLK.max() >= self._n_experts:
            n, layer, k = np.argwhere(known_NLK >= self._n_experts)[0]
            raise LogCorrupt(
                f"{where}: token {positions[n]}, MoE layer {layer}: recorded expert "
                f"{known_NLK[n, layer, k]} of a model with {self._n_experts}"
            )
        if twice is not None:
            n, layer = twice
            raise LogCorrupt(
                f"{where}: token {positions[n]}, MoE layer {layer}: recorded experts "
                f"{known_NLK[n, layer].tolist()} are not distinct"
            )


def _name(sequence: TrainSequence) -> str:
    return f"{sequence.rollout_id} attempt {sequence.attempt} tip {sequence.tip}"
