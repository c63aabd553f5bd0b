"""Branches: every sampled token is owned exactly once, whatever the tree (invariant I1)."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from molt.store.branches import branches, chain, chain_length, tips, token_lags


def seg(parent: int | None, keep: int, n: int) -> SimpleNamespace:
    return SimpleNamespace(parent=parent, keep=keep, n_tokens=n)


@st.composite
def trees(draw: st.DrawFn) -> dict[int, SimpleNamespace]:
    """A random legal rollout: each child keeps at least one own token of its parent."""
    out: dict[int, SimpleNamespace] = {}
    for i in range(draw(st.integers(1, 9))):
        n = draw(st.integers(1, 6))
        parent = draw(st.none() | st.integers(0, i - 1)) if i else None
        if parent is None:
            out[i] = seg(None, 0, n)
        else:
            end = chain_length(out, parent)
            out[i] = seg(parent, draw(st.integers(end - out[parent].n_tokens + 1, end)), n)
    return out


def test_five_turns_in_two_samples_out() -> None:
    """Turns 0, 1, 2 extend each other; 3 rewrites the end of 1; 4 extends 3."""
    tree = {
        0: seg(None, 0, 10),
        1: seg(0, 10, 5),
        2: seg(1, 15, 5),
        3: seg(1, 12, 4),
        4: seg(3, 16, 3),
    }
    first, second = branches(tree)
    assert (first.tip, second.tip) == (2, 4)
    assert [(p.segment, p.end, p.owned_from) for p in first.pieces] == [
        (0, 10, 0),
        (1, 5, 0),
        (2, 5, 0),
    ]
    assert [(p.segment, p.end, p.owned_from) for p in second.pieces] == [
        (0, 10, 10),
        (1, 2, 2),
        (3, 4, 0),
        (4, 3, 0),
    ]
    assert (first.n_tokens, second.n_tokens) == (20, 19)


@given(trees())
def test_each_token_is_owned_exactly_once(tree: dict[int, SimpleNamespace]) -> None:
    owners: dict[tuple[int, int], int] = {}
    for branch in branches(tree):
        for piece in branch.pieces:
            for token in range(piece.owned_from, piece.end):
                key = (piece.segment, token)
                assert key not in owners
                owners[key] = branch.tip
    everything = {(i, t) for i, s in tree.items() for t in range(s.n_tokens)}
    assert set(owners) == everything
    for (segment, token), tip in owners.items():
        holding = [b for b in tips(tree) if dict(chain(tree, b)).get(segment, 0) > token]
        assert tip == min(holding)


@given(trees())
def test_a_branch_is_as_long_as_its_chain(tree: dict[int, SimpleNamespace]) -> None:
    for branch in branches(tree):
        assert branch.n_tokens == chain_length(tree, branch.tip)
        assert all(0 < p.end <= tree[p.segment].n_tokens for p in branch.pieces)


@given(trees(), st.data())
def test_a_shared_token_belongs_to_the_lowest_trained_branch(
    tree: dict[int, SimpleNamespace], data: st.DataObject
) -> None:
    trained = data.draw(st.sets(st.sampled_from(tips(tree)), min_size=1))
    # Only the chains of these tips: what a plan's addresses lead to.
    known = {i: tree[i] for t in trained for i, _ in chain(tree, t)}
    found = branches(known, trained)
    assert [b.tip for b in found] == sorted(trained)
    owned = sum(p.end - p.owned_from for b in found for p in b.pieces)
    reached = {(i, t) for b in trained for i, end in chain(tree, b) for t in range(end)}
    assert owned == len(reached)


def test_an_untrained_chain_does_not_become_a_branch() -> None:
    """Segment 1 extends 0 but is not trained; 2 rewrites 0. Only branch 2 is planned."""
    tree = {0: seg(None, 0, 10), 1: seg(0, 10, 5), 2: seg(0, 6, 3)}
    known = {0: tree[0], 2: tree[2]}
    assert [b.tip for b in branches(tree)] == [1, 2]
    assert [b.tip for b in branches(known, [2])] == [2]
    assert branches(known, [2])[0].pieces[0].owned_from == 0


def test_lag_is_counted_in_versions_per_token() -> None:
    row = {
        "sampled": np.array([0, 1, 1, 0, 1], np.uint8),
        "version_runs": [{"epoch": 1, "version": 3, "n": 1}, {"epoch": 1, "version": 4, "n": 2}],
    }
    assert token_lags(row, step=6).tolist() == [0, 2, 1, 0, 1]
    assert token_lags({"sampled": np.zeros(2, np.uint8), "version_runs": []}, 6).tolist() == [0, 0]
