"""Audit speed and memory: logs of 1 and 10 million tokens, each audited in a process of its own.

    python tests/bench/audit.py [--tokens 1000000 10000000] [--folder DIR]

Groups of 8 rollouts with 985 tokens each (as in tests/bench/run.py), all planned, 8 groups a step.
Prints tokens/s and the peak of resident memory; what importing and an empty log need is subtracted
in "above the start".
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import factories as make

from molt.replay.audit import audit
from molt.replay.redo import plan_digest
from molt.schemas.check import chain_digest, segment_digest
from molt.store import Log
from molt.store.control import read_record
from molt.train.advantages import advantages

TOKENS, CONTEXT, ROLLOUTS, GROUPS = 985, 400, 8, 8


def peak_kib() -> int:
    """Of this program; getrusage also remembers the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def build(path: Path, n_tokens: int) -> None:
    log, rng = Log.create(path), np.random.default_rng(0)
    make.open_epoch(log)
    log.control.put("policy", [make.policy(1, 0)])
    with log.writer(linger_s=60) as w:
        for step in range(1, 1 + max(1, n_tokens // (TOKENS * ROLLOUTS * GROUPS))):
            rows = []
            for k in range((step - 1) * GROUPS, step * GROUPS):
                w.append("prompts", make.prompt(k, n=ROLLOUTS))
                rows += group(w, rng, k, step - 1)
            w.flush()
            plan = [{**row, **refs(*tickets)} for row, tickets in rows]
            n = log.control.put("plan", plan, make.plan_header(step))
            counts = {"plan": plan_digest(read_record(path, n).rows)}
            n_trained = (TOKENS - CONTEXT) * ROLLOUTS * GROUPS
            row = make.step_row(1, step, n_tokens=n_trained, counts=json.dumps(counts))
            log.control.put("step", [row])
            log.control.put("policy", [make.policy(1, step)])


def group(w, rng, k: int, version: int) -> list[tuple]:
    rewards = [float(i % 3) for i in range(ROLLOUTS)]
    values = advantages(rewards, [True] * ROLLOUTS)
    rows = []
    for i in range(ROLLOUTS):
        who = f"train-{k}/{i}"
        sampled = np.repeat(np.array([0, 1], np.uint8), [CONTEXT, TOKENS - CONTEXT])
        logprobs = np.where(sampled, -rng.exponential(0.5, TOKENS), 0.0).astype(np.float32)
        row = make.segment(rollout_id=who, ids=[1], version=version, digest=b"")
        row |= {
            "token_ids": rng.integers(0, 49152, TOKENS, dtype=np.int32),
            "sampled": sampled,
            "train": sampled,
            "logprobs": logprobs,
            "version_runs": [{"epoch": 1, "version": version, "n": TOKENS - CONTEXT}],
        }
        row["digest"] = segment_digest(row)
        digest = chain_digest([row["digest"]])
        counts = {"sampled": TOKENS - CONTEXT, "context": CONTEXT, "regenerated": 0}
        tickets = [w.append("segments", row), w.append("rewards", make.reward(who, rewards[i]))]
        w.append("rollouts", make.rollout(who, digests=[row["digest"]], counts=counts))
        more = {"reward": rewards[i], "advantage": values[i], "chain_digest": digest}
        rows.append((make.plan_row(who, [], **more), tickets))
    return rows


def refs(*tickets) -> dict:
    segment, reward = (make.as_ref(t.result()) for t in tickets)
    return {"branches": [{"tip": 0, "refs": [segment]}], "reward_refs": [reward]}


def measure(path: str) -> None:
    """In a child: one line of JSON."""
    import time

    start, begun = peak(), time.perf_counter()
    found = audit(Log.open(path), advantages=advantages).to_json()
    seconds = time.perf_counter() - begun
    assert found["ok"], found["violations"][:3]
    rate = found["tokens"] / seconds
    print(json.dumps({"tokens": found["tokens"], "rate": rate, "start": start, "peak": peak()}))


def peak() -> int:
    return peak_kib() >> 10


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--tokens", type=int, nargs="+", default=[1_000_000, 10_000_000])
    p.add_argument("--folder", default=None, help="keep the logs there")
    p.add_argument("--measure", default=None, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.measure:
        measure(args.measure)
        return
    with tempfile.TemporaryDirectory() as scratch:
        for n in args.tokens:
            path = Path(args.folder or scratch) / f"tokens-{n}"
            if not path.exists():
                build(path, n)
            command = [sys.executable, __file__, "--measure", str(path)]
            found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
            print(
                f"{found['tokens']:>10} tokens: {found['rate'] / 1e6:.2f} M tokens/s, peak "
                f"{found['peak']} MiB, {found['peak'] - found['start']} MiB above the start"
            )


if __name__ == "__main__":
    main()
