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

ref_struct = pa.struct(
    [("log", pa.int32()), ("writer", pa.string()), ("seq", pa.int64()), ("row", pa.int32())]
)
"""A row address: `log` indexes `epoch.sources` (0 = this log)."""

attempt_struct = pa.struct([("rollout_id", pa.string()), ("attempt", pa.int32())])
version_run_struct = pa.struct([("epoch", pa.int32()), ("version", pa.int64()), ("n", pa.int32())])
sampling_struct = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),
        ("min_p", pa.float64()),
        ("max_tokens", pa.int32()),
        ("stop", pa.large_list(pa.string())),
    ]
)
media_struct = pa.struct(
    [
        ("kind", pa.string()),
        ("sha256", pa.string()),
        ("start", pa.int64()),
        ("n_tokens", pa.int32()),
        ("processor_digest", pa.string()),
        ("params", pa.string()),
    ]
)
counts_struct = pa.struct(
    [("sampled", pa.int64()), ("context", pa.int64()), ("regenerated", pa.int64())]
)


def field(name: str, type_: pa.DataType, *, null: bool = False) -> pa.Field:
    return pa.field(name, type_, nullable=null)


AT = field("at", pa.timestamp("us"))

STREAMS: dict[str, pa.Schema] = {
    "prompts": pa.schema(
        [
            field("ordinal", pa.int64()),
            field("group_id", pa.string()),
            field("purpose", pa.string()),
            field("dataset", pa.string()),
            field("prompt", pa.large_string()),
            field("n", pa.int32()),
            field("attempt", pa.int32()),
            field("reason", pa.string()),
            field("rollouts", pa.large_list(attempt_struct)),
            AT,
        ]
    ),
    "segments": pa.schema(
        [
            field("group_id", pa.string()),
            field("rollout_id", pa.string()),
            field("attempt", pa.int32()),
            field("segment", pa.int32()),
            field("parent", pa.int32(), null=True),
            field("keep", pa.int64()),
            field("token_ids", pa.large_list(pa.int32())),
            field("sampled", pa.large_list(pa.uint8())),
            field("train", pa.large_list(pa.uint8())),
            field("train_reason", pa.string(), null=True),
            field("logprobs", pa.large_list(pa.float32())),
            field("version_runs", pa.large_list(version_run_struct)),
            field("finish_reason", pa.string()),
            field("stop_token", pa.int32(), null=True),
            field("sampling", sampling_struct),
            field("logprobs_kind", pa.string()),
            field("kv", pa.string(), null=True),
            field("policy", pa.string()),
            field("role", pa.string()),
            field("engine_id", pa.string()),
            field("source_attempt", pa.int32(), null=True),
            field("messages", pa.large_string()),
            field("media", pa.large_list(media_struct)),
            field("digest", pa.binary(32)),
            AT,
        ]
    ),
    "routing": pa.schema(
        [
            field("rollout_id", pa.string()),
            field("attempt", pa.int32()),
            field("segment", pa.int32()),
            field("start", pa.int64()),
            field("n", pa.int32()),
            field("experts", pa.large_binary()),
            field("row_xxh3", pa.large_list(pa.uint64())),
            AT,
        ]
    ),
    "rollouts": pa.schema(
        [
            field("group_id", pa.string()),
            field("rollout_id", pa.string()),
            field("attempt", pa.int32()),
            field("status", pa.string()),
            field("reason", pa.string(), null=True),
            field("n_segments", pa.int32()),
            field("chain_digest", pa.binary(32)),
            field("counts", counts_struct),
            field("seconds", pa.float64()),
            field("metrics", pa.large_string()),
            AT,
        ]
    ),
    "rewards": pa.schema(
        [
            field("rollout_id", pa.string()),
            field("attempt", pa.int32()),
            field("segment", pa.int32(), null=True),
            field("token", pa.int64(), null=True),
            field("name", pa.string()),
            field("value", pa.float64(), null=True),
            field("revision", pa.int32()),
            field("source", pa.string()),
            AT,
        ]
    ),
    "scores": pa.schema(
        [
            field("rollout_id", pa.string()),
            field("attempt", pa.int32()),
            field("segment", pa.int32()),
            field("kind", pa.string()),
            field("model", pa.string()),
            field("epoch", pa.int32()),
            field("version", pa.int64()),
            field("values", pa.large_list(pa.float32())),
            AT,
        ]
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
