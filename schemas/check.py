"""Invariants of single rows (I1, I2): the same checks run before the write and after the read.

Every function takes a normalised row and raises SegmentRejected naming rollout, segment, index
and both values. `check_row` is the one entry: schema first, then the stream's own rules.
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from molt.schemas.columns import LISTS, Row, check_storable, normalise, row_name
from molt.schemas.control import CONTROL_ENUMS
from molt.schemas.errors import SegmentRejected
from molt.schemas.streams import ENUMS, STREAMS, expert_dtype

ROOT_DIGEST = bytes(32)
LOGPROB_MAX = 1e-4
"""A log-probability may exceed 0 by rounding, by no more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """What a child segment must agree with."""

    digest: bytes
    n_chain: int
    """Tokens of the parent's whole chain, root to its own last token."""
    n_own: int
    """Tokens of the parent's own row."""
    media: tuple[tuple[int, int], ...] = ()
    """(first, end) of the media runs in its own row, counted in its chain; no child cuts them."""


DIGESTED: dict[str, np.dtype[Any]] = {
    "token_ids": np.dtype("<i4"),
    "sampled": np.dtype("u1"),
    "train": np.dtype("u1"),
    "logprobs": np.dtype("<f4"),
}
LENGTH = struct.Struct("<q").pack
_TOKEN_MIN, _FLAG_MAX = np.array(0, np.int32), np.array(1, np.uint8)
_LOGPROB_MAX, _LOGPROB_MIN = np.array(LOGPROB_MAX, np.float32), np.array(-math.inf, np.float32)
"""Limits as arrays: a comparison with a Python number takes twice as long on a short row."""


def segment_digest(row: Mapping[str, Any], parent_digest: bytes = ROOT_DIGEST) -> bytes:
    """blake2b-256 over the parent's digest, `keep` and the row's own token columns."""
    parts: list[Any] = [parent_digest, LENGTH(row["keep"])]
    for name, dtype in DIGESTED.items():
        array = np.ascontiguousarray(row[name], dtype)
        parts += (LENGTH(len(array)), array)
    runs = row["version_runs"]
    parts += [struct.pack("<iqi", run["epoch"], run["version"], run["n"]) for run in runs]
    return digest_of(parts)


def chain_digest(tip_digests: Sequence[bytes]) -> bytes:
    """blake2b-256 of the tips' digests in segment order: one value names a whole rollout."""
    return digest_of(tip_digests)


def digest_of(parts: Iterable[Any]) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=32).digest()


def check_row(
    stream: str, schema: pa.Schema, row: Mapping[str, Any], parent: Parent | None = None
) -> Row:
    """An owned, fully checked copy of `row`, ready to be stored."""
    if stream == "segments":
        row = _unsampled_to_zero(row)
    out = normalise(stream, schema, row)
    check_enums(stream, out)
    if stream in STREAMS:
        check_names(stream, out)
        check_numbers(stream, out)
    else:
        check_storable(stream, schema, out)
    if stream == "segments":
        check_segment(out, parent)
    elif stream in CHECKS:
        CHECKS[stream](out)
    return out


def _refused(stream: str, row: Mapping[str, Any], why: str) -> SegmentRejected:
    return SegmentRejected(f"{row_name(stream, row)}: {why}")


def check_enums(stream: str, row: Row) -> None:
    for name, allowed in ENUMS_OF.get(stream, ()):
        value = row.get(name)
        if value is not None and value not in allowed:
            raise _refused(stream, row, f"{name} '{value}' is none of {sorted(allowed)}")


_NUMBER = "(?:0|[1-9][0-9]{0,17})"
ROLLOUT_ID = re.compile(
    f"((?:{'|'.join(sorted(ENUMS['prompts', 'purpose']))})-{_NUMBER})/{_NUMBER}"
)


@lru_cache(maxsize=1 << 14)
def wrong_name(rollout_id: str, group_id: str | None = None) -> str | None:
    """Why readers could not take the name of a rollout apart; None if they can.

    >>> wrong_name("train-7/0", "train-7")
    >>> wrong_name("train-7/0", "train-8")
    "rollout_id 'train-7/0' is not of group 'train-8'"
    """
    found = ROLLOUT_ID.fullmatch(rollout_id)
    if found is None:
        return f"rollout_id '{rollout_id}' is not <purpose>-<ordinal>/<i>"
    if group_id not in (None, found[1]):
        return f"rollout_id '{rollout_id}' is not of group '{group_id}'"
    return None


def check_names(stream: str, row: Row) -> None:
    rollouts = row["rollouts"] if stream == "prompts" else [row]
    for rollout in rollouts:
        why = wrong_name(rollout["rollout_id"] or "", row.get("group_id"))
        if why:
            raise _refused(stream, row, why)


_COUNTED = ("attempt", "segment", "start", "token", "source_attempt", "n_segments", "version")
_NUMBERS = {s: [n for n in _COUNTED if n in schema.names] for s, schema in STREAMS.items()}
_NESTED = {"prompts": ["rollouts"], "segments": ["sampling", "media"]}
_NESTED["rollouts"] = ["counts"]
_OPTIONAL = {"processor_digest", "params"}


def check_numbers(stream: str, row: Row) -> None:
    """No count or index is below 0, no part of a nested value is missing."""
    for name in _NUMBERS[stream]:
        value = row[name]
        if value is not None and value < 0:
            raise _refused(stream, row, f"{name} {value} < 0")
    for name in _NESTED.get(stream, ()):
        value = row[name]
        for item in value if type(value) is list else (value,):
            if None in item.values() and {n for n in item if item[n] is None} - _OPTIONAL:
                raise _refused(stream, row, f"{name} lacks a value: {item}")


def check_json(stream: str, row: Row, name: str, kind: type) -> None:
    """A user's own text, of any kind, may hold control characters; SQL reads objects."""
    try:
        value = json.loads(row[name], parse_constant=_no_constant, strict=kind is dict)
    except (ValueError, RecursionError) as error:
        raise _refused(stream, row, f"{name} is not JSON: {error!s:.200}") from None
    if not isinstance(value, kind):
        raise _refused(stream, row, f"{name} is not a JSON object: {row[name]:.80}")


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


ENUMS_OF: dict[str, list[tuple[str, frozenset[str]]]] = {}
for (_owner, _name), _allowed in (ENUMS | CONTROL_ENUMS).items():
    ENUMS_OF.setdefault(_owner, []).append((_name, _allowed))


def _unsampled_to_zero(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """None stands for "no logprob"; it is legal only where the token was not sampled."""
    logprobs, sampled = row.get("logprobs"), row.get("sampled")
    if isinstance(logprobs, np.ndarray) or not isinstance(logprobs, Sequence):
        return row
    if not isinstance(sampled, LISTS) or len(logprobs) != len(sampled):
        return row
    for i, (value, flag) in enumerate(zip(logprobs, sampled, strict=True)):
        if value is None and flag:
            why = f"no logprob for the sampled token at index {i}; every sampled token needs one"
            raise _refused("segments", row, f"{why} (ask the engine for logprobs)")
    return {**row, "logprobs": [0.0 if v is None else v for v in logprobs]}


def check_segment(row: Row, parent: Parent | None = None) -> None:
    """All rules of one segment row; `parent` adds the rules of the chain when it is known."""
    _check_lengths(row)
    _check_masks(row)
    _check_logprobs(row)
    _check_versions(row)
    _check_media(row)
    _check_link(row, parent)
    if parent is not None or row["parent"] is None:
        expected = segment_digest(row, parent.digest if parent else ROOT_DIGEST)
        if row["digest"] != expected:
            _reject(row, f"digest {row['digest'].hex()} instead of {expected.hex()}")


def _reject(row: Row, why: str) -> None:
    raise _refused("segments", row, why)


def _first(flags: np.ndarray, value: bool = True) -> int:
    """Index of the first `value`, -1 if there is none; numpy's reductions take six times longer."""
    return flags.tobytes().find(value)


def _check_lengths(row: Row) -> None:
    ids = row["token_ids"]
    n = len(ids)
    if n == 0:
        _reject(row, "no tokens; a segment holds at least one")
    for name in ("sampled", "train", "logprobs"):
        if len(row[name]) != n:
            what = "sampled tokens" if np.count_nonzero(row["sampled"]) == n else "tokens"
            _reject(row, f"{len(row[name])} {name} for {n} {what}")
    if _first(ids < _TOKEN_MIN) >= 0:
        _reject(row, f"token id {int(ids.min())} is negative")


def _check_masks(row: Row) -> None:
    sampled, train = row["sampled"], row["train"]
    same = sampled.tobytes() == train.tobytes()  # nearly all rows: the rest holds by itself
    for name, mask in (("sampled", sampled), ("train", train))[: 1 if same else 2]:
        if _first(mask > _FLAG_MAX) >= 0:
            _reject(row, f"{name} is {int(mask.max())} at index {int(mask.argmax())}, not 0 or 1")
    if same:
        return
    loose = _first(train > sampled)
    if loose >= 0:
        _reject(row, f"train is 1 at index {loose}, where the token was not sampled")
    if not row["train_reason"] and np.count_nonzero(train) < np.count_nonzero(sampled):
        _reject(row, "sampled tokens with train = 0 need a train_reason")


def _check_logprobs(row: Row) -> None:
    logprobs = row["logprobs"]
    low, high = logprobs > _LOGPROB_MIN, logprobs <= _LOGPROB_MAX  # NaN is neither
    if _first(low, False) >= 0 or _first(high, False) >= 0:
        i = _first(low & high, False)
        _reject(row, f"logprob {logprobs[i]} at index {i} is not finite and <= 0")
    i = _first(logprobs.astype(np.bool_) > row["sampled"].view(np.bool_))
    if i >= 0:
        _reject(row, f"logprob {logprobs[i]} at index {i}, where nothing was sampled")


def _check_versions(row: Row) -> None:
    n_sampled, total = int(np.count_nonzero(row["sampled"])), 0
    for run in row["version_runs"]:
        if None in run.values():
            _reject(row, f"version_runs lacks a value: {run}")
        total += run["n"]
    if total != n_sampled:
        _reject(row, f"version_runs cover {total} tokens, but {n_sampled} were sampled")
    for run in row["version_runs"]:
        if run["n"] < 1 or run["epoch"] < 1 or run["version"] < 0:
            _reject(row, f"impossible version run {run}")


def _check_media(row: Row) -> None:
    n = len(row["token_ids"])
    for run in row["media"]:
        if run["start"] < 0 or run["n_tokens"] < 1 or run["start"] + run["n_tokens"] > n:
            _reject(row, f"media run at {run['start']} of {run['n_tokens']} tokens in {n}")


def _check_link(row: Row, parent: Parent | None) -> None:
    if row["parent"] is None:
        if row["keep"] != 0:
            _reject(row, f"keep is {row['keep']} at a root; a root keeps nothing")
        return
    if not 0 <= row["parent"] < row["segment"]:
        _reject(row, f"parent {row['parent']} does not come before segment {row['segment']}")
    if row["keep"] < 1:
        _reject(row, f"keep is {row['keep']}; a child keeps at least one token of its parent")
    if parent is None:
        return
    for first, end in parent.media:
        if first < row["keep"] < end:
            _reject(row, f"keep {row['keep']} ends inside a media run, tokens {first + 1} to {end}")
    if not ends_inside(row["keep"], parent):
        first_own = parent.n_chain - parent.n_own
        own = f"whose own tokens are {first_own + 1} to {parent.n_chain} of its chain"
        _reject(row, f"keep {row['keep']} does not end inside parent {row['parent']}, {own}")


def ends_inside(keep: int, parent: Parent) -> bool:
    """Whether the last kept token is one of the parent's own."""
    return parent.n_chain - parent.n_own < keep <= parent.n_chain


def parent_of(row: Row) -> Parent:
    """What the children of a segment must agree with."""
    n_own, keep = len(row["token_ids"]), row["keep"]
    media = [(keep + run["start"], keep + run["start"] + run["n_tokens"]) for run in row["media"]]
    return Parent(digest=row["digest"], n_chain=keep + n_own, n_own=n_own, media=tuple(media))


def check_reward(row: Row) -> None:
    value = row["value"]
    if value is not None and not math.isfinite(value):
        why = f"reward '{row['name']}' is {value}; use None for a rollout that cannot be scored"
        raise _refused("rewards", row, why)
    if row["revision"] < 0:
        raise _refused("rewards", row, f"revision {row['revision']} < 0")


def check_scores(row: Row) -> None:
    if row["epoch"] < 1:
        raise _refused("scores", row, f"epoch {row['epoch']} < 1")
    bad = np.flatnonzero(~np.isfinite(row["values"]))
    if len(bad):
        raise _refused("scores", row, f"value {row['values'][bad[0]]} at index {bad[0]}")


def check_routing(row: Row) -> None:
    """Rows must fit `n` positions and their own hashes (shape is checked with the metadata)."""
    n, size = row["n"], len(row["experts"])
    if n < 1 or not size or len(row["row_xxh3"]) != n or size % n:
        why = f"{size} bytes and {len(row['row_xxh3'])} hashes for {n} positions"
        raise _refused("routing", row, why)
    found, recorded = row_hashes(row["experts"], n), row["row_xxh3"].tolist()
    if found != recorded:
        i = next(i for i in range(n) if found[i] != recorded[i])
        why = f"hash of position {row['start'] + i} is {found[i]:016x}, recorded {recorded[i]:016x}"
        raise _refused("routing", row, why)


def row_hashes(data: bytes, n: int) -> list[int]:
    """xxh3-64 of each of the `n` positions in `data`."""
    view, width = memoryview(data), len(data) // n
    hash_of = xxhash.xxh3_64_intdigest
    return [hash_of(view[at : at + width]) for at in range(0, n * width, width)]


def routing_shape(metadata: Mapping[str, str]) -> tuple[int, int, int, np.dtype[Any]]:
    """layers, top_k, experts, dtype; KeyError if one is not there, ValueError if it is none."""
    if not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError(f"metadata {dict(metadata)} are not texts")
    layers, top_k = int(metadata["molt.layers"]), int(metadata["molt.top_k"])
    n_experts, dtype = int(metadata["molt.experts"]), metadata["molt.dtype"]
    if layers < 1 or top_k < 1 or dtype != expert_dtype(n_experts):
        raise ValueError(f"{layers} layers, top {top_k} of {n_experts} experts as {dtype}")
    return layers, top_k, n_experts, np.dtype(dtype)


def check_routing_shape(row: Row, metadata: Mapping[str, str], n_chain: int | None = None) -> None:
    """A routing row against the shape in the commit's metadata and, if known, its chain's end."""
    try:
        layers, top_k, n_experts, dtype = routing_shape(metadata)
    except KeyError as error:
        why = f"no {error} for this run; open the writer with routing=routing_metadata(...)"
        raise _refused("routing", row, why) from None
    except ValueError as error:
        raise _refused("routing", row, str(error)) from None
    first, n = row["start"], row["n"]
    size = n * layers * top_k * dtype.itemsize
    if len(row["experts"]) != size:
        why = f"{len(row['experts'])} bytes of experts instead of {size}"
        raise _refused("routing", row, why)
    experts_NLK = np.frombuffer(row["experts"], dtype.newbyteorder("<")).reshape(n, layers, top_k)
    if experts_NLK.max() >= n_experts:
        why = f"expert {experts_NLK.max()} in a run of {n_experts} experts"
        raise _refused("routing", row, why)
    if n_chain is not None and first + n > n_chain:
        why = f"positions {first} to {first + n - 1} in a chain of {n_chain} tokens"
        raise _refused("routing", row, why)
    twice = repeated_expert(experts_NLK)
    if twice is not None:
        at, layer = twice
        chosen = experts_NLK[at, layer].tolist()
        why = f"position {first + at}, layer {layer}: experts {chosen} are not distinct"
        raise _refused("routing", row, why)


def repeated_expert(experts_NLK: np.ndarray) -> tuple[int, int] | None:
    """The first (row, layer) whose top-k choices name an expert twice; None if there is none."""
    choices_KNL = np.ascontiguousarray(np.moveaxis(experts_NLK, -1, 0))
    bad_NL = np.zeros(experts_NLK.shape[:-1], bool)
    for k, choice_NL in enumerate(choices_KNL):  # pairs: a tenth of what sorting takes
        for other_NL in choices_KNL[k + 1 :]:
            bad_NL |= choice_NL == other_NL
    if not bad_NL.any():
        return None
    row, layer = np.argwhere(bad_NL)[0].tolist()
    return row, layer


def repeated_rows(experts_NLK: np.ndarray) -> int:
    """Length of the longest run of tokens with equal choices in all layers.

    Legal, and suspicious when it is long: padding that was taken for routing looks like this.
    """
    if not len(experts_NLK):
        return 0
    changes = (experts_NLK[1:] != experts_NLK[:-1]).any((1, 2))
    edges = np.flatnonzero(np.concatenate([[True], changes, [True]]))
    return int(np.diff(edges).max())


def routing_sum(rows: Iterable[tuple[int, int, Sequence[int]]]) -> int:
    """One value for all routing of an attempt: of (segment, start, row_xxh3), in any order.

    The outcome carries it as `metrics.routing_sum`, so that rows of another rollout show.
    """
    total = 0
    for segment, start, hashes in rows:
        packed = struct.pack("<qq", segment, start) + np.array(hashes, "<u8").tobytes()
        total += xxhash.xxh3_64_intdigest(packed)
    return total % (1 << 64)


def routing_columns(experts_NLK: np.ndarray, n_experts: int) -> Row:
    """`n`, `experts` and `row_xxh3` of a routing row from expert ids [N, layers, top_k].

    Ids that the run's dtype cannot hold are refused, never wrapped.
    """
    if experts_NLK.ndim != 3 or not experts_NLK.size or experts_NLK.dtype.kind not in "iu":
        raise SegmentRejected(
            f"expert ids {experts_NLK.shape} of {experts_NLK.dtype}; whole numbers are needed, "
            "[N, layers, top_k], none of them 0"
        )
    if experts_NLK.min() < 0 or experts_NLK.max() >= n_experts:
        raise SegmentRejected(
            f"expert ids {experts_NLK.min()} to {experts_NLK.max()} in a run of {n_experts} experts"
        )
    packed = experts_NLK.astype(np.dtype(expert_dtype(n_experts)).newbyteorder("<"))
    data, n = packed.tobytes(), len(packed)
    return {"n": n, "experts": data, "row_xxh3": row_hashes(data, n)}


def check_prompt(row: Row) -> None:
    if row["group_id"] != f"{row['purpose']}-{row['ordinal']}":
        raise _refused("prompts", row, f"group_id must be {row['purpose']}-{row['ordinal']}")
    if row["n"] < 1 or row["ordinal"] < 0 or row["attempt"] < 0:
        why = f"n {row['n']}, ordinal {row['ordinal']}, attempt {row['attempt']}"
        raise _refused("prompts", row, why)
    for rollout in row["rollouts"]:
        if rollout["attempt"] < 0:
            raise _refused("prompts", row, f"attempt {rollout['attempt']} of a rollout")
    check_json("prompts", row, "prompt", object)


def check_rollout(row: Row) -> None:
    if row["status"] in ("failed", "aborted") and not row["reason"]:
        raise _refused("rollouts", row, f"status {row['status']} needs a reason")
    if min(row["counts"].values()) < 0 or not 0 <= row["seconds"] < math.inf:
        why = f"impossible counts {row['counts']} or seconds {row['seconds']}"
        raise _refused("rollouts", row, why)
    check_json("rollouts", row, "metrics", dict)


CHECKS: dict[str, Callable[[Row], None]] = {
    "rewards": check_reward,
    "scores": check_scores,
    "routing": check_routing,
    "prompts": check_prompt,
    "rollouts": check_rollout,
}
