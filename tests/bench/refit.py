"""A real run: idle shares of its steps, and its refits beside a bare broadcast."""

import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from report import Report, table

from molt.store import Log

SPAWN = multiprocessing.get_context("spawn")
RECIPE = Path(__file__).parents[2] / "molt" / "recipes" / "demo.toml"
STEPS = 8
BROADCASTS = 7


def broadcast_all(folder: str, rank: int, port: int, conn: Any) -> None:
    """Every tensor of a model, one after the other, as float32 over gloo; seconds of each time."""
    import torch
    from safetensors import safe_open

    from molt.rollout.sender import broadcast, join_gloo, open_store

    torch.set_num_threads(1)
    store = open_store("127.0.0.1", port, 2, is_master=rank == 0)
    if rank == 0:
        conn.send(store.port)
    group = join_gloo(store, "127.0.0.1", rank, 2)
    tensors = []
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            tensors += [opened.get_tensor(k).float().contiguous() for k in list(opened.keys())]
    times = []
    for _ in range(BROADCASTS):
        started = time.perf_counter()
        for tensor in tensors:
            broadcast(group, tensor)
        times.append(time.perf_counter() - started)
    conn.send((sum(t.nbytes for t in tensors), times))


def bare(folder: str) -> tuple[int, float]:
    """Bytes, and the median of the seconds that the sender took."""
    conn, other = SPAWN.Pipe()
    children = [SPAWN.Process(target=broadcast_all, args=(folder, 0, 0, other))]
    children[0].start()
    ignored, last = SPAWN.Pipe()
    args = (folder, 1, conn.recv(), last)
    children.append(SPAWN.Process(target=broadcast_all, args=args))
    children[1].start()
    n_bytes, times = conn.recv()
    ignored.recv()
    for child in children:
        child.join()
    return n_bytes, statistics.median(times[1:])


def bench_run(folder: Path, model: str, report: Report) -> None:
    """Eight steps of the demo's recipe."""
    from molt.config import load
    from molt.model import resolve_model

    path = folder / "run"
    sets = [f"run.dir={path}", f"run.steps={STEPS}", "data.eval=", "checkpoint.every=100"]
    sets += [f"model={model}"] if model else []
    command = [sys.executable, "-m", "molt.cli", "train", str(RECIPE)]
    subprocess.run([*command, *(f"--set={s}" for s in sets)], check=True, stdout=sys.stderr)
    log = Log.open(path)
    metrics = [
        json.loads(m) for (m,) in log.sql("select metrics from steps order by step").fetchall()
    ]
    steady = metrics[2:]
    idle = {k: statistics.fmean(m["idle"][k] for m in steady) for k in ("trainer", "engines")}
    phases = sorted({k for m in steady for k, v in m["seconds"].items() if isinstance(v, float)})
    spent = [statistics.fmean(m["seconds"].get(k, 0.0) for m in steady) for k in phases]
    commits = [m["commit_s"] for m in steady]
    report.add(
        "A real run: where a step's time goes",
        table(["", *phases], [("seconds a step", *spent)]),
        f"The trainer waits {idle['trainer']:.1%} of the time, the engines are paused "
        f"{idle['engines']:.1%} (means of steps 3 to {STEPS}). A durable commit of the driver "
        f"takes {statistics.fmean(c['mean'] for c in commits) * 1e3:.1f} ms on average, "
        f"{max(c['max'] for c in commits) * 1e3:.1f} at most.",
    )
    refits = [r.rows[0] for r in log.records() if r.kind == "policy"]
    refit_s = statistics.median(r["seconds"] for r in refits[1:])
    n_bytes, bare_s = bare(resolve_model(load(RECIPE, sets).model))
    rows = [
        ("refit: gather, send, receive, hash on both sides", refits[-1]["bytes"] / 1e6, refit_s),
        ("bare broadcast of the model's tensors", n_bytes / 1e6, bare_s),
    ]
    parts = {k: statistics.median(m["refit"][k] for m in steady) for k in steady[0]["refit"]}
    again = [m["recomputed"] for m in steady]
    report.add(
        "Refit beside a bare broadcast, gloo",
        table(["", "MB", "s"], rows),
        table(["parts of a refit, s", *parts], [("median", *parts.values())]),
        "Recomputing KV after a refit, apart: "
        f"{statistics.fmean(a['tokens'] for a in again):.0f} tokens in "
        f"{statistics.fmean(a['seconds'] for a in again):.3f} s on average.",
    )
    ratio = (refit_s / refits[-1]["bytes"]) / (bare_s / n_bytes)
    report.target("refit to a bare broadcast, per byte", ratio, 1.3, most=True)
