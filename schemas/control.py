"""The control records: what the driver decides, totally ordered, one commit each.

A record kind is a stream of its own: `molt.stream` = the kind, `molt.header` = one canonical JSON
object, and the table holds its rows. Kinds without rows have one row and an empty header.
"""

import pyarrow as pa

from molt.schemas.streams import AT, field, ref_struct

closed_struct = pa.struct([("writer", pa.string()), ("last_seq", pa.int64())])
source_struct = pa.struct([("log", pa.int32()), ("run_id", pa.string()), ("path", pa.string())])
digests_struct = pa.struct(
    [("model", pa.string()), ("tokenizer", pa.string()), ("template", pa.string())]
)
branch_struct = pa.struct([("tip", pa.int32()), ("refs", pa.large_list(ref_struct))])
probe_struct = pa.struct(
    [
        ("mean_gap", pa.float64()),
        ("p999_gap", pa.float64()),
        ("max_gap", pa.float64()),
        ("k3", pa.float64()),
    ]
)
sketch_struct = pa.struct([("name", pa.string()), ("values", pa.large_list(pa.float64()))])
file_struct = pa.struct([("name", pa.string()), ("bytes", pa.int64())])

CONTROL: dict[str, pa.Schema] = {
    "epoch": pa.schema(
        [
            field("epoch", pa.int32()),
            field("parent_epoch", pa.int32(), null=True),
            field("cut", pa.int64(), null=True),
            field("closed", pa.large_list(closed_struct)),
            field("sources", pa.large_list(source_struct)),
            field("config", pa.large_string()),
            field("digests", digests_struct),
            field("packages", pa.large_string()),
            field("world_size", pa.int32()),
            field("threads", pa.int32()),
            AT,
        ]
    ),
    "plan": pa.schema(
        [
            field("group_id", pa.string()),
            field("rollout_id", pa.string()),
            field("attempt", pa.int32()),
            field("branches", pa.large_list(branch_struct)),
            field("reward", pa.float64(), null=True),
            field("reward_refs", pa.large_list(ref_struct)),
            field("in_baseline", pa.bool_()),
            field("advantage", pa.float64()),
            field("lag_max", pa.int64(), null=True),
            field("decision", pa.string()),
            field("chain_digest", pa.binary(32), null=True),
            AT,
        ]
    ),
    "drop": pa.schema(
        [
            field("group_id", pa.string()),
            field("rollout_id", pa.string(), null=True),
            field("reason", pa.string()),
            AT,
        ]
    ),
    "step": pa.schema(
        [
            field("epoch", pa.int32()),
            field("step", pa.int64()),
            field("updates", pa.int32()),
            field("loss", pa.float64()),
            field("grad_norm", pa.float64()),
            field("n_tokens", pa.int64()),
            field("counts", pa.large_string()),
            field("metrics", pa.large_string()),
            field("state_digest", pa.string()),
            field("sketch", pa.large_list(sketch_struct), null=True),
            AT,
        ]
    ),
    "policy": pa.schema(
        [
            field("epoch", pa.int32()),
            field("version", pa.int64()),
            field("weights_digest", pa.string()),
            field("bytes", pa.int64()),
            field("seconds", pa.float64()),
            field("kv", pa.string()),
            field("recompute_tokens", pa.int64()),
            field("engines", pa.large_list(pa.string())),
            field("probe", probe_struct),
            AT,
        ]
    ),
    "checkpoint": pa.schema(
        [
            field("epoch", pa.int32()),
            field("step", pa.int64()),
            field("path", pa.string()),
            field("bytes", pa.int64()),
            field("files", pa.large_list(file_struct)),
            field("state_digest", pa.string()),
            AT,
        ]
    ),
}

CONTROL_VERSIONS: dict[str, str] = {**dict.fromkeys(CONTROL, "1.0"), "plan": "1.1"}
"""plan 1.1: `chain_digest`, so that the control log itself says which tokens were trained."""

HEADERS: dict[str, frozenset[str]] = {
    "plan": frozenset(
        {
            "epoch",
            "step",
            "data_pass",
            "seed",
            "algorithm",
            "update_passes",
            "mini_batches",
            "max_lag",
        }
    ),
    "drop": frozenset({"epoch"}),
}
"""Keys of `molt.header`, exactly; kinds that are not named here have none."""

CONTROL_ENUMS: dict[tuple[str, str], frozenset[str]] = {
    ("plan", "decision"): frozenset({"train", "mask", "baseline_only"}),
    ("policy", "kv"): frozenset({"recomputed", "kept"}),
}
