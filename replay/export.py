"""Export: any view, or the answer to any query, as Parquet, JSONL or a Hugging Face dataset.

Rows are verified on the way as in SQL, and streamed: memory does not grow with the log. JSONL has
text as it was appended, the others as it is stored (`schemas.text`).
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from molt.schemas.columns import unescaped
from molt.schemas.errors import ConfigError
from molt.schemas.text import ESCAPE
from molt.store.log import Log
from molt.store.sql import connect, json_able, unique

DEFAULT = (
    *("prompts", "segments", "rollouts", "rewards", "plans", "drops", "steps", "policies"),
    *("branches", "lag"),
)
"""What is exported when nothing is named; routing and tokens are large and can be asked for."""
BATCH_ROWS = 2048
MARK = json.dumps(ESCAPE)[1:-1]
"""What the text of a row has that may need `unescaped`; JSON can hold half of a surrogate pair."""


def export(
    logs: Sequence[Log],
    folder: Path,
    style: str,
    views: Sequence[str] = DEFAULT,
    query: str | None = None,
) -> dict[str, int]:
    """Write one file (or dataset) per view into `folder`, or one called "query"; rows of each.

    All or nothing. What exists is not overwritten: ConfigError, also for a wrong view or query.
    """
    queries = {"query": query} if query else {v: f'select * from "{v}"' for v in views}
    files = {n: n if style == "datasets" else f"{n}.{style}" for n in queries}
    folder.mkdir(parents=True, exist_ok=True)
    for file in files.values():
        if (folder / file).exists():
            raise ConfigError(f"{folder / file} exists; choose another folder, or remove it")
    written = {}
    with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as scratch:
        for name, text in queries.items():
            con = connect(logs, query=text)
            try:
                reader = _named(con.sql(text).to_arrow_reader(BATCH_ROWS))
            except (duckdb.Error, AttributeError) as error:
                raise ConfigError(f"{name}: {error}") from None
            written[name] = WRITERS[style](reader, Path(scratch) / files[name])
            con.close()
        for file in files.values():
            (Path(scratch) / file).rename(folder / file)
    return written


def _named(reader: pa.RecordBatchReader) -> pa.RecordBatchReader:
    """The same rows, no column name twice."""
    names = unique(reader.schema.names)
    if names == reader.schema.names:
        return reader
    schema = pa.schema([f.with_name(n) for f, n in zip(reader.schema, names, strict=True)])
    return pa.RecordBatchReader.from_batches(schema, (b.rename_columns(names) for b in reader))


def _parquet(reader: pa.RecordBatchReader, target: Path) -> int:
    n = 0
    with pq.ParquetWriter(target, reader.schema, compression="zstd") as out:
        for batch in reader:
            out.write_batch(batch)
            n += batch.num_rows
    return n


def _jsonl(reader: pa.RecordBatchReader, target: Path) -> int:
    n = 0
    with open(target, "x", encoding="utf-8") as out:
        for batch in reader:
            for row in batch.to_pylist():
                line = json.dumps(json_able(row))
                if MARK in line:
                    line = json.dumps(json_able(unescaped(row)))
                out.write(line + "\n")
            n += batch.num_rows
    return n


def _datasets(reader: pa.RecordBatchReader, target: Path) -> int:
    """Through a Parquet file, which `datasets` maps instead of loading."""
    from datasets import Dataset, Features

    file = target.with_name(f"{target.name}.rows")
    n = _parquet(reader, file)
    if n:
        made = Dataset.from_parquet(str(file), cache_dir=str(target.parent), keep_in_memory=False)
    else:
        empty: dict[str, list[Any]] = {name: [] for name in reader.schema.names}
        made = Dataset.from_dict(empty, Features.from_arrow_schema(reader.schema))
    made.save_to_disk(str(target), num_shards=None if n else 1)
    return n


WRITERS = {"parquet": _parquet, "jsonl": _jsonl, "datasets": _datasets}
