"""The reference workload: agent segments with a heavy-tailed length, and its rows for the log.

Tokens per segment: lognormal, median 600, sigma 1, 8 to 16,384 (mean about 980). Per token: id
(Zipf over 150k, shuffled), logprob and version (0 where not sampled) and loss mask: 13 raw bytes.
A segment is context and up to three sampled runs; 30 % of them change the version once.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import factories as make
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from molt.schemas.streams import STREAMS

FIELDS = {
    "ids": np.dtype(np.int32),
    "logprobs": np.dtype(np.float32),
    "mask": np.dtype(np.uint8),
    "versions": np.dtype(np.int32),
}
COLUMNS = {"token_ids": "ids", "sampled": "mask", "train": "mask", "logprobs": "logprobs"}
"""Where the log keeps them."""
RAW_BYTES = sum(dtype.itemsize for dtype in FIELDS.values())
SEGMENTS_PER_VERSION = 500
VOCABULARY = 150_000

Flat = dict[str, npt.NDArray[Any]]


class Workload:
    """`n` segments; `flat[field]` is [tokens], segment i is [offsets[i], offsets[i + 1])."""

    def __init__(self, n: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.n = n
        lengths = np.clip(rng.lognormal(np.log(600), 1.0, n), 8, 16_384).astype(np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.n_tokens = total = int(self.offsets[-1])
        weights = 1.0 / (np.arange(VOCABULARY) + 2.7) ** 1.05
        ranks = np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(total))
        names = rng.permutation(VOCABULARY).astype(np.int32)
        logprobs = -rng.standard_exponential(total, dtype=np.float32)
        easy = rng.random(total) < 0.6
        logprobs[easy] = -(10 ** (-7 + 5 * rng.random(int(easy.sum()), dtype=np.float32)))
        mask = np.zeros(total, np.uint8)
        versions = np.zeros(total, np.int32)
        for i, (a, b) in enumerate(self.spans()):
            cuts = a + np.sort(rng.integers(0, b - a, 6))
            for first, end in cuts.reshape(3, 2):
                mask[first:end] = 1
            versions[a:b] = i // SEGMENTS_PER_VERSION
            if rng.random() < 0.3:
                versions[rng.integers(a, b) : b] += 1
        ids = names[ranks.clip(0, VOCABULARY - 1)]
        self.flat: Flat = {
            "ids": ids,
            "logprobs": logprobs * mask,
            "mask": mask,
            "versions": versions * mask,
        }
        self.rewards = rng.random(n)
        self._rows: dict[int, dict[str, Any]] = {}
        self._tables: dict[tuple[int, int], pa.Table] = {}

    def spans(self) -> Iterator[tuple[int, int]]:
        yield from zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True)

    @property
    def n_versions(self) -> int:
        return int(self.flat["versions"].max()) + 1

    def arrays(self, i: int) -> Flat:
        a, b = self.offsets[i % self.n], self.offsets[i % self.n + 1]
        return {name: values[a:b] for name, values in self.flat.items()}

    def raw(self, i: int) -> bytes:
        return b"".join(values.tobytes() for values in self.arrays(i).values())

    def raw_bytes(self, i: int, j: int) -> int:
        n = sum(self.offsets[k % self.n + 1] - self.offsets[k % self.n] for k in range(i, j))
        return int(n) * RAW_BYTES

    def plain(self, i: int) -> dict[str, Any]:
        """What a peer stores of segment i: numpy arrays and two scalars."""
        arrays = self.arrays(i)
        return {"id": self.name(i), "version0": int(arrays["versions"].max()), **arrays}

    @staticmethod
    def name(i: int) -> str:
        return f"train-{i}/0"

    def row(self, i: int) -> dict[str, Any]:
        """Segment i for the log, its digest included; made once per segment of the workload."""
        row = self._rows.get(i % self.n)
        if row is None:
            row = self._rows[i % self.n] = self._row(i)
        if row["rollout_id"] == self.name(i):
            return row
        return {**row, "rollout_id": self.name(i), "group_id": f"train-{i}"}

    def table(self, i: int, j: int) -> pa.Table:
        """Segments [i, j) for the log, made once; the token columns are views of the arrays."""
        if (i, j) not in self._tables:
            ends = [i, *range(i // self.n * self.n + self.n, j, self.n), j]
            parts = [self._table(a, b) for a, b in pairwise(ends)]
            self._tables[i, j] = pa.concat_tables(parts).combine_chunks()
        return self._tables[i, j]

    def _table(self, i: int, j: int) -> pa.Table:
        """Within one pass over the segments."""
        schema, first = STREAMS["segments"], i % self.n
        rows = [self.row(k) for k in range(i, j)]
        ends = self.offsets[first : first + j - i + 1]
        offsets = pa.array(ends - ends[0])
        columns = []
        for field in schema:
            if field.name in COLUMNS:
                values = pa.array(self.flat[COLUMNS[field.name]][ends[0] : ends[-1]])
                columns.append(pa.LargeListArray.from_arrays(offsets, values))
            elif field.name == "at":
                columns.append(pa.array([make.NOW] * (j - i), field.type))
            else:
                columns.append(pa.array([row[field.name] for row in rows], field.type))
        return pa.Table.from_arrays(columns, schema=schema)

    def _row(self, i: int) -> dict[str, Any]:
        arrays = self.arrays(i)
        sampled = arrays["versions"][arrays["mask"] == 1]
        edges = np.flatnonzero(np.diff(sampled, prepend=-1, append=-1))
        runs = [(1, int(sampled[a]), int(b - a)) for a, b in zip(edges, edges[1:], strict=False)]
        row = make.segment(
            rollout_id=self.name(i),
            ids=arrays["ids"],
            sampled=arrays["mask"].tolist(),
            logprobs=arrays["logprobs"],
            runs=runs,
        )
        return {**row, **{name: arrays[field] for name, field in COLUMNS.items()}}


class Packed:
    """Where a reader puts tokens, as a trainer's packer would; its pages are touched before."""

    def __init__(self, n_tokens: int) -> None:
        self.flat: Flat = {k: np.zeros(n_tokens, dtype) for k, dtype in FIELDS.items()}
        self.n = 0

    def put(self, fields: Flat) -> None:
        end = self.n + len(fields["ids"])
        for name, values in fields.items():
            np.copyto(self.flat[name][self.n : end], values, casting="unsafe")
        self.n = end

    def check(self, workload: Workload) -> None:
        """Whatever was read must be what was written."""
        for name, values in workload.flat.items():
            if not np.array_equal(self.flat[name][: workload.n_tokens], values):
                raise AssertionError(f"{name} came back with other values")
