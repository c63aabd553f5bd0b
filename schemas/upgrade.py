"""Reading files of other schema versions: explicit upgrades, never guesses.

A newer minor may add columns: they are ignored. An older minor lacks columns: its upgrade step in
`UPGRADES` adds them, or the nullable column reads as null. A newer major is refused by name.
Golden files of every version stay in `schemas/golden/` and are read in tests for ever.
"""

from collections.abc import Callable

import pyarrow as pa

from molt.schemas.control import CONTROL, CONTROL_VERSIONS
from molt.schemas.errors import SchemaMismatch
from molt.schemas.streams import MAJOR, STREAMS, USER_PREFIX, VERSIONS, fingerprint

UPGRADES: dict[tuple[str, str], Callable[[pa.Table], pa.Table]] = {}
"""(stream, found version) -> a function from that table to the current schema."""


def current_schema(stream: str) -> tuple[pa.Schema, str] | None:
    """Schema and version this program writes; None for a user's own `x_` stream."""
    if stream in STREAMS:
        return STREAMS[stream], VERSIONS[stream]
    if stream in CONTROL:
        return CONTROL[stream], CONTROL_VERSIONS[stream]
    if stream.startswith(USER_PREFIX):
        return None
    raise SchemaMismatch(f"unknown stream '{stream}'; users' own streams start with 'x_'")


def check_version(stream: str, schema_text: str, where: str) -> str:
    """The version that a commit of `stream` was written in; SchemaMismatch if it is too new.

    `schema_text` is the commit's own `molt.schema`, `where` the file's name for messages.
    """
    name, _, rest = schema_text.partition(" ")
    version, _, print_ = rest.partition(" ")
    if name != stream or not print_:
        raise SchemaMismatch(f"{where}: schema '{schema_text}' in a file of stream '{stream}'")
    known = current_schema(stream)
    ours = known[1] if known else f"{MAJOR}.0"
    if int(version.split(".")[0]) > int(ours.split(".")[0]):
        raise SchemaMismatch(
            f"{where}: '{stream}' is written in schema {version}, this program reads up to "
            f"{ours}; install a newer molt-log"
        )
    return version


def to_current(table: pa.Table, stream: str, schema_text: str, where: str) -> pa.Table:
    """`table` in the schema of this program; SchemaMismatch if that is not possible."""
    version = check_version(stream, schema_text, where)
    known = current_schema(stream)
    if known is None:
        return table
    schema, ours = known
    if version == ours and schema_text.endswith(fingerprint(schema)):
        return table
    if (stream, version) in UPGRADES:
        table = UPGRADES[stream, version](table)
    return _select(table, schema, where, version)


def _select(table: pa.Table, schema: pa.Schema, where: str, version: str) -> pa.Table:
    columns = []
    for f in schema:
        if f.name in table.column_names:
            columns.append(table.column(f.name).cast(f.type))
        elif f.nullable:
            columns.append(pa.nulls(table.num_rows, f.type))
        else:
            raise SchemaMismatch(
                f"{where}: schema {version} has no column '{f.name}' and no upgrade is known"
            )
    return pa.Table.from_arrays(columns, schema=schema.with_metadata(table.schema.metadata))
