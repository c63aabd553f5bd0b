"""Rows to Arrow columns: the only place where a Python value becomes a stored one.

`normalise` refuses unknown, missing and mistyped fields and copies every buffer, so that later
edits by the caller cannot reach the log; `to_table` packs normalised rows.
"""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from molt.schemas.errors import SegmentRejected
from molt.schemas.streams import ROW_TOKENS_MAX
from molt.schemas.text import escape_text, unescape_text

Row = dict[str, Any]


def row_name(stream: str, row: Mapping[str, Any]) -> str:
    """The words an error uses for a row: "segments row of train-3/1 attempt 0 segment 2"."""
    parts = [f"{stream} row"]
    who = row.get("rollout_id") or row.get("group_id")
    if who:
        parts.append(f"of {who}")
    parts += [f"{k} {row[k]}" for k in ("attempt", "segment", "step") if row.get(k) is not None]
    return " ".join(parts)


def normalise(stream: str, schema: pa.Schema, row: Mapping[str, Any]) -> Row:
    """An owned copy of `row` with every value checked against `schema`.

    Raises SegmentRejected naming the field for an unknown, missing or mistyped one.
    """
    unknown = [name for name in row if name not in schema.names]
    if unknown:
        raise SegmentRejected(f"{row_name(stream, row)}: unknown field '{unknown[0]}'")
    missing = [f.name for f in schema if f.name not in row and not f.nullable]
    if missing:
        raise SegmentRejected(f"{row_name(stream, row)}: missing field '{missing[0]}'")
    out: Row = {}
    for f in schema:
        value = row.get(f.name)
        if value is None:
            if not f.nullable:
                raise SegmentRejected(f"{row_name(stream, row)}: field '{f.name}' is None")
            out[f.name] = None
            continue
        try:
            out[f.name] = convert(f.type, value)
        except (TypeError, ValueError, OverflowError) as error:
            raise SegmentRejected(
                f"{row_name(stream, row)}: field '{f.name}' must be {f.type}: {error}"
            ) from None
    return out


def convert(type_: pa.DataType, value: Any) -> Any:
    """One owned value of an Arrow type; TypeError or ValueError if `value` is not one."""
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        if not isinstance(value, str):
            raise TypeError(f"got {type(value).__name__}")
        return escape_text(value)
    if pa.types.is_boolean(type_):
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"got {type(value).__name__}")
        return bool(value)
    if pa.types.is_integer(type_):
        return _integer(type_, value)
    if pa.types.is_floating(type_):
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise TypeError(f"got {type(value).__name__}")
        return float(value)
    if pa.types.is_timestamp(type_):
        if not isinstance(value, datetime.datetime):
            raise TypeError(f"got {type(value).__name__}")
        return value
    if pa.types.is_large_list(type_):
        return _list(type_.value_type, value)
    if pa.types.is_struct(type_):
        return _struct(type_, value)
    return _bytes(type_, value)


def _integer(type_: pa.DataType, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"got {type(value).__name__}")
    info = np.iinfo(type_.to_pandas_dtype())
    if not info.min <= int(value) <= info.max:
        raise OverflowError(f"{value} is out of range")
    return int(value)


def _bytes(type_: pa.DataType, value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"got {type(value).__name__}")
    width = type_.byte_width if pa.types.is_fixed_size_binary(type_) else len(value)
    if len(value) != width:
        raise ValueError(f"{len(value)} bytes instead of {width}")
    return bytes(value)


def _struct(type_: pa.StructType, value: Any) -> Row:
    if not isinstance(value, Mapping):
        raise TypeError(f"got {type(value).__name__}")
    names = [type_.field(i).name for i in range(type_.num_fields)]
    if set(value) != set(names):
        raise ValueError(f"fields {sorted(value)} instead of {sorted(names)}")
    return {n: None if value[n] is None else convert(type_.field(n).type, value[n]) for n in names}


def _list(item: pa.DataType, value: Any) -> Any:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
        raise TypeError(f"got {type(value).__name__}")
    if len(value) > ROW_TOKENS_MAX:
        raise ValueError(f"{len(value)} items, more than the limit of {ROW_TOKENS_MAX}")
    if pa.types.is_integer(item):
        return _integers(item, value)
    if pa.types.is_floating(item):
        return _floats(item, value)
    return [convert(item, v) for v in value]


def _integers(item: pa.DataType, value: Any) -> np.ndarray:
    dtype = np.dtype(item.to_pandas_dtype())
    if len(value) == 0:
        return np.zeros(0, dtype)
    # numpy makes float64 of Python integers on both sides of 2**63, and loses their low bits.
    whole = dtype == np.uint64 and all(isinstance(v, int | np.integer) for v in value)
    array = np.asarray(value, dtype if whole else None)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise TypeError(f"got items of dtype {array.dtype}, {array.ndim} axes")
    info = np.iinfo(dtype)
    if array.dtype != dtype and (int(array.min()) < info.min or int(array.max()) > info.max):
        raise OverflowError("an item is out of range")
    return np.array(array, dtype, copy=True)


def _floats(item: pa.DataType, value: Any) -> np.ndarray:
    if has_none(value):
        raise TypeError("an item is None")
    array = np.asarray(value)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "fiu"):
        raise TypeError(f"got items of dtype {array.dtype}, {array.ndim} axes")
    return np.array(array, np.dtype(item.to_pandas_dtype()), copy=True)


def has_none(value: Any) -> bool:
    return not isinstance(value, np.ndarray) and any(v is None for v in value)


def to_table(schema: pa.Schema, rows: Sequence[Row]) -> pa.Table:
    """Normalised rows as one table of exactly `schema`."""
    columns = [column(f.type, [row[f.name] for row in rows]) for f in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def column(type_: pa.DataType, values: list[Any]) -> pa.Array:
    """Lists of numbers are packed through numpy; the rest goes through Arrow's own builder."""
    numeric = pa.types.is_large_list(type_) and (
        pa.types.is_integer(type_.value_type) or pa.types.is_floating(type_.value_type)
    )
    if not numeric or any(v is None for v in values):
        return pa.array(values, type_)
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(v) for v in values], out=offsets[1:])
    dtype = type_.value_type.to_pandas_dtype()
    flat = np.concatenate(values) if values else np.zeros(0, dtype)
    items = pa.array(flat, type_.value_type)
    return pa.LargeListArray.from_arrays(pa.array(offsets), items, type=type_)


def to_rows(table: pa.Table) -> list[Row]:
    """A verified table as Python rows; number lists as numpy arrays, text unescaped."""
    columns = {name: _values(table.column(name)) for name in table.column_names}
    return [{name: values[i] for name, values in columns.items()} for i in range(table.num_rows)]


def _values(col: pa.ChunkedArray) -> list[Any]:
    type_ = col.type
    numeric = pa.types.is_large_list(type_) and (
        pa.types.is_integer(type_.value_type) or pa.types.is_floating(type_.value_type)
    )
    if numeric and col.null_count == 0:
        array = col.combine_chunks()
        flat = array.values.to_numpy(zero_copy_only=False)
        offsets = array.offsets.to_numpy()
        return [flat[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    return [_unescape(v) for v in col.to_pylist()]


def _unescape(value: Any) -> Any:
    if isinstance(value, str):
        return unescape_text(value)
    if isinstance(value, list):
        return [_unescape(v) for v in value]
    if isinstance(value, dict):
        return {k: _unescape(v) for k, v in value.items()}
    return value
