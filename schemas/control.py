"""The control records: what the driver decides, totally ordered, one commit each.

A record kind is a stream of its own: `molt.stream` = the kind, `molt.header` = one canonical JSON
object, and the table holds its rows. Kinds without rows have one row and an empty header.
"""

import dataclasses

import pyarrow as pa

from molt.schemas.records import PlanHeader
from molt.schemas.streams import STRUCTS, stream, struct

STRUCTS |= {
    "closed": struct("writer string, last_seq int64"),
    "source": struct("log int32, run_id string, path string"),
    "digests": struct("model string, tokenizer string, template string"),
    "branch": struct("tip int32, refs [ref]"),
    "probe": struct("mean_gap float64, p999_gap float64, max_gap float64, k3 float64"),
    "sketch": struct("name string, values [float64]"),
    "file": struct("name string, bytes int64"),
}

CONTROL: dict[str, pa.Schema] = {
    "epoch": stream(
        "epoch int32, parent_epoch int32?, cut int64?, closed [closed], sources [source], "
        "config large_string, digests digests, packages large_string, world_size int32, "
        "threads int32"
    ),
    "plan": stream(
        "group_id string, rollout_id string, attempt int32, branches [branch], reward float64?, "
        "reward_refs [ref], in_baseline bool, advantage float64, lag_max int64?, "
        "decision string, chain_digest digest?"
    ),
    "drop": stream("group_id string, rollout_id string?, reason string"),
    "step": stream(
        "epoch int32, step int64, updates int32, loss float64, grad_norm float64, "
        "n_tokens int64, counts large_string, metrics large_string, state_digest string, "
        "sketch [sketch]?"
    ),
    "policy": stream(
        "epoch int32, version int64, weights_digest string, bytes int64, seconds float64, "
        "kv string, recompute_tokens int64, engines [string], probe probe"
    ),
    "checkpoint": stream(
        "epoch int32, step int64, path string, bytes int64, files [file], state_digest string"
    ),
}

CONTROL_VERSIONS: dict[str, str] = {**dict.fromkeys(CONTROL, "1.0"), "plan": "1.1"}
"""plan 1.1: `chain_digest`, so that the control log itself says which tokens were trained."""

HEADERS: dict[str, frozenset[str]] = {
    "plan": frozenset(f.name for f in dataclasses.fields(PlanHeader)),
    "drop": frozenset({"epoch"}),
}
"""Keys of `molt.header`, exactly; kinds that are not named here have none."""

CONTROL_ENUMS: dict[tuple[str, str], frozenset[str]] = {
    ("plan", "decision"): frozenset({"train", "mask", "baseline_only"}),
    ("policy", "kv"): frozenset({"recomputed", "kept"}),
}
