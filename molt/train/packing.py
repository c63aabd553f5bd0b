"""Batch layout: training sequences -> packed rows in which every common prefix is computed once.

Stands between the assembled sequences and the forward pass. Suffixes: T tokens of a row, R logit
rows, N targets (trained tokens). Invariant: a target's logprob equals that of the plain forward of
its own sequence, and the one shift from the mask axis to the next-token axis is `predictors()`.

A row is a prefix tree written out: sequences in lexicographic order, each adding only the tokens
it does not share with the one before it. Position ids are depths in the tree and a token attends to
its ancestors only, so sequences never see each other.

    sequences [7 8 1 2], [7 8 1 3], [7 9]    row       7 8 1 2 3 9
                                             position  0 1 2 3 3 1

The example shows full sequences; inputs stop at the last predictor, because what follows it
predicts nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Which experts served the tokens that are fed to the model; L layers, K choices per token."""

    experts_TLK: np.ndarray
    """uint8 or uint16; 0 where unknown"""
    known_T: np.ndarray
    """bool"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One sequence and the tokens whose logprob is wanted."""

    token_ids: np.ndarray
    """int [T]"""
    targets: np.ndarray
    """int64, ascending indices into token_ids, all >= 1; not empty"""
    temperature: float
    """the logits are divided by it"""
    recorded: Recorded | None = None
    """experts of the tokens before the last target"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One forward pass."""

    input_ids_T: np.ndarray
    position_ids_T: np.ndarray
    mask_TT: np.ndarray | None
    """bool, [query, key]; None = plain causal (one chain)"""
    keep_R: np.ndarray
    """int64, row positions whose logits are needed"""
    temperature_R: np.ndarray
    """float32"""
    logits_N: np.ndarray
    """int64, for each target its index into R"""
    target_ids_N: np.ndarray
    slot_N: np.ndarray
    """int64, where the target stands among all targets of the batch (sequence by sequence)"""
    sequence_T: np.ndarray
    """int64, the first of the packed sequences that a token belongs to"""
    recorded: Recorded | None = None
    """experts of the row's tokens"""


def predictors(targets: np.ndarray) -> np.ndarray:
    """Indices of the tokens whose hidden state predicts `targets`: the only shift there is."""
    return targets - 1


def idle_row() -> Row:
    """A one-token row without targets: a rank that ran out of rows still joins the collectives."""
    none, zero = np.zeros(0, np.int64), np.zeros(1, np.int64)
    return Row(
        input_ids_T=zero,
        position_ids_T=zero,
        mask_TT=None,
        keep_R=zero,
        temperature_R=np.ones(1, np.float32),
        logits_N=none,
        target_ids_N=none,
        slot_N=none,
        sequence_T=zero,
    )


def pack(items: Sequence[Wanted], *, max_tokens: int, share: bool = True) -> list[Row]:
    """Lay all sequences out in rows of at most `max_tokens` (a longer sequence stands alone).

    With `share=False` every sequence is a row of its own under the plain causal mask, for models
    that take no 4-D mask. The result depends on the ids alone, not on the order of `items` (except
    for `slot_N`, which follows it).
    """
    starts = np.cumsum([0, *(len(item.targets) for item in items)])
    inputs = [item.token_ids[: item.targets[-1]].astype(np.int64) for item in items]
    order = sorted(range(len(items)), key=lambda i: inputs[i].astype(">i4").tobytes())
    rows: list[list[tuple[int, int]]] = []
    n_tokens = 0
    for before, index in zip([None, *order], order, strict=False):
        shared = 0
        if share and before is not None:
            shared = common_prefix(inputs[before], inputs[index])
            shared = _routed_alike(items[before].recorded, items[index].recorded, shared)
        n_new = len(inputs[index]) - shared
        if rows and share and n_tokens + n_new <= max_tokens:
            rows[-1].append((index, shared))
            n_tokens += n_new
        else:
            rows.append([(index, 0)])
            n_tokens = len(inputs[index])
    return [_row(row, inputs, items, starts) for row in rows]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading ids that are equal in both."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n


def _routed_alike(a: Recorded | None, b: "Recorded | None", n: int) -> int:
    """How many of `n` common tokens also have the same recorded experts: others are not shared."""
    if a is None or b is None:
        return n
    alike = (a.experts_TLK[:n] == b.experts_TLK[:n]).all((1, 2)) & (a.known_T[:n] == b.known_T[:n])
    return n if alike.all() else int(alike.argmin())


def _row(
    members: list[tuple[int, int]],
    inputs: list[np.ndarray],
    items: Sequence[Wanted],
    starts: np.ndarray,
) -> Row:
    """Write one prefix tree out; `members` are (sequence, tokens shared with the one before)."""
    n_tokens = sum(len(inputs[index]) - shared for index, shared in members)
    is_chain = n_tokens == max(len(inputs[index]) for index, _ in members)
    ids_T = np.zeros(n_tokens, np.int64)
    mask_TT = None if is_chain else np.zeros((n_tokens, n_tokens), bool)
    depth_T, path, end = np.zeros(n_tokens, np.int64), np.zeros(0, np.int64), 0
    sequence_T, experts, known = np.zeros(n_tokens, np.int64), [], []
    predictor_N, temperature_N, target_N, slot_N = [], [], [], []
    for index, shared in members:
        item, begin = items[index], end
        end = begin + len(inputs[index]) - shared
        ids_T[begin:end] = inputs[index][shared:]
        depth_T[begin:end] = np.arange(shared, len(inputs[index]))
        sequence_T[begin:end] = index
        if item.recorded is not None:
            experts.append(item.recorded.experts_TLK[shared:])
            known.append(item.recorded.known_T[shared:])
        if mask_TT is not None:
            mask_TT[begin:end, path[:shared]] = True
            mask_TT[begin:end, begin:end] = np.tri(end - begin, dtype=bool)
        path = np.concatenate([path[:shared], np.arange(begin, end)])
        predictor_N.append(path[predictors(item.targets)])
        temperature_N.append(np.full(len(item.targets), item.temperature, np.float32))
        target_N.append(item.token_ids[item.targets].astype(np.int64))
        slot_N.append(starts[index] + np.arange(len(item.targets)))
    wanted_N = np.stack([np.concatenate(predictor_N), np.concatenate(temperature_N)])
    wanted_2R, logits_N = np.unique(wanted_N.astype(np.float64), axis=1, return_inverse=True)
    return Row(
        input_ids_T=ids_T,
        position_ids_T=depth_T,
        mask_TT=mask_TT,
        keep_R=wanted_2R[0].astype(np.int64),
        temperature_R=wanted_2R[1].astype(np.float32),
        logits_N=logits_N.reshape(-1),
        target_ids_N=np.concatenate(target_N),
        slot_N=np.concatenate(slot_N),
        sequence_T=sequence_T,
        recorded=(
            Recorded(experts_TLK=np.concatenate(experts), known_T=np.concatenate(known))
            if experts
            else None
        ),
    )
