"""What an earlier attempt of a rollout left in the log, and how a new one goes on from it.

A resumable agent is played again from its prompt; each of its requests that the earlier attempt
had sampled is answered with the recorded ids, as copies that name their `source_attempt`, and the
first one that was not, or not to its end, goes on at the engine. Ids are compared with ids (I1).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from molt.rollout.types import Completion
from molt.schemas.records import Sampling

Row = Mapping[str, Any]


class Recorded:
    """Replies of an earlier attempt, found by the exact ids of their prompt."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._replies: dict[bytes, list[list[Row]]] = {}
        chains: dict[int, np.ndarray] = {}
        open_: dict[int, list[Row]] = {}
        for row in rows:
            parent, n_context = row["parent"], int(np.count_nonzero(row["sampled"] == 0))
            kept = chains[parent][: row["keep"]] if parent is not None else row["token_ids"][:0]
            chains[row["segment"]] = np.concatenate([kept, row["token_ids"]])
            if parent in open_ and n_context == 0 and row["keep"] == len(chains[parent]):
                reply = open_.pop(parent)
            else:
                reply = []
                prompt = chains[row["segment"]][: row["keep"] + n_context]
                self._replies.setdefault(_key(prompt), []).append(reply)
            reply.append(row)
            if row["finish_reason"] == "partial":
                open_[row["segment"]] = reply

    def pop(self, prompt_ids: Sequence[int] | np.ndarray) -> list[Row]:
        """The segments of the oldest reply to this prompt that was not handed out; [] if none."""
        replies = self._replies.get(_key(prompt_ids)) if self._replies else None
        return replies.pop(0) if replies else []


def _key(ids: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(ids, np.int32).tobytes()


def recorded_pieces(reply: Sequence[Row]) -> Iterator[tuple[Completion, Row]]:
    """The sampled tokens of each segment of a recorded reply."""
    for row in reply:
        sampled = row["sampled"] == 1
        runs = ((r["epoch"], r["version"], r["n"]) for r in row["version_runs"])
        done = Completion(
            token_ids=row["token_ids"][sampled],
            logprobs=row["logprobs"][sampled],
            version_runs=tuple(runs),
            finish_reason=row["finish_reason"],
            stop_token=row["stop_token"],
        )
        yield done, row


def recorded_sampling(row: Row) -> Sampling:
    """The sampling parameters of a recorded segment."""
    return Sampling(**{**row["sampling"], "stop": tuple(row["sampling"]["stop"])})


def n_sampled(rows: Sequence[Row]) -> int:
    """Sampled tokens of these segments."""
    return sum(int(np.count_nonzero(row["sampled"])) for row in rows)
