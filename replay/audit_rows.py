"""Rows that two writers tell differently (I4), found with 24 bytes of memory per row."""

import contextlib
from array import array
from pathlib import Path

import numpy as np
import xxhash

from molt.replay.audit_report import Report
from molt.schemas.columns import Row, to_rows
from molt.schemas.errors import MoltError
from molt.store.reader import CommitFile, find_commit, read_commit

SEQ_BITS = 40


class Remembered:
    """Of every row that has a name: hashes of its name and of its content, and where it is."""

    def __init__(self, log: Path, report: Report) -> None:
        self.log, self.report = log, report
        self.writers: list[str] = []
        self.keys, self.contents, self.places = array("Q"), array("Q"), array("Q")

    def add(self, index: int, file: CommitFile, row: Row) -> None:
        """`index` is that of the file's writer."""
        marked = identity(file.stream, row)
        if marked is not None:
            self.keys.append(marked[0])
            self.contents.append(marked[1])
            self.places.append(index << SEQ_BITS | file.seq)

    def count(self, key: int) -> int:
        return int(np.count_nonzero(np.asarray(self.keys) == np.uint64(key)))

    def find(self, key: int) -> Row | None:
        """A row of this name, read again."""
        where = np.flatnonzero(np.asarray(self.keys) == np.uint64(key))
        return self._row(self.places[int(where[0])], key) if len(where) else None

    def conflicts(self) -> None:
        keys, contents, places = (np.array(a) for a in (self.keys, self.contents, self.places))
        order = np.lexsort((contents, keys))
        same = keys[order][1:] == keys[order][:-1]
        for i in np.flatnonzero(same & (contents[order][1:] != contents[order][:-1])):
            where = [int(places[order[j]]) for j in (i, i + 1)]
            rows = [f"{self.writers[p >> SEQ_BITS]}/{p & (1 << SEQ_BITS) - 1}" for p in where]
            row = self._row(where[1], int(keys[order[i]])) or {}
            who = row.get("rollout_id") or (f"{row['group_id']}/0" if row else None)
            self.report.violation(
                "I4", "two rows of one name differ", rollout=who, expected=rows[0], found=rows[1]
            )

    def _row(self, place: int, key: int) -> Row | None:
        """A remembered row; None if it cannot be read any more."""
        writer, seq = self.writers[place >> SEQ_BITS], place & (1 << SEQ_BITS) - 1
        with contextlib.suppress(MoltError, OSError):
            file = find_commit(self.log, writer, seq)
            for row in to_rows(read_commit(file).table):
                if (identity(file.stream, row) or [0])[0] == key:
                    return row
        return None


def identity(stream: str, row: Row) -> tuple[int, int] | None:
    """64 bits of a row's name and 64 of its content; None for streams whose rows have no name."""
    content: str | bytes
    if stream == "segments":
        return segment_key(row["rollout_id"], row["attempt"], row["segment"]), hashed(row["digest"])
    who = f"{row.get('rollout_id')}/{row.get('attempt')}"
    if stream == "rollouts":
        key = f"r/{who}/{row['status'] == 'pending'}"
        content = row["chain_digest"] + row["status"].encode()
    elif stream == "rewards":
        key = f"w/{who}/{row['segment']}/{row['token']}/{row['revision']}/{row['name']}"
        content = str(None if row["value"] is None else row["value"] + 0.0)  # -0.0 is 0.0
    elif stream == "scores":
        model = f"{row['kind']}/{row['epoch']}.{row['version']}/{row['model']}"
        key, content = f"c/{who}/{row['segment']}/{model}", row["values"].tobytes()
    elif stream == "prompts":  # issued again it is the same prompt, for fewer rollouts
        key, content = f"p/{row['group_id']}", f"{row['n']}/{row['dataset']}/{row['prompt']}"
    else:
        return None
    return hashed(key), hashed(content)


def segment_key(rollout_id: str, attempt: int, segment: int) -> int:
    return hashed(f"s/{rollout_id}/{attempt}/{segment}")


def hashed(content: str | bytes) -> int:
    raw = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return xxhash.xxh3_64_intdigest(raw)
