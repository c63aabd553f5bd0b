"""Row ranges of routing commits: a few positions out of a large file, verified alone (I6).

Routing is not compressed, and each position has its own hash, so a trainer rank reads only what it
trains on. Where the bytes lie is said in the footer, in a text with a checksum of its own: nothing
unverified is parsed. Commits without that text (older ones, cold ones) are read whole.
"""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from molt.schemas.check import row_hashes
from molt.schemas.errors import LogCorrupt
from molt.store.files import STORE

KEY = "molt.ranges"
MARK = b"molt.at="
DIGITS = 16
TAILS = (16 << 10, 1 << 20)
"""Bytes read from a file's end in search of the mark, one try after the other."""


def ranges_text(raw: memoryview, where: str) -> str:
    """The index of an encoded routing commit; the footer that it goes into lies behind the rows.

    Row r is [start, n, file offset of `experts`, of `row_xxh3`, bytes per position, segment].
    """
    source = pa.py_buffer(raw)
    table = pa.ipc.open_file(source).read_all()
    places = []
    for name in ("experts", "row_xxh3"):
        column = table.column(name).chunk(0)
        offsets = np.frombuffer(column.buffers()[1], np.int64, len(column) + 1)
        items = column.buffers()[2] if name == "experts" else column.values.buffers()[1]
        places.append(offsets * (8 if name == "row_xxh3" else 1) + items.address - source.address)
    counts = table.column("n").to_numpy()
    width = np.diff(places[0]) // counts
    starts, segments = (table.column(name).to_numpy() for name in ("start", "segment"))
    columns = [starts, counts, places[0][:-1], places[1][:-1], width, segments]
    rows = np.stack(columns, 1).tolist()
    text = json.dumps({"where": where, "rows": rows}, separators=(",", ":"))
    return f"{MARK.decode()}{xxhash.xxh3_64_hexdigest(text.encode())}{text}"


def read_range(
    path: Path, where: str, row: int, first: int, end: int
) -> tuple[npt.NDArray[np.uint8], int] | None:
    """Positions [first, end) of a row as [n, width] bytes, and how many bytes were read for them.

    None if the commit has no index. Raises LogCorrupt for damage, LookupError for positions that
    the row does not hold, FileNotFoundError if the commit has left its file.
    """
    found, n_read = _entry(path, where, row)
    if found is None:
        return None
    start, n, experts, hashes, width, _ = found
    check_positions(where, start, n, first, end)
    skip, n = first - start, end - first
    data = STORE.read(path, experts + skip * width, n * width)
    recorded = STORE.read(path, hashes + skip * 8, n * 8)
    own = np.array(row_hashes(data, n), "<u8").tobytes()
    if own != recorded:
        i = next(i for i in range(n) if own[8 * i : 8 * i + 8] != recorded[8 * i : 8 * i + 8])
        raise LogCorrupt(f"{where} row {row}: position {first + i} has another hash than its own")
    return np.frombuffer(data, np.uint8).reshape(n, width), n_read + len(data) + len(recorded)


def read_place(path: Path, where: str, row: int) -> tuple[int, int, int] | None:
    """(segment, start, n) of a row, of which nothing else is read; None and errors as above."""
    found, _ = _entry(path, where, row)
    return None if found is None else (found[5], found[0], found[1])


def _entry(path: Path, where: str, row: int) -> tuple[list[int] | None, int]:
    """A row of the index, verified, and the bytes read for it."""
    text, n_read = _index(path)
    if text is None:
        return None, n_read
    if xxhash.xxh3_64_hexdigest(text[DIGITS:]).encode() != text[:DIGITS]:
        raise LogCorrupt(f"{where}: the index of its rows is damaged. Run `molt doctor`")
    found = json.loads(text[DIGITS:])
    if found["where"] != where:
        raise LogCorrupt(f"{where}: the file says it is {found['where']}")
    if not 0 <= row < len(found["rows"]):
        raise LogCorrupt(f"{where}: it has {len(found['rows'])} rows, not {row + 1}")
    entry: list[int] = found["rows"][row]
    return entry, n_read


def _index(path: Path) -> tuple[bytes | None, int]:
    """(the text behind the mark, bytes read)."""
    n_read = 0
    for length in TAILS:
        tail = STORE.read(path, -length)
        n_read += len(tail)
        at = tail.rfind(MARK)
        if at >= 0:
            return tail[at + len(MARK) :].partition(b"\0")[0], n_read
    return None, n_read


def check_positions(where: object, start: int, n: int, first: int, end: int) -> None:
    if not start <= first < end <= start + n:
        raise LookupError(
            f"{where}: positions {first} to {end - 1} asked for, "
            f"it holds {start} to {start + n - 1}"
        )
