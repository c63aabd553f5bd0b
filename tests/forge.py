"""A log in which everything is consistent, and the means to falsify it with every checksum right.

`honest_log` writes what a run would: prompts, two-turn rollouts, routing, rewards, plans with their
digests, steps that count their tokens, policies. `rewrite` changes rows of a commit and seals it
again; `rewrite_segment` also mends the digests of the rollout's other rows in the data log.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import factories as make
import numpy as np

from molt.replay.redo import plan_counts
from molt.schemas.check import (
    ROOT_DIGEST,
    chain_digest,
    routing_columns,
    routing_sum,
    segment_digest,
)
from molt.schemas.columns import to_rows, to_table
from molt.schemas.control import CONTROL_VERSIONS
from molt.schemas.streams import VERSIONS, routing_metadata, schema_id
from molt.store import Log, Writer
from molt.store.commit import checksum_error, decode, encode
from molt.store.control import read_record
from molt.store.doctor import doctor
from molt.train.advantages import advantages

Row = dict[str, Any]
SHAPE = routing_metadata(layers=2, top_k=2, n_experts=8)
CONFIG = {
    "algo": {"std_normalize": False},
    "reward": {"weights": {"score": 2.0}, "sum_turns": False},
    "engine": {"dtype": "float32"},
    "train": {"routing": "replay"},
    "limits": {"float32_gap_floor": 1e-4, "bf16_gap_floor": 0.1, "baseline_factor": 10.0},
}
STEPS, GROUPS, ROLLOUTS = 3, 2, 2
PROBE = {"mean_gap": 1e-6, "p999_gap": 1e-6, "max_gap": 1e-6, "k3": 1e-12}


def honest_log(path: Path, *, shift: int = 0, skip: int | None = None) -> Log:
    """Three steps of two groups of two rollouts, all with one version of lag at most.

    `shift` displaces every logprob by that many sampled tokens before anything is sealed; ordinal
    `skip` is never issued.
    """
    log = Log.create(path, run_id="honest")
    make.open_epoch(log, config=json.dumps(CONFIG))
    log.control.put("policy", [make.policy(1, 0, probe=PROBE)])
    with log.writer(linger_s=60, routing=SHAPE) as w:
        for step in range(1, STEPS + 1):
            first = (step - 1) * GROUPS
            ordinals = [k + (skip is not None and k >= skip) for k in range(first, first + GROUPS)]
            for k in ordinals:
                w.append("prompts", make.prompt(k, n=ROLLOUTS))
            version = max(0, step - 2)
            rows = [r for k in ordinals for r in play_group(w, k, version, step, shift)]
            n = log.control.put("plan", rows, make.plan_header(step))
            put_step(log, n, version == step - 1)
            log.control.put("policy", [make.policy(1, step, probe=PROBE)])
    return log


def play_group(w: Writer, ordinal: int, version: int, step: int, shift: int) -> list[Row]:
    played = [play(w, f"train-{ordinal}/{i}", version, shift) for i in range(ROLLOUTS)]
    rewards = [2.0 * ((ordinal + i) % 3) for i in range(ROLLOUTS)]
    values = advantages(rewards, [True] * ROLLOUTS, "grpo")
    rows = []
    for i, (refs, digest) in enumerate(played):
        who = f"train-{ordinal}/{i}"
        reward = w.append("rewards", make.reward(who, rewards[i] / 2))
        w.flush()
        more = {"reward": rewards[i], "reward_refs": [make.as_ref(reward.result())]}
        more |= {"advantage": values[i], "lag_max": step - 1 - version, "chain_digest": digest}
        rows.append(make.plan_row(who, refs, tip=1, **more))
    return rows


def play(w: Writer, who: str, version: int, shift: int) -> tuple[list[Any], bytes]:
    """Two turns: three context and four sampled tokens, a tool's answer, three sampled tokens."""
    rng = np.random.default_rng([int(c) for c in who if c.isdigit()])
    logprobs = -rng.uniform(0.5, 3.0, 7).astype(np.float32)
    logprobs = np.roll(logprobs, shift)
    ids = [int(i) for i in rng.integers(10, 200, 12)]
    root = make.segment(
        rollout_id=who,
        ids=ids[:7],
        sampled=[0, 0, 0, 1, 1, 1, 1],
        logprobs=[None] * 3 + [float(x) for x in logprobs[:4]],
        runs=[(1, version, 4)],
    )
    child = make.segment(
        rollout_id=who,
        segment=1,
        parent=0,
        keep=7,
        parent_digest=root["digest"],
        ids=ids[7:],
        sampled=[0, 0, 1, 1, 1],
        logprobs=[None] * 2 + [float(x) for x in logprobs[4:]],
        runs=[(1, version, 3)],
    )
    tickets = [w.append("segments", row) for row in (root, child)]
    experts_NLK = np.argsort(rng.random((12, 2, 8)))[..., :2]
    experts = make.routing(who, segment=1, start=0) | routing_columns(experts_NLK, 8)
    tickets.append(w.append("routing", experts))
    told = {"routing_sum": f"{routing_sum([(1, 0, experts['row_xxh3'])]):016x}"}
    counts = {"sampled": 7, "context": 5, "regenerated": 0}
    outcome = make.rollout(who, digests=[child["digest"]], counts=counts, n_segments=2)
    w.append("rollouts", outcome | {"metrics": json.dumps(told)})
    w.flush()
    return [t.result() for t in tickets], chain_digest([child["digest"]])


def put_step(log: Log, plan: int, on_policy: bool) -> None:
    record = read_record(log.path, plan)
    n_tokens = 7 * len(record.rows)
    gap = {"n": n_tokens, "mean": 1e-6, "p999": 1e-6, "max": 1e-6, "k3": 0.0}
    metrics = {"mismatch": {"all": gap, **({"0": gap} if on_policy else {})}}
    row = make.step_row(1, record.header["step"], n_tokens=n_tokens, metrics=json.dumps(metrics))
    row["counts"] = json.dumps(plan_counts(record.rows))
    log.control.put("step", [row])


# -- falsifying ------------------------------------------------------------------------------------

Change = Callable[[Row], Row | None]


def reseal(path: Path, rows: list[Row], commit: Any, *, seq: int | None = None, **header: Any):
    """Write a commit's file anew with other rows; its checksum is right."""
    table = to_table(commit.table.schema.remove_metadata(), rows)
    meta = commit.table.schema.metadata or {}
    raw = encode(
        table,
        stream=commit.stream,
        writer=commit.writer,
        seq=commit.seq if seq is None else seq,
        schema_text=schema_text(commit),
        header={**commit.header, **header},
        extra={k.decode(): v.decode() for k, v in meta.items()},
    )
    assert checksum_error(raw) is None
    path.write_bytes(raw)


def schema_text(commit: Any) -> str:
    version = {**VERSIONS, **CONTROL_VERSIONS}[commit.stream]
    return schema_id(commit.stream, commit.table.schema.remove_metadata(), version)


def read(path: Path) -> Any:
    control = path.parent.name == "train"
    writer = "control" if control else path.parents[1].name
    seq = int(path.name.split(".")[0])
    return decode(path.read_bytes(), stream=None, writer=writer, seq=seq)


def rewrite(path: Path, change: Change, **header: Any) -> None:
    """`change` returns the new row, or None to remove it."""
    commit = read(path)
    rows = [new for row in to_rows(commit.table) if (new := change(row)) is not None]
    reseal(path, rows, commit, **header)


def rewrite_all(log: Log, stream: str, change: Change) -> None:
    for path in make.data_commits(log.path, stream):
        rewrite(path, change)


def control(log: Log, kind: str, step: int | None = None) -> list[Path]:
    """Files of the control records of a kind (and step or version)."""
    found = []
    for record in log.records():
        at = record.header.get("step") or (
            record.rows[0].get("step", record.rows[0].get("version"))
        )
        if record.kind == kind and step in (None, at):
            found.append(log.path / "train" / f"{record.n:010d}.arrow")
    return found


def remove_record(log: Log, path: Path) -> None:
    """Take a control record out and give the later ones the numbers before theirs."""
    n = int(path.stem)
    files = sorted((log.path / "train").glob("*.arrow"))
    for file in files[n + 1 :]:
        commit = read(file)
        reseal(file, to_rows(commit.table), commit, seq=commit.seq - 1)
        file.rename(file.with_name(f"{commit.seq - 1:010d}.arrow"))


def rewrite_segment(log: Log, who: str, segment: int, change: Change) -> None:
    """Change one segment, and every digest of the data log that depends on it."""
    digests: dict[int, bytes] = {}

    def mend(row: Row) -> Row:
        if row["rollout_id"] != who:
            return row
        row = {**row, **{k: np.array(v) for k, v in row.items() if isinstance(v, np.ndarray)}}
        if row["segment"] == segment:
            row = change(row) or row
        parent = ROOT_DIGEST if row["parent"] is None else digests[row["parent"]]
        row["digest"] = digests[row["segment"]] = segment_digest(row, parent)
        return row

    rewrite_all(log, "segments", mend)
    sampled = sum(
        int(np.count_nonzero(r["sampled"]))
        for path in make.data_commits(log.path, "segments")
        for r in to_rows(read(path).table)
        if r["rollout_id"] == who
    )

    def outcome(row: Row) -> Row:
        if row["rollout_id"] != who:
            return row
        counts = {**row["counts"], "sampled": sampled}
        return {**row, "chain_digest": chain_digest([digests[max(digests)]]), "counts": counts}

    rewrite_all(log, "rollouts", outcome)


def retell_step(log: Log, step: int, **more: Any) -> None:
    """Let a step record agree with its plan as it is now."""
    plan = next(r for r in log.records() if r.kind == "plan" and r.header["step"] == step)
    text = json.dumps(plan_counts(plan.rows))
    rewrite(control(log, "step", step)[0], lambda row: {**row, "counts": text, **more})


def is_sound(log: Log) -> bool:
    """True if the doctor, who knows checksums and single rows, sees nothing."""
    return bool(doctor(log.path)["ok"])
