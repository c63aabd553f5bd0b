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
    parent_of,
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
        ({"media": [make.media(start=None)]}, "media lacks a value"),
        ({"sampling": {**make.SAMPLING, "top_k": None}}, "sampling lacks a value"),
        ({"attempt": -1}, "attempt -1 < 0"),
        ({"segment": -1}, "segment -1 < 0"),
        ({"source_attempt": -1}, "source_attempt -1 < 0"),
        ({"group_id": "train-4"}, "'train-3/1' is not of group 'train-4'"),
    ],
)
def test_a_bad_segment_is_refused_with_its_name(change: dict, why: str) -> None:
    with pytest.raises(SegmentRejected, match=why) as error:
        check("segments", make.segment(rollout_id="train-3/1", **change))
    assert "train-3/1" in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": 0.5},
        {"sampled": 1},
        {"logprobs": {-0.5}},
        {"logprobs": "abc"},
        {"parent": "a"},
        {"attempt": [0]},
        {"token_ids": 7},
        {"version_runs": 3},
        {"media": [None]},
        {"sampling": []},
    ],
)
def test_a_mistyped_field_is_refused_by_its_name(change: dict) -> None:
    (name,) = change
    with pytest.raises(SegmentRejected, match=f"field '{name}' must be"):
        check("segments", make.segment() | change)


@pytest.mark.parametrize("name", ["epoch", "version", "n"])
def test_a_version_run_lacks_nothing(name: str) -> None:
    run = {"epoch": 1, "version": 0, "n": 3, name: None}
    with pytest.raises(SegmentRejected, match="version_runs lacks a value"):
        check("segments", make.segment() | {"version_runs": [run]})


@pytest.mark.parametrize(
    "name",
    [
        "r7",
        "",
        "train-0",
        "train-0/",
        "train-x/0",
        "play-0/0",
        "train--1/0",
        "train-0/-1",
        "train-00/0",
        "train-0/0/0",
        "train-0/0\n",
        "train-0/٣",
        f"train-{10**18}/0",
    ],
)
def test_a_name_that_readers_cannot_take_apart_is_refused(name: str) -> None:
    rows = {
        "segments": make.segment(),
        "routing": make.routing(),
        "rollouts": make.rollout(),
        "rewards": make.reward(),
        "scores": make.score(),
    }
    for stream, row in rows.items():
        with pytest.raises(SegmentRejected, match="is not <purpose>-<ordinal>/<i>"):
            check(stream, row | {"rollout_id": name})
    with pytest.raises(SegmentRejected, match="is not <purpose>-<ordinal>/<i>"):
        check("prompts", make.prompt(rollouts=[{"rollout_id": name, "attempt": 1}]))


@pytest.mark.parametrize("name", ["eval-0/12", "judge-123456/0"])
def test_every_purpose_names_rollouts(name: str) -> None:
    assert check("rewards", make.reward(name))["rollout_id"] == name


@pytest.mark.parametrize(("keep", "ok"), [(8, True), (9, True), (10, False), (11, True)])
def test_no_child_cuts_a_media_run(keep: int, ok: bool) -> None:
    """The parent's own tokens are 7 to 11 of its chain, those of the image 9 and 10."""
    root = make.segment(segment=1, parent=0, keep=7, media=[make.media(start=2, n_tokens=2)])
    root |= {"token_ids": [1, 2, 3, 4, 5]}
    parent = parent_of(root)
    assert parent.media == ((9, 11),) and parent.n_chain == 12
    row = make.segment(segment=2, parent=1, keep=keep, parent_digest=parent.digest)
    if ok:
        assert check("segments", row, parent)["keep"] == keep
    else:
        with pytest.raises(SegmentRejected, match="inside a media run, tokens 10 to 11"):
            check("segments", row, parent)


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
        ("scores", make.score(segment=-1), "segment -1 < 0"),
        ("scores", make.score(version=-1), "version -1 < 0"),
        ("scores", make.score(epoch=0), "epoch 0 < 1"),
        ("rewards", make.reward(segment=-1), "segment -1 < 0"),
        ("rewards", make.reward(token=-1), "token -1 < 0"),
        ("routing", make.routing(start=-1), "start -1 < 0"),
        ("routing", make.routing(segment=-1), "segment -1 < 0"),
        ("routing", make.routing(n=1) | {"experts": b""}, "0 bytes and 1 hashes for 1 positions"),
        ("rollouts", make.rollout(attempt=-1), "attempt -1 < 0"),
        ("rollouts", make.rollout(n_segments=-1), "n_segments -1 < 0"),
        ("rollouts", make.rollout(seconds=float("nan")), "seconds nan"),
        ("rollouts", make.rollout(counts={"sampled": -1, "context": 0, "regenerated": 0}), "-1"),
        (
            "rollouts",
            make.rollout(counts={"sampled": None, "context": 0, "regenerated": 0}),
            "lack",
        ),
        ("rollouts", make.rollout(metrics="not json"), "metrics is not JSON"),
        ("rollouts", make.rollout(metrics='{"a": NaN}'), "metrics is not JSON: NaN"),
        ("rollouts", make.rollout(metrics="[]"), "metrics is not a JSON object"),
        ("rollouts", make.rollout(metrics="null"), "metrics is not a JSON object"),
        ("rollouts", make.rollout(metrics="[" * 100_000), "metrics is not JSON"),
        ("prompts", make.prompt(prompt="two words"), "prompt is not JSON"),
        ("prompts", make.prompt(rollouts=[{"rollout_id": "train-1/0", "attempt": 1}]), "'train-0'"),
        ("prompts", make.prompt(rollouts=[{"rollout_id": "train-0/0", "attempt": None}]), "lacks"),
        ("prompts", make.prompt(rollouts=[{"rollout_id": "train-0/0", "attempt": -1}]), "-1"),
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
    for change in ({"layers": "x"}, {"layers": "-2"}, {"dtype": "float32"}, {"experts": "0"}):
        name, text = next(iter(change.items()))
        with pytest.raises(SegmentRejected, match=text):
            check_routing_shape(row, shape | {f"molt.{name}": text})


def test_expert_ids_are_packed_little_endian() -> None:
    ids = np.array([[[1, 300]], [[2, 0]]])
    packed = routing_columns(ids, 512)
    assert packed["experts"] == b"\x01\x00\x2c\x01\x02\x00\x00\x00" and packed["n"] == 2
    for bad in (np.zeros((0, 2, 2), int), np.array([[[0.5, 1.5]]]), np.array([[0, 1]])):
        with pytest.raises(SegmentRejected, match="whole numbers are needed"):
            routing_columns(bad, 8)
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
