"""Segments to branches: which tokens make one training sequence, and which of them it owns.

A segment is a tip unless some child keeps all of its tokens; the chain root -> tip is a branch.
A sampled token shared by several branches belongs to the lowest-numbered one (invariant I1: owned
tokens of all branches sum to the sampled ones, so each is trained once per pass).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Link(Protocol):
    """What this module needs to know of a segment."""

    @property
    def parent(self) -> int | None: ...
    @property
    def keep(self) -> int: ...
    @property
    def n_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens [0, end) of segment `segment`; those in [owned_from, end) are owned."""

    segment: int
    end: int
    owned_from: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One training sequence: its pieces from root to tip."""

    tip: int
    pieces: tuple[Piece, ...]

    @property
    def n_tokens(self) -> int:
        return sum(p.end for p in self.pieces)


def chain_length(segments: Mapping[int, Link], segment: int) -> int:
    """Tokens of the chain that ends with this segment's last own token."""
    return segments[segment].keep + segments[segment].n_tokens


def tips(segments: Mapping[int, Link]) -> list[int]:
    """Segments that no child keeps entirely, in order."""
    extended = {
        s.parent
        for s in segments.values()
        if s.parent is not None and s.keep == chain_length(segments, s.parent)
    }
    return [i for i in sorted(segments) if i not in extended]


def chain(segments: Mapping[int, Link], tip: int) -> list[tuple[int, int]]:
    """(segment, kept tokens of its own row) from root to tip."""
    out = [(tip, segments[tip].n_tokens)]
    current = segments[tip]
    while current.parent is not None:
        parent = segments[current.parent]
        out.append((current.parent, current.keep - parent.keep))
        current = parent
    return out[::-1]


def branches(segments: Mapping[int, Link], trained: Collection[int] | None = None) -> list[Branch]:
    """All branches of one attempt, numbered by their tip.

    `trained` limits them to these tips: of a shared token the lowest *trained* branch is the
    owner, and `segments` may then hold no more than the chains of these tips.

    >>> from types import SimpleNamespace as S
    >>> root = S(parent=None, keep=0, n_tokens=12)
    >>> [b.tip for b in branches({0: root, 1: S(parent=0, keep=12, n_tokens=5)})]
    [1]
    >>> [b.tip for b in branches({0: root, 1: S(parent=0, keep=8, n_tokens=5)})]
    [0, 1]
    """
    owned: dict[int, int] = {}
    out = []
    for tip in tips(segments) if trained is None else sorted(trained):
        pieces = []
        for segment, end in chain(segments, tip):
            start = min(owned.get(segment, 0), end)
            pieces.append(Piece(segment=segment, end=end, owned_from=start))
            owned[segment] = max(owned.get(segment, 0), end)
        out.append(Branch(tip=tip, pieces=tuple(pieces)))
    return out


def token_lags(row: Mapping[str, Any], step: int) -> npt.NDArray[np.int64]:
    """[T] lag of each sampled token of a segment row at `step`: (step - 1) - version; else 0."""
    lag = np.zeros(len(row["sampled"]), np.int64)
    versions = [np.full(run["n"], run["version"], np.int64) for run in row["version_runs"]]
    if versions:
        lag[row["sampled"] == 1] = (step - 1) - np.concatenate(versions)
    return lag
