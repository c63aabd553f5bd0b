"""Checks of single rows: each rule has a row that breaks it and nothing else."""

import pickle

import factories as make
import numpy as np
import pytest

import molt.schemas.errors as errors
from molt.schemas.check import (
    ROOT_DIGEST,
    Parent,
    chain_digest,
    check_routing_shape,
    check_row,
    routing_columns,
    segment_digest,
)
from molt.schemas.errors import MoltError, SegmentRejected
from molt.schemas.records import Sampling, Version, VersionRun, to_row
from molt.schemas.streams import STREAMS, expert_dtype, routing_metadata

AT = {"at": make.NOW}
PARENT = Parent(digest=b"p" * 32, n_chain=12, n_own=5)


def check(stream: str, row: dict, parent: Parent | None = None) -> dict:
    return check_row(stream, STREAMS[stream], {**row, **AT}, parent)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ids": [], "sampled": []}, "no tokens"),
        ({"ids": [1, -2, 3]}, "token id -2 is negative"),
        ({"sampled": [0, 1]}, "2 sampled for 3 tokens"),
        ({"logprobs": [-0.1] * 4}, "4 logprobs for 3 sampled tokens"),
        ({"sampled": [0, 2, 1], "logprobs": [0.0, -1.0, -1.0]}, "sampled is 2 at index 1"),
        ({"sampled": [0, 1, 1], "train": [1, 1, 1]}, "train is 1 at index 0"),
        ({"train": [1, 1, 0], "train_reason": None}, "need a train_reason"),
        ({"logprobs": [-0.1, 0.125, -0.1]}, "logprob 0.125 at index 1"),
        ({"logprobs": [-0.1, float("nan"), -0.1]}, "logprob nan at index 1"),
        ({"logprobs": [-0.1, float("-inf"), -0.1]}, "logprob -inf at index 1"),
        ({"logprobs": [-0.1, None, -0.1]}, "index 1"),
        ({"sampled": [0, 1, 1], "logprobs": [-0.1, -0.1, -0.1]}, "index 0, where nothing"),
        ({"runs": [(1, 0, 2)]}, "cover 2 tokens, but 3 were sampled"),
        ({"runs": [(1, 0, 3), (1, 1, 0)]}, "impossible version run"),
        ({"runs": [(0, 0, 3)]}, "impossible version run"),
        ({"runs": [(1, -1, 3)]}, "impossible version run"),
        ({"keep": 3}, "a root keeps nothing"),
        ({"segment": 1, "parent": 1, "keep": 3}, "does not come before"),
        ({"segment": 1, "parent": 0, "keep": 0}, "keeps at least one token"),
        ({"digest": b"x" * 32}, "digest 7878"),
        ({"finish_reason": "eos"}, "finish_reason 'eos' is none of"),
        ({"logprobs_kind": "tempered"}, "logprobs_kind 'tempered'"),
        ({"media": [make.media(start=2, n_tokens=2)]}, "media run at 2 of 2 tokens in 3"),
    ],
)
def test_a_bad_segment_is_refused_with_its_name(change: dict, why: str) -> None:
    with pytest.raises(SegmentRejected, match=why) as error:
        check("segments", make.segment(rollout_id="train-3/1", **change))
    assert "train-3/1" in str(error.value)


def test_a_logprob_may_exceed_zero_by_rounding_only() -> None:
    row = check("segments", make.segment(logprobs=[1e-4, 0.0, -0.5]))
    assert row["logprobs"].dtype == np.float32


@pytest.mark.parametrize(("keep", "ok"), [(7, False), (8, True), (12, True), (13, False)])
def test_keep_ends_inside_the_parents_own_tokens(keep: int, ok: bool) -> None:
    row = make.segment(segment=1, parent=0, keep=keep, parent_digest=PARENT.digest)
    if ok:
        assert check("segments", row, PARENT)["keep"] == keep
    else:
        with pytest.raises(SegmentRejected, match="own tokens are 8 to 12"):
            check("segments", row, PARENT)


def test_a_child_names_its_parents_content() -> None:
    row = make.segment(segment=1, parent=0, keep=9, parent_digest=b"q" * 32)
    with pytest.raises(SegmentRejected, match="digest"):
        check("segments", row, PARENT)


@pytest.mark.parametrize(
    "change",
    [
        {"ids": [1, 2, 4]},
        {"sampled": [0, 1, 1]},
        {"train": [1, 1, 0]},
        {"logprobs": [-0.25, -0.25, -0.5]},
        {"version": 1},
        {"epoch": 2},
        {"runs": [(1, 0, 1), (1, 0, 2)]},
    ],
)
def test_the_digest_covers_every_token_column(change: dict) -> None:
    assert make.segment(**change)["digest"] != make.segment()["digest"]


def test_digests_are_those_of_the_design() -> None:
    """Fixed by hand: a change of the format must not pass unseen."""
    row = make.segment(ids=[5, 6], sampled=[0, 1], logprobs=[None, -0.5], version=3)
    import hashlib
    import struct

    text = struct.pack("<q", 0) + struct.pack("<q2i", 2, 5, 6) + struct.pack("<q2B", 2, 0, 1)
    text += struct.pack("<q2B", 2, 0, 1) + struct.pack("<q2f", 2, 0.0, -0.5)
    text += struct.pack("<iqi", 1, 3, 1)
    expected = hashlib.blake2b(ROOT_DIGEST + text, digest_size=32).digest()
    assert segment_digest({**row, "logprobs": [0.0, -0.5]}) == row["digest"] == expected
    tips = [b"a" * 32, b"b" * 32]
    assert chain_digest(tips) == hashlib.blake2b(b"".join(tips), digest_size=32).digest()


@pytest.mark.parametrize(
    ("stream", "row", "why"),
    [
        ("rewards", make.reward(value=float("nan")), "is nan"),
        ("rewards", make.reward(value=float("inf")), "is inf"),
        ("rewards", make.reward(revision=-1), "revision -1"),
        ("prompts", make.prompt(3, group_id="train-4"), "must be train-3"),
        ("prompts", make.prompt(n=0), "n 0"),
        ("prompts", make.prompt(purpose="play"), "purpose 'play'"),
        ("rollouts", make.rollout(status="failed"), "needs a reason"),
        ("rollouts", make.rollout(status="great"), "status 'great'"),
        ("routing", make.routing(n=3) | {"n": 2}, "3 hashes for 2 positions"),
        ("routing", make.routing() | {"row_xxh3": [1, 2]}, "hash of position 0"),
        ("scores", make.score(values=[0.5, float("nan")]), "nan at index 1"),
    ],
)
def test_a_bad_row_of_another_stream_is_refused(stream: str, row: dict, why: str) -> None:
    with pytest.raises(SegmentRejected, match=why):
        check(stream, row)


def test_an_unscorable_rollout_has_no_value() -> None:
    assert check("rewards", make.reward(value=None))["value"] is None


def test_routing_fits_the_shape_of_its_run() -> None:
    shape = routing_metadata(layers=2, top_k=2, n_experts=8)
    row = check("routing", make.routing(n=3, width=4))
    check_routing_shape(row, shape, n_chain=3)
    for bad, why in (
        ({}, "routing_metadata"),
        (routing_metadata(layers=3, top_k=2, n_experts=8), "12 bytes of experts instead of 18"),
        (routing_metadata(layers=2, top_k=2, n_experts=3), "in a run of 3 experts"),
    ):
        with pytest.raises(SegmentRejected, match=why):
            check_routing_shape(row, bad)
    with pytest.raises(SegmentRejected, match="in a chain of 2 tokens"):
        check_routing_shape(row, shape, n_chain=2)


def test_expert_ids_are_packed_little_endian() -> None:
    ids = np.array([[[1, 300]], [[2, 0]]])
    packed = routing_columns(ids, 512)
    assert packed["experts"] == b"\x01\x00\x2c\x01\x02\x00\x00\x00" and packed["n"] == 2
    with pytest.raises(ValueError, match="65537 experts"):
        expert_dtype(65_537)


def test_every_error_survives_pickling() -> None:
    kinds = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, MoltError)]
    assert len(kinds) > 8
    for kind in kinds:
        back = pickle.loads(pickle.dumps(kind("what and where")))
        assert type(back) is kind and str(back) == "what and where"


def test_versions_have_a_text_form() -> None:
    version = Version.parse("3.17")
    assert (version.epoch, version.version, str(version)) == (3, 17, "3.17")
    assert version < Version(epoch=4, version=0)
    with pytest.raises(ValueError):
        Version.parse("17")


def test_records_become_rows_with_their_nested_records() -> None:
    assert to_row(VersionRun(epoch=1, version=2, n=3)) == {"epoch": 1, "version": 2, "n": 3}


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (Sampling(), None),
        (Sampling(temperature=0), "greedy"),
        (Sampling(temperature=0.5), None),
        (Sampling(top_p=0.9, top_k=20), "top_p, top_k"),
    ],
)
def test_a_distribution_the_trainer_cannot_reproduce_is_named(
    sampling: Sampling, reason: str | None
) -> None:
    assert sampling.untrainable_reason() == reason
