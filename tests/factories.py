"""Small factories for rows of the log, and one complete tiny log. Every argument has a meaning.

`segment(ids=[1, 2, 3], sampled=[0, 1, 1], version=4)` is a valid row of train-0/0; `build_log`
writes a run of two epochs with everything in it that a reader can meet.
"""

import datetime
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from molt.replay.assemble import TrainSequence
from molt.schemas.check import ROOT_DIGEST, chain_digest, segment_digest
from molt.schemas.records import Ref
from molt.schemas.streams import STREAMS
from molt.store import Log, Writer
from molt.store.control import Record
from molt.store.fold import Fold, Group

Row = dict[str, Any]

NOW = datetime.datetime(2026, 1, 1)
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "max_tokens": 16,
    "stop": [],
}


def closed_groups(fold: Fold, purpose: str = "train") -> list[Group]:
    return [g for g in fold.open_groups(purpose) if fold.is_closed(g)]


def segment(
    *,
    rollout_id: str = "train-0/0",
    attempt: int = 0,
    segment: int = 0,
    parent: int | None = None,
    keep: int = 0,
    parent_digest: bytes = ROOT_DIGEST,
    ids: Sequence[int] = (1, 2, 3),
    sampled: Sequence[int] | None = None,
    train: Sequence[int] | None = None,
    logprobs: Sequence[float | None] | None = None,
    version: int = 0,
    epoch: int = 1,
    runs: Sequence[tuple[int, int, int]] | None = None,
    **more: Any,
) -> Row:
    """A segments row; all tokens sampled unless told otherwise. `runs` = (epoch, version, n)."""
    sampled = [1] * len(ids) if sampled is None else list(sampled)
    n_sampled = sum(sampled)
    if logprobs is None:
        logprobs = [-0.25 if s else None for s in sampled]
    if runs is None:
        runs = [(epoch, version, n_sampled)] if n_sampled else []
    row = {
        "group_id": rollout_id.rpartition("/")[0],
        "rollout_id": rollout_id,
        "attempt": attempt,
        "segment": segment,
        "parent": parent,
        "keep": keep,
        "token_ids": list(ids),
        "sampled": sampled,
        "train": list(sampled if train is None else train),
        "train_reason": None if train is None else "test",
        "logprobs": list(logprobs),
        "version_runs": [{"epoch": e, "version": v, "n": n} for e, v, n in runs],
        "finish_reason": "stop",
        "stop_token": None,
        "sampling": dict(SAMPLING),
        "logprobs_kind": "processed",
        "kv": None,
        "policy": "main",
        "role": "agent",
        "engine_id": "engine-0",
        "source_attempt": None,
        "messages": "[]",
        "media": [],
        **more,
    }
    row.setdefault("digest", digest_of(row, parent_digest))
    return row


def as_stored(row: Row) -> Row:
    """With a time, and 0.0 where there is no logprob."""
    row = {**row, "at": NOW}
    return row | {k: [p or 0.0 for p in row[k]] for k in ("logprobs",) if k in row}


def as_table(stream: str, rows: Iterable[Row]) -> pa.Table:
    """Rows for `append_table`, unchecked."""
    return pa.Table.from_pylist([as_stored(row) for row in rows], schema=STREAMS[stream])


def digest_of(row: Row, parent_digest: bytes = ROOT_DIGEST) -> bytes:
    values = np.array([0.0 if v is None else v for v in row["logprobs"]], np.float32)
    return segment_digest({**row, "logprobs": values}, parent_digest)


def prompt(ordinal: int = 0, *, n: int = 2, purpose: str = "train", **more: Any) -> Row:
    return {
        "ordinal": ordinal,
        "group_id": f"{purpose}-{ordinal}",
        "purpose": purpose,
        "dataset": "sums",
        "prompt": json.dumps({"x": ordinal, "y": 1}),
        "n": n,
        "attempt": 0,
        "reason": "new",
        "rollouts": [],
        **more,
    }


def reward(
    rollout_id: str = "train-0/0", value: float | None = 1.0, attempt: int = 0, **more: Any
) -> Row:
    row = {"rollout_id": rollout_id, "attempt": attempt, "segment": None, "token": None}
    return {**row, "name": "score", "value": value, "revision": 0, "source": "env", **more}


def rollout(
    rollout_id: str = "train-0/0", *, attempt: int = 0, digests: Sequence[bytes] = (), **more: Any
) -> Row:
    """A rollouts row; `digests` are those of its tips."""
    return {
        "group_id": rollout_id.rpartition("/")[0],
        "rollout_id": rollout_id,
        "attempt": attempt,
        "status": "ok",
        "reason": None,
        "n_segments": len(digests),
        "chain_digest": chain_digest(digests),
        "counts": {"sampled": 3, "context": 0, "regenerated": 0},
        "seconds": 0.5,
        "metrics": "{}",
        **more,
    }


def routing(
    rollout_id: str = "train-0/0", *, start: int = 0, n: int = 2, width: int = 4, **more: Any
) -> Row:
    import xxhash

    experts = bytes(i % 8 for i in range(n * width))
    hashes = [xxhash.xxh3_64_intdigest(experts[i * width : (i + 1) * width]) for i in range(n)]
    row = {"rollout_id": rollout_id, "attempt": 0, "segment": 0, "start": start, "n": n}
    return {**row, "experts": experts, "row_xxh3": hashes, **more}


def score(**more: Any) -> Row:
    row = {"rollout_id": "train-0/0", "attempt": 0, "segment": 0, "kind": "ref", "model": "m"}
    return {**row, "epoch": 1, "version": 0, "values": [-0.5], **more}


def media(**more: Any) -> Row:
    row = {"kind": "image", "sha256": "0" * 64, "start": 0, "n_tokens": 1}
    return {**row, "processor_digest": "p", "params": "{}", **more}


def open_epoch(log: Log, **more: Any) -> Record:
    fields = {
        "sources": [],
        "config": "{}",
        "digests": {"model": "m", "tokenizer": "t", "template": "p"},
        "packages": "{}",
        "world_size": 1,
        "threads": 1,
        **more,
    }
    return log.control.open_epoch(now=NOW, **fields)


def policy(epoch: int, version: int, **more: Any) -> Row:
    return {
        "epoch": epoch,
        "version": version,
        "weights_digest": f"{epoch:08x}{version:08x}",
        "bytes": 1024,
        "seconds": 0.1,
        "kv": "recomputed",
        "recompute_tokens": 0,
        "engines": ["engine-0"],
        "probe": {"mean_gap": 0.001, "p999_gap": 0.002, "max_gap": 0.003, "k3": 1e-6},
        **more,
    }


def plan_header(step: int, **more: Any) -> Row:
    return {
        "step": step,
        "data_pass": 0,
        "seed": 7,
        "algorithm": "grpo",
        "update_passes": 1,
        "mini_batches": 1,
        "max_lag": 1,
        **more,
    }


def plan_row(rollout_id: str, refs: Sequence[Any], *, tip: int = 0, **more: Any) -> Row:
    """One rollout of a plan with a single branch; `refs` are the addresses of its chain."""
    return {
        "group_id": rollout_id.rpartition("/")[0],
        "rollout_id": rollout_id,
        "attempt": 0,
        "branches": [{"tip": tip, "refs": [as_ref(r) for r in refs]}],
        "reward": 1.0,
        "reward_refs": [],
        "in_baseline": True,
        "advantage": 0.5,
        "lag_max": 0,
        "decision": "train",
        "chain_digest": None,
        **more,
    }


def as_ref(ref: Any) -> Row:
    return {"log": ref.log, "writer": ref.writer, "seq": ref.seq, "row": ref.row}


def step_row(epoch: int, step: int, **more: Any) -> Row:
    return {
        "epoch": epoch,
        "step": step,
        "updates": 1,
        "loss": 0.5,
        "grad_norm": 1.5,
        "n_tokens": 6,
        "counts": "{}",
        "metrics": json.dumps({"reward_mean": 0.5, "tokens_per_s": 10}),
        "state_digest": f"{step:016x}",
        "sketch": None,
        **more,
    }


def drop_row(group_id: str, reason: str = "lag", rollout_id: str | None = None) -> Row:
    return {"group_id": group_id, "rollout_id": rollout_id, "reason": reason}


def append_rollout(
    w: Writer, rollout_id: str, *, value: float = 1.0, epoch: int = 1, version: int = 0, **more: Any
) -> list[Any]:
    """A whole single-turn rollout: segment, reward, outcome. Returns the segment's address."""
    row = segment(
        rollout_id=rollout_id,
        ids=[5, 6, 7, 8, 9],
        sampled=[0, 0, 1, 1, 1],
        epoch=epoch,
        version=version,
        **more,
    )
    ticket = w.append("segments", row)
    attempt = row["attempt"]
    w.append("rewards", reward(rollout_id, value, attempt))
    w.append("rollouts", rollout(rollout_id, attempt=attempt, digests=[row["digest"]]))
    w.flush()
    return [ticket.result()]


def build_log(path: Path) -> Log:
    """Two epochs. train-0 planned in step 1, train-1 dropped, train-2 in flight, eval-0 done.

    Epoch 1 went on to step 2 (on train-3) and sampled train-4 with its weights; epoch 2 forks from
    step 1, so both are abandoned. Its opening closes the writer of epoch 1, which does not know
    and goes on: train-5 is invisible.
    """
    log = Log.create(path, run_id="tiny")
    open_epoch(log)
    log.control.put("policy", [policy(1, 0)])
    w = log.writer()
    for ordinal in range(5):
        w.append("prompts", prompt(ordinal, n=2 if ordinal == 0 else 1))
    w.append("prompts", prompt(0, n=1, purpose="eval"))
    refs = {r: append_rollout(w, r, value=v) for r, v in (("train-0/0", 1.0), ("train-0/1", 0.0))}
    append_rollout(w, "train-1/0")
    append_rollout(w, "eval-0/0")
    w.append("segments", segment(rollout_id="train-2/0", finish_reason="partial"))
    w.flush()
    rows = [plan_row(r, refs[r], reward=1.0 - i) for i, r in enumerate(refs)]
    log.control.put("plan", rows, plan_header(1))
    log.control.put("drop", [drop_row("train-1")], {})
    log.control.put("step", [step_row(1, 1)])
    cut = log.control.put("policy", [policy(1, 1)])
    late = append_rollout(w, "train-3/0", version=1)
    log.control.put("plan", [plan_row("train-3/0", late, lag_max=0)], plan_header(2))
    log.control.put("step", [step_row(1, 2)])
    log.control.put("policy", [policy(1, 2)])
    append_rollout(w, "train-4/0", version=2)
    open_epoch(log, parent_epoch=1, cut=cut)
    append_rollout(w, "train-5/0", version=2)
    w.close()
    log.control.put("policy", [policy(2, 1)])
    write_epoch_2(log, late)
    return log


def write_epoch_2(log: Log, late: Sequence[Any]) -> None:
    """Step 2 again, on train-3 (kept from epoch 1) and on train-4 as attempt 1."""
    with log.writer(2) as w:
        again = [{"rollout_id": "train-4/0", "attempt": 1}]
        w.append("prompts", prompt(4, n=1, attempt=1, reason="reissue", rollouts=again))
        refs = append_rollout(w, "train-4/0", attempt=1, epoch=2, version=1)
        rows = [plan_row("train-3/0", late), plan_row("train-4/0", refs, attempt=1)]
        log.control.put("plan", rows, plan_header(2))
        log.control.put("step", [step_row(2, 2, state_digest="b" * 16)])
        log.control.put("policy", [policy(2, 2)])
        path = "checkpoints/2-2"
        folder = log.path / path
        folder.mkdir()
        (folder / "state.bin").write_bytes(b"weights")
        marker = {"epoch": 2, "step": 2, "state_digest": "b" * 16}
        (folder / "COMPLETE").write_text(json.dumps(marker))
        files = [{"name": "state.bin", "bytes": 7}]
        row = {"epoch": 2, "step": 2, "path": path, "bytes": 7, "files": files}
        log.control.put("checkpoint", [{**row, "state_digest": "b" * 16}])


def load_case(name: str) -> Row:
    """A real user's bug: tests/cases/<name>.json with `given` and `expected`."""
    return dict(json.loads((Path(__file__).parent / "cases" / f"{name}.json").read_text()))


def data_commits(path: Path, stream: str = "*") -> list[Path]:
    return sorted((path / "data").glob(f"*/*/*.{stream}.arrow"))


def flip(path: Path, at: int, mask: int = 1) -> None:
    """Damage one byte of a file in place."""
    raw = bytearray(path.read_bytes())
    raw[at % len(raw)] ^= mask
    path.write_bytes(raw)


def ref(writer: str, seq: int, row: int) -> Ref:
    return Ref(writer=writer, seq=seq, row=row)


def sequence(n: int, **more: Any) -> TrainSequence:
    """A training sequence of `n` tokens, all but the first three trained."""
    mask = np.arange(n) >= 3
    return TrainSequence(
        **{
            "group_id": "train-0",
            "rollout_id": "train-0/0",
            "attempt": 0,
            "tip": 0,
            "token_ids": np.arange(n, dtype=np.int32),
            "mask": mask,
            "logprobs": np.zeros(n, np.float32),
            "lag": np.zeros(n, np.int64),
            "advantage": 1.0,
            "temperature": 1.0,
            "chain": ((0, n),),
            **more,
        }
    )
