"""Export: any view, or the answer to any query, as Parquet, JSONL or a Hugging Face dataset.

Rows are verified on the way as in SQL, and streamed: memory does not grow with the log. JSONL has
text as it was appended, the others as it is stored (`schemas.text`).
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from molt.schemas.columns import unescaped
from molt.schemas.errors import ConfigError
from molt.schemas.text import ESCAPE
from molt.store.log import Log
from molt.store.sql import connect, json_able

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

    Nothing that exists is overwritten: ConfigError, also for a wrong view or query.
    """
    queries = {"query": query} if query else {v: f'select * from "{v}"' for v in views}
    written = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in queries.items():
        target = folder / (name if style == "datasets" else f"{name}.{style}")
        if target.exists():
            raise ConfigError(f"{target} exists; choose another folder, or remove it")
        con = connect(logs, query=text)
        try:
            reader = con.sql(text).to_arrow_reader(BATCH_ROWS)
        except (duckdb.Error, AttributeError) as error:
            raise ConfigError(f"{name}: {error}") from None
        written[name] = WRITERS[style](reader, target)
        con.close()
    return written


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
    from datasets import Dataset

    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as scratch:
        file = Path(scratch) / "rows.parquet"
        n = _parquet(reader, file)
        made = Dataset.from_parquet(str(file), cache_dir=scratch, keep_in_memory=False)
        made.save_to_disk(str(target))
    return n


WRITERS = {"parquet": _parquet, "jsonl": _jsonl, "datasets": _datasets}
