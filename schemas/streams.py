"""The data streams: what rollout workers append. Columns are the contract.

Schemas are declared here and never inferred. `STREAMS[name]` is the Arrow schema of a stream at
`VERSIONS[name]`; `schema_id`, "<name> <version> <fingerprint>", is the text in every commit.
List columns are `large_list` (64-bit offsets: 2**31 tokens in one file overflow `list`).
Every row also has `at`, UTC wall-clock time: information only, nothing is ordered by it.
"""

import functools
import re

import pyarrow as pa
import xxhash

MAJOR = 1

ROW_TOKENS_MAX = 1_048_576
"""Longest token column one row may hold; a longer one is refused at append."""

STRUCTS: dict[str, pa.DataType] = {}
"""Name -> type of what columns may hold besides Arrow's own types."""


def type_of(text: str) -> pa.DataType:
    """`text` is Arrow's name of a type, a name in STRUCTS, or one of these in brackets: a list."""
    if text.startswith("["):
        return pa.large_list(type_of(text[1:-1]))
    return STRUCTS[text] if text in STRUCTS else pa.type_for_alias(text)


def fields(text: str) -> list[pa.Field]:
    """The columns of a declaration; with `?` behind its type one may be null.

    >>> [str(f) for f in fields("parent int32?, train [uint8]")]
    ['pyarrow.Field<parent: int32>', 'pyarrow.Field<train: large_list<item: uint8> not null>']
    """
    pairs = [column.split() for column in text.split(",")]
    return [
        pa.field(name, type_of(kind.removesuffix("?")), nullable=kind.endswith("?"))
        for name, kind in pairs
    ]


def struct(text: str) -> pa.DataType:
    return pa.struct([f.with_nullable(True) for f in fields(text)])


def stream(text: str) -> pa.Schema:
    """The columns of a declaration and `at`."""
    return pa.schema([*fields(text), AT])


AT = pa.field("at", pa.timestamp("us"), nullable=False)

# A row address, "ref": `log` indexes `epoch.sources` (0 = this log).
STRUCTS |= {
    "digest": pa.binary(32),
    "ref": struct("log int32, writer string, seq int64, row int32"),
    "attempt": struct("rollout_id string, attempt int32"),
    "version_run": struct("epoch int32, version int64, n int32"),
    "sampling": struct(
        "temperature float64, top_p float64, top_k int32, min_p float64, max_tokens int32, "
        "stop [string]"
    ),
    "media": struct(
        "kind string, sha256 string, start int64, n_tokens int32, processor_digest string, "
        "params string"
    ),
    "counts": struct("sampled int64, context int64, regenerated int64"),
}

STREAMS: dict[str, pa.Schema] = {
    "prompts": stream(
        "ordinal int64, group_id string, purpose string, dataset string, prompt large_string, "
        "n int32, attempt int32, reason string, rollouts [attempt]"
    ),
    "segments": stream(
        "group_id string, rollout_id string, attempt int32, segment int32, parent int32?, "
        "keep int64, token_ids [int32], sampled [uint8], train [uint8], train_reason string?, "
        "logprobs [float32], version_runs [version_run], finish_reason string, "
        "stop_token int32?, sampling sampling, logprobs_kind string, kv string?, policy string, "
        "role string, engine_id string, source_attempt int32?, messages large_string, "
        "media [media], digest digest"
    ),
    "routing": stream(
        "rollout_id string, attempt int32, segment int32, start int64, n int32, "
        "experts large_binary, row_xxh3 [uint64]"
    ),
    "rollouts": stream(
        "group_id string, rollout_id string, attempt int32, status string, reason string?, "
        "n_segments int32, chain_digest digest, counts counts, seconds float64, "
        "metrics large_string"
    ),
    "rewards": stream(
        "rollout_id string, attempt int32, segment int32?, token int64?, name string, "
        "value float64?, revision int32, source string"
    ),
    "scores": stream(
        "rollout_id string, attempt int32, segment int32, kind string, model string, "
        "epoch int32, version int64, values [float32]"
    ),
}

VERSIONS: dict[str, str] = dict.fromkeys(STREAMS, "1.0")

ENUMS: dict[tuple[str, str], frozenset[str]] = {
    ("prompts", "purpose"): frozenset({"train", "eval", "judge"}),
    ("prompts", "reason"): frozenset({"new", "reissue"}),
    ("segments", "finish_reason"): frozenset({"stop", "length", "tool_calls", "abort", "partial"}),
    ("segments", "logprobs_kind"): frozenset({"processed", "raw"}),
    ("segments", "kv"): frozenset({"recomputed", "kept"}),
    ("segments", "role"): frozenset({"agent", "judge", "user_sim", "frozen"}),
    ("rollouts", "status"): frozenset({"ok", "truncated", "failed", "aborted", "pending"}),
    ("scores", "kind"): frozenset({"train", "ref", "teacher", "value", "advantage"}),
}
"""Columns whose text is one of a closed set; anything else is refused at append."""

UNCOMPRESSED = frozenset({"routing"})
"""Streams that zstd does not shrink and whose rows are read by range."""

FLUSH_ORDER = ("prompts", "segments", "routing", "scores", "rewards", "rollouts")
"""Order of one writer's commits within a flush: an outcome is published after all it names."""

USER_PREFIX = "x_"
USER_NAME = re.compile("x_[a-z0-9_]+")
"""Names of users' own streams: one word in SQL and in file names."""


def fingerprint(schema: pa.Schema) -> str:
    """16 hex digits over names, types and nullability; metadata does not count."""
    text = "\n".join(f"{f.name}:{f.type}:{f.nullable}" for f in schema)
    return xxhash.xxh3_64_hexdigest(text.encode())


@functools.lru_cache(maxsize=64)
def schema_id(name: str, schema: pa.Schema, version: str) -> str:
    return f"{name} {version} {fingerprint(schema)}"


def expert_dtype(n_experts: int) -> str:
    """The one dtype of a run's expert ids: "uint8" up to 256 experts, else "uint16"."""
    if not 1 <= n_experts <= 65_536:
        raise ValueError(f"{n_experts} experts: expert ids fit uint8 (<= 256) or uint16 (<= 65536)")
    return "uint8" if n_experts <= 256 else "uint16"


def routing_metadata(*, layers: int, top_k: int, n_experts: int) -> dict[str, str]:
    """What every `routing` commit of a run says about the shape of `experts`."""
    return {
        "molt.layers": str(layers),
        "molt.top_k": str(top_k),
        "molt.experts": str(n_experts),
        "molt.dtype": expert_dtype(n_experts),
    }
