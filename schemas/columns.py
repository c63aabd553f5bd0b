"""Rows to Arrow columns: the only place where a Python value becomes a stored one.

`normalise` refuses unknown, missing and mistyped fields and copies every buffer, so that later
edits by the caller cannot reach the log; `to_table` packs normalised rows.
"""

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from molt.schemas.errors import SegmentRejected
from molt.schemas.streams import ROW_TOKENS_MAX
from molt.schemas.text import ESCAPE_BYTES, escape_text, unescape_text

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
    out: Row = {}
    for name, nullable, convert in _fields(schema)[0]:
        value = row.get(name)
        if value is None:
            if not nullable:
                what = f"field '{name}' is None" if name in row else f"missing field '{name}'"
                raise SegmentRejected(f"{row_name(stream, row)}: {_unknown(schema, row) or what}")
            out[name] = None
            continue
        try:
            out[name] = convert(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise SegmentRejected(
                f"{row_name(stream, row)}: field '{name}' must be {schema.field(name).type}: "
                f"{error}"
            ) from None
    if not out.keys() >= row.keys():
        raise SegmentRejected(f"{row_name(stream, row)}: {_unknown(schema, row)}")
    return out


def _unknown(schema: pa.Schema, row: Mapping[str, Any]) -> str:
    return next((f"unknown field '{n}'" for n in row if n not in schema.names), "")


Convert = Callable[[Any], Any]
"""One owned value of an Arrow type; TypeError or ValueError if the argument is not one."""

Fields = tuple[list[tuple[str, bool, Convert]], pa.StructType]
_FIELDS: dict[int, tuple[pa.Schema, Fields]] = {}
"""id of a schema -> the schema, kept so that its id stays its own; how its values are made, and the
type of a whole row."""


def _fields(schema: pa.Schema) -> Fields:
    known = _FIELDS.get(id(schema))
    if known is None:  # hashing a schema costs more than converting a row
        if len(_FIELDS) > 256:
            _FIELDS.clear()
        makers = [(f.name, f.nullable, converter(f.type)) for f in schema]
        known = _FIELDS[id(schema)] = schema, (makers, pa.struct(list(schema)))
    return known[1]


def converter(type_: pa.DataType) -> Convert:
    """The conversion of one Arrow type, its dispatch done once."""
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return _text
    if pa.types.is_boolean(type_):
        return partial(_instance, bool, (bool, np.bool_))
    if pa.types.is_integer(type_):
        info = np.iinfo(type_.to_pandas_dtype())
        return partial(_integer, int(info.min), int(info.max))
    if pa.types.is_floating(type_):
        return partial(_float, np.dtype(type_.to_pandas_dtype()))
    if pa.types.is_timestamp(type_):
        return _time
    if pa.types.is_large_list(type_):
        return _list_converter(type_.value_type)
    if pa.types.is_struct(type_):
        fields = [type_.field(i) for i in range(type_.num_fields)]
        required = [f.name for f in fields if not f.nullable]
        return partial(_struct, {f.name: converter(f.type) for f in fields}, required)
    if pa.types.is_fixed_size_binary(type_):
        return partial(_bytes, type_.byte_width)
    if pa.types.is_binary(type_) or pa.types.is_large_binary(type_):
        return partial(_bytes, None)
    return partial(_other, type_)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"got {type(value).__name__}")
    return value if value.isascii() else escape_text(value)


def _instance(make: Callable[[Any], Any], kinds: Any, value: Any) -> Any:
    if not isinstance(value, kinds):
        raise TypeError(f"got {type(value).__name__}")
    return make(value)


INTEGERS, NUMBERS, LISTS = (int, np.integer), (int, float, np.number), (np.ndarray, list, Sequence)
BYTES = (bytes, bytearray, memoryview)


def _float(dtype: np.dtype[Any], value: Any) -> float:
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, NUMBERS):
            raise TypeError(f"got {type(value).__name__}")
        value = float(value)
    if dtype.itemsize < 8 and math.isfinite(value) and abs(value) > float(np.finfo(dtype).max):
        raise OverflowError(f"{value} is out of range")
    return float(value)


def _time(value: Any) -> datetime.datetime:
    if not isinstance(value, datetime.datetime):
        raise TypeError(f"got {type(value).__name__}")
    return value


def _integer(low: int, high: int, value: Any) -> int:
    if type(value) is int and low <= value <= high:
        return value
    if isinstance(value, bool) or not isinstance(value, INTEGERS):
        raise TypeError(f"got {type(value).__name__}")
    if not low <= value <= high:
        raise OverflowError(f"{value} is out of range")
    return int(value)


def _bytes(width: int | None, value: Any) -> bytes:
    if not isinstance(value, BYTES):
        raise TypeError(f"got {type(value).__name__}")
    if width is not None and len(value) != width:
        raise ValueError(f"{len(value)} bytes instead of {width}")
    return bytes(value)


def _other(type_: pa.DataType, value: Any) -> Any:
    """A type that only users' own streams have: Arrow decides."""
    if pa.types.is_map(type_) and isinstance(value, Mapping):
        value = list(value.items())
    try:
        return pa.scalar(escaped(value), type_).as_py()
    except pa.ArrowException as error:
        raise TypeError(error) from None


def _struct(fields: Mapping[str, Convert], required: Sequence[str], value: Any) -> Row:
    if type(value) is not dict and not isinstance(value, Mapping):
        raise TypeError(f"got {type(value).__name__}")
    if value.keys() != fields.keys():
        raise ValueError(f"fields {sorted(value)} instead of {sorted(fields)}")
    for name in required:
        if value[name] is None:
            raise TypeError(f"'{name}' is None")
    return {n: None if (v := value[n]) is None else make(v) for n, make in fields.items()}


def _list_converter(item: pa.DataType) -> Convert:
    if pa.types.is_integer(item) or pa.types.is_floating(item):
        dtype = np.dtype(item.to_pandas_dtype())
        convert = partial(_integers if pa.types.is_integer(item) else _floats, dtype)
        return partial(_numbers, dtype, convert)
    make = converter(item)
    return partial(_list, lambda value: [make(v) for v in value])


def _numbers(dtype: np.dtype[Any], make: Convert, value: Any) -> Any:
    if not (type(value) is np.ndarray and value.dtype is dtype and value.ndim == 1):
        return _list(make, value)
    return _list(np.ndarray.copy, value)  # nearly all rows: as the engine client makes them


def _list(make: Convert, value: Any) -> Any:
    if not isinstance(value, LISTS) or isinstance(value, (str, bytes)):
        raise TypeError(f"got {type(value).__name__}")
    if len(value) > ROW_TOKENS_MAX:
        raise ValueError(f"{len(value)} items, more than the limit of {ROW_TOKENS_MAX}")
    return make(value)


def _integers(dtype: np.dtype[Any], value: Any) -> np.ndarray:
    if len(value) == 0:
        return np.zeros(0, dtype)
    # numpy makes float64 of Python integers on both sides of 2**63, and loses their low bits.
    whole = dtype == np.uint64 and all(isinstance(v, int | np.integer) for v in value)
    array = np.asarray(value, dtype if whole else None)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise TypeError(f"got items of dtype {array.dtype}, {array.ndim} axes")
    if array.dtype != dtype:
        info = np.iinfo(dtype)
        if int(array.min()) < info.min or int(array.max()) > info.max:
            raise OverflowError("an item is out of range")
    return np.array(array, dtype, copy=True)


def _floats(dtype: np.dtype[Any], value: Any) -> np.ndarray:
    if has_none(value):
        raise TypeError("an item is None")
    array = np.asarray(value)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "fiu"):
        raise TypeError(f"got items of dtype {array.dtype}, {array.ndim} axes")
    with np.errstate(over="ignore"):
        out = np.array(array, dtype, copy=True)
    if out.dtype.itemsize < array.dtype.itemsize and (np.isinf(out) & np.isfinite(array)).any():
        raise OverflowError("an item is out of range")
    return out


def has_none(value: Any) -> bool:
    return not isinstance(value, np.ndarray) and any(v is None for v in value)


def to_table(schema: pa.Schema, rows: Sequence[Row]) -> pa.Table:
    """Normalised rows as one table of exactly `schema`."""
    packed = pa.array(rows, _fields(schema)[1])  # one call: each costs more than a row's values
    return pa.Table.from_arrays(packed.flatten(), schema=schema)


def check_storable(stream: str, schema: pa.Schema, row: Row) -> None:
    """Refuses a value that only Arrow knows to be too large, or none, for a user's own type."""
    try:
        to_table(schema, [row]).validate(full=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise SegmentRejected(f"{row_name(stream, row)}: {error}") from None


def owned(table: pa.Table) -> pa.Table:
    """A copy that shares no buffer with the caller, each column in one piece."""
    return pa.concat_tables([table, table.slice(0, 0)]).combine_chunks()


def _is_numbers(type_: pa.DataType) -> bool:
    return bool(pa.types.is_large_list(type_)) and (
        pa.types.is_integer(type_.value_type) or pa.types.is_floating(type_.value_type)
    )


def to_rows(table: pa.Table) -> list[Row]:
    """A verified table as Python rows; number lists as numpy arrays, text unescaped."""
    columns = [_values(table, name) for name in table.column_names]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def one_chunk(table: pa.Table, name: str) -> pa.Array:
    """A column as one array; copied only if it lies in several."""
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def flat(table: pa.Table, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """(offsets [rows + 1] from 0, values) of a list column: views of Arrow's own buffers."""
    array = one_chunk(table, name)
    offsets = array.offsets.to_numpy()
    values = array.values.to_numpy(zero_copy_only=False)
    return offsets - offsets[0], values[offsets[0] : offsets[-1]]


def _values(table: pa.Table, name: str) -> list[Any]:
    col = table.column(name)
    if _is_numbers(col.type) and col.null_count == 0:
        offsets, values = flat(table, name)
        return [values[a:b] for a, b in pairwise(offsets.tolist())]
    rows: list[Any] = col.to_pylist()
    if pa.types.is_primitive(col.type) or not _has_escape(col):
        return rows
    return [unescaped(v) for v in rows]


def _has_escape(column: pa.ChunkedArray) -> bool:
    """Whether some text of a column may need `unescape_text`; nearly none does."""
    if "dictionary<" in str(column.type):  # its text is not among the buffers
        return True
    buffers = (b for chunk in column.chunks for b in chunk.buffers() if b is not None)
    return any(map(ESCAPE_BYTES.search, buffers))


def unescaped(value: Any) -> Any:
    """A stored value with the text that was appended, in lists, structs and maps too."""
    return _with_text(unescape_text, value)


def escaped(value: Any) -> Any:
    """The value whose `unescaped` is this one."""
    return _with_text(escape_text, value)


def _with_text(change: Callable[[str], str], value: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_with_text(change, v) for v in value]
    if isinstance(value, tuple):  # an entry of a map
        return tuple(_with_text(change, v) for v in value)
    if isinstance(value, dict):
        return {k: _with_text(change, v) for k, v in value.items()}
    return value
