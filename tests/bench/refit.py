"""Refits beside a bare broadcast, and where the time of a real run's steps goes."""

import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import Report, table

from molt.config import load
from molt.model import resolve_model
from molt.process import rendezvous
from molt.publish import PARTS
from molt.store import Log

SPAWN = multiprocessing.get_context("spawn")
RECIPE = Path(__file__).parents[2] / "molt" / "recipes" / "demo.toml"
STEPS = 8
REFITS = 12


def broadcast_all(folder: str, rank: int, port: int, conn: Any) -> None:
    """Sends or receives the tensors of a model, one after the other, whenever it is told to."""
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
    conn.send(sum(t.nbytes for t in tensors))
    while conn.recv():
        started = time.perf_counter()
        for tensor in tensors:
            broadcast(group, tensor)
        conn.send(time.perf_counter() - started)


class Bare:
    """Two processes that do nothing but broadcast a model from one to the other over gloo."""

    def __init__(self, folder: str) -> None:
        self.conns, self.children, port = [], [], 0
        for rank in (0, 1):
            conn, other = SPAWN.Pipe()
            child = SPAWN.Process(target=broadcast_all, args=(folder, rank, port, other))
            child.start()
            self.conns.append(conn)
            self.children.append(child)
            if rank == 0:
                port = conn.recv()
        self.n_bytes = max(conn.recv() for conn in self.conns)

    def seconds(self) -> float:
        """Until the receiver has all of it."""
        for conn in self.conns:
            conn.send(True)
        return max(conn.recv() for conn in self.conns)

    def close(self) -> None:
        for conn, child in zip(self.conns, self.children, strict=True):
            conn.send(False)
            child.join()


def refits(folder: Path, model: str, bare: Bare) -> Iterator[tuple[float, dict[str, Any]]]:
    """A bare broadcast's seconds and what a refit of a paused engine took, `REFITS` times."""
    from tiny import Rig

    from molt.train.actor import TrainerActor
    from molt.train.settings import trainer_settings

    settings = trainer_settings(load(RECIPE), model)
    log = str(Log.create(folder / "none").path)
    trainer = TrainerActor(settings, 0, 1, rendezvous(), None, log)
    trainer.start()
    rig = Rig(model)
    try:
        rig.start()
        rig.run(rig.engine.pause(1))
        manifest = trainer.manifest()
        for version in range(REFITS):
            bare_s, started = bare.seconds(), time.perf_counter()
            sent, received = rig.run(rig.send(trainer.export(), manifest, version))
            assert sent["digest"] == received["digest"]
            yield bare_s, sent | received | {"whole_s": time.perf_counter() - started}
    finally:
        rig.close()
        trainer.close()


def bench_refit(folder: Path, model: str, report: Report) -> None:
    """Refits and bare broadcasts in turns; the engine is paused and both trainers idle."""
    model = resolve_model(model or load(RECIPE).model)
    bare = Bare(model)
    try:
        found = list(refits(folder, model, bare))[1:]
    finally:
        bare.close()
    n_bytes = found[0][1]["bytes"]
    ratios = [(r["transfer_s"] / n_bytes) / (s / bare.n_bytes) for s, r in found]
    rows = [
        ("refit: gather, send, receive, hash on both sides", n_bytes / 1e6)
        + quartiles([r["transfer_s"] for _, r in found]),
        ("bare broadcast of the model's tensors", bare.n_bytes / 1e6)
        + quartiles([s for s, _ in found]),
        ("ratio within a round, per byte", "") + quartiles(ratios),
        ("refit until vLLM has loaded all", n_bytes / 1e6)
        + quartiles([r["whole_s"] for _, r in found]),
    ]
    parts = {k: statistics.median(r[k] for _, r in found) for k in PARTS if k in found[0][1]}
    report.add(
        "Refit beside a bare broadcast, gloo",
        table(["", "MB", "median, s", "quarter, s", "three quarters, s"], rows),
        f"{REFITS - 1} rounds in turns with the engine paused.",
        table(["parts of a refit, s", *parts], [("median", *parts.values())]),
    )
    report.target("refit to a bare broadcast, per byte", statistics.median(ratios), 1.3, most=True)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return median, low, high


def bench_run(folder: Path, model: str, report: Report) -> None:
    """Eight steps of the demo's recipe."""
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
    parts = {k: statistics.median(m["refit"][k] for m in steady) for k in steady[0]["refit"]}
    again = [m["recomputed"] for m in steady]
    report.add(
        "A real run: parts of a refit",
        table(["", *parts], [("median, s", *parts.values())]),
        "Recomputing KV after a refit, apart: "
        f"{statistics.fmean(a['tokens'] for a in again):.0f} tokens in "
        f"{statistics.fmean(a['seconds'] for a in again):.3f} s on average.",
    )
