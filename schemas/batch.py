"""A table of segments checked column by column: what `check_row` asks of each row, for all at once.

Only "all rows are right" is decided here. Whoever hears No asks `check_row` row by row, which names
the fault, or finds none: what is rare (media, masked tokens) is left to it.
"""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from molt.schemas.check import (
    DIGESTED,
    ENUMS_OF,
    LENGTH,
    LOGPROB_MAX,
    ROOT_DIGEST,
    Parent,
    digest_of,
    ends_inside,
    wrong_name,
)
from molt.schemas.columns import Row, flat, one_chunk
from molt.schemas.streams import ROW_TOKENS_MAX

Int64s = npt.NDArray[np.int64]
Place = tuple[str, int, int]
"""rollout_id, attempt, segment"""
ParentOf = Callable[[str, int, int], Parent | None]
"""What is known of the segment at a place."""
_TIME_MIN, _TIME_MAX = (np.datetime64(t, "us") for t in (datetime.min, datetime.max))
_RUN = np.dtype([("epoch", "<i4"), ("version", "<i8"), ("n", "<i4")])


def clean_segments(table: pa.Table, parent_of: ParentOf) -> dict[Place, Parent] | None:
    """What children of each row must agree with, by its place, if a validated table may be stored.

    None if a row is doubtful; fewer places than rows if some name the same segment.
    """
    if _has_null(table) or not _known_words(table) or len(one_chunk(table, "media").flatten()):
        return None
    if not _named(table) or not _not_negative(table) or not _in_calendar(table):
        return None
    tokens = {name: flat(table, name) for name in DIGESTED}
    runs = _runs(table)
    if runs is None or not _clean_tokens(tokens, *runs):
        return None
    return _linked(table, tokens, *runs, parent_of)


TOLD = ("parent", "finish_reason", "stop_token", "policy", "role")


def segment_content(row: Row) -> bytes:
    """What a repeated segment must have in common with the first, beyond what its digest covers."""
    told = repr(tuple(row[name] for name in TOLD)).encode()
    return xxhash.xxh3_128_digest(row["digest"] + told + row["messages"].encode())


def segment_contents(table: pa.Table, digests: Iterable[bytes]) -> list[bytes]:
    """`segment_content` of each row; `digests` are those of the table."""
    rows = list(zip(*(table.column(name).to_pylist() for name in TOLD), strict=True))
    told = {row: repr(row).encode() for row in set(rows)}  # nearly all rows are alike
    messages = table.column("messages").to_pylist()
    parts = zip(digests, rows, messages, strict=True)
    return [xxhash.xxh3_128_digest(d + told[row] + text.encode()) for d, row, text in parts]


def _has_null(table: pa.Table) -> bool:
    columns = [one_chunk(table, f.name) for f in table.schema if not f.nullable]
    columns += [c.values for c in columns if pa.types.is_large_list(c.type)]
    sampling = one_chunk(table, "sampling")
    columns += [*sampling.flatten(), sampling.field("stop").values]
    return any(c.null_count for c in columns)


def _known_words(table: pa.Table) -> bool:
    return all(
        set(pc.unique(table.column(name)).to_pylist()) <= allowed | {None}
        for name, allowed in ENUMS_OF["segments"]
    )


def _named(table: pa.Table) -> bool:
    names = (table.column(name).to_pylist() for name in ("rollout_id", "group_id"))
    return not any(wrong_name(*pair) for pair in set(zip(*names, strict=True)))


def _not_negative(table: pa.Table) -> bool:
    sources = one_chunk(table, "source_attempt")
    columns = [one_chunk(table, name).to_numpy() for name in ("attempt", "segment")]
    if sources.null_count < len(sources):
        columns.append(sources.drop_null().to_numpy())
    return all(column.min() >= 0 for column in columns)


def _in_calendar(table: pa.Table) -> bool:
    """Whether Python's datetime holds all times."""
    times = one_chunk(table, "at").to_numpy()
    return bool(times.min() >= _TIME_MIN and times.max() <= _TIME_MAX)


def _runs(table: pa.Table) -> tuple[Int64s, npt.NDArray[np.void]] | None:
    """(offsets [rows + 1], runs) of `version_runs`; None if a value of one is missing."""
    column = one_chunk(table, "version_runs")
    items = column.flatten()
    children = {name: items.field(name) for name in _RUN.names or ()}
    if any(child.null_count for child in children.values()):
        return None
    runs = np.empty(len(items), _RUN)
    for name, child in children.items():
        runs[name] = child.to_numpy()
    offsets = column.offsets.to_numpy()
    return offsets - offsets[0], runs


def _clean_tokens(
    tokens: dict[str, tuple[Int64s, npt.NDArray[Any]]],
    run_offsets: Int64s,
    runs: npt.NDArray[np.void],
) -> bool:
    """The rules of tokens, masks, logprobs and versions; no sampled token is left untrained."""
    (offsets, ids), (_, sampled), (_, train), (_, logprobs) = tokens.values()
    n_T = np.diff(offsets)
    if not all(np.array_equal(offsets, own) for own, _ in tokens.values()):
        return False
    if n_T.min() < 1 or n_T.max() > ROW_TOKENS_MAX or ids.min() < 0 or sampled.max() > 1:
        return False
    # NaN is neither above nor below a limit.
    fine = logprobs.min() > -np.inf and logprobs.max() <= LOGPROB_MAX
    mask = sampled.view(np.bool_)
    if not fine or not np.array_equal(sampled, train) or (logprobs.astype(np.bool_) > mask).any():
        return False
    total = np.concatenate([[0], np.cumsum(runs["n"], dtype=np.int64)])
    n_sampled = np.add.reduceat(sampled, offsets[:-1], dtype=np.int64)
    if not np.array_equal(total[run_offsets[1:]] - total[run_offsets[:-1]], n_sampled):
        return False
    right = (runs["n"] >= 1) & (runs["epoch"] >= 1) & (runs["version"] >= 0)
    return bool(right.all())


def _linked(
    table: pa.Table,
    tokens: dict[str, tuple[Int64s, npt.NDArray[Any]]],
    run_offsets: Int64s,
    runs: npt.NDArray[np.void],
    parent_of: ParentOf,
) -> dict[Place, Parent] | None:
    """The rules between segments, and the digests; a parent may stand earlier in the same table."""
    digested = [(values.itemsize, values.view(np.uint8).data) for _, values in tokens.values()]
    bounds, run_bounds = tokens["token_ids"][0].tolist(), (run_offsets * _RUN.itemsize).tolist()
    run_bytes = runs.tobytes()
    found: dict[Place, Parent] = {}
    names = ("rollout_id", "attempt", "segment", "parent", "keep", "digest")
    rows = zip(*(table.column(name).to_pylist() for name in names), strict=True)
    for i, (rollout, attempt, segment, parent, keep, digest) in enumerate(rows):
        a, b = bounds[i], bounds[i + 1]
        above: Parent | None = None
        if parent is not None:
            above = found.get((rollout, attempt, parent)) or parent_of(rollout, attempt, parent)
            if not 0 <= parent < segment or keep < 1:
                return None
            if above and (above.media or not ends_inside(keep, above)):
                return None
        elif keep != 0:
            return None
        if parent is None or above is not None:
            parts: list[Any] = [above.digest if above else ROOT_DIGEST, LENGTH(keep)]
            for width, view in digested:
                parts += (LENGTH(b - a), view[a * width : b * width])
            parts.append(run_bytes[run_bounds[i] : run_bounds[i + 1]])
            if digest_of(parts) != digest:
                return None
        found[rollout, attempt, segment] = Parent(digest=digest, n_chain=keep + b - a, n_own=b - a)
    return found
