"""Rows to columns and back: exact, owned, and refused when they do not fit the schema."""

import factories as make
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from molt.schemas.columns import normalise, to_rows, to_table
from molt.schemas.errors import SegmentRejected
from molt.schemas.streams import STREAMS
from molt.schemas.text import canonical_json, difference, escape_text, unescape_text

SCHEMA = pa.schema(
    [
        pa.field("i", pa.int32(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("b", pa.binary(2)),
        pa.field("ids", pa.large_list(pa.int32())),
        pa.field("xs", pa.large_list(pa.float32())),
        pa.field("s", pa.struct([("a", pa.int64()), ("t", pa.string())])),
    ]
)
GOOD = {"i": 1, "text": "x", "b": b"ab", "ids": [1, 2], "xs": [0.5], "s": {"a": 1, "t": "y"}}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"i": 2**31}, "out of range"),
        ({"i": True}, "got bool"),
        ({"i": 1.0}, "got float"),
        ({"i": None}, "is None"),
        ({"text": b"x"}, "got bytes"),
        ({"b": b"abc"}, "3 bytes instead of 2"),
        ({"ids": [1, 2**31]}, "out of range"),
        ({"ids": [1.5]}, "dtype float64"),
        ({"ids": [[1]]}, "2 axes"),
        ({"ids": "12"}, "got str"),
        ({"xs": [0.5, None]}, "is None"),
        ({"s": {"a": 1}}, "fields"),
        ({"surprise": 1}, "unknown field 'surprise'"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(change: dict, why: str) -> None:
    field = next(iter(change))
    with pytest.raises(SegmentRejected, match=why) as error:
        normalise("x_test", SCHEMA, GOOD | change)
    assert field in str(error.value)


def test_a_missing_field_is_refused_unless_it_may_be_null() -> None:
    with pytest.raises(SegmentRejected, match="missing field 'text'"):
        normalise("x_test", SCHEMA, {"i": 1})
    assert normalise("x_test", SCHEMA, {"i": 1, "text": ""})["ids"] is None


def test_rows_come_back_as_they_went_in() -> None:
    rows = [normalise("x_test", SCHEMA, GOOD), normalise("x_test", SCHEMA, {"i": 2, "text": "\0"})]
    back = to_rows(to_table(SCHEMA, rows))
    assert back[0]["ids"] == [1, 2] and back[0]["s"] == {"a": 1, "t": "y"}
    assert back[1] == {"i": 2, "text": "\0", "b": None, "ids": None, "xs": None, "s": None}


def test_normalise_copies_arrays_of_the_right_dtype() -> None:
    ids = np.array([1, 2, 3], np.int32)
    row = normalise("x_test", SCHEMA, GOOD | {"ids": ids})
    ids[0] = 99
    assert row["ids"].tolist() == [1, 2, 3]


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1)), max_size=8))
def test_token_lists_survive_packing(lists: list[list[int]]) -> None:
    schema = pa.schema([pa.field("ids", pa.large_list(pa.int32()), nullable=False)])
    rows = [normalise("x_test", schema, {"ids": ids}) for ids in lists]
    assert [r["ids"].tolist() for r in to_rows(to_table(schema, rows))] == lists


@given(st.text(st.characters(codec=None, categories=None)))
def test_any_string_is_stored_as_utf8_and_comes_back(text: str) -> None:
    stored = escape_text(text)
    stored.encode()
    assert unescape_text(stored) == text


@pytest.mark.parametrize(
    "text", ["\ufdd0", "\ufdd0d800", "\ud800\ufdd0\udfff", "a\0b", "\ufdd0" * 3]
)
def test_the_escape_character_itself_is_escaped(text: str) -> None:
    assert unescape_text(escape_text(text)) == text


def test_difference_names_changed_keys_only() -> None:
    old = {"train": {"lr": 1.0, "betas": [0.9, 0.95]}, "model": "a"}
    new = {"train": {"lr": 2.0, "betas": (0.9, 0.95)}, "model": "a", "more": {"k": 1}}
    assert difference(old, new) == {"train.lr": (1.0, 2.0), "more.k": (None, 1)}


def test_canonical_json_is_one_text_per_value_and_refuses_nan() -> None:
    assert canonical_json({"b": 1, "a": [1.5, "é"]}) == '{"a":[1.5,"\\u00e9"],"b":1}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": float("nan")})


def test_list_columns_of_streams_are_large_lists() -> None:
    small = [
        (name, f.name)
        for name, schema in STREAMS.items()
        for f in schema
        if pa.types.is_list(f.type)
    ]
    assert small == []


def test_the_factories_make_rows_that_fit() -> None:
    for stream, row in (
        ("prompts", make.prompt()),
        ("rewards", make.reward()),
        ("rollouts", make.rollout()),
    ):
        schema = STREAMS[stream]
        assert set(normalise(stream, schema, {**row, "at": make.NOW})) == set(schema.names)
