"""A step's exact batch on disk: tensors as the trainer gets them, and one table row per token.

`step-N.safetensors` holds the sequences end to end; `step-N.parquet` names every token and, where
the step was executed, says what the algorithm did with it. Both are for other tools to read.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from molt.replay.assemble import TrainSequence

Arrays = Mapping[str, npt.NDArray[Any]]


def tensors(sequences: Sequence[TrainSequence]) -> dict[str, npt.NDArray[Any]]:
    """The batch as flat arrays: token_ids, mask, logprobs, lag [sum T], offsets [S + 1],
    advantage and temperature [S].
    """
    lengths = [len(s.token_ids) for s in sequences]
    return {
        "token_ids": _flat([s.token_ids for s in sequences], np.int32),
        "mask": _flat([s.mask for s in sequences], np.uint8),
        "logprobs": _flat([s.logprobs for s in sequences], np.float32),
        "lag": _flat([s.lag for s in sequences], np.int64),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "advantage": np.array([s.advantage for s in sequences], np.float64),
        "temperature": np.array([s.temperature for s in sequences], np.float64),
    }


def _flat(parts: Sequence[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)


def token_table(sequences: Sequence[TrainSequence], trained: Arrays) -> pa.Table:
    """One row per token of every sequence; `trained` has columns [N] over the trained tokens."""
    batch = tensors(sequences)
    lengths = np.diff(batch["offsets"])
    index = np.repeat(np.arange(len(sequences)), lengths)
    where = np.flatnonzero(batch["mask"])
    columns: dict[str, Any] = {
        "rollout_id": pa.array([s.rollout_id for s in sequences], pa.string()).take(index),
        "attempt": np.array([s.attempt for s in sequences], np.int32)[index],
        "tip": np.array([s.tip for s in sequences], np.int32)[index],
        "pos": np.arange(len(index)) - batch["offsets"][index],
        "token_id": batch["token_ids"],
        "trained": batch["mask"] == 1,
        "logprob": batch["logprobs"],
        "lag": batch["lag"],
    }
    for name, values in trained.items():
        full = np.zeros(len(index), values.dtype)
        full[where] = values
        columns[name] = pa.array(full, mask=batch["mask"] == 0)
    return pa.table(columns)


def dump(
    folder: Path, step: int, sequences: Sequence[TrainSequence], tokens: pa.Table
) -> tuple[Path, Path]:
    """Write the batch and the table of a step into `folder`; returns both paths."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    names = [{"rollout_id": s.rollout_id, "attempt": s.attempt, "tip": s.tip} for s in sequences]
    batch = folder / f"step-{step}.safetensors"
    save_file(tensors(sequences), batch, metadata={"sequences": json.dumps(names)})
    table = folder / f"step-{step}.parquet"
    pq.write_table(tokens, table)
    return batch, table


PER_ROLLOUT = """
select rollout_id, tip, count(*) as tokens,
    {'advantage': any_value(advantage), 'weight': avg(weight), 'move': avg(after - before)}
        as recorded,
    {'advantage': any_value(other_advantage), 'weight': avg(other_weight),
     'move': avg(other_after - before)} as changed
from tokens where trained group by rollout_id, attempt, tip order by rollout_id, tip
"""


def per_rollout(tokens: pa.Table) -> list[dict[str, Any]]:
    """Both algorithms' effect on each rollout's tokens: advantage, mean weight, mean move.

    A move is the change of log pi by the step; a weight is d loss / d log pi before it.
    """
    con = duckdb.connect()
    con.register("tokens", tokens)
    rows: list[dict[str, Any]] = con.sql(PER_ROLLOUT).to_arrow_table().to_pylist()
    return rows
